// Compile-time shape of one pass over chunks of retention, and the arguments of its launches.
//
// For tiles X and Y of [chunk, D], Z of [chunk, columns] and a state S of [D, columns] in registers, a pass computes
// Out = decayed(X Y^T) Z + decayed(X S) and S' = gamma^chunk S + decayed(Y)^T Z, chunk after chunk:
//
//   output  X = Q,  Y = K,  Z = V    from the first chunk on, S the state
//   dq      X = dO, Y = V,  Z = K    from the first chunk on, S the state transposed
//   dk      X = V,  Y = dO, Z = Q    from the last chunk on, S the state's gradient transposed
//   dv      X = K,  Y = Q,  Z = dO   from the last chunk on, S the state's gradient
//
// Every static_assert here is the twin of a named predicate in kernels/chunks_sm80/rules.py.
#pragma once

#include "attention_autotuner/common/chunk_sequences.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/tile.cuh"
#include "attention_autotuner/score/modifications.cuh"
#include "attention_autotuner/score/score_mod.cuh"

namespace attention_autotuner {

enum class ChunkResult { kOutput, kDq, kDk, kDv };

// Scores are computed in the pass by every CTA, or once by a kernel of their own, and read.
enum class Scores { kInline, kPrecomputed };

template <typename Config, typename PassType, ChunkResult kResultOf, bool kStatesOf = false>
struct ChunkTraits {
  using Element = typename Config::Element;
  using Pass = PassType;
  static constexpr bool kPacked = kIsPacked<Config>;
  using Arguments = typename ChunkSequence<kPacked>::Arguments;
  static constexpr ChunkResult kResult = kResultOf;
  // Time runs backwards. X then has the heads of K and V, Y and Z those of Q; else the other way round.
  static constexpr bool kReversed = kResult == ChunkResult::kDk || kResult == ChunkResult::kDv;
  static constexpr bool kTransposed = kResult == ChunkResult::kDq || kResult == ChunkResult::kDk;  // D is dim_v
  static constexpr int kCopyBytes = Config::kCopyBytes;
  static constexpr int kChunk = Config::kChunk;
  static constexpr int kPaddedDepth = kTransposed ? Config::kPaddedDimV : Config::kPaddedDimQK;
  static constexpr int kD = divide_up(kPaddedDepth, 16 * Pass::kDepthWarps) * 16 * Pass::kDepthWarps;
  static constexpr int kPaddedColumns = kTransposed ? Config::kPaddedDimQK : Config::kPaddedDimV;
  static constexpr int kColumns = Pass::kColumns;
  static constexpr int kColumnWarps = Pass::kColumnWarps;
  static constexpr int kDepthWarps = Pass::kDepthWarps;
  static constexpr int kStages = Pass::kNumStages;
  static constexpr bool kPrecomputed = Pass::kScores == Scores::kPrecomputed;  // scores are read, not computed
  static constexpr bool kStates = kStatesOf;  // the pass moves the state only, and has neither X nor scores
  static constexpr int kCtasPerSm = Pass::kCtasPerSm;
  static constexpr int kWarps = kColumnWarps * kDepthWarps;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kSlices = divide_up(kPaddedColumns, kColumns);

  static_assert(Config::kPaddedDimQK % 16 == 0 && Config::kPaddedDimQK >= 16 && Config::kPaddedDimQK <= 256,
                "padded_dim_qk_range");
  static_assert(Config::kPaddedDimV % 16 == 0 && Config::kPaddedDimV >= 16 && Config::kPaddedDimV <= 512,
                "padded_dim_v_range");
  static_assert(kCopyBytes == 16 || kCopyBytes == 2, "copy_bytes_known");
  static_assert(kChunk == 16 || kChunk == 32 || kChunk == 64 || kChunk == 128, "chunk_range");
  static_assert(kStages >= 1 && kStages <= 3, "chunk_stages_range");
  static_assert(kWarps >= 2 && kWarps <= 16 && kWarps % 2 == 0, "chunk_warps_range");  // a row's copy takes pairs
  static_assert(kDepthWarps == 1 || kDepthWarps == 2 || kDepthWarps == 4, "depth_warps_range");
  static_assert(kColumns % (16 * kColumnWarps) == 0, "columns_divide_among_warps");
  static_assert(kChunk % (16 * kDepthWarps) == 0, "chunk_divides_among_depth_warps");
  static_assert(kStates || kPrecomputed || kChunk % (8 * kColumnWarps) == 0, "inline_divides_chunk");
  static_assert(!kPrecomputed || kChunk >= 32, "precomputed_needs_chunk_of_32");

  static constexpr int kTokenTiles = kChunk / 16;
  static constexpr int kRowTiles = kColumns / kColumnWarps / 16;  // of a warp's state, whose rows are columns of Z
  static constexpr int kWarpColumns = 16 * kRowTiles;
  static constexpr int kDepth = kD / kDepthWarps;  // of a warp
  static constexpr int kDepthTiles = kDepth / 8;
  static constexpr int kScoreTiles =
      kPrecomputed || kStates ? 0 : kChunk / 8 / kColumnWarps;  // of a warp, 8 tokens of Y each
  static_assert(4 * kRowTiles * kDepthTiles <= 128, "state_fits_registers");

  using TileX = SmemTile<kChunk, kD, false>;  // and of Y
  using TileZ = SmemTile<kChunk, kColumns, false>;
  using TileP = SmemTile<kChunk, kChunk, false>;

  // Stages of [X] [Y] [Z] [scores where precomputed], then the scores where computed, then sums on their way between
  // the warps that share columns.
  static constexpr int kYOffset = kStates ? 0 : TileX::kBytes;
  static constexpr int kZOffset = kYOffset + TileX::kBytes;
  static constexpr int kPOffset = kZOffset + TileZ::kBytes;
  static constexpr int kStageBytes = kPOffset + (kPrecomputed ? TileP::kBytes : 0);
  static constexpr int kScoresOffset = kStages * kStageBytes;
  static constexpr int kExchangeOffset = kScoresOffset + (kPrecomputed || kStates ? 0 : TileP::kBytes);
  static constexpr int kExchangeColumns = kPrecomputed ? kColumns : maximum(kColumns, kChunk);
  static constexpr int kExchangeBytes =
      kStates ? 0 : kChunk * kExchangeColumns * int(sizeof(float)) * (kDepthWarps - 1);
  static constexpr int kSmemBytes = kExchangeOffset + kExchangeBytes;
  static_assert(kSmemBytes <= 227 * 1024, "smem_fits_block");
};

// The pass that moves the state only, for the same problem. Warps of 16 columns read all of Y for an instruction a
// fragment; without an output, two such columns and half of the depth fit a warp, which reads half as much.
template <typename T>
struct StatesPass : T::Pass {
  static constexpr bool kWider = T::kRowTiles == 1 && T::kColumnWarps % 2 == 0 && T::kDepthWarps < 4 &&
                                 T::kD % (32 * T::kDepthWarps) == 0 && T::kChunk % (32 * T::kDepthWarps) == 0;
  static constexpr int kColumnWarps = kWider ? T::kColumnWarps / 2 : T::kColumnWarps;
  static constexpr int kDepthWarps = kWider ? T::kDepthWarps * 2 : T::kDepthWarps;
  static constexpr auto kScores = Scores::kInline;
};
template <typename Config, typename T>
using StatesTraits = ChunkTraits<Config, StatesPass<T>, T::kResult, true>;

}  // namespace attention_autotuner

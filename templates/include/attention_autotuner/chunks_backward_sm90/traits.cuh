// Compile-time shape of a pass over chunks of retention's backward in family sm90, with a gradient or for states alone.
//
// With X, Y and Z in the places of Q, K and V:
//
//   dq      X = dO, Y = V,  Z = K    from the first chunk on, the state transposed
//   dk      X = V,  Y = dO, Z = Q    from the last chunk on, the state's gradient transposed
//   dv      X = K,  Y = Q,  Z = dO   from the last chunk on, the state's gradient
//
// Every static_assert here is the twin of a named predicate in kernels/chunks_sm90/rules.py.
#pragma once

#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/score/score_mod.cuh"
#include "attention_autotuner/sm90/chunk_factors.cuh"

namespace attention_autotuner {

enum class ChunkGradient { kDq, kDk, kDv };

template <typename Config, ChunkGradient kResult, bool kStatesOnlyOf>
struct ChunkBackwardTraits {
  using Element = typename Config::Element;
  static constexpr bool kStatesOnly = kStatesOnlyOf;  // neither X nor an output
  // Time runs backwards, and X has the heads of K and V, Y and Z those of Q; else the other way round.
  static constexpr bool kReversed = kResult == ChunkGradient::kDk || kResult == ChunkGradient::kDv;
  // The depth is dim_v, the columns are of dim_qk.
  static constexpr bool kTransposed = kResult == ChunkGradient::kDq || kResult == ChunkGradient::kDk;
  static constexpr int kChunk = kChunkTokens;
  static constexpr int kWarpgroups =
      Config::kWarpgroups;  // with 64 columns of Z each; one more computes scores and loads
  static constexpr int kCtasPerSm = Config::kCtasPerSm;
  static constexpr int kThreads = 128 * (1 + kWarpgroups);
  // Head dims in whole blocks of 64 columns: what is beyond the true ones arrives as zeros.
  static constexpr int kTrueDepth = divide_up(kTransposed ? Config::kPaddedDimV : Config::kPaddedDimQK, 64) * 64;
  // A depth beyond 256 is for two warpgroups, which then have the same 64 columns and half of the depth each; X and Y
  // come in pieces of 128 columns.
  static constexpr int kDepthParts = kTrueDepth > 256 && kWarpgroups == 2 ? 2 : 1;
  static constexpr bool kInParts = kDepthParts > 1;
  static constexpr int kDepth = kInParts ? 512 : kTrueDepth;
  static constexpr int kPartDepth = kDepth / kDepthParts;
  static constexpr bool kSumsChunks = kPartDepth <= 64;  // beyond, registers spill: 16 % slower at 128
  static constexpr int kPieces = kInParts ? 4 : 1;
  static constexpr int kPartPieces = kPieces / kDepthParts;
  static constexpr int kPieceDepth = kDepth / kPieces;
  static constexpr int kColumns = 64 * kWarpgroups / kDepthParts;
  static constexpr int kSlices = divide_up(kTransposed ? Config::kPaddedDimQK : Config::kPaddedDimV, kColumns);

  static_assert(Config::kPaddedDimQK % 16 == 0 && Config::kPaddedDimQK >= 16 && Config::kPaddedDimQK <= 256,
                "padded_dim_qk_range");
  static_assert(Config::kPaddedDimV % 16 == 0 && Config::kPaddedDimV >= 16 && Config::kPaddedDimV <= 512,
                "padded_dim_v_range");
  static_assert(Config::kCopyBytes == 16, "tma_needs_alignment");
  static_assert(kWarpgroups >= 1 && kWarpgroups <= 3, "state_warpgroups_range");
  static_assert(Config::kNumStages >= 2 && Config::kNumStages <= 4, "wgmma_chunk_stages_range");
  static_assert(kCtasPerSm == 1 || kCtasPerSm == 2, "wgmma_ctas_range");
  static_assert(Config::kSuperChunk % kChunk == 0, "super_chunk_multiple_of_wgmma_chunk");

  // Registers of a thread: what all have at launch is what the warpgroups share out between them.
  static constexpr int kLaunchRegisters = minimum(65536 / (kThreads * kCtasPerSm) / 8 * 8, 248);
  static constexpr int kPool = kLaunchRegisters * (1 + kWarpgroups);
  static constexpr int kPackedRegisters = 8;  // of a slice of the state, rounded
  static constexpr int kDepthSlices = kPartDepth / 4 / kPackedRegisters;
  // The state, the output, the tokens of Z, and a slice that MMAs still read.
  static constexpr int kFragmentRegisters = kPartDepth / 2 + 32 + 16 + kPackedRegisters;
  static constexpr int kRegistersBesideFragments = 32;
  static constexpr int kAmpleRegisters = kFragmentRegisters + 48;
  static constexpr int kScoreRegisters = kPool - kWarpgroups * kAmpleRegisters >= 80 ? 80 : 72;
  static constexpr int kStateRegisters = minimum((kPool - kScoreRegisters) / kWarpgroups / 8 * 8, 240);
  static constexpr bool kMovesRegisters = kStateRegisters > kLaunchRegisters;
  static_assert(kFragmentRegisters + kRegistersBesideFragments <= kStateRegisters, "state_fits_warpgroup");

  // Stages of X, Y and Z, then two of decayed scores, the output of each warpgroup, and barriers; all tiles at
  // multiples of 1024 bytes. Without X, scores and outputs, as many stages of Y and Z as that holds, up to four.
  // In parts: slots for pieces of X and Y, stages of Z, scores, the output, and what warpgroups exchange of it.
  static constexpr int kBlockBytes = kChunk * 128;  // of 64 columns
  static constexpr int kYBytes = kChunk * kDepth * 2;
  static constexpr int kZBytes = kColumns / 64 * kBlockBytes;
  static constexpr int kXBytes = kStatesOnly ? 0 : kYBytes;
  static constexpr int kPieceBytes = kChunk * kPieceDepth * 2;
  static constexpr int kSlots = kInParts ? 11 : 0;
  static constexpr int kUses = (kStatesOnly ? 1 : 2) * kPieces;  // of slots, in a chunk
  static constexpr int kStageBytes = kInParts ? kZBytes : kXBytes + kYBytes + kZBytes;
  static constexpr int kScoreStages = kInParts ? 1 : 2;
  static constexpr int kScoresOffset =
      kInParts ? kSlots * kPieceBytes + 2 * kZBytes : Config::kNumStages * (2 * kYBytes + kZBytes);
  static constexpr int kOutOffset = kScoresOffset + kScoreStages * kBlockBytes;
  static constexpr int kShareOffset = kOutOffset + kZBytes;
  static constexpr int kShareBytes = kInParts ? kBlockBytes : 0;  // half of the output, in fp32
  static constexpr int kBarrierOffset = kShareOffset + kDepthParts * kShareBytes;
  static constexpr int kStages = kInParts      ? (kStatesOnly ? 4 : 2)
                                 : kStatesOnly ? minimum(kBarrierOffset / kStageBytes, 4)
                                               : Config::kNumStages;
  static constexpr int kBarriers = (kInParts ? 2 : 6) * kStages + 2 * kScoreStages + 2 * kSlots;
  static constexpr int kFactorOffset = kBarrierOffset + 256;  // of tokens, then of outputs
  static constexpr int kAlignment = 1024;                     // which the start of shared memory may lack
  static constexpr int kSmemBytes = kAlignment + kFactorOffset + TokenFactors::kMostBytes;
  static_assert(Config::kNumStages > 4 || 8 * kBarriers <= 256, "barriers_fit");
  static_assert(kSmemBytes <= 227 * 1024, "smem_fits_block");
};

}  // namespace attention_autotuner

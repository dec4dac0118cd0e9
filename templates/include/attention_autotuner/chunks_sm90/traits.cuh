// Compile-time shape of retention's pass over chunks in family sm90, with an output or for states alone.
//
// Every static_assert here is the twin of a named predicate in kernels/chunks_sm90/rules.py.
#pragma once

#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/score/score_mod.cuh"
#include "attention_autotuner/sm90/chunk_factors.cuh"

namespace attention_autotuner {

template <typename Config, bool kStatesOnlyOf>
struct ChunkSm90Traits {
  using Element = typename Config::Element;
  static constexpr bool kStatesOnly = kStatesOnlyOf;  // neither Q nor an output
  static constexpr bool kDivided = Config::kSuperChunk != 0;
  static constexpr int kChunk = kChunkTokens;
  static constexpr int kWarpgroups =
      Config::kWarpgroups;  // with 64 columns of V each; one more computes scores and loads
  static constexpr int kCtasPerSm = Config::kCtasPerSm;
  static constexpr int kThreads = 128 * (1 + kWarpgroups);
  // Head dims in whole blocks of 64 columns: what is beyond the true ones arrives as zeros.
  static constexpr int kDepth = divide_up(Config::kPaddedDimQK, 64) * 64;
  static constexpr bool kSumsChunks = kDepth <= 128;  // beyond, registers are too few
  static constexpr int kColumns = 64 * kWarpgroups;
  static constexpr int kSlices = divide_up(Config::kPaddedDimV, kColumns);

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
  static constexpr int kDepthSlices = kDepth / 4 / kPackedRegisters;
  // The state, the output, the tokens of V, and a slice that MMAs still read.
  static constexpr int kFragmentRegisters = kDepth / 2 + 32 + 16 + kPackedRegisters;
  static constexpr int kRegistersBesideFragments = 32;
  static constexpr int kAmpleRegisters = kFragmentRegisters + 48;
  static constexpr int kScoreRegisters = kPool - kWarpgroups * kAmpleRegisters >= 80 ? 80 : 72;
  static constexpr int kStateRegisters = minimum((kPool - kScoreRegisters) / kWarpgroups / 8 * 8, 240);
  static constexpr bool kMovesRegisters = kStateRegisters > kLaunchRegisters;
  static_assert(kFragmentRegisters + kRegistersBesideFragments <= kStateRegisters, "state_fits_warpgroup");

  // Stages of Q, K and V, then two of decayed scores, the output of each warpgroup, and barriers; all tiles at
  // multiples of 1024 bytes. Without Q, scores and outputs, as many stages of K and V as that holds, up to four.
  static constexpr int kBlockBytes = kChunk * 128;  // of 64 columns
  static constexpr int kKBytes = kChunk * kDepth * 2;
  static constexpr int kVBytes = kWarpgroups * kBlockBytes;
  static constexpr int kQBytes = kStatesOnly ? 0 : kKBytes;
  static constexpr int kStageBytes = kQBytes + kKBytes + kVBytes;
  static constexpr int kScoreStages = 2;
  static constexpr int kScoresOffset = Config::kNumStages * (2 * kKBytes + kVBytes);
  static constexpr int kOutOffset = kScoresOffset + kScoreStages * kBlockBytes;
  static constexpr int kBarrierOffset = kOutOffset + kWarpgroups * kBlockBytes;
  static constexpr int kStages = kStatesOnly ? minimum(kBarrierOffset / kStageBytes, 4) : Config::kNumStages;
  static constexpr int kBarriers = 6 * kStages + 2 * kScoreStages;
  static constexpr int kFactorOffset = kBarrierOffset + 256;
  static constexpr int kAlignment = 1024;  // which the start of shared memory may lack
  static constexpr int kSmemBytes = kAlignment + kFactorOffset + TokenFactors::kMostBytes;
  static_assert(Config::kNumStages > 4 || 8 * kBarriers <= 256, "barriers_fit");
  static_assert(kSmemBytes <= 227 * 1024, "smem_fits_block");
};

}  // namespace attention_autotuner

// Compile-time shape of retnet's forward kernel of family sm90.
//
// Every static_assert here is the twin of a named predicate in kernels/scores_forward_sm90/rules.py.
#pragma once

#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/scheduler.cuh"
#include "attention_autotuner/score/score_mod.cuh"

namespace attention_autotuner {

template <typename Config>
struct ForwardSm90Traits {
  using Element = typename Config::Element;
  static constexpr int kWarpgroups = Config::kWarpgroups;  // consumers; one more is the producer
  static constexpr int kBlockM = 64 * kWarpgroups;
  static constexpr int kBlockN = Config::kBlockN;
  static constexpr bool kByQueries = true;  // a tile's rows are queries
  static constexpr int kBlockRows = kBlockM;
  static constexpr int kBlockColumns = kBlockN;
  static constexpr int kStages = Config::kNumStages;
  static constexpr int kVSlices = Config::kVSlices;
  static constexpr int kThreads = 128 * (1 + kWarpgroups);
  // Head dims in whole blocks of 64 columns: what is beyond the true ones arrives as zeros.
  static constexpr int kDepth = divide_up(Config::kPaddedDimQK, 64) * 64;
  static constexpr int kColumns = divide_up(Config::kPaddedDimV, 64 * kVSlices) * 64;  // of V, in one CTA
  static constexpr int kProducerRegisters = kWarpgroups == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kWarpgroups == 2 ? 232 : 160;
  static constexpr int kRegistersBesideFragments = 40;
  static constexpr int kFragmentRegisters = kColumns / 2 + kBlockN / 2 + kBlockN / 4;  // O, S and P

  static_assert(Config::kPaddedDimQK % 16 == 0 && Config::kPaddedDimQK >= 16 && Config::kPaddedDimQK <= 256,
                "padded_dim_qk_range");
  static_assert(Config::kPaddedDimV % 16 == 0 && Config::kPaddedDimV >= 16 && Config::kPaddedDimV <= 512,
                "padded_dim_v_range");
  static_assert(Config::kCopyBytes == 16, "tma_needs_alignment");
  static_assert(kWarpgroups == 2 || kWarpgroups == 3, "warpgroups_range");
  static_assert(kBlockN == 64 || kBlockN == 128, "wgmma_block_n_known");
  static_assert(kStages >= 1 && kStages <= 4, "wgmma_stages_range");
  static_assert(kVSlices >= 1 && kColumns <= 256, "value_columns_fit_mma");
  static_assert(kFragmentRegisters + kRegistersBesideFragments <= kConsumerRegisters, "fragments_fit_warpgroup");

  // Q, then stages of K, of V and of the mask, then barriers; all tiles at multiples of 1024 bytes.
  static constexpr int kQBytes = kBlockM * kDepth * 2;
  static constexpr int kKBytes = kBlockN * kDepth * 2;
  static constexpr int kVBytes = kBlockN * kColumns * 2;
  static constexpr int kMaskBytes = kBlockM * kBlockN * 2;
  static constexpr int kKOffset = kQBytes;
  static constexpr int kVOffset = kKOffset + kStages * kKBytes;
  static constexpr int kMaskOffset = kVOffset + kStages * kVBytes;
  static constexpr int kBarrierOffset = kMaskOffset + kStages * kMaskBytes;
  static constexpr int kBarrierBytes = 8 * (1 + 6 * kStages);
  static constexpr int kAlignment = 1024;  // which the start of shared memory may lack
  static constexpr int kSmemBytes = kAlignment + kBarrierOffset + 256;
  static_assert(kBarrierBytes <= 256, "barriers_fit");
  static_assert(kSmemBytes <= 227 * 1024, "smem_fits_block");
};

}  // namespace attention_autotuner

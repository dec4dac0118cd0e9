// Compile-time shape of a pass of retnet's backward in family sm90, and its shared-memory layout.
//
// Every static_assert here is the twin of a named predicate in kernels/scores_backward_sm90/rules.py.
#pragma once

#include "attention_autotuner/common/backward_arguments.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/scheduler.cuh"
#include "attention_autotuner/score/score_mod.cuh"

namespace attention_autotuner {

template <typename Config, typename Pass, Result kOfPass>
struct PassSm90Traits {
  using Element = typename Config::Element;
  static constexpr Result kResult = kOfPass;
  static constexpr bool kLongestFirst = Config::kCtaOrder == CtaOrder::kLongestFirst;
  static constexpr bool kPingPong = Pass::kPingPong;
  static constexpr bool kByQueries = kResult == Result::kDq;  // rows are queries, columns keys; else the reverse
  static constexpr int kWarpgroups = Pass::kWarpgroups;       // consumers; one more is the producer
  static constexpr int kBlockRows = 64 * kWarpgroups;
  static constexpr int kBlockColumns = Pass::kBlockColumns;
  static constexpr int kStages = Pass::kNumStages;         // of Z and the mask
  static constexpr int kDepthSlices = Pass::kDepthSlices;  // of Y's head dim
  static constexpr int kSliceStages = Pass::kSliceStages;
  static constexpr int kSlices = Pass::kSlices;
  static constexpr int kThreads = 128 * (1 + kWarpgroups);
  // Head dims in whole blocks of 64 columns: what is beyond the true ones arrives as zeros. Where r has a gradient, dQ
  // and dK need the signs of Q K^T beside dO V^T.
  static constexpr int kScoreDim =
      kResult == Result::kDv ? Config::kPaddedDimQK : maximum(Config::kPaddedDimQK, Config::kPaddedDimV);
  static constexpr int kResultDim = kResult == Result::kDv ? Config::kPaddedDimV : Config::kPaddedDimQK;
  static constexpr int kDepth = divide_up(kScoreDim, 64) * 64;
  static constexpr int kSliceDepth = kDepth / kDepthSlices;
  static constexpr int kColumns = divide_up(kResultDim, 64 * kSlices) * 64;
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = kWarpgroups == 2 ? 232 : 152;
  static constexpr int kRegistersBesideFragments = 40;
  static constexpr int kFragmentRegisters = kColumns / 2 + kBlockColumns / 2 + kBlockColumns / 4;  // result, S and P
  // X of 64 columns stays in registers where there are enough: shared memory is what narrow head dims wait for.
  static constexpr bool kKeepsX =
      kDepth == 64 && kFragmentRegisters + kDepth / 4 + kRegistersBesideFragments <= kConsumerRegisters;

  static_assert(Config::kPaddedDimQK % 16 == 0 && Config::kPaddedDimQK >= 16 && Config::kPaddedDimQK <= 256,
                "padded_dim_qk_range");
  static_assert(Config::kPaddedDimV % 16 == 0 && Config::kPaddedDimV >= 16 && Config::kPaddedDimV <= 512,
                "padded_dim_v_range");
  static_assert(Config::kCopyBytes == 16, "tma_needs_alignment");
  static_assert(kBlockColumns == 64 || kBlockColumns == 128, "block_columns_known");
  static_assert(kWarpgroups == 2 || kWarpgroups == 3, "warpgroups_range");
  static_assert(kStages >= 1 && kStages <= 3, "pass_stages_range");
  static_assert(!kPingPong || kDepthSlices == 1, "sliced_depth_has_no_ping_pong");
  static_assert(kSlices >= 1 && kColumns <= 256, "result_columns_fit_mma");
  static_assert(kDepthSlices >= 1 && kDepth % (64 * kDepthSlices) == 0, "slices_divide_depth");
  static_assert(kSliceStages >= 2 && kSliceStages <= 8 && (kDepthSlices == 1 || kSliceStages >= 3),
                "slice_stages_range");
  static_assert(kFragmentRegisters + kRegistersBesideFragments <= kConsumerRegisters, "fragments_fit_warpgroup");

  // X, then stages of Y's slices, of Z and of the mask, all at multiples of 1024 bytes; barriers; factors.
  static constexpr int kXBytes = kBlockRows * kDepth * 2;
  static constexpr int kYBytes = kBlockColumns * kSliceDepth * 2;
  static constexpr int kZBytes = kBlockColumns * kColumns * 2;
  static constexpr int kMaskBytes = kBlockRows * kBlockColumns * 2;
  static constexpr int kFactorBytes = kByQueries ? 0 : kBlockColumns * 4;
  static constexpr int kYOffset = kXBytes;
  static constexpr int kZOffset = kYOffset + kSliceStages * kYBytes;
  static constexpr int kMaskOffset = kZOffset + kStages * kZBytes;
  static constexpr int kBarrierOffset = kMaskOffset + kStages * kMaskBytes;
  static constexpr int kBarriers = 2 + 2 * kSliceStages + 4 * kStages;
  static constexpr int kFactorOffset = kBarrierOffset + 256;
  static constexpr int kAlignment = 1024;  // which the start of shared memory may lack
  static constexpr int kSmemBytes = kAlignment + kFactorOffset + kStages * kFactorBytes;
  static_assert(8 * kBarriers <= 256, "barriers_fit");
  static_assert(kSmemBytes <= 227 * 1024, "smem_fits_block");
};

}  // namespace attention_autotuner

// Compile-time shape of a pass of retnet's backward in family sm90, and its shared-memory layout.
//
// Every static_assert here is the twin of a named predicate in kernels/scores_backward_sm90/rules.py.
#pragma once

#include <type_traits>

#include "attention_autotuner/common/backward_arguments.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/scheduler.cuh"
#include "attention_autotuner/score/score_mod.cuh"

namespace attention_autotuner {

// Whether dQ's pass stores its scores and dK's multiplies them; see stored_scores.cuh.
template <typename Config, typename = void>
inline constexpr bool kStoresScoresOf = false;
template <typename Config>
inline constexpr bool kStoresScoresOf<Config, std::void_t<typename Config::StoredDk>> = true;

template <typename Config, typename Pass, Result kOfPass>
struct PassSm90Traits {
  using Element = typename Config::Element;
  static constexpr Result kResult = kOfPass;
  static constexpr bool kLongestFirst = Config::kCtaOrder == CtaOrder::kLongestFirst;
  static constexpr bool kGathered = Config::kGatheredStores;
  static constexpr bool kPingPong = Pass::kPingPong;
  static constexpr bool kByQueries = kResult == Result::kDq;  // rows are queries, columns keys; else the reverse
  static constexpr bool kStoresScores = kByQueries && kStoresScoresOf<Config>;
  static constexpr int kWarpgroups = Pass::kWarpgroups;  // consumers; one more is the producer
  static constexpr int kBlockRows = 64 * kWarpgroups;
  static constexpr int kBlockColumns = Pass::kBlockColumns;
  static constexpr int kStages = Pass::kNumStages;         // of Z and the mask
  static constexpr int kDepthSlices = Pass::kDepthSlices;  // of Y's head dim
  static constexpr int kSliceStages = Pass::kSliceStages;
  static constexpr int kSlices = Pass::kSlices;
  // Both slices of a result form a cluster, in which each computes the scores of its half of a step and sends P to the
  // other. Y and Z then go through one ring of slots, a slice of a tile of either in each; see shared_scores.cuh.
  static constexpr int kExchangeStages = Pass::kExchangeStages;  // of P that comes from the other; 0 without
  static constexpr bool kSharesScores = kExchangeStages > 0;
  static constexpr int kStepColumns = kBlockColumns * (kSharesScores ? kSlices : 1);  // of all CTAs of a cluster
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
  static constexpr int kKeptBlock = 64;
  // Result, S, P and what is kept of X.
  static constexpr int kFragmentRegisters = kColumns / 2 + kBlockColumns / 2 + kStepColumns / 4 + Pass::kKeptDepth / 4;
  // X of 64 columns stays in registers where there are enough: shared memory is what narrow head dims wait for.
  static constexpr bool kKeepsX = kDepth == 64 && !kSharesScores &&
                                  kFragmentRegisters + kDepth / 4 + kRegistersBesideFragments <= kConsumerRegisters;
  static constexpr int kKeptDepth = kKeepsX ? kDepth : Pass::kKeptDepth;  // of wider X, its first columns alone
  // Addresses of a mask follow from the first and signs are found before it is read, in fewer registers.
  static constexpr bool kSparesRegisters = kByQueries && kDepth <= 128;

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
  static_assert(Pass::kKeptDepth % kKeptBlock == 0 && Pass::kKeptDepth >= 0 && Pass::kKeptDepth < kDepth &&
                    (Pass::kKeptDepth == 0 || !kSharesScores),
                "kept_depth_range");
  static_assert(kExchangeStages >= 0 && kExchangeStages <= 2, "exchange_stages_range");
  static_assert(!kSharesScores || (kResult == Result::kDv && kSlices == 2), "two_slices_share_scores");
  static_assert(!kSharesScores || !kPingPong, "shared_scores_have_no_ping_pong");
  static_assert(!kSharesScores || kSliceStages >= 3 * kDepthSlices, "shared_ring_holds_step");
  static_assert(!kSharesScores || kBlockColumns % (16 * kDepthSlices) == 0, "shared_slices_fit_mma");

  // X, then stages of Y's slices, of Z and of the mask, all at multiples of 1024 bytes; barriers; factors. Where scores
  // are shared: X, the ring's slots, stages of the mask and of P, barriers, factors.
  static constexpr int kXBytes = kBlockRows * kDepth * 2;
  static constexpr int kZRows = kSharesScores ? kBlockColumns / kDepthSlices : kBlockColumns;  // of a stage or slot
  static constexpr int kZBytes = kZRows * kColumns * 2;
  static constexpr int kYBytes =
      maximum(kBlockColumns * kSliceDepth * 2, kSharesScores ? kZBytes : 0);  // of a slot of the ring, if one is shared
  static constexpr int kMaskBytes = kBlockRows * kBlockColumns * 2;
  static constexpr int kFactorBytes = kByQueries ? 0 : kBlockColumns * 4;
  static constexpr int kYOffset = kXBytes;
  static constexpr int kZOffset = kYOffset + kSliceStages * kYBytes;
  static constexpr int kMaskOffset = kZOffset + (kSharesScores ? 0 : kStages * kZBytes);
  // A stage has for each warpgroup P of its rows, as its threads hold it.
  static constexpr int kExchangeOffset = kMaskOffset + kStages * kMaskBytes;
  static constexpr int kExchangedBytes = 64 * kBlockColumns * 2;
  static constexpr int kBarrierOffset = kExchangeOffset + kExchangeStages * kWarpgroups * kExchangedBytes;
  // Where scores are shared, each warpgroup has stages of the mask and of P for itself.
  static constexpr int kStageBarriers = kSharesScores ? 2 * (kStages + kExchangeStages) * kWarpgroups : 4 * kStages;
  static constexpr int kBarriers = 2 + 2 * kSliceStages + kStageBarriers;
  static constexpr int kFactorOffset = kBarrierOffset + 256;
  static constexpr int kFactorCopies = kSharesScores ? kWarpgroups : 1;
  static constexpr int kAlignment = 1024;  // which the start of shared memory may lack
  static constexpr int kSmemBytes = kAlignment + kFactorOffset + kStages * kFactorCopies * kFactorBytes;
  static_assert(8 * kBarriers <= 256, "barriers_fit");
  static_assert(kSmemBytes <= 227 * 1024, "smem_fits_block");
};

// The pass of dK that multiplies stored scores.
template <typename Config>
struct StoredPassSm90Traits {
  using Element = typename Config::Element;
  using Pass = typename Config::StoredDk;
  static constexpr bool kLongestFirst = Config::kCtaOrder == CtaOrder::kLongestFirst;
  static constexpr bool kGathered = Config::kGatheredStores, kByQueries = false, kSharesScores = false;
  static constexpr int kSlices = 1;
  static constexpr int kWarpgroups = Pass::kWarpgroups;
  static constexpr int kMmas = Pass::kWarpgroupRows / 64;  // of a warpgroup, one below the other
  static constexpr int kBlockRows = kWarpgroups * kMmas * 64;
  static constexpr int kBlockDepth = 64;  // queries of a step
  static constexpr int kStages = Pass::kNumStages;
  static constexpr int kThreads = 128 * (1 + kWarpgroups);
  static constexpr int kResultDim = Config::kPaddedDimQK;
  static constexpr int kColumns = divide_up(kResultDim, 64) * 64;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static constexpr int kFragmentRegisters = kMmas * kColumns / 2;

  static constexpr int kScoresBytes = kBlockRows * kBlockDepth * 2;
  static constexpr int kStageBytes = kScoresBytes + kBlockDepth * kColumns * 2;
  static constexpr int kBarrierOffset = kStages * kStageBytes;
  static constexpr int kSmemBytes = 1024 + kBarrierOffset + 256;

  static_assert(kWarpgroups == 2, "stored_warpgroups_known");
  static_assert(kMmas >= 1 && kMmas * 64 == Pass::kWarpgroupRows, "stored_rows_fit_mma");
  static_assert(kStages >= 2 && kStages <= 8, "stored_stages_range");
  static_assert(kFragmentRegisters <= 128, "stored_fragments_fit_warpgroup");
  static_assert(kSmemBytes <= 227 * 1024, "smem_fits_block");
};

}  // namespace attention_autotuner

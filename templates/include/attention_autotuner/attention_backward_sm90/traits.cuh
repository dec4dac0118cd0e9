// Compile-time shape of the passes of attention's backward of family sm90: tiles, rings, registers, shared memory.
//
// A pass has 64 rows of X0 and X1 for each of its consumer warpgroups, which stay, and tiles of Y0 and Y1 stream past:
//
//   S = X0 Y0^T      P = exp2(c S - base)      dP = X1 Y1^T      dS = P (dP + shift)
//
// or, of retnet with factors M from a mask or a decay, P = c S M base and dS = (dP base + sign(P) shift) M. There S has
// no part in a dS without shift, so that passes without dV compute it only where r has a gradient.
//
//   pass    rows      X0, X1   Y0, Y1   results
//   kKeys   keys      K, V     Q, dO    dK += dS Y0, dV += P Y1, and perhaps a share of dQ += dS^T X0
//
// where two warpgroups may share 64 rows instead, and each has one of the results (shared_rows.cuh),
//
//   kDk     keys      K, V     Q, dO    dK += dS Y0
//   kDv     keys      K        Q, dO    dV += P Y1
//   kDq     queries   Q, dO    K, V     dQ += dS Y0
//
// Every static_assert here is the twin of a named predicate in kernels/attention_backward_sm90/rules.py.
#pragma once

#include <cstdint>

#include "attention_autotuner/attention_forward_sm90/score_values.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/scheduler.cuh"
#include "attention_autotuner/score/score_mod.cuh"

namespace attention_autotuner {

inline constexpr int kWarpgroupBarrier = 1;  // the first of each warpgroup's named barriers

// How the three results are shared out: all in one pass, dQ in one of its own, or each in one of its own.
enum class Decomposition { kFused, kTwoPass, kThreePass };
enum class GradientPass { kKeys, kDk, kDv, kDq };
// What of the next step is issued before the results of this one, so that the softmax runs beside those.
enum class IssueOrder {
  kSerial,       // nothing: S and dP, the softmax, the results, all waited for
  kScoresAhead,  // S: the exponentials run beside the results of the step before
  kBothAhead,    // S and dP: all of the softmax does
  kInterleaved,  // S, after dP and dV and before dK and dQ: each half of the softmax runs beside half of the results
  kByTurns,  // S, then dK of the step before, dQ of that, dV and dP; S, dQ and dP in the same registers, and P and dS
};
// Who computes the share of dQ: the warpgroups of the keys, or one of its own.
enum class DqBy { kKeys, kOwn };
// How it is added to the sums.
enum class DqAdd {
  kReduce,   // from registers, which stalls a warpgroup while L2 takes what it has sent before
  kBulk,     // through shared memory, by bulk copies that nothing waits for
  kOrdered,  // from registers, in the order of the blocks of keys
  kStored,   // by bulk copies of a thread of its own, of which the first of each tile stores: nothing is cleared before
  kQueued,   // the same, in an order of the blocks of keys (query_order.cuh)
};

// Without a share of dQ.
struct NoDqShare {
  static constexpr DqBy kDqBy = DqBy::kKeys;
  static constexpr DqAdd kDqAdd = DqAdd::kReduce;
  static constexpr int kDsStages = 0;
};

template <typename Config, typename Pass, GradientPass kOfPass, typename Share = NoDqShare>
struct BackwardPassSm90Traits : ScoreModsOf<Config> {
  using Element = typename Config::Element;
  using Params = BackwardParamsOf<Config>;
  using Mods = ScoreModsOf<Config>;
  static constexpr GradientPass kPass = kOfPass;
  static constexpr ScoreMod kScoreMod = Config::kScoreMod;
  static constexpr bool kRetNet = kScoreMod != ScoreMod::kSoftmax;  // its scores instead of attention's
  static constexpr bool kMasked = kScoreMod == ScoreMod::kMasked;
  static constexpr bool kDecayed = kScoreMod == ScoreMod::kDecayed;
  static constexpr IssueOrder kOrder = Pass::kIssueOrder;
  static constexpr bool kByQueries = kPass == GradientPass::kDq;
  static constexpr bool kHasDs = kPass != GradientPass::kDv;  // and so dP
  static constexpr bool kHasDv = kPass == GradientPass::kKeys || kPass == GradientPass::kDv;
  static constexpr bool kSignsAlone = kRetNet && !kHasDv;  // of S, and those only where r has a gradient
  static constexpr bool kTakesScores = !kSignsAlone;
  // P and dS of retnet are made from S and dP at once, unless MMAs take P before dP is there.
  static constexpr bool kScoresAtOnce = kRetNet && kHasDv && kHasDs && kOrder != IssueOrder::kInterleaved;
  static constexpr bool kPacksCapped = Mods::kSoftcap && kHasDs && kHasDv;  // P for dV differs from that of dS
  static constexpr int kDsStages = Share::kDsStages;                        // of dS in shared memory
  static constexpr bool kSharesDq = kDsStages > 0;
  static constexpr bool kOwnDq = kSharesDq && Share::kDqBy == DqBy::kOwn;
  static constexpr bool kKeysDq = kSharesDq && !kOwnDq;
  static constexpr bool kOrdered = kSharesDq && Share::kDqAdd == DqAdd::kOrdered;
  static constexpr bool kBulkDq = kSharesDq && Share::kDqAdd == DqAdd::kBulk;
  static constexpr bool kQueuedDq = kSharesDq && Share::kDqAdd == DqAdd::kQueued;
  static constexpr bool kStoredDq = kQueuedDq || (kSharesDq && Share::kDqAdd == DqAdd::kStored);
  static constexpr bool kEarly = Config::kEarlyLaunches;
  static constexpr bool kDynamic = Config::kDynamic;  // CTAs that stay claim the next tile
  // And the first, where CTAs wait for such as have claimed before: these run, whatever else the GPU runs.
  static constexpr bool kClaimsFirst = kDynamic && kQueuedDq;
  // Whether a list may have a tail: queued shares have heads side by side all along.
  static constexpr bool kTailed = kDynamic && !kQueuedDq && !kByQueries;
  // Whether CTAs that share a block of keys may have unlike numbers of heads.
  static constexpr bool kUnevenParts = (kTailed || Mods::kPacked) && !kByQueries;
  // Whether a head's blocks of keys may begin at tiles of queries of their own, so that none waits for the one before
  // it in step. CTAs wait in a ring then, and have to run together.
  static constexpr bool kApart = kQueuedDq && kKeysDq && Config::kPersistent && !kDynamic && !Mods::kModified;
  // Where dQ of a head is converted once its blocks of keys have added, beside other heads. A CTA must not end before
  // its last additions are in global memory then, which costs more than it gains where many end, one after the other.
  static constexpr bool kCountsHeads = kEarly && (kBulkDq || kStoredDq) && (!Mods::kPacked || kDynamic) &&
                                       Config::kCtaOrder == CtaOrder::kRaster &&
                                       (Config::kPersistent || kKeysDq || kQueuedDq);
  static constexpr bool kGathered = Config::kGatheredStores;
  static constexpr bool kFirstPass = kPass == GradientPass::kKeys || kPass == GradientPass::kDk;

  static constexpr int kWarpgroups = Pass::kWarpgroups;   // of rows; one more is the producer, and perhaps one adds dQ
  static constexpr bool kSharedRows = Pass::kSharedRows;  // a result for each warpgroup
  static constexpr int kBlockRows = kSharedRows ? 64 : 64 * kWarpgroups;
  static constexpr int kBlockColumns = Pass::kBlockColumns;
  static constexpr int kFirstStages = Pass::kFirstStages;    // of Y0
  static constexpr int kSecondStages = Pass::kSecondStages;  // of Y1
  static constexpr bool kHeldRows = Pass::kHeldRows;         // X0 and X1 are operands from registers
  static constexpr int kMaskStages = Pass::kMaskStages;      // 0 without a mask
  static constexpr int kDepth = Config::kPaddedDimQK;
  static constexpr int kColumns = Config::kPaddedDimV;
  // As tiles hold them, in whole blocks of 64: what is beyond the true ones arrives as zeros.
  static constexpr int kDepthLoaded = divide_up(kDepth, 64) * 64;
  static constexpr int kColumnsLoaded = divide_up(kColumns, 64) * 64;
  // Results of CTAs that claim tiles leave through the place of X1, where they fit, and the next X1 comes after them.
  // Where X1 is in registers, they have a place of their own, and the next one comes at once.
  static constexpr bool kTmaStores = kDynamic && kDepthLoaded <= kColumnsLoaded;
  static constexpr bool kResultsApart = kTmaStores && kHeldRows;
  static constexpr int kThreads = 128 * (1 + kWarpgroups + kOwnDq);

  // The share of dQ, as 64 rows of queries by so many columns: where the warpgroups of the keys compute it, each takes
  // 64 of its rows, or where there are no more, 64 of its columns. Of 80 queries, these columns are the rows of the
  // MMA.
  static constexpr bool kSwapsDq = kKeysDq && kBlockColumns == 80;
  static constexpr bool kSplitsDqColumns = !kOwnDq && (kBlockColumns == 64 || kSwapsDq);
  static constexpr int kDqColumns = kOwnDq ? minimum(kDepth, 64) : kSplitsDqColumns ? 64 : kDepth;
  static constexpr int kDqMmaColumns = kSwapsDq ? kBlockColumns : kDqColumns;
  static constexpr int kDqParts = kOwnDq ? 1 : kWarpgroups;                      // that a tile is added in
  static constexpr int kDqSemaphores = kOrdered ? kDqParts : kStoredDq ? 1 : 0;  // of a tile
  static constexpr int kDqStages =
      kStoredDq ? (kOwnDq ? 2 : 1) : 0;  // of shares on their way to the thread that stores
  static constexpr int kDqSenders = kQueuedDq ? 2 : kStoredDq ? 1 : 0;  // threads
  static constexpr int kDqSlots = maximum(kDqStages, kDqSenders);  // pairs of barriers of a part: a sender has its own
  static constexpr int kHeadCounts = kStoredDq ? kDqSenders : 4 * kDqParts;  // of a block of keys
  static constexpr int kDqTileBytes = kBlockColumns * kDepth * 4;

  // Warpgroups trade registers: those of rows share what the others leave of the even shares of the launch.
  static constexpr int kEvenRegisters = minimum(65536 / kThreads, 255) / 8 * 8;
  static constexpr int kProducerRegisters = kWarpgroups == 3 ? 32 : 24;
  static constexpr int kDqRegisters = 72;
  static constexpr int kConsumerRegisters =
      minimum(240, (kEvenRegisters * (kThreads / 128) - kProducerRegisters - (kOwnDq ? kDqRegisters : 0)) /
                       maximum(1, kWarpgroups) / 8 * 8);

  // Of retnet's long steps more: the assembler loads factors ahead.
  static constexpr int kRegistersBesideFragments = kRetNet && kBlockColumns > 64                  ? 56
                                                   : kOrder == IssueOrder::kByTurns               ? 32
                                                   : kOrder == IssueOrder::kInterleaved && kOwnDq ? 32
                                                                                                  : 40;
  static constexpr int kResultRegisters = (kHasDs ? kDepth / 2 : 0) + (kHasDv ? kColumns / 2 : 0);
  static constexpr bool kByTurns = kOrder == IssueOrder::kByTurns;
  // Where TMA stores results, X1 of a block comes after those of the one before, and is waited for as late as possible.
  static constexpr bool kLateRows = kTmaStores && !kHeldRows && (kByTurns || kOrder == IssueOrder::kScoresAhead);
  static constexpr int kScoreRegisters = (kHasDs && !kByTurns ? 2 : 1) * kBlockColumns / 2;  // S and dP
  static constexpr int kPackedRegisters =
      (kHasDs && kHasDv && !kByTurns ? 2 : 1) * kBlockColumns / 4;  // P and dS as operands
  static constexpr int kDqFragments = kKeysDq ? kDqMmaColumns / 2 : 0;
  // Beside the results: what is there when scores turn into operands, when the results are in flight, or dQ.
  static constexpr int kBesideResults =
      kOrder == IssueOrder::kBothAhead     ? kScoreRegisters + kPackedRegisters + kDqFragments
      : kOrder == IssueOrder::kInterleaved ? kScoreRegisters + kPackedRegisters / 2
      : kByTurns                           ? kBlockColumns / 2 + kPackedRegisters
      : kOrder == IssueOrder::kSerial      ? kPackedRegisters + kDqFragments
                                           : kBlockColumns / 2 + maximum(kPackedRegisters, kDqFragments);
  static constexpr int kHeldRegisters = kHeldRows ? kDepth / 4 + (kHasDs ? kColumns / 4 : 0) : 0;
  // Of warpgroups that share rows: one result, its scores and its operand.
  static constexpr int kFragmentRegisters =
      kSharedRows ? maximum(kDepth, kColumns) / 2 + kBlockColumns / 2 + kBlockColumns / 4
                  : kResultRegisters + kHeldRegisters + maximum(kScoreRegisters, kBesideResults);

  static_assert(kDepth % 16 == 0 && kDepth >= 16 && kDepth <= 256, "padded_dim_qk_range");
  static_assert(kColumns % 16 == 0 && kColumns >= 16 && kColumns <= 512, "padded_dim_v_range");
  static_assert(Config::kCopyBytes == 16, "tma_needs_alignment");
  static_assert(kWarpgroups == 2 || (kWarpgroups == 3 && !kSharesDq), "warpgroups_range");
  static_assert(kBlockColumns % 16 == 0 && kBlockColumns >= 16 && kBlockColumns <= 128, "block_columns_fit_mma");
  static_assert(kColumns <= 256, "value_columns_fit_mma");
  static_assert(kFirstStages >= 1 && kFirstStages <= 4, "first_stages_range");
  static_assert(kSecondStages >= 1 && kSecondStages <= 4, "second_stages_range");
  static_assert(kMasked ? kMaskStages >= 1 && kMaskStages <= 4 : kMaskStages == 0, "mask_stages_range");
  static_assert(!kMasked || !kByQueries || kBlockColumns % 64 == 0, "mask_fills_blocks");
  static_assert((kOrder == IssueOrder::kSerial || kFirstStages > 1) &&
                    (kOrder != IssueOrder::kBothAhead || kSecondStages > 1),
                "ahead_needs_two_stages");
  static_assert(kOrder != IssueOrder::kBothAhead || kHasDs, "values_have_one_score");
  static_assert(kOrder != IssueOrder::kScoresAhead || !kSignsAlone, "scores_ahead_takes_scores");
  static_assert(kOrder != IssueOrder::kInterleaved || kPass == GradientPass::kKeys, "interleaving_needs_all_products");
  static_assert(!kSharesDq || (kDsStages <= 2 && (kOwnDq ? kBlockColumns % 64 == 0
                                                         : kBlockColumns == 64 * kWarpgroups ||
                                                               (kBlockColumns == 64 && kDepth > 64 && kDepth <= 128) ||
                                                               (kSwapsDq && kByTurns && kDepth == 128))),
                "dq_share_fits_warpgroups");
  static_assert(!kSharedRows ||
                    (kPass == GradientPass::kKeys && !kSharesDq && kWarpgroups == 2 && !kHeldRows && !kRetNet),
                "shared_rows_split_results");
  static_assert(!kSharedRows || ((kOrder == IssueOrder::kSerial || kOrder == IssueOrder::kBothAhead) &&
                                 kFirstStages > 1 && kSecondStages > 1),
                "shared_rows_need_two_stages");
  static_assert(kOrder != IssueOrder::kByTurns || (kKeysDq && kDqMmaColumns == kBlockColumns && !kRetNet &&
                                                   !Mods::kSoftcap && !Mods::kBias && !Mods::kAttnMask && !kHeldRows),
                "turns_share_registers");
  static_assert(!Mods::kAttnMask || !Mods::kSoftcap, "mask_tensors_take_exponents");
  static_assert(!Mods::kPacked || !Config::kPersistent || kDynamic, "packed_tiles_are_dispatched");
  static_assert(!kDynamic || (Config::kPersistent && Config::kCtaOrder == CtaOrder::kRaster && kEarly && kGathered &&
                              (kBulkDq || kStoredDq)),
                "claims_take_turns");
  static_assert(!Mods::kSpanned || !kOrdered, "spans_add_in_no_order");
  static_assert(!kQueuedDq || (Config::kCtaOrder == CtaOrder::kRaster && !Mods::kSpanned && !kMasked &&
                               (!Mods::kPacked || kDynamic)),
                "queue_has_the_order_of_blocks");
  static_assert(kFragmentRegisters + kRegistersBesideFragments <= kConsumerRegisters, "fragments_fit_warpgroup");

  // X0, X1, stages of Y0, of Y1, of the mask and of dS, all at multiples of 1024 bytes; 16 rows of the share of dQ for
  // each warp that adds it by bulk copies, or stages of all of it, or P on its way from one warpgroup to the other;
  // results on their way out, if not through the place of X1; stages of base and of shift where rows are keys;
  // barriers.
  static constexpr int kX0Bytes = kBlockRows * kDepthLoaded * 2;
  static constexpr int kX1Bytes = kHasDs ? kBlockRows * kColumnsLoaded * 2 : 0;
  static constexpr int kY0Bytes = kBlockColumns * kDepthLoaded * 2;
  static constexpr int kY1Bytes = kBlockColumns * kColumnsLoaded * 2;
  static constexpr int kDsBytes = kBlockColumns * kBlockRows * 2;
  static constexpr int kDqWarpBytes = kBulkDq ? 16 * kDqMmaColumns * 4 : 0;
  static constexpr int kValueBytes = kByQueries ? 0 : 4 * kBlockColumns;
  static constexpr int kX1Offset = kX0Bytes;
  static constexpr int kY0Offset = kX1Offset + kX1Bytes;
  static constexpr int kY1Offset = kY0Offset + kFirstStages * kY0Bytes;
  static constexpr int kMaskBytes = kBlockRows * kBlockColumns * 2;
  static constexpr int kMaskOffset = kY1Offset + kSecondStages * kY1Bytes;
  static constexpr int kDsOffset = kMaskOffset + kMaskStages * kMaskBytes;
  static constexpr int kDqOffset = kDsOffset + kDsStages * kDsBytes;
  static constexpr int kPOffset = kDqOffset + 4 * kDqParts * kDqWarpBytes + kDqStages * kDqTileBytes;
  static constexpr int kPStages = kSharedRows ? 2 : 0;
  static constexpr int kPBytes = kBlockRows * kBlockColumns * 2;
  static constexpr int kAfterP = kPOffset + kPStages * kPBytes;
  static constexpr int kResultsOffset = kResultsApart ? kAfterP : kX1Offset;
  static constexpr int kBaseOffset = kAfterP + (kResultsApart ? kX1Bytes : 0);
  static constexpr int kShiftOffset = kBaseOffset + kFirstStages * kValueBytes;
  static constexpr int kBarrierOffset = kShiftOffset + kSecondStages * kValueBytes;
  // Barriers in pairs, full and empty.
  static constexpr int kXBarrier = 0;  // X0, then X1
  static constexpr int kY0Barrier = 2;
  static constexpr int kY1Barrier = kY0Barrier + kFirstStages;
  static constexpr int kMaskBarrier = kY1Barrier + kSecondStages;
  static constexpr int kDsBarrier = kMaskBarrier + kMaskStages;
  static constexpr int kPBarrier = kDsBarrier + kDsStages;
  static constexpr int kDqBarrier = kPBarrier + kPStages;                // of each part of each slot of shares of dQ
  static constexpr int kTileBarrier = kDqBarrier + kDqParts * kDqSlots;  // of tiles that were claimed
  static constexpr int kTileSlots = kDynamic ? 2 : 0;
  static constexpr int kBarriers = kTileBarrier + kTileSlots;
  // Of tiles that are cleared before they are full, one for each producer.
  static constexpr int kClearedOffset = kBarrierOffset + 16 * kBarriers;
  static constexpr int kTileSlotOffset = kClearedOffset + (Mods::kPacked ? 16 : 0);
  static constexpr int kBarrierBytes = kDynamic ? 384 : 256;
  static constexpr int kAlignment = 1024;  // which the start of shared memory may lack
  // Then what a pass that finds the gradient of a bias table has for each warp, where there is room for it.
  static constexpr int kMostBiasDistance = 128;  // of the tables whose gradients it finds
  static constexpr int kBiasOffset = kBarrierOffset + kBarrierBytes;
  static constexpr int kBiasWarpBytes = 2048;
  static constexpr int kBiasBytes = 4 * kWarpgroups * kBiasWarpBytes;
  static constexpr bool kSumsBias = Mods::kBias && !Mods::kSoftcap && !Mods::kPacked && kHasDs && !kByQueries &&
                                    !kSharedRows && kAlignment + kBiasOffset + kBiasBytes <= 227 * 1024;
  static constexpr int kSmemBytes = kAlignment + kBiasOffset + (kSumsBias ? kBiasBytes : 0);
  static_assert(16 * (kBarriers + Mods::kPacked) + 4 * kTileSlots <= kBarrierBytes, "barriers_fit");
  static_assert(kSmemBytes <= 227 * 1024, "smem_fits_block");
};

// The same pass where r has a gradient, if that takes another main loop.
template <typename T>
struct WithSigns : T {
  static constexpr bool kTakesScores = true;
};

}  // namespace attention_autotuner

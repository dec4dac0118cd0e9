// Compile-time shape of attention's forward kernel of family sm90: tile, rings, registers, shared memory.
//
// Every static_assert here is the twin of a named predicate in kernels/attention_forward_sm90/rules.py.
#pragma once

#include "attention_autotuner/attention_forward_sm90/score_values.cuh"
#include "attention_autotuner/common/key_range.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/score/score_mod.cuh"

namespace attention_autotuner {

// kGrid: one CTA for each tile. kStatic: CTAs stay, and take every n-th tile. kDynamic: they claim the next one.
enum class Schedule { kGrid, kStatic, kDynamic };
// How a warpgroup orders the scores of key tile j, S(j), and the output of it, O(j).
enum class Mainloop {
  kStrict,       // S(j), softmax, O(j), so that P takes the registers of the scores
  kSerial,       // O(j) then S(j+1) in flight together, the softmax with neither
  kScoresFirst,  // S(j+1) then O(j) in flight together, modifications beside O(j), the softmax with neither
  kOverlap,      // S(j+1) then O(j), the softmax of j+1 while O(j) runs; drained between tiles of rows
  kOverlapFlat,  // the same, and the first S of the next tile of rows is issued before the last O of this one
};
// The way of a tile of O: kThroughQ through the shared memory of its Q and TMA, kDirect straight from registers.
enum class Output { kThroughQ, kDirect };

template <typename Config>
struct AttentionForwardSm90Traits : ScoreModsOf<Config> {
  using Element = typename Config::Element;
  static constexpr Mainloop kMainloop = Config::kMainloop;
  static constexpr Output kOutput = Config::kOutput;
  static constexpr Schedule kSchedule = Config::kSchedule;
  static constexpr bool kFlat = kMainloop == Mainloop::kOverlapFlat;
  static constexpr bool kOverlaps = kFlat || kMainloop == Mainloop::kOverlap;
  static constexpr bool kOptimistic = Config::kOptimistic;
  static constexpr bool kPingPong = Config::kPingPong;
  static constexpr ScoreMod kScoreMod = Config::kScoreMod;
  static constexpr bool kMasked = kScoreMod == ScoreMod::kMasked;  // retnet's scores instead of attention's
  static constexpr bool kKeyBounds = kHasKeyBounds<Config>;
  // A range of keys may end inside the tensor: what follows it is cleared in tiles of V.
  static constexpr bool kClearsV = kKeyBounds || ScoreModsOf<Config>::kPacked;
  static constexpr bool kPackGqa = Config::kPackGqa;  // rows of a tile are pairs of a query and a head of its group
  static constexpr bool kSplitKv = Config::kSplitKv;  // the keys of a tile of rows may be split among CTAs
  static constexpr int kWarpgroups = Config::kWarpgroups;  // consumers; one more is the producer
  static constexpr int kBlockM = 64 * kWarpgroups;
  static constexpr int kBlockN = Config::kBlockN;
  static constexpr int kQStages = Config::kQStages;
  static constexpr int kKStages = Config::kKStages;
  static constexpr int kVStages = Config::kVStages;
  static constexpr int kMaskStages = Config::kMaskStages;  // 0 without a mask
  static constexpr int kVSlices = Config::kVSlices;        // CTAs that share the columns of V of a tile of rows
  // The slices form a cluster, in which each computes the scores of its part of a step's keys and sends P to the other.
  static constexpr int kExchangeStages = Config::kExchangeStages;  // of P that comes from the other; 0 without
  static constexpr bool kSharesScores = kExchangeStages > 0;
  static constexpr int kScoreKeys = kSharesScores ? kBlockN / kVSlices : kBlockN;      // of a step, in one CTA
  static constexpr int kDepth = Config::kPaddedDimQK;                                  // that Q K^T sums over
  static constexpr int kColumns = divide_up(Config::kPaddedDimV, 16 * kVSlices) * 16;  // of V, in one CTA
  // As tiles hold them, in whole blocks of 64: what is beyond the true ones arrives as zeros.
  static constexpr int kDepthLoaded = divide_up(kDepth, 64) * 64;
  static constexpr int kColumnsLoaded = divide_up(kColumns, 64) * 64;
  static constexpr int kKeptDepth = Config::kKeptDepth;  // columns of Q that stay in registers
  static constexpr int kThreads = 128 * (1 + kWarpgroups);
  static constexpr int kProducers = kMasked && !kSharesScores ? 3 : 2;  // threads
  // Addresses of a mask follow from the first: fewer instructions, and yet slower where 128 columns of V overlap.
  static constexpr bool kDerivesAddresses = !kOverlaps || kSharesScores || (kColumns > 128 && kDepth <= 128);
  // As tiles of the mask are read.
  static constexpr bool kByQueries = true;
  static constexpr int kBlockRows = kBlockM;
  static constexpr int kBlockColumns = kScoreKeys;

  // Warpgroups trade registers: the consumers share what the producer leaves of the even shares of the launch. A single
  // one has as many as a thread can, without a trade.
  static constexpr bool kTradesRegisters = kWarpgroups > 1;
  static constexpr int kEvenRegisters = 65536 / kThreads / 8 * 8;
  static constexpr int kProducerRegisters = kWarpgroups == 3 ? 32 : 24;
  static constexpr int kConsumerRegisters =
      minimum(240, (kEvenRegisters * (1 + kWarpgroups) - kProducerRegisters) / maximum(1, kWarpgroups) / 8 * 8);
  static constexpr int kRegistersBesideFragments = 32;
  // O, S, what is kept of Q, and P unless it takes the place of S; the next P where it is made while this one is read.
  static constexpr int kFragmentRegisters = kColumns / 2 + kScoreKeys / 2 + kKeptDepth / 4 +
                                            (kMainloop == Mainloop::kStrict ? 0 : kBlockN / 4) +
                                            (kOverlaps && kOptimistic ? kBlockN / 4 : 0);

  static_assert(kScoreMod != ScoreMod::kDecayed, "softmax or a mask");
  static_assert(kDepth % 16 == 0 && kDepth >= 16 && kDepth <= 256, "padded_dim_qk_range");
  static_assert(Config::kPaddedDimV % 16 == 0 && Config::kPaddedDimV >= 16 && Config::kPaddedDimV <= 512,
                "padded_dim_v_range");
  static_assert(Config::kCopyBytes == 16, "tma_needs_alignment");
  static_assert(kWarpgroups >= 1 && kWarpgroups <= 4, "warpgroups_range");
  static_assert(kBlockN % 16 == 0 && kBlockN >= 16 && kBlockN <= 256, "block_n_fits_mma");
  static_assert(kVSlices >= 1 && kColumns <= 256, "value_columns_fit_mma");
  static_assert(kQStages >= 1 && kQStages <= 2, "q_stages_range");
  static_assert(kKStages >= 1 && kKStages <= 8, "k_stages_range");
  static_assert(kVStages >= 1 && kVStages <= 8, "v_stages_range");
  static_assert(kMasked ? kMaskStages >= 1 && kMaskStages <= 4 : kMaskStages == 0, "mask_stages_range");
  static_assert(!kMasked || kScoreKeys % 64 == 0, "mask_fills_blocks");
  static_assert(kExchangeStages >= 0 && kExchangeStages <= 2, "exchange_stages_range");
  static_assert(!kSharesScores || (kMasked && kVSlices == 2), "two_slices_share_scores");
  static_assert(!kSharesScores || (kMainloop == Mainloop::kOverlap && !kPingPong), "shared_scores_overlap");
  static_assert(!kSharesScores || kSchedule != Schedule::kDynamic, "clusters_claim_nothing");
  static_assert(!kSharesScores || kKStages + kVStages >= 3, "shared_ring_holds_step");
  static_assert(kKeptDepth % 16 == 0 && kKeptDepth >= 0 && kKeptDepth <= kDepth && !(kSharesScores && kKeptDepth > 0),
                "kept_depth_range");
  static_assert(!kMasked || !(kOptimistic || kPackGqa || kSplitKv), "softmax_alone");
  static_assert(kVSlices == 1 || kColumns % 64 == 0 || kOutput == Output::kDirect, "slices_fill_blocks");
  static_assert(!kFlat || (kQStages == 2 && kKStages > 1 && kVStages > 1), "flat_needs_two_stages");
  static_assert(!kFlat || !kPingPong, "flat_takes_no_turns");
  static_assert(!kPingPong || kWarpgroups > 1, "turns_need_warpgroups");
  static_assert(kOutput != Output::kThroughQ || kColumnsLoaded <= kDepthLoaded, "output_fits_q");
  static_assert(kOutput == Output::kDirect || (!kPackGqa && !kSplitKv), "output_leaves_directly");
  static_assert(!ScoreModsOf<Config>::kPacked || !kKeyBounds, "sequences have ends, not bounds");
  static_assert(!ScoreModsOf<Config>::kPacked || !kFlat, "flat_holds_one_sequence");
  static_assert(kFragmentRegisters + kRegistersBesideFragments <= kConsumerRegisters, "fragments_fit_warpgroup");

  // Stages of Q, of K, of V and of the mask, then barriers and the claimed tiles; all stages at multiples of 1024
  // bytes.
  static constexpr int kQBytes = kBlockM * kDepthLoaded * 2;
  // Where scores are shared, K and V go through one ring of all their stages, half of a step's keys in each.
  static constexpr int kKBytes =
      kScoreKeys * (kSharesScores ? maximum(kDepthLoaded, kColumnsLoaded) : kDepthLoaded) * 2;
  static constexpr int kVBytes = kSharesScores ? kKBytes : kBlockN * kColumnsLoaded * 2;
  static constexpr int kRingStages = kKStages + kVStages;
  static constexpr int kKOffset = kQStages * kQBytes;
  static constexpr int kVOffset = kKOffset + kKStages * kKBytes;
  static constexpr int kMaskBytes = kBlockM * kScoreKeys * 2;
  static constexpr int kMaskOffset = kVOffset + kVStages * kVBytes;
  // A stage has for each warpgroup P of its rows, as its threads hold it, and the levels and sums of the rows.
  static constexpr int kExchangeOffset = kMaskOffset + kMaskStages * kMaskBytes;
  static constexpr int kExchangedBytes = 64 * (kScoreKeys * 2 + 8);
  static constexpr int kBarrierOffset = kExchangeOffset + kExchangeStages * kWarpgroups * kExchangedBytes;
  // Barriers in pairs, full and empty.
  static constexpr int kQBarrier = 0;
  static constexpr int kKBarrier = kQStages;
  static constexpr int kVBarrier = kKBarrier + kKStages;
  static constexpr int kMaskBarrier = kVBarrier + kVStages;
  static constexpr int kExchangeBarrier = kMaskBarrier + kMaskStages;
  static constexpr int kTileBarrier = kExchangeBarrier + kExchangeStages * kWarpgroups;
  static constexpr int kTileSlots = 2;
  static constexpr int kTileSlotOffset = kBarrierOffset + 16 * (kTileBarrier + kTileSlots);
  static constexpr int kBoundedOffset = kTileSlotOffset + 4 * kTileSlots;  // of the barrier for V that is cleared
  static constexpr int kBarrierBytes = kBoundedOffset + (kClearsV ? 8 : 0) - kBarrierOffset;
  static constexpr int kAlignment = 1024;  // which the start of shared memory may lack
  static constexpr int kSmemBytes = kAlignment + kBarrierOffset + 512;
  static_assert(kBarrierBytes <= 512, "barriers_fit");
  static_assert(kSmemBytes <= 227 * 1024, "smem_fits_block");
};

}  // namespace attention_autotuner

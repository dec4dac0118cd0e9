// Compile-time shape of one attention forward kernel: the rows and columns of warps, and the shared-memory layout.
//
// Every static_assert here is the twin of a named predicate in kernels/scores_forward_sm80/rules.py, and
// kSmemBytes of smem_bytes in resources.py beside it.
#pragma once

#include <type_traits>

#include "attention_autotuner/common/key_range.cuh"
#include "attention_autotuner/common/packed_heads.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/scheduler.cuh"
#include "attention_autotuner/common/spans.cuh"
#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/common/tile.cuh"
#include "attention_autotuner/score/score_mod.cuh"

namespace attention_autotuner {

// The list of a launch for few queries, whose heads may be packed into tiles, and whose keys may be split among CTAs.
// All tiles of one split come before those of the next, so that heads that share keys read the same ones at a time.
struct SplitTileList : TileList {
  PackedHeads packed;
  Divider split_tiles, splits;          // tiles of one split, and how many splits there are
  float *partial_output, *partial_lse;  // of every split [rows, padded columns] and, in powers of two, [rows]
  int64_t partial_rows;                 // of all heads
};
struct SplitTile : TileCoordinates {  // its head is a group of packed ones
  int split;
};

template <typename Config>
struct ForwardTraits {
  using Element = typename Config::Element;
  static constexpr ScoreMod kScoreMod = Config::kScoreMod;
  using Modifications = typename ModificationsOf<Config>::Type;
  static constexpr bool kModified = kIsModified<Config>;
  static constexpr bool kPacked = kIsPacked<Config>;
  static constexpr bool kSpanned = kIsSpanned<Config>;
  static constexpr bool kPackGqa = Config::kPackGqa;  // rows of a tile are pairs of a query and a head of its group
  static constexpr bool kSplitKv = Config::kSplitKv;  // the keys of a tile of rows may be split among CTAs
  static constexpr bool kFewQueries = kPackGqa || kSplitKv;
  using List = std::conditional_t<kFewQueries, SplitTileList, TileList>;
  using Tile = std::conditional_t<kFewQueries, SplitTile, TileCoordinates>;
  // A split's keys are a range, too.
  static constexpr bool kKeyBounds =
      kScoreMod == ScoreMod::kSoftmax && (kHasKeyBounds<Config> || kModified || kSplitKv);
  using Range = std::conditional_t<kSpanned, SpannedRange<kKeyBounds>, KeyRange<kKeyBounds>>;
  using Params = std::conditional_t<
      kModified, ModifiedForwardParams<Config>,
      std::conditional_t<kKeyBounds, AttentionForwardParams1003, typename ScoreModParams<kScoreMod>::Forward>>;
  static constexpr int kPaddedDimQK = Config::kPaddedDimQK;
  static constexpr int kBlockM = Config::kBlockM;
  static constexpr int kBlockN = Config::kBlockN;
  static constexpr int kWarpsM = Config::kWarpsM;
  static constexpr int kWarpsN = Config::kWarpsN;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN;
  static constexpr int kStages = Config::kNumStages;
  static constexpr int kKSlice = Config::kKSlice;
  static constexpr int kCopyBytes = Config::kCopyBytes;
  static constexpr bool kQInRegisters = Config::kQInRegisters;

  static_assert(Config::kPaddedDimQK % 16 == 0 && Config::kPaddedDimQK >= 16 && Config::kPaddedDimQK <= 256,
                "padded_dim_qk_range");
  static_assert(Config::kPaddedDimV % 16 == 0 && Config::kPaddedDimV >= 16 && Config::kPaddedDimV <= 512,
                "padded_dim_v_range");
  static_assert(!kFewQueries || kScoreMod == ScoreMod::kSoftmax, "softmax_alone");
  static_assert(kWarpsM * kWarpsN >= 2 && kWarpsM * kWarpsN <= 16, "warps_range");
  static_assert(kWarpsN == 1 || kWarpsM <= 15, "row_barriers_available");
  static_assert(kBlockM % (16 * kWarpsM) == 0, "block_m_divides_among_warps");
  static_assert(kBlockN % (16 * kWarpsN) == 0, "block_n_divides_among_warps");
  static_assert(Config::kPaddedDimV % Config::kVSlices == 0, "v_slices_divide_padded_dim_v");
  static_assert(Config::kPaddedDimV / Config::kVSlices % (16 * kWarpsN) == 0, "value_columns_divide_among_warps");
  static_assert(kKSlice % 16 == 0 && kPaddedDimQK % kKSlice == 0, "k_slice_divides_padded_dim_qk");

  static constexpr int kValueSlices = Config::kVSlices;
  static constexpr int kValueColumns = Config::kPaddedDimV / kValueSlices;  // of this CTA
  static constexpr int kRowTiles = kBlockM / kWarpsM / 16;                  // 16-row tiles of a warp
  static constexpr int kKeyTiles = kBlockN / kWarpsN / 8;                   // 8-key tiles of a warp, Q K^T
  static constexpr int kColumnTiles = kValueColumns / kWarpsN / 8;          // 8-column tiles of a warp, P V
  static constexpr int kSlices = kPaddedDimQK / kKSlice;

  static constexpr bool kPInRegisters = kWarpsN == 1;
  static constexpr bool kQkAhead = Config::kQkAhead;
  static_assert(kStages >= 1 && kStages <= 4, "num_stages_range");
  static_assert(!kQkAhead || (kStages == 2 && kSlices == 1 && kPInRegisters), "qk_ahead_needs_two_whole_stages");
  static_assert(kSlices == 1 || kStages >= 2, "sliced_k_needs_two_stages");
  static_assert(Config::kCopyBytes == 16 || Config::kCopyBytes == 2, "copy_bytes_known");

  // Two row tiles of a wide output fill the registers of a thread: see common/tile.cuh.
  static constexpr bool kPadded = kRowTiles >= 2 && kColumnTiles >= 14;
  using TileQ = SmemTile<kBlockM, kPaddedDimQK, kPadded>;
  using TileK = SmemTile<kBlockN, kKSlice, kPadded>;
  using TileV = SmemTile<kBlockN, kValueColumns, kPadded>;
  using TileP = SmemTile<kBlockM, kBlockN, kPadded>;
  using TileM = SmemTile<kBlockM, kBlockN, kPadded>;  // of an explicit mask
  using TileO = SmemTile<kBlockM, kValueColumns, kPadded>;

  // Sliced K has a ring of kStages slices and one V tile; otherwise K and V have kStages tiles each.
  static constexpr int kVStages = kSlices == 1 ? kStages : 1;
  static constexpr int kPBytes = kPInRegisters ? 0 : TileP::kBytes;
  static constexpr int kRowExchangeBytes = kPInRegisters ? 0 : kWarpsN * kBlockM * int(sizeof(float));

  // [Q] [V K pairs, or V and the ring of K slices] [masks, one for each V] [P] [row values]. Q in registers needs
  // its place only until it is read, so K/V reuse it; O reuses everything at the end.
  static constexpr bool kPaired = kSlices == 1;
  static constexpr int kVSlotBytes = kPaired ? TileV::kBytes + TileK::kBytes : TileV::kBytes;
  static constexpr int kKSlotBytes = kPaired ? kVSlotBytes : TileK::kBytes;
  static constexpr int kQOffset = 0;
  static constexpr int kVOffset = kQInRegisters ? 0 : TileQ::kBytes;
  static constexpr int kKOffset = kVOffset + TileV::kBytes;
  static constexpr int kKvBytes = kVStages * TileV::kBytes + kStages * TileK::kBytes;
  static constexpr int kMaskOffset = kVOffset + kKvBytes;
  static constexpr int kMaskBytes = kScoreMod == ScoreMod::kMasked ? kVStages * TileM::kBytes : 0;

  // The first tile goes to the last buffers. Where Q on its way to registers leaves them alone, they fill meanwhile.
  static constexpr int kFirstSlot = kQkAhead ? 0 : kStages - 1;
  static constexpr bool kFirstEarly =
      kQInRegisters && kPaired && !kQkAhead && TileQ::kBytes <= kFirstSlot * kVSlotBytes;
  static constexpr int kPOffset = kMaskOffset + kMaskBytes;
  static constexpr int kRowExchangeOffset = kPOffset + kPBytes;
  static constexpr int kSmemBytes =
      maximum(maximum(kRowExchangeOffset + kRowExchangeBytes, TileO::kBytes), TileQ::kBytes);
  static_assert(kSmemBytes <= 227 * 1024, "smem_fits_block");
};

template <typename Config>
__device__ __forceinline__ typename ForwardTraits<Config>::Tile listed_tile(
    typename ForwardTraits<Config>::List const& list, int index) {
  auto const tile_at = [&list](int place) {
    return tile_coordinates<Config::kCtaOrder == CtaOrder::kLongestFirst, Config::kVSlices,
                            Config::kScoreMod == ScoreMod::kMasked>(place, list);
  };
  int const place = Config::kPersistent ? recompute_here(index) : block_index();
  if constexpr (ForwardTraits<Config>::kFewQueries) {
    int const split = list.split_tiles.divide(place);
    return {tile_at(place - split * list.split_tiles.divisor), split};
  } else {
    return tile_at(place);
  }
}

struct Nothing {
  __device__ __forceinline__ void operator()(int) const {}
};

}  // namespace attention_autotuner

// Which tiles of rows a CTA computes, and in which order.
#pragma once

#include <cstdint>
#include <type_traits>

#include "attention_autotuner/attention_forward_sm90/traits.cuh"
#include "attention_autotuner/common/scheduler.cuh"
#include "attention_autotuner/sm90/sequence_list.cuh"
#include "attention_autotuner/sm90/tile_slot.cuh"

namespace attention_autotuner {

// Tiles are ordered section by section; within a section of heads, row block by row block (the longest first where
// causal), its heads innermost. A section of one head walks the row blocks of one head after the other.
//
// A head is a query head, or one for each slice of its columns of V, or, where rows are packed, so many of one group as
// a tile packs. Split by split comes the whole order, so that heads that share keys read the same ones at a time. An
// explicit mask is a head's, for all batches: there the batches of a head are neighbours, and read it together; and row
// blocks that leave a warpgroup without queries may come after all others, so that the CTAs that end last have short
// tiles.
struct WorkList {
  int tiles, row_blocks, sections;
  bool longest_first;
  // `inner`: what of heads and batches counts faster: heads (or their slices), or the batches (and slices) of a head.
  Divider section_tiles, section_heads, last_heads, inner, group;
  Divider split_tiles, splits;  // tiles of one split, or, with a mask, of whole row blocks; how many splits there are
  int* claimed;                 // of a dynamic schedule: how many tiles were claimed beyond the first of every CTA
};

// Of packed sequences: the rest says it of a single row block, whose place is taken by as many as are listed. The
// longest come first there. Where keys are split the list has the parts of blocks.
template <typename Listed>
struct PackedWorkList : WorkList {
  ListOf<Listed> listed;
};
// `Listed`: what a list of packed sequences has; void: the batch has none.
template <typename Listed>
using WorkListOf = std::conditional_t<std::is_void_v<Listed>, WorkList, PackedWorkList<Listed>>;
template <typename T>
inline constexpr bool kListsParts = T::kPacked && (T::kPackGqa || T::kSplitKv);
template <typename T>
using ListedOf = std::conditional_t<!T::kPacked, void, std::conditional_t<kListsParts<T>, ListedPart, ListedBlock>>;

struct WorkTile {
  int row_block, head, batch, split, slice;
  int listed;  // of packed sequences: which block of the list
};

template <typename List>
__device__ __forceinline__ WorkTile packed_work_tile(int index, List const& list, int blocks) {
  int const section_tiles = list.section_heads.divisor * blocks, section = index / section_tiles;
  int const within = index - section * section_tiles;
  Divider const& heads = section == list.sections - 1 ? list.last_heads : list.section_heads;
  int const listed = heads.divide(within);
  int const head = section * list.section_heads.divisor + within - listed * heads.divisor;
  auto const& at = list.listed.blocks[listed];
  int split = 0;
  if constexpr (std::is_same_v<List, PackedWorkList<ListedPart>>) split = at.split;
  return {at.block, head, 0, split, 0, listed};
}

template <typename T>
__device__ __forceinline__ WorkTile work_tile(int index, WorkList const& list) {
  int split = 0;
  if constexpr (T::kSplitKv) {
    split = list.split_tiles.divide(index);
    index -= split * list.split_tiles.divisor;
  }
  int const section = list.section_tiles.divide(index);
  int const within = index - section * list.section_tiles.divisor;
  bool const last = section == list.sections - 1;
  int rank = last ? list.last_heads.divide(within) : list.section_heads.divide(within);
  int head_batch = section * list.section_heads.divisor + within -
                   rank * (last ? list.last_heads.divisor : list.section_heads.divisor);
  if constexpr (T::kMasked) {
    if (index >= list.split_tiles.divisor) {
      rank = list.row_blocks;
      head_batch = index - list.split_tiles.divisor;
    }
  }
  int const outer = list.inner.divide(head_batch);
  int const sliced = head_batch - outer * list.inner.divisor, inner = sliced / T::kVSlices;
  return {list.longest_first ? list.row_blocks - 1 - rank : rank,
          T::kMasked ? outer : inner,
          T::kMasked ? inner : outer,
          split,
          sliced - inner * T::kVSlices,
          0};
}

// The sequence of tiles of one CTA as one of its readers sees it. In a dynamic schedule the thread that loads K claims
// the next tile when it has almost loaded one, not earlier: claims a whole tile ahead cost causal launches up to a
// tenth. The others read its index from a ring of two slots in shared memory.
template <typename T>
struct TileSequence {
  using List = WorkListOf<ListedOf<T>>;
  List const& list;
  uint32_t const smem;
  int const blocks;  // of packed sequences, that are listed; else 1
  int index;
  RingCursor<T::kTileSlots> ring;

  __device__ __forceinline__ TileSequence(List const& list, uint32_t smem)
      : list(list), smem(smem), blocks(count_listed(list)), index(int(blockIdx.x)) {}
  __device__ __forceinline__ static int count_listed(List const& list) {
    if constexpr (T::kPacked) return *list.listed.count;
    return 1;
  }
  // At the index.
  __device__ __forceinline__ WorkTile tile() const {
    if constexpr (T::kPacked) {
      return packed_work_tile(index, list, blocks);
    } else {
      return work_tile<T>(index, list);
    }
  }
  __device__ __forceinline__ bool valid() const { return index < list.tiles * blocks; }
  // `Warp`: all lanes of a warp call.
  template <bool Warp>
  __device__ __forceinline__ bool next() {
    if constexpr (T::kSchedule == Schedule::kGrid) {
      return false;
    } else if constexpr (T::kSchedule == Schedule::kStatic) {
      index += int(gridDim.x);
    } else {
      index = TileSlot<T>{smem, ring.stage}.template read<Warp>(ring.phase);
      ring.advance();
    }
    return valid();
  }
  // For the thread that claims: the next index, not yet published.
  __device__ __forceinline__ int claim() const {
    if constexpr (T::kSchedule == Schedule::kGrid) return list.tiles * blocks;
    if constexpr (T::kSchedule == Schedule::kStatic) return index + int(gridDim.x);
    return atomicAdd(list.claimed, 1) + int(gridDim.x);
  }
  __device__ __forceinline__ bool publish(int claimed) {
    if constexpr (T::kSchedule == Schedule::kDynamic) {
      TileSlot<T>{smem, ring.stage}.write(claimed, ring.phase);
      ring.advance();
    }
    index = claimed;
    return valid();
  }
};

}  // namespace attention_autotuner

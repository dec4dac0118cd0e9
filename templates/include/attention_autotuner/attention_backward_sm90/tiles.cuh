// The output tiles of a pass of attention's backward of family sm90: lists of them, and which a CTA takes.
#pragma once

#include <cstdint>
#include <type_traits>

#include "attention_autotuner/attention_backward_sm90/traits.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/scheduler.cuh"
#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/sm90/sequence_list.cuh"
#include "attention_autotuner/sm90/tile_slot.cuh"

namespace attention_autotuner {

template <typename Config>
inline constexpr bool kSequencesInTurn<Config, std::enable_if_t<Config::DqShare::kDqAdd == DqAdd::kQueued>> = true;

}  // namespace attention_autotuner

namespace attention_autotuner::softmax_backward {

// The list of output tiles of a launch, section by section: so many heads of the batch, which together fit in L2. Of a
// section, all heads for one row block before the next row block; of a section of one head, its row blocks in turn.
struct SectionList {
  int tiles;
  bool reversed_rows;
  Divider section_tiles, section_heads, heads, group;  // with a mask, `heads` is the batch
};
// With a mask, batch entries, which share it, follow each other; else heads.
template <bool kMasked>
__device__ __forceinline__ TileCoordinates tile_of_head(int head_batch, int rank, SectionList const& list) {
  int const blocks = list.section_tiles.divisor / list.section_heads.divisor;
  int const outer = list.heads.divide(head_batch), inner = head_batch - outer * list.heads.divisor;
  return {list.reversed_rows ? blocks - 1 - rank : rank, kMasked ? outer : inner, kMasked ? inner : outer, 0};
}
template <bool kMasked>
__device__ __forceinline__ TileCoordinates section_tile(int index, SectionList const& list) {
  int const section = list.section_tiles.divide(index), within = index - section * list.section_tiles.divisor;
  int const rank = list.section_heads.divide(within);
  int const head_batch = section * list.section_heads.divisor + within - rank * list.section_heads.divisor;
  return tile_of_head<kMasked>(head_batch, rank, list);
}

// Of packed sequences: the list says it of a single row block, whose place is taken by as many as are listed.
struct PackedSectionList : SectionList {
  BlockList listed;
};
template <bool kPacked>
using SectionListOf = std::conditional_t<kPacked, PackedSectionList, SectionList>;

// Of CTAs that claim their tiles.
template <bool kPacked>
struct ClaimedList : SectionListOf<kPacked> {
  int* claimed;  // workspace: how many were claimed beyond the first of every CTA
};
// With a tail, the last heads are a section of their own: of heads in turn, causal blocks of the last one would begin
// with the longest, beside which the other SMs have nothing left to do.
template <bool kPacked>
struct TailedList : ClaimedList<kPacked> {
  int tail_tiles, tail_head;  // where that section begins
  Divider tail_heads;
};
template <typename T>
using TileListOf =
    std::conditional_t<T::kTailed, TailedList<T::kPacked>,
                       std::conditional_t<T::kDynamic, ClaimedList<T::kPacked>, SectionListOf<T::kPacked>>>;

// So many tiles of a single row block, or of packed sequences as many for each that is listed.
template <bool kPacked>
__device__ __forceinline__ int count_listed(int tiles, SectionListOf<kPacked> const& list) {
  if constexpr (kPacked) return tiles * *list.listed.count;
  return tiles;
}
template <bool kPacked>
__device__ __forceinline__ int count_tiles(SectionListOf<kPacked> const& list) {
  return count_listed<kPacked>(list.tiles, list);
}
// In the place of a row block is its place in the list.
__device__ __forceinline__ TileCoordinates listed_tile(int index, PackedSectionList const& list) {
  int const section_tiles = list.section_heads.divisor * *list.listed.count, section = index / section_tiles;
  int const within = index - section * section_tiles, listed = list.section_heads.divide(within);
  int const head = section * list.section_heads.divisor + within - listed * list.section_heads.divisor;
  return {listed, head, 0, 0};
}
template <bool kMasked, bool kPacked>
__device__ __forceinline__ TileCoordinates tailed_tile(int index, TailedList<kPacked> const& list) {
  int const within = index - count_listed<kPacked>(list.tail_tiles, list);
  if (within < 0) {
    if constexpr (kPacked) return listed_tile(index, list);
    if constexpr (!kPacked) return section_tile<kMasked>(index, list);
  }
  int const rank = list.tail_heads.divide(within);
  int const head = list.tail_head + within - rank * list.tail_heads.divisor;
  if constexpr (kPacked) return {rank, head, 0, 0};
  return tile_of_head<kMasked>(head, rank, list);
}

// How far a CTA is with its list of output tiles, of which it takes every n-th, or claims the next: every role of it
// walks the same one. The rings and barriers go on from one tile to the next.
template <bool kDynamic>
struct OutputTiles {
  int round = 0;
  int steps = 0;   // of the tiles before, all together
  int visits = 0;  // tiles before with any step at all: those whose rows were loaded

  __device__ __forceinline__ int tile() const { return round * int(gridDim.x) + int(blockIdx.x); }
  // After a tile whose steps end there.
  __device__ __forceinline__ void next(int end) {
    ++round;
    visits += end > steps;
    steps = end;
  }
};
template <>
struct OutputTiles<true> : OutputTiles<false> {
  int index = int(blockIdx.x);

  __device__ __forceinline__ int tile() const { return index; }
};
// Whether there is one.
template <typename T>
__device__ __forceinline__ bool has_tile(OutputTiles<T::kDynamic> const& tiles, TileListOf<T> const& list) {
  return tiles.tile() < count_tiles<T::kPacked>(list);
}

// How the roles of a CTA learn of the next tile, after one whose steps end at `end`. Where tiles are claimed, the
// producer that loads X0 does it, once it has loaded one and not earlier, as the last claims should be by CTAs that
// have the least to do: a thread, or of packed sequences a warp. The others read the tile's index from one of two slots
// in shared memory.
template <typename T>
__device__ __forceinline__ void claim_tile(OutputTiles<true>& tiles, int end, uint32_t smem, int* claimed) {
  int index = 0;
  if (!T::kPacked || lane_index() == 0) {
    TileSlot<T> const slot{smem, tiles.round % 2};
    index = atomicAdd(claimed, 1) + (T::kClaimsFirst ? 0 : int(gridDim.x));
    slot.write(index, tiles.round / 2 & 1);
  }
  tiles.index = T::kPacked ? __shfl_sync(0xffffffffu, index, 0) : index;
  tiles.next(end);
}
// kWarp: all lanes of a warp call.
template <typename T, bool kWarp>
__device__ __forceinline__ void next_tile(OutputTiles<T::kDynamic>& tiles, int end, uint32_t smem) {
  if constexpr (T::kDynamic) {
    TileSlot<T> const slot{smem, tiles.round % 2};
    tiles.index = slot.template read<kWarp>(tiles.round / 2 & 1);
  }
  tiles.next(end);
}
// Of a warp that is no producer: its CTA's first tile, where that is claimed as well.
template <typename T>
__device__ __forceinline__ void first_tile(OutputTiles<T::kDynamic>& tiles, uint32_t smem) {
  if constexpr (T::kClaimsFirst) next_tile<T, true>(tiles, 0, smem);
}

}  // namespace attention_autotuner::softmax_backward

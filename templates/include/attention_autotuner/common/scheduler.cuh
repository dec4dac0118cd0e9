// Which output tile a CTA works on: linear index -> (row block, head, batch, value slice), longest causal tiles first.
#pragma once

#include <cstdint>

namespace attention_autotuner {

// Division of 0 <= n < 2^31 by a number known at launch: with l = ceil(log2 d), n / d = n ceil(2^(31 + l) / d) >> (31 +
// l). (Granlund and Montgomery, Division by invariant integers using multiplication, PLDI 1994.)
struct Divider {
  int divisor;
  uint32_t multiplier;
  int shift;

  __host__ __device__ static Divider by(int divisor) {
    int log = 0;
    while ((int64_t(1) << log) < divisor) ++log;
    return {divisor, uint32_t(((uint64_t(1) << (31 + log)) + divisor - 1) / divisor), 31 + log};
  }
  __device__ __forceinline__ int divide(int n) const { return int(uint64_t(uint32_t(n)) * multiplier >> shift); }
  // The rest, of an index that goes on as the quotient: the fastest of its coordinates.
  __device__ __forceinline__ int take(int& index) const {
    int const quotient = divide(index), rest = index - quotient * divisor;
    index = quotient;
    return rest;
  }
};

// The same where the divisor may be an int as well.
__device__ __forceinline__ int quotient(int n, int divisor) { return n / divisor; }
__device__ __forceinline__ int quotient(int n, Divider const& divider) { return divider.divide(n); }
__host__ __device__ __forceinline__ int divisor_of(int divisor) { return divisor; }
__host__ __device__ __forceinline__ int divisor_of(Divider const& divider) { return divider.divisor; }

// kRaster: all row blocks of a head before the next head. kLongestFirst: all heads for one row block, the longest
// causal row blocks first (LPT).
enum class CtaOrder { kRaster, kLongestFirst };

// The list of output tiles of one launch, as its kernel gets it.
struct TileList {
  int tiles;
  bool reversed_rows;
  Divider row_blocks;
  Divider heads;
  Divider batches;
  Divider group;  // query heads of one K/V head
};

struct TileCoordinates {
  int row_block;
  int head;
  int batch;
  int value_slice;
};

// Value slices of one row block are neighbours in the list, so that they find Q and K in L2. LongestFirst: all heads
// and batches for one row block before the next row block. BatchFirst: the batches of a row block and head first, which
// share a tile of a mask.
template <bool LongestFirst, int ValueSlices, bool BatchFirst = false>
__device__ __forceinline__ TileCoordinates tile_coordinates(int index, TileList const& list) {
  TileCoordinates tile;
  tile.value_slice = index % ValueSlices;
  index /= ValueSlices;
  if constexpr (BatchFirst) tile.batch = list.batches.take(index);
  if constexpr (LongestFirst) {
    tile.head = list.heads.take(index);
    if constexpr (!BatchFirst) tile.batch = list.batches.take(index);
    tile.row_block = index;
  } else {
    tile.row_block = list.row_blocks.take(index);
    if constexpr (BatchFirst) {
      tile.head = index;
    } else {
      tile.head = list.heads.take(index);
      tile.batch = index;
    }
  }
  if (list.reversed_rows) tile.row_block = list.row_blocks.divisor - 1 - tile.row_block;
  return tile;
}

}  // namespace attention_autotuner

// Which output tile a CTA works on: linear index -> (row block, head, batch, value slice), longest causal tiles first.
//
// Called by: attention_forward_sm80.cuh; the cost model simulates the same list (tuning/cost_model.py).
#pragma once

namespace attention_autotuner {

struct TileCoordinates {
  int row_block;
  int head;
  int batch;
  int value_slice;
};

// Value slices of one row block are neighbours in the list, so that they find Q and K in L2. HeadsFirst walks all heads
// and batches for one row block before the next row block.
template <bool HeadsFirst, int ValueSlices>
__device__ __forceinline__ TileCoordinates tile_coordinates(int index, int row_blocks, int heads, int batches,
                                                            bool longest_first) {
  TileCoordinates tile;
  tile.value_slice = index % ValueSlices;
  index /= ValueSlices;
  if constexpr (HeadsFirst) {
    tile.head = index % heads;
    index /= heads;
    tile.batch = index % batches;
    tile.row_block = index / batches;
  } else {
    tile.row_block = index % row_blocks;
    index /= row_blocks;
    tile.head = index % heads;
    tile.batch = index / heads;
  }
  if (longest_first) tile.row_block = row_blocks - 1 - tile.row_block;
  return tile;
}

}  // namespace attention_autotuner

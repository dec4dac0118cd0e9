// Packed rows: the queries of all heads that share a head of K and V, as rows of one tile.
//
// Row r of a tile is query r / heads of its queries, and head r % heads. Where the heads of a group do not divide the
// tile, its last rows are empty.
#pragma once

#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/scheduler.cuh"

namespace attention_autotuner {

struct PackedHeads {
  Divider heads;  // that a tile packs: all of a group, or the most that divide it and fit
  int queries;    // of a tile
  int rows;       // heads by queries

  // Of heads that share K and V, in tiles of `block` rows; of one head where they are not packed.
  static PackedHeads of(bool packs, int group, int block) {
    int heads = packs ? minimum(group, block) : 1;
    while (group % heads != 0) --heads;
    return {Divider::by(heads), block / heads, block / heads * heads};
  }
  // The query of a row, of tiles from the first on, and its head, of groups of packed ones.
  __device__ __forceinline__ int query(int tile, int row) const { return tile * queries + heads.divide(row); }
  __device__ __forceinline__ int head(int group, int row) const {
    return group * heads.divisor + row - heads.divide(row) * heads.divisor;
  }
};

}  // namespace attention_autotuner

// A warp's product of two operands, sixteen columns of the common dimension at a time.
#pragma once

#include "attention_autotuner/common/warp_mma.cuh"
#include "attention_autotuner/common/tile.cuh"

namespace attention_autotuner {

// Where a lane reads a tile, from a start on by whole matrices: steps within a run of `Width` columns that starts at a
// multiple of that width, plus the 8 columns that lanes may point beyond.
template <typename Tile, int Width>
class Operand {
 public:
  __device__ __forceinline__ Operand(uint32_t tile, int row, int column)
      : tile_(tile), row_(row), column_(column), address_(tile + Tile::offset(row, column)) {}
  __device__ __forceinline__ uint32_t at(int rows, int columns) const {
    if constexpr (Tile::template advances<Width>()) {
      return Tile::advance(address_, rows, columns);
    } else {
      return tile_ + Tile::offset(row_ + rows, column_ + columns);
    }
  }

 private:
  uint32_t tile_;
  int row_, column_;
  uint32_t address_;
};

template <int RowTiles, int ColumnTiles>
using Accumulators = float[RowTiles][ColumnTiles][4];

template <int RowTiles, int ColumnTiles>
__device__ __forceinline__ void clear(Accumulators<RowTiles, ColumnTiles>& accumulators) {
#pragma unroll
  for (auto& row : accumulators) {
#pragma unroll
    for (auto& tile : row) {
#pragma unroll
      for (float& value : tile) value = 0.0f;
    }
  }
}

// accumulators += A B over one step of 16: `b(j, registers)` loads B's fragments for column tiles j and j + 1;
// `between(j / 2)` is other work to interleave.
template <typename Element, int RowTiles, int ColumnTiles, typename LoadB, typename Between>
__device__ __forceinline__ void multiply_step(Accumulators<RowTiles, ColumnTiles>& accumulators,
                                              uint32_t const (&a)[RowTiles][4], LoadB&& load_b, Between&& between) {
#pragma unroll
  for (int j = 0; j < ColumnTiles; j += 2) {
    uint32_t b[4];
    load_b(j, b);
#pragma unroll
    for (int i = 0; i < RowTiles; ++i) {
      mma_m16n8k16<Element>(accumulators[i][j], a[i], b[0], b[1]);
      mma_m16n8k16<Element>(accumulators[i][j + 1], a[i], b[2], b[3]);
    }
    between(j / 2);
  }
}

// accumulators += A B over `Steps` steps, A's rows and B's columns both stored along the common dimension: A at
// `a_address` (as lane_row_a points), B at `b_address` (as lane_row_b points); `between(step)` is other work.
template <typename Element, typename TileA, typename TileB, int Steps, int RowTiles, int ColumnTiles, typename Between>
__device__ __forceinline__ void multiply_rows(Accumulators<RowTiles, ColumnTiles>& accumulators, uint32_t a_address,
                                              uint32_t b_address, Between&& between) {
#pragma unroll
  for (int step = 0; step < Steps; ++step) {
    uint32_t a[RowTiles][4];
#pragma unroll
    for (int i = 0; i < RowTiles; ++i) load_matrix_x4(a[i], TileA::advance(a_address, 16 * i, 16 * step));
    multiply_step<Element>(
        accumulators, a,
        [&](int j, uint32_t (&b)[4]) { load_matrix_x4(b, TileB::advance(b_address, 8 * j, 16 * step)); }, [](int) {});
    between(step);
  }
}

}  // namespace attention_autotuner

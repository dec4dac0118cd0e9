// MMAs of one warp: mma.sync m16n8k16 with fp32 accumulation, and GEMMs of tiles in shared memory made of them.
//
// Family sm80 is built on them, and so are the kernels that serve both families.
//
// Fragment layouts are the PTX ones. Within a warp, lane l holds rows g = l / 4 and g + 8 and columns 2 (l % 4) + {0,
// 1} of every 16x8 accumulator tile. Two neighbouring accumulator tiles, converted to 16 bits, are the A operand of a
// 16x16 step: this is what keeps P in registers between the two MMAs of attention.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "attention_autotuner/common/shared_memory.cuh"

namespace attention_autotuner {

// d = c + a * b for one 16x8x16 step.
template <typename Element>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1,
                                             float const (&c)[4]) {
  if constexpr (std::is_same_v<Element, __half>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %11, %12, %13};\n"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
  } else {
    static_assert(std::is_same_v<Element, __nv_bfloat16>, "element type must be __half or __nv_bfloat16");
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %11, %12, %13};\n"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
  }
}

// d += a * b
template <typename Element>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1) {
  mma_m16n8k16<Element>(d, a, b0, b1, d);
}

// Where lane l points for the operands of a 16x16 step that starts at (row, column) (0, 0) of a shared-memory tile.
struct LaneRow {
  int row;
  int column;
};

// A operand (rows x k), and also the transposed B operand read from a (k x columns) tile: rows 0-15 by lane, then the
// right half of the columns.
__device__ __forceinline__ LaneRow lane_row_a(int lane) { return {lane & 15, (lane >> 4) * 8}; }

// B operand read from a (columns x k) tile: two column tiles of eight, each with both halves of k.
__device__ __forceinline__ LaneRow lane_row_b(int lane) {
  return {(lane & 7) + ((lane >> 4) & 1) * 8, ((lane >> 3) & 1) * 8};
}

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
__device__ __forceinline__ void gemm_step(Accumulators<RowTiles, ColumnTiles>& accumulators,
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
__device__ __forceinline__ void gemm(Accumulators<RowTiles, ColumnTiles>& accumulators, uint32_t a_address,
                                     uint32_t b_address, Between&& between) {
#pragma unroll
  for (int step = 0; step < Steps; ++step) {
    uint32_t a[RowTiles][4];
#pragma unroll
    for (int i = 0; i < RowTiles; ++i) load_matrix_x4(a[i], TileA::advance(a_address, 16 * i, 16 * step));
    gemm_step<Element>(
        accumulators, a,
        [&](int j, uint32_t (&b)[4]) { load_matrix_x4(b, TileB::advance(b_address, 8 * j, 16 * step)); }, [](int) {});
    between(step);
  }
}

}  // namespace attention_autotuner

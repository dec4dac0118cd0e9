// dQ in a key pass: the share of a block of keys, computed by all warps of a CTA and added to fp32 sums in global
// memory.
#pragma once

#include "attention_autotuner/common/shared_memory.cuh"
#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/common/warp_mma.cuh"
#include "attention_autotuner/scores_backward_sm80/pass.cuh"
#include "attention_autotuner/sm80/operand.cuh"

namespace attention_autotuner {

// Sums of dQ are kept as 16x8 tiles in fragment order, so that additions are dense: lane after lane where one
// instruction adds four floats, element after element where it adds one.
__device__ constexpr bool adds_by_lane() {
#if __CUDA_ARCH__ >= 900
  return true;
#else
  return false;
#endif
}

__device__ __forceinline__ void add_fragment(float* tile, int lane, float const (&values)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"l"(tile + 4 * lane), "f"(values[0]), "f"(values[1]),
               "f"(values[2]), "f"(values[3])
               : "memory");
#else
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    asm volatile("red.global.add.f32 [%0], %1;\n" ::"l"(tile + 32 * e + lane), "f"(values[e]) : "memory");
  }
#endif
}

// sums += dS K for one tile of queries: dS lies transposed at `ds`, K at `k`. The warps of the CTA split rows and
// columns as T::kDqSplit says. `copy_part(part, num_parts)` is called along the way.
template <typename T, typename CopyPart>
__device__ __forceinline__ void add_dq_share(uint32_t ds, uint32_t k, float* sums, CopyPart&& copy_part) {
  using Element = typename T::Element;
  constexpr int kSteps = T::kBlockN / 16;
  constexpr int kRows = 16 * T::kDqRowTiles, kColumns = 16 * T::kDqColumnPairs;
  // Where registers are scarce, what is needed late is computed again: see recompute_here.
  int const lane = lane_here(), warp = thread_index() >> 5;
  auto late_lane = [lane] { return T::kRegistersScarce ? lane_here() : lane; };
  int const row0 = warp % T::kDqSplit.warps_m * kRows;
  int const column0 = (T::kRegistersScarce ? thread_index() >> 5 : warp) / T::kDqSplit.warps_m * kColumns;
  LaneRow const a = lane_row_a(lane), b = lane_row_b(lane);
  Operand<typename T::TileDs, kRows> const ds_tile(ds, b.row, row0 + b.column);
  Operand<typename T::TileK, kColumns> const k_tile(k, a.row, column0 + a.column);
  // Where the columns do not divide among the warps, the last ones have fewer.
  auto exists = [&](int column) { return T::kDqEven || column0 + column < T::kPaddedDimQK; };

  Accumulators<T::kDqRowTiles, 2 * T::kDqColumnPairs> dq;
  clear(dq);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    uint32_t w[T::kDqRowTiles][4];
#pragma unroll
    for (int i = 0; i < T::kDqRowTiles; ++i) load_matrix_x4_transposed(w[i], ds_tile.at(16 * step, 16 * i));
#pragma unroll
    for (int j = 0; j < T::kDqColumnPairs; ++j) {
      if (exists(16 * j)) {
        uint32_t x[4];
        load_matrix_x4_transposed(x, k_tile.at(16 * step, 16 * j));
#pragma unroll
        for (int i = 0; i < T::kDqRowTiles; ++i) {
          mma_m16n8k16<Element>(dq[i][2 * j], w[i], x[0], x[1]);
          mma_m16n8k16<Element>(dq[i][2 * j + 1], w[i], x[2], x[3]);
        }
      }
    }
    copy_part(step, kSteps);
  }
  constexpr int kTilesPerRow = T::kPaddedDimQK / 8;
  float* const first = sums + (row0 / 16 * kTilesPerRow + column0 / 8) * 128;
#pragma unroll
  for (int i = 0; i < T::kDqRowTiles; ++i) {
#pragma unroll
    for (int j = 0; j < 2 * T::kDqColumnPairs; ++j) {
      if (exists(8 * j)) add_fragment(first + (i * kTilesPerRow + j) * 128, late_lane(), dq[i][j]);
    }
  }
}

}  // namespace attention_autotuner

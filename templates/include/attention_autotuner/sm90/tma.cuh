// Copies of tiles between global and shared memory by the tensor memory accelerator (TMA).
#pragma once

#include <cuda.h>

#include <cstdint>

#include "attention_autotuner/common/shared_memory.cuh"
#include "attention_autotuner/sm90/pipeline.cuh"
#include "attention_autotuner/sm90/swizzle.cuh"

namespace attention_autotuner {

// A TMA tile of a tensor [batch, heads, rows, columns], on its way into shared memory. What lies outside arrives as
// zeros. CUTLASS has the same over generic pointers and with a cache hint.
__device__ __forceinline__ void tma_load(uint32_t target, CUtensorMap const& descriptor, uint32_t barrier, int column,
                                         int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];\n" ::"r"(target),
      "l"(&descriptor), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}
__device__ __forceinline__ void prefetch_descriptor(CUtensorMap const& descriptor) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(&descriptor) : "memory");
}

// A tensor with what a TMA descriptor cannot say: dimensions that all share their memory are visited at 0.
struct TmaTensor {
  CUtensorMap descriptor;
  int head_step, batch_step;  // 0 or 1
};

// A tile of `Rows` by `Columns` on its way into shared memory, as blocks of 64 columns.
template <int Rows, int Columns>
__device__ __forceinline__ void load_tile(uint32_t target, TmaTensor const& tensor, uint32_t full, int row, int column,
                                          int head, int batch) {
#pragma unroll
  for (int block = 0; block < Columns / kSwizzleColumns; ++block) {
    tma_load(target + block * Rows * kSwizzleRowBytes, tensor.descriptor, full, column + block * kSwizzleColumns, row,
             head * tensor.head_step, batch * tensor.batch_step);
  }
}
// The same, and nothing else is what the phase of `full` waits for.
template <int Rows, int Columns>
__device__ __forceinline__ void fill_stage(uint32_t target, TmaTensor const& tensor, uint32_t full, int row, int column,
                                           int head, int batch) {
  arrive_and_expect_tx(full, Rows * Columns * 2);
  load_tile<Rows, Columns>(target, tensor, full, row, column, head, batch);
}

// What this thread stored in shared memory is visible to MMAs and TMA.
__device__ __forceinline__ void fence_view_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

// Zeros in the rows from `first` on of a tile that has come, by a whole warp; under racecheck, which knows of no lane
// but the one that arrives after this, by that one alone.
template <int Rows, int Columns>
__device__ __forceinline__ void clear_rows_from(uint32_t tile, int first) {
  constexpr int kLanes = kWarpArrivals > 1 ? 1 : 32;
#pragma unroll 1
  for (int block = 0; block < Columns / kSwizzleColumns; ++block) {
    uint32_t const rows = tile + block * Rows * kSwizzleRowBytes;
#pragma unroll 1
    for (int at = first * kSwizzleRowBytes + 16 * (int(threadIdx.x) & 31);
         at < Rows * kSwizzleRowBytes && (kLanes == 32 || (int(threadIdx.x) & 31) == 0); at += 16 * kLanes) {
      store_shared_four(rows + at, {0, 0, 0, 0});
    }
  }
  fence_view_async_shared();
  __syncwarp();
}

// A TMA tile of shared memory on its way into a tensor [batch, heads, rows, columns]; what lies outside is left out.
__device__ __forceinline__ void tma_store(CUtensorMap const& descriptor, uint32_t source, int column, int row, int head,
                                          int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];\n" ::"l"(&descriptor),
      "r"(source), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
  asm volatile("cp.async.bulk.commit_group;\n" ::: "memory");
}
// Until the tiles that this thread stores have been read from shared memory, but for so many of the latest groups.
template <int kPending = 0>
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;\n" ::"n"(kPending) : "memory");
}

}  // namespace attention_autotuner

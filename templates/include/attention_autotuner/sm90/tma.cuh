// Copies of tiles between global and shared memory by the tensor memory accelerator (TMA).
#pragma once

#include <cuda.h>

#include <cstdint>

#include "attention_autotuner/sm90/pipeline.cuh"
#include "attention_autotuner/sm90/swizzle.cuh"

namespace attention_autotuner {

// A box of a tensor [batch, heads, rows, columns], on its way into shared memory. What lies outside arrives as zeros.
__device__ __forceinline__ void copy_box(uint32_t target, CUtensorMap const& map, uint32_t barrier, int column, int row,
                                         int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];\n" ::"r"(target),
      "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}
__device__ __forceinline__ void prefetch_map(CUtensorMap const& map) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(&map) : "memory");
}

// A tensor with what a map cannot say: dimensions that all share their memory are visited at 0.
struct MappedTensor {
  CUtensorMap map;
  int head_step, batch_step;  // 0 or 1
};

// A tile of `Rows` by `Columns` on its way into shared memory, as blocks of 64 columns.
template <int Rows, int Columns>
__device__ __forceinline__ void copy_tile(uint32_t target, MappedTensor const& tensor, uint32_t full, int row,
                                          int column, int head, int batch) {
#pragma unroll
  for (int block = 0; block < Columns / kSwizzleColumns; ++block) {
    copy_box(target + block * Rows * kSwizzleRowBytes, tensor.map, full, column + block * kSwizzleColumns, row,
             head * tensor.head_step, batch * tensor.batch_step);
  }
}
// The same, and nothing else is what the phase of `full` waits for.
template <int Rows, int Columns>
__device__ __forceinline__ void fetch_tile(uint32_t target, MappedTensor const& tensor, uint32_t full, int row,
                                           int column, int head, int batch) {
  expect_bytes(full, Rows * Columns * 2);
  copy_tile<Rows, Columns>(target, tensor, full, row, column, head, batch);
}

// What this thread stored in shared memory is visible to products and copies of boxes.
__device__ __forceinline__ void publish_stores() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }

// A box of shared memory on its way into a tensor [batch, heads, rows, columns]; what lies outside is left out.
__device__ __forceinline__ void store_box(CUtensorMap const& map, uint32_t source, int column, int row, int head,
                                          int batch) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];\n" ::"l"(&map),
               "r"(source), "r"(column), "r"(row), "r"(head), "r"(batch)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;\n" ::: "memory");
}
// Until the boxes that this thread stores have been read from shared memory.
__device__ __forceinline__ void wait_boxes_read() { asm volatile("cp.async.bulk.wait_group.read 0;\n" ::: "memory"); }

}  // namespace attention_autotuner

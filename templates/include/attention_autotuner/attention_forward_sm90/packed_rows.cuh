// Tiles of packed rows (common/packed_heads.cuh) in shared memory.
#pragma once

#include <cstdint>

#include "attention_autotuner/common/shared_memory.cuh"
#include "attention_autotuner/sm90/swizzle.cuh"
#include "attention_autotuner/sm90/tma.cuh"

namespace attention_autotuner {

// Tiles of keys, counted from the first key; at least one.
struct KeyTiles {
  int first, end;
};

// A tile of packed rows on its way into shared memory, as blocks of `Rows` by 64 columns. The descriptor is of a tensor
// [batch, groups of heads, queries, heads, columns].
template <int Rows, int Columns>
__device__ __forceinline__ void load_packed_rows(uint32_t target, TmaTensor const& tensor, uint32_t full, int query,
                                                 int group, int batch) {
#pragma unroll
  for (int block = 0; block < Columns / kSwizzleColumns; ++block) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, "
        "%7}], [%2];\n" ::"r"(target + block * Rows * kSwizzleRowBytes),
        "l"(&tensor.descriptor), "r"(full), "r"(block * kSwizzleColumns), "r"(0), "r"(query),
        "r"(group * tensor.head_step), "r"(batch * tensor.batch_step)
        : "memory");
  }
}

// Zeros in rows `first` to `end` of a block of 64 columns, by `threads` threads.
__device__ __forceinline__ void clear_rows(uint32_t block, int first, int end, int threads) {
  uint32_t const stop = block + end * kSwizzleRowBytes;
  for (uint32_t at = block + first * kSwizzleRowBytes + 16 * threadIdx.x; at < stop; at += 16 * threads) {
    store_shared_four(at, {0, 0, 0, 0});
  }
}

}  // namespace attention_autotuner

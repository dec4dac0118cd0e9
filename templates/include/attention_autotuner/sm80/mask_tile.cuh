// Tiles of an explicit mask: their copy into shared memory and how a warp multiplies its scores by one.
//
// A mask is [heads or 1, seqlen_q, seqlen_k], shared by the batch. Its rows end anywhere, so a tile that is not whole
// is copied element by element at its end; what lies beyond the tensor arrives as zeros.
//
// Layout: SmemTile, queries as rows.
#pragma once

#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/shared_memory.cuh"
#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/common/tile.cuh"

namespace attention_autotuner {

// The first `elements` of a 16-byte chunk into shared memory, zeros after them.
template <int CopyBytes>
__device__ __forceinline__ void copy_chunk_start(uint32_t destination, uint16_t const* source, int elements) {
  if constexpr (CopyBytes == 16) {
    int const bytes = minimum(maximum(elements, 0), kChunk) * kElementBytes;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(destination), "l"(source), "r"(bytes));
  } else {
    uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      if (i < elements) words[i / 2] |= uint32_t(source[i]) << 16 * (i % 2);
    }
    store_shared_four(destination, {words[0], words[1], words[2], words[3]});
  }
}

// As TileCopy, for a mask.
template <int Rows, int Columns, int Threads, int CopyBytes, bool Padded>
struct MaskCopy : TileCopy<Rows, Columns, Threads, CopyBytes, Padded> {
  using Base = TileCopy<Rows, Columns, Threads, CopyBytes, Padded>;

  template <typename Element>
  __device__ __forceinline__ static void copy(uint32_t target, Element const* pointer, int64_t stride_row, int rows,
                                              int columns) {
    int const thread = thread_index();
    int const rows_left = rows - Base::row(thread), columns_left = columns - Base::column(thread);
    int64_t const pass_stride = Base::kRowsPerPass * recompute_here(stride_row);
#pragma unroll
    for (int pass = 0; pass < Base::kPasses; ++pass) {
      int const first = pass * Base::kRowsPerPass;
      if (first + Base::kRowsPerPass <= Rows || Base::row(thread) + first < Rows) {
#pragma unroll
        for (int step = 0; step < Base::kSteps; ++step) {
          int const column = step * Base::kThreadsPerRow * kChunk;
          bool const exists = first < rows_left && column < columns_left;
          copy_chunk_start<CopyBytes>(Base::Tile::advance(target, first, column),
                                      reinterpret_cast<uint16_t const*>(pointer + column),
                                      exists ? columns_left - column : 0);
        }
      }
      pointer += pass_stride;
    }
  }
};

}  // namespace attention_autotuner

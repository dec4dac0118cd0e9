// Where a warp stands in a CTA whose warps split the rows of a tile, and how the warps that share rows exchange values.
#pragma once

#include "attention_autotuner/common/shared_memory.cuh"
#include "attention_autotuner/common/threads.cuh"

namespace attention_autotuner {

template <typename T>
struct RowWarps {
  uint32_t smem;  // where the CTA's shared memory starts

  // Where this warp stands. Warps that share rows wait for each other, so they are neighbours: each on another
  // scheduler.
  __device__ __forceinline__ static int warp_m() { return (thread_index() >> 5) / T::kWarpsN; }
  __device__ __forceinline__ static int warp_n() { return (thread_index() >> 5) % T::kWarpsN; }

  // Row of the block that accumulator row 8 half + lane / 4 of 16-row tile i is.
  __device__ __forceinline__ static int row_in_block(int i, int half) {
    return (warp_m() * T::kRowTiles + i) * 16 + half * 8 + lane_here() / 4;
  }

  __device__ __forceinline__ uint32_t exchange(int warp, int i, int half) const {
    return smem + T::kRowExchangeOffset + (warp * T::kBlockM + row_in_block(i, half)) * int(sizeof(float));
  }
  // A barrier among the warps that share rows.
  __device__ __forceinline__ void row_barrier() const { named_barrier(1 + warp_m(), 32 * T::kWarpsN); }

  // Combines a per-row value of the warps that share rows, by maximum or sum.
  template <typename Combine>
  __device__ __forceinline__ void combine_rows(float (&value)[T::kRowTiles][2], Combine&& combine) const {
#pragma unroll
    for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if ((lane_here() & 3) == 0) store_shared_float(exchange(warp_n(), i, half), value[i][half]);
      }
    }
    row_barrier();
#pragma unroll
    for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int other = 1; other < T::kWarpsN; ++other) {
          float const theirs = load_shared_float(exchange((warp_n() + other) % T::kWarpsN, i, half));
          value[i][half] = combine(value[i][half], theirs);
        }
      }
    }
  }
};

}  // namespace attention_autotuner

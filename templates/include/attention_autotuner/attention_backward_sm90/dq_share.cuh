// A block of keys' share of dQ, added to fp32 sums in global memory; postprocess.cuh makes dQ from those.
//
// Sums are kept as tiles of 16x8 in the order of accumulators: lane after lane, four floats each.
#pragma once

#include <cstdint>

#include "attention_autotuner/attention_backward_sm90/producer.cuh"
#include "attention_autotuner/common/convert.cuh"
#include "attention_autotuner/common/preprocess.cuh"
#include "attention_autotuner/common/shared_memory.cuh"
#include "attention_autotuner/common/sink_gradient.cuh"
#include "attention_autotuner/common/threads.cuh"

namespace attention_autotuner::softmax_backward {

using softmax_forward::advance_desc;
using softmax_forward::fence_accumulators;
using softmax_forward::leads_warpgroup;
using softmax_forward::make_smem_desc;
using softmax_forward::warp_in_warpgroup;
using softmax_forward::warpgroup_arrive;
using softmax_forward::warpgroup_commit_batch;
using softmax_forward::warpgroup_wait;

// Shares on their way to the thread that stores and adds them (dq_sender.cuh), each warpgroup's part by itself.
template <typename T>
struct SentDq {
  using Stages = BackwardPassSm90Stages<T>;
  using Ring = BarrierRing<T::kStoredDq ? T::kDqSlots : 1>;

  __device__ __forceinline__ static uint32_t tile(Stages const& stages, int index) {
    return stages.smem + T::kDqOffset + index % T::kDqStages * T::kDqTileBytes;
  }
  __device__ __forceinline__ static uint32_t full(Stages const& stages, int slot, int part) {
    return stages.full(T::kDqBarrier + slot * T::kDqParts + part, 0);
  }
  __device__ __forceinline__ static uint32_t empty(Stages const& stages, int slot, int part) {
    return stages.empty(T::kDqBarrier + slot * T::kDqParts + part, 0);
  }
  // Until the share that was last in the same place has left, and once this warp's sums are there.
  __device__ __forceinline__ static void acquire(Stages const& stages, int index, int part) {
    int const after = index + T::kDqSlots - T::kDqStages;
    wait(empty(stages, Ring::stage(after), part), Ring::phase(after) ^ 1);
  }
  __device__ __forceinline__ static void hand_over(Stages const& stages, int index, int part) {
    fence_view_async_shared();
    if (warp_arrives()) arrive(full(stages, Ring::stage(index), part));
  }
};

// The part of a share that one warpgroup computes at a time: 64 rows of queries from `row` on, columns from `column`
// on.
template <typename T>
struct DqShareSm90 {
  using Element = typename T::Element;
  using Sums = float[T::kDqMmaColumns / 2];
  Sums sums;  // where orders have no other registers for it

  // dS K with dS [queries, keys] at `ds` and K at `k`.
  __device__ __forceinline__ void issue(uint32_t ds, uint32_t k, int row, int column) {
    issue(sums, ds, k, row, column);
  }
  __device__ __forceinline__ static void issue(Sums& sums, uint32_t ds, uint32_t k, int row, int column) {
    constexpr int kBlockSteps = kSwizzleColumns / kMmaDepth;
    // Hides where the addresses come from, so that descriptors are computed here and not kept in registers.
    asm volatile("" : "+r"(ds), "+r"(k));
    uint64_t const a = make_smem_desc(ds + row * kSwizzleRowBytes, 0);
    uint64_t const b = make_smem_desc(k + column / kSwizzleColumns * T::kBlockRows * kSwizzleRowBytes,
                                      T::kBlockRows * kSwizzleRowBytes);
    warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < T::kBlockRows / kMmaDepth; ++step) {
      int const block = step / kBlockSteps, within = step % kBlockSteps * kMmaDepth * 2;
      uint64_t const of_ds = advance_desc(a, block * T::kBlockColumns * kSwizzleRowBytes + within);
      uint64_t const of_k = advance_desc(b, step * kMmaDepth * kSwizzleRowBytes);
      if constexpr (T::kSwapsDq) {
        Wgmma<T::kDqMmaColumns>::template ss<Element, 0, 1>(sums, of_k, of_ds, step > 0);
      } else {
        Wgmma<T::kDqMmaColumns>::template ss<Element, 1>(sums, of_ds, of_k, step > 0);
      }
    }
    warpgroup_commit_batch();
  }

  // Adds it, once it is complete, to the sums of its tile, which start at `tile`; or puts it into shared memory of this
  // warp, at `stage`, for `send`.
  __device__ __forceinline__ void add(float* tile, int row, int column, uint32_t stage) {
    add(sums, tile, row, column, stage);
  }
  __device__ __forceinline__ static void add(Sums& sums, float* tile, int row, int column, uint32_t stage) {
    fence_accumulators(sums);
    float* const first = place(tile, row, column);
    if constexpr (T::kBulkDq) wait_for_reads();
    if constexpr (T::kStoredDq) stage += 4 * offset(row, column);
#pragma unroll
    for (int g = 0; g < T::kDqMmaColumns / 8; ++g) {
      // The last columns may be none of dQ's; in this warp's own shared memory they do no harm.
      bool const takes = T::kBulkDq || T::kSwapsDq || T::kDepth % T::kDqColumns == 0 || column + 8 * g < T::kDepth;
      if (!takes) continue;
      float const a = sums[4 * g], b = sums[4 * g + 1], c = sums[4 * g + 2], d = sums[4 * g + 3];
      if constexpr (T::kBulkDq || T::kStoredDq) {
        store_shared_float4(stage + 512 * g + 16 * lane_index(), make_float4(a, b, c, d));
      } else {
        add_four(first + 128 * g + 4 * lane_index(), a, b, c, d);
      }
    }
  }
  // Of bulk additions; apart, because the fence waits for the stores, which other work can cover.
  __device__ __forceinline__ static void send(float* tile, int row, int column, uint32_t stage) {
    if constexpr (T::kBulkDq) {
      fence_view_async_shared();
      __syncwarp();
      if (lane_index() == 0) {
        bulk_copy(place(tile, row, column), stage,
                  64 * (T::kSwapsDq ? T::kBlockColumns : minimum(T::kDqColumns, T::kDepth - column)), false);
        bulk_commit();
      }
    }
  }
  // Where this warp's sums of a tile start.
  __device__ __forceinline__ static float* place(float* tile, int row, int column) {
    return tile + offset(row, column);
  }
  __device__ __forceinline__ static int offset(int row, int column) {
    if constexpr (T::kSwapsDq) return (column / 16 + warp_in_warpgroup()) * (T::kBlockColumns / 8) * 128;
    constexpr int kTilesPerRow = T::kDepth / 8;
    return ((row / 16 + warp_in_warpgroup()) * kTilesPerRow + column / 8) * 128;
  }
};

// Which tile of queries of all, and where its sums start.
template <typename T>
__device__ __forceinline__ int64_t dq_tile_index(BackwardPassSm90Stages<T> const& stages, Cursor const& now) {
  auto const& common = stages.arguments.common;
  int64_t const tile = (int64_t(stages.batch) * common.params.heads_q + now.head) * common.dq_tiles + now.tile;
  if constexpr (T::kPacked) return tile + stages.sequence.first_query / T::kBlockColumns + stages.sequence.number;
  return tile;
}
template <typename T>
__device__ __forceinline__ float* dq_tile(BackwardPassSm90Arguments<typename T::Params> const& arguments,
                                          int64_t index) {
  return arguments.common.dq_sum + index * (T::kBlockColumns * T::kDepth);
}

// Around the additions of one warpgroup to its part of a tile: shares come in the order of their blocks of keys. All
// blocks before one that sees a tile of queries see it as well, from block 0 or, in windows, from the first one on, so
// that a semaphore counts them.
template <typename T>
struct DqSemaphore {
  int* place;
  int block, barrier;

  __device__ __forceinline__ DqSemaphore(BackwardPassSm90Stages<T> const& stages, int64_t tile, Cursor const& now,
                                         int part, int barrier)
      : place(stages.arguments.semaphores + tile * T::kDqParts + part), block(stages.row_block), barrier(barrier) {
    if constexpr (T::kOrdered) {
      if constexpr (T::kModified) {
        block -= stages.common().first_key(now.tile * T::kBlockColumns) / T::kBlockRows;
      }
      if (leads_warpgroup()) semaphore_wait(place, block);
      named_barrier(barrier, kWarpgroupThreads);
    }
  }
  __device__ __forceinline__ void release() const {
    if constexpr (T::kOrdered) {
      fence_device();
      named_barrier(barrier, kWarpgroupThreads);
      if (leads_warpgroup()) semaphore_release(place, block + 1);
    }
  }
};

// By a thread that added shares of dQ by bulk copies: those of this tile are in global memory, all but so many of its
// latest copies.
template <typename T, int kPending = 0>
__device__ __forceinline__ void count_head(BackwardPassSm90Stages<T> const& stages) {
  if constexpr (T::kCountsHeads) {
    auto const& common = stages.arguments.common;
    int const heads = common.params.heads_kv, splits = common.splits.divisor;
    int* const counter = stages.arguments.complete + (stages.batch * heads + stages.kv_head) * splits + stages.split;
    if (stages.steps() == 0) stages.wait_for_preprocess();  // which clears the counters, and no load waited for it
    bulk_wait_written<kPending>();
    count_complete(counter);
  }
}

// Whether blocks are listed beside the preprocess: the only pass waits for both.
template <typename Config>
inline constexpr bool kListsAhead =
    ScoreModsOf<Config>::kPacked && Config::kDecomposition == Decomposition::kFused && Config::kEarlyLaunches;
// Whether the preprocess is the first kernel of a call, and not beside one that lists blocks or finds spans.
template <typename Config>
inline constexpr bool kPreprocessBegins = !ScoreModsOf<Config>::kSpanned && !kListsAhead<Config>;

// The preprocess, where the pass begins before its end. What may run beside it has ended when this one has.
template <typename Config>
__global__ void __launch_bounds__(kRowThreads)
    attention_backward_sm90_preprocess(ArgumentsOf<Config> const __grid_constant__ arguments, int64_t clear_words) {
  if constexpr (kPreprocessBegins<Config>) wait_on_dependent_grids();
  launch_dependent_grids();
  preprocess_rows<Config, true>(arguments, clear_words);
  if constexpr (!kPreprocessBegins<Config>) wait_on_dependent_grids();
}

}  // namespace attention_autotuner::softmax_backward

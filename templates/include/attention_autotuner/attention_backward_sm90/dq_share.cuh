// A block of keys' share of dQ, added to fp32 sums in global memory, and dQ from those.
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

// The preprocess, where the pass begins before its end. A kernel that lists blocks or finds spans may run beside it,
// and has ended when this one has.
template <typename Config>
__global__ void __launch_bounds__(kRowThreads)
    attention_backward_sm90_preprocess(ArgumentsOf<Config> const __grid_constant__ arguments, int64_t clear_words) {
  launch_dependent_grids();
  preprocess_rows<Config, true>(arguments, clear_words);
  if constexpr (ScoreModsOf<Config>::kListed) wait_on_dependent_grids();
}

// Zeros as dQ of a tile of queries.
template <typename T, typename Params>
__device__ __forceinline__ void clear_dq(Params const& p, typename T::Element* out, int first_row, int tile, int rows) {
  constexpr int kChunks = T::kDepth / 8;
  for (int unit = threadIdx.x; unit < T::kBlockColumns * kChunks; unit += kRowThreads) {
    int const row = tile * T::kBlockColumns + unit / kChunks, column = unit % kChunks * 8;
    if (row < rows && column < p.dim_qk) {
      *reinterpret_cast<uint4*>(out + int64_t(first_row + row) * p.dq.stride_row + column) = make_uint4(0, 0, 0, 0);
    }
  }
}

// How many CTAs find the gradient of sinks, before those that convert dQ.
template <typename Config, typename Params>
__host__ __device__ inline int sink_ctas(Params const& p) {
  if constexpr (ScoreModsOf<Config>::kSinks) return p.dsinks == nullptr ? 0 : p.heads_q;
  return 0;
}
// Of the others: which tile of queries a CTA has, and how many there are.
template <typename Config>
__device__ __forceinline__ unsigned converted_tile(ArgumentsOf<Config> const& arguments) {
  return blockIdx.x - unsigned(sink_ctas<Config>(arguments.params));
}
template <typename Config>
__device__ __forceinline__ int64_t count_converted(ArgumentsOf<Config> const& arguments) {
  return int64_t(gridDim.x) - sink_ctas<Config>(arguments.params);
}

// dQ in 16 bits from the sums of a tile of queries.
template <typename Config, typename T>
__device__ __forceinline__ void convert_dq(ArgumentsOf<Config> const& arguments) {
  using Element = typename T::Element;
  auto const& p = arguments.params;
  int const index = int(converted_tile<Config>(arguments)) / arguments.dq_tiles;
  int tile = int(converted_tile<Config>(arguments)) % arguments.dq_tiles, rows = p.seqlen_q, first_row = 0;
  if constexpr (T::kPacked) {
    CuSeqlens const queries = CuSeqlens::of_queries(p);
    SequenceBlock const at = find_block_by_warp<T::kBlockColumns>(queries, tile);
    if (!at.exists) return;
    tile = at.block;
    rows = queries.length(at.sequence);
    first_row = queries.begin(at.sequence);
  }
  int const head = index % p.heads_q, batch = index / p.heads_q;
  float const* const sums =
      arguments.dq_sum + int64_t(converted_tile<Config>(arguments)) * (T::kBlockColumns * T::kDepth);
  Element* const out = static_cast<Element*>(p.dq.data) + batch * p.dq.stride_batch + head * p.dq.stride_head;
  float const scale = score_scale(p);
  if constexpr (T::kStoredDq) {
    // Sums of a tile that no block of keys sees were never stored, and may be anything. Semaphores follow the sums.
    auto const* const semaphores = reinterpret_cast<int const*>(arguments.dq_sum + count_converted<Config>(arguments) *
                                                                                       (T::kBlockColumns * T::kDepth));
    if (semaphores[converted_tile<Config>(arguments)] == 0) return clear_dq<T>(p, out, first_row, tile, rows);
  }
  if constexpr (T::kSwapsDq) {
    // A unit is two rows of queries of a tile of 16 columns by 8 queries.
    constexpr int kQueryTiles = T::kBlockColumns / 8;
    for (int unit = threadIdx.x; unit < T::kDepth / 16 * kQueryTiles * 4; unit += kRowThreads) {
      int const fragment = unit / 4, column = fragment / kQueryTiles * 16;
      int const row = tile * T::kBlockColumns + fragment % kQueryTiles * 8 + unit % 4 * 2;
      auto const* const source = reinterpret_cast<float4 const*>(sums + int64_t(fragment) * 128) + unit % 4;
      uint32_t words[2][8];
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        float4 const a = source[8 * pair], b = source[8 * pair + 4];
        words[0][pair] = pack_pair<Element>(a.x * scale, b.x * scale);
        words[1][pair] = pack_pair<Element>(a.y * scale, b.y * scale);
        words[0][4 + pair] = pack_pair<Element>(a.z * scale, b.z * scale);
        words[1][4 + pair] = pack_pair<Element>(a.w * scale, b.w * scale);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int const query = i / 2, half = i % 2;
        if (row + query < rows && column + 8 * half < p.dim_qk) {
          *reinterpret_cast<uint4*>(out + int64_t(first_row + row + query) * p.dq.stride_row + column + 8 * half) =
              make_uint4(words[query][4 * half], words[query][4 * half + 1], words[query][4 * half + 2],
                         words[query][4 * half + 3]);
        }
      }
    }
    return;
  }
  constexpr int kColumnTiles = T::kDepth / 8;
  // A unit is one row of a tile of 16x8, and the row eight below it.
#pragma unroll 2
  for (int unit = threadIdx.x; unit < T::kBlockColumns / 16 * kColumnTiles * 8; unit += kRowThreads) {
    int const fragment = unit / 8, column = fragment % kColumnTiles * 8;
    int const row = tile * T::kBlockColumns + fragment / kColumnTiles * 16 + unit % 8;
    auto const* const source = reinterpret_cast<float4 const*>(sums + int64_t(fragment) * 128 + unit % 8 * 16);
    uint32_t words[2][4];
#pragma unroll
    for (int lane = 0; lane < 4; ++lane) {
      float4 const four = source[lane];
      words[0][lane] = pack_pair<Element>(four.x * scale, four.y * scale);
      words[1][lane] = pack_pair<Element>(four.z * scale, four.w * scale);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row + 8 * half < rows && column < p.dim_qk) {
        *reinterpret_cast<uint4*>(out + int64_t(first_row + row + 8 * half) * p.dq.stride_row + column) =
            make_uint4(words[half][0], words[half][1], words[half][2], words[half][3]);
      }
    }
  }
}
// How many blocks of keys a head has: known at launch, or of packed sequences once they are listed.
template <bool kPacked>
struct HeadBlocks {
  int blocks;
  static HeadBlocks of(int blocks, BlockList const&) { return {blocks}; }
  __device__ __forceinline__ int count() const { return blocks; }
};
template <>
struct HeadBlocks<true> {
  int const* listed;
  static HeadBlocks of(int, BlockList const& list) { return {list.count}; }
  __device__ __forceinline__ int count() const { return *listed; }
};
// One CTA a tile of queries. Where `blocks` blocks of keys count a head as complete, its tiles need not wait for
// others: while the last blocks of keys run, SMs that have no more of these convert the heads before. The last CTA
// stays until the pass has ended, so that the end of this kernel is the end of both.
template <typename Config, typename T>
__global__ void __launch_bounds__(kRowThreads)
    attention_backward_sm90_convert_dq(ArgumentsOf<Config> const __grid_constant__ arguments, int const* complete,
                                       HeadBlocks<T::kPacked> blocks) {
  constexpr bool kSinks = ScoreModsOf<Config>::kSinks;
  bool const of_sinks = kSinks && blockIdx.x < unsigned(sink_ctas<Config>(arguments.params));
  if constexpr (T::kCountsHeads) {
    if (threadIdx.x == 0) {
      auto const& p = arguments.params;
      // For sinks the first one, whose blocks of keys have seen the end of the preprocess.
      int const head = of_sinks ? 0 : int(converted_tile<Config>(arguments)) / arguments.dq_tiles;
      int const sharing = arguments.splits.divide(p.heads_q / p.heads_kv);
      wait_complete(complete + head / sharing, blocks.count() * T::kHeadCounts);
    }
    __syncthreads();
  } else if constexpr (T::kEarly) {
    wait_on_dependent_grids();
  }
  if constexpr (kSinks) {
    if (of_sinks) return sink_gradient_of_head<Config, kRowThreads>(arguments, int(blockIdx.x));
  }
  convert_dq<Config, T>(arguments);
  if constexpr (T::kCountsHeads) {
    if (blockIdx.x == gridDim.x - 1) wait_on_dependent_grids();
  }
}

}  // namespace attention_autotuner::softmax_backward

// The gradient of attention's bias table, of either family: entry D + d gets the sum of dS = P (dP - delta) over the
// batch and over all pairs whose key is d past its query's diagonal, clamped to +-D.
//
// A kernel of its own computes S and dP again, and is launched only where the gradient is wanted. Tiles hang on the
// diagonal: tile t of a block of queries begins 128 t keys past the diagonal of its first query, so that an element of
// the accumulators is as far past the diagonal in every tile of the same t. A CTA adds up tiles of one t element by
// element, in registers, and adds along diagonals once, at its end. Tiles that are D or more from the diagonal
// altogether share an entry, and CTAs of either side add up all of these. What CTAs have found goes to the workspace,
// which a second kernel adds in a fixed order: the result is the same bits every time.
#pragma once

#include <cstdint>

#include "attention_autotuner/common/preprocess.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/score_gradient.cuh"
#include "attention_autotuner/common/sequences.cuh"
#include "attention_autotuner/common/shared_memory.cuh"
#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/host/checks.cuh"
#include "attention_autotuner/host/entry.cuh"
#include "attention_autotuner/score/modifications.cuh"

namespace attention_autotuner {

inline constexpr int kBiasDiagonals = 2 * kScoreTile - 1;  // of a tile
inline constexpr int kBiasSums = kBiasDiagonals + 3;       // of a CTA: diagonals, the far sides, padding
inline constexpr int kBiasLine = kScoreTile + 8;           // floats of a row of dS on its way to sums of diagonals
inline constexpr int kBiasCtas = 1024;                     // or more, of a pass over near or far tiles

// The CTAs of a launch, head by head: `near_parts` for each of `near` tiles from t = `first_near` on, then `far_parts`
// for the tiles before these and as many for those behind. Parts share the blocks of queries.
struct BiasGradientList {
  int blocks;      // of queries, of all batch entries
  int row_blocks;  // of one
  int first_near, near, near_parts, far_parts;
  float* sums;  // workspace: [heads_q, CTAs of a head, kBiasSums]

  __host__ __device__ int ctas() const { return near * near_parts + 2 * far_parts; }
};

template <typename Config>
struct BiasGradientWarp : ScoreGradientTile<Config> {
  using Base = ScoreGradientTile<Config>;
  using Arguments = typename Base::Arguments;
  using Base::smem;
  using Base::sum;
  using Base::warp_column;
  using Base::warp_row;
  static constexpr int kSmemBytes = maximum(Base::kSmemBytes, kScoreTile / 2 * kBiasLine * int(sizeof(float)));

  // Adds the tiles of a block of queries from t = `begin` up to `end` that have visible keys.
  __device__ __forceinline__ void add_block(Arguments const& arguments, int batch, int head, int block, int begin,
                                            int end) {
    auto const& p = arguments.params;
    int const row0 = block * kScoreTile, origin = row0 + p.seqlen_k - p.seqlen_q;
    int const last = minimum(row0 + kScoreTile, int(p.seqlen_q)) - 1;
    int const first_key = arguments.first_key(row0), end_key = arguments.visible_keys(last);
    if (first_key >= end_key) return;
    begin = maximum(begin, (first_key - origin) >> 7);
    end = minimum(end, (end_key - origin + kScoreTile - 1) >> 7);
    if (begin >= end) return;
    ScoreTilePlace here{batch, head, row0, origin + kScoreTile * begin};
    this->begin(arguments, here);
#pragma unroll 1
    for (int t = begin; t < end; ++t) {
      ScoreTilePlace const next{batch, head, row0, here.key + kScoreTile};
      this->add_tile(arguments, here, t + 1 < end, next);
      here = next;
    }
  }
  // The sum along diagonal `thread_index()` of the tile, of which the first is that of its last row and first column.
  __device__ __forceinline__ float sum_diagonal() const {
    float total = 0.0f;
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      __syncthreads();
      if (warp_row() / (kScoreTile / 2) == upper) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            int const row = warp_row() % (kScoreTile / 2) + 16 * i + 8 * half + lane_here() / 4;
            uint32_t const line = smem + 4 * (row * kBiasLine + warp_column() + 2 * (lane_here() & 3));
#pragma unroll
            for (int j = 0; j < 8; ++j) {
              store_shared_float2(line + 32 * j, make_float2(sum[i][j][2 * half], sum[i][j][2 * half + 1]));
            }
          }
        }
      }
      __syncthreads();
      for (int row = 0; row < kScoreTile / 2; ++row) {
        int const column = upper * (kScoreTile / 2) + row + thread_index() - (kScoreTile - 1);
        if (column >= 0 && column < kScoreTile) total += load_shared_float(smem + 4 * (row * kBiasLine + column));
      }
    }
    return total;
  }
};

// The sum over a CTA's threads, in the first of them. Shared memory must be free.
__device__ __forceinline__ float sum_threads(uint32_t smem, float value) {
#pragma unroll
  for (int other = 16; other > 0; other /= 2) value += __shfl_xor_sync(0xffffffffu, value, other);
  __syncthreads();
  if (lane_here() == 0) store_shared(smem + thread_index() / 32 * 4, __float_as_uint(value));
  __syncthreads();
  value = 0.0f;
  for (int warp = 0; warp < kScoreThreads / 32; ++warp) value += load_shared_float(smem + 4 * warp);
  return value;
}

template <typename Config>
__global__ void __launch_bounds__(kScoreThreads)
    backward_bias_sums(ArgumentsOf<Config> const __grid_constant__ arguments,
                       BiasGradientList const __grid_constant__ list) {
  extern __shared__ __align__(128) char smem_bytes[];
  auto const& p = arguments.params;
  int const head = block_index() / list.ctas(), cta = block_index() % list.ctas();
  int const near_ctas = list.near * list.near_parts, far = cta - near_ctas;
  bool const is_near = far < 0, before = !is_near && far < list.far_parts;
  int const sharing = is_near ? list.near_parts : list.far_parts, part = (is_near ? cta : far) % sharing;
  int const t = list.first_near + (is_near ? cta / sharing : 0);
  int const begin = is_near ? t : before ? -kUnbounded : list.first_near + list.near;
  int const end = is_near ? t + 1 : before ? list.first_near : kUnbounded;

  BiasGradientWarp<Config> warp{{shared_address(smem_bytes), 0}};
  clear(warp.sum);
#pragma unroll 1
  for (int block = part; block < list.blocks; block += sharing) {
    if constexpr (kIsPacked<Config>) {
      auto const at = find_block<kScoreTile>(CuSeqlens::of_queries(p), block);
      if (!at.exists) continue;
      ArgumentsOf<Config> shown = arguments;
      show_sequence_to_backward<true>(shown, at.sequence);
      warp.add_block(shown, 0, head, at.block, begin, end);
    } else {
      warp.add_block(arguments, block / list.row_blocks, head, block % list.row_blocks, begin, end);
    }
  }

  float const along = warp.sum_diagonal();
  int const past = kScoreTile * t + thread_index() - (kScoreTile - 1);
  bool const low = is_near ? past <= -p.bias_distance : before;
  bool const high = !low && (!is_near || past >= p.bias_distance);
  float* const sums = list.sums + int64_t(block_index()) * kBiasSums;
  if (thread_index() < kBiasDiagonals) sums[thread_index()] = low || high ? 0.0f : along;
  // The last thread has no diagonal, and no element of one.
  float const of_low = sum_threads(warp.smem, low ? along : 0.0f),
              of_high = sum_threads(warp.smem, high ? along : 0.0f);
  if (thread_index() == 0) {
    sums[kBiasDiagonals] = of_low;
    sums[kBiasDiagonals + 1] = of_high;
  }
}

// Entries of a head, 256 for each CTA, then one for the two ends.
template <typename Config>
__global__ void __launch_bounds__(kScoreThreads)
    backward_bias_gradient(ArgumentsOf<Config> const __grid_constant__ arguments,
                           BiasGradientList const __grid_constant__ list) {
  extern __shared__ __align__(128) char smem_bytes[];
  auto const& p = arguments.params;
  int const distance = p.bias_distance, entries = 2 * distance + 1;
  int const ctas = divide_up(entries, kScoreThreads) + 1, head = block_index() / ctas, cta = block_index() % ctas;
  float const* const sums = list.sums + int64_t(head) * list.ctas() * kBiasSums;
  float* const result = p.dbias_table + int64_t(head) * entries;
  if (cta < ctas - 1) {
    int const entry = cta * kScoreThreads + thread_index(), past = entry - distance;
    if (entry < 1 || entry >= entries - 1) return;
    float total = 0.0f;
    // Of the tiles that have it.
    for (int t = past >> 7; t <= (past + kScoreTile - 1) >> 7; ++t) {
      int const diagonal = past - kScoreTile * t + kScoreTile - 1, tile = t - list.first_near;
      if (diagonal < 0 || diagonal >= kBiasDiagonals || tile < 0 || tile >= list.near) continue;
#pragma unroll 4
      for (int part = 0; part < list.near_parts; ++part) {
        total += sums[int64_t(tile * list.near_parts + part) * kBiasSums + diagonal];
      }
    }
    result[entry] = total;
    return;
  }
  float low = 0.0f, high = 0.0f;
  for (int other = thread_index(); other < list.ctas(); other += kScoreThreads) {
    low += sums[int64_t(other) * kBiasSums + kBiasDiagonals];
    high += sums[int64_t(other) * kBiasSums + kBiasDiagonals + 1];
  }
  low = sum_threads(shared_address(smem_bytes), low);
  high = sum_threads(shared_address(smem_bytes), high);
  if (thread_index() == 0) {
    result[0] = distance == 0 ? low + high : low;
    if (distance > 0) result[entries - 1] = high;
  }
}

// The host side, which does nothing for configs without a table and where no gradient is wanted.
template <typename Config>
struct BiasGradient {
  using Arguments = ArgumentsOf<Config>;
  using Params = typename AbiParams<BackwardParamsOf<Config>>::Type;
  static constexpr bool kHas = kHasBiasTable<Config>;
  static_assert(!kHas || !kIsSpanned<Config>, "documents and prefixes take no table of biases");
  static constexpr int kReduceSmemBytes = kScoreThreads / 32 * int(sizeof(float));

  static int32_t prepare(int32_t device) {
    if constexpr (kHas) {
      int resident = 0;
      constexpr int kSmemBytes = BiasGradientWarp<Config>::kSmemBytes;
      int32_t const status = prepare_kernel(backward_bias_sums<Config>, kScoreThreads, kSmemBytes, device, &resident);
      if (status != ATTENTION_AUTOTUNER_OK) return status;
      return prepare_kernel(backward_bias_gradient<Config>, kScoreThreads, kReduceSmemBytes, device, &resident);
    }
    return ATTENTION_AUTOTUNER_OK;
  }
  static BiasGradientList list_of(Params const& p, float* sums) {
    constexpr bool kPacked = kIsPacked<Config>;
    BiasGradientList list{};
    if constexpr (kHas) {
      int const rows = rows_of_queries<kPacked>(p), keys = rows_of_keys<kPacked>(p);
      list.row_blocks = divide_up(rows, kScoreTile);
      list.blocks = kPacked ? count_blocks(rows, p.batch, kScoreTile) : list.row_blocks * p.batch;
      // Tiles with an entry of their own, of those that any sequence has.
      int const reach = (p.bias_distance + kScoreTile - 2) / kScoreTile;
      list.first_near = -minimum(reach, divide_up(keys, kScoreTile));
      list.near = minimum(reach, list.row_blocks) - list.first_near + 1;
      list.near_parts = minimum(list.blocks, divide_up(kBiasCtas, p.heads_q * list.near));
      list.far_parts = minimum(list.blocks, divide_up(kBiasCtas, p.heads_q));
      list.sums = sums;
    }
    return list;
  }
  static int64_t workspace_bytes(Params const& p) {
    if constexpr (kHas) {
      if (p.dbias_table != nullptr) return int64_t(p.heads_q) * list_of(p, nullptr).ctas() * kBiasSums * 4;
    }
    return 0;
  }
  // After the preprocess.
  static int32_t launch([[maybe_unused]] Arguments const& arguments, [[maybe_unused]] float* sums,
                        [[maybe_unused]] cudaStream_t stream) {
    if constexpr (kHas) {
      Params const& p = arguments.params;
      if (p.dbias_table == nullptr) return ATTENTION_AUTOTUNER_OK;
      BiasGradientList const list = list_of(p, sums);
      int64_t const ctas = int64_t(p.heads_q) * list.ctas();
      int64_t const reducing = int64_t(p.heads_q) * (divide_up(2 * p.bias_distance + 1, kScoreThreads) + 1);
      if (ctas > INT32_MAX || reducing > INT32_MAX) return ATTENTION_AUTOTUNER_BAD_SHAPE;
      backward_bias_sums<Config>
          <<<int(ctas), kScoreThreads, BiasGradientWarp<Config>::kSmemBytes, stream>>>(arguments, list);
      cudaError_t const error = cudaGetLastError();
      if (error != cudaSuccess) return cuda_status(error);
      backward_bias_gradient<Config><<<int(reducing), kScoreThreads, kReduceSmemBytes, stream>>>(arguments, list);
      return cuda_status(cudaGetLastError());
    }
    return ATTENTION_AUTOTUNER_OK;
  }
};

}  // namespace attention_autotuner

// Results of a consumer warpgroup on their way to global memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "attention_autotuner/abi.h"
#include "attention_autotuner/attention_backward_sm90/memory.cuh"
#include "attention_autotuner/attention_backward_sm90/traits.cuh"
#include "attention_autotuner/common/convert.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/sequences.cuh"
#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/scores_backward_sm90/epilogue.cuh"
#include "attention_autotuner/sm90/roles.cuh"
#include "attention_autotuner/sm90/stmatrix.cuh"
#include "attention_autotuner/sm90/swizzle.cuh"
#include "attention_autotuner/sm90/tma.cuh"

namespace attention_autotuner::softmax_backward {

inline constexpr int kStoredRows = 16;  // of a TMA tile, those of a warp

// A result of this warp's 16 rows, on its way through this warp's part of the place of results, which nothing else
// reads any more. A TMA tile does not end with a packed sequence.
template <typename T, int Registers, typename Consumer>
__device__ __forceinline__ void store_through(Consumer const& consumer, float const (&result)[Registers],
                                              TmaTensor const& stored, attention_autotuner_tensor const& out,
                                              int columns, float scale) {
  using Element = typename T::Element;
  constexpr int kBlocks = divide_up(2 * Registers, kSwizzleColumns);
  int const first = consumer.group * kWarpgroupRows + kStoredRows * softmax_forward::warp_in_warpgroup();
  int row = consumer.row_block * T::kBlockRows + first;
  if constexpr (T::kPacked) {
    if (row + kStoredRows > consumer.common().params.seqlen_k) {
      attention_autotuner_tensor shifted = out;
      shift_rows(shifted, consumer.sequence.first_key);
      write_gathered<Element>(result, shifted, columns, scale, consumer.batch, consumer.kv_head,
                              consumer.common().params.seqlen_k, row + lane_index() / 4, 0);
      return;
    }
    row += consumer.sequence.first_key;
  }
  uint32_t const tile = consumer.results_tile();
  int const key = lane_index() & 7, here = first + (lane_index() & 8) + key;
#pragma unroll
  for (int i = 0; i < Registers / 8; ++i) {
    uint32_t words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      int const at = 8 * i + 4 * (w / 2) + 2 * (w % 2);
      words[w] = pack_pair<Element>(result[at] * scale, result[at + 1] * scale);
    }
    store_matrix_x4(swizzled_address<T::kBlockRows>(tile, here, 2 * i + (lane_index() >> 4), key), words);
  }
  fence_view_async_shared();
  __syncwarp();
  if (lane_index() == 0) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      tma_store(stored.descriptor, tile + (block * T::kBlockRows + first) * kSwizzleRowBytes, block * kSwizzleColumns,
                row, consumer.kv_head * stored.head_step, consumer.batch * stored.batch_step);
    }
  }
}

// Writes all results of a consumer.
template <typename T, typename Consumer>
__device__ __forceinline__ void write_results(Consumer const& consumer) {
  using Element = typename T::Element;
  auto const& all = consumer.arguments.common;
  auto const& params = all.params;
  auto const& mine = consumer.common().params;
  // With the rows of the sequence.
  auto const of_sequence = [&consumer](attention_autotuner_tensor const& tensor)
      -> std::conditional_t<T::kPacked, attention_autotuner_tensor, attention_autotuner_tensor const&> {
    if constexpr (T::kPacked) {
      attention_autotuner_tensor shifted = tensor;
      shift_rows(shifted, T::kByQueries ? consumer.sequence.first_query : consumer.sequence.first_key);
      return shifted;
    } else {
      return tensor;
    }
  };
  int const row = consumer.lane_row(), batch = consumer.batch;
  auto const write = [&](auto const& result, attention_autotuner_tensor const& out, float* partial, int padded_columns,
                         int columns, float scale, int head, int split, int rows) {
    if constexpr (T::kPacked && !T::kByQueries) {
      if (all.splits.divisor > 1) {
        int64_t first_row = first_partial_row<true>(params, split, 0, head);
        first_row += consumer.sequence.first_key;
        write_partial_sums(result, partial + first_row * padded_columns, padded_columns, rows, row, 0);
        return;
      }
    }
    write_result<Element, T::kGathered>(result, all, of_sequence(out), partial, padded_columns, columns, scale, batch,
                                        head, split, rows, row, 0);
  };
  if constexpr (T::kByQueries) {
    write(consumer.dq_or_dk, params.dq, nullptr, T::kDepth, params.dim_qk, score_scale(params), consumer.head, 0,
          mine.seqlen_q);
  } else {
    if constexpr (T::kHasDs) {
      write(consumer.dq_or_dk, params.dk, all.dk_partial, T::kDepth, params.dim_qk, score_scale(params),
            consumer.kv_head, consumer.split, mine.seqlen_k);
    }
    if constexpr (T::kHasDv) {
      write(consumer.dv, params.dv, all.dv_partial, T::kColumns, params.dim_v, 1.0f, consumer.kv_head, consumer.split,
            mine.seqlen_k);
    }
  }
}

}  // namespace attention_autotuner::softmax_backward

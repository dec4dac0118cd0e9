// Results of a consumer warpgroup on their way to global memory: 4 bytes a lane, or gathered, 16.
//
// Accumulators give a lane two columns of every eight. The four lanes of a row exchange what they have of four times
// eight columns, after which each has eight of its own: a quarter of the stores, and whole sectors of L2.
#pragma once

#include <cstdint>
#include <type_traits>

#include "attention_autotuner/abi.h"
#include "attention_autotuner/common/convert.cuh"
#include "attention_autotuner/common/sequences.cuh"
#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/scores_backward_sm90/epilogue.cuh"

namespace attention_autotuner::softmax_backward {

// Words of four lanes as a matrix, a lane a row: transposed.
__device__ __forceinline__ void transpose_quad(uint32_t (&words)[4]) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    bool const upper = (lane_index() & bit) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & bit) != 0) continue;
      uint32_t& low = words[i];
      uint32_t& high = words[i | bit];
      uint32_t const received = __shfl_xor_sync(0xffffffffu, upper ? low : high, bit);
      low = upper ? received : low;
      high = upper ? high : received;
    }
  }
}

// Writes a warpgroup's rows, scaled, in 16 bits; of tensors aligned to 16 bytes. `row` is the lane's first.
template <typename Element, int Registers>
__device__ __forceinline__ void write_gathered(float const (&result)[Registers], attention_autotuner_tensor const& out,
                                               int columns, float scale, int batch, int head, int rows, int row) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int const i = row + 8 * half;
    Element* const line =
        static_cast<Element*>(out.data) + batch * out.stride_batch + head * out.stride_head + i * out.stride_row;
#pragma unroll
    for (int g = 0; g < Registers / 4; g += 4) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        int const first = 4 * (g + j) + 2 * half;
        words[j] = first < Registers ? pack_pair<Element>(result[first] * scale, result[first + 1] * scale) : 0u;
      }
      transpose_quad(words);
      int const column = 8 * (g + (lane_index() & 3));
      if (i < rows && column < columns) {
        *reinterpret_cast<uint4*>(line + column) = make_uint4(words[0], words[1], words[2], words[3]);
      }
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
    if constexpr (T::kGathered) {
      // Rows that CTAs share go to the workspace in fp32.
      if (partial == nullptr || all.splits.divisor == 1) {
        write_gathered<Element>(result, of_sequence(out), columns, scale, batch, head, rows, row);
        return;
      }
    }
    write_result<Element>(result, all, of_sequence(out), partial, padded_columns, columns, scale, batch, head, split,
                          rows, row, 0);
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

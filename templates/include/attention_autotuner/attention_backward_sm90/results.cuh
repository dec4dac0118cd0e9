// Results of a consumer warpgroup on their way to global memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "attention_autotuner/abi.h"
#include "attention_autotuner/common/convert.cuh"
#include "attention_autotuner/common/sequences.cuh"
#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/scores_backward_sm90/epilogue.cuh"

namespace attention_autotuner::softmax_backward {

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

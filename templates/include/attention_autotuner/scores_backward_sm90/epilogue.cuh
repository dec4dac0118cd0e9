// The epilogue of the passes of retnet's backward in family sm90.
#pragma once

#include "attention_autotuner/abi.h"
#include "attention_autotuner/common/convert.cuh"
#include "attention_autotuner/common/threads.cuh"

namespace attention_autotuner {

// Writes a warpgroup's rows of a result, scaled; or, where CTAs share rows, in fp32 as partial sums. `row` is the
// lane's first and `column` the first of the accumulators.
template <typename Element, int Registers, typename Common>
__device__ __forceinline__ void write_result(float const (&result)[Registers], Common const& common,
                                             attention_autotuner_tensor const& out, float* partial, int padded_columns,
                                             int columns, float scale, int batch, int head, int split, int rows,
                                             int row, int column) {
  auto const& params = common.params;
  bool const shares = partial != nullptr && common.splits.divisor > 1;
  column += 2 * (lane_index() & 3);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int const i = row + 8 * half;
    if (i >= rows) continue;
    if (shares) {
      float* const line =
          partial + (((int64_t(split) * params.batch + batch) * params.heads_kv + head) * rows + i) * padded_columns;
#pragma unroll
      for (int g = 0; g < Registers / 4; ++g) {
        if (column + 8 * g < padded_columns) {
          *reinterpret_cast<float2*>(line + column + 8 * g) =
              make_float2(result[4 * g + 2 * half], result[4 * g + 2 * half + 1]);
        }
      }
    } else {
      Element* const line =
          static_cast<Element*>(out.data) + batch * out.stride_batch + head * out.stride_head + i * out.stride_row;
#pragma unroll
      for (int g = 0; g < Registers / 4; ++g) {
        if (column + 8 * g < columns) {
          *reinterpret_cast<uint32_t*>(line + column + 8 * g) =
              pack_pair<Element>(result[4 * g + 2 * half] * scale, result[4 * g + 2 * half + 1] * scale);
        }
      }
    }
  }
}

}  // namespace attention_autotuner

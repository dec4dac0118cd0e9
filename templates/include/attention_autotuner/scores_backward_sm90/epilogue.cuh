// The epilogue of the passes of backwards in family sm90: 4 bytes a lane, or gathered, 16.
#pragma once

#include <cstdint>

#include "attention_autotuner/abi.h"
#include "attention_autotuner/common/convert.cuh"
#include "attention_autotuner/common/threads.cuh"

namespace attention_autotuner {

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

// Writes a warpgroup's rows of a result in 16 bits, scaled, of tensors aligned to 16 bytes; arguments as below.
// Gathered: the four lanes of a row exchange what they have of four times eight columns, after which each has eight of
// its own. So there are a quarter of the stores, and they are whole sectors of L2. They stream, because L2 has better
// uses than results that nobody reads before the kernel's end.
template <typename Element, int kHalfStep = 8, int Registers>
__device__ __forceinline__ void write_gathered(float const (&result)[Registers], attention_autotuner_tensor const& out,
                                               int columns, float scale, int batch, int head, int rows, int row,
                                               int column) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int const i = row + kHalfStep * half;
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
      int const at = column + 8 * (g + (lane_index() & 3));
      if (i < rows && at < columns) {
        __stcs(reinterpret_cast<uint4*>(line + at), make_uint4(words[0], words[1], words[2], words[3]));
      }
    }
  }
}

// The same of partial sums, in fp32; `partial` is those of a head's first row.
template <int kHalfStep = 8, int Registers>
__device__ __forceinline__ void write_partial_sums(float const (&result)[Registers], float* partial, int padded_columns,
                                                   int rows, int row, int column) {
  column += 2 * (lane_index() & 3);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int const i = row + kHalfStep * half;
    if (i >= rows) continue;
    float* const line = partial + int64_t(i) * padded_columns;
#pragma unroll
    for (int g = 0; g < Registers / 4; ++g) {
      if (column + 8 * g < padded_columns) {
        *reinterpret_cast<float2*>(line + column + 8 * g) =
            make_float2(result[4 * g + 2 * half], result[4 * g + 2 * half + 1]);
      }
    }
  }
}

// Writes a warpgroup's rows of a result, scaled; or, where CTAs share rows, in fp32 as partial sums. `row` is the
// lane's first, the second is kHalfStep further, and `column` the first of the accumulators.
template <typename Element, bool kGathered, int kHalfStep = 8, int Registers, typename Common>
__device__ __forceinline__ void write_result(float const (&result)[Registers], Common const& common,
                                             attention_autotuner_tensor const& out, float* partial, int padded_columns,
                                             int columns, float scale, int batch, int head, int split, int rows,
                                             int row, int column) {
  auto const& params = common.params;
  if constexpr (kGathered) {
    if (partial == nullptr || common.splits.divisor == 1) {
      write_gathered<Element, kHalfStep>(result, out, columns, scale, batch, head, rows, row, column);
      return;
    }
  }
  bool const shares = partial != nullptr && common.splits.divisor > 1;
  column += 2 * (lane_index() & 3);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int const i = row + kHalfStep * half;
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

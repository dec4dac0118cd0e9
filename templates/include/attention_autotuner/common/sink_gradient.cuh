// The gradient of attention's sinks, of either family: sum over rows of exp(sink - LSE) (dLSE - delta).
#pragma once

#include "attention_autotuner/common/backward_arguments.cuh"
#include "attention_autotuner/common/preprocess.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/shared_memory.cuh"
#include "attention_autotuner/score/modifications.cuh"

namespace attention_autotuner {

inline constexpr int kSinkThreads = 256;
inline constexpr int kSinkSmemBytes = kSinkThreads / 32 * int(sizeof(float));

// After the preprocess, one CTA a query head, which adds in the same order every time.
template <typename Config>
__global__ void __launch_bounds__(kSinkThreads)
    backward_sink_gradient(ArgumentsOf<Config> const __grid_constant__ arguments) {
  extern __shared__ __align__(128) char smem_bytes[];
  uint32_t const sums = shared_address(smem_bytes);  // of warps
  auto const& p = arguments.params;
  int const head = blockIdx.x;
  float const sink = Sinks::of(p, head);
  float sum = 0.0f;
  // Rows that are padding add nothing.
  for (int batch = 0; batch < (kIsPacked<Config> ? 1 : p.batch); ++batch) {
    int64_t const first = arguments.lse_delta_offset(batch, head);
    for (int row = threadIdx.x; row < (kIsPacked<Config> ? arguments.lse_delta_rows : p.seqlen_q);
         row += kSinkThreads) {
      sum = fmaf(exp2_approximate(sink - arguments.base[first + row]), arguments.shift[first + row], sum);
    }
  }
#pragma unroll
  for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
  if (threadIdx.x % 32 == 0) store_shared(sums + threadIdx.x / 32 * 4, __float_as_uint(sum));
  __syncthreads();
  if (threadIdx.x == 0) {
    sum = 0.0f;
    for (int warp = 0; warp < kSinkThreads / 32; warp += 2) {
      float2 const two = load_shared_float2(sums + 4 * warp);
      sum += two.x + two.y;
    }
    p.dsinks[head] = sum;
  }
}

}  // namespace attention_autotuner

// The gradient of attention's sinks, of either family: sum over rows of exp(sink - LSE) (dLSE - delta).
#pragma once

#include "attention_autotuner/common/backward_arguments.cuh"
#include "attention_autotuner/common/preprocess.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/score/modifications.cuh"

namespace attention_autotuner {

inline constexpr int kSinkThreads = 256;

// After the preprocess: of a query head, by a CTA, which adds in the same order every time.
template <typename Config, int kThreads>
__device__ __forceinline__ void sink_gradient_of_head(ArgumentsOf<Config> const& arguments, int head) {
  __shared__ float sums[kThreads / 32];  // of warps
  auto const& p = arguments.params;
  float const sink = Sinks::of(p, head);
  float sum = 0.0f;
  // Rows of all sequences, four at a time. Those that are padding add nothing.
  int const fours = arguments.lse_delta_rows / 4, sequences = kIsPacked<Config> ? 1 : p.batch;
#pragma unroll 4
  for (int64_t place = threadIdx.x; place < int64_t(sequences) * fours; place += kThreads) {
    int const sequence = int(place) / fours;
    int64_t const first = arguments.lse_delta_offset(sequence, head) + 4 * (place - int64_t(sequence) * fours);
    float4 const base = *reinterpret_cast<float4 const*>(arguments.base + first);
    float4 const shift = *reinterpret_cast<float4 const*>(arguments.shift + first);
    sum = fmaf(exp2_approximate(sink - base.x), shift.x, sum);
    sum = fmaf(exp2_approximate(sink - base.y), shift.y, sum);
    sum = fmaf(exp2_approximate(sink - base.z), shift.z, sum);
    sum = fmaf(exp2_approximate(sink - base.w), shift.w, sum);
  }
#pragma unroll
  for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kThreads / 32; ++warp) sum += sums[warp];
    p.dsinks[head] = sum;
  }
}
// One CTA a query head.
template <typename Config>
__global__ void __launch_bounds__(kSinkThreads)
    backward_sink_gradient(ArgumentsOf<Config> const __grid_constant__ arguments) {
  sink_gradient_of_head<Config, kSinkThreads>(arguments, blockIdx.x);
}

}  // namespace attention_autotuner

// The rates of ex2 and of fp32 FMA: independent chains in registers, with constants of each thread's own.
#pragma once

#include "attention_autotuner/peaks/random.cuh"
#include "attention_autotuner/peaks/timing.cuh"

namespace attention_autotuner::peaks {

inline constexpr int kChains = 8;  // per thread that do not depend on each other
inline constexpr int kLinks = 16;  // of a chain in one iteration
inline constexpr int kArithmeticThreads = 512;

// x <- 2^(b - a x): one ex2 to one FMA, of which an SM does several times as many.
struct ExpLink {
  static constexpr double kWork = 1.0;
  __device__ static float next(float x, float a, float b) {
    float const argument = fmaf(-a, x, b);
    float y;
    asm volatile("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(argument));
    return y;
  }
};

// x <- a x + b with a below 1: it settles near b / (1 - a), another value in each chain.
struct FmaLink {
  static constexpr double kWork = 2.0;
  __device__ static float next(float x, float a, float b) {
    float y;
    asm volatile("fma.rn.f32 %0, %1, %2, %3;\n" : "=f"(y) : "f"(x), "f"(a), "f"(b));
    return y;
  }
};

template <typename Link>
__global__ void __launch_bounds__(kArithmeticThreads) arithmetic_loop(int iterations, float* sink, Elapsed* elapsed) {
  uint32_t const thread = blockIdx.x * blockDim.x + threadIdx.x;
  float x[kChains];
#pragma unroll
  for (int i = 0; i < kChains; ++i) x[i] = uniform(thread * 16u + i);
  float const a = 0.25f + 0.5f * uniform(thread * 16u + kChains);
  float const b = 0.25f + 0.5f * uniform(thread * 16u + kChains + 1);
  Stopwatch const watch;
#pragma unroll 1
  for (int it = 0; it < iterations; ++it) {
#pragma unroll
    for (int link = 0; link < kLinks; ++link) {
#pragma unroll
      for (int i = 0; i < kChains; ++i) x[i] = Link::next(x[i], a, b);
    }
  }
  watch.stop(elapsed);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kChains; ++i) sum += x[i];
  sink[thread] = sum;
}

template <typename Link>
inline int32_t measure_arithmetic(double seconds, attention_autotuner_peak_result* result) {
  double const work = double(kArithmeticThreads) * kChains * kLinks * Link::kWork;
  return measure_loop(arithmetic_loop<Link>, kArithmeticThreads, 0, work, seconds, result);
}

}  // namespace attention_autotuner::peaks

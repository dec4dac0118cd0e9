// The rate of mma.sync m16n8k16 with fp32 accumulation, operands in registers.
//
// A warp holds a 64x32 tile of accumulators, 16 that do not depend on each other, and two steps of k of both operands,
// so that every instruction brings other operands than the one before.
#pragma once

#include "attention_autotuner/peaks/random.cuh"
#include "attention_autotuner/peaks/timing.cuh"

namespace attention_autotuner::peaks {

inline constexpr int kMmaThreads = 256;
inline constexpr int kMmaRows = 4;     // tiles of 16 rows
inline constexpr int kMmaColumns = 4;  // tiles of 8 columns
inline constexpr int kMmaSteps = 2;    // of k

template <typename Element>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], uint32_t const (&a)[4], uint32_t const (&b)[2]) {
  if constexpr (std::is_same_v<Element, __half>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

template <typename Element>
__global__ void __launch_bounds__(kMmaThreads, 2) mma_loop(int iterations, float* sink, Elapsed* elapsed) {
  uint32_t const thread = blockIdx.x * blockDim.x + threadIdx.x;
  uint32_t a[kMmaSteps][kMmaRows][4], b[kMmaSteps][kMmaColumns][2];
  float d[kMmaRows][kMmaColumns][4];
  uint32_t seed = thread * 64u;
#pragma unroll
  for (int k = 0; k < kMmaSteps; ++k) {
#pragma unroll
    for (int m = 0; m < kMmaRows; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[k][m][i] = normal_pair<Element>(seed++);
    }
#pragma unroll
    for (int n = 0; n < kMmaColumns; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) b[k][n][i] = normal_pair<Element>(seed++);
    }
  }
#pragma unroll
  for (int m = 0; m < kMmaRows; ++m) {
#pragma unroll
    for (int n = 0; n < kMmaColumns; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) d[m][n][i] = uniform(seed + i);
    }
  }
  Stopwatch const watch;
#pragma unroll 1
  for (int it = 0; it < iterations; ++it) {
#pragma unroll
    for (int k = 0; k < kMmaSteps; ++k) {
#pragma unroll
      for (int m = 0; m < kMmaRows; ++m) {
#pragma unroll
        for (int n = 0; n < kMmaColumns; ++n) mma_m16n8k16<Element>(d[m][n], a[k][m], b[k][n]);
      }
    }
  }
  watch.stop(elapsed);
  float sum = 0.0f;
#pragma unroll
  for (int m = 0; m < kMmaRows; ++m) {
#pragma unroll
    for (int n = 0; n < kMmaColumns; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sum += d[m][n][i];
    }
  }
  sink[thread] = sum;
}

template <typename Element>
inline int32_t measure_mma(double seconds, attention_autotuner_peak_result* result) {
  double const warps = kMmaThreads / 32;
  double const work = warps * kMmaSteps * kMmaRows * kMmaColumns * (2.0 * 16 * 8 * 16);
  return measure_loop(mma_loop<Element>, kMmaThreads, 0, work, seconds, result);
}

}  // namespace attention_autotuner::peaks

// The rate of wgmma m64n256k16 with fp32 accumulation, both operands in shared memory with 128-byte swizzle.
//
// Two warpgroups of a CTA have 64 rows each and share 256 columns, so that one always has work queued while the other
// waits. Shared memory holds kWgmmaSteps tiles of 64 elements of k, filled once, with another content for each step.
//
// wgmma exists for sm_90a alone: elsewhere the kernels are empty and measure_wgmma() returns BAD_DEVICE.
#pragma once

#include "attention_autotuner/peaks/random.cuh"
#include "attention_autotuner/peaks/timing.cuh"

namespace attention_autotuner::peaks {

inline constexpr int kWarpgroup = 128;
inline constexpr int kWarpgroups = 2;
inline constexpr int kWgmmaSteps = 4;     // tiles of k
inline constexpr int kRowBytes = 128;     // 64 elements of k: one row of the swizzle
inline constexpr int kGroupBytes = 1024;  // eight rows: after these the pattern of the swizzle repeats
inline constexpr int kInstructionK = 16;  // elements
inline constexpr int kWgmmaM = 64;
inline constexpr int kWgmmaN = 256;
inline constexpr int kRowsBytes = kWgmmaM * kRowBytes;  // of one warpgroup and step
inline constexpr int kColumnsBytes = kWgmmaN * kRowBytes;
inline constexpr int kStepBytes = kWarpgroups * kRowsBytes + kColumnsBytes;
inline constexpr size_t kWgmmaSmemBytes = size_t(kWgmmaSteps) * kStepBytes + kGroupBytes;  // with space to align

// Describes a tile whose rows are 128 bytes of k in shared memory: "Matrix descriptor format" of the PTX ISA, with a
// stride of 1024 bytes from eight rows to the next eight, and layout 1, the 128-byte swizzle. The leading dimension has
// no meaning in this layout.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address) {
  return uint64_t((address & 0x3ffffu) >> 4) | uint64_t(1) << 16 | uint64_t(kGroupBytes >> 4) << 32 | uint64_t(1) << 62;
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

#define ATTENTION_AUTOTUNER_FOUR(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define ATTENTION_AUTOTUNER_SIXTEEN(d, i)                                                                 \
  ATTENTION_AUTOTUNER_FOUR(d, i), ATTENTION_AUTOTUNER_FOUR(d, i + 4), ATTENTION_AUTOTUNER_FOUR(d, i + 8), \
      ATTENTION_AUTOTUNER_FOUR(d, i + 12)
// The accumulators are operands 0 to 127 and the descriptors 128 and 129; then: add to the accumulators, signs as they
// are, both operands with k innermost.
#define ATTENTION_AUTOTUNER_WGMMA(type, d, a, b)                                                                    \
  asm volatile(                                                                                                     \
      "{\n.reg .pred add;\nsetp.ne.b32 add, 1, 0;\n"                                                                \
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type                                                  \
      " {"                                                                                                          \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                      \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                            \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                            \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "                            \
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "                            \
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "                            \
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "                \
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127 "             \
      "}, %128, %129, add, 1, 1, 0, 0;\n}\n"                                                                        \
      : ATTENTION_AUTOTUNER_SIXTEEN(d, 0), ATTENTION_AUTOTUNER_SIXTEEN(d, 16), ATTENTION_AUTOTUNER_SIXTEEN(d, 32),  \
        ATTENTION_AUTOTUNER_SIXTEEN(d, 48), ATTENTION_AUTOTUNER_SIXTEEN(d, 64), ATTENTION_AUTOTUNER_SIXTEEN(d, 80), \
        ATTENTION_AUTOTUNER_SIXTEEN(d, 96), ATTENTION_AUTOTUNER_SIXTEEN(d, 112)                                     \
      : "l"(a), "l"(b))

template <typename Element>
__device__ __forceinline__ void wgmma_m64n256k16(float (&d)[128], uint64_t a, uint64_t b) {
  if constexpr (std::is_same_v<Element, __half>) {
    ATTENTION_AUTOTUNER_WGMMA("f16", d, a, b);
  } else {
    ATTENTION_AUTOTUNER_WGMMA("bf16", d, a, b);
  }
}

#undef ATTENTION_AUTOTUNER_WGMMA
#undef ATTENTION_AUTOTUNER_SIXTEEN
#undef ATTENTION_AUTOTUNER_FOUR

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <typename Element>
__global__ void __launch_bounds__(kWarpgroups* kWarpgroup, 1)
    wgmma_loop([[maybe_unused]] int iterations, [[maybe_unused]] float* sink, [[maybe_unused]] Elapsed* elapsed) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint8_t raw[];
  uint32_t const start = uint32_t(__cvta_generic_to_shared(raw));
  uint32_t const skipped = (kGroupBytes - start % kGroupBytes) % kGroupBytes;
  uint32_t* const words = reinterpret_cast<uint32_t*>(raw + skipped);
  constexpr int kWords = kWgmmaSteps * kStepBytes / 4;
  for (int i = threadIdx.x; i < kWords; i += blockDim.x) words[i] = normal_pair<Element>(blockIdx.x * kWords + i);
  // What was written by ordinary stores is read by the tensor cores.
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
  __syncthreads();

  uint32_t const tiles = start + skipped;
  uint32_t const warpgroup =
      __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);  // a value of the warp, not the lane
  uint64_t const rows = matrix_descriptor(tiles + warpgroup * kRowsBytes);
  uint64_t const columns = matrix_descriptor(tiles + kWarpgroups * kRowsBytes);
  float d[128];
#pragma unroll
  for (int i = 0; i < 128; ++i) d[i] = uniform(threadIdx.x * 128u + i);
  Stopwatch const watch;
#pragma unroll 1
  for (int it = 0; it < iterations; ++it) {
    asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
#pragma unroll
    for (int step = 0; step < kWgmmaSteps; ++step) {
#pragma unroll
      for (int k = 0; k < kRowBytes / (2 * kInstructionK); ++k) {
        uint64_t const offset = (step * kStepBytes + k * 2 * kInstructionK) >> 4;
        wgmma_m64n256k16<Element>(d, rows + offset, columns + offset);
      }
    }
    asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;\n" ::: "memory");
  }
  watch.stop(elapsed);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 128; ++i) sum += d[i];
  sink[blockIdx.x * blockDim.x + threadIdx.x] = sum;
#endif
}

// 1 where the code that runs on this device has wgmma in it.
__global__ void has_wgmma(int32_t* answer) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  *answer = 1;
#else
  *answer = 0;
#endif
}

template <typename Element>
inline int32_t measure_wgmma(double seconds, attention_autotuner_peak_result* result) {
  DeviceBuffer answer;
  int32_t compiled = 0;
  ATTENTION_AUTOTUNER_TRY(answer.allocate(sizeof(compiled)));
  has_wgmma<<<1, 1>>>(answer.as<int32_t>());
  ATTENTION_AUTOTUNER_TRY(cudaGetLastError());
  ATTENTION_AUTOTUNER_TRY(cudaMemcpy(&compiled, answer.as<int32_t>(), sizeof(compiled), cudaMemcpyDeviceToHost));
  if (compiled != 1) return ATTENTION_AUTOTUNER_BAD_DEVICE;
  double const instructions = double(kWgmmaSteps) * (kRowBytes / (2 * kInstructionK)) * kWarpgroups;
  double const work = instructions * (2.0 * kWgmmaM * kWgmmaN * kInstructionK);
  return measure_loop(wgmma_loop<Element>, kWarpgroups * kWarpgroup, kWgmmaSmemBytes, work, seconds, result);
}

}  // namespace attention_autotuner::peaks

// Bandwidths: shared memory, L2, and a copy in device memory, all by 16 bytes a thread.
#pragma once

#include "attention_autotuner/peaks/random.cuh"
#include "attention_autotuner/peaks/timing.cuh"

namespace attention_autotuner::peaks {

inline constexpr int kVector = 16;  // bytes of one access
inline constexpr int kMemoryThreads = 512;
inline constexpr int kSmemBytes = 32 * 1024;  // of a CTA: four accesses of every thread
inline constexpr int kLoads = 8;              // in flight per thread
inline constexpr size_t kL2Share = 4;         // the L2 over what is read of it
inline constexpr size_t kMaxL2Set = size_t(16) << 20;
inline constexpr size_t kCopyBytes = size_t(3) << 29;  // 1.5 GiB

__device__ __forceinline__ uint32_t fold(uint4 v) { return v.x ^ v.y ^ v.z ^ v.w; }

// Neighbouring threads read neighbouring 16 bytes: every bank once a quarter-warp.
__global__ void __launch_bounds__(kMemoryThreads) smem_loop(int iterations, uint32_t* sink, Elapsed* elapsed) {
  __shared__ uint4 tile[kSmemBytes / kVector];
  for (int i = threadIdx.x; i < kSmemBytes / kVector; i += kMemoryThreads) {
    uint32_t const seed = (blockIdx.x * (kSmemBytes / kVector) + i) * 4u;
    tile[i] = make_uint4(hash(seed), hash(seed + 1), hash(seed + 2), hash(seed + 3));
  }
  __syncthreads();
  uint32_t const address = uint32_t(__cvta_generic_to_shared(tile + threadIdx.x));
  uint32_t folded = 0;
  Stopwatch const watch;
#pragma unroll 1
  for (int it = 0; it < iterations; ++it) {
    uint4 v[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      uint32_t const place = address + uint32_t(i * kMemoryThreads * kVector % kSmemBytes);
      asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n"
                   : "=r"(v[i].x), "=r"(v[i].y), "=r"(v[i].z), "=r"(v[i].w)
                   : "r"(place));
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) folded ^= fold(v[i]);
  }
  watch.stop(elapsed);
  sink[blockIdx.x * blockDim.x + threadIdx.x] = folded;
}

inline int32_t measure_smem(double seconds, attention_autotuner_peak_result* result) {
  Grid grid{};
  int32_t const status = fill_device(smem_loop, kMemoryThreads, 0, &grid);
  if (status != ATTENTION_AUTOTUNER_OK) return status;
  DeviceBuffer sink, elapsed;
  ATTENTION_AUTOTUNER_TRY(sink.allocate(size_t(grid.ctas) * grid.threads * sizeof(uint32_t)));
  ATTENTION_AUTOTUNER_TRY(elapsed.allocate(sizeof(Elapsed)));
  double const work = double(grid.ctas) * grid.threads * kLoads * kVector;
  return sample_loop(
      [&](int iterations) {
        smem_loop<<<grid.ctas, grid.threads>>>(iterations, sink.as<uint32_t>(), elapsed.as<Elapsed>());
      },
      work, elapsed.as<Elapsed>(), seconds, result);
}

// Every CTA reads all of the data again and again, from a start of its own; .cg passes by L1.
__global__ void __launch_bounds__(kMemoryThreads)
    l2_loop(int iterations, uint4 const* data, uint32_t count, uint32_t* sink, Elapsed* elapsed) {
  uint32_t const stride = kMemoryThreads * kLoads;  // count is a multiple of it
  uint32_t const blocks = count / stride;
  uint32_t block = uint32_t(uint64_t(blockIdx.x) * blocks / gridDim.x);
  uint32_t folded = 0;
  Stopwatch const watch;
#pragma unroll 1
  for (int it = 0; it < iterations; ++it) {
    uint4 const* place = data + size_t(block) * stride + threadIdx.x;
    uint4 v[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];\n"
                   : "=r"(v[i].x), "=r"(v[i].y), "=r"(v[i].z), "=r"(v[i].w)
                   : "l"(place + i * kMemoryThreads));
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) folded ^= fold(v[i]);
    block = block + 1 == blocks ? 0 : block + 1;
  }
  watch.stop(elapsed);
  sink[blockIdx.x * blockDim.x + threadIdx.x] = folded;
}

inline int32_t measure_l2(double seconds, attention_autotuner_peak_result* result) {
  Grid grid{};
  int32_t const status = fill_device(l2_loop, kMemoryThreads, 0, &grid);
  if (status != ATTENTION_AUTOTUNER_OK) return status;
  int device = 0, l2_bytes = 0;
  ATTENTION_AUTOTUNER_TRY(cudaGetDevice(&device));
  ATTENTION_AUTOTUNER_TRY(cudaDeviceGetAttribute(&l2_bytes, cudaDevAttrL2CacheSize, device));
  size_t const unit = size_t(kMemoryThreads) * kLoads * kVector;
  size_t const bytes = std::max(unit, std::min(kMaxL2Set, size_t(l2_bytes) / kL2Share) / unit * unit);
  DeviceBuffer data, sink, elapsed;
  ATTENTION_AUTOTUNER_TRY(data.allocate(bytes));
  ATTENTION_AUTOTUNER_TRY(sink.allocate(size_t(grid.ctas) * grid.threads * sizeof(uint32_t)));
  ATTENTION_AUTOTUNER_TRY(elapsed.allocate(sizeof(Elapsed)));
  uint32_t const count = uint32_t(bytes / kVector);
  fill_random<<<grid.ctas, grid.threads>>>(data.as<uint4>(), count);
  ATTENTION_AUTOTUNER_TRY(cudaGetLastError());
  double const work = double(grid.ctas) * grid.threads * kLoads * kVector;
  return sample_loop(
      [&](int iterations) {
        l2_loop<<<grid.ctas, grid.threads>>>(iterations, data.as<uint4>(), count, sink.as<uint32_t>(),
                                             elapsed.as<Elapsed>());
      },
      work, elapsed.as<Elapsed>(), seconds, result);
}

// One CTA copies kLoads * 16 bytes a thread, each once: marked to leave the caches first.
__global__ void __launch_bounds__(kMemoryThreads) copy_once(uint4 const* source, uint4* target) {
  size_t const first = size_t(blockIdx.x) * kMemoryThreads * kLoads + threadIdx.x;
  uint4 v[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) v[i] = __ldcs(source + first + i * kMemoryThreads);
#pragma unroll
  for (int i = 0; i < kLoads; ++i) __stcs(target + first + i * kMemoryThreads, v[i]);
}

inline int32_t measure_copy(double seconds, attention_autotuner_peak_result* result) {
  size_t free_bytes = 0, total_bytes = 0;
  ATTENTION_AUTOTUNER_TRY(cudaMemGetInfo(&free_bytes, &total_bytes));
  size_t const unit = size_t(kMemoryThreads) * kLoads * kVector;
  size_t const bytes = std::min(kCopyBytes, free_bytes / 3) / unit * unit;
  if (bytes == 0) return ATTENTION_AUTOTUNER_CUDA_ERROR + int32_t(cudaErrorMemoryAllocation);
  DeviceBuffer source, target;
  ATTENTION_AUTOTUNER_TRY(source.allocate(bytes));
  ATTENTION_AUTOTUNER_TRY(target.allocate(bytes));
  fill_random<<<1024, kMemoryThreads>>>(source.as<uint4>(), bytes / kVector);
  ATTENTION_AUTOTUNER_TRY(cudaGetLastError());
  int const ctas = int(bytes / unit);
  return sample_launches([&] { copy_once<<<ctas, kMemoryThreads>>>(source.as<uint4>(), target.as<uint4>()); },
                         2.0 * double(bytes), true, nullptr, seconds, result);
}

__global__ void empty_kernel() {}

inline int32_t measure_launch(double seconds, attention_autotuner_peak_result* result) {
  return sample_launches([] { empty_kernel<<<1, 1>>>(); }, 1.0, false, nullptr, seconds, result);
}

}  // namespace attention_autotuner::peaks

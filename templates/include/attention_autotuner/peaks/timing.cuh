// How a peak is timed: a warm-up that brings the clocks to their sustained level, then equal samples between events.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "attention_autotuner/peaks/peaks.h"

namespace attention_autotuner::peaks {

inline constexpr double kWarmSeconds = 0.4;
inline constexpr double kMaxSeconds = 60.0;
inline constexpr double kLaunchSeconds = 20e-3;  // of one launch: long beside its start, short beside a sample
inline constexpr int kSamples = 11;

// Stops a function at the first CUDA error.
#define ATTENTION_AUTOTUNER_TRY(call)                                                \
  do {                                                                               \
    cudaError_t const error_ = (call);                                               \
    if (error_ != cudaSuccess) return attention_autotuner::peaks::status_of(error_); \
  } while (false)

inline int32_t status_of(cudaError_t error) {
  cudaGetLastError();  // or the next call would report it once more
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction) {
    return ATTENTION_AUTOTUNER_BAD_DEVICE;
  }
  return ATTENTION_AUTOTUNER_CUDA_ERROR + int32_t(error);
}

// SM cycles and nanoseconds that one thread saw pass.
struct Elapsed {
  unsigned long long cycles;
  unsigned long long nanoseconds;
};

__device__ __forceinline__ unsigned long long nanoseconds_now() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;\n" : "=l"(now)::"memory");
  return now;
}

// Counts cycles of the first CTA's SM from its making to stop().
struct Stopwatch {
  bool mine;
  unsigned long long cycles;
  unsigned long long nanoseconds;

  __device__ __forceinline__ Stopwatch() : mine(blockIdx.x == 0 && threadIdx.x == 0), cycles(0), nanoseconds(0) {
    if (mine) {
      nanoseconds = nanoseconds_now();
      cycles = clock64();
    }
  }
  __device__ __forceinline__ void stop(Elapsed* elapsed) const {
    if (mine) {
      elapsed->cycles = clock64() - cycles;
      elapsed->nanoseconds = nanoseconds_now() - nanoseconds;
    }
  }
};

// Device memory that frees itself.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(DeviceBuffer const&) = delete;
  DeviceBuffer& operator=(DeviceBuffer const&) = delete;
  ~DeviceBuffer() { cudaFree(data_); }

  cudaError_t allocate(size_t bytes) { return cudaMalloc(&data_, bytes); }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
};

class Event {
 public:
  Event() = default;
  Event(Event const&) = delete;
  Event& operator=(Event const&) = delete;
  ~Event() {
    if (event_ != nullptr) cudaEventDestroy(event_);
  }

  cudaError_t create() { return cudaEventCreate(&event_); }
  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

inline double host_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Seconds that `count` launches take, by events around them.
template <typename Launch>
inline int32_t time_launches(Launch const& launch, int64_t count, Event const& start, Event const& end,
                             double* seconds) {
  ATTENTION_AUTOTUNER_TRY(cudaEventRecord(start.get()));
  for (int64_t i = 0; i < count; ++i) launch();
  ATTENTION_AUTOTUNER_TRY(cudaGetLastError());
  ATTENTION_AUTOTUNER_TRY(cudaEventRecord(end.get()));
  ATTENTION_AUTOTUNER_TRY(cudaEventSynchronize(end.get()));
  float milliseconds = 0.0f;
  ATTENTION_AUTOTUNER_TRY(cudaEventElapsedTime(&milliseconds, start.get(), end.get()));
  *seconds = double(milliseconds) * 1e-3;
  return ATTENTION_AUTOTUNER_OK;
}

inline double quantile(double const (&sorted)[kSamples], double share) {
  double const place = share * (kSamples - 1);
  int const below = int(place);
  int const above = std::min(below + 1, kSamples - 1);
  return sorted[below] + (place - below) * (sorted[above] - sorted[below]);
}

// Warms up, then times samples of equal numbers of launches and fills in the result.
//
// `launch()` enqueues `work` operations, bytes or launches; `per_second` says whether the value is work over time, or
// time over work. `elapsed` is where the kernel leaves its cycles, or null.
template <typename Launch>
inline int32_t sample_launches(Launch const& launch, double work, bool per_second, Elapsed const* elapsed,
                               double seconds, attention_autotuner_peak_result* result) {
  Event start, end;
  ATTENTION_AUTOTUNER_TRY(start.create());
  ATTENTION_AUTOTUNER_TRY(end.create());
  double once = 0.0;
  int64_t count = 1;
  for (double const until = host_seconds() + kWarmSeconds; host_seconds() < until;) {
    int32_t const status = time_launches(launch, count, start, end, &once);
    if (status != ATTENTION_AUTOTUNER_OK) return status;
    once /= double(count);
    count = std::max<int64_t>(1, std::llround(std::min(0.05 / std::max(once, 1e-7), 1e6)));
  }
  count = std::max<int64_t>(1, std::llround(seconds / kSamples / std::max(once, 1e-7)));
  double values[kSamples], clocks[kSamples];
  result->seconds = 0.0;
  for (int i = 0; i < kSamples; ++i) {
    double took = 0.0;
    int32_t const status = time_launches(launch, count, start, end, &took);
    if (status != ATTENTION_AUTOTUNER_OK) return status;
    result->seconds += took;
    double const per_item = took / (double(count) * work);
    values[i] = per_second ? 1.0 / per_item : per_item;
    clocks[i] = 0.0;
    if (elapsed != nullptr) {
      Elapsed seen{};
      ATTENTION_AUTOTUNER_TRY(cudaMemcpy(&seen, elapsed, sizeof(seen), cudaMemcpyDeviceToHost));
      if (seen.nanoseconds > 0) clocks[i] = double(seen.cycles) * 1e9 / double(seen.nanoseconds);
    }
  }
  std::sort(values, values + kSamples);
  std::sort(clocks, clocks + kSamples);
  result->samples = kSamples;
  result->value = quantile(values, 0.5);
  result->spread = 0.5 * (quantile(values, 0.75) - quantile(values, 0.25));
  result->sm_clock_hz = quantile(clocks, 0.5);
  return ATTENTION_AUTOTUNER_OK;
}

// How a kernel that loops `iterations` times is spread over the device.
struct Grid {
  int ctas;
  int threads;
};

// As many CTAs of a kernel as the device holds at once.
template <typename Kernel>
inline int32_t fill_device(Kernel kernel, int threads, size_t smem_bytes, Grid* grid) {
  int device = 0, sms = 0, resident = 0;
  ATTENTION_AUTOTUNER_TRY(cudaGetDevice(&device));
  ATTENTION_AUTOTUNER_TRY(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  if (smem_bytes > 0) {
    ATTENTION_AUTOTUNER_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(smem_bytes)));
  }
  ATTENTION_AUTOTUNER_TRY(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, threads, smem_bytes));
  if (resident < 1) return ATTENTION_AUTOTUNER_BAD_DEVICE;
  *grid = Grid{sms * resident, threads};
  return ATTENTION_AUTOTUNER_OK;
}

// Measures a kernel whose work grows with a number of iterations: finds the number that fills kLaunchSeconds.
//
// `launch(iterations)` enqueues it; `work` is what one iteration does over the whole grid.
template <typename Launch>
inline int32_t sample_loop(Launch const& launch, double work, Elapsed const* elapsed, double seconds,
                           attention_autotuner_peak_result* result) {
  Event start, end;
  ATTENTION_AUTOTUNER_TRY(start.create());
  ATTENTION_AUTOTUNER_TRY(end.create());
  int iterations = 16;
  for (int attempt = 0; attempt < 12; ++attempt) {
    double took = 0.0;
    int32_t const status = time_launches([&] { launch(iterations); }, 1, start, end, &took);
    if (status != ATTENTION_AUTOTUNER_OK) return status;
    if (took > 0.5 * kLaunchSeconds) break;
    double const factor = std::min(16.0, kLaunchSeconds / std::max(took, 1e-6));
    iterations = int(std::min(1e8, iterations * std::max(factor, 1.5)));
  }
  return sample_launches([&] { launch(iterations); }, work * iterations, true, elapsed, seconds, result);
}

// The same of a kernel that reads nothing and writes a float a thread, on the whole device; `work` is that of a CTA.
inline int32_t measure_loop(void (*kernel)(int, float*, Elapsed*), int threads, size_t smem_bytes, double work,
                            double seconds, attention_autotuner_peak_result* result) {
  Grid grid{};
  int32_t const status = fill_device(kernel, threads, smem_bytes, &grid);
  if (status != ATTENTION_AUTOTUNER_OK) return status;
  DeviceBuffer sink, elapsed;
  ATTENTION_AUTOTUNER_TRY(sink.allocate(size_t(grid.ctas) * grid.threads * sizeof(float)));
  ATTENTION_AUTOTUNER_TRY(elapsed.allocate(sizeof(Elapsed)));
  return sample_loop(
      [&](int iterations) {
        kernel<<<grid.ctas, grid.threads, smem_bytes>>>(iterations, sink.as<float>(), elapsed.as<Elapsed>());
      },
      grid.ctas * work, elapsed.as<Elapsed>(), seconds, result);
}

}  // namespace attention_autotuner::peaks

// Launches that may begin before the kernel ahead of them in the stream has ended (programmatic dependent launch). What
// their kernels do about it: common/dependent_launch.cuh. The first kernel of a call, too: its launch, and what it does
// before it waits, then cost nothing behind a kernel that is still running, of whatever library.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

#include "attention_autotuner/host/entry.cuh"
#include "attention_autotuner/host/launch_config.cuh"

namespace attention_autotuner {

class EarlyLaunch {
 public:
  // Asks the driver: graphs of those before CUDA 12.3 cannot hold such launches.
  static int32_t prepare() {
    int driver = 0;
    cudaError_t const error = cudaDriverGetVersion(&driver);
    possible_.store(driver >= 12030);
    return cuda_status(error);
  }
  // Of a kernel that may have been compiled for GPUs without such launches: whether it waits.
  template <typename Kernel>
  static int32_t prepare(Kernel kernel, std::atomic<bool>& waits) {
    cudaFuncAttributes attributes;
    cudaError_t const error = cudaFuncGetAttributes(&attributes, kernel);
    if (error != cudaSuccess) return cuda_status(error);
    waits.store(attributes.ptxVersion >= 90);
    return prepare();
  }
  // `early`: the kernel waits for what is ahead, before it reads or writes memory that others do.
  template <typename... Parameters, typename... Arguments>
  static int32_t start(bool early, void (*kernel)(Parameters...), dim3 ctas, int threads, int smem_bytes,
                       cudaStream_t stream, Arguments const&... arguments) {
    return start_clusters(early, 1, kernel, ctas, threads, smem_bytes, stream, arguments...);
  }
  // The same, where so many CTAs are a cluster.
  template <typename... Parameters, typename... Arguments>
  static int32_t start_clusters(bool early, int cluster, void (*kernel)(Parameters...), dim3 ctas, int threads,
                                int smem_bytes, cudaStream_t stream, Arguments const&... arguments) {
    cudaLaunchAttribute attributes[2];
    unsigned count = 0;
    if (early && possible_.load(std::memory_order_relaxed)) {
      attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attributes[count++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster > 1) attributes[count++] = cluster_attribute(cluster);
    cudaLaunchConfig_t const config = launch_config(ctas, threads, smem_bytes, stream, attributes, count);
    return cuda_status(cudaLaunchKernelEx(&config, kernel, arguments...));
  }

 private:
  static inline std::atomic<bool> possible_;
};

}  // namespace attention_autotuner

// Launches whose CTAs wait for each other in a ring, and so have to run at the same time.
#pragma once

#include <cuda_runtime.h>

#include "attention_autotuner/host/launch_config.cuh"

namespace attention_autotuner {

// All CTAs at once, when there is room for them and the kernel ahead has ended; cudaErrorCooperativeLaunchTooLarge
// where there never is, as this process may have a part of the device alone, and nothing was launched.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_together(void (*kernel)(Parameters...), dim3 ctas, int threads, int smem_bytes, cudaStream_t stream,
                            Arguments const&... arguments) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t const config = launch_config(ctas, threads, smem_bytes, stream, &attribute, 1);
  cudaError_t const error = cudaLaunchKernelEx(&config, kernel, arguments...);
  if (error != cudaErrorCooperativeLaunchTooLarge && error != cudaErrorNotSupported) return error;
  cudaGetLastError();
  return cudaErrorCooperativeLaunchTooLarge;
}

}  // namespace attention_autotuner

// Launches whose CTAs wait for each other in a ring, and so have to run at the same time.
#pragma once

#include <cuda_runtime.h>

namespace attention_autotuner {

// All CTAs at once, when there is room for them; false where there never is, as this process may have a part of the
// device alone, and nothing was launched. It begins when the kernel ahead has ended.
template <typename... Parameters, typename... Arguments>
bool launch_together(cudaError_t& error, void (*kernel)(Parameters...), dim3 ctas, int threads, int smem_bytes,
                     cudaStream_t stream, Arguments const&... arguments) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = ctas;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  error = cudaLaunchKernelEx(&config, kernel, arguments...);
  if (error != cudaErrorCooperativeLaunchTooLarge && error != cudaErrorNotSupported) return true;
  cudaGetLastError();
  return false;
}

}  // namespace attention_autotuner

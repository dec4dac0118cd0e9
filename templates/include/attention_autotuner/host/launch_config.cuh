// Launches with attributes, for cudaLaunchKernelEx.
#pragma once

#include <cuda_runtime.h>

namespace attention_autotuner {

inline cudaLaunchConfig_t launch_config(dim3 ctas, int threads, int smem_bytes, cudaStream_t stream,
                                        cudaLaunchAttribute* attributes, unsigned count) {
  cudaLaunchConfig_t config{};
  config.gridDim = ctas;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  return config;
}

// So many CTAs are a cluster.
inline cudaLaunchAttribute cluster_attribute(int ctas) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = ctas;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  return attribute;
}

}  // namespace attention_autotuner

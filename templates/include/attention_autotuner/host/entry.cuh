// What the host sides of all artifacts share: status, preparation of a kernel, and the macro that exports the C ABI.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

#include "attention_autotuner/abi.h"
#include "attention_autotuner/score/score_mod.cuh"

namespace attention_autotuner {

inline constexpr int kMaxDevices = 64;

// The version that an artifact exports: the least one with all fields of the params that its kernels take.
template <typename Params>
inline constexpr uint32_t kAbiVersionOf = 1002;
template <>
inline constexpr uint32_t kAbiVersionOf<AttentionForwardParams1003> = 1003;
template <>
inline constexpr uint32_t kAbiVersionOf<AttentionForwardParams1004> = 1004;
template <>
inline constexpr uint32_t kAbiVersionOf<AttentionBackwardParams1004> = 1004;
template <>
inline constexpr uint32_t kAbiVersionOf<AttentionForwardParams1005> = 1005;
template <>
inline constexpr uint32_t kAbiVersionOf<AttentionBackwardParams1005> = 1005;
template <>
inline constexpr uint32_t kAbiVersionOf<attention_autotuner_attention_forward_params> = 1006;
template <>
inline constexpr uint32_t kAbiVersionOf<AttentionBackwardParams1006> = 1006;
template <>
inline constexpr uint32_t kAbiVersionOf<attention_autotuner_attention_backward_params> = 1007;

inline int32_t cuda_status(cudaError_t error) {
  return error == cudaSuccess ? ATTENTION_AUTOTUNER_OK : ATTENTION_AUTOTUNER_CUDA_ERROR + int32_t(error);
}

inline char const* status_string(int32_t status) {
  switch (status) {
    case ATTENTION_AUTOTUNER_OK:
      return "ok";
    case ATTENTION_AUTOTUNER_BAD_VERSION:
      return "params were made for another version of the ABI";
    case ATTENTION_AUTOTUNER_BAD_SHAPE:
      return "a size in params is outside what this kernel was compiled for";
    case ATTENTION_AUTOTUNER_BAD_ALIGNMENT:
      return "a pointer or stride in params breaks this kernel's copy width";
    case ATTENTION_AUTOTUNER_BAD_DEVICE:
      return "the kernel was not prepared for this device, or cannot run on it";
    default:
      return status >= ATTENTION_AUTOTUNER_CUDA_ERROR
                 ? cudaGetErrorString(cudaError_t(status - ATTENTION_AUTOTUNER_CUDA_ERROR))
                 : "unknown status";
  }
}

// The first status that is not ok.
class Steps {
 public:
  template <typename Step>
  Steps& then(Step&& step) {
    if (status_ == ATTENTION_AUTOTUNER_OK) status_ = step();
    return *this;
  }
  int32_t status() const { return status_; }

 private:
  int32_t status_ = ATTENTION_AUTOTUNER_OK;
};

// Lets a kernel use its shared memory on the present device; `resident` receives the CTAs of it that an SM holds.
template <typename Kernel>
inline int32_t prepare_kernel(Kernel kernel, int threads, int smem_bytes, int32_t device, int* resident) {
  int limit = 0;
  cudaError_t error = cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error == cudaSuccess && limit < smem_bytes) return ATTENTION_AUTOTUNER_BAD_DEVICE;
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  }
  if (error == cudaSuccess) {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(resident, kernel, threads, smem_bytes);
  }
  if (error != cudaSuccess) {
    cudaGetLastError();
    return cuda_status(error);
  }
  return *resident < 1 ? ATTENTION_AUTOTUNER_BAD_DEVICE : ATTENTION_AUTOTUNER_OK;
}

// The same of a kernel that streams rows beside one that takes nearly all of an SM's shared memory. More of its loads
// are on their way at a time the more L1 there is, of which it would have what the other leaves: 10 us of the 333
// of attention's backward at 512 tokens, d128, causal, on an H200.
template <typename Kernel>
inline int32_t prepare_streaming_kernel(Kernel kernel, int threads, int32_t device) {
  int resident = 0;
  int32_t const status = prepare_kernel(kernel, threads, 0, device, &resident);
  if (status != ATTENTION_AUTOTUNER_OK) return status;
  return cuda_status(
      cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxL1));
}

// An artifact's description of itself: its tile, and the threads and shared memory of its widest kernel. Params are
// named where they have fields since 1003.
template <typename Config, typename Params = void>
inline attention_autotuner_kernel_info kernel_info(int block_m, int block_n, int threads, int dynamic_smem_bytes) {
  return {sizeof(attention_autotuner_kernel_info),
          kAbiVersionOf<Params>,
          Config::kName,
          Config::kPaddedDimQK,
          Config::kPaddedDimV,
          block_m,
          block_n,
          threads,
          0,
          dynamic_smem_bytes,
          Config::kCopyBytes};
}

}  // namespace attention_autotuner

#define ATTENTION_AUTOTUNER_EXPORT_ENTRY(Entry)                                                                        \
  extern "C" {                                                                                                         \
  uint32_t attention_autotuner_abi_version(void) { return attention_autotuner::kAbiVersionOf<Entry::Params>; }         \
  int32_t attention_autotuner_get_kernel_info(attention_autotuner_kernel_info* info) {                                 \
    if (info == nullptr || info->struct_size < sizeof(*info)) return ATTENTION_AUTOTUNER_BAD_VERSION;                  \
    *info = Entry::info();                                                                                             \
    return ATTENTION_AUTOTUNER_OK;                                                                                     \
  }                                                                                                                    \
  int32_t attention_autotuner_prepare(int32_t device) {                                                                \
    if (device < 0 || device >= attention_autotuner::kMaxDevices) return ATTENTION_AUTOTUNER_BAD_DEVICE;               \
    return Entry::prepare(device);                                                                                     \
  }                                                                                                                    \
  size_t attention_autotuner_workspace_bytes(void const* params) {                                                     \
    return params == nullptr ? 0 : Entry::workspace_bytes(*static_cast<Entry::Params const*>(params));                 \
  }                                                                                                                    \
  int32_t attention_autotuner_launch(void const* params, void* workspace, void* stream, int32_t device) {              \
    if (params == nullptr) return ATTENTION_AUTOTUNER_BAD_SHAPE;                                                       \
    if (device < 0 || device >= attention_autotuner::kMaxDevices) return ATTENTION_AUTOTUNER_BAD_DEVICE;               \
    return Entry::launch(*static_cast<Entry::Params const*>(params), workspace, static_cast<cudaStream_t>(stream),     \
                         device);                                                                                      \
  }                                                                                                                    \
  char const* attention_autotuner_status_string(int32_t status) { return attention_autotuner::status_string(status); } \
  }

// Host side of an attention forward artifact: checks, preparation, launch, and the macro that exports the C ABI.
//
// Called by: templates/attention/forward.cu.jinja.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cmath>

#include "attention_forward_loops.cuh"

namespace attention_autotuner {

inline constexpr int kMaxDevices = 64;
inline constexpr int64_t kMaxRows = int64_t(1) << 30;  // row + causal_offset stays within 32 bits

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

// Rows can be read (or written) `bytes` at a time; strides of dimensions of size 1 do not matter.
inline bool aligned(attention_autotuner_tensor const& tensor, int bytes, int batch, int heads, int rows) {
  int const elements = bytes / kElementBytes;
  return reinterpret_cast<uintptr_t>(tensor.data) % bytes == 0 && (batch == 1 || tensor.stride_batch % elements == 0) &&
         (heads == 1 || tensor.stride_head % elements == 0) && (rows == 1 || tensor.stride_row % elements == 0);
}

template <typename Config>
struct ForwardEntry {
  using T = ForwardTraits<Config>;
  // Resident CTAs of the whole device, set by prepare(); 0 before.
  static inline std::atomic<int> slots[kMaxDevices];

  static int32_t prepare(int32_t device) {
    if (device < 0 || device >= kMaxDevices) return ATTENTION_AUTOTUNER_BAD_DEVICE;
    if (slots[device].load() > 0) return ATTENTION_AUTOTUNER_OK;
    auto kernel = attention_forward_kernel<Config>;
    int limit = 0, multiprocessors = 0, resident = 0;
    cudaError_t error = cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (error == cudaSuccess && limit < T::kSmemBytes) return ATTENTION_AUTOTUNER_BAD_DEVICE;
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    if (error == cudaSuccess) {
      error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, T::kSmemBytes);
    }
    if (error == cudaSuccess) {
      error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, T::kThreads, T::kSmemBytes);
    }
    if (error != cudaSuccess) {
      cudaGetLastError();
      return cuda_status(error);
    }
    if (resident < 1) return ATTENTION_AUTOTUNER_BAD_DEVICE;
    slots[device].store(resident * multiprocessors);
    return ATTENTION_AUTOTUNER_OK;
  }

  static int32_t check(ForwardParams const& p) {
    if (p.struct_size < sizeof(ForwardParams) || p.abi_version / 1000 != ATTENTION_AUTOTUNER_ABI_VERSION / 1000) {
      return ATTENTION_AUTOTUNER_BAD_VERSION;
    }
    bool const shape = p.batch >= 1 && p.heads_q >= 1 && p.heads_kv >= 1 && p.heads_q % p.heads_kv == 0 &&
                       p.seqlen_q >= 1 && p.seqlen_q <= kMaxRows && p.seqlen_k >= 1 && p.seqlen_k <= kMaxRows &&
                       p.dim_qk % kChunk == 0 && p.dim_qk > T::kClassQK - 16 && p.dim_qk <= T::kClassQK &&
                       p.dim_v % kChunk == 0 && p.dim_v > Config::kClassV - 16 && p.dim_v <= Config::kClassV &&
                       p.causal_offset > -kMaxRows && p.causal_offset < kMaxRows;
    if (!shape) return ATTENTION_AUTOTUNER_BAD_SHAPE;
    constexpr int kBytes = Config::kCopyBytes;
    bool const pointers =
        aligned(p.q, kBytes, p.batch, p.heads_q, p.seqlen_q) && aligned(p.k, kBytes, p.batch, p.heads_kv, p.seqlen_k) &&
        aligned(p.v, kBytes, p.batch, p.heads_kv, p.seqlen_k) && aligned(p.o, 16, p.batch, p.heads_q, p.seqlen_q);
    return pointers ? ATTENTION_AUTOTUNER_OK : ATTENTION_AUTOTUNER_BAD_ALIGNMENT;
  }

  static int32_t launch(ForwardParams const& p, cudaStream_t stream, int32_t device) {
    int32_t const status = check(p);
    if (status != ATTENTION_AUTOTUNER_OK) return status;
    if (device < 0 || device >= kMaxDevices || slots[device].load(std::memory_order_relaxed) == 0) {
      return ATTENTION_AUTOTUNER_BAD_DEVICE;
    }
    int const row_blocks = (p.seqlen_q + T::kBlockM - 1) / T::kBlockM;
    int64_t const tiles = int64_t(row_blocks) * p.heads_q * p.batch * Config::kVSlices;
    if (tiles > INT32_MAX) return ATTENTION_AUTOTUNER_BAD_SHAPE;
    int grid = int(tiles);
    if (Config::kPersistent) grid = minimum(grid, slots[device].load(std::memory_order_relaxed));
    // A zero scale is served by a cleared Q, see apply_scale_sign.
    float const c = p.softmax_scale == 0.0f ? kLog2E : fabsf(p.softmax_scale) * kLog2E;
    TileList const list{int(tiles),
                        p.causal != 0,
                        Divider::by(row_blocks),
                        Divider::by(p.heads_q),
                        Divider::by(p.batch),
                        Divider::by(p.heads_q / p.heads_kv)};
    attention_forward_kernel<Config><<<grid, T::kThreads, T::kSmemBytes, stream>>>(p, list, c);
    return cuda_status(cudaGetLastError());
  }

  static int32_t get_info(attention_autotuner_kernel_info* info) {
    if (info == nullptr || info->struct_size < sizeof(*info)) return ATTENTION_AUTOTUNER_BAD_VERSION;
    *info = {sizeof(*info),
             ATTENTION_AUTOTUNER_ABI_VERSION,
             Config::kName,
             T::kClassQK,
             Config::kClassV,
             T::kBlockM,
             T::kBlockN,
             T::kThreads,
             0,
             T::kSmemBytes,
             Config::kCopyBytes};
    return ATTENTION_AUTOTUNER_OK;
  }
};

}  // namespace attention_autotuner

#define ATTENTION_AUTOTUNER_ATTENTION_FORWARD_ENTRY(Config)                                                            \
  extern "C" {                                                                                                         \
  uint32_t attention_autotuner_abi_version(void) { return ATTENTION_AUTOTUNER_ABI_VERSION; }                           \
  int32_t attention_autotuner_get_kernel_info(attention_autotuner_kernel_info* info) {                                 \
    return attention_autotuner::ForwardEntry<Config>::get_info(info);                                                  \
  }                                                                                                                    \
  int32_t attention_autotuner_prepare(int32_t device) {                                                                \
    return attention_autotuner::ForwardEntry<Config>::prepare(device);                                                 \
  }                                                                                                                    \
  size_t attention_autotuner_workspace_bytes(void const*) { return 0; }                                                \
  int32_t attention_autotuner_launch(void const* params, void*, void* stream, int32_t device) {                        \
    if (params == nullptr) return ATTENTION_AUTOTUNER_BAD_SHAPE;                                                       \
    return attention_autotuner::ForwardEntry<Config>::launch(                                                          \
        *static_cast<attention_autotuner_attention_forward_params const*>(params), static_cast<cudaStream_t>(stream),  \
        device);                                                                                                       \
  }                                                                                                                    \
  char const* attention_autotuner_status_string(int32_t status) { return attention_autotuner::status_string(status); } \
  }

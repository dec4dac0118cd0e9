// Tensors of 16-bit elements as kernels of family sm90 copy them: their TMA descriptors.
//
// They are made at every launch and passed by value, so that launches can be captured and keep nothing. What makes them
// is looked up in the driver at run time: an artifact loads on machines without one.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "attention_autotuner/abi.h"
#include "attention_autotuner/common/tile.cuh"
#include "attention_autotuner/host/entry.cuh"
#include "attention_autotuner/sm90/swizzle.cuh"
#include "attention_autotuner/sm90/tma.cuh"

namespace attention_autotuner {

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, cuuint64_t const*,
                                 cuuint64_t const*, cuuint32_t const*, cuuint32_t const*, CUtensorMapInterleave,
                                 CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// What L2 reads from memory for a sector that it lacks. A TMA tile's row is 128 bytes, of which the next tile's may be
// the other half of 256: on an H200 keys that stream, read by 256 bytes, came at 4.1 TB/s, not at 4.3.
constexpr CUtensorMapL2promotion kL2Promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;

// What makes descriptors.
struct TmaDescriptors {
  static inline std::atomic<EncodeTiled> encode;
  [[maybe_unused]] static constexpr int kCudaWithDescriptors = 12000;

  // Looks the driver's function up, for a device that has use for it.
  static int32_t prepare(int32_t device) {
    int major = 0, minor = 0;
    cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    if (error != cudaSuccess) return cuda_status(error);
    if (major != 9 || minor != 0) return ATTENTION_AUTOTUNER_BAD_DEVICE;
    void* entry_point = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry_point, kCudaWithDescriptors,
                                             cudaEnableDefault, &result);
#else
    error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &entry_point, cudaEnableDefault, &result);
#endif
    if (error != cudaSuccess) return cuda_status(error);
    if (result != cudaDriverEntryPointSuccess || entry_point == nullptr) return ATTENTION_AUTOTUNER_BAD_DEVICE;
    encode.store(reinterpret_cast<EncodeTiled>(entry_point));
    return ATTENTION_AUTOTUNER_OK;
  }

  // The descriptor of a tensor whose TMA tiles are 64 columns by `tile_rows`. CUDA copies its bytes, whatever they say.
  template <typename Element>
  static bool make(TmaTensor& described, attention_autotuner_tensor const& tensor, int columns, int rows, int heads,
                   int batch, int tile_rows) {
    constexpr auto kType =
        std::is_same_v<Element, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    described.head_step = heads > 1 && tensor.stride_head != 0;
    described.batch_step = batch > 1 && tensor.stride_batch != 0;
    auto bytes = [](bool moves, int64_t stride) { return cuuint64_t(moves ? stride * kElementBytes : 16); };
    cuuint64_t const sizes[4] = {cuuint64_t(columns), cuuint64_t(rows), cuuint64_t(described.head_step ? heads : 1),
                                 cuuint64_t(described.batch_step ? batch : 1)};
    cuuint64_t const strides[3] = {bytes(rows > 1, tensor.stride_row), bytes(described.head_step, tensor.stride_head),
                                   bytes(described.batch_step, tensor.stride_batch)};
    cuuint32_t const tile[4] = {cuuint32_t(kSwizzleColumns), cuuint32_t(tile_rows), 1, 1}, steps[4] = {1, 1, 1, 1};
    return encode.load(std::memory_order_relaxed)(&described.descriptor, kType, 4, tensor.data, sizes, strides, tile,
                                                  steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                                  kL2Promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
  }
};

}  // namespace attention_autotuner

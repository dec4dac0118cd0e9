// Host side of a retnet forward artifact of family sm90: checks, tensor maps, preparation and launch.
//
// Maps are made at every launch and passed by value, so that launches can be captured and keep nothing. What makes them
// is looked up in the driver at run time: an artifact loads on machines without one.
//
// Called by: templates/retnet/forward_sm90.cu.jinja.
#pragma once

#include "entry.cuh"
#include "retnet_forward_sm90.cuh"

namespace attention_autotuner {

using EncodeTiledMap = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, cuuint64_t const*,
                                    cuuint64_t const*, cuuint32_t const*, cuuint32_t const*, CUtensorMapInterleave,
                                    CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

template <typename Config>
struct WgmmaForwardEntry {
  using T = WgmmaForwardTraits<Config>;
  using Params = attention_autotuner_retnet_forward_params;
  [[maybe_unused]] static constexpr int kCudaWithMaps = 12000;
  static inline std::atomic<EncodeTiledMap> encode;
  static inline std::atomic<bool> prepared[kMaxDevices];

  static int32_t prepare(int32_t device) {
    if (prepared[device].load()) return ATTENTION_AUTOTUNER_OK;
    int major = 0, minor = 0, resident = 0;
    cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    if (error != cudaSuccess) return cuda_status(error);
    if (major != 9 || minor != 0) return ATTENTION_AUTOTUNER_BAD_DEVICE;
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, kCudaWithMaps, cudaEnableDefault, &result);
#else
    error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result);
#endif
    if (error != cudaSuccess) return cuda_status(error);
    if (result != cudaDriverEntryPointSuccess || found == nullptr) return ATTENTION_AUTOTUNER_BAD_DEVICE;
    encode.store(reinterpret_cast<EncodeTiledMap>(found));
    int32_t const status = prepare_kernel(retnet_forward_wgmma<Config>, T::kThreads, T::kSmemBytes, device, &resident);
    if (status == ATTENTION_AUTOTUNER_OK) prepared[device].store(true);
    return status;
  }

  static size_t workspace_bytes(Params const&) { return 0; }

  static int32_t check(Params const& p) {
    if (!same_version(p)) return ATTENTION_AUTOTUNER_BAD_VERSION;
    if (!takes_shape(p, Config::kClassQK, Config::kClassV) || !has_weights<Weights::kMasked>(p)) {
      return ATTENTION_AUTOTUNER_BAD_SHAPE;
    }
    bool const pointers =
        aligned(p.q, 16, p.batch, p.heads_q, p.seqlen_q) && aligned(p.k, 16, p.batch, p.heads_kv, p.seqlen_k) &&
        aligned(p.v, 16, p.batch, p.heads_kv, p.seqlen_k) && aligned(p.o, 16, p.batch, p.heads_q, p.seqlen_q) &&
        aligned(p.mask, 16, 1, p.heads_q, p.seqlen_q);
    return pointers ? ATTENTION_AUTOTUNER_OK : ATTENTION_AUTOTUNER_BAD_ALIGNMENT;
  }

  // A map of a tensor whose boxes are 64 columns by `box_rows`. CUDA copies the bytes of a map, whatever they say.
  static bool make_map(MappedTensor& mapped, attention_autotuner_tensor const& tensor, int columns, int rows, int heads,
                       int batch, int box_rows) {
    constexpr auto kType = std::is_same_v<typename T::Element, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                                       : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    mapped.head_step = heads > 1 && tensor.stride_head != 0;
    mapped.batch_step = batch > 1 && tensor.stride_batch != 0;
    auto bytes = [](bool moves, int64_t stride) { return cuuint64_t(moves ? stride * kElementBytes : 16); };
    cuuint64_t const sizes[4] = {cuuint64_t(columns), cuuint64_t(rows), cuuint64_t(mapped.head_step ? heads : 1),
                                 cuuint64_t(mapped.batch_step ? batch : 1)};
    cuuint64_t const strides[3] = {bytes(rows > 1, tensor.stride_row), bytes(mapped.head_step, tensor.stride_head),
                                   bytes(mapped.batch_step, tensor.stride_batch)};
    cuuint32_t const box[4] = {cuuint32_t(kSwizzleColumns), cuuint32_t(box_rows), 1, 1}, steps[4] = {1, 1, 1, 1};
    return encode.load(std::memory_order_relaxed)(&mapped.map, kType, 4, tensor.data, sizes, strides, box, steps,
                                                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
  }

  static int32_t launch(Params const& p, void*, cudaStream_t stream, int32_t device) {
    int32_t const status = check(p);
    if (status != ATTENTION_AUTOTUNER_OK) return status;
    if (!prepared[device].load(std::memory_order_relaxed)) return ATTENTION_AUTOTUNER_BAD_DEVICE;
    int const row_blocks = divide_up(p.seqlen_q, T::kBlockM);
    int64_t const tiles = int64_t(row_blocks) * p.heads_q * p.batch * T::kVSlices;
    if (tiles > INT32_MAX) return ATTENTION_AUTOTUNER_BAD_SHAPE;
    WgmmaForwardArguments arguments;
    bool const mapped = make_map(arguments.q, p.q, p.dim_qk, p.seqlen_q, p.heads_q, p.batch, T::kBlockM) &&
                        make_map(arguments.k, p.k, p.dim_qk, p.seqlen_k, p.heads_kv, p.batch, T::kBlockN) &&
                        make_map(arguments.v, p.v, p.dim_v, p.seqlen_k, p.heads_kv, p.batch, T::kBlockN) &&
                        make_map(arguments.mask, p.mask, p.seqlen_k, p.seqlen_q, p.heads_q, 1, T::kBlockM);
    if (!mapped) return ATTENTION_AUTOTUNER_BAD_ALIGNMENT;
    arguments.params = p;
    arguments.list = {int(tiles),
                      p.causal != 0,
                      Divider::by(row_blocks),
                      Divider::by(p.heads_q),
                      Divider::by(p.batch),
                      Divider::by(p.heads_q / p.heads_kv)};
    retnet_forward_wgmma<Config><<<int(tiles), T::kThreads, T::kSmemBytes, stream>>>(arguments);
    return cuda_status(cudaGetLastError());
  }

  static attention_autotuner_kernel_info info() {
    return {sizeof(attention_autotuner_kernel_info),
            ATTENTION_AUTOTUNER_ABI_VERSION,
            Config::kName,
            Config::kClassQK,
            Config::kClassV,
            T::kBlockM,
            T::kBlockN,
            T::kThreads,
            0,
            T::kSmemBytes,
            Config::kCopyBytes};
  }
};

}  // namespace attention_autotuner

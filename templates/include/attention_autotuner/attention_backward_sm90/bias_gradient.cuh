// The gradient of attention's bias table: of what its pass over keys sums, or by a kernel of its own
// (common/bias_gradient.cuh).
//
// The pass sums tables of short distances, of one query head a CTA, where shared memory has room: see bias_sums.cuh.
#pragma once

#include <cstdint>

#include "attention_autotuner/attention_backward_sm90/producer.cuh"
#include "attention_autotuner/common/bias_gradient.cuh"
#include "attention_autotuner/common/preprocess.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/shared_memory.cuh"
#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/host/entry.cuh"

namespace attention_autotuner {

namespace softmax_backward {

inline constexpr int kBiasSumThreads = 256;
inline constexpr int kBiasSumSmemBytes = kBiasSumThreads * int(sizeof(float));
inline constexpr int kBiasSumEntries = 32;  // of a CTA

// Adds the `count` sums of each head.
template <typename Config>
__global__ void __launch_bounds__(kBiasSumThreads)
    attention_backward_sm90_bias_gradient(ArgumentsOf<Config> const __grid_constant__ arguments,
                                          float const* __restrict__ sums, int count) {
  extern __shared__ __align__(128) char smem_bytes[];
  uint32_t const smem = shared_address(smem_bytes);
  auto const& p = arguments.params;
  constexpr int kSharing = kBiasSumThreads / kBiasSumEntries;
  int const entries = 2 * p.bias_distance + 1, ctas = divide_up(entries, kBiasSumEntries);
  int const head = int(blockIdx.x) / ctas, entry = int(blockIdx.x) % ctas * kBiasSumEntries + lane_index();
  float total = 0.0f;
  if (entry < entries) {
    float const* const first = sums + int64_t(head) * count * entries + entry;
#pragma unroll 8
    for (int i = int(threadIdx.x) / 32; i < count; i += kSharing) total += first[int64_t(i) * entries];
  }
  store_shared(smem + 4 * int(threadIdx.x), __float_as_uint(total));
  __syncthreads();
  if (int(threadIdx.x) >= 32 || entry >= entries) return;
  total = 0.0f;
#pragma unroll
  for (int i = 0; i < kSharing; ++i) total += load_shared_float(smem + 4 * (32 * i + lane_index()));
  p.dbias_table[int64_t(head) * entries + entry] = total;
}

}  // namespace softmax_backward

// The host side. `splits`: CTAs that share a block of keys.
template <typename Config, typename Keys>
struct BiasGradientSm90 {
  using KernelParams = BackwardParamsOf<Config>;
  using Params = typename AbiParams<KernelParams>::Type;
  using Other = BiasGradient<Config>;
  static constexpr bool kHas = kHasBiasTable<Config>;

  static int32_t prepare(int32_t device) {
    int32_t const status = Other::prepare(device);
    if constexpr (Keys::kSumsBias) {
      int resident = 0;
      if (status != ATTENTION_AUTOTUNER_OK) return status;
      return prepare_kernel(softmax_backward::attention_backward_sm90_bias_gradient<Config>,
                            softmax_backward::kBiasSumThreads, softmax_backward::kBiasSumSmemBytes, device, &resident);
    }
    return status;
  }
  // Whether the pass sums it.
  static bool in_pass([[maybe_unused]] Params const& p, [[maybe_unused]] int splits) {
    if constexpr (Keys::kSumsBias) {
      bool const wanted = p.dbias_table != nullptr && p.bias_distance <= Keys::kMostBiasDistance;
      return wanted && p.heads_q == p.heads_kv * splits;
    }
    return false;
  }
  static int key_blocks(Params const& p) { return divide_up(p.seqlen_k, Keys::kBlockRows); }
  static int sums_of_head(Params const& p) { return p.batch * key_blocks(p) * Keys::kWarpgroups; }
  static int64_t workspace_bytes(Params const& p, int splits) {
    if constexpr (Keys::kSumsBias) {
      int64_t const sums = int64_t(p.heads_q) * sums_of_head(p);
      if (in_pass(p, splits)) return sums * (2 * p.bias_distance + 1) * int64_t(sizeof(float));
    }
    return Other::workspace_bytes(p);
  }
  static void put(softmax_backward::BackwardPassSm90Arguments<KernelParams>& arguments, Params const& p, int splits,
                  float* sums) {
    if constexpr (kHas) {
      arguments.bias_sums = in_pass(p, splits) ? sums : nullptr;
      arguments.bias_blocks = key_blocks(p);
    }
  }
  // After the preprocess.
  static int32_t launch_before(BackwardArguments<KernelParams> const& common, float* sums, cudaStream_t stream) {
    bool const summed = in_pass(common.params, common.splits.divisor);
    return summed ? int32_t(ATTENTION_AUTOTUNER_OK) : Other::launch(common, sums, stream);
  }
  // After the passes.
  static int32_t launch_after([[maybe_unused]] BackwardArguments<KernelParams> const& common,
                              [[maybe_unused]] float const* sums, [[maybe_unused]] cudaStream_t stream) {
    if constexpr (Keys::kSumsBias) {
      Params const& p = common.params;
      if (in_pass(p, common.splits.divisor)) {
        int const ctas = p.heads_q * divide_up(2 * p.bias_distance + 1, softmax_backward::kBiasSumEntries);
        softmax_backward::attention_backward_sm90_bias_gradient<Config>
            <<<ctas, softmax_backward::kBiasSumThreads, softmax_backward::kBiasSumSmemBytes, stream>>>(common, sums,
                                                                                                       sums_of_head(p));
        return cuda_status(cudaGetLastError());
      }
    }
    return ATTENTION_AUTOTUNER_OK;
  }
};

}  // namespace attention_autotuner

// Host side of an attention forward artifact of family sm90: checks, TMA descriptors, the order of tiles, launch.
#pragma once

#include <cmath>

#include "attention_autotuner/abi.h"
#include "attention_autotuner/attention_forward_sm90/mainloop.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/host/checks.cuh"
#include "attention_autotuner/host/entry.cuh"
#include "attention_autotuner/host/tma_descriptor.cuh"
#include "attention_autotuner/host/workspace.cuh"

namespace attention_autotuner {

template <typename Config>
struct AttentionForwardSm90Entry {
  using T = AttentionForwardSm90Traits<Config>;
  using Element = typename T::Element;
  using Params = attention_autotuner_attention_forward_params;
  static constexpr bool kDynamic = T::kSchedule == Schedule::kDynamic;
  static constexpr int64_t kMaxTiles = INT32_MAX - 65536;  // indices of claims beyond the last tile stay within 32 bits
  // Resident CTAs of the whole device, set by prepare(); 0 before.
  static inline std::atomic<int> slots[kMaxDevices];

  static int32_t prepare(int32_t device) {
    if (slots[device].load() > 0) return ATTENTION_AUTOTUNER_OK;
    int multiprocessors = 0, resident = 0;
    cudaError_t const error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) return cuda_status(error);
    int32_t status = TmaDescriptors::prepare(device);
    if (status != ATTENTION_AUTOTUNER_OK) return status;
    status =
        prepare_kernel(softmax_forward::attention_forward_sm90<Config>, T::kThreads, T::kSmemBytes, device, &resident);
    if (status == ATTENTION_AUTOTUNER_OK) slots[device].store(resident * multiprocessors);
    return status;
  }

  struct Workspace : WorkspaceLayout {
    int* claimed;
    explicit Workspace(void* base) : WorkspaceLayout(base), claimed(this->template take<int>(kDynamic, 1)) {}
  };
  static size_t workspace_bytes(Params const&) { return size_t(Workspace(nullptr).used()); }

  static int32_t check(Params const& p) {
    if (!same_version(p)) return ATTENTION_AUTOTUNER_BAD_VERSION;
    bool const bounded = p.seqlens_k != nullptr || p.starts_k != nullptr;
    if (!takes_shape(p, Config::kPaddedDimQK, Config::kPaddedDimV) || (bounded && !T::kKeyBounds)) {
      return ATTENTION_AUTOTUNER_BAD_SHAPE;
    }
    bool const pointers =
        aligned(p.q, 16, p.batch, p.heads_q, p.seqlen_q) && aligned(p.k, 16, p.batch, p.heads_kv, p.seqlen_k) &&
        aligned(p.v, 16, p.batch, p.heads_kv, p.seqlen_k) && aligned(p.o, 16, p.batch, p.heads_q, p.seqlen_q);
    return pointers ? ATTENTION_AUTOTUNER_OK : ATTENTION_AUTOTUNER_BAD_ALIGNMENT;
  }

  // Heads whose tiles are computed together: those that share K and V and, where causal, as many more as L2 has room
  // for, so that the longest tiles of many heads come first. A power of two of the former, which divides most launches.
  static int section_heads(Params const& p) {
    constexpr double kSectionBytes = 32e6;  // of K and V
    int const group = p.heads_q / p.heads_kv;
    if (!p.causal) return group;
    double const bytes = 2.0 * p.seqlen_k * (p.dim_qk + p.dim_v);
    int64_t const most = int64_t(p.batch) * p.heads_kv;
    double const power = std::exp2(std::round(std::log2(std::fmax(1.0, kSectionBytes / bytes))));
    return int(std::fmin(power, double(most))) * group;
  }
  static WorkList work_list(Params const& p, int tiles, int row_blocks, int* claimed) {
    int const heads = p.heads_q * p.batch, section = section_heads(p);
    int const sections = divide_up(heads, section), last = heads - (sections - 1) * section;
    return {tiles,
            row_blocks,
            sections,
            p.causal != 0,
            Divider::by(section * row_blocks),
            Divider::by(section),
            Divider::by(last),
            Divider::by(p.heads_q),
            Divider::by(p.heads_q / p.heads_kv),
            claimed};
  }

  static int32_t launch(Params const& p, void* workspace, cudaStream_t stream, int32_t device) {
    int32_t const status = check(p);
    if (status != ATTENTION_AUTOTUNER_OK) return status;
    int const resident = slots[device].load(std::memory_order_relaxed);
    if (resident == 0) return ATTENTION_AUTOTUNER_BAD_DEVICE;
    if (kDynamic && workspace == nullptr) return ATTENTION_AUTOTUNER_BAD_SHAPE;
    int const row_blocks = divide_up(p.seqlen_q, T::kBlockM);
    int64_t const tiles = int64_t(row_blocks) * p.heads_q * p.batch;
    if (tiles > kMaxTiles) return ATTENTION_AUTOTUNER_BAD_SHAPE;
    softmax_forward::AttentionForwardSm90Arguments arguments;
    bool const described =
        TmaDescriptors::make<Element>(arguments.q, p.q, p.dim_qk, p.seqlen_q, p.heads_q, p.batch, T::kBlockM) &&
        TmaDescriptors::make<Element>(arguments.k, p.k, p.dim_qk, p.seqlen_k, p.heads_kv, p.batch, T::kBlockN) &&
        TmaDescriptors::make<Element>(arguments.v, p.v, p.dim_v, p.seqlen_k, p.heads_kv, p.batch, T::kBlockN) &&
        TmaDescriptors::make<Element>(arguments.o, p.o, p.dim_v, p.seqlen_q, p.heads_q, p.batch,
                                      softmax_forward::kWarpgroupRows);
    if (!described) return ATTENTION_AUTOTUNER_BAD_ALIGNMENT;
    Workspace const buffers(workspace);
    arguments.list = work_list(p, int(tiles), row_blocks, buffers.claimed);
    arguments.output = p.o.data;
    arguments.stride_batch = p.o.stride_batch;
    arguments.stride_head = p.o.stride_head;
    arguments.stride_row = p.o.stride_row;
    arguments.lse = p.lse;
    arguments.heads_q = p.heads_q;
    arguments.seqlen_q = p.seqlen_q;
    arguments.seqlen_k = p.seqlen_k;
    arguments.dim_v = p.dim_v;
    arguments.causal = p.causal;
    arguments.causal_offset = p.causal_offset;
    arguments.seqlens_k = p.seqlens_k;
    arguments.starts_k = p.starts_k;
    arguments.causal_from_end = p.causal_from_end;
    arguments.zero = 0;
    arguments.claim_lead = p.causal ? 1 : 4;
    arguments.exponent_scale = p.softmax_scale == 0.0f ? kLog2E : fabsf(p.softmax_scale) * kLog2E;
    arguments.sign = p.softmax_scale > 0.0f ? 1.0f : p.softmax_scale < 0.0f ? -1.0f : 0.0f;
    if constexpr (kDynamic) {
      cudaError_t const error = cudaMemsetAsync(buffers.claimed, 0, sizeof(int), stream);
      if (error != cudaSuccess) return cuda_status(error);
    }
    int const ctas = T::kSchedule == Schedule::kGrid ? int(tiles) : minimum(int(tiles), resident);
    softmax_forward::attention_forward_sm90<Config><<<ctas, T::kThreads, T::kSmemBytes, stream>>>(arguments);
    return cuda_status(cudaGetLastError());
  }

  static attention_autotuner_kernel_info info() {
    return kernel_info<Config, Params>(T::kBlockM, T::kBlockN, T::kThreads, T::kSmemBytes);
  }
};

}  // namespace attention_autotuner

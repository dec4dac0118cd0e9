// Host side of a retnet forward artifact of family sm90: checks, TMA descriptors, preparation and launch.
#pragma once

#include "attention_autotuner/abi.h"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/scheduler.cuh"
#include "attention_autotuner/host/checks.cuh"
#include "attention_autotuner/host/entry.cuh"
#include "attention_autotuner/host/tma_descriptor.cuh"
#include "attention_autotuner/score/score_mod.cuh"
#include "attention_autotuner/scores_forward_sm90/mainloop.cuh"

namespace attention_autotuner {

template <typename Config>
struct ForwardSm90Entry {
  using T = ForwardSm90Traits<Config>;
  using Params = attention_autotuner_retnet_forward_params;
  static inline std::atomic<bool> prepared[kMaxDevices];

  static int32_t prepare(int32_t device) {
    if (prepared[device].load()) return ATTENTION_AUTOTUNER_OK;
    int resident = 0;
    int32_t status = TmaDescriptors::prepare(device);
    if (status != ATTENTION_AUTOTUNER_OK) return status;
    status = prepare_kernel(scores_forward_sm90<Config>, T::kThreads, T::kSmemBytes, device, &resident);
    if (status == ATTENTION_AUTOTUNER_OK) prepared[device].store(true);
    return status;
  }

  static size_t workspace_bytes(Params const&) { return 0; }

  static int32_t check(Params const& p) {
    if (!same_version(p)) return ATTENTION_AUTOTUNER_BAD_VERSION;
    if (!takes_shape(p, Config::kPaddedDimQK, Config::kPaddedDimV) || !has_score_mod_inputs<ScoreMod::kMasked>(p)) {
      return ATTENTION_AUTOTUNER_BAD_SHAPE;
    }
    bool const pointers =
        aligned(p.q, 16, p.batch, p.heads_q, p.seqlen_q) && aligned(p.k, 16, p.batch, p.heads_kv, p.seqlen_k) &&
        aligned(p.v, 16, p.batch, p.heads_kv, p.seqlen_k) && aligned(p.o, 16, p.batch, p.heads_q, p.seqlen_q) &&
        aligned(p.mask, 16, 1, p.heads_q, p.seqlen_q);
    return pointers ? ATTENTION_AUTOTUNER_OK : ATTENTION_AUTOTUNER_BAD_ALIGNMENT;
  }

  static int32_t launch(Params const& p, void*, cudaStream_t stream, int32_t device) {
    int32_t const status = check(p);
    if (status != ATTENTION_AUTOTUNER_OK) return status;
    if (!prepared[device].load(std::memory_order_relaxed)) return ATTENTION_AUTOTUNER_BAD_DEVICE;
    int const row_blocks = divide_up(p.seqlen_q, T::kBlockM);
    int64_t const tiles = int64_t(row_blocks) * p.heads_q * p.batch * T::kVSlices;
    if (tiles > INT32_MAX) return ATTENTION_AUTOTUNER_BAD_SHAPE;
    ForwardSm90Arguments arguments;
    using Element = typename T::Element;
    bool const described =
        TmaDescriptors::make<Element>(arguments.q, p.q, p.dim_qk, p.seqlen_q, p.heads_q, p.batch, T::kBlockM) &&
        TmaDescriptors::make<Element>(arguments.k, p.k, p.dim_qk, p.seqlen_k, p.heads_kv, p.batch, T::kBlockN) &&
        TmaDescriptors::make<Element>(arguments.v, p.v, p.dim_v, p.seqlen_k, p.heads_kv, p.batch, T::kBlockN) &&
        TmaDescriptors::make<Element>(arguments.mask, p.mask, p.seqlen_k, p.seqlen_q, p.heads_q, 1, T::kBlockM);
    if (!described) return ATTENTION_AUTOTUNER_BAD_ALIGNMENT;
    arguments.params = p;
    arguments.list = {int(tiles),
                      p.causal != 0,
                      Divider::by(row_blocks),
                      Divider::by(p.heads_q),
                      Divider::by(p.batch),
                      Divider::by(p.heads_q / p.heads_kv)};
    scores_forward_sm90<Config><<<int(tiles), T::kThreads, T::kSmemBytes, stream>>>(arguments);
    return cuda_status(cudaGetLastError());
  }

  static attention_autotuner_kernel_info info() {
    return kernel_info<Config>(T::kBlockM, T::kBlockN, T::kThreads, T::kSmemBytes);
  }
};

}  // namespace attention_autotuner

// Host side of an artifact of the toy kernel: checks, preparation and launch.
#pragma once

#include "attention_autotuner/host/checks.cuh"
#include "attention_autotuner/host/entry.cuh"
#include "attention_autotuner/naive_sm80/mainloop.cuh"

namespace attention_autotuner {

template <typename Config>
struct NaiveEntry {
  using T = NaiveTraits<Config>;
  using Params = attention_autotuner_attention_forward_params;
  static_assert(Config::kScoreMod == ScoreMod::kSoftmax, "attention_takes_softmax");
  static inline std::atomic<bool> prepared[kMaxDevices];

  static int32_t prepare(int32_t device) {
    if (prepared[device].load()) return ATTENTION_AUTOTUNER_OK;
    int resident = 0;
    int32_t const status = prepare_kernel(naive_attention<Config>, T::kThreads, 0, device, &resident);
    if (status == ATTENTION_AUTOTUNER_OK) prepared[device].store(true);
    return status;
  }

  static size_t workspace_bytes(Params const&) { return 0; }

  static int32_t check(Params const& p) {
    if (!same_version(p)) return ATTENTION_AUTOTUNER_BAD_VERSION;
    if (!takes_shape(p, Config::kPaddedDimQK, Config::kPaddedDimV)) return ATTENTION_AUTOTUNER_BAD_SHAPE;
    constexpr int kBytes = Config::kCopyBytes;
    bool const pointers =
        aligned(p.q, kBytes, p.batch, p.heads_q, p.seqlen_q) && aligned(p.k, kBytes, p.batch, p.heads_kv, p.seqlen_k) &&
        aligned(p.v, kBytes, p.batch, p.heads_kv, p.seqlen_k) && aligned(p.o, 16, p.batch, p.heads_q, p.seqlen_q);
    return pointers ? ATTENTION_AUTOTUNER_OK : ATTENTION_AUTOTUNER_BAD_ALIGNMENT;
  }

  static int32_t launch(Params const& p, void*, cudaStream_t stream, int32_t device) {
    int32_t const status = check(p);
    if (status != ATTENTION_AUTOTUNER_OK) return status;
    if (!prepared[device].load(std::memory_order_relaxed)) return ATTENTION_AUTOTUNER_BAD_DEVICE;
    int64_t const ctas = int64_t(divide_up(p.seqlen_q, Config::kWarps)) * p.heads_q * p.batch;
    if (ctas > INT32_MAX) return ATTENTION_AUTOTUNER_BAD_SHAPE;
    naive_attention<Config><<<int(ctas), T::kThreads, 0, stream>>>(p);
    return cuda_status(cudaGetLastError());
  }

  static attention_autotuner_kernel_info info() {
    return kernel_info<Config, Params>(Config::kWarps, T::kLanes, T::kThreads, 0);
  }
};

}  // namespace attention_autotuner

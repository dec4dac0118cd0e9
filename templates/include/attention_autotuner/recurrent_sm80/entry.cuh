// Host side of a recurrent retention artifact: checks, preparation and the launch of its one kernel.
#pragma once

#include "attention_autotuner/common/scheduler.cuh"
#include "attention_autotuner/host/checks.cuh"
#include "attention_autotuner/host/early_launch.cuh"
#include "attention_autotuner/host/entry.cuh"
#include "attention_autotuner/host/retention_checks.cuh"
#include "attention_autotuner/recurrent_sm80/mainloop.cuh"

namespace attention_autotuner {

template <typename Config>
struct RecurrentEntry {
  using Params = RetentionForwardParams;
  using T = RecurrentTraits<Config>;
  static inline std::atomic<bool> prepared[kMaxDevices], early;

  static int32_t prepare(int32_t device) {
    if (prepared[device].load()) return ATTENTION_AUTOTUNER_OK;
    int resident = 0;
    int32_t status = prepare_kernel(retention_recurrent<Config>, T::kThreads, T::kSmemBytes, device, &resident);
    if (status == ATTENTION_AUTOTUNER_OK) status = EarlyLaunch::prepare(retention_recurrent<Config>, early);
    if (status == ATTENTION_AUTOTUNER_OK) prepared[device].store(true);
    return status;
  }

  static size_t workspace_bytes(Params const&) { return 0; }

  static int32_t launch(Params const& p, void*, cudaStream_t stream, int32_t device) {
    int32_t const status = check_retention_shape(p, Config::kPaddedDimQK, Config::kPaddedDimV);
    if (status != ATTENTION_AUTOTUNER_OK) return status;
    bool const states = reinterpret_cast<uintptr_t>(p.initial_state) % 16 == 0 &&  // read and written in fours
                        reinterpret_cast<uintptr_t>(p.final_state) % 16 == 0;
    if (!states || !takes_retention_inputs(p, Config::kCopyBytes) || !aligned(p.o, 16, p.batch, p.heads_q, p.seqlen)) {
      return ATTENTION_AUTOTUNER_BAD_ALIGNMENT;
    }
    if (!prepared[device].load(std::memory_order_relaxed)) return ATTENTION_AUTOTUNER_BAD_DEVICE;
    int64_t const ctas = int64_t(p.batch) * p.heads_q * T::kSlices;
    if (ctas > INT32_MAX) return ATTENTION_AUTOTUNER_BAD_SHAPE;
    return EarlyLaunch::start(early.load(std::memory_order_relaxed), retention_recurrent<Config>, int(ctas),
                              T::kThreads, T::kSmemBytes, stream, p, Divider::by(p.heads_q),
                              Divider::by(p.heads_q / p.heads_kv));
  }

  static attention_autotuner_kernel_info info() {
    return kernel_info<Config>(1, T::kColumns, T::kThreads, T::kSmemBytes);
  }
};

}  // namespace attention_autotuner

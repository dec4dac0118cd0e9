// Host side of a forward artifact with scores: checks, preparation and launch.
#pragma once

#include <cmath>

#include "attention_autotuner/abi.h"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/scheduler.cuh"
#include "attention_autotuner/host/checks.cuh"
#include "attention_autotuner/host/entry.cuh"
#include "attention_autotuner/scores_forward_sm80/mainloop.cuh"

namespace attention_autotuner {

// The factor of the scores, which a launch takes beside the shapes.
inline float score_factor(attention_autotuner_retnet_forward_params const& p) { return p.scale; }
template <typename AttentionParams>
inline float score_factor(AttentionParams const& p) {
  return p.softmax_scale == 0.0f ? kLog2E : fabsf(p.softmax_scale) * kLog2E;  // 0 clears Q: see apply_scale_sign
}

template <typename Config>
struct ForwardEntry {
  using T = ForwardTraits<Config>;
  using Params = typename T::Params;
  // Resident CTAs of the whole device, set by prepare(); 0 before.
  static inline std::atomic<int> slots[kMaxDevices];

  static int32_t prepare(int32_t device) {
    if (slots[device].load() > 0) return ATTENTION_AUTOTUNER_OK;
    int multiprocessors = 0, resident = 0;
    cudaError_t const error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) return cuda_status(error);
    int32_t const status = prepare_kernel(scores_forward_sm80<Config>, T::kThreads, T::kSmemBytes, device, &resident);
    if (status == ATTENTION_AUTOTUNER_OK) slots[device].store(resident * multiprocessors);
    return status;
  }

  static size_t workspace_bytes(Params const&) { return 0; }

  static int32_t check(Params const& p) {
    if (!same_version(p)) return ATTENTION_AUTOTUNER_BAD_VERSION;
    if (!takes_shape(p, T::kPaddedDimQK, Config::kPaddedDimV) || !has_score_mod_inputs<T::kScoreMod>(p) ||
        !has_values<typename T::Modifications>(p)) {
      return ATTENTION_AUTOTUNER_BAD_SHAPE;
    }
    constexpr int kBytes = Config::kCopyBytes;
    bool const pointers = aligned(p.q, kBytes, batch_of<T::kPacked>(p), p.heads_q, rows_of_queries<T::kPacked>(p)) &&
                          aligned(p.k, kBytes, batch_of<T::kPacked>(p), p.heads_kv, rows_of_keys<T::kPacked>(p)) &&
                          aligned(p.v, kBytes, batch_of<T::kPacked>(p), p.heads_kv, rows_of_keys<T::kPacked>(p)) &&
                          aligned(p.o, 16, batch_of<T::kPacked>(p), p.heads_q, rows_of_queries<T::kPacked>(p)) &&
                          mask_aligned<T::kScoreMod>(p, kBytes);
    return pointers ? ATTENTION_AUTOTUNER_OK : ATTENTION_AUTOTUNER_BAD_ALIGNMENT;
  }

  static int32_t launch(Params const& p, void*, cudaStream_t stream, int32_t device) {
    int32_t const status = check(p);
    if (status != ATTENTION_AUTOTUNER_OK) return status;
    int const resident = slots[device].load(std::memory_order_relaxed);
    if (resident == 0) return ATTENTION_AUTOTUNER_BAD_DEVICE;
    int row_blocks = (p.seqlen_q + T::kBlockM - 1) / T::kBlockM;
    if constexpr (T::kPacked) row_blocks = count_blocks(p.total_q, p.batch, T::kBlockM);
    int64_t const tiles = int64_t(row_blocks) * p.heads_q * batch_of<T::kPacked>(p) * Config::kVSlices;
    if (tiles > INT32_MAX) return ATTENTION_AUTOTUNER_BAD_SHAPE;
    int grid = int(tiles);
    if (Config::kPersistent) grid = minimum(grid, resident);
    TileList const list{int(tiles),
                        p.causal != 0,
                        Divider::by(row_blocks),
                        Divider::by(p.heads_q),
                        Divider::by(batch_of<T::kPacked>(p)),
                        Divider::by(p.heads_q / p.heads_kv)};
    scores_forward_sm80<Config><<<grid, T::kThreads, T::kSmemBytes, stream>>>(with_window(p), list, score_factor(p));
    return cuda_status(cudaGetLastError());
  }

  static attention_autotuner_kernel_info info() {
    return kernel_info<Config, Params>(T::kBlockM, T::kBlockN, T::kThreads, T::kSmemBytes);
  }
};

}  // namespace attention_autotuner

// Host side of a forward artifact with scores: checks, preparation and launch.
#pragma once

#include <cmath>

#include "attention_autotuner/abi.h"
#include "attention_autotuner/common/packed_heads.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/scheduler.cuh"
#include "attention_autotuner/host/checks.cuh"
#include "attention_autotuner/host/entry.cuh"
#include "attention_autotuner/host/split_kv.cuh"
#include "attention_autotuner/host/workspace.cuh"
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
  using Params = typename AbiParams<typename T::Params>::Type;
  // Resident CTAs of the whole device, set by prepare(); 0 before.
  static inline std::atomic<int> slots[kMaxDevices];

  static int32_t prepare(int32_t device) {
    if (slots[device].load() > 0) return ATTENTION_AUTOTUNER_OK;
    int multiprocessors = 0, resident = 0;
    cudaError_t const error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) return cuda_status(error);
    int32_t status = prepare_kernel(scores_forward_sm80<Config>, T::kThreads, T::kSmemBytes, device, &resident);
    if constexpr (T::kSplitKv) {  // which a capture may launch first
      int combining = 0;
      if (status == ATTENTION_AUTOTUNER_OK) {
        status = prepare_kernel(scores_forward_sm80_combine<Config>, kCombineThreads, 0, device, &combining);
      }
    }
    if constexpr (T::kSpanned) {
      int finding = 0;
      auto const find = find_spans<Config, false, Params>;
      if (status == ATTENTION_AUTOTUNER_OK) status = prepare_kernel(find, kSpanThreads, 0, device, &finding);
    }
    if (status == ATTENTION_AUTOTUNER_OK) slots[device].store(resident * multiprocessors);
    return status;
  }

  using Splits = SplitKv<T::kSplitKv, T::kBlockN, Config::kPaddedDimV, Params, T::kPacked>;
  struct Workspace : WorkspaceLayout {
    typename Splits::Partial partial;
    int2* spans;
    Workspace(void* base, Params const& p) : WorkspaceLayout(base), partial(*this, p), spans(nullptr) {
      if constexpr (T::kSpanned) spans = this->template take<int2>(true, count_spans<false>(p));
    }
  };
  static size_t workspace_bytes(Params const& p) {
    return check_shape(p) == ATTENTION_AUTOTUNER_OK ? size_t(Workspace(nullptr, p).used()) : 0;
  }

  static int32_t check_shape(Params const& p) {
    if (!same_version(p)) return ATTENTION_AUTOTUNER_BAD_VERSION;
    if (!takes_shape(p, T::kPaddedDimQK, Config::kPaddedDimV) || !has_score_mod_inputs<T::kScoreMod>(p) ||
        !has_values<typename T::Modifications>(p)) {
      return ATTENTION_AUTOTUNER_BAD_SHAPE;
    }
    return ATTENTION_AUTOTUNER_OK;
  }
  static int32_t check(Params const& p) {
    int32_t const status = check_shape(p);
    if (status != ATTENTION_AUTOTUNER_OK) return status;
    constexpr int kBytes = Config::kCopyBytes;
    bool const pointers = aligned(p.q, kBytes, batch_of<T::kPacked>(p), p.heads_q, rows_of_queries<T::kPacked>(p)) &&
                          aligned(p.k, kBytes, batch_of<T::kPacked>(p), p.heads_kv, rows_of_keys<T::kPacked>(p)) &&
                          aligned(p.v, kBytes, batch_of<T::kPacked>(p), p.heads_kv, rows_of_keys<T::kPacked>(p)) &&
                          aligned(p.o, 16, batch_of<T::kPacked>(p), p.heads_q, rows_of_queries<T::kPacked>(p)) &&
                          mask_aligned<T::kScoreMod>(p, kBytes);
    return pointers ? ATTENTION_AUTOTUNER_OK : ATTENTION_AUTOTUNER_BAD_ALIGNMENT;
  }

  static int32_t launch(Params const& p, void* workspace, cudaStream_t stream, int32_t device) {
    int32_t const status = check(p);
    if (status != ATTENTION_AUTOTUNER_OK) return status;
    Workspace const buffers(workspace, p);
    if (!takes_workspace(workspace, buffers.used())) return ATTENTION_AUTOTUNER_BAD_ALIGNMENT;
    int const resident = slots[device].load(std::memory_order_relaxed);
    if (resident == 0) return ATTENTION_AUTOTUNER_BAD_DEVICE;
    PackedHeads const packed = PackedHeads::of(T::kPackGqa, p.heads_q / p.heads_kv, T::kBlockM);
    int const heads = p.heads_q / packed.heads.divisor, splits = Splits::count(p);
    int row_blocks = divide_up(p.seqlen_q, packed.queries);
    if constexpr (T::kPacked) row_blocks = count_blocks(p.total_q, p.batch, packed.queries);
    int64_t const tiles = int64_t(row_blocks) * heads * batch_of<T::kPacked>(p) * Config::kVSlices * splits;
    if (tiles > INT32_MAX) return ATTENTION_AUTOTUNER_BAD_SHAPE;
    int grid = int(tiles);
    if (Config::kPersistent) grid = minimum(grid, resident);
    TileList const whole{int(tiles),
                         p.causal != 0,
                         Divider::by(row_blocks),
                         Divider::by(heads),
                         Divider::by(batch_of<T::kPacked>(p)),
                         Divider::by(heads / p.heads_kv)};
    typename T::List list;
    if constexpr (T::kFewQueries) {
      list = {whole,
              packed,
              Divider::by(int(tiles) / splits),
              Divider::by(splits),
              buffers.partial.output,
              buffers.partial.lse,
              Splits::rows(p)};
    } else {
      list = whole;
    }
    if constexpr (T::kSpanned) {
      int32_t const searched = launch_spans<Config, false>(false, with_window(p), buffers.spans, stream);
      if (searched != ATTENTION_AUTOTUNER_OK) return searched;
      scores_forward_sm80<Config><<<grid, T::kThreads, T::kSmemBytes, stream>>>(
          with_spans(with_window(p), buffers.spans), list, score_factor(p));
    } else {
      scores_forward_sm80<Config><<<grid, T::kThreads, T::kSmemBytes, stream>>>(with_window(p), list, score_factor(p));
    }
    cudaError_t const error = cudaGetLastError();
    if (error != cudaSuccess || splits == 1) return cuda_status(error);
    if constexpr (T::kSplitKv) {
      return Splits::combine(scores_forward_sm80_combine<Config>, p, buffers.partial, stream);
    }
    return ATTENTION_AUTOTUNER_OK;
  }

  static attention_autotuner_kernel_info info() {
    return kernel_info<Config, Params>(T::kBlockM, T::kBlockN, T::kThreads, T::kSmemBytes);
  }
};

}  // namespace attention_autotuner

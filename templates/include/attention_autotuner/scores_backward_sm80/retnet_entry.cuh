// Host side of a retnet backward artifact: that of attention over retnet's params, and the gradient of the mask.
#pragma once

#include "attention_autotuner/common/mask_gradient.cuh"
#include "attention_autotuner/host/entry.cuh"
#include "attention_autotuner/score/masked_backward.cuh"
#include "attention_autotuner/score/score_mod.cuh"
#include "attention_autotuner/scores_backward_sm80/entry.cuh"

namespace attention_autotuner {

template <typename Config>
struct RetNetBackwardEntry : BackwardEntry<Config> {
  static_assert(Config::kScoreMod != ScoreMod::kSoftmax, "retnet_has_no_softmax");
  using Base = BackwardEntry<Config>;
  using typename Base::Params;
  static constexpr bool kMasked = Config::kScoreMod == ScoreMod::kMasked;

  static int32_t prepare(int32_t device) {
    int32_t status = ATTENTION_AUTOTUNER_OK;
    if constexpr (kMasked) status = prepare_mask_gradient<Config>(device);
    return status == ATTENTION_AUTOTUNER_OK ? Base::prepare(device) : status;
  }

  static int32_t launch(Params const& p, void* workspace, cudaStream_t stream, int32_t device) {
    if (Base::check_shape(p) != ATTENTION_AUTOTUNER_OK) return Base::check_shape(p);
    if (p.r_grad && p.o.data == nullptr) return ATTENTION_AUTOTUNER_BAD_SHAPE;
    if (!kMasked && p.dmask.data != nullptr) return ATTENTION_AUTOTUNER_BAD_SHAPE;
    int32_t const status = Base::launch(p, workspace, stream, device);
    if constexpr (kMasked) {
      if (status == ATTENTION_AUTOTUNER_OK && p.dmask.data != nullptr) {
        return launch_mask_gradient<Config>(Base::arguments_of(p, typename Base::Workspace(p), workspace), stream);
      }
    }
    return status;
  }
};

}  // namespace attention_autotuner

// Host side of a retnet forward artifact: that of attention, over retnet's params.
#pragma once

#include "attention_autotuner/score/masked.cuh"
#include "attention_autotuner/score/score_mod.cuh"
#include "attention_autotuner/scores_forward_sm80/entry.cuh"

namespace attention_autotuner {

template <typename Config>
struct RetNetForwardEntry : ForwardEntry<Config> {
  static_assert(Config::kScoreMod != ScoreMod::kSoftmax, "retnet_has_no_softmax");
};

}  // namespace attention_autotuner

// Host side of attention's backward artifacts.
#pragma once

#include "attention_autotuner/score/score_mod.cuh"
#include "attention_autotuner/score/softmax_backward.cuh"
#include "attention_autotuner/scores_backward_sm80/entry.cuh"

namespace attention_autotuner {

template <typename Config>
struct AttentionBackwardEntry : BackwardEntry<Config> {
  static_assert(Config::kScoreMod == ScoreMod::kSoftmax, "attention_takes_softmax");
};

}  // namespace attention_autotuner

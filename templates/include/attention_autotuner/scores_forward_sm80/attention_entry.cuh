// Host side of attention's forward artifacts.
#pragma once

#include "attention_autotuner/score/score_mod.cuh"
#include "attention_autotuner/score/softmax.cuh"
#include "attention_autotuner/scores_forward_sm80/entry.cuh"

namespace attention_autotuner {

template <typename Config>
struct AttentionForwardEntry : ForwardEntry<Config> {
  static_assert(Config::kScoreMod == ScoreMod::kSoftmax, "attention_takes_softmax");
};

}  // namespace attention_autotuner

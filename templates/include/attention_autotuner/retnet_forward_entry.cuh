// Host side of a retnet forward artifact: that of attention, over retnet's params.
//
// Called by: templates/retnet/forward.cu.jinja.
#pragma once

#include "attention_forward_entry.cuh"
#include "retnet_weights_sm80.cuh"

namespace attention_autotuner {

template <typename Config>
struct RetNetForwardEntry : ForwardEntry<Config> {
  static_assert(Config::kWeights != Weights::kSoftmax, "retnet_has_no_softmax");
};

}  // namespace attention_autotuner

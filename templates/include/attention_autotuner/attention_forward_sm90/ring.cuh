// Position in a ring of stages, for what reads or fills them in turn.
#pragma once

namespace attention_autotuner {

// Position in a ring of stages.
template <int Stages>
struct RingCursor {
  int stage = 0, phase = 0;
  __device__ __forceinline__ void advance() {
    if constexpr (Stages == 1) {
      phase ^= 1;
    } else if (++stage == Stages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

}  // namespace attention_autotuner

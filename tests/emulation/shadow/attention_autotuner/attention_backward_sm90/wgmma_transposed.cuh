// The instructions of the header of this name, over the emulated machine.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "attention_autotuner/sm90/wgmma_atoms.cuh"

namespace attention_autotuner {

template <int N>
struct WgmmaTransposed {
  template <typename Element>
  static void ss(float (&sums)[N / 2], uint64_t a, uint64_t b, int accumulate) {
    ::emulation::issue_mma({N, !std::is_same_v<Element, __half>, false, true, false}, sums, a, nullptr, b,
                           accumulate != 0);
  }
};

}  // namespace attention_autotuner

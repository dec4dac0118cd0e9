// The instructions of the header of this name, over the emulated machine.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace attention_autotuner {

template <int N>
struct Wgmma {
  template <typename Element, int TransposedB, int TransposedA = 0>
  static void ss(float (&sums)[N / 2], uint64_t a, uint64_t b, int accumulate) {
    ::emulation::issue_mma({N, !std::is_same_v<Element, __half>, false, TransposedA != 0, TransposedB != 0}, sums, a,
                           nullptr, b, accumulate != 0);
  }
  template <typename Element, int TransposedB>
  static void rs(float (&sums)[N / 2], uint32_t const* a, uint64_t b, int accumulate) {
    uint32_t const* const registers[4] = {a, a + 1, a + 2, a + 3};
    ::emulation::issue_mma({N, !std::is_same_v<Element, __half>, true, false, TransposedB != 0}, sums, 0, registers, b,
                           accumulate != 0);
  }
};

}  // namespace attention_autotuner

// MMAs of a warp as CUTLASS names them: 16 rows by 8 columns over a depth of 16.
#pragma once

#include <cstdint>

namespace cute {

template <bool Bf16>
struct EmulatedMma16x8x16 {
  static void fma(float& d0, float& d1, float& d2, float& d3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                  uint32_t b0, uint32_t b1, float c0, float c1, float c2, float c3) {
    float sums[4] = {c0, c1, c2, c3};
    ::emulation::multiply_in_warp(sums, {{a0, a1, a2, a3, b0, b1}}, Bf16);
    d0 = sums[0], d1 = sums[1], d2 = sums[2], d3 = sums[3];
  }
};
using SM80_16x8x16_F32F16F16F32_TN = EmulatedMma16x8x16<false>;
using SM80_16x8x16_F32BF16BF16F32_TN = EmulatedMma16x8x16<true>;

}  // namespace cute

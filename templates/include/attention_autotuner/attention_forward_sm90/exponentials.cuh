// Exponentials of scores: of the unit of special functions, or polynomials on the FMA pipe where that unit is the
// limit.
#pragma once

#include "attention_autotuner/common/scalars.cuh"

namespace attention_autotuner {

// 2^x to 1e-4 of it, less than the rounding of P; 0 below 2^-127, so of a hidden score too. NaN does not stay NaN, and
// becomes no number less than 2^126.
__device__ __forceinline__ float exp2_polynomial(float x) {
  constexpr float kRounds = 12582912.0f;  // 1.5 * 2^23: a sum with it has the nearest integer in its last bits
  asm("max.NaN.f32 %0, %1, %2;\n" : "=f"(x) : "f"(x), "f"(-127.0f));
  asm("min.NaN.f32 %0, %1, %2;\n" : "=f"(x) : "f"(x), "f"(127.0f));
  float const whole = x + kRounds, rest = x - (whole - kRounds);  // |rest| <= 1/2
  // Minimax with 1 at 0, so that 2^-127 is 0 exactly.
  float const power = fmaf(fmaf(fmaf(0.05500855f, rest, 0.24221029f), rest, 0.69328289f), rest, 1.0f);
  return __int_as_float(__float_as_int(power) + (__float_as_int(whole) << 23));
}

// 2^x for a score of group `g` of eight keys, of which `kPolynomials` in four are polynomials.
template <int kPolynomials>
__device__ __forceinline__ float exponential(float x, int g) {
  bool const spread = (g + 1) * kPolynomials / 4 > g * kPolynomials / 4;
  return spread ? exp2_polynomial(x) : exp2_approximate(x);
}

}  // namespace attention_autotuner

// Integer helpers for traits, and small functions of floats.
#pragma once

namespace attention_autotuner {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

__host__ __device__ constexpr int maximum(int a, int b) { return a > b ? a : b; }
__host__ __device__ constexpr int minimum(int a, int b) { return a < b ? a : b; }
__host__ __device__ constexpr int divide_up(int a, int b) { return (a + b - 1) / b; }

__device__ __forceinline__ float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal_approximate(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// Exact where x is a power of two: products with it would else be too small, by one place and on the average.
__device__ __forceinline__ float reciprocal(float x) {
  float const y = reciprocal_approximate(x);
  return fmaf(y, fmaf(-x, y, 1.0f), y);
}

// To 2^-22 or so of 1, also near 0: an error that is relative to the limits, not to the result.
__device__ __forceinline__ float hyperbolic_tangent(float x) {
  return fmaf(-2.0f, reciprocal_approximate(exp2_approximate(2.0f * kLog2E * x) + 1.0f), 1.0f);
}

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }
__device__ __forceinline__ float minus_infinity() { return -infinity(); }

// sign(x) y
__device__ __forceinline__ float with_sign(float x, float y) { return x > 0.0f ? y : x < 0.0f ? -y : 0.0f; }

}  // namespace attention_autotuner

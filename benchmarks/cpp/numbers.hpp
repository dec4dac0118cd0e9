// Numbers of 16 bits on the host, and the normal numbers that inputs are made of, the same on host and device.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define ATTENTION_AUTOTUNER_BOTH __host__ __device__
#else
#define ATTENTION_AUTOTUNER_BOTH
#endif

namespace attention_autotuner::benchmarks {

enum class Number { kFp16, kBf16, kFp32 };

inline constexpr size_t bytes_of(Number type) { return type == Number::kFp32 ? 4 : 2; }
// The distance of 1 from the next greater number.
inline constexpr double epsilon_of(Number type) {
  return type == Number::kFp16 ? 0x1p-10 : type == Number::kBf16 ? 0x1p-7 : 0x1p-23;
}

inline float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float decode(uint16_t bits, Number type) {
  if (type == Number::kBf16) return from_bits(uint32_t(bits) << 16);
  uint32_t const sign = uint32_t(bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 0x3FF;
  if (exponent == 31) return from_bits(sign | 0x7F800000 | fraction << 13);
  if (exponent != 0) return from_bits(sign | (exponent + 112) << 23 | fraction << 13);
  float const tiny = float(fraction) * 0x1p-24f;
  return sign != 0 ? -tiny : tiny;
}

// Rounded to nearest, ties to even; what is beyond the range is infinite.
inline double rounded(double value, Number type) {
  if (type == Number::kFp32) return double(float(value));
  if (!std::isfinite(value) || value == 0) return value;
  int const digits = type == Number::kFp16 ? 11 : 8;
  int const lowest = type == Number::kFp16 ? -24 : -133;  // exponent of the smallest subnormal
  int exponent;
  std::frexp(value, &exponent);
  int const unit = exponent - digits > lowest ? exponent - digits : lowest;
  double const rounded = std::ldexp(std::nearbyint(std::ldexp(value, -unit)), unit);
  double const largest = type == Number::kFp16 ? 65504.0 : 0x1.FEp127;
  return std::fabs(rounded) > largest ? std::copysign(INFINITY, rounded) : rounded;
}

// A normal number of a seed and an index: two hashes (splitmix64), then Box and Muller's transform.
ATTENTION_AUTOTUNER_BOTH inline float normal(uint64_t seed, uint64_t index) {
  uint64_t x = seed * 0x9E3779B97F4A7C15ull + index + 1;
  x *= 0x9E3779B97F4A7C15ull;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ x >> 27) * 0x94D049BB133111EBull;
  x ^= x >> 31;
  float const radius = (float(x >> 40) + 0.5f) * 0x1p-24f, angle = float(x & 0xFFFFFF) * 0x1p-24f;
  return sqrtf(-2.0f * logf(radius)) * cosf(6.2831853f * angle);
}

}  // namespace attention_autotuner::benchmarks

// Values of score modifications in the arguments of family sm90's attention, forward and backward.
#pragma once

#include <cstdint>

#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/score/modifications.cuh"

namespace attention_autotuner {

// Which modifications a config has, of those that family sm90 knows.
template <typename Config>
struct ScoreModsOf {
  using Modifications = typename ModificationsOf<Config>::Type;
  static constexpr bool kPacked = Modifications::template kHas<Packed>;
  static constexpr bool kSpanned = Modifications::template kHas<Spans>;
  static constexpr bool kListed = kPacked || kSpanned;  // a kernel of its own says what is visited
  // With values or windows: packing by itself bends no score.
  static constexpr bool kModified = kBendsScores<Config>;
  static constexpr bool kSoftcap = Modifications::template kHas<Softcap>;
  static constexpr bool kAlibi = Modifications::template kHas<AlibiSlopes>;
  static constexpr bool kBias = Modifications::template kHas<BiasTable>;
  static constexpr bool kSinks = Modifications::template kHas<Sinks>;
  static constexpr bool kAttnMask = Modifications::template kHas<AttnMask>;
};

// Part of the arguments of kernels with modifications, and nothing of others.
template <bool kModified, bool kBias = false>
struct ScoreValues {};
template <>
struct ScoreValues<true, false> {
  int window_left, window_right;  // as with_window leaves them
  int zero;                       // which the compiler does not know
  float tanh_scale;               // of scores under a softcap: softmax_scale / softcap
  float slope_scale;              // log2(e) over the exponent's scale
  int slopes_per_batch;           // 0 where batch entries share slopes
  float const *alibi_slopes, *sinks;
};
template <>
struct ScoreValues<true, true> : ScoreValues<true, false> {
  float const* bias_table;
  int bias_distance;
};

// What a table adds to the scores of a tile, of which keys are at least `least` and at most `most` past the diagonals.
struct BiasOfTile {
  float const* middle;  // of the head's entries
  int distance;         // the greatest with an entry of its own
  bool varies;          // not all scores take the same entry
  bool within;          // all take entries of their own

  template <typename Values>
  __device__ __forceinline__ BiasOfTile(Values const& values, int head, int least, int most)
      : middle(BiasTable::middle_of(values, head)),
        distance(values.bias_distance),
        varies(most > -distance && least < distance),
        within(least >= -distance && most <= distance) {}
  __device__ __forceinline__ float operator[](int past) const {
    return middle[minimum(maximum(past, -distance), distance)];
  }
};

// The values in params. Under a softcap, `exponent_scale`, by which exponents are scores, becomes that of the tangents.
template <typename Mods, typename Params>
inline void take_values(ScoreValues<true, Mods::kBias>& values, Params const& asked, float& exponent_scale) {
  Params const params = with_window(asked);
  values.window_left = params.window_left;
  values.window_right = params.window_right;
  values.zero = 0;
  values.slopes_per_batch = params.alibi_per_batch ? params.heads_q : 0;
  values.alibi_slopes = params.alibi_slopes;
  values.sinks = params.sinks;
  if constexpr (Mods::kBias) {
    values.bias_table = params.bias_table;
    values.bias_distance = params.bias_distance;
  }
  if constexpr (Mods::kSoftcap) {
    values.tanh_scale = params.softmax_scale / params.softcap;
    exponent_scale = params.softcap * kLog2E;
  }
  values.slope_scale = kLog2E / exponent_scale;
}

// To 2^-11 of the result, one instruction on the unit of exponentials.
__device__ __forceinline__ float tanh_approximate(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace attention_autotuner

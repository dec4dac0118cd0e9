// LSE and delta of a row, or their counterparts for retention, which a backward needs beside its scores: see
// common/backward_arguments.cuh.
#pragma once

#include "attention_autotuner/abi.h"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/score/score_mod.cuh"

namespace attention_autotuner {

template <ScoreMod kScoreMod>
struct LseDelta {
  using Params = attention_autotuner_retnet_backward_params;

  __device__ __forceinline__ static float neutral_base() { return 0.0f; }
  __device__ __forceinline__ static bool want_delta(Params const& p) { return p.r_grad != 0; }
  // Base and shift from delta = rowsum(dO O). `place` is the row's index among all rows.
  __device__ __forceinline__ static float2 find(Params const& p, int64_t place, float delta) {
    float const r = p.r == nullptr ? 1.0f : p.r[place];
    bool const moves = p.r_grad && r > 1.0f && r < p.r_clamp_max;
    return make_float2(1.0f / r, moves ? -delta / r : 0.0f);
  }
};

template <>
struct LseDelta<ScoreMod::kSoftmax> {
  __device__ __forceinline__ static float neutral_base() { return infinity(); }
  template <typename Params>
  __device__ __forceinline__ static bool want_delta(Params const&) {
    return true;
  }
  // Base and shift from delta = rowsum(dO O). `place` is the row's index among all rows.
  template <typename Params>
  __device__ __forceinline__ static float2 find(Params const& p, int64_t place, float delta) {
    float const lse = p.lse[place];
    if (!(lse > minus_infinity())) return make_float2(infinity(), 0.0f);
    if (p.dlse != nullptr) delta -= p.dlse[place];
    return make_float2(lse * kLog2E, -delta);
  }
};

}  // namespace attention_autotuner

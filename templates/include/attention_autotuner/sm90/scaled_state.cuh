// The state of retention in the registers of a warpgroup: where it lies in memory, its scale, and its range.
//
// The registers hold the state over the scale, which takes the decay, and which a guard raises where they might leave
// the range of fp16. Callers: chunks_sm90/mainloop.cuh, chunks_backward_sm90/state.cuh.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/sm90/wgmma.cuh"

namespace attention_autotuner {

// `Stages` knows the arguments and the place of a CTA; `Element` is what MMAs read. `SumsChunks`: a chunk is summed by
// itself and then added, as tensor cores cut off what they add to an accumulator: of a state that only grows, 4e-4 is
// missing after 64k tokens.
template <typename Stages, typename Element, int Registers, bool SumsChunks>
struct ScaledState : Stages {
  using Stages::Stages;
  static constexpr int kRegisters = Registers;
  static constexpr bool kGuarded = std::is_same_v<Element, __half>;
  static constexpr float kFreshScale = 4.0f;
  static constexpr float kMostSquares = 1073741824.0f;  // of a lane: no element beyond 2^15

  float state[kRegisters];                   // over the scale
  float chunk[SumsChunks ? kRegisters : 1];  // the sum of a chunk
  float state_scale;

  __device__ __forceinline__ int64_t state_place(int slots, int slot) const {
    auto const& pass = this->arguments.pass;
    int64_t const sequence = int64_t(this->batch) * pass.heads.divisor + this->head;
    return (sequence * slots + (slots > 1 ? slot : 0)) * pass.depth * pass.columns;
  }
  // What an update of the state is accumulated in, by its first MMA as a new sum.
  __device__ __forceinline__ auto& updated() {
    if constexpr (SumsChunks) {
      return chunk;
    } else {
      return state;
    }
  }
  // Once all MMAs of a chunk are done.
  __device__ __forceinline__ void end_update() {
    fence_accumulators(updated());
    if constexpr (SumsChunks) {
#pragma unroll
      for (int i = 0; i < kRegisters; ++i) state[i] += chunk[i];
    }
  }
  __device__ __forceinline__ void scale_state(float factor) {
    if (factor == 1.0f) return;
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) state[i] *= factor;
  }
  // The decay of a chunk goes to the scale; returns the factor that the registers have to take over, mostly 1.
  __device__ __forceinline__ float decay(int length) {
    state_scale *= exp2_approximate(this->log2_gamma * float(length));
    if (state_scale >= 1.0f) return 1.0f;
    float const taken = state_scale * (1.0f / kFreshScale);
    state_scale = kFreshScale;
    return taken;
  }
  // Raises the scale where the state might leave the range of fp16.
  __device__ __forceinline__ void guard() {
    if constexpr (!kGuarded) return;
    float squares[4] = {};
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) squares[i % 4] = fmaf(state[i], state[i], squares[i % 4]);
    float const sum = (squares[0] + squares[1]) + (squares[2] + squares[3]);
    if (__any_sync(0xffffffffu, !(sum < kMostSquares))) raise_scale();
  }
  // Makes the scale so great that the largest element of the warp's columns is about 2^8.
  __device__ __forceinline__ void raise_scale() {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) largest = fmaxf(largest, fabsf(state[i]));
#pragma unroll
    for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
    // Within what a float's exponent spans, also where all is zero or not finite.
    int const exponent = maximum(minimum((__float_as_int(largest) >> 23) - 127, 100), -100) - 8;
    scale_state(__int_as_float((127 - exponent) << 23));
    state_scale *= __int_as_float((127 + exponent) << 23);
  }
};

}  // namespace attention_autotuner

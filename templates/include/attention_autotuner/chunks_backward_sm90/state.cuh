// What a warpgroup of a pass over chunks of retention's backward keeps of the state in registers: its loads and stores,
// its scale, and its range.
//
// Layouts: see sm90/wgmma.cuh.
#pragma once

#include <cuda_fp16.h>

#include <type_traits>

#include "attention_autotuner/chunks_backward_sm90/producer.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/sm90/roles.cuh"

namespace attention_autotuner {

// The state for 64 columns, or for a part of their depth.
template <typename T>
struct ChunkBackwardRegisters : ChunkBackwardStages<T> {
  using Base = ChunkBackwardStages<T>;
  using Base::arguments;
  using Base::Base;
  using Base::batch;
  using Base::head;
  using Base::log2_gamma;
  using Base::unit;
  using Base::warp;
  static constexpr int kRegisters = T::kPartDepth / 2;
  static constexpr float kFreshScale = 4.0f;
  static constexpr float kMostSquares = 1073741824.0f;  // of a lane: no element beyond 2^15

  float state[kRegisters];  // over the scale
  float state_scale;

  __device__ __forceinline__ static int group() { return thread_index() / kWarpgroupThreads - 1; }
  // Warpgroups have columns, or parts of the depth.
  __device__ __forceinline__ static int part() { return T::kInParts ? group() : 0; }
  __device__ __forceinline__ static int column_group() { return T::kInParts ? 0 : group(); }
  __device__ __forceinline__ static int own_piece(int piece) { return part() * T::kPartPieces + piece; }
  __device__ __forceinline__ int first_column() const { return this->slice * T::kColumns + 64 * column_group(); }
  // Y of this warpgroup's depth has come, or is done with.
  __device__ __forceinline__ void wait_own_y(int index) const {
#pragma unroll
    for (int piece = 0; piece < T::kPartPieces; ++piece) this->wait_y(index, own_piece(piece));
  }
  __device__ __forceinline__ void release_own_y(int index) const {
#pragma unroll
    for (int piece = 0; piece < T::kPartPieces; ++piece) this->release_y(index, own_piece(piece));
  }

  template <typename Visit>
  __device__ __forceinline__ void visit_state(Visit&& visit) {
    auto const& pass = arguments.pass;
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) {
      int const column = first_column() + 16 * warp() + lane_here() / 4 + i % 4 / 2 * 8;
      int const depth = part() * T::kPartDepth + i / 4 * 8 + 2 * (lane_here() & 3) + i % 2;
      if (column < pass.columns && depth < pass.depth) {
        visit(state[i], T::kTransposed ? column * pass.depth + depth : depth * pass.columns + column);
      }
    }
  }
  __device__ __forceinline__ int64_t state_place(int slots, int slot) const {
    auto const& pass = arguments.pass;
    int64_t const sequence = int64_t(batch) * pass.heads.divisor + head;
    return (sequence * slots + (slots > 1 ? slot : 0)) * pass.depth * pass.columns;
  }
  // Of the pieces of this super-chunk, the first in the pass's order.
  __device__ __forceinline__ int first_slot() const {
    auto const& pass = arguments.pass;
    int const slot = this->super * pass.pieces;
    return T::kReversed ? minimum(slot + pass.pieces, pass.first_slots) - 1 : slot;
  }
  __device__ __forceinline__ void load_state() {
    state_scale = kFreshScale;
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) state[i] = 0.0f;
    auto const& pass = arguments.pass;
    if (T::kStatesOnly || pass.first_states == nullptr) return;
    float const* const source = pass.first_states + state_place(pass.first_slots, first_slot());
    float const factor = 1.0f / (kFreshScale * unit);
    visit_state([source, factor](float& value, int offset) { value = source[offset] * factor; });
  }
  __device__ __forceinline__ void store_state() {
    auto const& pass = arguments.pass;
    if (pass.last_states == nullptr) return;
    float* const target = pass.last_states + state_place(pass.last_slots, this->super);
    visit_state([target, this](float& value, int offset) { target[offset] = value * (state_scale * unit); });
  }
  __device__ __forceinline__ void scale_state(float factor) {
    if (factor == 1.0f) return;
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) state[i] *= factor;
  }
  // The decay of a chunk goes to the scale; returns the factor that the registers have to take over, mostly 1.
  __device__ __forceinline__ float decay(int length) {
    state_scale *= exp2f(log2_gamma * float(length));
    if (state_scale >= 1.0f) return 1.0f;
    float const taken = state_scale * (1.0f / kFreshScale);
    state_scale = kFreshScale;
    return taken;
  }
  // Raises the scale where the state might leave the range of fp16.
  __device__ __forceinline__ void guard() {
    if constexpr (!std::is_same_v<typename T::Element, __half>) return;
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

// What a warpgroup of a pass over chunks of retention's backward keeps of the state in registers: its loads and stores.
//
// Layouts: see sm90/wgmma.cuh.
#pragma once

#include "attention_autotuner/chunks_backward_sm90/producer.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/sm90/roles.cuh"
#include "attention_autotuner/sm90/scaled_state.cuh"

namespace attention_autotuner {

// The state for 64 columns, or for a part of their depth.
template <typename T>
struct ChunkBackwardRegisters
    : ScaledState<ChunkBackwardStages<T>, typename T::Element, T::kPartDepth / 2, T::kSumsChunks> {
  using Base = ScaledState<ChunkBackwardStages<T>, typename T::Element, T::kPartDepth / 2, T::kSumsChunks>;
  using Base::arguments;
  using Base::Base;
  using Base::kFreshScale;
  using Base::kRegisters;
  using Base::state;
  using Base::state_place;
  using Base::state_scale;
  using Base::unit;
  using Base::warp;

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
    if (pass.first_slots > 1) wait_on_dependent_grids();  // as a kernel of this call makes them
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
};

}  // namespace attention_autotuner

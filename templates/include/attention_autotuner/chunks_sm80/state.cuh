// The part of a pass over chunks of retention that holds the state: where a warp stands, its registers, the tiles it
// loads, and the step from one chunk's state to the next.
//
// Layouts: see common/warp_mma.cuh (fragments), common/tile.cuh (shared memory), chunks_sm80/traits.cuh (which tensor
// is which).
#pragma once

#include "attention_autotuner/chunks_sm80/traits.cuh"
#include "attention_autotuner/common/chunk_sequences.cuh"
#include "attention_autotuner/common/convert.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/scheduler.cuh"
#include "attention_autotuner/common/shared_memory.cuh"
#include "attention_autotuner/common/tensors.cuh"
#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/common/tile.cuh"
#include "attention_autotuner/common/warp_mma.cuh"
#include "attention_autotuner/sm80/operand.cuh"

namespace attention_autotuner {

template <typename T, bool StatesOnly>
struct StateWarp {
  using Element = typename T::Element;
  using CopyX = TileCopy<T::kChunk, T::kD, T::kThreads, T::kCopyBytes, false>;
  using CopyZ = TileCopy<T::kChunk, T::kColumns, T::kThreads, T::kCopyBytes, false>;
  using CopyP = TileCopy<T::kChunk, T::kChunk, T::kThreads, 16, false>;
  static constexpr bool kReadsScores = !StatesOnly && T::kPrecomputed;
  static constexpr float kFreshScale = 4.0f;
  static constexpr float kLeastUnit = 1e-15f;

  using Arguments = typename T::Arguments;

  Arguments const& arguments;
  uint32_t const smem;
  int slice, super, head, batch;
  ChunkSequence<T::kPacked> sequence;
  int first, end;  // chunks
  float log2_gamma;
  Accumulators<T::kRowTiles, T::kDepthTiles> state;  // over the scale
  float state_scale;
  float unit;  // of the registers beside the scale: the greatest factor of a token, so that none is rounded to nothing

  // Warps that share columns wait for each other, so they are neighbours.
  __device__ __forceinline__ static int depth_warp() { return (thread_index() >> 5) % T::kDepthWarps; }
  __device__ __forceinline__ static int column_warp() { return (thread_index() >> 5) / T::kDepthWarps; }
  __device__ __forceinline__ static int warp_column() { return column_warp() * T::kWarpColumns; }
  __device__ __forceinline__ static int warp_depth() { return depth_warp() * T::kDepth; }

  __device__ __forceinline__ StateWarp(Arguments const& arguments, uint32_t smem, int index)
      : arguments(arguments), smem(smem), sequence(arguments, place(arguments, index)) {
    first = super * (arguments.super_chunk / T::kChunk);
    end = minimum(first + arguments.super_chunk / T::kChunk, sequence.chunks(arguments, T::kChunk));
    log2_gamma = arguments.log2_gamma[head];
    unit = T::kReversed ? arguments.scale * exp2f(log2_gamma) : 1.0f;
    if (fabsf(unit) < kLeastUnit) unit = 1.0f;
  }

  // Finds slice, super-chunk, head and batch entry of a CTA; of packed sequences, the super-chunk among those of all.
  __device__ __forceinline__ int& place(Arguments const& arguments, int index) {
    slice = index % T::kSlices;
    index /= T::kSlices;
    super = arguments.supers.take(index) + arguments.super_offset;
    head = arguments.heads.take(index);
    batch = index;
    return super;
  }
  // Whether there is anything to do: a super-chunk, and where its state alone is summed, someone who reads it.
  __device__ __forceinline__ bool exists() const {
    if constexpr (T::kPacked) {
      SuperChunkPlace const& here = sequence.place;
      if (!here.exists()) return false;
      bool const is_last = super == (T::kReversed ? 0 : here.supers - 1);
      return !StatesOnly || (!here.behind && (arguments.sums_last || !is_last));
    }
    return true;
  }

  // gamma^n for 0 <= n, and 1 below.
  __device__ __forceinline__ float power(int n) const { return exp2_approximate(log2_gamma * float(maximum(n, 0))); }

  // --- states --------------------------------------------------------------------------------------------------------

  // Visits every element of this warp's state that exists, with its offset in a state [dim_qk, dim_v].
  template <typename Visit>
  __device__ __forceinline__ void visit_state(Visit&& visit) {
#pragma unroll
    for (int r = 0; r < T::kRowTiles; ++r) {
#pragma unroll
      for (int n = 0; n < T::kDepthTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          int const column = slice * T::kColumns + warp_column() + 16 * r + e / 2 * 8 + lane_here() / 4;
          int const depth = warp_depth() + 8 * n + 2 * (lane_here() & 3) + e % 2;
          int const offset = T::kTransposed ? column * arguments.depth + depth : depth * arguments.columns + column;
          if (column < arguments.columns && depth < arguments.depth) visit(state[r][n][e], offset);
        }
      }
    }
  }
  __device__ __forceinline__ int64_t state_place(int slots, int slot) const {
    if constexpr (T::kPacked) return sequence.state(arguments, head, slots, slot);
    int64_t const of_head = int64_t(batch) * arguments.heads.divisor + head;
    return (of_head * slots + (slots > 1 ? slot : 0)) * arguments.depth * arguments.columns;
  }
  // Of the pieces of this super-chunk, the first in the pass's order.
  __device__ __forceinline__ int first_slot() const {
    if constexpr (T::kPacked) return sequence.block;
    int const slot = super * arguments.pieces;
    return T::kReversed ? minimum(slot + arguments.pieces, arguments.first_slots) - 1 : slot;
  }
  __device__ __forceinline__ void load_state() {
    clear(state);
    state_scale = kFreshScale;
    if (StatesOnly || arguments.first_states == nullptr || !sequence.has_state()) return;
    float const* const source = arguments.first_states + state_place(arguments.first_slots, first_slot());
    visit_state([source, this](float& value, int offset) { value = source[offset] / (kFreshScale * unit); });
  }
  __device__ __forceinline__ void store_state() {
    if (arguments.last_states == nullptr || !sequence.has_state()) return;
    float* const target = arguments.last_states + state_place(arguments.last_slots, sequence.slot(super));
    visit_state([target, this](float& value, int offset) { target[offset] = value * (state_scale * unit); });
  }

  // Where the head's tensors start, Z's at this CTA's columns. Computed where they are needed: registers are scarce.
  __device__ __forceinline__ Element const* x() const {
    return head_data<Element>(arguments.x, batch, T::kReversed ? arguments.group.divide(head) : head);
  }
  __device__ __forceinline__ Element const* y() const {
    return head_data<Element>(arguments.y, batch, T::kReversed ? head : arguments.group.divide(head));
  }
  __device__ __forceinline__ Element const* z() const {
    return head_data<Element>(arguments.z, batch, T::kReversed ? head : arguments.group.divide(head)) +
           slice * T::kColumns;
  }

  // --- loads ---------------------------------------------------------------------------------------------------------

  // A chunk's tiles on their way into a stage: planned before it is free, then start copies what is not whole, at once,
  // and the parts copy what is, spread over other work.
  struct Fetch {
    bool wanted, exact_depth, exact_columns;
    uint32_t xy, z_target;  // this thread's first chunk in X's tile and in Z's
    Element const *x, *y, *z;
    Element const* scores;
    uint32_t scores_target;
  };
  __device__ __forceinline__ Fetch plan_fetch(bool wanted, int chunk, int stage) const {
    int const thread = thread_index(), row = chunk * T::kChunk, rows = sequence.readable(arguments) - row;
    int const columns = arguments.columns - slice * T::kColumns;
    bool const whole = T::kCopyBytes == 16 && rows >= T::kChunk;
    uint32_t const base = smem + stage * T::kStageBytes;
    int const tensor_row = sequence.first_row + row;
    int64_t const row_x = tensor_row + CopyX::row(thread), row_z = tensor_row + CopyZ::row(thread);
    Fetch fetch{wanted,
                whole && arguments.depth >= T::kD,
                whole && columns >= T::kColumns,
                base + CopyX::offset(thread),
                base + T::kZOffset + CopyZ::offset(thread),
                x() + row_x * arguments.x.stride_row + CopyX::column(thread),
                y() + row_x * arguments.y.stride_row + CopyX::column(thread),
                z() + row_z * arguments.z.stride_row + CopyZ::column(thread),
                nullptr,
                0};
    if constexpr (kReadsScores) {
      int64_t const place = (int64_t(batch) * arguments.heads.divisor + head) * arguments.chunks +
                            sequence.first_chunk(T::kChunk) + chunk;
      fetch.scores = static_cast<Element const*>(arguments.scores) +
                     (place * T::kChunk + CopyP::row(thread)) * T::kChunk + CopyP::column(thread);
      fetch.scores_target = base + T::kPOffset + CopyP::offset(thread);
    }
    return fetch;
  }
  __device__ __forceinline__ void start_fetch(Fetch const& fetch, int chunk) const {
    if (!fetch.wanted || (fetch.exact_depth && fetch.exact_columns)) return;
    int const rows = sequence.readable(arguments) - chunk * T::kChunk;
    if (!fetch.exact_depth) {
      if constexpr (!StatesOnly) CopyX::copy(fetch.xy, fetch.x, arguments.x.stride_row, rows, arguments.depth);
      CopyX::copy(fetch.xy + T::kYOffset, fetch.y, arguments.y.stride_row, rows, arguments.depth);
    }
    if (!fetch.exact_columns) {
      CopyZ::copy(fetch.z_target, fetch.z, arguments.z.stride_row, rows, arguments.columns - slice * T::kColumns);
    }
  }
  __device__ __forceinline__ void fetch_part(Fetch const& fetch, int part, int num_parts) const {
    if constexpr (T::kCopyBytes == 16) {
      bool const depth = fetch.wanted && fetch.exact_depth;
      if constexpr (!StatesOnly) CopyX::copy_part(depth, fetch.xy, fetch.x, arguments.x.stride_row, part, num_parts);
      CopyX::copy_part(depth, fetch.xy + T::kYOffset, fetch.y, arguments.y.stride_row, part, num_parts);
      CopyZ::copy_part(fetch.wanted && fetch.exact_columns, fetch.z_target, fetch.z, arguments.z.stride_row, part,
                       num_parts);
    }
    if constexpr (kReadsScores) {
      CopyP::copy_part(fetch.wanted, fetch.scores_target, fetch.scores, T::kChunk, part, num_parts);
    }
  }

  // --- the registers -------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void scale_state(float factor) {
#pragma unroll
    for (auto& row : state) {
#pragma unroll
      for (auto& tile : row) {
#pragma unroll
        for (float& value : tile) value *= factor;
      }
    }
  }
  // Makes the scale so great that the registers' largest element is about 2^8.
  __device__ __forceinline__ void raise_scale() {
    float largest = 0.0f;
#pragma unroll
    for (auto const& row : state) {
#pragma unroll
      for (auto const& tile : row) {
#pragma unroll
        for (float const& value : tile) largest = fmaxf(largest, fabsf(value));
      }
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
    // Within what a float's exponent spans, also where all is zero or not finite.
    int const exponent = maximum(minimum((__float_as_int(largest) >> 23) - 127, 100), -100) - 8;
    scale_state(__int_as_float((127 - exponent) << 23));
    state_scale *= __int_as_float((127 + exponent) << 23);
  }

  // state = gamma^length state + (decayed Z)^T Y.
  __device__ __forceinline__ void update_state(uint32_t stage, int length) {
    state_scale *= exp2f(log2_gamma * float(length));
    if (state_scale < 1.0f) {
      scale_state(state_scale / kFreshScale);
      state_scale = kFreshScale;
    }
    float const scale = (T::kReversed ? arguments.scale : 1.0f) / (state_scale * unit);
    float const last = log2_gamma * float(T::kReversed ? 1 : length - 1);
    add_tokens(stage, [&](float token) {  // tokens beyond the sequence count for nothing
      return scale * exp2_approximate(fminf(fmaf(T::kReversed ? log2_gamma : -log2_gamma, token, last), 0.0f));
    });
  }
  // Adds (Z, each token times its factor)^T Y to the registers.
  template <typename Factor>
  __device__ __forceinline__ void add_tokens(uint32_t stage, Factor&& factor) {
    float const lane_token = float(2 * (lane_here() & 3));
    LaneRow const a = lane_row_a(lane_here()), b = lane_row_b(lane_here());
    Operand<typename T::TileZ, T::kWarpColumns> const z_tile(stage + T::kZOffset, b.row, warp_column() + b.column);
    Operand<typename T::TileX, T::kDepth> const y_tile(stage + T::kYOffset, a.row, warp_depth() + a.column);
#pragma unroll
    for (int step = 0; step < T::kTokenTiles; ++step) {
      uint32_t w[T::kRowTiles][4];
      float factors[4];  // of tokens 2t, 2t + 1 and the same 8 further
#pragma unroll
      for (int e = 0; e < 4; ++e) factors[e] = factor(lane_token + float(16 * step + e / 2 * 8 + e % 2));
#pragma unroll
      for (int r = 0; r < T::kRowTiles; ++r) {
        load_matrix_x4_transposed(w[r], z_tile.at(16 * step, 16 * r));
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float2 const pair = unpack_pair<Element>(w[r][e]);  // factors of 16 bits would err alike chunk after chunk
          w[r][e] = pack_pair<Element>(pair.x * factors[e / 2 * 2], pair.y * factors[e / 2 * 2 + 1]);
        }
      }
      gemm_step<Element>(
          state, w,
          [&](int j, uint32_t (&registers)[4]) { load_matrix_x4_transposed(registers, y_tile.at(16 * step, 8 * j)); },
          [](int) {});
    }
  }
};

}  // namespace attention_autotuner

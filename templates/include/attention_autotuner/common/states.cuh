// What retention does between and after its passes over chunks: states of super-chunks from their own sums, and sums
// over the query heads of a group.
#pragma once

#include "attention_autotuner/abi.h"
#include "attention_autotuner/common/chunk_sequences.cuh"
#include "attention_autotuner/common/convert.cuh"
#include "attention_autotuner/common/scalars.cuh"

namespace attention_autotuner {

inline constexpr int kStateThreads = 256;

// One element of the states of a sequence's super-chunks: what each adds becomes the state before it. Returns the last.
template <bool Reversed>
__device__ __forceinline__ float scan_states(float* mine, float state, float log2, int supers, int unknown,
                                             int elements, int super_chunk, int seqlen) {
  auto super_at = [supers](int step) { return Reversed ? supers - 1 - step : step; };
  for (int step = 0; step < supers - unknown; ++step) {
    int const super = super_at(step);
    int const length = minimum(super_chunk, seqlen - super * super_chunk);
    float* const slot = mine + int64_t(super) * elements;
    float const added = *slot;
    *slot = state;
    state = fmaf(state, exp2f(log2 * float(length)), added);
  }
  if (unknown > 0) mine[int64_t(super_at(supers - unknown)) * elements] = state;
  return state;
}

// Turns what each super-chunk adds to a state that starts from zero into the state before it, in the pass's order of
// time; the last `unknown` super-chunks of that order have added nothing yet, and only the first of them gets its
// state. `states` is [sequences, supers, elements]. One thread per element of a state; blockIdx.y is the sequence.
template <bool Reversed>
__global__ void __launch_bounds__(kStateThreads)
    retention_scan(float* states, float const* first, float* last, float const* log2_gamma, int heads, int supers,
                   int unknown, int elements, int super_chunk, int seqlen) {
  int const element = blockIdx.x * kStateThreads + threadIdx.x;
  if (element >= elements) return;
  int const sequence = blockIdx.y;
  float const log2 = log2_gamma[sequence % heads];
  float* const mine = states + int64_t(sequence) * supers * elements + element;
  float const before = first == nullptr ? 0.0f : first[int64_t(sequence) * elements + element];
  float const state = scan_states<Reversed>(mine, before, log2, supers, unknown, elements, super_chunk, seqlen);
  if (last != nullptr) last[int64_t(sequence) * elements + element] = state;
}

// The same of packed sequences: `states` is [heads, slots, elements], the others [sequences, heads, elements]. The last
// super-chunk of every sequence has added nothing yet unless there is a `last`. blockIdx.y is sequence and head.
template <bool Reversed>
__global__ void __launch_bounds__(kStateThreads)
    retention_scan_packed(float* states, float const* first, float* last, float const* log2_gamma, int heads, int slots,
                          int elements, PackedSuperChunks const __grid_constant__ packed) {
  int const element = blockIdx.x * kStateThreads + threadIdx.x;
  if (element >= elements) return;
  int const sequence = blockIdx.y / heads, head = blockIdx.y % heads, length = packed.sequences.length(sequence);
  int64_t const slot = int64_t(head) * slots + packed.first_block(sequence);
  int64_t const place = int64_t(blockIdx.y) * elements + element;
  float const before = first == nullptr ? 0.0f : first[place];
  float const state =
      scan_states<Reversed>(states + slot * elements + element, before, log2_gamma[head], packed.supers_of(length),
                            last == nullptr, elements, packed.tokens.divisor, length);
  if (last != nullptr) last[place] = state;
}

// Rounds sums over `group` heads of fp32 partial sums [batch, heads, rows, columns] into a tensor of batch x heads /
// group.
template <typename Element>
__global__ void __launch_bounds__(kStateThreads)
    retention_reduce_heads(float const* partial, attention_autotuner_tensor out, int group, int heads, int rows,
                           int columns) {
  int64_t const head_elements = int64_t(rows) * columns;
  int const kv_heads = heads / group, batch = blockIdx.y / kv_heads, kv_head = blockIdx.y % kv_heads;
  float const* const first = partial + (int64_t(batch) * heads + int64_t(kv_head) * group) * head_elements;
  auto* const target = static_cast<Element*>(out.data) + batch * out.stride_batch + kv_head * out.stride_head;
  for (int64_t pair = int64_t(blockIdx.x) * kStateThreads + threadIdx.x; pair < head_elements / 2;
       pair += int64_t(gridDim.x) * kStateThreads) {
    float2 sum = make_float2(0.0f, 0.0f);
    for (int member = 0; member < group; ++member) {
      float2 const part = *reinterpret_cast<float2 const*>(first + member * head_elements + 2 * pair);
      sum.x += part.x;
      sum.y += part.y;
    }
    int64_t const row = 2 * pair / columns, column = 2 * pair % columns;
    *reinterpret_cast<uint32_t*>(target + row * out.stride_row + column) = pack_pair<Element>(sum.x, sum.y);
  }
}

}  // namespace attention_autotuner

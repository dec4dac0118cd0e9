// What retention does between and after its passes over chunks: states of super-chunks from their own sums, sums over
// the query heads of a group, and the gradient of gamma.
//
// Called by: retention_entry.cuh.
#pragma once

#include "mma_sm80.cuh"
#include "retention_traits.cuh"

namespace attention_autotuner {

inline constexpr int kStateThreads = 256;

// Turns what each super-chunk adds to a state that starts from zero into the state before it, in the order of time that
// is walked. `states` is [sequences, slots, elements], where slot n holds super-chunk n's; forward, slot `supers` gets
// the last state too. One thread per element of a state; blockIdx.y is the sequence.
template <bool Reversed>
__global__ void __launch_bounds__(kStateThreads)
    retention_scan(float* states, float const* first, float* last, float const* log2_gamma, int heads, int supers,
                   int slots, int elements, int super_chunk, int seqlen) {
  int const element = blockIdx.x * kStateThreads + threadIdx.x;
  if (element >= elements) return;
  int const sequence = blockIdx.y;
  float const log2 = log2_gamma[sequence % heads];
  float* const mine = states + int64_t(sequence) * slots * elements + element;
  float state = first == nullptr ? 0.0f : first[int64_t(sequence) * elements + element];
  for (int step = 0; step < supers; ++step) {
    int const super = Reversed ? supers - 1 - step : step;
    int const length = minimum(super_chunk, seqlen - super * super_chunk);
    float* const slot = mine + int64_t(super) * elements;
    float const added = *slot;
    *slot = state;
    state = fmaf(state, exp2f(log2 * float(length)), added);
  }
  if (!Reversed && slots > supers) mine[int64_t(supers) * elements] = state;
  if (last != nullptr) last[int64_t(sequence) * elements + element] = state;
}

// Rounds sums over `group` heads of fp32 parts [batch, heads, rows, columns] into a tensor of batch x heads / group.
template <typename Element>
__global__ void __launch_bounds__(kStateThreads) retention_add_parts(float const* parts, attention_autotuner_tensor out,
                                                                     int group, int heads, int rows, int columns) {
  int64_t const head_elements = int64_t(rows) * columns;
  int const kv_heads = heads / group, batch = blockIdx.y / kv_heads, kv_head = blockIdx.y % kv_heads;
  float const* const first = parts + (int64_t(batch) * heads + int64_t(kv_head) * group) * head_elements;
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

__device__ __forceinline__ float block_sum(float value) {
  __shared__ float warps[kStateThreads / 32];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  if ((threadIdx.x & 31) == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = 0.0f;
  for (int warp = 0; warp < kStateThreads / 32; ++warp) sum += warps[warp];
  return sum;
}

struct GammaArguments {
  attention_autotuner_tensor q, k;
  float const *dq, *dk;    // [batch, heads, seqlen, dim_qk], fp32
  float const* states;     // [batch, heads, supers + 1, dim_qk, dim_v]
  float const* gradients;  // [batch, heads, supers, dim_qk, dim_v], after each super-chunk
  float* parts;            // [batch, heads, supers]
  int heads, group, seqlen, dim_qk, dim_v;
  int supers, super_chunk;
};

// A super-chunk's part of the gradient of log2 gamma. Every term of the output and of the last state is a product with
// gamma to the distance between two times. Summed with one time as weight, terms are q dq; with the other, k dk; so the
// sum over t of (t + 1) (q dq - k dk), t counted from the super-chunk's start, is that of the distances, but for terms
// that end in the state after it: those lack length times themselves, which is length <state, its gradient>.
template <typename Element>
__global__ void __launch_bounds__(kStateThreads)
    retention_gamma_parts(GammaArguments const __grid_constant__ arguments) {
  auto const& p = arguments;
  int const super = blockIdx.x, sequence = blockIdx.y, batch = sequence / p.heads, head = sequence % p.heads;
  int const row0 = super * p.super_chunk, length = minimum(p.super_chunk, p.seqlen - row0);
  auto const* const q = static_cast<Element const*>(p.q.data) + batch * p.q.stride_batch + head * p.q.stride_head;
  auto const* const k =
      static_cast<Element const*>(p.k.data) + batch * p.k.stride_batch + head / p.group * p.k.stride_head;
  int64_t const rows = int64_t(sequence) * p.seqlen;
  float sum = 0.0f;
  for (int index = threadIdx.x; index < length * p.dim_qk; index += kStateThreads) {
    int const time = index / p.dim_qk, column = index % p.dim_qk;
    int64_t const row = row0 + time, place = (rows + row) * p.dim_qk + column;
    sum += float(time + 1) * (float(q[row * p.q.stride_row + column]) * p.dq[place] -
                              float(k[row * p.k.stride_row + column]) * p.dk[place]);
  }
  int const elements = p.dim_qk * p.dim_v;
  float const* const state = p.states + (int64_t(sequence) * (p.supers + 1) + super + 1) * elements;
  float const* const gradient = p.gradients + (int64_t(sequence) * p.supers + super) * elements;
  float ends = 0.0f;
  for (int element = threadIdx.x; element < elements; element += kStateThreads) {
    ends = fmaf(state[element], gradient[element], ends);
  }
  sum = block_sum(fmaf(float(length), ends, sum));
  if (threadIdx.x == 0) p.parts[int64_t(sequence) * p.supers + super] = sum;
}

// The sum of a sequence's parts, times ln 2.
inline __global__ void __launch_bounds__(kStateThreads)
    retention_gamma_sum(float const* parts, float* dlog2_gamma, int supers) {
  float sum = 0.0f;
  for (int super = threadIdx.x; super < supers; super += kStateThreads) {
    sum += parts[int64_t(blockIdx.x) * supers + super];
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) dlog2_gamma[blockIdx.x] = kLn2 * sum;
}

}  // namespace attention_autotuner

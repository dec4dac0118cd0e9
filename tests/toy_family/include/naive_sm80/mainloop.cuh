// Attention by one warp a query row, for small head dims: every lane scores a key, then adds all keys to its columns.
// Nothing is shared, nothing staged; tensors are read element by element, so that any alignment will do.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "attention_autotuner/abi.h"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/tensors.cuh"
#include "attention_autotuner/common/threads.cuh"

namespace attention_autotuner {

enum class Exponential { kExact, kApproximate };

template <typename Config>
struct NaiveTraits {
  static constexpr int kLanes = 32;  // of a warp, and keys of a step
  static constexpr int kThreads = kLanes * Config::kWarps;
  static constexpr int kColumns = divide_up(Config::kPaddedDimV, kLanes);  // of the output, of a lane
  static_assert(Config::kWarps >= 1 && Config::kWarps <= 8, "naive_warps_range");
  static_assert(Config::kPaddedDimQK <= 64 && Config::kPaddedDimV <= 64, "naive_head_dims_small");
};

template <Exponential kExponential>
__device__ __forceinline__ float naive_exp2(float x) {
  return kExponential == Exponential::kExact ? exp2f(x) : exp2_approximate(x);
}

template <typename Config>
__global__ void __launch_bounds__(NaiveTraits<Config>::kThreads, Config::kCtasPerSm)
    naive_attention(attention_autotuner_attention_forward_params const __grid_constant__ p) {
  using T = NaiveTraits<Config>;
  using Element = typename Config::Element;
  int const lane = lane_index(), row_blocks = divide_up(p.seqlen_q, Config::kWarps);
  int const block = int(blockIdx.x) % row_blocks, sequence = int(blockIdx.x) / row_blocks;
  int const row = block * Config::kWarps + int(threadIdx.x) / T::kLanes;
  if (row >= p.seqlen_q) return;
  int const head = sequence % p.heads_q, batch = sequence / p.heads_q, kv_head = head / (p.heads_q / p.heads_kv);
  Element const* const q = head_data<Element>(p.q, batch, head) + row * p.q.stride_row;
  Element const* const k = head_data<Element>(p.k, batch, kv_head);
  Element const* const v = head_data<Element>(p.v, batch, kv_head);
  int const keys = p.causal ? maximum(0, minimum(p.seqlen_k, row + p.causal_offset + 1)) : p.seqlen_k;

  float largest = minus_infinity(), sum = 0.0f, o[T::kColumns] = {};
  for (int first = 0; first < keys; first += T::kLanes) {
    float score = minus_infinity();
    if (first + lane < keys) {
      Element const* const key = k + (first + lane) * p.k.stride_row;
      float dot = 0.0f;
      for (int i = 0; i < p.dim_qk; ++i) dot = fmaf(float(q[i]), float(key[i]), dot);
      score = p.softmax_scale * kLog2E * dot;
    }
    float const next = fmaxf(largest, over_warp(score, [](float a, float b) { return fmaxf(a, b); }));
    float const factor = naive_exp2<Config::kExponential>(largest - next);
    float const numerator = naive_exp2<Config::kExponential>(score - next);
    largest = next;
    sum = fmaf(sum, factor, over_warp(numerator, [](float a, float b) { return a + b; }));
#pragma unroll
    for (int c = 0; c < T::kColumns; ++c) o[c] *= factor;
    for (int key = first; key < minimum(first + T::kLanes, keys); ++key) {
      float const shared = __shfl_sync(0xffffffffu, numerator, key - first);
#pragma unroll
      for (int c = 0; c < T::kColumns; ++c) {
        int const column = lane + T::kLanes * c;
        if (column < p.dim_v) o[c] = fmaf(shared, float(v[key * p.v.stride_row + column]), o[c]);
      }
    }
  }

  auto* const out = static_cast<Element*>(p.o.data) + batch * p.o.stride_batch + head * p.o.stride_head;
#pragma unroll
  for (int c = 0; c < T::kColumns; ++c) {
    int const column = lane + T::kLanes * c;
    if (column < p.dim_v) out[row * p.o.stride_row + column] = Element(sum == 0.0f ? 0.0f : o[c] / sum);
  }
  if (p.lse != nullptr && lane == 0) {
    float const lse = sum == 0.0f ? minus_infinity() : (largest + log2f(sum)) * kLn2;
    p.lse[int64_t(sequence) * p.seqlen_q + row] = lse;
  }
}

}  // namespace attention_autotuner

// The postprocess of a backward of either family: dK and dV from the partial sums of the CTAs that shared their rows.
#pragma once

#include "attention_autotuner/abi.h"
#include "attention_autotuner/common/backward_arguments.cuh"
#include "attention_autotuner/common/convert.cuh"
#include "attention_autotuner/common/preprocess.cuh"
#include "attention_autotuner/common/tensors.cuh"
#include "attention_autotuner/common/tile.cuh"
#include "attention_autotuner/score/score_mod.cuh"

namespace attention_autotuner {

inline constexpr int64_t kReduceSplitsCtas = 4096;

// One result in 16 bits from the partial sums of the CTAs that shared its rows, always added in the same order.
template <typename Element, typename Arguments>
__device__ __forceinline__ void reduce_splits(Arguments const& arguments, float const* partial, int columns,
                                              float scale, attention_autotuner_tensor const& out, int dim,
                                              int64_t first, int64_t step) {
  auto const& p = arguments.params;
  int64_t const rows = int64_t(p.batch) * p.heads_kv * p.seqlen_k;
  int const chunks = columns / kChunk;
  for (int64_t unit = first; unit < rows * chunks; unit += step) {
    int64_t const row = unit / chunks;
    int const column = int(unit % chunks) * kChunk;
    if (column >= dim) continue;
    float values[kChunk] = {};
    for (int split = 0; split < arguments.splits.divisor; ++split) {
      auto const* const source = reinterpret_cast<float4 const*>(partial + (split * rows + row) * columns + column);
      float4 const low = source[0], high = source[1];
      float const addends[kChunk] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int i = 0; i < kChunk; ++i) values[i] += addends[i];
    }
    uint4 words;
    words.x = pack_pair<Element>(values[0] * scale, values[1] * scale);
    words.y = pack_pair<Element>(values[2] * scale, values[3] * scale);
    words.z = pack_pair<Element>(values[4] * scale, values[5] * scale);
    words.w = pack_pair<Element>(values[6] * scale, values[7] * scale);
    int64_t const head = row / p.seqlen_k;
    auto* const target = static_cast<Element*>(out.data) + head / p.heads_kv * out.stride_batch +
                         head % p.heads_kv * out.stride_head + row % p.seqlen_k * out.stride_row + column;
    *reinterpret_cast<uint4*>(target) = words;
  }
}

// Both results.
template <typename Config>
__device__ __forceinline__ void reduce_splits_of(ArgumentsOf<Config> const& arguments) {
  using Element = typename Config::Element;
  auto const& p = arguments.params;
  int64_t const first = int64_t(blockIdx.x) * kRowThreads + threadIdx.x, step = int64_t(gridDim.x) * kRowThreads;
  reduce_splits<Element>(arguments, arguments.dk_partial, Config::kPaddedDimQK, score_scale(p), p.dk, p.dim_qk, first,
                         step);
  reduce_splits<Element>(arguments, arguments.dv_partial, Config::kPaddedDimV, 1.0f, p.dv, p.dim_v, first, step);
}
template <typename Config>
__global__ void __launch_bounds__(kRowThreads)
    backward_reduce_splits(ArgumentsOf<Config> const __grid_constant__ arguments) {
  reduce_splits_of<Config>(arguments);
}

}  // namespace attention_autotuner

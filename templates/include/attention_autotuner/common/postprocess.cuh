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

// Eight neighbors of dK or dV in 16 bits from the partial sums of the CTAs that shared their rows, always added in the
// same order. Where these are few, nothing but their loads takes time, so that several are under way together.
template <typename Element, int kColumns, typename Arguments>
__device__ __forceinline__ void reduce_splits(Arguments const& arguments, float const* partial, int64_t chunk,
                                              float scale, attention_autotuner_tensor const& out, int dim) {
  constexpr int kChunks = kColumns / kChunk;
  auto const& p = arguments.params;
  int64_t const rows = int64_t(p.batch) * p.heads_kv * p.seqlen_k;
  int const row = int(chunk / kChunks), column = int(chunk % kChunks) * kChunk;
  if (column >= dim) return;
  auto const* const source = reinterpret_cast<float4 const*>(partial + int64_t(row) * kColumns + column);
  int64_t const stride = rows * (kColumns / 4);
  float values[kChunk] = {};
#pragma unroll 4
  for (int split = 0; split < arguments.splits.divisor; ++split) {
    float4 const low = source[split * stride], high = source[split * stride + 1];
    float const addends[kChunk] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < kChunk; ++i) values[i] += addends[i];
  }
  int const head = row / p.seqlen_k, batch = head / p.heads_kv;
  auto* const target = static_cast<Element*>(out.data) + batch * out.stride_batch +
                       (head - batch * p.heads_kv) * out.stride_head + (row - head * p.seqlen_k) * out.stride_row +
                       column;
  uint4 words;
  words.x = pack_pair<Element>(values[0] * scale, values[1] * scale);
  words.y = pack_pair<Element>(values[2] * scale, values[3] * scale);
  words.z = pack_pair<Element>(values[4] * scale, values[5] * scale);
  words.w = pack_pair<Element>(values[6] * scale, values[7] * scale);
  *reinterpret_cast<uint4*>(target) = words;
}

// Both results, chunk by chunk: those of dK, then those of dV.
template <typename Config>
__device__ __forceinline__ void reduce_splits_of(ArgumentsOf<Config> const& arguments) {
  using Element = typename Config::Element;
  constexpr int kColumnsK = Config::kPaddedDimQK, kColumnsV = Config::kPaddedDimV;
  auto const& p = arguments.params;
  int64_t const rows = int64_t(p.batch) * p.heads_kv * p.seqlen_k;
  int64_t const chunks_of_dk = rows * (kColumnsK / kChunk), chunks = chunks_of_dk + rows * (kColumnsV / kChunk);
  int64_t const step = int64_t(gridDim.x) * kRowThreads;
  for (int64_t chunk = int64_t(blockIdx.x) * kRowThreads + threadIdx.x; chunk < chunks; chunk += step) {
    if (chunk < chunks_of_dk) {
      reduce_splits<Element, kColumnsK>(arguments, arguments.dk_partial, chunk, score_scale(p), p.dk, p.dim_qk);
    } else {
      reduce_splits<Element, kColumnsV>(arguments, arguments.dv_partial, chunk - chunks_of_dk, 1.0f, p.dv, p.dim_v);
    }
  }
}
template <typename Config>
__global__ void __launch_bounds__(kRowThreads)
    backward_reduce_splits(ArgumentsOf<Config> const __grid_constant__ arguments) {
  reduce_splits_of<Config>(arguments);
}

}  // namespace attention_autotuner

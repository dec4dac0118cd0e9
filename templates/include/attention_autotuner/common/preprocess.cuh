// What comes before the passes of a backward of either family: the statistics of rows.
#pragma once

#include "attention_autotuner/common/backward_arguments.cuh"
#include "attention_autotuner/common/convert.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/tensors.cuh"
#include "attention_autotuner/common/tile.cuh"
#include "attention_autotuner/score/row_statistics.cuh"
#include "attention_autotuner/score/score_mod.cuh"

namespace attention_autotuner {

template <typename Config>
using ArgumentsOf = BackwardArguments<typename ScoreModParams<Config::kScoreMod>::Backward>;

inline constexpr int kEdgeThreads = 128;
inline constexpr int kLanesPerRow = 8;
inline constexpr int kPrepareRows = 64;  // of one CTA

// Eight elements of a row in fp32, read `CopyBytes` at a time.
template <typename Element, int CopyBytes>
__device__ __forceinline__ void load_eight(float (&values)[kChunk], Element const* source) {
  if constexpr (CopyBytes == 16) {
    uint4 const words = *reinterpret_cast<uint4 const*>(source);
    uint32_t const packed[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float2 const pair = unpack_pair<Element>(packed[i]);
      values[2 * i] = pair.x;
      values[2 * i + 1] = pair.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) values[i] = float(source[i]);
  }
}

// Statistics of 64 rows, with delta = rowsum(dO O) where they want it. Rows beyond the sequence get their neutral ones.
// Every CTA also clears its share of `clear_words` 16-byte words at dq_sum.
template <typename Config>
__global__ void __launch_bounds__(kEdgeThreads)
    attention_backward_prepare(ArgumentsOf<Config> const __grid_constant__ arguments, int64_t clear_words) {
  using Element = typename Config::Element;
  using Statistics = RowStatistics<Config::kScoreMod>;
  auto const& p = arguments.params;
  int const blocks = divide_up(arguments.statistics_rows, kPrepareRows);
  int const index = int(blockIdx.x) / blocks, block = int(blockIdx.x) % blocks;
  int const head = index % p.heads_q, batch = index / p.heads_q;
  int const lane = threadIdx.x % kLanesPerRow;
  constexpr int kRowsPerPass = kEdgeThreads / kLanesPerRow;
#pragma unroll
  for (int pass = 0; pass < kPrepareRows / kRowsPerPass; ++pass) {
    int const row = block * kPrepareRows + pass * kRowsPerPass + threadIdx.x / kLanesPerRow;
    float delta = 0.0f;
    if (row < p.seqlen_q && Statistics::want_delta(p)) {
      Element const* const o = head_data<Element>(p.o, batch, head) + row * p.o.stride_row;
      Element const* const dout = head_data<Element>(p.dout, batch, head) + row * p.dout.stride_row;
#pragma unroll 4
      for (int column = lane * kChunk; column < p.dim_v; column += kLanesPerRow * kChunk) {
        float left[kChunk], right[kChunk];
        load_eight<Element, 16>(left, o + column);
        load_eight<Element, Config::kCopyBytes>(right, dout + column);
#pragma unroll
        for (int i = 0; i < kChunk; ++i) delta = fmaf(left[i], right[i], delta);
      }
    }
#pragma unroll
    for (int other = kLanesPerRow / 2; other > 0; other /= 2) delta += __shfl_xor_sync(0xffffffffu, delta, other);
    if (lane == 0 && row < arguments.statistics_rows) {
      float2 found = make_float2(Statistics::neutral_base(), 0.0f);
      if (row < p.seqlen_q) found = Statistics::find(p, int64_t(index) * p.seqlen_q + row, delta);
      int64_t const place = arguments.statistics_offset(batch, head) + row;
      arguments.base[place] = found.x;
      arguments.shift[place] = found.y;
    }
  }
  int64_t const threads = int64_t(gridDim.x) * kEdgeThreads;
  for (int64_t word = int64_t(blockIdx.x) * kEdgeThreads + threadIdx.x; word < clear_words; word += threads) {
    reinterpret_cast<float4*>(arguments.dq_sum)[word] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
}

}  // namespace attention_autotuner

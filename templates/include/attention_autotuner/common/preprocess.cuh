// The preprocess of a backward of either family: LSE and delta of rows, see common/backward_arguments.cuh.
#pragma once

#include "attention_autotuner/common/backward_arguments.cuh"
#include "attention_autotuner/common/convert.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/sequences.cuh"
#include "attention_autotuner/common/tensors.cuh"
#include "attention_autotuner/common/tile.cuh"
#include "attention_autotuner/score/lse_delta.cuh"
#include "attention_autotuner/score/score_mod.cuh"

namespace attention_autotuner {

template <typename Config>
using ArgumentsOf = BackwardArguments<BackwardParamsOf<Config>>;

inline constexpr int kRowThreads = 128;
inline constexpr int kLanesPerRow = 8;
// Of one CTA: fewer where their loads are in flight together.
template <bool kAtOnce>
inline constexpr int kPreprocessRowsOf = kAtOnce ? 32 : 64;
inline constexpr int kPreprocessRows = kPreprocessRowsOf<false>;

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

// LSE and delta of 64 rows of a head, with rowsum(dO O) where it is needed. Rows beyond the sequence get neutral
// values.
template <typename Config>
__device__ __forceinline__ void find_lse_delta(ArgumentsOf<Config> const& arguments, int index, int block) {
  using Element = typename Config::Element;
  using Rows = LseDelta<Config::kScoreMod>;
  auto const& p = arguments.params;
  int const head = index % p.heads_q, batch = index / p.heads_q;
  int const lane = threadIdx.x % kLanesPerRow;
  constexpr int kRowsPerPass = kRowThreads / kLanesPerRow;
#pragma unroll
  for (int pass = 0; pass < kPreprocessRows / kRowsPerPass; ++pass) {
    int const row = block * kPreprocessRows + pass * kRowsPerPass + threadIdx.x / kLanesPerRow;
    float delta = 0.0f;
    if (row < p.seqlen_q && Rows::want_delta(p)) {
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
    if (lane == 0 && row < arguments.lse_delta_rows) {
      float2 values_of_row = make_float2(Rows::neutral_base(), 0.0f);
      if (row < p.seqlen_q) values_of_row = Rows::find(p, int64_t(index) * p.seqlen_q + row, delta);
      int64_t const place = arguments.lse_delta_offset(batch, head) + row;
      arguments.base[place] = values_of_row.x;
      arguments.shift[place] = values_of_row.y;
    }
  }
}

// The product of two rows' eight elements.
template <typename Element>
__device__ __forceinline__ float dot_eight(uint4 const& a, uint4 const& b) {
  uint32_t const left[4] = {a.x, a.y, a.z, a.w}, right[4] = {b.x, b.y, b.z, b.w};
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float2 const l = unpack_pair<Element>(left[i]), r = unpack_pair<Element>(right[i]);
    sum = fmaf(l.x, r.x, fmaf(l.y, r.y, sum));
  }
  return sum;
}
// The same as find_lse_delta, of 32 rows whose loads are in flight at a time; of tensors aligned to 16 bytes.
template <typename Config>
__device__ __forceinline__ void find_lse_delta_at_once(ArgumentsOf<Config> const& arguments, int index, int block) {
  using Element = typename Config::Element;
  using Rows = LseDelta<Config::kScoreMod>;
  static_assert(Config::kCopyBytes == 16);
  auto const& p = arguments.params;
  int const head = index % p.heads_q, batch = index / p.heads_q;
  int const lane = threadIdx.x % kLanesPerRow;
  constexpr int kRowsPerPass = kRowThreads / kLanesPerRow, kRows = kPreprocessRowsOf<true>,
                kPasses = kRows / kRowsPerPass;
  constexpr int kWords = divide_up(Config::kPaddedDimV, kLanesPerRow * kChunk);  // of a row, for each lane
  constexpr int kAtOnce = kWords >= 8 ? 1 : kPasses;
  int const first_row = block * kRows + threadIdx.x / kLanesPerRow;
  bool const wants_delta = Rows::want_delta(p);
#pragma unroll
  for (int pass = 0; pass < kPasses; pass += kAtOnce) {
    uint4 left[kAtOnce][kWords], right[kAtOnce][kWords];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      int const row = first_row + (pass + i) * kRowsPerPass;
#pragma unroll
      for (int word = 0; word < kWords; ++word) {
        int const column = (word * kLanesPerRow + lane) * kChunk;
        left[i][word] = right[i][word] = make_uint4(0, 0, 0, 0);
        if (row < p.seqlen_q && column < p.dim_v && wants_delta) {
          Element const* const o = head_data<Element>(p.o, batch, head) + row * p.o.stride_row;
          Element const* const dout = head_data<Element>(p.dout, batch, head) + row * p.dout.stride_row;
          left[i][word] = *reinterpret_cast<uint4 const*>(o + column);
          right[i][word] = *reinterpret_cast<uint4 const*>(dout + column);
        }
      }
    }
    float2 values[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      int const row = first_row + (pass + i) * kRowsPerPass;
      float delta = 0.0f;
#pragma unroll
      for (int word = 0; word < kWords; ++word) delta += dot_eight<Element>(left[i][word], right[i][word]);
#pragma unroll
      for (int other = kLanesPerRow / 2; other > 0; other /= 2) delta += __shfl_xor_sync(0xffffffffu, delta, other);
      values[i] = make_float2(Rows::neutral_base(), 0.0f);
      if (lane == 0 && row < p.seqlen_q) values[i] = Rows::find(p, int64_t(index) * p.seqlen_q + row, delta);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      int const row = first_row + (pass + i) * kRowsPerPass;
      if (lane != 0 || row >= arguments.lse_delta_rows) continue;
      int64_t const place = arguments.lse_delta_offset(batch, head) + row;
      arguments.base[place] = values[i].x;
      arguments.shift[place] = values[i].y;
    }
  }
}

// Every CTA takes its rows, and also clears its share of `clear_words` 16-byte words at dq_sum.
template <typename Config, bool kAtOnce = false>
__device__ __forceinline__ void preprocess_rows(ArgumentsOf<Config> const& arguments, int64_t clear_words) {
  constexpr int kRows = kPreprocessRowsOf<kAtOnce>;
  int const blocks = divide_up(arguments.lse_delta_rows, kRows);
  int const index = int(blockIdx.x) / blocks, block = int(blockIdx.x) % blocks;
  if constexpr (kIsPacked<Config>) {
    constexpr int kBlocks = kLseDeltaPadding / kRows;
    auto const at =
        find_block_by_warp<kLseDeltaPadding, kLseDeltaSpare>(CuSeqlens::of_queries(arguments.params), block / kBlocks);
    ArgumentsOf<Config> view = arguments;
    int const first_query = show_sequence_to_backward<true>(view, at.sequence).query;
    int64_t const shift = shift_of_row_values(view.params, first_query, index);
    view.params.lse += shift;
    if (view.params.dlse != nullptr) view.params.dlse += shift;
    if constexpr (kAtOnce) {
      find_lse_delta_at_once<Config>(view, index, at.block * kBlocks + block % kBlocks);
    } else {
      find_lse_delta<Config>(view, index, at.block * kBlocks + block % kBlocks);
    }
  } else if constexpr (kAtOnce) {
    find_lse_delta_at_once<Config>(arguments, index, block);
  } else {
    find_lse_delta<Config>(arguments, index, block);
  }
  int64_t const threads = int64_t(gridDim.x) * kRowThreads;
  for (int64_t word = int64_t(blockIdx.x) * kRowThreads + threadIdx.x; word < clear_words; word += threads) {
    reinterpret_cast<float4*>(arguments.dq_sum)[word] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
}
template <typename Config>
__global__ void __launch_bounds__(kRowThreads)
    backward_preprocess(ArgumentsOf<Config> const __grid_constant__ arguments, int64_t clear_words) {
  preprocess_rows<Config>(arguments, clear_words);
}

}  // namespace attention_autotuner

// What comes before and after the passes of a backward: row statistics, dQ from its fp32 sums, and dK and dV
// from the parts of several CTAs.
#pragma once

#include "attention_autotuner/scores_backward_sm80/dq_share.cuh"

namespace attention_autotuner {

template <typename Config>
using ArgumentsOf = BackwardArguments<typename BackwardClasses<Config>::Params>;

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
  using Statistics = RowStatistics<Config::kWeights>;
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

// dQ in 16 bits from the sums that key passes left in fragment order; one CTA a tile of block_m rows.
template <typename Config>
__global__ void __launch_bounds__(kEdgeThreads)
    attention_backward_convert(ArgumentsOf<Config> const __grid_constant__ arguments) {
  using T = KeyPassTraits<Config>;
  using Element = typename T::Element;
  auto const& p = arguments.params;
  int const index = int(blockIdx.x) / arguments.dq_tiles, tile = int(blockIdx.x) % arguments.dq_tiles;
  int const head = index % p.heads_q, batch = index / p.heads_q;
  float const* const sums = arguments.dq_sum + int64_t(blockIdx.x) * (T::kBlockM * T::kClassQK);
  Element* const out = static_cast<Element*>(p.dq.data) + batch * p.dq.stride_batch + head * p.dq.stride_head;
  constexpr int kColumnTiles = T::kClassQK / 8;
  // A unit is one row of eight in a fragment tile, and the row eight below it.
#pragma unroll 2
  for (int unit = threadIdx.x; unit < T::kBlockM / 16 * kColumnTiles * 8; unit += kEdgeThreads) {
    int const in_tile = unit % 8, fragment = unit / 8;
    int const row = tile * T::kBlockM + fragment / kColumnTiles * 16 + in_tile, column = fragment % kColumnTiles * 8;
    float const* const source = sums + int64_t(fragment) * 128;
    float values[16];
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
      // Four floats that are neighbours in either order: all of a lane, or one of each of the row's four lanes.
      float4 const four = *reinterpret_cast<float4 const*>(
          source + (adds_by_lane() ? 4 * (4 * in_tile + quarter) : 32 * quarter + 4 * in_tile));
      float const found[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int const lane = adds_by_lane() ? quarter : i;
        int const element = adds_by_lane() ? i : quarter;
        values[element / 2 * 8 + 2 * lane + element % 2] = found[i] * score_scale(p);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row + 8 * half < p.seqlen_q && column < p.dim_qk) {
        uint4 words;
        words.x = pack_pair<Element>(values[8 * half], values[8 * half + 1]);
        words.y = pack_pair<Element>(values[8 * half + 2], values[8 * half + 3]);
        words.z = pack_pair<Element>(values[8 * half + 4], values[8 * half + 5]);
        words.w = pack_pair<Element>(values[8 * half + 6], values[8 * half + 7]);
        *reinterpret_cast<uint4*>(out + int64_t(row + 8 * half) * p.dq.stride_row + column) = words;
      }
    }
  }
}

// One result in 16 bits from the parts of the CTAs that shared its rows, always added in the same order.
template <typename Element, typename Arguments>
__device__ __forceinline__ void add_parts(Arguments const& arguments, float const* parts, int columns, float scale,
                                          attention_autotuner_tensor const& out, int dim, int64_t first, int64_t step) {
  auto const& p = arguments.params;
  int64_t const rows = int64_t(p.batch) * p.heads_kv * p.seqlen_k;
  int const chunks = columns / kChunk;
  for (int64_t unit = first; unit < rows * chunks; unit += step) {
    int64_t const row = unit / chunks;
    int const column = int(unit % chunks) * kChunk;
    if (column >= dim) continue;
    float values[kChunk] = {};
    for (int split = 0; split < arguments.splits.divisor; ++split) {
      auto const* const source = reinterpret_cast<float4 const*>(parts + (split * rows + row) * columns + column);
      float4 const low = source[0], high = source[1];
      float const found[kChunk] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int i = 0; i < kChunk; ++i) values[i] += found[i];
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

template <typename Config>
__global__ void __launch_bounds__(kEdgeThreads)
    attention_backward_add_parts(ArgumentsOf<Config> const __grid_constant__ arguments) {
  using Element = typename Config::Element;
  auto const& p = arguments.params;
  int64_t const first = int64_t(blockIdx.x) * kEdgeThreads + threadIdx.x, step = int64_t(gridDim.x) * kEdgeThreads;
  add_parts<Element>(arguments, arguments.dk_parts, Config::kClassQK, score_scale(p), p.dk, p.dim_qk, first, step);
  add_parts<Element>(arguments, arguments.dv_parts, Config::kClassV, 1.0f, p.dv, p.dim_v, first, step);
}

}  // namespace attention_autotuner

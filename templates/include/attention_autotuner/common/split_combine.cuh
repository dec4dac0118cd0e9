// Split KV: the output and the LSE of rows from those of the CTAs that shared their keys.
#pragma once

#include <cstdint>

#include "attention_autotuner/common/convert.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/scheduler.cuh"
#include "attention_autotuner/common/threads.cuh"

namespace attention_autotuner {

inline constexpr int kCombineThreads = 128;  // of a CTA
inline constexpr int kCombineRows = kCombineThreads / 32;

// Of every split the normalised output of all rows, [splits, rows, padded columns], and their LSE in powers of two,
// [splits, rows]: minus infinity, and zeros, where a split has no key that a row sees.
struct SplitResults {
  float const *output, *lse;
  int splits;
  int rows;                // [batch, heads, queries]
  Divider queries, heads;  // of one head, of one batch
  void* combined;          // [batch, heads, queries, columns]
  int64_t stride_batch, stride_head, stride_row;
  int columns;          // the true ones
  float* combined_lse;  // [rows], in powers of e; or null
};

// Of all lanes of a warp, in a fixed order.
template <typename Combine>
__device__ __forceinline__ float over_warp(float value, Combine&& combine) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) value = combine(value, __shfl_xor_sync(0xffffffffu, value, lanes));
  return value;
}

// One row by a warp. Lane i has the factors of splits i, i + 32, ..., and columns 4 i to 4 i + 3 of every 128; splits
// are added in their order, so that equal inputs give equal bits.
template <typename Element, int Columns>
__device__ __forceinline__ void combine_row(SplitResults const& r, int row) {
  constexpr int kLaneColumns = 4, kWarpColumns = 32 * kLaneColumns, kBlocks = divide_up(Columns, kWarpColumns);
  int const lane = lane_index();
  auto lse_of = [&](int split) { return split < r.splits ? r.lse[int64_t(split) * r.rows + row] : minus_infinity(); };
  float largest = minus_infinity();
  for (int split = lane; split < r.splits; split += 32) largest = fmaxf(largest, lse_of(split));
  largest = over_warp(largest, [](float a, float b) { return fmaxf(a, b); });
  float const base = largest == minus_infinity() ? 0.0f : largest;
  float total = 0.0f;
  for (int split = lane; split < r.splits; split += 32) total += exp2_approximate(lse_of(split) - base);
  total = over_warp(total, [](float a, float b) { return a + b; });
  float const inverse = total == 0.0f ? 0.0f : 1.0f / total;

  float sums[kBlocks][kLaneColumns] = {};
  for (int begin = 0; begin < r.splits; begin += 32) {
    float const factor = exp2_approximate(lse_of(begin + lane) - base) * inverse;
    int const end = minimum(begin + 32, r.splits);
#pragma unroll 4
    for (int split = begin; split < end; ++split) {
      float const share = __shfl_sync(0xffffffffu, factor, split - begin);
      float const* const line = r.output + (int64_t(split) * r.rows + row) * Columns + kLaneColumns * lane;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        if (block * kWarpColumns + kLaneColumns * lane < Columns) {
          float4 const values = *reinterpret_cast<float4 const*>(line + block * kWarpColumns);
          sums[block][0] = fmaf(share, values.x, sums[block][0]);
          sums[block][1] = fmaf(share, values.y, sums[block][1]);
          sums[block][2] = fmaf(share, values.z, sums[block][2]);
          sums[block][3] = fmaf(share, values.w, sums[block][3]);
        }
      }
    }
  }

  int const head_batch = r.queries.divide(row), batch = r.heads.divide(head_batch);
  int const query = row - head_batch * r.queries.divisor, head = head_batch - batch * r.heads.divisor;
  Element* const line =
      static_cast<Element*>(r.combined) + batch * r.stride_batch + head * r.stride_head + query * r.stride_row;
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    int const column = block * kWarpColumns + kLaneColumns * lane;
    if (column < r.columns) {
      *reinterpret_cast<uint2*>(line + column) = make_uint2(pack_pair<Element>(sums[block][0], sums[block][1]),
                                                            pack_pair<Element>(sums[block][2], sums[block][3]));
    }
  }
  if (lane == 0 && r.combined_lse != nullptr) r.combined_lse[row] = (largest + log2f(total)) * kLn2;
}

// The row of this warp, of one CTA for every kCombineRows.
template <typename Element, int Columns>
__device__ __forceinline__ void combine_rows(SplitResults const& results) {
  int const row = int(blockIdx.x) * kCombineRows + int(threadIdx.x) / 32;
  if (row < results.rows) combine_row<Element, Columns>(results, row);
}

}  // namespace attention_autotuner

// Split KV: the output and the LSE of rows from those of the CTAs that shared their keys.
#pragma once

#include <cstdint>
#include <type_traits>

#include "attention_autotuner/common/convert.cuh"
#include "attention_autotuner/common/loads.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/scheduler.cuh"
#include "attention_autotuner/common/threads.cuh"

namespace attention_autotuner {

inline constexpr int kCombineThreads = 128;  // of a CTA
inline constexpr int kCombineWarps = kCombineThreads / 32;
inline constexpr int kLoadsAhead = 8;  // of the results of splits, that a lane has under way

// Of every split the normalised output of all rows, [splits, rows, padded columns], and their LSE in powers of two,
// [splits, rows]: minus infinity, and zeros, where a split has no key that a row sees.
struct SplitResults {
  float const *output, *lse;
  int splits;
  int rows;                // [batch, heads, queries]
  int warps_log2;          // of those that share the splits of a row
  Divider queries, heads;  // of one head, of one batch
  void* combined;          // [batch, heads, queries, columns]
  int64_t stride_batch, stride_head, stride_row;
  int columns;          // the true ones
  float* combined_lse;  // [rows], in powers of e; or null
};

// The same where rows have results of unlike numbers of splits, or of none beside those that were written for good.
struct UnevenSplitResults : SplitResults {
  int const* row_splits;  // [rows]
};

template <bool kUneven>
using SplitResultsOf = std::conditional_t<kUneven, UnevenSplitResults, SplitResults>;

// The results of a row, and whether there are several.
__device__ __forceinline__ SplitResults const& results_of(SplitResults const& r, int) { return r; }
__device__ __forceinline__ bool has_splits(SplitResults const& r, int row) { return row < r.rows; }
__device__ __forceinline__ SplitResults results_of(UnevenSplitResults const& r, int row) {
  SplitResults of_row = r;
  of_row.splits = row < r.rows ? r.row_splits[row] : 0;
  return of_row;
}
__device__ __forceinline__ bool has_splits(UnevenSplitResults const& r, int row) {
  return row < r.rows && r.row_splits[row] > 1;
}

// The logarithm of the warps that share a row of so many splits: few loads after one another, whose latencies are all
// the time of few rows.
__host__ __device__ constexpr int combine_warps_log2(int splits) { return splits <= 4 ? 0 : splits <= 8 ? 1 : 2; }
static_assert(kCombineWarps == 1 << combine_warps_log2(INT32_MAX));

// The sums of one row over some of its splits, from `first` on, `1 << warps_log2` apart. Lane i has the factors of
// splits i, i + 32, ..., and columns 4 i to 4 i + 3 of every 128; splits are added in their order, so that equal inputs
// give equal bits.
template <int Columns>
struct SplitSums {
  static constexpr int kLaneColumns = 4, kWarpColumns = 32 * kLaneColumns, kBlocks = divide_up(Columns, kWarpColumns);
  static constexpr int kAhead = kBlocks > 1 ? kLoadsAhead / 2 : kLoadsAhead;

  SplitResults const& r;
  int row;
  float of[kBlocks][kLaneColumns] = {};
  float lse = minus_infinity();  // of the whole row, in powers of two

  static __device__ __forceinline__ int column(int block) { return block * kWarpColumns + kLaneColumns * lane_index(); }

  // The results of the splits from `begin` on; past the last split those of that one again.
  __device__ __forceinline__ void load(float4 (&values)[kAhead][kBlocks], int begin) const {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      int const split = minimum(begin + (i << r.warps_log2), r.splits - 1);
      float const* const line = r.output + (int64_t(split) * r.rows + row) * Columns;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        values[i][block] = load_in_order(line + (column(block) < Columns ? column(block) : 0));
      }
    }
  }

  __device__ __forceinline__ float lse_of(int split) const {
    return split < r.splits ? r.lse[int64_t(split) * r.rows + row] : minus_infinity();
  }

  __device__ __forceinline__ void add(int first) {
    int const lane = lane_index(), stride = kAhead << r.warps_log2;
    float4 values[kAhead][kBlocks];
    float const lane_lse = lse_of(lane);
    load(values, first);
    float largest = lane_lse;
    for (int split = lane + 32; split < r.splits; split += 32) largest = fmaxf(largest, lse_of(split));
    largest = over_warp(largest, [](float a, float b) { return fmaxf(a, b); });
    float const base = largest == minus_infinity() ? 0.0f : largest;
    float factor = exp2_approximate(lane_lse - base), total = factor;
    for (int split = lane + 32; split < r.splits; split += 32) total += exp2_approximate(lse_of(split) - base);
    total = over_warp(total, [](float a, float b) { return a + b; });
    float const inverse = total == 0.0f ? 0.0f : 1.0f / total;
    lse = largest + log2f(total);

    int known = 0;  // the split of whose factor the first lane has
    for (int begin = first; begin < r.splits; begin += stride) {
      if (begin != first) load(values, begin);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        int const split = begin + (i << r.warps_log2);
        if (split >= r.splits) break;
        if (split - known >= 32) {
          known += 32;
          factor = exp2_approximate(lse_of(known + lane) - base);
        }
        float const share = __shfl_sync(0xffffffffu, factor, split - known) * inverse;
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          of[block][0] = fmaf(share, values[i][block].x, of[block][0]);
          of[block][1] = fmaf(share, values[i][block].y, of[block][1]);
          of[block][2] = fmaf(share, values[i][block].z, of[block][2]);
          of[block][3] = fmaf(share, values[i][block].w, of[block][3]);
        }
      }
    }
  }

  // The sums of the row's other warps, in their order.
  __device__ __forceinline__ void gather(int warp) {
    int const warps = 1 << r.warps_log2;
    __shared__ float4 shared[kCombineWarps * kBlocks * 32];
    auto place = [&](int of_warp, int block) { return (of_warp * kBlocks + block) * 32 + lane_index(); };
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      shared[place(warp, block)] = make_float4(of[block][0], of[block][1], of[block][2], of[block][3]);
    }
    __syncthreads();
    for (int other = 1; other < warps && warp % warps == 0; ++other) {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        float4 const values = shared[place(warp + other, block)];
        of[block][0] += values.x;
        of[block][1] += values.y;
        of[block][2] += values.z;
        of[block][3] += values.w;
      }
    }
  }

  template <typename Element>
  __device__ __forceinline__ void store() const {
    int const head_batch = r.queries.divide(row), batch = r.heads.divide(head_batch);
    int const query = row - head_batch * r.queries.divisor, head = head_batch - batch * r.heads.divisor;
    Element* const line =
        static_cast<Element*>(r.combined) + batch * r.stride_batch + head * r.stride_head + query * r.stride_row;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      if (column(block) < r.columns) {
        *reinterpret_cast<uint2*>(line + column(block)) =
            make_uint2(pack_pair<Element>(of[block][0], of[block][1]), pack_pair<Element>(of[block][2], of[block][3]));
      }
    }
    if (lane_index() == 0 && r.combined_lse != nullptr) r.combined_lse[row] = lse * kLn2;
  }
};

// The rows of this CTA, each by as many warps as share one.
template <typename Element, int Columns, typename Results>
__device__ __forceinline__ void combine_rows(Results const& r) {
  int const warp = __shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0);
  int const place = warp & ((1 << r.warps_log2) - 1);
  int const row = int(blockIdx.x) * (kCombineWarps >> r.warps_log2) + (warp >> r.warps_log2);
  SplitResults const& of_row = results_of(r, row);
  SplitSums<Columns> sums{of_row, row};
  if (has_splits(r, row)) sums.add(place);
  if (r.warps_log2 > 0) sums.gather(warp);
  if (has_splits(r, row) && place == 0) sums.template store<Element>();
}

}  // namespace attention_autotuner

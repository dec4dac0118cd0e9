// The softmax of a consumer warpgroup of attention's backward: P and dS from S and dP, as operands of the next MMAs.
#pragma once

#include <cstdint>

#include "attention_autotuner/attention_backward_sm90/modified.cuh"
#include "attention_autotuner/attention_backward_sm90/producer.cuh"
#include "attention_autotuner/common/convert.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/shared_memory.cuh"
#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/sm90/stmatrix.cuh"
#include "attention_autotuner/sm90/swizzle.cuh"

namespace attention_autotuner::softmax_backward {

using softmax_forward::warp_in_warpgroup;

template <typename T>
struct BackwardPassSm90Scores : BackwardPassSm90Stages<T> {
  using Base = BackwardPassSm90Stages<T>;
  using Element = typename T::Element;
  using Base::arguments;
  using Base::batch;
  using Base::head;
  using Base::row_block;

  // Stages follow from the number of a step, so that little is carried from one to the next.
  using First = BarrierRing<T::kFirstStages>;    // of Y0
  using Second = BarrierRing<T::kSecondStages>;  // of Y1

  int const group;  // of this warpgroup, the same in all lanes
  float s[T::kBlockColumns / 2], dp[T::kHasDs && !T::kByTurns ? T::kBlockColumns / 2 : 1];
  uint32_t p[T::kHasDv ? T::kBlockColumns / 4 : 1], ds[T::kHasDs && !T::kByTurns ? T::kBlockColumns / 4 : 1];
  float base[2], shift[2];       // of this lane's two rows, where rows are queries
  int first_whole, whole_tiles;  // those of which all of this warpgroup's rows see all columns
  CappedScores<T::kPacksCapped, T::kBlockColumns / 4> capped;
  Distances<T> distances;
  Biases<T> biases;

  __device__ __forceinline__ BackwardPassSm90Scores(BackwardPassSm90Arguments<typename T::Params> const& arguments,
                                                    uint32_t smem, typename Base::List const& list,
                                                    OutputTiles<T::kDynamic> const& tiles, int group)
      : Base(arguments, smem, list, tiles), group(group) {}

  // The first row of this warpgroup, and of this lane.
  __device__ __forceinline__ int first_row() const { return row_block * T::kBlockRows + group * kWarpgroupRows; }
  __device__ __forceinline__ int lane_row() const { return first_row() + 16 * warp_in_warpgroup() + lane_index() / 4; }

  __device__ __forceinline__ void load_row_values() {
    if constexpr (T::kByQueries) {
      auto const& common = Base::common();
      int64_t const first = common.lse_delta_offset(batch, head);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int const row = minimum(lane_row() + 8 * half, common.lse_delta_rows - 1);
        base[half] = common.base[first + row];
        shift[half] = common.shift[first + row];
      }
    }
  }

  // With a softcap and S alone ahead there are no registers to keep what is found.
  static constexpr bool kFindsAgain = T::kSoftcap && T::kOrder == IssueOrder::kScoresAhead;
  // Once a block: found again in every step it took 1 to 2 % of a call, and 3 to 11 % where spans are read.
  __device__ __forceinline__ void find_whole_tiles() {
    auto const& common = Base::common();
    int const first = first_row(), last = first + kWarpgroupRows - 1;
    int begin = 0, end = 0;  // of the columns that all rows see
    if constexpr (T::kByQueries) {
      if constexpr (T::kModified) begin = common.first_key(last);
      end = common.visible_keys(first);
    } else if (last < common.params.seqlen_k) {
      begin = common.first_query(last);
      end = T::kModified ? common.end_of_queries(first) : INT32_MAX;  // no query out of bounds has a P of its own
    }
    first_whole = divide_up(begin, T::kBlockColumns);
    whole_tiles = maximum(end / T::kBlockColumns - first_whole, 0);
  }
  // True where some of the warpgroup's rows do not see some of a tile's columns, or the reverse.
  __device__ __forceinline__ bool needs_mask(Cursor const& now) {
    if constexpr (kFindsAgain) find_whole_tiles();
    return uint32_t(now.tile - first_whole) >= uint32_t(whole_tiles);
  }
  // Whether warpgroups spare the scores of a tile they see nothing of; sums by distance take them from all.
  static constexpr bool kSkips = T::kPass == GradientPass::kKeys && !T::kRetNet && !T::kBias;
  // True where none of the warpgroup's keys is seen by any query of a tile, of those before the first to see one.
  __device__ __forceinline__ bool hides(Cursor const& now) const {
    if constexpr (!kSkips) return false;
    return Base::common().first_query(first_row()) >= (now.tile + 1) * T::kBlockColumns;
  }
  // The same of the last tile, where it is not the first.
  __device__ __forceinline__ bool hides_last() const {
    if constexpr (!kSkips || !T::kModified || T::kListed) return false;  // lists and spans are no faster for it
    auto const& common = Base::common();
    int const last = minimum(first_row() + kWarpgroupRows, common.params.seqlen_k) - 1;
    return Base::steps() > 1 && common.end_of_queries(last) <= (Base::range.end - 1) * T::kBlockColumns;
  }
  // Puts `hidden` in the place of scores of keys that queries do not see.
  __device__ __forceinline__ void mask(Cursor const& now, float hidden) {
    auto const& common = Base::common();
    int const column = now.tile * T::kBlockColumns + 2 * (lane_index() & 3);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int const row = lane_row() + 8 * half;
      int first = 0, end = T::kBlockColumns;  // visible columns from here
      if constexpr (T::kByQueries) {
        end = common.visible_keys(row) - column;
        if constexpr (T::kModified) first = common.first_key(row) - column;
      } else {
        first = row < common.params.seqlen_k ? common.first_query(row) - column : T::kBlockColumns;
        if constexpr (T::kModified) end = common.end_of_queries(row) - column;
      }
#pragma unroll
      for (int g = 0; g < T::kBlockColumns / 8; ++g) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = s[4 * g + 2 * half + e];
          bool seen = T::kByQueries ? 8 * g + e < end : 8 * g + e >= first;
          if constexpr (T::kModified) seen = 8 * g + e >= first && 8 * g + e < end;
          score = seen ? score : hidden;
        }
      }
    }
  }

  // What a bias table adds to the scores of a tile; while they are on their way, as it is a load.
  __device__ __forceinline__ void find_bias(Cursor const& now) { biases.begin(*this, now); }
  // P in the place of S.
  __device__ __forceinline__ void scores_to_p(int index, Cursor const& now) {
    uint32_t const values = Base::base_of(First::stage(index));  // of columns, where they are queries
    if constexpr (T::kModified) {
      bool const masked = needs_mask(now);
      distances.begin(*this, now);
      if (T::kAttnMask || masked || distances.crossed() || biases.vary()) {
        exponentiate_scores<true>(values, now, masked);
      } else {
        exponentiate_scores<false>(values, now, false);
      }
    } else {
      exponentiate_scores<false>(values, now, false);
      if (needs_mask(now)) mask(now, 0.0f);
    }
  }
  // `kAny`: of a tile that may need a mask and the magnitudes of distances.
  template <bool kAny>
  __device__ __forceinline__ void exponentiate_scores(uint32_t values, Cursor const& now, bool masked) {
    if constexpr (kAny && T::kSoftcap) {
#pragma unroll
      for (int i = 0; i < T::kBlockColumns / 2; ++i) s[i] = tanh_approximate(s[i] * arguments.tanh_scale);
      if (masked) mask(now, kHiddenTangent);
    }
    float const c = arguments.common.c;
    values += 8 * (lane_index() & 3);
#pragma unroll
    for (int g = 0; g < T::kBlockColumns / 8; ++g) {
      float2 of_columns{};
      if constexpr (!T::kByQueries) of_columns = load_shared_float2(values + 32 * g);
      float bent[4];
      biases.template load<kAny>(g);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float b = T::kByQueries ? base[e / 2] : e % 2 == 0 ? of_columns.x : of_columns.y;
        b = distances.template add<kAny>(b, e / 2, 8 * g + e % 2);
        b = biases.template take<kAny>(b, e);
        float score = s[4 * g + e];
        if constexpr (T::kAttnMask) {
          s[4 * g + e] = fmaf(score, c, -b);
          continue;
        }
        if constexpr (!kAny && T::kSoftcap) score = tanh_approximate(score * arguments.tanh_scale);
        s[4 * g + e] = exp2_approximate(fmaf(score, c, -b));
        if constexpr (T::kSoftcap && (T::kHasDs || T::kPacksCapped)) bent[e] = s[4 * g + e] * fmaf(-score, score, 1.0f);
        if constexpr (T::kSoftcap && T::kHasDs && !T::kHasDv) s[4 * g + e] = bent[e];
      }
      if constexpr (T::kPacksCapped) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          int const first = 4 * g + 2 * half;
          capped.next_p[2 * g + half] = pack_pair<Element>(s[first], s[first + 1]);
          capped.bent[2 * g + half] = pack_pair<Element>(bent[2 * half], bent[2 * half + 1]);
        }
      }
    }
    if constexpr (T::kAttnMask) {
      MaskTensorOfTile<T>::apply(*this, now, s);
#pragma unroll
      for (int i = 0; i < T::kBlockColumns / 2; ++i) s[i] = exp2_approximate(s[i]);
    }
    if (kAny && !T::kSoftcap && masked) mask(now, 0.0f);
  }
  // Where dP is, and dS as an operand.
  __device__ __forceinline__ auto& dp_registers() {
    if constexpr (T::kByTurns) {
      return s;
    } else {
      return dp;
    }
  }
  __device__ __forceinline__ auto& ds_registers() {
    if constexpr (T::kByTurns) {
      return p;
    } else {
      return ds;
    }
  }
  // dS in the place of dP.
  __device__ __forceinline__ void differentiate(int index, Cursor const&) {
    if constexpr (T::kHasDs) {
      auto& dp = dp_registers();
      uint32_t const values = Base::shift_of(Second::stage(index)) + 8 * (lane_index() & 3);
#pragma unroll
      for (int g = 0; g < T::kBlockColumns / 8; ++g) {
        float2 of_columns{};
        if constexpr (!T::kByQueries) of_columns = load_shared_float2(values + 32 * g);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float const d = T::kByQueries ? shift[e / 2] : e % 2 == 0 ? of_columns.x : of_columns.y;
          float p_of_ds = s[4 * g + e];
          if constexpr (T::kByTurns) {
            float2 const pair = unpack_pair<Element>(p[2 * g + e / 2]);
            p_of_ds = e % 2 == 0 ? pair.x : pair.y;
          }
          if constexpr (T::kPacksCapped) {
            float2 const pair = unpack_pair<Element>(capped.bent[2 * g + e / 2]);
            p_of_ds = e % 2 == 0 ? pair.x : pair.y;
          }
          dp[4 * g + e] = p_of_ds * (dp[4 * g + e] + d);
        }
      }
    }
  }
  // With no MMA in flight that reads them: the operands.
  __device__ __forceinline__ void pack_p() {
    if constexpr (T::kPacksCapped) {
      // Not a move: the assembler would give both the same registers, which MMAs read while they are written.
#pragma unroll
      for (int i = 0; i < T::kBlockColumns / 4; ++i) {
        asm volatile("or.b32 %0, %1, %2;\n" : "=r"(p[i]) : "r"(capped.next_p[i]), "r"(arguments.zero));
      }
      softmax_forward::fence_operands(p);
    } else if constexpr (T::kHasDv) {
      pack(p, s);
    }
  }
  __device__ __forceinline__ void pack_ds() {
    if constexpr (T::kHasDs) pack(ds_registers(), dp_registers());
  }
  template <int Registers>
  __device__ __forceinline__ static void pack(uint32_t (&operands)[Registers], float const* scores) {
#pragma unroll
    for (int i = 0; i < Registers; ++i) operands[i] = pack_pair<Element>(scores[2 * i], scores[2 * i + 1]);
    softmax_forward::fence_operands(operands);
  }
  // dS, of which rows are keys here, as rows of queries: one block of 64 columns for each warpgroup.
  __device__ __forceinline__ void store_ds(uint32_t tile) {
    auto const& ds = ds_registers();
    uint32_t const block = tile + group * T::kBlockColumns * kSwizzleRowBytes;
    int const matrix = lane_index() / 8, key = lane_index() & 7;
    int const chunk = 2 * warp_in_warpgroup() + matrix % 2, row = 8 * (matrix / 2) + key;
#pragma unroll
    for (int step = 0; step < T::kBlockColumns / 16; ++step) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = ds[4 * step + i];
      store_matrix_x4_transposed(swizzled_address(block, 16 * step + row, chunk, key), words);
    }
  }
};

}  // namespace attention_autotuner::softmax_backward

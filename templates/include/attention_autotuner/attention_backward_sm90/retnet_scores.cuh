// The scores of retnet's backward, of a consumer warpgroup: P and dS from S and dP, times the factors of a mask or of a
// decay.
//
// Passes that take P and dS make these factors twice: the registers to keep them in are the results'. Where S and dP
// are there at the same time, they make them once.
#pragma once

#include <cstdint>

#include "attention_autotuner/attention_backward_sm90/scores.cuh"
#include "attention_autotuner/common/convert.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/shared_memory.cuh"
#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/sm90/mask_tile.cuh"

namespace attention_autotuner::softmax_backward {

using softmax_forward::fence_accumulators;

// The factors of a warp's sixteen rows of a tile, in pairs of columns: of groups of eight columns one after the other,
// the first half of the rows, then the second. Groups go up, and down where columns are keys.
template <typename T, bool kDecayed = T::kDecayed>
struct RetNetFactors : MaskRows<T> {
  using Base = MaskRows<T>;
  using Element = typename T::Element;
  uint32_t words[4];

  // Waits for the mask. `row` is the first of the sixteen in the CTA's tile.
  template <typename Consumer>
  __device__ __forceinline__ RetNetFactors(Consumer const& consumer, int index, Cursor const& now, int row)
      : Base(consumer.arguments.common.params, consumer.mask_tile(BarrierRing<T::kMaskStages>::stage(index)), row,
             consumer.row_block * T::kBlockRows + row, now.tile * T::kBlockColumns) {
    using Masks = BarrierRing<T::kMaskStages>;
    wait(consumer.full(T::kMaskBarrier, Masks::stage(index)), Masks::phase(index));
  }
  __device__ __forceinline__ bool crossed() const { return Base::causal; }
  template <bool Crossed>
  __device__ __forceinline__ void begin(int sixteen) {
    Base::template load<Crossed>(words, sixteen);
  }
  template <bool Crossed>
  __device__ __forceinline__ float2 next(int g, int half) const {
    return unpack_pair<Element>(words[2 * (g % 2) + half]);
  }
  template <typename Consumer>
  __device__ __forceinline__ void end(Consumer const& consumer, int index) const {
    Base::release(consumer.empty(T::kMaskBarrier, BarrierRing<T::kMaskStages>::stage(index)));
  }
};

// gamma^distance: products of a power for each of the lane's first columns, or, where the diagonal crosses the tile and
// these could leave the range of fp32, an exponential each. Distances never fall from group to group, so that
// what is too small for fp32 at first is so for all.
template <typename T>
struct RetNetFactors<T, true> {
  static constexpr int kSign = T::kByQueries ? -1 : 1;
  static constexpr int kFirstGroup = T::kByQueries ? T::kBlockColumns / 8 - 1 : 0;
  int distance;  // from this lane's first key to its first query
  bool crosses;
  float log2_gamma, step;
  float2 powers[2];

  template <typename Consumer>
  __device__ __forceinline__ RetNetFactors(Consumer const& consumer, int, Cursor const& now, int row) {
    auto const& params = consumer.arguments.common.params;
    int const first = consumer.row_block * T::kBlockRows + row, column = now.tile * T::kBlockColumns;
    int const corner = kSign * (column - first) + params.causal_offset;
    crosses = corner < (T::kByQueries ? T::kBlockColumns - 1 : 15);
    distance = corner + kSign * (2 * (lane_index() & 3) - lane_index() / 4);
    log2_gamma = params.log2_gamma[now.head];
    step = exp2_approximate(8.0f * log2_gamma);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      powers[half] = make_float2(power(kFirstGroup, half, 0), power(kFirstGroup, half, 1));
    }
  }
  __device__ __forceinline__ int distance_of(int g, int half, int e) const {
    return distance + kSign * (8 * g + e - 8 * half);
  }
  __device__ __forceinline__ float power(int g, int half, int e) const {
    return exp2_approximate(log2_gamma * float(distance_of(g, half, e)));
  }
  __device__ __forceinline__ bool crossed() const { return crosses; }
  template <bool Crossed>
  __device__ __forceinline__ void begin(int) const {}
  template <bool Crossed>
  __device__ __forceinline__ float2 next(int g, int half) {
    if constexpr (Crossed) {
      return make_float2(distance_of(g, half, 0) < 0 ? 0.0f : power(g, half, 0),
                         distance_of(g, half, 1) < 0 ? 0.0f : power(g, half, 1));
    } else {
      float2 const now = powers[half];
      powers[half] = make_float2(now.x * step, now.y * step);
      return now;
    }
  }
  template <typename Consumer>
  __device__ __forceinline__ void end(Consumer const&, int) const {}
};

template <typename T>
struct BackwardPassSm90RetNet : BackwardPassSm90Scores<T> {
  using Base = BackwardPassSm90Scores<T>;
  using Base::arguments;
  using Base::Base;
  using Base::dp;
  using Base::s;
  using typename Base::First;
  using typename Base::Second;
  using Factors = RetNetFactors<T>;

  __device__ __forceinline__ void find_bias(Cursor const&) const {}
  // P in the place of S, in passes that take it.
  __device__ __forceinline__ void scores_to_p(int index, Cursor const& now) {
    if constexpr (T::kHasDv && !T::kScoresAtOnce) {
      Factors factors(*this, index, now, first_row());
      if (factors.crossed()) {
        multiply<true>(factors, index);
      } else {
        multiply<false>(factors, index);
      }
      if constexpr (!T::kHasDs) factors.end(*this, index);
    }
  }
  // dS in the place of dP.
  __device__ __forceinline__ void differentiate(int index, Cursor const& now) {
    if constexpr (T::kHasDs) {
      Factors factors(*this, index, now, first_row());
      // Where r has a gradient, through the signs of X.
      if (T::kTakesScores && arguments.common.params.r_grad) {
        differentiate_scores<T::kTakesScores, true>(factors, index);
      } else if (factors.crossed()) {
        differentiate_scores<false, true>(factors, index);
      } else {
        differentiate_scores<false, false>(factors, index);
      }
      factors.end(*this, index);
    }
  }

 private:
  // Of this warp, in the CTA's tile.
  __device__ __forceinline__ int first_row() const {
    return recompute_here(this->group * kWarpgroupRows + 16 * warp_in_warpgroup());
  }

  // Calls `visit` with each group of eight columns, in the order of factors.
  template <bool Crossed, typename Visit>
  __device__ __forceinline__ static void for_each_group(Factors& factors, Visit&& visit) {
    constexpr int kGroups = T::kBlockColumns / 8;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      int const g = T::kByQueries ? kGroups - 1 - i : i;
      if (i % 2 == 0) factors.template begin<Crossed>(g / 2);
      visit(g);
    }
  }
  template <bool Crossed>
  __device__ __forceinline__ void multiply(Factors& factors, int index) {
    uint32_t const values = Base::base_of(First::stage(index)) + 8 * (lane_index() & 3);
    float const c = arguments.common.c;
    for_each_group<Crossed>(factors, [&](int g) {
      float2 const base = load_shared_float2(values + 32 * g);
      float const low = base.x * c, high = base.y * c;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float2 const m = factors.template next<Crossed>(g, half);
        s[4 * g + 2 * half] *= m.x * low;
        s[4 * g + 2 * half + 1] *= m.y * high;
      }
    });
    fence_accumulators(s);  // or the compiler keeps all factors for a product behind the branches
  }
  template <bool Signs, bool Crossed>
  __device__ __forceinline__ void differentiate_scores(Factors& factors, int index) {
    uint32_t const lane = 8 * (lane_index() & 3);
    uint32_t const bases = Base::base_of(First::stage(index)) + lane;
    uint32_t const shifts = Base::shift_of(Second::stage(index)) + lane;
    float const c = arguments.common.c;
    for_each_group<Crossed>(factors, [&](int g) {
      float2 base{}, shift{};
      if constexpr (!T::kByQueries) base = load_shared_float2(bases + 32 * g);
      if constexpr (!T::kByQueries && Signs) shift = load_shared_float2(shifts + 32 * g);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if constexpr (T::kByQueries) {
          base = make_float2(Base::base[half], Base::base[half]);
          shift = make_float2(Base::shift[half], Base::shift[half]);
        }
        int const first = 4 * g + 2 * half;
        float2 const m = factors.template next<Crossed>(g, half);
        if constexpr (T::kScoresAtOnce) {
          s[first] *= m.x * (base.x * c);
          s[first + 1] *= m.y * (base.y * c);
        }
        dp[first] = gradient<Signs>(first, base.x, shift.x, m.x);
        dp[first + 1] = gradient<Signs>(first + 1, base.y, shift.y, m.y);
      }
    });
    if constexpr (T::kScoresAtOnce) fence_accumulators(s);
    fence_accumulators(dp);
  }
  template <bool Signs>
  __device__ __forceinline__ float gradient(int i, float base, float shift, float m) const {
    if constexpr (T::kScoresAtOnce && !Signs) return dp[i] * (m * base);  // of which P has m times what it takes
    float dx = dp[i] * base;
    if constexpr (Signs) dx += with_sign(T::kSignsAlone ? s[i] * m * arguments.common.c : s[i], shift);
    return dx * m;
  }
};

}  // namespace attention_autotuner::softmax_backward

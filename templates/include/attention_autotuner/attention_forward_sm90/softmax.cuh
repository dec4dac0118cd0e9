// The softmax of a consumer warpgroup of attention's forward: 64 rows, scores in the accumulators of WGMMA.
//
// O is rescaled only where a row's maximum has grown by more than kRescaleSlack. The optimistic form does not even look
// for the maximum first: it takes exponentials with that of the tile before, and again where their sums say that this
// was too low.
#pragma once

#include <cstdint>
#include <type_traits>

#include "attention_autotuner/attention_forward_sm90/modified.cuh"
#include "attention_autotuner/attention_forward_sm90/rows.cuh"
#include "attention_autotuner/common/convert.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/threads.cuh"

namespace attention_autotuner::softmax_forward {

inline constexpr float kRescaleSlack = 8.0f;       // powers of two that a row's maximum may grow before O is rescaled
inline constexpr float kLowestMaximum = -1.7e38f;  // of a row that has seen no key
inline constexpr float kSumLimit = 1024.0f;        // of a lane's sum in a tile taken with the maximum of the last one

template <typename T>
struct AttentionForwardSm90Softmax
    : std::conditional_t<T::kModified, AttentionForwardSm90Modified<T>, AttentionForwardSm90Rows<T>> {
  using Base = std::conditional_t<T::kModified, AttentionForwardSm90Modified<T>, AttentionForwardSm90Rows<T>>;
  using Element = typename T::Element;
  static constexpr bool kOffsets = T::kAlibi || T::kBias;  // tiles have some, beside scaled scores
  using Base::arguments;
  using Base::Base;
  using Base::factor;
  using Base::lane_row;
  using Base::level;  // the maximum of a row that its P is taken with, in powers of two
  using Base::p;
  using Base::query_of;
  using Base::range;
  using Base::s;
  using Base::sum;

  __device__ __forceinline__ void start_rows() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      level[half] = kLowestMaximum;
      sum[half] = 0.0f;
      if constexpr (T::kSinks) {
        level[half] = fmaxf(Base::sink[half], kLowestMaximum);
        sum[half] = (lane_index() & 3) == 0 ? exp2_approximate(Base::sink[half] - level[half]) : 0.0f;
      }
    }
  }
  // By which the maxima that row_maximum finds are in powers of two.
  __device__ __forceinline__ float maximum_scale() const { return kOffsets ? 1.0f : arguments.exponent_scale; }
  // What the exponents of a row's scaled scores subtract.
  __device__ __forceinline__ float exponent_base(int half) const {
    if constexpr (kOffsets) return level[half] - Base::offset[half];
    return level[half];
  }

  // Hides keys that rows do not see, and applies a scale that is not positive.
  __device__ __forceinline__ void mask(WorkTile const& tile, int key_tile) {
    if constexpr (T::kModified) {
      Base::mask_window(tile, key_tile);
      return;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int seen = range.length(arguments);
      if (arguments.causal) {
        seen = minimum(seen, query_of(tile, lane_row() + 8 * half) + 1 + range.causal_offset(arguments));
      }
      seen -= key_tile * T::kBlockN + 2 * (lane_index() & 3);
#pragma unroll
      for (int g = 0; g < T::kBlockN / 8; ++g) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = s[4 * g + 2 * half + e];
          score = 8 * g + e < seen ? score : minus_infinity();
        }
      }
    }
    if (arguments.sign != 1.0f) {
#pragma unroll
      for (int i = 0; i < T::kBlockN / 2; ++i) s[i] = s[i] == minus_infinity() ? s[i] : s[i] * arguments.sign;
    }
  }

  __device__ __forceinline__ void row_maximum(float (&most)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      constexpr int kChains = 2;
      float chain[kChains];
#pragma unroll
      for (int g = 0; g < T::kBlockN / 8; ++g) {
        float const pair = fmaxf(s[4 * g + 2 * half], s[4 * g + 2 * half + 1]);
        chain[g % kChains] = g < kChains ? pair : fmaxf(chain[g % kChains], pair);
      }
      most[half] = fmaxf(chain[0], chain[1]);
      if constexpr (kOffsets) most[half] = fmaf(most[half], arguments.exponent_scale, Base::offset[half]);
    }
#pragma unroll
    for (int lanes = 1; lanes <= 2; lanes *= 2) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        most[half] = fmaxf(most[half], __shfl_xor_sync(0xffffffffu, most[half], lanes));
      }
    }
  }
  __device__ __forceinline__ void raise_maximum(float const (&most)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float const next = fmaxf(level[half], most[half] * maximum_scale());
      factor[half] = exp2_approximate(level[half] - next);
      level[half] = next;
      sum[half] *= factor[half];
    }
  }
  // Brings the maxima up to date where that is due; returns whether O has to be multiplied with `factor`.
  __device__ __forceinline__ bool update_maximum() {
    float const c = maximum_scale();
    float most[2];
    row_maximum(most);
    bool const due = fmaxf(fmaf(most[0], c, -level[0]), fmaf(most[1], c, -level[1])) > kRescaleSlack;
    bool const any = __any_sync(0xffffffffu, due);
    if (any) raise_maximum(most);
    return any;
  }
  // Exponentials in the place of scores, with exact maxima.
  __device__ __forceinline__ bool exact_scores() {
    bool const due = update_maximum();
    exponentiate();
    return due;
  }
  // s <- exp2(s c - m), summed.
  __device__ __forceinline__ void exponentiate() {
    float const c = arguments.exponent_scale;
    float other[2] = {0.0f, 0.0f};
#pragma unroll
    for (int g = 0; g < T::kBlockN / 8; ++g) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[4 * g + e] = exp2_approximate(fmaf(s[4 * g + e], c, -exponent_base(e / 2)));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float const pair = s[4 * g + 2 * half] + s[4 * g + 2 * half + 1];
        if (g % 2 == 0) {
          sum[half] += pair;
        } else {
          other[half] += pair;
        }
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) sum[half] += other[half];
  }
  __device__ __forceinline__ void pack() {
#pragma unroll
    for (int i = 0; i < T::kBlockN / 4; ++i) p[i] = pack_pair<Element>(s[2 * i], s[2 * i + 1]);
  }

  // packed <- exp2(s c - m), summed in `part`.
  __device__ __forceinline__ void exponentiate_to(uint32_t (&packed)[T::kBlockN / 4], float (&part)[2]) const {
    float const c = arguments.exponent_scale;
    part[0] = part[1] = 0.0f;
#pragma unroll
    for (int g = 0; g < T::kBlockN / 8; ++g) {
      float x[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = exp2_approximate(fmaf(s[4 * g + e], c, -exponent_base(e / 2)));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        part[half] += x[2 * half] + x[2 * half + 1];
        packed[2 * g + half] = pack_pair<Element>(x[2 * half], x[2 * half + 1]);
      }
    }
  }
  // Exponentials straight to `packed`, with the maximum of the tile before unless that is not `known` or the sums say
  // that it was too low: the scores are still there then. Returns whether O has to be multiplied with `factor`. The
  // second attempt is code of its own: as a round of a loop it cost the first up to a tenth.
  __device__ __forceinline__ bool optimistic_softmax(uint32_t (&packed)[T::kBlockN / 4], bool known) {
    float part[2];
    if (known) exponentiate_to(packed, part);
    bool const exact = !known || !__all_sync(0xffffffffu, part[0] <= kSumLimit && part[1] <= kSumLimit);
    if (exact) {
      float most[2];
      row_maximum(most);
      raise_maximum(most);
      exponentiate_to(packed, part);
    }
    sum[0] += part[0];
    sum[1] += part[1];
    return exact;
  }
  // The softmax of a tile whose P takes the place of the last: `known` as above. No MMA may be in flight.
  __device__ __forceinline__ bool scores_to_p(bool known) {
    bool due;
    if constexpr (T::kOptimistic) {
      due = optimistic_softmax(p, known);
    } else {
      due = exact_scores();
      pack();
    }
    fence_operands(p);
    return due;
  }

  // A tile of an explicit mask that is skipped; there is none.
  __device__ __forceinline__ void wait_mask() const {}
  __device__ __forceinline__ void release_mask() const {}

  // What O is multiplied with at the end; `total` becomes the sums of whole rows.
  __device__ __forceinline__ void normalize(float const (&)[2], float (&total)[2], float (&inverse)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      total[half] = quad_sum(total[half]);
      inverse[half] = total[half] == 0.0f ? 0.0f : reciprocal_approximate(total[half]);
    }
  }
};

}  // namespace attention_autotuner::softmax_forward

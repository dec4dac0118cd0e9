// Scores of retnet's forward on the loop of attention's: Y = S M with the tile of an explicit mask, and sums of |Y|.
//
// P grows unnormalised; r meets O once, at the end, and so does a scale of at most 1. In fp16, P may leave the range of
// its type. A row's level, 1 or a greater scale at first, then goes down by a power of two, and its O with it: rare,
// decided by each lane's sum of |P| in a tile. bf16 has the range of fp32, and its level is 1.
#pragma once

#include <cstdint>
#include <type_traits>

#include "attention_autotuner/attention_forward_sm90/rows.cuh"
#include "attention_autotuner/common/convert.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/sm90/mask_tile.cuh"

namespace attention_autotuner::softmax_forward {

template <typename T>
struct AttentionForwardSm90Masked : AttentionForwardSm90Rows<T> {
  using Base = AttentionForwardSm90Rows<T>;
  using Element = typename T::Element;
  using Base::arguments;
  using Base::Base;
  using Base::empty;
  using Base::factor;
  using Base::full;
  using Base::group;
  using Base::level;  // P over Y
  using Base::p;
  using Base::s;
  using Base::sum;                                                   // of |Y|
  static constexpr bool kGuarded = std::is_same_v<Element, __half>;  // P could overflow
  static constexpr float kLimit = 16384.0f;                          // of a lane's sum of |P| in a tile
  static constexpr int kExponent = 9;  // a lowered row's largest such sum is within 2^9 and 2^10

  float tile_sum[2];  // of |Y| of one tile, over this lane's columns
  bool leveled;       // whether a level of the warp's rows is not 1
  RingCursor<T::kMaskStages> masks;

  __device__ __forceinline__ void start_rows() {
    leveled = kGuarded && fabsf(arguments.scale) > 1.0f;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      level[half] = leveled ? arguments.scale : 1.0f;
      sum[half] = 0.0f;
    }
  }

  // --- the mask ------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void wait_mask() const { wait(full(T::kMaskBarrier, masks.stage), masks.phase); }
  // Lets go of a tile of the mask that was not read.
  __device__ __forceinline__ void release_mask() {
    if (warp_arrives()) arrive(empty(T::kMaskBarrier, masks.stage));
    masks.advance();
  }
  // Y of a tile of keys in the place of its scores.
  __device__ __forceinline__ void mask(WorkTile const& tile, int key_tile) {
    int const row = group * kWarpgroupRows + 16 * warp_in_warpgroup();
    MaskRows<T> rows(arguments, this->mask_tile(masks.stage), row, tile.row_block * T::kBlockM + row,
                     key_tile * T::kBlockN + (T::kSharesScores ? tile.slice * T::kScoreKeys : 0));
    wait_mask();
    if (rows.causal) {
      multiply<true>(rows);
    } else {
      multiply<false>(rows);
    }
    rows.release(empty(T::kMaskBarrier, masks.stage));
    masks.advance();
  }

  // --- P -------------------------------------------------------------------------------------------------------------

  // Lowers the levels of rows whose P might leave the range of fp16; returns whether O has to be multiplied with
  // `factor`.
  __device__ __forceinline__ bool exact_scores() {
    if constexpr (!kGuarded) return false;
    bool due = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      tile_sum[half] *= fabsf(level[half]);
      due = due || tile_sum[half] > kLimit;
    }
    if (!__any_sync(0xffffffffu, due)) return false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float most = fmaxf(tile_sum[half], __shfl_xor_sync(0xffffffffu, tile_sum[half], 1));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
      int const bits = ((254 + kExponent) << 23) - (__float_as_int(most) & 0x7f800000);
      factor[half] = most > kLimit ? __int_as_float(bits) : 1.0f;
      level[half] *= factor[half];
    }
    leveled = true;
    return true;
  }
  // A word of P.
  template <bool Leveled>
  __device__ __forceinline__ uint32_t packed(int i) const {
    float const f = Leveled ? level[i % 2] : 1.0f;
    return pack_pair<Element>(s[2 * i] * f, s[2 * i + 1] * f);
  }
  __device__ __forceinline__ void pack() {
    if (kGuarded && leveled) {
      pack_words<true>();
    } else {
      pack_words<false>();
    }
  }
  // P of a tile in the place of the last. No MMA may be in flight.
  __device__ __forceinline__ bool scores_to_p(bool) {
    bool const due = exact_scores();
    pack();
    fence_operands(p);
    return due;
  }

  // What O is multiplied with at the end; `total` becomes r.
  __device__ __forceinline__ void normalize(float const (&levels)[2], float (&total)[2], float (&inverse)[2]) const {
    float const scale = arguments.scale;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float const magnitude = quad_sum(total[half]) * fabsf(scale);
      bool const divides = arguments.normalize && scale != 0.0f;
      float const r = divides ? fminf(fmaxf(magnitude, 1.0f), arguments.r_clamp_max) : 1.0f;
      inverse[half] = scale == 0.0f ? 0.0f : scale / (levels[half] * r);
      total[half] = r;
    }
  }

 private:
  template <bool Leveled>
  __device__ __forceinline__ void pack_words() {
#pragma unroll
    for (int i = 0; i < T::kScoreKeys / 4; ++i) p[i] = packed<Leveled>(i);
  }
  template <bool Causal>
  __device__ __forceinline__ void multiply(MaskRows<T>& rows) {
    tile_sum[0] = tile_sum[1] = 0.0f;
#pragma unroll
    for (int sixteen = 0; sixteen < T::kScoreKeys / 16; ++sixteen) {
      uint32_t words[4];
      rows.template load<Causal, T::kDerivesAddresses>(words, sixteen);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int const g = 2 * sixteen + i / 2, half = i % 2;
        float2 const m = unpack_pair<Element>(words[i]);
        float& low = s[4 * g + 2 * half];
        float& high = s[4 * g + 2 * half + 1];
        low *= m.x;
        high *= m.y;
        tile_sum[half] += fabsf(low) + fabsf(high);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) sum[half] += tile_sum[half];
  }
};

}  // namespace attention_autotuner::softmax_forward

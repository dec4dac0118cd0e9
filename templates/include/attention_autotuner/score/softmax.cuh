// Online softmax over accumulator fragments: running row maximum and sum, with a rescale of O only when it is due.
//
// Exponentials are taken in base 2 of s c - m with c = |scale| log2(e); m, the running maximum, is in these units too.
// It is kept stale while the true one exceeds it by less than kSlack: the probabilities then grow to at most 2^kSlack,
// which 16-bit floats and fp32 sums hold without loss, and the rescale of O, which is a pass over all its registers, is
// rarely needed. The final division by the row sum cancels the choice of m exactly. A row that has seen no key holds
// kLowest, which is finite, so that its masked scores (-inf) give exp2(-inf) = 0 and never NaN.
//
// Layout: fragments of common/warp_mma.cuh; entry [tile][half] is row 16 tile + 8 half + lane / 4 of the warp's rows.
#pragma once

#include <cstdint>

#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/scheduler.cuh"
#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/score/mask_patch.cuh"
#include "attention_autotuner/score/score_mod.cuh"

namespace attention_autotuner {

inline constexpr float kSlack = 8.0f;       // powers of two
inline constexpr float kLowest = -1.7e38f;  // half the range: its difference from any maximum is finite

// The largest entry of each row, over this warp's columns.
template <int Tiles, int Columns>
__device__ __forceinline__ void row_maximum(float (&largest)[Tiles][2], float const (&s)[Tiles][Columns][4]) {
#pragma unroll
  for (int i = 0; i < Tiles; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float value = fmaxf(s[i][0][2 * h], s[i][0][2 * h + 1]);
#pragma unroll
      for (int j = 1; j < Columns; ++j) value = fmaxf(value, fmaxf(s[i][j][2 * h], s[i][j][2 * h + 1]));
      largest[i][h] = quad_max(value);
    }
  }
}

// Moves the running maximum where it is due and rescales sum and O with it. Warps that share rows hold equal `largest`
// and equal maxima, so they all decide alike.
template <int Tiles, int OutputColumns>
__device__ __forceinline__ void update_maximum(float (&maximum)[Tiles][2], float (&sum)[Tiles][2],
                                               float const (&largest)[Tiles][2], float (&o)[Tiles][OutputColumns][4],
                                               float c) {
  bool due = false;
#pragma unroll
  for (int i = 0; i < Tiles; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) due = due || fmaf(largest[i][h], c, -maximum[i][h]) > kSlack;
  }
  if (__any_sync(0xffffffffu, due)) {
#pragma unroll
    for (int i = 0; i < Tiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float const next = fmaxf(maximum[i][h], largest[i][h] * c);
        float const factor = exp2_approximate(maximum[i][h] - next);
        maximum[i][h] = next;
        sum[i][h] *= factor;
#pragma unroll
        for (int j = 0; j < OutputColumns; ++j) {
          o[i][j][2 * h] *= factor;
          o[i][j][2 * h + 1] *= factor;
        }
      }
    }
  }
}

// s <- exp2(s c - m) for one 16x8 tile, summed into the state.
__device__ __forceinline__ void exponentiate(float (&s)[4], float (&sum)[2], float const (&maximum)[2], float c) {
#pragma unroll
  for (int e = 0; e < 4; ++e) s[e] = exp2_approximate(fmaf(s[e], c, -maximum[e / 2]));
  sum[0] += s[0] + s[1];
  sum[1] += s[2] + s[3];
}

// The score modification of a forward kernel with traits T: see scores_forward_sm80/warp.cuh.
template <typename T>
struct ForwardScoreMod<ScoreMod::kSoftmax, T> {
  static constexpr bool kHasSinks = T::Modifications::template kHas<Sinks>;
  float maximum[T::kRowTiles][2];  // times c
  float sum[T::kRowTiles][2];      // of this lane's columns only, until the end

  // What scores are multiplied by: modified ones are in powers of two.
  template <typename Warp>
  __device__ __forceinline__ static float factor(Warp const& w) {
    if constexpr (T::kModified) return 1.0f;
    return w.c;
  }

  template <typename Warp>
  __device__ __forceinline__ void begin(Warp&, TileCoordinates const&) {
#pragma unroll
    for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        maximum[i][h] = kLowest;
        sum[i][h] = 0.0f;
      }
    }
  }
  __device__ __forceinline__ static constexpr int far_keys() { return 0; }

  // There is no mask to copy.
  template <typename Warp>
  __device__ __forceinline__ void start_mask(Warp const&, int, int) const {}
  template <typename Warp>
  __device__ __forceinline__ void copy_mask_part(Warp const&, bool, int, int, int) const {}
  __device__ __forceinline__ void next_mask() {}

  // Masks the scores of a tile and brings the running maximum up to date.
  template <typename Warp>
  __device__ __forceinline__ void prepare(Warp& w, typename Warp::Scores& s, int key_tile, int) {
    if constexpr (T::kModified) modify(w, s, key_tile);
    w.apply_causal_mask(s, key_tile, minus_infinity());
    float largest[T::kRowTiles][2];
    row_maximum(largest, s);
    if constexpr (!T::kPInRegisters) w.combine_rows(largest, [](float a, float b) { return fmaxf(a, b); });
    update_maximum(maximum, sum, largest, w.o, factor(w));
  }
  template <typename Warp>
  __device__ __forceinline__ void modify(Warp const& w, typename Warp::Scores& s, int key_tile) const {
    auto const tile = w.tile();
    typename T::Modifications modifications(w.params, tile.batch, tile.head);
    int const column0 = w.range.begin() + w.first_key(key_tile) + w.warp_n() * 8 * T::kKeyTiles + 2 * (lane_here() & 3);
#pragma unroll
    for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int const row_in_block = w.row_in_block(i, half), row = w.query_of(tile, row_in_block);
        if constexpr (T::kPackGqa) {
          modifications = typename T::Modifications(w.params, tile.batch, w.head_of(tile, row_in_block));
        }
        MaskPatch<typename T::Modifications, 1, T::kKeyTiles> mask;
        mask.read(modifications, row, column0);
        int const before = row + w.range.diagonal - column0;
        float const distance = float(before);
#pragma unroll
        for (int j = 0; j < T::kKeyTiles; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            int const column = 8 * j + e;
            float& score = s[i][j][2 * half + e];
            ScorePlace const place{row, column0 + column, distance - float(column), column - before};
            score = mask.apply(modifications.apply(score * w.c, place), 0, j, e);
          }
        }
      }
    }
  }
  template <typename Warp>
  __device__ __forceinline__ void numerators(Warp const& w, float (&s)[4], int i) {
    exponentiate(s, sum[i], maximum[i], factor(w));
  }

  // The maximum of a row and its sink, which is of the first split, and the sum of the row's powers of two over that.
  struct RowTotal {
    float largest, total;
  };
  template <typename Warp>
  __device__ __forceinline__ RowTotal with_sink(Warp const& w, int i, int half) const {
    auto const tile = w.tile();
    int head = tile.head;
    if constexpr (T::kPackGqa) head = w.head_of(tile, w.row_in_block(i, half));
    float sink = Sinks::of(w.params, head);
    if constexpr (T::kSplitKv) sink = tile.split == 0 ? sink : minus_infinity();
    float const largest = fmaxf(maximum[i][half], sink);
    return {largest, sum[i][half] * exp2_approximate(maximum[i][half] - largest) + exp2_approximate(sink - largest)};
  }

  // With the sums complete: what O is multiplied with (a row that sees no key gives 0), and the LSE.
  template <typename Warp>
  __device__ __forceinline__ float output_factor(Warp const& w, int i, int half) const {
    if constexpr (kHasSinks) {
      auto const [largest, total] = with_sink(w, i, half);
      return total == 0.0f ? 0.0f : exp2_approximate(maximum[i][half] - largest) / total;
    }
    return sum[i][half] == 0.0f ? 0.0f : 1.0f / sum[i][half];
  }
  template <typename Warp>
  __device__ __forceinline__ float row_value(Warp const& w, int i, int half) const {
    if constexpr (kHasSinks) {
      auto const [largest, total] = with_sink(w, i, half);
      return total == 0.0f ? minus_infinity() : largest * kLn2 + logf(total);
    }
    return sum[i][half] == 0.0f ? minus_infinity() : maximum[i][half] * kLn2 + logf(sum[i][half]);
  }
  // The LSE in powers of two, as splits are combined.
  template <typename Warp>
  __device__ __forceinline__ float row_log2(Warp const& w, int i, int half) const {
    RowTotal row{maximum[i][half], sum[i][half]};
    if constexpr (kHasSinks) row = with_sink(w, i, half);
    return row.total == 0.0f ? minus_infinity() : row.largest + log2f(row.total);
  }
  template <typename Params>
  __device__ __forceinline__ static float* lse_or_r(Params const& params) {
    return params.lse;
  }
};

}  // namespace attention_autotuner

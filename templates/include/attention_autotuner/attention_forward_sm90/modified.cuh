// Score modifications of a consumer warpgroup of attention's forward: windows, softcap, ALiBi, bias tables, tensors of
// masks and sinks.
//
// A softcap leaves tangents in the place of scores; the cap is then part of the exponent's scale. ALiBi's
// -slope |distance| is linear in the columns of a tile on either side of the diagonal: what a column adds to a score is
// one FMA by a constant, and what the row and the tile add goes into what the exponent subtracts. Only tiles that the
// diagonal crosses take it score by score. So it is with a table: where all of a tile is so far from the diagonal that
// one entry serves, that is part of what the exponent subtracts. A sink is what the row's maximum and sum begin with.
#pragma once

#include <cstdint>

#include "attention_autotuner/attention_forward_sm90/mask_tensor.cuh"
#include "attention_autotuner/attention_forward_sm90/rows.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/threads.cuh"

namespace attention_autotuner::softmax_forward {

template <typename T>
struct AttentionForwardSm90Modified : AttentionForwardSm90Rows<T> {
  using Base = AttentionForwardSm90Rows<T>;
  using Base::arguments;
  using Base::Base;
  using Base::first;
  using Base::group;
  using Base::head_of;
  using Base::lane_row;
  using Base::query_of;
  using Base::range;
  using Base::s;
  using Base::steps;
  using Base::unmasked;
  using Base::visible_end;
  using Base::visible_first;

  int whole_from;                    // tiles of keys from here on lie within the windows' lower ends
  int rest;                          // of the CTA's tiles of keys, those below this warpgroup's
  int seen_begin[2], seen_end[2];    // of spans: the keys that this lane's two rows see
  float slope[2], sink[2];           // of this lane's two rows: over the exponent's scale; in powers of two
  float far_before[2], far_past[2];  // of tables: the entries of distant pairs, in powers of two
  float offset[2];                   // that exponents of the present tile have beside scaled scores, in powers of two
  MaskOfTile<T> mask_of_tile;

  __device__ __forceinline__ void begin_tile(WorkTile const& tile) {
    Base::begin_tile(tile);
    int const row = first_query(tile);
    unmasked = maximum(visible_end(range, row), 0) / T::kBlockN;
    whole_from = divide_up(visible_first(range, last_query(tile)), T::kBlockN);
    rest = 0;
    if constexpr (!T::kFlat) {
      rest = maximum(0, minimum(visible_first(range, row) / T::kBlockN - first, steps - 1));
      first += rest;
      steps -= rest;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int const head = head_of(tile, lane_row() + 8 * half);
      if constexpr (T::kSpanned) {
        // Read here, so that masks wait for no load.
        int const query = query_of(tile, lane_row() + 8 * half);
        seen_begin[half] = visible_first(range, query);
        seen_end[half] = visible_end(range, query);
      }
      if constexpr (T::kAlibi) {
        float const* const slopes = arguments.alibi_slopes + int64_t(slopes_of(tile)) * arguments.slopes_per_batch;
        slope[half] = slopes[head] * arguments.slope_scale;
      }
      if constexpr (T::kBias) {
        // Read here, so that tiles far from the diagonal wait for no load.
        BiasOfTile const bias(arguments, head, 0, 0);
        far_before[half] = bias.middle[-bias.distance] * kLog2E;
        far_past[half] = bias.middle[bias.distance] * kLog2E;
      }
      if constexpr (T::kAttnMask) {
        int const query = query_of(tile, lane_row() + 8 * half);
        mask_of_tile.begin_row(arguments, half, tile.batch, head, query, first_key_of_range());
      }
      if constexpr (T::kSinks) sink[half] = tile.split == 0 ? arguments.sinks[head] * kLog2E : minus_infinity();
    }
  }
  __device__ __forceinline__ bool needs_mask(int key_tile) const {
    return key_tile >= unmasked || key_tile < whole_from;
  }

  // Hides keys outside of the windows.
  __device__ __forceinline__ void mask_window(WorkTile const& tile, int key_tile) {
    int const column = key_tile * T::kBlockN + 2 * (lane_index() & 3);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int const query = query_of(tile, lane_row() + 8 * half);
      int const begin = (T::kSpanned ? seen_begin[half] : visible_first(range, query)) - column;
      int const end = (T::kSpanned ? seen_end[half] : visible_end(range, query)) - column;
#pragma unroll
      for (int g = 0; g < T::kBlockN / 8; ++g) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = s[4 * g + 2 * half + e];
          score = 8 * g + e >= begin && 8 * g + e < end ? score : minus_infinity();
        }
      }
    }
  }

  // Begins to read what a tensor of masks has for a tile, while its scores are on their way.
  __device__ __forceinline__ void fetch_mask(int key_tile) {
    if constexpr (T::kAttnMask) mask_of_tile.fetch(arguments, key_tile * T::kBlockN, range.length(arguments));
  }
  // What comes between scores and mask.
  __device__ __forceinline__ void modify(WorkTile const& tile, int key_tile) {
    if constexpr (T::kSoftcap) {
#pragma unroll
      for (int i = 0; i < T::kBlockN / 2; ++i) s[i] = tanh_approximate(s[i] * arguments.tanh_scale);
    } else if (arguments.sign != 1.0f) {
#pragma unroll
      for (int i = 0; i < T::kBlockN / 2; ++i) s[i] *= arguments.sign;
    }
    if constexpr (T::kAlibi) add_distances(tile, key_tile);
    if constexpr (T::kBias) add_biases(tile, key_tile);
    if constexpr (T::kAttnMask) {
      mask_of_tile.apply(arguments, s, key_tile * T::kBlockN, range.length(arguments), arguments.slope_scale);
    }
  }

 private:
  __device__ __forceinline__ int slopes_of(WorkTile const& tile) const {
    if constexpr (T::kPacked) return range.slopes;
    return tile.batch;
  }
  __device__ __forceinline__ int first_query(WorkTile const& tile) const {
    return query_of(tile, group * kWarpgroupRows);
  }
  __device__ __forceinline__ int last_query(WorkTile const& tile) const {
    return query_of(tile, group * kWarpgroupRows + kWarpgroupRows - 1);
  }

  __device__ __forceinline__ int first_key_of_range() const {
    if constexpr (T::kKeyBounds) return range.begin();
    return 0;
  }
  // Row i's bottom-right diagonal is the range's key i + this.
  __device__ __forceinline__ int diagonal_of_range() const {
    if constexpr (T::kKeyBounds) return range.diagonal - range.begin();
    return range.length(arguments) - range.queries(arguments);
  }

  __device__ __forceinline__ void add_biases(WorkTile const& tile, int key_tile) {
    int const diagonal = diagonal_of_range(), column = key_tile * T::kBlockN;
    int const least = column - last_query(tile) - diagonal;
    int const most = column + T::kBlockN - 1 - first_query(tile) - diagonal;
    constexpr int kHeads = T::kPackGqa ? 2 : 1;  // of this lane's rows
#pragma unroll
    for (int half = 0; half < kHeads; ++half) {
      int const row = lane_row() + 8 * half;
      BiasOfTile const bias(arguments, head_of(tile, row), least, most);
      float const far = bias.varies ? 0.0f : least >= bias.distance ? far_past[half] : far_before[half];
      offset[half] = T::kAlibi ? offset[half] + far : far;
      if constexpr (kHeads == 1) offset[1] = T::kAlibi ? offset[1] + far : far;
      if (!bias.varies) continue;
      int const past = column + 2 * (lane_index() & 3) - query_of(tile, row) - diagonal;
      if (bias.within) {
        float const* const entries = bias.middle + past;
        add_entries<kHeads>(half, [entries](int distance) { return entries[distance]; });
      } else {
        add_entries<kHeads>(half, [bias, past](int distance) { return bias[past + distance]; });
      }
    }
  }
  // `entry` of how far a key is past the first of this lane.
  template <int kHeads, typename Entry>
  __device__ __forceinline__ void add_entries(int half, Entry&& entry) {
    auto add = [&](int index, float value) { s[index] = fmaf(value, arguments.slope_scale, s[index]); };
    // Eight rows further down scores take what those of eight columns before take here.
    float before[2] = {entry(-8), entry(-7)};
#pragma unroll
    for (int g = 0; g < T::kBlockN / 8; ++g) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float const value = entry(8 * g + e);
        add(4 * g + 2 * half + e, value);
        if constexpr (kHeads == 1) add(4 * g + 2 + e, before[e]);
        before[e] = value;
      }
    }
  }

  __device__ __forceinline__ void add_distances(WorkTile const& tile, int key_tile) {
    int diagonal = range.length(arguments) - range.queries(arguments);
    if constexpr (T::kKeyBounds) diagonal = range.diagonal - range.begin();
    int const column = key_tile * T::kBlockN;
    // Where no row sees what is beyond its diagonal, the sign of distances there does not matter.
    bool const before = (!T::kSpanned && range.causal_offset(arguments) + arguments.window_right <= diagonal) ||
                        column + T::kBlockN - 1 <= first_query(tile) + diagonal;
    bool const behind = column >= last_query(tile) + diagonal;
    float distance[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      distance[half] = float(query_of(tile, lane_row() + 8 * half) + diagonal - column - 2 * (lane_index() & 3));
    }
    if (before || behind) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float const step = before ? slope[half] : -slope[half];
        offset[half] = -step * arguments.exponent_scale * distance[half];
#pragma unroll
        for (int g = 0; g < T::kBlockN / 8; ++g) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& score = s[4 * g + 2 * half + e];
            score = fmaf(step, float(8 * g + e), score);
          }
        }
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        offset[half] = 0.0f;
#pragma unroll
        for (int g = 0; g < T::kBlockN / 8; ++g) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& score = s[4 * g + 2 * half + e];
            score = fmaf(-slope[half], fabsf(distance[half] - float(8 * g + e)), score);
          }
        }
      }
    }
  }
};

}  // namespace attention_autotuner::softmax_forward

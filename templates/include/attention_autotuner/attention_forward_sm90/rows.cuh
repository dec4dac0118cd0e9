// The rows of a consumer warpgroup: 64 of a CTA's tile, with O, scores and P in the registers of WGMMA, and which tiles
// of keys they see.
#pragma once

#include <cstdint>

#include "attention_autotuner/attention_forward_sm90/producer.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/threads.cuh"

namespace attention_autotuner::softmax_forward {

template <typename T>
struct AttentionForwardSm90Rows : AttentionForwardSm90Stages<T> {
  using Base = AttentionForwardSm90Stages<T>;
  using Base::arguments;
  using Base::key_range;
  using Base::key_tiles;
  using Base::query_of;
  using Base::visible_first;

  int const group;  // of this warpgroup, the same in all lanes
  float o[T::kColumns / 2], s[T::kScoreKeys / 2];
  uint32_t p[T::kBlockN / 4], next_p[T::kBlockN / 4];
  float level[2], sum[2];        // of this lane's two rows: what P is taken with, and the sum over this lane's columns
  float factor[2];               // that O is due to be multiplied with
  typename Base::Range range;    // of the batch entry
  int steps, skipped, unmasked;  // tiles of keys: of this warpgroup, of the CTA beyond them, that need no mask
  int first;                     // of its tiles of keys, counted from the first key
  int turns_from, turns_end;     // of spans: tiles of keys that warpgroups issue by turns

  __device__ __forceinline__ AttentionForwardSm90Rows(ArgumentsOf<T> const& arguments, uint32_t smem, int group)
      : Base{arguments, smem}, group(group) {}

  // The first of this lane's two rows of a CTA's tile; the other is eight further on.
  __device__ __forceinline__ int lane_row() const {
    return group * kWarpgroupRows + 16 * warp_in_warpgroup() + lane_index() / 4;
  }
  __device__ __forceinline__ int first_key_tile() const {
    if constexpr (T::kSplitKv || T::kModified) return first;
    return 0;
  }
  __device__ __forceinline__ int last_key_tile() const { return first_key_tile() + steps - 1; }

  __device__ __forceinline__ void begin_tile(WorkTile const& tile) {
    range = key_range(tile);
    KeyTiles const tiles = key_tiles(range, tile);
    int const of_cta = tiles.end - tiles.first, row = query_of(tile, group * kWarpgroupRows);
    int const last_row = query_of(tile, group * kWarpgroupRows + kWarpgroupRows - 1);
    first = tiles.first;
    steps = 1;
    if (row < range.queries(arguments))
      steps = maximum(1, minimum(tiles.end, key_tiles(range, last_row + 1)) - tiles.first);
    // This warpgroup still holds a stage of V of the tile before while it skips stages of K.
    if constexpr (T::kFlat) steps = maximum(steps, of_cta - (T::kVStages - 1));
    if constexpr (T::kSharesScores) steps = of_cta;  // the others send and receive as many
    skipped = of_cta - steps;
    if constexpr (T::kSpanned) {
      turns_from = maximum(tiles.first, visible_first(range, query_of(tile, T::kBlockM - kWarpgroupRows)) / T::kBlockN);
      turns_end = minimum(tiles.end, key_tiles(range, query_of(tile, kWarpgroupRows - 1) + 1)) - 1;
    }
    int seen = range.length(arguments);
    if (arguments.causal) seen = minimum(seen, row + 1 + range.causal_offset(arguments));
    unmasked = !T::kMasked && arguments.sign == 1.0f ? maximum(seen, 0) / T::kBlockN : 0;
  }
  // In spans' few tiles the warpgroups that see a tile do not wait for those that skip it: turns begin when the first
  // warpgroup, whose rows' spans end first, has keys, and end when the last one has no more.
  __device__ __forceinline__ bool by_turns(int key_tile) const {
    return T::kPingPong && (!T::kSpanned || (key_tile >= turns_from && key_tile < turns_end));
  }
  // The last rows of causal documents see the most keys. Their warpgroup is the first of a round, so that it begins the
  // next tile while the others still have MMAs to issue.
  __device__ __forceinline__ int turn() const { return T::kSpanned ? T::kWarpgroups - 1 - group : group; }
  __device__ __forceinline__ void wait_turn(int key_tile) const {
    if (by_turns(key_tile)) ping_pong_wait(turn());
  }
  __device__ __forceinline__ void pass_turn(int key_tile) const {
    if (by_turns(key_tile)) ping_pong_pass<T::kWarpgroups>(turn());
  }
  __device__ __forceinline__ bool needs_mask(int key_tile) const { return key_tile >= unmasked; }
  __device__ __forceinline__ void fetch_mask(int) const {}  // there is no tensor of masks
  __device__ __forceinline__ void rescale_output() {
#pragma unroll
    for (int i = 0; i < T::kColumns / 2; ++i) o[i] *= factor[i / 2 % 2];
  }
};

}  // namespace attention_autotuner::softmax_forward

// The order in which a block of keys visits tiles of queries, and that in which its shares of dQ are added.
#pragma once

#include "attention_autotuner/common/backward_arguments.cuh"
#include "attention_autotuner/common/scalars.cuh"

namespace attention_autotuner::softmax_backward {

// Every block from its first tile on.
template <typename T, bool kApart = T::kApart>
struct QueryOrder {
  template <typename Stages>
  __device__ __forceinline__ explicit QueryOrder(Stages const&) {}
  __device__ __forceinline__ Cursor at(Cursor const& now) const { return now; }
  // How many shares of a tile come before this block's: first that of the last block that sees it, whose CTA started
  // first and comes first to it.
  template <typename Stages>
  __device__ __forceinline__ int shares_before(Stages const& stages, int tile) const {
    auto const& common = stages.common();
    int const last_row = minimum((tile + 1) * T::kBlockColumns, common.params.seqlen_q) - 1;
    return (common.visible_keys(last_row) - 1) / T::kBlockRows - stages.row_block;
  }
};

// Where `arguments.apart`, a head's blocks begin at tiles of their own and go around, so that each comes to a tile some
// steps after the block behind it, and not as soon as that has added its share. Their CTAs wait in a ring.
template <typename T>
struct QueryOrder<T, true> : QueryOrder<T, false> {
  int tiles, blocks, first;

  template <typename Stages>
  __device__ __forceinline__ explicit QueryOrder(Stages const& stages)
      : QueryOrder<T, false>(stages),
        tiles(stages.range.end),
        blocks(divide_up(stages.arguments.common.params.seqlen_k, T::kBlockRows)),
        first(stages.arguments.apart ? stages.row_block * tiles / blocks : 0) {}
  __device__ __forceinline__ Cursor at(Cursor const& now) const {
    int const turned = now.tile + first;
    return {now.head, turned < tiles ? turned : turned - tiles};
  }
  // First that of the block that begins there, or is the last to begin before.
  template <typename Stages>
  __device__ __forceinline__ int shares_before(Stages const& stages, int tile) const {
    if (!stages.arguments.apart) return QueryOrder<T, false>::shares_before(stages, tile);
    int const before = ((tile + 1) * blocks - 1) / tiles - stages.row_block;
    return before < 0 ? before + blocks : before;
  }
};

}  // namespace attention_autotuner::softmax_backward

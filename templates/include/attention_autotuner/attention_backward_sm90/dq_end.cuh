// dQ from its sums within the pass over keys: the CTA whose share of a tile of queries is the last turns the tile's
// sums into dQ, by a warp that has nothing else to do, so that no kernel reads them from memory again.
//
// Where sums are recycled, the warp clears those it has read, for a head that comes so many heads later: the sums of
// the heads in flight stay in L2, and no more than those are cleared ahead. A CTA waits for CTAs before it in the list,
// and so takes for granted that these start no later.
#pragma once

#include <cstdint>

#include "attention_autotuner/attention_backward_sm90/dq_share.cuh"
#include "attention_autotuner/attention_backward_sm90/memory.cuh"
#include "attention_autotuner/attention_backward_sm90/producer.cuh"
#include "attention_autotuner/common/shared_memory.cuh"
#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/sm90/pipeline.cuh"
#include "attention_autotuner/sm90/roles.cuh"

namespace attention_autotuner::softmax_backward {

template <typename T>
struct BackwardPassSm90DqEnd : BackwardPassSm90Stages<T> {
  using Base = BackwardPassSm90Stages<T>;
  using Element = typename T::Element;
  using Base::arguments;
  using Base::Base;
  using Base::batch;
  using Base::empty;
  using Base::full;
  using Base::range;
  using Added = BarrierRing<T::kAddedStages>;
  using Chunks = BarrierRing<T::kEndStages>;
  static constexpr int kChunkFloats = T::kEndBytes / 4;  // of sums, on their way through shared memory
  static constexpr int kTileChunks = T::kBlockColumns * T::kDepth / kChunkFloats;
  static constexpr int kColumnTiles = T::kDepth / 8;
  static_assert(kTileChunks * kChunkFloats == T::kBlockColumns * T::kDepth);

  // A warp calls. `chunks` counts those of all tiles.
  __device__ __forceinline__ void run(int& chunks) const {
    if (Base::row_block == 0) fill_unseen();
    Cursor now = range.begin();
#pragma unroll 1
    for (int index = Base::begin; index < Base::end; ++index, range.next(now)) {
      int const stage = Added::stage(index);
      wait(full(T::kAddedBarrier, stage), Added::phase(index));
      int is_last = 0;
      if (warp_arrives()) arrive(empty(T::kAddedBarrier, stage));
      if (lane_index() == 0) is_last = add_and_fetch(counter(now)) == visitors(now.tile);
      if (__shfl_sync(0xffffffffu, is_last, 0)) end_tile(now, chunks);
    }
  }

 private:
  __device__ __forceinline__ int* counter(Cursor const& now) const {
    return arguments.semaphores + dq_head_index(*this, now) * arguments.common.dq_tiles + now.tile;
  }
  // Blocks of keys with a step for a tile of queries: twin of TileRange::over_queries.
  __device__ __forceinline__ int visitors(int tile) const {
    auto const& all = arguments.common;
    auto const& p = all.params;
    int const after = (tile + 1) * T::kBlockColumns + p.causal_offset;  // one beyond the last row's diagonal
    int first = 0, keys = p.seqlen_k;
    if constexpr (kHasWindow<typename T::Params>) {
      int const key = all.first_key(tile * T::kBlockColumns);
      if (key >= keys) return 0;
      first = key / T::kBlockRows;
      keys = minimum(keys, after + p.window_right);
    } else if (p.causal) {
      keys = minimum(keys, after);
    }
    return maximum(divide_up(maximum(keys, 0), T::kBlockRows) - first, 0);
  }

  // Zeros for the queries that see no key, of which no CTA has a step; by those of the first block of keys.
  __device__ __forceinline__ void fill_unseen() const {
    auto const& all = arguments.common;
    if (visitors(0) > 0 && visitors(all.dq_tiles - 1) > 0) return;  // the tiles that are seen follow each other
#pragma unroll 1
    for (Cursor now{range.head, 0}; now.head < range.head + range.heads; ++now.head) {
      int unseen = 0;
#pragma unroll 1
      for (now.tile = 0; now.tile < all.dq_tiles; ++now.tile) {
        if (visitors(now.tile) > 0) continue;
        ++unseen;
#pragma unroll 1
        for (int unit = lane_index(); unit < T::kBlockColumns * kColumnTiles; unit += 32) {
          store(now, unit / kColumnTiles, unit % kColumnTiles * 8, make_uint4(0, 0, 0, 0));
        }
      }
      if constexpr (T::kRecyclesDq) {
        if (lane_index() == 0 && unseen > 0) add_released(dq_heads_ended(*this, now), unseen);
      }
    }
  }

  __device__ __forceinline__ void request(float const* sums, int chunk) const {
    int const stage = Chunks::stage(chunk);
    uint32_t const filled = full(T::kEndBarrier, stage);
    arrive_and_expect_tx(filled, T::kEndBytes);
    bulk_load(Base::end_stage(stage), sums, T::kEndBytes, filled);
  }
  __device__ __forceinline__ void end_tile(Cursor const& now, int& chunks) const {
    float* const sums = dq_tile<T>(arguments, dq_tile_index<T>(*this, now));
    if (lane_index() == 0) {
      fence_proxy_async_global();
#pragma unroll 1
      for (int i = 0; i < minimum(T::kEndStages, kTileChunks); ++i) request(sums + i * kChunkFloats, chunks + i);
    }
#pragma unroll 1
    for (int i = 0; i < kTileChunks; ++i, ++chunks) {
      int const stage = Chunks::stage(chunks);
      wait(full(T::kEndBarrier, stage), Chunks::phase(chunks));
      convert(now, Base::end_stage(stage), i);
      __syncwarp();
      if (lane_index() == 0 && i + T::kEndStages < kTileChunks) {
        request(sums + (i + T::kEndStages) * kChunkFloats, chunks + T::kEndStages);
      }
    }
    if constexpr (T::kRecyclesDq) {
      auto const& all = arguments.common;
      if (dq_head_index(*this, now) + Base::dq_slots.divisor >= int64_t(all.params.batch) * all.params.heads_q) return;
#pragma unroll 8
      for (int word = lane_index(); word < T::kBlockColumns * T::kDepth / 4; word += 32) {
        reinterpret_cast<float4*>(sums)[word] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      }
      fence_proxy_async_global();
      __syncwarp();
      if (lane_index() == 0) add_released(dq_heads_ended(*this, now), 1);
    }
  }
  // Tiles of 16x8 in the order of accumulators: a lane takes a row of four of them.
  __device__ __forceinline__ void convert(Cursor const& now, uint32_t chunk, int index) const {
    float const scale = score_scale(arguments.common.params);
    int const key = lane_index() % 8, turn = key / 2;
#pragma unroll 1
    for (int unit = lane_index(); unit < kChunkFloats / 8; unit += 32) {
      // Lanes begin at different quarters of a row, and fragments at different rows, so that banks differ.
      int const half = (unit / 8 ^ unit / 64) & 1;
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float2 const pair = load_shared_float2(chunk + unit / 8 % 8 * 512 + key * 64 + (i + turn) % 4 * 16 + 8 * half);
        words[i] = pack_pair<Element>(pair.x * scale, pair.y * scale);
      }
      int const fragment = index * (kChunkFloats / 128) + unit / 8 % 8;
      store(now, fragment / kColumnTiles * 16 + key + 8 * half, fragment % kColumnTiles * 8, turned(words, turn));
    }
  }
  // Word i of four in the place of i + turn.
  __device__ __forceinline__ static uint4 turned(uint32_t const (&w)[4], int turn) {
    bool const by_one = turn & 1, by_two = turn & 2;
    uint4 const once = by_one ? make_uint4(w[3], w[0], w[1], w[2]) : make_uint4(w[0], w[1], w[2], w[3]);
    return by_two ? make_uint4(once.z, once.w, once.x, once.y) : once;
  }
  __device__ __forceinline__ void store(Cursor const& now, int row, int column, uint4 const& words) const {
    auto const& p = arguments.common.params;
    int const query = now.tile * T::kBlockColumns + row;
    if (query >= p.seqlen_q || column >= p.dim_qk) return;
    Element* const out = static_cast<Element*>(p.dq.data) + batch * p.dq.stride_batch + now.head * p.dq.stride_head;
    *reinterpret_cast<uint4*>(out + int64_t(query) * p.dq.stride_row + column) = words;
  }
};

}  // namespace attention_autotuner::softmax_backward

// What producers and consumers of a pass of attention's backward share, and the producers.
#pragma once

#include <cstdint>

#include "attention_autotuner/abi.h"
#include "attention_autotuner/attention_backward_sm90/memory.cuh"
#include "attention_autotuner/attention_backward_sm90/traits.cuh"
#include "attention_autotuner/attention_forward_sm90/wgmma.cuh"
#include "attention_autotuner/common/backward_arguments.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/scheduler.cuh"
#include "attention_autotuner/sm90/pipeline.cuh"
#include "attention_autotuner/sm90/tma.cuh"

namespace attention_autotuner::softmax_backward {

using softmax_forward::kMmaDepth;
using softmax_forward::kWarpgroupRows;
using softmax_forward::kWarpgroupThreads;

// The list of output tiles of a launch, section by section: so many heads of the batch, which together fit in L2. Of a
// section, all heads for one row block before the next row block; of a section of one head, its row blocks in turn.
struct SectionList {
  int tiles;
  bool reversed_rows;
  Divider section_tiles, section_heads, heads, group;  // with a mask, `heads` is the batch
};
// With a mask, batch entries, which share it, follow each other; else heads.
template <bool kMasked>
__device__ __forceinline__ TileCoordinates section_tile(int index, SectionList const& list) {
  int const section = list.section_tiles.divide(index), within = index - section * list.section_tiles.divisor;
  int const rank = list.section_heads.divide(within);
  int const head_batch = section * list.section_heads.divisor + within - rank * list.section_heads.divisor;
  int const blocks = list.section_tiles.divisor / list.section_heads.divisor;
  int const outer = list.heads.divide(head_batch), inner = head_batch - outer * list.heads.divisor;
  return {list.reversed_rows ? blocks - 1 - rank : rank, kMasked ? outer : inner, kMasked ? inner : outer, 0};
}

// The mask of retnet, and nothing of attention.
template <typename Params>
struct MaskTensor {};
template <>
struct MaskTensor<attention_autotuner_retnet_backward_params> {
  TmaTensor mask;
};

template <typename Params>
struct BackwardPassSm90Arguments : ScoreValues<kHasWindow<Params>>, MaskTensor<Params> {
  TmaTensor x0, x1, y0, y1;
  BackwardArguments<Params> common;
  int* semaphores;  // workspace: [batch, heads_q, dq_tiles, parts], of ordered shares
};

// How far a CTA is with its list of output tiles, of which it takes every n-th: every role of it walks the same one.
// The rings and barriers go on from one tile to the next.
struct OutputTiles {
  int round = 0;
  int steps = 0;   // of the tiles before, all together
  int visits = 0;  // tiles before with any step at all: those whose rows were loaded

  __device__ __forceinline__ int tile() const { return round * int(gridDim.x) + int(blockIdx.x); }
  // After a tile whose steps end there.
  __device__ __forceinline__ void next(int end) {
    ++round;
    visits += end > steps;
    steps = end;
  }
};

// Where tiles and barriers lie, and which tiles an output tile visits.
template <typename T>
struct BackwardPassSm90Stages {
  BackwardPassSm90Arguments<typename T::Params> const& arguments;
  uint32_t const smem;
  int row_block, kv_head, head, batch, split;  // head: of the first of the queries' heads
  TileRange range;
  int begin, end;  // of the CTA's steps
  int visit;       // of the CTA

  __device__ __forceinline__ BackwardPassSm90Stages(BackwardPassSm90Arguments<typename T::Params> const& arguments,
                                                    uint32_t smem, SectionList const& list, OutputTiles const& tiles)
      : arguments(arguments), smem(smem), begin(tiles.steps), visit(tiles.visits) {
    auto const& common = arguments.common;
    TileCoordinates const tile = section_tile<T::kMasked>(tiles.tile(), list);
    row_block = tile.row_block;
    batch = tile.batch;
    int const first_row = row_block * T::kBlockRows;
    if constexpr (T::kByQueries) {
      head = tile.head;
      kv_head = list.group.divide(head);
      split = 0;
      int const last = minimum(first_row + T::kBlockRows, common.params.seqlen_q) - 1;
      range = {0, divide_up(maximum(common.visible_keys(last), 0), T::kBlockColumns), head, 1};
      if constexpr (T::kModified) range.first = common.first_key(first_row) / T::kBlockColumns;
    } else {
      Share<true> const share(common, tile.head);
      kv_head = share.kv_head;
      split = share.split;
      head = share.head;
      range = TileRange::over_queries(common, first_row, T::kBlockColumns, share.head, share.heads, T::kBlockRows);
    }
    end = begin + range.tiles();
  }
  __device__ __forceinline__ int steps() const { return end - begin; }

  __device__ __forceinline__ uint32_t full(int ring, int stage) const {
    return smem + T::kBarrierOffset + 16 * (ring + stage);
  }
  __device__ __forceinline__ uint32_t empty(int ring, int stage) const { return full(ring, stage) + 8; }
  __device__ __forceinline__ uint32_t x0_tile() const { return smem; }
  __device__ __forceinline__ uint32_t x1_tile() const { return smem + T::kX1Offset; }
  __device__ __forceinline__ uint32_t y0_tile(int stage) const { return smem + T::kY0Offset + stage * T::kY0Bytes; }
  __device__ __forceinline__ uint32_t y1_tile(int stage) const { return smem + T::kY1Offset + stage * T::kY1Bytes; }
  __device__ __forceinline__ uint32_t mask_tile(int stage) const {
    return smem + T::kMaskOffset + stage * T::kMaskBytes;
  }
  __device__ __forceinline__ uint32_t ds_tile(int stage) const { return smem + T::kDsOffset + stage * T::kDsBytes; }
  // Of one warp, for the share of dQ.
  __device__ __forceinline__ uint32_t dq_stage(int part) const {
    return smem + T::kDqOffset + (4 * part + softmax_forward::warp_in_warpgroup()) * T::kDqWarpBytes;
  }
  __device__ __forceinline__ uint32_t base_of(int stage) const {
    return smem + T::kBaseOffset + stage * T::kValueBytes;
  }
  __device__ __forceinline__ uint32_t shift_of(int stage) const {
    return smem + T::kShiftOffset + stage * T::kValueBytes;
  }

  __device__ __forceinline__ void init_barriers() const {
    constexpr int kDqWarps = T::kOwnDq ? 4 * kWarpArrivals : 0, kConsumers = 4 * T::kWarpgroups * kWarpArrivals;
    for (int i = 0; i < T::kDsBarrier; ++i) {
      barrier_init(full(i, 0), 1);
      barrier_init(empty(i, 0), kConsumers + (i == T::kXBarrier ? kDqWarps : 0));
    }
    for (int i = T::kDsBarrier; i < T::kBarriers; ++i) {
      barrier_init(full(i, 0), kConsumers);
      barrier_init(empty(i, 0), T::kOwnDq ? kDqWarps : kConsumers);
    }
    fence_barrier_init();
  }
  // X0, and X1, of this tile; from a producer or to it.
  __device__ __forceinline__ void acquire_rows(int which) const { wait(empty(T::kXBarrier, which), visit & 1 ^ 1); }
  __device__ __forceinline__ void wait_for_rows(int which) const { wait(full(T::kXBarrier, which), visit & 1); }
  __device__ __forceinline__ void release_rows(int which) const { arrive(empty(T::kXBarrier, which)); }

  // Of the tensors whose tiles stream.
  __device__ __forceinline__ int streamed_head(Cursor const& now) const { return T::kByQueries ? kv_head : now.head; }
  __device__ __forceinline__ int staying_head() const { return T::kByQueries ? head : kv_head; }
  __device__ __forceinline__ float const* values_of(float const* values, Cursor const& now) const {
    return values + arguments.common.lse_delta_offset(batch, now.head) + now.tile * T::kBlockColumns;
  }

  // One producer thread loads X0 and Y0 with the base of its rows, another X1 and Y1 with their shift, a third the
  // mask, so that a full ring of one does not stall others.
  __device__ __forceinline__ void load_first() const {
    if (steps() == 0) return;
    acquire_rows(0);
    fill_stage<T::kBlockRows, T::kDepthLoaded>(x0_tile(), arguments.x0, full(T::kXBarrier, 0),
                                               row_block * T::kBlockRows, 0, staying_head(), batch);
    using Ring = BarrierRing<T::kFirstStages>;
    Cursor now = range.begin();
#pragma unroll 1
    for (int index = begin; index < end; ++index, range.next(now)) {
      int const stage = Ring::stage(index);
      uint32_t const filled = full(T::kY0Barrier, stage);
      wait(empty(T::kY0Barrier, stage), Ring::phase(index) ^ 1);
      arrive_and_expect_tx(filled, T::kY0Bytes + (T::kByQueries ? 0 : 4 * T::kBlockColumns));
      load_tile<T::kBlockColumns, T::kDepthLoaded>(y0_tile(stage), arguments.y0, filled, now.tile * T::kBlockColumns, 0,
                                                   streamed_head(now), batch);
      if constexpr (!T::kByQueries) {
        bulk_load(base_of(stage), values_of(arguments.common.base, now), 4 * T::kBlockColumns, filled);
      }
    }
  }
  __device__ __forceinline__ void load_second() const {
    if (steps() == 0) return;
    if constexpr (T::kHasDs) {
      acquire_rows(1);
      fill_stage<T::kBlockRows, T::kColumnsLoaded>(x1_tile(), arguments.x1, full(T::kXBarrier, 1),
                                                   row_block * T::kBlockRows, 0, staying_head(), batch);
    }
    constexpr bool kShifts = T::kHasDs && !T::kByQueries;
    using Ring = BarrierRing<T::kSecondStages>;
    Cursor now = range.begin();
#pragma unroll 1
    for (int index = begin; index < end; ++index, range.next(now)) {
      int const stage = Ring::stage(index);
      uint32_t const filled = full(T::kY1Barrier, stage);
      wait(empty(T::kY1Barrier, stage), Ring::phase(index) ^ 1);
      arrive_and_expect_tx(filled, T::kY1Bytes + (kShifts ? 4 * T::kBlockColumns : 0));
      load_tile<T::kBlockColumns, T::kColumnsLoaded>(y1_tile(stage), arguments.y1, filled, now.tile * T::kBlockColumns,
                                                     0, streamed_head(now), batch);
      if constexpr (kShifts) {
        bulk_load(shift_of(stage), values_of(arguments.common.shift, now), 4 * T::kBlockColumns, filled);
      }
    }
  }
  __device__ __forceinline__ void load_mask() const {
    using Ring = BarrierRing<T::kMaskStages>;
    Cursor now = range.begin();
    int const row = row_block * T::kBlockRows;
#pragma unroll 1
    for (int index = begin; index < end; ++index, range.next(now)) {
      int const stage = Ring::stage(index), column = now.tile * T::kBlockColumns;
      uint32_t const filled = full(T::kMaskBarrier, stage);
      wait(empty(T::kMaskBarrier, stage), Ring::phase(index) ^ 1);
      if constexpr (T::kByQueries) {
        fill_stage<T::kBlockRows, T::kBlockColumns>(mask_tile(stage), arguments.mask, filled, row, column, now.head, 0);
      } else {
        fill_stage<T::kBlockColumns, T::kBlockRows>(mask_tile(stage), arguments.mask, filled, column, row, now.head, 0);
      }
    }
  }
};

}  // namespace attention_autotuner::softmax_backward

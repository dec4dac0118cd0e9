// What producers and consumers of a pass of attention's backward share, and the producers.
#pragma once

#include <cstdint>
#include <type_traits>

#include "attention_autotuner/abi.h"
#include "attention_autotuner/attention_backward_sm90/memory.cuh"
#include "attention_autotuner/attention_backward_sm90/query_order.cuh"
#include "attention_autotuner/attention_backward_sm90/tiles.cuh"
#include "attention_autotuner/attention_backward_sm90/traits.cuh"
#include "attention_autotuner/attention_forward_sm90/wgmma.cuh"
#include "attention_autotuner/common/backward_arguments.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/scheduler.cuh"
#include "attention_autotuner/common/spans.cuh"
#include "attention_autotuner/sm90/pipeline.cuh"
#include "attention_autotuner/sm90/roles.cuh"
#include "attention_autotuner/sm90/sequence_list.cuh"
#include "attention_autotuner/sm90/tma.cuh"

namespace attention_autotuner::softmax_backward {

using softmax_forward::kMmaDepth;
using softmax_forward::kWarpgroupRows;
using softmax_forward::kWarpgroupThreads;

// The arguments of one of the packed sequences, as far as they are its own.
struct SequenceParams {
  int seqlen_q, seqlen_k, causal, causal_offset, window_left, window_right, heads_q;
};
// What a pass knows of the sequence of its tile: a part of its stages, and nothing of theirs without packing.
template <bool kPacked, bool kSpanned>
struct SequenceOfTile {};
template <>
struct SequenceOfTile<true, false> {
  ListedBlock sequence;
  BackwardArguments<SequenceParams> shown;
};
// And of the batch entry, where it has spans.
struct EntryParams : SequenceParams {
  int2 const *row_spans, *key_spans;
};
template <>
struct SequenceOfTile<false, true> {
  BackwardArguments<EntryParams> shown;
};

// The mask of retnet, and nothing of attention.
template <typename Params>
struct MaskTensor {};
template <>
struct MaskTensor<attention_autotuner_retnet_backward_params> {
  TmaTensor mask;
};

// Where a pass over keys leaves the sums that become the gradient of a bias table, if it finds one.
template <bool kBias>
struct BiasSumsArguments {};
template <>
struct BiasSumsArguments<true> {
  float* bias_sums;  // workspace: [heads_q, batch, bias_blocks, warpgroups, 2 D + 1], or null
  int bias_blocks;   // of keys
};

template <typename Params>
struct BackwardPassSm90Arguments : ScoreValues<kHasWindow<Params>, kTakesBias<Params>>,
                                   BiasSumsArguments<kTakesBias<Params>>,
                                   MaskTensor<Params> {
  TmaTensor x0, x1, y0, y1;
  BackwardArguments<Params> common;
  int* semaphores;  // workspace: [batch, heads_q, dq_tiles, parts], of ordered shares; of stored ones without parts
  int* complete;    // workspace: [batch, heads_kv, splits]
  bool apart;       // whether a head's blocks of keys begin at tiles of queries of their own
};
// Of passes whose results TMA stores.
template <typename Params>
struct StoringPassSm90Arguments : BackwardPassSm90Arguments<Params> {
  TmaTensor dk, dv;  // 16 rows at a time
};
template <typename T>
using ArgumentsOfPass = std::conditional_t<T::kTmaStores, StoringPassSm90Arguments<typename T::Params>,
                                           BackwardPassSm90Arguments<typename T::Params>>;

// Where tiles and barriers lie, and which tiles an output tile visits.
template <typename T>
struct BackwardPassSm90Stages : SequenceOfTile<T::kPacked, T::kSpanned> {
  using List = TileListOf<T>;
  BackwardPassSm90Arguments<typename T::Params> const& arguments;
  uint32_t const smem;
  int row_block, kv_head, head, batch, split;  // head: of the first of the queries' heads
  TileRange range;
  int begin, end;  // of the CTA's steps
  int visit;       // of the CTA

  __device__ __forceinline__ BackwardPassSm90Stages(BackwardPassSm90Arguments<typename T::Params> const& arguments,
                                                    uint32_t smem, List const& list,
                                                    OutputTiles<T::kDynamic> const& tiles)
      : arguments(arguments), smem(smem), begin(tiles.steps), visit(tiles.visits) {
    TileCoordinates const tile = coordinates(list, tiles.tile());
    row_block = tile.row_block;
    if constexpr (T::kPacked) {
      show_sequence(list.listed.blocks[tile.row_block]);
      row_block = this->sequence.block;
    }
    if constexpr (T::kSpanned) show_entry(tile.batch);
    auto const& common = this->common();
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
      Share<true, T::kUnevenParts> const share(arguments.common, tile.head);
      kv_head = share.kv_head;
      split = share.split;
      head = share.head;
      range = TileRange::over_queries(common, first_row, T::kBlockColumns, share.head, share.heads, T::kBlockRows);
    }
    end = begin + range.tiles();
  }
  __device__ __forceinline__ static TileCoordinates coordinates(List const& list, int index) {
    if constexpr (T::kTailed) {
      return tailed_tile<T::kMasked, T::kPacked>(index, list);
    } else if constexpr (T::kPacked) {
      return listed_tile(index, list);
    } else {
      return section_tile<T::kMasked>(index, list);
    }
  }
  __device__ __forceinline__ void show_sequence(ListedBlock const& sequence) {
    auto const& all = arguments.common;
    auto& shown = this->shown;
    this->sequence = sequence;
    shown.params = {sequence.query_count,   sequence.key_count,      all.params.causal, sequence.offset,
                    all.params.window_left, all.params.window_right, all.params.heads_q};
    int64_t const blocks = sequence.first_query / kLseDeltaPadding + sequence.number * kLseDeltaSpare;
    shown.base = all.base + blocks * kLseDeltaPadding;
    shown.shift = all.shift + blocks * kLseDeltaPadding;
    shown.lse_delta_rows = all.lse_delta_rows;
  }
  __device__ __forceinline__ void show_entry(int entry) {
    auto const& p = arguments.common.params;
    auto& shown = this->shown;
    shown.params.row_spans = p.row_spans + int64_t(entry) * p.seqlen_q;
    shown.params.key_spans = p.key_spans + int64_t(entry) * p.seqlen_k;
    static_cast<SequenceParams&>(shown.params) = {p.seqlen_q,    p.seqlen_k,     p.causal, p.causal_offset,
                                                  p.window_left, p.window_right, p.heads_q};
    shown.base = arguments.common.base;
    shown.shift = arguments.common.shift;
    shown.lse_delta_rows = arguments.common.lse_delta_rows;
  }
  // By which a pass tells what it visits: the arguments of the launch, or of the sequence or batch entry.
  __device__ __forceinline__ auto const& common() const {
    if constexpr (T::kListed) {
      return this->shown;
    } else {
      return arguments.common;
    }
  }
  __device__ __forceinline__ int steps() const { return end - begin; }
  __device__ __forceinline__ int slopes() const {  // which batch entry's are its own
    if constexpr (T::kPacked) return this->sequence.slopes;
    return batch;
  }

  __device__ __forceinline__ static uint32_t full_at(uint32_t smem, int ring, int stage) {
    return smem + T::kBarrierOffset + 16 * (ring + stage);
  }
  __device__ __forceinline__ uint32_t full(int ring, int stage) const { return full_at(smem, ring, stage); }
  __device__ __forceinline__ uint32_t empty(int ring, int stage) const { return full(ring, stage) + 8; }
  __device__ __forceinline__ uint32_t cleared(int producer) const { return smem + T::kClearedOffset + 8 * producer; }
  __device__ __forceinline__ uint32_t x0_tile() const { return smem; }
  __device__ __forceinline__ uint32_t x1_tile() const { return smem + T::kX1Offset; }
  __device__ __forceinline__ uint32_t results_tile() const { return smem + T::kResultsOffset; }
  __device__ __forceinline__ uint32_t y0_tile(int stage) const { return smem + T::kY0Offset + stage * T::kY0Bytes; }
  __device__ __forceinline__ uint32_t y1_tile(int stage) const { return smem + T::kY1Offset + stage * T::kY1Bytes; }
  __device__ __forceinline__ uint32_t mask_tile(int stage) const {
    return smem + T::kMaskOffset + stage * T::kMaskBytes;
  }
  __device__ __forceinline__ uint32_t ds_tile(int stage) const { return smem + T::kDsOffset + stage * T::kDsBytes; }
  __device__ __forceinline__ uint32_t p_tile(int stage) const { return smem + T::kPOffset + stage * T::kPBytes; }
  // Of one warp, for the share of dQ, or of all that hand theirs to the thread that stores them.
  __device__ __forceinline__ uint32_t dq_stage(int part) const {
    if constexpr (T::kStoredDq) return smem + T::kDqOffset;
    return smem + T::kDqOffset + (4 * part + softmax_forward::warp_in_warpgroup()) * T::kDqWarpBytes;
  }
  __device__ __forceinline__ uint32_t base_of(int stage) const {
    return smem + T::kBaseOffset + stage * T::kValueBytes;
  }
  __device__ __forceinline__ uint32_t shift_of(int stage) const {
    return smem + T::kShiftOffset + stage * T::kValueBytes;
  }

  __device__ __forceinline__ static void init_barriers(uint32_t smem) {
    auto const full = [smem](int ring, int stage) { return full_at(smem, ring, stage); };
    auto const empty = [smem](int ring, int stage) { return full_at(smem, ring, stage) + 8; };
    constexpr int kDqWarps = T::kOwnDq ? 4 * kWarpArrivals : 0, kConsumers = 4 * T::kWarpgroups * kWarpArrivals;
    for (int i = 0; i < T::kDsBarrier; ++i) {
      barrier_init(full(i, 0), 1);
      barrier_init(empty(i, 0), kConsumers + (i == T::kXBarrier ? kDqWarps : 0));
    }
    for (int i = T::kDsBarrier; i < T::kPBarrier; ++i) {
      barrier_init(full(i, 0), kConsumers);
      barrier_init(empty(i, 0), T::kOwnDq ? kDqWarps : kConsumers);
    }
    for (int i = T::kPBarrier; i < T::kDqBarrier; ++i) {
      barrier_init(full(i, 0), 4 * kWarpArrivals);
      barrier_init(empty(i, 0), 4 * kWarpArrivals);
    }
    for (int i = T::kDqBarrier; i < T::kTileBarrier; ++i) {
      barrier_init(full(i, 0), 4 * kWarpArrivals);
      barrier_init(empty(i, 0), 1);
    }
    for (int i = T::kTileBarrier; i < T::kBarriers; ++i) {
      constexpr int kLoaders = (T::kPacked ? kWarpArrivals : 1) + T::kMasked + T::kDqSenders;
      barrier_init(full(i, 0), 1);
      barrier_init(empty(i, 0), kConsumers + kDqWarps + kLoaders);
    }
    if constexpr (T::kPacked) {
      for (int i = 0; i < 2; ++i) barrier_init(smem + T::kClearedOffset + 8 * i, 1);
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
    return values + common().lse_delta_offset(batch, now.head) + now.tile * T::kBlockColumns;
  }

  // A tile on its way, by load(barrier), which arrives there. Where a sequence ends within it, memory may hold anything
  // after that, and 0 times NaN is NaN: the rest is cleared before the tile is full. A warp calls.
  template <int Rows, int Columns, typename Load>
  __device__ __forceinline__ void load_cleared(uint32_t tile, uint32_t full, int rows, int producer, int& phase,
                                               Load&& load) const {
    bool const whole = rows >= Rows;
    if (lane_index() == 0) load(whole ? full : cleared(producer));
    if (whole) return;
    wait(cleared(producer), phase);
    phase ^= 1;
    clear_rows_from<Rows, Columns>(tile, rows);
    if (lane_index() == 0) arrive(full);
  }
  // What both producers do of packed sequences: the first with X0 and Y0, the second with X1 and Y1. `phase`: of the
  // barrier of cleared tiles, from one output tile to the next.
  template <int kProducer>
  __device__ __forceinline__ void load_packed(int& phase) const {
    constexpr bool kFirst = kProducer == 0, kValues = !T::kByQueries && (kFirst || T::kHasDs);
    constexpr int kColumns = kFirst ? T::kDepthLoaded : T::kColumnsLoaded;
    constexpr int kBarrier = kFirst ? T::kY0Barrier : T::kY1Barrier;
    using Ring = BarrierRing<kFirst ? T::kFirstStages : T::kSecondStages>;
    auto const& p = common().params;
    auto const& sequence = this->sequence;
    int const staying = T::kByQueries ? sequence.first_query : sequence.first_key;
    int const streamed = T::kByQueries ? sequence.first_key : sequence.first_query;
    if (steps() == 0) return;
    wait_for_preprocess();
    if constexpr (T::kDynamic && kFirst) launch_dependent_grids();
    auto const load_rows = [&] {
      uint32_t const tile = kFirst ? x0_tile() : x1_tile();
      int const row = row_block * T::kBlockRows;
      // Queries that are not the sequence's spoil no others.
      int const rows = T::kByQueries ? T::kBlockRows : p.seqlen_k - row;
      acquire_rows(kProducer);
      load_cleared<T::kBlockRows, kColumns>(
          tile, full(T::kXBarrier, kProducer), rows, kProducer, phase, [&](uint32_t arrived) {
            fill_stage<T::kBlockRows, kColumns>(tile, kFirst ? arguments.x0 : arguments.x1, arrived, staying + row, 0,
                                                staying_head(), batch);
          });
    };
    if constexpr (!T::kDynamic && (kFirst || T::kHasDs)) load_rows();
    Cursor now = range.begin();
#pragma unroll 1
    for (int index = begin; index < end; ++index, range.next(now)) {
      if constexpr (T::kDynamic) {
        if (index == rows_after<kFirst ? T::kFirstStages : T::kSecondStages>()) load_rows();
      }
      int const stage = Ring::stage(index), row = now.tile * T::kBlockColumns;
      uint32_t const tile = kFirst ? y0_tile(stage) : y1_tile(stage);
      int const rows = (T::kByQueries ? p.seqlen_k : p.seqlen_q) - row;
      wait(empty(kBarrier, stage), Ring::phase(index) ^ 1);
      load_cleared<T::kBlockColumns, kColumns>(
          tile, full(kBarrier, stage), rows, kProducer, phase, [&](uint32_t arrived) {
            arrive_and_expect_tx(arrived, 2 * T::kBlockColumns * kColumns + (kValues ? 4 * T::kBlockColumns : 0));
            load_tile<T::kBlockColumns, kColumns>(tile, kFirst ? arguments.y0 : arguments.y1, arrived, streamed + row,
                                                  0, streamed_head(now), batch);
            if constexpr (kValues) {
              bulk_load(kFirst ? base_of(stage) : shift_of(stage),
                        values_of(kFirst ? common().base : common().shift, now), 4 * T::kBlockColumns, arrived);
            }
          });
    }
  }

  // Where launches overlap. Later passes begin after the first one has waited, and so need not.
  __device__ __forceinline__ static void wait_for_preprocess() {
    if constexpr (T::kEarly && T::kFirstPass) wait_on_dependent_grids();
  }
  // The step whose tile of Y comes after X, where CTAs claim tiles: stages of those before fall free before the end of
  // the block before, which X waits for.
  template <int kStages>
  __device__ __forceinline__ int rows_after() const {
    return visit == 0 ? begin : begin + minimum(kStages, steps()) - 1;
  }
  __device__ __forceinline__ void load_first_rows() const {
    acquire_rows(0);
    fill_stage<T::kBlockRows, T::kDepthLoaded>(x0_tile(), arguments.x0, full(T::kXBarrier, 0),
                                               row_block * T::kBlockRows, 0, staying_head(), batch);
  }
  __device__ __forceinline__ void load_second_rows() const {
    acquire_rows(1);
    fill_stage<T::kBlockRows, T::kColumnsLoaded>(x1_tile(), arguments.x1, full(T::kXBarrier, 1),
                                                 row_block * T::kBlockRows, 0, staying_head(), batch);
  }
  // One producer thread loads X0 and Y0 with the base of its rows, another X1 and Y1 with their shift, a third the
  // mask, so that a full ring of one does not stall others.
  __device__ __forceinline__ void load_first() const {
    if (steps() == 0) return;
    if constexpr (!T::kDynamic) load_first_rows();
    wait_for_preprocess();
    if constexpr (T::kEarly) launch_dependent_grids();
    using Ring = BarrierRing<T::kFirstStages>;
    Cursor now = range.begin();
    QueryOrder<T> const order(*this);
#pragma unroll 1
    for (int index = begin; index < end; ++index, range.next(now)) {
      if constexpr (T::kDynamic) {
        if (index == rows_after<T::kFirstStages>()) load_first_rows();
      }
      int const stage = Ring::stage(index);
      uint32_t const filled = full(T::kY0Barrier, stage);
      wait(empty(T::kY0Barrier, stage), Ring::phase(index) ^ 1);
      arrive_and_expect_tx(filled, T::kY0Bytes + (T::kByQueries ? 0 : 4 * T::kBlockColumns));
      Cursor const at = order.at(now);
      load_tile<T::kBlockColumns, T::kDepthLoaded>(y0_tile(stage), arguments.y0, filled, at.tile * T::kBlockColumns, 0,
                                                   streamed_head(at), batch);
      if constexpr (!T::kByQueries) {
        bulk_load(base_of(stage), values_of(arguments.common.base, at), 4 * T::kBlockColumns, filled);
      }
    }
  }
  __device__ __forceinline__ void load_second() const {
    if (steps() == 0) return;
    if constexpr (T::kHasDs && !T::kDynamic) load_second_rows();
    wait_for_preprocess();
    constexpr bool kShifts = T::kHasDs && !T::kByQueries;
    using Ring = BarrierRing<T::kSecondStages>;
    Cursor now = range.begin();
    QueryOrder<T> const order(*this);
#pragma unroll 1
    for (int index = begin; index < end; ++index, range.next(now)) {
      if constexpr (T::kDynamic) {
        if (index == rows_after<T::kSecondStages>()) load_second_rows();
      }
      int const stage = Ring::stage(index);
      uint32_t const filled = full(T::kY1Barrier, stage);
      wait(empty(T::kY1Barrier, stage), Ring::phase(index) ^ 1);
      arrive_and_expect_tx(filled, T::kY1Bytes + (kShifts ? 4 * T::kBlockColumns : 0));
      Cursor const at = order.at(now);
      load_tile<T::kBlockColumns, T::kColumnsLoaded>(y1_tile(stage), arguments.y1, filled, at.tile * T::kBlockColumns,
                                                     0, streamed_head(at), batch);
      if constexpr (kShifts) {
        bulk_load(shift_of(stage), values_of(arguments.common.shift, at), 4 * T::kBlockColumns, filled);
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

// What producers and consumers of attention's forward share, and the producers.
#pragma once

#include <cstdint>
#include <type_traits>

#include "attention_autotuner/attention_forward_sm90/mask_tensor.cuh"
#include "attention_autotuner/attention_forward_sm90/packed_rows.cuh"
#include "attention_autotuner/attention_forward_sm90/schedule.cuh"
#include "attention_autotuner/attention_forward_sm90/score_values.cuh"
#include "attention_autotuner/attention_forward_sm90/wgmma.cuh"
#include "attention_autotuner/common/packed_heads.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/spans.cuh"
#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/sm90/pipeline.cuh"
#include "attention_autotuner/sm90/roles.cuh"
#include "attention_autotuner/sm90/tma.cuh"

namespace attention_autotuner::softmax_forward {

// Of packed sequences: rows of all.
template <bool kPacked>
struct PackedTotals {};
template <>
struct PackedTotals<true> {
  int total_q;
  int* row_splits;  // that a row has results of, [heads, rows]; null where none has several
};

// And the spans of rows, by batch entry.
template <bool kSpanned>
struct RowSpans {};
template <>
struct RowSpans<true> {
  int2 const* row_spans;
};

template <bool kModified, typename Listed = void, bool kBias = false, bool kSpanned = false, bool kAttnMask = false>
struct AttentionForwardSm90Arguments : ScoreValues<kModified, kBias>,
                                       PackedTotals<!std::is_void_v<Listed>>,
                                       RowSpans<kSpanned>,
                                       MaskTensorArguments<kAttnMask> {
  TmaTensor q, k, v, o, mask;
  WorkListOf<Listed> list;
  PackedHeads packed;
  void* output;
  int64_t stride_batch, stride_head, stride_row;  // of the output
  float* lse;
  float *partial_output, *partial_lse;  // of every split [rows, padded columns] and, in powers of two, [rows]
  int64_t partial_rows;                 // of all heads
  int heads_q, seqlen_q, seqlen_k, dim_v, causal, causal_offset;
  int const *seqlens_k, *starts_k;  // key bounds, as the ABI has them
  int causal_from_end;
  int zero;              // which the compiler does not know
  int claim_lead;        // key tiles of a tile of rows that are left to load when the next one is claimed
  float exponent_scale;  // |scale| log2(e), or log2(e) where scale is 0; softcap log2(e) where there is one
  float sign;            // of scale
  // Of retnet alone.
  float* r;
  float scale, r_clamp_max;
  int normalize;
};

template <typename T>
using ArgumentsOf = AttentionForwardSm90Arguments<T::kModified, ListedOf<T>, T::kBias, T::kSpanned, T::kAttnMask>;

// Where tiles and barriers lie, and how many tiles of keys a tile of rows sees.
template <typename T>
struct AttentionForwardSm90Stages {
  ArgumentsOf<T> const& arguments;
  uint32_t const smem;

  __device__ __forceinline__ uint32_t full(int ring, int stage) const {
    return smem + T::kBarrierOffset + 16 * (ring + stage);
  }
  __device__ __forceinline__ uint32_t empty(int ring, int stage) const { return full(ring, stage) + 8; }
  __device__ __forceinline__ uint32_t q_tile(int stage) const { return smem + stage * T::kQBytes; }
  __device__ __forceinline__ uint32_t k_tile(int stage) const { return smem + T::kKOffset + stage * T::kKBytes; }
  __device__ __forceinline__ uint32_t v_tile(int stage) const { return smem + T::kVOffset + stage * T::kVBytes; }
  __device__ __forceinline__ uint32_t mask_tile(int stage) const {
    return smem + T::kMaskOffset + stage * T::kMaskBytes;
  }

  __device__ __forceinline__ void init_barriers() const {
    for (int i = 0; i < T::kExchangeBarrier; ++i) {
      barrier_init(full(i, 0), 1);
      // The mask is released by warps, which read it for themselves.
      barrier_init(empty(i, 0), T::kWarpgroups * (i < T::kMaskBarrier ? 1 : 4 * kWarpArrivals));
    }
    for (int i = T::kExchangeBarrier; i < T::kTileBarrier; ++i) {
      barrier_init(full(i, 0), 1);
      barrier_init(empty(i, 0), 4 * kWarpArrivals);
    }
    for (int i = 0; i < T::kTileSlots; ++i) {
      barrier_init(full(T::kTileBarrier, i), 1);
      barrier_init(empty(T::kTileBarrier, i),
                   (T::kClearsV ? kWarpArrivals : T::kProducers - 1) + 4 * T::kWarpgroups * kWarpArrivals);
    }
    if constexpr (T::kClearsV) barrier_init(smem + T::kBoundedOffset, 1);
    fence_barrier_init();
  }

  // The query of a row of a CTA's tile, and the head in it.
  __device__ __forceinline__ int query_of(WorkTile const& tile, int row) const {
    if constexpr (T::kPackGqa) {
      return tile.row_block * arguments.packed.queries + arguments.packed.heads.divide(row);
    } else {
      return tile.row_block * T::kBlockM + row;
    }
  }
  __device__ __forceinline__ int head_of(WorkTile const& tile, int row) const {
    if constexpr (T::kPackGqa) {
      int const heads = arguments.packed.heads.divisor;
      return tile.head * heads + row - arguments.packed.heads.divide(row) * heads;
    } else {
      return tile.head;
    }
  }

  using Bounds = std::conditional_t<T::kSpanned, SpannedRange<T::kKeyBounds>, KeyRange<T::kKeyBounds>>;
  using Range = std::conditional_t<T::kPacked, ListedOf<T>, Bounds>;
  __device__ __forceinline__ Range key_range(WorkTile const& tile) const {
    if constexpr (T::kPacked) {
      return arguments.list.listed.blocks[tile.listed];
    } else {
      Range range;
      range.find(arguments, tile.batch);
      return range;
    }
  }
  // With modifications: the first key that a query sees, which may be behind the last, and the end of those.
  __device__ __forceinline__ int visible_first(Range const& range, int query) const {
    if constexpr (T::kSpanned) return maximum(range.visible_first(arguments, query), 0);
    return maximum(query + range.causal_offset(arguments) - arguments.window_left, 0);
  }
  __device__ __forceinline__ int visible_end(Range const& range, int query) const {
    if constexpr (T::kSpanned) return range.visible_end(arguments, query);
    int const length = range.length(arguments);
    return minimum(minimum(query + range.causal_offset(arguments), length) + arguments.window_right + 1, length);
  }
  // The end of the tiles of keys that queries before `query_end` see; at least one, so that every tile of rows runs the
  // main loop.
  __device__ __forceinline__ int key_tiles(Range const& range, int query_end) const {
    int seen = range.length(arguments);
    if constexpr (T::kModified) {
      seen = visible_end(range, minimum(query_end, range.queries(arguments)) - 1);
    } else if (arguments.causal) {
      seen = minimum(seen, minimum(query_end, range.queries(arguments)) + range.causal_offset(arguments));
    }
    return maximum(1, (seen + T::kBlockN - 1) / T::kBlockN);
  }
  // In how many parts a tile's keys are.
  __device__ __forceinline__ int splits_of(Range const& range) const {
    if constexpr (T::kPacked) {
      return range.splits;
    } else {
      return arguments.list.splits.divisor;
    }
  }
  // Those of a CTA's tile: of all that its queries see, an even share for every split. A split that is left without any
  // has the one behind the last key, which no query sees.
  __device__ __forceinline__ KeyTiles key_tiles(Range const& range, WorkTile const& tile) const {
    int const end = key_tiles(range, query_of(tile, 0) + (T::kPackGqa ? arguments.packed.queries : T::kBlockM));
    int begin = 0;
    if constexpr (T::kModified) begin = minimum(visible_first(range, query_of(tile, 0)) / T::kBlockN, end - 1);
    if constexpr (T::kSplitKv) {
      int const seen = end - begin, splits = splits_of(range);
      int const share = T::kPacked ? seen / splits : arguments.list.splits.divide(seen), rest = seen - share * splits;
      int const count = share + (tile.split < rest);
      int const first = count > 0 ? begin + tile.split * share + minimum(tile.split, rest)
                                  : (range.length(arguments) + T::kBlockN - 1) / T::kBlockN;
      return {first, first + maximum(1, count)};
    } else {
      return {begin, end};
    }
  }

  __device__ __forceinline__ void load_q(WorkTile const& tile, int first_query, int stage) const {
    uint32_t const target = q_tile(stage), arrived = full(T::kQBarrier, stage);
    if constexpr (T::kPackGqa) {
      arrive_and_expect_tx(arrived, arguments.packed.rows * T::kDepthLoaded * 2);
      load_packed_rows<T::kBlockM, T::kDepthLoaded>(target, arguments.q, arrived, first_query, tile.head, tile.batch);
    } else {
      fill_stage<T::kBlockM, T::kDepthLoaded>(target, arguments.q, arrived, first_query, 0, tile.head, tile.batch);
    }
  }
  // Rows of Q that no load fills, of packed rows alone, do no harm as zeros. All threads of a CTA call it.
  __device__ __forceinline__ void clear_unloaded_rows() const {
    if constexpr (T::kPackGqa) {
      for (int i = 0; i < T::kQStages * T::kDepthLoaded / kSwizzleColumns; ++i) {
        clear_rows(smem + i * T::kBlockM * kSwizzleRowBytes, arguments.packed.rows, T::kBlockM, T::kThreads);
      }
      fence_view_async_shared();
    }
  }

  // One producer thread loads Q and K, another V, a third the mask, so that a full ring of one does not stall others.
  __device__ __forceinline__ void load_q_and_k() const {
    TileSequence<T> sequence(arguments.list, smem);
    RingCursor<T::kQStages> q;
    RingCursor<T::kKStages> k;
    do {
      WorkTile const tile = sequence.tile();
      int const kv_head = arguments.list.group.divide(tile.head);
      Range const range = key_range(tile);
      wait(empty(T::kQBarrier, q.stage), q.phase ^ 1);
      load_q(tile, range.query_begin() + query_of(tile, 0), q.stage);
      q.advance();
      KeyTiles const tiles = key_tiles(range, tile);
      int const claims = minimum(tiles.end - 1, tiles.first + arguments.claim_lead);
      int claimed = 0;
#pragma unroll 1
      for (int key_tile = tiles.end - 1; key_tile >= tiles.first; --key_tile) {
        if (key_tile == claims) claimed = sequence.claim();
        wait(empty(T::kKBarrier, k.stage), k.phase ^ 1);
        fill_stage<T::kBlockN, T::kDepthLoaded>(k_tile(k.stage), arguments.k, full(T::kKBarrier, k.stage),
                                                range.begin() + key_tile * T::kBlockN, 0, kv_head, tile.batch);
        k.advance();
      }
      if (!sequence.publish(claimed)) break;
    } while (true);
  }
  // Where V is cleared a whole warp calls, else one thread.
  __device__ __forceinline__ void load_v() const {
    TileSequence<T> sequence(arguments.list, smem);
    RingCursor<T::kVStages> v;
    int phase = 0;
    do {
      WorkTile const tile = sequence.tile();
      int const kv_head = arguments.list.group.divide(tile.head);
      Range const range = key_range(tile);
      KeyTiles const tiles = key_tiles(range, tile);
#pragma unroll 1
      for (int key_tile = tiles.end - 1; key_tile >= tiles.first; --key_tile) {
        wait(empty(T::kVBarrier, v.stage), v.phase ^ 1);
        auto const fill = [&](uint32_t barrier) {
          if (T::kClearsV && lane_index() != 0) return;
          fill_stage<T::kBlockN, T::kColumnsLoaded>(v_tile(v.stage), arguments.v, barrier,
                                                    range.begin() + key_tile * T::kBlockN, tile.slice * T::kColumns,
                                                    kv_head, tile.batch);
        };
        int const rows = maximum(0, range.length(arguments) - key_tile * T::kBlockN);
        if (T::kClearsV && rows < T::kBlockN) {
          fill(smem + T::kBoundedOffset);
          wait(smem + T::kBoundedOffset, phase);
          phase ^= 1;
          // Where a range ends inside the tensor, memory may hold anything there, and 0 times NaN is NaN; of K it does
          // not matter, as scores are replaced.
          clear_rows_from<T::kBlockN, T::kColumnsLoaded>(v_tile(v.stage), rows);
          if (lane_index() == 0) arrive(full(T::kVBarrier, v.stage));
        } else {
          fill(full(T::kVBarrier, v.stage));
        }
        v.advance();
      }
    } while (sequence.template next<T::kClearsV>());
    if constexpr (T::kSplitKv) launch_dependent_grids();
  }
  __device__ __forceinline__ void load_mask() const {
    TileSequence<T> sequence(arguments.list, smem);
    RingCursor<T::kMaskStages> masks;
    do {
      WorkTile const tile = sequence.tile();
      KeyTiles const tiles = key_tiles(key_range(tile), tile);
#pragma unroll 1
      for (int key_tile = tiles.end - 1; key_tile >= tiles.first; --key_tile) {
        wait(empty(T::kMaskBarrier, masks.stage), masks.phase ^ 1);
        int const key = key_tile * T::kBlockN + (T::kSharesScores ? tile.slice * T::kScoreKeys : 0);
        fill_stage<T::kBlockM, T::kScoreKeys>(mask_tile(masks.stage), arguments.mask,
                                              full(T::kMaskBarrier, masks.stage), tile.row_block * T::kBlockM, key,
                                              tile.head, 0);
        masks.advance();
      }
    } while (sequence.template next<false>());
  }
};

}  // namespace attention_autotuner::softmax_forward

// The producer side of a pass of retnet's backward in family sm90: arguments, barriers, the tiles of a main loop, and
// the threads that load them.
#pragma once

#include <type_traits>

#include "attention_autotuner/abi.h"
#include "attention_autotuner/common/backward_arguments.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/scheduler.cuh"
#include "attention_autotuner/common/shared_memory.cuh"
#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/scores_backward_sm90/traits.cuh"
#include "attention_autotuner/sm90/pipeline.cuh"
#include "attention_autotuner/sm90/tma.cuh"

namespace attention_autotuner {

template <typename Work>
struct Role {
  using Type = Work;
};

struct PassSm90Arguments {
  TmaTensor x[2], y[2], z, mask;  // x and y of each main loop
  BackwardArguments<attention_autotuner_retnet_backward_params> common;
  int mainloops;
  float scale_sign;
};

// Scores that dQ's pass stores for dK's: those of some heads and batches, a matrix of queries by keys for each head and
// batch and, below one another, for each main loop. Both dimensions are those of whole tiles of dQ. Of each 32 keys, a
// lane's eight come together; see stored_scores.cuh.
struct ScoreBand {
  void* scores;
  int first_head, first_batch;  // query heads
  int batches;
  int loop_rows, columns;
  int key_block;  // of dK: a row of tiles is stored up to whole ones
  bool first;     // of the launch
};
struct BandSm90Arguments : PassSm90Arguments {
  ScoreBand band;
};
template <typename T>
using PassArguments = std::conditional_t<T::kStoresScores, BandSm90Arguments, PassSm90Arguments>;

// The barriers of X, of the stages of Y's slices, then of Z and the mask, stage after stage.
template <typename T>
struct PassSm90Barriers {
  using XRing = BarrierRing<1>;
  using YRing = BarrierRing<T::kSliceStages>;
  using Ring = BarrierRing<T::kStages, 2>;

  uint32_t const smem;

  __device__ __forceinline__ uint32_t barrier(int index) const { return smem + T::kBarrierOffset + 8 * index; }
  __device__ __forceinline__ XRing x_ring() const { return {barrier(0)}; }
  __device__ __forceinline__ YRing y_ring() const { return {barrier(2)}; }
  __device__ __forceinline__ Ring z_ring() const { return {barrier(2 + 2 * T::kSliceStages)}; }
  __device__ __forceinline__ Ring mask_ring() const { return {barrier(4 + 2 * T::kSliceStages)}; }

  __device__ __forceinline__ void init_barriers() const {
    x_ring().init(0, 1, T::kKeepsX ? 4 * T::kWarpgroups : T::kWarpgroups);
    for (int slot = 0; slot < T::kSliceStages; ++slot) y_ring().init(slot, 1, T::kWarpgroups);
    for (int stage = 0; stage < T::kStages; ++stage) {
      z_ring().init(stage, 1, T::kWarpgroups);
      mask_ring().init(stage, kWarpArrivals, 4 * T::kWarpgroups * kWarpArrivals);
    }
    fence_barrier_init();
  }
};

// What both roles know: the tile, the steps over the other side, the barriers; and the producers.
template <typename T>
struct PassSm90Stages : PassSm90Barriers<T> {
  using Barriers = PassSm90Barriers<T>;
  using Barriers::mask_ring;
  using Barriers::smem;
  using Barriers::x_ring;
  using Barriers::y_ring;
  using Barriers::z_ring;
  using typename Barriers::Ring;
  using typename Barriers::YRing;

  PassArguments<T> const& arguments;
  TileCoordinates const tile;
  TileRange range;  // over tiles of the other side
  int steps;        // of one main loop
  int kv_head, split;
  int done;       // steps of the CTA before this tile
  int mainloops;  // of the CTA before this tile

  __device__ __forceinline__ PassSm90Stages(PassArguments<T> const& arguments, uint32_t smem,
                                            TileCoordinates const& tile, TileList const& list, int done, int mainloops)
      : Barriers{smem}, arguments(arguments), tile(tile), done(done), mainloops(mainloops) {
    auto const& common = arguments.common;
    int const first_row = tile.row_block * T::kBlockRows;
    if constexpr (T::kByQueries) {
      int const last = minimum(first_row + T::kBlockRows, common.params.seqlen_q) - 1;
      kv_head = list.group.divide(tile.head);
      split = 0;
      range = {0, divide_up(maximum(common.visible_keys(last), 0), T::kBlockColumns), tile.head, 1};
    } else {
      Share<true> const share(common, tile.head);
      kv_head = share.kv_head;
      split = share.split;
      range = TileRange::over_queries(common, first_row, T::kStepColumns, share.head, share.heads, T::kBlockRows);
    }
    steps = range.tiles();
  }

  // --- producers, a warp for each operand, so that a full ring of one does not stall another -------------------------

  // By one thread: X and Y.
  __device__ __forceinline__ void load_xy() const {
    int const row = tile.row_block * T::kBlockRows;
    int slice_index = done * T::kDepthSlices;
    for (int pass = 0; pass < arguments.mainloops && steps > 0; ++pass) {
      x_ring().producer_acquire(mainloops + pass);
      fill_stage<T::kBlockRows, T::kDepth>(smem, arguments.x[pass], x_ring().full(0), row, 0,
                                           T::kByQueries ? tile.head : kv_head, tile.batch);
      Cursor now = range.begin();
      for (int step = 0; step < steps; ++step, range.next(now)) {
#pragma unroll 1
        for (int i = 0; i < T::kDepthSlices; ++i, ++slice_index) {
          int const slot = YRing::stage(slice_index);
          y_ring().producer_acquire(slice_index);
          fill_stage<T::kBlockColumns, T::kSliceDepth>(smem + T::kYOffset + slot * T::kYBytes, arguments.y[pass],
                                                       y_ring().full(slot), now.tile * T::kBlockColumns,
                                                       i * T::kSliceDepth, head_of(now), tile.batch);
        }
      }
    }
  }
  // By a whole warp, for the factors of columns.
  __device__ __forceinline__ void load_mask() const {
    auto const& common = arguments.common;
    int const row = tile.row_block * T::kBlockRows, total = arguments.mainloops * steps;
    bool const leads = lane_index() == 0;
    Cursor now = range.begin();
    for (int index = 0; index < total; ++index, range.next(now)) {
      if (index == steps) now = range.begin();
      int const at = done + index, stage = Ring::stage(at), other = now.tile * T::kBlockColumns;
      uint32_t const mask = smem + T::kMaskOffset + stage * T::kMaskBytes;
      mask_ring().producer_acquire(at);
      if (leads) {
        expect_tx(mask_ring().full(stage), T::kMaskBytes);
        if constexpr (T::kByQueries) {
          load_tile<T::kBlockRows, T::kBlockColumns>(mask, arguments.mask, mask_ring().full(stage), row, other,
                                                     tile.head, 0);
        } else {
          load_tile<T::kBlockColumns, T::kBlockRows>(mask, arguments.mask, mask_ring().full(stage), other, row,
                                                     now.head, 0);
        }
      }
      if constexpr (!T::kByQueries) {
        float const* const factors =
            (index < steps ? common.base : common.shift) + common.lse_delta_offset(tile.batch, now.head) + other;
        float const all = index >= steps              ? arguments.scale_sign
                          : T::kResult == Result::kDv ? common.params.scale
                                                      : 1.0f;
        for (int i = 2 * lane_index(); i < T::kBlockColumns; i += 64) {
          float2 const pair = *reinterpret_cast<float2 const*>(factors + i);
          store_shared_float2(smem + T::kFactorOffset + stage * T::kFactorBytes + 4 * i,
                              make_float2(pair.x * all, pair.y * all));
        }
      }
      if (warp_arrives()) arrive(mask_ring().full(stage));
    }
  }
  // By one thread: Z.
  __device__ __forceinline__ void load_z() const {
    int const total = arguments.mainloops * steps;
    Cursor now = range.begin();
    for (int index = 0; index < total; ++index, range.next(now)) {
      int const at = done + index, stage = Ring::stage(at);
      if (index == steps) now = range.begin();
      z_ring().producer_acquire(at);
      fill_stage<T::kBlockColumns, T::kColumns>(smem + T::kZOffset + stage * T::kZBytes, arguments.z,
                                                z_ring().full(stage), now.tile * T::kBlockColumns,
                                                tile.value_slice * T::kColumns, head_of(now), tile.batch);
    }
  }
  // Of the tensors whose tiles are streamed.
  __device__ __forceinline__ int head_of(Cursor const& now) const { return T::kByQueries ? kv_head : now.head; }
};

}  // namespace attention_autotuner

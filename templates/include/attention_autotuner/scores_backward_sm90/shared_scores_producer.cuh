// The producer side of a pass whose two slices share scores: barriers, the ring's order, and the threads that load. See
// shared_scores.cuh.
#pragma once

#include <type_traits>

#include "attention_autotuner/common/shared_memory.cuh"
#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/scores_backward_sm90/producer.cuh"
#include "attention_autotuner/sm90/pipeline.cuh"
#include "attention_autotuner/sm90/prefetch.cuh"
#include "attention_autotuner/sm90/roles.cuh"
#include "attention_autotuner/sm90/swizzle.cuh"
#include "attention_autotuner/sm90/tma.cuh"

namespace attention_autotuner {

// The barriers of X, of the ring's slots, then of the mask and of P, stage after stage, each warpgroup's by itself.
template <typename T>
struct SharedScoresBarriers {
  using XRing = BarrierRing<1>;
  using Slots = BarrierRing<T::kSliceStages>;
  using MaskRing = BarrierRing<T::kStages, T::kWarpgroups>;
  using Exchange = BarrierRing<T::kExchangeStages, T::kWarpgroups>;

  uint32_t const smem;

  __device__ __forceinline__ uint32_t barrier(int pair) const { return smem + T::kBarrierOffset + 16 * pair; }
  __device__ __forceinline__ XRing x_ring() const { return {barrier(0)}; }
  __device__ __forceinline__ Slots slots() const { return {barrier(1)}; }
  __device__ __forceinline__ MaskRing mask_ring(int group) const { return {barrier(1 + T::kSliceStages + group)}; }
  __device__ __forceinline__ Exchange exchange(int group) const {
    return {barrier(1 + T::kSliceStages + T::kStages * T::kWarpgroups + group)};
  }

  __device__ __forceinline__ void init_barriers() const {
    x_ring().init(0, 1, T::kWarpgroups);
    for (int slot = 0; slot < T::kSliceStages; ++slot) slots().init(slot, 1, T::kWarpgroups);
    for (int group = 0; group < T::kWarpgroups; ++group) {
      for (int stage = 0; stage < T::kStages; ++stage) {
        mask_ring(group).init(stage, kWarpArrivals, 4 * kWarpArrivals);
      }
      for (int stage = 0; stage < T::kExchangeStages; ++stage) exchange(group).init(stage, 1, 4 * kWarpArrivals);
    }
    fence_barrier_init();
  }
};

// Places in shared memory and columns that both roles know.
template <typename T, typename Work>
struct SharedScoresPlaces : Work {
  using Work::smem;
  using Work::tile;
  using Work::Work;
  static constexpr int kStepSlots = 3 * T::kDepthSlices;  // of the ring, in one step

  __device__ __forceinline__ SharedScoresBarriers<T> barriers() const { return {smem}; }
  __device__ __forceinline__ uint32_t slot(int stage) const { return smem + T::kYOffset + stage * T::kYBytes; }
  // Of a step, the first column of this CTA's half, or of the other's.
  __device__ __forceinline__ int near_half(int step_tile) const {
    return step_tile * T::kStepColumns + tile.value_slice * T::kBlockColumns;
  }
  __device__ __forceinline__ int far_half(int step_tile) const {
    return step_tile * T::kStepColumns + (tile.value_slice ^ 1) * T::kBlockColumns;
  }
};

template <typename T>
struct SharedScoresLoads : SharedScoresPlaces<T, PassSm90Stages<T>> {
  using Base = SharedScoresPlaces<T, PassSm90Stages<T>>;
  using Base::arguments;
  using Base::barriers;
  using Base::Base;
  using Base::done;
  using Base::far_half;
  using Base::mainloops;
  using Base::near_half;
  using Base::range;
  using Base::slot;
  using Base::smem;
  using Base::steps;
  using Base::tile;
  static constexpr int kPrefetchedSteps = 2;  // by which the mask is asked for before it is loaded

  // By one thread: all but the mask, in the order in which it is read.
  __device__ __forceinline__ void load_xyz() const {
    if (steps == 0) return;
    auto ring = RingCursor<T::kSliceStages>::after(done * Base::kStepSlots);
    auto const load = [&](TmaTensor const& tensor, auto rows, auto columns, int row, int column, int head) {
      wait(barriers().slots().empty(ring.stage), ring.phase ^ 1);
      fill_stage<decltype(rows)::value, decltype(columns)::value>(
          slot(ring.stage), tensor, barriers().slots().full(ring.stage), row, column, head, tile.batch);
      ring.advance();
    };
    auto const load_y = [&](Cursor const& now) {
#pragma unroll 1
      for (int i = 0; i < T::kDepthSlices; ++i) {
        load(arguments.y[0], std::integral_constant<int, T::kBlockColumns>{},
             std::integral_constant<int, T::kSliceDepth>{}, near_half(now.tile), i * T::kSliceDepth, now.head);
      }
    };
    auto const load_z = [&](int row, int head) {
#pragma unroll 1
      for (int i = 0; i < T::kDepthSlices; ++i) {
        load(arguments.z, std::integral_constant<int, T::kZRows>{}, std::integral_constant<int, T::kColumns>{},
             row + i * T::kZRows, tile.value_slice * T::kColumns, head);
      }
    };
    Cursor now = range.begin();
    load_y(now);
    barriers().x_ring().producer_acquire(mainloops);
    fill_stage<T::kBlockRows, T::kDepth>(smem, arguments.x[0], barriers().x_ring().full(0),
                                         tile.row_block * T::kBlockRows, 0, this->kv_head, tile.batch);
#pragma unroll 1
    for (int step = 1; step <= steps; ++step) {
      Cursor const last = now;
      load_z(near_half(last.tile), last.head);
      range.next(now);
      if (step < steps) load_y(now);
      load_z(far_half(last.tile), last.head);
    }
  }
  // By a whole warp for each consumer warpgroup: its rows of the mask, and the factors of columns.
  __device__ __forceinline__ void load_mask(int group) const {
    auto const& common = arguments.common;
    auto const ring = barriers().mask_ring(group);
    auto masks = RingCursor<T::kStages>::after(done);
    int const key = tile.row_block * T::kBlockRows + group * kWarpgroupRows;
    bool const leads = lane_index() == 0, prefetches = leads && tile.batch == 0;
    Cursor now = range.begin(), ahead = now;
    for (int step = 0; step < steps && step < kPrefetchedSteps; ++step) range.next(ahead);
#pragma unroll 1
    for (int step = 0; step < steps; ++step, range.next(now), range.next(ahead)) {
      int const query = near_half(now.tile), place = masks.stage * T::kWarpgroups + group;
      wait(ring.empty(masks.stage), masks.phase ^ 1);
      if (leads) {
        expect_tx(ring.full(masks.stage), T::kBlockColumns * kWarpgroupRows * 2);
        load_tile<T::kBlockColumns, kWarpgroupRows>(
            smem + T::kMaskOffset + masks.stage * T::kMaskBytes + group * T::kBlockColumns * kSwizzleRowBytes,
            arguments.mask, ring.full(masks.stage), query, key, now.head, 0);
      }
      if (prefetches && step + kPrefetchedSteps < steps) {
        tma_prefetch(arguments.mask.descriptor, key, near_half(ahead.tile), ahead.head * arguments.mask.head_step, 0);
      }
      float const* const factors = common.base + common.lse_delta_offset(tile.batch, now.head) + query;
      for (int i = 2 * lane_index(); i < T::kBlockColumns; i += 64) {
        float2 const pair = *reinterpret_cast<float2 const*>(factors + i);
        store_shared_float2(smem + T::kFactorOffset + place * T::kFactorBytes + 4 * i,
                            make_float2(pair.x * common.params.scale, pair.y * common.params.scale));
      }
      if (warp_arrives()) arrive(ring.full(masks.stage));
      masks.advance();
    }
  }
};

}  // namespace attention_autotuner

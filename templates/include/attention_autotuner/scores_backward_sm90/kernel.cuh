// The kernel of a pass of retnet's backward in family sm90: warpgroups take their roles, CTAs their tiles.
#pragma once

#include <type_traits>

#include "attention_autotuner/common/scheduler.cuh"
#include "attention_autotuner/scores_backward_sm90/mainloop.cuh"
#include "attention_autotuner/scores_backward_sm90/producer.cuh"
#include "attention_autotuner/scores_backward_sm90/shared_scores.cuh"
#include "attention_autotuner/scores_backward_sm90/shared_scores_producer.cuh"
#include "attention_autotuner/sm90/cluster.cuh"
#include "attention_autotuner/sm90/roles.cuh"

namespace attention_autotuner {

// CTAs are persistent: each takes a tile of every round, the rounds in alternating direction, so that the longer tiles
// fall to other CTAs each time. The first CTAs have one more tile where tiles are not shared out evenly.
//
// The passes do not wait for each other: each starts as CTAs of the one before end. The first waits for the factors,
// and all end in order, so that waiting for the last is waiting for all. Where dQ's stores scores, dK's lets the next
// start only after it has waited for the dQ of its band: what a later dQ finds in flight is the dK before it alone,
// which reads the other band.
template <typename T>
__global__ void __launch_bounds__(T::kThreads, 1)
    scores_backward_sm90(PassArguments<T> const __grid_constant__ arguments, TileList const list) {
  extern __shared__ char smem_bytes[];
  uint32_t const smem = aligned_shared(smem_bytes);
  if constexpr (T::kSharesScores) {
    if (threadIdx.x == 0) SharedScoresBarriers<T>{smem}.init_barriers();
    cluster_sync();
  } else {
    if (threadIdx.x == 0) PassSm90Barriers<T>{smem}.init_barriers();
    __syncthreads();
  }
  // All roles visit the same tiles, and count the stages that they have used.
  auto for_each_tile = [&](auto role, auto&& use) {
    int const ctas = int(gridDim.x);
    int done = 0, mainloops = 0, place = list.tiles / ctas % 2 == 0 ? int(blockIdx.x) : ctas - 1 - int(blockIdx.x);
#pragma unroll 1
    for (int first = 0; first < list.tiles; first += ctas, place = ctas - 1 - place) {
      if (first + place >= list.tiles) continue;
      TileCoordinates tile = tile_coordinates<T::kLongestFirst, T::kSlices, true>(first + place, list);
      if constexpr (T::kStoresScores) {
        tile.head += arguments.band.first_head;
        tile.batch += arguments.band.first_batch;
      }
      typename decltype(role)::Type work(arguments, smem, tile, list, done, mainloops);
      use(work);
      if (work.steps > 0) {
        done += arguments.mainloops * work.steps;
        mainloops += arguments.mainloops;
      }
    }
  };
  bool first_pass = T::kResult == Result::kDq;
  if constexpr (T::kStoresScores) first_pass = arguments.band.first;
  if (!first_pass && threadIdx.x == 0) launch_dependent_grids();
  if (threadIdx.x < kWarpgroupThreads) {
    cutlass::arch::warpgroup_reg_dealloc<T::kProducerRegisters>();
    if constexpr (T::kSharesScores) {
      Role<SharedScoresLoads<T>> loads;
      if (threadIdx.x == 0) for_each_tile(loads, [](auto const& work) { work.load_xyz(); });
      int const group = int(threadIdx.x) / 32 - 1;
      if (group >= 0 && group < T::kWarpgroups) {
        for_each_tile(loads, [group](auto const& work) { work.load_mask(group); });
      }
    } else {
      Role<PassSm90Stages<T>> loads;
      if (threadIdx.x == 0) for_each_tile(loads, [](auto const& work) { work.load_xy(); });
      if (threadIdx.x / 32 == 1) for_each_tile(loads, [](auto const& work) { work.load_mask(); });
      if (threadIdx.x == 64) for_each_tile(loads, [](auto const& work) { work.load_z(); });
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<T::kConsumerRegisters>();
    if (first_pass) {
      wait_on_dependent_grids();
      launch_dependent_grids();
    }
    if constexpr (T::kPingPong) ping_pong_begin<T::kWarpgroups>();
    using Consumer = std::conditional_t<T::kSharesScores, SharedScoresConsumer<T>, PassSm90Consumer<T>>;
    for_each_tile(Role<Consumer>{}, [](auto& work) {
      work.mainloop();
      work.write();
    });
    if constexpr (T::kPingPong) ping_pong_end();
    if (!first_pass) wait_on_dependent_grids();
  }
  // No CTA ends while the other of its cluster may still store to its shared memory.
  if constexpr (T::kSharesScores) cluster_sync();
}

}  // namespace attention_autotuner

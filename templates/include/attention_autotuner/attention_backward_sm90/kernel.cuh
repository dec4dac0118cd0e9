// The kernel of a pass of attention's backward of family sm90: its warpgroups' roles, and the tiles that a CTA takes.
#pragma once

#include "attention_autotuner/attention_backward_sm90/dq_sender.cuh"
#include "attention_autotuner/attention_backward_sm90/dq_share.cuh"
#include "attention_autotuner/attention_backward_sm90/mainloop.cuh"
#include "attention_autotuner/attention_backward_sm90/producer.cuh"
#include "attention_autotuner/attention_backward_sm90/shared_rows.cuh"
#include "attention_autotuner/attention_backward_sm90/tiles.cuh"
#include "attention_autotuner/attention_backward_sm90/traits.cuh"
#include "attention_autotuner/attention_forward_sm90/wgmma.cuh"
#include "attention_autotuner/sm90/roles.cuh"

namespace attention_autotuner::softmax_backward {

// The warpgroup that computes and adds the CTA's share of dQ, where it has one of its own.
template <typename T>
struct BackwardPassSm90Dq : BackwardPassSm90Stages<T> {
  using Base = BackwardPassSm90Stages<T>;
  using Base::arguments;
  using Base::Base;
  using Base::begin;
  using Base::empty;
  using Base::end;
  using Base::full;
  using Base::range;

  DqShareSm90<T> share;
  using Stored = BarrierRing<T::kDsStages>;

  __device__ __forceinline__ void run() {
    if (Base::steps() == 0) return;
    Base::wait_for_rows(0);
    Cursor now = range.begin();
#pragma unroll 1
    for (int index = begin; index < end; ++index, range.next(now)) {
      int64_t const tile = dq_tile_index<T>(*this, now);
      int const stage = Stored::stage(index);
      wait(full(T::kDsBarrier, stage), Stored::phase(index));
      share.issue(Base::ds_tile(stage), Base::x0_tile(), 0, 0);
      DqSemaphore<T> const semaphore(*this, tile, now, 0, kWarpgroupBarrier + T::kWarpgroups);
#pragma unroll
      for (int row = 0; row < T::kBlockColumns; row += kWarpgroupRows) {
#pragma unroll
        for (int column = 0; column < T::kDepth; column += T::kDqColumns) {
          if (row + column > 0) share.issue(Base::ds_tile(stage), Base::x0_tile(), row, column);
          warpgroup_wait<0>();
          if (row + kWarpgroupRows >= T::kBlockColumns && column + T::kDqColumns >= T::kDepth && warp_arrives()) {
            arrive(empty(T::kDsBarrier, stage));
          }
          if constexpr (T::kStoredDq) {
            if (row + column == 0) SentDq<T>::acquire(*this, index, 0);
            share.add(nullptr, row, column, SentDq<T>::tile(*this, index));
          } else {
            share.add(dq_tile<T>(arguments, tile), row, column, Base::dq_stage(0));
            share.send(dq_tile<T>(arguments, tile), row, column, Base::dq_stage(0));
          }
        }
      }
      if constexpr (T::kStoredDq) SentDq<T>::hand_over(*this, index, 0);
      semaphore.release();
    }
    if (warp_arrives()) Base::release_rows(0);
    if constexpr (T::kBulkDq) wait_for_reads();
  }
};

// The tiles of a consumer warpgroup. The kernel below calls it for signs alone: a call in place of its own loop gives
// other registers to kernels that have been timed.
template <typename T, typename Arguments>
__device__ __forceinline__ void consume_tiles(Arguments const& arguments, uint32_t smem, TileListOf<T> const& list,
                                              OutputTiles<T::kDynamic>& tiles, int group) {
  while (has_tile<T>(tiles, list)) {
    BackwardPassSm90Consumer<T> consumer(arguments, smem, list, tiles, group);
    consumer.mainloop();
    consumer.write();
    next_tile<T, true>(tiles, consumer.end, smem);
  }
}

// The tiles of a warpgroup that shares their rows.
template <typename T, typename Role, typename Arguments>
__device__ __forceinline__ void share_rows(Arguments const& arguments, uint32_t smem, TileListOf<T> const& list,
                                           OutputTiles<T::kDynamic>& tiles) {
  while (has_tile<T>(tiles, list)) {
    BackwardPassSm90SharedRows<T, Role> consumer(arguments, smem, list, tiles);
    consumer.mainloop();
    consumer.write();
    next_tile<T, true>(tiles, consumer.end, smem);
  }
}

template <typename Config, typename T>
__global__ void __launch_bounds__(T::kThreads, 1)
    attention_backward_sm90(ArgumentsOfPass<T> const __grid_constant__ arguments, TileListOf<T> const list) {
  extern __shared__ char smem_bytes[];
  using Stages = BackwardPassSm90Stages<T>;
  uint32_t const smem = aligned_shared(smem_bytes);
  int const warpgroup = __shfl_sync(0xffffffffu, int(threadIdx.x) / kWarpgroupThreads, 0);
  OutputTiles<T::kDynamic> tiles;
  if (threadIdx.x == 0) {
    prefetch_descriptor(arguments.x0.descriptor);
    prefetch_descriptor(arguments.y0.descriptor);
    prefetch_descriptor(arguments.y1.descriptor);
    if (T::kHasDs) prefetch_descriptor(arguments.x1.descriptor);
    if constexpr (T::kMasked) prefetch_descriptor(arguments.mask.descriptor);
    if constexpr (T::kTmaStores) {
      prefetch_descriptor(arguments.dk.descriptor);
      prefetch_descriptor(arguments.dv.descriptor);
    }
    Stages::init_barriers(smem);
  }
  __syncthreads();
  if constexpr (T::kListed) Stages::wait_for_preprocess();  // beside which blocks are listed, or spans found
  if constexpr (T::kPacked && !T::kClaimsFirst) {
    if (tiles.tile() >= count_tiles<true>(list)) return;  // there are more CTAs than blocks of rows
  }
  if (warpgroup == 0) {
    softmax_forward::give_registers<T::kProducerRegisters>();
    bool const sends =
        (T::kDqSenders > 0 && threadIdx.x == kDqSender) || (T::kDqSenders > 1 && threadIdx.x == kOtherDqSender);
    if (!sends && (T::kPacked ? threadIdx.x >= 64
                              : threadIdx.x != 0 && threadIdx.x != 32 && !(T::kMasked && threadIdx.x == 64))) {
      return;
    }
    [[maybe_unused]] int phase = 0;
    // As at the end of the loop: one lambda for both gives other machine code to kernels that have been timed.
    if constexpr (T::kClaimsFirst) {
      if (T::kPacked ? threadIdx.x < 32 : threadIdx.x == 0) {
        Stages::wait_for_preprocess();
        claim_tile<T>(tiles, 0, smem, list.claimed);
      } else if (sends) {
        next_tile<T, false>(tiles, 0, smem);
      } else {
        next_tile<T, T::kPacked>(tiles, 0, smem);
      }
    }
    while (has_tile<T>(tiles, list)) {
      Stages const stages(arguments, smem, list, tiles);
      if (sends) {
        if constexpr (T::kQueuedDq) {
          queue_dq_shares<T>(stages);
        } else if constexpr (T::kStoredDq) {
          send_dq_shares<T>(stages);
        }
        count_head<T>(stages);
      } else if constexpr (T::kPacked) {
        if (threadIdx.x < 32) {
          stages.template load_packed<0>(phase);
        } else {
          stages.template load_packed<1>(phase);
        }
      } else if (threadIdx.x == 0) {
        stages.load_first();
      } else if (T::kMasked && threadIdx.x == 64) {
        if constexpr (T::kMasked) stages.load_mask();
      } else {
        stages.load_second();
      }
      if constexpr (!T::kDynamic) {
        tiles.next(stages.end);
      } else if (T::kPacked ? threadIdx.x < 32 : threadIdx.x == 0) {
        Stages::wait_for_preprocess();  // which clears the counter of claims
        claim_tile<T>(tiles, stages.end, smem, list.claimed);
      } else if (sends) {
        next_tile<T, false>(tiles, stages.end, smem);
      } else {
        next_tile<T, T::kPacked>(tiles, stages.end, smem);
      }
    }
    if constexpr (T::kEarly) wait_on_dependent_grids();  // as those without a step, and later passes, have not
  } else if (T::kOwnDq && warpgroup == 1 + T::kWarpgroups) {
    if constexpr (T::kOwnDq) {
      softmax_forward::give_registers<T::kDqRegisters>();
      first_tile<T>(tiles, smem);
      while (has_tile<T>(tiles, list)) {
        BackwardPassSm90Dq<T> share(arguments, smem, list, tiles);
        share.run();
        if constexpr (T::kBulkDq) {
          if (lane_index() == 0) count_head<T>(share);
        }
        next_tile<T, true>(tiles, share.end, smem);
      }
    }
  } else {
    softmax_forward::take_registers<T::kConsumerRegisters>();
    first_tile<T>(tiles, smem);
    if constexpr (T::kSharedRows) {
      if (warpgroup == 1) {
        share_rows<T, OfValues<T>>(arguments, smem, list, tiles);
      } else {
        share_rows<T, OfKeys<T>>(arguments, smem, list, tiles);
      }
    } else {
      if constexpr (T::kSignsAlone) {
        if (arguments.common.params.r_grad)
          return consume_tiles<WithSigns<T>>(arguments, smem, list, tiles, warpgroup - 1);
      }
      while (has_tile<T>(tiles, list)) {
        BackwardPassSm90Consumer<T> consumer(arguments, smem, list, tiles, warpgroup - 1);
        consumer.mainloop();
        consumer.write();
        next_tile<T, true>(tiles, consumer.end, smem);
      }
      if constexpr (T::kTmaStores) wait_for_reads();  // before the warp ends
    }
  }
}

}  // namespace attention_autotuner::softmax_backward

// A pass of attention's backward for compute capability 9.0, by WGMMA, with tiles loaded by TMA into rings of stages.
//
// A CTA has a block of rows: 64 for each of its consumer warpgroups, all of whose results stay in registers. P and dS
// are operands from registers; where the CTA adds a share of dQ, dS goes through shared memory as well, transposed, to
// the warpgroups that compute it.
#pragma once

#include "attention_autotuner/attention_backward_sm90/dq_share.cuh"
#include "attention_autotuner/attention_backward_sm90/producer.cuh"
#include "attention_autotuner/attention_backward_sm90/scores.cuh"
#include "attention_autotuner/attention_backward_sm90/traits.cuh"
#include "attention_autotuner/attention_forward_sm90/wgmma.cuh"
#include "attention_autotuner/scores_backward_sm90/epilogue.cuh"

namespace attention_autotuner::softmax_backward {

// Named barriers: of all consumers, and of each warpgroup.
inline constexpr int kConsumerBarrier = 1;
inline constexpr int kWarpgroupBarrier = 2;

// A consumer warpgroup.
template <typename T>
struct BackwardPassSm90Consumer : BackwardPassSm90Scores<T> {
  using Base = BackwardPassSm90Scores<T>;
  using Element = typename T::Element;
  using Base::arguments;
  using Base::Base;
  using Base::base_of;
  using Base::batch;
  using Base::dp;
  using Base::ds;
  using Base::ds_tile;
  using Base::empty;
  using Base::full;
  using Base::group;
  using Base::p;
  using Base::range;
  using Base::row_block;
  using Base::s;
  using Base::shift_of;
  using Base::steps;
  using Base::x0_tile;
  using Base::x1_tile;
  using Base::y0_tile;
  using Base::y1_tile;

  float dq_or_dk[T::kHasDs ? T::kDepth / 2 : 1], dv[T::kHasDv ? T::kColumns / 2 : 1];
  DqShareSm90<T> share;
  RingCursor<T::kFirstStages> first;                   // of Y0, for the next S
  RingCursor<T::kSecondStages> second;                 // of Y1, for the next dP
  RingCursor<T::kSharesDq ? T::kDsStages : 1> stored;  // of dS
  int first_now = 0, second_now = 0;                   // stages of Y0 and of Y1 of this step
  int first_held, second_held;                         // and of the one before, while its results are in flight

  // --- MMAs ----------------------------------------------------------------------------------------------------------

  // scores = X Y^T, this warpgroup's rows of X.
  template <int Depth>
  __device__ __forceinline__ void issue_product(float (&scores)[T::kBlockColumns / 2], uint32_t x, uint32_t y) {
    constexpr int kBlockSteps = kSwizzleColumns / kMmaDepth;
    uint64_t const x_desc = make_smem_desc(x + group * kWarpgroupRows * kSwizzleRowBytes, 0);
    uint64_t const y_desc = make_smem_desc(y, 0);
    warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < Depth / kMmaDepth; ++step) {
      int const block = step / kBlockSteps, within = step % kBlockSteps * kMmaDepth * 2;
      Wgmma<T::kBlockColumns>::template ss<Element, 0>(
          scores, advance_desc(x_desc, block * T::kBlockRows * kSwizzleRowBytes + within),
          advance_desc(y_desc, block * T::kBlockColumns * kSwizzleRowBytes + within), step > 0);
    }
    warpgroup_commit_batch();
  }
  // result += A Y, A in registers.
  template <int Columns>
  __device__ __forceinline__ static void issue_result(float (&result)[Columns / 2], uint32_t const* a, uint32_t y) {
    uint64_t const y_desc = make_smem_desc(y, T::kBlockColumns * kSwizzleRowBytes);
#pragma unroll
    for (int step = 0; step < T::kBlockColumns / kMmaDepth; ++step) {
      Wgmma<Columns>::template rs<Element, 1>(result, a + 4 * step,
                                              advance_desc(y_desc, step * kMmaDepth * kSwizzleRowBytes), 1);
    }
  }

  __device__ __forceinline__ void issue_scores() {
    wait(full(T::kY0Barrier, first.stage), first.phase);
    issue_product<T::kDepth>(s, x0_tile(), y0_tile(first.stage));
    first.advance();
  }
  // Waits for Y1, for dV as well.
  __device__ __forceinline__ void issue_dp() {
    wait(full(T::kY1Barrier, second.stage), second.phase);
    if constexpr (T::kHasDs) issue_product<T::kColumns>(dp, x1_tile(), y1_tile(second.stage));
    second.advance();
  }
  __device__ __forceinline__ void issue_results() {
    warpgroup_arrive();
    if constexpr (T::kHasDv) issue_result<T::kColumns>(dv, p, y1_tile(second_now));
    if constexpr (T::kHasDs) issue_result<T::kDepth>(dq_or_dk, ds, y0_tile(first_now));
    warpgroup_commit_batch();
    first_held = first_now;
    second_held = second_now;
    first_now = first_now + 1 == T::kFirstStages ? 0 : first_now + 1;
    second_now = second_now + 1 == T::kSecondStages ? 0 : second_now + 1;
  }
  // Once the results of a step are complete.
  __device__ __forceinline__ void finish_results() {
    if constexpr (T::kHasDv) fence_accumulators(dv);
    if constexpr (T::kHasDs) fence_accumulators(dq_or_dk);
    if (warp_arrives()) {
      arrive(empty(T::kY0Barrier, first_held));
      arrive(empty(T::kY1Barrier, second_held));
    }
  }

  // --- the share of dQ -----------------------------------------------------------------------------------------------

  __device__ __forceinline__ void store_ds() {
    if constexpr (T::kOwnDq) {
      wait(empty(T::kDsBarrier, stored.stage), stored.phase ^ 1);
      Base::store_ds(ds_tile(stored.stage));
      if (warp_arrives()) arrive(full(T::kDsBarrier, stored.stage));
      stored.advance();
    } else if constexpr (T::kKeysDq) {
      if constexpr (T::kDsStages == 1) named_barrier(kConsumerBarrier, T::kWarpgroups * kWarpgroupThreads);
      Base::store_ds(ds_tile(stored.stage));
    }
  }
  __device__ __forceinline__ int dq_row() const { return T::kSplitsDqColumns ? 0 : group * kWarpgroupRows; }
  __device__ __forceinline__ int dq_column() const { return T::kSplitsDqColumns ? group * T::kDqColumns : 0; }
  __device__ __forceinline__ void issue_dq() {
    if constexpr (T::kKeysDq) {
      named_barrier(kConsumerBarrier, T::kWarpgroups * kWarpgroupThreads);
      share.issue(ds_tile(stored.stage), x0_tile(), dq_row(), dq_column());
      stored.advance();
    }
  }
  __device__ __forceinline__ void add_dq(Cursor const& now) {
    if constexpr (T::kKeysDq) {
      fence_accumulators(share.sums);
      int64_t const tile = dq_tile_index(arguments, batch, now);
      DqTurn<T> const turn(arguments, tile, group, row_block, kWarpgroupBarrier + group);
      share.add(dq_tile<T>(arguments, tile), dq_row(), dq_column());
      turn.end();
    }
  }

  // --- steps ---------------------------------------------------------------------------------------------------------

  // Operands of a step's results from its scores, all of it with nothing else in flight.
  __device__ __forceinline__ void score_alone(Cursor const& now) {
    issue_scores();
    issue_dp();
    warpgroup_wait<T::kHasDs ? 1 : 0>();
    fence_accumulators(s);
    Base::exponentiate(base_of(first_now), now);
    warpgroup_wait<0>();
    if constexpr (T::kHasDs) fence_accumulators(dp);
    Base::differentiate(shift_of(second_now));
    Base::pack();
    store_ds();
  }
  // Results of a step, all of it with nothing else in flight.
  __device__ __forceinline__ void results_alone(Cursor const& now) {
    issue_results();
    issue_dq();
    warpgroup_wait<0>();
    finish_results();
    add_dq(now);
  }
  // Results of the step `before`, and the scores of `now` beside them. No MMA is in flight when the loop comes around:
  // the assembler would wait for each.
  __device__ __forceinline__ void step_ahead(Cursor const& before, Cursor const& now) {
    constexpr bool kBoth = T::kOrder == IssueOrder::kBothAhead;
    constexpr int kResults = T::kKeysDq ? 2 : 1;  // groups
    issue_scores();
    if constexpr (kBoth) issue_dp();
    issue_results();
    issue_dq();
    warpgroup_wait<kResults + kBoth>();
    fence_accumulators(s);
    Base::exponentiate(base_of(first_now), now);
    if constexpr (kBoth) {
      warpgroup_wait<kResults>();
      fence_accumulators(dp);
      Base::differentiate(shift_of(second_now));
    }
    warpgroup_wait<0>();
    finish_results();
    if constexpr (!kBoth) issue_dp();
    add_dq(before);
    if constexpr (!kBoth && T::kHasDs) {
      warpgroup_wait<0>();
      fence_accumulators(dp);
      Base::differentiate(shift_of(second_now));
    }
    Base::pack();
    store_ds();
  }

  __device__ __forceinline__ void mainloop() {
    if constexpr (T::kHasDs) {
#pragma unroll
      for (int i = 0; i < T::kDepth / 2; ++i) dq_or_dk[i] = 0.0f;
    }
    if constexpr (T::kHasDv) {
#pragma unroll
      for (int i = 0; i < T::kColumns / 2; ++i) dv[i] = 0.0f;
    }
    if (steps == 0) return;
    Base::load_row_values();
    wait(full(T::kXBarrier, 0), 0);
    if constexpr (T::kHasDs) wait(full(T::kXBarrier, 1), 0);
    Cursor now = range.begin();
    if constexpr (T::kOrder == IssueOrder::kSerial) {
#pragma unroll 1
      for (int index = 0; index < steps; ++index, range.next(now)) {
        score_alone(now);
        results_alone(now);
      }
    } else {
      score_alone(now);
#pragma unroll 1
      for (int index = 1; index < steps; ++index) {
        Cursor const before = now;
        range.next(now);
        step_ahead(before, now);
      }
      results_alone(now);
    }
  }

  __device__ __forceinline__ void write() const {
    auto const& common = arguments.common;
    auto const& params = common.params;
    int const row = Base::lane_row();
    if constexpr (T::kByQueries) {
      write_result<Element>(dq_or_dk, common, params.dq, nullptr, T::kDepth, params.dim_qk, params.softmax_scale, batch,
                            Base::head, 0, params.seqlen_q, row, 0);
    } else {
      if constexpr (T::kHasDs) {
        write_result<Element>(dq_or_dk, common, params.dk, common.dk_partial, T::kDepth, params.dim_qk,
                              params.softmax_scale, batch, Base::kv_head, Base::split, params.seqlen_k, row, 0);
      }
      if constexpr (T::kHasDv) {
        write_result<Element>(dv, common, params.dv, common.dv_partial, T::kColumns, params.dim_v, 1.0f, batch,
                              Base::kv_head, Base::split, params.seqlen_k, row, 0);
      }
    }
  }
};

// The warpgroup that computes and adds the CTA's share of dQ, where it has one of its own.
template <typename T>
struct BackwardPassSm90Dq : BackwardPassSm90Stages<T> {
  using Base = BackwardPassSm90Stages<T>;
  using Base::arguments;
  using Base::Base;
  using Base::batch;
  using Base::empty;
  using Base::full;
  using Base::range;
  using Base::steps;

  DqShareSm90<T> share;
  RingCursor<T::kDsStages> stored;

  __device__ __forceinline__ void run() {
    if (steps == 0) return;
    wait(full(T::kXBarrier, 0), 0);
    Cursor now = range.begin();
#pragma unroll 1
    for (int index = 0; index < steps; ++index, range.next(now)) {
      int64_t const tile = dq_tile_index(arguments, batch, now);
      wait(full(T::kDsBarrier, stored.stage), stored.phase);
      share.issue(Base::ds_tile(stored.stage), Base::x0_tile(), 0, 0);
      DqTurn<T> const turn(arguments, tile, 0, Base::row_block, kWarpgroupBarrier + T::kWarpgroups);
#pragma unroll
      for (int row = 0; row < T::kBlockColumns; row += kWarpgroupRows) {
#pragma unroll
        for (int column = 0; column < T::kDepth; column += T::kDqColumns) {
          if (row + column > 0) share.issue(Base::ds_tile(stored.stage), Base::x0_tile(), row, column);
          warpgroup_wait<0>();
          if (row + kWarpgroupRows >= T::kBlockColumns && column + T::kDqColumns >= T::kDepth && warp_arrives()) {
            arrive(empty(T::kDsBarrier, stored.stage));
          }
          share.add(dq_tile<T>(arguments, tile), row, column);
        }
      }
      turn.end();
      stored.advance();
    }
  }
};

template <typename Config, typename T>
__global__ void __launch_bounds__(T::kThreads, 1)
    attention_backward_sm90(BackwardPassSm90Arguments const __grid_constant__ arguments, TileList const list) {
  extern __shared__ char smem_bytes[];
  uint32_t const smem = aligned_shared(smem_bytes);
  int const warpgroup = __shfl_sync(0xffffffffu, int(threadIdx.x) / kWarpgroupThreads, 0);
  if (threadIdx.x == 0) {
    prefetch_descriptor(arguments.x0.descriptor);
    prefetch_descriptor(arguments.y0.descriptor);
    prefetch_descriptor(arguments.y1.descriptor);
    if (T::kHasDs) prefetch_descriptor(arguments.x1.descriptor);
    BackwardPassSm90Stages<T>(arguments, smem, list).init_barriers();
  }
  __syncthreads();
  if (warpgroup == 0) {
    softmax_forward::give_registers<T::kProducerRegisters>();
    BackwardPassSm90Stages<T> const stages(arguments, smem, list);
    if (threadIdx.x == 0) stages.load_first();
    if (threadIdx.x == 32) stages.load_second();
  } else if (T::kOwnDq && warpgroup == 1 + T::kWarpgroups) {
    if constexpr (T::kOwnDq) {
      softmax_forward::give_registers<T::kDqRegisters>();
      BackwardPassSm90Dq<T>(arguments, smem, list).run();
    }
  } else {
    softmax_forward::take_registers<T::kConsumerRegisters>();
    BackwardPassSm90Consumer<T> consumer(arguments, smem, list, warpgroup - 1);
    consumer.mainloop();
    consumer.write();
  }
}

}  // namespace attention_autotuner::softmax_backward

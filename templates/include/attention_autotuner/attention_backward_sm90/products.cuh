// The MMAs of a consumer warpgroup of attention's backward: scores, results, and the CTA's share of dQ.
#pragma once

#include <type_traits>

#include "attention_autotuner/attention_backward_sm90/dq_share.cuh"
#include "attention_autotuner/attention_backward_sm90/producer.cuh"
#include "attention_autotuner/attention_backward_sm90/retnet_scores.cuh"
#include "attention_autotuner/attention_backward_sm90/scores.cuh"
#include "attention_autotuner/attention_backward_sm90/traits.cuh"
#include "attention_autotuner/attention_forward_sm90/wgmma.cuh"
#include "attention_autotuner/common/shared_memory.cuh"

namespace attention_autotuner::softmax_backward {

template <typename T>
using ScoresOf = std::conditional_t<T::kRetNet, BackwardPassSm90RetNet<T>, BackwardPassSm90Scores<T>>;

// Results and MMAs of a consumer warpgroup.
template <typename T>
struct BackwardPassSm90Products : ScoresOf<T> {
  using Base = ScoresOf<T>;
  using Element = typename T::Element;
  using Base::arguments;
  using Base::Base;
  using Base::batch;
  using Base::begin;
  using Base::dp;
  using Base::ds;
  using Base::ds_tile;
  using Base::empty;
  using Base::full;
  using Base::group;
  using Base::p;
  using Base::row_block;
  using Base::s;
  using Base::x0_tile;
  using Base::x1_tile;
  using Base::y0_tile;
  using Base::y1_tile;

  float dq_or_dk[T::kHasDs ? T::kDepth / 2 : 1], dv[T::kHasDv ? T::kColumns / 2 : 1];
  uint32_t x0[T::kHeldRows ? T::kDepth / 4 : 1], x1[T::kHeldRows && T::kHasDs ? T::kColumns / 4 : 1];
  DqShareSm90<T> share;

  using typename Base::First;
  using typename Base::Second;
  using Stored = BarrierRing<T::kSharesDq ? T::kDsStages : 1>;  // of dS

  // --- MMAs ----------------------------------------------------------------------------------------------------------

  // Of wide head dims and where registers are few: hides where addresses come from, so that descriptors are computed
  // where they are used and not kept in registers.
  static constexpr bool kHidesAddresses = T::kRetNet || T::kOrder == IssueOrder::kInterleaved || T::kByTurns;

  // This warpgroup's rows of X as operands.
  template <int Depth>
  __device__ __forceinline__ void load_fragments(uint32_t (&fragments)[Depth / 4], uint32_t x) const {
    int const matrix = lane_index() / 8, key = lane_index() & 7;
    int const row = group * kWarpgroupRows + 16 * softmax_forward::warp_in_warpgroup() + 8 * (matrix % 2) + key;
#pragma unroll
    for (int step = 0; step < Depth / kMmaDepth; ++step) {
      uint32_t words[4];
      load_matrix_x4(words, swizzled_address<T::kBlockRows>(x, row, 2 * step + matrix / 2, key));
#pragma unroll
      for (int i = 0; i < 4; ++i) fragments[4 * step + i] = words[i];
    }
    softmax_forward::fence_operands(fragments);
  }
  // scores = X Y^T, X in registers.
  template <int Depth>
  __device__ __forceinline__ void issue_product(float (&scores)[T::kBlockColumns / 2], uint32_t const (&x)[Depth / 4],
                                                uint32_t y) {
    uint64_t const y_desc = make_smem_desc(y, 0);
    warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < Depth / kMmaDepth; ++step) {
      int const block = step * kMmaDepth / kSwizzleColumns, within = step * kMmaDepth % kSwizzleColumns * 2;
      Wgmma<T::kBlockColumns>::template rs<Element, 0>(
          scores, x + 4 * step, advance_desc(y_desc, block * T::kBlockColumns * kSwizzleRowBytes + within), step > 0);
    }
    warpgroup_commit_batch();
  }
  // scores = X Y^T, this warpgroup's rows of X.
  template <int Depth>
  __device__ __forceinline__ void issue_product(float (&scores)[T::kBlockColumns / 2], uint32_t x, uint32_t y) {
    constexpr int kBlockSteps = kSwizzleColumns / kMmaDepth;
    if constexpr (Depth > 128 || kHidesAddresses) asm volatile("" : "+r"(x), "+r"(y));
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
    if constexpr (kHidesAddresses) asm volatile("" : "+r"(y));
    uint64_t const y_desc = make_smem_desc(y, T::kBlockColumns * kSwizzleRowBytes);
#pragma unroll
    for (int step = 0; step < T::kBlockColumns / kMmaDepth; ++step) {
      Wgmma<Columns>::template rs<Element, 1>(result, a + 4 * step,
                                              advance_desc(y_desc, step * kMmaDepth * kSwizzleRowBytes), 1);
    }
  }

  // Waits for Y0, for dK as well. Those who wait for a group that is not there wait for nothing.
  __device__ __forceinline__ void issue_scores(int index) {
    int const stage = First::stage(index);
    wait(full(T::kY0Barrier, stage), First::phase(index));
    if constexpr (T::kTakesScores && T::kHeldRows) {
      issue_product<T::kDepth>(s, x0, y0_tile(stage));
    } else if constexpr (T::kTakesScores) {
      issue_product<T::kDepth>(s, x0_tile(), y0_tile(stage));
    }
  }
  // Waits for Y1, for dV as well, unless that was issued before.
  __device__ __forceinline__ void wait_for_second(int index) {
    wait(full(T::kY1Barrier, Second::stage(index)), Second::phase(index));
  }
  __device__ __forceinline__ void issue_dp(int index) {
    int const stage = Second::stage(index);
    wait_for_second(index);
    if constexpr (T::kHasDs && T::kHeldRows) {
      issue_product<T::kColumns>(dp, x1, y1_tile(stage));
    } else if constexpr (T::kHasDs) {
      issue_product<T::kColumns>(Base::dp_registers(), x1_tile(), y1_tile(stage));
    }
  }
  template <bool Dv, bool Ds>
  __device__ __forceinline__ void issue_results(int index) {
    warpgroup_arrive();
    if constexpr (Dv) issue_result<T::kColumns>(dv, p, y1_tile(Second::stage(index)));
    if constexpr (Ds) issue_result<T::kDepth>(dq_or_dk, Base::ds_registers(), y0_tile(First::stage(index)));
    warpgroup_commit_batch();
  }
  // Once the results of a step are complete.
  __device__ __forceinline__ void finish_results(int index) {
    if constexpr (T::kHasDv) fence_accumulators(dv);
    if constexpr (T::kHasDs) fence_accumulators(dq_or_dk);
    if (warp_arrives()) {
      arrive(empty(T::kY0Barrier, First::stage(index)));
      if constexpr (T::kOrder != IssueOrder::kInterleaved) arrive(empty(T::kY1Barrier, Second::stage(index)));
    }
  }

  // --- the share of dQ -----------------------------------------------------------------------------------------------

  __device__ __forceinline__ void store_ds(int index) {
    if constexpr (T::kSharesDq) {
      int const stage = Stored::stage(index);
      wait(empty(T::kDsBarrier, stage), Stored::phase(index) ^ 1);
      Base::store_ds(ds_tile(stage));
    }
  }
  // Apart, because the fence waits for the stores: MMAs that are issued between cover it.
  __device__ __forceinline__ void publish_ds(int index) {
    if constexpr (T::kSharesDq) {
      fence_view_async_shared();
      if (warp_arrives()) arrive(full(T::kDsBarrier, Stored::stage(index)));
    }
  }
  __device__ __forceinline__ int dq_row() const { return T::kSplitsDqColumns ? 0 : group * kWarpgroupRows; }
  __device__ __forceinline__ int dq_column() const { return T::kSplitsDqColumns ? group * T::kDqColumns : 0; }
  __device__ __forceinline__ auto& dq_sums() {
    if constexpr (T::kByTurns) {
      return this->s;
    } else {
      return share.sums;
    }
  }
  __device__ __forceinline__ void issue_dq(int index) {
    if constexpr (T::kKeysDq) {
      wait(full(T::kDsBarrier, Stored::stage(index)), Stored::phase(index));
      share.issue(dq_sums(), ds_tile(Stored::stage(index)), x0_tile(), dq_row(), dq_column());
    }
  }
  // Once it is complete: out of its registers.
  __device__ __forceinline__ void add_dq(int index, Cursor const& now) {
    if constexpr (T::kKeysDq) {
      fence_accumulators(dq_sums());
      if (warp_arrives()) arrive(empty(T::kDsBarrier, Stored::stage(index)));
      int64_t const tile = dq_tile_index<T>(*this, now);
      DqSemaphore<T> const semaphore(*this, tile, now, group, kWarpgroupBarrier + group);
      if constexpr (T::kStoredDq) SentDq<T>::acquire(*this, index, group);
      share.add(dq_sums(), dq_tile<T>(arguments, tile), dq_row(), dq_column(), Base::dq_stage(group));
      semaphore.release();
    }
  }
  __device__ __forceinline__ void send_dq(int index, Cursor const& now) {
    if constexpr (T::kKeysDq && T::kStoredDq) {
      SentDq<T>::hand_over(*this, index, group);
    } else if constexpr (T::kKeysDq) {
      share.send(dq_tile<T>(arguments, dq_tile_index<T>(*this, now)), dq_row(), dq_column(), Base::dq_stage(group));
    }
  }

  // --- tiles that a warpgroup does not see -------------------------------------------------------------------------

  // In the place of a step's scores where this warpgroup's keys see none of the tile, as those of the second do in the
  // first tile above the diagonal: zeros, also for results that are issued all the same.
  __device__ __forceinline__ void pass_zeros(int index) {
#pragma unroll
    for (int i = 0; i < T::kBlockColumns / 4; ++i) p[i] = Base::ds_registers()[i] = 0;
    if (T::kLateRows && index == begin) Base::wait_for_rows(1);
    if constexpr (T::kByTurns) {
      if (warp_arrives()) arrive(empty(T::kY1Barrier, Second::stage(index)));
    } else {
      wait_for_second(index);
    }
    wait(full(T::kY0Barrier, First::stage(index)), First::phase(index));
    store_ds(index);
  }
  // All of such a step, where results are issued for one step at a time.
  __device__ __forceinline__ void skip_step(int index, Cursor const& now) {
    pass_zeros(index);
    publish_ds(index);
    issue_dq(index);
    if (warp_arrives()) {
      arrive(empty(T::kY0Barrier, First::stage(index)));
      arrive(empty(T::kY1Barrier, Second::stage(index)));
    }
    warpgroup_wait<0>();
    add_dq(index, now);
  }
};

}  // namespace attention_autotuner::softmax_backward

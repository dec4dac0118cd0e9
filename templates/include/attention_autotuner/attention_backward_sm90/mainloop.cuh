// A pass of attention's backward for compute capability 9.0, by WGMMA, with tiles loaded by TMA into rings of stages.
//
// A CTA has a block of rows: 64 for each of its consumer warpgroups, all of whose results stay in registers. P and dS
// are operands from registers; where the CTA adds a share of dQ, dS goes through shared memory as well, transposed, to
// the warpgroups that compute it.
#pragma once

#include <type_traits>

#include "attention_autotuner/attention_backward_sm90/bias_sums.cuh"
#include "attention_autotuner/attention_backward_sm90/products.cuh"
#include "attention_autotuner/attention_backward_sm90/results.cuh"
#include "attention_autotuner/attention_backward_sm90/traits.cuh"
#include "attention_autotuner/attention_forward_sm90/wgmma.cuh"
#include "attention_autotuner/common/shared_memory.cuh"

namespace attention_autotuner::softmax_backward {

// A consumer warpgroup.
template <typename T>
struct BackwardPassSm90Consumer : BackwardPassSm90Products<T> {
  using Base = BackwardPassSm90Products<T>;
  using Element = typename T::Element;
  using Base::add_dq;
  using Base::arguments;
  using Base::Base;
  using Base::batch;
  using Base::begin;
  using Base::dp;
  using Base::dq_or_dk;
  using Base::dv;
  using Base::empty;
  using Base::end;
  using Base::finish_results;
  using Base::group;
  using Base::issue_dp;
  using Base::issue_dq;
  using Base::issue_scores;
  using Base::publish_ds;
  using Base::range;
  using Base::s;
  using Base::send_dq;
  using Base::share;
  using Base::store_ds;
  using Base::wait_for_second;
  using Base::x0;
  using Base::x0_tile;
  using Base::x1;
  using Base::x1_tile;
  using typename Base::First;
  using typename Base::Second;
  using Sums = BiasSums<T>;

  // --- steps ---------------------------------------------------------------------------------------------------------

  // Operands of a step's results from its scores, all of it with nothing else in flight. `First`: of the CTA's first
  // step, where X1 is on its way as TMA stores the results before.
  template <bool First = false>
  __device__ __forceinline__ void score_alone(int index, Cursor const& now) {
    issue_scores(index);
    if constexpr (First) Base::wait_for_rows(1);
    issue_dp(index);
    Base::find_bias(now);
    warpgroup_wait<T::kHasDs ? 1 : 0>();
    if constexpr (T::kTakesScores) fence_accumulators(s);
    Base::scores_to_p(index, now);
    warpgroup_wait<0>();
    finish_scores(index, now);
  }
  __device__ __forceinline__ void finish_scores(int index, Cursor const& now) {
    if constexpr (T::kHasDs) fence_accumulators(dp);
    Base::differentiate(index, now);
    Base::pack_p();
    Sums::add_near(*this, now);
    Base::pack_ds();
    store_ds(index);
  }
  // Results of a step, with nothing else in flight. With S alone ahead there are no registers for all results at a
  // time.
  template <bool Last = false>
  __device__ __forceinline__ void results_alone(int index, Cursor const& now) {
    constexpr bool kDqLast = T::kOrder == IssueOrder::kScoresAhead;
    Base::template issue_results<T::kHasDv, T::kHasDs>(index);
    publish_ds(index);
    if constexpr (!kDqLast) issue_dq(index);
    Sums::add_far(*this, now);
    warpgroup_wait<0>();
    finish_results(index);
    if constexpr (kDqLast) {
      issue_dq(index);
      if constexpr (Last) store_dv();
      warpgroup_wait<0>();
    } else if constexpr (Last) {
      store_dv();
    }
    add_dq(index, now);
    send_dq(index, now);
  }
  // Results of a step, and the scores of `now`, the next, beside them. No MMA is in flight when the loop comes around:
  // the assembler would wait for each. With S alone ahead, the share of dQ comes between, in the registers of dP.
  __device__ __forceinline__ void step_ahead(int index, Cursor const& before, Cursor const& now) {
    constexpr bool kBoth = T::kOrder == IssueOrder::kBothAhead;
    constexpr int kResults = kBoth && T::kKeysDq ? 2 : 1;  // groups
    issue_scores(index + 1);
    if constexpr (kBoth) issue_dp(index + 1);
    Base::template issue_results<T::kHasDv, T::kHasDs>(index);
    publish_ds(index);
    if constexpr (kBoth) issue_dq(index);
    Base::find_bias(now);
    Sums::add_far(*this, before);
    warpgroup_wait<kResults + kBoth>();
    if constexpr (T::kTakesScores) fence_accumulators(s);
    Base::scores_to_p(index + 1, now);
    if constexpr (kBoth) {
      warpgroup_wait<kResults>();
      fence_accumulators(dp);
      Base::differentiate(index + 1, now);
      warpgroup_wait<0>();
      finish_results(index);
      add_dq(index, before);
      send_dq(index, before);
      Base::pack_p();
      Sums::add_near(*this, now);
      Base::pack_ds();
      store_ds(index + 1);
    } else {
      warpgroup_wait<0>();
      finish_results(index);
      issue_dq(index);
      warpgroup_wait<0>();
      add_dq(index, before);
      issue_dp(index + 1);
      send_dq(index, before);
      warpgroup_wait<0>();
      finish_scores(index + 1, now);
    }
  }

  // A step whose P is in the place of S, and P of `next`, in the same place. dP comes with dV, which runs beside dS;
  // the next S comes with dK and dQ, which run beside its exponentials.
  template <bool Last>
  __device__ __forceinline__ void step_interleaved(int index, Cursor const& before, Cursor const& now,
                                                   Cursor const& next) {
    constexpr int kAfterScores = 1 + T::kKeysDq;  // groups
    Base::pack_p();
    issue_dp(index);
    Base::template issue_results<true, false>(index);
    if (index > begin) send_dq(index - 1, before);
    warpgroup_wait<1>();
    fence_accumulators(dp);
    Base::differentiate(index, now);
    Sums::add_near(*this, now);
    Base::pack_ds();
    store_ds(index);
    if constexpr (!Last) issue_scores(index + 1);
    Base::template issue_results<false, true>(index);
    publish_ds(index);
    issue_dq(index);
    if constexpr (!Last) Base::find_bias(next);
    Sums::add_far(*this, now);
    warpgroup_wait<kAfterScores>();
    if (warp_arrives()) arrive(empty(T::kY1Barrier, Second::stage(index)));
    if constexpr (!Last) {
      fence_accumulators(s);
      Base::scores_to_p(index + 1, next);
    }
    warpgroup_wait<0>();
    finish_results(index);
    if constexpr (Last) store_dv();
    add_dq(index, now);
    if constexpr (Last) send_dq(index, now);
  }

  // dS of a step whose dP and dV are there, in the place of P.
  __device__ __forceinline__ void take_ds(int index, Cursor const& now) {
    fence_accumulators(s);
    fence_accumulators(dv);
    Base::differentiate(index, now);
    if (warp_arrives()) arrive(empty(T::kY1Barrier, Second::stage(index)));
    Base::pack_ds();
    store_ds(index);
  }
  // dK and dQ of a step, and P and dS of `now`, the next. P and dS are operands alone, each when the other is not, and
  // S, dQ and dP have the same registers: one is issued as soon as the one before has left, and dK or dV covers that.
  // Where `spared` is `index`, dS is zero and dK not issued: with 80 queries a step it saves 1.4 % of a causal call of
  // 4096 tokens, with 64 the question costs more than it saves.
  static constexpr bool kSparesDk = T::kSwapsDq && T::kDynamic;
  __device__ __forceinline__ void step_by_turns(int index, Cursor const& before, Cursor const& now,
                                                [[maybe_unused]] int spared) {
    issue_scores(index + 1);
    if (kSparesDk && index == spared) {
      warpgroup_arrive();
      warpgroup_commit_batch();
    } else {
      Base::template issue_results<false, true>(index);
    }
    publish_ds(index);
    warpgroup_wait<1>();
    fence_accumulators(s);
    Base::scores_to_p(index + 1, now);
    warpgroup_wait<0>();
    finish_first(index);
    Base::pack_p();
    issue_dq(index);
    wait_for_second(index + 1);
    Base::template issue_results<true, false>(index + 1);
    warpgroup_wait<1>();
    add_dq(index, before);
    issue_dp(index + 1);
    send_dq(index, before);
    warpgroup_wait<0>();
    take_ds(index + 1, now);
  }
  // dK and dQ of the last step but one, where this warpgroup's keys see none of the last tile.
  __device__ __forceinline__ void step_to_hidden(int index, Cursor const& before) {
    Base::template issue_results<false, true>(index);
    publish_ds(index);
    issue_dq(index);
    warpgroup_wait<0>();
    finish_first(index);
    add_dq(index, before);
    send_dq(index, before);
    Base::pass_zeros(index + 1);
  }
  __device__ __forceinline__ void finish_first(int index) {
    fence_accumulators(dq_or_dk);
    if (warp_arrives()) arrive(empty(T::kY0Barrier, First::stage(index)));
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
    if (Base::steps() == 0) return Sums::write_nothing(*this);
    Base::load_row_values();
    Base::find_whole_tiles();
    if constexpr (T::kTmaStores && !T::kResultsApart) release_stored_rows();
    Base::wait_for_rows(0);
    if constexpr (T::kHasDs && !T::kLateRows) Base::wait_for_rows(1);
    if constexpr (T::kHeldRows) Base::template load_fragments<T::kDepth>(x0, x0_tile());
    if constexpr (T::kHeldRows && T::kHasDs) Base::template load_fragments<T::kColumns>(x1, x1_tile());
    if constexpr (T::kResultsApart) release_held_rows();
    Cursor now = range.begin();
    Sums::clear(*this);
    if constexpr (T::kOrder == IssueOrder::kSerial) {
#pragma unroll 1
      for (int index = begin; index < end; ++index, range.next(now)) {
        score_alone(index, now);
        results_alone(index, now);
      }
    } else if constexpr (T::kOrder == IssueOrder::kInterleaved) {
      int first = begin;
      Cursor before = now;
      if (Base::steps() > 1 && Base::hides(now)) {
        Base::skip_step(first++, now);
        range.next(now);
      }
      issue_scores(first);
      Base::find_bias(now);
      warpgroup_wait<0>();
      fence_accumulators(s);
      Base::scores_to_p(first, now);
#pragma unroll 1
      for (int index = first; index < end - 1; ++index) {
        Cursor next = now;
        range.next(next);
        step_interleaved<false>(index, before, now, next);
        before = now;
        now = next;
      }
      step_interleaved<true>(end - 1, before, now, now);
    } else if constexpr (T::kByTurns) {
      int const spared = kSparesDk && Base::hides(now) ? begin : -1;
      if (Base::hides(now)) {
        Base::pass_zeros(begin);
      } else {
        issue_scores(begin);
        warpgroup_wait<0>();
        fence_accumulators(s);
        Base::scores_to_p(begin, now);
        Base::pack_p();
        if constexpr (T::kLateRows) Base::wait_for_rows(1);
        wait_for_second(begin);
        Base::template issue_results<true, false>(begin);
        issue_dp(begin);
        warpgroup_wait<0>();
        take_ds(begin, now);
      }
      bool const hides_last = Base::hides_last();
#pragma unroll 1
      for (int index = begin; index < end - 1 - hides_last; ++index) {
        Cursor const before = now;
        range.next(now);
        step_by_turns(index, before, now, spared);
      }
      if (hides_last) {
        Cursor const before = now;
        range.next(now);
        step_to_hidden(end - 2, before);
      }
      Base::template issue_results<false, true>(end - 1);
      publish_ds(end - 1);
      issue_dq(end - 1);
      store_dv();
      warpgroup_wait<0>();
      finish_first(end - 1);
      add_dq(end - 1, now);
      send_dq(end - 1, now);
    } else {
      if (Base::hides(now)) {
        Base::pass_zeros(begin);
      } else {
        score_alone<T::kLateRows>(begin, now);
      }
#pragma unroll 1
      for (int index = begin; index < end - 1; ++index) {
        Cursor const before = now;
        range.next(now);
        step_ahead(index, before, now);
      }
      results_alone<T::kTmaStores>(end - 1, now);
    }
    Sums::write(*this);
    if (warp_arrives()) {
      if constexpr (!kReleasesX0) Base::release_rows(0);
      if constexpr (T::kHasDs && !T::kTmaStores) Base::release_rows(1);
    }
    if constexpr (T::kKeysDq && T::kBulkDq && !T::kTmaStores) wait_for_reads();
  }

  __device__ __forceinline__ void write() const {
    if constexpr (T::kTmaStores) {
      if (stores_through()) return store_dk();
    }
    write_results<T>(*this);
    if constexpr (T::kKeysDq && T::kBulkDq) {
      if (lane_index() == 0) count_head<T>(*this);
    }
  }

  // --- results that TMA stores ---------------------------------------------------------------------------------------

  // Partial sums of CTAs that share rows are stored from registers, as are zeros where nothing was loaded.
  __device__ __forceinline__ bool stores_through() const {
    return arguments.common.splits.divisor == 1 && Base::steps() > 0;
  }
  // X1 of the block before, once the results that went through its place have been read.
  __device__ __forceinline__ void release_stored_rows() const {
    if (Base::visit == 0) return;
    if (lane_index() == 0) tma_store_wait_read();
    if (warp_arrives()) Base::release_rows(1);
  }
  // Rows that are in registers by now; a share of dQ takes X0 from its place.
  static constexpr bool kReleasesX0 = T::kResultsApart && !T::kKeysDq;
  __device__ __forceinline__ void release_held_rows() const {
    __syncwarp();
    if (!warp_arrives()) return;
    Base::release_rows(1);
    if constexpr (kReleasesX0) Base::release_rows(0);
  }
  __device__ __forceinline__ auto const& results() const {
    return static_cast<StoringPassSm90Arguments<typename T::Params> const&>(arguments);
  }
  // dV, of which no MMA is in flight, nor of X1, while dK or dQ may be.
  __device__ __forceinline__ void store_dv() const {
    if constexpr (T::kTmaStores) {
      if (!stores_through()) return;
      if constexpr (T::kResultsApart) {
        if (Base::visit > 0) wait_for_reads();  // of dK of the block before
      }
      // Those who share dQ have waited for all of dS, which was made from the last of dP.
      if constexpr (!T::kKeysDq && !T::kResultsApart) named_barrier(kWarpgroupBarrier + group, kWarpgroupThreads);
      auto const& params = arguments.common.params;
      store_through<T>(*this, dv, results().dv, params.dv, params.dim_v, 1.0f);
    }
  }
  // dK, in the place of dV, once that has been read.
  __device__ __forceinline__ void store_dk() const {
    auto const& params = arguments.common.params;
    if constexpr (T::kOrder == IssueOrder::kSerial) store_dv();
    // This lane's latest copies may add to dQ.
    wait_for_reads<T::kKeysDq && T::kBulkDq && T::kOrder != IssueOrder::kSerial ? 1 : 0>();
    store_through<T>(*this, dq_or_dk, results().dk, params.dk, params.dim_qk, score_scale(params));
    if constexpr (T::kKeysDq && T::kBulkDq) {
      if (lane_index() == 0) count_head<T, T::kDepthLoaded / kSwizzleColumns>(*this);
    }
  }
};

}  // namespace attention_autotuner::softmax_backward

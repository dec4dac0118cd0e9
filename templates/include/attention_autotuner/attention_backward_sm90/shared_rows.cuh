// Warpgroups that share a block of keys: one has P and dV, the other dS and dK.
//
// Each result of 64 keys takes the accumulators of one warpgroup, even of 256 columns, so that S and dP are computed
// once for both. P goes from one to the other through shared memory in 16 bits: lanes of the two hold the same scores,
// and a lane's words are read by the lane of its number. While one warpgroup has a softmax to do, the MMAs of the other
// run.
#pragma once

#include <cstdint>

#include "attention_autotuner/attention_backward_sm90/mainloop.cuh"
#include "attention_autotuner/attention_backward_sm90/memory.cuh"
#include "attention_autotuner/attention_backward_sm90/producer.cuh"
#include "attention_autotuner/attention_backward_sm90/traits.cuh"
#include "attention_autotuner/attention_forward_sm90/wgmma.cuh"
#include "attention_autotuner/common/convert.cuh"
#include "attention_autotuner/common/threads.cuh"

namespace attention_autotuner::softmax_backward {

// The pass as each warpgroup sees it.
template <typename T>
struct OfValues : T {
  static constexpr bool kHasDs = false;
};
template <typename T>
struct OfKeys : T {
  static constexpr bool kHasDv = false;
  static constexpr bool kPacksCapped = false;
  static constexpr bool kTakesScores = false;
};

template <typename T, typename Role>
struct BackwardPassSm90SharedRows : BackwardPassSm90Consumer<Role> {
  using Base = BackwardPassSm90Consumer<Role>;
  using Element = typename T::Element;
  using Base::begin;
  using Base::dp;
  using Base::dq_or_dk;
  using Base::ds;
  using Base::dv;
  using Base::empty;
  using Base::end;
  using Base::full;
  using Base::p;
  using Base::range;
  using Base::s;
  using First = typename Base::First;
  using Second = typename Base::Second;
  using Shared = BarrierRing<T::kPStages>;
  static constexpr bool kOfValues = Role::kHasDv;

  __device__ __forceinline__ BackwardPassSm90SharedRows(BackwardPassSm90Arguments<typename T::Params> const& arguments,
                                                        uint32_t smem, typename Base::List const& list,
                                                        OutputTiles<T::kDynamic> const& tiles)
      : Base(arguments, smem, list, tiles, 0) {}

  // This lane's words of P, each warp's instruction after instruction.
  __device__ __forceinline__ uint32_t p_of(int index) const {
    return Base::p_tile(Shared::stage(index)) + 16 * int(threadIdx.x % kWarpgroupThreads);
  }
  static constexpr int kWordsBytes = 16 * kWarpgroupThreads;  // of four words of each lane

  // P as dS takes it: with a softcap, times the derivative of scores.
  __device__ __forceinline__ void give_p(int index) const {
    wait(empty(T::kPBarrier, Shared::stage(index)), Shared::phase(index) ^ 1);
    uint32_t const* words = p;
    if constexpr (T::kPacksCapped) words = Base::capped.bent;
#pragma unroll
    for (int i = 0; i < T::kBlockColumns / 16; ++i, words += 4) {
      store_four(p_of(index) + i * kWordsBytes, words[0], words[1], words[2], words[3]);
    }
    if (warp_arrives()) arrive(full(T::kPBarrier, Shared::stage(index)));
  }
  // P in the place of S.
  __device__ __forceinline__ void take_p(int index) {
    wait(full(T::kPBarrier, Shared::stage(index)), Shared::phase(index));
    uint32_t seen = 0;
#pragma unroll
    for (int i = 0; i < T::kBlockColumns / 16; ++i) {
      uint32_t words[4];
      load_four(words, p_of(index) + i * kWordsBytes);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float2 const pair = unpack_pair<Element>(words[j]);
        s[8 * i + 2 * j] = pair.x;
        s[8 * i + 2 * j + 1] = pair.y;
      }
      seen |= words[0];
    }
    if (warp_arrives()) arrive_after(seen, empty(T::kPBarrier, Shared::stage(index)));
  }

  // S of P and dV, or dP of dS and dK.
  __device__ __forceinline__ void issue_own_scores(int index, Cursor const& now) {
    if constexpr (kOfValues) {
      Base::issue_scores(index);
      Base::find_bias(now);
    } else {
      Base::issue_dp(index);
    }
  }
  // dV, or dK.
  __device__ __forceinline__ void issue_result(int index) {
    if constexpr (kOfValues) {
      wait(full(T::kY1Barrier, Second::stage(index)), Second::phase(index));
    } else {
      wait(full(T::kY0Barrier, First::stage(index)), First::phase(index));
    }
    Base::template issue_results<kOfValues, !kOfValues>(index);
  }
  // P or dS in the place of scores that are complete.
  __device__ __forceinline__ void convert_scores(int index, Cursor const& now) {
    if constexpr (kOfValues) {
      fence_accumulators(s);
      Base::scores_to_p(index, now);
    } else {
      fence_accumulators(dp);
      take_p(index);
      Base::differentiate(index, now);
    }
  }
  // The operand of the result of a step, with no MMA in flight that reads it.
  __device__ __forceinline__ void pack(int index) {
    if constexpr (kOfValues) {
      Base::pack_p();
      give_p(index);
      if (warp_arrives()) arrive(empty(T::kY0Barrier, First::stage(index)));
    } else {
      Base::pack_ds();
      uint32_t seen = 0;  // of what was read from the stage
#pragma unroll
      for (int i = 0; i < T::kBlockColumns / 4; ++i) seen |= ds[i];
      if (warp_arrives()) arrive_after(seen, empty(T::kY1Barrier, Second::stage(index)));
    }
  }
  __device__ __forceinline__ void finish_result(int index) {
    if constexpr (kOfValues) {
      fence_accumulators(dv);
      if (warp_arrives()) arrive(empty(T::kY1Barrier, Second::stage(index)));
    } else {
      fence_accumulators(dq_or_dk);
      if (warp_arrives()) arrive(empty(T::kY0Barrier, First::stage(index)));
    }
  }

  // The result of a step, and the operand of the next.
  __device__ __forceinline__ void step(int index, Cursor const& next) {
    if constexpr (T::kOrder == IssueOrder::kBothAhead) {
      issue_own_scores(index + 1, next);
      issue_result(index);
      warpgroup_wait<1>();
      convert_scores(index + 1, next);
      warpgroup_wait<0>();
      finish_result(index);
    } else {
      issue_result(index);
      issue_own_scores(index + 1, next);
      warpgroup_wait<1>();
      finish_result(index);
      warpgroup_wait<0>();
      convert_scores(index + 1, next);
    }
    pack(index + 1);
  }

  __device__ __forceinline__ void mainloop() {
    if constexpr (kOfValues) {
#pragma unroll
      for (int i = 0; i < T::kColumns / 2; ++i) dv[i] = 0.0f;
    } else {
#pragma unroll
      for (int i = 0; i < T::kDepth / 2; ++i) dq_or_dk[i] = 0.0f;
    }
    if (Base::steps() == 0) return;
    Base::find_whole_tiles();
    // Both wait for both, though each reads one: so neither releases those of the next block before the other.
    Base::wait_for_rows(0);
    Base::wait_for_rows(1);
    Cursor now = range.begin();
    issue_own_scores(begin, now);
    warpgroup_wait<0>();
    convert_scores(begin, now);
    pack(begin);
#pragma unroll 1
    for (int index = begin; index < end - 1; ++index) {
      range.next(now);
      step(index, now);
    }
    issue_result(end - 1);
    warpgroup_wait<0>();
    finish_result(end - 1);
    if (warp_arrives()) {
      Base::release_rows(0);
      Base::release_rows(1);
    }
  }
};

}  // namespace attention_autotuner::softmax_backward

// A pass of retnet's backward where two CTAs of a cluster have the same rows and half of the result's columns each:
// neither computes all scores.
//
// A step is twice kBlockColumns columns. Each CTA computes P of its half of them, keeps it as an operand in registers
// and stores it in the other's shared memory as its threads hold it: thread t of a warpgroup has in both CTAs the same
// rows, so that what it receives is an operand as it comes. Y, of half of the columns, and Z, of all of them, go
// through one ring of slots in the order in which they are read: Z of this CTA's half, Y of the next step, Z of the
// other's half. In that order MMAs are issued, and never drained between two steps: P of the other comes while those of
// this CTA's half and of the next scores run, and scores are modified while the other's half is multiplied.
//
// The mask comes for each warpgroup by itself, so that none waits for another that reads it later; and a CTA of each
// head asks L2 for its next tiles, as memory answers later than one stage of it can wait.
#pragma once

#include <cstdint>
#include <utility>

#include "attention_autotuner/common/convert.cuh"
#include "attention_autotuner/common/shared_memory.cuh"
#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/scores_backward_sm90/mainloop.cuh"
#include "attention_autotuner/scores_backward_sm90/shared_scores_producer.cuh"
#include "attention_autotuner/sm90/cluster.cuh"
#include "attention_autotuner/sm90/mask_tile.cuh"
#include "attention_autotuner/sm90/pipeline.cuh"
#include "attention_autotuner/sm90/remote.cuh"
#include "attention_autotuner/sm90/roles.cuh"
#include "attention_autotuner/sm90/wgmma.cuh"

namespace attention_autotuner {

// A consumer warpgroup.
template <typename T>
struct SharedScoresConsumer : SharedScoresPlaces<T, PassSm90Consumer<T>> {
  using Base = SharedScoresPlaces<T, PassSm90Consumer<T>>;
  using Element = typename T::Element;
  using Masks = typename SharedScoresBarriers<T>::MaskRing;
  using Exchange = typename SharedScoresBarriers<T>::Exchange;
  using Base::arguments;
  using Base::barriers;
  using Base::Base;
  using Base::done;
  using Base::near_half;
  using Base::p;  // of this CTA's half
  using Base::range;
  using Base::result;
  using Base::s;
  using Base::slot;
  using Base::smem;
  using Base::steps;
  using Base::tile;
  static constexpr int kSlices = T::kDepthSlices;      // of a tile, each with a slot and a group of MMAs of its own
  static constexpr int kWords = T::kBlockColumns / 4;  // of P of half of a step
  static_assert(kWords % 4 == 0);

  uint32_t others_p[kWords];

  // --- MMAs and slots, which are counted over all steps of the CTA ---------------------------------------------------

  __device__ __forceinline__ static int stage_of(int slot_index) { return int(uint32_t(slot_index) % T::kSliceStages); }
  __device__ __forceinline__ void wait_slot(int slot_index) const {
    int const round = int(uint32_t(slot_index) / T::kSliceStages);
    wait(barriers().slots().full(stage_of(slot_index)), round & 1);
  }
  // Until the MMAs of a tile from this slot on are complete, with `Behind` groups issued after them; lets go of its
  // slots.
  template <int Behind>
  __device__ __forceinline__ void complete_tile(int slot_index, bool releases = true) const {
    complete_slices<Behind>(slot_index, releases, std::make_integer_sequence<int, kSlices>{});
  }
  template <int Behind, int... I>
  __device__ __forceinline__ void complete_slices(int slot_index, bool releases,
                                                  std::integer_sequence<int, I...>) const {
    (complete_slice<Behind + kSlices - 1 - I>(slot_index + I, releases), ...);
  }
  template <int Behind>
  __device__ __forceinline__ void complete_slice(int slot_index, bool releases) const {
    warpgroup_wait<Behind>();
    if (releases) consumer_release(barriers().slots().empty(stage_of(slot_index)));
  }
  // S = X Y^T of this CTA's half of a step.
  __device__ __forceinline__ void issue_scores(int slot_index) {
    constexpr int kBlockSteps = kSwizzleColumns / kMmaDepth;
    // Hides where the address comes from, so that descriptors are computed where they are used and not kept in
    // registers.
    uint32_t first = smem + consumer_index() * kWarpgroupRows * kSwizzleRowBytes;
    asm volatile("" : "+r"(first));
    uint64_t const rows = make_smem_desc(first, 0);
#pragma unroll
    for (int i = 0; i < kSlices; ++i) {
      wait_slot(slot_index + i);
      uint64_t const y = make_smem_desc(slot(stage_of(slot_index + i)), 0);
      warpgroup_arrive();
#pragma unroll
      for (int step = 0; step < T::kSliceDepth / kMmaDepth; ++step) {
        int const block = step / kBlockSteps, within = step % kBlockSteps * kMmaDepth * 2;
        int const ahead = (i * (T::kSliceDepth / kSwizzleColumns) + block) * T::kBlockRows * kSwizzleRowBytes + within;
        gemm_ss<Element>(s, advance_desc(rows, ahead),
                         advance_desc(y, block * T::kBlockColumns * kSwizzleRowBytes + within), i + step > 0);
      }
      warpgroup_commit_batch();
    }
  }
  // result += P Z of one half of a step.
  __device__ __forceinline__ void issue_result(uint32_t const (&words)[kWords], int slot_index) {
    constexpr int kSteps = T::kZRows / kMmaDepth;
#pragma unroll
    for (int i = 0; i < kSlices; ++i) {
      wait_slot(slot_index + i);
      uint64_t const z = make_smem_desc(slot(stage_of(slot_index + i)), T::kZRows * kSwizzleRowBytes);
      warpgroup_arrive();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        gemm_rs<Element, Major::MN>(result, words + 4 * (i * kSteps + step),
                                    advance_desc(z, step * kMmaDepth * kSwizzleRowBytes), true);
      }
      warpgroup_commit_batch();
    }
  }

  // --- P -------------------------------------------------------------------------------------------------------------

  // P of this CTA's half from complete scores, those of the CTA's step `index`; the last ones of a tile release X. No
  // MMA that reads the P before is in flight.
  __device__ __forceinline__ void make_p(int index, Cursor const& now, bool last) {
    int const stage = Masks::stage(index);
    fence_accumulators(s);
    if (last) consumer_release(barriers().x_ring().empty(0));
    auto const mask_ring = barriers().mask_ring(consumer_index());
    int const row = consumer_row() / 16 * 16;
    MaskRows<T> mask(arguments.common.params, smem + T::kMaskOffset + stage * T::kMaskBytes, row,
                     tile.row_block * T::kBlockRows + row, near_half(now.tile));
    mask_ring.consumer_wait(index);
    int const factors = stage * T::kWarpgroups + consumer_index();
    if (mask.causal) {
      modify_scores<true>(mask, factors);
    } else {
      modify_scores<false>(mask, factors);
    }
    mask.release(mask_ring.empty(stage));
  }
  // Scores stay as they are: as MMAs are never drained, what else writes accumulators makes the compiler wait for each.
  template <bool Causal>
  __device__ __forceinline__ void modify_scores(MaskRows<T>& mask, int stage) {
    uint32_t const factors = smem + T::kFactorOffset + stage * T::kFactorBytes + 8 * (thread_index() & 3);
#pragma unroll
    for (int sixteen = 0; sixteen < T::kBlockColumns / 16; ++sixteen) {
      uint32_t words[4];
      mask.template load<Causal>(words, sixteen);
#pragma unroll
      for (int eight = 0; eight < 2; ++eight) {
        int const g = 2 * sixteen + eight;
        float2 const f = load_shared_float2(factors + 32 * g);
        mask.note(f.x);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float2 const m = unpack_pair<Element>(words[2 * eight + half]);
          int const i = 2 * g + half;
          p[i] = pack_pair<Element>(modified_score<false>(s[2 * i], m.x, f.x),
                                    modified_score<false>(s[2 * i + 1], m.y, f.y));
        }
      }
    }
  }
  __device__ __forceinline__ auto exchange() const { return barriers().exchange(consumer_index()); }
  // Where a thread's first four words of P lie, in the stage of its warpgroup.
  __device__ __forceinline__ uint32_t exchanged(int stage) const {
    return smem + T::kExchangeOffset + (stage * T::kWarpgroups + consumer_index()) * T::kExchangedBytes +
           thread_index() % kWarpgroupThreads * 16;
  }
  // Stores P of this CTA's half in the other's shared memory.
  __device__ __forceinline__ void send(int index) const {
    int const other = cluster_rank() ^ 1, stage = Exchange::stage(index);
    exchange().producer_acquire(index);
    uint32_t const target = remote_address(exchanged(stage), other);
    uint32_t const counts = remote_address(exchange().full(stage), other);
#pragma unroll
    for (int i = 0; i < kWords / 4; ++i) {
      uint32_t const words[4] = {p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]};
      store_remote(target + i * kWarpgroupThreads * 16, words, counts);
    }
  }
  // P of the other's half. No MMA that reads the one before is in flight.
  __device__ __forceinline__ void receive(int index) {
    int const stage = Exchange::stage(index);
    uint32_t const full = exchange().full(stage), source = exchanged(stage);
    if (threadIdx.x % kWarpgroupThreads == 0) arrive_and_expect_tx(full, T::kExchangedBytes);
    exchange().consumer_wait(index);
    uint32_t seen = 0;
#pragma unroll
    for (int i = 0; i < kWords / 4; ++i) {
      uint32_t words[4];
      load_received(words, source + i * kWarpgroupThreads * 16);
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        others_p[4 * i + w] = words[w];
        seen |= words[w];
      }
    }
    bool const some = __any_sync(0xffffffffu, seen != 0);  // every lane has read
    if (warp_arrives()) {
      arrive_remote_after(some, remote_address(exchange().empty(stage), cluster_rank() ^ 1));
    }
  }

  // --- the pass ------------------------------------------------------------------------------------------------------

  // Of Z of this CTA's half of a step; that of its scores came before the step's first.
  __device__ __forceinline__ static int first_slot(int index) { return index * Base::kStepSlots + kSlices; }
  __device__ __forceinline__ void mainloop() {
#pragma unroll
    for (int i = 0; i < T::kColumns / 2; ++i) result[i] = 0.0f;
    if (steps == 0) return;
    Cursor now = range.begin();
    barriers().x_ring().consumer_wait(this->mainloops);
    issue_scores(done * Base::kStepSlots);
    complete_tile<0>(done * Base::kStepSlots);
    make_p(done, now, steps == 1);
    send(done);
#pragma unroll 1
    for (int step = 1; step < steps; ++step) {
      int const index = done + step, slots = first_slot(index - 1);
      range.next(now);
      issue_result(p, slots);
      complete_tile<kSlices>(slots - kSlices, step > 1);  // of the other's half of the step before
      issue_scores(slots + kSlices);
      receive(index - 1);
      issue_result(others_p, slots + 2 * kSlices);
      complete_tile<2 * kSlices>(slots);
      complete_tile<kSlices>(slots + kSlices);
      make_p(index, now, step + 1 == steps);
      send(index);
    }
    int const index = done + steps - 1, slots = first_slot(index);
    issue_result(p, slots);
    complete_tile<kSlices>(slots - kSlices, steps > 1);
    receive(index);
    issue_result(others_p, slots + kSlices);
    complete_tile<kSlices>(slots);
    complete_tile<0>(slots + kSlices);
    fence_accumulators(result);
  }
};

}  // namespace attention_autotuner

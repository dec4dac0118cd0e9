// Attention forward for compute capability 9.0: O = softmax(scale Q K^T) V by WGMMA, with tiles of Q, K and V loaded by
// TMA into rings of stages; and retnet's, O = ((scale Q K^T) M / r) V, with tiles of the mask beside them.
//
// A CTA has 64 rows of queries for each of its consumer warpgroups, and two or three producer threads (where keys may
// end inside a tensor a thread and a warp). It computes tile of rows after tile of rows, their keys from the last to
// the first, so that a mask is met at the beginning of a tile. Few queries are packed: those of all heads of a group
// are rows of one tile; and their keys are split among CTAs, whose results common/split_combine.cuh combines.
#pragma once

#include "attention_autotuner/attention_forward_sm90/output.cuh"
#include "attention_autotuner/attention_forward_sm90/producer.cuh"
#include "attention_autotuner/attention_forward_sm90/traits.cuh"
#include "attention_autotuner/attention_forward_sm90/wgmma.cuh"
#include "attention_autotuner/common/shared_memory.cuh"
#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/sm90/swizzle.cuh"

namespace attention_autotuner::softmax_forward {

// A consumer warpgroup.
template <typename T>
struct AttentionForwardSm90Consumer : AttentionForwardSm90Output<T> {
  using Base = AttentionForwardSm90Output<T>;
  using Element = typename T::Element;
  using Packed = uint32_t[T::kBlockN / 4];
  using Base::arguments;
  using Base::Base;
  using Base::begin_tile;
  using Base::empty;
  using Base::fetch_mask;
  using Base::first_key_tile;
  using Base::full;
  using Base::group;
  using Base::k_tile;
  using Base::last_key_tile;
  using Base::level;
  using Base::mask;
  using Base::next_p;
  using Base::o;
  using Base::p;
  using Base::pass_turn;
  using Base::q_tile;
  using Base::rescale_output;
  using Base::s;
  using Base::scores_to_p;
  using Base::skipped;
  using Base::smem;
  using Base::start_rows;
  using Base::sum;
  using Base::turn;
  using Base::v_tile;
  using Base::wait_turn;
  using Base::write;

  RingCursor<T::kQStages> q;
  RingCursor<T::kKStages> k;
  RingCursor<T::kVStages> v;
  uint32_t kept[T::kKeptDepth > 0 ? T::kKeptDepth / 4 : 1];  // the first columns of Q, as operands

  // --- MMAs and stages -----------------------------------------------------------------------------------------------

  __device__ __forceinline__ void issue_scores() {
    constexpr int kBlockSteps = kSwizzleColumns / kMmaDepth;
    uint64_t const q_desc = make_smem_desc(q_tile(q.stage) + group * kWarpgroupRows * kSwizzleRowBytes, 0);
    uint64_t const k_desc = make_smem_desc(k_tile(k.stage), 0);
    warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < T::kDepth / kMmaDepth; ++step) {
      int const block = step / kBlockSteps, within = step % kBlockSteps * kMmaDepth * 2;
      uint64_t const k_here = advance_desc(k_desc, block * T::kBlockN * kSwizzleRowBytes + within);
      if (step * kMmaDepth < T::kKeptDepth) {
        Wgmma<T::kBlockN>::template rs<Element, 0>(s, kept + 4 * step, k_here, step > 0);
      } else {
        Wgmma<T::kBlockN>::template ss<Element, 0>(
            s, advance_desc(q_desc, block * T::kBlockM * kSwizzleRowBytes + within), k_here, step > 0);
      }
    }
    warpgroup_commit_batch();
  }
  __device__ __forceinline__ void issue_output(int accumulate) {
    uint64_t const v_desc = make_smem_desc(v_tile(v.stage), T::kBlockN * kSwizzleRowBytes);
    warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < T::kBlockN / kMmaDepth; ++step) {
      Wgmma<T::kColumns>::template rs<Element, 1>(
          o, p + 4 * step, advance_desc(v_desc, step * kMmaDepth * kSwizzleRowBytes), step > 0 ? 1 : accumulate);
    }
    warpgroup_commit_batch();
  }
  // For Q, whose first columns stay. No MMA that reads them may be in flight.
  __device__ __forceinline__ void wait_q() {
    wait(full(T::kQBarrier, q.stage), q.phase);
    if constexpr (T::kKeptDepth > 0) {
      int const matrix = lane_index() / 8, key = lane_index() & 7;
      int const row = group * kWarpgroupRows + 16 * warp_in_warpgroup() + 8 * (matrix % 2) + key;
#pragma unroll
      for (int step = 0; step < T::kKeptDepth / kMmaDepth; ++step) {
        uint32_t words[4];
        load_matrix_x4(words, swizzled_address<T::kBlockM>(q_tile(q.stage), row, 2 * step + matrix / 2, key));
#pragma unroll
        for (int i = 0; i < 4; ++i) kept[4 * step + i] = words[i];
      }
      fence_operands(kept);
      // One thread lets go of this stage for all, which have read then.
      if constexpr (T::kOutput == Output::kDirect) warpgroup_barrier(group);
    }
  }
  __device__ __forceinline__ void wait_k() const { wait(full(T::kKBarrier, k.stage), k.phase); }
  __device__ __forceinline__ void wait_v() const { wait(full(T::kVBarrier, v.stage), v.phase); }
  __device__ __forceinline__ void release_q() {
    if constexpr (T::kOutput == Output::kDirect) consumer_release(empty(T::kQBarrier, q.stage));
  }
  __device__ __forceinline__ void release_stored_q() { Base::release_q_after_store(q.stage); }
  __device__ __forceinline__ void release_k() {
    consumer_release(empty(T::kKBarrier, k.stage));
    k.advance();
  }
  __device__ __forceinline__ void release_v() {
    consumer_release(empty(T::kVBarrier, v.stage));
    v.advance();
  }
  // Tiles of keys that other warpgroups of the CTA see and this one does not. Each phase has to be waited for, by all
  // warps before one of them releases the stage: a wait that comes two phases late takes one for the other.
  __device__ __forceinline__ void skip_k() {
#pragma unroll 1
    for (int i = 0; i < skipped; ++i) {
      wait_k();
      Base::wait_mask();
      warpgroup_barrier(group);
      release_k();
      Base::release_mask();
    }
  }
  __device__ __forceinline__ void skip_v() {
#pragma unroll 1
    for (int i = 0; i < skipped; ++i) {
      wait_v();
      warpgroup_barrier(group);
      release_v();
    }
  }
  // Where nothing is held, in the order in which the others read: they wait for V before they release the next K. The
  // first turn beside them is that of tile `turn_of`: the first tile of a warpgroup's own takes none.
  __device__ __forceinline__ void skip_k_and_v(int tiles, int turn_of) {
#pragma unroll 1
    for (int i = 0; i < tiles; ++i) {
      wait_k();
      wait_v();
      Base::wait_mask();
      warpgroup_barrier(group);
      release_k();
      release_v();
      Base::release_mask();
      wait_turn(turn_of - i);
      pass_turn(turn_of - i);
    }
  }

  // --- steps ---------------------------------------------------------------------------------------------------------

  // Those that come after this warpgroup's own.
  __device__ __forceinline__ void skip_rest() {
    if constexpr (T::kModified) skip_k_and_v(Base::rest, first_key_tile() - 1);
  }

  // Modifies and masks the scores of a tile of keys where that is due.
  __device__ __forceinline__ void finish_scores(WorkTile const& tile, int key_tile) {
    release_k();
    if constexpr (T::kModified) Base::modify(tile, key_tile);
    if (Base::needs_mask(key_tile)) mask(tile, key_tile);
  }

  // The first scores of a tile, with nothing in flight: leaves P.
  __device__ __forceinline__ void first_step(WorkTile const& tile) {
    start_rows();
    skip_k_and_v(skipped, last_key_tile() + skipped - 1);
    wait_q();
    wait_k();
    issue_scores();
    fetch_mask(last_key_tile());
    warpgroup_wait<0>();
    fence_accumulators(s);
    finish_scores(tile, last_key_tile());
    scores_to_p(false);
  }
  __device__ __forceinline__ void last_step(int accumulate) {
    wait_v();
    issue_output(accumulate);
    warpgroup_wait<0>();
    fence_accumulators(o);
    release_v();
  }

  // QK of one tile of keys, then PV of the one before: leaves the scores, modified, and PV in flight.
  __device__ __forceinline__ void scores_then_output(WorkTile const& tile, int key_tile, int accumulate) {
    wait_k();
    wait_turn(key_tile);
    issue_scores();
    wait_v();
    issue_output(accumulate);
    pass_turn(key_tile);
    fetch_mask(key_tile);
    warpgroup_wait<1>();
    fence_accumulators(s);
    finish_scores(tile, key_tile);
  }
  __device__ __forceinline__ void finish_output() {
    warpgroup_wait<0>();
    fence_accumulators(s);
    fence_accumulators(o);
    release_v();
  }

  // The softmax beside PV. The next P is left for pack_next(). Returns whether O has to be multiplied with `factor`.
  __device__ __forceinline__ bool step_overlap(WorkTile const& tile, int key_tile, int accumulate, bool new_tile) {
    scores_then_output(tile, key_tile, accumulate);
    bool due;
    if constexpr (T::kOptimistic) {
      due = Base::optimistic_softmax(next_p, !new_tile);
    } else {
      due = Base::exact_scores();
    }
    finish_output();
    return due;
  }
  __device__ __forceinline__ void pack_next() {
    if constexpr (T::kOptimistic) {
#pragma unroll
      for (int i = 0; i < T::kBlockN / 4; ++i) {
        // Not a move: the assembler would give both the same registers, which PV reads while they are written.
        asm volatile("or.b32 %0, %1, %2;\n" : "=r"(p[i]) : "r"(next_p[i]), "r"(arguments.zero));
      }
    } else {
      Base::pack();
    }
    fence_operands(p);
  }
  __device__ __forceinline__ void step_serial(WorkTile const& tile, int key_tile, int accumulate) {
    wait_v();
    wait_turn(key_tile);
    issue_output(accumulate);
    wait_k();
    issue_scores();
    pass_turn(key_tile);
    fetch_mask(key_tile);
    warpgroup_wait<1>();
    release_v();
    warpgroup_wait<0>();
    fence_accumulators(s);
    fence_accumulators(o);
    finish_scores(tile, key_tile);
    if (scores_to_p(true)) rescale_output();
  }
  // Only what modifies scores runs beside PV.
  __device__ __forceinline__ void step_scores_first(WorkTile const& tile, int key_tile, int accumulate) {
    scores_then_output(tile, key_tile, accumulate);
    finish_output();
    if (scores_to_p(true)) rescale_output();
  }
  // One tile of keys from beginning to end, so that P takes the registers of the scores.
  __device__ __forceinline__ void step_strict(WorkTile const& tile, int key_tile, int accumulate) {
    wait_k();
    wait_turn(key_tile);
    issue_scores();
    pass_turn(key_tile);
    fetch_mask(key_tile);
    warpgroup_wait<0>();
    fence_accumulators(s);
    finish_scores(tile, key_tile);
    if (scores_to_p(accumulate != 0)) rescale_output();
    wait_v();
    issue_output(accumulate);
    warpgroup_wait<0>();
    fence_accumulators(o);
    release_v();
  }

  // --- main loops ----------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void clear_output() {
#pragma unroll
    for (int i = 0; i < T::kColumns / 2; ++i) o[i] = 0.0f;
  }

  __device__ __forceinline__ void run_strict() {
    TileSequence<T> sequence(arguments.list, smem);
    clear_output();
    do {
      WorkTile const tile = sequence.tile();
      begin_tile(tile);
      if constexpr (T::kQStages == 1) release_stored_q();
      start_rows();
      wait_q();
      skip_k_and_v(skipped, last_key_tile() + skipped);
      int accumulate = 0;
#pragma unroll 1
      for (int key_tile = last_key_tile(); key_tile >= first_key_tile(); --key_tile) {
        step_strict(tile, key_tile, accumulate);
        if (!accumulate) release_stored_q();
        accumulate = 1;
      }
      release_q();
      skip_rest();
      write(tile, level, sum, q.stage);
      q.advance();
    } while (sequence.template next<true>());
  }

  __device__ __forceinline__ void run_tiles() {
    TileSequence<T> sequence(arguments.list, smem);
    do {
      WorkTile const tile = sequence.tile();
      begin_tile(tile);
      if constexpr (T::kQStages == 1) release_stored_q();
      first_step(tile);
      release_stored_q();
      int accumulate = 0;
#pragma unroll 1
      for (int key_tile = last_key_tile() - 1; key_tile >= first_key_tile(); --key_tile) {
        if constexpr (T::kMainloop == Mainloop::kSerial) {
          step_serial(tile, key_tile, accumulate);
        } else if constexpr (T::kMainloop == Mainloop::kScoresFirst) {
          step_scores_first(tile, key_tile, accumulate);
        } else {
          if (step_overlap(tile, key_tile, accumulate, false)) rescale_output();
          pack_next();
        }
        accumulate = 1;
      }
      release_q();
      last_step(accumulate);
      skip_rest();
      write(tile, level, sum, q.stage);
      q.advance();
    } while (sequence.template next<true>());
  }

  // One loop over the steps of all tiles: QK of the next tile is issued before the last PV of this one.
  __device__ __forceinline__ void run_flat() {
    TileSequence<T> sequence(arguments.list, smem);
    WorkTile tile = sequence.tile();
    begin_tile(tile);
    first_step(tile);
    int accumulate = 0, key_tile = last_key_tile();
    clear_output();
#pragma unroll 1
    while (true) {
      bool const new_tile = key_tile == first_key_tile();
      WorkTile const before = tile;
      float const levels[2] = {level[0], level[1]};
      float total[2] = {sum[0], sum[1]};
      if (new_tile) {
        release_q();
        release_stored_q();
        if (!sequence.template next<true>()) break;
        tile = sequence.tile();
        begin_tile(tile);
        start_rows();
        q.advance();
        wait_q();
        skip_k();
        key_tile = last_key_tile() + 1;
      }
      --key_tile;
      bool const due = step_overlap(tile, key_tile, accumulate, new_tile);
      accumulate = 1;
      if (new_tile) {
        write(before, levels, total, q.stage ^ 1);
        skip_v();
        accumulate = 0;
      } else {
        if (due) rescale_output();
        release_stored_q();
      }
      pack_next();
    }
    last_step(accumulate);
    write(tile, level, sum, q.stage);
  }

  __device__ __forceinline__ void run() {
    if (T::kPingPong && turn() == T::kWarpgroups - 1) ping_pong_pass<T::kWarpgroups>(turn());
    if constexpr (T::kFlat) {
      run_flat();
    } else if constexpr (T::kMainloop == Mainloop::kStrict) {
      run_strict();
    } else {
      run_tiles();
    }
    if (T::kPingPong && turn() == 0) ping_pong_wait(turn());
    // Shared memory stays until stores have read it.
    if (T::kOutput == Output::kThroughQ && leads_warpgroup()) tma_store_wait_read();
  }
};

}  // namespace attention_autotuner::softmax_forward

// Retnet's forward where two CTAs of a cluster have the same rows and half of the columns of V each: neither computes
// all scores.
//
// A step is kBlockN keys. Each CTA computes P of its half of them, by rank, keeps it as an operand in registers and
// stores it in the other's shared memory as its threads hold it: thread t of a warpgroup has in both CTAs the same
// rows, so that what it receives is an operand as it comes. K, of half of the keys, and V, of all of them, go through
// one ring in the order in which they are read: K of the next step, then V of this CTA's keys and of the other's. With
// every P go the levels of the rows, which both CTAs lower alike at the end of a step, and the sums so far.
#pragma once

#include <cstdint>
#include <type_traits>

#include "attention_autotuner/attention_forward_sm90/output.cuh"
#include "attention_autotuner/attention_forward_sm90/producer.cuh"
#include "attention_autotuner/attention_forward_sm90/wgmma.cuh"
#include "attention_autotuner/common/convert.cuh"
#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/sm90/remote.cuh"

namespace attention_autotuner::softmax_forward {

template <typename T>
struct SharedScoresLoads : AttentionForwardSm90Stages<T> {
  using Base = AttentionForwardSm90Stages<T>;
  using Base::arguments;
  using Base::empty;
  using Base::full;
  using Base::smem;

  // One thread for all three, in the order in which they are read.
  __device__ __forceinline__ void load_q_k_and_v() const {
    TileSequence<T> sequence(arguments.list, smem);
    RingCursor<T::kQStages> q;
    RingCursor<T::kRingStages> ring;
    do {
      WorkTile const tile = sequence.tile();
      int const kv_head = arguments.list.group.divide(tile.head);
      typename Base::Range const range = Base::key_range(tile);
      auto const load = [&](TmaTensor const& tensor, auto columns, int key_tile, int half, int column) {
        wait(empty(T::kKBarrier, ring.stage), ring.phase ^ 1);
        fill_stage<T::kScoreKeys, decltype(columns)::value>(
            Base::k_tile(ring.stage), tensor, full(T::kKBarrier, ring.stage),
            range.begin() + key_tile * T::kBlockN + half * T::kScoreKeys, column, kv_head, tile.batch);
        ring.advance();
      };
      auto const load_k = [&](int key_tile) {
        load(arguments.k, std::integral_constant<int, T::kDepthLoaded>{}, key_tile, tile.slice, 0);
      };
      KeyTiles const tiles = Base::key_tiles(range, tile);
      load_k(tiles.end - 1);
      wait(empty(T::kQBarrier, q.stage), q.phase ^ 1);
      Base::load_q(tile, range.query_begin() + Base::query_of(tile, 0), q.stage);
      q.advance();
#pragma unroll 1
      for (int key_tile = tiles.end - 1; key_tile >= tiles.first; --key_tile) {
        if (key_tile > tiles.first) load_k(key_tile - 1);
#pragma unroll 1
        for (int i = 0; i < 2; ++i) {
          load(arguments.v, std::integral_constant<int, T::kColumnsLoaded>{}, key_tile, tile.slice ^ i,
               tile.slice * T::kColumns);
        }
      }
      if (!sequence.publish(sequence.claim())) break;
    } while (true);
  }
};

// A consumer warpgroup.
template <typename T>
struct SharedScoresConsumer : AttentionForwardSm90Output<T> {
  using Base = AttentionForwardSm90Output<T>;
  using Element = typename T::Element;
  using Base::arguments;
  using Base::Base;
  using Base::empty;
  using Base::factor;
  using Base::full;
  using Base::group;
  using Base::level;
  using Base::o;
  using Base::p;
  using Base::s;
  using Base::smem;
  using Base::sum;
  static constexpr int kWords = T::kScoreKeys / 4;  // of P of half of a step

  RingCursor<T::kQStages> q;
  RingCursor<T::kRingStages> ring;  // the next tile of K or V
  RingCursor<T::kExchangeStages> exchange;
  float other_level[2], other_sum[2];  // of the other CTA, as its last P came

  // --- MMAs and stages -----------------------------------------------------------------------------------------------

  __device__ __forceinline__ void wait_tile() const { wait(full(T::kKBarrier, ring.stage), ring.phase); }
  // Lets go of the tile so many before the next.
  __device__ __forceinline__ void release(int before) const {
    int const stage = ring.stage - before;
    consumer_release(empty(T::kKBarrier, stage < 0 ? stage + T::kRingStages : stage));
  }
  __device__ __forceinline__ void issue_scores() {
    constexpr int kBlockSteps = kSwizzleColumns / kMmaDepth;
    uint64_t const q_desc = make_smem_desc(Base::q_tile(q.stage) + group * kWarpgroupRows * kSwizzleRowBytes, 0);
    uint64_t const k_desc = make_smem_desc(Base::k_tile(ring.stage), 0);
    wait_tile();
    warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < T::kDepth / kMmaDepth; ++step) {
      int const block = step / kBlockSteps, within = step % kBlockSteps * kMmaDepth * 2;
      Wgmma<T::kScoreKeys>::template ss<Element, 0>(
          s, advance_desc(q_desc, block * T::kBlockM * kSwizzleRowBytes + within),
          advance_desc(k_desc, block * T::kScoreKeys * kSwizzleRowBytes + within), step > 0);
    }
    warpgroup_commit_batch();
    ring.advance();
  }
  // Of half of a step: first of this CTA's keys, then of the other's.
  template <int Half>
  __device__ __forceinline__ void issue_output(int accumulate) {
    uint64_t const v_desc = make_smem_desc(Base::k_tile(ring.stage), T::kScoreKeys * kSwizzleRowBytes);
    wait_tile();
    warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < T::kScoreKeys / kMmaDepth; ++step) {
      Wgmma<T::kColumns>::template rs<Element, 1>(o, p + Half * kWords + 4 * step,
                                                  advance_desc(v_desc, step * kMmaDepth * kSwizzleRowBytes),
                                                  Half > 0 || step > 0 ? 1 : accumulate);
    }
    warpgroup_commit_batch();
    ring.advance();
  }

  // --- the exchange --------------------------------------------------------------------------------------------------

  __device__ __forceinline__ int exchange_barrier(int stage) const {
    return T::kExchangeBarrier + stage * T::kWarpgroups + group;
  }
  __device__ __forceinline__ uint32_t exchanged(int stage) const {
    return smem + T::kExchangeOffset + (stage * T::kWarpgroups + group) * T::kExchangedBytes;
  }
  __device__ __forceinline__ static int thread() { return int(threadIdx.x) % kWarpgroupThreads; }
  // Of four words of P, and of what goes with its rows.
  __device__ __forceinline__ static int words_offset(int i) { return (i * kWarpgroupThreads + thread()) * 16; }
  __device__ __forceinline__ static int rows_offset() { return 64 * T::kScoreKeys * 2 + thread() / 4 * 16; }

  // P of this CTA's keys, to the other CTA; `last` in its tile of rows, with the sums of these.
  __device__ __forceinline__ void send(int other, bool last) {
    uint32_t const barrier = full(exchange_barrier(exchange.stage), 0);
    wait(barrier + 8, exchange.phase ^ 1);
    uint32_t const target = remote_address(exchanged(exchange.stage), other), counts = remote_address(barrier, other);
#pragma unroll
    for (int i = 0; i < kWords / 4; ++i) {
      uint32_t words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) words[w] = p[4 * i + w];
      store_remote(target + words_offset(i), words, counts);
    }
    float totals[2] = {};
    if (last) {
      totals[0] = quad_sum(sum[0]);
      totals[1] = quad_sum(sum[1]);
    }
    uint32_t const rows[4] = {__float_as_uint(level[0]), __float_as_uint(level[1]), __float_as_uint(totals[0]),
                              __float_as_uint(totals[1])};
    if ((lane_index() & 3) == 0) store_remote(target + rows_offset(), rows, counts);
  }
  // P of the other CTA's keys. No MMA may be in flight.
  __device__ __forceinline__ void receive(int other) {
    uint32_t const barrier = full(exchange_barrier(exchange.stage), 0), source = exchanged(exchange.stage);
    if (leads_warpgroup()) arrive_and_expect_tx(barrier, T::kExchangedBytes);
    wait(barrier, exchange.phase);
    uint32_t seen = 0;
#pragma unroll
    for (int i = 0; i < kWords / 4; ++i) {
      uint32_t words[4];
      load_received(words, source + words_offset(i));
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        p[kWords + 4 * i + w] = words[w];
        seen |= words[w];
      }
    }
    uint32_t rows[4];
    load_received(rows, source + rows_offset());
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      other_level[half] = __uint_as_float(rows[half]);
      other_sum[half] = __uint_as_float(rows[2 + half]);
      seen |= rows[2 + half];
    }
    // Every lane has read.
    bool const some = __any_sync(0xffffffffu, seen != 0);
    if (warp_arrives()) arrive_remote_after(some, remote_address(barrier + 8, other));
    exchange.advance();
  }
  // Takes both halves of P at the lower of their levels, which differ by a power of two. Returns whether O has to be
  // multiplied with `factor`, `due` being whether it had to be for this CTA's own sake.
  __device__ __forceinline__ bool reconcile(bool due) {
    if constexpr (!Base::kGuarded) return false;
    bool const differ = other_level[0] != level[0] || other_level[1] != level[1];
    if (!__any_sync(0xffffffffu, due || differ)) return false;
    Base::leveled = true;
    float shares[2][2];  // of each CTA's P, by rows
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!due) factor[half] = 1.0f;
      shares[0][half] = shares[1][half] = 1.0f;
      if (fabsf(other_level[half]) < fabsf(level[half])) {
        shares[0][half] = other_level[half] / level[half];
        factor[half] *= shares[0][half];
        level[half] = other_level[half];
      } else if (other_level[half] != level[half]) {
        shares[1][half] = level[half] / other_level[half];
      }
    }
#pragma unroll
    for (int i = 0; i < 2 * kWords; ++i) {
      float2 const pair = unpack_pair<Element>(p[i]);
      float const share = shares[i / kWords][i % 2];
      p[i] = pack_pair<Element>(pair.x * share, pair.y * share);
    }
    return true;
  }

  // --- steps ---------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void first_step(WorkTile const& tile) {
    wait(full(T::kQBarrier, q.stage), q.phase);
    issue_scores();
    warpgroup_wait<0>();
    fence_accumulators(s);
    release(1);
    Base::mask(tile, Base::last_key_tile());
    Base::exact_scores();
    Base::pack();
    send(tile.slice ^ 1, Base::last_key_tile() == 0);
    receive(tile.slice ^ 1);
    reconcile(false);
    fence_operands(p);
  }
  // Scores of one step, then the output of the one before.
  __device__ __forceinline__ void step(WorkTile const& tile, int key_tile, int accumulate) {
    issue_scores();
    issue_output<0>(accumulate);
    issue_output<1>(1);
    warpgroup_wait<2>();
    fence_accumulators(s);
    release(3);
    Base::mask(tile, key_tile);
    bool due = Base::exact_scores();
    warpgroup_wait<1>();
    release(2);
    Base::pack();  // in the place of P of the step before, which has been read
    send(tile.slice ^ 1, key_tile == 0);
    warpgroup_wait<0>();
    release(1);
    fence_accumulators(s);
    fence_accumulators(o);
    receive(tile.slice ^ 1);
    due = reconcile(due);
    if (due) Base::rescale_output();
    fence_operands(p);
  }
  __device__ __forceinline__ void last_step(int accumulate) {
    issue_output<0>(accumulate);
    issue_output<1>(1);
    warpgroup_wait<1>();
    release(2);
    warpgroup_wait<0>();
    release(1);
    fence_accumulators(o);
  }

  __device__ __forceinline__ void run() {
    TileSequence<T> sequence(arguments.list, smem);
    do {
      WorkTile const tile = sequence.tile();
      Base::begin_tile(tile);
      if constexpr (T::kQStages == 1) Base::release_q_after_store(q.stage);
      Base::start_rows();
      first_step(tile);
      if constexpr (T::kQStages > 1) Base::release_q_after_store(q.stage);
      int accumulate = 0;
#pragma unroll 1
      for (int key_tile = Base::last_key_tile() - 1; key_tile >= 0; --key_tile) {
        step(tile, key_tile, accumulate);
        accumulate = 1;
      }
      if constexpr (T::kOutput == Output::kDirect) consumer_release(empty(T::kQBarrier, q.stage));
      last_step(accumulate);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if ((lane_index() & 3) == 0) sum[half] += other_sum[half];
      }
      Base::write(tile, level, sum, q.stage);
      q.advance();
    } while (sequence.template next<true>());
    // Shared memory stays until stores have read it.
    if (T::kOutput == Output::kThroughQ && leads_warpgroup()) tma_store_wait_read();
  }
};

}  // namespace attention_autotuner::softmax_forward

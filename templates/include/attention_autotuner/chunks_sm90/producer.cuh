// What warpgroups of retention's pass over chunks have in common: the CTA's place, its stages and their barriers; and
// the warpgroup that computes scores, of which one thread is the producer.
//
// Layouts: see sm90/wgmma.cuh.
#pragma once

#include "attention_autotuner/chunks_sm90/traits.cuh"
#include "attention_autotuner/common/chunk_arguments.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/scheduler.cuh"
#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/sm90/chunk_factors.cuh"
#include "attention_autotuner/sm90/pipeline.cuh"
#include "attention_autotuner/sm90/roles.cuh"
#include "attention_autotuner/sm90/swizzle.cuh"
#include "attention_autotuner/sm90/tma.cuh"
#include "attention_autotuner/sm90/wgmma.cuh"

namespace attention_autotuner {

struct ChunkSm90Arguments {
  TmaTensor q, k, v, o;
  ChunkArguments pass;
  float* pieces;  // what each piece of a sequence adds to the state, as registers hold it; or null
};

// What all roles know: the chunks and the barriers.
template <typename T>
struct ChunkSm90Stages {
  ChunkSm90Arguments const& arguments;
  uint32_t const smem;
  int slice, super, head, batch;
  int first, count;  // chunks
  float log2_gamma;

  __device__ __forceinline__ ChunkSm90Stages(ChunkSm90Arguments const& arguments, uint32_t smem, int index)
      : arguments(arguments), smem(smem) {
    auto const& pass = arguments.pass;
    slice = index % T::kSlices;
    index /= T::kSlices;
    super = pass.supers.take(index) + pass.super_offset;
    head = pass.heads.take(index);
    batch = index;
    int const chunks = pass.super_chunk / T::kChunk;
    first = super * chunks;
    count = minimum(chunks, pass.chunks - first);
    log2_gamma = pass.log2_gamma[head];
  }

  __device__ __forceinline__ static int warp() { return thread_index() % kWarpgroupThreads / 32; }
  __device__ __forceinline__ int row(int index) const { return (first + index) * T::kChunk; }
  __device__ __forceinline__ int length(int index) const {
    return minimum(T::kChunk, arguments.pass.seqlen - row(index));
  }
  __device__ __forceinline__ float power(float n) const { return exp2_approximate(log2_gamma * n); }

  // --- stages --------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ uint32_t q_tile(int stage) const { return smem + stage * T::kStageBytes; }
  __device__ __forceinline__ uint32_t k_tile(int stage) const { return q_tile(stage) + T::kQBytes; }
  __device__ __forceinline__ uint32_t v_tile(int stage) const { return k_tile(stage) + T::kKBytes; }
  __device__ __forceinline__ uint32_t scores_tile(int index) const {
    return smem + T::kScoresOffset + index % T::kScoreStages * T::kBlockBytes;
  }

  // Those of Q, K and V, stage after stage, then those of the scores.
  using Ring = BarrierRing<T::kStages, 3>;
  using ScoresRing = BarrierRing<T::kScoreStages>;
  __device__ __forceinline__ uint32_t barrier(int index) const { return smem + T::kBarrierOffset + 8 * index; }
  __device__ __forceinline__ Ring q_ring() const { return {barrier(0)}; }
  __device__ __forceinline__ Ring k_ring() const { return {barrier(2)}; }
  __device__ __forceinline__ Ring v_ring() const { return {barrier(4)}; }
  __device__ __forceinline__ ScoresRing scores_ring() const { return {barrier(6 * T::kStages)}; }

  __device__ __forceinline__ TokenFactors token_factors() const { return {smem + T::kFactorOffset}; }
  __device__ __forceinline__ bool is_last(int index) const { return index + 1 == count; }
  __device__ __forceinline__ void store_token_factors() const {
    token_factors().store_decays(log2_gamma, length(count - 1));
  }

  __device__ __forceinline__ void init_barriers() const {
    constexpr int kReaders = 4 * T::kWarpgroups, kMore = T::kStatesOnly ? 0 : 4;  // warps
#pragma unroll
    for (int stage = 0; stage < T::kStages; ++stage) {
      q_ring().init(stage, 1, kReaders + kMore);
      k_ring().init(stage, 1, kReaders + kMore);
      v_ring().init(stage, 1, kReaders);
    }
#pragma unroll
    for (int stage = 0; stage < T::kScoreStages; ++stage) scores_ring().init(stage, 4, kReaders);
    fence_barrier_init();
  }
  // Once this warp has done with what the barrier guards.
  __device__ __forceinline__ static void warp_release(uint32_t barrier) {
    __syncwarp();
    if (lane_here() == 0) arrive(barrier);
  }
};

// The warpgroup that computes scores; one thread of it is the producer.
template <typename T>
struct ScoreWarpgroup : ChunkSm90Stages<T> {
  using Base = ChunkSm90Stages<T>;
  using Element = typename T::Element;
  using Base::arguments;
  using Base::Base;
  using Base::batch;
  using Base::count;
  using Base::head;
  using typename Base::Ring;
  using typename Base::ScoresRing;

  // By the producer thread: loads a chunk, each tile once its stage is empty.
  __device__ __forceinline__ void load(int index) const {
    int const stage = Ring::stage(index), row = this->row(index);
    int const kv_head = arguments.pass.group.divide(head), column = this->slice * T::kColumns;
    auto const& [q, k, v, o, pass, pieces] = arguments;
    if constexpr (!T::kStatesOnly) {
      this->q_ring().producer_acquire(index);
      fill_stage<T::kChunk, T::kDepth>(this->q_tile(stage), q, this->q_ring().full(stage), row, 0, head, batch);
    }
    this->k_ring().producer_acquire(index);
    fill_stage<T::kChunk, T::kDepth>(this->k_tile(stage), k, this->k_ring().full(stage), row, 0, kv_head, batch);
    this->v_ring().producer_acquire(index);
    fill_stage<T::kChunk, T::kColumns>(this->v_tile(stage), v, this->v_ring().full(stage), row, column, kv_head, batch);
  }

  __device__ __forceinline__ void gemm_scores(float (&s)[32], int stage) const {
    constexpr int kBlockSteps = kSwizzleColumns / kMmaDepth;
    uint64_t const q = make_smem_desc(this->q_tile(stage), 0), k = make_smem_desc(this->k_tile(stage), 0);
    warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < T::kDepth / kMmaDepth; ++step) {
      int const offset = step / kBlockSteps * T::kBlockBytes + step % kBlockSteps * kMmaDepth * 2;
      gemm_ss<Element>(s, advance_desc(q, offset), advance_desc(k, offset), step > 0);
    }
    warpgroup_commit_batch();
    warpgroup_wait<0>();
    fence_accumulators(s);
  }

  __device__ __forceinline__ void run() const {
    bool const loads = threadIdx.x == 0;
    if (loads) {
      for (int index = 0; index < minimum(count, T::kStages); ++index) load(index);
    }
    if constexpr (T::kStatesOnly) {
      if (loads) {
        for (int index = T::kStages; index < count; ++index) load(index);
      }
      return;
    }
    __syncwarp();
    ChunkScores<Element, false> const scores(arguments.pass.scale, this->log2_gamma);
    for (int index = 0; index < count; ++index) {
      int const stage = Ring::stage(index);
      this->q_ring().consumer_wait(index);
      this->k_ring().consumer_wait(index);
      float s[32];
      gemm_scores(s, stage);
      this->warp_release(this->q_ring().empty(stage));
      this->warp_release(this->k_ring().empty(stage));
      this->scores_ring().producer_acquire(index);
      scores.store(s, this->scores_tile(index));
      fence_view_async_shared();
      this->warp_release(this->scores_ring().full(ScoresRing::stage(index)));
      int const next = index - 1 + T::kStages;
      if (loads && index > 0 && next < count) load(next);
      __syncwarp();
    }
  }
};

}  // namespace attention_autotuner

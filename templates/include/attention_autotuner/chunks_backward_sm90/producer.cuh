// What warpgroups of a pass over chunks of retention's backward have in common: the CTA's place, its stages and their
// barriers; and the warpgroup that computes scores, of which one thread is the producer.
//
// Layouts: see sm90/wgmma.cuh.
#pragma once

#include "attention_autotuner/chunks_backward_sm90/traits.cuh"
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

struct ChunkBackwardArguments {
  TmaTensor x, y, z, out;
  ChunkArguments pass;
  bool first;  // kernel of its call
};

// What all roles know: the chunks and the barriers.
template <typename T>
struct ChunkBackwardStages {
  static constexpr float kLeastUnit = 1e-15f;

  ChunkBackwardArguments const& arguments;
  uint32_t const smem;
  int slice, super, head, batch;
  int first, count;  // chunks
  float log2_gamma;
  // Of the registers of the state, beside the scale: the greatest factor of a token, so that none is rounded to
  // nothing.
  float unit;

  __device__ __forceinline__ ChunkBackwardStages(ChunkBackwardArguments const& arguments, uint32_t smem, int index)
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
    unit = T::kReversed ? pass.scale * exp2f(log2_gamma) : 1.0f;
    if (fabsf(unit) < kLeastUnit) unit = 1.0f;
  }

  __device__ __forceinline__ static int warp() { return thread_index() % kWarpgroupThreads / 32; }
  __device__ __forceinline__ int row(int index) const {
    return (first + (T::kReversed ? count - 1 - index : index)) * T::kChunk;
  }
  __device__ __forceinline__ int length(int index) const {
    return minimum(T::kChunk, arguments.pass.seqlen - row(index));
  }
  __device__ __forceinline__ float power(float n) const { return exp2_approximate(log2_gamma * n); }

  // --- stages --------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ uint32_t x_tile(int stage) const {
    return smem + T::kSlots * T::kPieceBytes + stage * T::kStageBytes;
  }
  __device__ __forceinline__ uint32_t y_tile(int stage) const { return x_tile(stage) + T::kXBytes; }
  __device__ __forceinline__ uint32_t z_tile(int stage) const {
    return T::kInParts ? x_tile(stage) : y_tile(stage) + T::kYBytes;
  }
  __device__ __forceinline__ uint32_t scores_tile(int index) const {
    return smem + T::kScoresOffset + index % T::kScoreStages * T::kBlockBytes;
  }

  // Those of X, Y and Z, stage after stage, then those of the scores.
  using Ring = BarrierRing<T::kStages, T::kInParts ? 1 : 3>;
  using ScoresRing = BarrierRing<T::kScoreStages>;
  __device__ __forceinline__ uint32_t barrier(int index) const { return smem + T::kBarrierOffset + 8 * index; }
  __device__ __forceinline__ Ring x_ring() const { return {barrier(0)}; }
  __device__ __forceinline__ Ring y_ring() const { return {barrier(2)}; }
  __device__ __forceinline__ Ring z_ring() const { return {barrier(T::kInParts ? 0 : 4)}; }
  __device__ __forceinline__ ScoresRing scores_ring() const { return {barrier((T::kInParts ? 2 : 6) * T::kStages)}; }

  // In parts, pieces of X and then of Y of a chunk take the slots of a ring, chunk after chunk.
  using Slots = BarrierRing<maximum(T::kSlots, 1)>;
  __device__ __forceinline__ Slots slots() const { return {barrier(2 * T::kStages + 2 * T::kScoreStages)}; }
  __device__ __forceinline__ uint32_t slot_tile(int use) const { return smem + Slots::stage(use) * T::kPieceBytes; }
  __device__ __forceinline__ static int x_use(int index, int piece) { return index * T::kUses + piece; }
  __device__ __forceinline__ static int y_use(int index, int piece) {
    return (index + 1) * T::kUses - T::kPieces + piece;
  }

  // Of a piece of X or Y: its tile, a wait until it has come, and its release; all of it is one piece but in parts.
  __device__ __forceinline__ uint32_t x_piece(int index, int piece) const {
    return T::kInParts ? slot_tile(x_use(index, piece)) : x_tile(Ring::stage(index));
  }
  __device__ __forceinline__ uint32_t y_piece(int index, int piece) const {
    return T::kInParts ? slot_tile(y_use(index, piece)) : y_tile(Ring::stage(index));
  }
  __device__ __forceinline__ void wait_x(int index, int piece) const {
    T::kInParts ? slots().consumer_wait(x_use(index, piece)) : x_ring().consumer_wait(index);
  }
  __device__ __forceinline__ void wait_y(int index, int piece) const {
    T::kInParts ? slots().consumer_wait(y_use(index, piece)) : y_ring().consumer_wait(index);
  }
  __device__ __forceinline__ void release_x(int index, int piece) const {
    warp_release(T::kInParts ? slots().empty(Slots::stage(x_use(index, piece))) : x_ring().empty(Ring::stage(index)));
  }
  __device__ __forceinline__ void release_y(int index, int piece) const {
    warp_release(T::kInParts ? slots().empty(Slots::stage(y_use(index, piece))) : y_ring().empty(Ring::stage(index)));
  }

  __device__ __forceinline__ TokenFactors token_factors() const { return {smem + T::kFactorOffset}; }
  // Of the output, where time runs backwards.
  __device__ __forceinline__ TokenFactors output_factors() const {
    return {smem + T::kFactorOffset + TokenFactors::kBytes};
  }
  // Whether a chunk is the sequence's last, which may be shorter.
  __device__ __forceinline__ bool is_last(int index) const { return row(index) + T::kChunk >= arguments.pass.seqlen; }
  // Tokens of Z decay up to where the pass leaves the chunk, outputs from where it enters.
  __device__ __forceinline__ void store_token_factors() const {
    int const last = length(T::kReversed ? 0 : count - 1);
    if constexpr (T::kReversed) {
      token_factors().store([this](int token, bool) { return power(float(token + 1)); });
      output_factors().store_decays(log2_gamma, last);
    } else {
      token_factors().store_decays(log2_gamma, last);
    }
  }

  __device__ __forceinline__ void init_barriers() const {
    constexpr int kReaders = 4 * T::kWarpgroups, kMore = T::kStatesOnly ? 0 : 4;  // warps
#pragma unroll
    for (int stage = 0; stage < T::kStages; ++stage) {
      if constexpr (!T::kInParts) {
        x_ring().init(stage, 1, kReaders + kMore);
        y_ring().init(stage, 1, kReaders + kMore);
      }
      z_ring().init(stage, 1, kReaders);
    }
#pragma unroll
    for (int slot = 0; slot < T::kSlots; ++slot) slots().init(slot, 1, kReaders / T::kDepthParts + kMore);
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
struct ChunkBackwardScores : ChunkBackwardStages<T> {
  using Base = ChunkBackwardStages<T>;
  using Element = typename T::Element;
  using Base::arguments;
  using Base::Base;
  using Base::batch;
  using Base::count;
  using Base::head;
  using typename Base::Ring;
  using typename Base::ScoresRing;
  using Scores = ChunkScores<Element, T::kReversed>;

  // By the producer thread: loads a chunk, each tile once its stage is empty.
  __device__ __forceinline__ void load(int index) const {
    int const stage = Ring::stage(index), row = this->row(index);
    int const kv_head = arguments.pass.group.divide(head), column = this->slice * T::kColumns;
    int const x_head = T::kReversed ? kv_head : head, other_head = T::kReversed ? head : kv_head;
    TmaTensor const &x = arguments.x, &y = arguments.y, &z = arguments.z;
    if constexpr (!T::kStatesOnly) {
      this->x_ring().producer_acquire(index);
      fill_stage<T::kChunk, T::kDepth>(this->x_tile(stage), x, this->x_ring().full(stage), row, 0, x_head, batch);
    }
    this->y_ring().producer_acquire(index);
    fill_stage<T::kChunk, T::kDepth>(this->y_tile(stage), y, this->y_ring().full(stage), row, 0, other_head, batch);
    this->z_ring().producer_acquire(index);
    fill_stage<T::kChunk, T::kColumns>(this->z_tile(stage), z, this->z_ring().full(stage), row, column, other_head,
                                       batch);
  }

  // By the producer thread, in parts: loads pieces from `loaded` on, up to a number of uses of the slots, each once its
  // slot is empty; and Z before the first of Y.
  __device__ __forceinline__ void load_pieces(int& loaded, int uses) const {
    int const kv_head = arguments.pass.group.divide(head), column = this->slice * T::kColumns;
    int const x_head = T::kReversed ? kv_head : head, other_head = T::kReversed ? head : kv_head;
    TmaTensor const &x = arguments.x, &y = arguments.y, &z = arguments.z;
    for (int const end = minimum(uses, count * T::kUses); loaded < end; ++loaded) {
      int const index = loaded / T::kUses, use = loaded % T::kUses, piece = use % T::kPieces, row = this->row(index);
      bool const is_y = use >= T::kUses - T::kPieces;
      if (is_y && piece == 0) {
        int const stage = Ring::stage(index);
        this->z_ring().producer_acquire(index);
        fill_stage<T::kChunk, T::kColumns>(this->z_tile(stage), z, this->z_ring().full(stage), row, column, other_head,
                                           batch);
      }
      uint32_t const full = this->slots().full(Base::Slots::stage(loaded));
      this->slots().producer_acquire(loaded);
      fill_stage<T::kChunk, T::kPieceDepth>(this->slot_tile(loaded), is_y ? y : x, full, row, piece * T::kPieceDepth,
                                            is_y ? other_head : x_head, batch);
    }
  }

  __device__ __forceinline__ void gemm_scores(float (&s)[32], int index, int piece) const {
    constexpr int kBlockSteps = kSwizzleColumns / kMmaDepth;
    uint64_t const x = make_smem_desc(this->x_piece(index, piece), 0);
    uint64_t const y = make_smem_desc(this->y_piece(index, piece), 0);
    warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < T::kPieceDepth / kMmaDepth; ++step) {
      int const offset = step / kBlockSteps * T::kBlockBytes + step % kBlockSteps * kMmaDepth * 2;
      gemm_ss<Element>(s, advance_desc(x, offset), advance_desc(y, offset), step > 0 || piece > 0);
    }
    warpgroup_commit_batch();
    warpgroup_wait<0>();
    fence_accumulators(s);
  }

  __device__ __forceinline__ void run() const {
    bool const loads = threadIdx.x == 0;
    if constexpr (T::kInParts) {
      run_in_parts(loads);
      return;
    }
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
    Scores const scores(arguments.pass.scale, this->log2_gamma);
    for (int index = 0; index < count; ++index) {
      float s[32];
      score_piece(s, index, 0);
      pass_scores(scores, s, index);
      int const next = index - 1 + T::kStages;
      if (loads && index > 0 && next < count) load(next);
      __syncwarp();
    }
  }
  __device__ __forceinline__ void score_piece(float (&s)[32], int index, int piece) const {
    this->wait_x(index, piece);
    this->wait_y(index, piece);
    gemm_scores(s, index, piece);
    this->release_x(index, piece);
    this->release_y(index, piece);
  }
  __device__ __forceinline__ void pass_scores(Scores const& scores, float const (&s)[32], int index) const {
    this->scores_ring().producer_acquire(index);
    scores.store(s, this->scores_tile(index));
    fence_view_async_shared();
    this->warp_release(this->scores_ring().full(ScoresRing::stage(index)));
  }
  // The producer thread may wait for a slot only where other warpgroups empty it without the scores to come: before the
  // last piece of a chunk, slots of the chunk before; once its scores are stored, those of its X.
  __device__ __forceinline__ void run_in_parts(bool loads) const {
    int loaded = 0;
    if (loads) load_pieces(loaded, T::kStatesOnly ? count * T::kUses : T::kSlots);
    if constexpr (T::kStatesOnly) return;
    __syncwarp();
    Scores const scores(arguments.pass.scale, this->log2_gamma);
    for (int index = 0; index < count; ++index) {
      float s[32];
#pragma unroll
      for (int piece = 0; piece < T::kPieces; ++piece) {
        if (piece == T::kPieces - 1) {
          if (loads) load_pieces(loaded, index * T::kUses + T::kSlots);
          __syncwarp();
        }
        score_piece(s, index, piece);
      }
      pass_scores(scores, s, index);
      if (loads) load_pieces(loaded, index * T::kUses + T::kPieces + T::kSlots);
      __syncwarp();
    }
  }
};

}  // namespace attention_autotuner

// The pass over chunks of retention by WGMMA: a CTA visits the chunks of a super-chunk of one head for some columns of
// V.
//
// A warpgroup has the state for 64 columns of V, transposed, in its accumulators: S^T += V^T K accumulates it, and S^T,
// rounded, is from the same registers the A operand of O^T = S^T Q^T. So the state is copied nowhere. One more
// warpgroup computes the scores of the next chunk, decays them and puts them where the others multiply them with V;
// one of its threads keeps the stages full. Outputs are transposed on their way through shared memory.
//
// What registers hold is the state over a scale, as in the kernel of family sm80: the decay of a chunk goes to the
// scale, and only when it has fallen below 1 do the registers take it over, so that what is added to them is never
// scaled up. In fp16 the state may exceed the type: before it is rounded, its sum of squares is looked at, and where
// it is great the scale goes up, for each warp's 16 columns apart. Token factors are fp32, and rounded once with V.
//
// Layouts: see sm90/wgmma.cuh.
#pragma once

#include "attention_autotuner/chunks_sm90/producer.cuh"
#include "attention_autotuner/common/convert.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/shared_memory.cuh"
#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/sm90/pipeline.cuh"
#include "attention_autotuner/sm90/roles.cuh"
#include "attention_autotuner/sm90/scaled_state.cuh"
#include "attention_autotuner/sm90/stmatrix.cuh"
#include "attention_autotuner/sm90/swizzle.cuh"
#include "attention_autotuner/sm90/tma.cuh"
#include "attention_autotuner/sm90/wgmma.cuh"

namespace attention_autotuner {

// A warpgroup that has the state for 64 columns.
template <typename T>
struct StateWarpgroup : ScaledState<ChunkSm90Stages<T>, typename T::Element, T::kDepth / 2, T::kSumsChunks> {
  using Base = ScaledState<ChunkSm90Stages<T>, typename T::Element, T::kDepth / 2, T::kSumsChunks>;
  using Element = typename T::Element;
  using Base::arguments;
  using Base::Base;
  using Base::batch;
  using Base::count;
  using Base::decay;
  using Base::guard;
  using Base::head;
  using Base::kFreshScale;
  using Base::kRegisters;
  using Base::log2_gamma;
  using Base::scale_state;
  using Base::state;
  using Base::state_place;
  using Base::state_scale;
  using Base::warp;
  using Base::warp_release;
  using typename Base::Ring;
  using typename Base::ScoresRing;
  static constexpr int kSteps = T::kChunk / kMmaDepth;
  static constexpr int kEarlySteps = T::kDepthSlices < 8 ? 1 : 2;  // of the update, before the scores' MMAs

  using Tokens = uint32_t[16];  // of V, transposed, decayed

  float out[32];

  // The slice of the depth under whose MMAs a step's tokens are prepared; wider apart, a depth of 256 spills.
  __device__ __forceinline__ static constexpr int slice_of_tokens(int step) {
    return T::kDepthSlices < 8 ? step * T::kDepthSlices / kSteps : step + 1;
  }
  __device__ __forceinline__ static int group() { return thread_index() / kWarpgroupThreads - 1; }
  __device__ __forceinline__ int first_column() const { return this->slice * T::kColumns + 64 * group(); }

  // --- states --------------------------------------------------------------------------------------------------------

  template <typename Visit>
  __device__ __forceinline__ void visit_state(Visit&& visit) {
    auto const& pass = arguments.pass;
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) {
      int const column = first_column() + 16 * warp() + lane_here() / 4 + i % 4 / 2 * 8;
      int const depth = i / 4 * 8 + 2 * (lane_here() & 3) + i % 2;
      if (column < pass.columns && depth < pass.depth) visit(state[i], depth * pass.columns + column);
    }
  }
  // Before the super-chunk: the given state and what the pieces before have added to it.
  __device__ __forceinline__ void load_state() {
    state_scale = kFreshScale;
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) state[i] = 0.0f;
    if constexpr (T::kStatesOnly) return;
    auto const& pass = arguments.pass;
    if (pass.first_states != nullptr) {
      float const* const source = pass.first_states + state_place(1, 0);
      visit_state([source](float& value, int offset) { value = source[offset]; });
    }
    if constexpr (T::kDivided) {
      int const pieces = this->super * pass.pieces;
      if (pieces > 0) add_pieces(pieces);
    }
    scale_state(1.0f / kFreshScale);
  }
  __device__ __forceinline__ void add_pieces(int pieces) {
    wait_on_dependent_grids();
    float const factor = exp2f(log2_gamma * float(arguments.pass.super_chunk / arguments.pass.pieces));
    for (int piece = 0; piece < pieces; ++piece) {
      float4 const* const source = piece_place(piece);
#pragma unroll
      for (int i = 0; i < kRegisters / 4; ++i) {
        float4 const added = source[i * kWarpgroupThreads];
        float const values[4] = {added.x, added.y, added.z, added.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) state[4 * i + j] = fmaf(state[4 * i + j], factor, values[j]);
      }
    }
  }
  __device__ __forceinline__ void store_state() {
    if constexpr (T::kStatesOnly) {
      float4* const target = piece_place(this->super);
#pragma unroll
      for (int i = 0; i < kRegisters; i += 4) {
        target[i / 4 * kWarpgroupThreads] = make_float4(state[i] * state_scale, state[i + 1] * state_scale,
                                                        state[i + 2] * state_scale, state[i + 3] * state_scale);
      }
      return;
    }
    auto const& pass = arguments.pass;
    if (pass.last_states == nullptr || this->super + 1 < pass.supers.divisor) return;
    float* const target = pass.last_states + state_place(1, 0);
    visit_state([target, this](float& value, int offset) { target[offset] = value * state_scale; });
  }
  // This thread's part of what a piece adds.
  __device__ __forceinline__ float4* piece_place(int piece) const {
    auto const& pass = arguments.pass;
    int64_t const sequence = int64_t(batch) * pass.heads.divisor + head;
    int64_t const part = ((sequence * pass.last_slots + piece) * T::kSlices + this->slice) * T::kWarpgroups + group();
    return reinterpret_cast<float4*>(arguments.pieces) + part * (kRegisters / 4 * kWarpgroupThreads) +
           thread_index() % kWarpgroupThreads;
  }

  // --- MMAs ----------------------------------------------------------------------------------------------------------

  using Packed = uint32_t[T::kPackedRegisters];
  // The state, rounded, of a slice of the depth.
  __device__ __forceinline__ void pack_slice(Packed& packed, int slice_of_depth) const {
#pragma unroll
    for (int i = 0; i < T::kPackedRegisters; ++i) {
      int const at = 2 * (slice_of_depth * T::kPackedRegisters + i);
      packed[i] = pack_pair<Element>(state[at], state[at + 1]);
    }
  }
  // out (+)= S^T Q^T, of a slice of the depth.
  __device__ __forceinline__ void issue_slice(Packed const& packed, int slice_of_depth, int stage) {
    constexpr int kBlockSteps = kSwizzleColumns / kMmaDepth, kSteps = T::kPackedRegisters / 4;
    uint64_t const q = make_smem_desc(this->q_tile(stage), 0);
    warpgroup_arrive();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      int const step = slice_of_depth * kSteps + i;
      int const offset = step / kBlockSteps * T::kBlockBytes + step % kBlockSteps * kMmaDepth * 2;
      gemm_rs<Element, Major::K>(out, packed + 4 * i, advance_desc(q, offset), step > 0);
    }
    warpgroup_commit_batch();
  }
  // out += V^T P^T
  __device__ __forceinline__ void issue_scores(int stage, int index) {
    uint64_t const v = make_smem_desc(this->v_tile(stage) + group() * T::kBlockBytes, T::kBlockBytes);
    uint64_t const p = make_smem_desc(this->scores_tile(index), 0);
    warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < T::kChunk / kMmaDepth; ++step) {
      gemm_ss<Element, Major::MN>(out, advance_desc(v, step * kMmaDepth * kSwizzleRowBytes),
                                  advance_desc(p, step * kMmaDepth * 2), true);
    }
    warpgroup_commit_batch();
  }
  // state += (decayed V)^T K, of a step's tokens.
  __device__ __forceinline__ void issue_update(uint32_t const* tokens, int stage, int step) {
    uint64_t const k = make_smem_desc(this->k_tile(stage), T::kBlockBytes);
    warpgroup_arrive();
    gemm_rs<Element, Major::MN>(this->updated(), tokens, advance_desc(k, step * kMmaDepth * kSwizzleRowBytes),
                                !T::kSumsChunks || step > 0);
    warpgroup_commit_batch();
  }
  // The A operand of the update: V's tokens of a step times gamma to their distance from the chunk's end, over the
  // scale.
  __device__ __forceinline__ void prepare_tokens(uint32_t* tokens, int stage, bool last, int step) const {
    uint32_t const v = this->v_tile(stage) + group() * T::kBlockBytes;
    int const token = lane_here() / 16 * 8 + lane_here() % 8, chunk = 2 * warp() + lane_here() / 8 % 2;
    uint32_t raw[4];
    load_matrix_x4_transposed(raw, swizzled_address(v, step * kMmaDepth + token, chunk, token & 7));
    float const scale = reciprocal(state_scale);
    float4 const factors = this->token_factors().load(step, last);
#pragma unroll
    for (int further = 0; further < 2; ++further) {
      float const factor[2] = {scale * (further ? factors.z : factors.x), scale * (further ? factors.w : factors.y)};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float2 const pair = unpack_pair<Element>(raw[2 * further + half]);
        tokens[2 * further + half] = pack_pair<Element>(pair.x * factor[0], pair.y * factor[1]);
      }
    }
  }

  // --- output --------------------------------------------------------------------------------------------------------

  // The contribution of the state to a token decays with the token's place in the chunk.
  __device__ __forceinline__ void scale_output(float scale) {
    float const first = float(2 * (lane_here() & 3) + 1), eight = this->power(8);
    float factor[2] = {scale * this->power(first), scale * this->power(first + 1.0f)};
#pragma unroll
    for (int g = 0; g < T::kChunk / 8; ++g) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        out[4 * g + e] *= factor[e];
        out[4 * g + 2 + e] *= factor[e];
        factor[e] *= eight;
      }
    }
  }
  __device__ __forceinline__ void store_output(int index) const {
    uint32_t const tile = this->smem + T::kOutOffset + group() * T::kBlockBytes;
    bool const stores = thread_index() % kWarpgroupThreads == 0;
    if (stores) tma_store_wait_read();
    named_barrier(1 + group(), kWarpgroupThreads);
    int const token = lane_here() / 16 * 8 + lane_here() % 8, chunk = 2 * warp() + lane_here() / 8 % 2;
    uint32_t const place = swizzled_address(tile, token, chunk, token & 7);
#pragma unroll
    for (int g = 0; g < T::kChunk / 8; g += 2) {
      uint32_t tiles[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        tiles[i] = pack_pair<Element>(out[4 * g + 2 * i], out[4 * g + 2 * i + 1]);
      }
      store_matrix_x4_transposed(place + 8 * g * kSwizzleRowBytes, tiles);
    }
    fence_view_async_shared();
    named_barrier(1 + group(), kWarpgroupThreads);
    if (stores) {
      tma_store(arguments.o.descriptor, tile, first_column(), this->row(index), head * arguments.o.head_step,
                batch * arguments.o.batch_step);
    }
  }

  // --- main loops ----------------------------------------------------------------------------------------------------

  // The state before a chunk, as far as its MMAs start with it. No MMA may be in flight.
  __device__ __forceinline__ void begin_chunk(Packed (&packed)[2]) {
    guard();
    pack_slice(packed[0], 0);
    pack_slice(packed[1], 1);
  }
  // The tensor cores have a chunk's MMAs in one queue: V's tokens are prepared under those of the state, what the state
  // gives is scaled under the first of the update, and the output leaves under the last.
  __device__ __forceinline__ void run() {
    load_state();
    Packed packed[2];
    Tokens tokens;
    begin_chunk(packed);
    for (int index = 0; index < count; ++index) {
      int const stage = Ring::stage(index);
      float const scale = arguments.pass.scale * state_scale, taken = decay(this->length(index));
      this->q_ring().consumer_wait(index);
#pragma unroll
      for (int slice_of_depth = 0; slice_of_depth < T::kDepthSlices; ++slice_of_depth) {
        if (slice_of_depth > 1) {
          warpgroup_wait<1>();
          fence_operands(packed[slice_of_depth % 2]);
          pack_slice(packed[slice_of_depth % 2], slice_of_depth);
        }
        issue_slice(packed[slice_of_depth % 2], slice_of_depth, stage);
        if (slice_of_depth == 0) this->v_ring().consumer_wait(index);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          if (slice_of_tokens(step) == slice_of_depth)
            prepare_tokens(tokens + 4 * step, stage, this->is_last(index), step);
        }
      }
      if constexpr (T::kDepthSlices <= 2) {  // without, the compiler waits where the state is scaled
        warpgroup_wait<1>();
        fence_operands(packed[0]);
      }
      scale_state(taken);
      this->k_ring().consumer_wait(index);
#pragma unroll
      for (int step = 0; step < kEarlySteps; ++step) issue_update(tokens + 4 * step, stage, step);
      warpgroup_wait<kEarlySteps>();
      fence_operands(packed[0]);
      fence_operands(packed[1]);
      fence_accumulators(out);
      warp_release(this->q_ring().empty(stage));
      scale_output(scale);
      this->scores_ring().consumer_wait(index);
      issue_scores(stage, index);
#pragma unroll
      for (int step = kEarlySteps; step < kSteps; ++step) issue_update(tokens + 4 * step, stage, step);
      warpgroup_wait<kSteps - kEarlySteps>();
      fence_accumulators(out);
      warp_release(this->v_ring().empty(stage));
      warp_release(this->scores_ring().empty(ScoresRing::stage(index)));
      store_output(index);
      warpgroup_wait<0>();
      fence_operands(tokens);
      this->end_update();
      warp_release(this->k_ring().empty(stage));
      begin_chunk(packed);
    }
    store_state();
    if (thread_index() % kWarpgroupThreads == 0) tma_store_wait_read();
  }
  // Without outputs, the next chunk's tokens are prepared while this one's are multiplied.
  __device__ __forceinline__ void run_states() {
    load_state();
    Tokens tokens, next;
    float taken = load_tokens(next, 0);
    for (int index = 0; index < count; ++index) {
      int const stage = Ring::stage(index);
#pragma unroll
      for (int i = 0; i < 16; ++i) tokens[i] = next[i];
      scale_state(taken);
      this->k_ring().consumer_wait(index);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) issue_update(tokens + 4 * step, stage, step);
      if (index + 1 < count) taken = load_tokens(next, index + 1);
      warpgroup_wait<0>();
      fence_operands(tokens);
      this->end_update();
      warp_release(this->k_ring().empty(stage));
    }
    store_state();
  }
  __device__ __forceinline__ float load_tokens(Tokens& tokens, int index) {
    int const stage = Ring::stage(index);
    float const taken = decay(this->length(index));
    this->v_ring().consumer_wait(index);
    uint32_t seen = 0;  // something of every load
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      prepare_tokens(tokens + 4 * step, stage, this->is_last(index), step);
      seen |= tokens[4 * step];
    }
    __syncwarp();
    if (lane_here() == 0) arrive_after(seen, this->v_ring().empty(stage));
    return taken;
  }
};

template <typename T>
__global__ void __launch_bounds__(T::kThreads, T::kCtasPerSm)
    chunks_sm90(ChunkSm90Arguments const __grid_constant__ arguments) {
  extern __shared__ char smem_bytes[];
  uint32_t const smem = aligned_shared(smem_bytes);
  if (threadIdx.x == 0) {
    prefetch_descriptor(arguments.k.descriptor);
    prefetch_descriptor(arguments.v.descriptor);
    if constexpr (!T::kStatesOnly) {
      prefetch_descriptor(arguments.q.descriptor);
      prefetch_descriptor(arguments.o.descriptor);
    }
    ChunkSm90Stages<T>(arguments, smem, int(blockIdx.x)).init_barriers();
  }
  if constexpr (T::kStatesOnly) {
    begin_call();
  } else {
    if (arguments.pass.supers.divisor == 1) wait_on_dependent_grids();  // else states are found first
  }
  if (threadIdx.x < kWarpgroupThreads) ChunkSm90Stages<T>(arguments, smem, int(blockIdx.x)).store_token_factors();
  __syncthreads();
  if (threadIdx.x < kWarpgroupThreads) {
    if constexpr (T::kMovesRegisters) cutlass::arch::warpgroup_reg_dealloc<T::kScoreRegisters>();
    ScoreWarpgroup<T> warpgroup(arguments, smem, int(blockIdx.x));
    warpgroup.run();
  } else {
    if constexpr (T::kMovesRegisters) cutlass::arch::warpgroup_reg_alloc<T::kStateRegisters>();
    StateWarpgroup<T> warpgroup(arguments, smem, int(blockIdx.x));
    if constexpr (T::kStatesOnly) {
      warpgroup.run_states();
    } else {
      warpgroup.run();
    }
  }
}

}  // namespace attention_autotuner

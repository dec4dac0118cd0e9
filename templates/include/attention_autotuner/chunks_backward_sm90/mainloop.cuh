// A pass over chunks of retention's backward by WGMMA: a CTA visits the chunks of a super-chunk of one head for some
// columns of Z, forward in time for dq, backward for dk and dv.
//
// It is the pass of the forward direction, with X, Y and Z for Q, K and V; see chunks_sm90/mainloop.cuh. Backward in
// time the state is the gradient of the state, a row sees the tokens behind it, and the scale of the scores goes with
// the tokens of Z, not with the output: registers hold the state over the scale of their own and over a unit.
//
// Under a group of query heads dk and dv are fp32 partial sums, one for each head, which registers write at once.
//
// Layouts: see sm90/wgmma.cuh.
#pragma once

#include "attention_autotuner/chunks_backward_sm90/producer.cuh"
#include "attention_autotuner/chunks_backward_sm90/state.cuh"
#include "attention_autotuner/common/convert.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/shared_memory.cuh"
#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/sm90/pipeline.cuh"
#include "attention_autotuner/sm90/roles.cuh"
#include "attention_autotuner/sm90/stmatrix.cuh"
#include "attention_autotuner/sm90/swizzle.cuh"
#include "attention_autotuner/sm90/tma.cuh"
#include "attention_autotuner/sm90/wgmma.cuh"

namespace attention_autotuner {

// A warpgroup that has the state for 64 columns, or for a part of their depth.
template <typename T>
struct ChunkBackwardState : ChunkBackwardRegisters<T> {
  using Base = ChunkBackwardRegisters<T>;
  using Element = typename T::Element;
  using Base::arguments;
  using Base::Base;
  using Base::count;
  using Base::first_column;
  using Base::group;
  using Base::own_piece;
  using Base::part;
  using Base::state;
  using Base::state_scale;
  using Base::warp;
  using Base::warp_release;
  using typename Base::Ring;
  static constexpr int kPieceRegisters = Base::kRegisters / T::kPartPieces;
  static constexpr int kSteps = T::kChunk / kMmaDepth;
  static constexpr int kPieceSlices = T::kDepthSlices / T::kPartPieces;

  using Tokens = uint32_t[16];                                           // of Z, transposed, decayed
  using Share = float[16];                                               // of the output, in parts
  using Rounded = std::conditional_t<T::kInParts, Share, uint32_t[16]>;  // output, or what is kept of it

  float out[32];

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
  // out (+)= S^T X^T, of a slice of the depth.
  __device__ __forceinline__ void issue_slice(Packed const& packed, int slice_of_depth, int index) {
    constexpr int kBlockSteps = kSwizzleColumns / kMmaDepth, kSteps = T::kPackedRegisters / 4;
    constexpr int kPieceSteps = T::kPieceDepth / kMmaDepth;
    warpgroup_arrive();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      int const step = slice_of_depth * kSteps + i, here = step % kPieceSteps;
      int const offset = here / kBlockSteps * T::kBlockBytes + here % kBlockSteps * kMmaDepth * 2;
      uint64_t const x = make_smem_desc(this->x_piece(index, own_piece(step / kPieceSteps)), 0);
      gemm_rs<Element, Major::K>(out, packed + 4 * i, advance_desc(x, offset), step > 0);
    }
    warpgroup_commit_batch();
  }
  // out += Z^T P^T; in parts, of a share of the tokens that are summed over.
  __device__ __forceinline__ void issue_scores(int stage, int index) {
    constexpr int kMySteps = kSteps / T::kDepthParts;
    uint32_t const z_rows =
        this->z_tile(stage) + this->column_group() * T::kBlockBytes + part() * kMySteps * kMmaDepth * kSwizzleRowBytes;
    uint64_t const z = make_smem_desc(z_rows, T::kBlockBytes);
    uint64_t const p = make_smem_desc(this->scores_tile(index) + part() * kMySteps * kMmaDepth * 2, 0);
    warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < kMySteps; ++step) {
      gemm_ss<Element, Major::MN>(out, advance_desc(z, step * kMmaDepth * kSwizzleRowBytes),
                                  advance_desc(p, step * kMmaDepth * 2), true);
    }
    warpgroup_commit_batch();
  }
  // state += (decayed Z)^T Y, of a step's tokens.
  __device__ __forceinline__ void issue_update(uint32_t const* tokens, int index, int step) {
    warpgroup_arrive();
#pragma unroll
    for (int piece = 0; piece < T::kPartPieces; ++piece) {
      uint64_t const y = make_smem_desc(this->y_piece(index, own_piece(piece)), T::kBlockBytes);
      auto& columns = reinterpret_cast<float (&)[kPieceRegisters]>(this->updated()[piece * kPieceRegisters]);
      gemm_rs<Element, Major::MN>(columns, tokens, advance_desc(y, step * kMmaDepth * kSwizzleRowBytes),
                                  !T::kSumsChunks || step > 0);
    }
    warpgroup_commit_batch();
  }
  // The A operand of the update: Z's tokens of a step times the factors of this lane's, two and two eight tokens
  // further.
  __device__ __forceinline__ void scale_tokens(uint32_t* tokens, int stage, int step, float4 factors) const {
    uint32_t const z = this->z_tile(stage) + this->column_group() * T::kBlockBytes;
    int const token = lane_here() / 16 * 8 + lane_here() % 8, chunk = 2 * warp() + lane_here() / 8 % 2;
    uint32_t raw[4];
    load_matrix_x4_transposed(raw, swizzled_address(z, step * kMmaDepth + token, chunk, token & 7));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float2 const pair = unpack_pair<Element>(raw[i]);
      tokens[i] = i < 2 ? pack_pair<Element>(pair.x * factors.x, pair.y * factors.y)
                        : pack_pair<Element>(pair.x * factors.z, pair.y * factors.w);
    }
  }
  // By gamma to the distance from where the pass leaves the chunk, over the scale.
  __device__ __forceinline__ void prepare_tokens(uint32_t* tokens, int stage, bool last, int step) const {
    float const scale = (T::kReversed ? arguments.pass.scale : 1.0f) * reciprocal(state_scale * this->unit);
    float4 const factors = this->token_factors().load(step, last);
    scale_tokens(tokens, stage, step,
                 make_float4(scale * factors.x, scale * factors.y, scale * factors.z, scale * factors.w));
  }

  // --- output --------------------------------------------------------------------------------------------------------

  // The contribution of the state to a token decays with the token's distance from where the pass enters the chunk.
  __device__ __forceinline__ void scale_output(float scale, bool last) {
    if constexpr (T::kReversed) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        float4 const factors = this->output_factors().load(step, last);
        float const factor[4] = {scale * factors.x, scale * factors.y, scale * factors.z, scale * factors.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) out[8 * step + i] *= factor[i / 4 * 2 + i % 2];
      }
      return;
    }
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
  __device__ __forceinline__ void pack_output(Rounded& rounded) const {
#pragma unroll
    for (int i = 0; i < 16; ++i) rounded[i] = pack_pair<Element>(out[2 * i], out[2 * i + 1]);
  }
  __device__ __forceinline__ void store_output(Rounded const& rounded, int index) const {
    uint32_t const tile = this->smem + T::kOutOffset + group() * T::kBlockBytes;
    bool const stores = thread_index() % kWarpgroupThreads == 0;
    if (stores) tma_store_wait_read();
    named_barrier(1 + group(), kWarpgroupThreads);
    int const token = lane_here() / 16 * 8 + lane_here() % 8, chunk = 2 * warp() + lane_here() / 8 % 2;
    uint32_t const place = swizzled_address(tile, token, chunk, token & 7);
#pragma unroll
    for (int g = 0; g < T::kChunk / 8; g += 2) {
      uint32_t const tiles[4] = {rounded[2 * g], rounded[2 * g + 1], rounded[2 * g + 2], rounded[2 * g + 3]};
      store_matrix_x4_transposed(place + 8 * g * kSwizzleRowBytes, tiles);
    }
    fence_view_async_shared();
    named_barrier(1 + group(), kWarpgroupThreads);
    if (stores) {
      tma_store(arguments.out.descriptor, tile, first_column(), this->row(index), this->head * arguments.out.head_step,
                this->batch * arguments.out.batch_step);
    }
  }

  // Parts of the depth make parts of the output, and each warpgroup adds those of half of the tokens: the others it
  // passes to its partner, through shared memory and in fp32.
  __device__ __forceinline__ uint32_t share_place(int of, int pair) const {
    int const place = pair * kWarpgroupThreads + thread_index() % kWarpgroupThreads;
    return this->smem + T::kShareOffset + of * T::kShareBytes + 8 * place;
  }
  __device__ __forceinline__ void pass_share(Share& kept) const {
    bool const second = part() == 1;
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
      float2 const passed = second ? make_float2(out[i], out[i + 1]) : make_float2(out[16 + i], out[17 + i]);
      store_shared_float2(share_place(part(), i / 2), passed);
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) kept[i] = second ? out[16 + i] : out[i];
  }
  // Both warpgroups wait for each other twice: until shares have been passed and the last output has been read, and
  // until the output is stored and shares may be passed once more.
  __device__ __forceinline__ void finish_output(Share const& kept, int index) const {
    bool const stores = thread_index() == kWarpgroupThreads;
    if (stores) tma_store_wait_read();
    named_barrier(1, 2 * kWarpgroupThreads);
    Share sum;
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
      float2 const taken = load_shared_float2(share_place(1 - part(), i / 2));
      sum[i] = kept[i] + taken.x;
      sum[i + 1] = kept[i + 1] + taken.y;
    }
    uint32_t const tile = this->smem + T::kOutOffset;
    int const first = part() * T::kChunk / 2;
    if (is_partial()) {
      write_partial(sum, index, first);
    } else {
      int const token = lane_here() / 16 * 8 + lane_here() % 8, chunk = 2 * warp() + lane_here() / 8 % 2;
      uint32_t const place = swizzled_address(tile, first + token, chunk, token & 7);
#pragma unroll
      for (int g = 0; g < 4; g += 2) {
        uint32_t tiles[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) tiles[i] = pack_pair<Element>(sum[4 * g + 2 * i], sum[4 * g + 2 * i + 1]);
        store_matrix_x4_transposed(place + 8 * g * kSwizzleRowBytes, tiles);
      }
      fence_view_async_shared();
    }
    named_barrier(1, 2 * kWarpgroupThreads);
    if (stores && !is_partial()) {
      tma_store(arguments.out.descriptor, tile, first_column(), this->row(index), this->head * arguments.out.head_step,
                this->batch * arguments.out.batch_step);
    }
  }

  __device__ __forceinline__ bool is_partial() const { return T::kReversed && arguments.pass.partial != nullptr; }
  // Writes the output to the partial sums, from a token on.
  template <int Registers>
  __device__ __forceinline__ void write_partial(float const (&out)[Registers], int index, int first = 0) const {
    auto const& pass = arguments.pass;
    int const column = first_column() + 16 * warp() + lane_here() / 4;
    int const row = this->row(index) + first + 2 * (lane_here() & 3);
    int64_t const first_row = (int64_t(this->batch) * pass.heads.divisor + this->head) * pass.seqlen + row;
    float* const target = pass.partial + first_row * pass.columns + column;
#pragma unroll
    for (int i = 0; i < Registers; ++i) {
      int const token = i / 4 * 8 + i % 2, further = i % 4 / 2 * 8;
      if (row + token < pass.seqlen && column + further < pass.columns) {
        target[int64_t(token) * pass.columns + further] = out[i];
      }
    }
  }

  // --- main loops ----------------------------------------------------------------------------------------------------

  // The state before a chunk, as far as its MMAs start with it. No MMA but those that end the last chunk may be in
  // flight.
  __device__ __forceinline__ void begin_chunk(Packed (&packed)[2]) {
    this->guard();
    pack_slice(packed[0], 0);
    pack_slice(packed[1], 1);
  }
  __device__ __forceinline__ void run() {
    static_assert(!T::kInParts || kPieceSlices * T::kPackedRegisters * 4 == T::kPieceDepth);
    this->load_state();
    Packed packed[2];
    Tokens tokens;
    Rounded rounded;
    begin_chunk(packed);
    for (int index = 0; index < count; ++index) {
      int const stage = Ring::stage(index);
      bool const last = this->is_last(index);
#pragma unroll
      for (int slice_of_depth = 0; slice_of_depth < T::kDepthSlices; ++slice_of_depth) {
        if (slice_of_depth % kPieceSlices == 0) this->wait_x(index, own_piece(slice_of_depth / kPieceSlices));
        if (slice_of_depth > 1) {
          warpgroup_wait<1>();
          if (slice_of_depth > kPieceSlices && slice_of_depth % kPieceSlices == 1) {
            this->release_x(index, own_piece(slice_of_depth / kPieceSlices - 1));
          }
          fence_operands(packed[slice_of_depth % 2]);
          pack_slice(packed[slice_of_depth % 2], slice_of_depth);
        }
        issue_slice(packed[slice_of_depth % 2], slice_of_depth, index);
        if (slice_of_depth == 1 && index > 0) end_output(rounded, index - 1);
      }
      warpgroup_wait<1>();
      fence_operands(packed[0]);
      float const scale = (T::kReversed ? 1.0f : arguments.pass.scale) * (state_scale * this->unit);
      this->scale_state(this->decay(this->length(index)));
      this->z_ring().consumer_wait(index);
      this->wait_own_y(index);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        prepare_tokens(tokens + 4 * step, stage, last, step);
        issue_update(tokens + 4 * step, index, step);
      }
      warpgroup_wait<kSteps>();
      fence_operands(packed[1]);
      fence_accumulators(out);
      this->release_x(index, own_piece(T::kPartPieces - 1));
      scale_output(scale, last);
      this->scores_ring().consumer_wait(index);
      issue_scores(stage, index);
      warpgroup_wait<1>();
      fence_operands(tokens);
      this->end_update();
      this->release_own_y(index);
      begin_chunk(packed);
      warpgroup_wait<0>();
      fence_accumulators(out);
      warp_release(this->z_ring().empty(stage));
      warp_release(this->scores_ring().empty(Base::ScoresRing::stage(index)));
      if constexpr (T::kInParts) {
        pass_share(rounded);
      } else if (is_partial()) {
        write_partial(out, index);
      } else {
        pack_output(rounded);
      }
    }
    end_output(rounded, count - 1);
    this->store_state();
    if (thread_index() % kWarpgroupThreads == 0) tma_store_wait_read();
  }
  __device__ __forceinline__ void end_output(Rounded const& rounded, int index) const {
    if constexpr (T::kInParts) {
      finish_output(rounded, index);
    } else if (!is_partial()) {
      store_output(rounded, index);
    }
  }
  // Without outputs, the next chunk's tokens are prepared while this one's are multiplied.
  __device__ __forceinline__ void run_states() {
    this->load_state();
    Tokens tokens, next;
    float taken = load_tokens(next, 0);
    for (int index = 0; index < count; ++index) {
#pragma unroll
      for (int i = 0; i < 16; ++i) tokens[i] = next[i];
      this->scale_state(taken);
      this->wait_own_y(index);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) issue_update(tokens + 4 * step, index, step);
      if (index + 1 < count) taken = load_tokens(next, index + 1);
      warpgroup_wait<0>();
      fence_operands(tokens);
      this->end_update();
      this->release_own_y(index);
    }
    this->store_state();
  }
  __device__ __forceinline__ float load_tokens(Tokens& tokens, int index) {
    int const stage = Ring::stage(index);
    float const taken = this->decay(this->length(index));
    this->z_ring().consumer_wait(index);
    uint32_t seen = 0;  // something of every load
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      prepare_tokens(tokens + 4 * step, stage, this->is_last(index), step);
      seen |= tokens[4 * step];
    }
    __syncwarp();
    if (lane_here() == 0) arrive_after(seen, this->z_ring().empty(stage));
    return taken;
  }
};

template <typename T>
__global__ void __launch_bounds__(T::kThreads, T::kCtasPerSm)
    chunks_backward_sm90(ChunkBackwardArguments const __grid_constant__ arguments) {
  extern __shared__ char smem_bytes[];
  uint32_t const smem = aligned_shared(smem_bytes);
  if (threadIdx.x == 0) {
    prefetch_descriptor(arguments.y.descriptor);
    prefetch_descriptor(arguments.z.descriptor);
    if constexpr (!T::kStatesOnly) {
      prefetch_descriptor(arguments.x.descriptor);
      prefetch_descriptor(arguments.out.descriptor);
    }
    ChunkBackwardStages<T>(arguments, smem, int(blockIdx.x)).init_barriers();
  }
  if (arguments.first) wait_on_dependent_grids();
  launch_dependent_grids();
  if (threadIdx.x < kWarpgroupThreads) ChunkBackwardStages<T>(arguments, smem, int(blockIdx.x)).store_token_factors();
  __syncthreads();
  if (threadIdx.x < kWarpgroupThreads) {
    if constexpr (T::kMovesRegisters) cutlass::arch::warpgroup_reg_dealloc<T::kScoreRegisters>();
    ChunkBackwardScores<T> warpgroup(arguments, smem, int(blockIdx.x));
    warpgroup.run();
  } else {
    if constexpr (T::kMovesRegisters) cutlass::arch::warpgroup_reg_alloc<T::kStateRegisters>();
    ChunkBackwardState<T> warpgroup(arguments, smem, int(blockIdx.x));
    if constexpr (T::kStatesOnly) {
      warpgroup.run_states();
    } else {
      warpgroup.run();
    }
  }
  if (threadIdx.x == kWarpgroupThreads) wait_on_dependent_grids();  // so that what waits for this pass waits for all
}

}  // namespace attention_autotuner

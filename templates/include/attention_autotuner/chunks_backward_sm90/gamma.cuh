// The gradient of gamma beyond super-chunks: see common/gamma.cuh.
#pragma once

#include "attention_autotuner/chunks_backward_sm90/mainloop.cuh"
#include "attention_autotuner/common/gamma.cuh"

namespace attention_autotuner {

using ChunkGammaArguments = GammaPassArguments<ChunkBackwardArguments>;

// The pass of dv, whose Z are output gradients, sums over queries; that of dq, whose Z are keys, over keys.
template <typename T>
struct ChunkGammaState : ChunkBackwardState<T> {
  using Base = ChunkBackwardState<T>;
  using Base::Base;
  using typename Base::Ring;

  __device__ __forceinline__ float run(ChunkGammaArguments const& mine) {
    auto const& pass = mine.chunks.pass;
    int const start = this->super * pass.super_chunk, length = minimum(pass.super_chunk, pass.seqlen - start);
    int64_t const place = this->state_place(pass.supers.divisor, this->super);
    float const most = most_of_shares(length, this->log2_gamma), rest = 1.0f / most;
    auto share = [&](float n) {  // of tokens beyond the sequence, none
      float const distance = fmaxf(n, 0.0f);
      return rest * distance * this->power(distance);
    };
#pragma unroll
    for (float& value : this->state) value = 0.0f;
    if constexpr (!T::kReversed) {
      float const* const source = mine.states + place;
      float const whole = share(float(length));
      this->visit_state([source, whole](float& value, int offset) { value = whole * source[offset]; });
    }
    typename Base::Tokens tokens;
    for (int index = 0; index < this->count; ++index) {
      int const stage = Ring::stage(index), time = this->row(index) - start;
      this->z_ring().consumer_wait(index);
      this->wait_own_y(index);
#pragma unroll
      for (int step = 0; step < Base::kSteps; ++step) {
        auto share_of = [&](int further) {
          int const token = step * kMmaDepth + 2 * (lane_here() & 3) + further;
          return share(float(T::kReversed ? time + 1 + token : length - 1 - time - token));
        };
        this->scale_tokens(tokens + 4 * step, stage, step,
                           make_float4(share_of(0), share_of(1), share_of(8), share_of(9)));
        this->issue_update(tokens + 4 * step, index, step);
      }
      warpgroup_wait<0>();
      fence_operands(tokens);
      this->end_update();
      this->release_own_y(index);
      this->warp_release(this->z_ring().empty(stage));
    }
    float sum = 0.0f;
    float const* const partner = (T::kReversed ? mine.states : mine.gradients) + place;
    this->visit_state([&sum, partner](float& value, int offset) { sum = fmaf(value, partner[offset], sum); });
    return (T::kReversed ? pass.scale : 1.0f) * most * warp_sum(sum);
  }
};

template <typename T>
__global__ void __launch_bounds__(T::kThreads, T::kCtasPerSm)
    chunk_gamma_pass(ChunkGammaArguments const __grid_constant__ arguments) {
  extern __shared__ char smem_bytes[];
  uint32_t const smem = aligned_shared(smem_bytes);
  if (threadIdx.x == 0) {
    prefetch_descriptor(arguments.chunks.y.descriptor);
    prefetch_descriptor(arguments.chunks.z.descriptor);
    ChunkBackwardStages<T>(arguments.chunks, smem, int(blockIdx.x)).init_barriers();
  }
  __syncthreads();
  if (threadIdx.x < kWarpgroupThreads) {
    if constexpr (T::kMovesRegisters) cutlass::arch::warpgroup_reg_dealloc<T::kScoreRegisters>();
    ChunkBackwardScores<T> warpgroup(arguments.chunks, smem, int(blockIdx.x));
    warpgroup.run();
  } else {
    if constexpr (T::kMovesRegisters) cutlass::arch::warpgroup_reg_alloc<T::kStateRegisters>();
    ChunkGammaState<T> warpgroup(arguments.chunks, smem, int(blockIdx.x));
    float const sum = warpgroup.run(arguments);
    int const warp = thread_index() / 32 - 4;
    if (lane_here() == 0) arguments.partial[int64_t(blockIdx.x) * 4 * T::kWarpgroups + warp] = sum;
  }
}

}  // namespace attention_autotuner

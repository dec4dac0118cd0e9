// The gradient of gamma beyond super-chunks: see common/gamma.cuh.
#pragma once

#include "attention_autotuner/chunks_sm80/mainloop.cuh"
#include "attention_autotuner/common/gamma.cuh"

namespace attention_autotuner {

// The pass of dv, whose Z are output gradients, sums over queries; that of dq, whose Z are keys, over keys.
template <typename T>
struct GammaWarp : ChunkWarp<T, true> {
  using Base = ChunkWarp<T, true>;

  __device__ __forceinline__ GammaWarp(typename T::Arguments const& arguments, uint32_t smem, int index)
      : Base(arguments, smem, index) {}

  __device__ __forceinline__ float run(GammaPassArguments<typename T::Arguments> const& mine) {
    constexpr int kStages = minimum(T::kStages, 2);
    auto const& arguments = this->arguments;
    int const start = super * arguments.super_chunk;
    int const length = minimum(arguments.super_chunk, sequence.readable(arguments) - start);
    if constexpr (T::kPacked) {
      if (length <= 0) return 0.0f;
    }
    int64_t const place = this->state_place(arguments.supers.divisor, sequence.slot(super));
    float const most = most_of_shares(length, this->log2_gamma), rest = 1.0f / most;
    auto share = [&](float n) {  // of tokens beyond the sequence, none
      float const distance = fmaxf(n, 0.0f);
      return rest * distance * exp2_approximate(this->log2_gamma * distance);
    };
    auto fetch = [&](int chunk, int stage) {
      if (chunk < this->end) {
        int const thread = thread_index(), row = chunk * T::kChunk, rows = sequence.readable(arguments) - row;
        int const tensor_row = sequence.first_row + row;
        uint32_t const base = smem + stage * T::kStageBytes;
        CopyY::copy(base + T::kYOffset + CopyY::offset(thread),
                    this->y() + (tensor_row + CopyY::row(thread)) * arguments.y.stride_row + CopyY::column(thread),
                    arguments.y.stride_row, rows, arguments.depth);
        CopyZ::copy(base + T::kZOffset + CopyZ::offset(thread),
                    this->z() + (tensor_row + CopyZ::row(thread)) * arguments.z.stride_row + CopyZ::column(thread),
                    arguments.z.stride_row, rows, arguments.columns - this->slice * T::kColumns);
      }
      cp_async_fence();
    };
    fetch(this->first, 0);
    clear(this->state);
    if constexpr (!T::kReversed) {
      float const* const source = mine.states + place;
      float const whole = share(float(length));
      this->visit_state([source, whole](float& value, int offset) { value = whole * source[offset]; });
    }
    for (int chunk = this->first; chunk < this->end; ++chunk) {
      int const stage = (chunk - this->first) % kStages, time = chunk * T::kChunk - start;
      if constexpr (kStages == 2) fetch(chunk + 1, 1 - stage);
      cp_async_wait<kStages - 1>();
      __syncthreads();
      this->add_tokens(smem + stage * T::kStageBytes, [&](float token) {
        return share(T::kReversed ? float(time + 1) + token : float(length - 1 - time) - token);
      });
      __syncthreads();
      if constexpr (kStages == 1) fetch(chunk + 1, 0);
    }
    float sum = 0.0f;
    float const* const partner = (T::kReversed ? mine.states : mine.gradients) + place;
    this->visit_state([&sum, partner](float& value, int offset) { sum = fmaf(value, partner[offset], sum); });
    return (T::kReversed ? arguments.scale : 1.0f) * most * warp_sum(sum);
  }

 private:
  using CopyY = typename Base::CopyX;
  using CopyZ = typename Base::CopyZ;
  using Base::sequence;
  using Base::smem;
  using Base::super;
};

template <typename T>
__global__ void __launch_bounds__(T::kThreads, T::kCtasPerSm)
    retention_gamma_pass(GammaPassArguments<typename T::Arguments> const __grid_constant__ arguments) {
  extern __shared__ __align__(128) char smem_bytes[];
  GammaWarp<T> warp(arguments.chunks, shared_address(smem_bytes), int(blockIdx.x));
  float const sum = warp.run(arguments);
  int const index = thread_index() / 32;
  if (lane_here() == 0) arguments.partial[int64_t(blockIdx.x) * T::kWarps + index] = sum;
}

}  // namespace attention_autotuner

// What an initial state adds to the output of retention's parallel form: O += scale gamma^(i+1) Q S.
//
// The output of a pass over chunks without its keys: a CTA loops over a super-chunk of one head for some columns, the
// state in registers.
#pragma once

#include "attention_autotuner/chunks_sm80/mainloop.cuh"
#include "attention_autotuner/common/chunk_arguments.cuh"
#include "attention_autotuner/common/convert.cuh"
#include "attention_autotuner/common/shared_memory.cuh"
#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/common/warp_mma.cuh"

namespace attention_autotuner {

template <typename T>
struct FromStateWarp : ChunkWarp<T, true> {
  using Base = ChunkWarp<T, true>;
  using typename Base::CopyX;
  using typename Base::Element;
  using typename Base::Output;
  static constexpr float kNothing = -60.0f;  // log2 of a decay that no 16-bit result shows

  using Base::Base;

  __device__ __forceinline__ void load_first() {
    clear(this->state);
    this->state_scale = Base::kFreshScale;
    float const* const source = this->arguments.first_states + this->state_place(1, 0);
    this->visit_state([source](float& value, int offset) { value = source[offset] / Base::kFreshScale; });
  }
  __device__ __forceinline__ void fetch(int chunk) const {
    auto const& p = this->arguments;
    int const thread = thread_index(), row = chunk * T::kChunk;
    __syncthreads();
    CopyX::copy(this->smem + CopyX::offset(thread),
                this->x() + int64_t(row + CopyX::row(thread)) * p.x.stride_row + CopyX::column(thread), p.x.stride_row,
                p.seqlen - row, p.depth);
    cp_async_fence();
    cp_async_wait<0>();
    __syncthreads();
  }
  __device__ __forceinline__ void run() {
    auto const& p = this->arguments;
    load_first();
    for (int chunk = this->first; chunk < this->end; ++chunk) {
      int const row0 = chunk * T::kChunk;
      if (this->log2_gamma * float(row0 + 1) < kNothing) return;
      fetch(chunk);
      Output out;
      Accumulators<T::kTokenTiles, 1> unused;
      for (int attempt = 0; attempt < 2; ++attempt) {
        clear(out);
        this->gemm_x(out, unused, this->smem, [](int) {});
        if (attempt > 0 || !this->overflows(out)) break;
        this->raise_scale();
      }
      int const lane = lane_here(), column0 = this->slice * T::kColumns + this->warp_column();
#pragma unroll
      for (int i = 0; i < T::kTokenTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float const factor = p.scale * this->state_scale * this->power(row0 + 16 * i + 8 * half + lane / 4 + 1);
#pragma unroll
          for (int n = 0; n < 2 * T::kRowTiles; ++n) {
            out[i][n][2 * half] *= factor;
            out[i][n][2 * half + 1] *= factor;
          }
        }
      }
      if constexpr (T::kDepthWarps > 1) this->add_depth_warps(out);
      Element* const rows = static_cast<Element*>(p.out.data) + this->batch * p.out.stride_batch +
                            this->head * p.out.stride_head + (row0 + lane / 4) * p.out.stride_row + column0 +
                            2 * (lane & 3);
      this->template write_pairs<true>(out, rows, p.out.stride_row, row0, column0,
                                       [](Element* to, float low, float high) {
                                         auto* const place = reinterpret_cast<uint32_t*>(to);
                                         float2 const before = unpack_pair<Element>(*place);
                                         *place = pack_pair<Element>(before.x + low, before.y + high);
                                       });
    }
  }
};

template <typename T>
__global__ void __launch_bounds__(T::kThreads, T::kCtasPerSm)
    retention_from_state(ChunkArguments const __grid_constant__ arguments) {
  extern __shared__ __align__(128) char smem_bytes[];
  FromStateWarp<T> warp(arguments, shared_address(smem_bytes), int(blockIdx.x));
  warp.run();
}

}  // namespace attention_autotuner

// The main loops of attention forward and its kernel function: when tiles are fetched, and what overlaps with what.
//
// Called by: attention_forward_entry.cuh.
#pragma once

#include "attention_forward_epilogue.cuh"
#include "attention_forward_sm80.cuh"

namespace attention_autotuner {

struct Nothing {
  __device__ __forceinline__ void operator()(int) const {}
};

// One barrier per arriving K tile (or slice) and V tile. An event's buffer is refilled kLookahead events before its next
// use, as soon as the barrier has shown that every warp is done with it.
template <typename Warp>
__device__ __forceinline__ void loop_by_event(Warp& w) {
  using T = typename Warp::T;
  constexpr int kEvents = T::kSlices + 1;  // per tile
  constexpr int kLookahead = T::kSlices == 1 ? 1 : minimum(T::kStages - 1, T::kSlices);
  static_assert(T::kSlices > 1 || T::kStages == 1, "unsliced multi-stage kernels loop by tile");

  int fetch_step = 0, fetch_event = 0, fetch_slot = 0;
  auto fetch = [&] {
    if (fetch_step < w.tiles) {
      if (fetch_event < T::kSlices) {
        w.copy_k(fetch_step, fetch_event, fetch_slot);
        fetch_slot = fetch_slot + 1 == T::kStages ? 0 : fetch_slot + 1;
      } else {
        w.copy_v(fetch_step, 0);
      }
      if (++fetch_event == kEvents) {
        fetch_event = 0;
        ++fetch_step;
      }
    }
    cute::cp_async_fence();
  };
  auto arrive = [&] {
    cute::cp_async_wait<kLookahead - 1>();
    __syncthreads();
  };

  w.take_q();
#pragma unroll
  for (int event = 0; event < kLookahead; ++event) fetch();
  int slot = 0;
  for (int step = 0; step < w.tiles; ++step) {
    typename Warp::Scores s;
    Warp::clear(s);
#pragma unroll
    for (int slice = 0; slice < T::kSlices; ++slice) {
      arrive();
      if (slice == 0) w.settle_q(step);
      fetch();
      w.multiply_qk(s, slice, slot, Nothing{});
      slot = slot + 1 == T::kStages ? 0 : slot + 1;
    }
    arrive();
    fetch();
    w.accumulate(s, step, 0);
  }
}

// kStages K/V pairs in flight and one barrier per pair.
template <typename Warp>
__device__ __forceinline__ void loop_by_tile(Warp& w) {
  using T = typename Warp::T;
  auto fetch = [&](int step, int slot) {
    if (step < w.tiles) {
      w.copy_k(step, 0, slot);
      w.copy_v(step, slot);
    }
    cute::cp_async_fence();
  };

  w.take_q();
#pragma unroll
  for (int step = 0; step < T::kStages - 1; ++step) fetch(step, step);
  int slot = 0, fetch_slot = T::kStages - 1;
  for (int step = 0; step < w.tiles; ++step) {
    cute::cp_async_wait<T::kStages - 2>();
    __syncthreads();
    w.settle_q(step);
    fetch(step + T::kStages - 1, fetch_slot);
    typename Warp::Scores s;
    Warp::clear(s);
    w.multiply_qk(s, 0, slot, Nothing{});
    w.accumulate(s, step, slot);
    slot = slot + 1 == T::kStages ? 0 : slot + 1;
    fetch_slot = fetch_slot + 1 == T::kStages ? 0 : fetch_slot + 1;
  }
}

// Two K/V pairs in flight; group t holds K of tile t + 1 and V of tile t. The exponentials of tile t are spread between
// the products Q K^T of tile t + 1.
template <typename Warp>
__device__ __forceinline__ void loop_ahead(Warp& w) {
  using T = typename Warp::T;
  constexpr int kSteps = T::kClassQK / 16;
  constexpr int kUnits = T::kRowTiles * Warp::kKeySteps;  // of exponentials, 16 rows x 16 keys each
  auto fetch = [&](int step) {
    if (step + 1 < w.tiles) w.copy_k(step + 1, 0, (step + 1) & 1);
    if (step < w.tiles) w.copy_v(step, step & 1);
    cute::cp_async_fence();
  };

  w.take_q();
  w.copy_k(0, 0, 0);
  cute::cp_async_fence();
  fetch(0);
  cute::cp_async_wait<1>();
  __syncthreads();
  w.settle_q(0);
  typename Warp::Scores s;
  Warp::clear(s);
  w.multiply_qk(s, 0, 0, Nothing{});
  for (int step = 0; step < w.tiles; ++step) {
    cute::cp_async_wait<0>();
    __syncthreads();
    fetch(step + 1);
    float scaled[T::kRowTiles][2];
    w.prepare_softmax(s, step, scaled);
    uint32_t p[Warp::kKeySteps][T::kRowTiles][4];
    auto exponentials = [&](int qk_step) {
#pragma unroll
      for (int unit = 0; unit < kUnits; ++unit) {
        if (unit * kSteps / kUnits == qk_step) {
          w.take_p(p[unit / T::kRowTiles][unit % T::kRowTiles], s, unit % T::kRowTiles, unit / T::kRowTiles, scaled);
        }
      }
    };
    typename Warp::Scores next;
    Warp::clear(next);
    if (step + 1 < w.tiles) {
      w.multiply_qk(next, 0, (step + 1) & 1, exponentials);
    } else {
#pragma unroll
      for (int qk_step = 0; qk_step < kSteps; ++qk_step) exponentials(qk_step);
    }
#pragma unroll
    for (int key_step = 0; key_step < Warp::kKeySteps; ++key_step) {
      w.multiply_pv(p[key_step], key_step, step & 1, Nothing{});
    }
#pragma unroll
    for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < T::kKeyTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[i][j][e] = next[i][j][e];
      }
    }
  }
}

template <typename Config>
__global__ void __launch_bounds__(ForwardTraits<Config>::kThreads, Config::kCtasPerSm)
    attention_forward_kernel(ForwardParams const __grid_constant__ params, int row_blocks, int tiles) {
  using T = ForwardTraits<Config>;
  extern __shared__ __align__(128) char smem_bytes[];
  uint32_t const smem = shared_address(smem_bytes);
  for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
    ForwardWarp<Config> warp(params,
                             tile_coordinates<Config::kHeadsFirst, Config::kVSlices>(
                                 index, row_blocks, params.heads_q, params.batch, params.causal != 0),
                             smem);
    if (warp.tiles > 0) {
      if constexpr (T::kQkAhead) {
        loop_ahead(warp);
      } else if constexpr (T::kStages > 1 && T::kSlices == 1) {
        loop_by_tile(warp);
      } else {
        loop_by_event(warp);
      }
    }
    write_output(warp);
    if constexpr (!Config::kPersistent) return;
    __syncthreads();  // the next tile's loads reuse the memory that O was staged in
  }
}

}  // namespace attention_autotuner

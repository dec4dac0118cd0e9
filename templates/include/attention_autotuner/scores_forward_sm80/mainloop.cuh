// The main loops of the forward kernels and their kernel function: when tiles are fetched, and what overlaps with what.
#pragma once

#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/scheduler.cuh"
#include "attention_autotuner/common/sequences.cuh"
#include "attention_autotuner/common/shared_memory.cuh"
#include "attention_autotuner/common/split_combine.cuh"
#include "attention_autotuner/scores_forward_sm80/epilogue.cuh"
#include "attention_autotuner/scores_forward_sm80/warp.cuh"

namespace attention_autotuner {

// The loops count K/V tiles down from the last one.

// One barrier per arriving K tile (or slice) and V tile. An event's buffer is refilled kLookahead events before its
// next use, as soon as the barrier has shown that every warp is done with it.
template <typename Warp>
__device__ __forceinline__ void loop_by_event(Warp& w) {
  using T = typename Warp::T;
  constexpr int kEvents = T::kSlices + 1;  // per tile
  constexpr int kLookahead = T::kSlices == 1 ? 1 : minimum(T::kStages - 1, T::kSlices);
  constexpr int kQkSteps = T::kKSlice / 16;
  static_assert(T::kSlices > 1 || T::kStages == 1, "unsliced multi-stage kernels loop by tile");

  int slot = T::kFirstSlot, fetch_slot = T::kFirstSlot;
  // Unsliced, the very first V tile is fetched with the first K tile: nothing else would cover its latency.
  auto fetched_early = [&](int key_tile, int event) {
    return T::kSlices == 1 && event == 1 && key_tile == w.tiles - 1;
  };
  // What is fetched during `event`, counted from the first event of `key_tile`: it may belong to the next tile.
  struct Arrival {
    int key_tile, event;
    __device__ __forceinline__ Arrival(int during_tile, int during_event)
        : key_tile(during_event + kLookahead >= kEvents ? during_tile - 1 : during_tile),
          event(during_event + kLookahead >= kEvents ? during_event + kLookahead - kEvents
                                                     : during_event + kLookahead) {}
  };
  auto fetch_start = [&](Arrival const& arrival) {
    auto const [key_tile, event] = arrival;
    if (event < T::kSlices) {
      w.start_k(key_tile, event, fetch_slot);
    } else if (!fetched_early(key_tile, event)) {
      w.start_v(key_tile, 0);
    }
  };
  auto fetch_part = [&](Arrival const& arrival, int part, int num_parts) {
    auto const [key_tile, event] = arrival;
    if (event < T::kSlices) {
      w.copy_k_part(key_tile, event, fetch_slot, part, num_parts);
      if (T::kStages > 1 && part == num_parts - 1) fetch_slot = fetch_slot + 1 == T::kStages ? 0 : fetch_slot + 1;
    } else {
      w.copy_v_part(!fetched_early(key_tile, event), key_tile, 0, part, num_parts);
    }
    if (part == num_parts - 1) cp_async_fence();
  };
  auto arrive = [&](bool first) {
    if (T::kSlices == 1 && first) {
      cp_async_wait<1>();
    } else {
      cp_async_wait<kLookahead - 1>();
    }
    __syncthreads();
  };

  int key_tile = w.tiles - 1;
#pragma unroll
  for (int event = -kLookahead; event < 0; ++event) {
    Arrival const arrival(key_tile, event);
    fetch_start(arrival);
    fetch_part(arrival, 0, 1);
  }
  if (T::kSlices == 1) {
    w.copy_v(key_tile, 0);
    cp_async_fence();
  }
  for (; key_tile >= 0; --key_tile) {
    typename Warp::Scores s;
#pragma unroll
    for (int slice = 0; slice < T::kSlices; ++slice) {
      arrive(key_tile == w.tiles - 1);
      Arrival const arrival(key_tile, slice);
      fetch_start(arrival);
      w.gemm_qk(s, slice, slot, [&](int step) { fetch_part(arrival, step, kQkSteps); });
      if (T::kStages > 1) slot = slot + 1 == T::kStages ? 0 : slot + 1;
    }
    arrive(false);
    Arrival const arrival(key_tile, T::kSlices);
    fetch_start(arrival);
    w.accumulate(s, key_tile, 0, [&](int step) { fetch_part(arrival, step, Warp::kKeySteps); });
  }
}

// kStages K/V pairs in flight and one barrier per pair.
template <typename Warp>
__device__ __forceinline__ void loop_by_tile(Warp& w) {
  using T = typename Warp::T;
  constexpr int kAhead = T::kStages - 1;

  int key_tile = w.tiles - 1;
#pragma unroll
  for (int stage = 0; stage < kAhead; ++stage) {
    int const slot = (T::kFirstSlot + stage) % T::kStages;
    if (stage == 0 && T::kFirstEarly) continue;
    w.copy_k(key_tile - stage, 0, slot);
    if (stage == 0) cp_async_fence();  // the first MMA need not wait for V
    w.copy_v(key_tile - stage, slot);
    cp_async_fence();
  }
  for (int slot = T::kFirstSlot; key_tile >= 0; --key_tile) {
    bool const first = key_tile == w.tiles - 1;
    if (first) {
      cp_async_wait<kAhead>();
    } else {
      cp_async_wait<kAhead - 1>();
    }
    __syncthreads();
    int const fetch_slot = slot == 0 ? T::kStages - 1 : slot - 1;
    w.start_k(key_tile - kAhead, 0, fetch_slot);
    w.start_v(key_tile - kAhead, fetch_slot);
    typename Warp::Scores s;
    w.gemm_qk(s, 0, slot, [&](int step) {
      w.copy_k_part(key_tile - kAhead, 0, fetch_slot, step, Warp::kQSteps);
      w.copy_v_part(true, key_tile - kAhead, fetch_slot, step, Warp::kQSteps);
    });
    cp_async_fence();
    if (first) {
      cp_async_wait<kAhead>();
      __syncthreads();
    }
    w.accumulate(s, key_tile, slot, Nothing{});
    slot = slot + 1 == T::kStages ? 0 : slot + 1;
  }
}

// Two K/V pairs in flight; a group holds V of one tile and K of the next. The numerators of a tile are spread between
// the MMAs Q K^T of the next.
template <typename Warp>
__device__ __forceinline__ void loop_ahead(Warp& w) {
  using T = typename Warp::T;
  constexpr int kUnits = T::kRowTiles * Warp::kKeySteps;  // of numerators, 16 rows x 16 keys each

  int key_tile = w.tiles - 1;
  w.copy_k(key_tile, 0, key_tile & 1);
  cp_async_fence();
  w.copy_k(key_tile - 1, 0, (key_tile - 1) & 1);
  w.copy_v(key_tile, key_tile & 1);
  cp_async_fence();
  cp_async_wait<1>();
  __syncthreads();
  typename Warp::Scores s;
  w.gemm_qk(s, 0, key_tile & 1, Nothing{});
  for (; key_tile >= 0; --key_tile) {
    cp_async_wait<0>();
    __syncthreads();
    w.start_k(key_tile - 2, 0, key_tile & 1);
    w.start_v(key_tile - 1, (key_tile - 1) & 1);
    w.score_mod.prepare(w, s, key_tile, key_tile & 1);
    uint32_t p[Warp::kKeySteps][T::kRowTiles][4];
    auto numerators = [&](int qk_step) {
#pragma unroll
      for (int unit = 0; unit < kUnits; ++unit) {
        if (unit * Warp::kQSteps / kUnits == qk_step) {
          w.compute_p(p[unit / T::kRowTiles][unit % T::kRowTiles], s, unit % T::kRowTiles, unit / T::kRowTiles);
        }
      }
    };
    typename Warp::Scores next;
    if (key_tile > 0) {
      w.gemm_qk(next, 0, (key_tile - 1) & 1, [&](int step) {
        numerators(step);
        w.copy_k_part(key_tile - 2, 0, key_tile & 1, step, Warp::kQSteps);
        w.copy_v_part(true, key_tile - 1, (key_tile - 1) & 1, step, Warp::kQSteps);
      });
    } else {
#pragma unroll
      for (int qk_step = 0; qk_step < Warp::kQSteps; ++qk_step) numerators(qk_step);
    }
    cp_async_fence();
#pragma unroll
    for (int key_step = 0; key_step < Warp::kKeySteps; ++key_step) {
      w.gemm_pv(p[key_step], key_step, key_tile & 1, Nothing{});
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

template <typename Warp>
__device__ __forceinline__ void compute_tile(Warp& warp) {
  using T = typename Warp::T;
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
}

// A tile of the list of packed sequences, by params that show its sequence.
template <typename Config>
__device__ __forceinline__ void compute_packed_tile(typename ForwardTraits<Config>::Params const& all,
                                                    typename ForwardTraits<Config>::List const& list, float c,
                                                    uint32_t smem, int index) {
  using T = ForwardTraits<Config>;
  TileOfSequence<typename T::Tile> tile{listed_tile<Config>(list, index)};
  int rows = T::kBlockM;
  if constexpr (T::kPackGqa) rows = list.packed.queries;
  SequenceBlock const at = find_block(CuSeqlens::of_queries(all), tile.row_block, rows);
  if (!at.exists) return;
  typename T::Params params = all;
  tile.first_query = show_sequence<true>(params, at.sequence).query;
  shift_rows(params.o, tile.first_query);
  if (!T::kFewQueries && params.lse != nullptr) {
    params.lse += shift_of_row_values(params, tile.first_query, tile.head);
  }
  tile.batch = 0;
  tile.row_block = at.block;
  ForwardWarp<Config> warp(params, list, c, smem, index, tile);
  compute_tile(warp);
}

template <typename Config>
__global__ void __launch_bounds__(ForwardTraits<Config>::kThreads, Config::kCtasPerSm)
    scores_forward_sm80(typename ForwardTraits<Config>::Params const __grid_constant__ params,
                        typename ForwardTraits<Config>::List const __grid_constant__ list, float c) {
  using T = ForwardTraits<Config>;
  extern __shared__ __align__(128) char smem_bytes[];
  uint32_t const smem = shared_address(smem_bytes);
  for (int index = blockIdx.x; index < list.tiles; index += gridDim.x) {
    if constexpr (T::kPacked) {
      compute_packed_tile<Config>(params, list, c, smem, index);
    } else {
      ForwardWarp<Config> warp(params, list, c, smem, index);
      compute_tile(warp);
    }
    if constexpr (!Config::kPersistent) return;
    __syncthreads();  // the next tile's loads reuse the memory that O was staged in
  }
}

// The results of all splits.
template <typename Config>
__global__ void __launch_bounds__(kCombineThreads)
    scores_forward_sm80_combine(SplitResults const __grid_constant__ results) {
  combine_rows<typename Config::Element, Config::kPaddedDimV>(results);
}

}  // namespace attention_autotuner

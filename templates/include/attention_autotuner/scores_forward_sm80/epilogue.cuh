// The end of a forward tile: normalise O, stage it in shared memory, write whole 16-byte chunks; write LSE or r.
#pragma once

#include "attention_autotuner/common/convert.cuh"
#include "attention_autotuner/common/shared_memory.cuh"
#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/common/tile.cuh"
#include "attention_autotuner/scores_forward_sm80/warp.cuh"

namespace attention_autotuner {

// One row of a split, in fp32, by the four lanes that share it.
template <typename Warp>
__device__ __forceinline__ void write_partial(Warp const& w, typename Warp::T::Tile const& tile, int i, int half) {
  using T = typename Warp::T;
  int const row = w.row_in_block(i, half), lane = lane_here();
  if (!w.row_exists(tile, row)) return;
  int64_t const head = int64_t(tile.batch) * w.params.heads_q + w.head_of(tile, row);
  int64_t const place = tile.split * w.list.partial_rows + w.row_index(tile, head, row);
  int const column = tile.value_slice * T::kValueColumns + w.warp_n() * 8 * T::kColumnTiles;
  float* const line = w.list.partial_output + place * (T::kValueSlices * T::kValueColumns) + column + 2 * (lane & 3);
  float const factor = w.score_mod.output_factor(w, i, half);
#pragma unroll
  for (int j = 0; j < T::kColumnTiles; ++j) {
    *reinterpret_cast<float2*>(line + 8 * j) =
        make_float2(w.o[i][j][2 * half] * factor, w.o[i][j][2 * half + 1] * factor);
  }
  if (column == 0 && (lane & 3) == 0) w.list.partial_lse[place] = w.score_mod.row_log2(w, i, half);
}

template <typename Warp>
__device__ __forceinline__ void write_output(Warp& w) {
  using T = typename Warp::T;
  using Element = typename T::Element;
  using Tile = typename T::TileO;
  auto const& params = w.params;

  cp_async_wait<0>();  // no load of this tile may land in the memory that is staged in now
  __syncthreads();
  float (&sum)[T::kRowTiles][2] = w.score_mod.sum;
#pragma unroll
  for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) sum[i][half] = quad_sum(sum[i][half]);
  }
  if constexpr (!T::kPInRegisters) {
    w.combine_rows(sum, [](float a, float b) { return a + b; });
    __syncthreads();  // row values may lie under O
  }

  auto const tile = w.tile();
  if constexpr (T::kSplitKv) {
    if (w.list.splits.divisor > 1) {
#pragma unroll
      for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) write_partial(w, tile, i, half);
      }
      return;
    }
  }
  int const value0 = tile.value_slice * T::kValueColumns;
  int const lane = lane_here(), first_column = w.warp_n() * 8 * T::kColumnTiles + 2 * (lane & 3);
#pragma unroll
  for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int const row = w.row_in_block(i, half);
      float const factor = w.score_mod.output_factor(w, i, half);
      if (w.score_mod.lse_or_r(params) != nullptr && value0 == 0 && first_column == 0 && w.row_exists(tile, row)) {
        int64_t const head = int64_t(tile.batch) * params.heads_q + w.head_of(tile, row);
        w.score_mod.lse_or_r(params)[w.row_index(tile, head, row)] = w.score_mod.row_value(w, i, half);
      }
#pragma unroll
      for (int j = 0; j < T::kColumnTiles; ++j) {
        store_shared(w.smem + Tile::offset(row, first_column + 8 * j),
                     pack_pair<Element>(w.o[i][j][2 * half] * factor, w.o[i][j][2 * half + 1] * factor));
      }
    }
  }
  if constexpr (T::kPInRegisters) {
    __syncwarp();
  } else {
    __syncthreads();
  }

  // Each warp writes the rows it staged (all warps together where they share rows).
  constexpr int kChunks = T::kValueColumns / kChunk;
  constexpr int kRows = T::kPInRegisters ? 16 * T::kRowTiles : T::kBlockM;
  constexpr int kWriters = T::kPInRegisters ? 32 : T::kThreads;
  int const first_row = T::kPInRegisters ? w.warp_m() * kRows : 0;
  auto* const out = static_cast<Element*>(params.o.data) + tile.batch * params.o.stride_batch +
                    (T::kPackGqa ? 0 : tile.head * params.o.stride_head) + value0;
#pragma unroll 4
  for (int chunk = thread_index() % kWriters; chunk < kRows * kChunks; chunk += kWriters) {
    int const row = first_row + chunk / kChunks, column = chunk % kChunks * kChunk;
    if (w.row_exists(tile, row) && value0 + column < params.dim_v) {
      uint4 const words = load_shared_four(w.smem + Tile::offset(row, column));
      int64_t const head = T::kPackGqa ? w.head_of(tile, row) * params.o.stride_head : 0;
      *reinterpret_cast<uint4*>(out + head + int64_t(w.query_of(tile, row)) * params.o.stride_row + column) = words;
    }
  }
}

}  // namespace attention_autotuner

// dS = P (dP - delta) of tiles of 128 queries by 128 keys, made again for gradients that are sums of it: those of
// attention's bias tables and masks, of either family.
//
// Layouts: see common/warp_mma.cuh (fragments) and common/tile.cuh (shared memory). Eight warps share a tile as four
// blocks of 32 queries by two of 64 keys. Slices of the head dims pass through two stages of shared memory, and the
// first ones of the tile after this arrive while its scores become dS.
#pragma once

#include <cstdint>

#include "attention_autotuner/common/backward_arguments.cuh"
#include "attention_autotuner/common/preprocess.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/sequences.cuh"
#include "attention_autotuner/common/shared_memory.cuh"
#include "attention_autotuner/common/tensors.cuh"
#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/common/tile.cuh"
#include "attention_autotuner/common/warp_mma.cuh"
#include "attention_autotuner/score/mask_patch.cuh"
#include "attention_autotuner/score/modifications.cuh"

namespace attention_autotuner {

inline constexpr int kScoreTile = 128;  // queries and keys
inline constexpr int kScoreThreads = 256;
static_assert(kLseDeltaPadding % kScoreTile == 0, "blocks of queries have rows of LSE and delta");

// Where a tile begins, at a row and a key that may be negative.
struct ScoreTilePlace {
  int batch, head, row, key;
};

template <typename Config>
struct ScoreGradientTile {
  using Element = typename Config::Element;
  using Modifications = typename ModificationsOf<Config>::Type;
  using Arguments = ArgumentsOf<Config>;
  static constexpr int slice_of(int dim) { return dim % 64 == 0 ? 64 : dim % 32 == 0 ? 32 : 16; }
  static constexpr int kSliceQK = slice_of(Config::kPaddedDimQK), kSliceV = slice_of(Config::kPaddedDimV);
  static constexpr int kSlicesQK = Config::kPaddedDimQK / kSliceQK, kSlicesV = Config::kPaddedDimV / kSliceV;
  static constexpr int kTileBytes = kScoreTile * maximum(kSliceQK, kSliceV) * kElementBytes;
  static constexpr int kStageBytes = 2 * kTileBytes;  // rows of queries, rows of keys
  static constexpr int kSmemBytes = 2 * kStageBytes;
  using Scores = Accumulators<2, 8>;

  uint32_t const smem;
  int stage;  // of the next slice
  Scores sum;

  __device__ __forceinline__ static int warp_row() { return thread_index() / 32 % 4 * 32; }
  __device__ __forceinline__ static int warp_column() { return thread_index() / 128 * 64; }
  // Of an element of the accumulators.
  __device__ __forceinline__ static int tile_row(int i, int half) {
    return warp_row() + 16 * i + 8 * half + lane_here() / 4;
  }
  __device__ __forceinline__ static int tile_column(int j) { return warp_column() + 8 * j + 2 * (lane_here() & 3); }

  // 128 rows of a slice of columns; what the tensor does not have arrives as zeros.
  template <int Slice>
  __device__ __forceinline__ static void copy_rows(uint32_t tile, attention_autotuner_tensor const& tensor, int batch,
                                                   int head, int row0, int rows, int column0, int columns) {
    using Tile = SmemTile<kScoreTile, Slice, false>;
    constexpr int kThreadsOfRow = Slice / kChunk, kRowsOfPass = kScoreThreads / kThreadsOfRow;
    int const thread = thread_index(), first = thread / kThreadsOfRow, column = thread % kThreadsOfRow * kChunk;
    uint32_t const target = tile + Tile::offset(first, column);
    Element const* source =
        head_data<Element>(tensor, batch, head) + (row0 + first) * tensor.stride_row + column0 + column;
#pragma unroll
    for (int pass = 0; pass < kScoreTile / kRowsOfPass; ++pass) {
      int const row = row0 + first + pass * kRowsOfPass;
      bool const exists = uint32_t(row) < uint32_t(rows) && column0 + column < columns;
      copy_chunk<Config::kCopyBytes>(Tile::advance(target, pass * kRowsOfPass, 0), source, exists);
      source += kRowsOfPass * tensor.stride_row;
    }
  }
  // Fetches a slice of a tile: of Q and K, and behind those of dO and V.
  __device__ __forceinline__ void fetch(Arguments const& arguments, ScoreTilePlace const& place, int slice) const {
    auto const& p = arguments.params;
    uint32_t const queries = smem + stage * kStageBytes, keys = queries + kTileBytes;
    int const kv_head = place.head / (p.heads_q / p.heads_kv);
    if (slice < kSlicesQK) {
      int const column = slice * kSliceQK;
      copy_rows<kSliceQK>(queries, p.q, place.batch, place.head, place.row, p.seqlen_q, column, p.dim_qk);
      copy_rows<kSliceQK>(keys, p.k, place.batch, kv_head, place.key, p.seqlen_k, column, p.dim_qk);
    } else {
      int const column = (slice - kSlicesQK) * kSliceV;
      copy_rows<kSliceV>(queries, p.dout, place.batch, place.head, place.row, p.seqlen_q, column, p.dim_v);
      copy_rows<kSliceV>(keys, p.v, place.batch, kv_head, place.key, p.seqlen_k, column, p.dim_v);
    }
    cp_async_fence();
  }
  // result += A B^T over a slice: rows of queries A and rows of keys B.
  template <int Slice>
  __device__ __forceinline__ static void multiply(Scores& result, uint32_t rows) {
    using Tile = SmemTile<kScoreTile, Slice, false>;
    LaneRow const a = lane_row_a(lane_here()), b = lane_row_b(lane_here());
    gemm<Element, Tile, Tile, Slice / 16>(result, rows + Tile::offset(warp_row() + a.row, a.column),
                                          rows + kTileBytes + Tile::offset(warp_column() + b.row, b.column),
                                          [](int) {});
  }
  // Before the first tile, whose first slices are fetched.
  __device__ __forceinline__ void begin(Arguments const& arguments, ScoreTilePlace const& place) {
    __syncthreads();  // shared memory is free
    fetch(arguments, place, 0);
  }
  // Adds dS of a tile. `more`: another one is next, whose first slices are fetched.
  __device__ __forceinline__ void add_tile(Arguments const& arguments, ScoreTilePlace const& place, bool more,
                                           ScoreTilePlace const& next) {
    Scores s, dp;
    clear(s);
    clear(dp);
    int const slices = recompute_here(kSlicesQK + kSlicesV);  // a loop from which the compiler moves nothing
#pragma unroll 1
    for (int slice = 0; slice < slices; ++slice) {
      cp_async_wait<0>();
      __syncthreads();  // the slice has arrived, and nobody reads the other stage any more
      uint32_t const rows = smem + stage * kStageBytes;
      stage ^= 1;
      if (slice + 1 < slices) {
        fetch(arguments, place, slice + 1);
      } else if (more) {
        fetch(arguments, next, 0);
      }
      if (slice < kSlicesQK) {
        multiply<kSliceQK>(s, rows);
      } else {
        multiply<kSliceV>(dp, rows);
      }
    }
    add_scores(arguments, place, s, dp);
  }
  __device__ __forceinline__ void add_scores(Arguments const& arguments, ScoreTilePlace const& place, Scores const& s,
                                             Scores const& dp) {
    auto const& p = arguments.params;
    Modifications const modifications(p, place.batch, place.head);
    int const diagonal = p.seqlen_k - p.seqlen_q, column0 = place.key + tile_column(0);
    int64_t const values = arguments.lse_delta_offset(place.batch, place.head) + place.row;
    float base[4], shift[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      base[r] = arguments.base[values + tile_row(r / 2, r % 2)];
      shift[r] = arguments.shift[values + tile_row(r / 2, r % 2)];
    }
    MaskPatch<Modifications, 1, 8> mask;
    mask.load(modifications, place.row + tile_row(0, 0), column0);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      int const i = r / 2, half = r % 2, row = place.row + tile_row(i, half);
      int const first = arguments.first_key(row), end = arguments.visible_keys(row);
      mask.take(modifications);
      if (r < 3) mask.load(modifications, place.row + tile_row((r + 1) / 2, (r + 1) % 2), column0);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          int const column = column0 + 8 * j + e, past = column - row - diagonal;
          float score = s[i][j][2 * half + e] * arguments.c;
          score = modifications.apply(score, {row, maximum(column, 0), float(-past), past});
          float const p = exp2_approximate(mask.apply(score - base[r], 0, j, e));
          if (column < first || column >= end) continue;
          sum[i][j][2 * half + e] = fmaf(p, dp[i][j][2 * half + e] + shift[r], sum[i][j][2 * half + e]);
        }
      }
    }
  }
};

}  // namespace attention_autotuner

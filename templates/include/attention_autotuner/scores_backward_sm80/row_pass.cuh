// A pass of a backward with one result, by blocks of its rows: dQ by queries, or dK or dV by keys.
//
//   dQ   rows are queries: Q and dO stay, K and V stream     dQ += dS K
//   dK   rows are keys:    K and V stay, Q and dO stream     dK += dS^T Q
//   dV   rows are keys:    K stays, Q and dO stream          dV += P^T dO, a slice of its columns per CTA
//
// Each warp owns rows and keeps its scores and its result in registers, so warps meet only where tiles arrive. Where
// the rows are too few for the warps, two warps share rows, halve every step's columns and add their results at the
// end. Nothing is added across CTAs: the result is the same bits every time.
//
// Layouts: see common/warp_mma.cuh (fragments), common/tile.cuh (shared memory), scores_backward_sm80/traits.cuh (its
// layout).
#pragma once

#include "attention_autotuner/abi.h"
#include "attention_autotuner/common/backward_arguments.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/scheduler.cuh"
#include "attention_autotuner/common/shared_memory.cuh"
#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/common/tile.cuh"
#include "attention_autotuner/common/warp_mma.cuh"
#include "attention_autotuner/score/mask_stream.cuh"
#include "attention_autotuner/score/score_mod.cuh"
#include "attention_autotuner/scores_backward_sm80/pass.cuh"
#include "attention_autotuner/sm80/operand.cuh"

namespace attention_autotuner {

template <typename Traits, bool Shared>
struct RowPassWarp : PassWarp<Traits> {
  using T = Traits;
  using Place = PassWarp<T>;
  using Place::arrive;
  using Place::lse_delta;
  using Place::smem;
  using Place::warp;
  using Score = BackwardScoreMod<T::kScoreMod, T>;
  using Arguments = BackwardArguments<typename T::Params>;
  using Element = typename T::Element;
  using Stream = PairStream<Element, T::kBlockColumns, T::kPaddedDimQK, T::kOtherColumns, T::kThreads, T::kCopyBytes>;
  using Scores = Accumulators<T::kRowTiles, T::kColumnTiles>;

  Arguments const& arguments;
  int const batch, row0, slice;
  Share<Shared> const share;  // where the rows are keys
  int const head;             // of the rows
  TileRange range;            // over the streamed tiles; of keys where the rows are queries
  Cursor now, ahead;
  Stream stream;
  MaskStream<T::kScoreMod, T> masks;
  float base[T::kByQueries ? T::kRowTiles : 1][2];
  float shift[T::kByQueries ? T::kRowTiles : 1][2];

  __device__ __forceinline__ static int warp_row() { return warp() % T::kWarps * (16 * T::kRowTiles); }
  __device__ __forceinline__ static int warp_column() { return warp() / T::kWarps * (8 * T::kColumnTiles); }

  __device__ __forceinline__ RowPassWarp(Arguments const& arguments, TileList const& list, TileCoordinates const& tile,
                                         uint32_t smem)
      : Place{smem},
        arguments(arguments),
        batch(tile.batch),
        row0(tile.row_block * T::kBlockRows),
        slice(tile.value_slice),
        share(arguments, tile.head),
        head(T::kByQueries ? tile.head : share.kv_head),
        stream(T::kByQueries ? arguments.params.k : arguments.params.q,
               T::kByQueries ? arguments.params.v : arguments.params.dout,
               T::kByQueries ? arguments.params.seqlen_k : arguments.params.seqlen_q, arguments.params.dim_qk,
               arguments.params.dim_v, T::kNeedsDp ? 0 : tile.value_slice * T::kResultColumns, smem + T::kQKOffset,
               smem + T::kOtherOffset) {
    auto const& p = arguments.params;
    if constexpr (T::kByQueries) {
      int const last = (row0 + T::kBlockRows < p.seqlen_q ? row0 + T::kBlockRows : p.seqlen_q) - 1;
      range = {arguments.first_key(row0) / T::kBlockColumns,
               divide_up(maximum(arguments.visible_keys(last), 0), T::kBlockColumns), list.group.divide(head), 1};
    } else {
      range = TileRange::over_queries(arguments, row0, T::kBlockColumns, share.head, share.heads, T::kBlockRows);
    }
    now = ahead = range.begin();
  }

  // --- loads ---------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void load_first() {
    auto const& p = arguments.params;
    using CopyQK = TileCopy<T::kBlockRows, T::kPaddedDimQK, T::kThreads, T::kCopyBytes, false>;
    using CopyV = TileCopy<T::kBlockRows, T::kPaddedDimV, T::kThreads, T::kCopyBytes, false>;
    int const rows = T::kByQueries ? p.seqlen_q : p.seqlen_k;
    copy_resident<CopyQK, Element>(smem + T::kRowsQKOffset, T::kByQueries ? p.q : p.k, batch, head, row0, rows,
                                   p.dim_qk);
    if constexpr (T::kNeedsDp) {
      copy_resident<CopyV, Element>(smem + T::kRowsVOffset, T::kByQueries ? p.dout : p.v, batch, head, row0, rows,
                                    p.dim_v);
    }
    stream.seek(batch, ahead.head, ahead.tile * T::kBlockColumns);
    start_next(true, 0);
    copy_next(true, 0, 0, 1);
    if constexpr (T::kByQueries) {
#pragma unroll
      for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          int const row = row0 + warp_row() + 16 * i + 8 * half + lane_here() / 4;
          bool const exists = row < p.seqlen_q;
          int64_t const index = arguments.lse_delta_offset(batch, head) + row;
          base[i][half] = exists ? arguments.base[index] : LseDelta<T::kScoreMod>::neutral_base();
          shift[i][half] = exists ? arguments.shift[index] : 0.0f;
        }
      }
    }
    arrive();
  }
  // The next streamed tile into `slot`: start_next, then all parts of copy_next.
  __device__ __forceinline__ void start_next(bool wanted, int slot) {
    if constexpr (!T::kByQueries) {
      if (wanted) {
        copy_lse_delta<T::kBlockColumns>(arguments, lse_delta(slot), batch, ahead.head, ahead.tile * T::kBlockColumns);
      }
    }
    stream.start(wanted, slot, slot);
    int const column = ahead.tile * T::kBlockColumns;
    masks.seek(arguments, smem, T::kByQueries ? head : ahead.head, T::kByQueries ? row0 : column,
               T::kByQueries ? column : row0);
    masks.start(arguments, wanted, slot);
  }
  __device__ __forceinline__ void copy_next(bool wanted, int slot, int part, int num_parts) {
    stream.copy_part(wanted, slot, slot, part, num_parts);
    masks.copy_part(arguments, wanted, slot, part, num_parts);
    if (part != num_parts - 1) return;
    if (range.next(ahead)) {
      if (ahead.head < range.head + range.heads) stream.seek(batch, ahead.head, ahead.tile * T::kBlockColumns);
    } else {
      stream.next();
    }
  }

  // --- between the MMAs (see BackwardScoreMod) -----------------------------------------------------------------------

  // Whether every row of this warp meets every column of the tile.
  __device__ __forceinline__ bool is_whole() const {
    auto const& p = arguments.params;
    if constexpr (T::kModified) {
      int const first = row0 + warp_row(), last = first + 16 * T::kRowTiles - 1, column = now.tile * T::kBlockColumns;
      if (T::kByQueries ? arguments.first_key(last) > column
                        : arguments.end_of_queries(first) < column + T::kBlockColumns) {
        return false;
      }
    }
    if constexpr (T::kByQueries) {
      return (now.tile + 1) * T::kBlockColumns <= arguments.visible_keys(row0 + warp_row());
    } else {
      return row0 + T::kBlockRows <= p.seqlen_k &&
             arguments.first_query(row0 + warp_row() + 16 * T::kRowTiles - 1) <= now.tile * T::kBlockColumns;
    }
  }
  // Whether a row meets a column, both counted from the tensors' first.
  __device__ __forceinline__ bool meets(int row, int column) const {
    if constexpr (T::kByQueries) {
      return column < arguments.visible_keys(row) && (!T::kModified || column >= arguments.first_key(row));
    } else {
      return row < arguments.params.seqlen_k && column >= arguments.first_query(row) &&
             (!T::kModified || column < arguments.end_of_queries(row));
    }
  }

  // --- main loop -----------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void run() {
    using TileX = std::conditional_t<T::kNeedsDp, typename T::TileQK, typename T::TileOther>;  // of the last product
    constexpr int kXOffset = T::kNeedsDp ? T::kQKOffset : T::kOtherOffset;
    constexpr int kOperandSteps = T::kColumnTiles / 2;
    LaneRow const a = lane_row_a(lane_here()), b = lane_row_b(lane_here());
    int const x_column = T::kNeedsDp ? slice * T::kResultColumns : 0;
    uint32_t const rows_qk = smem + T::kRowsQKOffset + T::TileRowsQK::offset(warp_row() + a.row, a.column);
    uint32_t const rows_v = smem + T::kRowsVOffset + T::TileRowsV::offset(warp_row() + a.row, a.column);
    uint32_t const qk = smem + T::kQKOffset + T::TileQK::offset(warp_column() + b.row, b.column);
    uint32_t const other = smem + T::kOtherOffset + T::TileOther::offset(warp_column() + b.row, b.column);

    Accumulators<T::kRowTiles, T::kResultTiles> sum;
    clear(sum);
    int slot = 0;
    for (int left = range.tiles(); left > 0; --left) {
      bool const more = left > 1, whole = is_whole();
      if constexpr (T::kStages > 1) start_next(more, slot ^ 1);
      Scores s, dp;
      // The next tile's copies run under the first MMA that is always there.
      constexpr bool kCopiesUnderS = !T::kNeedsDp || Score::kAlwaysNeedsScores;
      if (!T::kNeedsDp || Score::needs_scores(arguments)) {
        clear(s);
        gemm<Element, typename T::TileRowsQK, typename T::TileQK, T::kPaddedDimQK / 16>(
            s, rows_qk, qk + slot * T::TileQK::kBytes, [&](int step) {
              if constexpr (T::kStages > 1 && kCopiesUnderS) copy_next(more, slot ^ 1, step, T::kPaddedDimQK / 16);
            });
      }
      if constexpr (T::kNeedsDp) {
        Score::begin_dp(*this, dp, slot);
        gemm<Element, typename T::TileRowsV, typename T::TileOther, T::kPaddedDimV / 16>(
            dp, rows_v, other + slot * T::TileOther::kBytes, [&](int step) {
              if constexpr (T::kStages > 1 && !kCopiesUnderS) copy_next(more, slot ^ 1, step, T::kPaddedDimV / 16);
            });
      }
      Operand<TileX, T::kResultColumns> const x(smem + kXOffset + slot * TileX::kBytes, warp_column() + a.row,
                                                x_column + a.column);
      uint32_t w[2][T::kRowTiles][4];
      Score::compute_operand(*this, w[0], s, dp, 0, whole, slot);
#pragma unroll
      for (int step = 0; step < kOperandSteps; ++step) {
        gemm_step<Element>(
            sum, w[step % 2],
            [&](int j, uint32_t (&registers)[4]) { load_matrix_x4_transposed(registers, x.at(16 * step, 8 * j)); },
            [&](int j) {
              if (j == 0 && step + 1 < kOperandSteps) {
                Score::compute_operand(*this, w[(step + 1) % 2], s, dp, step + 1, whole, slot);
              }
            });
      }
      if constexpr (T::kStages == 1) {
        __syncthreads();
        start_next(more, 0);
        copy_next(more, 0, 0, 1);
      }
      arrive();
      range.next(now);
      if constexpr (T::kStages > 1) slot ^= 1;
    }
    if constexpr (T::kColumnWarps > 1) add_column_warps(sum);
    if (warp() < T::kWarps) write(sum);
  }

  // The sums of the warps that share rows, in the first of them.
  __device__ __forceinline__ void add_column_warps(Accumulators<T::kRowTiles, T::kResultTiles>& sum) const {
    bool const gives = warp() >= T::kWarps;
#pragma unroll
    for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < T::kResultTiles; ++j) {
        uint32_t const address =
            smem + (((warp() % T::kWarps) * T::kRowTiles + i) * T::kResultTiles + j) * 512 + lane_here() * 16;
        float (&v)[4] = sum[i][j];
        if (gives) store_shared_float4(address, {v[0], v[1], v[2], v[3]});
      }
    }
    __syncthreads();
    if (!gives) {
#pragma unroll
      for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
        for (int j = 0; j < T::kResultTiles; ++j) {
          uint32_t const address = smem + ((warp() * T::kRowTiles + i) * T::kResultTiles + j) * 512 + lane_here() * 16;
          add_shared_float4(sum[i][j], address);
        }
      }
    }
    __syncthreads();
  }

  __device__ __forceinline__ void write(Accumulators<T::kRowTiles, T::kResultTiles> const& sum) const {
    auto const& p = arguments.params;
    if constexpr (Shared) {
      write_partial<T::kPacked>(sum, T::kNeedsDp ? arguments.dk_partial : arguments.dv_partial, p, share.split, batch,
                                head, row0 + warp_row(), slice * T::kResultColumns, T::kResultDim);
      return;
    }
    attention_autotuner_tensor const& out = T::kResult == Result::kDq ? p.dq : T::kResult == Result::kDk ? p.dk : p.dv;
    write_rows<Element, typename T::TileResult>(sum, T::kNeedsDp ? score_scale(p) : 1.0f, smem, warp_row(), out, batch,
                                                head, row0, T::kByQueries ? p.seqlen_q : p.seqlen_k,
                                                slice * T::kResultColumns, T::kNeedsDp ? p.dim_qk : p.dim_v);
  }
};

template <typename Traits, bool Shared>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kCtasPerSm)
    backward_rows(BackwardArguments<typename Traits::Params> const __grid_constant__ arguments,
                  TileList const __grid_constant__ list) {
  extern __shared__ __align__(128) char smem_bytes[];
  constexpr bool kBatchFirst = Traits::kScoreMod == ScoreMod::kMasked;
  auto compute = [](auto& warp) {
    if (warp.range.tiles() > 0) warp.load_first();
    warp.run();
  };
  if constexpr (Traits::kPacked || Traits::kSpanned) {
    auto const listed = tile_coordinates<Traits::kLongestFirst, Traits::kSlices, kBatchFirst>(block_index(), list);
    of_sequence<Traits>(arguments, listed, [&](auto const& shown, TileCoordinates const& tile) {
      RowPassWarp<Traits, Shared> warp(shown, list, tile, shared_address(smem_bytes));
      compute(warp);
    });
  } else {
    RowPassWarp<Traits, Shared> warp(
        arguments, list, tile_coordinates<Traits::kLongestFirst, Traits::kSlices, kBatchFirst>(block_index(), list),
        shared_address(smem_bytes));
    compute(warp);
  }
}

}  // namespace attention_autotuner

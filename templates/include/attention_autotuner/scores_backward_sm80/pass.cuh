// What the passes of family sm80 share: resident tiles, the stream of tiles, the write of a result.
#pragma once

#include "attention_autotuner/abi.h"
#include "attention_autotuner/common/backward_arguments.cuh"
#include "attention_autotuner/common/convert.cuh"
#include "attention_autotuner/common/shared_memory.cuh"
#include "attention_autotuner/common/tensors.cuh"
#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/common/tile.cuh"
#include "attention_autotuner/common/warp_mma.cuh"
#include "attention_autotuner/scores_backward_sm80/traits.cuh"

namespace attention_autotuner {

// Calls work(arguments, tile) for a tile of the list; of packed sequences, with arguments that show its sequence, and
// with spans, those of its batch entry.
template <typename T, typename Arguments, typename Work>
__device__ __forceinline__ void of_sequence(Arguments const& arguments, TileCoordinates tile, Work&& work) {
  if constexpr (T::kPacked) {
    auto const& p = arguments.params;
    SequenceBlock const at =
        find_block<T::kBlockRows>(T::kByQueries ? CuSeqlens::of_queries(p) : CuSeqlens::of_keys(p), tile.row_block);
    if (!at.exists) return;
    Arguments shown = arguments;
    SequenceBegin const begin = show_sequence_to_backward<T::kByQueries>(shown, at.sequence);
    if constexpr (!T::kByQueries) {
      shown.dk_partial += int64_t(begin.key) * T::kPaddedDimQK;
      shown.dv_partial += int64_t(begin.key) * T::kPaddedDimV;
    }
    if constexpr (T::kOnePass) {
      CuSeqlens const queries = CuSeqlens::of_queries(p);
      shown.dq_sum +=
          int64_t(queries.first_block<T::kBlockColumns, 1>(at.sequence)) * (T::kBlockColumns * T::kPaddedDimQK);
    }
    tile.batch = 0;
    tile.row_block = at.block;
    work(shown, tile);
  } else if constexpr (T::kSpanned) {
    Arguments shown = arguments;
    shown.params.row_spans += int64_t(tile.batch) * shown.params.seqlen_q;
    shown.params.key_spans += int64_t(tile.batch) * shown.params.seqlen_k;
    work(shown, tile);
  } else {
    work(arguments, tile);
  }
}

// Copies a whole tile that stays.
template <typename Copy, typename Element>
__device__ __forceinline__ void copy_resident(uint32_t tile, attention_autotuner_tensor const& tensor, int batch,
                                              int head, int row, int rows, int columns) {
  int const thread = thread_index();
  Element const* const source = head_data<Element>(tensor, batch, head) +
                                int64_t(row + Copy::row(thread)) * tensor.stride_row + Copy::column(thread);
  Copy::copy(tile + Copy::offset(thread), source, tensor.stride_row, rows - row, columns);
}

// Tiles of `Rows` rows of two tensors that belong together, one after the other.
template <typename Element, int Rows, int ColumnsA, int ColumnsB, int Threads, int CopyBytes>
struct PairStream {
  using CopyA = TileCopy<Rows, ColumnsA, Threads, CopyBytes, false>;
  using CopyB = TileCopy<Rows, ColumnsB, Threads, CopyBytes, false>;

  attention_autotuner_tensor const& a;
  attention_autotuner_tensor const& b;
  int const rows;  // of the tensors
  int const columns_a, columns_b;
  int const column_b;  // where B's columns start
  uint32_t const a_target, b_target;
  Element const* a_next;  // this thread's first chunk of the next tile
  Element const* b_next;
  int row;  // first row of the next tile

  __device__ __forceinline__ PairStream(attention_autotuner_tensor const& a, attention_autotuner_tensor const& b,
                                        int rows, int columns_a, int columns_b, int column_b, uint32_t a_tile,
                                        uint32_t b_tile)
      : a(a),
        b(b),
        rows(rows),
        columns_a(columns_a),
        columns_b(columns_b - column_b),
        column_b(column_b),
        a_target(a_tile + CopyA::offset(thread_index())),
        b_target(b_tile + CopyB::offset(thread_index())) {}

  __device__ __forceinline__ void seek(int batch, int head, int first_row) {
    int const thread = thread_index();
    row = first_row;
    a_next =
        head_data<Element>(a, batch, head) + int64_t(row + CopyA::row(thread)) * a.stride_row + CopyA::column(thread);
    b_next = head_data<Element>(b, batch, head) + int64_t(row + CopyB::row(thread)) * b.stride_row + column_b +
             CopyB::column(thread);
  }
  __device__ __forceinline__ bool is_exact() const {
    return CopyBytes == 16 && columns_a >= ColumnsA && columns_b >= ColumnsB && row + Rows <= rows;
  }
  // A tile is copied in two steps: start copies what is not a whole tile, at once; the parts copy what is.
  __device__ __forceinline__ void start(bool wanted, int slot_a, int slot_b) const {
    if (!wanted || is_exact()) return;
    CopyA::copy(a_target + slot_a * CopyA::Tile::kBytes, a_next, a.stride_row, rows - row, columns_a);
    CopyB::copy(b_target + slot_b * CopyB::Tile::kBytes, b_next, b.stride_row, rows - row, columns_b);
  }
  __device__ __forceinline__ void copy_part(bool wanted, int slot_a, int slot_b, int part, int num_parts) const {
    if constexpr (CopyBytes == 16) {
      bool const copies = wanted && is_exact();
      CopyA::copy_part(copies, a_target + slot_a * CopyA::Tile::kBytes, a_next, a.stride_row, part, num_parts);
      CopyB::copy_part(copies, b_target + slot_b * CopyB::Tile::kBytes, b_next, b.stride_row, part, num_parts);
    }
  }
  __device__ __forceinline__ void next() {
    row += Rows;
    a_next += Rows * a.stride_row;
    b_next += Rows * b.stride_row;
  }
};

// Copies LSE and delta of `Rows` queries into shared memory: first all bases, then all shifts.
template <int Rows, typename Arguments>
__device__ __forceinline__ void copy_lse_delta(Arguments const& arguments, uint32_t target, int batch, int head,
                                               int row) {
  constexpr int kChunks = Rows / 4;  // of 16 bytes
  int const chunk = thread_index();
  if (chunk >= 2 * kChunks) return;
  float const* const source = (chunk < kChunks ? arguments.base : arguments.shift) +
                              arguments.lse_delta_offset(batch, head) + row + chunk % kChunks * 4;
  copy_chunk<16>(target + chunk * 16, source, true);
}

// Where a thread of a pass stands, and what all passes do alike.
template <typename T>
struct PassWarp {
  uint32_t const smem;  // where the CTA's shared memory starts

  __device__ __forceinline__ static int warp() { return thread_index() >> 5; }
  __device__ __forceinline__ static void arrive() {
    cp_async_fence();
    cp_async_wait<0>();
    __syncthreads();
  }
  __device__ __forceinline__ uint32_t lse_delta(int slot) const {
    return smem + T::kLseDeltaOffset + slot * T::kLseDeltaBytes;
  }
};

// Writes a warp's rows of a result, scaled, through its own rows of a shared-memory tile. Other warps must be done with
// what lay there.
template <typename Element, typename Tile, int RowTiles, int ColumnTiles>
__device__ __forceinline__ void write_rows(Accumulators<RowTiles, ColumnTiles> const& sum, float scale, uint32_t tile,
                                           int warp_row, attention_autotuner_tensor const& tensor, int batch, int head,
                                           int row, int rows, int column, int columns) {
  int const lane = lane_here();
#pragma unroll
  for (int i = 0; i < RowTiles; ++i) {
#pragma unroll
    for (int j = 0; j < ColumnTiles; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        store_shared(tile + Tile::offset(warp_row + 16 * i + 8 * half + lane / 4, 8 * j + 2 * (lane & 3)),
                     pack_pair<Element>(sum[i][j][2 * half] * scale, sum[i][j][2 * half + 1] * scale));
      }
    }
  }
  __syncwarp();
  Element* const out =
      static_cast<Element*>(tensor.data) + batch * tensor.stride_batch + head * tensor.stride_head + column;
#pragma unroll 4
  for (int unit = lane; unit < RowTiles * 16 * ColumnTiles; unit += 32) {
    int const in_warp = unit / ColumnTiles, chunk = unit % ColumnTiles * kChunk;
    int const global_row = row + warp_row + in_warp;
    if (global_row < rows && column + chunk < columns) {
      *reinterpret_cast<uint4*>(out + int64_t(global_row) * tensor.stride_row + chunk) =
          load_shared_four(tile + Tile::offset(warp_row + in_warp, chunk));
    }
  }
}

// Writes a warp's rows of a CTA's partial dK or dV, unscaled, for backward_reduce_splits. `columns` is the padded head
// dim.
template <bool kPacked, int RowTiles, int ColumnTiles, typename Params>
__device__ __forceinline__ void write_partial(Accumulators<RowTiles, ColumnTiles> const& sum, float* partial,
                                              Params const& p, int split, int batch, int kv_head, int row, int column,
                                              int columns) {
  int const lane = lane_here();
  float* const head = partial + first_partial_row<kPacked>(p, split, batch, kv_head) * columns;
#pragma unroll
  for (int i = 0; i < RowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int const place = row + 16 * i + 8 * half + lane / 4;
      if (place >= p.seqlen_k) continue;
#pragma unroll
      for (int j = 0; j < ColumnTiles; ++j) {
        int const at = column + 8 * j + 2 * (lane & 3);
        if (at < columns) {
          *reinterpret_cast<float2*>(head + int64_t(place) * columns + at) =
              make_float2(sum[i][j][2 * half], sum[i][j][2 * half + 1]);
        }
      }
    }
  }
}

}  // namespace attention_autotuner

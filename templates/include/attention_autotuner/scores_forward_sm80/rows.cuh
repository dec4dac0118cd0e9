// The rows of a CTA's output tile: which queries and heads they are, and their way into shared memory.
#pragma once

#include <type_traits>

#include "attention_autotuner/common/scheduler.cuh"
#include "attention_autotuner/common/tensors.cuh"
#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/common/tile.cuh"
#include "attention_autotuner/scores_forward_sm80/traits.cuh"
#include "attention_autotuner/sm80/warps.cuh"

namespace attention_autotuner {

// A tile of packed sequences, where params show the one that it is of.
template <typename Tile>
struct TileOfSequence : Tile {
  int first_query;  // of the sequence, among all
};

template <typename Config>
struct ForwardRows : RowWarps<ForwardTraits<Config>> {
  using T = ForwardTraits<Config>;
  using Place = RowWarps<T>;
  using Place::smem;
  using Element = typename T::Element;
  using OfSequence = std::conditional_t<T::kPacked, TileOfSequence<typename T::Tile>, Nothing>;
  using CopyQ = TileCopy<T::kBlockM, T::kPaddedDimQK, T::kThreads, Config::kCopyBytes, T::kPadded>;

  typename T::Params const& params;
  typename T::List const& list;
  int const index;  // of this output tile in the list
  OfSequence const of_sequence;

  __device__ __forceinline__ typename T::Tile tile() const {
    if constexpr (T::kPacked) {
      return of_sequence;
    } else {
      return listed_tile<Config>(list, index);
    }
  }

  // Queries of a tile, the query of a row of it, and its head.
  __device__ __forceinline__ int tile_queries() const {
    if constexpr (T::kPackGqa) return list.packed.queries;
    return T::kBlockM;
  }
  __device__ __forceinline__ int query_of(TileCoordinates const& tile, int row) const {
    if constexpr (T::kPackGqa) return list.packed.query(tile.row_block, row);
    return tile.row_block * T::kBlockM + row;
  }
  __device__ __forceinline__ int head_of(TileCoordinates const& tile, int row) const {
    if constexpr (T::kPackGqa) return list.packed.head(tile.head, row);
    return tile.head;
  }
  __device__ __forceinline__ bool row_exists(TileCoordinates const& tile, int row) const {
    if constexpr (T::kPackGqa) {
      if (row >= list.packed.rows) return false;
    }
    return query_of(tile, row) < params.seqlen_q;
  }
  // The place of a row among those of all heads, whose number counts batches, too.
  __device__ __forceinline__ int64_t row_index(TileCoordinates const& tile, int64_t head, int row) const {
    if constexpr (T::kPacked && T::kFewQueries) {
      return head * params.total_q + of_sequence.first_query + query_of(tile, row);
    }
    if constexpr (T::kPackGqa) return head * params.seqlen_q + query_of(tile, row);
    return head * params.seqlen_q + tile.row_block * T::kBlockM + row;
  }

  __device__ __forceinline__ void copy_q(TileCoordinates const& tile) const {
    if constexpr (T::kPackGqa) return copy_packed_q(tile);
    int const thread = thread_index(), row0 = tile.row_block * T::kBlockM;
    Element const* const q = head_data<Element>(params.q, tile.batch, tile.head) +
                             int64_t(row0 + CopyQ::row(thread)) * params.q.stride_row + CopyQ::column(thread);
    CopyQ::copy(smem + T::kQOffset + CopyQ::offset(thread), q, params.q.stride_row, params.seqlen_q - row0,
                params.dim_qk);
  }
  // Rows of packed heads lie anywhere; those beyond them arrive as zeros.
  __device__ __forceinline__ void copy_packed_q(TileCoordinates const& tile) const {
    int const thread = thread_index(), columns = params.dim_qk - CopyQ::column(thread);
#pragma unroll
    for (int pass = 0; pass < CopyQ::kPasses; ++pass) {
      int const first = pass * CopyQ::kRowsPerPass, row = CopyQ::row(thread) + first;
      if (first + CopyQ::kRowsPerPass <= T::kBlockM || row < T::kBlockM) {
        bool const exists = row_exists(tile, row);
        Element const* const q = head_data<Element>(params.q, tile.batch, exists ? head_of(tile, row) : 0) +
                                 int64_t(exists ? query_of(tile, row) : 0) * params.q.stride_row +
                                 CopyQ::column(thread);
#pragma unroll
        for (int step = 0; step < CopyQ::kSteps; ++step) {
          int const column = step * CopyQ::kThreadsPerRow * kChunk;
          copy_chunk<Config::kCopyBytes>(T::TileQ::advance(smem + T::kQOffset + CopyQ::offset(thread), first, column),
                                         q + column, exists && column < columns);
        }
      }
    }
  }
};

}  // namespace attention_autotuner

// The arguments of the kernels of a backward, and the tiles that their CTAs visit.
//
// Notation: S = Q K^T, P the modified scores, dP = dO V^T, dS the gradient of S but for its scale. Then dV =
// P^T dO, dK = scale dS^T Q, dQ = scale dS K. A row has two values, called its LSE and delta after the softmax's,
// which P and dS need beside S and dP:
//
//   softmax     P = exp2(c S - base), c = scale log2(e), base the LSE in base 2; dS = P (dP + shift), shift = -delta
//   retention   P = c S M base, c = scale, base = 1 / r; dS = (dP base + sign(P) shift) M, shift = -delta / r, where r
//               has a gradient, else 0
//
// with delta = rowsum(dO O). Rows without a visible key, and rows beyond the sequence, carry a base that makes their P
// 0 and, for retention, their dS.
#pragma once

#include "attention_autotuner/abi.h"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/scheduler.cuh"
#include "attention_autotuner/common/sequences.cuh"
#include "attention_autotuner/score/modifications.cuh"

namespace attention_autotuner {

enum class Result { kDq, kDk, kDv };

// The arguments of every kernel of one launch beside its list of tiles.
template <typename Params>
struct BackwardArguments {
  Params params;
  float c;
  float* base;    // workspace: [batch, heads_q, lse_delta_rows]
  float* shift;   // alike
  float* dq_sum;  // workspace, of plans of one pass: [batch, heads_q, dq_tiles, sums of a tile in its kernel's order]
  int lse_delta_rows;
  int dq_tiles;
  // CTAs that share a block of keys, each with some of the group's query heads (a split reduction). Where they are more
  // than one, their dK and dV go to the workspace in fp32, [splits, batch, heads_kv, seqlen_k, padded dim], or of
  // packed sequences [splits, heads_kv, total_k, padded dim], and are added by the postprocess.
  Divider splits;
  float* dk_partial;
  float* dv_partial;

  __device__ __forceinline__ int64_t lse_delta_offset(int batch, int head) const {
    return (int64_t(batch) * params.heads_q + head) * lse_delta_rows;
  }
  // The first query that sees a key.
  __device__ __forceinline__ int first_query(int key) const {
    if constexpr (kHasSpans<Params>) return params.key_spans[minimum(key, int(params.seqlen_k) - 1)].x;
    if constexpr (kHasWindow<Params>) return maximum(key - params.causal_offset - params.window_right, 0);
    return params.causal ? maximum(key - params.causal_offset, 0) : 0;
  }
  // Queries that see a key are below this.
  __device__ __forceinline__ int end_of_queries(int key) const {
    if constexpr (kHasSpans<Params>) return params.key_spans[minimum(key, int(params.seqlen_k) - 1)].y;
    if constexpr (kHasWindow<Params>) {
      int const last = minimum(key - params.causal_offset, params.seqlen_q) + params.window_left;
      return minimum(last + 1, params.seqlen_q);
    }
    return params.seqlen_q;
  }
  // The same of the `keys` keys from `key` on; not negative.
  __device__ __forceinline__ int end_of_queries(int key, int keys) const {
    if constexpr (kHasWindow<Params>) {
      return maximum(end_of_queries(minimum(key + keys, int(params.seqlen_k)) - 1), 0);
    } else {
      return params.seqlen_q;
    }
  }
  // The first key that a query sees.
  __device__ __forceinline__ int first_key(int query) const {
    if constexpr (kHasSpans<Params>) return params.row_spans[minimum(query, int(params.seqlen_q) - 1)].x;
    if constexpr (kHasWindow<Params>) return maximum(query + params.causal_offset - params.window_left, 0);
    return 0;
  }
  // A query sees keys below this.
  __device__ __forceinline__ int visible_keys(int query) const {
    if constexpr (kHasSpans<Params>) return params.row_spans[minimum(query, int(params.seqlen_q) - 1)].y;
    if constexpr (kHasWindow<Params>) {
      int const end = minimum(query + params.causal_offset, params.seqlen_k) + params.window_right + 1;
      return minimum(end, params.seqlen_k);
    }
    int const diagonal = query + params.causal_offset + 1;
    return params.causal && diagonal < params.seqlen_k ? diagonal : params.seqlen_k;
  }
};

// Where the partial sums of dK and dV of a split begin: the row of the head's first key, of all sequences if packed.
template <bool kPacked, typename Params>
__device__ __forceinline__ int64_t first_partial_row(Params const& p, int split, int batch, int kv_head) {
  if constexpr (kPacked) return (int64_t(split) * p.heads_kv + kv_head) * p.total_k;
  return ((int64_t(split) * p.batch + batch) * p.heads_kv + kv_head) * p.seqlen_k;
}

// Which streamed tile: of which head of the group, and which of its tiles.
struct Cursor {
  int head;
  int tile;
};

// The K/V head that a CTA over keys works for, and the query heads that it takes: all of the group, unless several CTAs
// share it, as many heads each or, where uneven, up to one more. `head` is that of the list of tiles.
template <bool Shared, bool kUneven = false>
struct Share {
  int kv_head, split;
  int head, heads;  // the query heads

  template <typename Arguments>
  __device__ __forceinline__ Share(Arguments const& arguments, int list_head) {
    int const group = arguments.params.heads_q / arguments.params.heads_kv;
    if constexpr (Shared) {
      kv_head = arguments.splits.divide(list_head);
      split = list_head - kv_head * arguments.splits.divisor;
      if constexpr (kUneven) {
        int const first = arguments.splits.divide(group * split);
        heads = arguments.splits.divide(group * (split + 1)) - first;
        head = kv_head * group + first;
      } else {
        heads = arguments.splits.divide(group);
        head = list_head * heads;
      }
    } else {
      kv_head = list_head;
      split = 0;
      heads = group;
      head = list_head * group;
    }
  }
};

// The tiles that a CTA's main loop visits: [first, end) of every head from `head` on.
struct TileRange {
  int first, end;
  int head, heads;

  // Over the queries, in tiles of `block`, that meet the `keys` keys from `key` on.
  template <typename Arguments>
  __device__ __forceinline__ static TileRange over_queries(Arguments const& arguments, int key, int block, int head,
                                                           int heads, int keys) {
    return {arguments.first_query(key) / block, divide_up(arguments.end_of_queries(key, keys), block), head, heads};
  }
  __device__ __forceinline__ int tiles() const { return heads * maximum(end - first, 0); }
  __device__ __forceinline__ Cursor begin() const { return {head, first}; }
  // Moves on; true where another head begins.
  __device__ __forceinline__ bool next(Cursor& cursor) const {
    if (++cursor.tile < end) return false;
    cursor.tile = first;
    ++cursor.head;
    return true;
  }
};

}  // namespace attention_autotuner

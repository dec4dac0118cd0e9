// Packed sequences: the rows of all lie one after the other, and cu_seqlens, on the device, says where each begins.
//
// A kernel works on one sequence at a time, by params that show it alone: pointers to its rows, its lengths and its
// diagonal, in batch entry 0. What lies behind the last sequence is one more, of queries that see no key and of keys
// that no query sees, so that every row of every output is written.
//
// Blocks of rows are numbered over all sequences: those of sequence s begin at cu_seqlens[s] / block + s * spare. So
// each sequence has as many as it needs, and `spare` - 1 more at least; the host knows how many there are at most,
// whatever the lengths; and a CTA finds its sequence by bisection. At most `spare` a sequence are nobody's.
#pragma once

#include <cstdint>

#include "attention_autotuner/abi.h"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/scheduler.cuh"

namespace attention_autotuner {

inline constexpr int kLseDeltaPadding = 128;  // rows beyond a sequence whose LSE and delta a tile may read
inline constexpr int kLseDeltaSpare = 2;      // blocks of so many rows, that there are always as many beyond

// The numbers of blocks of all sequences are below this.
inline int count_blocks(int total, int sequences, int block, int spare = 1) {
  return total / block + (sequences + 1) * spare;
}

// One side of the sequences: queries or keys.
struct CuSeqlens {
  int32_t const* ends;  // [sequences + 1], from 0
  int sequences, total;

  template <typename Params>
  __device__ __forceinline__ static CuSeqlens of_queries(Params const& p) {
    return {p.cu_seqlens_q, p.batch, p.total_q};
  }
  template <typename Params>
  __device__ __forceinline__ static CuSeqlens of_keys(Params const& p) {
    return {p.cu_seqlens_k, p.batch, p.total_k};
  }

  // No row outside of the tensor, whatever memory holds.
  __device__ __forceinline__ int begin(int sequence) const { return minimum(maximum(ends[sequence], 0), total); }
  __device__ __forceinline__ int length(int sequence) const {
    int const end = sequence < sequences ? begin(sequence + 1) : total;
    return maximum(end - begin(sequence), 0);
  }
  template <int Block, int Spare>
  __device__ __forceinline__ int first_block(int sequence) const {
    return first_block(sequence, Block, Spare);
  }
  template <typename Rows>
  __device__ __forceinline__ int first_block(int sequence, Rows const& rows, int spare) const {
    return quotient(begin(sequence), rows) + sequence * spare;
  }
  // Whether the first sequence begins with the rows, and none before the one ahead of it. All threads of a CTA call.
  __device__ __forceinline__ bool in_order() const {
    bool ordered = begin(0) == 0;
    for (int i = int(threadIdx.x); i < sequences; i += int(blockDim.x)) ordered &= begin(i) <= begin(i + 1);
    return __syncthreads_and(ordered);
  }
  // The sequence that has a block: the last that begins at it or before.
  template <typename Rows>
  __device__ __forceinline__ int sequence_of(int block, Rows const& rows, int spare) const {
    int low = 0, high = sequences;
    while (low < high) {
      int const middle = (low + high + 1) / 2;
      if (first_block(middle, rows, spare) <= block) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }
};

// A block of rows of one sequence.
struct SequenceBlock {
  int sequence, block;
  bool exists;  // it has rows
};

// Of `rows` rows each, an int or a Divider.
template <typename Rows>
__device__ __forceinline__ SequenceBlock find_block(CuSeqlens const& side, int block, Rows const& rows, int spare = 1) {
  int const sequence = side.sequence_of(block, rows, spare);
  int const place = block - side.first_block(sequence, rows, spare);
  return {sequence, place, place * divisor_of(rows) < side.length(sequence)};
}
template <int Block, int Spare = 1>
__device__ __forceinline__ SequenceBlock find_block(CuSeqlens const& side, int block) {
  return find_block(side, block, Block, Spare);
}

// The same by a warp, all of whose lanes ask for one block: bisection waits for memory time and again, this for one
// read of up to 32 sequences.
template <int Block, int Spare = 1>
__device__ __forceinline__ SequenceBlock find_block_by_warp(CuSeqlens const& side, int block) {
  int low = 0, high = side.sequences;
#pragma unroll 1
  while (true) {
    int const step = (high - low) / 32 + 1, probe = low + int(threadIdx.x % 32) * step;
    bool const passed = probe <= high && side.first_block<Block, Spare>(minimum(probe, high)) <= block;
    low += (maximum(__popc(__ballot_sync(0xffffffffu, passed)), 1) - 1) * step;
    high = minimum(high, low + step - 1);
    if (step == 1) break;
  }
  int const place = block - side.first_block<Block, Spare>(low);
  return {low, place, place * Block < side.length(low)};
}

// Shifts a tensor's rows.
__device__ __forceinline__ void shift_rows(attention_autotuner_tensor& tensor, int rows) {
  tensor.data = static_cast<char*>(tensor.data) + rows * tensor.stride_row * 2;  // 16-bit elements
}

// Where a sequence begins among queries and keys.
struct SequenceBegin {
  int query, key;
};

// Leaves in params the lengths, the diagonal and the slopes of one sequence; q, k and v begin with it. By queries or by
// keys: whose rows the caller has, of which there may be some behind the last sequence.
template <bool ByQueries, typename Params>
__device__ __forceinline__ SequenceBegin show_sequence(Params& p, int sequence) {
  CuSeqlens const queries = CuSeqlens::of_queries(p), keys = CuSeqlens::of_keys(p);
  bool const behind = sequence == p.batch;
  SequenceBegin const begin{queries.begin(sequence), keys.begin(sequence)};
  p.seqlen_q = behind && !ByQueries ? 0 : queries.length(sequence);
  p.seqlen_k = behind && ByQueries ? 0 : keys.length(sequence);
  p.causal_offset = p.causal_from_end ? p.seqlen_k - p.seqlen_q : 0;
  if (p.alibi_per_batch) p.alibi_slopes += int64_t(minimum(sequence, p.batch - 1)) * p.heads_q;  // none are behind
  shift_rows(p.q, begin.query);
  shift_rows(p.k, begin.key);
  shift_rows(p.v, begin.key);
  return begin;
}

// Shows a sequence to the kernels of a backward, but for its sums of dQ.
template <bool ByQueries, typename Arguments>
__device__ __forceinline__ SequenceBegin show_sequence_to_backward(Arguments& arguments, int sequence) {
  auto& p = arguments.params;
  SequenceBegin const begin = show_sequence<ByQueries>(p, sequence);
  shift_rows(p.o, begin.query);
  shift_rows(p.dout, begin.query);
  shift_rows(p.dq, begin.query);
  shift_rows(p.dk, begin.key);
  shift_rows(p.dv, begin.key);
  CuSeqlens const queries = CuSeqlens::of_queries(p);
  int64_t const row_values =
      int64_t(queries.first_block<kLseDeltaPadding, kLseDeltaSpare>(sequence)) * kLseDeltaPadding;
  arguments.base += row_values;
  arguments.shift += row_values;
  return begin;
}

// The value of a row of `head`, [heads_q, total_q], where those of the sequence alone would be [heads_q, seqlen_q].
template <typename Params>
__device__ __forceinline__ int64_t shift_of_row_values(Params const& p, int first_query, int head) {
  return first_query + int64_t(head) * (p.total_q - p.seqlen_q);
}

}  // namespace attention_autotuner

// Which tokens a CTA of a pass over chunks of retention has: those of a batch entry, or of one of packed sequences.
//
// Super-chunks of packed sequences are numbered over all of them as blocks are in common/sequences.cuh, but for their
// size, which a launch decides. Every sequence has one at least, so that a state goes through one that is empty; what
// lies behind the last sequence counts as one without a state, whose rows are written and not read.
#pragma once

#include "attention_autotuner/common/chunk_arguments.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/scheduler.cuh"
#include "attention_autotuner/common/sequences.cuh"

namespace attention_autotuner {

// One super-chunk of one sequence.
struct SuperChunkPlace {
  int sequence, super;    // the latter among those of the sequence
  int first_row, length;  // of the sequence
  int supers;             // of the sequence
  bool behind;            // no sequence, but the rows behind them

  __device__ __forceinline__ bool exists() const { return super < supers; }
};

struct PackedSuperChunks {
  CuSeqlens sequences;
  Divider tokens;  // of a super-chunk

  __device__ __forceinline__ int first_block(int sequence) const {
    return tokens.divide(sequences.begin(sequence)) + sequence;
  }
  __device__ __forceinline__ int supers_of(int length) const { return tokens.divide(maximum(length - 1, 0)) + 1; }
  __device__ __forceinline__ SuperChunkPlace find(int block) const {
    int low = 0, high = sequences.sequences;
    while (low < high) {
      int const middle = (low + high + 1) / 2;
      if (first_block(middle) <= block) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    int const length = sequences.length(low);
    return {low, block - first_block(low), sequences.begin(low), length, supers_of(length), low == sequences.sequences};
  }
};

// The arguments of a pass; `seqlen` is the rows of all sequences, `chunks` counts chunks as blocks of all of them, and
// `supers` super-chunks. States of super-chunks are [heads, supers].
struct PackedChunkArguments : ChunkArguments {
  PackedSuperChunks packed;
  bool sums_last;  // of a pass for states: the last super-chunk of a sequence, in the pass's order of time, as well
};

template <bool kPacked>
struct ChunkSequence {
  using Arguments = ChunkArguments;
  static constexpr int first_row = 0;

  __device__ __forceinline__ ChunkSequence(Arguments const&, int&) {}
  __device__ __forceinline__ static int length(Arguments const& arguments) { return arguments.seqlen; }
  __device__ __forceinline__ static int readable(Arguments const& arguments) { return arguments.seqlen; }
  __device__ __forceinline__ static int chunks(Arguments const& arguments, int) { return arguments.chunks; }
  __device__ __forceinline__ static bool has_state() { return true; }
  __device__ __forceinline__ static int slot(int super) { return super; }
  __device__ __forceinline__ static int first_chunk(int) { return 0; }
};

template <>
struct ChunkSequence<true> {
  using Arguments = PackedChunkArguments;
  SuperChunkPlace place;
  int block;  // the super-chunk's number over all sequences
  int first_row;

  // Leaves the super-chunk's number among those of its sequence in `super`.
  __device__ __forceinline__ ChunkSequence(Arguments const& arguments, int& super)
      : place(arguments.packed.find(super)), block(super), first_row(place.first_row) {
    super = place.super;
  }
  __device__ __forceinline__ int length(Arguments const&) const { return place.length; }
  __device__ __forceinline__ int readable(Arguments const&) const { return place.behind ? 0 : place.length; }
  __device__ __forceinline__ int chunks(Arguments const&, int chunk) const { return divide_up(place.length, chunk); }
  __device__ __forceinline__ bool has_state() const { return !place.behind; }
  __device__ __forceinline__ int slot(int) const { return block; }
  // Of the sequence's chunks among those of all sequences.
  __device__ __forceinline__ int first_chunk(int chunk) const { return first_row / chunk + place.sequence; }
  // Where a state begins among those of [heads, slots], or where there is one slot, of [sequences, heads].
  __device__ __forceinline__ int64_t state(Arguments const& arguments, int head, int slots, int slot) const {
    int64_t const heads = arguments.heads.divisor;
    int64_t const state = slots > 1 ? int64_t(head) * slots + slot : place.sequence * heads + head;
    return state * arguments.depth * arguments.columns;
  }
};

}  // namespace attention_autotuner

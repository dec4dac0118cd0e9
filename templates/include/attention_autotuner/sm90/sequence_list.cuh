// The blocks of rows of packed sequences that exist, listed by a kernel of its own: those that visit most tiles first,
// or sequences in turn, those of the most steps first.
//
// A CTA of the kernels after it finds its block and its sequence by one read, whatever lengths there are. What lies
// behind the last sequence is one more, as common/sequences.cuh has it.
#pragma once

#include <cstdint>

#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/sequences.cuh"
#include "attention_autotuner/host/early_launch.cuh"
#include "attention_autotuner/sm90/roles.cuh"

namespace attention_autotuner {

inline constexpr int kListThreads = 256;

// A block of rows with its sequence. Kernels take it in the place of common/key_range.cuh's range of a batch entry.
struct alignas(16) ListedBlock {
  int block, number;  // of the block in its sequence, and of the sequence
  int first_query, query_count, first_key, key_count;
  int offset;
  int slopes;  // the sequence whose slopes it has: the last one, for what is behind it

  __device__ __forceinline__ int query_begin() const { return first_query; }
  __device__ __forceinline__ int begin() const { return first_key; }
  template <typename Params>
  __device__ __forceinline__ int queries(Params const&) const {
    return query_count;
  }
  template <typename Params>
  __device__ __forceinline__ int length(Params const&) const {
    return key_count;
  }
  template <typename Params>
  __device__ __forceinline__ int causal_offset(Params const&) const {
    return offset;
  }
};

// Where a list lies, and how many blocks it has.
struct BlockList {
  ListedBlock* blocks;
  int* count;
};

// Block `number` of all, of which it may be that none has it. Params have windows as with_window leaves them.
template <bool kByQueries, int kBlock, typename Params>
__device__ __forceinline__ bool find_listed(ListedBlock& listed, Params const& p, int number) {
  CuSeqlens const queries = CuSeqlens::of_queries(p), keys = CuSeqlens::of_keys(p);
  SequenceBlock const at = find_block<kBlock>(kByQueries ? queries : keys, number);
  bool const behind = at.sequence == p.batch;
  listed.block = at.block;
  listed.number = at.sequence;
  listed.first_query = queries.begin(at.sequence);
  listed.first_key = keys.begin(at.sequence);
  listed.query_count = behind && !kByQueries ? 0 : queries.length(at.sequence);
  listed.key_count = behind && kByQueries ? 0 : keys.length(at.sequence);
  listed.offset = p.causal_from_end ? listed.key_count - listed.query_count : 0;
  listed.slopes = minimum(at.sequence, p.batch - 1);
  return at.exists;
}

// The tiles that a block visits: of keys, or of queries. Those of queries count to the end of the sequence, so that of
// the blocks of its keys each has no more than the one before, and comes after it: additions to dQ take turns in this
// order.
template <bool kByQueries, int kBlock, int kStep, typename Params>
__device__ __forceinline__ int visited_tiles(ListedBlock const& at, Params const& p) {
  int const row = at.block * kBlock;
  if constexpr (kByQueries) {
    int const last = minimum(row + kBlock, at.query_count) - 1;
    int const end = minimum(minimum(last + at.offset, at.key_count) + p.window_right + 1, at.key_count);
    return maximum(divide_up(maximum(end, 0), kStep) - maximum(row + at.offset - p.window_left, 0) / kStep, 0);
  } else {
    int const first = maximum(row - at.offset - p.window_right, 0);
    return maximum(divide_up(at.query_count, kStep) - first / kStep, 0);
  }
}

// Whether a kernel wants a sequence's blocks in turn, the last one first, as its CTAs wait for each other in this
// order. They would wait for ever for blocks that share a number with others': where sequences overlap, or begin late,
// none is.
template <typename Config, typename = void>
inline constexpr bool kSequencesInTurn = false;

// Lists the blocks, of which there are at most `most`, and clears a counter for the kernel that follows. A block's
// place is how many come before it, so that nothing depends on who comes first. kEarly: the kernel behind may start
// beside it, where it waits for the list itself.
template <typename Config, bool kByQueries, int kBlock, int kStep, bool kEarly, typename Params>
__global__ void __launch_bounds__(kListThreads)
    list_blocks(Params const __grid_constant__ params, BlockList list, int most, int* cleared) {
  __shared__ uint64_t keys[kListThreads];
  wait_on_dependent_grids();
  if constexpr (kEarly) launch_dependent_grids();
  ListedBlock mine;
  bool listed = true;
  if constexpr (kSequencesInTurn<Config>) {
    listed = CuSeqlens::of_queries(params).in_order();
    listed &= CuSeqlens::of_keys(params).in_order();
  }
  auto const key_of = [&](ListedBlock& at, int number) {
    if (!listed || number >= most || !find_listed<kByQueries, kBlock>(at, params, number)) return uint64_t(0);
    ListedBlock ranked = at;
    if constexpr (kSequencesInTurn<Config>) {
      int const blocks = divide_up(kByQueries ? at.query_count : at.key_count, kBlock);
      number += blocks - 1 - 2 * at.block;
      ranked.block = 0;  // which visits the most of its sequence
    }
    uint64_t const visited = visited_tiles<kByQueries, kBlock, kStep>(ranked, params) + 1;
    return visited << 32 | uint32_t(most - number);
  };
  uint64_t const key = key_of(mine, int(blockIdx.x) * kListThreads + int(threadIdx.x));
  int place = 0, count = 0;
  for (int first = 0; first < most; first += kListThreads) {
    ListedBlock other;
    __syncthreads();
    keys[threadIdx.x] = key_of(other, first + int(threadIdx.x));
    __syncthreads();
#pragma unroll 8
    for (int i = 0; i < kListThreads; ++i) {
      place += keys[i] > key;
      count += keys[i] != 0;
    }
  }
  if (key != 0) list.blocks[place] = mine;
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    *list.count = count;
    if (cleared != nullptr) *cleared = 0;
  }
}

// The same on the host's side: `total` rows, of which it is queries or keys.
template <typename Config, bool kByQueries, int kBlock, int kStep, bool kEarly = false, typename Params>
inline int32_t launch_list(Params const& params, BlockList const& list, int* cleared, cudaStream_t stream) {
  int const most = count_blocks(kByQueries ? params.total_q : params.total_k, params.batch, kBlock);
  return EarlyLaunch::start(true, list_blocks<Config, kByQueries, kBlock, kStep, kEarly, Params>,
                            divide_up(most, kListThreads), kListThreads, 0, stream, params, list, most, cleared);
}

}  // namespace attention_autotuner

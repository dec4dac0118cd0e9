// The blocks of rows of packed sequences that exist, listed by a kernel of its own: those that visit most tiles first,
// or sequences in turn, those of the most steps first.
//
// A CTA of the kernels after it finds its block and its sequence by one read, whatever lengths there are. What lies
// behind the last sequence is one more, as common/sequences.cuh has it.
#pragma once

#include <cstdint>
#include <type_traits>

#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/sequences.cuh"
#include "attention_autotuner/common/threads.cuh"
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

// One of the parts of the tiles of keys that a block of queries visits.
struct alignas(16) ListedPart : ListedBlock {
  int split, splits;  // which one, of how many
};

// Where a list lies, and how many blocks it has.
template <typename Listed>
struct ListOf {
  using Block = Listed;
  Listed* blocks;
  int* count;
};
using BlockList = ListOf<ListedBlock>;
// Of blocks that have as many rows as is known at launch alone. Their parts are about as long as keeps all CTAs busy,
// whatever the lengths, and at most so many of a block.
struct PartList : ListOf<ListedPart> {
  Divider rows;
  int splits;
  float ctas;  // that run at a time, for each head

  // Of so many tiles, in parts of about as many as these.
  __device__ __forceinline__ int parts_of(int tiles, int part) const {
    return minimum(maximum(1, int(float(tiles) / part + 0.5f)), splits);
  }
};
template <int kBlock>
__host__ __device__ __forceinline__ int block_rows(BlockList const&) {
  return kBlock;
}
template <int kBlock>
__host__ __device__ __forceinline__ Divider const& block_rows(PartList const& list) {
  return list.rows;
}

// Block `number` of all, of `rows` rows, of which it may be that none has it. Params have windows as with_window leaves
// them.
template <bool kByQueries, typename Params, typename Rows>
__device__ __forceinline__ bool find_listed(ListedBlock& listed, Params const& p, int number, Rows const& rows) {
  CuSeqlens const queries = CuSeqlens::of_queries(p), keys = CuSeqlens::of_keys(p);
  SequenceBlock const at = find_block(kByQueries ? queries : keys, number, rows);
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
template <bool kByQueries, int kStep, typename Params>
__device__ __forceinline__ int visited_tiles(ListedBlock const& at, Params const& p, int rows) {
  int const row = at.block * rows;
  if constexpr (kByQueries) {
    int const last = minimum(row + rows, at.query_count) - 1;
    int const end = minimum(minimum(last + at.offset, at.key_count) + p.window_right + 1, at.key_count);
    return maximum(divide_up(maximum(end, 0), kStep) - maximum(row + at.offset - p.window_left, 0) / kStep, 0);
  } else {
    int const first = maximum(row - at.offset - p.window_right, 0);
    return maximum(divide_up(at.query_count, kStep) - first / kStep, 0);
  }
}

// How long a part is, in tiles of keys: of eight lengths, which make a round of a head's CTAs or more, the one whose
// rounds end first if all parts were alike. All threads of a CTA call, with `scratch` of three words for each warp.
template <int kStep, typename Params>
__device__ __forceinline__ int tiles_of_part(PartList const& list, Params const& p, float* scratch) {
  constexpr int kWarps = kListThreads / 32;
  constexpr float kPartTiles = 128.0f / kStep;  // that the begin and the end of one take
  int const warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  CuSeqlens const queries = CuSeqlens::of_queries(p), sequences = CuSeqlens::of_keys(p);
  auto const tiles_of = [&](int sequence) {
    int const keys = sequences.length(sequence);
    return divide_up(minimum(keys, minimum(keys, p.window_left) + minimum(keys, p.window_right) + list.rows.divisor),
                     kStep);
  };
  auto const blocks_of = [&](int sequence) {
    return float(list.rows.divide(queries.length(sequence) + list.rows.divisor - 1));
  };
  auto const add = [](float a, float b) { return a + b; };
  auto const larger = [](float a, float b) { return fmaxf(a, b); };
  float longest = 1.0f, all = 0.0f;
  for (int i = int(threadIdx.x); i < p.batch; i += kListThreads) {
    longest = fmaxf(longest, float(tiles_of(i)));
    all += float(tiles_of(i)) * blocks_of(i);
  }
  scratch[warp] = over_warp(longest, larger);
  scratch[kWarps + warp] = over_warp(all, add);
  __syncthreads();
  all = 0.0f;
  for (int i = 0; i < kWarps; ++i) {
    longest = fmaxf(longest, scratch[i]);
    all += scratch[kWarps + i];
  }
  auto const part_of = [&](int rounds) {
    float const even = all / (list.ctas * rounds), fewest = longest / list.splits;
    return int(ceilf(fmaxf(1.0f, fminf(longest, fmaxf(even, fewest)))));
  };
  int const part = part_of(warp + 1);
  float items = 0.0f, longest_part = 0.0f;
  for (int i = lane; i < p.batch; i += 32) {
    int const tiles = tiles_of(i), splits = list.parts_of(tiles, part);
    longest_part = fmaxf(longest_part, ceilf(float(tiles) / splits));
    items += float(splits) * blocks_of(i);
  }
  items = fmaxf(1.0f, over_warp(items, add));
  longest_part = over_warp(longest_part, larger);
  float const rounds = ceilf(items / list.ctas);
  scratch[2 * kWarps + warp] = fmaxf(longest_part, rounds * all / items) + kPartTiles * rounds;
  __syncthreads();
  int best = 0;
  for (int i = 1; i < kWarps; ++i) best = scratch[2 * kWarps + i] < scratch[2 * kWarps + best] ? i : best;
  int const chosen = part_of(best + 1);
  __syncthreads();
  return chosen;
}

// The rank that says the place of a block's parts, beside how many these are, and the block.
struct PartsRank {
  uint64_t key;
  int splits, place;
  ListedPart block;
};

// Writes the parts of so many blocks, a warp those of one after the other.
__device__ __forceinline__ void write_parts(PartList const& list, PartsRank const* ranks, int blocks) {
  for (int i = int(threadIdx.x) / 32; i < blocks; i += kListThreads / 32) {
    ListedPart part = ranks[i].block;
    for (part.split = int(threadIdx.x) % 32; part.split < ranks[i].splits; part.split += 32) {
      list.blocks[ranks[i].place + part.split] = part;
    }
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
template <typename Config, bool kByQueries, int kBlock, int kStep, bool kEarly, typename Params,
          typename List = BlockList>
__global__ void __launch_bounds__(kListThreads)
    list_blocks(Params const __grid_constant__ params, List list, int most, int* cleared) {
  using Block = typename List::Block;
  constexpr bool kParts = std::is_same_v<List, PartList>;
  using Rank = std::conditional_t<kParts, PartsRank, uint64_t>;
  __shared__ Rank keys[kListThreads];
  wait_on_dependent_grids();
  if constexpr (kEarly) launch_dependent_grids();
  Block mine;
  bool listed = true;
  auto const rows = block_rows<kBlock>(list);
  int part_tiles = 0;
  if constexpr (kParts) {
    auto* const scratch = reinterpret_cast<float*>(keys);
    part_tiles = list.splits > 1 ? tiles_of_part<kStep>(list, params, scratch) : 1 << 30;
  }
  if constexpr (kSequencesInTurn<Config>) {
    listed = CuSeqlens::of_queries(params).in_order();
    listed &= CuSeqlens::of_keys(params).in_order();
  }
  auto const key_of = [&](Block& at, int number) {
    if (!listed || number >= most || !find_listed<kByQueries>(at, params, number, rows)) return uint64_t(0);
    ListedBlock ranked = at;
    if constexpr (kSequencesInTurn<Config>) {
      int const blocks = divide_up(kByQueries ? at.query_count : at.key_count, kBlock);
      number += blocks - 1 - 2 * at.block;
      ranked.block = 0;  // which visits the most of its sequence
    }
    int tiles = visited_tiles<kByQueries, kStep>(ranked, params, divisor_of(rows));
    if constexpr (kParts) {
      at.splits = list.parts_of(tiles, part_tiles);
      tiles = int(ceilf(float(tiles) / at.splits));
    }
    uint64_t const visited = tiles + 1;
    return visited << 32 | uint32_t(most - number);
  };
  uint64_t const key = key_of(mine, int(blockIdx.x) * kListThreads + int(threadIdx.x));
  int place = 0, count = 0;
  for (int first = 0; first < most; first += kListThreads) {
    Block other;
    __syncthreads();
    if constexpr (kParts) {
      uint64_t of_other = key;
      if (first == int(blockIdx.x) * kListThreads) {
        other = mine;
      } else {
        of_other = key_of(other, first + int(threadIdx.x));
      }
      keys[threadIdx.x].key = of_other;
      keys[threadIdx.x].splits = of_other != 0 ? other.splits : 0;
    } else {
      keys[threadIdx.x] = key_of(other, first + int(threadIdx.x));
    }
    __syncthreads();
    int const ranked = kParts ? minimum(kListThreads, most - first) : kListThreads;
#pragma unroll 8
    for (int i = 0; i < ranked; ++i) {
      if constexpr (kParts) {
        place += keys[i].key > key ? keys[i].splits : 0;
        count += keys[i].splits;
      } else {
        place += keys[i] > key;
        count += keys[i] != 0;
      }
    }
  }
  if constexpr (kParts) {
    __syncthreads();
    keys[threadIdx.x] = {key, key != 0 ? mine.splits : 0, place, mine};
    __syncthreads();
    write_parts(list, keys, minimum(kListThreads, most - int(blockIdx.x) * kListThreads));
  } else {
    if (key != 0) list.blocks[place] = mine;
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    *list.count = count;
    if (cleared != nullptr) *cleared = 0;
  }
}

// The same on the host's side: `total` rows, of which it is queries or keys.
template <typename Config, bool kByQueries, int kBlock, int kStep, bool kEarly = false, typename Params, typename List>
inline int32_t launch_list(Params const& params, List const& list, int* cleared, cudaStream_t stream) {
  int const most =
      count_blocks(kByQueries ? params.total_q : params.total_k, params.batch, divisor_of(block_rows<kBlock>(list)));
  return EarlyLaunch::start(true, list_blocks<Config, kByQueries, kBlock, kStep, kEarly, Params, List>,
                            divide_up(most, kListThreads), kListThreads, 0, stream, params, list, most, cleared);
}

}  // namespace attention_autotuner

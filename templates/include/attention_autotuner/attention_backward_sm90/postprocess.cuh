// What follows the passes: dQ in 16 bits from the fp32 sums that blocks of keys added to (dq_share.cuh), dK and dV from
// those of CTAs that shared their rows, the gradient of sinks.
#pragma once

#include <cstdint>

#include "attention_autotuner/attention_backward_sm90/dq_share.cuh"
#include "attention_autotuner/common/convert.cuh"
#include "attention_autotuner/common/loads.cuh"
#include "attention_autotuner/common/postprocess.cuh"
#include "attention_autotuner/common/preprocess.cuh"
#include "attention_autotuner/common/scheduler.cuh"
#include "attention_autotuner/common/sink_gradient.cuh"
#include "attention_autotuner/common/threads.cuh"

namespace attention_autotuner::softmax_backward {

// How many CTAs find the gradient of sinks, before those that convert dQ.
template <typename Config, typename Params>
__host__ __device__ inline int sink_ctas(Params const& p) {
  if constexpr (ScoreModsOf<Config>::kSinks) return p.dsinks == nullptr ? 0 : p.heads_q;
  return 0;
}
// Of the others: which tile of queries a CTA has, and how many there are.
template <typename Config>
__device__ __forceinline__ int converted_tile(ArgumentsOf<Config> const& arguments) {
  return int(blockIdx.x) - sink_ctas<Config>(arguments.params);
}
template <typename Config>
__device__ __forceinline__ int64_t count_converted(ArgumentsOf<Config> const& arguments) {
  return int64_t(gridDim.x) - sink_ctas<Config>(arguments.params);
}

// The list of converted tiles of queries.
struct ConvertedTiles {
  Divider tiles, heads;  // of a query head, of a batch entry
  Divider counted;       // query heads that count as complete together, or of uneven parts those of a group
};
// Which counter of complete blocks a query head has: that of the CTAs which take it, see Share.
template <typename T, typename Arguments>
__device__ __forceinline__ int counter_of(Arguments const& arguments, ConvertedTiles const& list, int head) {
  int const counter = list.counted.divide(head);
  if constexpr (!T::kUnevenParts) return counter;
  int const splits = arguments.splits.divisor, within = head - counter * list.counted.divisor;
  return counter * splits + list.counted.divide((within + 1) * splits - 1);
}

// What a warp converts at a time: tiles of sums, which it reads lane after lane, as they lie. A lane ends with some
// rows of them, and with their columns in chunks of eight.
template <typename T, bool kSwapped = T::kSwapsDq>
struct ConvertedGroup {
  using Element = typename T::Element;
  static constexpr int kTiles = 4;
  static constexpr int kGroups = T::kBlockColumns * T::kDepth / (128 * kTiles);
  static constexpr int kRows = 2, kChunks = 1;
  float4 sums[kTiles];
  uint32_t words[kRows][4 * kChunks];

  __device__ __forceinline__ void load(float const* tile, int group) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) sums[i] = load_in_order(tile + 128 * (kTiles * group + i) + 4 * lane_index());
  }
  // A row of a tile has its columns in four lanes. Each lane keeps one tile, and gives its columns of the others away.
  __device__ __forceinline__ void convert(float scale) {
    int const place = lane_index() % 4;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      words[0][i] = pack_pair<Element>(sums[i].x * scale, sums[i].y * scale);
      words[1][i] = pack_pair<Element>(sums[i].z * scale, sums[i].w * scale);
    }
#pragma unroll
    for (int step = 1; step < kTiles; step *= 2) {
      bool const upper = place & step;
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        if (i & step) continue;
#pragma unroll
        for (int half = 0; half < kRows; ++half) {
          uint32_t const low = words[half][i], high = words[half][i | step];
          uint32_t const other = __shfl_xor_sync(0xffffffffu, upper ? low : high, step);
          words[half][i] = upper ? other : low;
          words[half][i | step] = upper ? high : other;
        }
      }
    }
  }
  __device__ __forceinline__ static int fragment(int group) { return kTiles * group + lane_index() % 4; }
  __device__ __forceinline__ static int row(int group, int half) {
    return fragment(group) / (T::kDepth / 8) * 16 + lane_index() / 4 + 8 * half;
  }
  __device__ __forceinline__ static int column(int group) { return fragment(group) % (T::kDepth / 8) * 8; }
};

// Of eight tiles of 16 columns by 8 queries. A lane reads whole rows, and gives half of each to its neighbor for half
// of the neighbor's, so that two lanes write a sector of 32 bytes together.
template <typename T>
struct ConvertedGroup<T, true> {
  using Element = typename T::Element;
  static constexpr int kQueryTiles = T::kBlockColumns / 8, kFragments = T::kDepth / 16 * kQueryTiles;
  static constexpr int kGroups = kFragments / 8;
  static constexpr int kRows = 4, kChunks = 1;
  static_assert(kFragments % 8 == 0);
  float4 sums[8];
  uint32_t words[kRows][4 * kChunks];

  __device__ __forceinline__ static int fragment(int group) { return 8 * group + lane_index() / 4; }
  __device__ __forceinline__ void load(float const* tile, int group) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      sums[i] = load_in_order(tile + 128 * fragment(group) + 16 * i + 4 * (lane_index() % 4));
    }
  }
  __device__ __forceinline__ void convert(float scale) {
    bool const odd = lane_index() % 2;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      float4 const a = sums[2 * pair], b = sums[2 * pair + 1];
      words[0][pair] = pack_pair<Element>(a.x * scale, b.x * scale);
      words[1][pair] = pack_pair<Element>(a.y * scale, b.y * scale);
      words[2][pair] = pack_pair<Element>(a.z * scale, b.z * scale);
      words[3][pair] = pack_pair<Element>(a.w * scale, b.w * scale);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t const left = words[half][i], right = words[2 + half][i];
        uint32_t const other = __shfl_xor_sync(0xffffffffu, odd ? left : right, 1);
        words[half][i] = odd ? other : left;
        words[2 + half][i] = odd ? right : other;
      }
    }
  }
  __device__ __forceinline__ static int row(int group, int i) {
    return fragment(group) % kQueryTiles * 8 + lane_index() % 4 / 2 * 4 + i;
  }
  __device__ __forceinline__ static int column(int group) {
    return fragment(group) / kQueryTiles * 16 + lane_index() % 2 * 8;
  }
};

// dQ in 16 bits from the sums of a tile of queries, by the warps of a CTA.
template <typename Config, typename T>
__device__ __forceinline__ void convert_dq(ArgumentsOf<Config> const& arguments, ConvertedTiles const& list) {
  using Element = typename T::Element;
  using Group = ConvertedGroup<T>;
  constexpr int kWarps = kRowThreads / 32, kAhead = minimum(2, divide_up(Group::kGroups, kWarps));
  auto const& p = arguments.params;
  int const place = converted_tile<Config>(arguments);
  int index = place, tile = list.tiles.take(index), rows = p.seqlen_q, first_row = 0;
  if constexpr (T::kPacked) {
    CuSeqlens const queries = CuSeqlens::of_queries(p);
    SequenceBlock const at = find_block_by_warp<T::kBlockColumns>(queries, tile);
    if (!at.exists) return;
    tile = at.block;
    rows = queries.length(at.sequence);
    first_row = queries.begin(at.sequence);
  }
  int const head = list.heads.take(index);
  float const* const sums = arguments.dq_sum + int64_t(place) * (T::kBlockColumns * T::kDepth);
  Element* const out = static_cast<Element*>(p.dq.data) + index * p.dq.stride_batch + head * p.dq.stride_head;
  float const scale = score_scale(p);
  // Sums of a tile that no block of keys sees were never stored, and may be anything. Semaphores follow the sums.
  [[maybe_unused]] int stored = 1;
  if constexpr (T::kStoredDq) {
    auto const* const semaphores = reinterpret_cast<int const*>(arguments.dq_sum + count_converted<Config>(arguments) *
                                                                                       (T::kBlockColumns * T::kDepth));
    stored = semaphores[place];
  }
  int const warp = int(threadIdx.x) / 32;
  for (int base = 0; base < Group::kGroups; base += kAhead * kWarps) {
    Group groups[kAhead];
    auto const exists = [&](int i) {
      return Group::kGroups % (kAhead * kWarps) == 0 || base + i * kWarps + warp < Group::kGroups;
    };
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (exists(i)) groups[i].load(sums, base + i * kWarps + warp);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (!exists(i)) break;
      groups[i].convert(scale);
      int const group = base + i * kWarps + warp, column = Group::column(group);
#pragma unroll
      for (int half = 0; half < Group::kRows; ++half) {
        int const row = tile * T::kBlockColumns + Group::row(group, half);
        if (row >= rows) continue;
        Element* const line = out + int64_t(first_row + row) * p.dq.stride_row + column;
#pragma unroll
        for (int chunk = 0; chunk < Group::kChunks; ++chunk) {
          if (column + 8 * chunk >= p.dim_qk) continue;
          uint32_t const* const words = groups[i].words[half] + 4 * chunk;
          *reinterpret_cast<uint4*>(line + 8 * chunk) =
              stored ? make_uint4(words[0], words[1], words[2], words[3]) : make_uint4(0, 0, 0, 0);
        }
      }
    }
  }
}

// How many blocks of keys a head has: known at launch, or of packed sequences once they are listed.
template <bool kPacked>
struct HeadBlocks {
  int blocks;
  static HeadBlocks of(int blocks, BlockList const&) { return {blocks}; }
  __device__ __forceinline__ int count() const { return blocks; }
};
template <>
struct HeadBlocks<true> {
  int const* listed;
  static HeadBlocks of(int, BlockList const& list) { return {list.count}; }
  __device__ __forceinline__ int count() const { return *listed; }
};
// One CTA a tile of queries. Where `blocks` blocks of keys count a head as complete, its tiles need not wait for
// others: while the last blocks of keys run, SMs that have no more of these convert the heads before. The last CTA
// stays until the pass has ended, so that the end of this kernel is the end of both.
template <typename Config, typename T>
__global__ void __launch_bounds__(kRowThreads)
    attention_backward_sm90_convert_dq(ArgumentsOf<Config> const __grid_constant__ arguments, int const* complete,
                                       HeadBlocks<T::kPacked> blocks, ConvertedTiles list) {
  constexpr bool kSinks = ScoreModsOf<Config>::kSinks;
  bool const of_sinks = kSinks && blockIdx.x < unsigned(sink_ctas<Config>(arguments.params));
  if constexpr (T::kCountsHeads) {
    if (threadIdx.x == 0) {
      // For sinks the first one, whose blocks of keys have seen the end of the preprocess.
      int const head = of_sinks ? 0 : list.tiles.divide(converted_tile<Config>(arguments));
      wait_complete(complete + counter_of<T>(arguments, list, head), blocks.count() * T::kHeadCounts);
    }
    __syncthreads();
  } else if constexpr (T::kEarly) {
    wait_on_dependent_grids();
  }
  if constexpr (kSinks) {
    if (of_sinks) return sink_gradient_of_head<Config, kRowThreads>(arguments, int(blockIdx.x));
  }
  convert_dq<Config, T>(arguments, list);
  if constexpr (T::kCountsHeads) {
    if (blockIdx.x == gridDim.x - 1) wait_on_dependent_grids();
  }
}

// dK and dV where CTAs shared their rows. It begins beside the last pass, and lets the conversion of dQ begin beside
// it.
template <typename Config>
__global__ void __launch_bounds__(kRowThreads)
    attention_backward_sm90_reduce_splits(ArgumentsOf<Config> const __grid_constant__ arguments) {
  if constexpr (Config::kEarlyLaunches) {
    launch_dependent_grids();
    wait_on_dependent_grids();
  }
  reduce_splits_of<Config>(arguments);
}

// Of passes that do not share dQ. It begins beside the last of them, and so after the preprocess, for which the first
// one has waited, and ends after it.
template <typename Config>
__global__ void __launch_bounds__(kSinkThreads)
    attention_backward_sm90_sink_gradient(ArgumentsOf<Config> const __grid_constant__ arguments) {
  sink_gradient_of_head<Config, kSinkThreads>(arguments, int(blockIdx.x));
  if constexpr (Config::kEarlyLaunches) wait_on_dependent_grids();
}

}  // namespace attention_autotuner::softmax_backward

// Decayed scores of every chunk, scale gamma^(i-j) (a_i b_j) for i >= j and 0 above, for passes that read them.
//
// A CTA computes one chunk of one head, a warp sixteen of its rows; the inner dimension streams through shared memory
// in slices. The result is [batch, heads, chunks, chunk, chunk] in the 16-bit type; of packed sequences, chunks are
// numbered over all of them.
#pragma once

#include "attention_autotuner/abi.h"
#include "attention_autotuner/chunks_sm80/traits.cuh"
#include "attention_autotuner/common/convert.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/scheduler.cuh"
#include "attention_autotuner/common/sequences.cuh"
#include "attention_autotuner/common/shared_memory.cuh"
#include "attention_autotuner/common/tensors.cuh"
#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/common/tile.cuh"
#include "attention_autotuner/common/warp_mma.cuh"

namespace attention_autotuner {

struct ScoresArguments {
  attention_autotuner_tensor a, b;  // of the heads of Q, and of K and V
  void* scores;
  float const* log2_gamma;
  int seqlen, depth;
  float scale;
  Divider chunks, heads, group;
};
struct PackedScoresArguments : ScoresArguments {
  CuSeqlens sequences;
};

template <typename Config, int D>
struct ScoresTraits {
  using Element = typename Config::Element;
  using Arguments = std::conditional_t<kIsPacked<Config>, PackedScoresArguments, ScoresArguments>;
  static constexpr bool kPacked = kIsPacked<Config>;
  static constexpr int kChunk = Config::kChunk;
  static constexpr int kCopyBytes = Config::kCopyBytes;
  static constexpr int kSlice = D % 64 == 0 ? 64 : D % 32 == 0 ? 32 : 16;
  static constexpr int kSlices = D / kSlice;
  static constexpr int kStages = 3;
  static constexpr int kThreads = 2 * kChunk;  // a warp for sixteen rows
  static constexpr int kColumnTiles = kChunk / 8;
  using Tile = SmemTile<kChunk, kSlice, false>;
  using Copy = TileCopy<kChunk, kSlice, kThreads, kCopyBytes, false>;
  static constexpr int kSmemBytes = kStages * 2 * Tile::kBytes;
};

template <typename T>
__global__ void __launch_bounds__(T::kThreads)
    retention_scores(typename T::Arguments const __grid_constant__ arguments) {
  using Element = typename T::Element;
  using Tile = typename T::Tile;
  using Copy = typename T::Copy;
  extern __shared__ __align__(128) char smem_bytes[];
  uint32_t const smem = shared_address(smem_bytes);
  int const thread = thread_index(), lane = thread & 31, row0 = thread / 32 * 16;
  int const sequence = arguments.chunks.divide(int(blockIdx.x));
  int const chunk = int(blockIdx.x) - sequence * arguments.chunks.divisor;
  int const batch = arguments.heads.divide(sequence), head = sequence - batch * arguments.heads.divisor;
  int row = chunk * T::kChunk + Copy::row(thread), rows = arguments.seqlen - chunk * T::kChunk;
  if constexpr (T::kPacked) {
    CuSeqlens const& sequences = arguments.sequences;
    SequenceBlock const here = find_block<T::kChunk>(sequences, chunk);
    if (!here.exists) return;
    int const first = here.block * T::kChunk;
    row = sequences.begin(here.sequence) + first + Copy::row(thread);
    rows = here.sequence == sequences.sequences ? 0 : sequences.length(here.sequence) - first;
  }
  Element const* const a =
      head_data<Element>(arguments.a, batch, head) + row * arguments.a.stride_row + Copy::column(thread);
  Element const* const b = head_data<Element>(arguments.b, batch, arguments.group.divide(head)) +
                           row * arguments.b.stride_row + Copy::column(thread);
  auto fetch = [&](int slice) {
    if (slice < T::kSlices) {
      uint32_t const target = smem + slice % T::kStages * 2 * Tile::kBytes + Copy::offset(thread);
      int const columns = arguments.depth - slice * T::kSlice;
      Copy::copy(target, a + slice * T::kSlice, arguments.a.stride_row, rows, columns);
      Copy::copy(target + Tile::kBytes, b + slice * T::kSlice, arguments.b.stride_row, rows, columns);
    }
    cp_async_fence();
  };
  LaneRow const at_a = lane_row_a(lane), at_b = lane_row_b(lane);
  Accumulators<1, T::kColumnTiles> s;
  clear(s);
#pragma unroll
  for (int slice = 0; slice < T::kStages - 1; ++slice) fetch(slice);
  for (int slice = 0; slice < T::kSlices; ++slice) {
    cp_async_wait<T::kStages - 2>();
    __syncthreads();
    fetch(slice + T::kStages - 1);
    uint32_t const stage = smem + slice % T::kStages * 2 * Tile::kBytes;
    gemm<Element, Tile, Tile, T::kSlice / 16>(s, stage + Tile::offset(row0 + at_a.row, at_a.column),
                                              stage + Tile::kBytes + Tile::offset(at_b.row, at_b.column), [](int) {});
  }
  float const log2_gamma = arguments.log2_gamma[head];
  auto* const out = static_cast<uint32_t*>(arguments.scores) +
                    (int64_t(sequence) * arguments.chunks.divisor + chunk) * (T::kChunk * T::kChunk / 2);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int const i = row0 + 8 * half + lane / 4;
#pragma unroll
    for (int n = 0; n < T::kColumnTiles; ++n) {
      float value[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        int const distance = i - (8 * n + 2 * (lane & 3) + e);
        float const decay = exp2_approximate(log2_gamma * float(maximum(distance, 0)));
        value[e] = distance < 0 ? 0.0f : s[0][n][2 * half + e] * (arguments.scale * decay);
      }
      out[i * (T::kChunk / 2) + 4 * n + (lane & 3)] = pack_pair<Element>(value[0], value[1]);
    }
  }
}

}  // namespace attention_autotuner

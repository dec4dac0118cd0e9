// The gradient of gamma, as far as all kernels compute it alike: every term of the outputs and of the last state is a
// product with gamma^n, and its share of the loss counts n times.
//
// Here n is never a difference of two large numbers, which would cancel: a super-chunk's cuts divide it into distances
// that have one sign. With S the state before a super-chunk of L tokens and G the gradient of the state after it, of
// times i and j in it:
//
//   both ends in it              sum of (i - j) gamma^(i-j) scale (q_i k_j) (do_i v_j)
//   the query, for what is in S  <S, sum of (i + 1) gamma^(i+1) scale q_i^T do_i>
//   the key, for what is in G    <G, sum of (L - 1 - j) gamma^(L-1-j) k_j^T v_j>
//   neither                      <G, L gamma^L S>
//
// The first is scores of the super-chunk's pairs, by MMAs of warps; the others are passes over its chunks as for the
// states (chunks_sm80/gamma.cuh, chunks_backward_sm90/gamma.cuh), with other factors of its tokens, and they end in an
// inner product with a stored state instead of a store. Partial sums are stored apart, and added in a fixed order.
#pragma once

#include <type_traits>

#include "attention_autotuner/abi.h"
#include "attention_autotuner/common/chunk_sequences.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/scheduler.cuh"
#include "attention_autotuner/common/shared_memory.cuh"
#include "attention_autotuner/common/tensors.cuh"
#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/common/tile.cuh"
#include "attention_autotuner/common/warp_mma.cuh"

namespace attention_autotuner {

inline constexpr int kGammaSumThreads = 256;

// Tokens of a super-chunk where the gradient of gamma is wanted and the kernel has no shorter ones: as many as there
// are columns, so that pairs of tokens cost no more than states. A multiple of every chunk.
constexpr int gamma_super_chunk(int padded_dim_qk, int padded_dim_v) {
  int tokens = 128;
  while (tokens < padded_dim_qk || tokens < padded_dim_v) tokens *= 2;
  return tokens;
}

template <typename Value>
__device__ __forceinline__ Value warp_sum(Value value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  return value;
}

// --- both ends in the super-chunk ------------------------------------------------------------------------------------

struct GammaPairsArguments {
  attention_autotuner_tensor q, k, v, dout;
  float* partial;  // [batch, heads, supers, tiles of a super-chunk, warps]
  float const* log2_gamma;
  int seqlen, super_chunk, dim_qk, dim_v;
  float scale;
  Divider tiles, supers, heads, group;
};
struct PackedGammaPairsArguments : GammaPairsArguments {
  PackedSuperChunks packed;
};

template <typename Config>
struct GammaPairsTraits {
  using Element = typename Config::Element;
  using Arguments = std::conditional_t<kIsPacked<Config>, PackedGammaPairsArguments, GammaPairsArguments>;
  static constexpr bool kPacked = kIsPacked<Config>;
  static constexpr int kRows = 64;   // tokens of a tile, of queries and of keys
  static constexpr int kSlice = 64;  // of the inner dimensions, one after the other
  static constexpr int kSlicesQK = divide_up(Config::kPaddedDimQK, kSlice);
  static constexpr int kSlices = kSlicesQK + divide_up(Config::kPaddedDimV, kSlice);
  static constexpr int kStages = 3;
  static constexpr int kWarps = kRows / 16;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kColumnTiles = kRows / 8;
  using Tile = SmemTile<kRows, kSlice, false>;
  using Copy = TileCopy<kRows, kSlice, kThreads, Config::kCopyBytes, false>;
  static constexpr int kSmemBytes = kStages * 2 * Tile::kBytes;
};

// A CTA takes kRows queries of a super-chunk, with all the keys before them in it.
template <typename T>
__global__ void __launch_bounds__(T::kThreads)
    retention_gamma_pairs(typename T::Arguments const __grid_constant__ arguments) {
  using Element = typename T::Element;
  using Tile = typename T::Tile;
  using Copy = typename T::Copy;
  extern __shared__ __align__(128) char smem_bytes[];
  uint32_t const smem = shared_address(smem_bytes);
  int const thread = thread_index(), lane = thread & 31, warp = thread / 32;
  int index = int(blockIdx.x);
  int const tile = arguments.tiles.take(index), super = arguments.supers.take(index);
  int const head = arguments.heads.take(index), kv_head = arguments.group.divide(head), batch = index;
  int start = super * arguments.super_chunk, seqlen = arguments.seqlen, first_row = 0;
  if constexpr (T::kPacked) {
    SuperChunkPlace const here = arguments.packed.find(super);
    start = here.super * arguments.super_chunk;
    seqlen = here.behind ? 0 : here.length;
    first_row = here.first_row;
  }
  int const row0 = tile * T::kRows, length = minimum(arguments.super_chunk, seqlen - start);
  int const count = row0 < length ? (tile + 1) * T::kSlices : 0;  // of slices, of all tiles of keys
  Element const* const q = head_data<Element>(arguments.q, batch, head);
  Element const* const k = head_data<Element>(arguments.k, batch, kv_head);
  Element const* const v = head_data<Element>(arguments.v, batch, kv_head);
  Element const* const dout = head_data<Element>(arguments.dout, batch, head);
  auto copy = [&](uint32_t target, Element const* data, int64_t stride_row, int first, int column, int columns) {
    Copy::copy(target + Copy::offset(thread),
               data + (first_row + start + first + Copy::row(thread)) * stride_row + column + Copy::column(thread),
               stride_row, length - first, columns - column);
  };
  auto fetch = [&](int step) {
    if (step < count) {
      uint32_t const stage = smem + step % T::kStages * 2 * Tile::kBytes;
      int const key0 = step / T::kSlices * T::kRows, slice = step % T::kSlices;
      if (slice < T::kSlicesQK) {
        int const column = slice * T::kSlice;
        copy(stage, q, arguments.q.stride_row, row0, column, arguments.dim_qk);
        copy(stage + Tile::kBytes, k, arguments.k.stride_row, key0, column, arguments.dim_qk);
      } else {
        int const column = (slice - T::kSlicesQK) * T::kSlice;
        copy(stage, dout, arguments.dout.stride_row, row0, column, arguments.dim_v);
        copy(stage + Tile::kBytes, v, arguments.v.stride_row, key0, column, arguments.dim_v);
      }
    }
    cp_async_fence();
  };
  LaneRow const at_a = lane_row_a(lane), at_b = lane_row_b(lane);
  float const log2_gamma = arguments.log2_gamma[head];
  Accumulators<1, T::kColumnTiles> scores, gradients;
  clear(scores);
  clear(gradients);
  float sum = 0.0f;
#pragma unroll
  for (int step = 0; step < T::kStages - 1; ++step) fetch(step);
  for (int step = 0; step < count; ++step) {
    cp_async_wait<T::kStages - 2>();
    __syncthreads();
    fetch(step + T::kStages - 1);
    uint32_t const stage = smem + step % T::kStages * 2 * Tile::kBytes;
    uint32_t const a = stage + Tile::offset(16 * warp + at_a.row, at_a.column);
    uint32_t const b = stage + Tile::kBytes + Tile::offset(at_b.row, at_b.column);
    int const slice = step % T::kSlices;
    if (slice < T::kSlicesQK) {
      gemm<Element, Tile, Tile, T::kSlice / 16>(scores, a, b, [](int) {});
    } else {
      gemm<Element, Tile, Tile, T::kSlice / 16>(gradients, a, b, [](int) {});
    }
    if (slice != T::kSlices - 1) continue;
    int const nearest = row0 + 16 * warp + lane / 4 - step / T::kSlices * T::kRows - 2 * (lane & 3);
#pragma unroll
    for (int n = 0; n < T::kColumnTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float const distance = float(maximum(nearest + e / 2 * 8 - 8 * n - e % 2, 0));
        float const weight = distance * exp2_approximate(log2_gamma * distance);
        sum = fmaf(weight * scores[0][n][e], gradients[0][n][e], sum);
      }
    }
    clear(scores);
    clear(gradients);
  }
  sum = warp_sum(sum);
  if (lane == 0) arguments.partial[int64_t(blockIdx.x) * T::kWarps + warp] = arguments.scale * sum;
}

// --- one end outside -------------------------------------------------------------------------------------------------

// The arguments of a pass over chunks, but for the states, with an inner product at its end.
template <typename Arguments>
struct GammaPassArguments {
  Arguments chunks;
  float const* states;     // [batch, heads, supers, dim_qk, dim_v], before each super-chunk
  float const* gradients;  // the same of the states after each
  float* partial;          // [batch, heads, supers, slices, warps]
};

// No n gamma^n of up to `length` tokens exceeds this, as none exceeds 1 / (e -ln gamma). Tokens get fractions of it,
// for the sake of the 16-bit type.
__device__ __forceinline__ float most_of_shares(int length, float log2_gamma) {
  constexpr float kE = 2.718281828459045f;
  return fminf(float(length), kLog2E / (kE * fabsf(log2_gamma)));
}

// --- all of it -------------------------------------------------------------------------------------------------------

// The sum of a sequence's partial sums, times ln 2. A block for a sequence.
inline __global__ void __launch_bounds__(kGammaSumThreads)
    retention_gamma_sum(float const* pairs, int pair_sums, float const* queries, int query_sums, float const* keys,
                        int key_sums, float* dlog2_gamma) {
  __shared__ double sums[kGammaSumThreads / 32];
  double sum = 0.0;
  auto add = [&](float const* partial, int count) {
    for (int part = threadIdx.x; part < count; part += kGammaSumThreads)
      sum += partial[int64_t(blockIdx.x) * count + part];
  };
  add(pairs, pair_sums);
  add(queries, query_sums);
  add(keys, key_sums);
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int warp = 1; warp < kGammaSumThreads / 32; ++warp) sum += sums[warp];
  dlog2_gamma[blockIdx.x] = float(double(kLn2) * sum);
}

}  // namespace attention_autotuner

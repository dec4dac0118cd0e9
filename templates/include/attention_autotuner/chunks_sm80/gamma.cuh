// The gradient of gamma: every term of the outputs and of the last state is a product with gamma^n, and its share of
// the loss counts n times.
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
// The first is scores of the super-chunk's pairs, in fp32; the others are passes over its chunks as for the states,
// with other factors of its tokens, and they end in an inner product with a stored state instead of a store. Partial
// sums are stored apart, and added in a fixed order.
#pragma once

#include "attention_autotuner/abi.h"
#include "attention_autotuner/chunks_sm80/mainloop.cuh"
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

__device__ __forceinline__ float warp_sum(float value) {
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
  auto split = [](int& index, Divider const& divider) {
    int const quotient = divider.divide(index), rest = index - quotient * divider.divisor;
    index = quotient;
    return rest;
  };
  int index = int(blockIdx.x);
  int const tile = split(index, arguments.tiles), super = split(index, arguments.supers);
  int const head = split(index, arguments.heads), kv_head = arguments.group.divide(head), batch = index;
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

// --- beyond the super-chunk ------------------------------------------------------------------------------------------

template <typename Arguments>
struct GammaPassArguments {
  Arguments chunks;        // but for the states
  float const* states;     // [batch, heads, supers, dim_qk, dim_v], before each super-chunk
  float const* gradients;  // the same of the states after each
  float* partial;          // [batch, heads, supers, slices, warps]
};

// The pass of dv, whose Z are output gradients, sums over queries; that of dq, whose Z are keys, over keys.
template <typename T>
struct GammaWarp : ChunkWarp<T, true> {
  using Base = ChunkWarp<T, true>;

  __device__ __forceinline__ GammaWarp(typename T::Arguments const& arguments, uint32_t smem, int index)
      : Base(arguments, smem, index) {}

  __device__ __forceinline__ float run(GammaPassArguments<typename T::Arguments> const& mine) {
    constexpr int kStages = minimum(T::kStages, 2);
    auto const& arguments = this->arguments;
    int const start = super * arguments.super_chunk;
    int const length = minimum(arguments.super_chunk, sequence.readable(arguments) - start);
    if constexpr (T::kPacked) {
      if (length <= 0) return 0.0f;
    }
    int64_t const place = this->state_place(arguments.supers.divisor, sequence.slot(super));
    // No n gamma^n exceeds 1 / (e -ln gamma). Tokens get fractions of that, for the sake of the 16-bit type.
    float const most = fminf(float(length), kLog2E / (kE * fabsf(this->log2_gamma))), rest = 1.0f / most;
    auto share = [&](float n) {  // of tokens beyond the sequence, none
      float const distance = fmaxf(n, 0.0f);
      return rest * distance * exp2_approximate(this->log2_gamma * distance);
    };
    auto fetch = [&](int chunk, int stage) {
      if (chunk < this->end) {
        int const thread = thread_index(), row = chunk * T::kChunk, rows = sequence.readable(arguments) - row;
        int const tensor_row = sequence.first_row + row;
        uint32_t const base = smem + stage * T::kStageBytes;
        CopyY::copy(base + T::kYOffset + CopyY::offset(thread),
                    this->y() + (tensor_row + CopyY::row(thread)) * arguments.y.stride_row + CopyY::column(thread),
                    arguments.y.stride_row, rows, arguments.depth);
        CopyZ::copy(base + T::kZOffset + CopyZ::offset(thread),
                    this->z() + (tensor_row + CopyZ::row(thread)) * arguments.z.stride_row + CopyZ::column(thread),
                    arguments.z.stride_row, rows, arguments.columns - this->slice * T::kColumns);
      }
      cp_async_fence();
    };
    fetch(this->first, 0);
    clear(this->state);
    if constexpr (!T::kReversed) {
      float const* const source = mine.states + place;
      float const whole = share(float(length));
      this->visit_state([source, whole](float& value, int offset) { value = whole * source[offset]; });
    }
    for (int chunk = this->first; chunk < this->end; ++chunk) {
      int const stage = (chunk - this->first) % kStages, time = chunk * T::kChunk - start;
      if constexpr (kStages == 2) fetch(chunk + 1, 1 - stage);
      cp_async_wait<kStages - 1>();
      __syncthreads();
      this->add_tokens(smem + stage * T::kStageBytes, [&](float token) {
        return share(T::kReversed ? float(time + 1) + token : float(length - 1 - time) - token);
      });
      __syncthreads();
      if constexpr (kStages == 1) fetch(chunk + 1, 0);
    }
    float sum = 0.0f;
    float const* const partner = (T::kReversed ? mine.states : mine.gradients) + place;
    this->visit_state([&sum, partner](float& value, int offset) { sum = fmaf(value, partner[offset], sum); });
    return (T::kReversed ? arguments.scale : 1.0f) * most * warp_sum(sum);
  }

 private:
  static constexpr float kE = 2.718281828459045f;
  using CopyY = typename Base::CopyX;
  using CopyZ = typename Base::CopyZ;
  using Base::sequence;
  using Base::smem;
  using Base::super;
};

template <typename T>
__global__ void __launch_bounds__(T::kThreads, T::kCtasPerSm)
    retention_gamma_pass(GammaPassArguments<typename T::Arguments> const __grid_constant__ arguments) {
  extern __shared__ __align__(128) char smem_bytes[];
  GammaWarp<T> warp(arguments.chunks, shared_address(smem_bytes), int(blockIdx.x));
  float const sum = warp.run(arguments);
  int const index = thread_index() / 32;
  if ((lane_here()) == 0) arguments.partial[int64_t(blockIdx.x) * T::kWarps + index] = sum;
}

// --- all of it -------------------------------------------------------------------------------------------------------

// The sum of a sequence's partial sums, times ln 2. A block for a sequence.
inline __global__ void __launch_bounds__(kGammaSumThreads)
    retention_gamma_sum(float const* pairs, int pair_sums, float const* queries, int query_sums, float const* keys,
                        int key_sums, float* dlog2_gamma) {
  __shared__ double sums[kGammaSumThreads];
  double sum = 0.0;
  auto add = [&](float const* partial, int count) {
    for (int part = threadIdx.x; part < count; part += kGammaSumThreads)
      sum += partial[int64_t(blockIdx.x) * count + part];
  };
  add(pairs, pair_sums);
  add(queries, query_sums);
  add(keys, key_sums);
  sums[threadIdx.x] = sum;
  for (int half = kGammaSumThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) dlog2_gamma[blockIdx.x] = float(double(kLn2) * sums[0]);
}

}  // namespace attention_autotuner

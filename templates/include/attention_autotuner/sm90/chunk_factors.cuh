// What a pass over chunks of retention multiplies with in every chunk, computed once: factors of scores, in registers,
// and of tokens, in shared memory. Callers: chunks_sm90 and chunks_backward_sm90.
#pragma once

#include <cstdint>

#include "attention_autotuner/common/convert.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/shared_memory.cuh"
#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/sm90/roles.cuh"
#include "attention_autotuner/sm90/stmatrix.cuh"
#include "attention_autotuner/sm90/swizzle.cuh"
#include "attention_autotuner/sm90/wgmma.cuh"

namespace attention_autotuner {

inline constexpr int kChunkTokens = 64;

// Scores of a chunk by a warpgroup: scaled and decayed by the distance of their tokens, 0 where the row does not see
// the column. The factors of a thread are as many as there are distances between the 8 x 8 tiles of its warp's rows.
// Reversed, a row sees the tokens behind it.
template <typename Element, bool Reversed>
struct ChunkScores {
  static constexpr int kTiles = kChunkTokens / 8;

  float factors[kTiles + 1][2];

  __device__ __forceinline__ static int warp() { return thread_index() % kWarpgroupThreads / 32; }

  __device__ __forceinline__ ChunkScores(float scale, float log2_gamma) {
    int const first =
        16 * warp() + lane_here() / 4 - 2 * (lane_here() & 3);  // how far a row is ahead in the first tile
#pragma unroll
    for (int i = 0; i <= kTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        int const ahead = first + 8 * (i + 1 - kTiles) - e, distance = Reversed ? -ahead : ahead;
        factors[i][e] = distance < 0 ? 0.0f : scale * exp2_approximate(log2_gamma * float(distance));
      }
    }
  }
  // Rounded once, at the end: a score between tokens that do not see each other may be beyond the 16-bit type, or not
  // finite.
  __device__ __forceinline__ static float apply_score_mod(float score, float factor) {
    return factor == 0.0f ? 0.0f : score * factor;
  }
  __device__ __forceinline__ void store(float const (&scores)[kChunkTokens / 2], uint32_t tile) const {
    int const here = 16 * warp() + (lane_here() / 8 % 2) * 8 + lane_here() % 8;
#pragma unroll
    for (int g = 0; g < kTiles; g += 2) {
      uint32_t packed[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int const column = g + i / 2, half = i % 2;
        float const* const pair = scores + 4 * column + 2 * half;
        float const(&factor)[2] = factors[half - column + kTiles - 1];
        packed[i] = pack_pair<Element>(apply_score_mod(pair[0], factor[0]), apply_score_mod(pair[1], factor[1]));
      }
      store_matrix_x4(swizzled_address(tile, here, g + lane_here() / 16, here & 7), packed);
    }
  }
};

// Factors of a chunk's tokens as the A operand of WGMMA has them in a lane: of whole chunks, then of the last one,
// which may be shorter.
struct TokenFactors {
  static constexpr int kTableBytes = 4 * kChunkTokens, kBytes = 2 * kTableBytes;
  static constexpr int kMostBytes = 2 * kBytes;  // those of tokens and of outputs, in a CTA's shared memory
  uint32_t place;

  // By the threads of a warpgroup; `factor` takes a token and whether it is one of the last chunk's.
  template <typename Factor>
  __device__ __forceinline__ void store(Factor&& factor) const {
    int const thread = thread_index() % kWarpgroupThreads, at = thread % kChunkTokens;
    int const lane = at / 16, step = at / 4 % 4, further = at / 2 % 2, e = at % 2;
    float const value = factor(kMmaDepth * step + 8 * further + 2 * lane + e, thread >= kChunkTokens);
    store_shared(place + 4 * thread, __float_as_uint(value));
  }
  // Decays up to the end of the chunk, of `last` tokens the sequence's last one. Tokens beyond are zeros.
  __device__ __forceinline__ void store_decays(float log2_gamma, int last) const {
    store([log2_gamma, last](int token, bool of_last) {
      return exp2_approximate(log2_gamma * float(maximum((of_last ? last : kChunkTokens) - 1 - token, 0)));
    });
  }
  // Those of a step's tokens in this lane: two, and two eight tokens further.
  __device__ __forceinline__ float4 load(int step, bool last) const {
    return load_shared_float4(place + (last ? kTableBytes : 0) + 64 * (lane_here() & 3) + 16 * step);
  }
};

}  // namespace attention_autotuner

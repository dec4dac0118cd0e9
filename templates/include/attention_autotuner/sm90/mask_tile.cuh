// Tiles of an explicit mask as the kernels of family sm90 read them from shared memory.
//
// Rows of a tile of scores are queries and its columns keys, or the reverse; the mask lies as in memory, so that it is
// transposed on its way out where rows are keys.
#pragma once

#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/shared_memory.cuh"
#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/sm90/pipeline.cuh"
#include "attention_autotuner/sm90/swizzle.cuh"

namespace attention_autotuner {

// The mask for 16 rows of a tile of scores.
template <typename T>
struct MaskRows {
  uint32_t const tile;  // of the mask, in shared memory
  int const row;        // of the tile, the first of the sixteen
  int beyond;           // by how much this lane's first key is beyond what its first query sees
  bool causal;          // whether some query does not see all keys
  uint32_t seen = 0;    // something of all that was read

  // `first_row` and `column` are where the sixteen rows and the tile's columns start in the tensors.
  template <typename Params>
  __device__ __forceinline__ MaskRows(Params const& params, uint32_t tile, int row, int first_row, int column)
      : tile(tile), row(row) {
    int const last_key = T::kByQueries ? column + T::kBlockColumns - 1 : first_row + 15;
    causal = params.causal && last_key > (T::kByQueries ? first_row : column) + params.causal_offset;
    int const ahead = column + 2 * (lane_index() & 3) - first_row - lane_index() / 4;
    beyond = params.causal ? (T::kByQueries ? ahead : -ahead) - params.causal_offset : INT32_MIN / 2;
  }

  // Sixteen columns in pairs as accumulators lie: words[2 j + half] holds rows 8 half on, columns 8 j on. `Derives`:
  // the address from that of the first sixteen, in fewer instructions.
  template <bool Causal, bool Derives = false>
  __device__ __forceinline__ void load(uint32_t (&words)[4], int sixteen) {
    int const matrix = lane_index() / 8, within = lane_index() % 8;
    if constexpr (T::kByQueries && Derives) {
      // Within a block of 64 columns, further chunks differ in two bits.
      uint32_t const first = swizzled_address(tile, row + 8 * (matrix % 2) + within, matrix / 2, within);
      load_matrix_x4(words, (first ^ sixteen % 4 * 32) + sixteen / 4 * T::kBlockRows * kSwizzleRowBytes);
    } else if constexpr (T::kByQueries) {
      int const here = row + 8 * (matrix % 2) + within, chunk = 2 * sixteen + matrix / 2;
      load_matrix_x4(words, swizzled_address<T::kBlockRows>(tile, here, chunk, within));
    } else {
      int const query = 16 * sixteen + 8 * (matrix / 2) + within, chunk = row / 8 + matrix % 2;
      load_matrix_x4_transposed(words, swizzled_address<T::kBlockColumns>(tile, query, chunk, within));
    }
    seen |= words[0];
    if constexpr (Causal) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int const further = 16 * sixteen + 8 * (i / 2) - 8 * (i % 2);  // columns minus rows
        if (beyond + (T::kByQueries ? further : -further) > 0) words[i] &= 0xffff0000u;
        if (beyond + (T::kByQueries ? further + 1 : -further - 1) > 0) words[i] &= 0x0000ffffu;
      }
    }
  }
  // A word that was read from the same stage beside the mask.
  __device__ __forceinline__ void note(float word) { seen |= __float_as_uint(word); }
  // Once the warp has read all.
  __device__ __forceinline__ void release(uint32_t freed) const {
    if (warp_arrives()) arrive_after(seen, freed);
  }
};

// A score modified: score m f, or sign(score) |m| f.
template <bool Signs>
__device__ __forceinline__ float modified_score(float score, float m, float f) {
  return Signs ? with_sign(score, fabsf(m) * f) : score * m * f;
}

}  // namespace attention_autotuner

// How tiles lie in shared memory for the kernels of family sm90.
//
// Tiles in shared memory are columns of 64 elements, one block of [rows, 64] after the other, in the 128-byte swizzle:
// within eight rows of 128 bytes, 16-byte chunk c of row r lies at chunk c ^ r. Blocks start at multiples of 1024
// bytes. That is what a TMA descriptor with tiles of 64 columns writes and what the descriptors of MMAs here say.
#pragma once

#include <cstdint>

namespace attention_autotuner {

inline constexpr int kSwizzleColumns = 64;  // elements of a row in one block
inline constexpr int kSwizzleRowBytes = 128;
inline constexpr int kSwizzleBytes = 1024;  // of eight rows, after which the pattern repeats

// Where tiles may start in a CTA's shared memory.
__device__ __forceinline__ uint32_t aligned_shared(void const* smem_bytes) {
  uint32_t const start = uint32_t(__cvta_generic_to_shared(smem_bytes));
  return (start + kSwizzleBytes - 1) / kSwizzleBytes * kSwizzleBytes;
}

// The address of 16-byte chunk `chunk` of row `row` of a block of 64 columns; `key` is row % 8, which callers know as
// the number of a lane.
__device__ __forceinline__ uint32_t swizzled_address(uint32_t block, int row, int chunk, int key) {
  return block + row * kSwizzleRowBytes + (chunk ^ key) * 16;
}
// The same in a tile of several blocks of `Rows` rows.
template <int Rows>
__device__ __forceinline__ uint32_t swizzled_address(uint32_t tile, int row, int chunk, int key) {
  return swizzled_address(tile, chunk / 8 * Rows + row, chunk % 8, key);
}

}  // namespace attention_autotuner

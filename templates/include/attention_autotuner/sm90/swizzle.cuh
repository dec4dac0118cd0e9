// How tiles lie in shared memory for the kernels of family sm90.
//
// Tiles in shared memory are columns of 64 elements, one block of [rows, 64] after the other, in the 128-byte swizzle:
// within eight rows of 128 bytes, 16-byte chunk c of row r lies at chunk c ^ r. Blocks start at multiples of 1024
// bytes. That is what a tensor map with a box of 64 columns writes and what the descriptors here say.
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

}  // namespace attention_autotuner

// Shared-memory tiles of the sm80 family and the copies that fill them from strided global rows.
//
// A tile is row-major with eight elements (16 bytes) of padding a row. Tile widths are multiples of 16 elements, so a
// padded row is an odd number of 16-byte units and the eight rows that one ldmatrix phase touches fall into eight
// different bank groups: conflict-free for every head dim, with addresses that are a base plus constants.
//
// Called by: attention_forward_sm80.cuh.
#pragma once

#include <cstdint>
#include <cute/arch/copy_sm80.hpp>
#include <cute/layout.hpp>

namespace attention_autotuner {

inline constexpr int kChunk = 8;         // elements of one 16-byte access
inline constexpr int kElementBytes = 2;  // fp16 and bf16

template <int Rows, int Columns>
struct SmemTile {
  static_assert(Columns % 16 == 0, "tile width must be a multiple of 16 elements");
  static constexpr int kStride = Columns + kChunk;  // elements
  static constexpr int kBytes = Rows * kStride * kElementBytes;
  using Layout = cute::Layout<cute::Shape<cute::Int<Rows>, cute::Int<Columns>>,
                              cute::Stride<cute::Int<kStride>, cute::Int<1>>>;

  // Byte offset of an element from the tile's start.
  __device__ __forceinline__ static constexpr int offset(int row, int column) {
    return Layout{}(row, column) * kElementBytes;
  }
};

// A view of one head's rows: where row 0 is, how far rows are apart, how many rows and columns exist.
template <typename Element>
struct GlobalRows {
  Element const* data;
  int64_t stride_row;  // elements
  int rows;
  int columns;
};

constexpr int largest_power_of_two_divisor(int value) { return value & -value; }

// Copies rows [row0, row0 + Rows) and columns [column0, column0 + Columns) into a tile; what lies outside the view
// arrives as zeros. With 16-byte copies the data arrives asynchronously (close the group with cp_async_fence); with
// 2-byte copies it is there when the call returns. Either way a barrier must follow before other threads read it.
template <int Rows, int Columns, int Threads, int CopyBytes, typename Element>
__device__ __forceinline__ void copy_tile(uint32_t smem, GlobalRows<Element> const& source, int row0, int column0,
                                          int thread) {
  static_assert(CopyBytes == 16 || CopyBytes == 2, "copies are 16 or 2 bytes wide");
  using Tile = SmemTile<Rows, Columns>;
  constexpr int kChunks = Columns / kChunk;
  constexpr int kDivisor = largest_power_of_two_divisor(kChunks);
  constexpr int kThreadsPerRow = kDivisor < 16 ? kDivisor : 16;
  constexpr int kRowsPerPass = Threads / kThreadsPerRow;
  constexpr int kPasses = (Rows + kRowsPerPass - 1) / kRowsPerPass;
  static_assert(Threads % kThreadsPerRow == 0, "threads must divide into rows");

  int const thread_row = thread / kThreadsPerRow;
  int const thread_column = (thread % kThreadsPerRow) * kChunk;
  Element const* pointer = source.data + int64_t(row0 + thread_row) * source.stride_row + column0 + thread_column;
  uint32_t const target = smem + Tile::offset(thread_row, thread_column);
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    int const row = pass * kRowsPerPass;
    if (Rows % kRowsPerPass == 0 || thread_row + row < Rows) {
      bool const row_exists = row0 + thread_row + row < source.rows;
#pragma unroll
      for (int step = 0; step < kChunks / kThreadsPerRow; ++step) {
        int const column = step * kThreadsPerRow * kChunk;
        bool const exists = row_exists && column0 + thread_column + column < source.columns;
        uint32_t const destination = target + Tile::offset(row, column);
        if constexpr (CopyBytes == 16) {
          asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(destination), "l"(pointer + column),
                       "r"(exists ? 16 : 0));
        } else {
          uint32_t words[4] = {0, 0, 0, 0};
          if (exists) {
            auto const* halves = reinterpret_cast<uint16_t const*>(pointer + column);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              words[i] = uint32_t(halves[2 * i]) | uint32_t(halves[2 * i + 1]) << 16;
            }
          }
          asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"(destination), "r"(words[0]), "r"(words[1]),
                       "r"(words[2]), "r"(words[3])
                       : "memory");
        }
      }
    }
    pointer += int64_t(kRowsPerPass) * source.stride_row;
  }
}

__device__ __forceinline__ uint32_t shared_address(void const* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// A barrier among `threads` threads that share an id in 1..15.
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace attention_autotuner

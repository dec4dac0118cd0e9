// Shared-memory tiles that warps read by ldmatrix, and the copies that fill them from strided global rows.
//
// A tile is row-major, its 16-byte chunks permuted within each row: chunk c of row r stands at c ^ key(r), such that
// the eight rows that one ldmatrix phase touches fall into eight different bank groups, for every width that is a
// multiple of 16 elements. Both chunks of a 32-byte sector stay in one sector: cp.async moves sectors, and a layout
// that splits them makes it read half of them twice. The other layout, rows padded by one chunk, does split them; its
// addresses are a base plus constants, and kernels that are short of registers gain more by that than the reads cost.
#pragma once

#include <cstdint>

#include "attention_autotuner/common/shared_memory.cuh"
#include "attention_autotuner/common/threads.cuh"

namespace attention_autotuner {

inline constexpr int kChunk = 8;         // elements of one 16-byte access
inline constexpr int kElementBytes = 2;  // fp16 and bf16

template <int Rows, int Columns, bool Padded>
struct SmemTile {
  static_assert(Rows % 16 == 0 && Columns % 16 == 0, "tiles are multiples of 16 by 16 elements");
  static constexpr int kRowChunks = Columns / kChunk + Padded;
  static constexpr int kBytes = Rows * kRowChunks * kChunk * kElementBytes;
  // Rows of 8 chunks start at one bank group, of 4 at two, of 2 (or 6, ...) at four: the key makes up for the rest.
  static constexpr int kKeyShift = kRowChunks % 8 == 0 ? 0 : kRowChunks % 4 == 0 ? 1 : 2;
  static constexpr int kKeyMask = Padded ? 0 : 7 >> kKeyShift;

  // Operands by reference, as a layout of CuTe takes them: by value, the compiler orders some kernels' instructions
  // in another way than when they were measured.
  static constexpr int chunk_index(int const& row, int const& chunk) { return row * kRowChunks + chunk; }

  // Byte offset of an element from the tile's start.
  __device__ __forceinline__ static constexpr int offset(int row, int column) {
    int const chunk = (column / kChunk) ^ ((row >> kKeyShift) & kKeyMask);
    return (chunk_index(row, chunk) * kChunk + column % kChunk) * kElementBytes;
  }

  // Whether columns from `first` on are reached by advance(): its chunk must have no bits in the key.
  static constexpr bool reaches(int first) { return (first / kChunk & kKeyMask) == 0; }

  // Whether that holds, for steps within them, wherever a run of `Width` columns starts at a multiple of its width.
  template <int Width>
  static constexpr bool advances() {
    return (Width / kChunk & kKeyMask) == 0 || (Width & (Width - 1)) == 0;
  }

  // The address `rows` (a multiple of 8) and `columns` (a multiple of 8) further than `address`, which is that of a
  // chunk 0 or 1 after a column that reaches(). Tiles start at multiples of 128 bytes.
  __device__ __forceinline__ static constexpr uint32_t advance(uint32_t address, int rows, int columns) {
    int const chunk = columns / kChunk, low = chunk & kKeyMask;
    return (address ^ uint32_t(low * 16)) + uint32_t((rows * kRowChunks + chunk - low) * 16);
  }
};

constexpr int largest_power_of_two_divisor(int value) { return value & -value; }

// One 16-byte chunk into shared memory, or zeros if it does not exist. Asynchronous for 16-byte copies.
template <int CopyBytes>
__device__ __forceinline__ void copy_chunk(uint32_t destination, void const* source, bool exists) {
  if constexpr (CopyBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(destination), "l"(source),
                 "r"(exists ? 16 : 0));
  } else {
    static_assert(CopyBytes == 2, "copies are 16 or 2 bytes wide");
    uint32_t words[4] = {0, 0, 0, 0};
    if (exists) {
      auto const* halves = static_cast<uint16_t const*>(source);
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = uint32_t(halves[2 * i]) | uint32_t(halves[2 * i + 1]) << 16;
    }
    store_shared_four(destination, {words[0], words[1], words[2], words[3]});
  }
}

// One 16-byte chunk, asynchronously, or nothing at all: predicated, not branched around, so that the compiler can place
// it between other instructions.
__device__ __forceinline__ void copy_chunk_if(bool wanted, uint32_t destination, void const* source) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %2, 0;\n"
      "@p cp.async.cg.shared.global [%0], [%1], 16;\n"
      "}\n" ::"r"(destination),
      "l"(source), "r"(int(wanted)));
}

// The asynchronous copies so far are a group; until all groups but the last `Pending` have arrived. CuTe has the same
// in a header that takes longer to compile than a kernel.
__device__ __forceinline__ void cp_async_fence() { asm volatile("cp.async.commit_group;\n"); }
template <int Pending>
__device__ __forceinline__ void cp_async_wait() {
  if constexpr (Pending == 0) {
    asm volatile("cp.async.wait_all;\n");
  } else {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(Pending));
  }
}

// How the threads of a CTA share the copy of one tile: neighbouring threads take neighbouring chunks of a row, up to a
// 128-byte line. Data arrives asynchronously with 16-byte copies (close the group with cp_async_fence), and at once
// with 2-byte copies; either way a barrier must follow before other threads read it.
template <int Rows, int Columns, int Threads, int CopyBytes, bool Padded>
struct TileCopy {
  using Tile = SmemTile<Rows, Columns, Padded>;
  static constexpr int kChunks = Columns / kChunk;
  static constexpr int kDivisor = largest_power_of_two_divisor(kChunks);
  static constexpr int kThreadsPerRow = kDivisor < 8 ? kDivisor : 8;
  static constexpr int kSteps = kChunks / kThreadsPerRow;
  static constexpr int kRowsPerPass = Threads / kThreadsPerRow;
  static constexpr int kPasses = (Rows + kRowsPerPass - 1) / kRowsPerPass;
  static_assert(Threads % (8 * kThreadsPerRow) == 0, "a pass must be a multiple of 8 rows");

  // The first chunk of a thread.
  __device__ __forceinline__ static int row(int thread) { return thread / kThreadsPerRow; }
  __device__ __forceinline__ static int column(int thread) { return thread % kThreadsPerRow * kChunk; }
  __device__ __forceinline__ static uint32_t offset(int thread) { return Tile::offset(row(thread), column(thread)); }

  // Copies this thread's chunks. `target` and `pointer` are those of its first chunk; `rows` and `columns` are how much
  // of the source there is from the tile's first element on: what lies beyond arrives as zeros.
  template <typename Element>
  __device__ __forceinline__ static void copy(uint32_t target, Element const* pointer, int64_t stride_row, int rows,
                                              int columns) {
    int const thread = thread_index();
    int const rows_left = rows - row(thread), columns_left = columns - column(thread);
    int64_t const pass_stride = kRowsPerPass * recompute_here(stride_row);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      int const first = pass * kRowsPerPass;
      if (first + kRowsPerPass <= Rows || row(thread) + first < Rows) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          int const column = step * kThreadsPerRow * kChunk;
          copy_chunk<CopyBytes>(Tile::advance(target, first, column), pointer + column,
                                first < rows_left && column < columns_left);
        }
      }
      pointer += pass_stride;
    }
  }

  // The same for a tile that exists as a whole (or not at all: then it is not `wanted`), in `num_parts` parts that can
  // be spread over other work.
  template <typename Element>
  __device__ __forceinline__ static void copy_part(bool wanted, uint32_t target, Element const* pointer,
                                                   int64_t stride_row, int part, int num_parts) {
    static_assert(CopyBytes == 16, "only asynchronous copies can be spread");
    constexpr int kUnits = kPasses * kSteps;
#pragma unroll
    for (int unit = part * kUnits / num_parts; unit < (part + 1) * kUnits / num_parts; ++unit) {
      int const first = unit / kSteps * kRowsPerPass, column = unit % kSteps * kThreadsPerRow * kChunk;
      bool const mine = first + kRowsPerPass <= Rows || row(thread_index()) + first < Rows;
      copy_chunk_if(wanted && mine, Tile::advance(target, first, column), pointer + first * stride_row + column);
    }
  }
};

}  // namespace attention_autotuner

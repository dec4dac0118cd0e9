// MMAs of a warpgroup (WGMMA), their descriptors, and the fences around them.
//
// Accumulators of an MMA of 64 rows by N columns: thread t of a warpgroup holds rows 16 (t / 32) + t % 32 / 4 and
// the same 8 further, columns 8 g + 2 (t % 4) and the next, in d[4 g + 2 half + e]. Packed in pairs, the same registers
// are the A operand of the next MMA.
//
// How tiles lie in shared memory: see sm90/swizzle.cuh.
#pragma once

#include <cstdint>

#include "attention_autotuner/sm90/swizzle.cuh"
#include "attention_autotuner/sm90/wgmma_atoms.cuh"

namespace attention_autotuner {

inline constexpr int kMmaDepth = 16;  // of one instruction

// The descriptor of a tile for the tensor cores: `leading` is the distance in bytes of blocks of 64 columns where the
// columns are not the dimension that is summed over, else unused.
__device__ __forceinline__ uint64_t make_smem_desc(uint32_t address, int leading) {
  constexpr uint64_t kSwizzle128 = uint64_t(1) << 62;
  return uint64_t((address & 0x3ffff) >> 4) | uint64_t(leading >> 4) << 16 | uint64_t(kSwizzleBytes >> 4) << 32 |
         kSwizzle128;
}

// The descriptor of the same tile from some bytes further on.
__device__ __forceinline__ uint64_t advance_desc(uint64_t desc, int bytes) {
  return (desc >> 32) << 32 | (uint32_t(desc) + uint32_t(bytes >> 4));
}

// Before MMAs: their operands in registers are written.
__device__ __forceinline__ void warpgroup_arrive() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
// The MMAs so far are a group.
__device__ __forceinline__ void warpgroup_commit_batch() {
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}
// Until all groups but the last `Pending` are done.
template <int Pending>
__device__ __forceinline__ void warpgroup_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(Pending) : "memory");
}

// Which dimension of an operand's tile in shared memory is contiguous: the one that is summed over, or the other.
enum class Major { K, MN };

// d (+)= A B over one step of the depth, both in shared memory. Operands are K-major where the columns of their tiles,
// A [rows, depth] and B [columns, depth], are what is summed over, and MN-major where the rows are.
template <typename Element, Major kMajorA = Major::K, Major kMajorB = Major::K, int Registers>
__device__ __forceinline__ void gemm_ss(float (&d)[Registers], uint64_t a, uint64_t b, bool accumulate) {
  Wgmma<2 * Registers>::template ss<Element, int(kMajorB), int(kMajorA)>(d, a, b, accumulate);
}
// The same with A in registers.
template <typename Element, Major kMajorB, int Registers>
__device__ __forceinline__ void gemm_rs(float (&d)[Registers], uint32_t const* a, uint64_t b, bool accumulate) {
  Wgmma<2 * Registers>::template rs<Element, int(kMajorB)>(d, a, b, accumulate);
}

// Keep the compiler from moving reads of accumulators to before the wait for the MMAs that write them, and operands
// in their registers until the MMAs that read them are done.
template <int Registers>
__device__ __forceinline__ void fence_accumulators(float (&d)[Registers]) {
#pragma unroll
  for (int i = 0; i < Registers; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int Registers>
__device__ __forceinline__ void fence_operands(uint32_t (&a)[Registers]) {
#pragma unroll
  for (int i = 0; i < Registers; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

}  // namespace attention_autotuner

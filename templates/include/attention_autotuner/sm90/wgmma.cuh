// MMAs of a warpgroup (WGMMA), their descriptors, and the fences around them.
//
// Accumulators of an MMA of 64 rows by N columns: thread t of a warpgroup holds rows 16 (t / 32) + t % 32 / 4 and
// the same 8 further, columns 8 g + 2 (t % 4) and the next, in d[4 g + 2 half + e]. Packed in pairs, the same registers
// are the A operand of the next MMA.
//
// How tiles lie in shared memory: see sm90/swizzle.cuh.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <type_traits>
#include <utility>

#include "attention_autotuner/sm90/swizzle.cuh"

namespace attention_autotuner {

using cute::SM90::GMMA::Major;

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

// The atoms of 64 rows by N columns: A and B in shared memory (SS), or A in registers (RS).
template <typename Element, int N>
struct WgmmaAtom;
#define ATTENTION_AUTOTUNER_WGMMA(ELEMENT, NAME, N)                                 \
  template <>                                                                       \
  struct WgmmaAtom<ELEMENT, N> {                                                    \
    template <Major A, Major B>                                                     \
    using SS = cute::SM90::GMMA::MMA_64x##N##x16_F32##NAME##NAME##_SS<A, B>;        \
    template <Major B>                                                              \
    using RS = cute::SM90::GMMA::MMA_64x##N##x16_F32##NAME##NAME##_RS<Major::K, B>; \
  }
ATTENTION_AUTOTUNER_WGMMA(__half, F16, 64);
ATTENTION_AUTOTUNER_WGMMA(__half, F16, 128);
ATTENTION_AUTOTUNER_WGMMA(__half, F16, 192);
ATTENTION_AUTOTUNER_WGMMA(__half, F16, 256);
ATTENTION_AUTOTUNER_WGMMA(__nv_bfloat16, BF16, 64);
ATTENTION_AUTOTUNER_WGMMA(__nv_bfloat16, BF16, 128);
ATTENTION_AUTOTUNER_WGMMA(__nv_bfloat16, BF16, 192);
ATTENTION_AUTOTUNER_WGMMA(__nv_bfloat16, BF16, 256);
#undef ATTENTION_AUTOTUNER_WGMMA

template <typename Atom, int Registers, size_t... I>
__device__ __forceinline__ void issue_ss(float (&d)[Registers], uint64_t a, uint64_t b, bool accumulate,
                                         std::index_sequence<I...>) {
  using cute::SM90::GMMA::ScaleOut;
  Atom::fma(a, b, d[I]..., accumulate ? ScaleOut::One : ScaleOut::Zero);
}
template <typename Atom, int Registers, size_t... I>
__device__ __forceinline__ void issue_rs(float (&d)[Registers], uint32_t const* a, uint64_t b, bool accumulate,
                                         std::index_sequence<I...>) {
  using cute::SM90::GMMA::ScaleOut;
  Atom::fma(a[0], a[1], a[2], a[3], b, d[I]..., accumulate ? ScaleOut::One : ScaleOut::Zero);
}

// d (+)= A B over one step of the depth, both in shared memory. Operands are K-major where the columns of their tiles,
// A [rows, depth] and B [columns, depth], are what is summed over, and MN-major where the rows are.
template <typename Element, Major kMajorA = Major::K, Major kMajorB = Major::K, int Registers>
__device__ __forceinline__ void gemm_ss(float (&d)[Registers], uint64_t a, uint64_t b, bool accumulate) {
  issue_ss<typename WgmmaAtom<Element, 2 * Registers>::template SS<kMajorA, kMajorB>>(
      d, a, b, accumulate, std::make_index_sequence<Registers>{});
}
// The same with A in registers.
template <typename Element, Major kMajorB, int Registers>
__device__ __forceinline__ void gemm_rs(float (&d)[Registers], uint32_t const* a, uint64_t b, bool accumulate) {
  issue_rs<typename WgmmaAtom<Element, 2 * Registers>::template RS<kMajorB>>(d, a, b, accumulate,
                                                                             std::make_index_sequence<Registers>{});
}

// Keep the compiler from moving reads of accumulators to before the wait for the MMAs that write them, and operands
// in their registers until the MMAs that read them are done.
template <int Registers>
__device__ __forceinline__ void fence_accumulators(float (&d)[Registers]) {
#pragma unroll
  for (int i = 0; i < Registers; ++i) cute::warpgroup_fence_operand(d[i]);
}
template <int Registers>
__device__ __forceinline__ void fence_operands(uint32_t (&a)[Registers]) {
#pragma unroll
  for (int i = 0; i < Registers; ++i) cute::warpgroup_fence_operand(a[i]);
}

}  // namespace attention_autotuner

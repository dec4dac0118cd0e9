// MMAs of a warpgroup (WGMMA), their descriptors, and the fences around them.
//
// Accumulators of a product of 64 rows by N columns: thread t of a warpgroup holds rows 16 (t / 32) + t % 32 / 4 and
// the same 8 further, columns 8 g + 2 (t % 4) and the next, in d[4 g + 2 half + e]. Packed in pairs, the same registers
// are the A operand of the next product.
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

inline constexpr int kProductDepth = 16;  // of one instruction

// A tile for the tensor cores: `leading` is the distance of blocks of 64 columns where columns are what the product
// does not sum over, else unused.
__device__ __forceinline__ uint64_t describe_tile(uint32_t address, int leading) {
  constexpr uint64_t kSwizzle128 = uint64_t(1) << 62;
  return uint64_t((address & 0x3ffff) >> 4) | uint64_t(leading >> 4) << 16 | uint64_t(kSwizzleBytes >> 4) << 32 |
         kSwizzle128;
}

// The same tile from some bytes further on.
__device__ __forceinline__ uint64_t advance(uint64_t tile, int bytes) {
  return (tile >> 32) << 32 | (uint32_t(tile) + uint32_t(bytes >> 4));
}

template <typename Element, int N>
struct WarpgroupProduct;
#define ATTENTION_AUTOTUNER_PRODUCT(ELEMENT, NAME, N)                                                           \
  template <>                                                                                                   \
  struct WarpgroupProduct<ELEMENT, N> {                                                                         \
    using Rows = cute::SM90::GMMA::MMA_64x##N##x16_F32##NAME##NAME##_SS<cute::SM90::GMMA::Major::K,             \
                                                                        cute::SM90::GMMA::Major::K>;            \
    using Registers = cute::SM90::GMMA::MMA_64x##N##x16_F32##NAME##NAME##_RS<cute::SM90::GMMA::Major::K,        \
                                                                             cute::SM90::GMMA::Major::MN>;      \
    using RegistersByRows = cute::SM90::GMMA::MMA_64x##N##x16_F32##NAME##NAME##_RS<cute::SM90::GMMA::Major::K,  \
                                                                                   cute::SM90::GMMA::Major::K>; \
  }
ATTENTION_AUTOTUNER_PRODUCT(__half, F16, 64);
ATTENTION_AUTOTUNER_PRODUCT(__half, F16, 128);
ATTENTION_AUTOTUNER_PRODUCT(__half, F16, 192);
ATTENTION_AUTOTUNER_PRODUCT(__half, F16, 256);
ATTENTION_AUTOTUNER_PRODUCT(__nv_bfloat16, BF16, 64);
ATTENTION_AUTOTUNER_PRODUCT(__nv_bfloat16, BF16, 128);
ATTENTION_AUTOTUNER_PRODUCT(__nv_bfloat16, BF16, 192);
ATTENTION_AUTOTUNER_PRODUCT(__nv_bfloat16, BF16, 256);
#undef ATTENTION_AUTOTUNER_PRODUCT

template <typename Element, int Registers, size_t... I>
__device__ __forceinline__ void multiply_tiles(float (&d)[Registers], uint64_t a, uint64_t b, bool adds,
                                               std::index_sequence<I...>) {
  using cute::SM90::GMMA::ScaleOut;
  WarpgroupProduct<Element, 2 * Registers>::Rows::fma(a, b, d[I]..., adds ? ScaleOut::One : ScaleOut::Zero);
}
template <typename Element, int Registers, size_t... I>
__device__ __forceinline__ void multiply_registers(float (&d)[Registers], uint32_t const* a, uint64_t b,
                                                   std::index_sequence<I...>) {
  using cute::SM90::GMMA::ScaleOut;
  WarpgroupProduct<Element, 2 * Registers>::Registers::fma(a[0], a[1], a[2], a[3], b, d[I]..., ScaleOut::One);
}
template <typename Element, int Registers, size_t... I>
__device__ __forceinline__ void multiply_kept(float (&d)[Registers], uint32_t const* a, uint64_t b, bool adds,
                                              std::index_sequence<I...>) {
  using cute::SM90::GMMA::ScaleOut;
  WarpgroupProduct<Element, 2 * Registers>::RegistersByRows::fma(a[0], a[1], a[2], a[3], b, d[I]...,
                                                                 adds ? ScaleOut::One : ScaleOut::Zero);
}
// d (+)= A B^T: both [rows, 16] of tiles whose columns are summed over.
template <typename Element, int Registers>
__device__ __forceinline__ void multiply_tiles(float (&d)[Registers], uint64_t a, uint64_t b, bool adds) {
  multiply_tiles<Element>(d, a, b, adds, std::make_index_sequence<Registers>{});
}
// The same with A in registers.
template <typename Element, int Registers>
__device__ __forceinline__ void multiply_kept(float (&d)[Registers], uint32_t const* a, uint64_t b, bool adds) {
  multiply_kept<Element>(d, a, b, adds, std::make_index_sequence<Registers>{});
}
// d += A B: A in registers, B [16, columns] of a tile whose rows are summed over.
template <typename Element, int Registers>
__device__ __forceinline__ void multiply_registers(float (&d)[Registers], uint32_t const* a, uint64_t b) {
  multiply_registers<Element>(d, a, b, std::make_index_sequence<Registers>{});
}

// Before the first product of a batch: registers written so far are visible to it.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
// Until at most that many committed batches are under way.
template <int Batches>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(Batches) : "memory");
}
// Keeps the compiler from moving reads of what products write to before the wait.
template <int Registers>
__device__ __forceinline__ void products_written(float (&d)[Registers]) {
#pragma unroll
  for (int i = 0; i < Registers; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Products of 64 rows by 64 columns.
template <typename Element>
struct SquareProduct;
#define ATTENTION_AUTOTUNER_SQUARE_PRODUCT(ELEMENT, NAME)                                                             \
  template <>                                                                                                         \
  struct SquareProduct<ELEMENT> {                                                                                     \
    using Registers =                                                                                                 \
        cute::SM90::GMMA::MMA_64x64x16_F32##NAME##NAME##_RS<cute::SM90::GMMA::Major::K, cute::SM90::GMMA::Major::K>;  \
    using Transposed =                                                                                                \
        cute::SM90::GMMA::MMA_64x64x16_F32##NAME##NAME##_SS<cute::SM90::GMMA::Major::MN, cute::SM90::GMMA::Major::K>; \
  }
ATTENTION_AUTOTUNER_SQUARE_PRODUCT(__half, F16);
ATTENTION_AUTOTUNER_SQUARE_PRODUCT(__nv_bfloat16, BF16);
#undef ATTENTION_AUTOTUNER_SQUARE_PRODUCT

template <typename Element, size_t... I>
__device__ __forceinline__ void multiply_registers_by_rows(float (&d)[32], uint32_t const* a, uint64_t b, bool adds,
                                                           std::index_sequence<I...>) {
  using cute::SM90::GMMA::ScaleOut;
  SquareProduct<Element>::Registers::fma(a[0], a[1], a[2], a[3], b, d[I]..., adds ? ScaleOut::One : ScaleOut::Zero);
}
template <typename Element, size_t... I>
__device__ __forceinline__ void multiply_transposed(float (&d)[32], uint64_t a, uint64_t b, std::index_sequence<I...>) {
  SquareProduct<Element>::Transposed::fma(a, b, d[I]..., cute::SM90::GMMA::ScaleOut::One);
}
// d (+)= A B^T: A in registers, B [64, 16] of a tile whose columns are summed over.
template <typename Element>
__device__ __forceinline__ void multiply_registers_by_rows(float (&d)[32], uint32_t const* a, uint64_t b, bool adds) {
  multiply_registers_by_rows<Element>(d, a, b, adds, std::make_index_sequence<32>{});
}
// d += A^T B^T: A [16, 64] of a tile whose rows are summed over, B [64, 16] of one whose columns are.
template <typename Element>
__device__ __forceinline__ void multiply_transposed(float (&d)[32], uint64_t a, uint64_t b) {
  multiply_transposed<Element>(d, a, b, std::make_index_sequence<32>{});
}

// Keeps operands in their registers until here: products read them while they run.
template <int Registers>
__device__ __forceinline__ void products_read(uint32_t (&a)[Registers]) {
#pragma unroll
  for (int i = 0; i < Registers; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

}  // namespace attention_autotuner

// What retention's kernels for warpgroup products need beside sm90/wgmma.cuh: products whose A operand is transposed
// or whose B operand has its columns summed over, tiles on their way from registers, and boxes on their way out.
#pragma once

#include "attention_autotuner/sm90/wgmma.cuh"

namespace attention_autotuner {

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

// Four 8x8 matrices from registers to shared memory, each as it is or transposed; lane l supplies the address of row
// l % 8 of matrix l / 8 there.
__device__ __forceinline__ void store_matrix_x4(uint32_t address, uint32_t const (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(address), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
__device__ __forceinline__ void store_matrix_x4_transposed(uint32_t address, uint32_t const (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(address), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// What this thread stored in shared memory is visible to products and copies of boxes.
__device__ __forceinline__ void publish_stores() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }

// A box of shared memory on its way into a tensor [batch, heads, rows, columns]; what lies outside is left out.
__device__ __forceinline__ void store_box(CUtensorMap const& map, uint32_t source, int column, int row, int head,
                                          int batch) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];\n" ::"l"(&map),
               "r"(source), "r"(column), "r"(row), "r"(head), "r"(batch)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;\n" ::: "memory");
}
// Until the boxes that this thread stores have been read from shared memory.
__device__ __forceinline__ void wait_boxes_read() { asm volatile("cp.async.bulk.wait_group.read 0;\n" ::: "memory"); }

}  // namespace attention_autotuner

// Warp-level products of the sm80 family: ldmatrix operand loads and mma.sync m16n8k16 with fp32 accumulation.
//
// Fragment layouts are the PTX ones. Within a warp, lane l holds rows g = l / 4 and g + 8 and columns 2 (l % 4) + {0,
// 1} of every 16x8 accumulator tile. Two neighbouring accumulator tiles, converted to 16 bits, are the A operand of a
// 16x16 step: this is what keeps P in registers between the two products of attention.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cute/arch/mma_sm80.hpp>
#include <type_traits>

namespace attention_autotuner {

// Four 8x8 matrices of 16-bit elements; lane l supplies the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// Two of them, addressed by lanes 0 to 15.
__device__ __forceinline__ void load_matrix_x2(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];\n" : "=r"(r[0]), "=r"(r[1]) : "r"(address));
}

// Four of them, each matrix transposed on the way.
__device__ __forceinline__ void load_matrix_x4_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// d = c + a * b for one 16x8x16 step.
template <typename Element>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1,
                                             float const (&c)[4]) {
  if constexpr (std::is_same_v<Element, __half>) {
    cute::SM80_16x8x16_F32F16F16F32_TN::fma(d[0], d[1], d[2], d[3], a[0], a[1], a[2], a[3], b0, b1, c[0], c[1], c[2],
                                            c[3]);
  } else {
    static_assert(std::is_same_v<Element, __nv_bfloat16>, "element type must be __half or __nv_bfloat16");
    cute::SM80_16x8x16_F32BF16BF16F32_TN::fma(d[0], d[1], d[2], d[3], a[0], a[1], a[2], a[3], b0, b1, c[0], c[1], c[2],
                                              c[3]);
  }
}

// d += a * b
template <typename Element>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1) {
  mma_m16n8k16<Element>(d, a, b0, b1, d);
}

// Two floats rounded to nearest and packed, `low` in the low half.
template <typename Element>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  uint32_t packed;
  if constexpr (std::is_same_v<Element, __half>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

template <typename Element>
__device__ __forceinline__ float2 unpack_pair(uint32_t packed) {
  if constexpr (std::is_same_v<Element, __half>) {
    return __half22float2(*reinterpret_cast<__half2 const*>(&packed));
  } else {
    return __bfloat1622float2(*reinterpret_cast<__nv_bfloat162 const*>(&packed));
  }
}

// Where lane l points for the operands of a 16x16 step that starts at (row, column) (0, 0) of a shared-memory tile.
struct LaneRow {
  int row;
  int column;
};

// A operand (rows x k), and also the transposed B operand read from a (k x columns) tile: rows 0-15 by lane, then the
// right half of the columns.
__device__ __forceinline__ LaneRow lane_row_a(int lane) { return {lane & 15, (lane >> 4) * 8}; }

// B operand read from a (columns x k) tile: two column tiles of eight, each with both halves of k.
__device__ __forceinline__ LaneRow lane_row_b(int lane) {
  return {(lane & 7) + ((lane >> 4) & 1) * 8, ((lane >> 3) & 1) * 8};
}

}  // namespace attention_autotuner

// Pairs of 16-bit elements: rounded from fp32 and packed into a register, and back.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace attention_autotuner {

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

}  // namespace attention_autotuner

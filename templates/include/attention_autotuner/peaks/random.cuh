// Random operands: a hash of the place, so that any thread can make its own.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace attention_autotuner::peaks {

// A well-mixed 32-bit hash (two rounds of xor-shift and multiply).
__device__ __forceinline__ uint32_t hash(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

// In (0, 1].
__device__ __forceinline__ float uniform(uint32_t seed) { return (float(hash(seed) >> 8) + 1.0f) * 0x1p-24f; }

// Two normal deviates, as one pair of 16-bit elements.
template <typename Element>
__device__ __forceinline__ uint32_t normal_pair(uint32_t seed) {
  float const radius = sqrtf(-2.0f * logf(uniform(2 * seed)));
  float sine, cosine;
  sincospif(2.0f * uniform(2 * seed + 1), &sine, &cosine);
  if constexpr (std::is_same_v<Element, __half>) {
    __half2 const pair = __floats2half2_rn(radius * cosine, radius * sine);
    return *reinterpret_cast<uint32_t const*>(&pair);
  } else {
    static_assert(std::is_same_v<Element, __nv_bfloat16>, "element type must be __half or __nv_bfloat16");
    __nv_bfloat162 const pair = __floats2bfloat162_rn(radius * cosine, radius * sine);
    return *reinterpret_cast<uint32_t const*>(&pair);
  }
}

// Fills memory with random words.
__global__ void fill_random(uint4* data, size_t count) {
  size_t const step = size_t(gridDim.x) * blockDim.x;
  for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    uint32_t const seed = uint32_t(i) * 4u;
    data[i] = make_uint4(hash(seed), hash(seed + 1), hash(seed + 2), hash(seed + 3));
  }
}

}  // namespace attention_autotuner::peaks

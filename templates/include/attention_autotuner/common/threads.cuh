// Where a thread stands, and what it does with the lanes that share a row of a fragment.
#pragma once

#include <cstdint>

namespace attention_autotuner {

// Main loops are short of registers: what is cheap to compute is computed again where it is used, instead of being kept
// through the loop. The compiler would hoist it; these hide a value's origin so that it does not.
__device__ __forceinline__ int64_t recompute_here(int64_t value) {
  int64_t hidden;
  asm volatile("mov.b64 %0, %1;\n" : "=l"(hidden) : "l"(value));
  return hidden;
}
__device__ __forceinline__ int recompute_here(int value) {
  int hidden;
  asm volatile("mov.b32 %0, %1;\n" : "=r"(hidden) : "r"(value));
  return hidden;
}
__device__ __forceinline__ int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;\n" : "=r"(index));
  return index;
}

// A lane's number: where it is read, and as a value that may stay in a register.
__device__ __forceinline__ int lane_here() { return thread_index() & 31; }
__device__ __forceinline__ int lane_index() { return int(threadIdx.x) & 31; }

__device__ __forceinline__ int block_index() {
  int index;
  asm volatile("mov.u32 %0, %%ctaid.x;\n" : "=r"(index));
  return index;
}

// Of all lanes of a warp, in a fixed order.
template <typename Combine>
__device__ __forceinline__ float over_warp(float value, Combine&& combine) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) value = combine(value, __shfl_xor_sync(0xffffffffu, value, lanes));
  return value;
}

// A barrier among `threads` threads that share an id in 1..15.
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

// Reductions over the four lanes that share a row.
__device__ __forceinline__ float quad_max(float value) {
  value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 1));
  return fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 2));
}

__device__ __forceinline__ float quad_sum(float value) {
  value += __shfl_xor_sync(0xffffffffu, value, 1);
  return value + __shfl_xor_sync(0xffffffffu, value, 2);
}

}  // namespace attention_autotuner

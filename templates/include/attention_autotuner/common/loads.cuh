// Loads from global memory whose order the compiler keeps.
#pragma once

namespace attention_autotuner {

// In order with other such loads and with shuffles, so that all of them are under way before the first one is waited
// for.
__device__ __forceinline__ float4 load_in_order(float const* from) {
  float4 values;
  asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];\n"
               : "=f"(values.x), "=f"(values.y), "=f"(values.z), "=f"(values.w)
               : "l"(from)
               : "memory");
  return values;
}

}  // namespace attention_autotuner

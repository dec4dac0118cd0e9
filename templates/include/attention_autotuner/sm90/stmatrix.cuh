// Matrices on their way from registers to shared memory.
#pragma once

#include <cstdint>

namespace attention_autotuner {

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

}  // namespace attention_autotuner

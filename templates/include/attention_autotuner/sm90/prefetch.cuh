// Tiles on their way into L2, ahead of the copies by TMA that will read them.
#pragma once

#include "attention_autotuner/sm90/tma.cuh"

namespace attention_autotuner {

// A hint: nothing waits for it.
__device__ __forceinline__ void tma_prefetch(CUtensorMap const& descriptor, int column, int row, int head, int batch) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];\n" ::"l"(&descriptor),
               "r"(column), "r"(row), "r"(head), "r"(batch)
               : "memory");
}

}  // namespace attention_autotuner

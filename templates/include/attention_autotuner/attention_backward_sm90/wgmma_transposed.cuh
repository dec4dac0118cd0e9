// MMAs in whose tile of A rows are the dimension that is summed over: A is read transposed, B as rows of its own.
//
// The other instructions are in attention_forward_sm90/wgmma_atoms.cuh, whose names of accumulators serve here.
#pragma once

#include <cstdint>
#include <type_traits>

#include "attention_autotuner/sm90/wgmma_atoms.cuh"

namespace attention_autotuner {

template <int N>
struct WgmmaTransposed;

#define ATTENTION_AUTOTUNER_TRANSPOSED(N, TYPE, I, J, K)                                                            \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #K ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE \
               " {" ATTENTION_AUTOTUNER_NAMES_##N "}, %" #I ", %" #J ", p, 1, 1, 1, 0;\n}\n"                        \
               : ATTENTION_AUTOTUNER_OPERANDS_##N                                                                   \
               : "l"(a), "l"(b), "r"(accumulate))
#define ATTENTION_AUTOTUNER_WGMMA_TRANSPOSED(N, I, J, K)                                                      \
  template <>                                                                                                 \
  struct WgmmaTransposed<N> {                                                                                 \
    template <typename Element>                                                                               \
    __device__ __forceinline__ static void ss(float (&sums)[N / 2], uint64_t a, uint64_t b, int accumulate) { \
      if constexpr (std::is_same_v<Element, __half>) {                                                        \
        ATTENTION_AUTOTUNER_TRANSPOSED(N, "f16.f16", I, J, K);                                                \
      } else {                                                                                                \
        ATTENTION_AUTOTUNER_TRANSPOSED(N, "bf16.bf16", I, J, K);                                              \
      }                                                                                                       \
    }                                                                                                         \
  };
ATTENTION_AUTOTUNER_WGMMA_TRANSPOSED(80, 40, 41, 42)
#undef ATTENTION_AUTOTUNER_WGMMA_TRANSPOSED
#undef ATTENTION_AUTOTUNER_TRANSPOSED

}  // namespace attention_autotuner

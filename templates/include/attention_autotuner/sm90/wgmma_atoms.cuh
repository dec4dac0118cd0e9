// WGMMA of 64 rows by N columns over a depth of 16, as instructions: A in shared memory (ss) or in registers (rs), B in
// shared memory with its columns or, transposed, its rows as what is summed over; A in shared memory likewise.
//
// CuTe has the same in headers that take longer to compile than a kernel.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace attention_autotuner {

template <int N>
struct Wgmma;

// Names and operands of the accumulators, eight more for every sixteen columns.
#define ATTENTION_AUTOTUNER_NAMES(a, b, c, d, e, f, g, h) \
  "%" #a ", %" #b ", %" #c ", %" #d ", %" #e ", %" #f ", %" #g ", %" #h
#define ATTENTION_AUTOTUNER_OPERANDS(a, b, c, d, e, f, g, h) \
  "+f"(sums[a]), "+f"(sums[b]), "+f"(sums[c]), "+f"(sums[d]), "+f"(sums[e]), "+f"(sums[f]), "+f"(sums[g]), "+f"(sums[h])
#define ATTENTION_AUTOTUNER_NAMES_16 ATTENTION_AUTOTUNER_NAMES(0, 1, 2, 3, 4, 5, 6, 7)
#define ATTENTION_AUTOTUNER_OPERANDS_16 ATTENTION_AUTOTUNER_OPERANDS(0, 1, 2, 3, 4, 5, 6, 7)
#define ATTENTION_AUTOTUNER_NAMES_32 \
  ATTENTION_AUTOTUNER_NAMES_16 ", " ATTENTION_AUTOTUNER_NAMES(8, 9, 10, 11, 12, 13, 14, 15)
#define ATTENTION_AUTOTUNER_OPERANDS_32 \
  ATTENTION_AUTOTUNER_OPERANDS_16, ATTENTION_AUTOTUNER_OPERANDS(8, 9, 10, 11, 12, 13, 14, 15)
#define ATTENTION_AUTOTUNER_NAMES_48 \
  ATTENTION_AUTOTUNER_NAMES_32 ", " ATTENTION_AUTOTUNER_NAMES(16, 17, 18, 19, 20, 21, 22, 23)
#define ATTENTION_AUTOTUNER_OPERANDS_48 \
  ATTENTION_AUTOTUNER_OPERANDS_32, ATTENTION_AUTOTUNER_OPERANDS(16, 17, 18, 19, 20, 21, 22, 23)
#define ATTENTION_AUTOTUNER_NAMES_64 \
  ATTENTION_AUTOTUNER_NAMES_48 ", " ATTENTION_AUTOTUNER_NAMES(24, 25, 26, 27, 28, 29, 30, 31)
#define ATTENTION_AUTOTUNER_OPERANDS_64 \
  ATTENTION_AUTOTUNER_OPERANDS_48, ATTENTION_AUTOTUNER_OPERANDS(24, 25, 26, 27, 28, 29, 30, 31)
#define ATTENTION_AUTOTUNER_NAMES_80 \
  ATTENTION_AUTOTUNER_NAMES_64 ", " ATTENTION_AUTOTUNER_NAMES(32, 33, 34, 35, 36, 37, 38, 39)
#define ATTENTION_AUTOTUNER_OPERANDS_80 \
  ATTENTION_AUTOTUNER_OPERANDS_64, ATTENTION_AUTOTUNER_OPERANDS(32, 33, 34, 35, 36, 37, 38, 39)
#define ATTENTION_AUTOTUNER_NAMES_96 \
  ATTENTION_AUTOTUNER_NAMES_80 ", " ATTENTION_AUTOTUNER_NAMES(40, 41, 42, 43, 44, 45, 46, 47)
#define ATTENTION_AUTOTUNER_OPERANDS_96 \
  ATTENTION_AUTOTUNER_OPERANDS_80, ATTENTION_AUTOTUNER_OPERANDS(40, 41, 42, 43, 44, 45, 46, 47)
#define ATTENTION_AUTOTUNER_NAMES_112 \
  ATTENTION_AUTOTUNER_NAMES_96 ", " ATTENTION_AUTOTUNER_NAMES(48, 49, 50, 51, 52, 53, 54, 55)
#define ATTENTION_AUTOTUNER_OPERANDS_112 \
  ATTENTION_AUTOTUNER_OPERANDS_96, ATTENTION_AUTOTUNER_OPERANDS(48, 49, 50, 51, 52, 53, 54, 55)
#define ATTENTION_AUTOTUNER_NAMES_128 \
  ATTENTION_AUTOTUNER_NAMES_112 ", " ATTENTION_AUTOTUNER_NAMES(56, 57, 58, 59, 60, 61, 62, 63)
#define ATTENTION_AUTOTUNER_OPERANDS_128 \
  ATTENTION_AUTOTUNER_OPERANDS_112, ATTENTION_AUTOTUNER_OPERANDS(56, 57, 58, 59, 60, 61, 62, 63)
#define ATTENTION_AUTOTUNER_NAMES_144 \
  ATTENTION_AUTOTUNER_NAMES_128 ", " ATTENTION_AUTOTUNER_NAMES(64, 65, 66, 67, 68, 69, 70, 71)
#define ATTENTION_AUTOTUNER_OPERANDS_144 \
  ATTENTION_AUTOTUNER_OPERANDS_128, ATTENTION_AUTOTUNER_OPERANDS(64, 65, 66, 67, 68, 69, 70, 71)
#define ATTENTION_AUTOTUNER_NAMES_160 \
  ATTENTION_AUTOTUNER_NAMES_144 ", " ATTENTION_AUTOTUNER_NAMES(72, 73, 74, 75, 76, 77, 78, 79)
#define ATTENTION_AUTOTUNER_OPERANDS_160 \
  ATTENTION_AUTOTUNER_OPERANDS_144, ATTENTION_AUTOTUNER_OPERANDS(72, 73, 74, 75, 76, 77, 78, 79)
#define ATTENTION_AUTOTUNER_NAMES_176 \
  ATTENTION_AUTOTUNER_NAMES_160 ", " ATTENTION_AUTOTUNER_NAMES(80, 81, 82, 83, 84, 85, 86, 87)
#define ATTENTION_AUTOTUNER_OPERANDS_176 \
  ATTENTION_AUTOTUNER_OPERANDS_160, ATTENTION_AUTOTUNER_OPERANDS(80, 81, 82, 83, 84, 85, 86, 87)
#define ATTENTION_AUTOTUNER_NAMES_192 \
  ATTENTION_AUTOTUNER_NAMES_176 ", " ATTENTION_AUTOTUNER_NAMES(88, 89, 90, 91, 92, 93, 94, 95)
#define ATTENTION_AUTOTUNER_OPERANDS_192 \
  ATTENTION_AUTOTUNER_OPERANDS_176, ATTENTION_AUTOTUNER_OPERANDS(88, 89, 90, 91, 92, 93, 94, 95)
#define ATTENTION_AUTOTUNER_NAMES_208 \
  ATTENTION_AUTOTUNER_NAMES_192 ", " ATTENTION_AUTOTUNER_NAMES(96, 97, 98, 99, 100, 101, 102, 103)
#define ATTENTION_AUTOTUNER_OPERANDS_208 \
  ATTENTION_AUTOTUNER_OPERANDS_192, ATTENTION_AUTOTUNER_OPERANDS(96, 97, 98, 99, 100, 101, 102, 103)
#define ATTENTION_AUTOTUNER_NAMES_224 \
  ATTENTION_AUTOTUNER_NAMES_208 ", " ATTENTION_AUTOTUNER_NAMES(104, 105, 106, 107, 108, 109, 110, 111)
#define ATTENTION_AUTOTUNER_OPERANDS_224 \
  ATTENTION_AUTOTUNER_OPERANDS_208, ATTENTION_AUTOTUNER_OPERANDS(104, 105, 106, 107, 108, 109, 110, 111)
#define ATTENTION_AUTOTUNER_NAMES_240 \
  ATTENTION_AUTOTUNER_NAMES_224 ", " ATTENTION_AUTOTUNER_NAMES(112, 113, 114, 115, 116, 117, 118, 119)
#define ATTENTION_AUTOTUNER_OPERANDS_240 \
  ATTENTION_AUTOTUNER_OPERANDS_224, ATTENTION_AUTOTUNER_OPERANDS(112, 113, 114, 115, 116, 117, 118, 119)
#define ATTENTION_AUTOTUNER_NAMES_256 \
  ATTENTION_AUTOTUNER_NAMES_240 ", " ATTENTION_AUTOTUNER_NAMES(120, 121, 122, 123, 124, 125, 126, 127)
#define ATTENTION_AUTOTUNER_OPERANDS_256 \
  ATTENTION_AUTOTUNER_OPERANDS_240, ATTENTION_AUTOTUNER_OPERANDS(120, 121, 122, 123, 124, 125, 126, 127)

// The instruction of one element type; `I` to `M` number the inputs, which come after the accumulators.
#define ATTENTION_AUTOTUNER_SS(N, TYPE, I, J, K, L, M)                                                              \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #K ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE \
               " {" ATTENTION_AUTOTUNER_NAMES_##N "}, %" #I ", %" #J ", p, 1, 1, %" #M ", %" #L ";\n}\n"            \
               : ATTENTION_AUTOTUNER_OPERANDS_##N                                                                   \
               : "l"(a), "l"(b), "r"(accumulate), "n"(TransposedB), "n"(TransposedA))
#define ATTENTION_AUTOTUNER_RS(N, TYPE, I, J, K, L, M, O, P)                                                        \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #O ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE \
               " {" ATTENTION_AUTOTUNER_NAMES_##N "}, {%" #I ", %" #J ", %" #K ", %" #L "}, %" #M ", p, 1, 1, %" #P \
                                                  ";\n}\n"                                                          \
               : ATTENTION_AUTOTUNER_OPERANDS_##N                                                                   \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(TransposedB))
#define ATTENTION_AUTOTUNER_WGMMA(N, I, J, K, L, M, O, P)                                                            \
  template <>                                                                                                        \
  struct Wgmma<N> {                                                                                                  \
    template <typename Element, int TransposedB, int TransposedA = 0>                                                \
    __device__ __forceinline__ static void ss(float (&sums)[N / 2], uint64_t a, uint64_t b, int accumulate) {        \
      if constexpr (std::is_same_v<Element, __half>) {                                                               \
        ATTENTION_AUTOTUNER_SS(N, "f16.f16", I, J, K, L, M);                                                         \
      } else {                                                                                                       \
        ATTENTION_AUTOTUNER_SS(N, "bf16.bf16", I, J, K, L, M);                                                       \
      }                                                                                                              \
    }                                                                                                                \
    template <typename Element, int TransposedB>                                                                     \
    __device__ __forceinline__ static void rs(float (&sums)[N / 2], uint32_t const* a, uint64_t b, int accumulate) { \
      if constexpr (std::is_same_v<Element, __half>) {                                                               \
        ATTENTION_AUTOTUNER_RS(N, "f16.f16", I, J, K, L, M, O, P);                                                   \
      } else {                                                                                                       \
        ATTENTION_AUTOTUNER_RS(N, "bf16.bf16", I, J, K, L, M, O, P);                                                 \
      }                                                                                                              \
    }                                                                                                                \
  };
ATTENTION_AUTOTUNER_WGMMA(16, 8, 9, 10, 11, 12, 13, 14)
ATTENTION_AUTOTUNER_WGMMA(32, 16, 17, 18, 19, 20, 21, 22)
ATTENTION_AUTOTUNER_WGMMA(48, 24, 25, 26, 27, 28, 29, 30)
ATTENTION_AUTOTUNER_WGMMA(64, 32, 33, 34, 35, 36, 37, 38)
ATTENTION_AUTOTUNER_WGMMA(80, 40, 41, 42, 43, 44, 45, 46)
ATTENTION_AUTOTUNER_WGMMA(96, 48, 49, 50, 51, 52, 53, 54)
ATTENTION_AUTOTUNER_WGMMA(112, 56, 57, 58, 59, 60, 61, 62)
ATTENTION_AUTOTUNER_WGMMA(128, 64, 65, 66, 67, 68, 69, 70)
ATTENTION_AUTOTUNER_WGMMA(144, 72, 73, 74, 75, 76, 77, 78)
ATTENTION_AUTOTUNER_WGMMA(160, 80, 81, 82, 83, 84, 85, 86)
ATTENTION_AUTOTUNER_WGMMA(176, 88, 89, 90, 91, 92, 93, 94)
ATTENTION_AUTOTUNER_WGMMA(192, 96, 97, 98, 99, 100, 101, 102)
ATTENTION_AUTOTUNER_WGMMA(208, 104, 105, 106, 107, 108, 109, 110)
ATTENTION_AUTOTUNER_WGMMA(224, 112, 113, 114, 115, 116, 117, 118)
ATTENTION_AUTOTUNER_WGMMA(240, 120, 121, 122, 123, 124, 125, 126)
ATTENTION_AUTOTUNER_WGMMA(256, 128, 129, 130, 131, 132, 133, 134)
#undef ATTENTION_AUTOTUNER_WGMMA
#undef ATTENTION_AUTOTUNER_RS
#undef ATTENTION_AUTOTUNER_SS

}  // namespace attention_autotuner

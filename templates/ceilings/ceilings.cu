// The library that measures a GPU's ceilings: from names to measurements, behind a C interface.
//
// Compiled by tuning/ceilings.py for the device at hand, 90a for compute capability 9.0.
#include <cstring>

#include "attention_autotuner/peaks/arithmetic.cuh"
#include "attention_autotuner/peaks/ceilings.h"
#include "attention_autotuner/peaks/memory.cuh"
#include "attention_autotuner/peaks/mma.cuh"
#include "attention_autotuner/peaks/wgmma.cuh"

#define ATTENTION_AUTOTUNER_EXPORT __attribute__((visibility("default")))

namespace attention_autotuner::ceilings {
namespace {

struct Ceiling {
  char const* name;
  char const* unit;
  int32_t (*measure)(double seconds, attention_autotuner_ceiling_result* result);
};

constexpr Ceiling kCeilings[] = {
    {"mma_fp16", "FLOP/s", measure_mma<__half>},
    {"mma_bf16", "FLOP/s", measure_mma<__nv_bfloat16>},
    {"wgmma_fp16", "FLOP/s", measure_wgmma<__half>},
    {"wgmma_bf16", "FLOP/s", measure_wgmma<__nv_bfloat16>},
    {"exp", "results/s", measure_arithmetic<ExpLink>},
    {"fp32", "FLOP/s", measure_arithmetic<FmaLink>},
    {"smem", "bytes/s", measure_smem},
    {"l2", "bytes/s", measure_l2},
    {"hbm_copy", "bytes/s", measure_copy},
    {"launch", "s", measure_launch},
};

Ceiling const* find(char const* which) {
  if (which == nullptr) return nullptr;
  for (Ceiling const& ceiling : kCeilings) {
    if (std::strcmp(which, ceiling.name) == 0) return &ceiling;
  }
  return nullptr;
}

}  // namespace
}  // namespace attention_autotuner::ceilings

extern "C" {

ATTENTION_AUTOTUNER_EXPORT int32_t attention_autotuner_measure_ceiling(char const* which, double seconds,
                                                                       attention_autotuner_ceiling_result* result) {
  using namespace attention_autotuner::ceilings;
  Ceiling const* const ceiling = find(which);
  if (ceiling == nullptr || result == nullptr || !(seconds > 0.0) || seconds > kMaxSeconds) {
    return ATTENTION_AUTOTUNER_BAD_SHAPE;
  }
  if (result->struct_size < sizeof(*result)) return ATTENTION_AUTOTUNER_BAD_VERSION;
  return ceiling->measure(seconds, result);
}

ATTENTION_AUTOTUNER_EXPORT int32_t attention_autotuner_ceiling(char const* which, double seconds, double* value,
                                                               double* spread) {
  if (value == nullptr || spread == nullptr) return ATTENTION_AUTOTUNER_BAD_SHAPE;
  attention_autotuner_ceiling_result result{};
  result.struct_size = sizeof(result);
  int32_t const status = attention_autotuner_measure_ceiling(which, seconds, &result);
  if (status == ATTENTION_AUTOTUNER_OK) {
    *value = result.value;
    *spread = result.spread;
  }
  return status;
}

ATTENTION_AUTOTUNER_EXPORT char const* attention_autotuner_ceiling_unit(char const* which) {
  auto const* const ceiling = attention_autotuner::ceilings::find(which);
  return ceiling == nullptr ? nullptr : ceiling->unit;
}

ATTENTION_AUTOTUNER_EXPORT char const* attention_autotuner_ceiling_status_string(int32_t status) {
  switch (status) {
    case ATTENTION_AUTOTUNER_OK:
      return "ok";
    case ATTENTION_AUTOTUNER_BAD_VERSION:
      return "the result was made for another version of the interface";
    case ATTENTION_AUTOTUNER_BAD_SHAPE:
      return "an unknown ceiling, a null pointer, or seconds outside (0, 60]";
    case ATTENTION_AUTOTUNER_BAD_DEVICE:
      return "the library holds no code for this on this device";
    default:
      return status >= ATTENTION_AUTOTUNER_CUDA_ERROR
                 ? cudaGetErrorString(cudaError_t(status - ATTENTION_AUTOTUNER_CUDA_ERROR))
                 : "unknown status";
  }
}

}  // extern "C"

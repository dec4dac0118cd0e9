// The library that measures a GPU's peaks: from names to measurements, behind a C interface.
//
// Compiled by the tuner for the device at hand, 90a for compute capability 9.0.
#include <cstring>

#include "attention_autotuner/peaks/arithmetic.cuh"
#include "attention_autotuner/peaks/memory.cuh"
#include "attention_autotuner/peaks/mma.cuh"
#include "attention_autotuner/peaks/peaks.h"
#include "attention_autotuner/peaks/wgmma.cuh"

#define ATTENTION_AUTOTUNER_EXPORT __attribute__((visibility("default")))

namespace attention_autotuner::peaks {
namespace {

struct Peak {
  char const* name;
  char const* unit;
  int32_t (*measure)(double seconds, attention_autotuner_peak_result* result);
};

constexpr Peak kPeaks[] = {
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

Peak const* find(char const* which) {
  if (which == nullptr) return nullptr;
  for (Peak const& peak : kPeaks) {
    if (std::strcmp(which, peak.name) == 0) return &peak;
  }
  return nullptr;
}

}  // namespace
}  // namespace attention_autotuner::peaks

extern "C" {

ATTENTION_AUTOTUNER_EXPORT int32_t attention_autotuner_measure_peak(char const* which, double seconds,
                                                                    attention_autotuner_peak_result* result) {
  using namespace attention_autotuner::peaks;
  Peak const* const peak = find(which);
  if (peak == nullptr || result == nullptr || !(seconds > 0.0) || seconds > kMaxSeconds) {
    return ATTENTION_AUTOTUNER_BAD_SHAPE;
  }
  if (result->struct_size < sizeof(*result)) return ATTENTION_AUTOTUNER_BAD_VERSION;
  return peak->measure(seconds, result);
}

ATTENTION_AUTOTUNER_EXPORT int32_t attention_autotuner_peak(char const* which, double seconds, double* value,
                                                            double* spread) {
  if (value == nullptr || spread == nullptr) return ATTENTION_AUTOTUNER_BAD_SHAPE;
  attention_autotuner_peak_result result{};
  result.struct_size = sizeof(result);
  int32_t const status = attention_autotuner_measure_peak(which, seconds, &result);
  if (status == ATTENTION_AUTOTUNER_OK) {
    *value = result.value;
    *spread = result.spread;
  }
  return status;
}

ATTENTION_AUTOTUNER_EXPORT char const* attention_autotuner_peak_unit(char const* which) {
  auto const* const peak = attention_autotuner::peaks::find(which);
  return peak == nullptr ? nullptr : peak->unit;
}

ATTENTION_AUTOTUNER_EXPORT char const* attention_autotuner_peak_status_string(int32_t status) {
  switch (status) {
    case ATTENTION_AUTOTUNER_OK:
      return "ok";
    case ATTENTION_AUTOTUNER_BAD_VERSION:
      return "the result was made for another version of the interface";
    case ATTENTION_AUTOTUNER_BAD_SHAPE:
      return "an unknown peak, a null pointer, or seconds outside (0, 60]";
    case ATTENTION_AUTOTUNER_BAD_DEVICE:
      return "the library holds no code for this on this device";
    default:
      return status >= ATTENTION_AUTOTUNER_CUDA_ERROR
                 ? cudaGetErrorString(cudaError_t(status - ATTENTION_AUTOTUNER_CUDA_ERROR))
                 : "unknown status";
  }
}

}  // extern "C"

// attention_autotuner/peaks/peaks.h without a GPU: known figures, one that this GPU cannot give, and one that fails.
#include <cstring>

#include "attention_autotuner/peaks/peaks.h"

extern "C" {

int32_t attention_autotuner_measure_peak(const char* which, double seconds, attention_autotuner_peak_result* result) {
  if (std::strncmp(which, "wgmma", 5) == 0) return ATTENTION_AUTOTUNER_BAD_DEVICE;
  if (std::strcmp(which, "launch") == 0) return ATTENTION_AUTOTUNER_CUDA_ERROR + 2;
  result->samples = 7;
  result->value = 1e12 * seconds;
  result->spread = 1e9;
  result->sm_clock_hz = std::strcmp(which, "hbm_copy") == 0 ? 0 : 1.5e9;
  return ATTENTION_AUTOTUNER_OK;
}

const char* attention_autotuner_peak_unit(const char* which) {
  constexpr const char* kKnown[] = {"mma_fp16", "mma_bf16", "wgmma_fp16", "wgmma_bf16", "fp32",
                                    "exp",      "smem",     "l2",         "hbm_copy",   "launch"};
  for (const char* known : kKnown) {
    if (std::strcmp(which, known) == 0) return "units/s";
  }
  return nullptr;
}

const char* attention_autotuner_peak_status_string(int32_t status) {
  return status == ATTENTION_AUTOTUNER_BAD_DEVICE ? "this device cannot" : "out of memory";
}
}

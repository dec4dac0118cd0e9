/* A library of peaks that runs on the host: figures by rule, and a way to die. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "attention_autotuner/peaks/peaks.h"

#ifndef HANGS_AT
#define HANGS_AT "nothing"
#endif
#define EXPORT __attribute__((visibility("default")))

EXPORT int32_t attention_autotuner_measure_peak(const char* which, double seconds,
                                                attention_autotuner_peak_result* result) {
  if (result->struct_size != sizeof(*result)) return ATTENTION_AUTOTUNER_BAD_VERSION;
  if (strcmp(which, DIES_AT) == 0) abort();
  while (strcmp(which, HANGS_AT) == 0) pause();
  if (strncmp(which, "wgmma", 5) == 0) return ATTENTION_AUTOTUNER_BAD_DEVICE;
  if (strcmp(which, "l2") == 0) return ATTENTION_AUTOTUNER_CUDA_ERROR + 2;
  result->samples = 11;
  result->value = 1e12 * (double)strlen(which);
  result->spread = 1e9;
  result->sm_clock_hz = 1.8e9;
  result->seconds = seconds;
  return ATTENTION_AUTOTUNER_OK;
}

EXPORT const char* attention_autotuner_peak_unit(const char* which) {
  return strcmp(which, "launch") == 0 ? "s" : "FLOP/s";
}

EXPORT const char* attention_autotuner_peak_status_string(int32_t status) {
  return status == ATTENTION_AUTOTUNER_BAD_DEVICE ? "no code for this device" : "out of memory";
}

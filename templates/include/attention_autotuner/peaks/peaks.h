/* What one GPU can do at best, measured: the C interface of the library that templates/peaks/peaks.cu compiles
 * to.
 *
 * The library stands alone (CUDA runtime inside, no torch) and works on the calling thread's current device. Operands
 * are random and never zeros, which would run faster than real data; every result is consumed.
 *
 * Callers: the tuner through ctypes, C++ benchmarks through dlopen.
 */
#ifndef ATTENTION_AUTOTUNER_PEAKS_H_
#define ATTENTION_AUTOTUNER_PEAKS_H_

#include "attention_autotuner/abi.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One peak.
 *
 *   which        unit        what is measured
 *   mma_fp16     FLOP/s      mma.sync m16n8k16 out of registers, fp32 accumulators
 *   mma_bf16     FLOP/s      the same on bf16
 *   wgmma_fp16   FLOP/s      wgmma m64n256k16, both operands in swizzled shared memory, fp32 accumulators
 *   wgmma_bf16   FLOP/s      the same on bf16
 *   exp          results/s   ex2.approx
 *   fp32         FLOP/s      fp32 FMA, two operations each
 *   smem         bytes/s     16-byte loads from shared memory without bank conflicts, all SMs together
 *   l2           bytes/s     16-byte loads out of L2, all SMs reading the same quarter of it
 *   hbm_copy     bytes/s     a copy of more than 1 GiB in device memory, bytes read plus bytes written
 *   launch       s           one empty kernel of many launched back to back
 */
typedef struct attention_autotuner_peak_result {
  uint32_t struct_size; /* sizeof as the caller knows it */
  int32_t samples;      /* timings that `value` is the median of */
  double value;         /* in the unit above */
  double spread;        /* half the distance between the quartiles, in the same unit */
  double sm_clock_hz;   /* of the SM while it was measured; 0 for hbm_copy and launch */
  double seconds;       /* that the timings add up to */
} attention_autotuner_peak_result;

/* Measures one peak on the current device, for about `seconds` after a warm-up of 0.4 s.
 *
 * Returns a status of abi.h: BAD_SHAPE for an unknown `which`, a null pointer, or seconds outside (0, 60]; BAD_VERSION
 * for a struct that is too short; BAD_DEVICE where the library holds no code for the device, or for wgmma where it was
 * not compiled for sm_90a; CUDA_ERROR plus the error where CUDA failed. */
int32_t attention_autotuner_measure_peak(const char* which, double seconds, attention_autotuner_peak_result* result);

/* The same, the value and its spread alone. */
int32_t attention_autotuner_peak(const char* which, double seconds, double* value, double* spread);

/* FLOP/s, results/s, bytes/s or s; null for an unknown `which`. */
const char* attention_autotuner_peak_unit(const char* which);

/* What a status means; the text lives as long as the library. */
const char* attention_autotuner_peak_status_string(int32_t status);

#ifdef __cplusplus
}
#endif

#endif /* ATTENTION_AUTOTUNER_PEAKS_H_ */

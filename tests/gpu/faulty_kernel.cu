// A kernel library for the GPU that does a little work, and at one of its launches faults or never ends:
// -DILLEGAL_AT=n writes to an illegal address at the n-th launch, -DHANGS_AT=n spins. Compiled by
// test_faults_on_device.py.
#include <cuda_runtime.h>

#include "attention_autotuner/abi.h"

#ifndef ILLEGAL_AT
#define ILLEGAL_AT 0
#endif
#ifndef HANGS_AT
#define HANGS_AT 0
#endif
#ifndef WORK
#define WORK 2000
#endif

namespace {

int launches = 0;

__global__ void work(float* lse, bool illegal, bool hang) {
  long long const start = clock64();
  while (clock64() - start < WORK) {
  }
  if (illegal) *reinterpret_cast<volatile float*>(0x10) = 1.0f;
  for (volatile bool spinning = hang; spinning;) __nanosleep(1000);
  if (lse != nullptr) lse[0] = 0.0f;
}

}  // namespace

uint32_t attention_autotuner_abi_version(void) { return ATTENTION_AUTOTUNER_ABI_VERSION; }

int32_t attention_autotuner_get_kernel_info(attention_autotuner_kernel_info* info) {
  *info = {sizeof(*info), ATTENTION_AUTOTUNER_ABI_VERSION, "faulty", 64, 64, 64, 64, 32, 0, 0, 16};
  return ATTENTION_AUTOTUNER_OK;
}

int32_t attention_autotuner_prepare(int32_t) { return ATTENTION_AUTOTUNER_OK; }

size_t attention_autotuner_workspace_bytes(void const*) { return 0; }

int32_t attention_autotuner_launch(void const* params, void*, void* stream, int32_t) {
  auto const* p = static_cast<attention_autotuner_attention_forward_params const*>(params);
  ++launches;
  work<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(p->lse, launches == ILLEGAL_AT, launches == HANGS_AT);
  auto const error = cudaGetLastError();
  return error == cudaSuccess ? ATTENTION_AUTOTUNER_OK : ATTENTION_AUTOTUNER_CUDA_ERROR + error;
}

char const* attention_autotuner_status_string(int32_t status) {
  return status < ATTENTION_AUTOTUNER_CUDA_ERROR
             ? "refused"
             : cudaGetErrorString(static_cast<cudaError_t>(status - ATTENTION_AUTOTUNER_CUDA_ERROR));
}

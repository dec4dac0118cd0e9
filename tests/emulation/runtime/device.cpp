// The emulated device as the CUDA runtime shows it, and the settings that tests make.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>

#include "../../../templates/include/attention_autotuner/abi.h"
#include "machine.h"

extern "C" CUresult emulation_encode_tiled(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, cuuint64_t const*,
                                           cuuint64_t const*, cuuint32_t const*, cuuint32_t const*,
                                           CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                           CUtensorMapFloatOOBfill);

// What went wrong in the launches that have run is the last error.
cudaError_t cudaGetLastError() { return emulation::last_fault().empty() ? cudaSuccess : cudaErrorLaunchFailure; }
char const* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorLaunchFailure ? emulation::last_fault().c_str() : "an error of the emulated runtime";
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
      *value = emulation::settings.multiprocessors;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = 227 << 10;
      return cudaSuccess;
    default:
      return cudaErrorNotSupported;
  }
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return cudaSuccess;
}
cudaError_t emulation_occupancy(int* resident, int, size_t) {
  *resident = 1;
  return cudaSuccess;
}
cudaError_t emulation_entry_point(char const* name, void** entry_point, cudaDriverEntryPointQueryResult* result) {
  bool const known = std::strcmp(name, "cuTensorMapEncodeTiled") == 0;
  *entry_point = known ? reinterpret_cast<void*>(&emulation_encode_tiled) : nullptr;
  *result = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

// The kernel's entry, and then what it has launched, to the end.
extern "C" int32_t emulation_launch_of_kernel(void const* params, void* workspace, void* stream, int32_t device);
extern "C" __attribute__((visibility("default"))) int32_t attention_autotuner_launch(void const* params,
                                                                                     void* workspace, void* stream,
                                                                                     int32_t device) {
  emulation::forget_fault();
  int32_t const status = emulation_launch_of_kernel(params, workspace, stream, device);
  bool const ended = emulation::finish();
  if (status != ATTENTION_AUTOTUNER_OK || ended) return status;
  return ATTENTION_AUTOTUNER_CUDA_ERROR + int32_t(cudaErrorLaunchFailure);
}

// Settings of the launches from now on; see machine.h.
extern "C" __attribute__((visibility("default"))) void emulation_configure(int policy, uint64_t seed,
                                                                           int multiprocessors, char const* mutant) {
  emulation::settings = {emulation::Policy(policy), seed, multiprocessors, mutant};
}
// Of the next call alone; see machine.h.
extern "C" __attribute__((visibility("default"))) void emulation_put_ahead(emulation::Range const* ranges, int read,
                                                                           int written) {
  emulation::put_ahead({ranges, ranges + read}, {ranges + read, ranges + read + written});
}

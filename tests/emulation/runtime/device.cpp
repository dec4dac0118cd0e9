// The emulated device as the CUDA runtime shows it, and the settings that tests make.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>

#include "machine.h"

extern "C" CUresult emulation_encode_tiled(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, cuuint64_t const*,
                                           cuuint64_t const*, cuuint32_t const*, cuuint32_t const*,
                                           CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                           CUtensorMapFloatOOBfill);

// A launch runs to its end; what went wrong in it is the last error.
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
cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t) {
  std::memset(data, value, bytes);
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

// Settings of the launches from now on; see machine.h.
extern "C" __attribute__((visibility("default"))) void emulation_configure(int policy, uint64_t seed,
                                                                           int multiprocessors, char const* mutant) {
  emulation::settings = {emulation::Policy(policy), seed, multiprocessors, mutant};
}

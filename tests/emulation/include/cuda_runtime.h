// The part of the CUDA runtime that host sides of artifacts call, for the emulated device.
#pragma once

#include <cuda.h>
#include <driver_types.h>
#include <vector_functions.h>
#include <vector_types.h>

#define CUDART_VERSION CUDA_VERSION

cudaError_t cudaGetLastError();
char const* cudaGetErrorString(cudaError_t error);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaDriverGetVersion(int* version);
cudaError_t emulation_occupancy(int* resident, int threads, size_t smem_bytes);
cudaError_t emulation_entry_point(char const* name, void** entry_point, cudaDriverEntryPointQueryResult* result);

template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, cudaFuncAttribute, int) {
  return cudaSuccess;
}
template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* resident, Kernel, int threads, size_t smem_bytes) {
  return emulation_occupancy(resident, threads, smem_bytes);
}
inline cudaError_t cudaGetDriverEntryPointByVersion(char const* name, void** entry_point, unsigned, unsigned long long,
                                                    cudaDriverEntryPointQueryResult* result) {
  return emulation_entry_point(name, entry_point, result);
}
inline cudaError_t cudaGetDriverEntryPoint(char const* name, void** entry_point, unsigned long long,
                                           cudaDriverEntryPointQueryResult* result) {
  return emulation_entry_point(name, entry_point, result);
}

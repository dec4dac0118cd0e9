// The device language over the emulated machine: included before every rewritten kernel.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstring>
#include <tuple>
#include <type_traits>

#include "machine.h"
#include "ptx.h"

// The machine exports a function of this name, which runs what the kernel's own has launched.
#define attention_autotuner_launch emulation_launch_of_kernel

#undef __launch_bounds__
#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __grid_constant__
#undef __forceinline__
#undef __align__
#define __launch_bounds__(...)
#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __forceinline__ inline
#define __align__(bytes) alignas(bytes)

namespace emulation {

template <typename Type>
Type* dynamic_shared(uint32_t alignment) {
  current->cta->memory.align(alignment);
  return reinterpret_cast<Type*>(current->cta->memory.data());
}
template <typename Type>
Type* static_shared() {
  return reinterpret_cast<Type*>(current->cta->static_memory);
}
inline Index3 const& thread_index() { return current->index; }
inline Index3 const& block_index() { return current->cta->index; }
inline Index3 const& grid_dim() { return launch_of(*current->cta).grid; }
inline Index3 const& block_dim() { return launch_of(*current->cta).block; }
inline bool mutant(char const* name) { return settings.mutant == name; }

inline Index3 index_of(dim3 const& size) { return {size.x, size.y, size.z}; }

template <typename... Parameters, typename... Arguments>
void launch_as(int cluster, bool early, dim3 grid, dim3 block, size_t shared_bytes, void (*kernel)(Parameters...),
               Arguments const&... arguments) {
  auto const held = std::make_shared<std::tuple<std::decay_t<Parameters>...>>(arguments...);
  submit({index_of(grid), index_of(block), uint32_t(shared_bytes), [kernel, held] { std::apply(kernel, *held); },
          cluster, early});
}
template <typename... Parameters, typename... Arguments>
void launch(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t, void (*kernel)(Parameters...),
            Arguments const&... arguments) {
  launch_as(1, false, grid, block, shared_bytes, kernel, arguments...);
}

template <typename Value>
Value shuffle(char const* what, unsigned mask, Value value, int from) {
  static_assert(sizeof(Value) <= sizeof(Words::w));
  Words mine{};
  std::memcpy(mine.w, &value, sizeof(Value));
  Words const* const all = meet(what, mask, mine);
  if ((mask >> from & 1) == 0) fault("%s from lane %d, which is not in its mask %08x", what, from, mask);
  std::memcpy(&value, all[from].w, sizeof(Value));
  return value;
}
inline uint32_t ballot(char const* what, unsigned mask, bool vote) {
  Words const* const all = meet(what, mask, {{uint32_t(vote)}});
  uint32_t votes = 0;
  for (int lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1) != 0) votes |= all[lane].w[0] << lane;
  }
  return votes;
}

}  // namespace emulation

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(cudaLaunchConfig_t const* config, void (*kernel)(Parameters...),
                               Arguments const&... arguments) {
  int cluster = 1;
  bool early = false;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    cudaLaunchAttribute const& attribute = config->attrs[i];
    if (attribute.id == cudaLaunchAttributeClusterDimension) cluster = int(attribute.val.clusterDim.x);
    if (attribute.id == cudaLaunchAttributeProgrammaticStreamSerialization) {
      early = attribute.val.programmaticStreamSerializationAllowed != 0;
    }
    bool const together = attribute.id == cudaLaunchAttributeCooperative && attribute.val.cooperative;
    if (together && int(config->gridDim.x) > ::emulation::settings.multiprocessors) {
      return cudaErrorCooperativeLaunchTooLarge;
    }
  }
  ::emulation::launch_as(cluster, early, config->gridDim, config->blockDim, config->dynamicSmemBytes, kernel,
                         arguments...);
  return cudaGetLastError();
}

inline void __syncthreads() { ::emulation::sync_named(0, -1); }
inline int __syncthreads_and(int vote) {
  bool& refused = ::emulation::current->cta->refused;
  __syncthreads();
  refused = false;
  __syncthreads();
  refused |= vote == 0;
  __syncthreads();
  return !refused;
}
inline void __syncwarp(unsigned mask = ~0u) { ::emulation::sync_warp(mask); }
template <typename Value>
Value __shfl_sync(unsigned mask, Value value, int from, int width = 32) {
  int const lane = ::emulation::current->lane();
  return ::emulation::shuffle("__shfl_sync", mask, value, lane / width * width + from % width);
}
template <typename Value>
Value __shfl_xor_sync(unsigned mask, Value value, int bits) {
  return ::emulation::shuffle("__shfl_xor_sync", mask, value, ::emulation::current->lane() ^ bits);
}
inline unsigned __ballot_sync(unsigned mask, bool vote) { return ::emulation::ballot("__ballot_sync", mask, vote); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __clz(int bits) { return bits == 0 ? 32 : __builtin_clz(unsigned(bits)); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline bool __any_sync(unsigned mask, bool vote) { return ::emulation::ballot("__any_sync", mask, vote) != 0; }
inline bool __all_sync(unsigned mask, bool vote) { return ::emulation::ballot("__all_sync", mask, vote) == mask; }

template <typename To, typename From>
To emulation_bits(From from) {
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}
inline float __int_as_float(int bits) { return emulation_bits<float>(bits); }
inline float __uint_as_float(unsigned bits) { return emulation_bits<float>(bits); }
inline int __float_as_int(float value) { return emulation_bits<int>(value); }
inline unsigned __float_as_uint(float value) { return emulation_bits<unsigned>(value); }
inline size_t __cvta_generic_to_shared(void const* pointer) {
  auto& memory = ::emulation::current->cta->memory;
  return memory.base() + size_t(static_cast<char const*>(pointer) - memory.data());
}
template <typename Value>
Value atomicAdd(Value* address, Value value) {
  ::emulation::maybe_yield();
  Value const before = *address;
  *address = before + value;
  return before;
}
template <typename Value>
Value __ldcs(Value const* address) {
  return *address;
}
template <typename Value>
void __stcs(Value* address, Value value) {
  *address = value;
}

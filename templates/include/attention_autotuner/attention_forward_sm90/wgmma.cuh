// Descriptors of MMAs, the fences around them, and the roles of warpgroups.
//
// sm90/wgmma.cuh and sm90/roles.cuh have the same over CUTLASS; the namespace keeps the two apart.
#pragma once

#include <cstdint>

#include "attention_autotuner/attention_forward_sm90/wgmma_atoms.cuh"
#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/sm90/pipeline.cuh"
#include "attention_autotuner/sm90/swizzle.cuh"

namespace attention_autotuner::softmax_forward {

inline constexpr int kMmaDepth = 16;  // of one instruction
inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kWarpgroupRows = 64;

// The descriptor of a tile for the tensor cores: `leading` is the distance in bytes of blocks of 64 columns where the
// columns are not the dimension that is summed over, else unused.
__device__ __forceinline__ uint64_t make_smem_desc(uint32_t address, int leading) {
  constexpr uint64_t kSwizzle128 = uint64_t(1) << 62;
  return uint64_t((address & 0x3ffff) >> 4) | uint64_t(leading >> 4) << 16 | uint64_t(kSwizzleBytes >> 4) << 32 |
         kSwizzle128;
}
// The descriptor of the same tile from some bytes further on.
__device__ __forceinline__ uint64_t advance_desc(uint64_t desc, int bytes) {
  return (desc >> 32) << 32 | (uint32_t(desc) + uint32_t(bytes >> 4));
}

__device__ __forceinline__ void warpgroup_arrive() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void warpgroup_commit_batch() {
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}
template <int Pending>
__device__ __forceinline__ void warpgroup_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(Pending) : "memory");
}
// Keep the compiler from moving reads of accumulators to before the wait for the MMAs that write them, and operands
// in their registers until the MMAs that read them are done.
template <int Registers>
__device__ __forceinline__ void fence_accumulators(float (&sums)[Registers]) {
#pragma unroll
  for (int i = 0; i < Registers; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}
template <int Registers>
__device__ __forceinline__ void fence_operands(uint32_t (&a)[Registers]) {
#pragma unroll
  for (int i = 0; i < Registers; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

// Registers move from the producer to the consumers.
template <int Registers>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(Registers));
}
template <int Registers>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(Registers));
}

__device__ __forceinline__ int warp_in_warpgroup() { return int(threadIdx.x) % kWarpgroupThreads / 32; }
__device__ __forceinline__ bool leads_warpgroup() { return threadIdx.x % kWarpgroupThreads == 0; }
// One thread arrives for its warpgroup, once all that the warpgroup's MMAs read of a stage has been read.
__device__ __forceinline__ void consumer_release(uint32_t empty) {
  if (leads_warpgroup()) arrive(empty);
}

// A barrier among the threads of a consumer warpgroup.
__device__ __forceinline__ void warpgroup_barrier(int group) { named_barrier(8 + group, kWarpgroupThreads); }

// Ping-pong: consumer warpgroups issue their MMAs by turns. A warpgroup waits for its named barrier, and passes the
// turn on by arriving at the next one's; before the first turn the last warpgroup passes.
template <int Consumers>
__device__ __forceinline__ void ping_pong_pass(int group) {
  int const next = group + 1 == Consumers ? 0 : group + 1;
  asm volatile("bar.arrive %0, %1;\n" ::"r"(1 + next), "n"(2 * kWarpgroupThreads) : "memory");
}
__device__ __forceinline__ void ping_pong_wait(int group) { named_barrier(1 + group, 2 * kWarpgroupThreads); }

}  // namespace attention_autotuner::softmax_forward

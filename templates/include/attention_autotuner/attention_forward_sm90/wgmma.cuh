// Registers, barriers and ping-pong of warpgroups whose number is an argument, beside sm90/wgmma.cuh and
// sm90/roles.cuh.
#pragma once

#include <cstdint>

#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/sm90/roles.cuh"
#include "attention_autotuner/sm90/wgmma.cuh"

namespace attention_autotuner::softmax_forward {

using attention_autotuner::advance_desc;
using attention_autotuner::fence_accumulators;
using attention_autotuner::fence_operands;
using attention_autotuner::kMmaDepth;
using attention_autotuner::kWarpgroupRows;
using attention_autotuner::kWarpgroupThreads;
using attention_autotuner::make_smem_desc;
using attention_autotuner::warp_in_warpgroup;
using attention_autotuner::warpgroup_arrive;
using attention_autotuner::warpgroup_commit_batch;
using attention_autotuner::warpgroup_wait;

// Registers move from the producer to the consumers.
template <int Registers>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(Registers));
}
template <int Registers>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(Registers));
}

__device__ __forceinline__ bool leads_warpgroup() { return threadIdx.x % kWarpgroupThreads == 0; }
// The same as in sm90/roles.cuh, but for the order in which the compiler puts what is around it.
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

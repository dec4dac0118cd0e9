// The roles of a CTA's warpgroups: the first is the producer, the others are consumers, whose MMAs read what it loads.
//
// Registers move between them by warpgroup_reg_dealloc and warpgroup_reg_alloc of cutlass::arch (setmaxnreg).
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include <cstdint>

#include "attention_autotuner/common/dependent_launch.cuh"
#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/sm90/pipeline.cuh"

namespace attention_autotuner {

inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kWarpgroupRows = 64;

// Where a thread of a consumer warpgroup stands.
__device__ __forceinline__ int consumer_index() { return int(threadIdx.x) / kWarpgroupThreads - 1; }
__device__ __forceinline__ int warp_in_warpgroup() { return int(threadIdx.x) % kWarpgroupThreads / 32; }
// In a tile of 64 rows for each consumer warpgroup: the first of this lane's rows.
__device__ __forceinline__ int consumer_row() {
  return kWarpgroupRows * consumer_index() + 16 * warp_in_warpgroup() + lane_index() / 4;
}
// One thread arrives for its warpgroup, once all that the warpgroup's MMAs read of a stage has been read.
__device__ __forceinline__ void consumer_release(uint32_t empty) {
  if (threadIdx.x % kWarpgroupThreads == 0) arrive(empty);
}

// Ping-pong: consumer warpgroups issue their MMAs by turns, so that one modifies scores while the MMAs of another run.
// Each waits for its named barrier, and passes on to the next by arriving at the next's; the first begins.
template <int Consumers>
__device__ __forceinline__ void ping_pong_pass() {
  int const next = (consumer_index() + 1) % Consumers;
  asm volatile("bar.arrive %0, %1;\n" ::"r"(1 + next), "n"(2 * kWarpgroupThreads) : "memory");
}
template <int Consumers>
__device__ __forceinline__ void ping_pong_begin() {
  if (consumer_index() == Consumers - 1) ping_pong_pass<Consumers>();
}
__device__ __forceinline__ void ping_pong_wait() { named_barrier(1 + consumer_index(), 2 * kWarpgroupThreads); }
__device__ __forceinline__ void ping_pong_end() {
  if (consumer_index() == 0) ping_pong_wait();
}

}  // namespace attention_autotuner

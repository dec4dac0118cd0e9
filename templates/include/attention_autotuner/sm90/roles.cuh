// What the warpgroups of a CTA do: the first loads, the others multiply.
#pragma once

#include <cstdint>

#include "attention_autotuner/sm90/pipeline.cuh"

namespace attention_autotuner {

inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kWarpgroupRows = 64;

// For kernels that are launched to start before the one ahead of them in the stream has ended. The next may start once
// all CTAs have said so or ended; it need not wait, but where it does, all ahead of it is complete and visible.
__device__ __forceinline__ void launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
}
__device__ __forceinline__ void wait_for_grids_ahead() { asm volatile("griddepcontrol.wait;\n" ::: "memory"); }

template <int Registers>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(Registers));
}
template <int Registers>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(Registers));
}
// Where a thread of a multiplying warpgroup stands: the first warpgroup of a CTA loads.
__device__ __forceinline__ int group_index() { return int(threadIdx.x) / kWarpgroupThreads - 1; }
__device__ __forceinline__ int group_warp() { return int(threadIdx.x) % kWarpgroupThreads / 32; }
__device__ __forceinline__ int lane_index() { return int(threadIdx.x) & 31; }
// In a tile of 64 rows for each of them: the first of this lane's rows.
__device__ __forceinline__ int group_row() {
  return kWarpgroupRows * group_index() + 16 * group_warp() + lane_index() / 4;
}
// Once all that a warpgroup's products read of a stage has been read.
__device__ __forceinline__ void release(uint32_t freed) {
  if (threadIdx.x % kWarpgroupThreads == 0) arrive(freed);
}
// Multiplying warpgroups issue products in turns, so that one weighs while another multiplies: equally many, the first
// warpgroup first. `begin_turns` comes before the first of them, and `end_turns` after the last.
template <int Groups>
__device__ __forceinline__ void pass_turn() {
  int const next = (group_index() + 1) % Groups;
  asm volatile("bar.arrive %0, %1;\n" ::"r"(1 + next), "n"(2 * kWarpgroupThreads) : "memory");
}
template <int Groups>
__device__ __forceinline__ void begin_turns() {
  if (group_index() == Groups - 1) pass_turn<Groups>();
}
__device__ __forceinline__ void take_turn() {
  asm volatile("bar.sync %0, %1;\n" ::"r"(1 + group_index()), "n"(2 * kWarpgroupThreads) : "memory");
}
__device__ __forceinline__ void end_turns() {
  if (group_index() == 0) take_turn();
}
// Threads of one warpgroup wait for each other.
__device__ __forceinline__ void warpgroup_barrier(int id) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "n"(kWarpgroupThreads) : "memory");
}

}  // namespace attention_autotuner

// Programmatic dependent launch, for kernels that start before the one ahead of them in the stream has ended. Launches:
// host/early_launch.cuh.
#pragma once

namespace attention_autotuner {

// The next kernel may start once all CTAs have said so or ended; it need not wait, but where it does, all ahead of it
// is complete and visible. CUTLASS compiles its own to nothing unless a macro asks for them.
__device__ __forceinline__ void launch_dependent_grids() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_on_dependent_grids() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}
// By a call's first kernel, which starts before the kernel ahead in the stream has ended, of whatever library. The next
// one may read inputs of the call at once, and so must not start before this wait is over.
__device__ __forceinline__ void begin_call() {
  wait_on_dependent_grids();
  launch_dependent_grids();
}

}  // namespace attention_autotuner

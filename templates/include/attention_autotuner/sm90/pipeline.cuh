// Barriers in shared memory between the threads that fill stages and the warpgroups that read them.
#pragma once

#include <cstdint>

namespace attention_autotuner {

__device__ __forceinline__ void initialise_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(arrivals));
}
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}
// Makes the phase wait for that many bytes of copies; somebody has yet to arrive.
__device__ __forceinline__ void announce_bytes(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}
// Arrives as well.
__device__ __forceinline__ void expect_bytes(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}
// Arrives once a word has come, and with it what was read from shared memory before: the assembler does not wait for
// loads before it arrives, and the next copy may overtake them.
__device__ __forceinline__ void arrive_after(uint32_t word, uint32_t barrier) {
  asm volatile(
      "{\n"
      ".reg .pred some;\n"
      "setp.ne.b32 some, %0, 0;\n"
      "@some mbarrier.arrive.shared::cta.b64 _, [%1];\n"
      "@!some mbarrier.arrive.shared::cta.b64 _, [%1];\n"
      "}\n" ::"r"(word),
      "r"(barrier)
      : "memory");
}
// Once all lanes of a warp are there, it arrives. Checkers of races follow the threads that arrive, and not those that
// these waited for, so that builds for them have every lane arrive.
#ifdef ATTENTION_AUTOTUNER_CHECK_RACES
inline constexpr int kWarpArrivals = 32;
#else
inline constexpr int kWarpArrivals = 1;
#endif
__device__ __forceinline__ bool warp_arrives() {
  __syncwarp();
  return kWarpArrivals > 1 || (int(threadIdx.x) & 31) == 0;
}
__device__ __forceinline__ void wait(uint32_t barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

}  // namespace attention_autotuner

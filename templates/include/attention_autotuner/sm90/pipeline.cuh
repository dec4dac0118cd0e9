// Barriers in shared memory (mbarrier) and the ring of stages that they guard: a producer fills stages, consumers empty
// them.
//
// Barriers are 32-bit addresses of shared memory. CUTLASS has the same ones over generic pointers, which cost the
// kernels here instructions; and its wait has no memory clobber, so that reads of a stage may move ahead of it.
#pragma once

#include <cstdint>

namespace attention_autotuner {

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(arrivals));
}
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}
// Makes the phase wait for that many bytes of copies; an arrival is still due.
__device__ __forceinline__ void expect_tx(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}
// Arrives as well.
__device__ __forceinline__ void arrive_and_expect_tx(uint32_t barrier, int bytes) {
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
// Once all lanes of a warp are there, it arrives. Race checkers follow the threads that arrive, and not those that they
// waited for, so in builds for them every lane arrives.
#ifdef ATTENTION_AUTOTUNER_CHECK_RACES
inline constexpr int kWarpArrivals = 32;
#else
inline constexpr int kWarpArrivals = 1;
#endif
__device__ __forceinline__ bool warp_arrives() {
  __syncwarp();
  return kWarpArrivals > 1 || (int(threadIdx.x) & 31) == 0;
}
__device__ __forceinline__ void wait(uint32_t barrier, int phase) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(phase)
      : "memory");
}

// The barriers of a ring of stages, two for each: full once its tiles have arrived, empty once they have been read.
// Rings of `Interleaved` operands lie interleaved, stage after stage. What is counted is the use of the ring: the n-th
// takes stage n % Stages.
template <int Stages, int Interleaved = 1>
struct BarrierRing {
  uint32_t first;  // the full barrier of stage 0

  __device__ __forceinline__ static int stage(int index) { return index % Stages; }
  __device__ __forceinline__ static int phase(int index) { return index / Stages & 1; }
  __device__ __forceinline__ uint32_t full(int stage) const { return first + 16 * Interleaved * stage; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(stage) + 8; }
  __device__ __forceinline__ void init(int stage, int producers, int consumers) const {
    barrier_init(full(stage), producers);
    barrier_init(empty(stage), consumers);
  }
  // Until the stage may be filled again; at once for the first round.
  __device__ __forceinline__ void producer_acquire(int index) const { wait(empty(stage(index)), phase(index) ^ 1); }
  // Until the stage has been filled.
  __device__ __forceinline__ void consumer_wait(int index) const { wait(full(stage(index)), phase(index)); }
};

// Position in a ring of stages.
template <int Stages>
struct RingCursor {
  int stage = 0, phase = 0;

  // Once so many stages have been used.
  __device__ __forceinline__ static RingCursor after(int used) { return {used % Stages, used / Stages & 1}; }
  __device__ __forceinline__ void advance() {
    if constexpr (Stages == 1) {
      phase ^= 1;
    } else if (++stage == Stages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

}  // namespace attention_autotuner

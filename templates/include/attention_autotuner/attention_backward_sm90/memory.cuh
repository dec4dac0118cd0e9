// Memory operations of attention's backward of family sm90 beside TMA: values of rows on their way in, sums of dQ on
// their way out, and the semaphores that order these.
#pragma once

#include <cstdint>

#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/sm90/tma.cuh"

namespace attention_autotuner::softmax_backward {

// Contiguous bytes on their way into shared memory; both addresses and the size are multiples of 16.
__device__ __forceinline__ void bulk_load(uint32_t target, void const* source, int bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(target),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// Four words of shared memory, at a multiple of 16 bytes.
__device__ __forceinline__ void store_four(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ void load_four(uint32_t (&words)[4], uint32_t address) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

// Adds four floats to global memory.
__device__ __forceinline__ void add_four(float* sums, float a, float b, float c, float d) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"l"(sums), "f"(a), "f"(b), "f"(c), "f"(d)
               : "memory");
}

// Contiguous floats of shared memory on their way to global memory, added to what is there or in its place; both
// addresses and the bytes are multiples of 16.
__device__ __forceinline__ void bulk_copy(float* sums, uint32_t source, int bytes, bool stores) {
  if (stores) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n" ::"l"(sums), "r"(source), "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n" ::"l"(sums),
                 "r"(source), "r"(bytes)
                 : "memory");
  }
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;\n" ::: "memory"); }
// Until such groups of copies of this thread are in global memory, but for so many of the latest ones; that they have
// been read is tma_store_wait_read() of sm90/tma.cuh.
template <int kPending>
__device__ __forceinline__ void bulk_wait_written() {
  asm volatile("cp.async.bulk.wait_group %0;\n" ::"n"(kPending) : "memory");
}
// The latter of what a warp stores and adds by its first lane.
template <int kPending = 0>
__device__ __forceinline__ void wait_for_reads() {
  if (lane_index() == 0) tma_store_wait_read<kPending>();
  __syncwarp();
}
// Between what others stored by bulk copies, as this thread learned from a semaphore, and its own bulk copies.
__device__ __forceinline__ void fence_bulk_copies() { asm volatile("fence.proxy.async.global;\n" ::: "memory"); }

// By one thread, where 0 becomes 1: what was there.
__device__ __forceinline__ int semaphore_claim(int* semaphore) {
  int before;
  asm volatile("atom.acquire.gpu.global.cas.b32 %0, [%1], 0, 1;\n" : "=r"(before) : "l"(semaphore) : "memory");
  return before;
}
// By one thread: until the semaphore has a value, and what was added before that is visible.
__device__ __forceinline__ void semaphore_wait(int const* semaphore, int value) {
  int now;
  do {
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];\n" : "=r"(now) : "l"(semaphore) : "memory");
  } while (now != value);
}
// By one thread, after a barrier among those that added and fenced that: lets the next one in.
__device__ __forceinline__ void semaphore_release(int* semaphore, int value) {
  asm volatile("st.release.gpu.global.b32 [%0], %1;\n" ::"l"(semaphore), "r"(value) : "memory");
}
// By one thread: one more of those whose additions are complete.
__device__ __forceinline__ void count_complete(int* counter) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;\n" ::"l"(counter), "r"(1) : "memory");
}
// By one thread: until so many are, without hurry; what they added is visible then.
__device__ __forceinline__ void wait_complete(int const* counter, int count) {
  int now;
  while (true) {
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];\n" : "=r"(now) : "l"(counter) : "memory");
    if (now == count) return;
    asm volatile("nanosleep.u32 %0;\n" ::"r"(200));
  }
}
__device__ __forceinline__ void fence_device() { asm volatile("fence.acq_rel.gpu;\n" ::: "memory"); }

}  // namespace attention_autotuner::softmax_backward

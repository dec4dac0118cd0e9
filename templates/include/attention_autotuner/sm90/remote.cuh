// Shared memory of another CTA of a cluster: stores that its barriers count, and arrivals at them.
//
// Places are addresses of this CTA's own shared memory, which all CTAs of a cluster lay out alike.
#pragma once

#include <cstdint>

#include "attention_autotuner/sm90/pipeline.cuh"

namespace attention_autotuner {

// The same place in the CTA of a rank.
__device__ __forceinline__ uint32_t remote_address(uint32_t address, int rank) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}
// Four words on their way to another CTA, whose barrier receives their 16 bytes; both addresses are remote ones.
__device__ __forceinline__ void store_remote(uint32_t target, uint32_t const (&words)[4], uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];\n" ::"r"(target),
      "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]), "r"(barrier)
      : "memory");
}
// Four words that have come.
__device__ __forceinline__ void load_received(uint32_t (&words)[4], uint32_t address) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}
// Arrives at a barrier of another CTA once a word has come, and with it what was read from shared memory before.
// Nothing that was written is released: at the scope of a cluster that would wait for all stores of the thread.
__device__ __forceinline__ void arrive_remote_after(uint32_t word, uint32_t barrier) {
  asm volatile(
      "{\n"
      ".reg .pred some;\n"
      "setp.ne.b32 some, %0, 0;\n"
      "@some mbarrier.arrive.shared::cluster.b64 _, [%1];\n"
      "@!some mbarrier.arrive.shared::cluster.b64 _, [%1];\n"
      "}\n" ::"r"(word),
      "r"(barrier)
      : "memory");
}

}  // namespace attention_autotuner

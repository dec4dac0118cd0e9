// Clusters of CTAs: tiles that one CTA loads into the shared memory of all (multicast), and barriers of one another.
//
// All CTAs of a cluster lay their shared memory out alike, so that an address names the same place in each.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace attention_autotuner {

__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
  return rank;
}
// All threads of all CTAs of the cluster, and what they wrote to shared memory.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive;\n" ::: "memory");
  asm volatile("barrier.cluster.wait;\n" ::: "memory");
}
// Arrives at the barrier of a CTA of the cluster.
__device__ __forceinline__ void arrive_at(uint32_t barrier, int rank) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(remote) : "r"(barrier), "r"(rank));
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];\n" ::"r"(remote) : "memory");
}
// tma_load into the CTAs of a mask; each one's barrier of that address receives the bytes.
__device__ __forceinline__ void tma_load_multicast(uint32_t target, CUtensorMap const& descriptor, uint32_t barrier,
                                                   uint16_t ranks, int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%3, %4, %5, %6}], [%2], %7;\n" ::"r"(target),
      "l"(&descriptor), "r"(barrier), "r"(column), "r"(row), "r"(0), "r"(0), "h"(ranks)
      : "memory");
}

}  // namespace attention_autotuner

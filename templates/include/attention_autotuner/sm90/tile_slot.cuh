// The slots of shared memory in which one thread of a CTA that claims its tiles hands their indices to the others.
#pragma once

#include <cstdint>

#include "attention_autotuner/common/shared_memory.cuh"
#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/sm90/pipeline.cuh"

namespace attention_autotuner {

// One of them, of a kernel whose traits say where they and their barriers lie. Its phase is the parity of its uses.
template <typename T>
struct TileSlot {
  uint32_t smem;
  int slot;

  __device__ __forceinline__ uint32_t full() const { return smem + T::kBarrierOffset + 16 * (T::kTileBarrier + slot); }
  __device__ __forceinline__ uint32_t empty() const { return full() + 8; }
  __device__ __forceinline__ uint32_t word() const { return smem + T::kTileSlotOffset + 4 * slot; }
  __device__ __forceinline__ void write(int index, int phase) const {
    wait(empty(), phase ^ 1);
    store_shared(word(), uint32_t(index));
    arrive(full());
  }
  // `Warp`: all lanes of a warp call.
  template <bool Warp>
  __device__ __forceinline__ int read(int phase) const {
    wait(full(), phase);
    uint32_t const index = load_shared(word());
    if (!Warp || warp_arrives()) arrive_after(index, empty());
    return Warp ? __shfl_sync(0xffffffffu, int(index), 0) : int(index);
  }
};

}  // namespace attention_autotuner

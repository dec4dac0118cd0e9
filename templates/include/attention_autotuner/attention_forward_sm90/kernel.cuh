// The kernels of attention's and retnet's forward of family sm90: warpgroups take their roles.
#pragma once

#include <cstdint>
#include <type_traits>

#include "attention_autotuner/attention_forward_sm90/mainloop.cuh"
#include "attention_autotuner/attention_forward_sm90/producer.cuh"
#include "attention_autotuner/attention_forward_sm90/shared_scores.cuh"
#include "attention_autotuner/attention_forward_sm90/traits.cuh"
#include "attention_autotuner/attention_forward_sm90/wgmma.cuh"
#include "attention_autotuner/common/split_combine.cuh"
#include "attention_autotuner/sm90/cluster.cuh"

namespace attention_autotuner::softmax_forward {

template <typename Config>
__global__ void __launch_bounds__(AttentionForwardSm90Traits<Config>::kThreads, 1)
    attention_forward_sm90(ArgumentsOf<AttentionForwardSm90Traits<Config>> const __grid_constant__ arguments) {
  using T = AttentionForwardSm90Traits<Config>;
  // There are more CTAs than blocks of rows. The list of parts takes longer than the beginning of a CTA.
  auto const finds_tile = [&arguments] {
    wait_on_dependent_grids();
    return TileSequence<T>(arguments.list, 0).valid();
  };
  if constexpr (T::kPacked && !kListsParts<T>) {
    if (!finds_tile()) return;
  }
  extern __shared__ char smem_bytes[];
  uint32_t const smem = aligned_shared(smem_bytes);
  int const warpgroup = __shfl_sync(0xffffffffu, int(threadIdx.x) / kWarpgroupThreads, 0);
  AttentionForwardSm90Stages<T> const stages{arguments, smem};
  if (threadIdx.x == 0) {
    prefetch_descriptor(arguments.q.descriptor);
    prefetch_descriptor(arguments.k.descriptor);
    prefetch_descriptor(arguments.v.descriptor);
    if (T::kMasked) prefetch_descriptor(arguments.mask.descriptor);
    if (T::kOutput == Output::kThroughQ) prefetch_descriptor(arguments.o.descriptor);
    stages.init_barriers();
  }
  stages.clear_unloaded_rows();
  if constexpr (!T::kPacked) wait_on_dependent_grids();
  if constexpr (kListsParts<T>) {
    if (!finds_tile()) return;
  }
  if constexpr (T::kSharesScores) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  if (warpgroup == 0) {
    if constexpr (T::kTradesRegisters) give_registers<T::kProducerRegisters>();
    if constexpr (T::kSharesScores) {
      if (threadIdx.x == 0) SharedScoresLoads<T>{stages}.load_q_k_and_v();
    } else {
      if (threadIdx.x == 0) stages.load_q_and_k();
      if (T::kClearsV ? threadIdx.x / 32 == 1 : threadIdx.x == 32) stages.load_v();
    }
    if constexpr (T::kMasked) {
      if (threadIdx.x == 64) stages.load_mask();
    }
  } else {
    if constexpr (T::kTradesRegisters) take_registers<T::kConsumerRegisters>();
    std::conditional_t<T::kSharesScores, SharedScoresConsumer<T>, AttentionForwardSm90Consumer<T>> consumer(
        arguments, smem, warpgroup - 1);
    consumer.run();
  }
  // No CTA ends while the other of its cluster may still store to its shared memory.
  if constexpr (T::kSharesScores) cluster_sync();
}

// Ahead of the kernel above, where its CTAs claim tiles: none is claimed yet. A copy of zeros by the driver takes
// longer, and the kernel behind would begin after it.
template <typename Config>
__global__ void attention_forward_sm90_clear_claimed(int* claimed) {
  begin_call();
  *claimed = 0;
}

// The results of all splits. It starts while the kernel above runs, and waits for it.
template <typename Config>
__global__ void __launch_bounds__(kCombineThreads) attention_forward_sm90_combine(
    SplitResultsOf<AttentionForwardSm90Traits<Config>::kPacked> const __grid_constant__ results) {
  wait_on_dependent_grids();
  combine_rows<typename Config::Element, Config::kPaddedDimV>(results);
}

}  // namespace attention_autotuner::softmax_forward

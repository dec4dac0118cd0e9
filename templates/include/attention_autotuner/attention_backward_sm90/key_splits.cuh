// How many CTAs share a block of keys, each with some of the query heads of its group.
#pragma once

#include <cstdint>

#include "attention_autotuner/attention_backward_sm90/sections.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/host/head_splits.cuh"
#include "attention_autotuner/score/modifications.cuh"

namespace attention_autotuner {

inline constexpr int kMostSplitBlocks = 128;  // of a head, beyond which parts of dK and dV take too much memory

// The twin of head_splits() in attention_backward_sm90/resources.py. Causal blocks are of unlike length but in a
// window; of documents that is not known here. A list with a tail is full with fewer.
template <typename KernelParams, typename T, typename Params>
int count_key_splits(Params const& p, int enough_ctas) {
  int64_t const blocks = divide_up(p.seqlen_k, T::kBlockRows), lists = int64_t(p.heads_kv) * p.batch;
  int const group = p.heads_q / p.heads_kv;
  bool uneven = p.causal && !kHasSpans<KernelParams> && blocks <= kMostSplitBlocks;
  if constexpr (kHasWindow<KernelParams>) uneven = uneven && (p.window_left < 0 || p.window_left >= p.seqlen_k);
  if (uneven && T::kTailed) {
    int64_t const head_bytes = int64_t(streamed_bytes<T>(p, group, enough_ctas * T::kBlockRows));
    return count_tailed_head_splits(lists, blocks, group, p.seqlen_q, head_bytes, enough_ctas);
  }
  int64_t const enough = uneven ? enough_uneven_ctas(blocks, enough_ctas) : enough_ctas;
  return count_head_splits(blocks * lists, group, enough);
}

}  // namespace attention_autotuner

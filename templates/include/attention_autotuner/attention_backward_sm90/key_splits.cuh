// How many CTAs share a block of keys, each with some of the query heads of its group.
#pragma once

#include <cmath>
#include <cstdint>

#include "attention_autotuner/attention_backward_sm90/sections.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/host/head_splits.cuh"
#include "attention_autotuner/score/modifications.cuh"

namespace attention_autotuner {

inline constexpr int kMostSplitBlocks = 128;  // of a head, beyond which parts of dK and dV take too much memory

// How many blocks of keys a head has, and all heads, and how many queries see them. Of packed sequences those of the
// longest, and as many like these as are the work of all, if their lengths lie about the geometric mean of the mean and
// the greatest one.
template <bool kPacked>
struct KeyBlocks {
  int64_t of_head, all, queries;
  int filling;  // of all, as many as fill a GPU where CTAs claim them: nearly two an SM

  template <typename Params>
  KeyBlocks(Params const& p, int block, int enough_ctas)
      : of_head(divide_up(p.seqlen_k, block)),
        all(of_head * p.heads_kv * p.batch),
        queries(p.seqlen_q),
        filling(divide_up(19 * enough_ctas, 10)) {
    if constexpr (kPacked) {
      double const greatest = p.seqlen_k < p.total_k ? p.seqlen_k : p.total_k;
      double const root = std::sqrt(p.total_k / (p.batch * greatest)), shorter = root < 1 ? root : 1.0;
      of_head = divide_up(int(greatest), block);
      all = int64_t(shorter * p.heads_kv * p.total_k) / block;
      queries = int64_t(shorter * p.seqlen_q);
      filling = divide_up(16 * enough_ctas, 10);  // as short sequences come last
    }
  }
};

// The twin of head_splits() in attention_backward_sm90/resources.py. Causal blocks are of unlike length but in a
// window; of documents that is not known here. A list with a tail is full with fewer.
template <typename KernelParams, typename T, typename Params>
int count_key_splits(Params const& p, int enough_ctas) {
  KeyBlocks<T::kPacked> const counted(p, T::kBlockRows, enough_ctas);
  int64_t const blocks = counted.of_head;
  int const group = p.heads_q / p.heads_kv;
  bool uneven = p.causal && !kHasSpans<KernelParams> && blocks <= kMostSplitBlocks;
  if constexpr (kHasWindow<KernelParams>) uneven = uneven && (p.window_left < 0 || p.window_left >= p.seqlen_k);
  if (uneven && T::kUnevenParts) {
    int64_t const head_bytes = int64_t(streamed_bytes<T>(p, group, enough_ctas * T::kBlockRows));
    return count_tailed_head_splits(counted.all, blocks, group, counted.queries, head_bytes, counted.filling);
  }
  int64_t const enough = uneven ? enough_uneven_ctas(blocks, enough_ctas) : enough_ctas;
  return count_head_splits(counted.all, group, enough);
}

}  // namespace attention_autotuner

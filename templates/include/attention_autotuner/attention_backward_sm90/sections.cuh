// How many heads' tiles are side by side in the list of a pass of attention's backward of family sm90.
#pragma once

#include "attention_autotuner/abi.h"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/scheduler.cuh"
#include "attention_autotuner/host/checks.cuh"

namespace attention_autotuner {

// As many as divide all of them and whose streamed tensors, and sums of dQ, fit in L2 together; one where a head's row
// blocks come in turn. With a mask, the batch of each, which shares it. The twin of section_heads() in cost.py.
template <typename Config, typename T, bool kPacked, typename Params>
int section_heads(Params const& p, int heads, int splits) {
  int const sharing = T::kMasked ? p.batch : 1, all = heads / sharing;
  if (Config::kCtaOrder != CtaOrder::kLongestFirst) return sharing;
  constexpr double kSectionBytes = 24e6;
  int const rows_q = rows_of_queries<kPacked>(p), rows_k = rows_of_keys<kPacked>(p);
  int const streamed = T::kByQueries ? rows_k : rows_q * (p.heads_q / p.heads_kv / splits);
  double const bytes = double(streamed) * (2 * (p.dim_qk + p.dim_v) + (T::kSharesDq ? 4 * p.dim_qk : 0));
  int section = minimum(all, maximum(1, int(kSectionBytes / (bytes * sharing))));
  while (all % section != 0) --section;
  return section * sharing;
}

}  // namespace attention_autotuner

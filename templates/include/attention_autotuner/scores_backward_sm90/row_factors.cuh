// Factors of rows for retnet's backward in family sm90, where r is a constant: base = 1 / r for each query, and 0 for
// rows beyond the sequence. The kernel of common/preprocess.cuh reads O and dO as well, for r with a gradient.
#pragma once

#include "attention_autotuner/abi.h"
#include "attention_autotuner/common/backward_arguments.cuh"
#include "attention_autotuner/score/lse_delta.cuh"
#include "attention_autotuner/sm90/roles.cuh"

namespace attention_autotuner {

inline constexpr int kFactorThreads = 256;

// One thread for each row, padding included.
template <typename Config>
__global__ void __launch_bounds__(kFactorThreads) retnet_backward_factors(
    BackwardArguments<attention_autotuner_retnet_backward_params> const __grid_constant__ arguments, int rows) {
  using Rows = LseDelta<Config::kScoreMod>;
  begin_call();
  auto const& p = arguments.params;
  int const place = int(blockIdx.x) * kFactorThreads + int(threadIdx.x);
  if (place >= rows) return;
  int const head = place / arguments.lse_delta_rows, row = place % arguments.lse_delta_rows;
  float2 factors = make_float2(Rows::neutral_base(), 0.0f);
  if (row < p.seqlen_q) factors = Rows::find(p, int64_t(head) * p.seqlen_q + row, 0.0f);
  arguments.base[place] = factors.x;
  arguments.shift[place] = factors.y;
}

}  // namespace attention_autotuner

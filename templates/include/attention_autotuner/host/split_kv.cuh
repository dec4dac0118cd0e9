// Split KV on the host: how many CTAs share the keys of a tile of rows, where their results lie, and the launch that
// combines these.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/scheduler.cuh"
#include "attention_autotuner/common/split_combine.cuh"
#include "attention_autotuner/host/entry.cuh"
#include "attention_autotuner/host/workspace.cuh"

namespace attention_autotuner {

// The splits of a launch of a kernel that has them, with steps of BlockN keys and results of Columns padded columns.
template <bool kSplitKv, int BlockN, int Columns, typename Params, bool kPacked, bool kUneven = false>
struct SplitKv {
  using Results = SplitResultsOf<kUneven>;
  static int64_t rows(Params const& p) {
    return int64_t(batch_of<kPacked>(p)) * p.heads_q * rows_of_queries<kPacked>(p);
  }
  // No more than there are tiles of keys. Each has results of all rows.
  static int count(Params const& p) {
    if constexpr (kSplitKv) {
      if (rows(p) <= INT32_MAX) return maximum(1, minimum(p.splits, divide_up(p.seqlen_k, BlockN)));
    }
    return 1;
  }

  // The results of all splits, in a workspace.
  struct Partial {
    float *output, *lse;
    int* row_splits;
    Partial(WorkspaceLayout& layout, Params const& p)
        : output(layout.take<float>(count(p) > 1, count(p) * rows(p) * Columns)),
          lse(layout.take<float>(count(p) > 1, count(p) * rows(p))),
          row_splits(layout.take<int>(kUneven && count(p) > 1, rows(p))) {}
  };

  // The second kernel of a launch with splits: what it takes, and its CTAs of kCombineThreads.
  static Results results(Params const& p, Partial const& partial) {
    SplitResults const even = {partial.output,
                               partial.lse,
                               count(p),
                               int(rows(p)),
                               combine_warps_log2(count(p)),
                               Divider::by(rows_of_queries<kPacked>(p)),
                               Divider::by(p.heads_q),
                               p.o.data,
                               p.o.stride_batch,
                               p.o.stride_head,
                               p.o.stride_row,
                               p.dim_v,
                               p.lse};
    if constexpr (kUneven) {
      return {even, partial.row_splits};
    } else {
      return even;
    }
  }
  static int combine_ctas(Params const& p) {
    return divide_up(int(rows(p)), kCombineWarps >> combine_warps_log2(count(p)));
  }
  static int32_t combine(void (*kernel)(SplitResults), Params const& p, Partial const& partial, cudaStream_t stream) {
    kernel<<<combine_ctas(p), kCombineThreads, 0, stream>>>(results(p, partial));
    return cuda_status(cudaGetLastError());
  }
};

}  // namespace attention_autotuner

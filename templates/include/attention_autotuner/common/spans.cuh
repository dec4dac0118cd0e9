// The keys that each query sees, and the queries that see each key, where documents or a prefix say it: a span of each.
//
// Ids of documents never decrease. So what a row sees is a span, as in a window, and neither its begin nor its end lies
// before that of the row before: kernels tell by the first and the last row of a tile which tiles they skip, and which
// ones need no mask. A kernel of its own finds all spans first, by a search of the ids; they are of a row each, not of
// a pair.
#pragma once

#include <cstdint>

#include "attention_autotuner/common/key_range.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/score/score_mod.cuh"

namespace attention_autotuner {

inline constexpr int kSpanThreads = 128;

// The range of a batch entry's keys, with the spans of its queries. Params have row_spans and seqlen_q.
template <bool kKeyBounds>
struct SpannedRange : KeyRange<kKeyBounds> {
  int2 const* spans;

  template <typename Params>
  __device__ __forceinline__ void find(Params const& params, int batch) {
    KeyRange<kKeyBounds>::find(params, batch);
    spans = params.row_spans + int64_t(batch) * params.seqlen_q;
  }
  // The keys that a query sees, counted from the first of the range.
  template <typename Params>
  __device__ __forceinline__ int visible_first(Params const& params, int query) const {
    return spans[minimum(query, int(params.seqlen_q) - 1)].x - this->begin();
  }
  template <typename Params>
  __device__ __forceinline__ int visible_end(Params const& params, int query) const {
    return spans[minimum(query, int(params.seqlen_q) - 1)].y - this->begin();
  }
};

// How many of the ids are below one, or not above it: at least `low`, at most `high`. Every round probes at several
// places together, since each waits for memory as long as one alone would.
template <bool kNotAbove>
__device__ __forceinline__ int count_ids(int32_t const* ids, int low, int high, int32_t id) {
  constexpr int kProbes = 15;
#pragma unroll 1
  while (low < high) {
    int const step = (high - low + kProbes) / (kProbes + 1);
    int passed = 0;
#pragma unroll
    for (int i = 1; i <= kProbes; ++i) {
      int const at = low + i * step - 1;
      if (at < high) passed += kNotAbove ? ids[at] <= id : ids[at] < id;
    }
    low += passed * step;
    if (passed < kProbes) high = minimum(high, low + step - 1);
  }
  return low;
}

// Leaves of a span what is of the document of a row.
template <typename Params>
__device__ __forceinline__ int2 within_document(Params const& p, int batch, int row, int2 span) {
  if (p.document_ids == nullptr) return span;
  int32_t const* const ids = p.document_ids + int64_t(batch) * p.seqlen_k;
  return {maximum(span.x, count_ids<false>(ids, 0, row, ids[row])),
          minimum(span.y, count_ids<true>(ids, row + 1, p.seqlen_k, ids[row]))};
}

// Params have windows as with_window leaves them.
template <bool kKeyBounds, typename Params>
__device__ __forceinline__ int2 span_of_query(Params const& p, int batch, int query) {
  KeyRange<kKeyBounds> range;
  range.find(p, batch);
  int const first = range.begin(), end = first + range.length(p), diagonal = query + range.causal_offset(p) + first;
  int2 span{maximum(diagonal - p.window_left, first), minimum(minimum(diagonal, end) + p.window_right + 1, end)};
  if (p.prefix_lens != nullptr) span.y = maximum(span.y, minimum(p.prefix_lens[batch], end));
  return within_document(p, batch, query, span);
}
template <typename Params>
__device__ __forceinline__ int2 span_of_key(Params const& p, int batch, int key) {
  int const diagonal = key - p.causal_offset;
  int2 span{maximum(diagonal - p.window_right, 0),
            minimum(minimum(diagonal, int(p.seqlen_q)) + p.window_left + 1, int(p.seqlen_q))};
  if (p.prefix_lens != nullptr && key < p.prefix_lens[batch]) span.x = 0;
  return within_document(p, batch, key, span);
}

// Spans of all queries and, for a backward, of all keys; `claimed` is set to 0, if there is one. The kernel behind may
// start at once, where it waits for the spans itself.
template <typename Config, bool kBackward, typename Params>
__global__ void __launch_bounds__(kSpanThreads)
    find_spans(Params const __grid_constant__ params, int2* row_spans, int2* key_spans, int* claimed) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
  int64_t const index = int64_t(blockIdx.x) * kSpanThreads + threadIdx.x;
  int64_t const queries = int64_t(params.batch) * params.seqlen_q, key = index - queries;
  if (index == 0 && claimed != nullptr) *claimed = 0;
  if (index < queries) {
    int const batch = int(index / params.seqlen_q);
    row_spans[index] = span_of_query<!kBackward>(params, batch, int(index - int64_t(batch) * params.seqlen_q));
  } else if (kBackward && key < int64_t(params.batch) * params.seqlen_k) {
    int const batch = int(key / params.seqlen_k);
    key_spans[key] = span_of_key(params, batch, int(key - int64_t(batch) * params.seqlen_k));
  }
}

// How many spans there are.
template <bool kBackward, typename Params>
inline int64_t count_spans(Params const& p) {
  return int64_t(p.batch) * (int64_t(p.seqlen_q) + (kBackward ? p.seqlen_k : 0));
}
// Where they lie, of which there are so many from `spans` on: the params of the kernels that come after.
template <typename Abi>
inline SpannedParams<Abi> with_spans(Abi const& params, int2* spans) {
  SpannedParams<Abi> spanned;
  static_cast<Abi&>(spanned) = params;
  spanned.row_spans = spans;
  spanned.key_spans = spans + int64_t(params.batch) * params.seqlen_q;
  return spanned;
}
template <typename Config, bool kBackward, typename Params>
inline cudaError_t launch_spans(Params const& params, int2* spans, cudaStream_t stream, int* claimed = nullptr) {
  int64_t const ctas = (count_spans<kBackward>(params) + kSpanThreads - 1) / kSpanThreads;
  if (ctas > INT32_MAX) return cudaErrorInvalidValue;
  find_spans<Config, kBackward, Params>
      <<<int(ctas), kSpanThreads, 0, stream>>>(params, spans, spans + int64_t(params.batch) * params.seqlen_q, claimed);
  return cudaGetLastError();
}

}  // namespace attention_autotuner

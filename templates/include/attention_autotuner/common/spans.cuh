// The keys that each query sees, and the queries that see each key, where documents or a prefix say it: a span of each.
//
// Ids of documents never decrease. So what a row sees is a span, as in a window, and neither its begin nor its end lies
// before that of the row before: kernels tell by the first and the last row of a tile which tiles they skip, and which
// ones need no mask. A kernel of its own finds all spans first, by a search of the ids; they are of a row each, not of
// a pair.
#pragma once

#include <cstdint>

#include "attention_autotuner/common/dependent_launch.cuh"
#include "attention_autotuner/common/key_range.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/host/early_launch.cuh"
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

// The rows of one batch entry whose spans a CTA finds: [begin, end), at most one a thread.
struct SpannedRows {
  int begin, end;
  // The row of a thread. Threads that have none repeat the last one.
  __device__ __forceinline__ int of_thread() const { return minimum(begin + int(threadIdx.x), end - 1); }
};

// One end of a search of ids by all threads of a CTA: how many are below one, or not above it, at least `low` and at
// most `high`.
struct SearchedIds {
  static constexpr int kPlaces = 2;  // of a thread, in a round
  static constexpr int kProbes = kSpanThreads * kPlaces;
  static_assert(kProbes < 1 << 15);
  int low, high, step;
  int32_t ids[kPlaces];

  __device__ __forceinline__ bool open() const { return low < high; }
  __device__ __forceinline__ int place(int i) const {
    return low + (i * kSpanThreads + int(threadIdx.x) + 1) * step - 1;
  }
  __device__ __forceinline__ void load(int32_t const* from) {
    step = (high - low + kProbes) / (kProbes + 1);
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) {
      if (open() && place(i) < high) ids[i] = from[place(i)];
    }
  }
  // By the threads of a warp.
  template <bool kNotAbove>
  __device__ __forceinline__ int count(int32_t id) const {
    int passed = 0;
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) {
      bool const passes = open() && place(i) < high && (kNotAbove ? ids[i] <= id : ids[i] < id);
      passed += __popc(__ballot_sync(0xffffffffu, passes));
    }
    return passed;
  }
  __device__ __forceinline__ void narrow(int passed) {
    if (!open()) return;
    low += passed * step;
    if (passed < kProbes) high = minimum(high, low + step - 1);
  }
};

inline constexpr int kSpanWarps = kSpanThreads / 32;
inline constexpr int kDocumentWords = 3 * kSpanWarps;  // of shared memory

// Where the document of a thread's row begins and ends. Called by all threads of a CTA; `shared` holds kDocumentWords.
//
// Every round of a search waits for memory, however many places it compares. So all threads of a CTA search together,
// for the begin of its first row's document and the end of its last row's, and two rounds do for 64k rows. Where
// documents begin in between, neighboring ids differ.
__device__ __forceinline__ int2 find_document(int32_t const* ids, int total_rows, SpannedRows const& rows,
                                              int* shared) {
  SearchedIds before{0, rows.begin, 0}, after{rows.end, total_rows, 0};
  int const row = rows.of_thread(), warp = int(threadIdx.x) / 32;
  int32_t const first_id = ids[rows.begin], last_id = ids[rows.end - 1];
  int32_t const id = ids[row], id_before = ids[maximum(row - 1, rows.begin)];
#pragma unroll 1
  for (int round = 0; before.open() || after.open(); ++round) {
    before.load(ids);
    after.load(ids);
    // What both sides passed is counted in halves of a word. Rounds alternate between the words.
    int const passed = before.template count<false>(first_id) + (after.template count<true>(last_id) << 16);
    int* const counts = shared + (1 + round % 2) * kSpanWarps;
    if (threadIdx.x % 32 == 0) counts[warp] = passed;
    __syncthreads();
    int sum = 0;
#pragma unroll
    for (int i = 0; i < kSpanWarps; ++i) sum += counts[i];
    before.narrow(sum & 0xffff);
    after.narrow(sum >> 16);
  }
  uint32_t const begins = __ballot_sync(0xffffffffu, id != id_before);
  if (threadIdx.x % 32 == 0) shared[warp] = int(begins);
  __syncthreads();
  // The last begin up to the thread's row, and the first one behind it.
  int2 document{before.low, after.low};
  uint32_t const behind = 0xfffffffeu << (threadIdx.x % 32);
#pragma unroll
  for (int i = 0; i < kSpanWarps; ++i) {
    uint32_t const set = uint32_t(shared[i]), up_to = i < warp ? set : i == warp ? set & ~behind : 0;
    if (up_to != 0) document.x = rows.begin + 32 * i + 31 - __clz(int(up_to));
  }
#pragma unroll
  for (int i = kSpanWarps - 1; i >= 0; --i) {
    uint32_t const set = uint32_t(shared[i]), from = i > warp ? set : i == warp ? set & behind : 0;
    if (from != 0) document.y = rows.begin + 32 * i + __ffs(int(from)) - 1;
  }
  return document;
}

// Where a window and a prefix let a query, or a key, see the other. Params have windows as with_window leaves them.
template <bool kKeyBounds, typename Params>
__device__ __forceinline__ int2 span_of_query(Params const& p, int batch, int query) {
  KeyRange<kKeyBounds> range;
  range.find(p, batch);
  int const first = range.begin(), end = first + range.length(p), diagonal = query + range.causal_offset(p) + first;
  int2 span{maximum(diagonal - p.window_left, first), minimum(minimum(diagonal, end) + p.window_right + 1, end)};
  if (p.prefix_lens != nullptr) span.y = maximum(span.y, minimum(p.prefix_lens[batch], end));
  return span;
}
template <typename Params>
__device__ __forceinline__ int2 span_of_key(Params const& p, int batch, int key) {
  int const diagonal = key - p.causal_offset;
  int2 span{maximum(diagonal - p.window_right, 0),
            minimum(minimum(diagonal, int(p.seqlen_q)) + p.window_left + 1, int(p.seqlen_q))};
  if (p.prefix_lens != nullptr && key < p.prefix_lens[batch]) span.x = 0;
  return span;
}

// CTAs of the rows of a batch entry.
template <bool kBackward, typename Params>
__host__ __device__ inline int2 span_ctas(Params const& p) {
  return {divide_up(p.seqlen_q, kSpanThreads), kBackward ? divide_up(p.seqlen_k, kSpanThreads) : 0};
}

// Spans of all queries and, for a backward, of all keys; `claimed` is set to 0, if there is one. The kernel behind may
// start at once, where it waits for the spans itself.
template <typename Config, bool kBackward, typename Params>
__global__ void __launch_bounds__(kSpanThreads)
    find_spans(Params const __grid_constant__ params, int2* row_spans, int2* key_spans, int* claimed) {
  begin_call();
  __shared__ int shared[kDocumentWords];
  if (blockIdx.x == 0 && threadIdx.x == 0 && claimed != nullptr) *claimed = 0;
  int2 const ctas = span_ctas<kBackward>(params);
  int const batch = int(blockIdx.x) / (ctas.x + ctas.y), cta = int(blockIdx.x) - batch * (ctas.x + ctas.y);
  bool const of_keys = kBackward && cta >= ctas.x;
  int const total = of_keys ? params.seqlen_k : params.seqlen_q;
  int const begin = (of_keys ? cta - ctas.x : cta) * kSpanThreads;
  SpannedRows const rows{begin, minimum(begin + kSpanThreads, total)};
  int const row = rows.of_thread();
  int2 span = of_keys ? span_of_key(params, batch, row) : span_of_query<!kBackward>(params, batch, row);
  if (params.document_ids != nullptr) {
    int2 const document =
        find_document(params.document_ids + int64_t(batch) * params.seqlen_k, params.seqlen_k, rows, shared);
    span = {maximum(span.x, document.x), minimum(span.y, document.y)};
  }
  if (begin + int(threadIdx.x) < total) {
    (of_keys ? key_spans : row_spans)[int64_t(batch) * total + row] = span;
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
inline int32_t launch_spans(bool early, Params const& params, int2* spans, cudaStream_t stream,
                            int* claimed = nullptr) {
  int2 const ctas_of_entry = span_ctas<kBackward>(params);
  int64_t const ctas = int64_t(params.batch) * (ctas_of_entry.x + ctas_of_entry.y);
  if (ctas > INT32_MAX) return cuda_status(cudaErrorInvalidValue);
  return EarlyLaunch::start(early, find_spans<Config, kBackward, Params>, int(ctas), kSpanThreads, 0, stream, params,
                            spans, spans + int64_t(params.batch) * params.seqlen_q, claimed);
}

}  // namespace attention_autotuner

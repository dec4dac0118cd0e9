// The keys that the rows of one batch entry may see, where a kernel is compiled for key bounds.
//
// Kernels count keys from the first of them, so that bounds change where K and V begin, how many rows they have and
// where the diagonal hangs, and nothing else: there is no mask at the lower end, and no tile below it is read.
#pragma once

#include <type_traits>

#include "attention_autotuner/common/scalars.cuh"

namespace attention_autotuner {

// Whether a config asks for key bounds; those rendered without say nothing of them.
template <typename Config, typename = void>
inline constexpr bool kHasKeyBounds = false;
template <typename Config>
inline constexpr bool kHasKeyBounds<Config, std::void_t<decltype(Config::kKeyBounds)>> = Config::kKeyBounds;

// The range of a batch entry. Without bounds it holds nothing: params say it all.
template <bool kKeyBounds>
struct KeyRange {
  template <typename Params>
  __device__ __forceinline__ void find(Params const&, int) {}
  __device__ __forceinline__ static constexpr int begin() { return 0; }
  __device__ __forceinline__ static constexpr int query_begin() { return 0; }
  template <typename Params>
  __device__ __forceinline__ int queries(Params const& params) const {
    return params.seqlen_q;
  }
  template <typename Params>
  __device__ __forceinline__ int length(Params const& params) const {
    return params.seqlen_k;
  }
  template <typename Params>
  __device__ __forceinline__ int causal_offset(Params const& params) const {
    return params.causal_offset;
  }
};

template <>
struct KeyRange<true> {
  int first, keys, offset;
  int diagonal;  // row i's bottom-right diagonal is key i + diagonal of k

  // Params have seqlens_k, starts_k, causal_from_end, seqlen_q, seqlen_k and causal_offset.
  template <typename Params>
  __device__ __forceinline__ void find(Params const& params, int batch) {
    auto within = [&](int position) { return minimum(maximum(position, 0), int(params.seqlen_k)); };
    int const end = params.seqlens_k == nullptr ? params.seqlen_k : within(params.seqlens_k[batch]);
    first = params.starts_k == nullptr ? 0 : within(params.starts_k[batch]);
    keys = maximum(end - first, 0);
    diagonal = end - params.seqlen_q;
    offset = (params.causal_from_end ? diagonal : params.causal_offset) - first;
  }
  // Leaves out the first `count` keys of the range.
  __device__ __forceinline__ void skip(int count) {
    first += count;
    keys = maximum(keys - count, 0);
    offset -= count;
  }
  __device__ __forceinline__ int begin() const { return first; }
  __device__ __forceinline__ static constexpr int query_begin() { return 0; }
  template <typename Params>
  __device__ __forceinline__ int queries(Params const& params) const {
    return params.seqlen_q;
  }
  template <typename Params>
  __device__ __forceinline__ int length(Params const&) const {
    return keys;
  }
  // Row i sees the keys up to i + causal_offset of the range.
  template <typename Params>
  __device__ __forceinline__ int causal_offset(Params const&) const {
    return offset;
  }
};

}  // namespace attention_autotuner

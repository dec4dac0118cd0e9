// What bends the scores of attention before the softmax: the modifications that a kernel is compiled with, and their
// values in its params.
//
// A modification is a class of a dozen lines, made of a launch's params for one batch entry and one query head:
//
//   Modification(params, batch, head)          reads its values
//   float apply(float score, ScorePlace at)    the score that takes the place of `score`; scores come and go in powers
//                                              of two, that is times log2(e), after the scale
//   float derivative(float score, float result)   of result = apply(score, at) by score; left out where it is 1
//
// Both families apply them alike: forward kernels to the accumulators of Q K^T, before the mask and the row maximum;
// backward kernels to the scores they compute again, whose gradient is multiplied by the derivative. A config names
// them in the order in which they are applied; see kernels/scores_forward_sm80 and docs/score_modifications.md.
//
// A kernel with any modification takes windows, too: WindowedParams is true for its params.
#pragma once

#include <type_traits>

#include "attention_autotuner/abi.h"
#include "attention_autotuner/common/scalars.cuh"

namespace attention_autotuner {

// Where a score stands: row of q, row of k, and how far the key is before the row's bottom-right diagonal, row +
// seqlen_k - seqlen_q - column, and past it, which is minus that.
struct ScorePlace {
  int row, column;
  float distance;
  int past;
};

// What modifications without state and without a derivative share.
struct PlainModification {
  static constexpr bool kHasDerivative = false;
  __device__ __forceinline__ static float apply(float score, ScorePlace const&) { return score; }
  __device__ __forceinline__ static float derivative(float, float) { return 1.0f; }
};

// The keys that a row sees are those from its diagonal - window_left to its diagonal + window_right: kernels find them
// by formula, and nothing is left to do to a score.
struct Window : PlainModification {
  template <typename Params>
  __device__ __forceinline__ Window(Params const&, int, int) {}
};

// Sequences of their own lengths, one after the other: which rows and keys there are, and nothing else. See
// common/sequences.cuh.
struct Packed : PlainModification {
  template <typename Params>
  __device__ __forceinline__ Packed(Params const&, int, int) {}
};

// The keys that a row sees are a span, by documents or a prefix, too, which a kernel before has found: see
// common/spans.cuh.
struct Spans : PlainModification {
  template <typename Params>
  __device__ __forceinline__ Spans(Params const&, int, int) {}
};

// c tanh(score / c)
struct Softcap {
  static constexpr bool kHasDerivative = true;
  float cap, inverse;  // in powers of two

  template <typename Params>
  __device__ __forceinline__ Softcap(Params const& params, int, int)
      : cap(params.softcap * kLog2E), inverse(1.0f / (params.softcap * kLog2E)) {}
  __device__ __forceinline__ float apply(float score, ScorePlace const&) const {
    return cap * hyperbolic_tangent(score * inverse);
  }
  __device__ __forceinline__ float derivative(float, float result) const {
    float const share = result * inverse;
    return fmaf(-share, share, 1.0f);
  }
};

// score - slope |distance|
struct AlibiSlopes : PlainModification {
  float slope;  // in powers of two

  template <typename Params>
  __device__ __forceinline__ AlibiSlopes(Params const& params, int batch, int head)
      : slope(params.alibi_slopes[(params.alibi_per_batch ? batch * params.heads_q : 0) + head] * kLog2E) {}
  __device__ __forceinline__ float apply(float score, ScorePlace const& at) const {
    return fmaf(-slope, fabsf(at.distance), score);
  }
};

// score + table[clamp(past, -D, D) + D], read through L1
struct BiasTable : PlainModification {
  static constexpr int kMaxDistance = 1 << 16;  // D at most
  float const* middle;                          // of the head's entries
  int most;                                     // D

  template <typename Params>
  __device__ __forceinline__ BiasTable(Params const& params, int, int head)
      : middle(middle_of(params, head)), most(params.bias_distance) {}
  // Of anything that has the table's fields.
  template <typename Params>
  __device__ __forceinline__ static float const* middle_of(Params const& params, int head) {
    return params.bias_table + int64_t(head) * (2 * params.bias_distance + 1) + params.bias_distance;
  }
  __device__ __forceinline__ float apply(float score, ScorePlace const& at) const {
    return fmaf(middle[minimum(maximum(at.past, -most), most)], kLog2E, score);
  }
};

// A tensor for every pair: bytes that hide keys, or numbers that are added to scores that are otherwise as the softmax
// takes them. Kernels read it in patches, see score/mask_patch.cuh.
struct AttnMask : PlainModification {
  static constexpr int kKinds = 4;  // see abi.h
  char const* data;
  int64_t stride_row, stride_column;
  int rows, columns, kind;
  bool in_pairs;  // bytes or 16-bit numbers of two keys, the first of an even place, may be read at a time

  template <typename Params>
  __device__ __forceinline__ AttnMask(Params const& params, int batch, int head)
      : stride_row(params.attn_mask.stride_row),
        stride_column(params.attn_mask_stride_column),
        rows(params.seqlen_q),
        columns(params.seqlen_k),
        kind(params.attn_mask_kind) {
    int64_t const first = batch * params.attn_mask.stride_batch + head * params.attn_mask.stride_head;
    data = static_cast<char const*>(params.attn_mask.data) + first * (kind == 0 ? 1 : kind == 1 ? 4 : 2);
    in_pairs = kind != 1 && stride_column == 1 && (columns | stride_row) % 2 == 0 &&
               reinterpret_cast<uintptr_t>(data) % (kind == 0 ? 2 : 4) == 0;
  }
};

// A logit of the head that joins the denominator and LSE: kernels add it at the end of a row, and nothing is done to a
// score. Its gradient is in common/sink_gradient.cuh.
struct Sinks : PlainModification {
  template <typename Params>
  __device__ __forceinline__ Sinks(Params const&, int, int) {}
  // In powers of two.
  template <typename Params>
  __device__ __forceinline__ static float of(Params const& params, int head) {
    return params.sinks[head] * kLog2E;
  }
};

template <typename... Mods>
struct Modifications : Mods... {
  static constexpr int kCount = sizeof...(Mods);
  static constexpr bool kAny = kCount > 0;
  static constexpr bool kHasDerivative = (Mods::kHasDerivative || ...);
  template <typename Mod>
  static constexpr bool kHas = (std::is_same_v<Mod, Mods> || ...);

  template <typename Params>
  __device__ __forceinline__ Modifications(Params const& params, int batch, int head) : Mods(params, batch, head)... {}

  __device__ __forceinline__ float apply(float score, ScorePlace const& at) const {
    ((score = Mods::apply(score, at)), ...);
    return score;
  }
  // The same, and its derivative.
  __device__ __forceinline__ float apply(float score, ScorePlace const& at, float& derivative) const {
    derivative = 1.0f;
    auto step = [&](auto const& mod) {
      float const result = mod.apply(score, at);
      if constexpr (std::decay_t<decltype(mod)>::kHasDerivative) derivative *= mod.derivative(score, result);
      score = result;
    };
    (step(static_cast<Mods const&>(*this)), ...);
    return score;
  }
};

// The modifications of a config; those rendered without say nothing of them.
template <typename Config, typename = void>
struct ModificationsOf {
  using Type = Modifications<>;
};
template <typename Config>
struct ModificationsOf<Config, std::void_t<typename Config::Modifications>> {
  using Type = typename Config::Modifications;
};
template <typename Config>
inline constexpr bool kIsModified = ModificationsOf<Config>::Type::kAny;

template <typename Config>
inline constexpr bool kIsPacked = ModificationsOf<Config>::Type::template kHas<Packed>;
template <typename Config>
inline constexpr bool kIsSpanned = ModificationsOf<Config>::Type::template kHas<Spans>;
// Whether there is any other modification than packing.
template <typename Config>
inline constexpr bool kBendsScores = ModificationsOf<Config>::Type::kCount > int(kIsPacked<Config>);

template <typename Config>
inline constexpr bool kHasBiasTable = ModificationsOf<Config>::Type::template kHas<BiasTable>;
template <typename Config>
inline constexpr bool kHasAttnMask = ModificationsOf<Config>::Type::template kHas<AttnMask>;

// Whether params have windows. Kernels of these find them as with_window leaves them.
template <typename Params, typename = void>
inline constexpr bool kHasWindow = false;
template <typename Params>
inline constexpr bool kHasWindow<Params, std::void_t<decltype(Params::window_left)>> = true;

// Whether params have a bias table.
template <typename Params, typename = void>
inline constexpr bool kTakesBias = false;
template <typename Params>
inline constexpr bool kTakesBias<Params, std::void_t<decltype(Params::bias_table)>> = true;
// And whether they have spans, of the batch entry that a kernel works on.
template <typename Params, typename = void>
inline constexpr bool kHasSpans = false;
template <typename Params>
inline constexpr bool kHasSpans<Params, std::void_t<decltype(Params::key_spans)>> = true;

inline constexpr int kUnbounded = (1 << 30) - 2;  // sums with rows and offsets stay within 32 bits

// Params with the causal mask as part of the window, and distances in place of -1.
template <typename Params, std::enable_if_t<kHasWindow<Params>, int> = 0>
inline Params with_window(Params params) {
  auto bounded = [](int32_t distance) { return distance < 0 ? kUnbounded : minimum(distance, kUnbounded); };
  params.window_left = bounded(params.window_left);
  params.window_right = params.causal ? 0 : bounded(params.window_right);
  return params;
}
template <typename Params, std::enable_if_t<!kHasWindow<Params>, int> = 0>
inline Params const& with_window(Params const& params) {
  return params;
}

}  // namespace attention_autotuner

// The score modification that kernels are compiled for: it makes W of O = W V from the scores S = Q K^T.
#pragma once

#include "attention_autotuner/abi.h"

namespace attention_autotuner {

enum class ScoreMod {
  kSoftmax,  // W = softmax(scale S)
  kMasked,   // W = X / r, X = scale S * M with M in memory, r = clamp(rowsum |X|, 1, r_clamp_max)
  kDecayed,  // the same with M_ij = gamma^(i + causal_offset - j) at and below the diagonal, never stored
};

// The arguments of a direction's kernels.
template <ScoreMod kScoreMod>
struct ScoreModParams {
  using Forward = attention_autotuner_retnet_forward_params;
  using Backward = attention_autotuner_retnet_backward_params;
};
template <>
struct ScoreModParams<ScoreMod::kSoftmax> {
  using Forward = attention_autotuner_attention_forward_params;
  using Backward = attention_autotuner_attention_backward_params;
};

// The parts of kernels of traits T that differ between score modifications: see the specialisations in
// score/softmax.cuh, score/softmax_backward.cuh, score/masked.cuh and score/masked_backward.cuh.
template <ScoreMod kScoreMod, typename T>
struct ForwardScoreMod;
template <ScoreMod kScoreMod, typename T>
struct BackwardScoreMod;
template <ScoreMod kScoreMod>
struct LseDelta;

// What the scores are multiplied by.
inline __host__ __device__ float score_scale(attention_autotuner_attention_forward_params const& p) {
  return p.softmax_scale;
}
inline __host__ __device__ float score_scale(attention_autotuner_attention_backward_params const& p) {
  return p.softmax_scale;
}
template <typename Params>
inline __host__ __device__ float score_scale(Params const& p) {
  return p.scale;
}

}  // namespace attention_autotuner

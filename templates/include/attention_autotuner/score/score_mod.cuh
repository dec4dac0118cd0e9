// The score modification that kernels are compiled for: it makes W of O = W V from the scores S = Q K^T.
#pragma once

#include <cstddef>

#include "attention_autotuner/abi.h"
#include "attention_autotuner/score/modifications.cuh"

namespace attention_autotuner {

enum class ScoreMod {
  kSoftmax,  // W = softmax(scale S)
  kMasked,   // W = X / r, X = scale S * M with M in memory, r = clamp(rowsum |X|, 1, r_clamp_max)
  kDecayed,  // the same with M_ij = gamma^(i + causal_offset - j) at and below the diagonal, never stored
};

// Attention's params as far as ABI 1002 to 1006 have them: kernels that read no later field take these, so that
// the later ones change no machine code of theirs. Each version adds fields to the one before it, at the places that
// they have in the C struct (tests/build/test_params_versions.py compares all of them).
struct AttentionForwardParams1002 {
  uint32_t struct_size;
  uint32_t abi_version;
  attention_autotuner_tensor q, k, v, o;
  float* lse;
  int32_t batch, heads_q, heads_kv, seqlen_q, seqlen_k, dim_qk, dim_v, causal, causal_offset;
  float softmax_scale;
};
struct AttentionForwardParams1003 : AttentionForwardParams1002 {
  int32_t const *seqlens_k, *starts_k;
  int32_t causal_from_end, splits;
};
struct AttentionForwardParams1004 : AttentionForwardParams1003 {
  int32_t window_left, window_right;
  float softcap;
  int32_t alibi_per_batch;
  float const *alibi_slopes, *sinks;
  attention_autotuner_tensor attn_mask;
  int64_t attn_mask_stride_column;
  int32_t attn_mask_kind;
};
struct AttentionForwardParams1005 : AttentionForwardParams1004 {
  int32_t const *cu_seqlens_q, *cu_seqlens_k;
  int32_t total_q, total_k;
};
struct AttentionBackwardParams1002 {
  uint32_t struct_size;
  uint32_t abi_version;
  attention_autotuner_tensor q, k, v, o, dout, dq, dk, dv;
  float const *lse, *dlse;
  int32_t batch, heads_q, heads_kv, seqlen_q, seqlen_k, dim_qk, dim_v, causal, causal_offset;
  float softmax_scale;
};
struct AttentionBackwardParams1004 : AttentionBackwardParams1002 {
  int32_t window_left, window_right;
  float softcap;
  int32_t alibi_per_batch;
  float const *alibi_slopes, *sinks;
  attention_autotuner_tensor attn_mask;
  int64_t attn_mask_stride_column;
  int32_t attn_mask_kind;
  float* dsinks;
};
struct AttentionBackwardParams1005 : AttentionBackwardParams1004 {
  int32_t const *cu_seqlens_q, *cu_seqlens_k;
  int32_t total_q, total_k, causal_from_end;
};
struct AttentionBackwardParams1006 : AttentionBackwardParams1005 {
  float const* bias_table;
  int32_t bias_distance;
  float* dbias_table;
  int32_t const *document_ids, *prefix_lens;
};
static_assert(
    sizeof(AttentionForwardParams1002) == offsetof(attention_autotuner_attention_forward_params, seqlens_k) &&
        sizeof(AttentionForwardParams1003) == offsetof(attention_autotuner_attention_forward_params, window_left) &&
        sizeof(AttentionForwardParams1004) == offsetof(attention_autotuner_attention_forward_params, cu_seqlens_q) &&
        sizeof(AttentionForwardParams1005) == offsetof(attention_autotuner_attention_forward_params, bias_table) &&
        sizeof(AttentionBackwardParams1002) == offsetof(attention_autotuner_attention_backward_params, window_left) &&
        sizeof(AttentionBackwardParams1004) == offsetof(attention_autotuner_attention_backward_params, cu_seqlens_q) &&
        sizeof(AttentionBackwardParams1005) == offsetof(attention_autotuner_attention_backward_params, bias_table) &&
        sizeof(AttentionBackwardParams1006) == offsetof(attention_autotuner_attention_backward_params, dattn_mask),
    "1002 to 1006 are prefixes of the present params");

// Params of kernels that are compiled for spans, with those that a kernel before them has found: see common/spans.cuh.
template <typename Abi>
struct SpannedParams : Abi {
  int2 const *row_spans, *key_spans;
};
// What an artifact is launched with, whose kernels take such params.
template <typename Params>
struct AbiParams {
  using Type = Params;
};
template <typename Abi>
struct AbiParams<SpannedParams<Abi>> {
  using Type = Abi;
};

// The arguments of a direction's kernels.
template <ScoreMod kScoreMod>
struct ScoreModParams {
  using Forward = attention_autotuner_retnet_forward_params;
  using Backward = attention_autotuner_retnet_backward_params;
};
template <>
struct ScoreModParams<ScoreMod::kSoftmax> {
  using Forward = AttentionForwardParams1002;
  using Backward = AttentionBackwardParams1002;
};

// The same of a config that is compiled with modifications, for packed sequences, or for spans.
template <typename Config>
using ModifiedForwardParams = std::conditional_t<
    kIsSpanned<Config>, SpannedParams<attention_autotuner_attention_forward_params>,
    std::conditional_t<kHasBiasTable<Config>, attention_autotuner_attention_forward_params,
                       std::conditional_t<kIsPacked<Config>, AttentionForwardParams1005, AttentionForwardParams1004>>>;
template <typename Config>
using UnspannedBackwardParams =
    std::conditional_t<kHasAttnMask<Config>, attention_autotuner_attention_backward_params,
                       std::conditional_t<kHasBiasTable<Config> || kIsSpanned<Config>, AttentionBackwardParams1006,
                                          std::conditional_t<kIsPacked<Config>, AttentionBackwardParams1005,
                                                             AttentionBackwardParams1004>>>;
template <typename Config>
using ModifiedBackwardParams = std::conditional_t<kIsSpanned<Config>, SpannedParams<UnspannedBackwardParams<Config>>,
                                                  UnspannedBackwardParams<Config>>;
template <typename Config>
using BackwardParamsOf = std::conditional_t<kIsModified<Config>, ModifiedBackwardParams<Config>,
                                            typename ScoreModParams<Config::kScoreMod>::Backward>;

// The parts of kernels of traits T that differ between score modifications: see the specialisations in
// score/softmax.cuh, score/softmax_backward.cuh, score/masked.cuh and score/masked_backward.cuh.
template <ScoreMod kScoreMod, typename T>
struct ForwardScoreMod;
template <ScoreMod kScoreMod, typename T>
struct BackwardScoreMod;
template <ScoreMod kScoreMod>
struct LseDelta;

// What the scores are multiplied by.
inline __host__ __device__ float score_scale(attention_autotuner_retnet_forward_params const& p) { return p.scale; }
inline __host__ __device__ float score_scale(attention_autotuner_retnet_backward_params const& p) { return p.scale; }
template <typename AttentionParams>
inline __host__ __device__ float score_scale(AttentionParams const& p) {
  return p.softmax_scale;
}

}  // namespace attention_autotuner

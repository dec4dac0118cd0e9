// What the host sides of all artifacts ask of params: version, sizes, alignment.
#pragma once

#include <cstdint>

#include "attention_autotuner/abi.h"
#include "attention_autotuner/common/tile.cuh"
#include "attention_autotuner/score/score_mod.cuh"

namespace attention_autotuner {

inline constexpr int64_t kMaxRows = int64_t(1) << 30;  // row + causal_offset stays within 32 bits

// Rows can be read (or written) `bytes` at a time; strides of dimensions of size 1 do not matter.
inline bool aligned(attention_autotuner_tensor const& tensor, int bytes, int batch, int heads, int rows) {
  int const elements = bytes / kElementBytes;
  return reinterpret_cast<uintptr_t>(tensor.data) % bytes == 0 && (batch == 1 || tensor.stride_batch % elements == 0) &&
         (heads == 1 || tensor.stride_head % elements == 0) && (rows == 1 || tensor.stride_row % elements == 0);
}

// Whether a launch that needs so many bytes of device memory can have these.
inline bool takes_workspace(void const* workspace, int64_t bytes) {
  return bytes == 0 || (workspace != nullptr && reinterpret_cast<uintptr_t>(workspace) % 16 == 0);
}

// Whether params have every field that an artifact of these Params reads; a caller's struct may be longer.
template <typename Params>
inline bool same_version(Params const& params) {
  return params.struct_size >= sizeof(Params) && params.abi_version / 1000 == ATTENTION_AUTOTUNER_ABI_VERSION / 1000;
}

// True where head dims round up to these padded ones.
inline bool takes_dims(int dim_qk, int dim_v, int padded_dim_qk, int padded_dim_v) {
  return dim_qk % kChunk == 0 && dim_qk > padded_dim_qk - 16 && dim_qk <= padded_dim_qk && dim_v % kChunk == 0 &&
         dim_v > padded_dim_v - 16 && dim_v <= padded_dim_v;
}

// Whether the sizes in attention's params are what kernels of these padded head dims take.
template <typename Params>
inline bool takes_shape(Params const& p, int padded_dim_qk, int padded_dim_v) {
  return p.batch >= 1 && p.heads_q >= 1 && p.heads_kv >= 1 && p.heads_q % p.heads_kv == 0 && p.seqlen_q >= 1 &&
         p.seqlen_q <= kMaxRows && p.seqlen_k >= 1 && p.seqlen_k <= kMaxRows &&
         takes_dims(p.dim_qk, p.dim_v, padded_dim_qk, padded_dim_v) && p.causal_offset > -kMaxRows &&
         p.causal_offset < kMaxRows;
}

// Whether params bring what the score modification takes.
template <ScoreMod kScoreMod, typename Params>
inline bool has_score_mod_inputs(Params const& p) {
  if constexpr (kScoreMod == ScoreMod::kMasked) {
    return p.mask.data != nullptr;
  } else if constexpr (kScoreMod == ScoreMod::kDecayed) {
    return p.causal == 1 && p.log2_gamma != nullptr;
  } else {
    return true;
  }
}

// Whether params bring the values of the modifications that a config is compiled with.
template <typename Mods, typename Params>
inline bool has_values(Params const& p) {
  if constexpr (Mods::template kHas<Softcap>) {
    if (!(p.softcap > 0.0f)) return false;
  }
  if constexpr (Mods::template kHas<AlibiSlopes>) {
    if (p.alibi_slopes == nullptr) return false;
  }
  if constexpr (Mods::template kHas<BiasTable>) {
    if (p.bias_table == nullptr || p.bias_distance < 0 || p.bias_distance > BiasTable::kMaxDistance) return false;
  }
  if constexpr (Mods::template kHas<AttnMask>) {
    if (p.attn_mask.data == nullptr || p.attn_mask_kind < 0 || p.attn_mask_kind >= AttnMask::kKinds) return false;
  }
  if constexpr (Mods::template kHas<Sinks>) {
    if (p.sinks == nullptr) return false;
  }
  if constexpr (Mods::template kHas<Spans>) {
    if (p.document_ids == nullptr && p.prefix_lens == nullptr) return false;
    if (p.document_ids != nullptr && p.seqlen_q != p.seqlen_k) return false;
    if (p.prefix_lens != nullptr && !p.causal) return false;
  }
  if constexpr (Mods::template kHas<Packed>) {
    if (p.cu_seqlens_q == nullptr || p.cu_seqlens_k == nullptr) return false;
    if (p.total_q < 1 || p.total_q > kMaxRows || p.total_k < 1 || p.total_k > kMaxRows) return false;
  }
  return true;
}

// The extents of a launch's tensors: of packed sequences, one batch entry with the rows of all.
template <bool kPacked, typename Params>
inline int batch_of(Params const& p) {
  if constexpr (kPacked) return 1;
  return p.batch;
}
template <bool kPacked, typename Params>
inline int rows_of_queries(Params const& p) {
  if constexpr (kPacked) return p.total_q;
  return p.seqlen_q;
}
template <bool kPacked, typename Params>
inline int rows_of_keys(Params const& p) {
  if constexpr (kPacked) return p.total_k;
  return p.seqlen_k;
}

template <ScoreMod kScoreMod, typename Params>
inline bool mask_aligned(Params const& p, int bytes) {
  if constexpr (kScoreMod == ScoreMod::kMasked) {
    return aligned(p.mask, bytes, 1, p.heads_q, p.seqlen_q);
  } else {
    return true;
  }
}

}  // namespace attention_autotuner

// What every retention artifact asks of its params.
#pragma once

#include "attention_autotuner/abi.h"
#include "attention_autotuner/abi_retention_packed.h"
#include "attention_autotuner/host/checks.cuh"
#include "attention_autotuner/host/entry.cuh"

namespace attention_autotuner {

using RetentionForwardParams = attention_autotuner_retention_forward_params;
using RetentionBackwardParams = attention_autotuner_retention_backward_params;

using PackedRetentionForwardParams = attention_autotuner_retention_packed_forward_params;
using PackedRetentionBackwardParams = attention_autotuner_retention_packed_backward_params;
template <>
inline constexpr uint32_t kAbiVersionOf<PackedRetentionForwardParams> = 1005;
template <>
inline constexpr uint32_t kAbiVersionOf<PackedRetentionBackwardParams> = 1005;

inline constexpr int64_t kMaxGridY = 65535;

// Params of packed sequences.
template <typename Params, typename = void>
inline constexpr bool kHasSequences = false;
template <typename Params>
inline constexpr bool kHasSequences<Params, std::void_t<decltype(Params::cu_seqlens)>> = true;

// The extents of a launch's tensors: of packed sequences, one batch entry with the rows of all.
template <typename Params>
inline int batch_of_rows(Params const& p) {
  if constexpr (kHasSequences<Params>) return 1;
  return p.batch;
}
template <typename Params>
inline int rows_of(Params const& p) {
  if constexpr (kHasSequences<Params>) {
    return p.total;
  } else {
    return p.seqlen;
  }
}

template <typename Params>
inline int32_t check_retention_shape(Params const& p, int padded_dim_qk, int padded_dim_v) {
  if (!same_version(p)) return ATTENTION_AUTOTUNER_BAD_VERSION;
  bool const sizes = p.batch >= 1 && p.heads_q >= 1 && p.heads_kv >= 1 && p.heads_q % p.heads_kv == 0 &&
                     int64_t(p.batch) * p.heads_q <= kMaxGridY && p.seqlen >= 1 && p.seqlen <= kMaxRows &&
                     takes_dims(p.dim_qk, p.dim_v, padded_dim_qk, padded_dim_v) && p.log2_gamma != nullptr;
  if constexpr (kHasSequences<Params>) {
    if (p.total < 1 || p.total > kMaxRows || p.cu_seqlens == nullptr) return ATTENTION_AUTOTUNER_BAD_SHAPE;
  }
  return sizes ? ATTENTION_AUTOTUNER_OK : ATTENTION_AUTOTUNER_BAD_SHAPE;
}

template <typename Params>
inline bool takes_retention_inputs(Params const& p, int copy_bytes) {
  int const batch = batch_of_rows(p), rows = rows_of(p);
  return aligned(p.q, copy_bytes, batch, p.heads_q, rows) && aligned(p.k, copy_bytes, batch, p.heads_kv, rows) &&
         aligned(p.v, copy_bytes, batch, p.heads_kv, rows);
}

// Whether a forward artifact that is prepared or not can be launched with these pointers.
template <typename Params>
inline int32_t check_retention_forward_launch(Params const& p, int copy_bytes, void const* workspace,
                                              int64_t workspace_bytes, bool prepared) {
  if (!takes_workspace(workspace, workspace_bytes) || !takes_retention_inputs(p, copy_bytes) ||
      !aligned(p.o, 16, batch_of_rows(p), p.heads_q, rows_of(p))) {
    return ATTENTION_AUTOTUNER_BAD_ALIGNMENT;
  }
  return prepared ? ATTENTION_AUTOTUNER_OK : ATTENTION_AUTOTUNER_BAD_DEVICE;
}

}  // namespace attention_autotuner

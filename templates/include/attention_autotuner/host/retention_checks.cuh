// What every retention artifact asks of its params.
#pragma once

#include "attention_autotuner/abi.h"
#include "attention_autotuner/host/checks.cuh"
#include "attention_autotuner/host/entry.cuh"

namespace attention_autotuner {

using RetentionForwardParams = attention_autotuner_retention_forward_params;
using RetentionBackwardParams = attention_autotuner_retention_backward_params;

inline constexpr int64_t kMaxGridY = 65535;

template <typename Params>
inline int32_t check_retention_shape(Params const& p, int padded_dim_qk, int padded_dim_v) {
  if (!same_version(p)) return ATTENTION_AUTOTUNER_BAD_VERSION;
  bool const sizes = p.batch >= 1 && p.heads_q >= 1 && p.heads_kv >= 1 && p.heads_q % p.heads_kv == 0 &&
                     int64_t(p.batch) * p.heads_q <= kMaxGridY && p.seqlen >= 1 && p.seqlen <= kMaxRows &&
                     takes_dims(p.dim_qk, p.dim_v, padded_dim_qk, padded_dim_v) && p.log2_gamma != nullptr;
  return sizes ? ATTENTION_AUTOTUNER_OK : ATTENTION_AUTOTUNER_BAD_SHAPE;
}

template <typename Params>
inline bool takes_retention_inputs(Params const& p, int copy_bytes) {
  return aligned(p.q, copy_bytes, p.batch, p.heads_q, p.seqlen) &&
         aligned(p.k, copy_bytes, p.batch, p.heads_kv, p.seqlen) &&
         aligned(p.v, copy_bytes, p.batch, p.heads_kv, p.seqlen);
}

// Whether a forward artifact that is prepared or not can be launched with these pointers.
inline int32_t check_retention_forward_launch(RetentionForwardParams const& p, int copy_bytes, void const* workspace,
                                              int64_t workspace_bytes, bool prepared) {
  bool const has_workspace = workspace_bytes == 0 || workspace != nullptr;
  if (!has_workspace || reinterpret_cast<uintptr_t>(workspace) % 16 != 0 || !takes_retention_inputs(p, copy_bytes) ||
      !aligned(p.o, 16, p.batch, p.heads_q, p.seqlen)) {
    return ATTENTION_AUTOTUNER_BAD_ALIGNMENT;
  }
  return prepared ? ATTENTION_AUTOTUNER_OK : ATTENTION_AUTOTUNER_BAD_DEVICE;
}

}  // namespace attention_autotuner

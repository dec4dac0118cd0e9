/* The params of retention of packed sequences, beside abi.h, whose rules they follow. They lie in a header of their own
 * so that the artifacts of other calls do not depend on them.
 *
 * They begin with the fields of abi.h's retention params of the same direction. Tensors have one batch entry with the
 * rows of all sequences, one after the other; batch is how many sequences there are, seqlen their greatest length, by
 * which work is divided and which bounds nothing. States are [batch, heads_q, dim_qk, dim_v]; dlog2_gamma is [heads_q].
 * Rows behind the last sequence get zeros.
 */
#ifndef ATTENTION_AUTOTUNER_ABI_RETENTION_PACKED_H_
#define ATTENTION_AUTOTUNER_ABI_RETENTION_PACKED_H_

#include "attention_autotuner/abi.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct attention_autotuner_retention_packed_forward_params {
  uint32_t struct_size;
  uint32_t abi_version;
  attention_autotuner_tensor q;
  attention_autotuner_tensor k;
  attention_autotuner_tensor v;
  attention_autotuner_tensor o;
  const float* log2_gamma;
  const float* initial_state;
  float* final_state;
  int32_t batch;
  int32_t heads_q;
  int32_t heads_kv;
  int32_t seqlen;
  int32_t dim_qk;
  int32_t dim_v;
  float scale;
  int32_t total;             /* rows of q, k and v */
  const int32_t* cu_seqlens; /* [batch + 1] on the device: 0, then where each sequence ends */
} attention_autotuner_retention_packed_forward_params;

typedef struct attention_autotuner_retention_packed_backward_params {
  uint32_t struct_size;
  uint32_t abi_version;
  attention_autotuner_tensor q;
  attention_autotuner_tensor k;
  attention_autotuner_tensor v;
  attention_autotuner_tensor dout;
  attention_autotuner_tensor dq;
  attention_autotuner_tensor dk;
  attention_autotuner_tensor dv;
  const float* log2_gamma;
  const float* initial_state;
  const float* dfinal_state;
  float* dinitial_state;
  float* dlog2_gamma;
  int32_t batch;
  int32_t heads_q;
  int32_t heads_kv;
  int32_t seqlen;
  int32_t dim_qk;
  int32_t dim_v;
  float scale;
  int32_t total;
  const int32_t* cu_seqlens;
} attention_autotuner_retention_packed_backward_params;

#ifdef __cplusplus
}
#endif

#endif /* ATTENTION_AUTOTUNER_ABI_RETENTION_PACKED_H_ */

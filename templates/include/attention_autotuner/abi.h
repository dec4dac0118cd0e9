/* The C ABI of an artifact: all that a loader (Python, C++ benchmark, client program) knows of a kernel library.
 *
 * Every artifact is a shared library that exports the functions declared at the end of this header. Structs are plain
 * C: pointers, sizes, scalars and 64-bit strides counted in elements. A minor version appends fields and never moves
 * one; `struct_size` tells an artifact how many of them the caller knows. The Python mirror is
 * python/attention_autotuner/core/abi.py, and a test compares the two field by field.
 */
#ifndef ATTENTION_AUTOTUNER_ABI_H_
#define ATTENTION_AUTOTUNER_ABI_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* major * 1000 + minor */
#define ATTENTION_AUTOTUNER_ABI_VERSION 1007

enum attention_autotuner_status {
  ATTENTION_AUTOTUNER_OK = 0,
  ATTENTION_AUTOTUNER_BAD_VERSION = 1,   /* params were made for another major version, or are too short */
  ATTENTION_AUTOTUNER_BAD_SHAPE = 2,     /* a size is outside what this artifact was compiled for */
  ATTENTION_AUTOTUNER_BAD_ALIGNMENT = 3, /* a pointer or stride breaks the artifact's copy width */
  ATTENTION_AUTOTUNER_BAD_DEVICE = 4,    /* the device cannot run it, or prepare() was not called for it */
  ATTENTION_AUTOTUNER_CUDA_ERROR = 1000  /* plus the cudaError_t value */
};

/* A strided 4-d tensor [batch, heads, seqlen, dim] with unit last stride; strides are in elements. */
typedef struct attention_autotuner_tensor {
  void* data;
  int64_t stride_batch;
  int64_t stride_head;
  int64_t stride_row;
} attention_autotuner_tensor;

/* Attention forward. Row i sees key j if !causal or j <= i + causal_offset. An artifact that is compiled for key bounds
 * reads the keys starts_k[b] <= j < seqlens_k[b] alone; others take neither array. What came with 1004 is read by
 * artifacts that are compiled with score modifications, each of which reads its own fields and windows. */
typedef struct attention_autotuner_attention_forward_params {
  uint32_t struct_size; /* sizeof as the caller knows it */
  uint32_t abi_version;
  attention_autotuner_tensor q; /* [batch, heads_q, seqlen_q, dim_qk] */
  attention_autotuner_tensor k; /* [batch, heads_kv, seqlen_k, dim_qk] */
  attention_autotuner_tensor v; /* [batch, heads_kv, seqlen_k, dim_v] */
  attention_autotuner_tensor o; /* [batch, heads_q, seqlen_q, dim_v], always 16-byte aligned rows */
  float* lse;                   /* contiguous [batch, heads_q, seqlen_q], or null when not wanted */
  int32_t batch;
  int32_t heads_q;
  int32_t heads_kv;
  int32_t seqlen_q;
  int32_t seqlen_k;
  int32_t dim_qk; /* true head dims; the compiled class is these rounded up to 16 */
  int32_t dim_v;
  int32_t causal;        /* 0 or 1 */
  int32_t causal_offset; /* seqlen_k - seqlen_q for bottom-right alignment, 0 for top-left */
  float softmax_scale;   /* any finite value, negative and 0 included */
  /* since 1003 */
  const int32_t* seqlens_k; /* [batch] on the device, ends of the keys, clamped to [0, seqlen_k]; null: seqlen_k */
  const int32_t* starts_k;  /* [batch] on the device, first keys, clamped likewise; null: 0 */
  int32_t causal_from_end;  /* 1: seqlens_k[b] - seqlen_q takes the place of causal_offset */
  int32_t splits;           /* parts that the keys of a row are cut into, by artifacts that do; 0 or 1: none */
  /* since 1004 */
  int32_t window_left;       /* row i sees the keys from i + causal_offset - window_left; -1: no bound */
  int32_t window_right;      /* and up to i + causal_offset + window_right; -1: no bound, beside that of causal */
  float softcap;             /* c: scaled scores become c tanh(score / c) */
  int32_t alibi_per_batch;   /* 1: alibi_slopes are [batch, heads_q] */
  const float* alibi_slopes; /* [heads_q]: -slope * |i + seqlen_k - seqlen_q - j| is added, seqlens_k[b] for seqlen_k */
  const float* sinks;        /* [heads_q]: logits that join the softmax's denominator and LSE */
  attention_autotuner_tensor attn_mask; /* [batch, heads_q, seqlen_q, seqlen_k], strides of 0 where it is broadcast */
  int64_t attn_mask_stride_column;
  int32_t attn_mask_kind; /* 0: bytes, 0 hides a key; else what is added is fp32 (1), fp16 (2) or bf16 (3) */
  /* since 1005: of artifacts that are compiled for packed sequences. batch is how many there are, seqlen_q and seqlen_k
   * their greatest lengths, lse is [heads_q, total_q]; tensors have one batch entry with the rows of all sequences, one
   * after the other. Each has a bottom-right diagonal of its own where causal_from_end is 1, else a top-left one. Rows
   * behind the last sequence see nothing. */
  const int32_t* cu_seqlens_q; /* [batch + 1] on the device: 0, then where each sequence of queries ends */
  const int32_t* cu_seqlens_k; /* of keys */
  int32_t total_q;             /* rows of q */
  int32_t total_k;             /* rows of k */
  /* since 1006 */
  const float* bias_table; /* [heads_q, 2 bias_distance + 1]: the entry at clamp(past, -bias_distance, bias_distance) +
                              bias_distance is added, where past = j - i - (seqlen_k - seqlen_q), seqlens_k[b] for
                              seqlen_k */
  int32_t bias_distance;   /* the greatest that has an entry of its own */
  /* of artifacts that are compiled for spans of keys; either may be null */
  const int32_t* document_ids; /* [batch, seqlen_k] on the device, where seqlen_q is seqlen_k: they never decrease, and
                                  row i sees key j only where theirs are equal */
  const int32_t* prefix_lens;  /* [batch] on the device: row i sees key j, too, where j < prefix_lens[b] */
} attention_autotuner_attention_forward_params;

/* Attention backward: gradients of q, k and v from those of o and, where given, of LSE. Strides of 0 are allowed in
 * what is read. The workspace holds every row's LSE and delta and, for some artifacts, dq in fp32. */
typedef struct attention_autotuner_attention_backward_params {
  uint32_t struct_size;
  uint32_t abi_version;
  attention_autotuner_tensor q;    /* [batch, heads_q, seqlen_q, dim_qk] */
  attention_autotuner_tensor k;    /* [batch, heads_kv, seqlen_k, dim_qk] */
  attention_autotuner_tensor v;    /* [batch, heads_kv, seqlen_k, dim_v] */
  attention_autotuner_tensor o;    /* [batch, heads_q, seqlen_q, dim_v], always 16-byte aligned rows */
  attention_autotuner_tensor dout; /* gradient of o, shaped like it, with unit last stride */
  attention_autotuner_tensor dq;   /* outputs, shaped like q, k and v, always 16-byte aligned rows */
  attention_autotuner_tensor dk;
  attention_autotuner_tensor dv;
  const float* lse;  /* contiguous [batch, heads_q, seqlen_q], as the forward wrote it */
  const float* dlse; /* gradient of lse, contiguous, or null for none */
  int32_t batch;
  int32_t heads_q;
  int32_t heads_kv;
  int32_t seqlen_q;
  int32_t seqlen_k;
  int32_t dim_qk;
  int32_t dim_v;
  int32_t causal;
  int32_t causal_offset;
  float softmax_scale;
  /* since 1004: as in the forward */
  int32_t window_left;
  int32_t window_right;
  float softcap;
  int32_t alibi_per_batch;
  const float* alibi_slopes;
  const float* sinks;
  attention_autotuner_tensor attn_mask;
  int64_t attn_mask_stride_column;
  int32_t attn_mask_kind;
  float* dsinks; /* [heads_q], or null where not wanted */
  /* since 1005: as in the forward */
  const int32_t* cu_seqlens_q;
  const int32_t* cu_seqlens_k;
  int32_t total_q;
  int32_t total_k;
  int32_t causal_from_end;
  /* since 1006: as in the forward */
  const float* bias_table;
  int32_t bias_distance;
  float* dbias_table; /* shaped like bias_table, or null where not wanted */
  const int32_t* document_ids;
  const int32_t* prefix_lens;
  /* since 1007 */
  void* dattn_mask; /* contiguous, of the type that attn_mask_kind names, which is not 0: the gradient of what is
                       added, or null where not wanted */
  int32_t attn_mask_summed; /* axes of dattn_mask that have one entry, for the sum over batch (1), heads_q (2), seqlen_q
                               (4) or seqlen_k (8), added up */
} attention_autotuner_attention_backward_params;

/* Retention with an explicit mask or a decay, forward: X = (scale Q K^T) * M, r = clamp(rowsum |X|, 1, r_clamp_max) or
 * 1, O = (X / r) V. M is the mask, or, for artifacts compiled for decay, gamma^(i + causal_offset - j) at and below the
 * diagonal. Row i sees key j if !causal or j <= i + causal_offset. */
typedef struct attention_autotuner_retnet_forward_params {
  uint32_t struct_size;
  uint32_t abi_version;
  attention_autotuner_tensor q;    /* [batch, heads_q, seqlen_q, dim_qk] */
  attention_autotuner_tensor k;    /* [batch, heads_kv, seqlen_k, dim_qk] */
  attention_autotuner_tensor v;    /* [batch, heads_kv, seqlen_k, dim_v] */
  attention_autotuner_tensor o;    /* [batch, heads_q, seqlen_q, dim_v], always 16-byte aligned rows */
  attention_autotuner_tensor mask; /* [heads_q, seqlen_q, seqlen_k] of q's type; stride_head 0 where heads share it,
                                      stride_batch unused; null data for decay */
  const float* log2_gamma;         /* [heads_q], each <= 0; null for a mask */
  float* r;                        /* contiguous [batch, heads_q, seqlen_q], or null when not wanted */
  int32_t batch;
  int32_t heads_q;
  int32_t heads_kv;
  int32_t seqlen_q;
  int32_t seqlen_k;
  int32_t dim_qk;
  int32_t dim_v;
  int32_t causal;
  int32_t causal_offset;
  float scale;       /* any finite value, negative and 0 included */
  int32_t normalize; /* 0: r is 1 */
  float r_clamp_max; /* infinity for no limit */
} attention_autotuner_retnet_forward_params;

/* Gradients of the same: of q, k and v, and of the mask where wanted. r is a constant to them unless r_grad: then,
 * where 1 < r < r_clamp_max, rowsum |X| has a gradient, which takes o. */
typedef struct attention_autotuner_retnet_backward_params {
  uint32_t struct_size;
  uint32_t abi_version;
  attention_autotuner_tensor q;
  attention_autotuner_tensor k;
  attention_autotuner_tensor v;
  attention_autotuner_tensor o;    /* always 16-byte aligned rows; null data without r_grad */
  attention_autotuner_tensor dout; /* shaped like o, with unit last stride */
  attention_autotuner_tensor dq;   /* outputs, shaped like q, k and v, always 16-byte aligned rows */
  attention_autotuner_tensor dk;
  attention_autotuner_tensor dv;
  attention_autotuner_tensor mask;  /* as in the forward */
  attention_autotuner_tensor dmask; /* [heads_q, seqlen_q, seqlen_k], or summed over heads where the mask's
                                       stride_head is 0; unit last stride; null data when not wanted */
  const float* log2_gamma;
  const float* r; /* as the forward wrote it; null: r is 1 */
  int32_t batch;
  int32_t heads_q;
  int32_t heads_kv;
  int32_t seqlen_q;
  int32_t seqlen_k;
  int32_t dim_qk;
  int32_t dim_v;
  int32_t causal;
  int32_t causal_offset;
  float scale;
  int32_t r_grad;
  float r_clamp_max;
} attention_autotuner_retnet_backward_params;

/* Retention with decay, forward, in whichever form: S_t = gamma S_{t-1} + k_t^T v_t, o_t = scale q_t S_t. States are
 * contiguous fp32 [batch, heads_q, dim_qk, dim_v], 16-byte aligned; both may be the same memory. */
typedef struct attention_autotuner_retention_forward_params {
  uint32_t struct_size;
  uint32_t abi_version;
  attention_autotuner_tensor q; /* [batch, heads_q, seqlen, dim_qk] */
  attention_autotuner_tensor k; /* [batch, heads_kv, seqlen, dim_qk] */
  attention_autotuner_tensor v; /* [batch, heads_kv, seqlen, dim_v] */
  attention_autotuner_tensor o; /* [batch, heads_q, seqlen, dim_v], always 16-byte aligned rows */
  const float* log2_gamma;      /* [heads_q], each <= 0 */
  const float* initial_state;   /* null for zeros */
  float* final_state;           /* null when not wanted */
  int32_t batch;
  int32_t heads_q;
  int32_t heads_kv;
  int32_t seqlen;
  int32_t dim_qk;
  int32_t dim_v;
  float scale;
} attention_autotuner_retention_forward_params;

/* Gradients of the same, from those of o and, where given, of the final state. */
typedef struct attention_autotuner_retention_backward_params {
  uint32_t struct_size;
  uint32_t abi_version;
  attention_autotuner_tensor q;
  attention_autotuner_tensor k;
  attention_autotuner_tensor v;
  attention_autotuner_tensor dout; /* [batch, heads_q, seqlen, dim_v], unit last stride */
  attention_autotuner_tensor dq;   /* outputs, shaped like q, k and v, always 16-byte aligned rows */
  attention_autotuner_tensor dk;
  attention_autotuner_tensor dv;
  const float* log2_gamma;
  const float* initial_state; /* null for zeros */
  const float* dfinal_state;  /* gradient of the final state, null for none */
  float* dinitial_state;      /* null when not wanted */
  float* dlog2_gamma;         /* [batch, heads_q], gradient of log2_gamma; null when not wanted */
  int32_t batch;
  int32_t heads_q;
  int32_t heads_kv;
  int32_t seqlen;
  int32_t dim_qk;
  int32_t dim_v;
  float scale;
} attention_autotuner_retention_backward_params;

/* What an artifact is, for occupancy arithmetic and for checks by loaders. Of several kernels, the main one's tile and
 * threads, and the greatest shared memory. */
typedef struct attention_autotuner_kernel_info {
  uint32_t struct_size;
  uint32_t abi_version;
  const char* name; /* the candidate's name */
  int32_t padded_dim_qk;
  int32_t padded_dim_v;
  int32_t block_m;
  int32_t block_n;
  int32_t num_threads;
  int32_t static_smem_bytes;
  int32_t dynamic_smem_bytes;
  int32_t copy_bytes;
} attention_autotuner_kernel_info;

#define ATTENTION_AUTOTUNER_EXPORT __attribute__((visibility("default")))

/* The least version of this header that has every field the artifact reads: callers of that or of a later minor version
 * may launch it. */
ATTENTION_AUTOTUNER_EXPORT uint32_t attention_autotuner_abi_version(void);

/* Fills *info (whose struct_size the caller sets). Needs no GPU. */
ATTENTION_AUTOTUNER_EXPORT int32_t attention_autotuner_get_kernel_info(attention_autotuner_kernel_info* info);

/* Loads the module on a device and sets function attributes. Idempotent, thread-safe; must not run under graph
 * capture. The device must be the calling thread's current one. */
ATTENTION_AUTOTUNER_EXPORT int32_t attention_autotuner_prepare(int32_t device);

/* Bytes of device workspace that launch() needs for these params (0: pass null). */
ATTENTION_AUTOTUNER_EXPORT size_t attention_autotuner_workspace_bytes(const void* params);

/* Enqueues the work on `stream` (a cudaStream_t) of `device` (the current one, prepared before). Never synchronises,
 * never allocates. The workspace arrives uninitialised. */
ATTENTION_AUTOTUNER_EXPORT int32_t attention_autotuner_launch(const void* params, void* workspace, void* stream,
                                                              int32_t device);

/* A static string for a status code. */
ATTENTION_AUTOTUNER_EXPORT const char* attention_autotuner_status_string(int32_t status);

#ifdef __cplusplus
}
#endif

#endif /* ATTENTION_AUTOTUNER_ABI_H_ */

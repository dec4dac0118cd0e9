/* The C ABI of an artifact: all that a loader (Python, C++ benchmark, client program) knows of a kernel library.
 *
 * Every artifact is a shared library that exports the functions declared at the end of this header. Structs are plain
 * C: pointers, sizes, scalars and 64-bit strides counted in elements. A minor version appends fields and never moves
 * one; `struct_size` tells an artifact how many of them the caller knows. The Python mirror is
 * python/attention_autotuner/abi.py, and a test compares the two field by field.
 */
#ifndef ATTENTION_AUTOTUNER_ABI_H_
#define ATTENTION_AUTOTUNER_ABI_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* major * 1000 + minor */
#define ATTENTION_AUTOTUNER_ABI_VERSION 1001

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

/* Attention forward. Row i sees key j if !causal or j <= i + causal_offset. */
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
} attention_autotuner_attention_forward_params;

/* Attention backward: gradients of q, k and v from those of o and, where given, of LSE. Strides of 0 are allowed in
 * what is read. The workspace holds every row's statistics and, for some artifacts, dq in fp32. */
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
} attention_autotuner_attention_backward_params;

/* What an artifact is, for occupancy arithmetic and for checks by loaders. Of several kernels, the main one's tile and
 * threads, and the greatest shared memory. */
typedef struct attention_autotuner_kernel_info {
  uint32_t struct_size;
  uint32_t abi_version;
  const char* name; /* the candidate's name */
  int32_t class_qk;
  int32_t class_v;
  int32_t block_m;
  int32_t block_n;
  int32_t num_threads;
  int32_t static_smem_bytes;
  int32_t dynamic_smem_bytes;
  int32_t copy_bytes;
} attention_autotuner_kernel_info;

#if defined(_WIN32)
#define ATTENTION_AUTOTUNER_EXPORT __declspec(dllexport)
#else
#define ATTENTION_AUTOTUNER_EXPORT __attribute__((visibility("default")))
#endif

/* The version of this header that the artifact was compiled with. */
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

/* A kernel library that runs on the host: the whole C ABI over a naive attention in fp16, so that the loader, the
 * launch plans and the packing of params are tested end to end without a GPU. It is a forward kernel, with -DBACKWARD a
 * backward one. The tests append other -D options to make it misbehave. */
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "attention_autotuner/abi.h"

#ifndef VERSION
#define VERSION ATTENTION_AUTOTUNER_ABI_VERSION
#endif
#ifndef PREPARE_STATUS
#define PREPARE_STATUS ATTENTION_AUTOTUNER_OK
#endif
#ifndef LAUNCH_STATUS
#define LAUNCH_STATUS ATTENTION_AUTOTUNER_OK
#endif
#ifndef WORKSPACE_BYTES
#define WORKSPACE_BYTES 0
#endif
#ifndef NAME
#define NAME "fake"
#endif
#ifndef O_FACTOR
#define O_FACTOR 1
#endif
#ifndef LSE_BIAS
#define LSE_BIAS 0
#endif
#ifndef TIME_US
#define TIME_US 100.0
#endif
#ifndef BLOCK_M
#define BLOCK_M 128
#endif
#ifndef BLOCK_N
#define BLOCK_N 32
#endif

static int prepared_count, launch_count, same_inputs;
static void* last_o;
static void* last_stream;
static void* last_workspace;

ATTENTION_AUTOTUNER_EXPORT int32_t fake_prepared_count(void) { return prepared_count; }
ATTENTION_AUTOTUNER_EXPORT int32_t fake_launch_count(void) { return launch_count; }
ATTENTION_AUTOTUNER_EXPORT void* fake_last_stream(void) { return last_stream; }
ATTENTION_AUTOTUNER_EXPORT void* fake_last_workspace(void) { return last_workspace; }

ATTENTION_AUTOTUNER_EXPORT double fake_time_us(void) { return TIME_US; }

#ifdef CRASHES_AT_LOAD
__attribute__((constructor)) static void crash(void) { raise(SIGSEGV); }
#endif

uint32_t attention_autotuner_abi_version(void) { return VERSION; }

int32_t attention_autotuner_get_kernel_info(attention_autotuner_kernel_info* info) {
  if (info->struct_size < sizeof(*info)) return ATTENTION_AUTOTUNER_BAD_VERSION;
  *info =
      (attention_autotuner_kernel_info){sizeof(*info), VERSION, NAME, 64, 48, BLOCK_M, BLOCK_N, 256, 1024, 49152, 16};
  return ATTENTION_AUTOTUNER_OK;
}

int32_t attention_autotuner_prepare(int32_t device) {
  (void)device;
  ++prepared_count;
  return PREPARE_STATUS;
}

size_t attention_autotuner_workspace_bytes(const void* params) {
#ifdef BACKWARD
  attention_autotuner_attention_backward_params const* p = params;
  return sizeof(float) * p->batch * p->heads_q * p->seqlen_q; /* every row's delta */
#else
  (void)params;
  return WORKSPACE_BYTES;
#endif
}

const char* attention_autotuner_status_string(int32_t status) {
  return status == ATTENTION_AUTOTUNER_BAD_SHAPE ? "a bad shape" : "some other status";
}

static _Float16* row(attention_autotuner_tensor t, int64_t batch, int64_t head, int64_t index) {
  return (_Float16*)t.data + batch * t.stride_batch + head * t.stride_head + index * t.stride_row;
}

#ifdef BACKWARD
typedef attention_autotuner_attention_backward_params Params;

/* P, and dS without the scale, of one pair of row and key; 0 where the row does not see the key. */
static float score_gradient(Params const* p, float const* delta, int b, int h, int i, int j, float* weight) {
  int const kv = h / (p->heads_q / p->heads_kv);
  int64_t const flat = ((int64_t)b * p->heads_q + h) * p->seqlen_q + i;
  *weight = 0;
  if ((p->causal && j > (int64_t)i + p->causal_offset) || p->lse[flat] == -INFINITY) return 0;
  _Float16 const *q = row(p->q, b, h, i), *k = row(p->k, b, kv, j), *v = row(p->v, b, kv, j),
                 *go = row(p->dout, b, h, i);
  float s = 0, dp = 0;
  for (int d = 0; d < p->dim_qk; ++d) s += (float)q[d] * (float)k[d];
  for (int d = 0; d < p->dim_v; ++d) dp += (float)go[d] * (float)v[d];
  *weight = expf(s * p->softmax_scale - p->lse[flat]);
  return *weight * (dp - delta[flat]);
}

static void add(float* sum, float factor, _Float16 const* x, int n) {
  for (int d = 0; d < n; ++d) sum[d] += factor * (float)x[d];
}

static void store(_Float16* out, float const* sum, int n) {
  for (int d = 0; d < n; ++d) out[d] = (_Float16)sum[d];
}

static void run(Params const* p, float* delta) {
  int const group = p->heads_q / p->heads_kv;
  float weight;
  for (int b = 0; b < p->batch; ++b)
    for (int h = 0; h < p->heads_q; ++h)
      for (int i = 0; i < p->seqlen_q; ++i) {
        int64_t const flat = ((int64_t)b * p->heads_q + h) * p->seqlen_q + i;
        _Float16 const *o = row(p->o, b, h, i), *go = row(p->dout, b, h, i);
        delta[flat] = p->dlse ? -p->dlse[flat] : 0;
        for (int d = 0; d < p->dim_v; ++d) delta[flat] += (float)o[d] * (float)go[d];
        float dq[256] = {0};
        for (int j = 0; j < p->seqlen_k; ++j) {
          float const ds = score_gradient(p, delta, b, h, i, j, &weight);
          add(dq, ds * p->softmax_scale, row(p->k, b, h / group, j), p->dim_qk);
        }
        store(row(p->dq, b, h, i), dq, p->dim_qk);
      }
  for (int b = 0; b < p->batch; ++b)
    for (int kv = 0; kv < p->heads_kv; ++kv)
      for (int j = 0; j < p->seqlen_k; ++j) {
        float dk[256] = {0}, dv[512] = {0};
        for (int h = kv * group; h < (kv + 1) * group; ++h)
          for (int i = 0; i < p->seqlen_q; ++i) {
            float const ds = score_gradient(p, delta, b, h, i, j, &weight);
            add(dk, ds * p->softmax_scale, row(p->q, b, h, i), p->dim_qk);
            add(dv, weight, row(p->dout, b, h, i), p->dim_v);
          }
        store(row(p->dk, b, kv, j), dk, p->dim_qk);
        store(row(p->dv, b, kv, j), dv, p->dim_v);
      }
}
#else
typedef attention_autotuner_attention_forward_params Params;

static int bound(Params const* p, int const* bounds, int b, int otherwise) {
#ifdef IGNORES_BOUNDS
  return otherwise;
#endif
  if (bounds == NULL) return otherwise;
  return bounds[b] < 0 ? 0 : bounds[b] > p->seqlen_k ? p->seqlen_k : bounds[b];
}

static void attend(Params const* p, int b, int h, int i) {
  int const group = p->heads_q / p->heads_kv;
  int const first = bound(p, p->starts_k, b, 0), end = bound(p, p->seqlens_k, b, p->seqlen_k);
  int64_t const offset = p->causal_from_end ? end - p->seqlen_q : p->causal_offset;
  int64_t const limit = p->causal ? i + offset : p->seqlen_k - 1;
  _Float16 const* q = row(p->q, b, h, i);
  _Float16* o = row(p->o, b, h, i);
  float sum = 0, largest = -INFINITY;
  float accumulated[512] = {0};
  for (int j = first; j < end && j <= limit; ++j) {
    _Float16 const* k = row(p->k, b, h / group, j);
    _Float16 const* v = row(p->v, b, h / group, j);
    float s = 0;
    for (int d = 0; d < p->dim_qk; ++d) s += (float)q[d] * (float)k[d];
    s *= p->softmax_scale;
    float const next = fmaxf(largest, s), keep = expf(largest - next), weight = expf(s - next);
#ifdef FORGETS_JUMPS
    sum = (largest != -INFINITY && next - largest > 6 ? sum : sum * keep) + weight;
#else
    sum = sum * keep + weight;
#endif
    for (int d = 0; d < p->dim_v; ++d) accumulated[d] = accumulated[d] * keep + weight * (float)v[d];
    largest = next;
  }
  for (int d = 0; d < p->dim_v; ++d) o[d] = (_Float16)(sum > 0 ? O_FACTOR * accumulated[d] / sum : 0.0f);
  if (p->lse)
    p->lse[((int64_t)b * p->heads_q + h) * p->seqlen_q + i] = sum > 0 ? largest + logf(sum) + LSE_BIAS : -INFINITY;
}

static void run(Params const* p, void* workspace) {
  (void)workspace;
  for (int b = 0; b < p->batch; ++b)
    for (int h = 0; h < p->heads_q; ++h)
      for (int i = 0; i < p->seqlen_q; ++i) attend(p, b, h, i);
}
#endif

int32_t attention_autotuner_launch(const void* params, void* workspace, void* stream, int32_t device) {
  Params const* p = params;
  (void)device;
  last_stream = stream;
  last_workspace = workspace;
  ++launch_count;
  same_inputs = p->o.data == last_o ? same_inputs + 1 : 1;
  last_o = p->o.data;
#ifdef CRASHES_AT /* a launch, counted from 1 */
  if (launch_count == CRASHES_AT) raise(SIGSEGV);
#endif
#ifdef HANGS_AT
  while (launch_count == HANGS_AT) pause();
#endif
#ifdef CRASHES_AGAIN /* a launch on the same inputs, counted from 1: races have such, checks have not */
  if (same_inputs == CRASHES_AGAIN) raise(SIGSEGV);
#endif
#ifdef HANGS_AGAIN
  while (same_inputs == HANGS_AGAIN) pause();
#endif
#ifdef EXITS_AT
  if (launch_count == EXITS_AT) exit(0);
#endif
#ifdef PRINTS
  for (int line = 0; line < PRINTS; ++line) puts("a line of forty characters, newline counted");
#endif
  if (LAUNCH_STATUS != ATTENTION_AUTOTUNER_OK) return LAUNCH_STATUS;
  if (p->struct_size != sizeof(*p)) return ATTENTION_AUTOTUNER_BAD_VERSION;
#ifndef NO_WORK
  run(p, workspace);
#endif
#ifdef WRONG_TAIL
#ifdef BACKWARD
  row(p->dk, p->batch - 1, p->heads_kv - 1, p->seqlen_k - 1)[p->dim_qk - 1] += (_Float16)0.5f;
#else
  row(p->o, p->batch - 1, p->heads_q - 1, p->seqlen_q - 1)[p->dim_v - 1] += (_Float16)0.5f;
#endif
#endif
#ifdef LEAKS
  p->lse[-1] = 0; /* beside the output */
#endif
#ifdef VARIES
  p->lse[0] += (float)launch_count; /* as a data race would */
#endif
  return ATTENTION_AUTOTUNER_OK;
}

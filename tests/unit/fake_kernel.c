/* A kernel library that runs on the host: the whole C ABI over a naive attention in fp16, so that the loader, the launch
 * plan and the packing of params are tested end to end without a GPU. The tests append -D options to make it misbehave. */
#include <math.h>

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

static int prepared_count, launch_count;
static void* last_stream;
static void* last_workspace;

ATTENTION_AUTOTUNER_EXPORT int32_t fake_prepared_count(void) { return prepared_count; }
ATTENTION_AUTOTUNER_EXPORT int32_t fake_launch_count(void) { return launch_count; }
ATTENTION_AUTOTUNER_EXPORT void* fake_last_stream(void) { return last_stream; }
ATTENTION_AUTOTUNER_EXPORT void* fake_last_workspace(void) { return last_workspace; }

uint32_t attention_autotuner_abi_version(void) { return VERSION; }

int32_t attention_autotuner_get_kernel_info(attention_autotuner_kernel_info* info) {
  if (info->struct_size < sizeof(*info)) return ATTENTION_AUTOTUNER_BAD_VERSION;
  *info = (attention_autotuner_kernel_info){sizeof(*info), VERSION, "fake", 64, 48, 128, 32, 256, 1024, 49152, 16};
  return ATTENTION_AUTOTUNER_OK;
}

int32_t attention_autotuner_prepare(int32_t device) {
  (void)device;
  ++prepared_count;
  return PREPARE_STATUS;
}

size_t attention_autotuner_workspace_bytes(const void* params) {
  (void)params;
  return WORKSPACE_BYTES;
}

const char* attention_autotuner_status_string(int32_t status) {
  return status == ATTENTION_AUTOTUNER_BAD_SHAPE ? "a bad shape" : "some other status";
}

static _Float16* row(attention_autotuner_tensor t, int64_t batch, int64_t head, int64_t index) {
  return (_Float16*)t.data + batch * t.stride_batch + head * t.stride_head + index * t.stride_row;
}

static void attend(const attention_autotuner_attention_forward_params* p, int b, int h, int i) {
  int const group = p->heads_q / p->heads_kv;
  int64_t const limit = p->causal ? (int64_t)i + p->causal_offset : p->seqlen_k - 1;
  _Float16 const* q = row(p->q, b, h, i);
  _Float16* o = row(p->o, b, h, i);
  float sum = 0, largest = -INFINITY;
  float accumulated[512] = {0};
  for (int j = 0; j < p->seqlen_k && j <= limit; ++j) {
    _Float16 const* k = row(p->k, b, h / group, j);
    _Float16 const* v = row(p->v, b, h / group, j);
    float s = 0;
    for (int d = 0; d < p->dim_qk; ++d) s += (float)q[d] * (float)k[d];
    s *= p->softmax_scale;
    float const next = fmaxf(largest, s), keep = expf(largest - next), weight = expf(s - next);
    sum = sum * keep + weight;
    for (int d = 0; d < p->dim_v; ++d) accumulated[d] = accumulated[d] * keep + weight * (float)v[d];
    largest = next;
  }
  for (int d = 0; d < p->dim_v; ++d) o[d] = (_Float16)(sum > 0 ? accumulated[d] / sum : 0.0f);
  if (p->lse) p->lse[((int64_t)b * p->heads_q + h) * p->seqlen_q + i] = sum > 0 ? largest + logf(sum) : -INFINITY;
}

int32_t attention_autotuner_launch(const void* params, void* workspace, void* stream, int32_t device) {
  attention_autotuner_attention_forward_params const* p = params;
  (void)device;
  last_stream = stream;
  last_workspace = workspace;
  ++launch_count;
  if (LAUNCH_STATUS != ATTENTION_AUTOTUNER_OK) return LAUNCH_STATUS;
  if (p->struct_size != sizeof(*p)) return ATTENTION_AUTOTUNER_BAD_VERSION;
#ifndef NO_WORK
  for (int b = 0; b < p->batch; ++b)
    for (int h = 0; h < p->heads_q; ++h)
      for (int i = 0; i < p->seqlen_q; ++i) attend(p, b, h, i);
#endif
  return ATTENTION_AUTOTUNER_OK;
}

/* Retnet as a kernel library that runs on the host, in fp16; see fake_kernel.c. With -DBACKWARD its gradients. */
#include <math.h>
#include <string.h>

#ifdef BACKWARD
#define PARAMS attention_autotuner_retnet_backward_params
#else
#define PARAMS attention_autotuner_retnet_forward_params
#endif
#include "fake_library.h"

size_t attention_autotuner_workspace_bytes(const void* params) {
#ifdef BACKWARD
  Params const* p = params;
  /* The gradient of the mask, summed in fp32. */
  return p->dmask.data ? sizeof(float) * p->heads_q * p->seqlen_q * p->seqlen_k : 0;
#else
  (void)params;
  return 0;
#endif
}

static int kv_of(Params const* p, int h) { return h / (p->heads_q / p->heads_kv); }

/* scale q k^T, and what it is multiplied by. */
static float score(Params const* p, int b, int h, int i, int j, float* weight) {
  int64_t const distance = (int64_t)i + p->causal_offset - j;
  *weight = 0;
  if (!p->causal || distance >= 0) {
    *weight = p->mask.data ? (float)row(p->mask, 0, h, i)[j] : exp2f(p->log2_gamma[h] * distance);
  }
  return p->scale * dot(row(p->q, b, h, i), row(p->k, b, kv_of(p, h), j), p->dim_qk);
}

#ifndef BACKWARD
static void run(Params const* p, float* workspace) {
  (void)workspace;
  for (int b = 0; b < p->batch; ++b)
    for (int h = 0; h < p->heads_q; ++h)
      for (int i = 0; i < p->seqlen_q; ++i) {
        float sum = 0, total[512] = {0};
        for (int j = 0; j < p->seqlen_k; ++j) {
          float weight;
          float const x = score(p, b, h, i, j, &weight) * weight;
          sum += fabsf(x);
          add(total, x, row(p->v, b, kv_of(p, h), j), p->dim_v);
        }
        float const r = p->normalize ? fminf(fmaxf(sum, 1), p->r_clamp_max) : 1;
        for (int d = 0; d < p->dim_v; ++d) total[d] /= r;
        store(row(p->o, b, h, i), total, p->dim_v);
        if (p->r) p->r[((int64_t)b * p->heads_q + h) * p->seqlen_q + i] = r;
      }
}
#else
/* X / r, the gradient of X, and the score and weight that X is made of. */
static float gradient(Params const* p, int b, int h, int i, int j, float* share, float* s, float* weight) {
  float const r = p->r ? p->r[((int64_t)b * p->heads_q + h) * p->seqlen_q + i] : 1;
  *s = score(p, b, h, i, j, weight);
  float const x = *s * *weight;
  float dx = dot(row(p->dout, b, h, i), row(p->v, b, kv_of(p, h), j), p->dim_v);
  if (p->r_grad && r > 1 && r < p->r_clamp_max) {
    dx -= (float)((x > 0) - (x < 0)) * dot(row(p->dout, b, h, i), row(p->o, b, h, i), p->dim_v);
  }
  *share = x / r;
  return dx / r;
}

static void run(Params const* p, float* dmask) {
  float share, s, weight;
  if (p->dmask.data) memset(dmask, 0, attention_autotuner_workspace_bytes(p));
  for (int b = 0; b < p->batch; ++b)
    for (int h = 0; h < p->heads_q; ++h)
      for (int i = 0; i < p->seqlen_q; ++i) {
        float dq[256] = {0};
        for (int j = 0; j < p->seqlen_k; ++j) {
          float const dx = gradient(p, b, h, i, j, &share, &s, &weight);
          add(dq, p->scale * dx * weight, row(p->k, b, kv_of(p, h), j), p->dim_qk);
          int const owner = p->mask.stride_head ? h : 0;
          int const seen = !p->causal || j <= (int64_t)i + p->causal_offset;
          if (p->dmask.data && seen) dmask[((int64_t)owner * p->seqlen_q + i) * p->seqlen_k + j] += dx * s;
        }
        store(row(p->dq, b, h, i), dq, p->dim_qk);
      }
  for (int b = 0; b < p->batch; ++b)
    for (int kv = 0; kv < p->heads_kv; ++kv)
      for (int j = 0; j < p->seqlen_k; ++j) {
        float dk[256] = {0}, dv[512] = {0};
        for (int h = 0; h < p->heads_q; ++h)
          for (int i = 0; kv_of(p, h) == kv && i < p->seqlen_q; ++i) {
            float const dx = gradient(p, b, h, i, j, &share, &s, &weight);
            add(dk, p->scale * dx * weight, row(p->q, b, h, i), p->dim_qk);
            add(dv, share, row(p->dout, b, h, i), p->dim_v);
          }
        store(row(p->dk, b, kv, j), dk, p->dim_qk);
        store(row(p->dv, b, kv, j), dv, p->dim_v);
      }
  for (int h = 0; p->dmask.data && h < (p->mask.stride_head ? p->heads_q : 1); ++h)
    for (int i = 0; i < p->seqlen_q; ++i)
      store(row(p->dmask, 0, h, i), dmask + ((int64_t)h * p->seqlen_q + i) * p->seqlen_k, p->seqlen_k);
}
#endif

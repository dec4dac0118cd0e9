/* Retention as a kernel library that runs on the host, in fp16; see fake_kernel.c. With -DBACKWARD its gradients. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#ifdef BACKWARD
#define PARAMS attention_autotuner_retention_backward_params
#else
#define PARAMS attention_autotuner_retention_forward_params
#endif
#include "fake_library.h"

static int64_t elements(Params const* p) { return (int64_t)p->dim_qk * p->dim_v; }

size_t attention_autotuner_workspace_bytes(const void* params) {
  Params const* p = params;
  /* As real kernels do: sizes count only where the decays are given, and what is wanted costs memory. */
  if (p->log2_gamma == NULL) return 0;
#ifdef BACKWARD
  int64_t const parts = (int64_t)p->batch * p->seqlen * p->heads_kv * (p->dim_qk + p->dim_v);
  int64_t const states = p->dlog2_gamma ? (p->seqlen + 2) * elements(p) : (p->seqlen + 1) * elements(p);
  return sizeof(float) * (parts + states);
#else
  return sizeof(float) * elements(p);
#endif
}

/* The state after a token, in the place of the one before. */
static void advance(Params const* p, float* state, int b, int h, int t) {
  int const kv = h / (p->heads_q / p->heads_kv);
  float const decay = exp2f(p->log2_gamma[h]);
  _Float16 const* k = row(p->k, b, kv, t);
  for (int d = 0; d < p->dim_qk; ++d) {
    for (int e = 0; e < p->dim_v; ++e) state[d * p->dim_v + e] *= decay;
    add(state + d * p->dim_v, (float)k[d], row(p->v, b, kv, t), p->dim_v);
  }
}

static void load(Params const* p, float* state, float const* from, int64_t sequence) {
  size_t const bytes = sizeof(float) * elements(p);
  if (from) memcpy(state, from + sequence * elements(p), bytes);
  else memset(state, 0, bytes);
}

#ifndef BACKWARD
static void run(Params const* p, float* state) {
  for (int b = 0; b < p->batch; ++b)
    for (int h = 0; h < p->heads_q; ++h) {
      int64_t const sequence = (int64_t)b * p->heads_q + h;
      load(p, state, p->initial_state, sequence);
      for (int t = 0; t < p->seqlen; ++t) {
        float o[512] = {0};
        _Float16 const* q = row(p->q, b, h, t);
        advance(p, state, b, h, t);
        for (int d = 0; d < p->dim_qk; ++d)
          for (int e = 0; e < p->dim_v; ++e) o[e] += p->scale * (float)q[d] * state[d * p->dim_v + e];
        store(row(p->o, b, h, t), o, p->dim_v);
      }
      if (p->final_state) memcpy(p->final_state + sequence * elements(p), state, sizeof(float) * elements(p));
    }
}
#else
static void of_token(Params const* p, float const* state, float* ds, float* dk, float* dv, int b, int h, int t) {
  int const kv = h / (p->heads_q / p->heads_kv), n = p->dim_v;
  _Float16 const *q = row(p->q, b, h, t), *go = row(p->dout, b, h, t), *k = row(p->k, b, kv, t),
                 *v = row(p->v, b, kv, t);
  float dq[256] = {0};
  for (int d = 0; d < p->dim_qk; ++d)
    for (int e = 0; e < n; ++e) {
      ds[d * n + e] += p->scale * (float)q[d] * (float)go[e];
      dq[d] += p->scale * (float)go[e] * state[d * n + e];
      dk[d] += (float)v[e] * ds[d * n + e];
      dv[e] += (float)k[d] * ds[d * n + e];
    }
  store(row(p->dq, b, h, t), dq, p->dim_qk);
}

static void run(Params const* p, float* workspace) {
  int64_t const tokens = (int64_t)p->batch * p->heads_kv * p->seqlen;
  float *dk = workspace, *dv = dk + tokens * p->dim_qk, *states = dv + tokens * p->dim_v;
  float* ds = calloc(elements(p), sizeof(float));
  memset(dk, 0, sizeof(float) * tokens * (p->dim_qk + p->dim_v));
  for (int b = 0; b < p->batch; ++b)
    for (int h = 0; h < p->heads_q; ++h) {
      int64_t const sequence = (int64_t)b * p->heads_q + h, n = elements(p);
      int64_t const first = ((int64_t)b * p->heads_kv + h / (p->heads_q / p->heads_kv)) * p->seqlen;
      float const decay = exp2f(p->log2_gamma[h]);
      float share = 0;
      load(p, states, p->initial_state, sequence);
      for (int t = 0; t < p->seqlen; ++t) {
        memcpy(states + (t + 1) * n, states + t * n, sizeof(float) * n);
        advance(p, states + (t + 1) * n, b, h, t);
      }
      load(p, ds, p->dfinal_state, sequence);
      for (int t = p->seqlen - 1; t >= 0; --t) {
        of_token(p, states + (t + 1) * n, ds, dk + (first + t) * p->dim_qk, dv + (first + t) * p->dim_v, b, h, t);
        for (int64_t i = 0; i < n; ++i) {
          ds[i] *= decay;
          share += logf(2) * ds[i] * states[t * n + i];
        }
      }
      if (p->dinitial_state) memcpy(p->dinitial_state + sequence * n, ds, sizeof(float) * n);
      if (p->dlog2_gamma) p->dlog2_gamma[sequence] = share;
    }
  for (int b = 0; b < p->batch; ++b)
    for (int kv = 0; kv < p->heads_kv; ++kv)
      for (int t = 0; t < p->seqlen; ++t) {
        int64_t const token = ((int64_t)b * p->heads_kv + kv) * p->seqlen + t;
        store(row(p->dk, b, kv, t), dk + token * p->dim_qk, p->dim_qk);
        store(row(p->dv, b, kv, t), dv + token * p->dim_v, p->dim_v);
      }
  free(ds);
}
#endif

// Retention token by token: a CTA keeps some columns of a head's state in registers while it loops over the tokens.
//
// A thread holds four columns of every kGroups-th row of the state. A token multiplies the state by gamma, adds k^T v
// to it and reads q S off it; the threads that share columns add their partial sums of that. For a token or a few, as
// in decoding, the time is that of the state's way from and to device memory, in whole rows of the slice. Every thread
// reads its elements before it writes them, so that the state may be updated in place.
#pragma once

#include "attention_autotuner/abi.h"
#include "attention_autotuner/common/convert.cuh"
#include "attention_autotuner/common/dependent_launch.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/scheduler.cuh"
#include "attention_autotuner/common/tensors.cuh"
#include "attention_autotuner/score/score_mod.cuh"

namespace attention_autotuner {

template <typename Config>
struct RecurrentTraits {
  using Element = typename Config::Element;
  static constexpr int kColumns = Config::kColumns;
  static constexpr int kWarps = Config::kWarps;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kSlices = divide_up(Config::kPaddedDimV, kColumns);
  static_assert(Config::kPaddedDimQK % 16 == 0 && Config::kPaddedDimQK >= 16 && Config::kPaddedDimQK <= 256,
                "padded_dim_qk_range");
  static_assert(Config::kPaddedDimV % 16 == 0 && Config::kPaddedDimV >= 16 && Config::kPaddedDimV <= 512,
                "padded_dim_v_range");
  static_assert(kWarps >= 1 && kWarps <= 32, "recurrent_warps_range");
  static_assert(kColumns % 4 == 0 && kColumns <= 128 && 32 % (kColumns / 4) == 0, "recurrent_columns_share_warps");
  static constexpr int kLanes = kColumns / 4;                   // that share a row
  static constexpr int kGroups = kThreads / kLanes;             // of rows
  static constexpr int kRows = Config::kPaddedDimQK / kGroups;  // of a thread
  static_assert(Config::kPaddedDimQK % kGroups == 0, "recurrent_rows_divide");
  static_assert(4 * kRows <= 128, "recurrent_state_fits_registers");
  static constexpr int kSmemBytes = kWarps * kColumns * int(sizeof(float));
};

template <typename Config>
__global__ void __launch_bounds__(RecurrentTraits<Config>::kThreads, Config::kCtasPerSm)
    retention_recurrent(attention_autotuner_retention_forward_params const __grid_constant__ p,
                        Divider const __grid_constant__ heads, Divider const __grid_constant__ group) {
  using T = RecurrentTraits<Config>;
  using Element = typename T::Element;
  extern __shared__ __align__(16) float sums[];  // [warp][column]
  int const thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  int const first_row = thread / T::kLanes, column_in_slice = thread % T::kLanes * 4;
  int const slice = blockIdx.x % T::kSlices, sequence = blockIdx.x / T::kSlices;
  int const batch = heads.divide(sequence), head = sequence - batch * heads.divisor, kv_head = group.divide(head);
  int const column = slice * T::kColumns + column_in_slice;
  bool const in_columns = column < p.dim_v;
  wait_on_dependent_grids();
  // gamma as two summands: near 1, an error of its rounding would grow with every token.
  float const log2_gamma = p.log2_gamma[head];
  bool const near_one = log2_gamma > -0.5f;
  float const gamma = near_one ? 1.0f : exp2f(log2_gamma), rest = near_one ? expm1f(log2_gamma * kLn2) : 0.0f;

  int64_t const place = int64_t(sequence) * p.dim_qk * p.dim_v + column;
  float4 state[T::kRows];
#pragma unroll
  for (int i = 0; i < T::kRows; ++i) {
    int const row = first_row + i * T::kGroups;
    bool const exists = p.initial_state != nullptr && in_columns && row < p.dim_qk;
    state[i] = exists ? *reinterpret_cast<float4 const*>(p.initial_state + place + row * p.dim_v)
                      : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  Element const* q = head_data<Element>(p.q, batch, head) + first_row;
  Element const* k = head_data<Element>(p.k, batch, kv_head) + first_row;
  Element const* v = head_data<Element>(p.v, batch, kv_head) + column;
  auto* o = static_cast<Element*>(p.o.data) + batch * p.o.stride_batch + head * p.o.stride_head;
  for (int token = 0; token < p.seqlen; ++token) {
    float const values[4] = {in_columns ? float(v[0]) : 0.0f, in_columns ? float(v[1]) : 0.0f,
                             in_columns ? float(v[2]) : 0.0f, in_columns ? float(v[3]) : 0.0f};
    float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < T::kRows; ++i) {
      bool const exists = first_row + i * T::kGroups < p.dim_qk;
      float const key = exists ? float(k[i * T::kGroups]) : 0.0f, query = exists ? float(q[i * T::kGroups]) : 0.0f;
      state[i].x = fmaf(gamma, state[i].x, fmaf(rest, state[i].x, key * values[0]));
      state[i].y = fmaf(gamma, state[i].y, fmaf(rest, state[i].y, key * values[1]));
      state[i].z = fmaf(gamma, state[i].z, fmaf(rest, state[i].z, key * values[2]));
      state[i].w = fmaf(gamma, state[i].w, fmaf(rest, state[i].w, key * values[3]));
      out.x = fmaf(query, state[i].x, out.x);
      out.y = fmaf(query, state[i].y, out.y);
      out.z = fmaf(query, state[i].z, out.z);
      out.w = fmaf(query, state[i].w, out.w);
    }
#pragma unroll
    for (int step = 16; step >= T::kLanes; step /= 2) {
      out.x += __shfl_xor_sync(0xffffffffu, out.x, step);
      out.y += __shfl_xor_sync(0xffffffffu, out.y, step);
      out.z += __shfl_xor_sync(0xffffffffu, out.z, step);
      out.w += __shfl_xor_sync(0xffffffffu, out.w, step);
    }
    if (lane < T::kLanes) *reinterpret_cast<float4*>(sums + warp * T::kColumns + column_in_slice) = out;
    __syncthreads();
    for (int pair = thread; pair < T::kColumns / 2; pair += T::kThreads) {
      float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll 8
      for (int other = 0; other < T::kWarps; ++other) {
        sum.x += sums[other * T::kColumns + 2 * pair];
        sum.y += sums[other * T::kColumns + 2 * pair + 1];
      }
      int const at = slice * T::kColumns + 2 * pair;
      if (at < p.dim_v) {
        *reinterpret_cast<uint32_t*>(o + at) = pack_pair<Element>(p.scale * sum.x, p.scale * sum.y);
      }
    }
    __syncthreads();
    q += p.q.stride_row;
    k += p.k.stride_row;
    v += p.v.stride_row;
    o += p.o.stride_row;
  }
  if (p.final_state == nullptr) return;
#pragma unroll
  for (int i = 0; i < T::kRows; ++i) {
    int const row = first_row + i * T::kGroups;
    if (in_columns && row < p.dim_qk) {
      *reinterpret_cast<float4*>(p.final_state + place + row * p.dim_v) = state[i];
    }
  }
}

}  // namespace attention_autotuner

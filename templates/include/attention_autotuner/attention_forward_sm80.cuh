// Attention forward for compute capability 8.0 and newer: O = softmax(scale Q K^T) V, one CTA per block of query rows.
//
// Warps split the rows of a block; each keeps its S, P and O fragments in registers. With more than one warp along keys
// (kWarpsN), each computes its share of S, the row maxima meet in shared memory, and P goes through shared memory so
// that each warp can multiply all of it with its share of V's columns.
//
// Three main loops over the K/V tiles, last tile first (the masked ones come early):
//   by event  one barrier per arriving K tile, K slice or V tile; least shared memory
//   by tile   kStages whole K/V pairs in flight, one barrier per pair
//   ahead     by tile, and the next tile's Q K^T is issued between the exponentials of this one
//
// Layouts: see mma_sm80.cuh (fragments), tile_sm80.cuh (shared memory), attention_forward_traits.cuh (map).
// Called by: attention_forward_entry.cuh.
#pragma once

#include "abi.h"
#include "attention_forward_traits.cuh"
#include "mma_sm80.cuh"
#include "scheduler.cuh"
#include "softmax.cuh"

namespace attention_autotuner {

using ForwardParams = attention_autotuner_attention_forward_params;

template <typename Config>
struct ForwardWarp {
  using T = ForwardTraits<Config>;
  using Element = typename T::Element;
  using Scores = float[T::kRowTiles][T::kKeyTiles][4];
  static constexpr int kQSteps = T::kClassQK / 16;
  static constexpr int kKeySteps = T::kBlockN / 16;

  ForwardParams const& params;
  TileCoordinates const tile;
  uint32_t const smem;
  int const thread = threadIdx.x;
  int const lane = threadIdx.x & 31;
  int const warp_m = (threadIdx.x >> 5) % T::kWarpsM;
  int const warp_n = (threadIdx.x >> 5) / T::kWarpsM;
  int const row0 = tile.row_block * T::kBlockM;
  int const value0 = tile.value_slice * T::kValueColumns;

  GlobalRows<Element> q, k, v;
  int tiles;        // K/V tiles that some row of this block sees
  int whole_keys;   // keys that every row of this block sees
  float c;          // |scale| log2(e)
  uint32_t q_address, k_address, v_address;
  uint32_t q_registers[T::kQInRegisters ? T::kRowTiles : 1][T::kQInRegisters ? kQSteps : 1][4];
  float o[T::kRowTiles][T::kColumnTiles][4];
  SoftmaxState<T::kRowTiles> state;

  __device__ __forceinline__ static GlobalRows<Element> head_rows(attention_autotuner_tensor const& tensor, int batch,
                                                                  int head, int rows, int columns) {
    auto const* data = static_cast<Element const*>(tensor.data);
    return {data + batch * tensor.stride_batch + head * tensor.stride_head, tensor.stride_row, rows, columns};
  }

  // Row i sees keys below this.
  __device__ __forceinline__ int visible_keys(int row) const {
    int const diagonal = row + params.causal_offset + 1;
    return params.causal && diagonal < params.seqlen_k ? diagonal : params.seqlen_k;
  }

  __device__ __forceinline__ ForwardWarp(ForwardParams const& params, TileCoordinates const& tile, uint32_t smem)
      : params(params), tile(tile), smem(smem) {
    int const kv_head = tile.head / (params.heads_q / params.heads_kv);
    q = head_rows(params.q, tile.batch, tile.head, params.seqlen_q, params.dim_qk);
    k = head_rows(params.k, tile.batch, kv_head, params.seqlen_k, params.dim_qk);
    v = head_rows(params.v, tile.batch, kv_head, params.seqlen_k, params.dim_v);
    int const last_row = minimum(row0 + T::kBlockM, params.seqlen_q) - 1;
    tiles = maximum(visible_keys(last_row) + T::kBlockN - 1, 0) / T::kBlockN;
    whole_keys = visible_keys(row0);
    c = params.softmax_scale == 0.0f ? kLog2E : fabsf(params.softmax_scale) * kLog2E;

    LaneRow const a = lane_row_a(lane), b = lane_row_b(lane);
    q_address = smem + T::kQOffset + T::TileQ::offset(warp_m * 16 * T::kRowTiles + a.row, a.column);
    k_address = smem + T::kKOffset + T::TileK::offset(warp_n * 8 * T::kKeyTiles + b.row, b.column);
    v_address = smem + T::kVOffset + T::TileV::offset(a.row, warp_n * 8 * T::kColumnTiles + a.column);
    state.clear();
#pragma unroll
    for (auto& row : o) {
#pragma unroll
      for (auto& column : row) {
#pragma unroll
        for (float& value : column) value = 0.0f;
      }
    }
  }

  // --- loads ---------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void copy_q() const {
    copy_tile<T::kBlockM, T::kClassQK, T::kThreads, Config::kCopyBytes>(smem + T::kQOffset, q, row0, 0, thread);
  }
  __device__ __forceinline__ void copy_k(int step, int slice, int slot) const {
    copy_tile<T::kBlockN, T::kKSlice, T::kThreads, Config::kCopyBytes>(
        smem + T::kKOffset + slot * T::TileK::kBytes, k, key0(step), slice * T::kKSlice, thread);
  }
  __device__ __forceinline__ void copy_v(int step, int slot) const {
    copy_tile<T::kBlockN, T::kValueColumns, T::kThreads, Config::kCopyBytes>(
        smem + T::kVOffset + slot * T::TileV::kBytes, v, key0(step), value0, thread);
  }
  // First key of the step-th tile: the walk starts at the last one.
  __device__ __forceinline__ int key0(int step) const { return (tiles - 1 - step) * T::kBlockN; }

  // The kernels multiply by |scale|: a negative scale flips the signs of Q, a zero one clears it, both exactly. Rare, so
  // it is a pass over Q's shared memory; entered and left with all threads together, Q having arrived.
  __device__ __forceinline__ void apply_scale_sign() const {
    if (params.softmax_scale > 0.0f) return;
    __syncthreads();
    uint32_t const keep = params.softmax_scale == 0.0f ? 0u : 0xffffffffu;
    for (int word = thread; word < T::TileQ::kBytes / 4; word += T::kThreads) {
      uint32_t const address = smem + T::kQOffset + 4 * word;
      uint32_t value;
      asm volatile("ld.shared.b32 %0, [%1];\n" : "=r"(value) : "r"(address) : "memory");
      value = (value ^ 0x80008000u) & keep;
      asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(address), "r"(value) : "memory");
    }
    __syncthreads();
  }

  // Q into registers, its shared memory free again on return. A kernel that keeps Q in shared memory needs no step here.
  __device__ __forceinline__ void take_q() {
    if constexpr (T::kQInRegisters) {
      copy_q();
      cute::cp_async_fence();
      cute::cp_async_wait<0>();
      __syncthreads();
      apply_scale_sign();
#pragma unroll
      for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
        for (int step = 0; step < kQSteps; ++step) {
          load_matrix_x4(q_registers[i][step], q_address + T::TileQ::offset(16 * i, 16 * step));
        }
      }
      __syncthreads();
    } else {
      copy_q();
    }
  }
  // After the first barrier of the main loop.
  __device__ __forceinline__ void settle_q(int step) const {
    if constexpr (!T::kQInRegisters) {
      if (step == 0) apply_scale_sign();
    }
  }

  // --- products ------------------------------------------------------------------------------------------------------

  // s += Q K^T over one slice of K in `slot`; `between(step)` is other work to interleave after each 16 columns.
  template <typename Between>
  __device__ __forceinline__ void multiply_qk(Scores& s, int slice, int slot, Between&& between) {
    uint32_t const k_slot = k_address + slot * T::TileK::kBytes;
#pragma unroll
    for (int step = 0; step < T::kKSlice / 16; ++step) {
      uint32_t a[T::kRowTiles][4];
#pragma unroll
      for (int i = 0; i < T::kRowTiles; ++i) {
        if constexpr (T::kQInRegisters) {
#pragma unroll
          for (int r = 0; r < 4; ++r) a[i][r] = q_registers[i][slice * (T::kKSlice / 16) + step][r];
        } else {
          load_matrix_x4(a[i], q_address + T::TileQ::offset(16 * i, slice * T::kKSlice + 16 * step));
        }
      }
#pragma unroll
      for (int j = 0; j < T::kKeyTiles; j += 2) {
        uint32_t b[4];
        load_matrix_x4(b, k_slot + T::TileK::offset(8 * j, 16 * step));
#pragma unroll
        for (int i = 0; i < T::kRowTiles; ++i) {
          mma_m16n8k16<Element>(s[i][j], a[i], b[0], b[1]);
          mma_m16n8k16<Element>(s[i][j + 1], a[i], b[2], b[3]);
        }
      }
      between(step);
    }
  }

  // P as the A operand of 16 keys: exponentials of two score tiles, packed.
  __device__ __forceinline__ void take_p(uint32_t (&p)[4], Scores& s, int i, int key_step,
                                         float const (&scaled)[T::kRowTiles][2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float(&tile_scores)[4] = s[i][2 * key_step + half];
      exponentiate(tile_scores, state.sum[i], scaled[i], c);
      p[2 * half] = pack_pair<Element>(tile_scores[0], tile_scores[1]);
      p[2 * half + 1] = pack_pair<Element>(tile_scores[2], tile_scores[3]);
    }
  }

  // o += P V for 16 keys; `between(j)` is other work to interleave.
  template <typename Between>
  __device__ __forceinline__ void multiply_pv(uint32_t const (&p)[T::kRowTiles][4], int key_step, int slot,
                                              Between&& between) {
    uint32_t const v_slot = v_address + slot * T::TileV::kBytes;
#pragma unroll
    for (int j = 0; j < T::kColumnTiles; j += 2) {
      uint32_t b[4];
      load_matrix_x4_transposed(b, v_slot + T::TileV::offset(16 * key_step, 8 * j));
#pragma unroll
      for (int i = 0; i < T::kRowTiles; ++i) {
        mma_m16n8k16<Element>(o[i][j], p[i], b[0], b[1]);
        mma_m16n8k16<Element>(o[i][j + 1], p[i], b[2], b[3]);
      }
      between(j / 2);
    }
  }

  // --- softmax between the products ----------------------------------------------------------------------------------

  __device__ __forceinline__ int row_in_block(int i, int half) const {
    return (warp_m * T::kRowTiles + i) * 16 + half * 8 + lane / 4;
  }

  __device__ __forceinline__ void mask(Scores& s, int step) const {
    int const key = key0(step);
    if (key + T::kBlockN <= whole_keys) return;
#pragma unroll
    for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int const limit = visible_keys(row0 + row_in_block(i, half)) - key - warp_n * 8 * T::kKeyTiles - 2 * (lane & 3);
#pragma unroll
        for (int j = 0; j < T::kKeyTiles; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            if (8 * j + e >= limit) s[i][j][2 * half + e] = minus_infinity();
          }
        }
      }
    }
  }

  __device__ __forceinline__ uint32_t statistics(int warp, int i, int half) const {
    return smem + T::kStatisticsOffset + (warp * T::kBlockM + row_in_block(i, half)) * int(sizeof(float));
  }
  // A barrier among the warps that share rows.
  __device__ __forceinline__ void row_barrier() const { named_barrier(1 + warp_m, 32 * T::kWarpsN); }

  // Combines a per-row value of the warps that share rows, by maximum or sum.
  template <typename Combine>
  __device__ __forceinline__ void combine_rows(float (&value)[T::kRowTiles][2], Combine&& combine) const {
#pragma unroll
    for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if ((lane & 3) == 0) {
          asm volatile("st.shared.f32 [%0], %1;\n" ::"r"(statistics(warp_n, i, half)), "f"(value[i][half]) : "memory");
        }
      }
    }
    row_barrier();
#pragma unroll
    for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int other = 1; other < T::kWarpsN; ++other) {
          float theirs;
          asm volatile("ld.shared.f32 %0, [%1];\n"
                       : "=f"(theirs)
                       : "r"(statistics((warp_n + other) % T::kWarpsN, i, half))
                       : "memory");
          value[i][half] = combine(value[i][half], theirs);
        }
      }
    }
  }

  // Masks the scores of a tile and brings the running maximum up to date; returns m c per row.
  __device__ __forceinline__ void prepare_softmax(Scores& s, int step, float (&scaled)[T::kRowTiles][2]) {
    mask(s, step);
    float largest[T::kRowTiles][2];
    row_maximum(largest, s);
    if constexpr (!T::kPInRegisters) combine_rows(largest, [](float a, float b) { return fmaxf(a, b); });
    update_maximum(state, largest, o, c);
    scaled_maximum(scaled, state, c);
  }

  // o += softmax numerators of s times V. The exponentials of the next 16 keys run between the products of these.
  __device__ __forceinline__ void accumulate(Scores& s, int step, int v_slot) {
    float scaled[T::kRowTiles][2];
    prepare_softmax(s, step, scaled);
    if constexpr (T::kPInRegisters) {
      uint32_t p[2][T::kRowTiles][4];
#pragma unroll
      for (int i = 0; i < T::kRowTiles; ++i) take_p(p[0][i], s, i, 0, scaled);
#pragma unroll
      for (int key_step = 0; key_step < kKeySteps; ++key_step) {
        multiply_pv(p[key_step % 2], key_step, v_slot, [&](int j) {
          if (key_step + 1 < kKeySteps && j < T::kRowTiles) take_p(p[(key_step + 1) % 2][j], s, j, key_step + 1, scaled);
        });
        if constexpr (T::kColumnTiles / 2 < T::kRowTiles) {
#pragma unroll
          for (int i = T::kColumnTiles / 2; i < T::kRowTiles; ++i) {
            if (key_step + 1 < kKeySteps) take_p(p[(key_step + 1) % 2][i], s, i, key_step + 1, scaled);
          }
        }
      }
    } else {
      store_p(s, scaled);
      row_barrier();
      uint32_t const p_address = smem + T::kPOffset + T::TileP::offset(row_in_block(0, 0) - lane / 4, 0) +
                                 T::TileP::offset(lane_row_a(lane).row, lane_row_a(lane).column);
#pragma unroll
      for (int key_step = 0; key_step < kKeySteps; ++key_step) {
        uint32_t p[T::kRowTiles][4];
#pragma unroll
        for (int i = 0; i < T::kRowTiles; ++i) load_matrix_x4(p[i], p_address + T::TileP::offset(16 * i, 16 * key_step));
        multiply_pv(p, key_step, v_slot, [](int) {});
      }
    }
  }

  // This warp's share of P into shared memory. The maxima's barrier has shown that all warps are done with the last P.
  __device__ __forceinline__ void store_p(Scores& s, float const (&scaled)[T::kRowTiles][2]) {
#pragma unroll
    for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < T::kKeyTiles; ++j) {
        exponentiate(s[i][j], state.sum[i], scaled[i], c);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32_t const address =
              smem + T::kPOffset +
              T::TileP::offset(row_in_block(i, half), warp_n * 8 * T::kKeyTiles + 8 * j + 2 * (lane & 3));
          asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(address),
                       "r"(pack_pair<Element>(s[i][j][2 * half], s[i][j][2 * half + 1]))
                       : "memory");
        }
      }
    }
  }

  __device__ __forceinline__ static void clear(Scores& s) {
#pragma unroll
    for (auto& row : s) {
#pragma unroll
      for (auto& column : row) {
#pragma unroll
        for (float& value : column) value = 0.0f;
      }
    }
  }
};

}  // namespace attention_autotuner

// The softmax between the MMAs of a backward's passes: P from S, dS from P and dP.
#pragma once

#include "attention_autotuner/common/convert.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/shared_memory.cuh"
#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/score/lse_delta.cuh"
#include "attention_autotuner/score/score_mod.cuh"

namespace attention_autotuner {

template <typename T>
struct BackwardScoreMod<ScoreMod::kSoftmax, T> {
  static constexpr bool kAlwaysNeedsScores = true;  // every pass takes S

  template <typename Arguments>
  __device__ __forceinline__ static constexpr bool needs_scores(Arguments const&) {
    return true;
  }
  // True where a value warp sends P to its key warp.
  template <typename Arguments>
  __device__ __forceinline__ static constexpr bool exchanges_p(Arguments const&) {
    return true;
  }

  // --- key pass ------------------------------------------------------------------------------------------------------

  // P^T from S^T, packed, and handed to the other warp of the pair.
  template <bool Whole, typename Warp>
  __device__ __forceinline__ static void compute_p(Warp const& w, typename Warp::Packed& p, typename Warp::Scores& s,
                                                   int slot, int part, int query0, int key) {
    uint32_t const lse2 = w.lse_delta(slot) + 4 * part * T::kSubtileRows + 8 * (lane_here() & 3);
#pragma unroll
    for (int step = 0; step < T::kQuerySteps; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int const j = 2 * step + half;
        float2 const l = load_shared_float2(lse2 + 32 * j);
#pragma unroll
        for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            s[i][j][e] = exp2_approximate(fmaf(s[i][j][e], w.arguments.c, e % 2 == 0 ? -l.x : -l.y));
          }
        }
      }
      if constexpr (!Whole) mask(w, s, step, query0, key);
#pragma unroll
      for (int i = 0; i < T::kRowTiles; ++i) {
        uint32_t (&a)[4] = p[step][i];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          a[r] =
              pack_pair<typename T::Element>(s[i][2 * step + r / 2][r % 2 * 2], s[i][2 * step + r / 2][r % 2 * 2 + 1]);
        }
        w.send_p(a, part, step, i);
      }
    }
  }
  // Clears the probabilities of 16 queries' unseen keys.
  template <typename Warp>
  __device__ __forceinline__ static void mask(Warp const& w, typename Warp::Scores& s, int step, int query0, int key) {
#pragma unroll
    for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int const row = key + 16 * i + 8 * half + lane_here() / 4;
        int const first = row < w.arguments.params.seqlen_k
                              ? w.arguments.first_query(row) - query0 - 16 * step - 2 * (lane_here() & 3)
                              : INT32_MAX;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            if (8 * j + e < first) s[i][2 * step + j][2 * half + e] = 0.0f;
          }
        }
      }
    }
  }

  // dS^T = P^T (dP^T - delta) from dP^T and the other warp's P^T, packed: kept for dK at once, stored for dQ and for a
  // later dK.
  template <typename Warp>
  __device__ __forceinline__ static void compute_ds(Warp const& w, typename Warp::Packed& ds,
                                                    typename Warp::Scores const& dp, int slot, int part) {
    uint32_t const store = w.ds_address(slot);
    uint32_t const shift =
        w.lse_delta(slot) + T::kLseDeltaBytes / 2 + 4 * part * T::kSubtileRows + 8 * (lane_here() & 3);
#pragma unroll
    for (int step = 0; step < T::kQuerySteps; ++step) {
      float2 const delta[2] = {load_shared_float2(shift + 64 * step), load_shared_float2(shift + 64 * step + 32)};
#pragma unroll
      for (int i = 0; i < T::kRowTiles; ++i) {
        uint32_t p[4];
        w.receive_p(p, part, step, i);
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          float2 const probability = unpack_pair<typename T::Element>(p[r]);
          float const(&d)[4] = dp[i][2 * step + r / 2];
          ds[step][i][r] = pack_pair<typename T::Element>(probability.x * (d[r % 2 * 2] + delta[r / 2].x),
                                                          probability.y * (d[r % 2 * 2 + 1] + delta[r / 2].y));
          if constexpr (T::kStoresDs) {
            store_shared(
                T::TileDs::advance(store, 16 * i + 8 * (r % 2), part * T::kSubtileRows + 16 * step + 8 * (r / 2)),
                ds[step][i][r]);
          }
        }
      }
    }
  }

  // --- row pass ------------------------------------------------------------------------------------------------------

  // dP starts from -delta, so that its MMA gives dP - delta.
  template <typename Warp>
  __device__ __forceinline__ static void begin_dp(Warp const& w, typename Warp::Scores& dp, int slot) {
    uint32_t const delta = w.lse_delta(slot) + T::kLseDeltaBytes / 2 + 4 * w.warp_column() + 8 * (lane_here() & 3);
#pragma unroll
    for (int j = 0; j < T::kColumnTiles; ++j) {
      float2 d;
      if constexpr (!T::kByQueries) d = load_shared_float2(delta + 32 * j);
#pragma unroll
      for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if constexpr (T::kByQueries) {
            dp[i][j][e] = w.shift[i][e / 2];
          } else {
            dp[i][j][e] = e % 2 == 0 ? d.x : d.y;
          }
        }
      }
    }
  }

  // The A operand of sixteen columns, packed: P, or dS = P (dP - delta).
  template <typename Warp>
  __device__ __forceinline__ static void compute_operand(Warp const& w, uint32_t (&packed)[T::kRowTiles][4],
                                                         typename Warp::Scores& s, typename Warp::Scores const& dp,
                                                         int step, bool whole, int slot) {
    uint32_t const lse2_address = w.lse_delta(slot) + 4 * w.warp_column() + 8 * (lane_here() & 3);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int const j = 2 * step + half;
      float2 l;
      if constexpr (!T::kByQueries) l = load_shared_float2(lse2_address + 32 * j);
#pragma unroll
      for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float base;
          if constexpr (T::kByQueries) {
            base = w.base[i][e / 2];
          } else {
            base = e % 2 == 0 ? l.x : l.y;
          }
          s[i][j][e] = exp2_approximate(fmaf(s[i][j][e], w.arguments.c, -base));
        }
      }
    }
    if (!whole) {
#pragma unroll
      for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          int const row = w.row0 + w.warp_row() + 16 * i + e / 2 % 2 * 8 + lane_here() / 4;
          int const column =
              w.now.tile * T::kBlockColumns + w.warp_column() + 16 * step + e / 4 * 8 + 2 * (lane_here() & 3) + e % 2;
          if (!w.meets(row, column)) s[i][2 * step + e / 4][e % 4] = 0.0f;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        int const j = 2 * step + r / 2, e = r % 2 * 2;
        float low = s[i][j][e], high = s[i][j][e + 1];
        if constexpr (T::kNeedsDp) {
          low *= dp[i][j][e];
          high *= dp[i][j][e + 1];
        }
        packed[i][r] = pack_pair<typename T::Element>(low, high);
      }
    }
  }
};

}  // namespace attention_autotuner

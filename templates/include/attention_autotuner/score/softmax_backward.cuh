// The softmax between the MMAs of a backward's passes: P from S, dS from P and dP.
#pragma once

#include "attention_autotuner/common/convert.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/shared_memory.cuh"
#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/score/lse_delta.cuh"
#include "attention_autotuner/score/mask_patch.cuh"
#include "attention_autotuner/score/modifications.cuh"
#include "attention_autotuner/score/score_mod.cuh"

namespace attention_autotuner {

// The modifications of a pass, for its accumulators of a tile.
template <typename T, bool kModified = T::kModified>
struct Modifier {
  static constexpr bool kHasDerivative = false;
  struct Derivatives {};
  template <bool kKeysAreRows>
  struct Patch {};

  template <typename... Where>
  __device__ __forceinline__ static Modifier of_keys(Where const&...) {
    return {};
  }
  template <typename Warp>
  __device__ __forceinline__ static Modifier of_rows(Warp const&) {
    return {};
  }
  template <typename Patch>
  __device__ __forceinline__ static void read(Patch const&, int) {}
};

template <typename T>
struct Modifier<T, true> {
  using Modifications = typename T::Modifications;
  static constexpr bool kHasDerivative = Modifications::kHasDerivative;

  // Those of sixteen columns' scores; nothing where all are 1.
  struct Derivatives {
    float values[kHasDerivative ? T::kRowTiles : 1][2][4];

    __device__ __forceinline__ float& at(int i, int j, int e) { return values[kHasDerivative ? i : 0][j][e]; }
  };

  // What a mask adds to them.
  template <bool kKeysAreRows>
  using Patch = MaskPatch<Modifications, 2 * T::kRowTiles, 2, kKeysAreRows>;

  Modifications modifications;
  float c;
  ScorePlace first;  // of this lane's first score

  template <typename Arguments>
  __device__ __forceinline__ Modifier(Arguments const& arguments, int batch, int head, int row, int column)
      : modifications(arguments.params, batch, head),
        c(arguments.c),
        first{row, column, float(row + arguments.params.seqlen_k - arguments.params.seqlen_q - column),
              column - (row + arguments.params.seqlen_k - arguments.params.seqlen_q)} {}

  // Of a key pass: keys are rows of accumulators.
  template <typename Warp>
  __device__ __forceinline__ static Modifier of_keys(Warp const& w, int query0, int key) {
    return {w.arguments, w.batch, w.now.head, query0 + 2 * (lane_here() & 3), key + lane_here() / 4};
  }
  // Of a row pass.
  template <typename Warp>
  __device__ __forceinline__ static Modifier of_rows(Warp const& w) {
    int const row = w.row0 + w.warp_row() + lane_here() / 4;
    int const column = w.now.tile * T::kBlockColumns + w.warp_column() + 2 * (lane_here() & 3);
    return {w.arguments, w.batch, T::kByQueries ? w.head : w.now.head, T::kByQueries ? row : column,
            T::kByQueries ? column : row};
  }

  // Reads what is added to the scores of sixteen columns of accumulators, from `column` after the first on.
  template <bool kKeysAreRows>
  __device__ __forceinline__ void read(Patch<kKeysAreRows>& patch, int column) const {
    int const row_of_first = kKeysAreRows ? first.column : first.row;
    patch.read(modifications, row_of_first, (kKeysAreRows ? first.row : first.column) + column);
  }
  // The score of so many rows and columns further, in powers of two.
  __device__ __forceinline__ float apply(float score, int rows, int columns, float& derivative) const {
    ScorePlace const at{first.row + rows, first.column + columns, first.distance + float(rows - columns),
                        first.past + columns - rows};
    return modifications.apply(score * c, at, derivative);
  }
};

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
    auto const modifier = Modifier<T>::of_keys(w, query0, key);
    typename Modifier<T>::Derivatives derivatives;
#pragma unroll
    for (int step = 0; step < T::kQuerySteps; ++step) {
      typename Modifier<T>::template Patch<true> patch;
      modifier.read(patch, 16 * step);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int const j = 2 * step + half;
        float2 const l = load_shared_float2(lse2 + 32 * j);
#pragma unroll
        for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            if constexpr (T::kModified) {
              float const score =
                  modifier.apply(s[i][j][e], 8 * j + e % 2, 16 * i + 8 * (e / 2), derivatives.at(i, half, e));
              float const base = e % 2 == 0 ? l.x : l.y;
              s[i][j][e] = exp2_approximate(patch.apply(score - base, 2 * i + e / 2, half, e % 2));
            } else {
              s[i][j][e] = exp2_approximate(fmaf(s[i][j][e], w.arguments.c, e % 2 == 0 ? -l.x : -l.y));
            }
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
        if constexpr (Modifier<T>::kHasDerivative) {
          // What becomes of dS: P times the derivative.
          uint32_t sent[4];
#pragma unroll
          for (int r = 0; r < 4; ++r) {
            float (&p0)[4] = s[i][2 * step + r / 2];
            int const e = r % 2 * 2;
            sent[r] = pack_pair<typename T::Element>(p0[e] * derivatives.at(i, r / 2, e),
                                                     p0[e + 1] * derivatives.at(i, r / 2, e + 1));
          }
          w.send_p(sent, part, step, i);
        } else {
          w.send_p(a, part, step, i);
        }
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
        int end = 0;
        if constexpr (T::kModified) end = w.arguments.end_of_queries(row) - query0 - 16 * step - 2 * (lane_here() & 3);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            if (8 * j + e < first || (T::kModified && 8 * j + e >= end)) s[i][2 * step + j][2 * half + e] = 0.0f;
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
    auto const modifier = Modifier<T>::of_rows(w);
    typename Modifier<T>::Derivatives derivatives;
    typename Modifier<T>::template Patch<!T::kByQueries> patch;
    modifier.read(patch, 16 * step);
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
          if constexpr (T::kModified) {
            int const row = 16 * i + 8 * (e / 2), column = 8 * j + e % 2;
            float const score = modifier.apply(s[i][j][e], T::kByQueries ? row : column, T::kByQueries ? column : row,
                                               derivatives.at(i, half, e));
            s[i][j][e] = exp2_approximate(patch.apply(score - base, 2 * i + e / 2, half, e % 2));
          } else {
            s[i][j][e] = exp2_approximate(fmaf(s[i][j][e], w.arguments.c, -base));
          }
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
          if constexpr (Modifier<T>::kHasDerivative) {
            low *= derivatives.at(i, r / 2, e);
            high *= derivatives.at(i, r / 2, e + 1);
          }
        }
        packed[i][r] = pack_pair<typename T::Element>(low, high);
      }
    }
  }
};

}  // namespace attention_autotuner

// Retention's score modification between the MMAs of a backward's passes: P = c S M / r and dS = dX M with dX = dP / r,
// and, in rows whose r has a gradient, dX = (dP - sign(X) delta) / r.
//
// dS needs no P, so the pairs of a key pass do not meet and the row passes for dQ and dK leave S out, unless r has a
// gradient (r_grad, known at run time): that takes the sign of X.
//
// M is read from a tile of the mask, which travels beside the streamed tiles, or is an exponential of the distance.
// Above the diagonal it is 0, whatever the mask holds there. Beyond the sequences the neutral values of rows and the
// zeros that copies leave make everything 0.
//
// Layouts: mask tiles are queries x keys; passes whose rows are keys read them transposed. See common/warp_mma.cuh
// (fragments).
#pragma once

#include "attention_autotuner/common/convert.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/shared_memory.cuh"
#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/common/warp_mma.cuh"
#include "attention_autotuner/score/lse_delta.cuh"
#include "attention_autotuner/score/mask_stream.cuh"
#include "attention_autotuner/score/score_mod.cuh"
#include "attention_autotuner/sm80/operand.cuh"

namespace attention_autotuner {

// M for a warp's scores: rows from `row` and columns from `column` of the tensors on, which are `tile_row` and
// `tile_column` of the mask's tile. Rows are queries or keys, as in the pass.
template <typename T>
class ScoreFactors {
 public:
  static constexpr bool kMasked = T::kScoreMod == ScoreMod::kMasked;
  static constexpr int kWidth = T::kByQueries ? 8 * T::kScoreColumnTiles : 16 * T::kRowTiles;

  template <typename Arguments>
  __device__ __forceinline__ ScoreFactors(Arguments const& arguments, uint32_t smem, int slot, int lane, int head,
                                          int row, int column, int tile_row, int tile_column)
      : mask_(place(smem + T::kMaskOffset + slot * T::TileM::kBytes, lane, tile_row, tile_column)) {
    int const r = row + lane / 4, c = column + 2 * (lane & 3);
    distance_ = T::kByQueries ? r - c : c - r;
    if (arguments.params.causal) {
      distance_ += arguments.params.causal_offset;
    } else {
      distance_ = INT32_MAX / 2;
    }
    if constexpr (!kMasked) log2_gamma_ = arguments.params.log2_gamma[head];
  }

  // For 16-row tile i and 16 columns: m[2 r + e] belongs to element e of register r of the packed scores.
  template <bool Whole>
  __device__ __forceinline__ void load(float (&m)[8], int i, int step) const {
    uint32_t words[4];
    if constexpr (kMasked) {
      if constexpr (T::kByQueries) {
        load_matrix_x4(words, mask_.at(16 * i, 16 * step));
      } else {
        load_matrix_x4_transposed(words, mask_.at(16 * step, 16 * i));
      }
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      float2 pair;
      if constexpr (kMasked) pair = unpack_pair<typename T::Element>(words[r]);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        int const by = 16 * step + 8 * (r / 2) + e - 16 * i - 8 * (r % 2);  // columns minus rows
        int const further = T::kByQueries ? -by : by;
        float& value = m[2 * r + e];
        if constexpr (kMasked) {
          value = e == 0 ? pair.x : pair.y;
        } else {
          value = exp2_approximate(log2_gamma_ * (float(distance_) + float(further)));
        }
        if (!Whole && distance_ + further < 0) value = 0.0f;
      }
    }
  }

 private:
  using Mask = Operand<typename T::TileM, kWidth>;
  __device__ __forceinline__ static Mask place(uint32_t tile, int lane, int tile_row, int tile_column) {
    if constexpr (T::kByQueries) {
      LaneRow const a = lane_row_a(lane);
      return Mask(tile, tile_row + a.row, tile_column + a.column);
    } else {
      LaneRow const b = lane_row_b(lane);
      return Mask(tile, tile_column + b.row, tile_row + b.column);
    }
  }

  Mask mask_;
  int distance_;  // from this lane's first key to its first query, such that negative ones are above the diagonal
  float log2_gamma_;
};

template <ScoreMod kScoreMod, typename T>
struct BackwardScoreMod {
  using Element = typename T::Element;
  static constexpr bool kAlwaysNeedsScores = false;

  template <typename Arguments>
  __device__ __forceinline__ static bool needs_scores(Arguments const& arguments) {
    return arguments.params.r_grad != 0;
  }
  template <typename Arguments>
  __device__ __forceinline__ static bool exchanges_p(Arguments const& arguments) {
    return arguments.params.r_grad != 0;
  }

  // --- key pass ------------------------------------------------------------------------------------------------------

  template <typename Warp>
  __device__ __forceinline__ static ScoreFactors<T> key_factors(Warp const& w, int slot, int part, int query0,
                                                                int key) {
    return {w.arguments,           w.smem, slot, lane_here(), w.now.head, key, query0, w.pair() * T::kRowsPerWarp,
            part * T::kSubtileRows};
  }

  // P^T from S^T, packed.
  template <bool Whole, typename Warp>
  __device__ __forceinline__ static void compute_p(Warp const& w, typename Warp::Packed& p, typename Warp::Scores& s,
                                                   int slot, int part, int query0, int key) {
    ScoreFactors<T> const factors = key_factors(w, slot, part, query0, key);
    uint32_t const base = w.lse_delta(slot) + 4 * part * T::kSubtileRows + 8 * (lane_here() & 3);
    float const c = w.arguments.c;
    bool const exchanges = exchanges_p(w.arguments);
#pragma unroll
    for (int step = 0; step < T::kQuerySteps; ++step) {
      float2 const b[2] = {load_shared_float2(base + 64 * step), load_shared_float2(base + 64 * step + 32)};
#pragma unroll
      for (int i = 0; i < T::kRowTiles; ++i) {
        float m[8];
        factors.template load<Whole>(m, i, step);
        float values[8];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          float const(&x)[4] = s[i][2 * step + r / 2];
          values[2 * r] = x[r % 2 * 2] * m[2 * r] * (b[r / 2].x * c);
          values[2 * r + 1] = x[r % 2 * 2 + 1] * m[2 * r + 1] * (b[r / 2].y * c);
          p[step][i][r] = pack_pair<Element>(values[2 * r], values[2 * r + 1]);
        }
        if (exchanges) {
          // The other warp needs signs: values that 16 bits round to zero keep theirs by a mark in the last place.
          uint32_t marked[4];
#pragma unroll
          for (int r = 0; r < 4; ++r) {
            marked[r] = p[step][i][r] | uint32_t(values[2 * r] != 0.0f) | uint32_t(values[2 * r + 1] != 0.0f) << 16;
          }
          w.send_p(marked, part, step, i);
        }
      }
    }
  }

  // dS^T from dP^T, packed: kept for dK at once, stored for dQ and for a later dK.
  template <typename Warp>
  __device__ __forceinline__ static void compute_ds(Warp const& w, typename Warp::Packed& ds,
                                                    typename Warp::Scores const& dp, int slot, int part) {
    int const query0 = w.now.tile * T::kBlockM + part * T::kSubtileRows, key = w.key0 + w.pair() * T::kRowsPerWarp;
    bool const whole = w.arguments.first_query(key + T::kRowsPerWarp - 1) <= query0;
    if (exchanges_p(w.arguments)) {
      compute_ds<false, true>(w, ds, dp, slot, part, query0, key);
    } else if (whole) {
      compute_ds<true, false>(w, ds, dp, slot, part, query0, key);
    } else {
      compute_ds<false, false>(w, ds, dp, slot, part, query0, key);
    }
  }
  template <bool Whole, bool RGrad, typename Warp>
  __device__ __forceinline__ static void compute_ds(Warp const& w, typename Warp::Packed& ds,
                                                    typename Warp::Scores const& dp, int slot, int part, int query0,
                                                    int key) {
    ScoreFactors<T> const factors = key_factors(w, slot, part, query0, key);
    uint32_t const store = w.ds_address(slot);
    uint32_t const base = w.lse_delta(slot) + 4 * part * T::kSubtileRows + 8 * (lane_here() & 3);
#pragma unroll
    for (int step = 0; step < T::kQuerySteps; ++step) {
      float2 b[2], shift[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        b[half] = load_shared_float2(base + 64 * step + 32 * half);
        if constexpr (RGrad) shift[half] = load_shared_float2(base + T::kLseDeltaBytes / 2 + 64 * step + 32 * half);
      }
#pragma unroll
      for (int i = 0; i < T::kRowTiles; ++i) {
        float m[8];
        factors.template load<Whole>(m, i, step);
        uint32_t p[4];
        if constexpr (RGrad) w.receive_p(p, part, step, i);
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          float const(&d)[4] = dp[i][2 * step + r / 2];
          float low = d[r % 2 * 2] * b[r / 2].x, high = d[r % 2 * 2 + 1] * b[r / 2].y;
          if constexpr (RGrad) {
            float2 const p_pair = unpack_pair<Element>(p[r]);
            low += with_sign(p_pair.x, shift[r / 2].x);
            high += with_sign(p_pair.y, shift[r / 2].y);
          }
          ds[step][i][r] = pack_pair<Element>(low * m[2 * r], high * m[2 * r + 1]);
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

  template <typename Warp>
  __device__ __forceinline__ static void begin_dp(Warp const&, typename Warp::Scores& dp, int) {
    clear(dp);
  }

  // The A operand of sixteen columns, packed: P or dS.
  template <typename Warp>
  __device__ __forceinline__ static void compute_operand(Warp const& w, uint32_t (&packed)[T::kRowTiles][4],
                                                         typename Warp::Scores const& s,
                                                         typename Warp::Scores const& dp, int step, bool whole,
                                                         int slot) {
    if (whole) {
      compute_operand<true>(w, packed, s, dp, step, slot);
    } else {
      compute_operand<false>(w, packed, s, dp, step, slot);
    }
  }
  template <bool Whole, typename Warp>
  __device__ __forceinline__ static void compute_operand(Warp const& w, uint32_t (&packed)[T::kRowTiles][4],
                                                         typename Warp::Scores const& s,
                                                         typename Warp::Scores const& dp, int step, int slot) {
    int const column = w.now.tile * T::kBlockColumns + w.warp_column();
    ScoreFactors<T> const factors(w.arguments, w.smem, slot, lane_here(), T::kByQueries ? w.head : w.now.head,
                                  w.row0 + w.warp_row(), column, w.warp_row(), w.warp_column());
    float const c = w.arguments.c;
    bool const r_grad = needs_scores(w.arguments);
    float2 bases[2], shifts[2];  // of the columns, where they are queries
    if constexpr (!T::kByQueries) {
      uint32_t const address = w.lse_delta(slot) + 4 * w.warp_column() + 8 * (lane_here() & 3) + 64 * step;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        bases[half] = load_shared_float2(address + 32 * half);
        if (T::kNeedsDp && r_grad) shifts[half] = load_shared_float2(address + 32 * half + T::kLseDeltaBytes / 2);
      }
    }
#pragma unroll
    for (int i = 0; i < T::kRowTiles; ++i) {
      float m[8];
      factors.template load<Whole>(m, i, step);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        float value[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          int const j = 2 * step + r / 2, at = r % 2 * 2 + e;
          float base, shift;
          if constexpr (T::kByQueries) {
            base = w.base[i][r % 2];
            shift = w.shift[i][r % 2];
          } else {
            base = e == 0 ? bases[r / 2].x : bases[r / 2].y;
            shift = e == 0 ? shifts[r / 2].x : shifts[r / 2].y;
          }
          if constexpr (T::kNeedsDp) {
            float dx = dp[i][j][at] * base;
            if (r_grad) dx += with_sign(s[i][j][at] * m[2 * r + e] * c, shift);
            value[e] = dx * m[2 * r + e];
          } else {
            value[e] = s[i][j][at] * m[2 * r + e] * (base * c);
          }
        }
        packed[i][r] = pack_pair<Element>(value[0], value[1]);
      }
    }
  }
};

}  // namespace attention_autotuner

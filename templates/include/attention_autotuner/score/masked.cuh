// The score modification of retention in a forward kernel: X = scale S * M, W = X / r, r = clamp(rowsum |X|, 1,
// r_clamp_max) or 1.
//
// With Y = S * M, P = Y times a factor of the row and O = P V grows unnormalised; the factor, scale and r meet O once,
// at the end. In bf16 the factor is 1: P has the range of fp32. In fp16 it is scale times a power of two, 1 until a
// tile's sum of |Y| says that an element might leave the range of P (or come near enough): then the row's power of two
// goes down and its O is rescaled, which is rare.
//
// A decay needs no mask in memory. Within a tile it is a factor of the column, by its distance to the tile's last key,
// and a factor of the row, which the one above joins. That needs gamma^block_n not too small; other heads take an
// exponential an element.
#pragma once

#include "attention_autotuner/common/convert.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/scheduler.cuh"
#include "attention_autotuner/common/shared_memory.cuh"
#include "attention_autotuner/common/tensors.cuh"
#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/common/warp_mma.cuh"
#include "attention_autotuner/score/score_mod.cuh"
#include "attention_autotuner/sm80/mask_tile.cuh"
#include "attention_autotuner/sm80/operand.cuh"

namespace attention_autotuner {

inline constexpr float kPLimit = 16384.0f;  // of a lane's sum of |P| in a tile, in fp16
inline constexpr int kPExponent = 9;        // a lowered row's largest such sum is within 2^9 and 2^10
inline constexpr float kFarthest = 150.0f;  // a decay of 2^-150 is none to fp32
inline constexpr int kMaxReach = 1 << 30;
inline constexpr float kSteepest = 60.0f;  // a tile whose decay spans more powers of two takes exponentials

template <ScoreMod kScoreMod, typename T>
struct ForwardScoreMod {
  using Element = typename T::Element;
  using Copy = MaskCopy<T::kBlockM, T::kBlockN, T::kThreads, T::kCopyBytes, T::kPadded>;
  using Rows = float[T::kRowTiles][2];
  static constexpr bool kMasked = kScoreMod == ScoreMod::kMasked;
  static constexpr bool kGuarded = std::is_same_v<Element, __half>;  // P could overflow

  Rows sum;  // of |Y|, or of |P| for a decay, over this lane's columns, until the end
  float guard[kGuarded ? T::kRowTiles : 1][2];  // scale times the row's power of two

  Element const* mask_next;  // this thread's first chunk of the mask tile that is fetched next
  float log2_gamma;
  int skipped;  // keys that are too far from all rows

  template <typename Warp>
  __device__ __forceinline__ void begin(Warp& w, TileCoordinates const& tile) {
    clear_rows(w.c);
    auto const& p = w.params;
    if constexpr (kMasked) {
      int const thread = thread_index();
      mask_next = static_cast<Element const*>(p.mask.data) + tile.head * p.mask.stride_head +
                  int64_t(tile.row_block * T::kBlockM + Copy::row(thread)) * p.mask.stride_row +
                  (w.tiles - 1) * T::kBlockN + Copy::column(thread);
    } else {
      log2_gamma = p.log2_gamma[tile.head];
      // The distance of a tile's last key to the first row must leave a decay.
      float const reach = fminf(kFarthest / fabsf(log2_gamma), float(kMaxReach));  // gamma may be 1
      int const row = tile.row_block * T::kBlockM + p.causal_offset;
      int const tiles = minimum(maximum(row - int(reach), 0) / T::kBlockN, w.tiles);
      skipped = tiles * T::kBlockN;
      w.tiles -= tiles;
      w.exact_tiles = maximum(w.exact_tiles - tiles, 0);
    }
  }
  __device__ __forceinline__ void clear_rows(float scale) {
#pragma unroll
    for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        sum[i][h] = 0.0f;
        if constexpr (kGuarded) guard[i][h] = scale;
      }
    }
  }
  // Where the first tile starts.
  __device__ __forceinline__ int far_keys() const {
    if constexpr (kMasked) {
      return 0;
    } else {
      return skipped;
    }
  }

  // --- the mask's tiles, which travel with V's -----------------------------------------------------------------------

  template <typename Warp>
  __device__ __forceinline__ static uint32_t mask_buffer(Warp const& w, int slot) {
    return w.smem + T::kMaskOffset + Copy::offset(thread_index()) + slot * T::TileM::kBytes;
  }
  template <typename Warp>
  __device__ __forceinline__ void start_mask(Warp const& w, int key_tile, int slot) const {
    if constexpr (kMasked) {
      Copy::copy(mask_buffer(w, slot), mask_next, w.params.mask.stride_row,
                 w.params.seqlen_q - w.tile().row_block * T::kBlockM, w.params.seqlen_k - key_tile * T::kBlockN);
    }
  }
  template <typename Warp>
  __device__ __forceinline__ void copy_mask_part(Warp const& w, bool wanted, int slot, int part, int num_parts) const {
    if constexpr (kMasked) {
      Copy::copy_part(wanted, mask_buffer(w, slot), mask_next, w.params.mask.stride_row, part, num_parts);
    }
  }
  __device__ __forceinline__ void next_mask() {
    if constexpr (kMasked) mask_next -= T::kBlockN;
  }

  // --- between the MMAs ----------------------------------------------------------------------------------------------

  // Y from S, or P at once for a decay, and its sums.
  template <typename Warp>
  __device__ __forceinline__ void prepare(Warp& w, typename Warp::Scores& s, int key_tile, int slot) {
    if constexpr (kMasked) {
      apply_mask(w, s, slot);
    } else if (log2_gamma * T::kBlockN >= -kSteepest) {
      apply_decay(w, s, key_tile);
    } else {
      apply_steep_decay(w, s, key_tile);
    }
    w.apply_causal_mask(s, key_tile, 0.0f);
    Rows row_max;
#pragma unroll
    for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        row_max[i][h] = 0.0f;
#pragma unroll
        for (int j = 0; j < T::kKeyTiles; ++j) row_max[i][h] += fabsf(s[i][j][2 * h]) + fabsf(s[i][j][2 * h + 1]);
        sum[i][h] += row_max[i][h];
      }
    }
    if constexpr (kGuarded) lower(w, s, row_max);
  }
  template <typename Warp>
  __device__ __forceinline__ void numerators(Warp const&, float (&s)[4], int i) const {
    if constexpr (kMasked && kGuarded) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[e] *= guard[i][e / 2];
    }
  }

  template <typename Warp>
  __device__ __forceinline__ void apply_mask(Warp const& w, typename Warp::Scores& s, int slot) const {
    LaneRow const a = lane_row_a(lane_here());
    Operand<typename T::TileM, 8 * T::kKeyTiles> const mask(w.smem + T::kMaskOffset + slot * T::TileM::kBytes,
                                                            w.warp_m() * 16 * T::kRowTiles + a.row,
                                                            w.warp_n() * 8 * T::kKeyTiles + a.column);
#pragma unroll
    for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < T::kKeyTiles; j += 2) {
        uint32_t m[4];
        load_matrix_x4(m, mask.at(16 * i, 8 * j));
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          float2 const pair = unpack_pair<Element>(m[r]);
          s[i][j + r / 2][r % 2 * 2] *= pair.x;
          s[i][j + r / 2][r % 2 * 2 + 1] *= pair.y;
        }
      }
    }
  }
  // Columns by their distance to the tile's last key, rows by that key's distance to them: negative, but no more than
  // the tile is wide, where a row sees part of the tile.
  template <typename Warp>
  __device__ __forceinline__ void apply_decay(Warp const& w, typename Warp::Scores& s, int key_tile) {
    int const last = T::kBlockN - 1 - w.warp_n() * 8 * T::kKeyTiles - 8 * (T::kKeyTiles - 1) - 2 * (lane_here() & 3);
    float column[2] = {exp2_approximate(log2_gamma * last), exp2_approximate(log2_gamma * (last - 1))};
    float const eight = exp2_approximate(log2_gamma * 8);
#pragma unroll
    for (int j = T::kKeyTiles - 1; j >= 0; --j) {
#pragma unroll
      for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[i][j][e] *= column[e % 2];
      }
      column[0] *= eight;
      column[1] *= eight;
    }
    int const row0 = w.tile().row_block * T::kBlockM + w.params.causal_offset - w.first_key(key_tile + 1) + 1;
#pragma unroll
    for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float factor = exp2_approximate(log2_gamma * maximum(row0 + w.row_in_block(i, h), -T::kBlockN));
        if constexpr (kGuarded) factor *= guard[i][h];
#pragma unroll
        for (int j = 0; j < T::kKeyTiles; ++j) {
          s[i][j][2 * h] *= factor;
          s[i][j][2 * h + 1] *= factor;
        }
      }
    }
  }
  template <typename Warp>
  __device__ __forceinline__ void apply_steep_decay(Warp const& w, typename Warp::Scores& s, int key_tile) {
    // Where it is negative, S is masked afterwards.
    int const first = w.tile().row_block * T::kBlockM + w.params.causal_offset - w.first_key(key_tile) -
                      w.warp_n() * 8 * T::kKeyTiles - 2 * (lane_here() & 3);
#pragma unroll
    for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float const distance = first + w.row_in_block(i, h);
#pragma unroll
        for (int j = 0; j < T::kKeyTiles; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& value = s[i][j][2 * h + e];
            value *= exp2_approximate(log2_gamma * (distance - float(8 * j + e)));
            if constexpr (kGuarded) value *= guard[i][h];
          }
        }
      }
    }
  }

  // Lowers the factor of rows whose P might leave the range of fp16, by this lane's sums of what s holds. Warps that
  // share rows combine them, so that they decide alike.
  template <typename Warp>
  __device__ __forceinline__ void lower(Warp& w, typename Warp::Scores& s, Rows& row_max) {
    if constexpr (kMasked) {
#pragma unroll
      for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) row_max[i][h] *= fabsf(guard[i][h]);
      }
    }
    if constexpr (!T::kPInRegisters) {
      quad_maxima(row_max);
      w.combine_rows(row_max, [](float a, float b) { return fmaxf(a, b); });
    }
    bool due = false;
#pragma unroll
    for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) due = due || row_max[i][h] > kPLimit;
    }
    if (__any_sync(0xffffffffu, due)) {
      if constexpr (T::kPInRegisters) quad_maxima(row_max);
#pragma unroll
      for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          // 2^(9 - exponent of the row's largest sum)
          int const bits = ((254 + kPExponent) << 23) - (__float_as_int(row_max[i][h]) & 0x7f800000);
          float const less = row_max[i][h] > kPLimit ? __int_as_float(bits) : 1.0f;
          auto scale = [&](auto& tiles) {
#pragma unroll
            for (auto& tile : tiles) {
              tile[2 * h] *= less;
              tile[2 * h + 1] *= less;
            }
          };
          guard[i][h] *= less;
          scale(w.o[i]);
          if constexpr (!kMasked) {
            sum[i][h] *= less;
            scale(s[i]);
          }
        }
      }
    }
  }
  __device__ __forceinline__ static void quad_maxima(Rows& row_max) {
#pragma unroll
    for (auto& row : row_max) {
#pragma unroll
      for (float& value : row) value = quad_max(value);
    }
  }

  // --- the end of a row ----------------------------------------------------------------------------------------------

  // With the sums complete: r, and what O is multiplied with. P is X times `powers` (of two), in bf16
  // over scale.
  template <typename Warp>
  __device__ __forceinline__ float powers(Warp const& w, int i, int half) const {
    if constexpr (kGuarded) return guard[i][half] / w.c;
    return 1.0f;
  }
  template <typename Warp>
  __device__ __forceinline__ float row_value(Warp const& w, int i, int half) const {
    if (!w.params.normalize || w.c == 0.0f) return 1.0f;
    float const total = kMasked || !kGuarded ? sum[i][half] * fabsf(w.c) : sum[i][half] / powers(w, i, half);
    return fminf(fmaxf(total, 1.0f), w.params.r_clamp_max);
  }
  template <typename Warp>
  __device__ __forceinline__ float output_factor(Warp const& w, int i, int half) const {
    if (w.c == 0.0f) return 0.0f;
    return (kGuarded ? 1.0f : w.c) / (powers(w, i, half) * row_value(w, i, half));
  }
  template <typename Params>
  __device__ __forceinline__ static float* lse_or_r(Params const& params) {
    return params.r;
  }
};

}  // namespace attention_autotuner

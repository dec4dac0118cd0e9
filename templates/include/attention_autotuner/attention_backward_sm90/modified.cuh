// Score modifications of a consumer warpgroup of attention's backward: softcap, ALiBi, bias tables, tensors of masks.
//
// A softcap's tangents give exponents and, squared, the derivative of scores, with which P waits for dP. ALiBi's
// -slope |distance| is linear in rows and columns of a tile on either side of the diagonal, and goes into what the
// exponents subtract. So does the entry of a bias table, which is a constant of tiles that are far from the diagonal. A
// tensor of masks is read where it lies, score by score: rows of a pass over keys are its columns.
// Windows are a matter of masks and of which tiles are visited. The gradient of sinks is in common/sink_gradient.cuh,
// or the kernel that converts dQ finds it; that of tables is in bias_gradient.cuh.
#pragma once

#include <cstdint>

#include "attention_autotuner/attention_backward_sm90/producer.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/threads.cuh"

namespace attention_autotuner::softmax_backward {

// Of a pass with a softcap for both dK and dV: what its scores become, in 16 bits, which together take no more
// registers than those.
template <bool kAny, int Registers>
struct CappedScores {};
template <int Registers>
struct CappedScores<true, Registers> {
  uint32_t next_p[Registers];  // P of the next results, while the last ones are in flight
  uint32_t bent[Registers];    // P times the derivative of scores
};

inline constexpr float kHiddenTangent = -1.0e19f;  // whose exponential is 0, and whose square is finite

// What ALiBi adds, for a tile, to what exponents subtract.
template <typename T, bool kAny = T::kAlibi>
struct Distances {
  template <typename Consumer>
  __device__ __forceinline__ void begin(Consumer const&, Cursor const&) {}
  template <bool kMagnitudes>
  __device__ __forceinline__ float add(float base, int, int) const {
    return base;
  }
  __device__ __forceinline__ static constexpr bool crossed() { return false; }
};
template <typename T>
struct Distances<T, true> {
  int head = -1;              // whose slope this is
  float slope, signed_slope;  // in powers of two; negative for tiles behind the diagonal
  float first[2];             // distances of this lane's two rows from the first of its columns
  bool crosses;               // the tile's distances have both signs

  template <typename Consumer>
  __device__ __forceinline__ void begin(Consumer const& consumer, Cursor const& now) {
    auto const& arguments = consumer.arguments;
    auto const& p = consumer.common().params;
    int const wanted = T::kByQueries ? consumer.head : now.head;
    // Beside a softcap there are no registers to keep the slope.
    if (T::kPacksCapped || wanted != head) {
      head = wanted;
      slope = arguments.alibi_slopes[int64_t(consumer.slopes()) * arguments.slopes_per_batch + head] * kLog2E;
    }
    // Rows may be queries or keys; a distance is query + diagonal - key.
    constexpr int kRows = kWarpgroupRows - 1, kColumns = T::kBlockColumns - 1, kSign = T::kByQueries ? 1 : -1;
    int const diagonal = p.seqlen_k - p.seqlen_q, column = now.tile * T::kBlockColumns;
    int const corner = kSign * (consumer.first_row() - column) + diagonal;
    int const least = corner - (T::kByQueries ? kColumns : kRows), most = corner + (T::kByQueries ? kRows : kColumns);
    // Where no query sees what is beyond its diagonal, the sign of distances there does not matter.
    bool const before = least >= 0 || (!T::kSpanned && p.causal_offset + arguments.window_right <= diagonal);
    crosses = !before && most > 0;
    signed_slope = before || crosses ? slope : -slope;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      first[half] = float(kSign * (consumer.lane_row() + 8 * half - column - 2 * (lane_index() & 3)) + diagonal);
    }
  }
  __device__ __forceinline__ bool crossed() const { return crosses; }
  // With the term of a row's half and a column.
  template <bool kMagnitudes>
  __device__ __forceinline__ float add(float base, int half, int column) const {
    float const step = T::kByQueries ? -float(column) : float(column);
    if constexpr (kMagnitudes) return fmaf(slope, fabsf(first[half] + step), base);
    // First what the values of several scores share.
    if constexpr (T::kByQueries) return fmaf(signed_slope, step, fmaf(signed_slope, first[half], base));
    return fmaf(signed_slope, first[half], fmaf(signed_slope, step, base));
  }
};

// What a bias table takes, for a tile, from what exponents subtract.
template <typename T, bool kAny = T::kBias>
struct Biases {
  template <typename Consumer>
  __device__ __forceinline__ void begin(Consumer const&, Cursor const&) {}
  template <bool kEach>
  __device__ __forceinline__ void load(int) {}
  template <bool kEach>
  __device__ __forceinline__ float take(float base, int) const {
    return base;
  }
  __device__ __forceinline__ static constexpr bool vary() { return false; }
};
template <typename T>
struct Biases<T, true> {
  static constexpr int kSign = T::kByQueries ? -1 : 1;  // of rows in how far keys are past diagonals
  float const* middle;                                  // of the head's entries
  int distance, past;                                   // of the lane's first score
  float constant;                                       // of tiles with one entry, in powers of two
  bool varies;
  float values[2][2];  // of eight columns' scores, for this lane's two rows

  template <typename Consumer>
  __device__ __forceinline__ void begin(Consumer const& consumer, Cursor const& now) {
    auto const& p = consumer.common().params;
    constexpr int kRows = kWarpgroupRows - 1, kColumns = T::kBlockColumns - 1;
    int const diagonal = p.seqlen_k - p.seqlen_q, column = now.tile * T::kBlockColumns;
    int const corner = kSign * (consumer.first_row() - column) - diagonal;
    int const least = corner - (T::kByQueries ? kRows : kColumns), most = corner + (T::kByQueries ? kColumns : kRows);
    BiasOfTile const bias(consumer.arguments, T::kByQueries ? consumer.head : now.head, least, most);
    middle = bias.middle;
    distance = bias.distance;
    varies = bias.varies;
    constant = bias[least] * kLog2E;
    past = kSign * (consumer.lane_row() - column - 2 * (lane_index() & 3)) - diagonal;
  }
  __device__ __forceinline__ bool vary() const { return varies; }
  // Of a tile whose scores take several entries (`kEach`): those of its columns from 8 g on, one g after the other.
  template <bool kEach>
  __device__ __forceinline__ void load(int g) {
    if constexpr (kEach) {
      auto entry = [this](int at) { return middle[minimum(maximum(at, -distance), distance)]; };
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        // Eight rows further down scores take what those of eight columns before take here.
        values[1][e] = g == 0 ? entry(past + kSign * (8 - e)) : values[0][e];
        values[0][e] = entry(past - kSign * (8 * g + e));
      }
    }
  }
  // For element e of four.
  template <bool kEach>
  __device__ __forceinline__ float take(float base, int e) const {
    if constexpr (!kEach) return base - constant;
    return fmaf(-kLog2E, values[e / 2][e % 2], base);
  }
};

// What a tensor of masks does to the exponents of a tile.
template <typename T>
struct MaskTensorOfTile {
  template <typename Consumer, int Registers>
  __device__ __forceinline__ static void apply(Consumer const& consumer, Cursor const& now,
                                               float (&exponents)[Registers]) {
    int const kind = consumer.arguments.common.params.attn_mask_kind;  // see abi.h
    if (kind == 0) {
      over_elements<char>(consumer, now, exponents, [](float x, char seen) { return seen ? x : minus_infinity(); });
    } else if (kind == 1) {
      over_elements<float>(consumer, now, exponents, [](float x, float added) { return fmaf(added, kLog2E, x); });
    } else if (kind == 2) {
      over_elements<__half>(consumer, now, exponents,
                            [](float x, __half added) { return fmaf(float(added), kLog2E, x); });
    } else {
      over_elements<__nv_bfloat16>(consumer, now, exponents,
                                   [](float x, __nv_bfloat16 added) { return fmaf(float(added), kLog2E, x); });
    }
  }

 private:
  // Rows and columns behind the last ones, whose P nobody wants, take theirs.
  template <typename Value, typename Consumer, int Registers, typename Combine>
  __device__ __forceinline__ static void over_elements(Consumer const& consumer, Cursor const& now,
                                                       float (&exponents)[Registers], Combine&& combine) {
    auto const& p = consumer.arguments.common.params;
    auto const& mask = p.attn_mask;
    int const head = T::kByQueries ? consumer.head : now.head;
    Value const* const values =
        static_cast<Value const*>(mask.data) + consumer.batch * mask.stride_batch + head * mask.stride_head;
    int64_t const of_rows = T::kByQueries ? mask.stride_row : p.attn_mask_stride_column;
    int64_t const of_columns = T::kByQueries ? p.attn_mask_stride_column : mask.stride_row;
    int const last_row = (T::kByQueries ? p.seqlen_q : p.seqlen_k) - 1;
    int const last_column = (T::kByQueries ? p.seqlen_k : p.seqlen_q) - 1;
    int const first = now.tile * T::kBlockColumns + 2 * (lane_index() & 3);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Value const* const row = values + minimum(consumer.lane_row() + 8 * half, last_row) * of_rows;
#pragma unroll
      for (int g = 0; g < T::kBlockColumns / 8; ++g) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = exponents[4 * g + 2 * half + e];
          x = combine(x, row[minimum(first + 8 * g + e, last_column) * of_columns]);
        }
      }
    }
  }
};

}  // namespace attention_autotuner::softmax_backward

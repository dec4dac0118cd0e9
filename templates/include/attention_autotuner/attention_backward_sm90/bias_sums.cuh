// The gradient of a bias table in a pass over keys: sums of dS by distance from the diagonal, of a warpgroup and a
// head.
//
// A tile of 64 keys is past the diagonals of its queries by distances that depend on its place alone. Where one entry
// serves all of it, threads add up their dS. Near the diagonal dS goes through shared memory of the warp, 24 columns at
// a time, and each lane adds up one diagonal. At the end of a head the warps of a warpgroup join their sums, which go
// to the workspace; a kernel adds those of all blocks of keys. Every order is fixed: the result is the same bits every
// time.
//
// Shared memory of a warp, in floats: 8 rows of 24 columns; for each lane a sum of either far side; and, from one float
// before their end on, entries of the table, of which the first and the last are those of the far sides.
#pragma once

#include <cstdint>

#include "attention_autotuner/attention_backward_sm90/producer.cuh"
#include "attention_autotuner/common/convert.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/shared_memory.cuh"
#include "attention_autotuner/common/threads.cuh"

namespace attention_autotuner::softmax_backward {

template <typename T, bool kAny = T::kSumsBias>
struct BiasSums {
  template <typename Consumer>
  __device__ __forceinline__ static void clear(Consumer const&) {}
  template <typename Consumer>
  __device__ __forceinline__ static void add_near(Consumer const&, Cursor const&) {}
  template <typename Consumer>
  __device__ __forceinline__ static void add_far(Consumer const&, Cursor const&) {}
  template <typename Consumer>
  __device__ __forceinline__ static void write(Consumer const&) {}
  template <typename Consumer>
  __device__ __forceinline__ static void write_nothing(Consumer const&) {}
};

template <typename T>
struct BiasSums<T, true> {
  static constexpr int kColumns = 24;                        // at a time: 31 diagonals of 8 rows
  static constexpr int kSides = 8 * kColumns;                // where sums of the far sides start
  static constexpr int kEntries = kSides + 2 * 32 - 1;       // and those of entries
  static constexpr int kGroups = T::kBlockColumns / 8;       // of columns
  static constexpr int kChunks = divide_up(kGroups + 1, 3);  // with the rows below as a group before
  static_assert((kEntries + 2 * T::kMostBiasDistance + 1) * int(sizeof(float)) <= T::kBiasWarpBytes);

  template <typename Consumer>
  __device__ __forceinline__ static uint32_t of_warp(Consumer const& consumer, int warp) {
    return consumer.smem + T::kBiasOffset + (4 * consumer.group + warp) * T::kBiasWarpBytes;
  }
  template <typename Consumer>
  __device__ __forceinline__ static uint32_t of_warp(Consumer const& consumer) {
    return of_warp(consumer, softmax_forward::warp_in_warpgroup());
  }
  template <typename Consumer>
  __device__ __forceinline__ static float* written(Consumer const& consumer) {
    auto const& arguments = consumer.arguments;
    int const entries = 2 * arguments.bias_distance + 1;
    int64_t const block =
        (int64_t(consumer.head) * arguments.common.params.batch + consumer.batch) * arguments.bias_blocks;
    return arguments.bias_sums + ((block + consumer.row_block) * T::kWarpgroups + consumer.group) * entries;
  }

  // Before the first tile of a head.
  template <typename Consumer>
  __device__ __forceinline__ static void clear(Consumer const& consumer) {
    if (consumer.arguments.bias_sums == nullptr) return;
    uint32_t const sums = of_warp(consumer) + 4 * kSides;
#pragma unroll 1
    for (int at = 16 * lane_index(); at < T::kBiasWarpBytes - 4 * kSides; at += 16 * 32) {
      store_shared_float4(sums + at, make_float4(0.0f, 0.0f, 0.0f, 0.0f));
    }
    __syncwarp();
  }
  // Adds dS of a tile near the diagonal, in the place of dP.
  template <typename Consumer>
  __device__ __forceinline__ static void add_near(Consumer const& consumer, Cursor const& now) {
    if (consumer.arguments.bias_sums == nullptr) return;
    int const first = first_past(consumer, now), distance = consumer.arguments.bias_distance;
    if (is_near(first, distance)) {
      add_diagonals(consumer.dp, of_warp(consumer), first + 16 * softmax_forward::warp_in_warpgroup(), distance);
    }
  }
  // Adds dS of a tile that is far from it, as packed: beside MMAs that read it.
  template <typename Consumer>
  __device__ __forceinline__ static void add_far(Consumer const& consumer, Cursor const& now) {
    if (consumer.arguments.bias_sums == nullptr) return;
    int const first = first_past(consumer, now), distance = consumer.arguments.bias_distance;
    if (is_near(first, distance)) return;
    uint32_t const sum = of_warp(consumer) + 4 * (kSides + (first > 0 ? 32 : 0) + lane_index());
    float const before = load_shared_float(sum);
    float four[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < T::kBlockColumns / 4; ++i) {
      float2 const pair = unpack_pair<typename T::Element>(consumer.ds[i]);
      four[2 * i % 4] += pair.x;
      four[2 * i % 4 + 1] += pair.y;
    }
    store_shared(sum, __float_as_uint(before + ((four[0] + four[1]) + (four[2] + four[3]))));
  }
  // At the end of a head: what it got goes to the workspace.
  template <typename Consumer>
  __device__ __forceinline__ static void write(Consumer const& consumer) {
    if (consumer.arguments.bias_sums == nullptr) return;
    uint32_t const sums = of_warp(consumer), entries = sums + 4 * kEntries;
    int const distance = consumer.arguments.bias_distance;
    float low = load_shared_float(sums + 4 * (kSides + lane_index()));
    float high = load_shared_float(sums + 4 * (kSides + 32 + lane_index()));
#pragma unroll
    for (int other = 16; other > 0; other /= 2) {
      low += __shfl_xor_sync(0xffffffffu, low, other);
      high += __shfl_xor_sync(0xffffffffu, high, other);
    }
    __syncwarp();
    if (lane_index() == 0) {
      store_shared(entries, __float_as_uint(distance == 0 ? low + high : low));
      if (distance > 0) store_shared(entries + 8 * distance, __float_as_uint(high));
    }
    named_barrier(kWarpgroupBarrier + consumer.group, kWarpgroupThreads);
    float* const result = written(consumer);
#pragma unroll 1
    for (int entry = int(threadIdx.x) % kWarpgroupThreads; entry <= 2 * distance; entry += kWarpgroupThreads) {
      float total = 0.0f;
#pragma unroll
      for (int warp = 0; warp < 4; ++warp) {
        total += load_shared_float(of_warp(consumer, warp) + 4 * (kEntries + entry));
      }
      result[entry] = total;
    }
    named_barrier(kWarpgroupBarrier + consumer.group, kWarpgroupThreads);
  }
  // Of a block of keys that no query sees.
  template <typename Consumer>
  __device__ __forceinline__ static void write_nothing(Consumer const& consumer) {
    if (consumer.arguments.bias_sums == nullptr) return;
    int const entries = 2 * consumer.arguments.bias_distance + 1;
    float* const result = written(consumer);
#pragma unroll 1
    for (int at = int(threadIdx.x) % kWarpgroupThreads; at < entries; at += kWarpgroupThreads) result[at] = 0.0f;
  }

 private:
  // How far the warpgroup's first key is past the diagonal of a tile's first query.
  template <typename Consumer>
  __device__ __forceinline__ static int first_past(Consumer const& consumer, Cursor const& now) {
    auto const& p = consumer.common().params;
    return consumer.first_row() - now.tile * T::kBlockColumns - (p.seqlen_k - p.seqlen_q);
  }
  // Whether some of its scores take entries of their own.
  __device__ __forceinline__ static bool is_near(int first, int distance) {
    return first + kWarpgroupRows - 1 > -distance && first - (T::kBlockColumns - 1) < distance;
  }
  // `first`: how far the warp's first key is past the diagonal of the tile's first query.
  template <int Scores>
  __device__ __forceinline__ static void add_diagonals(float const (&ds)[Scores], uint32_t sums, int first,
                                                       int distance) {
    int const lane = lane_index(), row = lane / 4;
    uint32_t const mine = sums + 4 * (row * kColumns + 2 * (lane & 3));
    // This lane's diagonal has column lane - 7 of row 0, the one after it of row 1, and so on.
    uint32_t const diagonal = sums + 4 * (lane - 7);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        // Eight rows further down elements are on the diagonals of those of eight columns before.
        int const g = 3 * chunk - 1 + i;
        float two[2] = {0.0f, 0.0f};
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (g >= 0 && g < kGroups) two[e] = ds[4 * g + e];
          if (g + 1 < kGroups) two[e] += ds[4 * (g + 1) + 2 + e];
        }
        store_shared_float2(mine + 32 * i, make_float2(two[0], two[1]));
      }
      __syncwarp();
      float total = 0.0f;
#pragma unroll
      for (int r = 0; r < 8; ++r) {
        int const column = lane - 7 + r;
        if (column >= 0 && column < kColumns) total += load_shared_float(diagonal + 4 * (kColumns + 1) * r);
      }
      int const past = first - 8 * (3 * chunk - 1) + 7 - lane;
      int const place = past <= -distance  ? kSides + lane
                        : past >= distance ? kSides + 32 + lane
                                           : kEntries + distance + past;
      uint32_t const sum = sums + 4 * place;
      store_shared(sum, __float_as_uint(load_shared_float(sum) + total));
      __syncwarp();
    }
  }
};

}  // namespace attention_autotuner::softmax_backward

// The output of a consumer warpgroup: O and the LSE of its rows, or their r.
#pragma once

#include <cstdint>
#include <type_traits>

#include "attention_autotuner/attention_forward_sm90/masked.cuh"
#include "attention_autotuner/attention_forward_sm90/softmax.cuh"
#include "attention_autotuner/common/convert.cuh"
#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/sm90/stmatrix.cuh"
#include "attention_autotuner/sm90/swizzle.cuh"
#include "attention_autotuner/sm90/tma.cuh"

namespace attention_autotuner::softmax_forward {

__device__ __forceinline__ float log2_approximate(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

template <typename T>
struct AttentionForwardSm90Output
    : std::conditional_t<T::kMasked, AttentionForwardSm90Masked<T>, AttentionForwardSm90Softmax<T>> {
  using Base = std::conditional_t<T::kMasked, AttentionForwardSm90Masked<T>, AttentionForwardSm90Softmax<T>>;
  using Element = typename T::Element;
  using Base::arguments;
  using Base::Base;
  using Base::empty;
  using Base::group;
  using Base::head_of;
  using Base::lane_row;
  using Base::o;
  using Base::q_tile;
  using Base::query_of;
  using Base::range;

  bool q_pending = false;  // a TMA store may still read the stage of Q before `q_stage`

  // Lets go of the stage of Q that O went through, once it has been read.
  __device__ __forceinline__ void release_q_after_store(int q_stage) {
    if constexpr (T::kOutput == Output::kThroughQ) {
      if (q_pending) {
        q_pending = false;
        if (leads_warpgroup()) {
          tma_store_wait_read();
          arrive(empty(T::kQBarrier, T::kQStages == 1 ? 0 : q_stage ^ 1));
        }
      }
    }
  }

  // Writes O, of whose rows `total` is the sums. All reads of this tile's Q, in stage `q_stage`, are done.
  __device__ __forceinline__ void write(WorkTile const& tile, float const (&levels)[2], float (&total)[2],
                                        int q_stage) {
    float inverse[2];
    Base::normalize(levels, total, inverse);
    bool parted = false;
    if constexpr (T::kSplitKv) parted = Base::splits_of(range) > 1;
    if constexpr (T::kSplitKv && T::kPacked) write_row_splits(tile);
    if (parted) {
#pragma unroll
      for (int half = 0; half < 2; ++half) write_partial(tile, half, inverse[half], levels[half], total[half]);
    } else if constexpr (T::kOutput == Output::kThroughQ) {
      // A TMA tile does not end with a sequence.
      if (T::kPacked && query_of(tile, (group + 1) * kWarpgroupRows) > range.queries(arguments)) {
#pragma unroll
        for (int half = 0; half < 2; ++half) write_row(tile, half, inverse[half]);
      } else {
        write_through(tile, inverse, q_tile(q_stage) + group * kWarpgroupRows * kSwizzleRowBytes);
      }
      q_pending = true;
      write_rows(tile, levels, total);
    } else {
      write_rows(tile, levels, total);
#pragma unroll
      for (int half = 0; half < 2; ++half) write_row(tile, half, inverse[half]);
    }
  }

 private:
  struct OutputRow {
    int query, head;
    bool exists;
  };
  __device__ __forceinline__ OutputRow output_row(WorkTile const& tile, int half) const {
    int const row = lane_row() + 8 * half, query = query_of(tile, row);
    bool const loaded = !T::kPackGqa || row < arguments.packed.rows;
    return {query, head_of(tile, row), loaded && query < range.queries(arguments)};
  }
  // Among the rows of all heads.
  __device__ __forceinline__ int64_t row_index(WorkTile const& tile, OutputRow const& row) const {
    if constexpr (T::kPacked) return int64_t(row.head) * arguments.total_q + range.query_begin() + row.query;
    return (int64_t(tile.batch) * arguments.heads_q + row.head) * arguments.seqlen_q + row.query;
  }

  // Through shared memory from `slab` on, laid out as tiles of Q.
  __device__ __forceinline__ void write_through(WorkTile const& tile, float const (&inverse)[2], uint32_t slab) {
    int const key = lane_index() & 7, row = 16 * warp_in_warpgroup() + (lane_index() & 8) + key;
#pragma unroll
    for (int i = 0; i < T::kColumns / 16; ++i) {
      uint32_t words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        int const at = 8 * i + 4 * (w / 2) + 2 * (w % 2);
        words[w] = pack_pair<Element>(o[at] * inverse[w % 2], o[at + 1] * inverse[w % 2]);
      }
      int const chunk = 2 * (i % 4) + (lane_index() >> 4);
      store_matrix_x4(swizzled_address(slab + i / 4 * T::kBlockM * kSwizzleRowBytes, row, chunk, key), words);
    }
    fence_view_async_shared();
    warpgroup_barrier(group);
    if (leads_warpgroup()) {
#pragma unroll
      for (int block = 0; block < T::kColumnsLoaded / kSwizzleColumns; ++block) {
        tma_store(arguments.o.descriptor, slab + block * T::kBlockM * kSwizzleRowBytes,
                  tile.slice * T::kColumns + block * kSwizzleColumns,
                  range.query_begin() + query_of(tile, group * kWarpgroupRows), tile.head * arguments.o.head_step,
                  tile.batch * arguments.o.batch_step);
      }
    }
  }

  // One of this lane's two rows from registers: the four lanes of a row exchange words, so that every one has the 8
  // columns of a 16-byte store.
  __device__ __forceinline__ void write_row(WorkTile const& tile, int half, float inverse) {
    OutputRow const row = output_row(tile, half);
    int const lane = lane_index() & 3;
    bool const writes = row.exists;
    Element* const line = static_cast<Element*>(arguments.output) + tile.batch * arguments.stride_batch +
                          row.head * arguments.stride_head + (range.query_begin() + row.query) * arguments.stride_row +
                          tile.slice * T::kColumns;
    int const columns = arguments.dim_v - tile.slice * T::kColumns;
#pragma unroll
    for (int i = 0; i < T::kColumns / 8; i += 4) {
      uint32_t words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        if (i + w < T::kColumns / 8) {
          int const at = 4 * (i + w) + 2 * half;
          words[w] = pack_pair<Element>(o[at] * inverse, o[at + 1] * inverse);
        }
      }
      if (i + 4 <= T::kColumns / 8) {
        transpose(words, lane);
        int const column = 8 * (i + lane);
        if (writes && column < columns) {
          *reinterpret_cast<uint4*>(line + column) = make_uint4(words[0], words[1], words[2], words[3]);
        }
      } else {
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          int const column = 8 * (i + w) + 2 * lane;
          if (i + w < T::kColumns / 8 && writes && column < columns) {
            *reinterpret_cast<uint32_t*>(line + column) = words[w];
          }
        }
      }
    }
  }
  // The 4 by 4 words of four lanes.
  __device__ __forceinline__ static void transpose(uint32_t (&words)[4], int lane) {
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        if ((w & bit) == 0) {
          bool const upper = (lane & bit) != 0;
          uint32_t const sent = upper ? words[w] : words[w | bit];
          uint32_t const received = __shfl_xor_sync(0xffffffffu, sent, bit);
          words[w] = upper ? received : words[w];
          words[w | bit] = upper ? words[w | bit] : received;
        }
      }
    }
  }

  __device__ __forceinline__ static float log2_sum(float maximum, float total) {
    return total == 0.0f ? minus_infinity() : maximum + log2_approximate(total);
  }
  // The LSE of this lane's two rows, or their r, which the first slice writes.
  __device__ __forceinline__ void write_rows(WorkTile const& tile, float const (&levels)[2], float const (&total)[2]) {
    float* const written = T::kMasked ? arguments.r : arguments.lse;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      OutputRow const row = output_row(tile, half);
      if (written != nullptr && tile.slice == 0 && (lane_index() & 3) == 0 && row.exists) {
        written[row_index(tile, row)] = T::kMasked ? total[half] : log2_sum(levels[half], total[half]) * kLn2;
      }
    }
  }
  // In how many parts the keys of this lane's two rows are, which the first one says.
  __device__ __forceinline__ void write_row_splits(WorkTile const& tile) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      OutputRow const row = output_row(tile, half);
      if (arguments.row_splits != nullptr && tile.split == 0 && (lane_index() & 3) == 0 && row.exists) {
        arguments.row_splits[row_index(tile, row)] = range.splits;
      }
    }
  }
  // One of this lane's two rows of a split, in fp32.
  __device__ __forceinline__ void write_partial(WorkTile const& tile, int half, float inverse, float maximum,
                                                float total) {
    OutputRow const row = output_row(tile, half);
    if (!row.exists) return;
    int const lane = lane_index() & 3;
    int64_t const place = tile.split * arguments.partial_rows + row_index(tile, row);
    float* const line = arguments.partial_output + place * T::kColumns + 2 * lane;
#pragma unroll
    for (int i = 0; i < T::kColumns / 8; ++i) {
      int const at = 4 * i + 2 * half;
      *reinterpret_cast<float2*>(line + 8 * i) = make_float2(o[at] * inverse, o[at + 1] * inverse);
    }
    if (lane == 0) arguments.partial_lse[place] = log2_sum(maximum, total);
  }
};

}  // namespace attention_autotuner::softmax_forward

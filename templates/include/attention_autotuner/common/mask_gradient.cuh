// The gradient of an explicit mask: dM = sum over the batch of dX * scale S, also over the heads where they share it.
//
// One CTA computes a tile of 64 queries by 64 keys over the batch (and the heads): for each it computes Q K^T
// and dO V^T, 64 columns of the head dims at a time through two buffers, and adds the product of the two in registers.
// So every element is written once and always from the same sums.
//
// Four warps, 32 by 32 scores each. Layouts: see common/warp_mma.cuh (fragments), common/tile.cuh (shared memory).
#pragma once

#include "attention_autotuner/abi.h"
#include "attention_autotuner/common/backward_arguments.cuh"
#include "attention_autotuner/common/convert.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/shared_memory.cuh"
#include "attention_autotuner/common/tensors.cuh"
#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/common/tile.cuh"
#include "attention_autotuner/common/warp_mma.cuh"
#include "attention_autotuner/host/entry.cuh"

namespace attention_autotuner {

template <typename Config>
struct MaskGradient {
  using Element = typename Config::Element;
  using Arguments = BackwardArguments<attention_autotuner_retnet_backward_params>;
  static constexpr int kThreads = 128;
  static constexpr int kBlock = 64;  // queries, keys, and columns of a step
  using Tile = SmemTile<kBlock, kBlock, false>;
  using Copy = TileCopy<kBlock, kBlock, kThreads, Config::kCopyBytes, false>;
  static constexpr int kStageBytes = 2 * Tile::kBytes;
  static constexpr int kSmemBytes = 2 * kStageBytes;
  using Scores = Accumulators<2, 4>;

  Arguments const& arguments;
  uint32_t const smem;
  int const first_head, heads;  // that share this tile
  int const row0, column0;

  // One slice of the operands of one GEMM.
  struct Step {
    int item;  // batch and head
    int slice;

    __device__ __forceinline__ void next(int slices) {
      if (++slice == slices) {
        slice = 0;
        ++item;
      }
    }
  };

  __device__ __forceinline__ static int warp() { return thread_index() >> 5; }
  __device__ __forceinline__ static int warp_row() { return warp() / 2 * 32; }
  __device__ __forceinline__ static int warp_column() { return warp() % 2 * 32; }

  __device__ __forceinline__ int slices_qk() const { return divide_up(arguments.params.dim_qk, kBlock); }
  __device__ __forceinline__ int slices() const { return slices_qk() + divide_up(arguments.params.dim_v, kBlock); }
  __device__ __forceinline__ int batch(int item) const { return item / heads; }
  __device__ __forceinline__ int head(int item) const { return first_head + item % heads; }

  __device__ __forceinline__ void fetch_rows(uint32_t tile, attention_autotuner_tensor const& tensor, int batch,
                                             int head, int row, int rows, int column, int columns) const {
    int const thread = thread_index();
    Element const* const source = head_data<Element>(tensor, batch, head) +
                                  int64_t(row + Copy::row(thread)) * tensor.stride_row + column + Copy::column(thread);
    Copy::copy(tile + Copy::offset(thread), source, tensor.stride_row, rows - row, columns - column);
  }
  __device__ __forceinline__ void fetch(Step const& step, int slot) const {
    auto const& p = arguments.params;
    uint32_t const a = smem + slot * kStageBytes, b = a + Tile::kBytes;
    int const kv_head = head(step.item) / (p.heads_q / p.heads_kv);
    if (step.slice < slices_qk()) {
      int const column = step.slice * kBlock;
      fetch_rows(a, p.q, batch(step.item), head(step.item), row0, p.seqlen_q, column, p.dim_qk);
      fetch_rows(b, p.k, batch(step.item), kv_head, column0, p.seqlen_k, column, p.dim_qk);
    } else {
      int const column = (step.slice - slices_qk()) * kBlock;
      fetch_rows(a, p.dout, batch(step.item), head(step.item), row0, p.seqlen_q, column, p.dim_v);
      fetch_rows(b, p.v, batch(step.item), kv_head, column0, p.seqlen_k, column, p.dim_v);
    }
  }

  __device__ __forceinline__ static void gemm_tile(Scores& scores, uint32_t a, uint32_t b) {
    gemm<Element, Tile, Tile, kBlock / 16>(scores, a, b, [](int) {});
  }

  // sum += dX * scale S.
  __device__ __forceinline__ void add(Scores& sum, Scores const& s, Scores const& dp, int item) const {
    auto const& p = arguments.params;
    int64_t const lse_delta = arguments.lse_delta_offset(batch(item), head(item));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int const row =
            row0 + warp_row() + 16 * i + 8 * half + lane_here() / 4;  // LSE and delta reach beyond the sequence
        float const base = arguments.base[lse_delta + row], shift = arguments.shift[lse_delta + row];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float const score = s[i][j][2 * half + e] * p.scale;
            float dx = dp[i][j][2 * half + e] * base;
            if (p.r_grad) dx += with_sign(score * mask(row, column(j) + e), shift);
            sum[i][j][2 * half + e] = fmaf(dx, score, sum[i][j][2 * half + e]);
          }
        }
      }
    }
  }
  __device__ __forceinline__ int column(int j) const { return column0 + warp_column() + 8 * j + 2 * (lane_here() & 3); }
  __device__ __forceinline__ float mask(int row, int column) const {
    auto const& p = arguments.params;
    if (row >= p.seqlen_q || column >= p.seqlen_k) return 0.0f;
    return float(head_data<Element>(p.mask, 0, first_head)[int64_t(row) * p.mask.stride_row + column]);
  }

  __device__ __forceinline__ void run() const {
    auto const& p = arguments.params;
    Scores sum;
    clear(sum);
    int const last_row = minimum(row0 + kBlock, p.seqlen_q) - 1;
    int const items = column0 < arguments.visible_keys(last_row) ? p.batch * heads : 0;
    int const slices = this->slices();
    LaneRow const a = lane_row_a(lane_here()), b = lane_row_b(lane_here());
    uint32_t const rows = smem + Tile::offset(warp_row() + a.row, a.column);
    uint32_t const columns = smem + Tile::kBytes + Tile::offset(warp_column() + b.row, b.column);
    Step ahead{0, 0};
    int slot = 0;
    auto fetch_next = [&](int into) {
      if (ahead.item < items) fetch(ahead, into);
      cp_async_fence();
      ahead.next(slices);
    };
    fetch_next(0);
    for (int item = 0; item < items; ++item) {
      Scores s, dp;
      clear(s);
      clear(dp);
      for (int slice = 0; slice < slices; ++slice) {
        cp_async_wait<0>();
        __syncthreads();
        fetch_next(slot ^ 1);
        if (slice < slices_qk()) {
          gemm_tile(s, rows + slot * kStageBytes, columns + slot * kStageBytes);
        } else {
          gemm_tile(dp, rows + slot * kStageBytes, columns + slot * kStageBytes);
        }
        slot ^= 1;
      }
      add(sum, s, dp, item);
    }
    write(sum);
  }

  __device__ __forceinline__ void write(Scores const& sum) const {
    auto const& p = arguments.params;
    Element* const out = static_cast<Element*>(p.dmask.data) + first_head * p.dmask.stride_head;
    bool const by_pairs = reinterpret_cast<uintptr_t>(out) % 4 == 0 && p.dmask.stride_row % 2 == 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int const row = row0 + warp_row() + 16 * i + 8 * half + lane_here() / 4;
        if (row >= p.seqlen_q) continue;
        int const visible = arguments.visible_keys(row);
        Element* const place = out + row * p.dmask.stride_row;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float value[2];
#pragma unroll
          for (int e = 0; e < 2; ++e) value[e] = column(j) + e < visible ? sum[i][j][2 * half + e] : 0.0f;
          if (by_pairs && column(j) + 1 < p.seqlen_k) {
            *reinterpret_cast<uint32_t*>(place + column(j)) = pack_pair<Element>(value[0], value[1]);
          } else {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              if (column(j) + e < p.seqlen_k) place[column(j) + e] = Element(value[e]);
            }
          }
        }
      }
    }
  }
};

// The grid: tiles of keys, of queries, heads of the mask.
template <typename Config>
__global__ void __launch_bounds__(MaskGradient<Config>::kThreads, 3) retnet_mask_gradient(
    BackwardArguments<attention_autotuner_retnet_backward_params> const __grid_constant__ arguments, int key_tiles,
    int query_tiles, int shared_heads) {
  using Gradient = MaskGradient<Config>;
  extern __shared__ __align__(128) char smem_bytes[];
  int const index = block_index(), row = index / key_tiles;
  Gradient const gradient{arguments,    shared_address(smem_bytes),           row / query_tiles,
                          shared_heads, row % query_tiles * Gradient::kBlock, index % key_tiles * Gradient::kBlock};
  gradient.run();
}

// Launches it, after kernels that leave the rows' LSE and delta in the workspace.
template <typename Config>
inline int32_t launch_mask_gradient(BackwardArguments<attention_autotuner_retnet_backward_params> const& arguments,
                                    cudaStream_t stream) {
  using Gradient = MaskGradient<Config>;
  auto const& p = arguments.params;
  bool const shared = p.mask.stride_head == 0 || p.heads_q == 1;
  int const key_tiles = divide_up(p.seqlen_k, Gradient::kBlock), query_tiles = divide_up(p.seqlen_q, Gradient::kBlock);
  int64_t const tiles = int64_t(key_tiles) * query_tiles * (shared ? 1 : p.heads_q);
  if (tiles > INT32_MAX) return ATTENTION_AUTOTUNER_BAD_SHAPE;
  retnet_mask_gradient<Config><<<int(tiles), Gradient::kThreads, Gradient::kSmemBytes, stream>>>(
      arguments, key_tiles, query_tiles, shared ? p.heads_q : 1);
  return cuda_status(cudaGetLastError());
}
template <typename Config>
inline int32_t prepare_mask_gradient(int32_t device) {
  using Gradient = MaskGradient<Config>;
  int resident = 0;
  return prepare_kernel(retnet_mask_gradient<Config>, Gradient::kThreads, Gradient::kSmemBytes, device, &resident);
}

}  // namespace attention_autotuner

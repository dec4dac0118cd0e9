// The pass over chunks of retention, for compute capability 8.0 and newer: a CTA loops over a super-chunk of one
// head for some columns of Z, with the state in registers.
//
// The state is kept transposed, columns of Z as rows: S^T += Z^T Y accumulates it, and the accumulators of S^T are,
// once rounded, the B operand of X S. So a warp needs no state but its own, and no copy of it anywhere. Warps own 16 or
// more columns each and all of D; where D is too deep for that, depth warps share columns, and their outputs meet in
// shared memory. Scores X Y^T are computed along with X S, from the same fragments of X, each warp the scores of its
// share of the chunk's tokens, and pass through shared memory; or they are precomputed.
//
// What registers hold is the state over a scale: the decay of a chunk goes to the scale, which is one number, and
// only when it has fallen below 1 do the registers take it over. So what is added to them is never scaled up. States
// grow with the sequence and may exceed what fp16 holds: that shows in the MMA with X, which is then done again with a
// greater scale. Decays are powers of gamma with exponents of at most a chunk, never negative.
//
// Layouts: see common/warp_mma.cuh (fragments), common/tile.cuh (shared memory), chunks_sm80/traits.cuh (which tensor
// is which).
#pragma once

#include "attention_autotuner/chunks_sm80/state.cuh"
#include "attention_autotuner/common/chunk_sequences.cuh"
#include "attention_autotuner/common/convert.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/shared_memory.cuh"
#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/common/warp_mma.cuh"
#include "attention_autotuner/sm80/operand.cuh"

namespace attention_autotuner {
template <typename T, bool StatesOnly>
struct ChunkWarp : StateWarp<T, StatesOnly> {
  using Base = StateWarp<T, StatesOnly>;
  using typename Base::Element;
  using typename Base::Fetch;
  using Output = Accumulators<T::kTokenTiles, 2 * T::kRowTiles>;
  static constexpr bool kComputesScores = !StatesOnly && !T::kPrecomputed;
  static constexpr int kDepthSteps = T::kDepth / 16;
  static constexpr int kOwned = T::kTokenTiles / T::kDepthWarps;  // token tiles that a warp writes
  using Base::arguments;
  using Base::Base;
  using Base::batch;
  using Base::column_warp;
  using Base::depth_warp;
  using Base::end;
  using Base::fetch_part;
  using Base::first;
  using Base::head;
  using Base::load_state;
  using Base::plan_fetch;
  using Base::power;
  using Base::raise_scale;
  using Base::sequence;
  using Base::slice;
  using Base::smem;
  using Base::start_fetch;
  using Base::state;
  using Base::state_scale;
  using Base::store_state;
  using Base::unit;
  using Base::update_state;
  using Base::warp_column;
  using Base::warp_depth;

  // Pairs of 8x8 tiles of scores with the same lag share their factors.
  static constexpr int kLagsPerRound = T::kDepthWarps > 1 ? T::kScoreTiles + 1 : 2;
  static constexpr int kLags = kComputesScores ? kLagsPerRound * (kOwned - 1) + T::kScoreTiles + 1 : 1;

  float factors[kLags][2];

  // --- MMAs ----------------------------------------------------------------------------------------------------------

  // Whether the registers hold something that the 16-bit type does not, as an MMA with them shows. What comes from
  // inputs that are not finite shows alike, and stays: the scale is raised once.
  __device__ __forceinline__ static bool overflows(Output const& out) {
    if constexpr (!std::is_same_v<Element, __half>) return false;
    float sum = 0.0f;  // a column of the state that is not finite shows in every token
#pragma unroll
    for (auto const& tile : out[0]) sum = fmaf(tile[0], 0.0f, fmaf(tile[1], 0.0f, sum));
    return __any_sync(0xffffffffu, sum != 0.0f);
  }

  // out = X S over the scale, and the scores of this warp's tokens; `between(step)` is other work.
  template <typename Scores, typename Between>
  __device__ __forceinline__ void gemm_x(Output& out, Scores& scores, uint32_t stage, Between&& between) const {
    LaneRow const a = lane_row_a(lane_here());
    Operand<typename T::TileX, T::kDepth> const x_tile(stage, a.row, warp_depth() + a.column);
    // Where a warp has eight tokens, lanes 16 and on repeat what 0 to 15 point at.
    constexpr bool kSingle = T::kScoreTiles == 1;
    LaneRow const b = lane_row_b(kSingle ? lane_here() & 15 : lane_here());
    Operand<typename T::TileX, T::kDepth> const y_tile(stage + T::kYOffset, column_warp() * 8 * T::kScoreTiles + b.row,
                                                       warp_depth() + b.column);
#pragma unroll
    for (int step = 0; step < kDepthSteps; ++step) {
      uint32_t s[T::kRowTiles][4];
#pragma unroll
      for (int r = 0; r < T::kRowTiles; ++r) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float const(&tile)[4] = state[r][2 * step + e % 2];
          s[r][e] = pack_pair<Element>(tile[e / 2 * 2], tile[e / 2 * 2 + 1]);
        }
      }
      uint32_t k[kComputesScores ? divide_up(T::kScoreTiles, 2) : 1][4];
      if constexpr (kComputesScores) {
#pragma unroll
        for (int j = 0; j < T::kScoreTiles; j += 2) {
          if constexpr (kSingle) {
            load_matrix_x2(k[0], y_tile.at(0, 16 * step));
          } else {
            load_matrix_x4(k[j / 2], y_tile.at(8 * j, 16 * step));
          }
        }
      }
#pragma unroll
      for (int i = 0; i < T::kTokenTiles; ++i) {
        uint32_t q[4];
        load_matrix_x4(q, x_tile.at(16 * i, 16 * step));
#pragma unroll
        for (int r = 0; r < T::kRowTiles; ++r) {
          mma_m16n8k16<Element>(out[i][2 * r], q, s[r][0], s[r][1]);
          mma_m16n8k16<Element>(out[i][2 * r + 1], q, s[r][2], s[r][3]);
        }
        if constexpr (kComputesScores) {
#pragma unroll
          for (int j = 0; j < T::kScoreTiles; ++j) {
            mma_m16n8k16<Element>(scores[i][j], q, k[j / 2][j % 2 * 2], k[j / 2][j % 2 * 2 + 1]);
          }
        }
      }
      between(step);
    }
  }

  // Which factors belong to eight rows of a token tile that this warp writes, by its round, and eight columns.
  __device__ __forceinline__ static constexpr int lag(int round, int half, int j) {
    return kLagsPerRound * round + half + T::kScoreTiles - 1 - j;
  }
  // Scale times gamma to the distance of the tokens of each score that this lane holds, 0 above the diagonal.
  __device__ __forceinline__ void prepare_factors() {
    constexpr int kSign = T::kReversed ? -1 : 1;
#pragma unroll
    for (int round = 0; round < kOwned; ++round) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int j = 0; j < T::kScoreTiles; ++j) {
          int const token = 16 * (T::kDepthWarps * round + depth_warp()) + 8 * half + lane_here() / 4;
          int const distance = kSign * (token - warp_token() - 8 * j - 2 * (lane_here() & 3)), next = distance - kSign;
          factors[lag(round, half, j)][0] = distance < 0 ? 0.0f : arguments.scale * power(distance);
          factors[lag(round, half, j)][1] = next < 0 ? 0.0f : arguments.scale * power(next);
        }
      }
    }
  }
  // The first token of Y whose scores this warp computes.
  __device__ __forceinline__ static int warp_token() { return column_warp() * 8 * T::kScoreTiles; }

  // Puts this warp's scores, scaled and decayed, where all warps find them. Rounded once, at the end: a score between
  // tokens that do not see each other may be beyond the 16-bit type.
  template <typename Scores>
  __device__ __forceinline__ void store_scores(Scores const& scores) const {
    Operand<typename T::TileP, 8 * T::kScoreTiles> const place(smem + T::kScoresOffset, lane_here() / 4,
                                                               warp_token() + 2 * (lane_here() & 3));
#pragma unroll
    for (int i = 0; i < T::kTokenTiles; ++i) {
      if (T::kDepthWarps > 1 && i % T::kDepthWarps != depth_warp()) continue;
#pragma unroll
      for (int j = 0; j < T::kScoreTiles; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float const(&tile)[4] = scores[i][j];
          float const(&factor)[2] = factors[lag(i / T::kDepthWarps, half, j)];
          store_shared(place.at(16 * i + 8 * half, 8 * j),
                       pack_pair<Element>(tile[2 * half] * factor[0], tile[2 * half + 1] * factor[1]));
        }
      }
    }
  }

  // out += P Z. Depth warps alternate along the tokens. Tiles of scores that are zeros are left out.
  __device__ __forceinline__ void gemm_z(Output& out, uint32_t stage) const {
    LaneRow const a = lane_row_a(lane_here()), b = lane_row_b(lane_here());
    constexpr bool kStoredTransposed = T::kPrecomputed && T::kReversed;
    uint32_t const tile = T::kPrecomputed ? stage + T::kPOffset : smem + T::kScoresOffset;
    Operand<typename T::TileP, T::kChunk> const p(tile, kStoredTransposed ? b.row : a.row,
                                                  kStoredTransposed ? b.column : a.column);
    Operand<typename T::TileZ, T::kWarpColumns> const z_tile(stage + T::kZOffset, a.row, warp_column() + a.column);
#pragma unroll
    for (int round = 0; round < T::kTokenTiles; round += T::kDepthWarps) {
#pragma unroll
      for (int warp = 0; warp < T::kDepthWarps; ++warp) {
        if (T::kDepthWarps > 1 && depth_warp() != warp) continue;
        int const step = round + warp;
        uint32_t v[T::kRowTiles][4];
#pragma unroll
        for (int r = 0; r < T::kRowTiles; ++r) load_matrix_x4_transposed(v[r], z_tile.at(16 * step, 16 * r));
#pragma unroll
        for (int i = 0; i < T::kTokenTiles; ++i) {
          if (T::kReversed ? i > step : i < step) continue;
          uint32_t w[4];
          if constexpr (kStoredTransposed) {
            load_matrix_x4_transposed(w, p.at(16 * step, 16 * i));
          } else {
            load_matrix_x4(w, p.at(16 * i, 16 * step));
          }
#pragma unroll
          for (int r = 0; r < T::kRowTiles; ++r) {
            mma_m16n8k16<Element>(out[i][2 * r], w, v[r][0], v[r][1]);
            mma_m16n8k16<Element>(out[i][2 * r + 1], w, v[r][2], v[r][3]);
          }
        }
      }
    }
  }

  // --- output --------------------------------------------------------------------------------------------------------

  // Adds what the warps that share columns have of the same tiles: each gets its own token tiles.
  template <int Tiles>
  __device__ __forceinline__ void add_depth_warps(Accumulators<T::kTokenTiles, Tiles>& sum) const {
    auto place = [&](int sender, int round, int owner, int n) {  // of this lane's part of a tile for `owner`
      int const rank = (owner - sender + T::kDepthWarps) % T::kDepthWarps - 1;
      int const group = (column_warp() * T::kDepthWarps + sender) * (T::kDepthWarps - 1) + rank;
      return smem + T::kExchangeOffset + ((group * kOwned + round) * Tiles + n) * 512 + lane_here() * 16;
    };
    int const me = depth_warp();
#pragma unroll
    for (int i = 0; i < T::kTokenTiles; ++i) {
      int const owner = i % T::kDepthWarps;
      if (owner == me) continue;
#pragma unroll
      for (int n = 0; n < Tiles; ++n) {
        float const(&v)[4] = sum[i][n];
        store_shared_float4(place(me, i / T::kDepthWarps, owner, n), {v[0], v[1], v[2], v[3]});
      }
    }
    named_barrier(1 + column_warp(), 32 * T::kDepthWarps);
#pragma unroll
    for (int i = 0; i < T::kTokenTiles; ++i) {
      if (i % T::kDepthWarps != me) continue;
#pragma unroll
      for (int other = 1; other < T::kDepthWarps; ++other) {
#pragma unroll
        for (int n = 0; n < Tiles; ++n) {
          add_shared_float4(sum[i][n], place((me + other) % T::kDepthWarps, i / T::kDepthWarps, me, n));
        }
      }
    }
  }

  // Writes this warp's token tiles as pairs of neighbours, rounded, or to the partial sums.
  __device__ __forceinline__ void write(Output const& out, int chunk) const {
    int const row0 = chunk * T::kChunk, first_row = sequence.first_row + row0, lane_row = lane_here() / 4,
              column0 = slice * T::kColumns + warp_column();
    if (arguments.partial != nullptr) {
      int64_t const row_of_heads = (int64_t(batch) * arguments.heads.divisor + head) * arguments.seqlen + first_row;
      float* const partial =
          arguments.partial + (row_of_heads + lane_row) * arguments.columns + column0 + 2 * (lane_here() & 3);
      write_pairs<true>(out, partial, arguments.columns, row0, column0, [](float* to, float low, float high) {
        *reinterpret_cast<float2*>(to) = make_float2(low, high);
      });
      return;
    }
    int64_t const stride = arguments.out.stride_row;
    Element* const rows = static_cast<Element*>(arguments.out.data) + batch * arguments.out.stride_batch +
                          head * arguments.out.stride_head + (first_row + lane_row) * stride + column0 +
                          2 * (lane_here() & 3);
    auto const store = [](Element* to, float low, float high) {
      *reinterpret_cast<uint32_t*>(to) = pack_pair<Element>(low, high);
    };
    if (row0 + T::kChunk <= sequence.length(arguments) && column0 + T::kWarpColumns <= arguments.columns) {
      write_pairs<false>(out, rows, stride, row0, column0, store);
    } else {
      write_pairs<true>(out, rows, stride, row0, column0, store);
    }
  }
  // `rows` is where the lane's first pair goes.
  template <bool Checks, typename Type, typename Store>
  __device__ __forceinline__ void write_pairs(Output const& out, Type* rows, int64_t stride, int row0, int column0,
                                              Store&& store) const {
#pragma unroll
    for (int i = 0; i < T::kTokenTiles; ++i) {
      if (T::kDepthWarps > 1 && i % T::kDepthWarps != depth_warp()) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int const row = 16 * i + 8 * half;
        if (Checks && row0 + row + lane_here() / 4 >= sequence.length(arguments)) continue;
#pragma unroll
        for (int n = 0; n < 2 * T::kRowTiles; ++n) {
          if (Checks && column0 + 8 * n + 2 * (lane_here() & 3) >= arguments.columns) continue;
          store(rows + row * stride + 8 * n, out[i][n][2 * half], out[i][n][2 * half + 1]);
        }
      }
    }
  }

  // --- main loop -----------------------------------------------------------------------------------------------------

  // The output of one chunk, in registers; `between` as in gemm_x.
  template <typename Between>
  __device__ __forceinline__ void compute_output(Output& out, int length, uint32_t stage, Between&& between) {
    Accumulators<T::kTokenTiles, maximum(T::kScoreTiles, 1)> scores;
    for (int attempt = 0; attempt < 2; ++attempt) {
      clear(out);
      clear(scores);
      gemm_x(out, scores, stage, between);
      if (attempt > 0 || !overflows(out)) break;
      raise_scale();
    }
    if constexpr (kComputesScores) {
      if constexpr (T::kDepthWarps > 1) add_depth_warps(scores);
      store_scores(scores);
    }
    float const scale = (T::kReversed ? 1.0f : arguments.scale) * (state_scale * unit);
#pragma unroll
    for (int i = 0; i < T::kTokenTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int const token = 16 * i + 8 * half + lane_here() / 4;
        float const factor = scale * power(T::kReversed ? length - 1 - token : token + 1);
#pragma unroll
        for (int n = 0; n < 2 * T::kRowTiles; ++n) {
          out[i][n][2 * half] *= factor;
          out[i][n][2 * half + 1] *= factor;
        }
      }
    }
    if constexpr (kComputesScores) __syncthreads();
    gemm_z(out, stage);
    if constexpr (T::kDepthWarps > 1) add_depth_warps(out);
  }

  __device__ __forceinline__ void run() {
    constexpr int kAhead = T::kStages - 1;
    int const count = end - first;
    auto chunk_at = [&](int index) { return T::kReversed ? end - 1 - index : first + index; };
    auto fetch_whole = [&](int index, int stage) {
      Fetch const fetch = plan_fetch(index < count, chunk_at(index), stage);
      start_fetch(fetch, chunk_at(index));
      fetch_part(fetch, 0, 1);
      cp_async_fence();
    };
#pragma unroll
    for (int index = 0; index < maximum(kAhead, 1); ++index) fetch_whole(index, index);
    load_state();
    if constexpr (kComputesScores) prepare_factors();
    int stage = 0;
    for (int index = 0; index < count; ++index) {
      int const chunk = chunk_at(index);
      int const length = minimum(T::kChunk, sequence.length(arguments) - chunk * T::kChunk);
      int const empty_stage = stage == 0 ? T::kStages - 1 : stage - 1, ahead = chunk_at(index + kAhead);
      Fetch const fetch = plan_fetch(kAhead > 0 && index + kAhead < count, ahead, empty_stage);
      cp_async_wait<maximum(kAhead - 1, 0)>();
      __syncthreads();
      start_fetch(fetch, ahead);
      uint32_t const base = smem + stage * T::kStageBytes;
      if constexpr (StatesOnly) {
        fetch_part(fetch, 0, 1);
        cp_async_fence();
        update_state(base, length);
      } else {
        Output out;
        compute_output(out, length, base, [&](int step) { fetch_part(fetch, step, kDepthSteps); });
        cp_async_fence();
        write(out, chunk);
        update_state(base, length);
      }
      if constexpr (kAhead == 0) {
        __syncthreads();
        fetch_whole(index + 1, 0);
      }
      stage = stage + 1 == T::kStages ? 0 : stage + 1;
    }
    store_state();
  }
};

template <typename T, bool StatesOnly>
__global__ void __launch_bounds__(T::kThreads, T::kCtasPerSm)
    retention_chunks(typename T::Arguments const __grid_constant__ arguments) {
  extern __shared__ __align__(128) char smem_bytes[];
  ChunkWarp<T, StatesOnly> warp(arguments, shared_address(smem_bytes), int(blockIdx.x));
  if constexpr (T::kPacked) {
    if (!warp.exists()) return;
  }
  warp.run();
}

}  // namespace attention_autotuner

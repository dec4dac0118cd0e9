// The pass over chunks of retention, for compute capability 8.0 and newer: a CTA walks a super-chunk of one head for
// some columns of Z, with the state in registers.
//
// The state is kept transposed, columns of Z as rows: S^T += Z^T Y accumulates it, and the accumulators of S^T are,
// once rounded, the B operand of X S. So a warp needs no state but its own, and no copy of it anywhere. Warps own 16 or
// more columns each and all of D; where D is too deep for that, depth warps share columns, and their outputs meet in
// shared memory. Scores X Y^T are computed along with X S, from the same fragments of X, each warp the scores of its
// share of the chunk's tokens, and pass through shared memory; or they are given.
//
// fp16 holds the rounded state scaled by a power of two, which brings its largest element to 2^13: states grow with the
// sequence and may exceed what fp16 holds. Decays are powers of gamma with exponents of at most a chunk, never
// negative.
//
// Layouts: see mma_sm80.cuh (fragments), tile_sm80.cuh (shared memory), retention_traits.cuh (map, which tensor is
// which). Called by: retention_entry.cuh.
#pragma once

#include "product_sm80.cuh"
#include "retention_traits.cuh"
#include "tensors.cuh"

namespace attention_autotuner {

template <typename T, bool StatesOnly>
struct ChunkWarp {
  using Element = typename T::Element;
  using CopyX = TileCopy<T::kChunk, T::kD, T::kThreads, T::kCopyBytes, false>;
  using CopyZ = TileCopy<T::kChunk, T::kColumns, T::kThreads, T::kCopyBytes, false>;
  using CopyP = TileCopy<T::kChunk, T::kChunk, T::kThreads, 16, false>;
  using Output = Accumulators<T::kTokenTiles, 2 * T::kRowTiles>;
  static constexpr bool kComputesScores = !StatesOnly && !T::kGiven;
  static constexpr int kDepthSteps = T::kDepth / 16;

  ChunkArguments const& arguments;
  uint32_t const smem;
  int slice, super, head, batch;
  int first, end;  // chunks
  float log2_gamma;
  Element const *x, *y, *z;
  Accumulators<T::kRowTiles, T::kDepthTiles> state;

  __device__ __forceinline__ static int lane() { return thread_index() & 31; }
  // Warps that share columns wait for each other, so they are neighbours.
  __device__ __forceinline__ static int depth_warp() { return (thread_index() >> 5) % T::kDepthWarps; }
  __device__ __forceinline__ static int column_warp() { return (thread_index() >> 5) / T::kDepthWarps; }
  __device__ __forceinline__ static int warp_column() { return column_warp() * T::kWarpColumns; }
  __device__ __forceinline__ static int warp_depth() { return depth_warp() * T::kDepth; }

  __device__ __forceinline__ ChunkWarp(ChunkArguments const& arguments, uint32_t smem, int index)
      : arguments(arguments), smem(smem) {
    auto take = [&index](Divider const& divider) {
      int const quotient = divider.divide(index), rest = index - quotient * divider.divisor;
      index = quotient;
      return rest;
    };
    slice = index % T::kSlices;
    index /= T::kSlices;
    super = take(arguments.supers);
    head = take(arguments.heads);
    batch = index;
    first = super * (arguments.super_chunk / T::kChunk);
    end = minimum(first + arguments.super_chunk / T::kChunk, arguments.chunks);
    log2_gamma = arguments.log2_gamma[head];
    int const kv_head = arguments.group.divide(head);
    x = head_data<Element>(arguments.x, batch, T::kReversed ? kv_head : head);
    y = head_data<Element>(arguments.y, batch, T::kReversed ? head : kv_head);
    z = head_data<Element>(arguments.z, batch, T::kReversed ? head : kv_head) + slice * T::kColumns;
  }

  // gamma^n for 0 <= n, and 1 below.
  __device__ __forceinline__ float power(int n) const { return exp2f(log2_gamma * float(maximum(n, 0))); }

  // --- states --------------------------------------------------------------------------------------------------------

  // Visits every element of this warp's state that exists, with its offset in a state [dim_qk, dim_v].
  template <typename Visit>
  __device__ __forceinline__ void visit_state(Visit&& visit) {
#pragma unroll
    for (int r = 0; r < T::kRowTiles; ++r) {
#pragma unroll
      for (int n = 0; n < T::kDepthTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          int const column = slice * T::kColumns + warp_column() + 16 * r + e / 2 * 8 + lane() / 4;
          int const depth = warp_depth() + 8 * n + 2 * (lane() & 3) + e % 2;
          int const offset = T::kTransposed ? column * arguments.depth + depth : depth * arguments.columns + column;
          if (column < arguments.columns && depth < arguments.depth) visit(state[r][n][e], offset);
        }
      }
    }
  }
  __device__ __forceinline__ int64_t state_place(int slots) const {
    int64_t const sequence = int64_t(batch) * arguments.heads.divisor + head;
    return (sequence * slots + (slots > 1 ? super : 0)) * arguments.depth * arguments.columns;
  }
  __device__ __forceinline__ void load_state() {
    clear(state);
    if (StatesOnly || arguments.first_states == nullptr) return;
    float const* const source = arguments.first_states + state_place(arguments.first_slots);
    visit_state([source](float& value, int offset) { value = source[offset]; });
  }
  __device__ __forceinline__ void store_state() {
    if (arguments.last_states == nullptr) return;
    float* const target = arguments.last_states + state_place(arguments.last_slots);
    visit_state([target](float& value, int offset) { target[offset] = value; });
  }

  // --- loads ---------------------------------------------------------------------------------------------------------

  // Copies a chunk's tiles into a stage, spread over `parts` calls where they are whole.
  template <typename Copy>
  __device__ __forceinline__ static void copy_tile_part(bool wanted, uint32_t tile, Element const* data,
                                                        int64_t stride_row, int row, int rows, int columns, int part,
                                                        int parts) {
    int const thread = thread_index();
    Element const* const source = data + int64_t(row + Copy::row(thread)) * stride_row + Copy::column(thread);
    uint32_t const target = tile + Copy::offset(thread);
    bool const exact = T::kCopyBytes == 16 && rows >= T::kChunk && columns >= Copy::kChunks * kChunk;
    if constexpr (T::kCopyBytes == 16) Copy::copy_part(wanted && exact, target, source, stride_row, part, parts);
    if (part == 0 && wanted && !exact) Copy::copy(target, source, stride_row, rows, columns);
  }
  __device__ __forceinline__ void fetch_part(bool wanted, int chunk, int stage, int part, int parts) const {
    uint32_t const base = smem + stage * T::kStageBytes;
    int const row = chunk * T::kChunk, rows = arguments.seqlen - row;
    if constexpr (!StatesOnly) {
      copy_tile_part<CopyX>(wanted, base, x, arguments.x.stride_row, row, rows, arguments.depth, part, parts);
    }
    copy_tile_part<CopyX>(wanted, base + T::kYOffset, y, arguments.y.stride_row, row, rows, arguments.depth, part,
                          parts);
    copy_tile_part<CopyZ>(wanted, base + T::kZOffset, z, arguments.z.stride_row, row, rows,
                          arguments.columns - slice * T::kColumns, part, parts);
    if constexpr (!StatesOnly && T::kGiven) {
      int64_t const place = (int64_t(batch) * arguments.heads.divisor + head) * arguments.chunks + chunk;
      int const thread = thread_index();
      CopyP::copy_part(wanted, base + T::kPOffset + CopyP::offset(thread),
                       static_cast<Element const*>(arguments.scores) +
                           (place * T::kChunk + CopyP::row(thread)) * T::kChunk + CopyP::column(thread),
                       T::kChunk, part, parts);
    }
  }

  // --- products ------------------------------------------------------------------------------------------------------

  // A power of two that brings the state into the range of the 16-bit type, as its exponent.
  __device__ __forceinline__ int state_exponent() const {
    if constexpr (!std::is_same_v<Element, __half>) return 0;
    float largest = 0.0f;
#pragma unroll
    for (auto const& row : state) {
#pragma unroll
      for (auto const& tile : row) {
#pragma unroll
        for (float const& value : tile) largest = fmaxf(largest, fabsf(value));
      }
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
    int const exponent = (__float_as_int(largest) >> 23) - 127;
    return 13 - minimum(maximum(exponent, -100), 100);
  }
  __device__ __forceinline__ static float power_of_two(int exponent) { return __int_as_float((127 + exponent) << 23); }

  // out = X S scaled by 2^exponent, and the scores of this warp's tokens; `between(step)` is other work.
  template <typename Scores, typename Between>
  __device__ __forceinline__ void multiply_x(Output& out, Scores& scores, int exponent, uint32_t stage,
                                             Between&& between) const {
    float const factor = power_of_two(exponent);
    LaneRow const a = lane_row_a(lane());
    Operand<typename T::TileX, T::kDepth> const x_tile(stage, a.row, warp_depth() + a.column);
    // Where a warp has eight tokens, lanes 16 and on repeat what 0 to 15 point at.
    constexpr bool kSingle = T::kScoreTiles == 1;
    LaneRow const b = lane_row_b(kSingle ? lane() & 15 : lane());
    Operand<typename T::TileX, T::kDepth> const y_tile(stage + T::kYOffset, column_warp() * 8 * T::kScoreTiles + b.row,
                                                       b.column);
#pragma unroll
    for (int step = 0; step < kDepthSteps; ++step) {
      uint32_t s[T::kRowTiles][4];
#pragma unroll
      for (int r = 0; r < T::kRowTiles; ++r) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float const(&tile)[4] = state[r][2 * step + e % 2];
          float const low = tile[e / 2 * 2], high = tile[e / 2 * 2 + 1];
          s[r][e] = std::is_same_v<Element, __half> ? pack_pair<Element>(low * factor, high * factor)
                                                    : pack_pair<Element>(low, high);
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

  // Decays this warp's scores and puts them where all warps find them.
  template <typename Scores>
  __device__ __forceinline__ void store_scores(Scores const& scores) const {
    int const token = column_warp() * 8 * T::kScoreTiles + 2 * (lane() & 3);  // of Y
#pragma unroll
    for (int i = 0; i < T::kTokenTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int const row = 16 * i + 8 * half + lane() / 4;
#pragma unroll
        for (int j = 0; j < T::kScoreTiles; ++j) {
          float value[2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            int const distance = T::kReversed ? token + 8 * j + e - row : row - token - 8 * j - e;
            float const decay = exp2_approximate(log2_gamma * float(maximum(distance, 0)));
            value[e] = distance < 0 ? 0.0f : scores[i][j][2 * half + e] * (arguments.scale * decay);
          }
          asm volatile(
              "st.shared.b32 [%0], %1;\n" ::"r"(smem + T::kScoresOffset + T::TileP::offset(row, token + 8 * j)),
              "r"(pack_pair<Element>(value[0], value[1]))
              : "memory");
        }
      }
    }
  }

  // out += P Z. Depth warps take turns along the tokens. Tiles of scores that are zeros are left out.
  __device__ __forceinline__ void multiply_z(Output& out, uint32_t stage) const {
    LaneRow const a = lane_row_a(lane()), b = lane_row_b(lane());
    constexpr bool kStoredTransposed = T::kGiven && T::kReversed;
    uint32_t const tile = T::kGiven ? stage + T::kPOffset : smem + T::kScoresOffset;
    Operand<typename T::TileP, T::kChunk> const p(tile, kStoredTransposed ? b.row : a.row,
                                                  kStoredTransposed ? b.column : a.column);
    Operand<typename T::TileZ, T::kWarpColumns> const z_tile(stage + T::kZOffset, a.row, warp_column() + a.column);
#pragma unroll
    for (int turn = 0; turn < T::kTokenTiles; turn += T::kDepthWarps) {
#pragma unroll
      for (int warp = 0; warp < T::kDepthWarps; ++warp) {
        if (T::kDepthWarps > 1 && depth_warp() != warp) continue;
        int const step = turn + warp;
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

  // state = gamma^length state + (decayed Z)^T Y.
  __device__ __forceinline__ void update_state(uint32_t stage, int length) {
    LaneRow const a = lane_row_a(lane()), b = lane_row_b(lane());
    Operand<typename T::TileZ, T::kWarpColumns> const z_tile(stage + T::kZOffset, b.row, warp_column() + b.column);
    Operand<typename T::TileX, T::kDepth> const y_tile(stage + T::kYOffset, a.row, warp_depth() + a.column);
    float const whole = power(length), scale = T::kReversed ? arguments.scale : 1.0f;
#pragma unroll
    for (auto& row : state) {
#pragma unroll
      for (auto& tile : row) {
#pragma unroll
        for (float& value : tile) value *= whole;
      }
    }
#pragma unroll
    for (int step = 0; step < T::kTokenTiles; ++step) {
      uint32_t w[T::kRowTiles][4];
      float factors[4];  // of tokens 2t, 2t + 1 and the same 8 further
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        int const token = 16 * step + e / 2 * 8 + 2 * (lane() & 3) + e % 2;
        factors[e] = scale * power(T::kReversed ? token + 1 : length - 1 - token);
      }
#pragma unroll
      for (int r = 0; r < T::kRowTiles; ++r) {
        load_matrix_x4_transposed(w[r], z_tile.at(16 * step, 16 * r));
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float2 const pair = unpack_pair<Element>(w[r][e]);
          w[r][e] = pack_pair<Element>(pair.x * factors[e / 2 * 2], pair.y * factors[e / 2 * 2 + 1]);
        }
      }
      multiply_step<Element>(
          state, w,
          [&](int j, uint32_t (&registers)[4]) { load_matrix_x4_transposed(registers, y_tile.at(16 * step, 8 * j)); },
          [](int) {});
    }
  }

  // --- output --------------------------------------------------------------------------------------------------------

  // Adds the outputs of the warps that share columns: each gets the token tiles of its turn.
  __device__ __forceinline__ void add_depth_warps(Output& out) const {
    constexpr int kOwned = T::kTokenTiles / T::kDepthWarps, kTiles = 2 * T::kRowTiles;
    auto place = [&](int giver, int turn, int owner, int n) {  // of a fragment of `owner`'s tile
      int const rank = (owner - giver + T::kDepthWarps) % T::kDepthWarps - 1;
      int const group = (column_warp() * T::kDepthWarps + giver) * (T::kDepthWarps - 1) + rank;
      return smem + T::kExchangeOffset + ((group * kOwned + turn) * kTiles + n) * 512 + lane() * 16;
    };
    int const me = depth_warp();
#pragma unroll
    for (int i = 0; i < T::kTokenTiles; ++i) {
      int const owner = i % T::kDepthWarps;
      if (owner == me) continue;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        float const(&v)[4] = out[i][n];
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"r"(place(me, i / T::kDepthWarps, owner, n)),
                     "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
                     : "memory");
      }
    }
    named_barrier(1 + column_warp(), 32 * T::kDepthWarps);
#pragma unroll
    for (int i = 0; i < T::kTokenTiles; ++i) {
      if (i % T::kDepthWarps != me) continue;
#pragma unroll
      for (int other = 1; other < T::kDepthWarps; ++other) {
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          float v[4];
          asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];\n"
                       : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
                       : "r"(place((me + other) % T::kDepthWarps, i / T::kDepthWarps, me, n))
                       : "memory");
#pragma unroll
          for (int e = 0; e < 4; ++e) out[i][n][e] += v[e];
        }
      }
    }
  }

  __device__ __forceinline__ void write(Output const& out, int chunk) const {
    int const column0 = slice * T::kColumns + warp_column() + 2 * (lane() & 3);
    auto* const rows = static_cast<Element*>(arguments.out.data) + batch * arguments.out.stride_batch +
                       head * arguments.out.stride_head;
    float* const parts =
        arguments.parts + (int64_t(batch) * arguments.heads.divisor + head) * arguments.seqlen * arguments.columns;
#pragma unroll
    for (int i = 0; i < T::kTokenTiles; ++i) {
      if (T::kDepthWarps > 1 && i % T::kDepthWarps != depth_warp()) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int const row = chunk * T::kChunk + 16 * i + 8 * half + lane() / 4;
        if (row >= arguments.seqlen) continue;
#pragma unroll
        for (int n = 0; n < 2 * T::kRowTiles; ++n) {
          int const column = column0 + 8 * n;
          if (column >= arguments.columns) continue;
          float const low = out[i][n][2 * half], high = out[i][n][2 * half + 1];
          if (arguments.parts != nullptr) {
            *reinterpret_cast<float2*>(parts + int64_t(row) * arguments.columns + column) = make_float2(low, high);
          } else {
            *reinterpret_cast<uint32_t*>(rows + int64_t(row) * arguments.out.stride_row + column) =
                pack_pair<Element>(low, high);
          }
        }
      }
    }
  }

  // --- main loop -----------------------------------------------------------------------------------------------------

  // The output of one chunk; `between` as in multiply_x.
  template <typename Between>
  __device__ __forceinline__ void output(int chunk, int length, uint32_t stage, Between&& between) {
    Output out;
    Accumulators<T::kTokenTiles, maximum(T::kScoreTiles, 1)> scores;
    clear(out);
    clear(scores);
    int const exponent = state_exponent();
    multiply_x(out, scores, exponent, stage, between);
    if constexpr (kComputesScores) store_scores(scores);
    float const scale = (T::kReversed ? 1.0f : arguments.scale) * power_of_two(-exponent);
#pragma unroll
    for (int i = 0; i < T::kTokenTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int const token = 16 * i + 8 * half + lane() / 4;
        float const factor = scale * power(T::kReversed ? length - 1 - token : token + 1);
#pragma unroll
        for (int n = 0; n < 2 * T::kRowTiles; ++n) {
          out[i][n][2 * half] *= factor;
          out[i][n][2 * half + 1] *= factor;
        }
      }
    }
    if constexpr (kComputesScores) __syncthreads();
    multiply_z(out, stage);
    if constexpr (T::kDepthWarps > 1) add_depth_warps(out);
    write(out, chunk);
  }

  __device__ __forceinline__ void run() {
    constexpr int kAhead = T::kStages - 1;
    int const count = end - first;
    auto chunk_at = [&](int index) { return T::kReversed ? end - 1 - index : first + index; };
#pragma unroll
    for (int stage = 0; stage < maximum(kAhead, 1); ++stage) {
      fetch_part(stage < count, chunk_at(stage), stage, 0, 1);
      cute::cp_async_fence();
    }
    load_state();
    int stage = 0;
    for (int index = 0; index < count; ++index) {
      int const chunk = chunk_at(index);
      int const length = minimum(T::kChunk, arguments.seqlen - chunk * T::kChunk);
      cute::cp_async_wait<maximum(kAhead - 1, 0)>();
      __syncthreads();
      uint32_t const base = smem + stage * T::kStageBytes;
      int const free_stage = stage == 0 ? T::kStages - 1 : stage - 1;
      bool const more = index + kAhead < count;
      auto fetch = [&](int part, int parts) {
        if constexpr (kAhead > 0) fetch_part(more, chunk_at(index + kAhead), free_stage, part, parts);
      };
      if constexpr (StatesOnly) {
        fetch(0, 1);
      } else {
        output(chunk, length, base, [&](int step) { fetch(step, kDepthSteps); });
      }
      if constexpr (kAhead > 0) cute::cp_async_fence();
      update_state(base, length);
      if constexpr (kAhead == 0) {
        __syncthreads();
        fetch_part(index + 1 < count, chunk_at(index + 1), 0, 0, 1);
        cute::cp_async_fence();
      }
      stage = stage + 1 == T::kStages ? 0 : stage + 1;
    }
    store_state();
  }
};

template <typename T, bool StatesOnly>
__global__ void __launch_bounds__(T::kThreads, T::kCtasPerSm)
    retention_chunks(ChunkArguments const __grid_constant__ arguments) {
  extern __shared__ __align__(128) char smem_bytes[];
  ChunkWarp<T, StatesOnly> warp(arguments, shared_address(smem_bytes), int(blockIdx.x));
  warp.run();
}

}  // namespace attention_autotuner

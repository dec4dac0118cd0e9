// The pass over chunks of retention, for compute capability 8.0 and newer: a CTA walks a super-chunk of one head for
// some columns of Z, with the state in registers.
//
// The state is kept transposed, columns of Z as rows: S^T += Z^T Y accumulates it, and the accumulators of S^T are,
// once rounded, the B operand of X S. So a warp needs no state but its own, and no copy of it anywhere. Warps own 16 or
// more columns each and all of D; where D is too deep for that, depth warps share columns, and their outputs meet in
// shared memory. Scores X Y^T are computed along with X S, from the same fragments of X, each warp the scores of its
// share of the chunk's tokens, and pass through shared memory; or they are given.
//
// What registers hold is the state over a weight: the decay of a chunk goes to the weight, which is one number, and
// only when it has fallen below 1 do the registers take it over. So what is added to them is never scaled up. States
// grow with the sequence and may exceed what fp16 holds: that shows in the product with X, which is then done again
// with a greater weight. Decays are powers of gamma with exponents of at most a chunk, never negative.
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
  static constexpr bool kReadsScores = !StatesOnly && T::kGiven;
  static constexpr int kDepthSteps = T::kDepth / 16;
  static constexpr int kOwned = T::kTokenTiles / T::kDepthWarps;  // token tiles that a warp writes
  static constexpr float kFreshWeight = 4.0f;
  static constexpr float kLeastUnit = 1e-15f;

  ChunkArguments const& arguments;
  uint32_t const smem;
  int slice, super, head, batch;
  int first, end;  // chunks
  float log2_gamma;
  Accumulators<T::kRowTiles, T::kDepthTiles> state;  // over the weight
  float weight;
  float unit;  // of the registers beside the weight: the greatest factor of a token, so that none is rounded to nothing
  uint32_t decays[T::kTokenTiles][kComputesScores ? T::kScoreTiles : 1][2];

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
    super = take(arguments.supers) + arguments.super_offset;
    head = take(arguments.heads);
    batch = index;
    first = super * (arguments.super_chunk / T::kChunk);
    end = minimum(first + arguments.super_chunk / T::kChunk, arguments.chunks);
    log2_gamma = arguments.log2_gamma[head];
    unit = T::kReversed ? arguments.scale * exp2f(log2_gamma) : 1.0f;
    if (fabsf(unit) < kLeastUnit) unit = 1.0f;
  }

  // gamma^n for 0 <= n, and 1 below.
  __device__ __forceinline__ float power(int n) const { return exp2_approximate(log2_gamma * float(maximum(n, 0))); }

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
  __device__ __forceinline__ int64_t state_place(int slots, int slot) const {
    int64_t const sequence = int64_t(batch) * arguments.heads.divisor + head;
    return (sequence * slots + (slots > 1 ? slot : 0)) * arguments.depth * arguments.columns;
  }
  // Of the pieces of this super-chunk, the one that is walked first.
  __device__ __forceinline__ int first_slot() const {
    int const slot = super * arguments.pieces;
    return T::kReversed ? minimum(slot + arguments.pieces, arguments.first_slots) - 1 : slot;
  }
  __device__ __forceinline__ void load_state() {
    clear(state);
    weight = kFreshWeight;
    if (StatesOnly || arguments.first_states == nullptr) return;
    float const* const source = arguments.first_states + state_place(arguments.first_slots, first_slot());
    visit_state([source, this](float& value, int offset) { value = source[offset] / (kFreshWeight * unit); });
  }
  __device__ __forceinline__ void store_state() {
    if (arguments.last_states == nullptr) return;
    float* const target = arguments.last_states + state_place(arguments.last_slots, super);
    visit_state([target, this](float& value, int offset) { target[offset] = value * (weight * unit); });
  }

  // Where the head's tensors start, Z's at this CTA's columns. Computed where they are needed: registers are scarce.
  __device__ __forceinline__ Element const* x() const {
    return head_data<Element>(arguments.x, batch, T::kReversed ? arguments.group.divide(head) : head);
  }
  __device__ __forceinline__ Element const* y() const {
    return head_data<Element>(arguments.y, batch, T::kReversed ? head : arguments.group.divide(head));
  }
  __device__ __forceinline__ Element const* z() const {
    return head_data<Element>(arguments.z, batch, T::kReversed ? head : arguments.group.divide(head)) +
           slice * T::kColumns;
  }

  // --- loads ---------------------------------------------------------------------------------------------------------

  // A chunk's tiles on their way into a stage: planned before it is free, then start copies what is not whole, at once,
  // and the parts copy what is, spread over other work.
  struct Fetch {
    bool wanted, exact_depth, exact_columns;
    uint32_t xy, z_target;  // this thread's first chunk in X's tile and in Z's
    Element const *x, *y, *z;
    Element const* scores;
    uint32_t scores_target;
  };
  __device__ __forceinline__ Fetch plan_fetch(bool wanted, int chunk, int stage) const {
    int const thread = thread_index(), row = chunk * T::kChunk, rows = arguments.seqlen - row;
    int const columns = arguments.columns - slice * T::kColumns;
    bool const whole = T::kCopyBytes == 16 && rows >= T::kChunk;
    uint32_t const base = smem + stage * T::kStageBytes;
    int64_t const row_x = row + CopyX::row(thread), row_z = row + CopyZ::row(thread);
    Fetch fetch{wanted,
                whole && arguments.depth >= T::kD,
                whole && columns >= T::kColumns,
                base + CopyX::offset(thread),
                base + T::kZOffset + CopyZ::offset(thread),
                x() + row_x * arguments.x.stride_row + CopyX::column(thread),
                y() + row_x * arguments.y.stride_row + CopyX::column(thread),
                z() + row_z * arguments.z.stride_row + CopyZ::column(thread),
                nullptr,
                0};
    if constexpr (kReadsScores) {
      int64_t const place = (int64_t(batch) * arguments.heads.divisor + head) * arguments.chunks + chunk;
      fetch.scores = static_cast<Element const*>(arguments.scores) +
                     (place * T::kChunk + CopyP::row(thread)) * T::kChunk + CopyP::column(thread);
      fetch.scores_target = base + T::kPOffset + CopyP::offset(thread);
    }
    return fetch;
  }
  __device__ __forceinline__ void start_fetch(Fetch const& fetch, int chunk) const {
    if (!fetch.wanted || (fetch.exact_depth && fetch.exact_columns)) return;
    int const rows = arguments.seqlen - chunk * T::kChunk;
    if (!fetch.exact_depth) {
      if constexpr (!StatesOnly) CopyX::copy(fetch.xy, fetch.x, arguments.x.stride_row, rows, arguments.depth);
      CopyX::copy(fetch.xy + T::kYOffset, fetch.y, arguments.y.stride_row, rows, arguments.depth);
    }
    if (!fetch.exact_columns) {
      CopyZ::copy(fetch.z_target, fetch.z, arguments.z.stride_row, rows, arguments.columns - slice * T::kColumns);
    }
  }
  __device__ __forceinline__ void fetch_part(Fetch const& fetch, int part, int parts) const {
    if constexpr (T::kCopyBytes == 16) {
      bool const depth = fetch.wanted && fetch.exact_depth;
      if constexpr (!StatesOnly) CopyX::copy_part(depth, fetch.xy, fetch.x, arguments.x.stride_row, part, parts);
      CopyX::copy_part(depth, fetch.xy + T::kYOffset, fetch.y, arguments.y.stride_row, part, parts);
      CopyZ::copy_part(fetch.wanted && fetch.exact_columns, fetch.z_target, fetch.z, arguments.z.stride_row, part,
                       parts);
    }
    if constexpr (kReadsScores) {
      CopyP::copy_part(fetch.wanted, fetch.scores_target, fetch.scores, T::kChunk, part, parts);
    }
  }

  // --- products ------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void scale_state(float factor) {
#pragma unroll
    for (auto& row : state) {
#pragma unroll
      for (auto& tile : row) {
#pragma unroll
        for (float& value : tile) value *= factor;
      }
    }
  }
  // Makes the weight so great that the registers' largest element is about 2^8.
  __device__ __forceinline__ void raise_weight() {
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
    int const exponent = minimum((__float_as_int(largest) >> 23) - 127, 100) - 8;
    scale_state(__int_as_float((127 - exponent) << 23));
    weight *= __int_as_float((127 + exponent) << 23);
  }
  // Whether the registers hold something that the 16-bit type does not, as a product with them shows. What comes from
  // inputs that are not finite shows alike, and stays: the weight is raised once.
  __device__ __forceinline__ static bool overflows(Output const& out) {
    if constexpr (!std::is_same_v<Element, __half>) return false;
    float sum = 0.0f;  // a column of the state that is not finite shows in every token
#pragma unroll
    for (auto const& tile : out[0]) sum = fmaf(tile[0], 0.0f, fmaf(tile[1], 0.0f, sum));
    return __any_sync(0xffffffffu, sum != 0.0f);
  }

  // out = X S over the weight, and the scores of this warp's tokens; `between(step)` is other work.
  template <typename Scores, typename Between>
  __device__ __forceinline__ void multiply_x(Output& out, Scores& scores, uint32_t stage, Between&& between) const {
    LaneRow const a = lane_row_a(lane());
    Operand<typename T::TileX, T::kDepth> const x_tile(stage, a.row, warp_depth() + a.column);
    // Where a warp has eight tokens, lanes 16 and on repeat what 0 to 15 point at.
    constexpr bool kSingle = T::kScoreTiles == 1;
    LaneRow const b = lane_row_b(kSingle ? lane() & 15 : lane());
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

  // gamma to the distance of every pair of tokens whose score this lane holds, 0 above the diagonal, packed.
  __device__ __forceinline__ void prepare_decays() {
    constexpr int kSign = T::kReversed ? -1 : 1;
#pragma unroll
    for (int i = 0; i < T::kTokenTiles; ++i) {
#pragma unroll
      for (int j = 0; j < T::kScoreTiles; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          int const distance = kSign * (16 * i + 8 * half + lane() / 4 - warp_token() - 8 * j - 2 * (lane() & 3));
          int const next = distance - kSign;
          decays[i][j][half] = pack_pair<Element>(distance < 0 ? 0.0f : power(distance), next < 0 ? 0.0f : power(next));
        }
      }
    }
  }
  // The first token of Y whose scores this warp computes.
  __device__ __forceinline__ static int warp_token() { return column_warp() * 8 * T::kScoreTiles; }

  // Decays this warp's scores and puts them where all warps find them.
  template <typename Scores>
  __device__ __forceinline__ void store_scores(Scores const& scores) const {
    Operand<typename T::TileP, 8 * T::kScoreTiles> const place(smem + T::kScoresOffset, lane() / 4,
                                                               warp_token() + 2 * (lane() & 3));
#pragma unroll
    for (int i = 0; i < T::kTokenTiles; ++i) {
      if (T::kDepthWarps > 1 && i % T::kDepthWarps != depth_warp()) continue;
#pragma unroll
      for (int j = 0; j < T::kScoreTiles; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float const(&tile)[4] = scores[i][j];
          uint32_t const packed =
              pack_pair<Element>(tile[2 * half] * arguments.scale, tile[2 * half + 1] * arguments.scale);
          asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(place.at(16 * i + 8 * half, 8 * j)),
                       "r"(multiply_pairs<Element>(packed, decays[i][j][half]))
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
    weight *= exp2f(log2_gamma * float(length));
    if (weight < 1.0f) {
      scale_state(weight / kFreshWeight);
      weight = kFreshWeight;
    }
    float const scale = (T::kReversed ? arguments.scale : 1.0f) / (weight * unit);
    float const last = log2_gamma * float(T::kReversed ? 1 : length - 1);
    add_tokens(stage, [&](float token) {  // tokens beyond the sequence count for nothing
      return scale * exp2_approximate(fminf(fmaf(T::kReversed ? log2_gamma : -log2_gamma, token, last), 0.0f));
    });
  }
  // Adds (Z, each token times its factor)^T Y to the registers.
  template <typename Factor>
  __device__ __forceinline__ void add_tokens(uint32_t stage, Factor&& factor) {
    float const lane_token = float(2 * (lane() & 3));
    LaneRow const a = lane_row_a(lane()), b = lane_row_b(lane());
    Operand<typename T::TileZ, T::kWarpColumns> const z_tile(stage + T::kZOffset, b.row, warp_column() + b.column);
    Operand<typename T::TileX, T::kDepth> const y_tile(stage + T::kYOffset, a.row, warp_depth() + a.column);
#pragma unroll
    for (int step = 0; step < T::kTokenTiles; ++step) {
      uint32_t w[T::kRowTiles][4];
      float factors[4];  // of tokens 2t, 2t + 1 and the same 8 further
#pragma unroll
      for (int e = 0; e < 4; ++e) factors[e] = factor(lane_token + float(16 * step + e / 2 * 8 + e % 2));
#pragma unroll
      for (int r = 0; r < T::kRowTiles; ++r) {
        load_matrix_x4_transposed(w[r], z_tile.at(16 * step, 16 * r));
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float2 const pair = unpack_pair<Element>(w[r][e]);  // factors of 16 bits would err alike chunk after chunk
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

  // Adds what the warps that share columns have of the same tiles: each gets the token tiles of its turn.
  template <int Tiles>
  __device__ __forceinline__ void add_depth_warps(Accumulators<T::kTokenTiles, Tiles>& sum) const {
    auto place = [&](int giver, int turn, int owner, int n) {  // of this lane's part of a tile for `owner`
      int const rank = (owner - giver + T::kDepthWarps) % T::kDepthWarps - 1;
      int const group = (column_warp() * T::kDepthWarps + giver) * (T::kDepthWarps - 1) + rank;
      return smem + T::kExchangeOffset + ((group * kOwned + turn) * Tiles + n) * 512 + lane() * 16;
    };
    int const me = depth_warp();
#pragma unroll
    for (int i = 0; i < T::kTokenTiles; ++i) {
      int const owner = i % T::kDepthWarps;
      if (owner == me) continue;
#pragma unroll
      for (int n = 0; n < Tiles; ++n) {
        float const(&v)[4] = sum[i][n];
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
        for (int n = 0; n < Tiles; ++n) {
          float v[4];
          asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];\n"
                       : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
                       : "r"(place((me + other) % T::kDepthWarps, i / T::kDepthWarps, me, n))
                       : "memory");
#pragma unroll
          for (int e = 0; e < 4; ++e) sum[i][n][e] += v[e];
        }
      }
    }
  }

  // Writes the token tiles of this warp's turn as pairs of neighbours, rounded, or to the parts.
  __device__ __forceinline__ void write(Output const& out, int chunk) const {
    int const row0 = chunk * T::kChunk, lane_row = lane() / 4, column0 = slice * T::kColumns + warp_column();
    if (arguments.parts != nullptr) {
      int64_t const first_row = (int64_t(batch) * arguments.heads.divisor + head) * arguments.seqlen + row0;
      float* const parts = arguments.parts + (first_row + lane_row) * arguments.columns + column0 + 2 * (lane() & 3);
      write_pairs<true>(out, parts, arguments.columns, row0, column0, [](float* to, float low, float high) {
        *reinterpret_cast<float2*>(to) = make_float2(low, high);
      });
      return;
    }
    int64_t const stride = arguments.out.stride_row;
    Element* const rows = static_cast<Element*>(arguments.out.data) + batch * arguments.out.stride_batch +
                          head * arguments.out.stride_head + (row0 + lane_row) * stride + column0 + 2 * (lane() & 3);
    auto const store = [](Element* to, float low, float high) {
      *reinterpret_cast<uint32_t*>(to) = pack_pair<Element>(low, high);
    };
    if (row0 + T::kChunk <= arguments.seqlen && column0 + T::kWarpColumns <= arguments.columns) {
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
        if (Checks && row0 + row + lane() / 4 >= arguments.seqlen) continue;
#pragma unroll
        for (int n = 0; n < 2 * T::kRowTiles; ++n) {
          if (Checks && column0 + 8 * n + 2 * (lane() & 3) >= arguments.columns) continue;
          store(rows + row * stride + 8 * n, out[i][n][2 * half], out[i][n][2 * half + 1]);
        }
      }
    }
  }

  // --- main loop -----------------------------------------------------------------------------------------------------

  // The output of one chunk, in registers; `between` as in multiply_x.
  template <typename Between>
  __device__ __forceinline__ void take_output(Output& out, int length, uint32_t stage, Between&& between) {
    Accumulators<T::kTokenTiles, maximum(T::kScoreTiles, 1)> scores;
    for (int attempt = 0; attempt < 2; ++attempt) {
      clear(out);
      clear(scores);
      multiply_x(out, scores, stage, between);
      if (attempt > 0 || !overflows(out)) break;
      raise_weight();
    }
    if constexpr (kComputesScores) {
      if constexpr (T::kDepthWarps > 1) add_depth_warps(scores);
      store_scores(scores);
    }
    float const scale = (T::kReversed ? 1.0f : arguments.scale) * (weight * unit);
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
  }

  __device__ __forceinline__ void run() {
    constexpr int kAhead = T::kStages - 1;
    int const count = end - first;
    auto chunk_at = [&](int index) { return T::kReversed ? end - 1 - index : first + index; };
    auto fetch_whole = [&](int index, int stage) {
      Fetch const fetch = plan_fetch(index < count, chunk_at(index), stage);
      start_fetch(fetch, chunk_at(index));
      fetch_part(fetch, 0, 1);
      cute::cp_async_fence();
    };
#pragma unroll
    for (int index = 0; index < maximum(kAhead, 1); ++index) fetch_whole(index, index);
    load_state();
    if constexpr (kComputesScores) prepare_decays();
    int stage = 0;
    for (int index = 0; index < count; ++index) {
      int const chunk = chunk_at(index);
      int const length = minimum(T::kChunk, arguments.seqlen - chunk * T::kChunk);
      int const free_stage = stage == 0 ? T::kStages - 1 : stage - 1, ahead = chunk_at(index + kAhead);
      Fetch const fetch = plan_fetch(kAhead > 0 && index + kAhead < count, ahead, free_stage);
      cute::cp_async_wait<maximum(kAhead - 1, 0)>();
      __syncthreads();
      start_fetch(fetch, ahead);
      uint32_t const base = smem + stage * T::kStageBytes;
      if constexpr (StatesOnly) {
        fetch_part(fetch, 0, 1);
        cute::cp_async_fence();
        update_state(base, length);
      } else {
        Output out;
        take_output(out, length, base, [&](int step) { fetch_part(fetch, step, kDepthSteps); });
        cute::cp_async_fence();
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
    retention_chunks(ChunkArguments const __grid_constant__ arguments) {
  extern __shared__ __align__(128) char smem_bytes[];
  ChunkWarp<T, StatesOnly> warp(arguments, shared_address(smem_bytes), int(blockIdx.x));
  warp.run();
}

}  // namespace attention_autotuner

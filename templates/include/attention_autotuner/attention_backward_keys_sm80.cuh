// The pass of attention backward over blocks of keys: dK and dV of a block, and its share of every query's dQ.
//
// Scores are computed transposed, keys as rows: P^T and dS^T then are, as accumulators, the A operands of dV and dK,
// and only dQ needs dS through shared memory. Warps work in pairs that share 16 to 64 key rows, one warp holding dV,
// the other dK, so that each can own twice the rows that a warp holding both could, which halves what the products read
// from shared memory:
//
//   value warp   S^T = K Q^T, P^T, hands P^T over, dV += P^T dO
//   key warp     dP^T = V dO^T, takes P^T, dS^T, dK += dS^T Q
//   both         dQ += dS K, shared by all warps of the CTA, added to fp32 sums in global memory (fused plan)
//
// One CTA per block of keys and K/V head; it walks the query tiles of every query head of the group.
//
// Layouts: see mma_sm80.cuh (fragments), tile_sm80.cuh (shared memory), attention_backward_traits.cuh (map).
// Called by: attention_backward_entry.cuh.
#pragma once

#include "attention_backward_common.cuh"

namespace attention_autotuner {

// Sums of dQ are kept as 16x8 tiles in fragment order, so that additions are dense: lane after lane where one
// instruction adds four floats, element after element where it adds one.
__device__ constexpr bool adds_by_lane() {
#if __CUDA_ARCH__ >= 900
  return true;
#else
  return false;
#endif
}

__device__ __forceinline__ void add_fragment(float* tile, int lane, float const (&values)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"l"(tile + 4 * lane), "f"(values[0]), "f"(values[1]),
               "f"(values[2]), "f"(values[3])
               : "memory");
#else
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    asm volatile("red.global.add.f32 [%0], %1;\n" ::"l"(tile + 32 * e + lane), "f"(values[e]) : "memory");
  }
#endif
}

template <typename Config>
struct KeyPassWarp {
  using T = KeyPassTraits<Config>;
  using Element = typename T::Element;
  using Stream = PairStream<Element, T::kBlockM, T::kClassQK, T::kClassV, T::kThreads, T::kCopyBytes>;
  using Scores = Accumulators<T::kRowTiles, T::kQueryTiles>;
  using Packed = uint32_t[T::kQuerySteps][T::kRowTiles][4];  // A operands, 16 queries each

  BackwardArguments const& arguments;
  uint32_t const smem;
  int const batch, kv_head, key0;
  QueryTiles now, ahead;
  Stream stream;

  __device__ __forceinline__ static int lane() { return thread_index() & 31; }
  __device__ __forceinline__ static int warp() { return thread_index() >> 5; }
  __device__ __forceinline__ static bool is_value_warp() { return warp() < T::kPairs; }
  __device__ __forceinline__ static int pair() { return warp() % T::kPairs; }

  __device__ __forceinline__ KeyPassWarp(BackwardArguments const& arguments, TileCoordinates const& tile, uint32_t smem)
      : arguments(arguments),
        smem(smem),
        batch(tile.batch),
        kv_head(tile.head),
        key0(tile.row_block * T::kBlockN),
        stream(arguments.params.q, arguments.params.dout, arguments.params.seqlen_q, arguments.params.dim_qk,
               arguments.params.dim_v, 0, smem + T::kQOffset, smem + T::kDoOffset) {
    BackwardParams const& p = arguments.params;
    int const group = p.heads_q / p.heads_kv;
    now.first = arguments.first_query(key0) / T::kBlockM;
    now.end = round_up_division(p.seqlen_q, T::kBlockM);
    now.head = kv_head * group;
    now.head_end = now.head + group;
    now.tile = now.first;
    ahead = now;
  }

  // --- loads ---------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void load_first() {
    BackwardParams const& p = arguments.params;
    using CopyK = TileCopy<T::kBlockN, T::kClassQK, T::kThreads, T::kCopyBytes, false>;
    using CopyV = TileCopy<T::kBlockN, T::kClassV, T::kThreads, T::kCopyBytes, false>;
    copy_resident<CopyK, Element>(smem + T::kKOffset, p.k, batch, kv_head, key0, p.seqlen_k, p.dim_qk);
    copy_resident<CopyV, Element>(smem + T::kVOffset, p.v, batch, kv_head, key0, p.seqlen_k, p.dim_v);
    stream.seek(batch, ahead.head, ahead.tile * T::kBlockM);
    start_next(true, 0);
    copy_next(true, 0, 0, 1);
    arrive();
  }
  __device__ __forceinline__ static void arrive() {
    cute::cp_async_fence();
    cute::cp_async_wait<0>();
    __syncthreads();
  }
  // The next tile of queries into `slot`: start_next, then all parts of copy_next.
  __device__ __forceinline__ void start_next(bool wanted, int slot) {
    if (wanted) {
      copy_statistics<T::kBlockM>(arguments, statistics(slot), batch, ahead.head, ahead.tile * T::kBlockM);
    }
    stream.start(wanted, slot);
  }
  __device__ __forceinline__ void copy_next(bool wanted, int slot, int part, int parts) {
    stream.copy_part(wanted, slot, part, parts);
    if (part != parts - 1) return;
    if (ahead.next()) {
      if (ahead.head < ahead.head_end) stream.seek(batch, ahead.head, ahead.tile * T::kBlockM);
    } else {
      stream.next();
    }
  }
  __device__ __forceinline__ uint32_t statistics(int slot) const {
    return smem + T::kStatisticsOffset + slot * T::kStatisticsBytes;
  }

  // --- between the products ------------------------------------------------------------------------------------------

  __device__ __forceinline__ uint32_t exchange(int step, int i) const {
    return smem + T::kExchangeOffset + ((pair() * T::kRowTiles + i) * T::kQuerySteps + step) * 512 + lane() * 16;
  }

  // P^T from S^T, packed, and handed to the other warp of the pair.
  __device__ __forceinline__ void take_p(Packed& p, Scores& s, int slot) {
    int const query0 = now.tile * T::kBlockM, key = key0 + pair() * T::kRowsPerWarp;
    bool const whole =
        key0 + T::kBlockN <= arguments.params.seqlen_k && arguments.first_query(key + T::kRowsPerWarp - 1) <= query0;
    uint32_t const lse2 = statistics(slot) + 8 * (lane() & 3);
#pragma unroll
    for (int step = 0; step < T::kQuerySteps; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int const j = 2 * step + half;
        float2 const l = load_shared_float2(lse2 + 32 * j);
#pragma unroll
        for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            s[i][j][e] = exponential(fmaf(s[i][j][e], arguments.c, e % 2 == 0 ? -l.x : -l.y));
          }
        }
      }
      if (!whole) mask(s, step, query0, key);
#pragma unroll
      for (int i = 0; i < T::kRowTiles; ++i) {
        uint32_t (&a)[4] = p[step][i];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          a[r] = pack_pair<Element>(s[i][2 * step + r / 2][r % 2 * 2], s[i][2 * step + r / 2][r % 2 * 2 + 1]);
        }
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"(exchange(step, i)), "r"(a[0]), "r"(a[1]),
                     "r"(a[2]), "r"(a[3])
                     : "memory");
      }
    }
  }
  // Clears the probabilities of 16 queries' unseen keys.
  __device__ __forceinline__ void mask(Scores& s, int step, int query0, int key) const {
#pragma unroll
    for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int const row = key + 16 * i + 8 * half + lane() / 4;
        int const first = row < arguments.params.seqlen_k
                              ? arguments.first_query(row) - query0 - 16 * step - 2 * (lane() & 3)
                              : INT32_MAX;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            if (8 * j + e < first) s[i][2 * step + j][2 * half + e] = 0.0f;
          }
        }
      }
    }
  }

  // dP^T starts from -delta, so that its product gives dP - delta.
  __device__ __forceinline__ void begin_dp(Scores& dp, int slot) const {
    uint32_t const delta = statistics(slot) + T::kStatisticsBytes / 2 + 8 * (lane() & 3);
#pragma unroll
    for (int j = 0; j < T::kQueryTiles; ++j) {
      float2 const d = load_shared_float2(delta + 32 * j);
#pragma unroll
      for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) dp[i][j][e] = e % 2 == 0 ? d.x : d.y;
      }
    }
  }
  // dS^T from dP^T and the other warp's P^T, packed, and stored for dQ.
  __device__ __forceinline__ void take_ds(Packed& ds, Scores const& dp, int slot) const {
    uint32_t const store = smem + T::kDsOffset + slot * T::kDsBytes +
                           T::TileDs::offset(pair() * T::kRowsPerWarp + lane() / 4, 2 * (lane() & 3));
#pragma unroll
    for (int step = 0; step < T::kQuerySteps; ++step) {
#pragma unroll
      for (int i = 0; i < T::kRowTiles; ++i) {
        uint32_t p[4];
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n"
                     : "=r"(p[0]), "=r"(p[1]), "=r"(p[2]), "=r"(p[3])
                     : "r"(exchange(step, i))
                     : "memory");
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          float2 const probability = unpack_pair<Element>(p[r]);
          float const(&d)[4] = dp[i][2 * step + r / 2];
          ds[step][i][r] = pack_pair<Element>(probability.x * d[r % 2 * 2], probability.y * d[r % 2 * 2 + 1]);
          if constexpr (T::kFused) {
            store_shared(T::TileDs::advance(store, 16 * i + 8 * (r % 2), 16 * step + 8 * (r / 2)), ds[step][i][r]);
          }
        }
      }
    }
  }

  // --- products ------------------------------------------------------------------------------------------------------

  // sum += W X for W packed keys x queries and X the tile of queries at `address` (as lane_row_a points).
  template <typename Tile, int ColumnTiles>
  __device__ __forceinline__ static void accumulate(Accumulators<T::kRowTiles, ColumnTiles>& sum, Packed const& w,
                                                    uint32_t address) {
#pragma unroll
    for (int step = 0; step < T::kQuerySteps; ++step) {
      multiply_step<Element>(
          sum, w[step],
          [&](int j, uint32_t (&b)[4]) { load_matrix_x4_transposed(b, Tile::advance(address, 16 * step, 8 * j)); },
          [](int) {});
    }
  }

  // This warp's tile of dQ = dS K, added to the sums in global memory.
  __device__ __forceinline__ void add_dq(int slot) const {
    constexpr int kWarpsM = T::kDqSplit.warps_m, kColumns = 16 * T::kDqColumnPairs, kRows = 16 * T::kDqRowTiles;
    int const warp_m = warp() % kWarpsM, warp_d = warp() / kWarpsM;
    LaneRow const a = lane_row_a(lane()), b = lane_row_b(lane());
    uint32_t const ds = smem + T::kDsOffset + slot * T::kDsBytes;
    uint32_t const ds_address = ds + T::TileDs::offset(b.row, warp_m * kRows + b.column);
    uint32_t const k_address = smem + T::kKOffset + T::TileK::offset(a.row, warp_d * kColumns + a.column);
    Accumulators<T::kDqRowTiles, 2 * T::kDqColumnPairs> dq;
    clear(dq);
#pragma unroll
    for (int step = 0; step < T::kBlockN / 16; ++step) {
      uint32_t w[T::kDqRowTiles][4];
#pragma unroll
      for (int i = 0; i < T::kDqRowTiles; ++i) {
        if constexpr (T::TileDs::template advances<kRows>()) {
          load_matrix_x4_transposed(w[i], T::TileDs::advance(ds_address, 16 * step, 16 * i));
        } else {
          load_matrix_x4_transposed(w[i],
                                    ds + T::TileDs::offset(16 * step + b.row, warp_m * kRows + 16 * i + b.column));
        }
      }
#pragma unroll
      for (int j = 0; j < T::kDqColumnPairs; ++j) {
        if (T::kDqEven || warp_d * kColumns + 16 * j < T::kClassQK) {
          uint32_t x[4];
          if constexpr (T::TileK::template advances<kColumns>()) {
            load_matrix_x4_transposed(x, T::TileK::advance(k_address, 16 * step, 16 * j));
          } else {
            load_matrix_x4_transposed(
                x, smem + T::kKOffset + T::TileK::offset(16 * step + a.row, warp_d * kColumns + 16 * j + a.column));
          }
#pragma unroll
          for (int i = 0; i < T::kDqRowTiles; ++i) {
            mma_m16n8k16<Element>(dq[i][2 * j], w[i], x[0], x[1]);
            mma_m16n8k16<Element>(dq[i][2 * j + 1], w[i], x[2], x[3]);
          }
        }
      }
    }
    int64_t const tile = (int64_t(batch) * arguments.params.heads_q + now.head) * arguments.dq_tiles + now.tile;
    float* const out = arguments.dq_sum + tile * (T::kBlockM * T::kClassQK) +
                       (warp_m * T::kDqRowTiles * (T::kClassQK / 8) + warp_d * 2 * T::kDqColumnPairs) * 128;
#pragma unroll
    for (int i = 0; i < T::kDqRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < 2 * T::kDqColumnPairs; ++j) {
        if (T::kDqEven || warp_d * kColumns + 8 * j < T::kClassQK) {
          add_fragment(out + (i * (T::kClassQK / 8) + j) * 128, lane(), dq[i][j]);
        }
      }
    }
  }

  // --- main loop -----------------------------------------------------------------------------------------------------

  template <bool ValueWarp>
  __device__ __forceinline__ void run() {
    constexpr int kClass = ValueWarp ? T::kClassV : T::kClassQK;
    constexpr int kSteps = (ValueWarp ? T::kClassQK : T::kClassV) / 16;  // of the first product
    LaneRow const a = lane_row_a(lane()), b = lane_row_b(lane());
    int const row0 = pair() * T::kRowsPerWarp;
    uint32_t const k_address = smem + T::kKOffset + T::TileK::offset(row0 + a.row, a.column);
    uint32_t const v_address = smem + T::kVOffset + T::TileV::offset(row0 + a.row, a.column);
    uint32_t const q_rows = smem + T::kQOffset + T::TileQ::offset(b.row, b.column);
    uint32_t const do_rows = smem + T::kDoOffset + T::TileDo::offset(b.row, b.column);
    uint32_t const q_columns = smem + T::kQOffset + T::TileQ::offset(a.row, a.column);
    uint32_t const do_columns = smem + T::kDoOffset + T::TileDo::offset(a.row, a.column);

    Accumulators<T::kRowTiles, kClass / 8> sum;
    clear(sum);
    int slot = 0;
    for (int left = now.count(); left > 0; --left) {
      bool const more = left > 1;
      int const q_slot = slot * T::TileQ::kBytes, do_slot = slot * T::TileDo::kBytes;
      if constexpr (T::kStages > 1) start_next(more, slot ^ 1);
      auto fetch = [&](int step) {
        if constexpr (T::kStages > 1) copy_next(more, slot ^ 1, step, kSteps);
      };
      Scores s;
      Packed w;
      if constexpr (ValueWarp) {
        clear(s);
        multiply_rows<Element, typename T::TileK, typename T::TileQ, kSteps>(s, k_address, q_rows + q_slot, fetch);
        take_p(w, s, slot);
        named_barrier_arrive(1 + pair(), 64);
        accumulate<typename T::TileDo>(sum, w, do_columns + do_slot);
      } else {
        begin_dp(s, slot);
        multiply_rows<Element, typename T::TileV, typename T::TileDo, kSteps>(s, v_address, do_rows + do_slot, fetch);
        named_barrier(1 + pair(), 64);
        take_ds(w, s, slot);
        accumulate<typename T::TileQ>(sum, w, q_columns + q_slot);
      }
      arrive();  // dS is complete, the next tile is here, and this one's buffers are free
      if constexpr (T::kStages == 1) {
        start_next(more, 0);
        copy_next(more, 0, 0, 1);
      }
      if constexpr (T::kFused) add_dq(slot);
      if constexpr (T::kStages == 1) arrive();
      now.next();
      if constexpr (T::kStages > 1) slot ^= 1;
    }
    if constexpr (T::kFused) __syncthreads();  // dQ has read K
    BackwardParams const& p = arguments.params;
    if constexpr (ValueWarp) {
      write_rows<Element, typename T::TileV>(sum, 1.0f, smem + T::kVOffset, row0, p.dv, batch, kv_head, key0,
                                             p.seqlen_k, 0, p.dim_v);
    } else {
      write_rows<Element, typename T::TileK>(sum, p.softmax_scale, smem + T::kKOffset, row0, p.dk, batch, kv_head, key0,
                                             p.seqlen_k, 0, p.dim_qk);
    }
  }
};

template <typename Config>
__global__ void __launch_bounds__(KeyPassTraits<Config>::kThreads, KeyPassTraits<Config>::kCtasPerSm)
    attention_backward_keys(BackwardArguments const __grid_constant__ arguments,
                            TileList const __grid_constant__ list) {
  using T = KeyPassTraits<Config>;
  extern __shared__ __align__(128) char smem_bytes[];
  KeyPassWarp<Config> warp(arguments, tile_coordinates<T::kHeadsFirst, 1>(block_index(), list),
                           shared_address(smem_bytes));
  if (!warp.now.empty()) warp.load_first();
  if (warp.is_value_warp()) {
    warp.template run<true>();
  } else {
    warp.template run<false>();
  }
}

}  // namespace attention_autotuner

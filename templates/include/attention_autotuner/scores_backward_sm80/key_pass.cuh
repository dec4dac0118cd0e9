// The pass of a backward over blocks of keys: dK and dV of a block, and its share of every query's dQ.
//
// Scores are computed transposed, keys as rows: P^T and dS^T then are, as accumulators, the A operands of dV and dK,
// and only dQ needs dS through shared memory. Warps work in pairs that share 16 to 64 key rows, one warp holding dV,
// the other dK, so that each can own twice the rows that a warp holding both could, which halves what the MMAs read
// from shared memory:
//
//   value warp   S^T = K Q^T, P^T, sends P^T, dV += P^T dO
//   key warp     dP^T = V dO^T, receives P^T where dS needs it, dS^T, dK += dS^T Q
//   both         dQ += dS K, shared by all warps of the CTA, added to fp32 sums in global memory (one-pass plan)
//
// A step's queries can be split into subtiles: scores then need fewer registers, and dQ's MMA still has all queries.
//
// With three buffers for Q the key warp does the dK of the tile before, first thing, so that it has MMAs to run while
// the value warp computes exponentials.
//
// One CTA per block of keys and K/V head loops over the query tiles of every query head of the group, or several share
// them.
//
// Layouts: see common/warp_mma.cuh (fragments), common/tile.cuh (shared memory), scores_backward_sm80/traits.cuh (its
// layout).
#pragma once

#include "attention_autotuner/common/backward_arguments.cuh"
#include "attention_autotuner/common/scheduler.cuh"
#include "attention_autotuner/common/shared_memory.cuh"
#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/common/tile.cuh"
#include "attention_autotuner/common/warp_mma.cuh"
#include "attention_autotuner/score/mask_stream.cuh"
#include "attention_autotuner/score/score_mod.cuh"
#include "attention_autotuner/scores_backward_sm80/dq_share.cuh"

namespace attention_autotuner {

template <typename Config, bool Shared>
struct KeyPassWarp : PassWarp<KeyPassTraits<Config>> {
  using T = KeyPassTraits<Config>;
  using Place = PassWarp<T>;
  using Place::arrive;
  using Place::lse_delta;
  using Place::smem;
  using Place::warp;
  using Score = BackwardScoreMod<T::kScoreMod, T>;
  using Arguments = BackwardArguments<typename T::Params>;
  using Element = typename T::Element;
  using Stream = PairStream<Element, T::kBlockM, T::kPaddedDimQK, T::kPaddedDimV, T::kThreads, T::kCopyBytes>;
  using Scores = Accumulators<T::kRowTiles, T::kQueryTiles>;
  using Packed = uint32_t[T::kQuerySteps][T::kRowTiles][4];  // A operands, 16 queries each

  Arguments const& arguments;
  int const batch, key0;
  Share<Shared> const share;
  TileRange range;  // over the tiles of queries
  Cursor now;
  Cursor ahead;  // fetched next

  __device__ __forceinline__ static bool is_value_warp() {
    return __shfl_sync(0xffffffffu, warp(), 0) < T::kPairs;  // the same for a warp, and the compiler knows
  }
  __device__ __forceinline__ static int pair() { return warp() % T::kPairs; }

  __device__ __forceinline__ KeyPassWarp(Arguments const& arguments, TileCoordinates const& tile, uint32_t smem)
      : Place{smem},
        arguments(arguments),
        batch(tile.batch),
        key0(tile.row_block * T::kBlockN),
        share(arguments, tile.head),
        range(TileRange::over_queries(arguments, key0, T::kBlockM, share.head, share.heads, T::kBlockN)) {
    now = ahead = range.begin();
  }

  // --- loads ---------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void load_first() {
    auto const& p = arguments.params;
    using CopyK = TileCopy<T::kBlockN, T::kPaddedDimQK, T::kThreads, T::kCopyBytes, false>;
    using CopyV = TileCopy<T::kBlockN, T::kPaddedDimV, T::kThreads, T::kCopyBytes, false>;
    copy_resident<CopyK, Element>(smem + T::kKOffset, p.k, batch, share.kv_head, key0, p.seqlen_k, p.dim_qk);
    copy_resident<CopyV, Element>(smem + T::kVOffset, p.v, batch, share.kv_head, key0, p.seqlen_k, p.dim_v);
#pragma unroll
    for (int tile = 0; tile < T::kDoStages; ++tile) {
      fetch(tile < range.tiles(), tile, tile, true, [](auto&& copy_part) { copy_part(0, 1); });
    }
    arrive();
  }
  // Fetches the next tile of queries, if there is one, Q into `q_slot` and the rest into `slot`. `work` is called with
  // a function that copies a part of it, to spread over other work.
  template <typename Work>
  __device__ __forceinline__ void fetch(bool wanted, int q_slot, int slot, bool moves, Work&& work) {
    auto const& p = arguments.params;
    int const row = ahead.tile * T::kBlockM;
    Stream stream(p.q, p.dout, p.seqlen_q, p.dim_qk, p.dim_v, 0, smem + T::kQOffset, smem + T::kDoOffset);
    stream.seek(batch, ahead.head, row);
    MaskStream<T::kScoreMod, T> masks;
    masks.seek(arguments, smem, ahead.head, row, key0);
    if (wanted) copy_lse_delta<T::kBlockM>(arguments, lse_delta(slot), batch, ahead.head, row);
    stream.start(wanted, q_slot, slot);
    masks.start(arguments, wanted, slot);
    work([&](int part, int num_parts) {
      stream.copy_part(wanted, q_slot, slot, part, num_parts);
      masks.copy_part(arguments, wanted, slot, part, num_parts);
    });
    if (moves) range.next(ahead);
  }

  // --- between the MMAs (see BackwardScoreMod) -----------------------------------------------------------------------

  __device__ __forceinline__ uint32_t exchange(int part, int step, int i) const {
    return smem + T::kExchangeOffset +
           (((part * T::kPairs + pair()) * T::kRowTiles + i) * T::kQuerySteps + step) * 512 + lane_here() * 16;
  }
  __device__ __forceinline__ static int exchange_barrier(int part) { return 1 + part * T::kPairs + pair(); }

  // P^T from S^T, packed, and sent to the other warp of the pair where dS needs it.
  __device__ __forceinline__ void compute_p(Packed& p, Scores& s, int slot, int part) const {
    int const query0 = now.tile * T::kBlockM + part * T::kSubtileRows, key = key0 + pair() * T::kRowsPerWarp;
    bool whole =
        key0 + T::kBlockN <= arguments.params.seqlen_k && arguments.first_query(key + T::kRowsPerWarp - 1) <= query0;
    if constexpr (T::kModified) whole = whole && query0 + T::kSubtileRows <= arguments.end_of_queries(key);
    if (whole) {
      Score::template compute_p<true>(*this, p, s, slot, part, query0, key);
    } else {
      Score::template compute_p<false>(*this, p, s, slot, part, query0, key);
    }
  }
  __device__ __forceinline__ void send_p(uint32_t const (&p)[4], int part, int step, int i) const {
    store_shared_four(exchange(part, step, i), {p[0], p[1], p[2], p[3]});
  }
  __device__ __forceinline__ void receive_p(uint32_t (&p)[4], int part, int step, int i) const {
    uint4 const words = load_shared_four(exchange(part, step, i));
    p[0] = words.x, p[1] = words.y, p[2] = words.z, p[3] = words.w;
  }
  // Where this lane stores dS^T of a slot.
  __device__ __forceinline__ uint32_t ds_address(int slot) const {
    return smem + T::kDsOffset + slot * T::kDsBytes +
           T::TileDs::offset(pair() * T::kRowsPerWarp + lane_here() / 4, 2 * (lane_here() & 3));
  }

  // --- MMAs ----------------------------------------------------------------------------------------------------------

  // sum += W X for W packed keys x queries and X the tile of queries at `address` (as lane_row_a points).
  template <typename Tile, int ColumnTiles>
  __device__ __forceinline__ static void accumulate(Accumulators<T::kRowTiles, ColumnTiles>& sum, Packed const& w,
                                                    uint32_t address) {
#pragma unroll
    for (int step = 0; step < T::kQuerySteps; ++step) {
      gemm_step<Element>(
          sum, w[step],
          [&](int j, uint32_t (&b)[4]) { load_matrix_x4_transposed(b, Tile::advance(address, 16 * step, 8 * j)); },
          [](int) {});
    }
  }

  // sum += dS^T Q with the dS^T that this warp has stored.
  __device__ __forceinline__ void accumulate_dk(Accumulators<T::kRowTiles, T::kPaddedDimQK / 8>& sum, int slot,
                                                uint32_t q_columns) const {
    LaneRow const a = lane_row_a(lane_here());
    uint32_t const ds =
        smem + T::kDsOffset + slot * T::kDsBytes + T::TileDs::offset(pair() * T::kRowsPerWarp + a.row, a.column);
#pragma unroll
    for (int step = 0; step < T::kQuerySteps; ++step) {
      uint32_t w[T::kRowTiles][4];
#pragma unroll
      for (int i = 0; i < T::kRowTiles; ++i) load_matrix_x4(w[i], T::TileDs::advance(ds, 16 * i, 16 * step));
      gemm_step<Element>(
          sum, w,
          [&](int j, uint32_t (&b)[4]) {
            load_matrix_x4_transposed(b, T::TileQ::advance(q_columns, 16 * step, 8 * j));
          },
          [](int) {});
    }
  }

  // This CTA's share of dQ = dS K, added to the sums in global memory; copies are spread over it.
  template <typename CopyPart>
  __device__ __forceinline__ void add_dq(int slot, CopyPart&& copy_part) const {
    int64_t const tile = (int64_t(batch) * arguments.params.heads_q + now.head) * arguments.dq_tiles + now.tile;
    add_dq_share<T>(smem + T::kDsOffset + slot * T::kDsBytes, smem + T::kKOffset,
                    arguments.dq_sum + tile * (T::kBlockM * T::kPaddedDimQK), copy_part);
  }

  // --- main loop -----------------------------------------------------------------------------------------------------

  // The buffers of a step: of Q, and of dO, dS, LSE and delta.
  struct Slots {
    int q = 0, other = 0;
    int q_before = 0;  // of the step before; of use only where dK comes later

    __device__ __forceinline__ static int after(int slot, int stages) { return slot + 1 == stages ? 0 : slot + 1; }
    __device__ __forceinline__ void next() {
      other = after(other, T::kDoStages);
      q_before = q;
      q = T::kDkLater ? after(q, T::kQStages) : other;
    }
    // The buffers that are free once all warps are done with a step, seen from it and from the next.
    __device__ __forceinline__ int free_q() const {
      return T::kDkLater ? after(after(q, T::kQStages), T::kQStages) : q;
    }
    __device__ __forceinline__ int freed_q() const { return T::kDkLater ? after(q, T::kQStages) : freed(); }
    __device__ __forceinline__ int freed() const { return after(other, T::kDoStages); }
  };

  template <bool ValueWarp>
  __device__ __forceinline__ void run() {
    // First MMA: own rows times streamed rows. Second: P or dS times the other streamed tile's columns.
    using TileOwn = std::conditional_t<ValueWarp, typename T::TileK, typename T::TileV>;
    using TileFirst = std::conditional_t<ValueWarp, typename T::TileQ, typename T::TileDo>;
    using TileSecond = std::conditional_t<ValueWarp, typename T::TileDo, typename T::TileQ>;
    constexpr int kOwnOffset = ValueWarp ? T::kKOffset : T::kVOffset;
    constexpr int kFirstOffset = ValueWarp ? T::kQOffset : T::kDoOffset;
    constexpr int kSecondOffset = ValueWarp ? T::kDoOffset : T::kQOffset;
    constexpr int kSteps = (ValueWarp ? T::kPaddedDimQK : T::kPaddedDimV) / 16;
    LaneRow const a = lane_row_a(lane_here()), b = lane_row_b(lane_here());
    int const row0 = pair() * T::kRowsPerWarp;
    uint32_t const own_rows = smem + kOwnOffset + TileOwn::offset(row0 + a.row, a.column);
    uint32_t const first = smem + kFirstOffset + TileFirst::offset(b.row, b.column);
    uint32_t const second = smem + kSecondOffset + TileSecond::offset(a.row, a.column);

    Accumulators<T::kRowTiles, (ValueWarp ? T::kPaddedDimV : T::kPaddedDimQK) / 8> sum;
    clear(sum);
    Slots slots;
    int const tiles = range.tiles();
    for (int left = tiles; left > 0; --left) {
      if constexpr (!ValueWarp && T::kDkLater) {
        if (left < tiles) accumulate_dk(sum, slots.freed(), second + slots.q_before * T::TileQ::kBytes);
      }
#pragma unroll
      for (int part = 0; part < T::kSubtiles; ++part) {
        uint32_t const first_part = TileFirst::advance(first + (ValueWarp ? slots.q : slots.other) * TileFirst::kBytes,
                                                       part * T::kSubtileRows, 0);
        uint32_t const second_part = TileSecond::advance(
            second + (ValueWarp ? slots.other : slots.q) * TileSecond::kBytes, part * T::kSubtileRows, 0);
        Scores s;
        Packed w;
        clear(s);
        auto scores = [&](auto&& copy_part) {
          gemm<Element, TileOwn, TileFirst, kSteps>(s, recompute_here(int(own_rows)), first_part, [&](int step) {
            copy_part(part * kSteps + step, T::kSubtiles * kSteps);
          });
        };
        if constexpr (T::kFetchesEarly) {
          fetch(left < tiles && left >= T::kDoStages, slots.freed_q(), slots.freed(), left < tiles, scores);
        } else {
          scores([](int, int) {});
        }
        if constexpr (ValueWarp) compute_p(w, s, slots.other, part);
        if (Score::exchanges_p(arguments)) named_barrier(exchange_barrier(part), 64);
        if constexpr (!ValueWarp) Score::compute_ds(*this, w, s, slots.other, part);
        if constexpr (ValueWarp || !T::kDkLater) accumulate<TileSecond>(sum, w, second_part);
      }
      arrive();  // dS is complete, the next tile is here, and this one's buffers are free
      auto dq = [&](auto&& copy_part) {
        if constexpr (T::kOnePass) {
          add_dq(slots.other, copy_part);
        } else {
          copy_part(0, 1);
        }
      };
      if constexpr (T::kFetchesEarly) {
        if constexpr (T::kOnePass) add_dq(slots.other, [](int, int) {});
      } else {
        fetch(left > T::kDoStages, slots.free_q(), slots.other, true, dq);
      }
      if constexpr (T::kStages == 1) arrive();
      range.next(now);
      slots.next();
    }
    if constexpr (!ValueWarp && T::kDkLater) {
      if (tiles > 0) accumulate_dk(sum, slots.freed(), second + slots.q_before * T::TileQ::kBytes);
    }
    auto const& p = arguments.params;
    if constexpr (Shared) {
      write_partial<T::kPacked>(sum, ValueWarp ? arguments.dv_partial : arguments.dk_partial, p, share.split, batch,
                                share.kv_head, key0 + row0, 0, ValueWarp ? T::kPaddedDimV : T::kPaddedDimQK);
      return;
    }
    if constexpr (T::kOnePass) __syncthreads();  // dQ has read K
    if constexpr (ValueWarp) {
      write_rows<Element, typename T::TileV>(sum, 1.0f, smem + T::kVOffset, row0, p.dv, batch, share.kv_head, key0,
                                             p.seqlen_k, 0, p.dim_v);
    } else {
      write_rows<Element, typename T::TileK>(sum, score_scale(p), smem + T::kKOffset, row0, p.dk, batch, share.kv_head,
                                             key0, p.seqlen_k, 0, p.dim_qk);
    }
  }
};

template <typename Config, bool Shared>
__global__ void __launch_bounds__(KeyPassTraits<Config>::kThreads, KeyPassTraits<Config>::kCtasPerSm)
    backward_keys(BackwardArguments<typename KeyPassTraits<Config>::Params> const __grid_constant__ arguments,
                  TileList const __grid_constant__ list) {
  using T = KeyPassTraits<Config>;
  extern __shared__ __align__(128) char smem_bytes[];
  uint32_t const smem = shared_address(smem_bytes);
  auto const listed = tile_coordinates<T::kLongestFirst, 1, T::kScoreMod == ScoreMod::kMasked>(int(blockIdx.x), list);
  of_sequence<T>(arguments, listed, [smem](auto const& shown, TileCoordinates const& tile) {
    KeyPassWarp<Config, Shared> warp(shown, tile, smem);
    if (warp.range.tiles() > 0) warp.load_first();
    if (warp.is_value_warp()) {
      warp.template run<true>();
    } else {
      warp.template run<false>();
    }
  });
}

}  // namespace attention_autotuner

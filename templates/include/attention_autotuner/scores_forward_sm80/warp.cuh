// O = W V for compute capability 8.0 and newer, W from Q K^T as the ScoreMod of the kernel says (softmax for attention,
// see score/score_mod.cuh): one CTA per block of query rows.
//
// Warps split the rows of a block; each keeps its S, P and O fragments in registers. With more than one warp along keys
// (kWarpsN), each computes its share of S, values of rows (the maxima of a softmax) are combined in shared memory,
// and P, the numerators of W, goes through shared memory so that each warp can multiply all of it with its share of V's
// columns.
//
// The score modification has: a state of every row, the work on S between the MMAs (prepare), P from S (numerators),
// and at the end what O is multiplied with and what is written beside it.
//
// Three main loops over the K/V tiles, last tile first (the masked ones come early):
//   by event  one barrier per arriving K tile, K slice or V tile; least shared memory
//   by tile   kStages whole K/V pairs in flight, one barrier per pair
//   ahead     by tile, and the next tile's Q K^T is issued between the exponentials of this one
//
// Layouts: see common/warp_mma.cuh (fragments), common/tile.cuh (shared memory), scores_forward_sm80/traits.cuh (its
// layout).
#pragma once

#include "attention_autotuner/common/convert.cuh"
#include "attention_autotuner/common/key_range.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/scheduler.cuh"
#include "attention_autotuner/common/shared_memory.cuh"
#include "attention_autotuner/common/tensors.cuh"
#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/common/tile.cuh"
#include "attention_autotuner/common/warp_mma.cuh"
#include "attention_autotuner/score/score_mod.cuh"
#include "attention_autotuner/scores_forward_sm80/rows.cuh"
#include "attention_autotuner/scores_forward_sm80/traits.cuh"

namespace attention_autotuner {

template <typename Config>
struct ForwardWarp : ForwardRows<Config> {
  using T = ForwardTraits<Config>;
  using Rows = ForwardRows<Config>;
  using Rows::list;
  using Rows::params;
  using Rows::query_of;
  using Rows::row_in_block;
  using Rows::smem;
  using Rows::tile;
  using Rows::tile_queries;
  using Rows::warp_m;
  using Rows::warp_n;
  using Element = typename T::Element;
  using Params = typename T::Params;
  using Scores = Accumulators<T::kRowTiles, T::kKeyTiles>;
  using CopyK = TileCopy<T::kBlockN, T::kKSlice, T::kThreads, Config::kCopyBytes, T::kPadded>;
  using CopyV = TileCopy<T::kBlockN, T::kValueColumns, T::kThreads, Config::kCopyBytes, T::kPadded>;
  static constexpr int kQSteps = T::kPaddedDimQK / 16;
  static constexpr int kKeySteps = T::kBlockN / 16;

  typename T::Range range;

  // This thread's first chunk of the K and V tiles that are fetched next.
  Element const* k_next;
  Element const* v_next;
  uint32_t k_target;  // where it goes in the first K buffer
  uint32_t v_target;  // and V buffer; not used where it follows from k_target
  static constexpr bool kSameCopy = CopyK::kThreadsPerRow == CopyV::kThreadsPerRow && T::kKSlice == T::kValueColumns;
  int tiles;        // K/V tiles that some row of this block sees
  int whole_keys;   // keys that every row of this block sees
  int exact_tiles;  // K/V tiles that lie wholly inside the tensors
  float const c;    // |scale| log2(e) for a softmax, else scale; a kernel parameter, so that it costs no register
  uint32_t q_address, k_address, v_address;
  uint32_t q_registers[T::kQInRegisters ? T::kRowTiles : 1][T::kQInRegisters ? kQSteps : 1][4];
  Accumulators<T::kRowTiles, T::kColumnTiles> o;
  ForwardScoreMod<T::kScoreMod, T> score_mod;

  __device__ __forceinline__ int first_key(int key_tile) const { return key_tile * T::kBlockN + score_mod.far_keys(); }

  // Row i sees keys of the range below this.
  __device__ __forceinline__ int visible_keys(int row) const {
    if constexpr (T::kSpanned) return range.visible_end(params, row);
    if constexpr (T::kModified) {
      int const end = minimum(row + range.causal_offset(params), range.length(params)) + params.window_right + 1;
      return minimum(end, range.length(params));
    }
    int const diagonal = row + range.causal_offset(params) + 1;
    return params.causal && diagonal < range.length(params) ? diagonal : range.length(params);
  }

  // And none below this, where there are windows.
  __device__ __forceinline__ int first_visible(int row) const {
    if constexpr (T::kSpanned) return range.visible_first(params, row);
    if constexpr (T::kModified) return row + range.causal_offset(params) - params.window_left;
    return 0;
  }

  __device__ __forceinline__ ForwardWarp(Params const& params, typename T::List const& list, float c, uint32_t smem,
                                         int index, typename Rows::OfSequence of_sequence = {})
      : Rows{{smem}, params, list, index, of_sequence}, c(c) {
    auto const tile = this->tile();
    range.find(params, tile.batch);
    if constexpr (T::kModified) {
      // Whole tiles, which no row sees.
      int const skipped = minimum(maximum(first_visible(tile.row_block * tile_queries()), 0), range.length(params));
      range.skip(skipped - skipped % T::kBlockN);
    }
    int const kv_head = list.group.divide(tile.head);
    int const last_row = minimum((tile.row_block + 1) * tile_queries(), params.seqlen_q) - 1;
    tiles = maximum(visible_keys(last_row) + T::kBlockN - 1, 0) / T::kBlockN;
    if constexpr (T::kSplitKv) take_share(tile.split);
    whole_keys = visible_keys(tile.row_block * tile_queries());
    int const columns_v = params.dim_v - tile.value_slice * T::kValueColumns;
    bool const exact_rows = T::kScoreMod != ScoreMod::kMasked || (tile.row_block + 1) * T::kBlockM <= params.seqlen_q;
    exact_tiles =
        Config::kCopyBytes == 16 && params.dim_qk == T::kPaddedDimQK && columns_v >= T::kValueColumns && exact_rows
            ? range.length(params) / T::kBlockN
            : 0;

    int const thread = thread_index();
    score_mod.begin(*this, tile);
    int64_t const last_key = range.begin() + first_key(tiles - 1);
    k_next = head_data<Element>(params.k, tile.batch, kv_head) + (last_key + CopyK::row(thread)) * params.k.stride_row +
             CopyK::column(thread);
    v_next = head_data<Element>(params.v, tile.batch, kv_head) + (last_key + CopyV::row(thread)) * params.v.stride_row +
             tile.value_slice * T::kValueColumns + CopyV::column(thread);
    k_target = smem + T::kKOffset + CopyK::offset(thread);
    if constexpr (!kSameCopy) v_target = smem + T::kVOffset + CopyV::offset(thread);

    LaneRow const a = lane_row_a(lane_here()), b = lane_row_b(lane_here());
    q_address = smem + T::kQOffset + T::TileQ::offset(warp_m() * 16 * T::kRowTiles + a.row, a.column);
    k_address = smem + T::kKOffset + T::TileK::offset(warp_n() * 8 * T::kKeyTiles + b.row, b.column);
    v_address = smem + T::kVOffset + T::TileV::offset(a.row, warp_n() * 8 * T::kColumnTiles + a.column);
    clear(o);
    if (tiles > 0) load_q(tile);
  }

  // Of the tiles of keys, an even share for every split, which may be none.
  __device__ __forceinline__ void take_share(int split) {
    int const share = list.splits.divide(tiles), rest = tiles - share * list.splits.divisor;
    tiles = share + (split < rest);
    range.skip((split * share + minimum(split, rest)) * T::kBlockN);
  }

  // --- loads ---------------------------------------------------------------------------------------------------------

  // K tiles (with all their slices, in order) and V tiles are fetched from the last to the first, each in two steps:
  // start copies what is not a whole tile, at once; then the parts copy what is, spread over the MMAs that run
  // meanwhile.
  __device__ __forceinline__ bool is_exact(int key_tile) const { return unsigned(key_tile) < unsigned(exact_tiles); }

  __device__ __forceinline__ void start_k(int key_tile, int slice, int slot) {
    if (key_tile < 0 || is_exact(key_tile)) return;
    CopyK::copy(k_target + slot * T::kKSlotBytes, k_next + slice * T::kKSlice, params.k.stride_row,
                range.length(params) - first_key(key_tile), params.dim_qk - slice * T::kKSlice);
  }
  __device__ __forceinline__ void start_v(int key_tile, int slot) {
    if (key_tile < 0 || is_exact(key_tile)) return;
    CopyV::copy(v_buffer(slot), v_next, params.v.stride_row, range.length(params) - first_key(key_tile),
                params.dim_v - tile().value_slice * T::kValueColumns);
    score_mod.start_mask(*this, key_tile, slot);
  }
  __device__ __forceinline__ void copy_k_part(int key_tile, int slice, int slot, int part, int num_parts) {
    if constexpr (Config::kCopyBytes == 16) {
      CopyK::copy_part(is_exact(key_tile), k_target + slot * T::kKSlotBytes, k_next + slice * T::kKSlice,
                       params.k.stride_row, part, num_parts);
    }
    if (part == num_parts - 1 && slice == T::kSlices - 1) k_next -= T::kBlockN * params.k.stride_row;
  }
  __device__ __forceinline__ void copy_v_part(bool wanted, int key_tile, int slot, int part, int num_parts) {
    if constexpr (Config::kCopyBytes == 16) {
      CopyV::copy_part(wanted && is_exact(key_tile), v_buffer(slot), v_next, params.v.stride_row, part, num_parts);
      score_mod.copy_mask_part(*this, wanted && is_exact(key_tile), slot, part, num_parts);
    }
    if (wanted && part == num_parts - 1) {
      v_next -= T::kBlockN * params.v.stride_row;
      score_mod.next_mask();
    }
  }
  __device__ __forceinline__ void copy_k(int key_tile, int slice, int slot) {
    start_k(key_tile, slice, slot);
    copy_k_part(key_tile, slice, slot, 0, 1);
  }
  __device__ __forceinline__ void copy_v(int key_tile, int slot) {
    start_v(key_tile, slot);
    copy_v_part(true, key_tile, slot, 0, 1);
  }
  __device__ __forceinline__ uint32_t v_buffer(int slot) const {
    return (kSameCopy ? k_target + (T::kVOffset - T::kKOffset) : v_target) + slot * T::kVSlotBytes;
  }

  // The kernels multiply by |scale|: a negative scale flips the signs of Q, a zero one clears it, both exactly. Rare,
  // so it is a pass over Q's shared memory behind a wait of its own; entered with all of Q's copies issued.
  __device__ __forceinline__ void apply_scale_sign() const {
    if (score_scale(params) > 0.0f) return;
    cp_async_wait<0>();
    __syncthreads();
    uint32_t const keep = score_scale(params) == 0.0f ? 0u : 0xffffffffu;
    for (int word = thread_index(); word < T::TileQ::kBytes / 4; word += T::kThreads) {
      uint32_t const address = smem + T::kQOffset + 4 * word;
      store_shared(address, (load_shared(address) ^ 0x80008000u) & keep);
    }
    __syncthreads();
  }

  // Brings Q to where the MMAs read it: on its way to shared memory on return, or in registers with its shared
  // memory free again. Where kFirstEarly, the first K and V tiles are on their way too, a group each.
  __device__ __forceinline__ void load_q(TileCoordinates const& tile) {
    this->copy_q(tile);
    if constexpr (T::kFirstEarly) {
      cp_async_fence();
      copy_k(tiles - 1, 0, T::kFirstSlot);
      cp_async_fence();
      copy_v(tiles - 1, T::kFirstSlot);
      cp_async_fence();
    }
    if constexpr (T::kScoreMod == ScoreMod::kSoftmax) apply_scale_sign();
    if constexpr (T::kQInRegisters) {
      cp_async_wait<T::kFirstEarly ? 2 : 0>();
      __syncthreads();
#pragma unroll
      for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
        for (int step = 0; step < kQSteps; ++step) {
          load_matrix_x4(q_registers[i][step], T::TileQ::advance(q_address, 16 * i, 16 * step));
        }
      }
      __syncthreads();
    }
  }

  // --- MMAs ----------------------------------------------------------------------------------------------------------

  // s += Q K^T over one slice of K in `slot` (s = for the first slice); `between(step)` is other work to interleave
  // after each 16 columns.
  template <typename Between>
  __device__ __forceinline__ void gemm_qk(Scores& s, int slice, int slot, Between&& between) {
    uint32_t const k_slot = k_address + slot * T::kKSlotBytes;
#pragma unroll
    for (int step = 0; step < T::kKSlice / 16; ++step) {
      uint32_t a[T::kRowTiles][4];
#pragma unroll
      for (int i = 0; i < T::kRowTiles; ++i) {
        if constexpr (T::kQInRegisters) {
#pragma unroll
          for (int r = 0; r < 4; ++r) a[i][r] = q_registers[i][slice * (T::kKSlice / 16) + step][r];
        } else {
          load_matrix_x4(a[i], T::TileQ::advance(q_address, 16 * i, slice * T::kKSlice + 16 * step));
        }
      }
#pragma unroll
      for (int j = 0; j < T::kKeyTiles; j += 2) {
        uint32_t b[4];
        load_matrix_x4(b, T::TileK::advance(k_slot, 8 * j, 16 * step));
#pragma unroll
        for (int i = 0; i < T::kRowTiles; ++i) {
          if (slice == 0 && step == 0) {
            constexpr float kZero[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            mma_m16n8k16<Element>(s[i][j], a[i], b[0], b[1], kZero);
            mma_m16n8k16<Element>(s[i][j + 1], a[i], b[2], b[3], kZero);
          } else {
            mma_m16n8k16<Element>(s[i][j], a[i], b[0], b[1]);
            mma_m16n8k16<Element>(s[i][j + 1], a[i], b[2], b[3]);
          }
        }
      }
      between(step);
    }
  }

  // P as the A operand of 16 keys: numerators of two score tiles, packed.
  __device__ __forceinline__ void compute_p(uint32_t (&p)[4], Scores& s, int i, int key_step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float (&tile_scores)[4] = s[i][2 * key_step + half];
      score_mod.numerators(*this, tile_scores, i);
      p[2 * half] = pack_pair<Element>(tile_scores[0], tile_scores[1]);
      p[2 * half + 1] = pack_pair<Element>(tile_scores[2], tile_scores[3]);
    }
  }

  // Where this lane reads V `rows` and `columns` beyond its warp's first.
  __device__ __forceinline__ uint32_t v_operand(uint32_t v_slot, int rows, int columns) const {
    if constexpr (T::kPInRegisters || T::TileV::reaches(8 * T::kColumnTiles)) {
      return T::TileV::advance(v_slot, rows, columns);
    } else {
      LaneRow const a = lane_row_a(lane_here());
      return v_slot + T::TileV::offset(rows + a.row, warp_n() * 8 * T::kColumnTiles + columns + a.column) -
             T::TileV::offset(a.row, warp_n() * 8 * T::kColumnTiles + a.column);
    }
  }

  // o += P V for 16 keys; `between(j)` is other work to interleave.
  template <typename Between>
  __device__ __forceinline__ void gemm_pv(uint32_t const (&p)[T::kRowTiles][4], int key_step, int slot,
                                          Between&& between) {
    uint32_t const v_slot = v_address + slot * T::kVSlotBytes;
    gemm_step<Element>(
        o, p, [&](int j, uint32_t (&b)[4]) { load_matrix_x4_transposed(b, v_operand(v_slot, 16 * key_step, 8 * j)); },
        between);
  }

  // --- between the MMAs ----------------------------------------------------------------------------------------------

  // Sets scores to `masked` where a row does not see a key.
  __device__ __forceinline__ void apply_causal_mask(Scores& s, int key_tile, float masked) const {
    int const key = first_key(key_tile);
    if constexpr (T::kModified) {
      bool const below = key < first_visible(query_of(tile(), T::kBlockM - 1));
      if (key + T::kBlockN <= whole_keys && !below) return;
    } else {
      if (key + T::kBlockN <= whole_keys) return;
    }
    auto const tile = this->tile();
    int const first = key + warp_n() * 8 * T::kKeyTiles + 2 * (lane_here() & 3);
#pragma unroll
    for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int const limit = visible_keys(query_of(tile, row_in_block(i, half))) - first;
        int least = 0;
        if constexpr (T::kModified) least = first_visible(query_of(tile, row_in_block(i, half))) - first;
#pragma unroll
        for (int j = 0; j < T::kKeyTiles; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            if (8 * j + e >= limit || (T::kModified && 8 * j + e < least)) s[i][j][2 * half + e] = masked;
          }
        }
      }
    }
  }

  // o += P V with P from s. The numerators of the next 16 keys are taken between the MMAs of these;
  // `between(key_step)` is other work to interleave.
  template <typename Between>
  __device__ __forceinline__ void accumulate(Scores& s, int key_tile, int v_slot, Between&& between) {
    score_mod.prepare(*this, s, key_tile, v_slot);
    if constexpr (T::kPInRegisters) {
      uint32_t p[2][T::kRowTiles][4];
#pragma unroll
      for (int i = 0; i < T::kRowTiles; ++i) compute_p(p[0][i], s, i, 0);
#pragma unroll
      for (int key_step = 0; key_step < kKeySteps; ++key_step) {
        gemm_pv(p[key_step % 2], key_step, v_slot, [&](int j) {
          if (j == 0) between(key_step);
          if (key_step + 1 < kKeySteps && j < T::kRowTiles) compute_p(p[(key_step + 1) % 2][j], s, j, key_step + 1);
        });
        if constexpr (T::kColumnTiles / 2 < T::kRowTiles) {
#pragma unroll
          for (int i = T::kColumnTiles / 2; i < T::kRowTiles; ++i) {
            if (key_step + 1 < kKeySteps) compute_p(p[(key_step + 1) % 2][i], s, i, key_step + 1);
          }
        }
      }
    } else {
      store_p(s);
      this->row_barrier();
      uint32_t const p_address = smem + T::kPOffset + T::TileP::offset(warp_m() * 16 * T::kRowTiles, 0) +
                                 T::TileP::offset(lane_row_a(lane_here()).row, lane_row_a(lane_here()).column);
#pragma unroll
      for (int key_step = 0; key_step < kKeySteps; ++key_step) {
        uint32_t p[T::kRowTiles][4];
#pragma unroll
        for (int i = 0; i < T::kRowTiles; ++i)
          load_matrix_x4(p[i], T::TileP::advance(p_address, 16 * i, 16 * key_step));
        gemm_pv(p, key_step, v_slot, [&](int j) {
          if (j == 0) between(key_step);
        });
      }
    }
  }

  // This warp's share of P into shared memory. A barrier has passed since the last P was read: that of the next K tile.
  __device__ __forceinline__ void store_p(Scores& s) {
#pragma unroll
    for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < T::kKeyTiles; ++j) {
        score_mod.numerators(*this, s[i][j], i);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32_t const address =
              smem + T::kPOffset +
              T::TileP::offset(row_in_block(i, half), warp_n() * 8 * T::kKeyTiles + 8 * j + 2 * (lane_here() & 3));
          store_shared(address, pack_pair<Element>(s[i][j][2 * half], s[i][j][2 * half + 1]));
        }
      }
    }
  }
};

}  // namespace attention_autotuner

// One result of retnet's backward with an explicit mask, for compute capability 9.0, by WGMMA.
//
// With r a constant, each result is a matrix P of scores times the mask, multiplied by a tensor:
//
//   dQ = scale (dO V^T / r * M) K      rows are queries     X = dO   Y = V    Z = K
//   dK = scale (V dO^T / r * M^T) Q    rows are keys        X = V    Y = dO   Z = Q
//   dV = (scale K Q^T / r * M^T) dO    rows are keys        X = K    Y = Q    Z = dO
//
// so a pass is the forward kernel with other tensors: result = (X Y^T * M * factors) Z. Where r has a gradient, dQ and
// dK have a second main loop over the same tiles, whose P is sign(X Y^T) |M| shift with X, Y = Q, K or K, Q; shift is
// that of common/backward_arguments.cuh, as is base = 1 / r.
//
// A CTA has 64 rows for each of its consumer warpgroups, and a producer warpgroup of which three warps load. The GEMM
// of a tile's scores is issued before that of the last tile's P with Z, so that scores are modified while the
// latter runs. Y may come in slices of its columns, where shared memory holds no more; X of few columns stays in
// registers. CTAs are persistent, and the producers run ahead into the next tile.
#pragma once

#include "attention_autotuner/common/backward_arguments.cuh"
#include "attention_autotuner/common/convert.cuh"
#include "attention_autotuner/common/shared_memory.cuh"
#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/scores_backward_sm90/epilogue.cuh"
#include "attention_autotuner/scores_backward_sm90/producer.cuh"
#include "attention_autotuner/sm90/mask_tile.cuh"
#include "attention_autotuner/sm90/pipeline.cuh"
#include "attention_autotuner/sm90/roles.cuh"
#include "attention_autotuner/sm90/swizzle.cuh"
#include "attention_autotuner/sm90/wgmma.cuh"

namespace attention_autotuner {

// A consumer warpgroup.
template <typename T>
struct PassSm90Consumer : PassSm90Stages<T> {
  using Base = PassSm90Stages<T>;
  using Element = typename T::Element;
  using Base::arguments;
  using Base::Base;
  using Base::done;
  using Base::mainloops;
  using Base::mask_ring;
  using Base::range;
  using Base::smem;
  using Base::steps;
  using Base::tile;
  using Base::x_ring;
  using Base::y_ring;
  using Base::z_ring;
  using typename Base::Ring;
  using typename Base::YRing;

  static constexpr int kLoadBarrier = 8;  // named barriers below are those of ping-pong

  float result[T::kColumns / 2], s[T::kBlockColumns / 2];
  uint32_t p[T::kBlockColumns / 4];  // P, rounded
  uint32_t x[T::kKeptDepth > 0 ? T::kKeptDepth / 4 : 1];
  float factor[2];  // of this lane's rows, where they are queries
  int slice_index;  // of Y's slices, the next to be multiplied

  // --- MMAs ----------------------------------------------------------------------------------------------------------

  // Loads the main loop's X, or its first columns, into registers, in the layout of an A operand.
  __device__ __forceinline__ void load_x() {
    if constexpr (T::kKeptDepth > 0) {
      int const matrix = lane_index() / 8, within = lane_index() % 8;
      int const row = consumer_row() / 16 * 16 + 8 * (matrix % 2) + within;
      uint32_t seen = 0;
#pragma unroll
      for (int step = 0; step < T::kKeptDepth / kMmaDepth; ++step) {
        int const chunk = 2 * step + matrix / 2;
        uint32_t words[4];
        load_matrix_x4(words, swizzled_address<T::kBlockRows>(smem, row, chunk, within));
#pragma unroll
        for (int i = 0; i < 4; ++i) x[4 * step + i] = words[i];
        seen |= words[0];
      }
      if constexpr (T::kKeepsX) {
        __syncwarp();
        if (lane_index() == 0) arrive_after(seen, x_ring().empty(0));
      } else {
        named_barrier(kLoadBarrier + consumer_index(), kWarpgroupThreads);  // as one thread lets go of X for all
      }
    }
  }
  // S = X Y^T. Slices of Y but the last are released as soon as their MMAs are complete.
  __device__ __forceinline__ void issue_scores() {
    constexpr int kBlockSteps = kSwizzleColumns / kMmaDepth;
    constexpr int kSliceBlocks = T::kSliceDepth / kSwizzleColumns;
    // Hides where the address comes from, so that descriptors are computed where they are used and not kept in
    // registers.
    uint32_t first = smem + consumer_index() * kWarpgroupRows * kSwizzleRowBytes;
    asm volatile("" : "+r"(first));
    uint64_t const rows = make_smem_desc(first, 0);
#pragma unroll
    for (int i = 0; i < T::kDepthSlices; ++i, ++slice_index) {
      int const slot = YRing::stage(slice_index);
      y_ring().consumer_wait(slice_index);
      uint64_t const y = make_smem_desc(smem + T::kYOffset + slot * T::kYBytes, 0);
      warpgroup_arrive();
#pragma unroll
      for (int step = 0; step < T::kSliceDepth / kMmaDepth; ++step) {
        int const block = step / kBlockSteps, within = step % kBlockSteps * kMmaDepth * 2;
        uint64_t const here = advance_desc(y, block * T::kBlockColumns * kSwizzleRowBytes + within);
        int const from = i * T::kSliceDepth + step * kMmaDepth;  // the first column of the depth
        if (T::kKeepsX || from < T::kKeptDepth) {
          gemm_rs<Element, Major::K>(s, x + from / 4, here, i + step > 0);
        } else {
          int const ahead = (i * kSliceBlocks + block) * T::kBlockRows * kSwizzleRowBytes + within;
          gemm_ss<Element>(s, advance_desc(rows, ahead), here, i + step > 0);
        }
      }
      warpgroup_commit_batch();
      if (i > 0) {
        warpgroup_wait<1>();
        consumer_release(y_ring().empty(YRing::stage(slice_index - 1)));
      }
    }
  }
  __device__ __forceinline__ void issue_result(int stage) {
    uint64_t const z = make_smem_desc(smem + T::kZOffset + stage * T::kZBytes, T::kBlockColumns * kSwizzleRowBytes);
    warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < T::kBlockColumns / kMmaDepth; ++step) {
      gemm_rs<Element, Major::MN>(result, p + 4 * step, advance_desc(z, step * kMmaDepth * kSwizzleRowBytes), true);
    }
    warpgroup_commit_batch();
  }

  // --- score modification --------------------------------------------------------------------------------------------

  template <bool Signs, bool Causal>
  __device__ __forceinline__ void apply_score_mod(MaskRows<T>& mask, int stage) {
    uint32_t const factors = smem + T::kFactorOffset + stage * T::kFactorBytes + 8 * (lane_index() & 3);
    constexpr bool kSignsFirst = Signs && T::kSparesRegisters;
    if constexpr (kSignsFirst) {
#pragma unroll
      for (int i = 0; i < T::kBlockColumns / 2; ++i) s[i] = with_sign(s[i], 1.0f);
      fence_accumulators(s);
    }
#pragma unroll
    for (int sixteen = 0; sixteen < T::kBlockColumns / 16; ++sixteen) {
      uint32_t words[4];
      mask.template load<Causal, T::kSparesRegisters>(words, sixteen);
#pragma unroll
      for (int eight = 0; eight < 2; ++eight) {
        int const g = 2 * sixteen + eight;
        float2 f{};
        if constexpr (!T::kByQueries) {
          f = load_shared_float2(factors + 32 * g);
          mask.note(f.x);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if constexpr (T::kByQueries) f = make_float2(factor[half], factor[half]);
          float2 const m = unpack_pair<Element>(words[2 * eight + half]);
          float& low = s[4 * g + 2 * half];
          float& high = s[4 * g + 2 * half + 1];
          low = kSignsFirst ? low * fabsf(m.x) * f.x : modified_score<Signs>(low, m.x, f.x);
          high = kSignsFirst ? high * fabsf(m.y) * f.y : modified_score<Signs>(high, m.y, f.y);
        }
      }
    }
  }
  // Modifies a tile's scores once they are complete; `last` in its main loop, they release X.
  __device__ __forceinline__ void modify_scores(int index, bool last, bool signs, Cursor const& now) {
    fence_accumulators(s);
    consumer_release(y_ring().empty(YRing::stage(slice_index - 1)));
    if (!T::kKeepsX && last) consumer_release(x_ring().empty(0));
    int const at = done + index, stage = Ring::stage(at), row = consumer_row() / 16 * 16;
    MaskRows<T> mask(arguments.common.params, smem + T::kMaskOffset + stage * T::kMaskBytes, row,
                     tile.row_block * T::kBlockRows + row, now.tile * T::kBlockColumns);
    mask_ring().consumer_wait(at);
    if (signs) {
      apply_score_mod<true, true>(mask, stage);
    } else if (mask.causal) {
      apply_score_mod<false, true>(mask, stage);
    } else {
      apply_score_mod<false, false>(mask, stage);
    }
    mask.release(mask_ring().empty(stage));
  }
  // With no MMA in flight: packs scores into the A operand of the next.
  __device__ __forceinline__ void pack_p() {
#pragma unroll
    for (int i = 0; i < T::kBlockColumns / 4; ++i) p[i] = pack_pair<Element>(s[2 * i], s[2 * i + 1]);
  }
  // P, or zeros, into the band of scores that dK multiplies, 16 bytes a lane.
  template <bool kZeros = false>
  __device__ __forceinline__ void store_p(int loop, int column) const {
    auto const& band = arguments.band;
    int const matrix = (tile.head - band.first_head) * band.batches + tile.batch - band.first_batch;
    int const row = (matrix * arguments.mainloops + loop) * band.loop_rows + tile.row_block * T::kBlockRows;
    Element* const line = static_cast<Element*>(band.scores) + int64_t(row + consumer_row()) * band.columns + column +
                          8 * (lane_index() & 3);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < T::kBlockColumns / 32; ++i) {
        uint32_t const* const words = p + 8 * i + half;
        *reinterpret_cast<uint4*>(line + 8 * half * band.columns + 32 * i) =
            kZeros ? make_uint4(0, 0, 0, 0) : make_uint4(words[0], words[2], words[4], words[6]);
      }
    }
  }
  // Zeros where the rows see no key, but others of a tile of dK do.
  __device__ __forceinline__ void store_unseen() const {
    int const seen = steps * T::kBlockColumns, key_block = arguments.band.key_block;
    int const end = minimum(divide_up(seen, key_block) * key_block, arguments.band.columns);
    for (int loop = 0; loop < arguments.mainloops; ++loop) {
      for (int column = seen; column < end; column += T::kBlockColumns) store_p<true>(loop, column);
    }
  }

  // --- the pass ------------------------------------------------------------------------------------------------------

  // The factors of a main loop, where rows are queries.
  __device__ __forceinline__ void load_factors(bool signs) {
    if constexpr (T::kByQueries) {
      auto const& common = arguments.common;
      float const* const factors = (signs ? common.shift : common.base) +
                                   common.lse_delta_offset(tile.batch, tile.head) + tile.row_block * T::kBlockRows +
                                   consumer_row();
#pragma unroll
      for (int half = 0; half < 2; ++half) factor[half] = factors[8 * half] * (signs ? arguments.scale_sign : 1.0f);
    }
  }
  __device__ __forceinline__ void mainloop() {
#pragma unroll
    for (int i = 0; i < T::kColumns / 2; ++i) result[i] = 0.0f;
    if (steps == 0) return;
    int const total = arguments.mainloops * steps;
    Cursor now = range.begin();
    slice_index = done * T::kDepthSlices;
    load_factors(false);
    x_ring().consumer_wait(mainloops);
    load_x();
    issue_scores();
    warpgroup_wait<0>();
    modify_scores(0, steps == 1, false, now);
    pack_p();
    if constexpr (T::kStoresScores) store_p(0, now.tile * T::kBlockColumns);
    for (int index = 1; index < total; ++index) {
      int const before = done + index - 1, stage = Ring::stage(before);
      bool const signs = index >= steps;
      range.next(now);
      if (index == steps) {
        now = range.begin();
        load_factors(true);
        x_ring().consumer_wait(mainloops + 1);
        load_x();
      }
      if constexpr (T::kPingPong) ping_pong_wait();
      issue_scores();
      z_ring().consumer_wait(before);
      issue_result(stage);
      if constexpr (T::kPingPong) ping_pong_pass<T::kWarpgroups>();
      bool const last = index + 1 == steps || index + 1 == total;
      warpgroup_wait<1>();
      modify_scores(index, last, signs, now);
      warpgroup_wait<0>();
      fence_accumulators(result);
      consumer_release(z_ring().empty(stage));
      pack_p();
      if constexpr (T::kStoresScores) store_p(signs, now.tile * T::kBlockColumns);
    }
    if constexpr (T::kStoresScores) store_unseen();
    int const last = done + total - 1, stage = Ring::stage(last);
    z_ring().consumer_wait(last);
    issue_result(stage);
    warpgroup_wait<0>();
    fence_accumulators(result);
    consumer_release(z_ring().empty(stage));
  }

  __device__ __forceinline__ void write() const {
    auto const& common = arguments.common;
    auto const& params = common.params;
    int const row = tile.row_block * T::kBlockRows + consumer_row(), column = tile.value_slice * T::kColumns;
    auto const write = [&](attention_autotuner_tensor const& out, float* partial, int columns, float scale, int head,
                           int split, int rows) {
      write_result<Element, T::kGathered>(result, common, out, partial, T::kResultDim, columns, scale, tile.batch, head,
                                          split, rows, row, column);
    };
    if constexpr (T::kByQueries) {
      write(params.dq, nullptr, params.dim_qk, params.scale, tile.head, 0, params.seqlen_q);
    } else if constexpr (T::kResult == Result::kDk) {
      write(params.dk, common.dk_partial, params.dim_qk, params.scale, this->kv_head, this->split, params.seqlen_k);
    } else {
      write(params.dv, common.dv_partial, params.dim_v, 1.0f, this->kv_head, this->split, params.seqlen_k);
    }
  }
};

}  // namespace attention_autotuner

// One result of retnet's backward with an explicit mask, for compute capability 9.0, by warpgroup products.
//
// With r a constant, each result is the product of weights with a tensor, and the weights are scores times the mask:
//
//   dQ = scale (dO V^T / r * M) K      rows are queries     X = dO   Y = V    Z = K
//   dK = scale (V dO^T / r * M^T) Q    rows are keys        X = V    Y = dO   Z = Q
//   dV = (scale K Q^T / r * M^T) dO    rows are keys        X = K    Y = Q    Z = dO
//
// so a pass is the forward kernel with other tensors: result = (X Y^T * M * factors) Z. Where r has a gradient, dQ and
// dK have a second walk over the same tiles, whose weights are sign(X Y^T) |M| shift with X, Y = Q, K or K, Q; shift is
// that of attention_backward_common.cuh, as is base = 1 / r.
//
// A CTA has 64 rows for each of its multiplying warpgroups, and some threads of another that keep the stages full. The
// scores of a tile are issued before the product of the last tile's weights with Z, so that they are weighed while
// that product runs. Y may come in parts of its columns, where shared memory has no room for more.
//
// Called by: retnet_backward_entry_sm90.cuh.
#pragma once

#include "attention_backward_common.cuh"
#include "retnet_backward_sm80.cuh"
#include "retnet_backward_traits_sm90.cuh"
#include "retnet_masks_sm90.cuh"
#include "retnet_results_sm90.cuh"
#include "tensor_maps_sm90.cuh"

namespace attention_autotuner {

struct WgmmaPassArguments {
  MappedTensor x[2], y[2], z, mask;  // x and y of each walk
  BackwardArguments<attention_autotuner_retnet_backward_params> common;
  int walks;
  float turn;  // the sign of scale
};

// What both roles know: the tile, the steps over the other side, the barriers; and the threads that load.
template <typename T>
struct WgmmaPassStages {
  WgmmaPassArguments const& arguments;
  uint32_t const smem;
  TileCoordinates const tile;
  Walk walk;  // over tiles of the other side
  int steps;  // of one walk
  int kv_head, split;

  __device__ __forceinline__ WgmmaPassStages(WgmmaPassArguments const& arguments, uint32_t smem,
                                             TileCoordinates const& tile, TileList const& list)
      : arguments(arguments), smem(smem), tile(tile) {
    auto const& common = arguments.common;
    int const first_row = tile.row_block * T::kBlockRows;
    if constexpr (T::kByQueries) {
      int const last = minimum(first_row + T::kBlockRows, common.params.seqlen_q) - 1;
      kv_head = list.group.divide(tile.head);
      split = 0;
      walk = {0, divide_up(maximum(common.visible_keys(last), 0), T::kBlockColumns), tile.head, 1};
    } else {
      Share<true> const share(common, tile.head);
      kv_head = share.kv_head;
      split = share.split;
      walk = Walk::over_queries(common, first_row, T::kBlockColumns, share.head, share.heads);
    }
    steps = walk.tiles();
  }

  // --- barriers: full and free of each, turn about -------------------------------------------------------------------

  __device__ __forceinline__ uint32_t barrier(int index) const { return smem + T::kBarrierOffset + 8 * index; }
  __device__ __forceinline__ uint32_t x_full() const { return barrier(0); }
  __device__ __forceinline__ uint32_t x_free() const { return barrier(1); }
  __device__ __forceinline__ uint32_t y_full(int slot) const { return barrier(2 + 2 * slot); }
  __device__ __forceinline__ uint32_t y_free(int slot) const { return barrier(3 + 2 * slot); }
  __device__ __forceinline__ uint32_t z_full(int stage) const { return barrier(2 + 2 * T::kPartSlots + 4 * stage); }
  __device__ __forceinline__ uint32_t z_free(int stage) const { return barrier(3 + 2 * T::kPartSlots + 4 * stage); }
  __device__ __forceinline__ uint32_t mask_full(int stage) const { return barrier(4 + 2 * T::kPartSlots + 4 * stage); }
  __device__ __forceinline__ uint32_t mask_free(int stage) const { return barrier(5 + 2 * T::kPartSlots + 4 * stage); }

  __device__ __forceinline__ void initialise_barriers() const {
    initialise_barrier(x_full(), 1);
    initialise_barrier(x_free(), T::kWarpgroups);
    for (int slot = 0; slot < T::kPartSlots; ++slot) {
      initialise_barrier(y_full(slot), 1);
      initialise_barrier(y_free(slot), T::kWarpgroups);
    }
    for (int stage = 0; stage < T::kStages; ++stage) {
      initialise_barrier(z_full(stage), 1);
      initialise_barrier(z_free(stage), T::kWarpgroups);
      initialise_barrier(mask_full(stage), 1);
      initialise_barrier(mask_free(stage), 4 * T::kWarpgroups);
    }
    publish_barriers();
  }

  // --- the threads that load, in three warps: none may wait for the room that another's tiles lack -------------------

  // By one thread: X and Y.
  __device__ __forceinline__ void load_scores() const {
    int const row = tile.row_block * T::kBlockRows;
    int part = 0;
    for (int pass = 0; pass < arguments.walks && steps > 0; ++pass) {
      if (pass > 0) wait(x_free(), 0);
      fetch_tile<T::kBlockRows, T::kDepth>(smem, arguments.x[pass], x_full(), row, 0,
                                           T::kByQueries ? tile.head : kv_head, tile.batch);
      Cursor now = walk.begin();
      for (int step = 0; step < steps; ++step, walk.next(now)) {
#pragma unroll 1
        for (int i = 0; i < T::kParts; ++i, ++part) {
          int const slot = part % T::kPartSlots;
          wait(y_free(slot), (part / T::kPartSlots & 1) ^ 1);
          fetch_tile<T::kBlockColumns, T::kPartDepth>(smem + T::kYOffset + slot * T::kYBytes, arguments.y[pass],
                                                      y_full(slot), now.tile * T::kBlockColumns, i * T::kPartDepth,
                                                      head_of(now), tile.batch);
        }
      }
    }
  }
  // By a whole warp, for the factors of columns.
  __device__ __forceinline__ void load_masks() const {
    auto const& common = arguments.common;
    int const row = tile.row_block * T::kBlockRows, total = arguments.walks * steps;
    bool const leads = lane_index() == 0;
    Cursor now = walk.begin();
    for (int index = 0; index < total; ++index, walk.next(now)) {
      if (index == steps) now = walk.begin();
      int const stage = index % T::kStages, other = now.tile * T::kBlockColumns;
      uint32_t const mask = smem + T::kMaskOffset + stage * T::kMaskBytes;
      wait(mask_free(stage), (index / T::kStages & 1) ^ 1);
      if (leads) {
        announce_bytes(mask_full(stage), T::kMaskBytes);
        if constexpr (T::kByQueries) {
          copy_tile<T::kBlockRows, T::kBlockColumns>(mask, arguments.mask, mask_full(stage), row, other, tile.head, 0);
        } else {
          copy_tile<T::kBlockColumns, T::kBlockRows>(mask, arguments.mask, mask_full(stage), other, row, now.head, 0);
        }
      }
      if constexpr (!T::kByQueries) {
        float const* const factors =
            (index < steps ? common.base : common.shift) + common.statistics_offset(tile.batch, now.head) + other;
        for (int i = 2 * lane_index(); i < T::kBlockColumns; i += 64) {
          store_shared_float2(smem + T::kFactorOffset + stage * T::kFactorBytes + 4 * i,
                              *reinterpret_cast<float2 const*>(factors + i));
        }
        __syncwarp();
      }
      if (leads) arrive(mask_full(stage));
    }
  }
  // By one thread: Z.
  __device__ __forceinline__ void load_others() const {
    int const total = arguments.walks * steps;
    Cursor now = walk.begin();
    for (int index = 0; index < total; ++index, walk.next(now)) {
      int const stage = index % T::kStages;
      if (index == steps) now = walk.begin();
      wait(z_free(stage), (index / T::kStages & 1) ^ 1);
      fetch_tile<T::kBlockColumns, T::kColumns>(smem + T::kZOffset + stage * T::kZBytes, arguments.z, z_full(stage),
                                                now.tile * T::kBlockColumns, tile.value_slice * T::kColumns,
                                                head_of(now), tile.batch);
    }
  }
  // Of the tensors whose tiles are walked.
  __device__ __forceinline__ int head_of(Cursor const& now) const { return T::kByQueries ? kv_head : now.head; }
};

// A warpgroup that multiplies.
template <typename T>
struct WgmmaPassWarpgroup : WgmmaPassStages<T> {
  using Base = WgmmaPassStages<T>;
  using Element = typename T::Element;
  using Base::arguments;
  using Base::Base;
  using Base::mask_free;
  using Base::mask_full;
  using Base::smem;
  using Base::steps;
  using Base::tile;
  using Base::walk;
  using Base::x_free;
  using Base::x_full;
  using Base::y_free;
  using Base::y_full;
  using Base::z_free;
  using Base::z_full;

  float result[T::kColumns / 2], s[T::kBlockColumns / 2];
  uint32_t weights[T::kBlockColumns / 4];
  float factor[2];  // of this lane's rows, where they are queries
  int part;         // of Y, the next to be multiplied

  // --- products ------------------------------------------------------------------------------------------------------

  // S = X Y^T. Parts of Y but the last are released as they are done with.
  __device__ __forceinline__ void issue_scores() {
    constexpr int kBlockSteps = kSwizzleColumns / kProductDepth;
    constexpr int kPartBlocks = T::kPartDepth / kSwizzleColumns;
    // Told anew each time, lest the compiler keep every place in X in registers.
    uint32_t rows = smem + group_index() * kWarpgroupRows * kSwizzleRowBytes;
    asm volatile("" : "+r"(rows));
    uint64_t const x = describe_tile(rows, 0);
#pragma unroll
    for (int i = 0; i < T::kParts; ++i, ++part) {
      int const slot = part % T::kPartSlots;
      wait(y_full(slot), part / T::kPartSlots & 1);
      uint64_t const y = describe_tile(smem + T::kYOffset + slot * T::kYBytes, 0);
      begin_products();
#pragma unroll
      for (int step = 0; step < T::kPartDepth / kProductDepth; ++step) {
        int const block = step / kBlockSteps, within = step % kBlockSteps * kProductDepth * 2;
        multiply_tiles<Element>(s, advance(x, (i * kPartBlocks + block) * T::kBlockRows * kSwizzleRowBytes + within),
                                advance(y, block * T::kBlockColumns * kSwizzleRowBytes + within), i + step > 0);
      }
      commit_products();
      if (i > 0) {
        wait_products<1>();
        release(y_free((part - 1) % T::kPartSlots));
      }
    }
  }
  __device__ __forceinline__ void issue_result(int stage) {
    uint64_t const z = describe_tile(smem + T::kZOffset + stage * T::kZBytes, T::kBlockColumns * kSwizzleRowBytes);
    begin_products();
#pragma unroll
    for (int step = 0; step < T::kBlockColumns / kProductDepth; ++step) {
      multiply_registers<Element>(result, weights + 4 * step, advance(z, step * kProductDepth * kSwizzleRowBytes));
    }
    commit_products();
  }

  // --- weights -------------------------------------------------------------------------------------------------------

  template <bool Signs, bool Hides>
  __device__ __forceinline__ void weigh(MaskRows<T>& mask, int stage) {
    uint32_t const factors = smem + T::kFactorOffset + stage * T::kFactorBytes + 8 * (lane_index() & 3);
    float const last = Signs ? arguments.turn : T::kResult == Result::kDv ? arguments.common.params.scale : 1.0f;
#pragma unroll
    for (int sixteen = 0; sixteen < T::kBlockColumns / 16; ++sixteen) {
      uint32_t words[4];
      mask.template load<Hides>(words, sixteen);
#pragma unroll
      for (int eight = 0; eight < 2; ++eight) {
        int const g = 2 * sixteen + eight;
        float2 f{};
        if constexpr (!T::kByQueries) {
          f = load_shared_float2(factors + 32 * g);
          mask.note(f.x);
          f = make_float2(f.x * last, f.y * last);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if constexpr (T::kByQueries) f = make_float2(factor[half], factor[half]);
          float2 const m = unpack_pair<Element>(words[2 * eight + half]);
          float& low = s[4 * g + 2 * half];
          float& high = s[4 * g + 2 * half + 1];
          low = weight_of<Signs>(low, m.x, f.x);
          high = weight_of<Signs>(high, m.y, f.y);
        }
      }
    }
  }
  // With a tile's scores complete: weighs them.
  __device__ __forceinline__ void take_scores(int index, bool signs, Cursor const& now) {
    products_written(s);
    release(y_free((part - 1) % T::kPartSlots));
    if (arguments.walks > 1 && index + 1 == steps) release(x_free());
    int const stage = index % T::kStages, row = group_row() / 16 * 16;
    MaskRows<T> mask(arguments.common.params, smem + T::kMaskOffset + stage * T::kMaskBytes, row,
                     tile.row_block * T::kBlockRows + row, now.tile * T::kBlockColumns);
    wait(mask_full(stage), index / T::kStages & 1);
    if (signs) {
      weigh<true, true>(mask, stage);
    } else if (mask.hides) {
      weigh<false, true>(mask, stage);
    } else {
      weigh<false, false>(mask, stage);
    }
    mask.release(mask_free(stage));
  }
  // With no product under way: makes them the operand of the next.
  __device__ __forceinline__ void pack_weights() {
#pragma unroll
    for (int i = 0; i < T::kBlockColumns / 4; ++i) weights[i] = pack_pair<Element>(s[2 * i], s[2 * i + 1]);
  }

  // --- the pass ------------------------------------------------------------------------------------------------------

  // The factors of a walk, where rows are queries.
  __device__ __forceinline__ void take_factors(bool signs) {
    if constexpr (T::kByQueries) {
      auto const& common = arguments.common;
      float const* const factors = (signs ? common.shift : common.base) +
                                   common.statistics_offset(tile.batch, tile.head) + tile.row_block * T::kBlockRows +
                                   group_row();
#pragma unroll
      for (int half = 0; half < 2; ++half) factor[half] = factors[8 * half] * (signs ? arguments.turn : 1.0f);
    }
  }
  __device__ __forceinline__ void multiply() {
#pragma unroll
    for (int i = 0; i < T::kColumns / 2; ++i) result[i] = 0.0f;
    if (steps == 0) return;
    int const total = arguments.walks * steps;
    Cursor now = walk.begin();
    part = 0;
    if (T::kTurns && total > 1) begin_turns<T::kWarpgroups>();
    take_factors(false);
    wait(x_full(), 0);
    issue_scores();
    wait_products<0>();
    take_scores(0, false, now);
    pack_weights();
    for (int index = 1; index < total; ++index) {
      int const before = (index - 1) % T::kStages;
      bool const signs = index >= steps;
      walk.next(now);
      if (index == steps) {
        now = walk.begin();
        take_factors(true);
        wait(x_full(), 1);
      }
      if constexpr (T::kTurns) take_turn();
      issue_scores();
      wait(z_full(before), (index - 1) / T::kStages & 1);
      issue_result(before);
      if constexpr (T::kTurns) end_turn<T::kWarpgroups>(index + 1 == total);
      wait_products<1>();
      take_scores(index, signs, now);
      wait_products<0>();
      products_written(result);
      release(z_free(before));
      pack_weights();
    }
    int const last = (total - 1) % T::kStages;
    wait(z_full(last), (total - 1) / T::kStages & 1);
    issue_result(last);
    wait_products<0>();
    products_written(result);
  }

  __device__ __forceinline__ void write() const {
    auto const& common = arguments.common;
    auto const& params = common.params;
    int const row = tile.row_block * T::kBlockRows + group_row(), column = tile.value_slice * T::kColumns;
    if constexpr (T::kByQueries) {
      write_result<Element>(result, common, params.dq, nullptr, T::kResultClass, params.dim_qk, params.scale,
                            tile.batch, tile.head, 0, params.seqlen_q, row, column);
    } else if constexpr (T::kResult == Result::kDk) {
      write_result<Element>(result, common, params.dk, common.dk_parts, T::kResultClass, params.dim_qk, params.scale,
                            tile.batch, this->kv_head, this->split, params.seqlen_k, row, column);
    } else {
      write_result<Element>(result, common, params.dv, common.dv_parts, T::kResultClass, params.dim_v, 1.0f, tile.batch,
                            this->kv_head, this->split, params.seqlen_k, row, column);
    }
  }
};

template <typename T>
__global__ void __launch_bounds__(T::kThreads, 1)
    retnet_backward_wgmma(WgmmaPassArguments const __grid_constant__ arguments, TileList const list) {
  extern __shared__ char smem_bytes[];
  uint32_t const smem = aligned_shared(smem_bytes);
  TileCoordinates const tile = tile_coordinates<T::kHeadsFirst, T::kSlices, true>(int(blockIdx.x), list);
  WgmmaPassStages<T> stages(arguments, smem, tile, list);
  if (threadIdx.x == 0) stages.initialise_barriers();
  __syncthreads();
  if (threadIdx.x < kWarpgroupThreads) {
    give_registers<T::kProducerRegisters>();
    if (threadIdx.x == 0) stages.load_scores();
    if (threadIdx.x / 32 == 1) stages.load_masks();
    if (threadIdx.x == 64) stages.load_others();
  } else {
    take_registers<T::kConsumerRegisters>();
    WgmmaPassWarpgroup<T> warpgroup(arguments, smem, tile, list);
    warpgroup.multiply();
    warpgroup.write();
  }
}

}  // namespace attention_autotuner

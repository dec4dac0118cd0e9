// Retnet forward with an explicit mask, for compute capability 9.0: X = scale S * M, O = (X / r) V by warpgroup
// products, with tiles of Q, K, V and the mask brought by tensor maps.
//
// A CTA has 64 rows of queries for each of its multiplying warpgroups, and some threads of another that keep the
// stages full. The scores of a tile are issued before the product of the last tile's P with V, so that they are weighed
// while that product runs. P grows unnormalised; r meets O once, at the end.
//
// In fp16, P may leave the range of its type. A row's factor, scale at first, then goes down by a power of two, and its
// O with it: rare, decided by each lane's sum of |P| in a tile. bf16 has the range of fp32, and its factor is 1.
#pragma once

#include "attention_autotuner/abi.h"
#include "attention_autotuner/common/convert.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/scheduler.cuh"
#include "attention_autotuner/scores_forward_sm90/traits.cuh"
#include "attention_autotuner/sm90/mask_tile.cuh"
#include "attention_autotuner/sm90/pipeline.cuh"
#include "attention_autotuner/sm90/roles.cuh"
#include "attention_autotuner/sm90/swizzle.cuh"
#include "attention_autotuner/sm90/tma.cuh"
#include "attention_autotuner/sm90/wgmma.cuh"

namespace attention_autotuner {

struct ForwardSm90Arguments {
  MappedTensor q, k, v, mask;
  attention_autotuner_retnet_forward_params params;
  TileList list;
};

// What both roles know: the tile, the list of keys, the barriers; and the threads that load.
template <typename Config>
struct ForwardSm90Stages {
  using T = ForwardSm90Traits<Config>;

  ForwardSm90Arguments const& arguments;
  uint32_t const smem;
  TileCoordinates const tile;
  int tiles;  // of keys

  __device__ __forceinline__ ForwardSm90Stages(ForwardSm90Arguments const& arguments, uint32_t smem,
                                               TileCoordinates const& tile)
      : arguments(arguments), smem(smem), tile(tile) {
    auto const& params = arguments.params;
    int seen = params.seqlen_k;
    if (params.causal) seen = minimum(seen, (tile.row_block + 1) * T::kBlockM + params.causal_offset);
    tiles = divide_up(maximum(seen, 0), T::kBlockN);
  }

  // --- barriers ------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ uint32_t barrier(int index) const { return smem + T::kBarrierOffset + 8 * index; }
  __device__ __forceinline__ uint32_t q_full() const { return barrier(0); }
  __device__ __forceinline__ uint32_t k_full(int stage) const { return barrier(1 + 6 * stage); }
  __device__ __forceinline__ uint32_t k_free(int stage) const { return barrier(2 + 6 * stage); }
  __device__ __forceinline__ uint32_t v_full(int stage) const { return barrier(3 + 6 * stage); }
  __device__ __forceinline__ uint32_t v_free(int stage) const { return barrier(4 + 6 * stage); }
  __device__ __forceinline__ uint32_t mask_full(int stage) const { return barrier(5 + 6 * stage); }
  __device__ __forceinline__ uint32_t mask_free(int stage) const { return barrier(6 + 6 * stage); }

  __device__ __forceinline__ void initialise_barriers() const {
    initialise_barrier(q_full(), 1);
    for (int stage = 0; stage < T::kStages; ++stage) {
      initialise_barrier(k_full(stage), 1);
      initialise_barrier(k_free(stage), T::kWarpgroups);
      initialise_barrier(v_full(stage), 1);
      initialise_barrier(v_free(stage), T::kWarpgroups);
      initialise_barrier(mask_full(stage), 1);
      initialise_barrier(mask_free(stage), 4 * T::kWarpgroups * kWarpArrivals);  // of warps
    }
    publish_barriers();
  }
  __device__ __forceinline__ static int stage_of(int index) { return index % T::kStages; }
  __device__ __forceinline__ static int parity_of(int index) { return index / T::kStages & 1; }

  // --- the threads that load -----------------------------------------------------------------------------------------

  // Three threads load, as none may wait for the room that another's tiles lack.
  __device__ __forceinline__ void load_keys() const {
    if (tiles == 0) return;
    fetch_tile<T::kBlockM, T::kDepth>(smem, arguments.q, q_full(), tile.row_block * T::kBlockM, 0, tile.head,
                                      tile.batch);
    for (int index = 0; index < tiles; ++index) {
      int const stage = stage_of(index);
      wait(k_free(stage), parity_of(index) ^ 1);
      fetch_tile<T::kBlockN, T::kDepth>(smem + T::kKOffset + stage * T::kKBytes, arguments.k, k_full(stage),
                                        index * T::kBlockN, 0, kv_head(), tile.batch);
    }
  }
  __device__ __forceinline__ void load_masks() const {
    for (int index = 0; index < tiles; ++index) {
      int const stage = stage_of(index);
      wait(mask_free(stage), parity_of(index) ^ 1);
      fetch_tile<T::kBlockM, T::kBlockN>(smem + T::kMaskOffset + stage * T::kMaskBytes, arguments.mask,
                                         mask_full(stage), tile.row_block * T::kBlockM, index * T::kBlockN, tile.head,
                                         0);
    }
  }
  __device__ __forceinline__ void load_values() const {
    for (int index = 0; index < tiles; ++index) {
      int const stage = stage_of(index);
      wait(v_free(stage), parity_of(index) ^ 1);
      fetch_tile<T::kBlockN, T::kColumns>(smem + T::kVOffset + stage * T::kVBytes, arguments.v, v_full(stage),
                                          index * T::kBlockN, tile.value_slice * T::kColumns, kv_head(), tile.batch);
    }
  }
  __device__ __forceinline__ int kv_head() const { return arguments.list.group.divide(tile.head); }
};

// A warpgroup that multiplies.
template <typename Config>
struct ForwardSm90Consumer : ForwardSm90Stages<Config> {
  using Base = ForwardSm90Stages<Config>;
  using T = typename Base::T;
  using Element = typename T::Element;
  using Base::arguments;
  using Base::Base;
  using Base::k_free;
  using Base::k_full;
  using Base::mask_free;
  using Base::mask_full;
  using Base::parity_of;
  using Base::q_full;
  using Base::smem;
  using Base::stage_of;
  using Base::tile;
  using Base::tiles;
  using Base::v_free;
  using Base::v_full;
  static constexpr bool kGuarded = std::is_same_v<Element, __half>;  // P could overflow
  static constexpr float kLimit = 16384.0f;                          // of a lane's sum of |P| in a tile
  static constexpr int kExponent = 9;  // a lowered row's largest such sum is within 2^9 and 2^10

  float o[T::kColumns / 2], s[T::kBlockN / 2];
  uint32_t p[T::kBlockN / 4];
  float sum[2], factor[2];  // of this lane's two rows: of |Y| = |S M| over its columns; of P over Y

  __device__ __forceinline__ void issue_scores(int stage) {
    constexpr int kBlockSteps = kSwizzleColumns / kProductDepth;
    uint64_t const q = describe_tile(smem + group_index() * kWarpgroupRows * kSwizzleRowBytes, 0);
    uint64_t const k = describe_tile(smem + T::kKOffset + stage * T::kKBytes, 0);
    begin_products();
#pragma unroll
    for (int step = 0; step < T::kDepth / kProductDepth; ++step) {
      int const block = step / kBlockSteps, within = step % kBlockSteps * kProductDepth * 2;
      multiply_tiles<Element>(s, advance(q, block * T::kBlockM * kSwizzleRowBytes + within),
                              advance(k, block * T::kBlockN * kSwizzleRowBytes + within), step > 0);
    }
    commit_products();
  }
  __device__ __forceinline__ void issue_output(int stage) {
    uint64_t const v = describe_tile(smem + T::kVOffset + stage * T::kVBytes, T::kBlockN * kSwizzleRowBytes);
    begin_products();
#pragma unroll
    for (int step = 0; step < T::kBlockN / kProductDepth; ++step) {
      multiply_registers<Element>(o, p + 4 * step, advance(v, step * kProductDepth * kSwizzleRowBytes));
    }
    commit_products();
  }

  // Scores times their mask, and the sums of what that gives; `found` receives this tile's alone.
  template <bool Hides>
  __device__ __forceinline__ void weigh(MaskRows<T>& mask, float (&found)[2]) {
    found[0] = found[1] = 0.0f;
#pragma unroll
    for (int sixteen = 0; sixteen < T::kBlockN / 16; ++sixteen) {
      uint32_t words[4];
      mask.template load<Hides>(words, sixteen);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int const g = 2 * sixteen + i / 2, half = i % 2;
        float2 const m = unpack_pair<Element>(words[i]);
        float& low = s[4 * g + 2 * half];
        float& high = s[4 * g + 2 * half + 1];
        low *= m.x;
        high *= m.y;
        found[half] += fabsf(low) + fabsf(high);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) sum[half] += found[half];
  }

  // Lowers the factors of rows whose P might leave the range of fp16. No product may be under way.
  __device__ __forceinline__ void lower(float (&found)[2]) {
    bool due = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      found[half] *= fabsf(factor[half]);
      due = due || found[half] > kLimit;
    }
    if (!__any_sync(0xffffffffu, due)) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float most = fmaxf(found[half], __shfl_xor_sync(0xffffffffu, found[half], 1));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
      int const bits = ((254 + kExponent) << 23) - (__float_as_int(most) & 0x7f800000);
      float const less = most > kLimit ? __int_as_float(bits) : 1.0f;
      factor[half] *= less;
#pragma unroll
      for (int g = 0; g < T::kColumns / 8; ++g) {
        o[4 * g + 2 * half] *= less;
        o[4 * g + 2 * half + 1] *= less;
      }
    }
  }
  __device__ __forceinline__ void pack_weights() {
#pragma unroll
    for (int i = 0; i < T::kBlockN / 4; ++i) {
      float const f = kGuarded ? factor[i % 2] : 1.0f;
      p[i] = pack_pair<Element>(s[2 * i] * f, s[2 * i + 1] * f);
    }
  }

  __device__ __forceinline__ void multiply() {
    float const scale = arguments.params.scale;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] = 0.0f;
      factor[half] = kGuarded ? scale : 1.0f;
    }
#pragma unroll
    for (int i = 0; i < T::kColumns / 2; ++i) o[i] = 0.0f;
    if (tiles == 0) return;
    float found[2];
    wait(q_full(), 0);
    wait(k_full(0), 0);
    issue_scores(0);
    wait_products<0>();
    take_scores(0, found);
    take_weights(found);
    for (int index = 1; index < tiles; ++index) {
      int const stage = stage_of(index), before = stage_of(index - 1);
      wait(k_full(stage), parity_of(index));
      issue_scores(stage);
      wait(v_full(before), parity_of(index - 1));
      issue_output(before);
      wait_products<1>();
      take_scores(index, found);
      wait_products<0>();
      products_written(o);
      take_weights(found);
      release(v_free(before));
    }
    int const last = tiles - 1;
    wait(v_full(stage_of(last)), parity_of(last));
    issue_output(stage_of(last));
    wait_products<0>();
    products_written(o);
  }
  // With a tile's scores complete: weighs them.
  __device__ __forceinline__ void take_scores(int index, float (&found)[2]) {
    products_written(s);
    release(k_free(stage_of(index)));
    int const stage = stage_of(index), row = group_row() / 16 * 16;
    MaskRows<T> mask(arguments.params, smem + T::kMaskOffset + stage * T::kMaskBytes, row,
                     tile.row_block * T::kBlockM + row, index * T::kBlockN);
    wait(mask_full(stage), parity_of(index));
    if (mask.hides) {
      weigh<true>(mask, found);
    } else {
      weigh<false>(mask, found);
    }
    mask.release(mask_free(stage));
  }
  // With no product under way: makes them the operand of the next.
  __device__ __forceinline__ void take_weights(float (&found)[2]) {
    if constexpr (kGuarded) lower(found);
    pack_weights();
  }

  __device__ __forceinline__ void write() {
    auto const& params = arguments.params;
    float const scale = params.scale;
    Element* const out =
        static_cast<Element*>(params.o.data) + tile.batch * params.o.stride_batch + tile.head * params.o.stride_head;
    int const column0 = tile.value_slice * T::kColumns + 2 * (lane_index() & 3);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = sum[half] + __shfl_xor_sync(0xffffffffu, sum[half], 1);
      total += __shfl_xor_sync(0xffffffffu, total, 2);
      bool const divides = params.normalize && scale != 0.0f;
      float const r = divides ? fminf(fmaxf(total * fabsf(scale), 1.0f), params.r_clamp_max) : 1.0f;
      float const whole = kGuarded ? factor[half] / scale : 1.0f;  // a power of two: P over X, in bf16 over Y
      float const last = scale == 0.0f ? 0.0f : (kGuarded ? 1.0f : scale) / (whole * r);
      int const i = tile.row_block * T::kBlockM + group_row() + 8 * half;
      if (i >= params.seqlen_q) continue;
      if (params.r != nullptr && tile.value_slice == 0 && (lane_index() & 3) == 0) {
        params.r[(int64_t(tile.batch) * params.heads_q + tile.head) * params.seqlen_q + i] = r;
      }
      Element* const line = out + i * params.o.stride_row;
#pragma unroll
      for (int g = 0; g < T::kColumns / 8; ++g) {
        int const column = column0 + 8 * g;
        if (column < params.dim_v) {
          *reinterpret_cast<uint32_t*>(line + column) =
              pack_pair<Element>(o[4 * g + 2 * half] * last, o[4 * g + 2 * half + 1] * last);
        }
      }
    }
  }
};

template <typename Config>
__global__ void __launch_bounds__(ForwardSm90Traits<Config>::kThreads, 1)
    retnet_forward_wgmma(ForwardSm90Arguments const __grid_constant__ arguments) {
  using T = ForwardSm90Traits<Config>;
  extern __shared__ char smem_bytes[];
  uint32_t const smem = aligned_shared(smem_bytes);
  TileCoordinates const tile =
      tile_coordinates<Config::kCtaOrder == CtaOrder::kHeadsFirst, T::kVSlices, true>(int(blockIdx.x), arguments.list);
  ForwardSm90Stages<Config> stages(arguments, smem, tile);
  if (threadIdx.x == 0) {
    prefetch_map(arguments.q.map);
    prefetch_map(arguments.k.map);
    prefetch_map(arguments.v.map);
    prefetch_map(arguments.mask.map);
    stages.initialise_barriers();
  }
  __syncthreads();
  if (threadIdx.x < kWarpgroupThreads) {
    give_registers<T::kProducerRegisters>();
    if (threadIdx.x == 0) stages.load_keys();
    if (threadIdx.x == 32) stages.load_masks();
    if (threadIdx.x == 64) stages.load_values();
  } else {
    take_registers<T::kConsumerRegisters>();
    ForwardSm90Consumer<Config> warpgroup(arguments, smem, tile);
    warpgroup.multiply();
    warpgroup.write();
  }
}

}  // namespace attention_autotuner

// Retnet forward with an explicit mask, for compute capability 9.0: X = scale S * M, O = (X / r) V by WGMMA, with tiles
// of Q, K, V and the mask loaded by TMA.
//
// A CTA has 64 rows of queries for each of its consumer warpgroups, and three producer threads. The GEMM of a tile's
// scores is issued before that of the last tile's P with V, so that scores are modified while the latter runs. P grows
// unnormalised; r meets O once, at the end.
//
// In fp16, P may leave the range of its type. A row's factor, scale at first, then goes down by a power of two, and its
// O with it: rare, decided by each lane's sum of |P| in a tile. bf16 has the range of fp32, and its factor is 1.
#pragma once

#include "attention_autotuner/abi.h"
#include "attention_autotuner/common/convert.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/scheduler.cuh"
#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/scores_forward_sm90/traits.cuh"
#include "attention_autotuner/sm90/mask_tile.cuh"
#include "attention_autotuner/sm90/pipeline.cuh"
#include "attention_autotuner/sm90/roles.cuh"
#include "attention_autotuner/sm90/swizzle.cuh"
#include "attention_autotuner/sm90/tma.cuh"
#include "attention_autotuner/sm90/wgmma.cuh"

namespace attention_autotuner {

struct ForwardSm90Arguments {
  TmaTensor q, k, v, mask;
  attention_autotuner_retnet_forward_params params;
  TileList list;
};

// What both roles know: the tile, the list of keys, the barriers; and the producers.
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

  // Q has one; then those of K, V and the mask, stage after stage.
  using Ring = BarrierRing<T::kStages, 3>;
  __device__ __forceinline__ uint32_t barrier(int index) const { return smem + T::kBarrierOffset + 8 * index; }
  __device__ __forceinline__ uint32_t q_full() const { return barrier(0); }
  __device__ __forceinline__ Ring k_ring() const { return {barrier(1)}; }
  __device__ __forceinline__ Ring v_ring() const { return {barrier(3)}; }
  __device__ __forceinline__ Ring mask_ring() const { return {barrier(5)}; }

  __device__ __forceinline__ void init_barriers() const {
    barrier_init(q_full(), 1);
    for (int stage = 0; stage < T::kStages; ++stage) {
      k_ring().init(stage, 1, T::kWarpgroups);
      v_ring().init(stage, 1, T::kWarpgroups);
      mask_ring().init(stage, 1, 4 * T::kWarpgroups * kWarpArrivals);  // of warps
    }
    fence_barrier_init();
  }

  // --- producers -----------------------------------------------------------------------------------------------------

  // One producer thread for each operand, so that a full ring of one does not stall another.
  __device__ __forceinline__ void load_keys() const {
    if (tiles == 0) return;
    fill_stage<T::kBlockM, T::kDepth>(smem, arguments.q, q_full(), tile.row_block * T::kBlockM, 0, tile.head,
                                      tile.batch);
    for (int index = 0; index < tiles; ++index) {
      int const stage = Ring::stage(index);
      k_ring().producer_acquire(index);
      fill_stage<T::kBlockN, T::kDepth>(smem + T::kKOffset + stage * T::kKBytes, arguments.k, k_ring().full(stage),
                                        index * T::kBlockN, 0, kv_head(), tile.batch);
    }
  }
  __device__ __forceinline__ void load_mask() const {
    for (int index = 0; index < tiles; ++index) {
      int const stage = Ring::stage(index);
      mask_ring().producer_acquire(index);
      fill_stage<T::kBlockM, T::kBlockN>(smem + T::kMaskOffset + stage * T::kMaskBytes, arguments.mask,
                                         mask_ring().full(stage), tile.row_block * T::kBlockM, index * T::kBlockN,
                                         tile.head, 0);
    }
  }
  __device__ __forceinline__ void load_values() const {
    for (int index = 0; index < tiles; ++index) {
      int const stage = Ring::stage(index);
      v_ring().producer_acquire(index);
      fill_stage<T::kBlockN, T::kColumns>(smem + T::kVOffset + stage * T::kVBytes, arguments.v, v_ring().full(stage),
                                          index * T::kBlockN, tile.value_slice * T::kColumns, kv_head(), tile.batch);
    }
  }
  __device__ __forceinline__ int kv_head() const { return arguments.list.group.divide(tile.head); }
};

// A consumer warpgroup.
template <typename Config>
struct ForwardSm90Consumer : ForwardSm90Stages<Config> {
  using Base = ForwardSm90Stages<Config>;
  using T = typename Base::T;
  using Element = typename T::Element;
  using Base::arguments;
  using Base::Base;
  using Base::k_ring;
  using Base::mask_ring;
  using Base::q_full;
  using Base::smem;
  using Base::tile;
  using Base::tiles;
  using Base::v_ring;
  using Ring = typename Base::Ring;
  static constexpr bool kGuarded = std::is_same_v<Element, __half>;  // P could overflow
  static constexpr float kLimit = 16384.0f;                          // of a lane's sum of |P| in a tile
  static constexpr int kExponent = 9;  // a lowered row's largest such sum is within 2^9 and 2^10

  float o[T::kColumns / 2], s[T::kBlockN / 2];
  uint32_t p[T::kBlockN / 4];
  float sum[2], factor[2];  // of this lane's two rows: of |Y| = |S M| over its columns; of P over Y

  __device__ __forceinline__ void issue_scores(int stage) {
    constexpr int kBlockSteps = kSwizzleColumns / kMmaDepth;
    uint64_t const q = make_smem_desc(smem + consumer_index() * kWarpgroupRows * kSwizzleRowBytes, 0);
    uint64_t const k = make_smem_desc(smem + T::kKOffset + stage * T::kKBytes, 0);
    cute::warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < T::kDepth / kMmaDepth; ++step) {
      int const block = step / kBlockSteps, within = step % kBlockSteps * kMmaDepth * 2;
      gemm_ss<Element>(s, advance_desc(q, block * T::kBlockM * kSwizzleRowBytes + within),
                       advance_desc(k, block * T::kBlockN * kSwizzleRowBytes + within), step > 0);
    }
    cute::warpgroup_commit_batch();
  }
  __device__ __forceinline__ void issue_output(int stage) {
    uint64_t const v = make_smem_desc(smem + T::kVOffset + stage * T::kVBytes, T::kBlockN * kSwizzleRowBytes);
    cute::warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < T::kBlockN / kMmaDepth; ++step) {
      gemm_rs<Element, Major::MN>(o, p + 4 * step, advance_desc(v, step * kMmaDepth * kSwizzleRowBytes), true);
    }
    cute::warpgroup_commit_batch();
  }

  // Scores times their mask, and their sums; `tile_sum` receives this tile's alone.
  template <bool Causal>
  __device__ __forceinline__ void apply_score_mod(MaskRows<T>& mask, float (&tile_sum)[2]) {
    tile_sum[0] = tile_sum[1] = 0.0f;
#pragma unroll
    for (int sixteen = 0; sixteen < T::kBlockN / 16; ++sixteen) {
      uint32_t words[4];
      mask.template load<Causal>(words, sixteen);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int const g = 2 * sixteen + i / 2, half = i % 2;
        float2 const m = unpack_pair<Element>(words[i]);
        float& low = s[4 * g + 2 * half];
        float& high = s[4 * g + 2 * half + 1];
        low *= m.x;
        high *= m.y;
        tile_sum[half] += fabsf(low) + fabsf(high);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) sum[half] += tile_sum[half];
  }

  // Lowers the factors of rows whose P might leave the range of fp16. No MMA may be in flight.
  __device__ __forceinline__ void lower(float (&tile_sum)[2]) {
    bool due = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      tile_sum[half] *= fabsf(factor[half]);
      due = due || tile_sum[half] > kLimit;
    }
    if (!__any_sync(0xffffffffu, due)) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float most = fmaxf(tile_sum[half], __shfl_xor_sync(0xffffffffu, tile_sum[half], 1));
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
  __device__ __forceinline__ void pack_p() {
#pragma unroll
    for (int i = 0; i < T::kBlockN / 4; ++i) {
      float const f = kGuarded ? factor[i % 2] : 1.0f;
      p[i] = pack_pair<Element>(s[2 * i] * f, s[2 * i + 1] * f);
    }
  }

  __device__ __forceinline__ void mainloop() {
    float const scale = arguments.params.scale;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] = 0.0f;
      factor[half] = kGuarded ? scale : 1.0f;
    }
#pragma unroll
    for (int i = 0; i < T::kColumns / 2; ++i) o[i] = 0.0f;
    if (tiles == 0) return;
    float tile_sum[2];
    wait(q_full(), 0);
    wait(k_ring().full(0), 0);
    issue_scores(0);
    cute::warpgroup_wait<0>();
    modify_scores(0, tile_sum);
    compute_p(tile_sum);
    for (int index = 1; index < tiles; ++index) {
      int const stage = Ring::stage(index), before = Ring::stage(index - 1);
      k_ring().consumer_wait(index);
      issue_scores(stage);
      v_ring().consumer_wait(index - 1);
      issue_output(before);
      cute::warpgroup_wait<1>();
      modify_scores(index, tile_sum);
      cute::warpgroup_wait<0>();
      fence_accumulators(o);
      compute_p(tile_sum);
      consumer_release(v_ring().empty(before));
    }
    int const last = tiles - 1;
    v_ring().consumer_wait(last);
    issue_output(Ring::stage(last));
    cute::warpgroup_wait<0>();
    fence_accumulators(o);
  }
  // Modifies a tile's scores once they are complete.
  __device__ __forceinline__ void modify_scores(int index, float (&tile_sum)[2]) {
    fence_accumulators(s);
    consumer_release(k_ring().empty(Ring::stage(index)));
    int const stage = Ring::stage(index), row = consumer_row() / 16 * 16;
    MaskRows<T> mask(arguments.params, smem + T::kMaskOffset + stage * T::kMaskBytes, row,
                     tile.row_block * T::kBlockM + row, index * T::kBlockN);
    mask_ring().consumer_wait(index);
    if (mask.causal) {
      apply_score_mod<true>(mask, tile_sum);
    } else {
      apply_score_mod<false>(mask, tile_sum);
    }
    mask.release(mask_ring().empty(stage));
  }
  // With no MMA in flight: packs scores into the A operand of the next.
  __device__ __forceinline__ void compute_p(float (&tile_sum)[2]) {
    if constexpr (kGuarded) lower(tile_sum);
    pack_p();
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
      int const i = tile.row_block * T::kBlockM + consumer_row() + 8 * half;
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
    scores_forward_sm90(ForwardSm90Arguments const __grid_constant__ arguments) {
  using T = ForwardSm90Traits<Config>;
  extern __shared__ char smem_bytes[];
  uint32_t const smem = aligned_shared(smem_bytes);
  TileCoordinates const tile = tile_coordinates<Config::kCtaOrder == CtaOrder::kLongestFirst, T::kVSlices, true>(
      int(blockIdx.x), arguments.list);
  ForwardSm90Stages<Config> stages(arguments, smem, tile);
  if (threadIdx.x == 0) {
    prefetch_descriptor(arguments.q.descriptor);
    prefetch_descriptor(arguments.k.descriptor);
    prefetch_descriptor(arguments.v.descriptor);
    prefetch_descriptor(arguments.mask.descriptor);
    stages.init_barriers();
  }
  __syncthreads();
  if (threadIdx.x < kWarpgroupThreads) {
    cutlass::arch::warpgroup_reg_dealloc<T::kProducerRegisters>();
    if (threadIdx.x == 0) stages.load_keys();
    if (threadIdx.x == 32) stages.load_mask();
    if (threadIdx.x == 64) stages.load_values();
  } else {
    cutlass::arch::warpgroup_reg_alloc<T::kConsumerRegisters>();
    ForwardSm90Consumer<Config> warpgroup(arguments, smem, tile);
    warpgroup.mainloop();
    warpgroup.write();
  }
}

}  // namespace attention_autotuner

// dK = scale dS^T Q of retnet's backward in family sm90, from the scores that dQ's pass has stored: dK needs no V dO^T
// of its own.
//
// The pass is a matrix multiplication: tiles of dS, whose rows are what is summed over, and of Q go through one ring of
// stages of 64 queries. dS lies in the workspace for a band of heads at a time (see score_bands.cuh), so that it takes
// as much memory as the SMs have tiles of it in work, and L2 holds a good part. Of each 32 keys, those that one lane of
// dQ's pass has of a row, 8 j + 2 l + e for lane l of four, lie together in the order of l, j, e: it stores them as 16
// bytes. Here that is an order of rows of dK, which are put right where they are written.
#pragma once

#include "attention_autotuner/common/backward_arguments.cuh"
#include "attention_autotuner/common/scheduler.cuh"
#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/scores_backward_sm90/epilogue.cuh"
#include "attention_autotuner/scores_backward_sm90/producer.cuh"
#include "attention_autotuner/sm90/pipeline.cuh"
#include "attention_autotuner/sm90/roles.cuh"
#include "attention_autotuner/sm90/swizzle.cuh"
#include "attention_autotuner/sm90/tma.cuh"
#include "attention_autotuner/sm90/wgmma.cuh"

namespace attention_autotuner {

struct StoredSm90Arguments {
  TmaTensor scores, q;  // scores as [batch, head, main loop and query, key] of the band
  BackwardArguments<attention_autotuner_retnet_backward_params> common;
  ScoreBand band;
  int mainloops;
};

// What both roles know: the tile, and the steps over the queries of its heads.
template <typename T>
struct StoredScoresStages {
  using Ring = BarrierRing<T::kStages>;

  StoredSm90Arguments const& arguments;
  uint32_t const smem;
  TileCoordinates const tile;
  Share<true> const share;
  TileRange const range;
  int const used;  // stages of the CTA before this tile

  __device__ __forceinline__ StoredScoresStages(StoredSm90Arguments const& arguments, uint32_t smem,
                                                TileCoordinates const& tile, int used)
      : arguments(arguments),
        smem(smem),
        tile(tile),
        share(arguments.common, tile.head),
        range(TileRange::over_queries(arguments.common, tile.row_block * T::kBlockRows, T::kBlockDepth, share.head,
                                      share.heads, T::kBlockRows)),
        used(used) {}

  __device__ __forceinline__ static Ring ring(uint32_t smem) { return {smem + T::kBarrierOffset}; }
  __device__ __forceinline__ static void init_barriers(uint32_t smem) {
    for (int stage = 0; stage < T::kStages; ++stage) ring(smem).init(stage, 1, T::kWarpgroups);
    fence_barrier_init();
  }
  __device__ __forceinline__ int steps() const { return arguments.mainloops * range.tiles(); }
  __device__ __forceinline__ uint32_t scores_tile(int stage) const { return smem + stage * T::kStageBytes; }
  __device__ __forceinline__ uint32_t q_tile(int stage) const { return scores_tile(stage) + T::kScoresBytes; }

  // By one thread.
  __device__ __forceinline__ void load() const {
    auto const& band = arguments.band;
    int const ends = steps();
    Cursor now = range.begin();
    int loop_row = 0;
#pragma unroll 1
    for (int step = 0; step < ends; ++step, range.next(now)) {
      if (step == range.tiles()) {
        now = range.begin();
        loop_row = band.loop_rows;
      }
      int const stage = Ring::stage(used + step), query = now.tile * T::kBlockDepth;
      uint32_t const full = ring(smem).full(stage);
      ring(smem).producer_acquire(used + step);
      arrive_and_expect_tx(full, T::kStageBytes);
      load_tile<T::kBlockDepth, T::kBlockRows>(scores_tile(stage), arguments.scores, full, loop_row + query,
                                               tile.row_block * T::kBlockRows, now.head - band.first_head,
                                               tile.batch - band.first_batch);
      load_tile<T::kBlockDepth, T::kColumns>(q_tile(stage), arguments.q, full, query, 0, now.head, tile.batch);
    }
  }
};

// A consumer warpgroup.
template <typename T>
struct StoredScoresConsumer : StoredScoresStages<T> {
  using Base = StoredScoresStages<T>;
  using Element = typename T::Element;
  using Base::arguments;
  using Base::Base;
  using Base::ring;
  using Base::smem;
  using Base::tile;
  using Base::used;
  using typename Base::Ring;
  static constexpr int kBlockBytes = T::kBlockDepth * kSwizzleRowBytes;  // of 64 columns of a tile
  static constexpr int kStepBytes = kMmaDepth * kSwizzleRowBytes;        // from one MMA's operands to the next one's

  float result[T::kMmas][T::kColumns / 2];

  __device__ __forceinline__ void issue(int stage) {
    uint64_t const scores =
        make_smem_desc(this->scores_tile(stage) + consumer_index() * T::kMmas * kBlockBytes, kBlockBytes);
    uint64_t const q = make_smem_desc(this->q_tile(stage), kBlockBytes);
    warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < T::kBlockDepth / kMmaDepth; ++step) {
#pragma unroll
      for (int mma = 0; mma < T::kMmas; ++mma) {
        gemm_ss<Element, Major::MN, Major::MN>(result[mma], advance_desc(scores, mma * kBlockBytes + step * kStepBytes),
                                               advance_desc(q, step * kStepBytes), true);
      }
    }
    warpgroup_commit_batch();
  }
  __device__ __forceinline__ void mainloop() {
#pragma unroll
    for (int mma = 0; mma < T::kMmas; ++mma) {
#pragma unroll
      for (float& value : result[mma]) value = 0.0f;
    }
    int const ends = used + this->steps();
    if (ends == used) return;
    ring(smem).consumer_wait(used);
    issue(Ring::stage(used));
#pragma unroll 1
    for (int at = used + 1; at < ends; ++at) {
      ring(smem).consumer_wait(at);
      issue(Ring::stage(at));
      warpgroup_wait<1>();
      consumer_release(ring(smem).empty(Ring::stage(at - 1)));
    }
    warpgroup_wait<0>();
#pragma unroll
    for (int mma = 0; mma < T::kMmas; ++mma) fence_accumulators(result[mma]);
    consumer_release(ring(smem).empty(Ring::stage(ends - 1)));
  }
  __device__ __forceinline__ void write() const {
    auto const& common = arguments.common;
    auto const& params = common.params;
    // This lane's first row of dK among 64. Its second was stored by the next lane of dQ's pass: two keys further.
    int const pair = lane_index() / 8, odd = lane_index() / 4 & 1, warp = warp_in_warpgroup();
    int const row = 32 * (warp / 2) + 8 * pair + 4 * (warp & 1) + odd;
#pragma unroll
    for (int mma = 0; mma < T::kMmas; ++mma) {
      int const first = tile.row_block * T::kBlockRows + (consumer_index() * T::kMmas + mma) * kWarpgroupRows;
      write_result<Element, T::kGathered, 2>(result[mma], common, params.dk, common.dk_partial, T::kResultDim,
                                             params.dim_qk, params.scale, tile.batch, this->share.kv_head,
                                             this->share.split, params.seqlen_k, first + row, 0);
    }
  }
};

// CTAs are persistent, as those of the other passes are. The scores of the band are there once the kernel ahead is
// complete, and with it the dK that read the other band: the next dQ may fill that.
template <typename T>
__global__ void __launch_bounds__(T::kThreads, 1)
    scores_backward_sm90_stored(StoredSm90Arguments const __grid_constant__ arguments, TileList const list) {
  extern __shared__ char smem_bytes[];
  uint32_t const smem = aligned_shared(smem_bytes);
  if (threadIdx.x == 0) StoredScoresStages<T>::init_barriers(smem);
  __syncthreads();
  auto for_each_tile = [&](auto role, auto&& use) {
    int used = 0;
    for (int index = int(blockIdx.x); index < list.tiles; index += int(gridDim.x)) {
      TileCoordinates tile = tile_coordinates<T::kLongestFirst, 1, true>(index, list);
      tile.head += arguments.band.first_head / list.group.divisor * arguments.common.splits.divisor;
      tile.batch += arguments.band.first_batch;
      typename decltype(role)::Type work(arguments, smem, tile, used);
      use(work);
      used += work.steps();
    }
  };
  if (threadIdx.x < kWarpgroupThreads) {
    cutlass::arch::warpgroup_reg_dealloc<T::kProducerRegisters>();
    if (threadIdx.x == 0) {
      wait_on_dependent_grids();
      launch_dependent_grids();
      for_each_tile(Role<StoredScoresStages<T>>{}, [](auto const& work) { work.load(); });
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<T::kConsumerRegisters>();
    for_each_tile(Role<StoredScoresConsumer<T>>{}, [](auto& work) {
      work.mainloop();
      work.write();
    });
  }
}

}  // namespace attention_autotuner

// C = A B for compute capability 9.0: WGMMA from tiles that TMA loads into a ring of stages, one producer thread and
// two consumer warpgroups in a CTA that stays and takes one tile of C after the other.
//
// A and B may each lie by rows or by columns: tiles arrive as they lie, and the descriptors of the MMAs say how to read
// them. With splits, several CTAs share the depth of a tile; their sums go to the workspace in fp32, and a second
// kernel adds them up in a fixed order.
#pragma once

#include "attention_autotuner/common/convert.cuh"
#include "attention_autotuner/gemm_sm90/traits.cuh"
#include "attention_autotuner/sm90/cluster.cuh"
#include "attention_autotuner/sm90/pipeline.cuh"
#include "attention_autotuner/sm90/stmatrix.cuh"
#include "attention_autotuner/sm90/tma.cuh"
#include "attention_autotuner/sm90/wgmma.cuh"

namespace attention_autotuner {

// The tiles of C in groups of row blocks: those of a group are computed side by side, column by column, so that what is
// in flight reads few rows of A and few columns of B.
struct GemmTiles {
  int row_blocks;  // of whole clusters
  int column_blocks, tiles, items, group, splits, steps;
};
struct GemmItem {
  int row_block, column_block, split, begin, end;  // steps of the depth
};
__device__ __forceinline__ GemmItem gemm_item(GemmTiles const& list, int index) {
  GemmItem item;
  item.split = index / list.tiles;
  int const tile = index - item.split * list.tiles, band = list.group * list.column_blocks, first = tile / band;
  int const rows = minimum(list.row_blocks - first * list.group, list.group), within = tile - first * band;
  item.column_block = within / rows;
  item.row_block = first * list.group + within - item.column_block * rows;
  item.begin = int(int64_t(list.steps) * item.split / list.splits);
  item.end = int(int64_t(list.steps) * (item.split + 1) / list.splits);
  return item;
}

struct GemmSm90Arguments {
  TmaTensor a, b, o;
  GemmTiles list;
  void* output;
  int64_t stride;  // of rows of C
  float* partial;  // of every split [m, n]; null without splits
  int m, n;
};

template <typename Config>
struct GemmSm90Stages {
  using T = GemmSm90Traits<Config>;
  using Ring = BarrierRing<T::kStages>;

  GemmSm90Arguments const& arguments;
  uint32_t const smem;

  __device__ __forceinline__ Ring ring() const { return {smem + T::kBarrierOffset}; }
  __device__ __forceinline__ uint32_t a_tile(int stage) const { return smem + stage * T::kStageBytes; }
  __device__ __forceinline__ uint32_t b_tile(int stage) const { return a_tile(stage) + T::kABytes; }
  __device__ __forceinline__ void init_barriers() const {
    for (int stage = 0; stage < T::kStages; ++stage) ring().init(stage, 1, T::kSharing * T::kCluster);
    fence_barrier_init();
  }
  // Where this CTA's cluster begins and how many there are.
  __device__ __forceinline__ int first_item() const { return block_index() / T::kCluster; }
  __device__ __forceinline__ int clusters() const { return int(gridDim.x) / T::kCluster; }

  __device__ __forceinline__ void load() const {
    int const rank = T::kCluster > 1 ? cluster_rank() : 0;
    if (arguments.partial != nullptr) launch_dependent_grids();
    constexpr int kShare = T::kBlockN / T::kCluster;  // columns of B that this CTA loads for its cluster
    int use = 0;
    for (int index = first_item(); index < arguments.list.items; index += clusters()) {
      GemmItem const item = gemm_item(arguments.list, index);
      int const row = (item.row_block * T::kCluster + rank) * T::kBlockM;
      int const column = item.column_block * T::kBlockN + rank * kShare;
#pragma unroll 1
      for (int step = item.begin; step < item.end; ++step, ++use) {
        int const stage = Ring::stage(use), depth = step * T::kBlockK;
        uint32_t const full = ring().full(stage), b = b_tile(stage) + rank * kShare * kSwizzleRowBytes;
        ring().producer_acquire(use);
        arrive_and_expect_tx(full, T::kStageBytes);
        if constexpr (T::kTransposedA) {
          load_tile<T::kBlockK, T::kBlockM>(a_tile(stage), arguments.a, full, depth, row, 0, 0);
        } else {
          load_tile<T::kBlockM, T::kBlockK>(a_tile(stage), arguments.a, full, row, depth, 0, 0);
        }
        if constexpr (T::kTransposedB) {
          load_b<kShare, T::kBlockK>(b, full, column, depth);
        } else {
          load_b<T::kBlockK, kShare>(b, full, depth, column);
        }
      }
    }
  }
  template <int Rows, int Columns>
  __device__ __forceinline__ void load_b(uint32_t target, uint32_t full, int row, int column) const {
    if constexpr (T::kCluster == 1) {
      load_tile<Rows, Columns>(target, arguments.b, full, row, column, 0, 0);
    } else {
#pragma unroll
      for (int block = 0; block < Columns / kSwizzleColumns; ++block) {
        tma_load_multicast(target + block * Rows * kSwizzleRowBytes, arguments.b.descriptor, full,
                           uint16_t((1 << T::kCluster) - 1), column + block * kSwizzleColumns, row);
      }
    }
  }
};

template <typename Config>
struct GemmSm90Consumer : GemmSm90Stages<Config> {
  using Base = GemmSm90Stages<Config>;
  using T = typename Base::T;
  using Element = typename T::Element;
  using Ring = typename Base::Ring;
  using Base::a_tile;
  using Base::arguments;
  using Base::b_tile;
  using Base::clusters;
  using Base::first_item;
  using Base::ring;
  using Base::smem;
  static constexpr Major kMajorA = T::kTransposedA ? Major::MN : Major::K;
  static constexpr Major kMajorB = T::kTransposedB ? Major::K : Major::MN;
  static constexpr int kBlockBytes = kWarpgroupRows * kSwizzleRowBytes;  // 64 rows of A by a step, or the reverse
  // Bytes from one instruction's operands to the next one's, along the depth.
  static constexpr int kStepA = kMmaDepth * (T::kTransposedA ? kSwizzleRowBytes : 2);
  static constexpr int kStepB = kMmaDepth * (T::kTransposedB ? 2 : kSwizzleRowBytes);

  static constexpr int kStoreBarrier = 8;  // named barriers below are those of turns

  float sums[T::kMmas][T::kBlockN / 2];

  // The first of this warpgroup's rows in a tile.
  __device__ __forceinline__ int first_row() const {
    return T::kPingPong ? 0 : consumer_index() * T::kMmas * kWarpgroupRows;
  }
  __device__ __forceinline__ void issue(int stage, bool accumulate) {
    uint64_t const a = make_smem_desc(a_tile(stage) + first_row() / kWarpgroupRows * kBlockBytes, 0);
    uint64_t const b = make_smem_desc(b_tile(stage), T::kTransposedB ? 0 : T::kBlockK * kSwizzleRowBytes);
    warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < T::kBlockK / kMmaDepth; ++step) {
#pragma unroll
      for (int mma = 0; mma < T::kMmas; ++mma) {
        gemm_ss<Element, kMajorA, kMajorB>(sums[mma], advance_desc(a, mma * kBlockBytes + step * kStepA),
                                           advance_desc(b, step * kStepB), accumulate || step > 0);
      }
    }
    warpgroup_commit_batch();
  }
  __device__ __forceinline__ void release(int use) {
    uint32_t const empty = ring().empty(Ring::stage(use));
    if constexpr (T::kCluster == 1) {
      consumer_release(empty);
    } else if (threadIdx.x % kWarpgroupThreads < T::kCluster) {
      arrive_at(empty, threadIdx.x % kWarpgroupThreads);
    }
  }
  // The sums of an item whose stages begin with the ring's `use`-th.
  __device__ __forceinline__ void mainloop(int use, int steps) {
    ring().consumer_wait(use);
    issue(Ring::stage(use), false);
#pragma unroll 1
    for (int step = 1; step < steps; ++step) {
      ring().consumer_wait(use + step);
      issue(Ring::stage(use + step), true);
      warpgroup_wait<1>();
      release(use + step - 1);
    }
    // Only now: a warpgroup that waited for its stages earlier would take a former round of the ring for its own.
    if constexpr (T::kPingPong) ping_pong_pass<T::kWarpgroups>();
    warpgroup_wait<0>();
#pragma unroll
    for (int mma = 0; mma < T::kMmas; ++mma) fence_accumulators(sums[mma]);
    release(use + steps - 1);
  }

  // 64 rows from `row` on, through shared memory.
  __device__ __forceinline__ void store(float const (&s)[T::kBlockN / 2], int row, int column) {
    uint32_t const slab = smem + T::kStoreOffset + consumer_index() * T::kStoreBytes;
    int const key = lane_index() & 7, line = 16 * warp_in_warpgroup() + (lane_index() & 8) + key;
    bool const leads = threadIdx.x % kWarpgroupThreads == 0;
#pragma unroll
    for (int part = 0; part < T::kBlockN; part += T::kStoreColumns) {
      if (leads) tma_store_wait_read();
      named_barrier(kStoreBarrier + consumer_index(), kWarpgroupThreads);
#pragma unroll
      for (int i = 0; i < T::kStoreColumns / 16; ++i) {
        uint32_t words[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          int const at = part / 2 + 8 * i + 4 * (w / 2) + 2 * (w % 2);
          words[w] = pack_pair<Element>(s[at], s[at + 1]);
        }
        store_matrix_x4(swizzled_address<kWarpgroupRows>(slab, line, 2 * i + (lane_index() >> 4), key), words);
      }
      fence_view_async_shared();
      named_barrier(kStoreBarrier + consumer_index(), kWarpgroupThreads);
      if (leads) {
#pragma unroll
        for (int block = 0; block < T::kStoreColumns / kSwizzleColumns; ++block) {
          tma_store(arguments.o.descriptor, slab + block * kBlockBytes, column + part + block * kSwizzleColumns, row, 0,
                    0);
        }
      }
    }
  }
  // The same from registers: to C, or in fp32 to the workspace.
  template <typename Type>
  __device__ __forceinline__ void write(float const (&s)[T::kBlockN / 2], Type* out, int64_t stride, int row,
                                        int column) {
    row += 16 * warp_in_warpgroup() + lane_index() / 4;
    column += 2 * (lane_index() & 3);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Type* const line = out + (row + 8 * half) * stride;
      if (row + 8 * half >= arguments.m) continue;
#pragma unroll
      for (int g = 0; g < T::kBlockN / 8; ++g) {
        float const low = s[4 * g + 2 * half], high = s[4 * g + 2 * half + 1];
        if (column + 8 * g >= arguments.n) continue;
        if constexpr (sizeof(Type) == 4) {
          *reinterpret_cast<float2*>(line + column + 8 * g) = make_float2(low, high);
        } else {
          *reinterpret_cast<uint32_t*>(line + column + 8 * g) = pack_pair<Element>(low, high);
        }
      }
    }
  }

  __device__ __forceinline__ void run() {
    int const rank = T::kCluster > 1 ? cluster_rank() : 0;
    int use = 0, turn = 0;
    if constexpr (T::kPingPong) ping_pong_begin<T::kWarpgroups>();
    for (int index = first_item(); index < arguments.list.items; index += clusters(), turn ^= 1) {
      GemmItem const item = gemm_item(arguments.list, index);
      int const steps = item.end - item.begin;
      if (T::kPingPong && turn != consumer_index()) {
        use += steps;
        continue;
      }
      if constexpr (T::kPingPong) ping_pong_wait();
      mainloop(use, steps);
      use += steps;
      int const column = item.column_block * T::kBlockN;
#pragma unroll
      for (int mma = 0; mma < T::kMmas; ++mma) {
        int const row = (item.row_block * T::kCluster + rank) * T::kBlockM + first_row() + mma * kWarpgroupRows;
        if (row >= arguments.m) continue;
        if (arguments.partial != nullptr) {
          write(sums[mma], arguments.partial + int64_t(item.split) * arguments.m * arguments.n, arguments.n, row,
                column);
        } else if constexpr (T::kStores) {
          store(sums[mma], row, column);
        } else {
          write(sums[mma], static_cast<Element*>(arguments.output), arguments.stride, row, column);
        }
      }
    }
    if constexpr (T::kPingPong) {
      if (turn == 1 && consumer_index() == 1) {  // a turn without an item
        ping_pong_wait();
        ping_pong_pass<T::kWarpgroups>();
      }
      ping_pong_end();
    }
    // Shared memory stays until stores have read it.
    if (T::kStores && threadIdx.x % kWarpgroupThreads == 0) tma_store_wait_read();
  }
};

template <typename Config>
__global__ void __launch_bounds__(GemmSm90Traits<Config>::kThreads, 1)
    gemm_sm90(GemmSm90Arguments const __grid_constant__ arguments) {
  using T = GemmSm90Traits<Config>;
  extern __shared__ char smem_bytes[];
  uint32_t const smem = aligned_shared(smem_bytes);
  GemmSm90Stages<Config> const stages{arguments, smem};
  if (threadIdx.x == 0) {
    prefetch_descriptor(arguments.a.descriptor);
    prefetch_descriptor(arguments.b.descriptor);
    if (T::kStores) prefetch_descriptor(arguments.o.descriptor);
    stages.init_barriers();
  }
  wait_on_dependent_grids();
  if constexpr (T::kCluster > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  if (threadIdx.x < kWarpgroupThreads) {
    cutlass::arch::warpgroup_reg_dealloc<T::kProducerRegisters>();
    if (threadIdx.x == 0) stages.load();
  } else {
    cutlass::arch::warpgroup_reg_alloc<T::kConsumerRegisters>();
    GemmSm90Consumer<Config> consumer{{arguments, smem}};
    consumer.run();
  }
  // No CTA ends while others of its cluster may still arrive at its barriers.
  if constexpr (T::kCluster > 1) cluster_sync();
}

inline constexpr int kGemmSumThreads = 256;

// C from the sums of all splits, eight columns by a thread. It may start while they are computed, and waits for them.
template <typename Config>
__global__ void __launch_bounds__(kGemmSumThreads) gemm_sm90_sum(GemmSm90Arguments const __grid_constant__ arguments) {
  using Element = typename Config::Element;
  wait_on_dependent_grids();
  int64_t const at = (int64_t(blockIdx.x) * kGemmSumThreads + threadIdx.x) * 8;
  int64_t const elements = int64_t(arguments.m) * arguments.n;
  if (at >= elements) return;
  float sums[8] = {};
  for (int split = 0; split < arguments.list.splits; ++split) {
    float4 const* const from = reinterpret_cast<float4 const*>(arguments.partial + split * elements + at);
    float4 const low = from[0], high = from[1];
    float const values[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[i] += values[i];
  }
  int64_t const row = at / arguments.n, column = at - row * arguments.n;
  *reinterpret_cast<uint4*>(static_cast<Element*>(arguments.output) + row * arguments.stride + column) =
      make_uint4(pack_pair<Element>(sums[0], sums[1]), pack_pair<Element>(sums[2], sums[3]),
                 pack_pair<Element>(sums[4], sums[5]), pack_pair<Element>(sums[6], sums[7]));
}

}  // namespace attention_autotuner

// Compile-time shape of the matrix multiplication of family sm90: tile, ring, registers, shared memory.
//
// Every static_assert here is the twin of a named predicate in kernels/gemm_sm90/rules.py.
#pragma once

#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/sm90/roles.cuh"
#include "attention_autotuner/sm90/swizzle.cuh"

namespace attention_autotuner {

// kCooperative: the consumer warpgroups share the rows of a tile. kPingPong: each has every other tile, so that one
// writes its results while the MMAs of the other run.
enum class Schedule { kCooperative, kPingPong };
// The way of a tile of C: kTma through shared memory, kDirect straight from registers.
enum class Output { kTma, kDirect };

template <typename Config>
struct GemmSm90Traits {
  using Element = typename Config::Element;
  static constexpr bool kTransposedA = Config::kTransposedA, kTransposedB = Config::kTransposedB;
  static constexpr bool kPingPong = Config::kSchedule == Schedule::kPingPong;
  static constexpr bool kStores = Config::kOutput == Output::kTma;
  static constexpr int kWarpgroups = 2;  // consumers; one more is the producer
  static constexpr int kThreads = 128 * (1 + kWarpgroups);
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  static constexpr int kBlockK = kSwizzleColumns;  // of one stage
  static constexpr int kStages = Config::kStages;
  static constexpr int kCluster = Config::kCluster;  // CTAs that share a tile of columns of B, one tile of rows each
  static constexpr int kSharing = kPingPong ? 1 : kWarpgroups;         // warpgroups of a tile
  static constexpr int kMmas = kBlockM / (kWarpgroupRows * kSharing);  // of a warpgroup, one below the other
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  static constexpr int kFragmentRegisters = kMmas * kBlockN / 2;

  static constexpr int kABytes = kBlockM * kBlockK * 2, kBBytes = kBlockN * kBlockK * 2;
  static constexpr int kStageBytes = kABytes + kBBytes;
  static constexpr int kStoreColumns = kBlockN % 128 == 0 ? 128 : 64;  // of a warpgroup's 64 rows that leave at once
  static constexpr int kStoreBytes = kStores ? kWarpgroupRows * kStoreColumns * 2 : 0;
  static constexpr int kStoreOffset = kStages * kStageBytes;
  static constexpr int kBarrierOffset = kStoreOffset + kWarpgroups * kStoreBytes;
  static constexpr int kSmemBytes = kSwizzleBytes + kBarrierOffset + 256;

  static_assert(Config::kCopyBytes == 16, "tma_needs_alignment");
  static_assert(kBlockM % (kWarpgroupRows * kSharing) == 0 && kMmas >= 1 && kBlockM <= 256, "block_m_fills_warpgroups");
  static_assert(kBlockN == 64 || kBlockN == 128 || kBlockN == 192 || kBlockN == 256, "block_n_known");
  static_assert(kStages >= 2 && kStages <= 8, "stages_range");
  static_assert(kCluster == 1 || (kCluster == 2 && kBlockN % 128 == 0), "cluster_splits_columns");
  static_assert(kFragmentRegisters <= 128, "fragments_fit_warpgroup");
  static_assert(kSmemBytes <= 227 * 1024, "smem_fits_block");
};

}  // namespace attention_autotuner

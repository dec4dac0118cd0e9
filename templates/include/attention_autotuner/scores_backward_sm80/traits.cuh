// Compile-time shapes of the passes of a backward and their shared-memory layouts.
//
// Every static_assert here is the twin of a named predicate in kernels/scores_backward_sm80/rules.py, and
// kSmemBytes of the formulas in resources.py beside it.
#pragma once

#include "attention_autotuner/common/backward_arguments.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/scheduler.cuh"
#include "attention_autotuner/common/tile.cuh"
#include "attention_autotuner/score/score_mod.cuh"

namespace attention_autotuner {

// kOnePass: preprocess, key pass with dQ, conversion. kTwoKernels: preprocess, key pass, row pass for dQ.
// kThreeKernels: preprocess, a row pass for each result.
enum class Plan { kOnePass, kTwoKernels, kThreeKernels };

template <typename Config>
struct BackwardDims {
  static constexpr ScoreMod kScoreMod = Config::kScoreMod;
  using Params = BackwardParamsOf<Config>;
  using Modifications = typename ModificationsOf<Config>::Type;
  static constexpr bool kModified = kIsModified<Config>;
  static constexpr bool kPacked = kIsPacked<Config>;
  static constexpr bool kSpanned = kIsSpanned<Config>;
  static constexpr int kPaddedDimQK = Config::kPaddedDimQK;
  static constexpr int kPaddedDimV = Config::kPaddedDimV;
  static constexpr int kCopyBytes = Config::kCopyBytes;
  static_assert(Config::kPaddedDimQK % 16 == 0 && Config::kPaddedDimQK >= 16 && Config::kPaddedDimQK <= 256,
                "padded_dim_qk_range");
  static_assert(Config::kPaddedDimV % 16 == 0 && Config::kPaddedDimV >= 16 && Config::kPaddedDimV <= 512,
                "padded_dim_v_range");
  static_assert(Config::kCopyBytes == 16 || Config::kCopyBytes == 2, "copy_bytes_known");
};

// How the warps of a key pass share dQ's tile of block_m x padded_dim_qk: along rows and columns, such that none has
// more than it must, and then such that they read least.
struct Split {
  int warps_m;
  int warps_d;
};
constexpr Split split_dq(int warps, int row_tiles, int column_tiles, int key_tiles) {
  Split best{1, warps};
  int best_work = 0, best_reads = 0;
  for (int m = 1; m <= warps; m *= 2) {
    if (row_tiles % m != 0 || warps % m != 0) continue;
    int const rows = row_tiles / m, columns = divide_up(column_tiles, warps / m);
    int const work = rows * columns, reads = (rows + columns) * key_tiles;
    if (best_work == 0 || work < best_work || (work == best_work && reads < best_reads)) {
      best = {m, warps / m};
      best_work = work;
      best_reads = reads;
    }
  }
  return best;
}

// The pass over blocks of keys: see scores_backward_sm80/key_pass.cuh.
template <typename Config>
struct KeyPassTraits : BackwardDims<Config> {
  using Element = typename Config::Element;
  using Pass = typename Config::Keys;
  using BackwardDims<Config>::kScoreMod;
  using BackwardDims<Config>::kPaddedDimQK;
  using BackwardDims<Config>::kPaddedDimV;
  static constexpr bool kLongestFirst = Config::kCtaOrder == CtaOrder::kLongestFirst;
  static constexpr int kBlockM = Pass::kBlockM;
  static constexpr int kBlockN = Pass::kBlockN;
  static constexpr int kPairs = Pass::kWarpPairs;
  static constexpr int kStages = Pass::kNumStages;
  static constexpr int kSubtiles = Pass::kQuerySubtiles;
  static constexpr int kCtasPerSm = Pass::kCtasPerSm;
  static constexpr bool kOnePass = Config::kPlan == Plan::kOnePass;  // dQ's share is computed and added here
  static constexpr bool kByQueries = false;                          // a CTA's rows are keys
  static constexpr int kBlockRows = kBlockN;
  static constexpr int kBlockColumns = kBlockM;
  static constexpr int kSlices = 1;
  static constexpr int kThreads = 64 * kPairs;

  static_assert(kBlockM % 16 == 0 && kBlockM >= 16 && kBlockM <= 128, "keys_block_m_multiple_of_16");
  static_assert(kPairs >= 1 && kPairs <= 8, "keys_warps_range");
  static_assert(kBlockN % (16 * kPairs) == 0, "keys_block_n_divides_among_pairs");
  static_assert(kStages >= 1 && kStages <= 3, "keys_num_stages_range");
  static_assert(kBlockM % (16 * kSubtiles) == 0 && kPairs * kSubtiles <= 15 && (kSubtiles == 1 || kStages < 3),
                "keys_query_subtiles_divide");
  // With a third buffer for Q, a tile's dK is left for the next step, where it runs under the exponentials.
  static constexpr bool kDkLater = kStages == 3;
  static constexpr int kQStages = kStages;
  static constexpr int kDoStages = kStages == 1 ? 1 : 2;  // and of LSE, delta and dS

  // A thread may have fewer than 255 registers.
  static constexpr bool kRegistersScarce = kThreads * kCtasPerSm > 256;
  // Tiles are fetched under the first MMA where there are registers for it, else under dQ's.
  static constexpr bool kFetchesEarly = kStages > 1 && kSubtiles == 1 && !kRegistersScarce;

  static constexpr int kRowsPerWarp = kBlockN / kPairs;
  static constexpr int kRowTiles = kRowsPerWarp / 16;
  static constexpr int kSubtileRows = kBlockM / kSubtiles;  // queries whose scores a warp holds at a time
  static constexpr int kQueryTiles = kSubtileRows / 8;
  static constexpr int kScoreColumnTiles = kQueryTiles;
  static constexpr int kQuerySteps = kSubtileRows / 16;

  using TileK = SmemTile<kBlockN, kPaddedDimQK, false>;
  using TileV = SmemTile<kBlockN, kPaddedDimV, false>;
  using TileQ = SmemTile<kBlockM, kPaddedDimQK, false>;
  using TileDo = SmemTile<kBlockM, kPaddedDimV, false>;
  using TileDs = SmemTile<kBlockN, kBlockM, false>;  // transposed: keys x queries
  using TileM = SmemTile<kBlockM, kBlockN, false>;   // of an explicit mask

  static constexpr Split kDqSplit = split_dq(2 * kPairs, kBlockM / 16, kPaddedDimQK / 16, kBlockN / 16);
  static constexpr int kDqRowTiles = kBlockM / 16 / kDqSplit.warps_m;
  static constexpr int kDqColumnPairs = divide_up(kPaddedDimQK / 16, kDqSplit.warps_d);  // of 16 columns
  static constexpr bool kDqEven = kPaddedDimQK / 16 % kDqSplit.warps_d == 0;

  static constexpr int kLseDeltaBytes = kBlockM * 2 * int(sizeof(float));  // all bases, then all shifts
  static constexpr int kExchangeBytes = kBlockN * kBlockM * kElementBytes;
  static constexpr bool kStoresDs = kOnePass || kDkLater;
  static constexpr int kDsBytes = kStoresDs ? TileDs::kBytes : 0;

  static constexpr int kKOffset = 0;
  static constexpr int kVOffset = kKOffset + TileK::kBytes;
  static constexpr int kQOffset = kVOffset + TileV::kBytes;
  static constexpr int kDoOffset = kQOffset + kQStages * TileQ::kBytes;
  static constexpr int kDsOffset = kDoOffset + kDoStages * TileDo::kBytes;
  static constexpr int kMaskOffset = kDsOffset + kDoStages * kDsBytes;
  static constexpr int kMaskBytes = kScoreMod == ScoreMod::kMasked ? kDoStages * TileM::kBytes : 0;
  static constexpr int kExchangeOffset = kMaskOffset + kMaskBytes;
  static constexpr int kLseDeltaOffset = kExchangeOffset + kExchangeBytes;
  static constexpr int kSmemBytes = kLseDeltaOffset + kDoStages * kLseDeltaBytes;
  static_assert(kSmemBytes <= 227 * 1024, "smem_fits_block");
};

// A pass with one result, by blocks of its rows: see scores_backward_sm80/row_pass.cuh.
template <typename Config, typename PassType, Result kResultOf>
struct RowPassTraits : BackwardDims<Config> {
  using Element = typename Config::Element;
  using Pass = PassType;
  static constexpr Result kResult = kResultOf;
  static constexpr bool kByQueries = kResult == Result::kDq;  // the rows are queries, else keys
  static constexpr bool kOnePass = false;
  static constexpr bool kNeedsDp = kResult != Result::kDv;
  using BackwardDims<Config>::kScoreMod;
  using BackwardDims<Config>::kPaddedDimQK;
  using BackwardDims<Config>::kPaddedDimV;
  static constexpr bool kLongestFirst = Config::kCtaOrder == CtaOrder::kLongestFirst;
  static constexpr int kBlockRows = Pass::kBlockRows;
  static constexpr int kBlockColumns = Pass::kBlockColumns;
  static constexpr int kWarps = Pass::kWarps;
  static constexpr int kColumnWarps = Pass::kColumnWarps;
  static constexpr int kStages = Pass::kNumStages;
  static constexpr int kSlices = Pass::kSlices;
  static constexpr int kCtasPerSm = Pass::kCtasPerSm;
  static constexpr int kThreads = 32 * kWarps * kColumnWarps;
  static constexpr int kResultDim = kResult == Result::kDv ? kPaddedDimV : kPaddedDimQK;

  static_assert(kWarps * kColumnWarps >= 2 && kWarps * kColumnWarps <= 16, "rows_warps_range");
  static_assert(kColumnWarps >= 1 && kColumnWarps <= 2, "rows_column_warps_range");
  static_assert(kBlockRows % (16 * kWarps) == 0, "rows_block_rows_divides_among_warps");
  static_assert(kBlockColumns % (16 * kColumnWarps) == 0 && kBlockColumns <= 128,
                "rows_block_columns_divides_among_warps");
  static_assert(kStages >= 1 && kStages <= 2, "rows_num_stages_range");

  // Of this CTA. Only dV reads its slice alone, so only there may the last slice reach beyond the padded head dim.
  static constexpr int kResultColumns = divide_up(kResultDim / 16, kSlices) * 16;
  static_assert(kSlices * kResultColumns == kResultDim || (!kNeedsDp && (kSlices - 1) * kResultColumns < kResultDim),
                "rows_slices_divide_padded_dim");
  static constexpr int kRowTiles = kBlockRows / kWarps / 16;
  static constexpr int kColumnTiles = kBlockColumns / kColumnWarps / 8;  // of a warp's scores
  static constexpr int kScoreColumnTiles = kColumnTiles;
  static constexpr int kResultTiles = kResultColumns / 8;
  // What streams beside Q (or K): dO (or V), of which the pass for dV needs its slice alone.
  static constexpr int kOtherColumns = kResult == Result::kDv ? kResultColumns : kPaddedDimV;

  using TileRowsQK = SmemTile<kBlockRows, kPaddedDimQK, false>;  // Q or K, resident
  using TileRowsV = SmemTile<kBlockRows, kPaddedDimV, false>;    // dO or V, resident
  using TileQK = SmemTile<kBlockColumns, kPaddedDimQK, false>;   // K or Q, streamed
  using TileOther = SmemTile<kBlockColumns, kOtherColumns, false>;
  using TileResult = SmemTile<kBlockRows, kResultColumns, false>;
  // Of an explicit mask, queries as rows.
  using TileM = SmemTile<kByQueries ? kBlockRows : kBlockColumns, kByQueries ? kBlockColumns : kBlockRows, false>;

  static constexpr int kLseDeltaBytes = kByQueries ? 0 : kBlockColumns * 2 * int(sizeof(float));
  static constexpr int kRowsQKOffset = 0;
  static constexpr int kRowsVOffset = kRowsQKOffset + TileRowsQK::kBytes;
  static constexpr int kQKOffset = kRowsVOffset + (kNeedsDp ? TileRowsV::kBytes : 0);
  static constexpr int kOtherOffset = kQKOffset + kStages * TileQK::kBytes;
  static constexpr int kMaskOffset = kOtherOffset + kStages * TileOther::kBytes;
  static constexpr int kMaskBytes = kScoreMod == ScoreMod::kMasked ? kStages * TileM::kBytes : 0;
  static constexpr int kLseDeltaOffset = kMaskOffset + kMaskBytes;
  static constexpr int kLoopBytes = kLseDeltaOffset + kStages * kLseDeltaBytes;
  static constexpr int kReductionBytes = kBlockRows * kResultColumns * int(sizeof(float)) * (kColumnWarps - 1);
  static constexpr int kSmemBytes = maximum(maximum(kLoopBytes, kReductionBytes), TileResult::kBytes);
  static_assert(kSmemBytes <= 227 * 1024, "smem_fits_block");
};

}  // namespace attention_autotuner

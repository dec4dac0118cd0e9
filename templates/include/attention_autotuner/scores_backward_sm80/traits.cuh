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

// kFused: preparation, key pass with dQ, conversion. kPair: preparation, key pass, row pass for dQ. kSplit:
// preparation, a row pass for each result.
enum class Plan { kFused, kPair, kSplit };

template <typename Config>
struct BackwardClasses {
  static constexpr ScoreMod kScoreMod = Config::kScoreMod;
  using Params = typename ScoreModParams<kScoreMod>::Backward;
  static constexpr int kClassQK = Config::kClassQK;
  static constexpr int kClassV = Config::kClassV;
  static constexpr int kCopyBytes = Config::kCopyBytes;
  static_assert(Config::kClassQK % 16 == 0 && Config::kClassQK >= 16 && Config::kClassQK <= 256, "class_qk_range");
  static_assert(Config::kClassV % 16 == 0 && Config::kClassV >= 16 && Config::kClassV <= 512, "class_v_range");
  static_assert(Config::kCopyBytes == 16 || Config::kCopyBytes == 2, "copy_bytes_known");
};

// How the warps of a key pass share dQ's tile of block_m x class_qk: along rows and columns, such that none has more
// than it must, and then such that they read least.
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
struct KeyPassTraits : BackwardClasses<Config> {
  using Element = typename Config::Element;
  using Pass = typename Config::Keys;
  using BackwardClasses<Config>::kScoreMod;
  using BackwardClasses<Config>::kClassQK;
  using BackwardClasses<Config>::kClassV;
  static constexpr bool kHeadsFirst = Config::kCtaOrder == CtaOrder::kHeadsFirst;
  static constexpr int kBlockM = Pass::kBlockM;
  static constexpr int kBlockN = Pass::kBlockN;
  static constexpr int kPairs = Pass::kWarpPairs;
  static constexpr int kStages = Pass::kNumStages;
  static constexpr int kParts = Pass::kQueryParts;
  static constexpr int kCtasPerSm = Pass::kCtasPerSm;
  static constexpr bool kFused = Config::kPlan == Plan::kFused;  // dQ's share is computed and added here
  static constexpr bool kByQueries = false;                      // a CTA's rows are keys
  static constexpr int kBlockRows = kBlockN;
  static constexpr int kBlockColumns = kBlockM;
  static constexpr int kSlices = 1;
  static constexpr int kThreads = 64 * kPairs;

  static_assert(kBlockM % 16 == 0 && kBlockM >= 16 && kBlockM <= 128, "keys_block_m_multiple_of_16");
  static_assert(kPairs >= 1 && kPairs <= 8, "keys_warps_range");
  static_assert(kBlockN % (16 * kPairs) == 0, "keys_block_n_divides_among_pairs");
  static_assert(kStages >= 1 && kStages <= 3, "keys_num_stages_range");
  static_assert(kBlockM % (16 * kParts) == 0 && kPairs * kParts <= 15 && (kParts == 1 || kStages < 3),
                "keys_query_parts_divide");
  // With a third buffer for Q, a tile's dK is left for the next step, where it runs under the exponentials.
  static constexpr bool kDkLater = kStages == 3;
  static constexpr int kQStages = kStages;
  static constexpr int kDoStages = kStages == 1 ? 1 : 2;  // and of the statistics and dS

  // A thread may have fewer than 255 registers.
  static constexpr bool kRegistersScarce = kThreads * kCtasPerSm > 256;
  // Tiles are fetched under the first product where there are registers for it, else under dQ's.
  static constexpr bool kFetchesEarly = kStages > 1 && kParts == 1 && !kRegistersScarce;

  static constexpr int kRowsPerWarp = kBlockN / kPairs;
  static constexpr int kRowTiles = kRowsPerWarp / 16;
  static constexpr int kPartRows = kBlockM / kParts;  // queries whose scores a warp holds at a time
  static constexpr int kQueryTiles = kPartRows / 8;
  static constexpr int kScoreColumnTiles = kQueryTiles;
  static constexpr int kQuerySteps = kPartRows / 16;

  using TileK = SmemTile<kBlockN, kClassQK, false>;
  using TileV = SmemTile<kBlockN, kClassV, false>;
  using TileQ = SmemTile<kBlockM, kClassQK, false>;
  using TileDo = SmemTile<kBlockM, kClassV, false>;
  using TileDs = SmemTile<kBlockN, kBlockM, false>;  // transposed: keys x queries
  using TileM = SmemTile<kBlockM, kBlockN, false>;   // of an explicit mask

  static constexpr Split kDqSplit = split_dq(2 * kPairs, kBlockM / 16, kClassQK / 16, kBlockN / 16);
  static constexpr int kDqRowTiles = kBlockM / 16 / kDqSplit.warps_m;
  static constexpr int kDqColumnPairs = divide_up(kClassQK / 16, kDqSplit.warps_d);  // of 16 columns
  static constexpr bool kDqEven = kClassQK / 16 % kDqSplit.warps_d == 0;

  static constexpr int kStatisticsBytes = kBlockM * 2 * int(sizeof(float));  // all bases, then all shifts
  static constexpr int kExchangeBytes = kBlockN * kBlockM * kElementBytes;
  static constexpr bool kStoresDs = kFused || kDkLater;
  static constexpr int kDsBytes = kStoresDs ? TileDs::kBytes : 0;

  static constexpr int kKOffset = 0;
  static constexpr int kVOffset = kKOffset + TileK::kBytes;
  static constexpr int kQOffset = kVOffset + TileV::kBytes;
  static constexpr int kDoOffset = kQOffset + kQStages * TileQ::kBytes;
  static constexpr int kDsOffset = kDoOffset + kDoStages * TileDo::kBytes;
  static constexpr int kMaskOffset = kDsOffset + kDoStages * kDsBytes;
  static constexpr int kMaskBytes = kScoreMod == ScoreMod::kMasked ? kDoStages * TileM::kBytes : 0;
  static constexpr int kExchangeOffset = kMaskOffset + kMaskBytes;
  static constexpr int kStatisticsOffset = kExchangeOffset + kExchangeBytes;
  static constexpr int kSmemBytes = kStatisticsOffset + kDoStages * kStatisticsBytes;
  static_assert(kSmemBytes <= 227 * 1024, "smem_fits_block");
};

// A pass with one result, by blocks of its rows: see scores_backward_sm80/row_pass.cuh.
template <typename Config, typename PassType, Result kResultOf>
struct RowPassTraits : BackwardClasses<Config> {
  using Element = typename Config::Element;
  using Pass = PassType;
  static constexpr Result kResult = kResultOf;
  static constexpr bool kByQueries = kResult == Result::kDq;  // the rows are queries, else keys
  static constexpr bool kNeedsDp = kResult != Result::kDv;
  using BackwardClasses<Config>::kScoreMod;
  using BackwardClasses<Config>::kClassQK;
  using BackwardClasses<Config>::kClassV;
  static constexpr bool kHeadsFirst = Config::kCtaOrder == CtaOrder::kHeadsFirst;
  static constexpr int kBlockRows = Pass::kBlockRows;
  static constexpr int kBlockColumns = Pass::kBlockColumns;
  static constexpr int kWarps = Pass::kWarps;
  static constexpr int kColumnWarps = Pass::kColumnWarps;
  static constexpr int kStages = Pass::kNumStages;
  static constexpr int kSlices = Pass::kSlices;
  static constexpr int kCtasPerSm = Pass::kCtasPerSm;
  static constexpr int kThreads = 32 * kWarps * kColumnWarps;
  static constexpr int kResultClass = kResult == Result::kDv ? kClassV : kClassQK;

  static_assert(kWarps * kColumnWarps >= 2 && kWarps * kColumnWarps <= 16, "rows_warps_range");
  static_assert(kColumnWarps >= 1 && kColumnWarps <= 2, "rows_column_warps_range");
  static_assert(kBlockRows % (16 * kWarps) == 0, "rows_block_rows_divides_among_warps");
  static_assert(kBlockColumns % (16 * kColumnWarps) == 0 && kBlockColumns <= 128,
                "rows_block_columns_divides_among_warps");
  static_assert(kStages >= 1 && kStages <= 2, "rows_num_stages_range");

  // Of this CTA. Only dV reads its slice alone, so only there may the last slice reach beyond the class.
  static constexpr int kResultColumns = divide_up(kResultClass / 16, kSlices) * 16;
  static_assert(kSlices * kResultColumns == kResultClass ||
                    (!kNeedsDp && (kSlices - 1) * kResultColumns < kResultClass),
                "rows_slices_divide_class");
  static constexpr int kRowTiles = kBlockRows / kWarps / 16;
  static constexpr int kColumnTiles = kBlockColumns / kColumnWarps / 8;  // of a warp's scores
  static constexpr int kScoreColumnTiles = kColumnTiles;
  static constexpr int kResultTiles = kResultColumns / 8;
  // What streams beside Q (or K): dO (or V), of which the pass for dV needs its slice alone.
  static constexpr int kOtherColumns = kResult == Result::kDv ? kResultColumns : kClassV;

  using TileRowsQK = SmemTile<kBlockRows, kClassQK, false>;  // Q or K, resident
  using TileRowsV = SmemTile<kBlockRows, kClassV, false>;    // dO or V, resident
  using TileQK = SmemTile<kBlockColumns, kClassQK, false>;   // K or Q, streamed
  using TileOther = SmemTile<kBlockColumns, kOtherColumns, false>;
  using TileResult = SmemTile<kBlockRows, kResultColumns, false>;
  // Of an explicit mask, queries as rows.
  using TileM = SmemTile<kByQueries ? kBlockRows : kBlockColumns, kByQueries ? kBlockColumns : kBlockRows, false>;

  static constexpr int kStatisticsBytes = kByQueries ? 0 : kBlockColumns * 2 * int(sizeof(float));
  static constexpr int kRowsQKOffset = 0;
  static constexpr int kRowsVOffset = kRowsQKOffset + TileRowsQK::kBytes;
  static constexpr int kQKOffset = kRowsVOffset + (kNeedsDp ? TileRowsV::kBytes : 0);
  static constexpr int kOtherOffset = kQKOffset + kStages * TileQK::kBytes;
  static constexpr int kMaskOffset = kOtherOffset + kStages * TileOther::kBytes;
  static constexpr int kMaskBytes = kScoreMod == ScoreMod::kMasked ? kStages * TileM::kBytes : 0;
  static constexpr int kStatisticsOffset = kMaskOffset + kMaskBytes;
  static constexpr int kLoopBytes = kStatisticsOffset + kStages * kStatisticsBytes;
  static constexpr int kReductionBytes = kBlockRows * kResultColumns * int(sizeof(float)) * (kColumnWarps - 1);
  static constexpr int kSmemBytes = maximum(maximum(kLoopBytes, kReductionBytes), TileResult::kBytes);
  static_assert(kSmemBytes <= 227 * 1024, "smem_fits_block");
};

}  // namespace attention_autotuner

// How many heads' tiles are side by side in the list of a pass of attention's backward of family sm90.
#pragma once

#include "attention_autotuner/abi.h"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/scheduler.cuh"
#include "attention_autotuner/host/checks.cuh"
#include "attention_autotuner/score/modifications.cuh"

namespace attention_autotuner {

// How often the blocks of heads that are side by side are as many as SMs; 0 where a head's blocks come in turn. Where
// the first share of a tile of queries is stored, or each waits for the one before, fewer CTAs ask for a tile at once
// the more heads are at work. Causal blocks begin at tiles of their own, and gain less by it than L2 loses. The twin of
// side_by_side() in cost.py.
template <typename T>
constexpr int waves_side_by_side(bool causal) {
  if (!T::kStoredDq || T::kMasked || T::kPacked) return 0;
  if (T::kQueuedDq) return !T::kDynamic ? 0 : T::kModified || (T::kKeysDq && causal) ? 1 : 2;
  return T::kKeysDq && !causal && !T::kModified ? 1 : 0;
}

// The largest divisor of `all` up to `most`, or 1.
inline int largest_divisor(int all, double most) {
  int divisor = maximum(1, int(most < all ? most : all));
  while (all % divisor != 0) --divisor;
  return divisor;
}

// The divisor of `all` whose ratio to `wanted` is nearest to one.
inline int nearest_divisor(int all, double wanted) {
  int const below = largest_divisor(all, wanted);
  int above = below + 1;
  while (above <= all && double(above) * below < wanted * wanted && all % above != 0) ++above;
  return above <= all && double(above) * below < wanted * wanted ? above : below;
}

// The bytes that blocks of keys of a head stream of so many queries, with the sums of dQ.
template <typename T, typename Params>
double streamed_bytes(Params const& p, int splits, int rows) {
  int const rows_of_heads = T::kByQueries ? rows : rows * (p.heads_q / p.heads_kv / splits);
  return double(rows_of_heads) * (2 * (p.dim_qk + p.dim_v) + (T::kSharesDq ? 4 * p.dim_qk : 0));
}

// Of packed sequences whose shares are queued: the more heads, the fewer blocks of a sequence begin it at once. By the
// longest sequence, beside which others are at work; causal ones, as above, within L2.
template <typename T, typename Params>
int packed_section_heads(Params const& p, int heads, int splits, int multiprocessors) {
  constexpr double kWaves = 4, kPackedBytes = 34e6;
  constexpr int kMostCausal = 8;  // where the warpgroups of the keys compute shares
  double wanted = kWaves * multiprocessors / divide_up(p.seqlen_k, T::kBlockRows);
  if (p.causal) {
    double const fitting = kPackedBytes / streamed_bytes<T>(p, splits, p.seqlen_q);
    if (fitting < wanted) wanted = fitting;
    if (T::kKeysDq && kMostCausal < wanted) wanted = kMostCausal;
  }
  return largest_divisor(heads, wanted);
}

// As many as divide all of them and whose streamed tensors, and sums of dQ, fit in L2 together; or, a head's row blocks
// in turn, one or as many as waves_side_by_side() has, of which causal ones visit all of those tensors at once. With a
// mask, the batch of each, which shares it. The twin of section_heads() in cost.py.
template <typename Config, typename T, bool kPacked, typename Params>
int section_heads(Params const& p, int heads, int splits, int multiprocessors) {
  int const sharing = T::kMasked ? p.batch : 1, all = heads / sharing;
  if (kPacked && T::kQueuedDq) return packed_section_heads<T>(p, heads, splits, multiprocessors);
  bool const in_turn = Config::kCtaOrder != CtaOrder::kLongestFirst;
  int const waves = in_turn ? waves_side_by_side<T>(p.causal) : 0;
  if (in_turn && waves == 0) return sharing;
  int const rows_k = rows_of_keys<kPacked>(p);
  int rows_q = rows_of_queries<kPacked>(p), blocks = divide_up(rows_k, T::kBlockRows);
  if constexpr (T::kOwnDq && T::kModified && kHasWindow<Params>) {
    int const seen = minimum(p.window_left, rows_k) + minimum(p.window_right, rows_k) + 1 + T::kBlockRows;
    blocks = minimum(blocks, divide_up(seen, T::kBlockRows));  // that share a tile of queries
    if (in_turn) rows_q = minimum(rows_q, seen);
  }
  constexpr double kSectionBytes = 24e6;
  double const bytes = streamed_bytes<T>(p, splits, T::kByQueries ? rows_k : rows_q) * sharing;
  int const fitting = maximum(1, int(kSectionBytes / bytes));
  if (in_turn) {
    double const wanted = double(waves) * multiprocessors / blocks;
    return nearest_divisor(all, p.causal && fitting < wanted ? double(fitting) : wanted);
  }
  return largest_divisor(all, fitting) * sharing;
}

// The tail of a list of claimed causal blocks, a head's in turn: heads that are side by side, their longest blocks
// first, as the last head alone would begin with its longest one while the other SMs run out of blocks. As many as
// stream tensors that fit in L2 (on an H200, 512 CTAs of 1024 tokens of d128: 0.90 of the time with 33 of 64
// heads, 1.08 with 50), and fewer than two are none. Short heads of a long list keep even, and lose 1 to 2 % by it. The
// twin of tail_heads() in cost.py.
template <typename T, bool kPacked, typename Params>
int tail_heads(Params const& p, int heads, int section, int blocks, int multiprocessors) {
  constexpr double kTailBytes = 36e6;
  constexpr int kShort = 16, kManyWaves = 12;
  if ((!p.causal && !kPacked) || section != 1) return 0;
  if (blocks <= kShort && int64_t(heads) * blocks > kManyWaves * int64_t(multiprocessors)) return 0;
  double const bytes = streamed_bytes<T>(p, p.heads_q / p.heads_kv, rows_of_queries<kPacked>(p));  // of a query head
  int const tail = int(minimum(double(heads), kTailBytes / bytes));
  return tail < 2 ? 0 : tail;
}

}  // namespace attention_autotuner

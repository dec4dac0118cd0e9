// How many CTAs of a pass over keys share a block of keys, each with some of the query heads of a group (a split
// reduction). It depends on the problem alone, and so do the workspace and the bits of a result.
#pragma once

#include <cstdint>

namespace attention_autotuner {

// The least number that is enough for a group, or as many as it has heads.
template <typename Enough>
int least_head_splits(int group, Enough enough) {
  int splits = 1;
  while (splits < group && !enough(splits)) ++splits;
  return splits;
}

inline int count_head_splits(int64_t ctas, int group, int64_t enough_ctas) {
  return least_head_splits(group, [=](int splits) { return group % splits == 0 && ctas * splits >= enough_ctas; });
}

// CTAs that are enough where a head's `blocks` of keys are as long as a causal mask leaves them: those of so many lists
// of blocks that a long one ends beside short ones. On an H200 that are 17 of 132 SMs: 1213 us against 1677 with 28/4
// heads of 4096 tokens in two sequences, 2453 against 2791 with 32/8 of 8192, a tie where lists are 32.
inline int64_t enough_uneven_ctas(int64_t blocks, int enough_ctas) {
  int64_t const of_lists = blocks * ((enough_ctas + 7) / 8);
  return of_lists > enough_ctas ? of_lists : enough_ctas;  // <algorithm> takes a tenth of the time to compile
}

// CTAs of causal blocks that take many heads drift apart, as their blocks are of unlike length, and stream all of these
// heads at once, of each so many bytes: with 64/8 heads of 8192 tokens and d128 that are 8.3 GB of DRAM traffic,
// and 1.1 in three parts. Finer parts pay by what is beyond L2, and cost sums of dK and dV, the more the fewer queries
// there are.
inline bool drifts(int splits, int finer, int group, int64_t queries, int64_t head_bytes) {
  constexpr int64_t kFitting = 50'000'000, kEnough = 400'000'000'000;
  return finer > splits && (group / splits * head_bytes - kFitting) * group * queries / finer >= kEnough;
}

// In a list with a tail, see TailedList, fewer are enough: nearly two CTAs an SM, of eight lists, or of four where a
// CTA has few heads. On an H200, 8192 tokens: 2470 us for 2731 with 32/8 heads, 1207 for 1406 with 16/2, each to those
// of 17 lists. Parts of two heads or more may differ by one. `head_bytes` is what the CTAs of all SMs stream of a head.
inline int count_tailed_head_splits(int64_t ctas, int64_t blocks, int group, int64_t queries, int64_t head_bytes,
                                    int filling_ctas) {
  int const splits = least_head_splits(group, [=](int splits) {
    int64_t const wanted = group / splits <= 4 ? 4 : 8;
    bool const allowed = group % splits == 0 || group / splits >= 2;
    return allowed && ctas * splits >= wanted * blocks && ctas * splits >= filling_ctas;
  });
  int const finer = (group + 2) / 3;
  return drifts(splits, finer, group, queries, head_bytes) ? finer : splits;
}

}  // namespace attention_autotuner

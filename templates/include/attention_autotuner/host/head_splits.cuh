// How many CTAs of a pass over keys share a block of keys, each with some of the query heads of a group (a split
// reduction). It depends on the problem alone, and so do the workspace and the bits of a result.
#pragma once

#include <cstdint>

namespace attention_autotuner {

// The least divisor of a group that is enough, or all of its heads.
template <typename Enough>
int least_head_splits(int group, Enough enough) {
  int splits = 1;
  while (splits < group && (group % splits != 0 || !enough(splits))) ++splits;
  return splits;
}

inline int count_head_splits(int64_t ctas, int group, int64_t enough_ctas) {
  return least_head_splits(group, [=](int splits) { return ctas * splits >= enough_ctas; });
}

// CTAs that are enough where a head's `blocks` of keys are as long as a causal mask leaves them: those of so many lists
// of blocks that a long one ends beside short ones. On an H200 that are 17 of 132 SMs: 1213 us against 1677 with 28/4
// heads of 4096 tokens in two sequences, 2453 against 2791 with 32/8 of 8192, a tie where lists are 32.
inline int64_t enough_uneven_ctas(int64_t blocks, int enough_ctas) {
  int64_t const of_lists = blocks * ((enough_ctas + 7) / 8);
  return of_lists > enough_ctas ? of_lists : enough_ctas;  // <algorithm> takes a tenth of the time to compile
}

// In a list with a tail, see TailedList, fewer are enough: nearly two CTAs an SM, of eight lists, or of four where a
// CTA has few heads, as those with many drift apart and share less of L2. On an H200, 8192 tokens: 2470 us for 2731
// with 32/8 heads, 1207 for 1406 with 16/2, each to those of 17 lists; 2586 for 2730 with 32/4 in eight lists to those
// in four.
inline int count_tailed_head_splits(int64_t lists, int64_t blocks, int group, int enough_ctas) {
  return least_head_splits(group, [=](int splits) {
    int64_t const wanted = group / splits <= 4 ? 4 : 8;
    return lists * splits >= wanted && 10 * lists * splits * blocks >= 19 * int64_t(enough_ctas);
  });
}

}  // namespace attention_autotuner

// How many CTAs of a pass over keys share a block of keys, each with some of the query heads of a group (a split
// reduction).
#pragma once

#include <cstdint>

namespace attention_autotuner {

// The least number of splits of a group that makes enough CTAs, or all of its heads. It depends on the problem alone,
// and so do the workspace and the bits of a result.
inline int count_head_splits(int64_t ctas, int group, int64_t enough_ctas) {
  int splits = 1;
  while (splits < group && (group % splits != 0 || ctas * splits < enough_ctas)) ++splits;
  return splits;
}

// CTAs that are enough where a head's `blocks` of keys are as long as a causal mask leaves them: those of so many lists
// of blocks that a long one ends beside short ones. On an H200 that are 17 of 132 SMs: 1213 us against 1677 with 28/4
// heads of 4096 tokens in two sequences, 2453 against 2791 with 32/8 of 8192, a tie where lists are 32.
inline int64_t enough_uneven_ctas(int64_t blocks, int enough_ctas) {
  int64_t const of_lists = blocks * ((enough_ctas + 7) / 8);
  return of_lists > enough_ctas ? of_lists : enough_ctas;  // <algorithm> takes a tenth of the time to compile
}

}  // namespace attention_autotuner

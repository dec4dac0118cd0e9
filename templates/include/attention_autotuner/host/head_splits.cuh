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

}  // namespace attention_autotuner

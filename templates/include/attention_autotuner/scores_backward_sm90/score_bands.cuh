// The bands of heads and batches whose scores retnet's backward in family sm90 stores at a time, where it does: dQ's
// pass fills one while dK's reads the other.
#pragma once

#include <cstdint>

#include "attention_autotuner/common/scalars.cuh"

namespace attention_autotuner {

// A band has as many heads and batches as give every SM a tile of dQ and of dK, and at least one K/V head of one batch.
// Of all batches of a head, if it has several heads: they share a mask.
template <typename Dq, typename Dk>
struct ScoreBands {
  int heads, batches;  // K/V heads and batches of a band
  int count;
  int loop_rows, columns;  // of a head's scores in one main loop
  int64_t bytes;           // of one band

  template <typename Params>
  ScoreBands(Params const& p, int splits, int enough_ctas) {
    int const group = p.heads_q / p.heads_kv;
    int const tiles =
        minimum(divide_up(p.seqlen_q, Dq::kBlockRows) * group, divide_up(p.seqlen_k, Dk::kBlockRows) * splits);
    int const wanted = maximum(1, enough_ctas / maximum(1, tiles));
    batches = even_share(p.batch, wanted);
    heads = batches == p.batch ? even_share(p.heads_kv, maximum(1, wanted / batches)) : 1;
    count = divide_up(p.heads_kv, heads) * divide_up(p.batch, batches);
    loop_rows = divide_up(p.seqlen_q, Dq::kBlockRows) * Dq::kBlockRows;
    columns = divide_up(p.seqlen_k, Dq::kBlockColumns) * Dq::kBlockColumns;
    int64_t const mainloops = p.r_grad ? 2 : 1;
    bytes = mainloops * heads * group * batches * loop_rows * columns * 2;
  }
  // The greatest of equal parts of `all` that have at most `most`.
  static int even_share(int all, int most) { return divide_up(all, divide_up(all, minimum(all, most))); }
  int64_t all_bytes() const { return bytes * minimum(count, 2); }
};

}  // namespace attention_autotuner

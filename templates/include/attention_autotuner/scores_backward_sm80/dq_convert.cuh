// dQ of a one-pass plan from the fp32 sums that its key passes added to.
#pragma once

#include "attention_autotuner/common/convert.cuh"
#include "attention_autotuner/common/preprocess.cuh"
#include "attention_autotuner/score/score_mod.cuh"
#include "attention_autotuner/scores_backward_sm80/dq_share.cuh"
#include "attention_autotuner/scores_backward_sm80/traits.cuh"

namespace attention_autotuner {

// dQ in 16 bits from the sums that key passes left in fragment order; one CTA a tile of block_m rows.
template <typename Config>
__global__ void __launch_bounds__(kRowThreads)
    backward_convert_dq(ArgumentsOf<Config> const __grid_constant__ arguments) {
  using T = KeyPassTraits<Config>;
  using Element = typename T::Element;
  auto const& p = arguments.params;
  int const index = int(blockIdx.x) / arguments.dq_tiles;
  int tile = int(blockIdx.x) % arguments.dq_tiles, rows = p.seqlen_q, first_row = 0;
  if constexpr (T::kPacked) {
    CuSeqlens const queries = CuSeqlens::of_queries(p);
    SequenceBlock const at = find_block<T::kBlockM>(queries, tile);
    if (!at.exists) return;
    tile = at.block;
    rows = queries.length(at.sequence);
    first_row = queries.begin(at.sequence);
  }
  int const head = index % p.heads_q, batch = index / p.heads_q;
  float const* const sums = arguments.dq_sum + int64_t(blockIdx.x) * (T::kBlockM * T::kPaddedDimQK);
  Element* const out = static_cast<Element*>(p.dq.data) + batch * p.dq.stride_batch + head * p.dq.stride_head;
  constexpr int kColumnTiles = T::kPaddedDimQK / 8;
  // A unit is one row of eight in a fragment tile, and the row eight below it.
#pragma unroll 2
  for (int unit = threadIdx.x; unit < T::kBlockM / 16 * kColumnTiles * 8; unit += kRowThreads) {
    int const in_tile = unit % 8, fragment = unit / 8;
    int const row = tile * T::kBlockM + fragment / kColumnTiles * 16 + in_tile, column = fragment % kColumnTiles * 8;
    float const* const source = sums + int64_t(fragment) * 128;
    float values[16];
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
      // Four floats that are neighbours in either order: all of a lane, or one of each of the row's four lanes.
      float4 const quad = *reinterpret_cast<float4 const*>(
          source + (adds_by_lane() ? 4 * (4 * in_tile + quarter) : 32 * quarter + 4 * in_tile));
      float const sums_of_row[4] = {quad.x, quad.y, quad.z, quad.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int const lane = adds_by_lane() ? quarter : i;
        int const element = adds_by_lane() ? i : quarter;
        values[element / 2 * 8 + 2 * lane + element % 2] = sums_of_row[i] * score_scale(p);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row + 8 * half < rows && column < p.dim_qk) {
        uint4 words;
        words.x = pack_pair<Element>(values[8 * half], values[8 * half + 1]);
        words.y = pack_pair<Element>(values[8 * half + 2], values[8 * half + 3]);
        words.z = pack_pair<Element>(values[8 * half + 4], values[8 * half + 5]);
        words.w = pack_pair<Element>(values[8 * half + 6], values[8 * half + 7]);
        *reinterpret_cast<uint4*>(out + int64_t(first_row + row + 8 * half) * p.dq.stride_row + column) = words;
      }
    }
  }
}

}  // namespace attention_autotuner

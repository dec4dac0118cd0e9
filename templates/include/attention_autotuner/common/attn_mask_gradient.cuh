// The gradient of a mask that is added to attention's scores, of either family: dS = P (dP - delta), summed over the
// axes along which the mask is broadcast.
//
// A kernel of its own computes S and dP again, and is launched only where the gradient is wanted. A CTA adds up all
// tiles of dS that one tile of the mask serves, element by element, in registers: of batch entries, of heads, and of
// blocks of queries or keys where the mask has one entry for all of them, whose elements it adds at its end. Where the
// mask has few tiles several CTAs share one, and a second kernel adds what they leave in the workspace. All sums are
// fp32 and taken in a fixed order: the result is the same bits every time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "attention_autotuner/common/convert.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/score_gradient.cuh"
#include "attention_autotuner/common/shared_memory.cuh"
#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/host/checks.cuh"
#include "attention_autotuner/host/entry.cuh"
#include "attention_autotuner/score/modifications.cuh"

namespace attention_autotuner {

inline constexpr int kMaskCtas = 512;  // that are enough

// The tiles of a launch's scores, and those of the mask.
struct AttnMaskGradientList {
  enum Axis { kBatch = 1, kHeads = 2, kQueries = 4, kKeys = 8 };  // see attn_mask_summed in abi.h
  int batch, heads, row_blocks, key_blocks;
  int summed;
  int splits;   // CTAs that share a tile of the mask
  float* sums;  // workspace, where those are several: [splits, elements of the mask]

  __host__ __device__ bool sums_over(Axis axis) const { return (summed & axis) != 0; }
  // Of the mask: its tiles, and the tiles of scores that each serves.
  __host__ __device__ int64_t tiles() const { return product(false); }
  __host__ __device__ int64_t addends() const { return product(true); }
  __host__ __device__ int64_t product(bool of_summed) const {
    int64_t result = 1;
    if (sums_over(kBatch) == of_summed) result *= batch;
    if (sums_over(kHeads) == of_summed) result *= heads;
    if (sums_over(kQueries) == of_summed) result *= row_blocks;
    if (sums_over(kKeys) == of_summed) result *= key_blocks;
    return result;
  }
};

// Elements of the mask.
template <typename Params>
__host__ __device__ inline int64_t attn_mask_elements(Params const& p) {
  using List = AttnMaskGradientList;
  auto along = [&p](int extent, List::Axis axis) { return int64_t(p.attn_mask_summed & axis ? 1 : extent); };
  return along(p.batch, List::kBatch) * along(p.heads_q, List::kHeads) * along(p.seqlen_q, List::kQueries) *
         along(p.seqlen_k, List::kKeys);
}

// Tile `addend` of those that tile `tile` of the mask serves.
__device__ __forceinline__ ScoreTilePlace place_of_tile(AttnMaskGradientList const& list, int tile, int addend) {
  using List = AttnMaskGradientList;
  auto along = [&](int extent, List::Axis axis) {
    int& index = list.sums_over(axis) ? addend : tile;
    int const here = index % extent;
    index /= extent;
    return here;
  };
  ScoreTilePlace place;
  place.key = along(list.key_blocks, List::kKeys) * kScoreTile;
  place.row = along(list.row_blocks, List::kQueries) * kScoreTile;
  place.head = along(list.heads, List::kHeads);
  place.batch = along(list.batch, List::kBatch);
  return place;
}

// Calls a function with a null pointer to the type of what a mask adds.
template <typename Function>
__device__ __forceinline__ void with_mask_type(int kind, Function&& function) {
  if (kind == 1) {
    function(static_cast<float*>(nullptr));
  } else if (kind == 2) {
    function(static_cast<__half*>(nullptr));
  } else {
    function(static_cast<__nv_bfloat16*>(nullptr));
  }
}

template <typename Config>
struct AttnMaskGradientTile : ScoreGradientTile<Config> {
  using Base = ScoreGradientTile<Config>;
  using Arguments = typename Base::Arguments;
  using List = AttnMaskGradientList;
  using Base::smem;
  using Base::sum;
  using Base::tile_column;
  using Base::tile_row;
  using Base::warp_column;
  using Base::warp_row;
  static constexpr int kSmemBytes = maximum(Base::kSmemBytes, 4 * kScoreTile * int(sizeof(float)));

  // The arguments of a batch entry.
  __device__ __forceinline__ static decltype(auto) of_entry(Arguments const& arguments, int batch) {
    if constexpr (kIsSpanned<Config>) {
      Arguments shown = arguments;
      shown.params.row_spans += int64_t(batch) * arguments.params.seqlen_q;
      return shown;
    } else {
      return (arguments);
    }
  }
  // Whether any query of a tile sees any of its keys.
  __device__ __forceinline__ static bool is_visible(Arguments const& all, ScoreTilePlace const& place) {
    auto const& arguments = of_entry(all, place.batch);
    int const last = minimum(place.row + kScoreTile, int(arguments.params.seqlen_q)) - 1;
    return place.key < arguments.visible_keys(last) && place.key + kScoreTile > arguments.first_key(place.row);
  }
  // Adds the tiles of scores from `addend` on, every `step`th, that a tile of the mask serves and that see anything.
  __device__ __forceinline__ void add(Arguments const& arguments, List const& list, int tile, int addend, int step) {
    int const end = int(list.addends());
    ScoreTilePlace here, next;
    auto find = [&](ScoreTilePlace& place) {
      for (; addend < end; addend += step) {
        place = place_of_tile(list, tile, addend);
        if (is_visible(arguments, place)) break;
      }
      return addend < end;
    };
    bool more = find(here);
    if (more) this->begin(arguments, here);
    while (more) {
      addend += step;
      more = find(next);
      this->add_tile(of_entry(arguments, here.batch), here, more, next);
      here = next;
    }
  }
  // Adds the tile's rows: their sums are those of its first row.
  __device__ __forceinline__ void add_rows() {
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float total = sum[0][j][e] + sum[0][j][2 + e] + sum[1][j][e] + sum[1][j][2 + e];
#pragma unroll
        for (int other = 4; other < 32; other *= 2) total += __shfl_xor_sync(0xffffffffu, total, other);
        int const place = warp_row() / 32 * kScoreTile + tile_column(j) + e;
        if (lane_here() < 4) store_shared(smem + 4 * place, __float_as_uint(total));
      }
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) total += load_shared_float(smem + 4 * (i * kScoreTile + tile_column(j) + e));
        sum[0][j][e] = total;
      }
    }
  }
  // Adds the tile's columns: their sums are those of its first column.
  __device__ __forceinline__ void add_columns() {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float total = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; ++j) total += sum[i][j][2 * half] + sum[i][j][2 * half + 1];
        total += __shfl_xor_sync(0xffffffffu, total, 1);
        total += __shfl_xor_sync(0xffffffffu, total, 2);
        int const place = warp_column() / 64 * kScoreTile + tile_row(i, half);
        if ((lane_here() & 3) == 0) store_shared(smem + 4 * place, __float_as_uint(total));
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t const first = smem + 4 * tile_row(i, half);
        sum[i][0][2 * half] = load_shared_float(first) + load_shared_float(first + 4 * kScoreTile);
      }
    }
  }
  // Stores the sums of a tile of the mask, of which `place` is the first one of scores.
  template <typename Value>
  __device__ __forceinline__ void store(Value* result, Arguments const& arguments, List const& list,
                                        ScoreTilePlace const& place) const {
    auto const& p = arguments.params;
    bool const one_row = list.sums_over(List::kQueries), one_column = list.sums_over(List::kKeys);
    int const rows = one_row ? 1 : p.seqlen_q, columns = one_column ? 1 : p.seqlen_k;
    int const heads = list.sums_over(List::kHeads) ? 1 : p.heads_q;
    bool const in_pairs = columns % 2 == 0 && reinterpret_cast<uintptr_t>(result) % (2 * sizeof(Value)) == 0;
    result += (int64_t(place.batch) * heads + place.head) * rows * columns;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int const row = place.row + tile_row(i, half);
        if (row >= rows) continue;
        Value* const line = result + int64_t(row) * columns;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          int const column = place.key + tile_column(j);
          float const first = sum[i][j][2 * half], second = sum[i][j][2 * half + 1];
          if (in_pairs) {
            if (column < columns) store_pair(line + column, first, second);
          } else {
            if (column < columns) line[column] = Value(first);
            if (column + 1 < columns) line[column + 1] = Value(second);
          }
        }
      }
    }
  }
  __device__ __forceinline__ static void store_pair(float* place, float first, float second) {
    *reinterpret_cast<float2*>(place) = make_float2(first, second);
  }
  template <typename Value>
  __device__ __forceinline__ static void store_pair(Value* place, float first, float second) {
    *reinterpret_cast<uint32_t*>(place) = pack_pair<Value>(first, second);
  }
};

template <typename Config>
__global__ void __launch_bounds__(kScoreThreads)
    backward_attn_mask_sums(ArgumentsOf<Config> const __grid_constant__ arguments,
                            AttnMaskGradientList const __grid_constant__ list) {
  using List = AttnMaskGradientList;
  extern __shared__ __align__(128) char smem_bytes[];
  int const tile = block_index() / list.splits, split = block_index() % list.splits;
  AttnMaskGradientTile<Config> warp{{shared_address(smem_bytes), 0}};
  clear(warp.sum);
  warp.add(arguments, list, tile, split, list.splits);
  if (list.sums_over(List::kQueries)) warp.add_rows();
  if (list.sums_over(List::kKeys)) warp.add_columns();
  auto const& p = arguments.params;
  ScoreTilePlace const place = place_of_tile(list, tile, 0);
  if (list.splits > 1) {
    warp.store(list.sums + split * attn_mask_elements(p), arguments, list, place);
  } else {
    with_mask_type(p.attn_mask_kind,
                   [&](auto* type) { warp.store(static_cast<decltype(type)>(p.dattn_mask), arguments, list, place); });
  }
}

// Adds what the CTAs of a tile have left.
template <typename Config>
__global__ void __launch_bounds__(kScoreThreads)
    backward_attn_mask_gradient(ArgumentsOf<Config> const __grid_constant__ arguments,
                                AttnMaskGradientList const __grid_constant__ list) {
  auto const& p = arguments.params;
  int64_t const elements = attn_mask_elements(p), place = int64_t(block_index()) * kScoreThreads + thread_index();
  if (place >= elements) return;
  float total = 0.0f;
#pragma unroll 4
  for (int split = 0; split < list.splits; ++split) total += list.sums[split * elements + place];
  with_mask_type(p.attn_mask_kind, [&](auto* type) {
    using Value = std::remove_pointer_t<decltype(type)>;
    static_cast<Value*>(p.dattn_mask)[place] = Value(total);
  });
}

// The host side, which does nothing for configs without a mask and where no gradient is wanted.
template <typename Config>
struct AttnMaskGradient {
  using Arguments = ArgumentsOf<Config>;
  using Params = typename AbiParams<BackwardParamsOf<Config>>::Type;
  static constexpr bool kHas = kHasAttnMask<Config>;
  static_assert(!kHas || !kIsPacked<Config>, "packed sequences take no mask");

  static int32_t prepare([[maybe_unused]] int32_t device) {
    if constexpr (kHas) {
      int resident = 0;
      constexpr int kSmemBytes = AttnMaskGradientTile<Config>::kSmemBytes;
      int32_t const status =
          prepare_kernel(backward_attn_mask_sums<Config>, kScoreThreads, kSmemBytes, device, &resident);
      if (status != ATTENTION_AUTOTUNER_OK) return status;
      return prepare_kernel(backward_attn_mask_gradient<Config>, kScoreThreads, 0, device, &resident);
    }
    return ATTENTION_AUTOTUNER_OK;
  }
  static AttnMaskGradientList list_of(Params const& p, float* sums) {
    AttnMaskGradientList list{};
    if constexpr (kHas) {
      list = {
          p.batch, p.heads_q, divide_up(p.seqlen_q, kScoreTile), divide_up(p.seqlen_k, kScoreTile), p.attn_mask_summed,
          1,       sums};
      int64_t const enough = (kMaskCtas + list.tiles() - 1) / list.tiles();
      list.splits = int(enough < list.addends() ? enough : list.addends());
    }
    return list;
  }
  static bool wanted([[maybe_unused]] Params const& p) {
    if constexpr (kHas) return p.dattn_mask != nullptr;
    return false;
  }
  static int64_t workspace_bytes(Params const& p) {
    if constexpr (kHas) {
      int const splits = list_of(p, nullptr).splits;
      if (wanted(p) && splits > 1) return splits * attn_mask_elements(p) * int64_t(sizeof(float));
    }
    return 0;
  }
  // After the preprocess.
  static int32_t launch([[maybe_unused]] Arguments const& arguments, [[maybe_unused]] float* sums,
                        [[maybe_unused]] cudaStream_t stream) {
    if constexpr (kHas) {
      Params const& p = arguments.params;
      if (!wanted(p)) return ATTENTION_AUTOTUNER_OK;
      AttnMaskGradientList const list = list_of(p, sums);
      int64_t const ctas = list.tiles() * list.splits,
                    adding = (attn_mask_elements(p) + kScoreThreads - 1) / kScoreThreads;
      bool const added = p.attn_mask_kind != 0 && p.attn_mask_summed >= 0 && p.attn_mask_summed < 16;
      if (!added || ctas > INT32_MAX || list.addends() > INT32_MAX || adding > INT32_MAX) {
        return ATTENTION_AUTOTUNER_BAD_SHAPE;
      }
      backward_attn_mask_sums<Config>
          <<<int(ctas), kScoreThreads, AttnMaskGradientTile<Config>::kSmemBytes, stream>>>(arguments, list);
      if (list.splits > 1) {
        backward_attn_mask_gradient<Config><<<int(adding), kScoreThreads, 0, stream>>>(arguments, list);
      }
      return cuda_status(cudaGetLastError());
    }
    return ATTENTION_AUTOTUNER_OK;
  }
};

}  // namespace attention_autotuner

// The tiles of an explicit mask that travel beside the streamed tiles of a pass.
#pragma once

#include "attention_autotuner/common/tensors.cuh"
#include "attention_autotuner/common/threads.cuh"
#include "attention_autotuner/score/score_mod.cuh"
#include "attention_autotuner/sm80/mask_tile.cuh"

namespace attention_autotuner {

// The tiles of an explicit mask beside the streamed ones. Other score modifications have none.
template <ScoreMod kScoreMod, typename T>
struct MaskStream {
  template <typename Arguments>
  __device__ __forceinline__ void seek(Arguments const&, uint32_t, int, int, int) {}
  template <typename Arguments>
  __device__ __forceinline__ void start(Arguments const&, bool, int) const {}
  template <typename Arguments>
  __device__ __forceinline__ void copy_part(Arguments const&, bool, int, int, int) const {}
};

// Tiles of the mask beside those of a pass with traits T.
template <typename T>
struct MaskStream<ScoreMod::kMasked, T> {
  using Element = typename T::Element;
  static constexpr int kRows = T::kByQueries ? T::kBlockRows : T::kBlockColumns;  // queries
  static constexpr int kColumns = T::kByQueries ? T::kBlockColumns : T::kBlockRows;
  using Copy = MaskCopy<kRows, kColumns, T::kThreads, T::kCopyBytes, false>;

  Element const* source;  // this thread's first chunk
  uint32_t target;
  int rows, columns;  // of the mask, from the tile's first on

  template <typename Arguments>
  __device__ __forceinline__ void seek(Arguments const& arguments, uint32_t smem, int head, int query, int key) {
    auto const& p = arguments.params;
    int const thread = thread_index();
    source = head_data<Element>(p.mask, 0, head) + int64_t(query + Copy::row(thread)) * p.mask.stride_row + key +
             Copy::column(thread);
    target = smem + T::kMaskOffset + Copy::offset(thread);
    rows = p.seqlen_q - query;
    columns = p.seqlen_k - key;
  }
  __device__ __forceinline__ bool is_exact() const {
    return T::kCopyBytes == 16 && rows >= kRows && columns >= kColumns;
  }
  template <typename Arguments>
  __device__ __forceinline__ void start(Arguments const& arguments, bool wanted, int slot) const {
    if (!wanted || is_exact()) return;
    Copy::copy(target + slot * T::TileM::kBytes, source, arguments.params.mask.stride_row, rows, columns);
  }
  template <typename Arguments>
  __device__ __forceinline__ void copy_part(Arguments const& arguments, bool wanted, int slot, int part,
                                            int num_parts) const {
    if constexpr (T::kCopyBytes == 16) {
      Copy::copy_part(wanted && is_exact(), target + slot * T::TileM::kBytes, source, arguments.params.mask.stride_row,
                      part, num_parts);
    }
  }
};

}  // namespace attention_autotuner

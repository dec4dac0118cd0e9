// The launches that the host sides of retention share: of a pass over chunks, of states at the starts of super-chunks,
// of scores.
#pragma once

#include "attention_autotuner/abi.h"
#include "attention_autotuner/chunks_sm80/mainloop.cuh"
#include "attention_autotuner/chunks_sm80/scores.cuh"
#include "attention_autotuner/common/chunk_sequences.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/scheduler.cuh"
#include "attention_autotuner/common/states.cuh"
#include "attention_autotuner/host/entry.cuh"
#include "attention_autotuner/host/super_chunks.cuh"

namespace attention_autotuner {

template <typename T, bool StatesOnly>
inline int32_t prepare_chunks(int32_t device) {
  int resident = 0;
  return prepare_kernel(retention_chunks<T, StatesOnly>, T::kThreads, T::kSmemBytes, device, &resident);
}

template <bool Reversed, bool Packed>
inline int32_t prepare_scan(int32_t device) {
  int resident = 0;
  if constexpr (Packed) {
    return prepare_kernel(retention_scan_packed<Reversed>, kStateThreads, 0, device, &resident);
  } else {
    return prepare_kernel(retention_scan<Reversed>, kStateThreads, 0, device, &resident);
  }
}

template <typename T, bool StatesOnly>
inline int32_t launch_chunks(typename T::Arguments arguments, int dim_qk, int dim_v, int batch, cudaStream_t stream) {
  arguments.depth = T::kTransposed ? dim_v : dim_qk;
  arguments.columns = T::kTransposed ? dim_qk : dim_v;
  int64_t const ctas = int64_t(batch) * arguments.heads.divisor * arguments.supers.divisor * T::kSlices;
  if (ctas > INT32_MAX) return ATTENTION_AUTOTUNER_BAD_SHAPE;
  retention_chunks<T, StatesOnly><<<int(ctas), T::kThreads, T::kSmemBytes, stream>>>(arguments);
  return cuda_status(cudaGetLastError());
}

// States of super-chunks into `states`, [batch, heads, cut.slots, dim_qk, dim_v], by a pass over Y and Z and a scan:
// before each piece in the pass's order of time. What the last super-chunk adds is left out where no `last`
// state is wanted.
template <typename Config, typename T>
inline int32_t launch_states(ChunkArguments arguments, SuperChunks const& cut, float* states, float const* first,
                             float* last, int dim_qk, int dim_v, int batch, cudaStream_t stream) {
  int const left_out = last != nullptr ? 0 : T::kReversed ? cut.pieces : cut.slots - (cut.supers - 1) * cut.pieces;
  arguments.super_chunk = cut.super_chunk / cut.pieces;
  arguments.super_offset = T::kReversed ? left_out : 0;
  arguments.first_states = nullptr;
  arguments.last_states = states;
  arguments.last_slots = cut.slots;
  if (left_out < cut.slots) {
    arguments.supers = Divider::by(cut.slots - left_out);
    int32_t const status = launch_chunks<StatesTraits<Config, T>, true>(arguments, dim_qk, dim_v, batch, stream);
    if (status != ATTENTION_AUTOTUNER_OK) return status;
  }
  int const elements = dim_qk * dim_v, heads = arguments.heads.divisor;
  dim3 const grid(divide_up(elements, kStateThreads), batch * heads);
  retention_scan<T::kReversed><<<grid, kStateThreads, 0, stream>>>(states, first, last, arguments.log2_gamma, heads,
                                                                   cut.slots, left_out, elements, arguments.super_chunk,
                                                                   arguments.seqlen);
  return cuda_status(cudaGetLastError());
}

// The same of packed sequences, into [heads, cut.slots, dim_qk, dim_v].
template <typename Config, typename T>
inline int32_t launch_states(PackedChunkArguments arguments, SuperChunks const& cut, float* states, float const* first,
                             float* last, int dim_qk, int dim_v, int, cudaStream_t stream) {
  arguments.first_states = nullptr;
  arguments.last_states = states;
  arguments.last_slots = cut.slots;
  arguments.sums_last = last != nullptr;
  int32_t const status = launch_chunks<StatesTraits<Config, T>, true>(arguments, dim_qk, dim_v, 1, stream);
  if (status != ATTENTION_AUTOTUNER_OK) return status;
  PackedSuperChunks const& packed = arguments.packed;
  int const elements = dim_qk * dim_v, heads = arguments.heads.divisor;
  dim3 const grid(divide_up(elements, kStateThreads), packed.sequences.sequences * heads);
  retention_scan_packed<T::kReversed><<<grid, kStateThreads, 0, stream>>>(states, first, last, arguments.log2_gamma,
                                                                          heads, cut.slots, elements, packed);
  return cuda_status(cudaGetLastError());
}

// Elements of the scores of all chunks.
inline int64_t score_elements(int64_t sequences, SuperChunks const& cut, int chunk) {
  return sequences * cut.chunks * chunk * chunk;
}

template <typename T, typename Chunks>
inline int32_t launch_scores(attention_autotuner_tensor const& a, attention_autotuner_tensor const& b, int depth,
                             Chunks const& arguments, void* scores, int batch, cudaStream_t stream) {
  int64_t const ctas = int64_t(batch) * arguments.heads.divisor * arguments.chunks;
  if (ctas > INT32_MAX) return ATTENTION_AUTOTUNER_BAD_SHAPE;
  typename T::Arguments mine{};
  static_cast<ScoresArguments&>(mine) = {a,
                                         b,
                                         scores,
                                         arguments.log2_gamma,
                                         arguments.seqlen,
                                         depth,
                                         arguments.scale,
                                         Divider::by(arguments.chunks),
                                         arguments.heads,
                                         arguments.group};
  if constexpr (T::kPacked) mine.sequences = arguments.packed.sequences;
  retention_scores<T><<<int(ctas), T::kThreads, T::kSmemBytes, stream>>>(mine);
  return cuda_status(cudaGetLastError());
}

}  // namespace attention_autotuner

// What the host sides of retention's artifacts share: checks, the launch of a pass over chunks, states of super-chunks.
#pragma once

#include "attention_autotuner/host/retention_checks.cuh"
#include "attention_autotuner/chunks_sm80/mainloop.cuh"
#include "attention_autotuner/chunks_sm80/scores.cuh"
#include "attention_autotuner/common/states.cuh"

namespace attention_autotuner {

// States of super-chunks are computed in up to kMaxPieces pieces each, as long as that makes no more CTAs than
// kEnoughPieces: GPUs of today hold one each for that many at once.
inline constexpr int kMaxPieces = 4;
inline constexpr int64_t kEnoughPieces = 128;

// How a sequence is cut, and the pieces that states of super-chunks are computed in.
struct SuperChunks {
  int chunks, super_chunk, supers;  // of the sequence; tokens; of the sequence
  int pieces;                       // of a super-chunk
  int slots;                        // pieces of the sequence

  // `wanted` tokens, or 0 for the whole sequence; `ctas` work on each super-chunk.
  SuperChunks(int seqlen, int chunk, int wanted, int64_t ctas) : pieces(1) {
    chunks = divide_up(seqlen, chunk);
    super_chunk = wanted == 0 || wanted >= seqlen ? chunks * chunk : wanted;
    supers = divide_up(seqlen, super_chunk);
    while (pieces < kMaxPieces && super_chunk % (2 * pieces * chunk) == 0 &&
           2 * ctas * (supers - 1) * pieces <= kEnoughPieces) {
      pieces *= 2;
    }
    if (supers == 1) pieces = 1;
    slots = divide_up(seqlen, super_chunk / pieces);
  }
};

// Hands out parts of a workspace, each at a multiple of 256 bytes; counts only where there is none yet.
class WorkspaceParts {
 public:
  explicit WorkspaceParts(void* base) : base_(static_cast<char*>(base)) {}
  // A part of `count` elements of `bytes` each, or null where it is not wanted.
  template <typename Type>
  Type* take(bool wanted, int64_t count) {
    if (!wanted) return nullptr;
    Type* const part = reinterpret_cast<Type*>(base_ + used_);
    used_ += (count * int64_t(sizeof(Type)) + 255) / 256 * 256;
    return part;
  }
  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

// The first status that is not ok.
class Steps {
 public:
  template <typename Step>
  Steps& then(Step&& step) {
    if (status_ == ATTENTION_AUTOTUNER_OK) status_ = step();
    return *this;
  }
  int32_t status() const { return status_; }

 private:
  int32_t status_ = ATTENTION_AUTOTUNER_OK;
};

template <typename T, bool StatesOnly>
inline int32_t prepare_chunks(int32_t device) {
  int resident = 0;
  return prepare_kernel(retention_chunks<T, StatesOnly>, T::kThreads, T::kSmemBytes, device, &resident);
}

// What the arguments of all passes of one call have in common.
template <typename Params>
inline ChunkArguments common_arguments(Params const& p, SuperChunks const& cut) {
  ChunkArguments arguments{};
  arguments.log2_gamma = p.log2_gamma;
  arguments.first_slots = arguments.last_slots = 1;
  arguments.pieces = cut.pieces;
  arguments.seqlen = p.seqlen;
  arguments.super_chunk = cut.super_chunk;
  arguments.chunks = cut.chunks;
  arguments.scale = p.scale;
  arguments.supers = Divider::by(cut.supers);
  arguments.heads = Divider::by(p.heads_q);
  arguments.group = Divider::by(p.heads_q / p.heads_kv);
  return arguments;
}

template <typename T, bool StatesOnly>
inline int32_t launch_chunks(ChunkArguments arguments, int dim_qk, int dim_v, int batch, cudaStream_t stream) {
  arguments.depth = T::kTransposed ? dim_v : dim_qk;
  arguments.columns = T::kTransposed ? dim_qk : dim_v;
  int64_t const ctas = int64_t(batch) * arguments.heads.divisor * arguments.supers.divisor * T::kSlices;
  if (ctas > INT32_MAX) return ATTENTION_AUTOTUNER_BAD_SHAPE;
  retention_chunks<T, StatesOnly><<<int(ctas), T::kThreads, T::kSmemBytes, stream>>>(arguments);
  return cuda_status(cudaGetLastError());
}

// States of super-chunks into `states`, [batch, heads, cut.slots, dim_qk, dim_v], by a pass over Y and Z and a scan:
// before each piece in the order of time that is walked. What the last super-chunk adds is left out where no `last`
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

// Elements of the scores of all chunks.
inline int64_t score_elements(int64_t sequences, SuperChunks const& cut, int chunk) {
  return sequences * cut.chunks * chunk * chunk;
}

template <typename T>
inline int32_t launch_scores(attention_autotuner_tensor const& a, attention_autotuner_tensor const& b, int depth,
                             ChunkArguments const& arguments, void* scores, int batch, cudaStream_t stream) {
  int64_t const ctas = int64_t(batch) * arguments.heads.divisor * arguments.chunks;
  if (ctas > INT32_MAX) return ATTENTION_AUTOTUNER_BAD_SHAPE;
  ScoresArguments const mine{a,
                             b,
                             scores,
                             arguments.log2_gamma,
                             arguments.seqlen,
                             depth,
                             arguments.scale,
                             Divider::by(arguments.chunks),
                             arguments.heads,
                             arguments.group};
  retention_scores<T><<<int(ctas), T::kThreads, T::kSmemBytes, stream>>>(mine);
  return cuda_status(cudaGetLastError());
}

}  // namespace attention_autotuner

// How retention cuts a sequence for its passes over chunks, in either family.
#pragma once

#include "attention_autotuner/common/chunk_sequences.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/scheduler.cuh"
#include "attention_autotuner/host/retention_checks.cuh"

namespace attention_autotuner {

// States of super-chunks are computed in up to kMaxPieces pieces each, as long as that makes no more CTAs than
// kEnoughPieces: GPUs of today hold one each for that many at once.
inline constexpr int kMaxPieces = 4;
inline constexpr int64_t kEnoughPieces = 128;

inline constexpr int kWholeSequence = 1 << 30;  // tokens, a multiple of every chunk

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

  // Whether sequences have more than one, as far as one knows.
  bool divided() const { return supers > 1 && super_chunk < kWholeSequence; }
};

// Of packed sequences, whose lengths are not known: chunks and super-chunks are counted over all of them, with those
// that are nobody's.
template <typename Params>
inline SuperChunks packed_super_chunks(Params const& p, int chunk, int super_chunk) {
  SuperChunks cut(1, chunk, 0, 0);
  cut.chunks = count_blocks(p.total, p.batch, chunk);
  cut.super_chunk = super_chunk;
  cut.supers = cut.slots = count_blocks(p.total, p.batch, super_chunk);
  return cut;
}

// Tokens of a super-chunk where `wanted` are asked for, 0 for all: no sequence is cut if none is thought to be longer.
template <typename Params>
inline int packed_super_chunk(Params const& p, int wanted) {
  return wanted == 0 || wanted >= minimum(p.seqlen, p.total) ? kWholeSequence : wanted;
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
template <typename Params>
inline auto pass_arguments(Params const& p, SuperChunks const& cut) {
  if constexpr (kHasSequences<Params>) {
    PackedChunkArguments arguments{common_arguments(p, cut)};
    arguments.seqlen = p.total;
    arguments.packed = {{p.cu_seqlens, p.batch, p.total}, Divider::by(cut.super_chunk)};
    return arguments;
  } else {
    return common_arguments(p, cut);
  }
}

}  // namespace attention_autotuner

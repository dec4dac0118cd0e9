// The arguments of a launch of a pass over chunks of retention, in either family.
#pragma once

#include "attention_autotuner/abi.h"
#include "attention_autotuner/common/scheduler.cuh"

namespace attention_autotuner {

// A super-chunk is what one CTA loops over; states are [dim_qk, dim_v].
struct ChunkArguments {
  attention_autotuner_tensor x, y, z;
  attention_autotuner_tensor out;
  float* partial;      // [batch, heads, seqlen, columns]: where the result goes instead, in fp32; or null
  void const* scores;  // [batch, heads, chunks, chunk, chunk], where precomputed
  float const* log2_gamma;
  float const* first_states;  // before the pass's first chunk; or null for zeros
  float* last_states;         // after the last one, or null
  // States of one (batch, head) are this many apart: 1, or the slots of super-chunks, `pieces` to each.
  int first_slots, last_slots, pieces;
  int super_offset;         // of the pass's first super-chunk
  int seqlen, super_chunk;  // tokens
  int chunks;               // of the sequence
  int depth, columns;       // true dims
  float scale;
  Divider supers, heads, group;
};

}  // namespace attention_autotuner

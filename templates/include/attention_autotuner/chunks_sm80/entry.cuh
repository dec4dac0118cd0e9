// Host side of a chunkwise retention artifact: workspace, checks, preparation and launches.
//
// One pass over chunks, and before it, where a sequence is cut into super-chunks, the states at their starts; where
// scores are precomputed, a kernel that computes them.
#pragma once

#include "attention_autotuner/chunks_sm80/launch.cuh"
#include "attention_autotuner/common/chunk_sequences.cuh"
#include "attention_autotuner/host/entry.cuh"
#include "attention_autotuner/host/retention_checks.cuh"
#include "attention_autotuner/host/super_chunks.cuh"
#include "attention_autotuner/host/workspace.cuh"

namespace attention_autotuner {

template <typename Config>
struct ChunksEntry {
  static constexpr bool kPacked = kIsPacked<Config>;
  using Params = std::conditional_t<kPacked, PackedRetentionForwardParams, RetentionForwardParams>;
  using T = ChunkTraits<Config, typename Config::Output, ChunkResult::kOutput>;
  using Scores = ScoresTraits<Config, Config::kPaddedDimQK>;
  static_assert(Config::kSuperChunk % Config::kChunk == 0, "super_chunk_multiple_of_chunk");
  static inline std::atomic<bool> prepared[kMaxDevices];

  static int32_t prepare(int32_t device) {
    if (prepared[device].load()) return ATTENTION_AUTOTUNER_OK;
    int resident = 0;
    int32_t status = prepare_chunks<T, false>(device);
    if constexpr (Config::kSuperChunk != 0) {
      if (status == ATTENTION_AUTOTUNER_OK) status = prepare_chunks<StatesTraits<Config, T>, true>(device);
    }
    if constexpr (T::kPrecomputed) {
      if (status == ATTENTION_AUTOTUNER_OK) {
        status = prepare_kernel(retention_scores<Scores>, Scores::kThreads, Scores::kSmemBytes, device, &resident);
      }
    }
    if (status == ATTENTION_AUTOTUNER_OK) {
      status = prepare_scan<false, kPacked>(device);
    }
    if (status == ATTENTION_AUTOTUNER_OK) prepared[device].store(true);
    return status;
  }

  static SuperChunks cut_of(Params const& p) {
    if constexpr (kPacked) {
      return packed_super_chunks(p, T::kChunk, packed_super_chunk(p, Config::kSuperChunk));
    } else {
      return {p.seqlen, T::kChunk, Config::kSuperChunk, int64_t(p.batch) * p.heads_q * T::kSlices};
    }
  }
  struct Workspace {
    SuperChunks cut;
    float* states;
    typename T::Element* scores;
    int64_t bytes;

    Workspace(Params const& p, void* base) : cut(cut_of(p)) {
      WorkspaceLayout layout(base);
      int64_t const sequences = int64_t(batch_of_rows(p)) * p.heads_q;
      states = layout.take<float>(cut.divided(), sequences * cut.slots * p.dim_qk * p.dim_v);
      scores = layout.take<typename T::Element>(T::kPrecomputed, score_elements(sequences, cut, T::kChunk));
      bytes = layout.used();
    }
  };

  static size_t workspace_bytes(Params const& p) {
    return check_shape(p) == ATTENTION_AUTOTUNER_OK ? size_t(Workspace(p, nullptr).bytes) : 0;
  }
  static int32_t check_shape(Params const& p) {
    return check_retention_shape(p, Config::kPaddedDimQK, Config::kPaddedDimV);
  }

  static int32_t launch(Params const& p, void* workspace, cudaStream_t stream, int32_t device) {
    int32_t status = check_shape(p);
    if (status != ATTENTION_AUTOTUNER_OK) return status;
    Workspace const places(p, workspace);
    status = check_retention_forward_launch(p, Config::kCopyBytes, workspace, places.bytes,
                                            prepared[device].load(std::memory_order_relaxed));
    if (status != ATTENTION_AUTOTUNER_OK) return status;
    auto arguments = pass_arguments(p, places.cut);
    int const batch = batch_of_rows(p);
    arguments.x = p.q;
    arguments.y = p.k;
    arguments.z = p.v;
    arguments.out = p.o;
    arguments.scores = places.scores;
    arguments.first_states = p.initial_state;
    arguments.last_states = p.final_state;
    Steps steps;
    if constexpr (T::kPrecomputed) {
      steps.then([&] { return launch_scores<Scores>(p.q, p.k, p.dim_qk, arguments, places.scores, batch, stream); });
    }
    if constexpr (Config::kSuperChunk != 0) {
      if (places.cut.divided()) {
        steps.then([&] {
          return launch_states<Config, T>(arguments, places.cut, places.states, p.initial_state, p.final_state,
                                          p.dim_qk, p.dim_v, batch, stream);
        });
        arguments.first_states = places.states;
        arguments.first_slots = places.cut.slots;
        arguments.last_states = nullptr;
      }
    }
    return steps.then([&] { return launch_chunks<T, false>(arguments, p.dim_qk, p.dim_v, batch, stream); }).status();
  }

  static attention_autotuner_kernel_info info() {
    return kernel_info<Config, Params>(T::kChunk, T::kColumns, T::kThreads, T::kSmemBytes);
  }
};

}  // namespace attention_autotuner

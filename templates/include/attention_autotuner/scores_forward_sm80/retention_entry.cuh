// Host side of a parallel retention artifact: attention's forward kernel with the decay as score modification, and,
// where there are states, what the initial one adds to the output, and a pass over chunks for the final one.
#pragma once

#include <limits>

#include "attention_autotuner/chunks_sm80/from_state.cuh"
#include "attention_autotuner/chunks_sm80/launch.cuh"
#include "attention_autotuner/common/chunk_arguments.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/host/entry.cuh"
#include "attention_autotuner/host/retention_checks.cuh"
#include "attention_autotuner/host/super_chunks.cuh"
#include "attention_autotuner/host/workspace.cuh"
#include "attention_autotuner/scores_forward_sm80/retnet_entry.cuh"

namespace attention_autotuner {

template <typename Config>
struct ParallelEntry {
  using Params = RetentionForwardParams;
  using Rows = RetNetForwardEntry<Config>;
  using T = ChunkTraits<Config, typename Config::States, ChunkResult::kOutput>;
  // Tokens of a CTA in the pass for the final state, and in the kernel that adds the initial state's contribution.
  static constexpr int kSuperChunk = 512;
  static_assert(kSuperChunk % Config::kChunk == 0, "super_chunk_multiple_of_chunk");
  static_assert(!kIsPacked<Config>, "parallel_form_packs_nothing");
  static inline std::atomic<bool> prepared[kMaxDevices];

  static int32_t prepare(int32_t device) {
    if (prepared[device].load()) return ATTENTION_AUTOTUNER_OK;
    int resident = 0;
    Steps steps;
    steps.then([&] { return Rows::prepare(device); })
        .then([&] { return prepare_chunks<StatesTraits<Config, T>, true>(device); })
        .then([&] { return prepare_kernel(retention_from_state<T>, T::kThreads, T::kSmemBytes, device, &resident); })
        .then([&] { return prepare_kernel(retention_scan<false>, kStateThreads, 0, device, &resident); });
    if (steps.status() == ATTENTION_AUTOTUNER_OK) prepared[device].store(true);
    return steps.status();
  }

  struct Workspace {
    SuperChunks cut;
    float* states;
    int64_t bytes;

    Workspace(Params const& p, void* base) : cut(p.seqlen, T::kChunk, kSuperChunk, kEnoughPieces) {
      WorkspaceLayout layout(base);
      bool const stores = p.final_state != nullptr;
      states = layout.take<float>(stores, int64_t(p.batch) * p.heads_q * cut.slots * p.dim_qk * p.dim_v);
      bytes = layout.used();
    }
  };

  static size_t workspace_bytes(Params const& p) {
    return check_shape(p) == ATTENTION_AUTOTUNER_OK ? size_t(Workspace(p, nullptr).bytes) : 0;
  }
  static int32_t check_shape(Params const& p) {
    return check_retention_shape(p, Config::kPaddedDimQK, Config::kPaddedDimV);
  }

  static typename Rows::Params rows_params(Params const& p) {
    typename Rows::Params rows{};
    rows.struct_size = sizeof(rows);
    rows.abi_version = kAbiVersionOf<typename Rows::Params>;
    rows.q = p.q;
    rows.k = p.k;
    rows.v = p.v;
    rows.o = p.o;
    rows.log2_gamma = p.log2_gamma;
    rows.batch = p.batch;
    rows.heads_q = p.heads_q;
    rows.heads_kv = p.heads_kv;
    rows.seqlen_q = rows.seqlen_k = p.seqlen;
    rows.dim_qk = p.dim_qk;
    rows.dim_v = p.dim_v;
    rows.causal = 1;
    rows.scale = p.scale;
    rows.r_clamp_max = std::numeric_limits<float>::infinity();
    return rows;
  }

  static int32_t launch(Params const& p, void* workspace, cudaStream_t stream, int32_t device) {
    int32_t status = check_shape(p);
    if (status != ATTENTION_AUTOTUNER_OK) return status;
    Workspace const places(p, workspace);
    status = check_retention_forward_launch(p, Config::kCopyBytes, workspace, places.bytes,
                                            prepared[device].load(std::memory_order_relaxed));
    if (status != ATTENTION_AUTOTUNER_OK) return status;
    ChunkArguments arguments = common_arguments(p, places.cut);
    arguments.x = p.q;
    arguments.y = p.k;
    arguments.z = p.v;
    arguments.out = p.o;
    arguments.first_states = p.initial_state;
    Steps steps;
    steps.then([&] { return Rows::launch(rows_params(p), nullptr, stream, device); });
    if (p.initial_state != nullptr) {  // before the final state, which may lie in the same memory
      steps.then([&] { return launch_from_state(arguments, p, stream); });
    }
    if (p.final_state != nullptr) {
      steps.then([&] {
        return launch_states<Config, T>(arguments, places.cut, places.states, p.initial_state, p.final_state, p.dim_qk,
                                        p.dim_v, p.batch, stream);
      });
    }
    return steps.status();
  }

  static int32_t launch_from_state(ChunkArguments arguments, Params const& p, cudaStream_t stream) {
    arguments.depth = p.dim_qk;
    arguments.columns = p.dim_v;
    int64_t const ctas = int64_t(p.batch) * p.heads_q * arguments.supers.divisor * T::kSlices;
    if (ctas > INT32_MAX) return ATTENTION_AUTOTUNER_BAD_SHAPE;
    retention_from_state<T><<<int(ctas), T::kThreads, T::kSmemBytes, stream>>>(arguments);
    return cuda_status(cudaGetLastError());
  }

  static attention_autotuner_kernel_info info() {
    attention_autotuner_kernel_info info = Rows::info();
    info.dynamic_smem_bytes = maximum(info.dynamic_smem_bytes, T::kSmemBytes);
    return info;
  }
};

}  // namespace attention_autotuner

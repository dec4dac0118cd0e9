// Host side of a chunkwise retention artifact of family sm90: workspace, checks, preparation and launches.
//
// One pass over chunks, and before it, where a sequence is cut into super-chunks, one for what their pieces add to the
// state, which CTAs of later super-chunks sum.
#pragma once

#include "attention_autotuner/abi.h"
#include "attention_autotuner/chunks_sm90/mainloop.cuh"
#include "attention_autotuner/common/chunk_arguments.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/scheduler.cuh"
#include "attention_autotuner/host/early_launch.cuh"
#include "attention_autotuner/host/entry.cuh"
#include "attention_autotuner/host/retention_checks.cuh"
#include "attention_autotuner/host/super_chunks.cuh"
#include "attention_autotuner/host/tma_descriptor.cuh"
#include "attention_autotuner/host/workspace.cuh"
#include "attention_autotuner/sm90/tma.cuh"

namespace attention_autotuner {

template <typename Config>
struct ChunksSm90Entry {
  using Params = RetentionForwardParams;
  using T = ChunkSm90Traits<Config, false>;
  using States = ChunkSm90Traits<Config, true>;
  using Element = typename T::Element;
  static inline std::atomic<bool> prepared[kMaxDevices];

  static int32_t prepare(int32_t device) {
    if (prepared[device].load()) return ATTENTION_AUTOTUNER_OK;
    int resident = 0;
    Steps steps;
    steps.then([&] { return TmaDescriptors::prepare(device); }).then([&] {
      return prepare_kernel(chunks_sm90<T>, T::kThreads, T::kSmemBytes, device, &resident);
    });
    if constexpr (Config::kSuperChunk != 0) {
      steps.then([&] { return prepare_kernel(chunks_sm90<States>, T::kThreads, T::kSmemBytes, device, &resident); });
    }
    steps.then([] { return EarlyLaunch::prepare(); });
    if (steps.status() == ATTENTION_AUTOTUNER_OK) prepared[device].store(true);
    return steps.status();
  }

  struct Workspace {
    SuperChunks cut;
    float* pieces;
    int64_t bytes;

    Workspace(Params const& p, void* base)
        : cut(p.seqlen, T::kChunk, Config::kSuperChunk, int64_t(p.batch) * p.heads_q * T::kSlices) {
      WorkspaceLayout layout(base);
      int64_t const elements = int64_t(T::kDepth) * T::kSlices * T::kColumns;
      pieces = layout.take<float>(cut.supers > 1, int64_t(p.batch) * p.heads_q * cut.slots * elements);
      bytes = layout.used();
    }
  };

  static size_t workspace_bytes(Params const& p) {
    return check_shape(p) == ATTENTION_AUTOTUNER_OK ? size_t(Workspace(p, nullptr).bytes) : 0;
  }
  static int32_t check_shape(Params const& p) {
    return check_retention_shape(p, Config::kPaddedDimQK, Config::kPaddedDimV);
  }

  template <typename Pass>
  static int32_t launch_pass(ChunkSm90Arguments const& arguments, int batch, cudaStream_t stream) {
    auto const& pass = arguments.pass;
    int64_t const ctas = int64_t(batch) * pass.heads.divisor * pass.supers.divisor * T::kSlices;
    if (ctas > INT32_MAX) return ATTENTION_AUTOTUNER_BAD_SHAPE;
    return EarlyLaunch::start(true, chunks_sm90<Pass>, int(ctas), Pass::kThreads, Pass::kSmemBytes, stream, arguments);
  }

  // What the pieces before the last super-chunk add to the state.
  static int32_t launch_states(ChunkSm90Arguments arguments, SuperChunks const& cut, Params const& p,
                               cudaStream_t stream) {
    ChunkArguments& pass = arguments.pass;
    pass.super_chunk = cut.super_chunk / cut.pieces;
    pass.supers = Divider::by((cut.supers - 1) * cut.pieces);
    return launch_pass<States>(arguments, p.batch, stream);
  }

  static int32_t launch(Params const& p, void* workspace, cudaStream_t stream, int32_t device) {
    int32_t status = check_shape(p);
    if (status != ATTENTION_AUTOTUNER_OK) return status;
    Workspace const places(p, workspace);
    status = check_retention_forward_launch(p, Config::kCopyBytes, workspace, places.bytes,
                                            prepared[device].load(std::memory_order_relaxed));
    if (status != ATTENTION_AUTOTUNER_OK) return status;
    ChunkSm90Arguments arguments;
    auto make = [&p](TmaTensor& described, attention_autotuner_tensor const& tensor, int columns, int heads) {
      return TmaDescriptors::make<Element>(described, tensor, columns, p.seqlen, heads, p.batch, T::kChunk);
    };
    if (!make(arguments.q, p.q, p.dim_qk, p.heads_q) || !make(arguments.k, p.k, p.dim_qk, p.heads_kv) ||
        !make(arguments.v, p.v, p.dim_v, p.heads_kv) || !make(arguments.o, p.o, p.dim_v, p.heads_q)) {
      return ATTENTION_AUTOTUNER_BAD_ALIGNMENT;
    }
    ChunkArguments& pass = arguments.pass;
    pass = common_arguments(p, places.cut);
    pass.depth = p.dim_qk;
    pass.columns = p.dim_v;
    pass.first_states = p.initial_state;
    pass.last_states = p.final_state;
    pass.last_slots = places.cut.slots;
    arguments.pieces = places.pieces;
    Steps steps;
    if constexpr (Config::kSuperChunk != 0) {
      if (places.cut.supers > 1) steps.then([&] { return launch_states(arguments, places.cut, p, stream); });
    }
    return steps.then([&] { return launch_pass<T>(arguments, p.batch, stream); }).status();
  }

  static attention_autotuner_kernel_info info() {
    return kernel_info<Config>(T::kChunk, T::kColumns, T::kThreads, T::kSmemBytes);
  }
};

}  // namespace attention_autotuner

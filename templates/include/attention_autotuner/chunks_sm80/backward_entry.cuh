// Host side of a retention backward artifact: workspace, preparation, and the launches of its three passes, in the
// order that host/chunks_backward.cuh describes.
#pragma once

#include "attention_autotuner/abi.h"
#include "attention_autotuner/chunks_sm80/gamma.cuh"
#include "attention_autotuner/chunks_sm80/launch.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/host/chunks_backward.cuh"
#include "attention_autotuner/host/entry.cuh"
#include "attention_autotuner/host/super_chunks.cuh"

namespace attention_autotuner {

template <typename Config>
using ChunksBackwardParams =
    std::conditional_t<kIsPacked<Config>, PackedRetentionBackwardParams, RetentionBackwardParams>;

template <typename Config>
struct ChunksBackwardEntry : ChunksBackward<Config, ChunksBackwardParams<Config>> {
  using Params = ChunksBackwardParams<Config>;
  using Base = ChunksBackward<Config, Params>;
  using Base::check;
  using Base::check_shape;
  using Base::prepared;
  using Base::reduce_heads;
  using typename Base::Element;
  static constexpr bool kPacked = kIsPacked<Config>;
  using Dq = ChunkTraits<Config, typename Config::Dq, ChunkResult::kDq>;
  using Dk = ChunkTraits<Config, typename Config::Dk, ChunkResult::kDk>;
  using Dv = ChunkTraits<Config, typename Config::Dv, ChunkResult::kDv>;
  using ScoresQK = ScoresTraits<Config, Config::kPaddedDimQK>;
  using ScoresV = ScoresTraits<Config, Config::kPaddedDimV>;
  static constexpr bool kPrecomputedQK = Dv::kPrecomputed;
  static constexpr bool kPrecomputedV = Dq::kPrecomputed || Dk::kPrecomputed;
  static_assert(Config::kSuperChunk % Config::kChunk == 0, "super_chunk_multiple_of_chunk");

  static int32_t prepare(int32_t device) {
    if (prepared[device].load()) return ATTENTION_AUTOTUNER_OK;
    int resident = 0;
    auto prepare_kernel_of = [&](auto kernel, int threads, int smem_bytes) {
      return prepare_kernel(kernel, threads, smem_bytes, device, &resident);
    };
    Steps steps;
    steps.then([&] { return prepare_chunks<Dq, false>(device); })
        .then([&] { return prepare_chunks<StatesTraits<Config, Dq>, true>(device); })
        .then([&] { return prepare_chunks<Dk, false>(device); })
        .then([&] { return prepare_chunks<Dv, false>(device); })
        .then([&] { return prepare_chunks<StatesTraits<Config, Dv>, true>(device); })
        .then([&] { return prepare_scan<false, kPacked>(device); })
        .then([&] { return prepare_scan<true, kPacked>(device); })
        .then([&] { return Base::prepare_common(device); })
        .then([&] { return prepare_kernel_of(retention_gamma_pass<Dq>, Dq::kThreads, Dq::kSmemBytes); })
        .then([&] { return prepare_kernel_of(retention_gamma_pass<Dv>, Dv::kThreads, Dv::kSmemBytes); });
    if constexpr (kPrecomputedQK) steps.then([&] { return prepare_scores<ScoresQK>(device); });
    if constexpr (kPrecomputedV) steps.then([&] { return prepare_scores<ScoresV>(device); });
    if (steps.status() == ATTENTION_AUTOTUNER_OK) prepared[device].store(true);
    return steps.status();
  }
  template <typename Scores>
  static int32_t prepare_scores(int32_t device) {
    int resident = 0;
    return prepare_kernel(retention_scores<Scores>, Scores::kThreads, Scores::kSmemBytes, device, &resident);
  }

  struct Workspace : Base::Buffers {
    Element *scores_qk, *scores_v;

    Workspace(Params const& p, void* base)
        : Base::Buffers(p, base, Base::cut_of(p, Config::kChunk, minimum(Dq::kSlices, Dv::kSlices)),
                        Dv::kSlices * Dv::kWarps, Dq::kSlices * Dq::kWarps) {
      int64_t const elements = score_elements(int64_t(batch_of_rows(p)) * p.heads_q, this->cut, Config::kChunk);
      scores_qk = this->template take<Element>(kPrecomputedQK, elements);
      scores_v = this->template take<Element>(kPrecomputedV, elements);
    }
  };
  static size_t workspace_bytes(Params const& p) {
    return check_shape(p) == ATTENTION_AUTOTUNER_OK ? size_t(Workspace(p, nullptr).used()) : 0;
  }

  // One of the three passes.
  template <typename T>
  static int32_t launch_pass(typename T::Arguments arguments, Params const& p, attention_autotuner_tensor const& x,
                             attention_autotuner_tensor const& y, attention_autotuner_tensor const& z,
                             attention_autotuner_tensor const& out, float* partial, Element const* scores,
                             cudaStream_t stream) {
    arguments.x = x;
    arguments.y = y;
    arguments.z = z;
    arguments.out = out;
    arguments.partial = partial;
    arguments.scores = scores;
    return launch_chunks<T, false>(arguments, p.dim_qk, p.dim_v, batch_of_rows(p), stream);
  }

  static int32_t launch(Params const& p, void* workspace, cudaStream_t stream, int32_t device) {
    int32_t status = check_shape(p);
    if (status != ATTENTION_AUTOTUNER_OK) return status;
    Workspace const w(p, workspace);
    status = check(p, workspace, w.used());
    if (status != ATTENTION_AUTOTUNER_OK) return status;
    if (!prepared[device].load(std::memory_order_relaxed)) return ATTENTION_AUTOTUNER_BAD_DEVICE;
    typename Dq::Arguments forward = pass_arguments(p, w.cut), reversed = forward;
    int const batch = batch_of_rows(p);
    Steps steps;
    if constexpr (kPrecomputedQK) {
      steps.then([&] { return launch_scores<ScoresQK>(p.q, p.k, p.dim_qk, forward, w.scores_qk, batch, stream); });
    }
    if constexpr (kPrecomputedV) {
      steps.then([&] { return launch_scores<ScoresV>(p.dout, p.v, p.dim_v, forward, w.scores_v, batch, stream); });
    }
    forward.first_states = p.initial_state;
    reversed.first_states = p.dfinal_state;
    auto reversed_dv = reversed;
    reversed_dv.last_states = p.dinitial_state;
    if (w.stores_states) {
      auto summing = forward;
      summing.y = p.v;
      summing.z = p.k;
      steps.then([&] {
        return launch_states<Config, Dq>(summing, w.cut, w.states, p.initial_state, nullptr, p.dim_qk, p.dim_v, batch,
                                         stream);
      });
      summing.y = p.q;
      summing.z = p.dout;
      steps.then([&] {
        return launch_states<Config, Dv>(summing, w.cut, w.gradients, p.dfinal_state, p.dinitial_state, p.dim_qk,
                                         p.dim_v, p.batch, stream);
      });
      forward.first_states = w.states;
      forward.first_slots = w.cut.slots;
      reversed.first_states = w.gradients;
      reversed.first_slots = w.cut.slots;
      reversed_dv = reversed;
    }
    steps.then([&] { return launch_pass<Dq>(forward, p, p.dout, p.v, p.k, p.dq, nullptr, w.scores_v, stream); })
        .then([&] { return launch_pass<Dk>(reversed, p, p.v, p.dout, p.q, p.dk, w.dk, w.scores_v, stream); })
        .then([&] { return launch_pass<Dv>(reversed_dv, p, p.k, p.q, p.dout, p.dv, w.dv, w.scores_qk, stream); });
    if (p.dlog2_gamma != nullptr) steps.then([&] { return launch_gamma(p, w, stream); });
    return steps.then([&] { return reduce_heads(w.dk, p.dk, p, p.dim_qk, stream); })
        .then([&] { return reduce_heads(w.dv, p.dv, p, p.dim_v, stream); })
        .status();
  }

  static int32_t launch_gamma(Params const& p, Workspace const& w, cudaStream_t stream) {
    auto keys = pass_arguments(p, w.cut), queries = keys;
    keys.y = p.v;
    keys.z = p.k;
    queries.y = p.q;
    queries.z = p.dout;
    return Base::launch_gamma(p, w, pass_arguments(p, w.cut), stream, [&] {
      return Steps()
          .then([&] { return launch_gamma_pass<Dv>(queries, p, w, w.gamma_queries, stream); })
          .then([&] { return launch_gamma_pass<Dq>(keys, p, w, w.gamma_keys, stream); })
          .status();
    });
  }
  template <typename T>
  static int32_t launch_gamma_pass(typename T::Arguments arguments, Params const& p, Workspace const& w, float* partial,
                                   cudaStream_t stream) {
    arguments.depth = T::kTransposed ? p.dim_v : p.dim_qk;
    arguments.columns = T::kTransposed ? p.dim_qk : p.dim_v;
    int64_t const ctas = int64_t(batch_of_rows(p)) * p.heads_q * w.cut.supers * T::kSlices;
    if (ctas > INT32_MAX) return ATTENTION_AUTOTUNER_BAD_SHAPE;
    GammaPassArguments<typename T::Arguments> const mine{arguments, w.states, w.gradients, partial};
    retention_gamma_pass<T><<<int(ctas), T::kThreads, T::kSmemBytes, stream>>>(mine);
    return cuda_status(cudaGetLastError());
  }

  static attention_autotuner_kernel_info info() {
    return kernel_info<Config, Params>(Config::kChunk, Dq::kColumns,
                                       maximum(Dq::kThreads, maximum(Dk::kThreads, Dv::kThreads)),
                                       maximum(Dq::kSmemBytes, maximum(Dk::kSmemBytes, Dv::kSmemBytes)));
  }
};

}  // namespace attention_autotuner

// Host side of a retention backward artifact: workspace, checks, preparation, and the launches of its three passes.
//
// dq walks forward with the states computed again, dk and dv walk backward with the gradient of the state. Where a
// sequence is cut into super-chunks, states and their gradients at the cuts come first, each from a pass of its own:
// they are all that is ever stored of either. Gradients of K and V under a group of query heads, and what the gradient
// of gamma needs, go through fp32 parts.
//
// Called by: templates/retention/backward.cu.jinja.
#pragma once

#include "retention_entry.cuh"

namespace attention_autotuner {

// Tokens of a super-chunk where the gradient of gamma asks for them and the kernel would not cut.
inline constexpr int kGammaSuperChunk = 512;
inline constexpr int kAddPartsBlocks = 512;

template <typename Config>
struct RetentionBackwardEntry {
  using Params = RetentionBackwardParams;
  using Element = typename Config::Element;
  using Dq = ChunkTraits<Config, typename Config::Dq, ChunkResult::kDq>;
  using Dk = ChunkTraits<Config, typename Config::Dk, ChunkResult::kDk>;
  using Dv = ChunkTraits<Config, typename Config::Dv, ChunkResult::kDv>;
  using ScoresQK = ScoresTraits<Config, Config::kClassQK>;
  using ScoresV = ScoresTraits<Config, Config::kClassV>;
  static constexpr bool kGivenQK = Dv::kGiven;
  static constexpr bool kGivenV = Dq::kGiven || Dk::kGiven;
  static_assert(Config::kSuperChunk % Config::kChunk == 0, "super_chunk_multiple_of_chunk");
  static inline std::atomic<bool> prepared[kMaxDevices];

  static int32_t prepare(int32_t device) {
    if (prepared[device].load()) return ATTENTION_AUTOTUNER_OK;
    int resident = 0;
    auto prepare_small = [&](auto kernel) { return prepare_kernel(kernel, kStateThreads, 0, device, &resident); };
    Steps steps;
    steps.then([&] { return prepare_chunks<Dq>(true, device); })
        .then([&] { return prepare_chunks<Dk>(false, device); })
        .then([&] { return prepare_chunks<Dv>(true, device); })
        .then([&] { return prepare_small(retention_scan<false>); })
        .then([&] { return prepare_small(retention_scan<true>); })
        .then([&] { return prepare_small(retention_add_parts<Element>); })
        .then([&] { return prepare_small(retention_gamma_parts<Element>); })
        .then([&] { return prepare_small(retention_gamma_sum); });
    if constexpr (kGivenQK) steps.then([&] { return prepare_scores<ScoresQK>(device); });
    if constexpr (kGivenV) steps.then([&] { return prepare_scores<ScoresV>(device); });
    if (steps.status() == ATTENTION_AUTOTUNER_OK) prepared[device].store(true);
    return steps.status();
  }
  template <typename Scores>
  static int32_t prepare_scores(int32_t device) {
    int resident = 0;
    return prepare_kernel(retention_scores<Scores>, Scores::kThreads, Scores::kSmemBytes, device, &resident);
  }

  struct Workspace {
    SuperChunks cut;
    bool stores_states;
    float *states, *gradients, *dq, *dk, *dv, *gamma;
    Element *scores_qk, *scores_v;
    int64_t bytes;

    Workspace(Params const& p, void* base)
        : cut(p.seqlen, Config::kChunk,
              Config::kSuperChunk == 0 && p.dlog2_gamma != nullptr ? kGammaSuperChunk : Config::kSuperChunk) {
      bool const gamma_too = p.dlog2_gamma != nullptr, grouped = p.heads_q != p.heads_kv;
      stores_states = cut.supers > 1 || gamma_too;
      WorkspaceParts parts(base);
      int64_t const sequences = int64_t(p.batch) * p.heads_q, rows = sequences * p.seqlen;
      int64_t const elements = int64_t(p.dim_qk) * p.dim_v;
      states = parts.take<float>(stores_states, sequences * (cut.supers + 1) * elements);
      gradients = parts.take<float>(stores_states, sequences * cut.supers * elements);
      dq = parts.take<float>(gamma_too, rows * p.dim_qk);
      dk = parts.take<float>(gamma_too || grouped, rows * p.dim_qk);
      dv = parts.take<float>(grouped, rows * p.dim_v);
      gamma = parts.take<float>(gamma_too, sequences * cut.supers);
      scores_qk = parts.take<Element>(kGivenQK, score_elements(sequences, cut, Config::kChunk));
      scores_v = parts.take<Element>(kGivenV, score_elements(sequences, cut, Config::kChunk));
      bytes = parts.used();
    }
  };

  static size_t workspace_bytes(Params const& p) {
    return check_shape(p) == ATTENTION_AUTOTUNER_OK ? size_t(Workspace(p, nullptr).bytes) : 0;
  }
  static int32_t check_shape(Params const& p) { return check_retention_shape(p, Config::kClassQK, Config::kClassV); }
  static int32_t check(Params const& p, void* workspace, int64_t bytes) {
    bool const pointers = takes_retention_inputs(p, Config::kCopyBytes) &&
                          aligned(p.dout, Config::kCopyBytes, p.batch, p.heads_q, p.seqlen) &&
                          aligned(p.dq, 16, p.batch, p.heads_q, p.seqlen) &&
                          aligned(p.dk, 16, p.batch, p.heads_kv, p.seqlen) &&
                          aligned(p.dv, 16, p.batch, p.heads_kv, p.seqlen) &&
                          reinterpret_cast<uintptr_t>(workspace) % 16 == 0 && (bytes == 0 || workspace != nullptr);
    return pointers ? ATTENTION_AUTOTUNER_OK : ATTENTION_AUTOTUNER_BAD_ALIGNMENT;
  }

  static int32_t add_parts(float const* parts, attention_autotuner_tensor const& out, int group, Params const& p,
                           int columns, cudaStream_t stream) {
    if (parts == nullptr) return ATTENTION_AUTOTUNER_OK;
    int const sequences = p.batch * p.heads_q / group;
    int64_t const blocks = (int64_t(p.seqlen) * columns / 2 + kStateThreads - 1) / kStateThreads;
    dim3 const grid(blocks < kAddPartsBlocks ? int(blocks) : kAddPartsBlocks, sequences);
    retention_add_parts<Element><<<grid, kStateThreads, 0, stream>>>(parts, out, group, p.heads_q, p.seqlen, columns);
    return cuda_status(cudaGetLastError());
  }

  // One of the three passes.
  template <typename T>
  static int32_t launch_pass(ChunkArguments arguments, Params const& p, attention_autotuner_tensor const& x,
                             attention_autotuner_tensor const& y, attention_autotuner_tensor const& z,
                             attention_autotuner_tensor const& out, float* parts, Element const* scores,
                             cudaStream_t stream) {
    arguments.x = x;
    arguments.y = y;
    arguments.z = z;
    arguments.out = out;
    arguments.parts = parts;
    arguments.scores = scores;
    return launch_chunks<T, false>(arguments, p.dim_qk, p.dim_v, p.batch, stream);
  }

  static int32_t launch(Params const& p, void* workspace, cudaStream_t stream, int32_t device) {
    int32_t status = check_shape(p);
    if (status != ATTENTION_AUTOTUNER_OK) return status;
    Workspace const w(p, workspace);
    status = check(p, workspace, w.bytes);
    if (status != ATTENTION_AUTOTUNER_OK) return status;
    if (!prepared[device].load(std::memory_order_relaxed)) return ATTENTION_AUTOTUNER_BAD_DEVICE;
    ChunkArguments forward = common_arguments(p, w.cut), reversed = forward;
    Steps steps;
    if constexpr (kGivenQK) {
      steps.then([&] { return launch_scores<ScoresQK>(p.q, p.k, p.dim_qk, forward, w.scores_qk, p.batch, stream); });
    }
    if constexpr (kGivenV) {
      steps.then([&] { return launch_scores<ScoresV>(p.dout, p.v, p.dim_v, forward, w.scores_v, p.batch, stream); });
    }
    forward.first_states = p.initial_state;
    reversed.first_states = p.dfinal_state;
    ChunkArguments reversed_dv = reversed;
    reversed_dv.last_states = p.dinitial_state;
    if (w.stores_states) {
      ChunkArguments walk = forward;
      walk.y = p.v;
      walk.z = p.k;
      steps.then([&] {
        return launch_states<Dq>(walk, w.states, w.cut.supers + 1, p.initial_state, nullptr, p.dim_qk, p.dim_v, p.batch,
                                 stream);
      });
      walk.y = p.q;
      walk.z = p.dout;
      steps.then([&] {
        return launch_states<Dv>(walk, w.gradients, w.cut.supers, p.dfinal_state, p.dinitial_state, p.dim_qk, p.dim_v,
                                 p.batch, stream);
      });
      forward.first_states = w.states;
      forward.first_slots = w.cut.supers + 1;
      reversed.first_states = w.gradients;
      reversed.first_slots = w.cut.supers;
      reversed_dv = reversed;
    }
    int const group = p.heads_q / p.heads_kv;
    steps.then([&] { return launch_pass<Dq>(forward, p, p.dout, p.v, p.k, p.dq, w.dq, w.scores_v, stream); })
        .then([&] { return launch_pass<Dk>(reversed, p, p.v, p.dout, p.q, p.dk, w.dk, w.scores_v, stream); })
        .then([&] { return launch_pass<Dv>(reversed_dv, p, p.k, p.q, p.dout, p.dv, w.dv, w.scores_qk, stream); });
    if (p.dlog2_gamma != nullptr) steps.then([&] { return launch_gamma(p, w, stream); });
    return steps.then([&] { return add_parts(w.dq, p.dq, 1, p, p.dim_qk, stream); })
        .then([&] { return add_parts(w.dk, p.dk, group, p, p.dim_qk, stream); })
        .then([&] { return add_parts(w.dv, p.dv, group, p, p.dim_v, stream); })
        .status();
  }

  static int32_t launch_gamma(Params const& p, Workspace const& w, cudaStream_t stream) {
    int const sequences = p.batch * p.heads_q;
    GammaArguments const arguments{p.q,
                                   p.k,
                                   w.dq,
                                   w.dk,
                                   w.states,
                                   w.gradients,
                                   w.gamma,
                                   p.heads_q,
                                   p.heads_q / p.heads_kv,
                                   p.seqlen,
                                   p.dim_qk,
                                   p.dim_v,
                                   w.cut.supers,
                                   w.cut.super_chunk};
    retention_gamma_parts<Element><<<dim3(w.cut.supers, sequences), kStateThreads, 0, stream>>>(arguments);
    int32_t const status = cuda_status(cudaGetLastError());
    if (status != ATTENTION_AUTOTUNER_OK) return status;
    retention_gamma_sum<<<sequences, kStateThreads, 0, stream>>>(w.gamma, p.dlog2_gamma, w.cut.supers);
    return cuda_status(cudaGetLastError());
  }

  static attention_autotuner_kernel_info info() {
    return {sizeof(attention_autotuner_kernel_info),
            ATTENTION_AUTOTUNER_ABI_VERSION,
            Config::kName,
            Config::kClassQK,
            Config::kClassV,
            Config::kChunk,
            Dq::kColumns,
            maximum(Dq::kThreads, maximum(Dk::kThreads, Dv::kThreads)),
            0,
            maximum(Dq::kSmemBytes, maximum(Dk::kSmemBytes, Dv::kSmemBytes)),
            Config::kCopyBytes};
  }
};

}  // namespace attention_autotuner

// Host side of a retention backward artifact: workspace, checks, preparation, and the launches of its three passes.
//
// dq goes forward in time with the states computed again, dk and dv go backward with the gradient of the state. Where a
// sequence is cut into super-chunks, states and their gradients at the cuts come first, each from a pass of its own:
// they are all that is ever stored of either, and the gradient of gamma is computed from them and the inputs. Gradients
// of K and V under a group of query heads go through fp32 partial sums, one for each head.
#pragma once

#include "attention_autotuner/abi.h"
#include "attention_autotuner/chunks_sm80/gamma.cuh"
#include "attention_autotuner/chunks_sm80/launch.cuh"
#include "attention_autotuner/common/chunk_sequences.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/scheduler.cuh"
#include "attention_autotuner/host/checks.cuh"
#include "attention_autotuner/host/entry.cuh"
#include "attention_autotuner/host/retention_checks.cuh"
#include "attention_autotuner/host/super_chunks.cuh"
#include "attention_autotuner/host/workspace.cuh"

namespace attention_autotuner {

inline constexpr int kReduceHeadsBlocks = 512;

template <typename Config>
struct ChunksBackwardEntry {
  static constexpr bool kPacked = kIsPacked<Config>;
  using Params = std::conditional_t<kPacked, PackedRetentionBackwardParams, RetentionBackwardParams>;
  using Element = typename Config::Element;
  using Dq = ChunkTraits<Config, typename Config::Dq, ChunkResult::kDq>;
  using Dk = ChunkTraits<Config, typename Config::Dk, ChunkResult::kDk>;
  using Dv = ChunkTraits<Config, typename Config::Dv, ChunkResult::kDv>;
  using ScoresQK = ScoresTraits<Config, Config::kPaddedDimQK>;
  using ScoresV = ScoresTraits<Config, Config::kPaddedDimV>;
  using Pairs = GammaPairsTraits<Config>;
  static constexpr bool kPrecomputedQK = Dv::kPrecomputed;
  static constexpr bool kPrecomputedV = Dq::kPrecomputed || Dk::kPrecomputed;
  static_assert(Config::kSuperChunk % Config::kChunk == 0, "super_chunk_multiple_of_chunk");
  static constexpr int kLongestForGamma = gamma_super_chunk(Config::kPaddedDimQK, Config::kPaddedDimV);
  static constexpr int kGammaSuperChunk =
      Config::kSuperChunk == 0 ? kLongestForGamma : minimum(Config::kSuperChunk, kLongestForGamma);
  static inline std::atomic<bool> prepared[kMaxDevices];

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
        .then([&] { return prepare_kernel_of(retention_reduce_heads<Element>, kStateThreads, 0); })
        .then([&] { return prepare_kernel_of(retention_gamma_pairs<Pairs>, Pairs::kThreads, Pairs::kSmemBytes); })
        .then([&] { return prepare_kernel_of(retention_gamma_pass<Dq>, Dq::kThreads, Dq::kSmemBytes); })
        .then([&] { return prepare_kernel_of(retention_gamma_pass<Dv>, Dv::kThreads, Dv::kSmemBytes); })
        .then([&] { return prepare_kernel_of(retention_gamma_sum, kGammaSumThreads, 0); });
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

  static SuperChunks cut_of(Params const& p) {
    bool const gamma_too = p.dlog2_gamma != nullptr;
    int const wanted = gamma_too ? kGammaSuperChunk : Config::kSuperChunk;
    if constexpr (kPacked) {
      return packed_super_chunks(p, Config::kChunk, gamma_too ? wanted : packed_super_chunk(p, wanted));
    } else {
      int64_t const ctas = int64_t(p.batch) * p.heads_q * minimum(Dq::kSlices, Dv::kSlices);
      return {p.seqlen, Config::kChunk, wanted, gamma_too ? kEnoughPieces : ctas};
    }
  }
  struct Workspace {
    SuperChunks cut;
    bool stores_states;
    float *states, *gradients, *dk, *dv;
    int gamma_tiles, pair_sums, query_sums, key_sums;  // of a sequence
    float *gamma_pairs, *gamma_queries, *gamma_keys;
    Element *scores_qk, *scores_v;
    int64_t bytes;

    Workspace(Params const& p, void* base) : cut(cut_of(p)) {
      bool const gamma_too = p.dlog2_gamma != nullptr, grouped = p.heads_q != p.heads_kv;
      stores_states = cut.divided() || gamma_too;
      WorkspaceLayout layout(base);
      int64_t const sequences = int64_t(batch_of_rows(p)) * p.heads_q, rows = sequences * rows_of(p);
      int64_t const elements = int64_t(p.dim_qk) * p.dim_v;
      states = layout.take<float>(stores_states, sequences * cut.slots * elements);
      gradients = layout.take<float>(stores_states, sequences * cut.slots * elements);
      dk = layout.take<float>(grouped, rows * p.dim_qk);
      dv = layout.take<float>(grouped, rows * p.dim_v);
      gamma_tiles = divide_up(cut.super_chunk, Pairs::kRows);
      pair_sums = cut.supers * gamma_tiles * Pairs::kWarps;
      query_sums = cut.supers * Dv::kSlices * Dv::kWarps;
      key_sums = cut.supers * Dq::kSlices * Dq::kWarps;
      gamma_pairs = layout.take<float>(gamma_too, sequences * pair_sums);
      gamma_queries = layout.take<float>(gamma_too, sequences * query_sums);
      gamma_keys = layout.take<float>(gamma_too, sequences * key_sums);
      scores_qk = layout.take<Element>(kPrecomputedQK, score_elements(sequences, cut, Config::kChunk));
      scores_v = layout.take<Element>(kPrecomputedV, score_elements(sequences, cut, Config::kChunk));
      bytes = layout.used();
    }
  };

  static size_t workspace_bytes(Params const& p) {
    return check_shape(p) == ATTENTION_AUTOTUNER_OK ? size_t(Workspace(p, nullptr).bytes) : 0;
  }
  static int32_t check_shape(Params const& p) {
    return check_retention_shape(p, Config::kPaddedDimQK, Config::kPaddedDimV);
  }
  static int32_t check(Params const& p, void* workspace, int64_t bytes) {
    int const batch = batch_of_rows(p), rows = rows_of(p);
    bool const pointers = takes_retention_inputs(p, Config::kCopyBytes) &&
                          aligned(p.dout, Config::kCopyBytes, batch, p.heads_q, rows) &&
                          aligned(p.dq, 16, batch, p.heads_q, rows) && aligned(p.dk, 16, batch, p.heads_kv, rows) &&
                          aligned(p.dv, 16, batch, p.heads_kv, rows) &&
                          reinterpret_cast<uintptr_t>(workspace) % 16 == 0 && (bytes == 0 || workspace != nullptr);
    return pointers ? ATTENTION_AUTOTUNER_OK : ATTENTION_AUTOTUNER_BAD_ALIGNMENT;
  }

  static int32_t reduce_heads(float const* partial, attention_autotuner_tensor const& out, int group, Params const& p,
                              int columns, cudaStream_t stream) {
    if (partial == nullptr) return ATTENTION_AUTOTUNER_OK;
    int const sequences = batch_of_rows(p) * p.heads_q / group;
    int64_t const blocks = (int64_t(rows_of(p)) * columns / 2 + kStateThreads - 1) / kStateThreads;
    dim3 const grid(blocks < kReduceHeadsBlocks ? int(blocks) : kReduceHeadsBlocks, sequences);
    retention_reduce_heads<Element>
        <<<grid, kStateThreads, 0, stream>>>(partial, out, group, p.heads_q, rows_of(p), columns);
    return cuda_status(cudaGetLastError());
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
    status = check(p, workspace, w.bytes);
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
    int const group = p.heads_q / p.heads_kv;
    steps.then([&] { return launch_pass<Dq>(forward, p, p.dout, p.v, p.k, p.dq, nullptr, w.scores_v, stream); })
        .then([&] { return launch_pass<Dk>(reversed, p, p.v, p.dout, p.q, p.dk, w.dk, w.scores_v, stream); })
        .then([&] { return launch_pass<Dv>(reversed_dv, p, p.k, p.q, p.dout, p.dv, w.dv, w.scores_qk, stream); });
    if (p.dlog2_gamma != nullptr) steps.then([&] { return launch_gamma(p, w, stream); });
    return steps.then([&] { return reduce_heads(w.dk, p.dk, group, p, p.dim_qk, stream); })
        .then([&] { return reduce_heads(w.dv, p.dv, group, p, p.dim_v, stream); })
        .status();
  }

  static int32_t launch_gamma(Params const& p, Workspace const& w, cudaStream_t stream) {
    int const sequences = batch_of_rows(p) * p.heads_q;
    auto keys = pass_arguments(p, w.cut), queries = keys;
    keys.y = p.v;
    keys.z = p.k;
    queries.y = p.q;
    queries.z = p.dout;
    typename Pairs::Arguments pairs{};
    static_cast<GammaPairsArguments&>(pairs) = {p.q,           p.k,          p.v,       p.dout,
                                                w.gamma_pairs, p.log2_gamma, p.seqlen,  w.cut.super_chunk,
                                                p.dim_qk,      p.dim_v,      p.scale,   Divider::by(w.gamma_tiles),
                                                keys.supers,   keys.heads,   keys.group};
    if constexpr (kPacked) pairs.packed = keys.packed;
    int64_t const ctas = int64_t(sequences) * w.cut.supers * w.gamma_tiles;
    if (ctas > INT32_MAX) return ATTENTION_AUTOTUNER_BAD_SHAPE;
    retention_gamma_pairs<Pairs><<<int(ctas), Pairs::kThreads, Pairs::kSmemBytes, stream>>>(pairs);
    Steps steps;
    return steps.then([] { return cuda_status(cudaGetLastError()); })
        .then([&] { return launch_gamma_pass<Dv>(queries, p, w, w.gamma_queries, stream); })
        .then([&] { return launch_gamma_pass<Dq>(keys, p, w, w.gamma_keys, stream); })
        .then([&] {
          retention_gamma_sum<<<sequences, kGammaSumThreads, 0, stream>>>(
              w.gamma_pairs, w.pair_sums, w.gamma_queries, w.query_sums, w.gamma_keys, w.key_sums, p.dlog2_gamma);
          return cuda_status(cudaGetLastError());
        })
        .status();
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
    return kernel_info<Config>(Config::kChunk, Dq::kColumns, maximum(Dq::kThreads, maximum(Dk::kThreads, Dv::kThreads)),
                               maximum(Dq::kSmemBytes, maximum(Dk::kSmemBytes, Dv::kSmemBytes)));
  }
};

}  // namespace attention_autotuner

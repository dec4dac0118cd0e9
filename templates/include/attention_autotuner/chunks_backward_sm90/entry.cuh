// Host side of a retention backward artifact of family sm90: workspace, checks, preparation, and the launches.
//
// dq goes forward in time with the states computed again, dk and dv go backward
// with the gradient of the state. Where a sequence is cut into super-chunks, states and their gradients at the cuts
// come first, each from a pass of its own, and the gradient of gamma is computed from them and the inputs, by the
// kernels of family sm80. Gradients of K and V under a group of query heads go through fp32 partial sums, one for each
// head.
#pragma once

#include "attention_autotuner/abi.h"
#include "attention_autotuner/chunks_backward_sm90/gamma.cuh"
#include "attention_autotuner/chunks_backward_sm90/mainloop.cuh"
#include "attention_autotuner/chunks_backward_sm90/scan.cuh"
#include "attention_autotuner/common/chunk_arguments.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/scheduler.cuh"
#include "attention_autotuner/common/states.cuh"
#include "attention_autotuner/host/checks.cuh"
#include "attention_autotuner/host/early_launch.cuh"
#include "attention_autotuner/host/entry.cuh"
#include "attention_autotuner/host/retention_checks.cuh"
#include "attention_autotuner/host/super_chunks.cuh"
#include "attention_autotuner/host/tma_descriptor.cuh"
#include "attention_autotuner/host/workspace.cuh"
#include "attention_autotuner/sm90/tma.cuh"

namespace attention_autotuner {

template <typename Config>
struct ChunksBackwardSm90Entry {
  using Params = RetentionBackwardParams;
  using Element = typename Config::Element;
  using Dq = ChunkBackwardTraits<Config, ChunkGradient::kDq, false>;
  using Dk = ChunkBackwardTraits<Config, ChunkGradient::kDk, false>;
  using Dv = ChunkBackwardTraits<Config, ChunkGradient::kDv, false>;
  using States = ChunkBackwardTraits<Config, ChunkGradient::kDq, true>;
  using Gradients = ChunkBackwardTraits<Config, ChunkGradient::kDv, true>;  // of the states
  using Pairs = GammaPairsTraits<Config>;
  using Tensor = attention_autotuner_tensor;
  static constexpr int kChunk = Dq::kChunk;
  static constexpr int kReduceBlocks = 512;
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
    steps.then([&] { return TmaDescriptors::prepare(device); })
        .then([&] { return prepare_kernel_of(chunks_backward_sm90<Dq>, Dq::kThreads, Dq::kSmemBytes); })
        .then([&] { return prepare_kernel_of(chunks_backward_sm90<Dk>, Dk::kThreads, Dk::kSmemBytes); })
        .then([&] { return prepare_kernel_of(chunks_backward_sm90<Dv>, Dv::kThreads, Dv::kSmemBytes); })
        .then([&] { return prepare_kernel_of(chunks_backward_sm90<States>, States::kThreads, States::kSmemBytes); })
        .then([&] {
          return prepare_kernel_of(chunks_backward_sm90<Gradients>, Gradients::kThreads, Gradients::kSmemBytes);
        })
        .then([&] { return prepare_kernel_of(chunk_scan_sm90<false>, kScanThreads, 0); })
        .then([&] { return prepare_kernel_of(chunk_scan_sm90<true>, kScanThreads, 0); })
        .then([] { return EarlyLaunch::prepare(); })
        .then([&] { return prepare_kernel_of(retention_reduce_heads<Element>, kStateThreads, 0); })
        .then([&] { return prepare_kernel_of(retention_gamma_pairs<Pairs>, Pairs::kThreads, Pairs::kSmemBytes); })
        .then([&] { return prepare_gamma<States>(device); })
        .then([&] { return prepare_gamma<Gradients>(device); })
        .then([&] { return prepare_kernel_of(retention_gamma_sum, kGammaSumThreads, 0); });
    if (steps.status() == ATTENTION_AUTOTUNER_OK) prepared[device].store(true);
    return steps.status();
  }
  template <typename T>
  static int32_t prepare_gamma(int32_t device) {
    int resident = 0;
    return prepare_kernel(chunk_gamma_pass<T>, T::kThreads, T::kSmemBytes, device, &resident);
  }

  struct Workspace {
    SuperChunks cut;
    bool stores_states;
    float *states, *gradients, *dk, *dv;
    int gamma_tiles, pair_sums, query_sums, key_sums;  // of a sequence
    float *gamma_pairs, *gamma_queries, *gamma_keys;
    int64_t bytes;

    Workspace(Params const& p, void* base)
        : cut(p.seqlen, kChunk, p.dlog2_gamma != nullptr ? kGammaSuperChunk : Config::kSuperChunk,
              p.dlog2_gamma != nullptr ? kEnoughPieces
                                       : int64_t(p.batch) * p.heads_q * minimum(Dq::kSlices, Dv::kSlices)) {
      bool const gamma_too = p.dlog2_gamma != nullptr, grouped = p.heads_q != p.heads_kv;
      stores_states = cut.supers > 1 || gamma_too;
      WorkspaceLayout layout(base);
      int64_t const sequences = int64_t(p.batch) * p.heads_q, rows = sequences * p.seqlen;
      int64_t const elements = int64_t(p.dim_qk) * p.dim_v;
      states = layout.take<float>(stores_states, sequences * cut.slots * elements);
      gradients = layout.take<float>(stores_states, sequences * cut.slots * elements);
      dk = layout.take<float>(grouped, rows * p.dim_qk);
      dv = layout.take<float>(grouped, rows * p.dim_v);
      gamma_tiles = divide_up(cut.super_chunk, Pairs::kRows);
      pair_sums = cut.supers * gamma_tiles * Pairs::kWarps;
      query_sums = cut.supers * Dv::kSlices * 4 * Dv::kWarpgroups;
      key_sums = cut.supers * Dq::kSlices * 4 * Dq::kWarpgroups;
      gamma_pairs = layout.take<float>(gamma_too, sequences * pair_sums);
      gamma_queries = layout.take<float>(gamma_too, sequences * query_sums);
      gamma_keys = layout.take<float>(gamma_too, sequences * key_sums);
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
    bool const pointers = takes_retention_inputs(p, Config::kCopyBytes) &&
                          aligned(p.dout, Config::kCopyBytes, p.batch, p.heads_q, p.seqlen) &&
                          aligned(p.dq, 16, p.batch, p.heads_q, p.seqlen) &&
                          aligned(p.dk, 16, p.batch, p.heads_kv, p.seqlen) &&
                          aligned(p.dv, 16, p.batch, p.heads_kv, p.seqlen) &&
                          reinterpret_cast<uintptr_t>(workspace) % 16 == 0 && (bytes == 0 || workspace != nullptr);
    return pointers ? ATTENTION_AUTOTUNER_OK : ATTENTION_AUTOTUNER_BAD_ALIGNMENT;
  }

  static int32_t reduce_heads(float const* partial, Tensor const& out, int group, Params const& p, int columns,
                              cudaStream_t stream) {
    if (partial == nullptr) return ATTENTION_AUTOTUNER_OK;
    int const sequences = p.batch * p.heads_q / group;
    int64_t const blocks = (int64_t(p.seqlen) * columns / 2 + kStateThreads - 1) / kStateThreads;
    dim3 const grid(blocks < kReduceBlocks ? int(blocks) : kReduceBlocks, sequences);
    retention_reduce_heads<Element>
        <<<grid, kStateThreads, 0, stream>>>(partial, out, group, p.heads_q, p.seqlen, columns);
    return cuda_status(cudaGetLastError());
  }

  // The arguments of one pass; `pass` lacks what depends on it.
  template <typename T>
  static int32_t describe(ChunkBackwardArguments& arguments, ChunkArguments const& pass, Params const& p,
                          Tensor const& x, Tensor const& y, Tensor const& z, Tensor const& out) {
    arguments.pass = pass;
    arguments.pass.depth = T::kTransposed ? p.dim_v : p.dim_qk;
    arguments.pass.columns = T::kTransposed ? p.dim_qk : p.dim_v;
    int const x_heads = T::kReversed ? p.heads_kv : p.heads_q, other_heads = T::kReversed ? p.heads_q : p.heads_kv;
    auto make = [&p](TmaTensor& described, Tensor const& tensor, int columns, int heads) {
      return TmaDescriptors::make<Element>(described, tensor, columns, p.seqlen, heads, p.batch, T::kChunk);
    };
    if (!make(arguments.x, x, arguments.pass.depth, x_heads) ||
        !make(arguments.y, y, arguments.pass.depth, other_heads) ||
        !make(arguments.z, z, arguments.pass.columns, other_heads) ||
        !make(arguments.out, out, arguments.pass.columns, x_heads)) {
      return ATTENTION_AUTOTUNER_BAD_ALIGNMENT;
    }
    int64_t const ctas = int64_t(p.batch) * p.heads_q * pass.supers.divisor * T::kSlices;
    return ctas > INT32_MAX ? ATTENTION_AUTOTUNER_BAD_SHAPE : ATTENTION_AUTOTUNER_OK;
  }
  template <typename T>
  static int ctas_of(ChunkArguments const& pass, Params const& p) {
    return p.batch * p.heads_q * pass.supers.divisor * T::kSlices;
  }
  // `early`: it begins before the kernel of this call that is ahead of it has ended.
  template <typename T>
  static int32_t launch_pass(bool early, ChunkArguments const& pass, Params const& p, Tensor const& x, Tensor const& y,
                             Tensor const& z, Tensor const& out, cudaStream_t stream) {
    ChunkBackwardArguments arguments;
    int32_t const status = describe<T>(arguments, pass, p, x, y, z, out);
    if (status != ATTENTION_AUTOTUNER_OK) return status;
    int const ctas = ctas_of<T>(pass, p);
    return EarlyLaunch::start(early, chunks_backward_sm90<T>, ctas, T::kThreads, T::kSmemBytes, stream, arguments);
  }
  static int32_t launch_dq(bool early, ChunkArguments const& pass, Params const& p, cudaStream_t stream) {
    return launch_pass<Dq>(early, pass, p, p.dout, p.v, p.k, p.dq, stream);
  }
  static int32_t launch_dk(ChunkArguments pass, Params const& p, float* partial, cudaStream_t stream) {
    pass.partial = partial;
    return launch_pass<Dk>(true, pass, p, p.v, p.dout, p.q, p.dk, stream);
  }
  static int32_t launch_dv(ChunkArguments pass, Params const& p, float* partial, cudaStream_t stream) {
    pass.partial = partial;
    return launch_pass<Dv>(true, pass, p, p.k, p.q, p.dout, p.dv, stream);
  }

  // States of super-chunks into `states`; of X and the output, which such a
  // pass has not, the tensors do not matter.
  template <typename T>
  static int32_t launch_states(bool early, ChunkArguments pass, SuperChunks const& cut, float* states,
                               float const* first, float* last, Params const& p, cudaStream_t stream) {
    int const left_out = last != nullptr ? 0 : T::kReversed ? cut.pieces : cut.slots - (cut.supers - 1) * cut.pieces;
    pass.super_chunk = cut.super_chunk / cut.pieces;
    pass.super_offset = T::kReversed ? left_out : 0;
    pass.last_states = states;
    pass.last_slots = cut.slots;
    if (left_out < cut.slots) {
      pass.supers = Divider::by(cut.slots - left_out);
      int32_t const status = T::kReversed ? launch_pass<T>(early, pass, p, p.k, p.q, p.dout, p.dv, stream)
                                          : launch_pass<T>(early, pass, p, p.dout, p.v, p.k, p.dq, stream);
      if (status != ATTENTION_AUTOTUNER_OK) return status;
      early = true;
    }
    int const elements = p.dim_qk * p.dim_v;
    dim3 const grid(divide_up(elements, kScanThreads * kScanElements), p.batch * p.heads_q);
    return EarlyLaunch::start(early, chunk_scan_sm90<T::kReversed>, grid, kScanThreads, 0, stream, states, first, last,
                              p.log2_gamma, p.heads_q, cut.slots, left_out, elements, pass.super_chunk, p.seqlen);
  }

  static int32_t launch(Params const& p, void* workspace, cudaStream_t stream, int32_t device) {
    int32_t status = check_shape(p);
    if (status != ATTENTION_AUTOTUNER_OK) return status;
    Workspace const w(p, workspace);
    status = check(p, workspace, w.bytes);
    if (status != ATTENTION_AUTOTUNER_OK) return status;
    if (!prepared[device].load(std::memory_order_relaxed)) return ATTENTION_AUTOTUNER_BAD_DEVICE;
    ChunkArguments const common = common_arguments(p, w.cut);
    ChunkArguments forward = common, reversed = common;
    forward.first_states = p.initial_state;
    reversed.first_states = p.dfinal_state;
    ChunkArguments reversed_dv = reversed;
    reversed_dv.last_states = p.dinitial_state;
    // A sequence of one slot has the states of the call around it: stored ones are for the gradient of gamma alone, and
    // the passes for dq, dk and dv, which wait for states of more slots, begin before they are there.
    bool const between_slots = w.cut.slots > 1;
    Steps steps;
    if (w.stores_states) {
      float* const last = between_slots ? p.dinitial_state : nullptr;
      steps
          .then([&] {
            return launch_states<States>(false, common, w.cut, w.states, p.initial_state, nullptr, p, stream);
          })
          .then([&] {
            return launch_states<Gradients>(true, common, w.cut, w.gradients, p.dfinal_state, last, p, stream);
          });
    }
    if (between_slots) {
      forward.first_states = w.states;
      reversed.first_states = w.gradients;
      forward.first_slots = reversed.first_slots = w.cut.slots;
      reversed_dv = reversed;
    }
    int const group = p.heads_q / p.heads_kv;
    steps.then([&] { return launch_dq(w.stores_states, forward, p, stream); })
        .then([&] { return launch_dk(reversed, p, w.dk, stream); })
        .then([&] { return launch_dv(reversed_dv, p, w.dv, stream); });
    if (p.dlog2_gamma != nullptr) steps.then([&] { return launch_gamma(p, w, stream); });
    return steps.then([&] { return reduce_heads(w.dk, p.dk, group, p, p.dim_qk, stream); })
        .then([&] { return reduce_heads(w.dv, p.dv, group, p, p.dim_v, stream); })
        .status();
  }

  static int32_t launch_gamma(Params const& p, Workspace const& w, cudaStream_t stream) {
    int const sequences = p.batch * p.heads_q;
    ChunkArguments const common = common_arguments(p, w.cut);
    GammaPairsArguments const pairs{p.q,           p.k,          p.v,         p.dout,
                                    w.gamma_pairs, p.log2_gamma, p.seqlen,    w.cut.super_chunk,
                                    p.dim_qk,      p.dim_v,      p.scale,     Divider::by(w.gamma_tiles),
                                    common.supers, common.heads, common.group};
    int64_t const ctas = int64_t(sequences) * w.cut.supers * w.gamma_tiles;
    if (ctas > INT32_MAX) return ATTENTION_AUTOTUNER_BAD_SHAPE;
    retention_gamma_pairs<Pairs><<<int(ctas), Pairs::kThreads, Pairs::kSmemBytes, stream>>>(pairs);
    Steps steps;
    return steps.then([] { return cuda_status(cudaGetLastError()); })
        .then([&] { return launch_gamma_pass<Gradients>(common, p, w, w.gamma_queries, stream); })
        .then([&] { return launch_gamma_pass<States>(common, p, w, w.gamma_keys, stream); })
        .then([&] {
          retention_gamma_sum<<<sequences, kGammaSumThreads, 0, stream>>>(
              w.gamma_pairs, w.pair_sums, w.gamma_queries, w.query_sums, w.gamma_keys, w.key_sums, p.dlog2_gamma);
          return cuda_status(cudaGetLastError());
        })
        .status();
  }
  template <typename T>
  static int32_t launch_gamma_pass(ChunkArguments const& pass, Params const& p, Workspace const& w, float* partial,
                                   cudaStream_t stream) {
    ChunkGammaArguments mine{{}, w.states, w.gradients, partial};
    int32_t const status = T::kReversed ? describe<T>(mine.chunks, pass, p, p.k, p.q, p.dout, p.dv)
                                        : describe<T>(mine.chunks, pass, p, p.dout, p.v, p.k, p.dq);
    if (status != ATTENTION_AUTOTUNER_OK) return status;
    chunk_gamma_pass<T><<<ctas_of<T>(pass, p), T::kThreads, T::kSmemBytes, stream>>>(mine);
    return cuda_status(cudaGetLastError());
  }

  static attention_autotuner_kernel_info info() {
    return kernel_info<Config>(kChunk, Dq::kColumns, Dq::kThreads, maximum(Dq::kSmemBytes, Dv::kSmemBytes));
  }
};

}  // namespace attention_autotuner

// Host side of a retention backward artifact of family sm90: workspace, preparation, TMA descriptors, and the launches
// of its three passes, in the order that host/chunks_backward.cuh describes.
#pragma once

#include "attention_autotuner/abi.h"
#include "attention_autotuner/chunks_backward_sm90/gamma.cuh"
#include "attention_autotuner/chunks_backward_sm90/mainloop.cuh"
#include "attention_autotuner/chunks_backward_sm90/scan.cuh"
#include "attention_autotuner/common/chunk_arguments.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/scheduler.cuh"
#include "attention_autotuner/host/chunks_backward.cuh"
#include "attention_autotuner/host/early_launch.cuh"
#include "attention_autotuner/host/entry.cuh"
#include "attention_autotuner/host/super_chunks.cuh"
#include "attention_autotuner/host/tma_descriptor.cuh"
#include "attention_autotuner/sm90/tma.cuh"

namespace attention_autotuner {

template <typename Config>
struct ChunksBackwardSm90Entry : ChunksBackward<Config, RetentionBackwardParams> {
  using Params = RetentionBackwardParams;
  using Base = ChunksBackward<Config, Params>;
  using Base::check;
  using Base::check_shape;
  using Base::prepared;
  using Base::reduce_heads;
  using typename Base::Element;
  using typename Base::Tensor;
  using Dq = ChunkBackwardTraits<Config, ChunkGradient::kDq, false>;
  using Dk = ChunkBackwardTraits<Config, ChunkGradient::kDk, false>;
  using Dv = ChunkBackwardTraits<Config, ChunkGradient::kDv, false>;
  using States = ChunkBackwardTraits<Config, ChunkGradient::kDq, true>;
  using Gradients = ChunkBackwardTraits<Config, ChunkGradient::kDv, true>;  // of the states
  static constexpr int kChunk = Dq::kChunk;

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
        .then([&] { return Base::prepare_common(device); })
        .then([&] { return prepare_gamma<States>(device); })
        .then([&] { return prepare_gamma<Gradients>(device); });
    if (steps.status() == ATTENTION_AUTOTUNER_OK) prepared[device].store(true);
    return steps.status();
  }
  template <typename T>
  static int32_t prepare_gamma(int32_t device) {
    int resident = 0;
    return prepare_kernel(chunk_gamma_pass<T>, T::kThreads, T::kSmemBytes, device, &resident);
  }

  struct Workspace : Base::Buffers {
    Workspace(Params const& p, void* base)
        : Base::Buffers(p, base, Base::cut_of(p, kChunk, minimum(Dq::kSlices, Dv::kSlices)),
                        Dv::kSlices * 4 * Dv::kWarpgroups, Dq::kSlices * 4 * Dq::kWarpgroups) {}
  };
  static size_t workspace_bytes(Params const& p) {
    return check_shape(p) == ATTENTION_AUTOTUNER_OK ? size_t(Workspace(p, nullptr).used()) : 0;
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
  // `first`: no kernel of this call is ahead of it.
  template <typename T>
  static int32_t launch_pass(bool first, ChunkArguments const& pass, Params const& p, Tensor const& x, Tensor const& y,
                             Tensor const& z, Tensor const& out, cudaStream_t stream) {
    ChunkBackwardArguments arguments;
    int32_t const status = describe<T>(arguments, pass, p, x, y, z, out);
    if (status != ATTENTION_AUTOTUNER_OK) return status;
    int const ctas = ctas_of<T>(pass, p);
    arguments.first = first;
    return EarlyLaunch::start(true, chunks_backward_sm90<T>, ctas, T::kThreads, T::kSmemBytes, stream, arguments);
  }
  static int32_t launch_dq(bool first, ChunkArguments const& pass, Params const& p, cudaStream_t stream) {
    return launch_pass<Dq>(first, pass, p, p.dout, p.v, p.k, p.dq, stream);
  }
  static int32_t launch_dk(ChunkArguments pass, Params const& p, float* partial, cudaStream_t stream) {
    pass.partial = partial;
    return launch_pass<Dk>(false, pass, p, p.v, p.dout, p.q, p.dk, stream);
  }
  static int32_t launch_dv(ChunkArguments pass, Params const& p, float* partial, cudaStream_t stream) {
    pass.partial = partial;
    return launch_pass<Dv>(false, pass, p, p.k, p.q, p.dout, p.dv, stream);
  }

  // States of super-chunks into `states`; of X and the output, which such a pass has not, the tensors do not matter.
  template <typename T>
  static int32_t launch_states(bool first_of_call, ChunkArguments pass, SuperChunks const& cut, float* states,
                               float const* first, float* last, Params const& p, cudaStream_t stream) {
    int const left_out = last != nullptr ? 0 : T::kReversed ? cut.pieces : cut.slots - (cut.supers - 1) * cut.pieces;
    pass.super_chunk = cut.super_chunk / cut.pieces;
    pass.super_offset = T::kReversed ? left_out : 0;
    pass.last_states = states;
    pass.last_slots = cut.slots;
    if (left_out < cut.slots) {
      pass.supers = Divider::by(cut.slots - left_out);
      int32_t const status = T::kReversed ? launch_pass<T>(first_of_call, pass, p, p.k, p.q, p.dout, p.dv, stream)
                                          : launch_pass<T>(first_of_call, pass, p, p.dout, p.v, p.k, p.dq, stream);
      if (status != ATTENTION_AUTOTUNER_OK) return status;
      first_of_call = false;
    }
    int const elements = p.dim_qk * p.dim_v;
    dim3 const grid(divide_up(elements, kScanThreads * kScanElements), p.batch * p.heads_q);
    return EarlyLaunch::start(!first_of_call, chunk_scan_sm90<T::kReversed>, grid, kScanThreads, 0, stream, states,
                              first, last, p.log2_gamma, p.heads_q, cut.slots, left_out, elements, pass.super_chunk,
                              p.seqlen);
  }

  static int32_t launch(Params const& p, void* workspace, cudaStream_t stream, int32_t device) {
    int32_t status = check_shape(p);
    if (status != ATTENTION_AUTOTUNER_OK) return status;
    Workspace const w(p, workspace);
    status = check(p, workspace, w.used());
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
          .then(
              [&] { return launch_states<States>(true, common, w.cut, w.states, p.initial_state, nullptr, p, stream); })
          .then([&] {
            return launch_states<Gradients>(false, common, w.cut, w.gradients, p.dfinal_state, last, p, stream);
          });
    }
    if (between_slots) {
      forward.first_states = w.states;
      reversed.first_states = w.gradients;
      forward.first_slots = reversed.first_slots = w.cut.slots;
      reversed_dv = reversed;
    }
    steps.then([&] { return launch_dq(!w.stores_states, forward, p, stream); })
        .then([&] { return launch_dk(reversed, p, w.dk, stream); })
        .then([&] { return launch_dv(reversed_dv, p, w.dv, stream); });
    if (p.dlog2_gamma != nullptr) steps.then([&] { return launch_gamma(p, w, stream); });
    return steps.then([&] { return reduce_heads(w.dk, p.dk, p, p.dim_qk, stream); })
        .then([&] { return reduce_heads(w.dv, p.dv, p, p.dim_v, stream); })
        .status();
  }

  static int32_t launch_gamma(Params const& p, Workspace const& w, cudaStream_t stream) {
    ChunkArguments const common = common_arguments(p, w.cut);
    return Base::launch_gamma(p, w, common, stream, [&] {
      return Steps()
          .then([&] { return launch_gamma_pass<Gradients>(common, p, w, w.gamma_queries, stream); })
          .then([&] { return launch_gamma_pass<States>(common, p, w, w.gamma_keys, stream); })
          .status();
    });
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

// What the host sides of retention's backward have in common, in either family: buffers, checks, and the launches
// around the passes over chunks.
//
// dq goes forward in time with the states computed again, dk and dv go backward with the gradient of the state. Where a
// sequence is cut into super-chunks, states and their gradients at the cuts come first, each from a pass of its own:
// they are all that is ever stored of either, and the gradient of gamma is computed from them and the inputs. Gradients
// of K and V under a group of query heads go through fp32 partial sums, one for each head.
#pragma once

#include "attention_autotuner/abi.h"
#include "attention_autotuner/common/chunk_sequences.cuh"
#include "attention_autotuner/common/gamma.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/scheduler.cuh"
#include "attention_autotuner/common/states.cuh"
#include "attention_autotuner/host/checks.cuh"
#include "attention_autotuner/host/entry.cuh"
#include "attention_autotuner/host/retention_checks.cuh"
#include "attention_autotuner/host/super_chunks.cuh"
#include "attention_autotuner/host/workspace.cuh"

namespace attention_autotuner {

inline constexpr int kReduceHeadsBlocks = 512;

template <typename Config, typename Params>
struct ChunksBackward {
  using Element = typename Config::Element;
  using Tensor = attention_autotuner_tensor;
  using Pairs = GammaPairsTraits<Config>;
  static constexpr int kLongestForGamma = gamma_super_chunk(Config::kPaddedDimQK, Config::kPaddedDimV);
  static constexpr int kGammaSuperChunk =
      Config::kSuperChunk == 0 ? kLongestForGamma : minimum(Config::kSuperChunk, kLongestForGamma);
  static inline std::atomic<bool> prepared[kMaxDevices];

  // The kernels around the passes.
  static int32_t prepare_common(int32_t device) {
    int resident = 0;
    return Steps()
        .then([&] { return prepare_kernel(retention_reduce_heads<Element>, kStateThreads, 0, device, &resident); })
        .then([&] {
          return prepare_kernel(retention_gamma_pairs<Pairs>, Pairs::kThreads, Pairs::kSmemBytes, device, &resident);
        })
        .then([&] { return prepare_kernel(retention_gamma_sum, kGammaSumThreads, 0, device, &resident); })
        .status();
  }

  // `slices` CTAs work on each super-chunk.
  static SuperChunks cut_of(Params const& p, int chunk, int slices) {
    bool const gamma_too = p.dlog2_gamma != nullptr;
    int const wanted = gamma_too ? kGammaSuperChunk : Config::kSuperChunk;
    if constexpr (Pairs::kPacked) {
      return packed_super_chunks(p, chunk, gamma_too ? wanted : packed_super_chunk(p, wanted));
    } else {
      return {p.seqlen, chunk, wanted, gamma_too ? kEnoughPieces : int64_t(p.batch) * p.heads_q * slices};
    }
  }
  // At the start of a workspace. The passes that sum over queries and keys leave so many sums of a super-chunk each.
  struct Buffers : WorkspaceLayout {
    SuperChunks cut;
    bool stores_states;
    float *states, *gradients, *dk, *dv;
    int gamma_tiles, pair_sums, query_sums, key_sums;  // of a sequence
    float *gamma_pairs, *gamma_queries, *gamma_keys;

    Buffers(Params const& p, void* base, SuperChunks const& cut, int sums_of_queries, int sums_of_keys)
        : WorkspaceLayout(base), cut(cut) {
      bool const gamma_too = p.dlog2_gamma != nullptr, grouped = p.heads_q != p.heads_kv;
      stores_states = cut.divided() || gamma_too;
      int64_t const sequences = int64_t(batch_of_rows(p)) * p.heads_q, rows = sequences * rows_of(p);
      int64_t const elements = int64_t(p.dim_qk) * p.dim_v;
      states = this->template take<float>(stores_states, sequences * cut.slots * elements);
      gradients = this->template take<float>(stores_states, sequences * cut.slots * elements);
      dk = this->template take<float>(grouped, rows * p.dim_qk);
      dv = this->template take<float>(grouped, rows * p.dim_v);
      gamma_tiles = divide_up(cut.super_chunk, Pairs::kRows);
      pair_sums = cut.supers * gamma_tiles * Pairs::kWarps;
      query_sums = cut.supers * sums_of_queries;
      key_sums = cut.supers * sums_of_keys;
      gamma_pairs = this->template take<float>(gamma_too, sequences * pair_sums);
      gamma_queries = this->template take<float>(gamma_too, sequences * query_sums);
      gamma_keys = this->template take<float>(gamma_too, sequences * key_sums);
    }
  };

  static int32_t check_shape(Params const& p) {
    return check_retention_shape(p, Config::kPaddedDimQK, Config::kPaddedDimV);
  }
  static int32_t check(Params const& p, void* workspace, int64_t bytes) {
    int const batch = batch_of_rows(p), rows = rows_of(p);
    bool const pointers = takes_retention_inputs(p, Config::kCopyBytes) &&
                          aligned(p.dout, Config::kCopyBytes, batch, p.heads_q, rows) &&
                          aligned(p.dq, 16, batch, p.heads_q, rows) && aligned(p.dk, 16, batch, p.heads_kv, rows) &&
                          aligned(p.dv, 16, batch, p.heads_kv, rows) && takes_workspace(workspace, bytes);
    return pointers ? ATTENTION_AUTOTUNER_OK : ATTENTION_AUTOTUNER_BAD_ALIGNMENT;
  }

  static int32_t reduce_heads(float const* partial, Tensor const& out, Params const& p, int columns,
                              cudaStream_t stream) {
    if (partial == nullptr) return ATTENTION_AUTOTUNER_OK;
    int const group = p.heads_q / p.heads_kv, sequences = batch_of_rows(p) * p.heads_kv;
    int64_t const blocks = (int64_t(rows_of(p)) * columns / 2 + kStateThreads - 1) / kStateThreads;
    dim3 const grid(blocks < kReduceHeadsBlocks ? int(blocks) : kReduceHeadsBlocks, sequences);
    retention_reduce_heads<Element>
        <<<grid, kStateThreads, 0, stream>>>(partial, out, group, p.heads_q, rows_of(p), columns);
    return cuda_status(cudaGetLastError());
  }

  // The gradient of gamma: of pairs within super-chunks, then what `passes` launches, then the sum. `common` are the
  // arguments that all passes have.
  template <typename Common, typename Passes>
  static int32_t launch_gamma(Params const& p, Buffers const& w, Common const& common, cudaStream_t stream,
                              Passes&& passes) {
    int const sequences = batch_of_rows(p) * p.heads_q;
    typename Pairs::Arguments pairs{};
    static_cast<GammaPairsArguments&>(pairs) = {p.q,           p.k,          p.v,         p.dout,
                                                w.gamma_pairs, p.log2_gamma, p.seqlen,    w.cut.super_chunk,
                                                p.dim_qk,      p.dim_v,      p.scale,     Divider::by(w.gamma_tiles),
                                                common.supers, common.heads, common.group};
    if constexpr (Pairs::kPacked) pairs.packed = common.packed;
    int64_t const ctas = int64_t(sequences) * w.cut.supers * w.gamma_tiles;
    if (ctas > INT32_MAX) return ATTENTION_AUTOTUNER_BAD_SHAPE;
    retention_gamma_pairs<Pairs><<<int(ctas), Pairs::kThreads, Pairs::kSmemBytes, stream>>>(pairs);
    return Steps()
        .then([] { return cuda_status(cudaGetLastError()); })
        .then(passes)
        .then([&] {
          retention_gamma_sum<<<sequences, kGammaSumThreads, 0, stream>>>(
              w.gamma_pairs, w.pair_sums, w.gamma_queries, w.query_sums, w.gamma_keys, w.key_sums, p.dlog2_gamma);
          return cuda_status(cudaGetLastError());
        })
        .status();
  }
};

}  // namespace attention_autotuner

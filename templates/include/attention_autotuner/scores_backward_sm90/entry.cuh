// Host side of a retnet backward artifact of family sm90: workspace, checks, TMA descriptors, preparation and launches.
//
// Rows' LSE and delta, split reductions and the gradient of the mask are by kernels of common/.
#pragma once

#include "attention_autotuner/abi.h"
#include "attention_autotuner/common/backward_arguments.cuh"
#include "attention_autotuner/common/mask_gradient.cuh"
#include "attention_autotuner/common/postprocess.cuh"
#include "attention_autotuner/common/preprocess.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/scheduler.cuh"
#include "attention_autotuner/host/backward.cuh"
#include "attention_autotuner/host/checks.cuh"
#include "attention_autotuner/host/early_launch.cuh"
#include "attention_autotuner/host/entry.cuh"
#include "attention_autotuner/host/head_splits.cuh"
#include "attention_autotuner/host/tma_descriptor.cuh"
#include "attention_autotuner/score/score_mod.cuh"
#include "attention_autotuner/scores_backward_sm90/kernel.cuh"
#include "attention_autotuner/scores_backward_sm90/row_factors.cuh"
#include "attention_autotuner/scores_backward_sm90/score_bands.cuh"
#include "attention_autotuner/scores_backward_sm90/stored_scores.cuh"
#include "attention_autotuner/sm90/tma.cuh"

namespace attention_autotuner {

// The kernel of dK's pass: the one that computes its scores, or the one that multiplies stored ones.
template <typename Config, bool kStored>
struct DkPassSm90 {
  using Traits = PassSm90Traits<Config, typename Config::Dk, Result::kDk>;
  static constexpr auto kKernel = scores_backward_sm90<Traits>;
};
template <typename Config>
struct DkPassSm90<Config, true> {
  using Traits = StoredPassSm90Traits<Config>;
  static constexpr auto kKernel = scores_backward_sm90_stored<Traits>;
};

template <typename Config>
struct BackwardSm90Entry : BackwardHost<Config> {
  using Host = BackwardHost<Config>;
  using typename Host::Params;
  using Element = typename Config::Element;
  using Common = typename Host::Arguments;
  using Dq = PassSm90Traits<Config, typename Config::Dq, Result::kDq>;
  using DkPass = DkPassSm90<Config, kStoresScoresOf<Config>>;
  using Dk = typename DkPass::Traits;
  using Dv = PassSm90Traits<Config, typename Config::Dv, Result::kDv>;
  using Bands = ScoreBands<Dq, Dk>;
#ifdef ATTENTION_AUTOTUNER_CHECK_RACES
  static constexpr int kMostCtas = 4;  // so that they take several tiles of small shapes, too
#else
  static constexpr int kMostCtas = INT32_MAX;
#endif
  static inline std::atomic<int> multiprocessors[kMaxDevices];  // of devices that are prepared

  // The passes in the order they run, each as (kernel, traits).
  template <typename Visit>
  static int32_t for_each_pass(Visit&& visit) {
    int32_t status = visit(scores_backward_sm90<Dq>, Dq{});
    if (status == ATTENTION_AUTOTUNER_OK) status = visit(DkPass::kKernel, Dk{});
    if (status == ATTENTION_AUTOTUNER_OK) status = visit(scores_backward_sm90<Dv>, Dv{});
    return status;
  }

  static int32_t prepare(int32_t device) {
    if (multiprocessors[device].load() > 0) return ATTENTION_AUTOTUNER_OK;
    int resident = 0, count = 0;
    int32_t status = TmaDescriptors::prepare(device);
    if (status == ATTENTION_AUTOTUNER_OK) {
      status = for_each_pass([device](auto kernel, auto traits) {
        using T = decltype(traits);
        int resident = 0;
        return prepare_kernel(kernel, T::kThreads, T::kSmemBytes, device, &resident);
      });
    }
    if (status == ATTENTION_AUTOTUNER_OK) {
      status = prepare_kernel(retnet_backward_factors<Config>, kFactorThreads, 0, device, &resident);
    }
    if (status == ATTENTION_AUTOTUNER_OK) {
      status = prepare_kernel(backward_preprocess<Config>, kRowThreads, 0, device, &resident);
    }
    if (status == ATTENTION_AUTOTUNER_OK) {
      status = prepare_kernel(backward_reduce_splits<Config>, kRowThreads, 0, device, &resident);
    }
    if (status == ATTENTION_AUTOTUNER_OK) {
      status = prepare_mask_gradient<Config>(device);
    }
    if (status == ATTENTION_AUTOTUNER_OK) {
      status = cuda_status(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
    }
    if (status == ATTENTION_AUTOTUNER_OK) status = EarlyLaunch::prepare();
    if (status == ATTENTION_AUTOTUNER_OK) multiprocessors[device].store(count);
    return status;
  }

  static int count_splits(Params const& p) {
    int const group = p.heads_q / p.heads_kv;
    int64_t const ctas = int64_t(divide_up(p.seqlen_k, Dk::kBlockRows)) * p.heads_kv * p.batch;
    return count_head_splits(ctas, group, Config::kEnoughCtas);
  }
  struct Workspace : Host::Places {
    int64_t scores;

    explicit Workspace(Params const& p) : Host::Places(p, count_splits(p)) {
      this->take_partial_sums(p);
      scores = (this->bytes + 255) / 256 * 256;
      if constexpr (Dq::kStoresScores) {
        this->bytes = scores + Bands(p, this->splits, Config::kEnoughCtas).all_bytes();
      }
    }
  };
  static size_t workspace_bytes(Params const& p) {
    return check_shape(p) == ATTENTION_AUTOTUNER_OK ? size_t(Workspace(p).bytes) : 0;
  }
  static int32_t check_shape(Params const& p) {
    int32_t const status = Host::check_shape(p);
    if (status != ATTENTION_AUTOTUNER_OK) return status;
    return p.r_grad && p.o.data == nullptr ? ATTENTION_AUTOTUNER_BAD_SHAPE : ATTENTION_AUTOTUNER_OK;
  }

  // --- launches ------------------------------------------------------------------------------------------------------

  // The TMA descriptors of a launch: of any tensor, with tiles of so many rows.
  struct Descriptors {
    Params const& p;
    bool made = true;

    void q(TmaTensor& described, int rows) { add(described, p.q, p.dim_qk, p.seqlen_q, p.heads_q, rows); }
    void k(TmaTensor& described, int rows) { add(described, p.k, p.dim_qk, p.seqlen_k, p.heads_kv, rows); }
    void v(TmaTensor& described, int rows) { add(described, p.v, p.dim_v, p.seqlen_k, p.heads_kv, rows); }
    void dout(TmaTensor& described, int rows) { add(described, p.dout, p.dim_v, p.seqlen_q, p.heads_q, rows); }
    void mask(TmaTensor& described, int rows) {
      made = made && TmaDescriptors::make<Element>(described, p.mask, p.seqlen_k, p.seqlen_q, p.heads_q, 1, rows);
    }
    void add(TmaTensor& described, attention_autotuner_tensor const& tensor, int columns, int length, int heads,
             int rows) {
      made = made && TmaDescriptors::make<Element>(described, tensor, columns, length, heads, p.batch, rows);
    }
  };

  // The arguments of a pass that computes scores: true where its tensors have descriptors.
  template <typename T>
  static bool fill(PassSm90Arguments& a, Common const& common) {
    Params const& p = common.params;
    Descriptors descriptors{p};
    descriptors.mask(a.mask, T::kByQueries ? T::kBlockRows : T::kBlockColumns);
    if constexpr (T::kResult == Result::kDq) {
      descriptors.dout(a.x[0], T::kBlockRows);
      descriptors.v(a.y[0], T::kBlockColumns);
      descriptors.q(a.x[1], T::kBlockRows);
      descriptors.k(a.y[1], T::kBlockColumns);
      descriptors.k(a.z, T::kBlockColumns);
    } else if constexpr (T::kResult == Result::kDk) {
      descriptors.v(a.x[0], T::kBlockRows);
      descriptors.dout(a.y[0], T::kBlockColumns);
      descriptors.k(a.x[1], T::kBlockRows);
      descriptors.q(a.y[1], T::kBlockColumns);
      descriptors.q(a.z, T::kBlockColumns);
    } else {
      descriptors.k(a.x[0], T::kBlockRows);
      descriptors.q(a.y[0], T::kBlockColumns);
      descriptors.dout(a.z, T::kZRows);
    }
    a.mainloops = p.r_grad && T::kResult != Result::kDv ? 2 : 1;
    a.common = common;
    a.scale_sign = p.scale > 0.0f ? 1.0f : p.scale < 0.0f ? -1.0f : 0.0f;
    return descriptors.made;
  }
  // A pass over so many heads, of queries or of keys, and batches.
  template <typename T, typename Arguments>
  static int32_t launch_tiles(void (*kernel)(Arguments, TileList), Arguments const& arguments, int heads, int batches,
                              int ctas, cudaStream_t stream) {
    Params const& p = arguments.common.params;
    int const blocks = divide_up(T::kByQueries ? p.seqlen_q : p.seqlen_k, T::kBlockRows);
    int64_t const tiles = int64_t(blocks) * heads * batches * T::kSlices;
    if (tiles > INT32_MAX) return ATTENTION_AUTOTUNER_BAD_SHAPE;
    TileList const list{int(tiles),         T::kByQueries && p.causal, Divider::by(blocks),
                        Divider::by(heads), Divider::by(batches),      Divider::by(p.heads_q / p.heads_kv)};
    int const grid = minimum(int(tiles), minimum(ctas, kMostCtas));
    constexpr int kCluster = T::kSharesScores ? T::kSlices : 1;  // the slices of a tile of rows
    return EarlyLaunch::start_clusters(true, kCluster, kernel, grid - grid % kCluster, T::kThreads, T::kSmemBytes,
                                       stream, arguments, list);
  }
  template <typename T>
  static int32_t launch_pass(void (*kernel)(PassSm90Arguments, TileList), Common const& common, int ctas,
                             cudaStream_t stream) {
    Params const& p = common.params;
    PassSm90Arguments arguments;
    if (!fill<T>(arguments, common)) return ATTENTION_AUTOTUNER_BAD_ALIGNMENT;
    int const heads = T::kByQueries ? p.heads_q : p.heads_kv * common.splits.divisor;
    return launch_tiles<T>(kernel, arguments, heads, p.batch, ctas, stream);
  }
  // dQ and dK of one band of heads and batches after the other.
  static int32_t launch_bands(Common const& common, char* scores, int ctas, cudaStream_t stream) {
    Params const& p = common.params;
    Bands const bands(p, common.splits.divisor, Config::kEnoughCtas);
    BandSm90Arguments dq;
    StoredSm90Arguments dk;
    Descriptors descriptors{p};
    descriptors.q(dk.q, Dk::kBlockDepth);
    if (!fill<Dq>(dq, common) || !descriptors.made) return ATTENTION_AUTOTUNER_BAD_ALIGNMENT;
    dk.common = common;
    dk.mainloops = dq.mainloops;
    int const group = p.heads_q / p.heads_kv, splits = common.splits.divisor, rows = dq.mainloops * bands.loop_rows;
    int count = 0;
    for (int head = 0; head < p.heads_kv; head += bands.heads) {
      for (int batch = 0; batch < p.batch; batch += bands.batches, ++count) {
        int const heads = minimum(bands.heads, p.heads_kv - head), batches = minimum(bands.batches, p.batch - batch);
        attention_autotuner_tensor stored{};
        stored.data = scores + count % 2 * bands.bytes;
        stored.stride_row = bands.columns;
        stored.stride_batch = int64_t(rows) * bands.columns;
        stored.stride_head = stored.stride_batch * batches;
        dq.band = dk.band = {stored.data,     head * group,  batch,          batches,
                             bands.loop_rows, bands.columns, Dk::kBlockRows, count == 0};
        if (!TmaDescriptors::make<Element>(dk.scores, stored, bands.columns, rows, heads * group, batches,
                                           Dk::kBlockDepth)) {
          return ATTENTION_AUTOTUNER_BAD_ALIGNMENT;
        }
        int32_t status = launch_tiles<Dq>(scores_backward_sm90<Dq>, dq, heads * group, batches, ctas, stream);
        if (status == ATTENTION_AUTOTUNER_OK) {
          status = launch_tiles<Dk>(DkPass::kKernel, dk, heads * splits, batches, ctas, stream);
        }
        if (status != ATTENTION_AUTOTUNER_OK) return status;
      }
    }
    return ATTENTION_AUTOTUNER_OK;
  }

  static int32_t launch(Params const& p, void* workspace, cudaStream_t stream, int32_t device) {
    int32_t status = check_shape(p);
    if (status == ATTENTION_AUTOTUNER_OK) status = Host::check_pointers(p);
    if (status != ATTENTION_AUTOTUNER_OK) return status;
    Workspace const places(p);
    if (!takes_workspace(workspace, places.bytes)) return ATTENTION_AUTOTUNER_BAD_ALIGNMENT;
    int const ctas = multiprocessors[device].load(std::memory_order_relaxed);
    if (ctas == 0) return ATTENTION_AUTOTUNER_BAD_DEVICE;
    Common const common = Host::arguments_of(p, places, workspace);
    int64_t const rows = int64_t(p.batch) * p.heads_q * common.lse_delta_rows;
    if (rows > INT32_MAX) return ATTENTION_AUTOTUNER_BAD_SHAPE;
    if (p.r_grad) {
      int const ctas = int(rows / common.lse_delta_rows) * divide_up(common.lse_delta_rows, kPreprocessRows);
      backward_preprocess<Config><<<ctas, kRowThreads, 0, stream>>>(common, 0);
      status = cuda_status(cudaGetLastError());
    } else {
      int const ctas = divide_up(int(rows), kFactorThreads);
      status =
          EarlyLaunch::start(true, retnet_backward_factors<Config>, ctas, kFactorThreads, 0, stream, common, int(rows));
    }
    if (status == ATTENTION_AUTOTUNER_OK) {
      auto const launch_one = [&](auto kernel, auto traits) {
        return launch_pass<decltype(traits)>(kernel, common, ctas, stream);
      };
      if constexpr (Dq::kStoresScores) {
        status = launch_bands(common, static_cast<char*>(workspace) + places.scores, ctas, stream);
        if (status == ATTENTION_AUTOTUNER_OK) status = launch_one(scores_backward_sm90<Dv>, Dv{});
      } else {
        status = for_each_pass(launch_one);
      }
    }
    if (status == ATTENTION_AUTOTUNER_OK && places.splits > 1) {
      backward_reduce_splits<Config><<<int(kReduceSplitsCtas), kRowThreads, 0, stream>>>(common);
      status = cuda_status(cudaGetLastError());
    }
    if (status == ATTENTION_AUTOTUNER_OK && p.dmask.data != nullptr) {
      status = launch_mask_gradient<Config>(common, stream);
    }
    return status;
  }

  static attention_autotuner_kernel_info info() {
    int smem = 0;
    for_each_pass([&smem](auto, auto traits) {
      smem = maximum(smem, decltype(traits)::kSmemBytes);
      return int32_t(ATTENTION_AUTOTUNER_OK);
    });
    return kernel_info<Config>(Dq::kBlockRows, Dq::kBlockColumns, Dq::kThreads, smem);
  }
};

}  // namespace attention_autotuner

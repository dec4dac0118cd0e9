// Host side of a backward artifact with scores: workspace, checks, prepare(), and the launches of its plan.
#pragma once

#include "attention_autotuner/abi.h"
#include "attention_autotuner/common/attn_mask_gradient.cuh"
#include "attention_autotuner/common/backward_arguments.cuh"
#include "attention_autotuner/common/bias_gradient.cuh"
#include "attention_autotuner/common/postprocess.cuh"
#include "attention_autotuner/common/preprocess.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/scheduler.cuh"
#include "attention_autotuner/common/sink_gradient.cuh"
#include "attention_autotuner/common/spans.cuh"
#include "attention_autotuner/host/backward.cuh"
#include "attention_autotuner/host/checks.cuh"
#include "attention_autotuner/host/entry.cuh"
#include "attention_autotuner/host/head_splits.cuh"
#include "attention_autotuner/score/score_mod.cuh"
#include "attention_autotuner/scores_backward_sm80/dq_convert.cuh"
#include "attention_autotuner/scores_backward_sm80/key_pass.cuh"
#include "attention_autotuner/scores_backward_sm80/row_pass.cuh"

namespace attention_autotuner {

template <typename Config>
struct BackwardEntry : BackwardHost<Config> {
  using Host = BackwardHost<Config>;
  using Host::check_shape;
  using typename Host::Arguments;
  using typename Host::Params;
  // Not by using: g++ does not find such names in a lambda of a template.
  static constexpr bool kPacked = Host::kPacked, kSpanned = Host::kSpanned;
  static constexpr bool kOnePass = Config::kPlan == Plan::kOnePass;
  static constexpr bool kHasKeys = Config::kPlan != Plan::kThreeKernels;
  static constexpr bool kHasSinks = ModificationsOf<Config>::Type::template kHas<Sinks>;
  static inline std::atomic<bool> prepared[kMaxDevices];

  // The plan's passes in the order they run, each as (kernel, kernel whose CTAs share a group, traits). Only passes
  // over keys can share.
  template <typename Visit>
  static int32_t for_each_pass(Visit&& visit) {
    int32_t status = ATTENTION_AUTOTUNER_OK;
    if constexpr (kHasKeys) {
      status = visit(backward_keys<Config, false>, backward_keys<Config, true>, KeyPassTraits<Config>{});
    }
    if constexpr (!kOnePass) {
      using Traits = RowPassTraits<Config, typename Config::Dq, Result::kDq>;
      if (status == ATTENTION_AUTOTUNER_OK) {
        status = visit(backward_rows<Traits, false>, nullptr, Traits{});
      }
    }
    if constexpr (!kHasKeys) {
      using TraitsK = RowPassTraits<Config, typename Config::Dk, Result::kDk>;
      using TraitsV = RowPassTraits<Config, typename Config::Dv, Result::kDv>;
      if (status == ATTENTION_AUTOTUNER_OK) {
        status = visit(backward_rows<TraitsK, false>, backward_rows<TraitsK, true>, TraitsK{});
      }
      if (status == ATTENTION_AUTOTUNER_OK) {
        status = visit(backward_rows<TraitsV, false>, backward_rows<TraitsV, true>, TraitsV{});
      }
    }
    return status;
  }

  static int32_t prepare(int32_t device) {
    if (prepared[device].load()) return ATTENTION_AUTOTUNER_OK;
    int32_t status = for_each_pass([device](auto kernel, auto shared, auto traits) {
      using Traits = decltype(traits);
      int resident = 0;
      int32_t prepared_status = prepare_kernel(kernel, Traits::kThreads, Traits::kSmemBytes, device, &resident);
      if constexpr (!Traits::kByQueries) {
        if (prepared_status == ATTENTION_AUTOTUNER_OK) {
          prepared_status = prepare_kernel(shared, Traits::kThreads, Traits::kSmemBytes, device, &resident);
        }
      }
      return prepared_status;
    });
    int resident = 0;
    if (status == ATTENTION_AUTOTUNER_OK) {
      status = prepare_kernel(backward_preprocess<Config>, kRowThreads, 0, device, &resident);
    }
    if (status == ATTENTION_AUTOTUNER_OK) {
      status = prepare_kernel(backward_reduce_splits<Config>, kRowThreads, 0, device, &resident);
    }
    if constexpr (kHasSinks) {
      if (status == ATTENTION_AUTOTUNER_OK) {
        status = prepare_kernel(backward_sink_gradient<Config>, kSinkThreads, 0, device, &resident);
      }
    }
    if (status == ATTENTION_AUTOTUNER_OK) status = BiasGradient<Config>::prepare(device);
    if (status == ATTENTION_AUTOTUNER_OK) status = AttnMaskGradient<Config>::prepare(device);
    if constexpr (kSpanned) {
      auto const find = find_spans<Config, true, Params>;
      if (status == ATTENTION_AUTOTUNER_OK) status = prepare_kernel(find, kSpanThreads, 0, device, &resident);
    }
    if constexpr (kOnePass) {
      if (status == ATTENTION_AUTOTUNER_OK) {
        status = prepare_kernel(backward_convert_dq<Config>, kRowThreads, 0, device, &resident);
      }
    }
    if (status == ATTENTION_AUTOTUNER_OK) prepared[device].store(true);
    return status;
  }

  // CTAs that share a block of keys.
  static int count_splits(Params const& p) {
    int block = 0;
    for_each_pass([&block](auto, auto, auto traits) {
      using Traits = decltype(traits);
      if (!Traits::kByQueries) block = maximum(block, Traits::kBlockRows);
      return int32_t(ATTENTION_AUTOTUNER_OK);
    });
    int const group = p.heads_q / p.heads_kv;
    int64_t const blocks = int64_t(divide_up(rows_of_keys<kPacked>(p), block)) * batch_of<kPacked>(p);
    return count_head_splits(blocks * p.heads_kv, group, Config::kEnoughCtas);
  }
  struct Workspace : Host::Places {
    int64_t bias_sums, mask_sums;

    explicit Workspace(Params const& p) : Host::Places(p, count_splits(p)) {
      if constexpr (kOnePass) {
        using T = KeyPassTraits<Config>;
        this->dq_tiles = divide_up(p.seqlen_q, T::kBlockM);
        if constexpr (kPacked) this->dq_tiles = count_blocks(p.total_q, p.batch, T::kBlockM);
        this->bytes += this->heads * this->dq_tiles * (T::kBlockM * T::kPaddedDimQK) * int64_t(sizeof(float));
      }
      this->take_partial_sums(p);
      this->take_spans(p);
      bias_sums = this->bytes;
      this->bytes += BiasGradient<Config>::workspace_bytes(p);
      mask_sums = this->bytes;
      this->bytes += AttnMaskGradient<Config>::workspace_bytes(p);
    }
  };

  static size_t workspace_bytes(Params const& p) {
    return check_shape(p) == ATTENTION_AUTOTUNER_OK ? size_t(Workspace(p).bytes) : 0;
  }

  // Launches a pass over blocks of `rows` rows of `heads` heads.
  template <typename Traits, typename Kernel>
  static int32_t launch_pass(Kernel kernel, Arguments const& arguments, int rows, int heads, bool reversed_rows,
                             cudaStream_t stream) {
    Params const& p = arguments.params;
    int blocks = divide_up(rows, Traits::kBlockRows);
    if constexpr (kPacked) blocks = count_blocks(rows, p.batch, Traits::kBlockRows);
    int64_t const tiles = int64_t(blocks) * heads * batch_of<kPacked>(p) * Traits::kSlices;
    if (tiles > INT32_MAX) return ATTENTION_AUTOTUNER_BAD_SHAPE;
    TileList const list{int(tiles),
                        reversed_rows,
                        Divider::by(blocks),
                        Divider::by(heads),
                        Divider::by(batch_of<kPacked>(p)),
                        Divider::by(p.heads_q / p.heads_kv)};
    kernel<<<int(tiles), Traits::kThreads, Traits::kSmemBytes, stream>>>(arguments, list);
    return cuda_status(cudaGetLastError());
  }

  static int32_t launch(Params const& p, void* workspace, cudaStream_t stream, int32_t device) {
    int32_t status = check_shape(p);
    if (status == ATTENTION_AUTOTUNER_OK) status = Host::check_pointers(p);
    if (status != ATTENTION_AUTOTUNER_OK) return status;
    Workspace const places(p);
    if (!takes_workspace(workspace, places.bytes)) return ATTENTION_AUTOTUNER_BAD_ALIGNMENT;
    if (!prepared[device].load(std::memory_order_relaxed)) return ATTENTION_AUTOTUNER_BAD_DEVICE;
    Arguments const arguments = Host::arguments_of(p, places, workspace);
    int64_t const heads = places.heads;
    int64_t const preprocess_grid = heads * divide_up(arguments.lse_delta_rows, kPreprocessRows);
    if (preprocess_grid > INT32_MAX || heads * places.dq_tiles > INT32_MAX) return ATTENTION_AUTOTUNER_BAD_SHAPE;
    if constexpr (kSpanned) {
      int2* const spans = const_cast<int2*>(arguments.params.row_spans);
      status = launch_spans<Config, true>(false, with_window(p), spans, stream);
      if (status != ATTENTION_AUTOTUNER_OK) return status;
    }
    backward_preprocess<Config>
        <<<int(preprocess_grid), kRowThreads, 0, stream>>>(arguments, (places.dk_partial - places.dq_sum) / 16);
    status = cuda_status(cudaGetLastError());
    if (status != ATTENTION_AUTOTUNER_OK) return status;
    if constexpr (kHasSinks) {
      if (p.dsinks != nullptr) backward_sink_gradient<Config><<<p.heads_q, kSinkThreads, 0, stream>>>(arguments);
      status = cuda_status(cudaGetLastError());
      if (status != ATTENTION_AUTOTUNER_OK) return status;
    }
    auto at = [workspace](int64_t bytes) { return reinterpret_cast<float*>(static_cast<char*>(workspace) + bytes); };
    status = BiasGradient<Config>::launch(arguments, at(places.bias_sums), stream);
    if (status != ATTENTION_AUTOTUNER_OK) return status;
    status = AttnMaskGradient<Config>::launch(arguments, at(places.mask_sums), stream);
    if (status != ATTENTION_AUTOTUNER_OK) return status;
    status = for_each_pass([&](auto kernel, auto shared, auto traits) {
      using Traits = decltype(traits);
      if constexpr (Traits::kByQueries) {
        return launch_pass<Traits>(kernel, arguments, rows_of_queries<kPacked>(p), p.heads_q, p.causal != 0, stream);
      } else {
        return launch_pass<Traits>(places.splits > 1 ? shared : kernel, arguments, rows_of_keys<kPacked>(p),
                                   p.heads_kv * places.splits, false, stream);
      }
    });
    if (status == ATTENTION_AUTOTUNER_OK && places.splits > 1) {
      backward_reduce_splits<Config>
          <<<int(kReduceSplitsCtas), kRowThreads, 0, stream>>>(Host::as_one_sequence(arguments));
      status = cuda_status(cudaGetLastError());
    }
    if constexpr (kOnePass) {
      if (status == ATTENTION_AUTOTUNER_OK) {
        backward_convert_dq<Config><<<int(heads * places.dq_tiles), kRowThreads, 0, stream>>>(arguments);
        status = cuda_status(cudaGetLastError());
      }
    }
    return status;
  }

  static attention_autotuner_kernel_info info() {
    int smem = 0, threads = 0, block_m = 0, block_n = 0;
    for_each_pass([&](auto, auto, auto traits) {
      using Traits = decltype(traits);
      smem = maximum(smem, Traits::kSmemBytes);
      if (threads == 0) {
        threads = Traits::kThreads;
        block_m = Traits::kByQueries ? Traits::kBlockRows : Traits::kBlockColumns;
        block_n = Traits::kByQueries ? Traits::kBlockColumns : Traits::kBlockRows;
      }
      return int32_t(ATTENTION_AUTOTUNER_OK);
    });
    return kernel_info<Config, Params>(block_m, block_n, threads, smem);
  }
};

}  // namespace attention_autotuner

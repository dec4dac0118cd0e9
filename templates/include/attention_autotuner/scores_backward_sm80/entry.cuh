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
#include "attention_autotuner/host/checks.cuh"
#include "attention_autotuner/host/entry.cuh"
#include "attention_autotuner/host/head_splits.cuh"
#include "attention_autotuner/score/score_mod.cuh"
#include "attention_autotuner/scores_backward_sm80/dq_convert.cuh"
#include "attention_autotuner/scores_backward_sm80/key_pass.cuh"
#include "attention_autotuner/scores_backward_sm80/row_pass.cuh"

namespace attention_autotuner {

inline int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// The factor of the scores: see common/backward_arguments.cuh.
inline float score_factor(attention_autotuner_retnet_backward_params const& p) { return p.scale; }
template <typename AttentionParams>
inline float score_factor(AttentionParams const& p) {
  return p.softmax_scale * kLog2E;
}

template <typename Config>
struct BackwardEntry {
  static constexpr ScoreMod kScoreMod = Config::kScoreMod;
  using KernelParams = BackwardParamsOf<Config>;
  using Params = typename AbiParams<KernelParams>::Type;
  using Arguments = BackwardArguments<KernelParams>;
  static constexpr bool kOnePass = Config::kPlan == Plan::kOnePass;
  static constexpr bool kHasKeys = Config::kPlan != Plan::kThreeKernels;
  static constexpr bool kPacked = kIsPacked<Config>;
  static constexpr bool kSpanned = kIsSpanned<Config>;
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

  // Where the buffers of the workspace start, in bytes.
  struct Workspace {
    int64_t lse_delta_rows, dq_tiles;
    int64_t shift, dq_sum, dk_partial, dv_partial, bias_sums, mask_sums, spans, bytes;
    int splits;

    explicit Workspace(Params const& p) {
      int64_t const heads = int64_t(batch_of<kPacked>(p)) * p.heads_q;
      lse_delta_rows = round_up(p.seqlen_q + kLseDeltaPadding, kLseDeltaPadding);
      if constexpr (kPacked) {
        lse_delta_rows = count_blocks(p.total_q, p.batch, kLseDeltaPadding, kLseDeltaSpare) * kLseDeltaPadding;
      }
      shift = heads * lse_delta_rows * int64_t(sizeof(float));
      dq_sum = bytes = 2 * shift;
      dq_tiles = 0;
      if constexpr (kOnePass) {
        using T = KeyPassTraits<Config>;
        dq_tiles = divide_up(p.seqlen_q, T::kBlockM);
        if constexpr (kPacked) dq_tiles = count_blocks(p.total_q, p.batch, T::kBlockM);
        bytes += heads * dq_tiles * (T::kBlockM * T::kPaddedDimQK) * int64_t(sizeof(float));
      }
      dk_partial = dv_partial = bytes;
      splits = count_splits(p);
      if (splits > 1) {
        int64_t const rows = int64_t(splits) * p.batch * p.heads_kv * p.seqlen_k;
        dv_partial += rows * Config::kPaddedDimQK * int64_t(sizeof(float));
        bytes = dv_partial + rows * Config::kPaddedDimV * int64_t(sizeof(float));
      }
      spans = bytes;
      if constexpr (kSpanned) bytes += count_spans<true>(p) * int64_t(sizeof(int2));
      bias_sums = bytes;
      bytes += BiasGradient<Config>::workspace_bytes(p);
      mask_sums = bytes;
      bytes += AttnMaskGradient<Config>::workspace_bytes(p);
    }

    static int count_splits(Params const& p) {
      if (kPacked) return 1;
      int block = 0;
      for_each_pass([&block](auto, auto, auto traits) {
        using Traits = decltype(traits);
        if (!Traits::kByQueries) block = maximum(block, Traits::kBlockRows);
        return int32_t(ATTENTION_AUTOTUNER_OK);
      });
      int const group = p.heads_q / p.heads_kv;
      int64_t const ctas = int64_t(divide_up(p.seqlen_k, block)) * p.heads_kv * p.batch;
      return count_head_splits(ctas, group, Config::kEnoughCtas);
    }
  };

  static size_t workspace_bytes(Params const& p) {
    return check_shape(p) == ATTENTION_AUTOTUNER_OK ? size_t(Workspace(p).bytes) : 0;
  }

  static int32_t check_shape(Params const& p) {
    if (!same_version(p)) return ATTENTION_AUTOTUNER_BAD_VERSION;
    bool const fits = takes_shape(p, Config::kPaddedDimQK, Config::kPaddedDimV) && has_score_mod_inputs<kScoreMod>(p) &&
                      has_values<typename ModificationsOf<Config>::Type>(p);
    return fits ? ATTENTION_AUTOTUNER_OK : ATTENTION_AUTOTUNER_BAD_SHAPE;
  }
  static int32_t check(Params const& p) {
    int32_t const status = check_shape(p);
    if (status != ATTENTION_AUTOTUNER_OK) return status;
    constexpr int kBytes = Config::kCopyBytes;
    auto queries = [&p](attention_autotuner_tensor const& tensor, int bytes) {
      return aligned(tensor, bytes, batch_of<kPacked>(p), p.heads_q, rows_of_queries<kPacked>(p));
    };
    auto keys = [&p](attention_autotuner_tensor const& tensor, int bytes) {
      return aligned(tensor, bytes, batch_of<kPacked>(p), p.heads_kv, rows_of_keys<kPacked>(p));
    };
    bool const pointers = queries(p.q, kBytes) && queries(p.dout, kBytes) && keys(p.k, kBytes) && keys(p.v, kBytes) &&
                          queries(p.o, 16) && queries(p.dq, 16) && keys(p.dk, 16) && keys(p.dv, 16) &&
                          mask_aligned<kScoreMod>(p, kBytes);
    return pointers ? ATTENTION_AUTOTUNER_OK : ATTENTION_AUTOTUNER_BAD_ALIGNMENT;
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

  static Arguments arguments_of(Params const& p, void* workspace) {
    Workspace const places(p);
    auto at = [workspace](int64_t bytes) { return reinterpret_cast<float*>(static_cast<char*>(workspace) + bytes); };
    auto const params_of_kernels = [&]() -> KernelParams {
      if constexpr (kSpanned) {
        return with_spans(with_window(p), reinterpret_cast<int2*>(at(places.spans)));
      } else {
        return with_window(p);
      }
    };
    return {params_of_kernels(),
            score_factor(p),
            at(0),
            at(places.shift),
            at(places.dq_sum),
            int(places.lse_delta_rows),
            int(places.dq_tiles),
            Divider::by(places.splits),
            at(places.dk_partial),
            at(places.dv_partial)};
  }

  static int32_t launch(Params const& p, void* workspace, cudaStream_t stream, int32_t device) {
    int32_t status = check(p);
    if (status != ATTENTION_AUTOTUNER_OK) return status;
    Workspace const places(p);
    if (!takes_workspace(workspace, places.bytes)) return ATTENTION_AUTOTUNER_BAD_ALIGNMENT;
    if (!prepared[device].load(std::memory_order_relaxed)) return ATTENTION_AUTOTUNER_BAD_DEVICE;
    Arguments const arguments = arguments_of(p, workspace);
    int64_t const heads = int64_t(batch_of<kPacked>(p)) * p.heads_q;
    int64_t const preprocess_grid = heads * divide_up(arguments.lse_delta_rows, kPreprocessRows);
    if (preprocess_grid > INT32_MAX || heads * places.dq_tiles > INT32_MAX) return ATTENTION_AUTOTUNER_BAD_SHAPE;
    if constexpr (kSpanned) {
      int2* const spans = const_cast<int2*>(arguments.params.row_spans);
      status = cuda_status(launch_spans<Config, true>(with_window(p), spans, stream));
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
      backward_reduce_splits<Config><<<int(kReduceSplitsCtas), kRowThreads, 0, stream>>>(arguments);
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

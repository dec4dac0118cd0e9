// Host side of an attention or retnet backward artifact of family sm90: workspace, checks, TMA descriptors, launches.
// Rows' LSE and delta and split reductions are by kernels of common/.
#pragma once

#include "attention_autotuner/abi.h"
#include "attention_autotuner/attention_backward_sm90/bias_gradient.cuh"
#include "attention_autotuner/attention_backward_sm90/kernel.cuh"
#include "attention_autotuner/attention_backward_sm90/key_splits.cuh"
#include "attention_autotuner/attention_backward_sm90/postprocess.cuh"
#include "attention_autotuner/attention_backward_sm90/sections.cuh"
#include "attention_autotuner/common/attn_mask_gradient.cuh"
#include "attention_autotuner/common/backward_arguments.cuh"
#include "attention_autotuner/common/postprocess.cuh"
#include "attention_autotuner/common/preprocess.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/scheduler.cuh"
#include "attention_autotuner/common/sink_gradient.cuh"
#include "attention_autotuner/host/backward.cuh"
#include "attention_autotuner/host/checks.cuh"
#include "attention_autotuner/host/early_launch.cuh"
#include "attention_autotuner/host/entry.cuh"
#include "attention_autotuner/host/launch_together.cuh"
#include "attention_autotuner/host/tma_descriptor.cuh"
#include "attention_autotuner/score/lse_delta.cuh"
#include "attention_autotuner/score/score_mod.cuh"

namespace attention_autotuner {

// The traits of a candidate's passes, in the order they run.
template <typename Config, Decomposition kDecomposition = Config::kDecomposition>
struct BackwardPassesSm90;
template <typename Config>
struct BackwardPassesSm90<Config, Decomposition::kFused> {
  using Keys = BackwardPassSm90Traits<Config, typename Config::Keys, GradientPass::kKeys, typename Config::DqShare>;
  template <typename Visit>
  static int32_t for_each(Visit&& visit) {
    return visit(Keys{});
  }
};
template <typename Config>
struct BackwardPassesSm90<Config, Decomposition::kTwoPass> {
  using Keys = BackwardPassSm90Traits<Config, typename Config::Keys, GradientPass::kKeys>;
  using Dq = BackwardPassSm90Traits<Config, typename Config::Dq, GradientPass::kDq>;
  template <typename Visit>
  static int32_t for_each(Visit&& visit) {
    return Steps().then([&] { return visit(Keys{}); }).then([&] { return visit(Dq{}); }).status();
  }
};
template <typename Config>
struct BackwardPassesSm90<Config, Decomposition::kThreePass> {
  using Keys = BackwardPassSm90Traits<Config, typename Config::Dk, GradientPass::kDk>;
  using Dv = BackwardPassSm90Traits<Config, typename Config::Dv, GradientPass::kDv>;
  using Dq = BackwardPassSm90Traits<Config, typename Config::Dq, GradientPass::kDq>;
  template <typename Visit>
  static int32_t for_each(Visit&& visit) {
    return Steps()
        .then([&] { return visit(Keys{}); })
        .then([&] { return visit(Dv{}); })
        .then([&] { return visit(Dq{}); })
        .status();
  }
};

template <typename Config>
struct AttentionBackwardSm90Entry : BackwardHost<Config> {
  using Host = BackwardHost<Config>;
  using Host::check_shape;
  using Host::kPacked;
  using typename Host::KernelParams;
  using typename Host::Params;
  using Element = typename Config::Element;
  using Common = typename Host::Arguments;
  using Passes = BackwardPassesSm90<Config>;
  using Keys = typename Passes::Keys;  // by whose blocks groups of heads are split
  using Mods = ScoreModsOf<Config>;
  using TableGradient = BiasGradientSm90<Config, Keys>;
  static constexpr bool kMasked = Config::kScoreMod == ScoreMod::kMasked;
  static constexpr bool kFused = Config::kDecomposition == Decomposition::kFused;
  // Beside the preprocess: the only pass waits for both.
  static constexpr bool kListedAhead = softmax_backward::kListsAhead<Config>;
  // Blocks of keys of a head: with 8 a call of an H200 gains 0 to 3 % where they begin apart, with 4 it loses 4 to 5.
  static constexpr int kFewestApart = 8;
  static constexpr int64_t kMostTiles = INT32_MAX - 65536;      // indices of claims beyond the last stay within 32 bits
  static inline std::atomic<int> multiprocessors[kMaxDevices];  // set by prepare(); 0 before

  static constexpr auto preprocess_kernel() {
    if constexpr (Config::kEarlyLaunches) {
      return softmax_backward::attention_backward_sm90_preprocess<Config>;
    } else {
      return backward_preprocess<Config>;
    }
  }

  static int32_t prepare(int32_t device) {
    if (multiprocessors[device].load() > 0) return ATTENTION_AUTOTUNER_OK;
    int resident = 0, count = 0;
    int32_t const status =
        Steps()
            .then([&] { return TmaDescriptors::prepare(device); })
            .then([&] { return cuda_status(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device)); })
            .then([&] {
              return Passes::for_each([&](auto traits) {
                using T = decltype(traits);
                if constexpr (kPacked) {
                  auto const list =
                      list_blocks<Config, T::kByQueries, T::kBlockRows, T::kBlockColumns, kListedAhead, Params>;
                  int32_t const listing = prepare_streaming_kernel(list, kListThreads, device);
                  if (listing != ATTENTION_AUTOTUNER_OK) return listing;
                }
                auto const kernel = softmax_backward::attention_backward_sm90<Config, T>;
                return prepare_kernel(kernel, T::kThreads, T::kSmemBytes, device, &resident);
              });
            })
            .then([&] {
              if constexpr (Mods::kSinks && !kFused) {
                int32_t const of_sinks = prepare_kernel(softmax_backward::attention_backward_sm90_sink_gradient<Config>,
                                                        kSinkThreads, 0, device, &resident);
                if (of_sinks != ATTENTION_AUTOTUNER_OK) return of_sinks;
              }
              return prepare_streaming_kernel(preprocess_kernel(), kRowThreads, device);
            })
            .then([&] {
              if constexpr (Mods::kSpanned) {
                return prepare_streaming_kernel(find_spans<Config, true, Params>, kSpanThreads, device);
              }
              return int32_t(ATTENTION_AUTOTUNER_OK);
            })
            .then([&] {
              return prepare_streaming_kernel(softmax_backward::attention_backward_sm90_reduce_splits<Config>,
                                              kRowThreads, device);
            })
            .then([&] { return TableGradient::prepare(device); })
            .then([&] { return AttnMaskGradient<Config>::prepare(device); })
            .then([&] {
              if constexpr (kFused) {
                return prepare_streaming_kernel(softmax_backward::attention_backward_sm90_convert_dq<Config, Keys>,
                                                kRowThreads, device);
              }
              return int32_t(ATTENTION_AUTOTUNER_OK);
            })
            .then([] { return EarlyLaunch::prepare(); })
            .status();
    if (status == ATTENTION_AUTOTUNER_OK) multiprocessors[device].store(count);
    return status;
  }

  struct Workspace : Host::Places {
    using Host::Places::bytes;
    using Host::Places::dq_tiles;
    int64_t semaphores, complete, listed, bias_sums, mask_sums;

    explicit Workspace(Params const& p)
        : Host::Places(p, count_key_splits<KernelParams, Keys>(p, Config::kEnoughCtas)) {
      semaphores = complete = bytes;
      if constexpr (kFused) {
        dq_tiles = divide_up(p.seqlen_q, Keys::kBlockColumns);
        if constexpr (kPacked) dq_tiles = count_blocks(p.total_q, p.batch, Keys::kBlockColumns);
        semaphores += this->heads * dq_tiles * (Keys::kBlockColumns * Keys::kDepth) * int64_t(sizeof(float));
        int64_t const count = this->heads * dq_tiles * Keys::kDqSemaphores;
        complete = semaphores + (count * int64_t(sizeof(int)) + 15) / 16 * 16;
        int64_t const counters = int64_t(this->splits) * p.batch * p.heads_kv + Config::kDynamic;
        bytes = complete + (counters * int64_t(sizeof(int)) + 15) / 16 * 16;
      }
      this->take_partial_sums(p);
      listed = bytes;
      if constexpr (kPacked) {
        int most = 0;
        Passes::for_each([&](auto traits) {
          most = maximum(most, row_blocks<decltype(traits)>(p));
          return int32_t(ATTENTION_AUTOTUNER_OK);
        });
        listed = (bytes + 15) / 16 * 16;
        bytes = listed + (most + 1) * int64_t(sizeof(ListedBlock));  // and how many there are
      }
      this->take_spans(p);
      bias_sums = (bytes + 15) / 16 * 16;
      if (int64_t const wanted = TableGradient::workspace_bytes(p, this->splits)) bytes = bias_sums + wanted;
      mask_sums = (bytes + 15) / 16 * 16;
      if (int64_t const wanted = AttnMaskGradient<Config>::workspace_bytes(p)) bytes = mask_sums + wanted;
    }
  };
  // Blocks of rows of a head, at most.
  template <typename T>
  static int row_blocks(Params const& p) {
    int const rows = T::kByQueries ? rows_of_queries<kPacked>(p) : rows_of_keys<kPacked>(p);
    if constexpr (kPacked) return count_blocks(rows, p.batch, T::kBlockRows);
    return divide_up(rows, T::kBlockRows);
  }
  static size_t workspace_bytes(Params const& p) {
    return check_shape(p) == ATTENTION_AUTOTUNER_OK ? size_t(Workspace(p).bytes) : 0;
  }

  template <typename T>
  static bool describe(softmax_backward::ArgumentsOfPass<T>& a, Params const& p) {
    int const queries = T::kByQueries ? T::kBlockRows : T::kBlockColumns;
    int const keys = T::kByQueries ? T::kBlockColumns : T::kBlockRows;
    auto make = [&p](TmaTensor& described, attention_autotuner_tensor const& tensor, int columns, int length, int heads,
                     int rows) {
      return TmaDescriptors::make<Element>(described, tensor, columns, length, heads, batch_of<kPacked>(p), rows);
    };
    if constexpr (kMasked) {
      if (!TmaDescriptors::make<Element>(a.mask, p.mask, p.seqlen_k, p.seqlen_q, p.heads_q, 1, queries)) return false;
    }
    int const rows_q = rows_of_queries<kPacked>(p), rows_k = rows_of_keys<kPacked>(p);
    if constexpr (T::kTmaStores) {
      bool const described = make(a.dk, p.dk, p.dim_qk, rows_k, p.heads_kv, softmax_backward::kStoredRows) &&
                             make(a.dv, p.dv, p.dim_v, rows_k, p.heads_kv, softmax_backward::kStoredRows);
      if (!described) return false;
    }
    return make(T::kByQueries ? a.x0 : a.y0, p.q, p.dim_qk, rows_q, p.heads_q, queries) &&
           make(T::kByQueries ? a.x1 : a.y1, p.dout, p.dim_v, rows_q, p.heads_q, queries) &&
           make(T::kByQueries ? a.y0 : a.x0, p.k, p.dim_qk, rows_k, p.heads_kv, keys) &&
           make(T::kByQueries ? a.y1 : a.x1, p.v, p.dim_v, rows_k, p.heads_kv, keys);
  }
  template <typename T>
  static int32_t list_blocks_of(Params const& p, BlockList const& listed, cudaStream_t stream) {
    return launch_list<Config, T::kByQueries, T::kBlockRows, T::kBlockColumns, kListedAhead>(p, listed, nullptr,
                                                                                             stream);
  }
  template <typename T>
  static int32_t launch_pass(Common const& common, int* semaphores, int* complete,
                             [[maybe_unused]] BlockList const& listed, float* bias_sums, cudaStream_t stream,
                             int most_ctas) {
    Params const& p = common.params;
    softmax_backward::ArgumentsOfPass<T> arguments;
    if (!describe<T>(arguments, p)) return ATTENTION_AUTOTUNER_BAD_ALIGNMENT;
    arguments.common = common;
    if constexpr (Mods::kModified) take_values<Mods>(arguments, p, arguments.common.c);
    arguments.semaphores = semaphores;
    arguments.complete = complete;
    TableGradient::put(arguments, p, common.splits.divisor, bias_sums);
    int const blocks = row_blocks<T>(p), batch = batch_of<kPacked>(p);
    int const heads = T::kByQueries ? p.heads_q : p.heads_kv * common.splits.divisor;
    int64_t const tiles = int64_t(blocks) * heads * batch;
    if (tiles > kMostTiles) return ATTENTION_AUTOTUNER_BAD_SHAPE;
    int const section = section_heads<Config, T, kPacked>(p, heads * batch, common.splits.divisor, most_ctas);
    softmax_backward::TileListOf<T> list;
    static_cast<softmax_backward::SectionList&>(list) = {
        kPacked ? heads : int(tiles), T::kQueuedDq || (T::kByQueries && p.causal), Divider::by(section * blocks),
        Divider::by(section),         Divider::by(kMasked ? batch : heads),        Divider::by(p.heads_q / p.heads_kv)};
    if constexpr (kPacked) {
      list.listed = listed;
      if constexpr (!kListedAhead) {
        int32_t const status = list_blocks_of<T>(p, listed, stream);
        if (status != ATTENTION_AUTOTUNER_OK) return status;
      }
    }
    if constexpr (T::kDynamic) list.claimed = complete + batch * p.heads_kv * common.splits.divisor;
    if constexpr (T::kTailed) {
      int const tail = tail_heads<T, kPacked>(p, heads * batch, section, blocks, most_ctas);
      list.tail_head = heads * batch - tail;
      list.tail_tiles = list.tail_head * (kPacked ? 1 : blocks);
      list.tail_heads = Divider::by(maximum(tail, 1));
    }
    int ctas = Config::kPersistent ? minimum(int(tiles), most_ctas) : int(tiles);
    // CTAs of a head wait for each other in turn: where they begin it together, those of the next head need not wait,
    // and each waits for such as were dispatched before it, which a CTA's second block of the same head would not.
    if (T::kQueuedDq && !T::kDynamic) ctas = ctas < blocks ? int(tiles) : ctas / blocks * blocks;
    auto const kernel = softmax_backward::attention_backward_sm90<Config, T>;
    arguments.apart = T::kApart && !p.causal && blocks >= kFewestApart && blocks <= most_ctas;
    if constexpr (T::kApart) {
      if (arguments.apart) {
        cudaError_t const error = launch_together(kernel, ctas, T::kThreads, T::kSmemBytes, stream, arguments, list);
        if (error != cudaErrorCooperativeLaunchTooLarge) return cuda_status(error);
        arguments.apart = false;
      }
    }
    // A later pass waits for nothing, as the first one has waited; but blocks are listed again for it, by the kernel
    // ahead.
    bool const early = Config::kEarlyLaunches && (!kPacked || T::kFirstPass);
    return EarlyLaunch::start(early, kernel, ctas, T::kThreads, T::kSmemBytes, stream, arguments, list);
  }

  static int32_t launch(Params const& p, void* workspace, cudaStream_t stream, int32_t device) {
    int32_t status = check_shape(p);
    if (status == ATTENTION_AUTOTUNER_OK) status = Host::check_pointers(p);
    if (status != ATTENTION_AUTOTUNER_OK) return status;
    Workspace const places(p);
    if (!takes_workspace(workspace, places.bytes)) return ATTENTION_AUTOTUNER_BAD_ALIGNMENT;
    int const most_ctas = multiprocessors[device].load(std::memory_order_relaxed);  // registers leave room for one each
    if (most_ctas == 0) return ATTENTION_AUTOTUNER_BAD_DEVICE;
    auto at = [workspace](int64_t bytes) { return static_cast<char*>(workspace) + bytes; };
    Common const common = Host::arguments_of(p, places, workspace);
    int* const semaphores = reinterpret_cast<int*>(at(places.semaphores));
    int* const complete = reinterpret_cast<int*>(at(places.complete));
    float* const bias_sums = reinterpret_cast<float*>(at(places.bias_sums));
    float* const mask_sums = reinterpret_cast<float*>(at(places.mask_sums));
    auto* const blocks = reinterpret_cast<ListedBlock*>(at(places.listed));
    BlockList const listed{blocks + 1, &blocks->block};
    int64_t const heads = places.heads;
    int64_t const preprocess_ctas = heads * divide_up(common.lse_delta_rows, kPreprocessRowsOf<Config::kEarlyLaunches>);
    if (preprocess_ctas > INT32_MAX || heads * places.dq_tiles > INT32_MAX) return ATTENTION_AUTOTUNER_BAD_SHAPE;
    if constexpr (Mods::kSpanned) {
      auto* const spans = reinterpret_cast<int2*>(at(places.spans));
      status = launch_spans<Config, true>(Config::kEarlyLaunches, with_window(p), spans, stream);
      if (status != ATTENTION_AUTOTUNER_OK) return status;
    }
    if constexpr (kListedAhead) {
      int32_t const listing = list_blocks_of<Keys>(p, listed, stream);
      if (listing != ATTENTION_AUTOTUNER_OK) return listing;
    }
    Common cleared = common;
    int64_t const clear_from = Keys::kStoredDq ? places.semaphores : places.dq_sum;
    cleared.dq_sum = reinterpret_cast<float*>(at(clear_from));
    return Steps()
        .then([&] {
          return EarlyLaunch::start(Config::kEarlyLaunches, preprocess_kernel(), int(preprocess_ctas), kRowThreads, 0,
                                    stream, cleared, (places.dk_partial - clear_from) / 16);
        })
        .then([&] { return TableGradient::launch_before(common, bias_sums, stream); })
        .then([&] { return AttnMaskGradient<Config>::launch(common, mask_sums, stream); })
        .then([&] {
          return Passes::for_each([&](auto traits) {
            return launch_pass<decltype(traits)>(common, semaphores, complete, listed, bias_sums, stream, most_ctas);
          });
        })
        .then([&] {
          if constexpr (Mods::kSinks && !kFused) {
            if (p.dsinks != nullptr) {
              return EarlyLaunch::start(Config::kEarlyLaunches,
                                        softmax_backward::attention_backward_sm90_sink_gradient<Config>, p.heads_q,
                                        kSinkThreads, 0, stream, common);
            }
          }
          return int32_t(ATTENTION_AUTOTUNER_OK);
        })
        .then([&] {
          if (places.splits == 1) return int32_t(ATTENTION_AUTOTUNER_OK);
          int64_t const rows = Host::partial_rows(p);
          int64_t const ctas = rows * (Config::kPaddedDimQK + Config::kPaddedDimV) / (kRowThreads * kChunk) + 1;
          return EarlyLaunch::start(Config::kEarlyLaunches,
                                    softmax_backward::attention_backward_sm90_reduce_splits<Config>,
                                    int(ctas < kReduceSplitsCtas ? ctas : kReduceSplitsCtas), kRowThreads, 0, stream,
                                    Host::as_one_sequence(common));
        })
        .then([&] {
          if constexpr (kFused) {
            int const counted = p.heads_q / p.heads_kv / (Keys::kUnevenParts ? 1 : common.splits.divisor);
            return EarlyLaunch::start(Config::kEarlyLaunches,
                                      softmax_backward::attention_backward_sm90_convert_dq<Config, Keys>,
                                      softmax_backward::sink_ctas<Config>(p) + int(heads * places.dq_tiles),
                                      kRowThreads, 0, stream, common, static_cast<int const*>(complete),
                                      softmax_backward::HeadBlocks<kPacked>::of(row_blocks<Keys>(p), listed),
                                      softmax_backward::ConvertedTiles{Divider::by(int(places.dq_tiles)),
                                                                       Divider::by(p.heads_q), Divider::by(counted)});
          }
          return int32_t(ATTENTION_AUTOTUNER_OK);
        })
        .then([&] { return TableGradient::launch_after(common, bias_sums, stream); })
        .status();
  }

  static attention_autotuner_kernel_info info() {
    int smem = 0, threads = 0;
    Passes::for_each([&](auto traits) {
      using T = decltype(traits);
      smem = maximum(smem, T::kSmemBytes);
      threads = maximum(threads, T::kThreads);
      return int32_t(ATTENTION_AUTOTUNER_OK);
    });
    return kernel_info<Config, Params>(Keys::kBlockColumns, Keys::kBlockRows, threads, smem);
  }
};

}  // namespace attention_autotuner

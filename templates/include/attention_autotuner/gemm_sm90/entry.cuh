// Host side of an artifact of the matrix multiplication of family sm90: checks, TMA descriptors, preparation and
// launch.
#pragma once

#include "attention_autotuner/abi_gemm.h"
#include "attention_autotuner/gemm_sm90/mainloop.cuh"
#include "attention_autotuner/host/checks.cuh"
#include "attention_autotuner/host/early_launch.cuh"
#include "attention_autotuner/host/entry.cuh"
#include "attention_autotuner/host/tma_descriptor.cuh"

namespace attention_autotuner {

template <typename Config>
struct GemmSm90Entry {
  using T = GemmSm90Traits<Config>;
  using Element = typename T::Element;
  using Params = attention_autotuner_gemm_forward_params;
  static constexpr int kUsualRowBlocks = 8;
  static inline std::atomic<int> slots[kMaxDevices];  // CTAs that the device holds at a time

  static int32_t prepare(int32_t device) {
    if (slots[device].load() > 0) return ATTENTION_AUTOTUNER_OK;
    int multiprocessors = 0, resident = 0;
    cudaError_t const error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) return cuda_status(error);
    int32_t status = TmaDescriptors::prepare(device);
    if (status != ATTENTION_AUTOTUNER_OK) return status;
    status = prepare_kernel(gemm_sm90_sum<Config>, kGemmSumThreads, 0, device, &resident);
    if (status != ATTENTION_AUTOTUNER_OK) return status;
    status = prepare_kernel(gemm_sm90<Config>, T::kThreads, T::kSmemBytes, device, &resident);
    if (status == ATTENTION_AUTOTUNER_OK) status = EarlyLaunch::prepare();
    if (status == ATTENTION_AUTOTUNER_OK) slots[device].store(resident * multiprocessors);
    return status;
  }

  static int steps(Params const& p) { return divide_up(p.k, T::kBlockK); }
  static int splits(Params const& p) { return maximum(1, minimum(p.splits, steps(p))); }
  static int64_t partial_bytes(Params const& p) {
    return splits(p) == 1 ? 0 : splits(p) * int64_t(p.m) * p.n * int64_t(sizeof(float));
  }
  static size_t workspace_bytes(Params const& p) {
    return check_shape(p) == ATTENTION_AUTOTUNER_OK ? size_t(partial_bytes(p)) : 0;
  }

  static int32_t check_shape(Params const& p) {
    if (!same_version(p)) return ATTENTION_AUTOTUNER_BAD_VERSION;
    auto const fits = [](int size) { return size >= 1 && size <= kMaxRows; };
    if (!fits(p.m) || !fits(p.n) || !fits(p.k) || p.n % kChunk != 0) return ATTENTION_AUTOTUNER_BAD_SHAPE;
    return ATTENTION_AUTOTUNER_OK;
  }
  static int32_t check(Params const& p) {
    int32_t const status = check_shape(p);
    if (status != ATTENTION_AUTOTUNER_OK) return status;
    bool const pointers = aligned(p.a, 16, 1, 1, T::kTransposedA ? p.k : p.m) &&
                          aligned(p.b, 16, 1, 1, T::kTransposedB ? p.n : p.k) && aligned(p.o, 16, 1, 1, p.m);
    return pointers ? ATTENTION_AUTOTUNER_OK : ATTENTION_AUTOTUNER_BAD_ALIGNMENT;
  }

  static int32_t launch(Params const& p, void* workspace, cudaStream_t stream, int32_t device) {
    int32_t const status = check(p);
    if (status != ATTENTION_AUTOTUNER_OK) return status;
    if (!takes_workspace(workspace, partial_bytes(p))) return ATTENTION_AUTOTUNER_BAD_ALIGNMENT;
    int const resident = slots[device].load(std::memory_order_relaxed);
    if (resident == 0) return ATTENTION_AUTOTUNER_BAD_DEVICE;
    GemmSm90Arguments arguments;
    GemmTiles& list = arguments.list;
    list.row_blocks = divide_up(p.m, T::kBlockM * T::kCluster);
    list.column_blocks = divide_up(p.n, T::kBlockN);
    list.group =
        minimum(list.row_blocks, maximum(1, (p.row_blocks > 0 ? p.row_blocks : kUsualRowBlocks) / T::kCluster));
    list.splits = splits(p);
    list.steps = steps(p);
    int64_t const tiles = int64_t(list.row_blocks) * list.column_blocks, items = tiles * list.splits;
    if (items * T::kCluster > INT32_MAX / 2) return ATTENTION_AUTOTUNER_BAD_SHAPE;
    list.tiles = int(tiles);
    list.items = int(items);
    constexpr int kShare = T::kBlockN / T::kCluster;
    bool const described =
        (T::kTransposedA ? TmaDescriptors::make<Element>(arguments.a, p.a, p.m, p.k, 1, 1, T::kBlockK)
                         : TmaDescriptors::make<Element>(arguments.a, p.a, p.k, p.m, 1, 1, T::kBlockM)) &&
        (T::kTransposedB ? TmaDescriptors::make<Element>(arguments.b, p.b, p.k, p.n, 1, 1, kShare)
                         : TmaDescriptors::make<Element>(arguments.b, p.b, p.n, p.k, 1, 1, T::kBlockK)) &&
        TmaDescriptors::make<Element>(arguments.o, p.o, p.n, p.m, 1, 1, kWarpgroupRows);
    if (!described) return ATTENTION_AUTOTUNER_BAD_ALIGNMENT;
    arguments.output = p.o.data;
    arguments.stride = p.o.stride_row;
    arguments.partial = list.splits > 1 ? static_cast<float*>(workspace) : nullptr;
    arguments.m = p.m;
    arguments.n = p.n;
    int const ctas = T::kCluster * minimum(list.items, resident / T::kCluster);
    int32_t const started = EarlyLaunch::start_clusters(true, T::kCluster, gemm_sm90<Config>, ctas, T::kThreads,
                                                        T::kSmemBytes, stream, arguments);
    if (started != ATTENTION_AUTOTUNER_OK || list.splits == 1) return started;
    int64_t const sum_ctas = (int64_t(p.m) * p.n / kChunk + kGemmSumThreads - 1) / kGemmSumThreads;
    return EarlyLaunch::start(true, gemm_sm90_sum<Config>, int(sum_ctas), kGemmSumThreads, 0, stream, arguments);
  }

  static attention_autotuner_kernel_info info() {
    return kernel_info<Config, Params>(T::kBlockM, T::kBlockN, T::kThreads, T::kSmemBytes);
  }
};

}  // namespace attention_autotuner

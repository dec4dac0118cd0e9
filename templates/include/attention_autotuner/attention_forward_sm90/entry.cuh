// Host side of an attention or retnet forward artifact of family sm90: checks, TMA descriptors, the order of tiles,
// launch.
#pragma once

#include <cmath>
#include <type_traits>

#include "attention_autotuner/abi.h"
#include "attention_autotuner/attention_forward_sm90/kernel.cuh"
#include "attention_autotuner/common/packed_heads.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/host/checks.cuh"
#include "attention_autotuner/host/early_launch.cuh"
#include "attention_autotuner/host/entry.cuh"
#include "attention_autotuner/host/split_kv.cuh"
#include "attention_autotuner/host/tma_descriptor.cuh"
#include "attention_autotuner/host/workspace.cuh"
#include "attention_autotuner/score/score_mod.cuh"

namespace attention_autotuner {

template <typename Config>
struct AttentionForwardSm90Entry {
  using T = AttentionForwardSm90Traits<Config>;
  using Element = typename T::Element;
  using Params = std::conditional_t<
      T::kMasked, attention_autotuner_retnet_forward_params,
      std::conditional_t<kIsModified<Config>, typename AbiParams<ModifiedForwardParams<Config>>::Type,
                         AttentionForwardParams1003>>;
  static constexpr bool kDynamic = T::kSchedule == Schedule::kDynamic;
  static constexpr bool kClears = kDynamic && !T::kPacked && !T::kSpanned;  // by a kernel that does nothing else
  static constexpr int64_t kMaxTiles = INT32_MAX - 65536;  // indices of claims beyond the last tile stay within 32 bits
  // Resident CTAs of the whole device, set by prepare(); 0 before.
  static inline std::atomic<int> slots[kMaxDevices];

  static int32_t prepare(int32_t device) {
    if (slots[device].load() > 0) return ATTENTION_AUTOTUNER_OK;
    int multiprocessors = 0, resident = 0;
    cudaError_t const error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) return cuda_status(error);
    int32_t status = TmaDescriptors::prepare(device);
    if constexpr (T::kPacked) {
      auto const list = list_blocks<Config, true, T::kBlockM, T::kBlockN, kListsParts<T>, Params, List>;
      if (status == ATTENTION_AUTOTUNER_OK) status = prepare_kernel(list, kListThreads, 0, device, &resident);
    }
    if constexpr (T::kSpanned) {
      auto const find = find_spans<Config, false, Params>;
      if (status == ATTENTION_AUTOTUNER_OK) status = prepare_kernel(find, kSpanThreads, 0, device, &resident);
    }
    if constexpr (kClears) {
      auto const clear = softmax_forward::attention_forward_sm90_clear_claimed<Config>;
      if (status == ATTENTION_AUTOTUNER_OK) status = prepare_kernel(clear, 1, 0, device, &resident);
    }
    if constexpr (T::kSplitKv) {
      auto const combine = softmax_forward::attention_forward_sm90_combine<Config>;
      if (status == ATTENTION_AUTOTUNER_OK) status = prepare_kernel(combine, kCombineThreads, 0, device, &resident);
    }
    if (status != ATTENTION_AUTOTUNER_OK) return status;
    status =
        prepare_kernel(softmax_forward::attention_forward_sm90<Config>, T::kThreads, T::kSmemBytes, device, &resident);
    if (status == ATTENTION_AUTOTUNER_OK) status = EarlyLaunch::prepare();
    if (status == ATTENTION_AUTOTUNER_OK) slots[device].store(resident * multiprocessors);
    return status;
  }

  // Of blocks of packed sequences.
  using List = std::conditional_t<kListsParts<T>, PartList, BlockList>;
  // Blocks of rows of a head, at most.
  static int row_blocks_of(Params const& p, int queries) {
    if constexpr (T::kPacked) return count_blocks(p.total_q, p.batch, queries);
    return divide_up(p.seqlen_q, queries);
  }
  static int64_t spans_of(Params const& p) {
    if constexpr (T::kSpanned) return count_spans<false>(p);
    return 0;
  }
  using Splits = SplitKv<T::kSplitKv, T::kBlockN, T::kColumns, Params, T::kPacked, T::kPacked>;
  struct Workspace : WorkspaceLayout {
    int* claimed;
    typename Splits::Partial partial;
    List listed;
    int2* spans;
    Workspace(void* base, Params const& p)
        : WorkspaceLayout(base),
          claimed(this->template take<int>(kDynamic, 1)),
          partial(*this, p),
          listed(list_in(*this, p)),
          spans(this->template take<int2>(T::kSpanned, spans_of(p))) {}
  };
  static List list_in(WorkspaceLayout& layout, Params const& p) {
    List list;
    int const queries = packed_heads(p).queries;
    list.blocks = layout.take<typename List::Block>(T::kPacked, int64_t(row_blocks_of(p, queries)) * Splits::count(p));
    list.count = layout.take<int>(T::kPacked, 1);
    if constexpr (kListsParts<T>) {
      list.rows = Divider::by(queries);
      list.splits = Splits::count(p);
      list.ctas = 1.0f;
    }
    return list;
  }
  static size_t workspace_bytes(Params const& p) {
    return check_shape(p) == ATTENTION_AUTOTUNER_OK ? size_t(Workspace(nullptr, p).used()) : 0;
  }

  // Of heads of one stride 0, a tile packs one.
  static PackedHeads packed_heads(Params const& p) {
    return PackedHeads::of(T::kPackGqa && p.q.stride_head != 0, p.heads_q / p.heads_kv, T::kBlockM);
  }
  // The descriptor of Q as packed rows: [batch, groups of heads, queries, heads of a group, columns].
  static bool describe_packed(TmaTensor& described, Params const& p, PackedHeads const& packed) {
    int const heads = packed.heads.divisor, groups = p.heads_q / heads;
    int const batch = batch_of<T::kPacked>(p), rows = rows_of_queries<T::kPacked>(p);
    described.head_step = groups > 1 && p.q.stride_head != 0;
    described.batch_step = batch > 1 && p.q.stride_batch != 0;
    auto bytes = [](bool moves, int64_t stride) { return cuuint64_t(moves ? stride * kElementBytes : 16); };
    constexpr auto kType =
        std::is_same_v<Element, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    cuuint64_t const sizes[5] = {cuuint64_t(p.dim_qk), cuuint64_t(heads), cuuint64_t(rows),
                                 cuuint64_t(described.head_step ? groups : 1),
                                 cuuint64_t(described.batch_step ? batch : 1)};
    cuuint64_t const strides[4] = {bytes(heads > 1, p.q.stride_head), bytes(rows > 1, p.q.stride_row),
                                   bytes(described.head_step, heads * p.q.stride_head),
                                   bytes(described.batch_step, p.q.stride_batch)};
    cuuint32_t const tile[5] = {cuuint32_t(kSwizzleColumns), cuuint32_t(heads), cuuint32_t(packed.queries), 1, 1};
    cuuint32_t const steps[5] = {1, 1, 1, 1, 1};
    return TmaDescriptors::encode.load(std::memory_order_relaxed)(
               &described.descriptor, kType, 5, p.q.data, sizes, strides, tile, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
               CU_TENSOR_MAP_SWIZZLE_128B, kL2Promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
  }

  static int32_t check_shape(Params const& p) {
    if (!same_version(p)) return ATTENTION_AUTOTUNER_BAD_VERSION;
    bool bounded = false;
    if constexpr (!T::kMasked) bounded = p.seqlens_k != nullptr || p.starts_k != nullptr;
    if (!takes_shape(p, Config::kPaddedDimQK, Config::kPaddedDimV) || !has_score_mod_inputs<T::kScoreMod>(p) ||
        !has_values<typename T::Modifications>(p) || (bounded && !T::kKeyBounds)) {
      return ATTENTION_AUTOTUNER_BAD_SHAPE;
    }
    return ATTENTION_AUTOTUNER_OK;
  }
  static int32_t check(Params const& p) {
    int32_t const status = check_shape(p);
    if (status != ATTENTION_AUTOTUNER_OK) return status;
    int const batch = batch_of<T::kPacked>(p), rows_q = rows_of_queries<T::kPacked>(p);
    int const rows_k = rows_of_keys<T::kPacked>(p);
    bool const pointers = aligned(p.q, 16, batch, p.heads_q, rows_q) && aligned(p.k, 16, batch, p.heads_kv, rows_k) &&
                          aligned(p.v, 16, batch, p.heads_kv, rows_k) && aligned(p.o, 16, batch, p.heads_q, rows_q) &&
                          mask_aligned<T::kScoreMod>(p, 16);
    return pointers ? ATTENTION_AUTOTUNER_OK : ATTENTION_AUTOTUNER_BAD_ALIGNMENT;
  }

  // True where late rows see more keys than early ones do, so that the longest tiles come first in reversed order.
  static bool longest_last(Params const& p) {
    if constexpr (T::kModified) {
      Params const w = with_window(p);
      auto const seen = [&w](int row) {
        int const end = minimum(minimum(row + w.causal_offset, w.seqlen_k) + w.window_right + 1, w.seqlen_k);
        return maximum(end - maximum(row + w.causal_offset - w.window_left, 0), 0);
      };
      return seen(w.seqlen_q - 1) > seen(0);
    }
    return p.causal != 0;
  }
  // Heads whose tiles are computed together: those that share K and V, or a mask, and, where the longest tiles come
  // first, as many more as L2 has room for, so that those of many heads do. A power of two of the former, which divides
  // most launches. Of documents, tiles that are computed together read one or two of many.
  static int section_heads(Params const& p, int group) {
    double section_bytes = 32e6;  // of K and V
    if constexpr (T::kSpanned) section_bytes *= p.document_ids != nullptr ? 4.0 : 1.0;
    int const sharing = T::kMasked ? p.batch : 1;
    double const bytes = 2.0 * rows_of_keys<T::kPacked>(p) * (p.dim_qk + p.dim_v) * sharing;
    int64_t const most = int64_t(batch_of<T::kPacked>(p)) * p.heads_kv / sharing;
    double const power = std::exp2(std::round(std::log2(std::fmax(1.0, section_bytes / bytes))));
    return int(T::kPacked || longest_last(p) ? std::fmin(power, double(most)) : 1.0) * sharing * group;
  }
  // Of packed rows, a group of heads is the one that the rest of a tile's group takes after it.
  static WorkList work_list(Params const& p, PackedHeads const& packed, int row_blocks, int* claimed) {
    int const packed_heads = p.heads_q / packed.heads.divisor, group = packed_heads / p.heads_kv;
    int const heads_q = packed_heads * T::kVSlices, heads = heads_q * batch_of<T::kPacked>(p);
    int const section = section_heads(p, group * T::kVSlices), all = heads * row_blocks;
    int const sections = divide_up(heads, section), last = heads - (sections - 1) * section;
    // Those that queries fill in part come last where that leaves a warpgroup nothing to do.
    int const rest = p.seqlen_q % T::kBlockM;
    bool const short_last = rest > 0 && rest <= T::kBlockM - softmax_forward::kWarpgroupRows;
    if (T::kMasked && !longest_last(p) && row_blocks > 1 && short_last) row_blocks = p.seqlen_q / T::kBlockM;
    int const tiles = heads * row_blocks;
    int const splits = Splits::count(p), listed = T::kPacked ? 1 : splits;  // the list of packed sequences has parts
    return {all * listed,
            row_blocks,
            sections,
            longest_last(p),
            Divider::by(section * row_blocks),
            Divider::by(section),
            Divider::by(last),
            Divider::by(T::kMasked ? p.batch * T::kVSlices : heads_q),
            Divider::by(group),
            Divider::by(tiles),
            Divider::by(splits),
            claimed};
  }

  // What is made of scores, and the results of rows beside O.
  using Arguments = softmax_forward::ArgumentsOf<T>;
  template <typename AttentionParams>
  static bool take_scores(Arguments& arguments, AttentionParams const& p) {
    arguments.lse = p.lse;
    arguments.seqlens_k = p.seqlens_k;
    arguments.starts_k = p.starts_k;
    arguments.causal_from_end = p.causal_from_end;
    arguments.exponent_scale = p.softmax_scale == 0.0f ? kLog2E : fabsf(p.softmax_scale) * kLog2E;
    arguments.sign = p.softmax_scale > 0.0f ? 1.0f : p.softmax_scale < 0.0f ? -1.0f : 0.0f;
    if constexpr (T::kModified) take_values<T>(arguments, p, arguments.exponent_scale);
    if constexpr (T::kAttnMask) take_mask(arguments, p);
    return true;
  }
  static bool take_scores(Arguments& arguments, attention_autotuner_retnet_forward_params const& p) {
    arguments.r = p.r;
    arguments.scale = p.scale;
    arguments.r_clamp_max = p.r_clamp_max;
    arguments.normalize = p.normalize;
    return TmaDescriptors::make<Element>(arguments.mask, p.mask, p.seqlen_k, p.seqlen_q, p.heads_q, 1, T::kBlockM);
  }

  static int32_t launch(Params const& p, void* workspace, cudaStream_t stream, int32_t device) {
    int32_t const status = check(p);
    if (status != ATTENTION_AUTOTUNER_OK) return status;
    Workspace const buffers(workspace, p);
    if (!takes_workspace(workspace, buffers.used())) return ATTENTION_AUTOTUNER_BAD_ALIGNMENT;
    int const resident = slots[device].load(std::memory_order_relaxed);
    if (resident == 0) return ATTENTION_AUTOTUNER_BAD_DEVICE;
    Arguments arguments;
    PackedHeads const packed = arguments.packed = packed_heads(p);
    int const row_blocks = row_blocks_of(p, packed.queries), batch = batch_of<T::kPacked>(p);
    int const rows_q = rows_of_queries<T::kPacked>(p), rows_k = rows_of_keys<T::kPacked>(p);
    int64_t const tiles =
        int64_t(row_blocks) * (p.heads_q / packed.heads.divisor) * T::kVSlices * batch * Splits::count(p);
    if (tiles > kMaxTiles) return ATTENTION_AUTOTUNER_BAD_SHAPE;
    bool const described =
        (T::kPackGqa
             ? describe_packed(arguments.q, p, packed)
             : TmaDescriptors::make<Element>(arguments.q, p.q, p.dim_qk, rows_q, p.heads_q, batch, T::kBlockM)) &&
        TmaDescriptors::make<Element>(arguments.k, p.k, p.dim_qk, rows_k, p.heads_kv, batch, T::kScoreKeys) &&
        TmaDescriptors::make<Element>(arguments.v, p.v, p.dim_v, rows_k, p.heads_kv, batch, T::kScoreKeys) &&
        (T::kOutput == Output::kDirect || TmaDescriptors::make<Element>(arguments.o, p.o, p.dim_v, rows_q, p.heads_q,
                                                                        batch, softmax_forward::kWarpgroupRows));
    if (!described || !take_scores(arguments, p)) return ATTENTION_AUTOTUNER_BAD_ALIGNMENT;
    static_cast<WorkList&>(arguments.list) = work_list(p, packed, T::kPacked ? 1 : row_blocks, buffers.claimed);
    arguments.partial_output = buffers.partial.output;
    arguments.partial_lse = buffers.partial.lse;
    arguments.partial_rows = Splits::rows(p);
    arguments.output = p.o.data;
    arguments.stride_batch = p.o.stride_batch;
    arguments.stride_head = p.o.stride_head;
    arguments.stride_row = p.o.stride_row;
    arguments.heads_q = p.heads_q;
    arguments.seqlen_q = p.seqlen_q;
    arguments.seqlen_k = p.seqlen_k;
    arguments.dim_v = p.dim_v;
    arguments.causal = p.causal;
    arguments.causal_offset = p.causal_offset;
    arguments.zero = 0;
    arguments.claim_lead = p.causal ? 1 : 4;
    int32_t prepared = ATTENTION_AUTOTUNER_OK;
    if constexpr (T::kPacked) {
      arguments.list.listed = buffers.listed;
      arguments.total_q = p.total_q;
      arguments.row_splits = buffers.partial.row_splits;
      List listed = buffers.listed;
      if constexpr (kListsParts<T>) listed.ctas = float(resident * packed.heads.divisor) / p.heads_q;
      prepared = launch_list<Config, true, T::kBlockM, T::kBlockN, kListsParts<T>>(with_window(p), listed,
                                                                                   buffers.claimed, stream);
    } else if constexpr (kClears) {
      prepared = EarlyLaunch::start(true, softmax_forward::attention_forward_sm90_clear_claimed<Config>, 1, 1, 0,
                                    stream, buffers.claimed);
    }
    if constexpr (T::kSpanned) {
      arguments.row_spans = buffers.spans;
      prepared = launch_spans<Config, false>(true, with_window(p), buffers.spans, stream,
                                             kDynamic ? buffers.claimed : nullptr);
    }
    if (prepared != ATTENTION_AUTOTUNER_OK) return prepared;
    int const ctas = T::kSchedule == Schedule::kGrid ? int(tiles) : minimum(int(tiles), resident);
    constexpr int kCluster = T::kSharesScores ? T::kVSlices : 1;  // the slices of a tile of rows
    int32_t const started =
        EarlyLaunch::start_clusters(true, kCluster, softmax_forward::attention_forward_sm90<Config>,
                                    ctas / kCluster * kCluster, T::kThreads, T::kSmemBytes, stream, arguments);
    if (started != ATTENTION_AUTOTUNER_OK || Splits::count(p) == 1) return started;
    if constexpr (T::kSplitKv) {
      return EarlyLaunch::start(true, softmax_forward::attention_forward_sm90_combine<Config>, Splits::combine_ctas(p),
                                kCombineThreads, 0, stream, Splits::results(p, buffers.partial));
    }
    return ATTENTION_AUTOTUNER_OK;
  }

  static attention_autotuner_kernel_info info() {
    return kernel_info<Config, Params>(T::kBlockM, T::kBlockN, T::kThreads, T::kSmemBytes);
  }
};

}  // namespace attention_autotuner

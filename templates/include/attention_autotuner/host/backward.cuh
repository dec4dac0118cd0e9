// What the host sides of backwards with scores have in common, in either family: checks, the buffers of all of them,
// and the arguments of their kernels.
#pragma once

#include "attention_autotuner/abi.h"
#include "attention_autotuner/common/backward_arguments.cuh"
#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/common/scheduler.cuh"
#include "attention_autotuner/common/sequences.cuh"
#include "attention_autotuner/common/spans.cuh"
#include "attention_autotuner/host/checks.cuh"
#include "attention_autotuner/score/score_mod.cuh"

namespace attention_autotuner {

template <typename Config>
struct BackwardHost {
  using KernelParams = BackwardParamsOf<Config>;
  using Params = typename AbiParams<KernelParams>::Type;
  using Arguments = BackwardArguments<KernelParams>;
  static constexpr ScoreMod kScoreMod = Config::kScoreMod;
  static constexpr bool kPacked = kIsPacked<Config>;
  static constexpr bool kSpanned = kIsSpanned<Config>;

  static int32_t check_shape(Params const& p) {
    if (!same_version(p)) return ATTENTION_AUTOTUNER_BAD_VERSION;
    bool const fits = takes_shape(p, Config::kPaddedDimQK, Config::kPaddedDimV) && has_score_mod_inputs<kScoreMod>(p) &&
                      has_values<typename ModificationsOf<Config>::Type>(p);
    return fits ? ATTENTION_AUTOTUNER_OK : ATTENTION_AUTOTUNER_BAD_SHAPE;
  }
  static int32_t check_pointers(Params const& p) {
    auto queries = [&p](attention_autotuner_tensor const& tensor, int bytes) {
      return aligned(tensor, bytes, batch_of<kPacked>(p), p.heads_q, rows_of_queries<kPacked>(p));
    };
    auto keys = [&p](attention_autotuner_tensor const& tensor, int bytes) {
      return aligned(tensor, bytes, batch_of<kPacked>(p), p.heads_kv, rows_of_keys<kPacked>(p));
    };
    constexpr int kBytes = Config::kCopyBytes;
    bool const pointers = queries(p.q, kBytes) && queries(p.dout, kBytes) && keys(p.k, kBytes) && keys(p.v, kBytes) &&
                          queries(p.o, 16) && queries(p.dq, 16) && keys(p.dk, 16) && keys(p.dv, 16) &&
                          mask_aligned<kScoreMod>(p, kBytes);
    return pointers ? ATTENTION_AUTOTUNER_OK : ATTENTION_AUTOTUNER_BAD_ALIGNMENT;
  }

  // Rows of dK and dV in the partial sums of a split.
  static int64_t partial_rows(Params const& p) {
    return int64_t(batch_of<kPacked>(p)) * p.heads_kv * rows_of_keys<kPacked>(p);
  }
  // The arguments of the kernel that adds partial sums: packed sequences are one there.
  static Arguments as_one_sequence(Arguments arguments) {
    if constexpr (kPacked) {
      arguments.params.batch = 1;
      arguments.params.seqlen_k = arguments.params.total_k;
    }
    return arguments;
  }

  // Where buffers of the workspace start, in bytes: those of rows, then what else an entry takes.
  struct Places {
    int splits;     // CTAs that share a block of keys
    int64_t heads;  // of all batch entries
    int64_t lse_delta_rows, dq_tiles = 0;
    int64_t shift, dq_sum, dk_partial = 0, dv_partial = 0, spans = 0, bytes;

    Places(Params const& p, int splits) : splits(splits), heads(int64_t(batch_of<kPacked>(p)) * p.heads_q) {
      lse_delta_rows = int64_t(divide_up(p.seqlen_q, kLseDeltaPadding) + 1) * kLseDeltaPadding;
      if constexpr (kPacked) {
        lse_delta_rows = int64_t(count_blocks(p.total_q, p.batch, kLseDeltaPadding, kLseDeltaSpare)) * kLseDeltaPadding;
      }
      shift = heads * lse_delta_rows * int64_t(sizeof(float));
      dq_sum = bytes = 2 * shift;
    }
    // dK and dV of each split, where there are several.
    void take_partial_sums(Params const& p) {
      dk_partial = dv_partial = bytes;
      if (splits == 1) return;
      int64_t const rows = splits * partial_rows(p);
      dv_partial += rows * Config::kPaddedDimQK * int64_t(sizeof(float));
      bytes = dv_partial + rows * Config::kPaddedDimV * int64_t(sizeof(float));
    }
    void take_spans(Params const& p) {
      spans = bytes;
      if constexpr (kSpanned) bytes += count_spans<true>(p) * int64_t(sizeof(int2));
    }
  };

  // What the kernels of a launch have in common.
  static Arguments arguments_of(Params const& p, Places const& places, void* workspace) {
    auto at = [workspace](int64_t bytes) { return reinterpret_cast<float*>(static_cast<char*>(workspace) + bytes); };
    auto const params_of_kernels = [&]() -> KernelParams {
      if constexpr (kSpanned) {
        return with_spans(with_window(p), reinterpret_cast<int2*>(at(places.spans)));
      } else {
        return with_window(p);
      }
    };
    return {params_of_kernels(),
            score_scale(p) * (kScoreMod == ScoreMod::kSoftmax ? kLog2E : 1.0f),
            at(0),
            at(places.shift),
            at(places.dq_sum),
            int(places.lse_delta_rows),
            int(places.dq_tiles),
            Divider::by(places.splits),
            at(places.dk_partial),
            at(places.dv_partial)};
  }
};

}  // namespace attention_autotuner

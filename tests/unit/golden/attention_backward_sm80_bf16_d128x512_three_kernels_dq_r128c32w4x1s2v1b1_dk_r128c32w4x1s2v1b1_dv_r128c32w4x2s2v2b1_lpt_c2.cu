// attention backward, kernel scores_backward_sm80: one instantiation and its C entry points.
// Candidate: attention_backward_sm80_bf16_d128x512_three_kernels_dq_r128c32w4x1s2v1b1_dk_r128c32w4x1s2v1b1_dv_r128c32w4x2s2v2b1_lpt_c2
#include <attention_autotuner/scores_backward_sm80/attention_entry.cuh>

namespace {

struct Config {
  using Element = __nv_bfloat16;
  static constexpr char const* kName = "attention_backward_sm80_bf16_d128x512_three_kernels_dq_r128c32w4x1s2v1b1_dk_r128c32w4x1s2v1b1_dv_r128c32w4x2s2v2b1_lpt_c2";
  static constexpr auto kScoreMod = attention_autotuner::ScoreMod::kSoftmax;
  static constexpr int kPaddedDimQK = 128;
  static constexpr int kPaddedDimV = 512;
  static constexpr int kCopyBytes = 2;
  static constexpr int kEnoughCtas = 256;
  static constexpr auto kPlan = attention_autotuner::Plan::kThreeKernels;
  struct Dq {
    static constexpr int kBlockRows = 128;
    static constexpr int kBlockColumns = 32;
    static constexpr int kWarps = 4;
    static constexpr int kColumnWarps = 1;
    static constexpr int kNumStages = 2;
    static constexpr int kSlices = 1;
    static constexpr int kCtasPerSm = 1;
  };
  struct Dk {
    static constexpr int kBlockRows = 128;
    static constexpr int kBlockColumns = 32;
    static constexpr int kWarps = 4;
    static constexpr int kColumnWarps = 1;
    static constexpr int kNumStages = 2;
    static constexpr int kSlices = 1;
    static constexpr int kCtasPerSm = 1;
  };
  struct Dv {
    static constexpr int kBlockRows = 128;
    static constexpr int kBlockColumns = 32;
    static constexpr int kWarps = 4;
    static constexpr int kColumnWarps = 2;
    static constexpr int kNumStages = 2;
    static constexpr int kSlices = 2;
    static constexpr int kCtasPerSm = 1;
  };
  static constexpr auto kCtaOrder = attention_autotuner::CtaOrder::kLongestFirst;
};

}  // namespace

ATTENTION_AUTOTUNER_EXPORT_ENTRY(attention_autotuner::AttentionBackwardEntry<Config>)

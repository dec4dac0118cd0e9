// attention backward, kernel scores_backward_sm80: one instantiation and its C entry points.
// Candidate: attention_backward_sm80_fp16_d128x128_two_kernels_keys_m64n128p4s1q1b1_dq_r128c32w4x1s2v1b1_raster_c16
#include <attention_autotuner/scores_backward_sm80/attention_entry.cuh>

namespace {

struct Config {
  using Element = __half;
  static constexpr char const* kName = "attention_backward_sm80_fp16_d128x128_two_kernels_keys_m64n128p4s1q1b1_dq_r128c32w4x1s2v1b1_raster_c16";
  static constexpr auto kScoreMod = attention_autotuner::ScoreMod::kSoftmax;
  static constexpr int kPaddedDimQK = 128;
  static constexpr int kPaddedDimV = 128;
  static constexpr int kCopyBytes = 16;
  static constexpr int kEnoughCtas = 256;
  static constexpr auto kPlan = attention_autotuner::Plan::kTwoKernels;
  struct Keys {
    static constexpr int kBlockM = 64;
    static constexpr int kBlockN = 128;
    static constexpr int kWarpPairs = 4;
    static constexpr int kNumStages = 1;
    static constexpr int kQuerySubtiles = 1;
    static constexpr int kCtasPerSm = 1;
  };
  struct Dq {
    static constexpr int kBlockRows = 128;
    static constexpr int kBlockColumns = 32;
    static constexpr int kWarps = 4;
    static constexpr int kColumnWarps = 1;
    static constexpr int kNumStages = 2;
    static constexpr int kSlices = 1;
    static constexpr int kCtasPerSm = 1;
  };
  static constexpr auto kCtaOrder = attention_autotuner::CtaOrder::kRaster;
};

}  // namespace

ATTENTION_AUTOTUNER_EXPORT_ENTRY(attention_autotuner::AttentionBackwardEntry<Config>)

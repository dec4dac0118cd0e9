// attention forward, kernel scores_forward_sm80: one instantiation and its C entry points.
// Candidate: attention_forward_sm80_bf16_d256x512_m64n32_w2x4_s1_k128_v2_qreg_ahead_persistent_lpt_b2_c2
#include <attention_autotuner/scores_forward_sm80/attention_entry.cuh>

namespace {

struct Config {
  using Element = __nv_bfloat16;
  static constexpr char const* kName = "attention_forward_sm80_bf16_d256x512_m64n32_w2x4_s1_k128_v2_qreg_ahead_persistent_lpt_b2_c2";
  static constexpr auto kScoreMod = attention_autotuner::ScoreMod::kSoftmax;
  static constexpr int kPaddedDimQK = 256;
  static constexpr int kPaddedDimV = 512;
  static constexpr int kCopyBytes = 2;
  static constexpr int kBlockM = 64;
  static constexpr int kBlockN = 32;
  static constexpr int kWarpsM = 2;
  static constexpr int kWarpsN = 4;
  static constexpr int kNumStages = 1;
  static constexpr bool kQInRegisters = true;
  static constexpr bool kQkAhead = true;
  static constexpr int kKSlice = 128;
  static constexpr int kVSlices = 2;
  static constexpr bool kPersistent = true;
  static constexpr auto kCtaOrder = attention_autotuner::CtaOrder::kLongestFirst;
  static constexpr int kCtasPerSm = 2;
  static constexpr bool kPackGqa = false;
  static constexpr bool kSplitKv = false;
};

}  // namespace

ATTENTION_AUTOTUNER_EXPORT_ENTRY(attention_autotuner::AttentionForwardEntry<Config>)

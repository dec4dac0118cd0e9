// attention forward, kernel scores_forward_sm80: one instantiation and its C entry points.
// Candidate: attention_forward_sm80_fp16_d64x64_m128n64_w4x1_s2_k64_v1_qsmem_inorder_grid_raster_b1_c16
#include <attention_autotuner/scores_forward_sm80/attention_entry.cuh>

namespace {

struct Config {
  using Element = __half;
  static constexpr char const* kName = "attention_forward_sm80_fp16_d64x64_m128n64_w4x1_s2_k64_v1_qsmem_inorder_grid_raster_b1_c16";
  static constexpr auto kScoreMod = attention_autotuner::ScoreMod::kSoftmax;
  static constexpr int kPaddedDimQK = 64;
  static constexpr int kPaddedDimV = 64;
  static constexpr int kCopyBytes = 16;
  static constexpr int kBlockM = 128;
  static constexpr int kBlockN = 64;
  static constexpr int kWarpsM = 4;
  static constexpr int kWarpsN = 1;
  static constexpr int kNumStages = 2;
  static constexpr bool kQInRegisters = false;
  static constexpr bool kQkAhead = false;
  static constexpr int kKSlice = 64;
  static constexpr int kVSlices = 1;
  static constexpr bool kPersistent = false;
  static constexpr auto kCtaOrder = attention_autotuner::CtaOrder::kRaster;
  static constexpr int kCtasPerSm = 1;
  static constexpr bool kPackGqa = false;
  static constexpr bool kSplitKv = false;
};

}  // namespace

ATTENTION_AUTOTUNER_EXPORT_ENTRY(attention_autotuner::AttentionForwardEntry<Config>)

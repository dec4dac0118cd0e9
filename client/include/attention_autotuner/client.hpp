// The C++ client: serves kernels from a bundle, a folder that `attention-autotuner export` writes, without Python and
// without CUDA headers. See docs/cpp.md.
//
//   attention_autotuner::Bundle bundle("bundle");
//   attention_autotuner::Problem problem;              // the fields that differ from their defaults
//   auto kernel = bundle.kernel(bundle.pick(problem));
//   kernel.prepare(device);                            // the thread's current CUDA device
//   auto params = attention_autotuner::make_params<attention_autotuner::AttentionForwardParams>(problem);
//   params.q = ...;                                    // device pointers and strides
//   kernel.launch(params, workspace, stream, device);  // a cudaStream_t, as it is
//
// All functions throw an Error of the kinds below. A Bundle and a Kernel may be used by several threads at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "attention_autotuner/abi.h"
#include "attention_autotuner/abi_gemm.h"

namespace attention_autotuner {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The bundle is missing, its index or one of its files is damaged or of another version, or others can change it.
class BundleError : public Error {
 public:
  using Error::Error;
};

// The problem is outside what kernels solve, or tensors are outside what this problem says; names field and value.
class UnsupportedProblemError : public Error {
 public:
  using Error::Error;
};

// Nothing in the bundle serves the problem.
class NoKernelError : public Error {
 public:
  using Error::Error;
};

// A library cannot be loaded, speaks another ABI, or is not the kernel that it should be.
class KernelError : public Error {
 public:
  using Error::Error;
};

// A kernel refused its params or the device, or CUDA failed.
class LaunchError : public Error {
 public:
  LaunchError(std::string const& message, int32_t status) : Error(message), status_(status) {}
  // As abi.h has it; from ATTENTION_AUTOTUNER_CUDA_ERROR on it holds a cudaError_t.
  int32_t status() const { return status_; }

 private:
  int32_t status_;
};

enum class Op { kAttention, kRetNet, kRetention, kGemm };
enum class Direction { kForward, kBackward };
enum class DType { kFp16, kBf16 };
enum class CausalAlignment { kBottomRight, kTopLeft };
enum class Mask { kNone, kExplicit, kDecay };
enum class Form { kAuto, kParallel, kChunkwise, kRecurrent };
// Of a product's factors, by rows (n) or by columns (t) in memory.
enum class Operands { kNN, kNT, kTN, kTT };
// Who chose a kernel: the user's own measurement, one that came with the package, the cost model, or nobody.
enum class Layer { kRecord, kShipped, kPredicted, kDefault };

// The names that Python and the index use, e.g. "attention" and "bottom_right".
char const* name_of(Op value);
char const* name_of(Direction value);
char const* name_of(DType value);
char const* name_of(CausalAlignment value);
char const* name_of(Mask value);
char const* name_of(Form value);
char const* name_of(Operands value);
char const* name_of(Layer value);

// One operation on one shape: the twin of Problem in core/problem.py, field by field.
struct Problem {
  Op op = Op::kAttention;
  Direction direction = Direction::kForward;
  DType dtype = DType::kFp16;
  int64_t batch = 4;
  int64_t heads_q = 16;  // a multiple of heads_kv
  int64_t heads_kv = 16;
  int64_t seqlen_q = 4096;
  int64_t seqlen_k = 4096;
  int64_t dim_qk = 128;  // a multiple of 8 up to 256; of gemm, up to 2^30, what is summed over
  int64_t dim_v = 128;   // a multiple of 8 up to 512; of gemm, up to 2^30, the columns of the result
  bool causal = false;
  CausalAlignment causal_alignment = CausalAlignment::kBottomRight;
  int64_t alignment_bytes = 16;       // 2 where a pointer or a stride is no multiple of 16 bytes
  bool deterministic = false;         // of backward: equal bits from equal inputs
  Mask mask = Mask::kNone;            // of retnet
  Form form = Form::kAuto;            // of retention forward
  bool key_bounds = false;            // of attention forward: params.seqlens_k or params.starts_k
  Operands operands = Operands::kNN;  // of gemm, whose rows are seqlen_q and seqlen_k

  // Throws UnsupportedProblemError, naming the field and its value, where kernels cannot solve it.
  void check() const;
  // The head dims that kernels are compiled for; those of gemm are compiled for none.
  int64_t padded_dim_qk() const { return op == Op::kGemm ? 16 : (dim_qk + 15) / 16 * 16; }
  int64_t padded_dim_v() const { return op == Op::kGemm ? 16 : (dim_v + 15) / 16 * 16; }
  // Row i sees keys j <= i + causal_offset().
  int64_t causal_offset() const { return causal_alignment == CausalAlignment::kBottomRight ? seqlen_k - seqlen_q : 0; }
  // Floating-point operations by the field's convention, and the fewest bytes through device memory.
  double flops() const;
  double bytes_moved() const;
  // The same with sequence lengths rounded up to the buckets that picks are recorded under.
  Problem bucketed() const;
  // Whether defaults go by the number of tiles: of attention, with more than the rows of one.
  bool goes_by_tiles() const;
  // The same with the lengths that its default is chosen for: multiples of 16 where they go by tiles, else its
  // bucket's.
  Problem rounded() const;
  // One line, e.g. "attention forward fp16 b4 h16 s4096 d128 causal".
  std::string describe() const;

  // A problem of a JSON object; fields that it lacks keep their defaults. The result is checked.
  static Problem from_json(std::string const& text);

  bool operator==(Problem const& other) const;
  bool operator!=(Problem const& other) const { return !(*this == other); }
};

// The problem that a bundle lists a pick of a layer under: bucketed for the user's own, else of rounded lengths.
Problem listed_as(Problem const& problem, Layer layer);

// Whether a shipped pick, measured on one problem, may serve the lengths of another.
bool serves_lengths(Problem const& measured, Problem const& problem);

// How far a recorded problem is from a bucketed one, in doublings; none where its kernel cannot stand in at all.
// Picks further than kMaxDistance do not serve, defaults excepted.
std::optional<double> distance(Problem const& problem, Problem const& recorded);
inline constexpr double kMaxDistance = 4.0;

// What kernels of an operation and a direction are launched with; abi.h describes every field.
using Tensor = attention_autotuner_tensor;
using AttentionForwardParams = attention_autotuner_attention_forward_params;
using AttentionBackwardParams = attention_autotuner_attention_backward_params;
using RetNetForwardParams = attention_autotuner_retnet_forward_params;
using RetNetBackwardParams = attention_autotuner_retnet_backward_params;
using RetentionForwardParams = attention_autotuner_retention_forward_params;
using RetentionBackwardParams = attention_autotuner_retention_backward_params;
using GemmForwardParams = attention_autotuner_gemm_forward_params;

template <typename Params>
struct ParamsOf;
template <>
struct ParamsOf<AttentionForwardParams> {
  static constexpr Op kOp = Op::kAttention;
  static constexpr Direction kDirection = Direction::kForward;
};
template <>
struct ParamsOf<AttentionBackwardParams> {
  static constexpr Op kOp = Op::kAttention;
  static constexpr Direction kDirection = Direction::kBackward;
};
template <>
struct ParamsOf<RetNetForwardParams> {
  static constexpr Op kOp = Op::kRetNet;
  static constexpr Direction kDirection = Direction::kForward;
};
template <>
struct ParamsOf<RetNetBackwardParams> {
  static constexpr Op kOp = Op::kRetNet;
  static constexpr Direction kDirection = Direction::kBackward;
};
template <>
struct ParamsOf<RetentionForwardParams> {
  static constexpr Op kOp = Op::kRetention;
  static constexpr Direction kDirection = Direction::kForward;
};
template <>
struct ParamsOf<RetentionBackwardParams> {
  static constexpr Op kOp = Op::kRetention;
  static constexpr Direction kDirection = Direction::kBackward;
};
template <>
struct ParamsOf<GemmForwardParams> {
  static constexpr Op kOp = Op::kGemm;
  static constexpr Direction kDirection = Direction::kForward;
};

// Params of a problem with every size set and every pointer null. Without a scale it is 1 for retnet and
// 1 / sqrt(dim_qk) for the others (gemm has none); retnet's normalise, without an upper limit and with r as a constant
// of the gradients.
template <typename Params>
Params make_params(Problem const& problem, std::optional<float> scale = std::nullopt);

// A contiguous [batch, heads, rows, columns] tensor.
inline Tensor contiguous(void* data, int64_t heads, int64_t rows, int64_t columns) {
  return {data, heads * rows * columns, rows * columns, columns};
}

// What a library says of itself.
struct KernelInfo {
  std::string name;
  int32_t padded_dim_qk, padded_dim_v, block_m, block_n, num_threads, static_smem_bytes, dynamic_smem_bytes, copy_bytes;
};

// What a pick launches its kernel with beside the problem; 0 leaves the field of the params as it is.
struct LaunchKnobs {
  int32_t splits = 0;
  int32_t row_blocks = 0;  // of gemm
};

// A loaded kernel library. Copies share it; it stays loaded as long as the process lives, as CUDA keeps referring to
// it.
class Kernel {
 public:
  // Loads a library as it is, unchecked; an expected name, where given, must be the kernel's own. What it was built
  // for, where given, is told to who prepares it on a device that cannot run it.
  static Kernel open(std::string const& library, std::string const& expected_name = "",
                     std::string const& built_for = "");

  KernelInfo const& info() const;
  std::string const& path() const;

  // Loads the module on a CUDA device, the calling thread's current one, and sets its attributes. Does nothing the
  // second time; must not run under graph capture.
  void prepare(int device) const;

  // Bytes of device memory, of any content and aligned to 16, that launch() needs for these params.
  template <typename Params>
  size_t workspace_bytes(Params const& params) const {
    check_params(ParamsOf<Params>::kOp, ParamsOf<Params>::kDirection);
    Params const set = with_knobs(params);
    return workspace_bytes_of(&set);
  }

  // Enqueues the work on a stream (a cudaStream_t; null is the default stream) of a device that is current and
  // prepared. Never synchronises and never allocates.
  template <typename Params>
  void launch(Params const& params, void* workspace, void* stream, int device) const {
    check_params(ParamsOf<Params>::kOp, ParamsOf<Params>::kDirection);
    Params const set = with_knobs(params);
    launch_with(&set, workspace, stream, device);
  }

  // The kernel as a pick with such knobs launches it.
  Kernel with(LaunchKnobs knobs) const {
    Kernel kernel = *this;
    kernel.knobs_ = knobs;
    return kernel;
  }

 private:
  struct State;
  explicit Kernel(std::shared_ptr<State> state) : state_(std::move(state)) {}
  void check_params(Op op, Direction direction) const;
  size_t workspace_bytes_of(void const* params) const;
  void launch_with(void const* params, void* workspace, void* stream, int device) const;
  void raise_for_status(int32_t status, char const* action) const;
  template <typename Params>
  Params with_knobs(Params params) const {
    constexpr bool kGemm = std::is_same_v<Params, GemmForwardParams>;
    if constexpr (kGemm || std::is_same_v<Params, AttentionForwardParams>) {
      if (knobs_.splits > 0) params.splits = knobs_.splits;
    }
    if constexpr (kGemm) {
      if (knobs_.row_blocks > 0) params.row_blocks = knobs_.row_blocks;
    }
    return params;
  }

  std::shared_ptr<State> state_;
  LaunchKnobs knobs_;
};

// One kernel of a bundle, as its index has it.
struct BundledKernel {
  std::string name;
  std::string library;  // absolute path
  std::string library_sha256;
  int64_t library_bytes = 0;
  std::string digest;         // identity of the artifact
  std::string kernel_digest;  // identity of its source, whatever compiled it
  std::string target_arch;    // compute capability that it was built for, e.g. "80", or "90a": that one alone
  bool target_ptx = false;    // whether newer GPUs can run it
};

// A decision that a bundle holds, or that it made for a problem.
struct Pick {
  Problem problem;  // that was recorded: of the user's own picks bucketed, else with rounded lengths
  size_t kernel = 0;
  LaunchKnobs launch;
  Layer layer = Layer::kDefault;
  double distance = 0;  // from the problem that was asked for; 0 for the very lengths
  std::optional<std::string> gpu_name;
  std::optional<double> median_us;
  std::optional<double> estimate_us;
};

// A folder of kernels and picks.
class Bundle {
 public:
  struct Options {
    bool verify_checksums = true;  // read a library whole and hold it against its SHA-256 before it is loaded
    // User numbers whose bundles are loaded beside one's own and root's. Nobody else may be able to write to them.
    std::vector<uint32_t> trusted_owners;
  };

  explicit Bundle(std::string const& folder) : Bundle(folder, Options()) {}
  Bundle(std::string const& folder, Options options);

  std::string const& folder() const;
  std::string const& arch() const;        // policy whose picks these are, e.g. "H100"
  std::string const& build_arch() const;  // compute capability that they were built for, e.g. "90"
  std::string const& package_version() const;
  std::vector<BundledKernel> const& kernels() const;
  std::vector<Pick> const& picks() const;

  // What serves a problem. Layers answer in the order record, shipped, predicted, default; within each the very one
  // comes first, then the nearest, the first of equals; shipped picks as serves_lengths() says. Throws
  // UnsupportedProblemError and NoKernelError.
  Pick pick(Problem const& problem) const;

  // Holds every library against its owner, its size and its SHA-256 and throws the BundleError of the first that fails.
  void verify() const;

  // The kernel of a pick, checked and loaded once, with its launch knobs.
  Kernel kernel(Pick const& pick) const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace attention_autotuner

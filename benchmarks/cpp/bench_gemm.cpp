// Products of matrices by one kernel library, or by the picks of a bundle: some elements are held against sums in
// double precision, then it is timed by the protocol of the other benchmarks.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <utility>
#include <vector>

#include "attention_autotuner/client.hpp"
#include "gpu.hpp"
#include "json.hpp"
#include "measure.hpp"
#include "options.hpp"
#include "report.hpp"

namespace attention_autotuner::benchmarks {
namespace {

constexpr char kProgram[] = "bench_gemm";
std::vector<DType> const kDTypes = {DType::kFp16, DType::kBf16};
std::vector<Operands> const kOperands = {Operands::kNN, Operands::kNT, Operands::kTN, Operands::kTT};
constexpr double kUlps = 2;  // that an element may be off, of the largest sum of its size

struct GemmOptions {
  std::string bundle, library, json, csv;
  bool every_pick = false;
  Problem problem;
  int64_t splits = 1, row_blocks = 8;
  int device = 0, rounds = 10, samples = 64;
};

struct Sets {
  std::vector<Memory> memory;  // a, b and o of every set, then the workspace
  std::vector<GemmForwardParams> params;
  void* workspace = nullptr;
};

Problem default_problem() {
  Problem problem;
  problem.op = Op::kGemm;
  problem.batch = problem.heads_q = problem.heads_kv = 1;
  problem.dim_qk = problem.dim_v = 4096;
  return problem;
}

bool transposed(Problem const& p, int operand) { return name_of(p.operands)[operand] == 't'; }

// A problem's dtype and operands as a library has them, whose name says them.
Problem as_compiled(Problem problem, std::string const& kernel) {
  constexpr char kBefore[] = "_d16x16_";
  size_t const at = kernel.find(kBefore);
  if (at == std::string::npos) throw UsageError("--library holds no product of matrices: " + kernel);
  problem.dtype = kernel.find("_bf16_") != std::string::npos ? DType::kBf16 : DType::kFp16;
  for (Operands const operands : kOperands) {
    if (kernel.compare(at + std::strlen(kBefore), 2, name_of(operands)) == 0) problem.operands = operands;
  }
  return problem;
}

Number number_of(Problem const& p) { return p.dtype == DType::kBf16 ? Number::kBf16 : Number::kFp16; }

Sets make_sets(GemmOptions const& o, Problem const& p, Kernel const& kernel, int count) {
  Sets sets;
  Number const type = number_of(p);
  auto const matrix = [&](int64_t rows, int64_t columns, bool transpose) {
    sets.memory.emplace_back(size_t(rows) * size_t(columns) * bytes_of(type));
    return transpose ? contiguous(sets.memory.back().data(), 1, columns, rows)
                     : contiguous(sets.memory.back().data(), 1, rows, columns);
  };
  int64_t const m = p.seqlen_q, n = p.dim_v, k = p.dim_qk;
  for (int set = 0; set < count; ++set) {
    auto params = make_params<GemmForwardParams>(p);
    params.a = matrix(m, k, transposed(p, 0));
    params.b = matrix(k, n, transposed(p, 1));
    params.o = matrix(m, n, false);
    params.splits = int32_t(o.splits), params.row_blocks = int32_t(o.row_blocks);
    fill_normal(params.a.data, size_t(m * k), type, 2 * uint64_t(set));
    fill_normal(params.b.data, size_t(k * n), type, 2 * uint64_t(set) + 1);
    fill_bytes(params.o.data, 0xFF, size_t(m * n) * bytes_of(type));
    sets.params.push_back(params);
  }
  if (size_t const bytes = kernel.workspace_bytes(sets.params[0])) {
    sets.memory.emplace_back(bytes);
    sets.workspace = sets.memory.back().data();
  }
  return sets;
}

// A matrix on the host, by rows or by columns.
struct HostMatrix {
  HostMatrix(Tensor const& matrix, int64_t count, bool transpose, Number type)
      : stride(matrix.stride_row), transpose(transpose), type(type), bits(size_t(count)) {
    download(bits.data(), matrix.data, 2 * bits.size());
  }
  double at(int64_t row, int64_t column) const {
    return decode(bits[size_t(transpose ? column * stride + row : row * stride + column)], type);
  }
  int64_t stride;
  bool transpose;
  Number type;
  std::vector<uint16_t> bits;
};

// What is wrong with some elements of a result, or nothing.
std::string verify(int samples, Problem const& p, GemmForwardParams const& params) {
  Number const type = number_of(p);
  int64_t const m = p.seqlen_q, n = p.dim_v, k = p.dim_qk;
  HostMatrix const a(params.a, m * k, transposed(p, 0), type);
  HostMatrix const b(params.b, k * n, transposed(p, 1), type);
  HostMatrix const c(params.o, m * n, false, type);
  for (int sample = 0; sample < samples; ++sample) {
    // Corners first, then anywhere.
    int64_t const row = sample < 4 ? (sample & 1) * (m - 1) : int64_t(7919) * sample % m;
    int64_t const column = sample < 4 ? sample / 2 * (n - 1) : int64_t(104729) * sample % n;
    double sum = 0;
    for (int64_t i = 0; i < k; ++i) sum += a.at(row, i) * b.at(i, column);
    double const computed = c.at(row, column);
    double const allowed = kUlps * epsilon_of(type) * (std::fabs(sum) + std::sqrt(double(k)) / 64);
    if (!(std::fabs(computed - sum) <= allowed)) {
      return "element " + std::to_string(row) + ", " + std::to_string(column) + " is " + std::to_string(computed) +
             ", should be " + std::to_string(sum);
    }
  }
  return "";
}

// Checks and times one problem; the record says what is wrong with it, where something is.
Record measured(GemmOptions const& o, Problem const& p, Kernel const& kernel, DeviceProperties const& device,
                bool& fine) {
  kernel.prepare(o.device);
  Sets const sets = make_sets(o, p, kernel, count_sets(p.bytes_moved(), device.l2_bytes, free_memory(), true));
  Stream const stream = Stream::standard();
  auto const launch = [&](int set, Stream const& on) {
    kernel.launch(sets.params[size_t(set)], sets.workspace, on.handle(), o.device);
  };
  launch(0, stream);
  synchronize();
  std::string const wrong = verify(o.samples, p, sets.params[0]);
  Record record;
  record.add("case", json::quoted(p.describe())).add("kernel", json::quoted(kernel.info().name));
  record.add("m", std::to_string(p.seqlen_q)).add("n", std::to_string(p.dim_v)).add("k", std::to_string(p.dim_qk));
  record.add("error", wrong.empty() ? "null" : json::quoted(wrong));
  std::string const shape = std::to_string(p.seqlen_q) + " x " + std::to_string(p.dim_v) + " x " +
                            std::to_string(p.dim_qk) + " " + name_of(p.operands) + " " + name_of(p.dtype);
  if (!wrong.empty()) {
    fine = false;
    std::printf("%s  FAILED: %s\n", shape.c_str(), wrong.c_str());
    return record;
  }
  static_cast<void>(warm_up(kWarmUpSeconds));
  Timing const timing = measure(stream, int(sets.params.size()), o.rounds, 0, launch);
  double const tflops = p.flops() / timing.median_us * 1e-6;
  record.add("median_us", number(timing.median_us)).add("spread_us", number(timing.spread_us));
  record.add("tflops", number(tflops));
  std::printf("%s  %10.2f us  +- %.2f  %7.1f TFLOP/s\n", shape.c_str(), timing.median_us, timing.spread_us, tflops);
  return record;
}

// What is measured: a problem, and its kernel.
std::vector<std::pair<Problem, Kernel>> tasks_of(GemmOptions const& o) {
  if (o.bundle.empty()) {
    Kernel const kernel = Kernel::open(o.library);
    return {{as_compiled(o.problem, kernel.info().name), kernel}};
  }
  Bundle const bundle(o.bundle);
  if (!o.every_pick) return {{o.problem, bundle.kernel(bundle.pick(o.problem))}};
  std::vector<std::pair<Problem, Kernel>> tasks;
  for (Pick const& pick : bundle.picks()) {
    if (pick.problem.op == Op::kGemm) tasks.emplace_back(pick.problem, bundle.kernel(pick));
  }
  if (tasks.empty()) throw NoKernelError("the bundle " + bundle.folder() + " has no pick of gemm");
  return tasks;
}

int body(int count, char const* const* arguments) {
  GemmOptions o;
  o.problem = default_problem();
  std::string sized, of_bundle, of_library;  // the last flag of each kind
  CommandLine line("Checks and times products of matrices by a kernel library or by the picks of a bundle.");
  line.flag("--bundle", "DIR", "kernels and picks that `attention-autotuner export --op gemm` wrote",
            [&o](std::string const& text) { o.bundle = text; });
  line.flag("--library", "FILE", "one kernel library instead", [&o](std::string const& text) { o.library = text; });
  line.flag("--every-pick", "", "measure every product of the bundle, instead of the one named below",
            [&o](std::string const&) { o.every_pick = true; });
  auto const size = [&line](char const* flag, int64_t& value, std::string& kind, char const* help) {
    line.flag(flag, "N", help, [=, &value, &kind](std::string const& text) { value = positive(kind = flag, text); });
  };
  size("--m", o.problem.seqlen_q, sized, "rows of A (4096)");
  size("--n", o.problem.dim_v, sized, "columns of B (4096)");
  size("--k", o.problem.dim_qk, sized, "columns of A (4096)");
  auto const name = [&line, &of_bundle](char const* flag, auto& value, auto const& values, char const* help) {
    line.flag(flag, "NAME", help,
              [=, &value, &of_bundle](std::string const& text) { value = one_of(of_bundle = flag, text, values); });
  };
  name("--dtype", o.problem.dtype, kDTypes, "of a bundle's product: fp16 (default) or bf16");
  name("--operands", o.problem.operands, kOperands, "of a bundle's product: nn (default), nt, tn or tt");
  size("--splits", o.splits, of_library, "CTAs that share the depth of a tile (1); a pick has its own");
  size("--row-blocks", o.row_blocks, of_library, "tiles of rows computed side by side (8); a pick has its own");
  auto const number_of = [&line](char const* name, int& value, char const* help) {
    line.flag(name, "N", help, [&value, name](std::string const& text) { value = int(not_negative(name, text)); });
  };
  number_of("--device", o.device, "CUDA device (0)");
  number_of("--rounds", o.rounds, "of timing (10)");
  number_of("--samples", o.samples, "elements that are checked (64)");
  line.flag("--json", "FILE", "write results and environment", [&o](std::string const& text) { o.json = text; });
  line.flag("--csv", "FILE", "write results as a table", [&o](std::string const& text) { o.csv = text; });
  if (line.parse(count, arguments, kProgram)) return 0;
  if (o.bundle.empty() == o.library.empty()) throw UsageError("give either --bundle or --library");
  if (o.every_pick && o.bundle.empty()) throw UsageError("--every-pick needs --bundle");
  if (o.every_pick && !(sized + of_bundle).empty()) {
    throw UsageError((sized.empty() ? of_bundle : sized) + " names a problem, --every-pick takes those of the bundle");
  }
  std::string const& other = o.bundle.empty() ? of_bundle : of_library;
  if (!other.empty()) throw UsageError(other + " is for --" + (o.bundle.empty() ? "bundle" : "library"));
  o.problem.seqlen_k = o.problem.seqlen_q;
  try {
    o.problem.check();
  } catch (UnsupportedProblemError const& error) {
    throw UsageError(error.what());
  }
  DeviceProperties const device = select_device(o.device);
  bool fine = true;
  std::vector<Record> results;
  for (auto const& [problem, kernel] : tasks_of(o)) results.push_back(measured(o, problem, kernel, device, fine));
  Record protocol;
  protocol.add("rounds", number(o.rounds)).add("samples", number(o.samples));
  Record const environment = environment_of(device);
  if (!o.json.empty()) write_json(o.json, kProgram, environment, protocol, results);
  if (!o.csv.empty()) write_csv(o.csv, environment, results);
  return fine ? 0 : 1;
}

}  // namespace
}  // namespace attention_autotuner::benchmarks

int main(int count, char** arguments) {
  using namespace attention_autotuner::benchmarks;
  return run_program(kProgram, [&] { return body(count, arguments); });
}

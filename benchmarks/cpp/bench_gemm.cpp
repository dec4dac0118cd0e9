// The product of two matrices by one kernel library: some elements are held against sums in double precision, then it
// is timed by the protocol of the other benchmarks.
#include <cmath>
#include <cstdio>
#include <cstring>
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
constexpr double kUlps = 2;  // that an element may be off, of the largest sum of its size

struct GemmOptions {
  std::string library, json, csv;
  int64_t m = 4096, n = 4096, k = 4096, splits = 1, row_blocks = 8;
  int device = 0, rounds = 10, samples = 64;
};

struct Sets {
  std::vector<Memory> memory;  // a, b and o of every set, then the workspace
  std::vector<GemmForwardParams> params;
  void* workspace = nullptr;
};

bool transposed(std::string const& kernel, int operand) {
  constexpr char kBefore[] = "_d16x16_";
  size_t const at = kernel.find(kBefore);
  if (at == std::string::npos) throw UsageError("--library holds no product of matrices: " + kernel);
  return kernel[at + std::strlen(kBefore) + size_t(operand)] == 't';
}

Sets make_sets(GemmOptions const& o, Kernel const& kernel, Number type, int count) {
  Sets sets;
  auto const matrix = [&](int64_t rows, int64_t columns, bool transpose) {
    sets.memory.emplace_back(size_t(rows) * size_t(columns) * bytes_of(type));
    return transpose ? contiguous(sets.memory.back().data(), 1, columns, rows)
                     : contiguous(sets.memory.back().data(), 1, rows, columns);
  };
  for (int set = 0; set < count; ++set) {
    GemmForwardParams p{};
    p.struct_size = sizeof(p);
    p.abi_version = ATTENTION_AUTOTUNER_ABI_VERSION;
    p.a = matrix(o.m, o.k, transposed(kernel.info().name, 0));
    p.b = matrix(o.k, o.n, transposed(kernel.info().name, 1));
    p.o = matrix(o.m, o.n, false);
    p.m = int32_t(o.m), p.n = int32_t(o.n), p.k = int32_t(o.k);
    p.splits = int32_t(o.splits), p.row_blocks = int32_t(o.row_blocks);
    fill_normal(p.a.data, size_t(o.m * o.k), type, 2 * uint64_t(set));
    fill_normal(p.b.data, size_t(o.k * o.n), type, 2 * uint64_t(set) + 1);
    fill_bytes(p.o.data, 0xFF, size_t(o.m * o.n) * bytes_of(type));
    sets.params.push_back(p);
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
std::string verify(GemmOptions const& o, Kernel const& kernel, GemmForwardParams const& p, Number type) {
  HostMatrix const a(p.a, o.m * o.k, transposed(kernel.info().name, 0), type);
  HostMatrix const b(p.b, o.k * o.n, transposed(kernel.info().name, 1), type);
  HostMatrix const c(p.o, o.m * o.n, false, type);
  for (int sample = 0; sample < o.samples; ++sample) {
    // Corners first, then anywhere.
    int64_t const row = sample < 4 ? (sample & 1) * (o.m - 1) : int64_t(7919) * sample % o.m;
    int64_t const column = sample < 4 ? sample / 2 * (o.n - 1) : int64_t(104729) * sample % o.n;
    double sum = 0;
    for (int64_t i = 0; i < o.k; ++i) sum += a.at(row, i) * b.at(i, column);
    double const computed = c.at(row, column);
    double const allowed = kUlps * epsilon_of(type) * (std::fabs(sum) + std::sqrt(double(o.k)) / 64);
    if (!(std::fabs(computed - sum) <= allowed)) {
      return "element " + std::to_string(row) + ", " + std::to_string(column) + " is " + std::to_string(computed) +
             ", should be " + std::to_string(sum);
    }
  }
  return "";
}

int body(int count, char const* const* arguments) {
  GemmOptions o;
  CommandLine line("Checks and times a product of matrices by a kernel library.");
  line.flag("--library", "FILE", "kernel.so of a product", [&o](std::string const& text) { o.library = text; });
  auto const size = [&line](char const* name, int64_t& value, char const* help) {
    line.flag(name, "N", help, [&value, name](std::string const& text) { value = positive(name, text); });
  };
  size("--m", o.m, "rows of A (4096)");
  size("--n", o.n, "columns of B (4096)");
  size("--k", o.k, "columns of A (4096)");
  size("--splits", o.splits, "CTAs that share the depth of a tile (1)");
  size("--row-blocks", o.row_blocks, "tiles of rows computed side by side (8)");
  auto const number_of = [&line](char const* name, int& value, char const* help) {
    line.flag(name, "N", help, [&value, name](std::string const& text) { value = int(not_negative(name, text)); });
  };
  number_of("--device", o.device, "CUDA device (0)");
  number_of("--rounds", o.rounds, "of timing (10)");
  number_of("--samples", o.samples, "elements that are checked (64)");
  line.flag("--json", "FILE", "write results and environment", [&o](std::string const& text) { o.json = text; });
  line.flag("--csv", "FILE", "write results as a table", [&o](std::string const& text) { o.csv = text; });
  if (line.parse(count, arguments, kProgram)) return 0;
  if (o.library.empty()) throw UsageError("--library is needed");
  Kernel const kernel = Kernel::open(o.library);
  Number const type = kernel.info().name.find("_bf16_") != std::string::npos ? Number::kBf16 : Number::kFp16;
  static_cast<void>(transposed(kernel.info().name, 0));
  DeviceProperties const device = select_device(o.device);
  kernel.prepare(o.device);
  double const bytes = 2.0 * (double(o.m) * double(o.k + o.n) + double(o.k) * double(o.n));
  Sets const sets = make_sets(o, kernel, type, count_sets(bytes, device.l2_bytes, free_memory(), true));
  Stream const stream = Stream::standard();
  auto const launch = [&](int set, Stream const& on) {
    kernel.launch(sets.params[size_t(set)], sets.workspace, on.handle(), o.device);
  };
  launch(0, stream);
  synchronize();
  std::string const wrong = verify(o, kernel, sets.params[0], type);
  Record record;
  record.add("kernel", json::quoted(kernel.info().name)).add("m", std::to_string(o.m)).add("n", std::to_string(o.n));
  record.add("k", std::to_string(o.k)).add("error", wrong.empty() ? "null" : json::quoted(wrong));
  if (wrong.empty()) {
    static_cast<void>(warm_up(kWarmUpSeconds));
    Timing const timing = measure(stream, int(sets.params.size()), o.rounds, 0, launch);
    double const tflops = 2.0 * double(o.m) * double(o.n) * double(o.k) / timing.median_us * 1e-6;
    record.add("median_us", number(timing.median_us)).add("spread_us", number(timing.spread_us));
    record.add("tflops", number(tflops));
    std::printf("%lld x %lld x %lld  %10.2f us  +- %.2f  %7.1f TFLOP/s\n", static_cast<long long>(o.m),
                static_cast<long long>(o.n), static_cast<long long>(o.k), timing.median_us, timing.spread_us, tflops);
  } else {
    std::printf("FAILED: %s\n", wrong.c_str());
  }
  Record protocol;
  protocol.add("rounds", number(o.rounds)).add("samples", number(o.samples));
  Record const environment = environment_of(device);
  if (!o.json.empty()) write_json(o.json, kProgram, environment, protocol, {record});
  if (!o.csv.empty()) write_csv(o.csv, environment, {record});
  return wrong.empty() ? 0 : 1;
}

}  // namespace
}  // namespace attention_autotuner::benchmarks

int main(int count, char** arguments) {
  using namespace attention_autotuner::benchmarks;
  return run_program(kProgram, [&] { return body(count, arguments); });
}

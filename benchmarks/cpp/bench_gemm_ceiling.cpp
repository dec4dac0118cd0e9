// What this GPU can do at best, by the library that bring-up measures with: what every other figure is held against.
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

#include "attention_autotuner/peaks/peaks.h"
#include "gpu.hpp"
#include "options.hpp"
#include "report.hpp"

namespace attention_autotuner::benchmarks {
namespace {

constexpr char kProgram[] = "bench_gemm_ceiling";
constexpr double kMaxSeconds = 60;  // of peaks/peaks.h

struct PeakOptions {
  std::vector<std::string> which;
  double seconds = 0.5;
  int device = 0;
  std::string json, csv;
};

double seconds(std::string const& text) {
  char* end = nullptr;
  double const value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0' || !(value > 0) || value > kMaxSeconds) {
    throw UsageError("--seconds must be a number above 0 and at most 60, got \"" + text + "\"");
  }
  return value;
}

std::vector<std::string> names(std::string const& text) {
  std::vector<std::string> names;
  for (size_t begin = 0; begin <= text.size();) {
    size_t const end = std::min(text.find(',', begin), text.size());
    names.push_back(text.substr(begin, end - begin));
    if (attention_autotuner_peak_unit(names.back().c_str()) == nullptr) {
      throw UsageError("--which knows no peak \"" + names.back() + "\"");
    }
    begin = end + 1;
  }
  return names;
}

Record measured(std::string const& which, double seconds, bool& fine) {
  attention_autotuner_peak_result result{};
  result.struct_size = sizeof(result);
  int32_t const status = attention_autotuner_measure_peak(which.c_str(), seconds, &result);
  std::string const unit = attention_autotuner_peak_unit(which.c_str());
  Record record;
  record.add("which", json::quoted(which)).add("unit", json::quoted(unit));
  if (status != ATTENTION_AUTOTUNER_OK) {
    // A GPU without the instructions of another is no failure.
    fine = fine && status == ATTENTION_AUTOTUNER_BAD_DEVICE;
    std::string const reason = attention_autotuner_peak_status_string(status);
    std::printf("%-11s  not measured: %s\n", which.c_str(), reason.c_str());
    return record.add("value", "null")
        .add("spread", "null")
        .add("samples", "0")
        .add("measured_sm_clock_mhz", "null")
        .add("error", json::quoted(reason));
  }
  std::printf("%-11s  %12.4g %-9s  +- %.2g\n", which.c_str(), result.value, unit.c_str(), result.spread);
  std::fflush(stdout);
  std::string const clock = result.sm_clock_hz > 0 ? number(result.sm_clock_hz * 1e-6) : "null";
  return record.add("value", number(result.value))
      .add("spread", number(result.spread))
      .add("samples", number(result.samples))
      .add("measured_sm_clock_mhz", clock)
      .add("error", "null");
}

int body(int count, char const* const* arguments) {
  PeakOptions options;
  std::string which = "mma_fp16,mma_bf16,wgmma_fp16,wgmma_bf16,fp32,exp,smem,l2,hbm_copy,launch";
  CommandLine line("Measures the limits of this GPU that kernels are held against.");
  line.flag("--which", "NAME[,NAME...]", "which of " + which + "; default: all",
            [&which](std::string const& text) { which = text; });
  line.flag("--seconds", "S", "of each measurement, after its warm-up (0.5)",
            [&options](std::string const& text) { options.seconds = seconds(text); });
  line.flag("--device", "N", "CUDA device (0)",
            [&options](std::string const& text) { options.device = int(not_negative("--device", text)); });
  line.flag("--json", "FILE", "write results and environment",
            [&options](std::string const& text) { options.json = text; });
  line.flag("--csv", "FILE", "write results as a table", [&options](std::string const& text) { options.csv = text; });
  if (line.parse(count, arguments, kProgram)) return 0;
  options.which = names(which);
  DeviceProperties const device = select_device(options.device);
  bool fine = true;
  std::vector<Record> results;
  for (std::string const& name : options.which) results.push_back(measured(name, options.seconds, fine));
  Record protocol;
  protocol.add("seconds", number(options.seconds));
  Record const environment = environment_of(device);
  if (!options.json.empty()) write_json(options.json, kProgram, environment, protocol, results);
  if (!options.csv.empty()) write_csv(options.csv, environment, results);
  return fine ? 0 : 1;
}

}  // namespace
}  // namespace attention_autotuner::benchmarks

int main(int count, char** arguments) {
  using namespace attention_autotuner::benchmarks;
  return run_program(kProgram, [&] { return body(count, arguments); });
}

#include "benchmark.hpp"

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>

#include "case.hpp"
#include "json.hpp"
#include "measure.hpp"
#include "options.hpp"
#include "report.hpp"

namespace attention_autotuner::benchmarks {
namespace {

// A kernel with what is known of it beside its code; JSON values.
struct Chosen {
  Kernel kernel;
  std::string layer, exact, digest, kernel_digest;
};

// The identity of a library that lies in a store, from the record beside it.
Chosen from_library(std::string const& library) {
  Chosen chosen{Kernel::open(library), "null", "null", "null", "null"};
  std::ifstream file(std::filesystem::path(library).parent_path() / "build.json");
  if (!file) return chosen;
  json::Value const record = json::parse({std::istreambuf_iterator<char>(file), {}});
  chosen.digest = quoted(record.at("digest").string());
  chosen.kernel_digest = quoted(record.at("kernel_digest").string());
  return chosen;
}

Chosen from_bundle(Bundle const& bundle, Problem const& problem) {
  Pick const pick = bundle.pick(problem);
  BundledKernel const& entry = bundle.kernels()[pick.kernel];
  return {bundle.kernel(pick), quoted(name_of(pick.layer)), pick.problem == problem.bucketed() ? "true" : "false",
          quoted(entry.digest), quoted(entry.kernel_digest)};
}

std::string json_of(Problem const& p) {
  auto const whole = [](int64_t value) { return std::to_string(value); };
  auto const truth = [](bool value) { return std::string(value ? "true" : "false"); };
  Record fields;
  fields.add("op", quoted(name_of(p.op)))
      .add("direction", quoted(name_of(p.direction)))
      .add("dtype", quoted(name_of(p.dtype)))
      .add("batch", whole(p.batch))
      .add("heads_q", whole(p.heads_q))
      .add("heads_kv", whole(p.heads_kv))
      .add("seqlen_q", whole(p.seqlen_q))
      .add("seqlen_k", whole(p.seqlen_k))
      .add("dim_qk", whole(p.dim_qk))
      .add("dim_v", whole(p.dim_v))
      .add("causal", truth(p.causal))
      .add("causal_alignment", quoted(name_of(p.causal_alignment)))
      .add("alignment_bytes", whole(p.alignment_bytes))
      .add("deterministic", truth(p.deterministic))
      .add("mask", quoted(name_of(p.mask)))
      .add("form", quoted(name_of(p.form)));
  return fields.json();
}

std::string json_of(Verdict const& verdict) {
  Record fields;
  fields.add("output", quoted(verdict.output))
      .add("reason", quoted(verdict.reason))
      .add("rows", number(double(verdict.rows)))
      .add("max_error", number(verdict.max_error))
      .add("max_allowed", number(verdict.max_allowed))
      .add("norm_error", number(verdict.norm_error))
      .add("norm_allowed", number(verdict.norm_allowed));
  return fields.json();
}

class Run {
 public:
  Run(Options const& options, DeviceProperties const& device) : options_(options), device_(device) {}

  // Checks and times one problem; false where something is wrong with it, which its record says.
  bool add(Problem const& problem, Chosen const& chosen) {
    Record record;
    record.add("case", quoted(problem.describe()))
        .add("problem", json_of(problem))
        .add("kernel", quoted(chosen.kernel.info().name))
        .add("layer", chosen.layer)
        .add("exact", chosen.exact)
        .add("digest", chosen.digest)
        .add("kernel_digest", chosen.kernel_digest);
    std::string const wrong = fill(problem, chosen.kernel, record);
    record.add("error", wrong.empty() ? "null" : quoted(wrong));
    if (!wrong.empty()) std::printf("%-64s  WRONG: %s\n", problem.describe().c_str(), wrong.c_str());
    std::fflush(stdout);
    results_.push_back(record);
    return wrong.empty();
  }

  void add_failure(Problem const& problem, std::string const& reason) {
    Record record;
    results_.push_back(
        record.add("case", quoted(problem.describe())).add("problem", json_of(problem)).add("error", quoted(reason)));
    std::printf("%-64s  FAILED: %s\n", problem.describe().c_str(), reason.c_str());
    std::fflush(stdout);
  }

  std::vector<Record> const& results() const { return results_; }

 private:
  std::string fill(Problem const& problem, Kernel const& kernel, Record& record) {
    kernel.prepare(options_.device);
    int const sets = count_sets(problem.bytes_moved(), device_.l2_bytes, free_memory(), options_.cold);
    auto const made = make_case(problem, kernel, options_.device, sets, options_.seed);
    Stream const stream;
    std::string wrong;
    std::vector<std::string> verdicts;
    if (options_.samples > 0) {
      for (Verdict const& verdict : made->verify(stream, options_.samples, options_.seed)) {
        verdicts.push_back(json_of(verdict));
        if (wrong.empty() && !verdict.reason.empty()) wrong = verdict.output + ": " + verdict.reason;
      }
    }
    record.add("verified", options_.samples > 0 && wrong.empty() ? "true" : "false").add("checks", array(verdicts));
    if (!wrong.empty()) return wrong;
    warm_up(kWarmUpSeconds);
    Timing const timing = measure(stream, sets, options_.rounds, [&](int set) { made->launch(set, stream); });
    double const tflops = problem.flops() / timing.median_us * 1e-6;
    double const gbytes = problem.bytes_moved() / timing.median_us * 1e-3;
    record.add("median_us", number(timing.median_us))
        .add("spread_us", number(timing.spread_us))
        .add("rounds", number(timing.rounds))
        .add("launches_a_round", number(timing.launches))
        .add("graph", timing.graph ? "true" : "false")
        .add("input_sets", number(sets))
        .add("workspace_bytes", number(double(made->workspace_bytes())))
        .add("tflops", number(tflops))
        .add("gbytes_per_s", number(gbytes));
    std::printf("%-64s  %10.2f us  +- %.2f  %7.1f TFLOP/s  %7.0f GB/s  %s\n", problem.describe().c_str(),
                timing.median_us, timing.spread_us, tflops, gbytes, options_.samples > 0 ? "right" : "unchecked");
    return "";
  }

  Options const& options_;
  DeviceProperties const& device_;
  std::vector<Record> results_;
};

std::vector<Problem> recorded(Bundle const& bundle, Op op, std::vector<Direction> const& directions) {
  std::vector<Problem> found;
  for (Pick const& pick : bundle.picks()) {
    for (Direction const direction : directions) {
      if (pick.problem.op == op && pick.problem.direction == direction) found.push_back(pick.problem);
    }
  }
  if (found.empty()) throw NoKernelError("the bundle " + bundle.folder() + " has no pick of " + name_of(op));
  return found;
}

int body(int count, char const* const* arguments, char const* program, Op op,
         std::vector<Direction> const& directions) {
  Options options;
  if (parse_options(count, arguments, program, op, directions, options)) return 0;
  std::optional<Bundle> bundle;
  std::optional<Chosen> library;
  if (!options.bundle.empty()) {
    bundle.emplace(options.bundle);
  } else {
    library.emplace(from_library(options.library));
  }
  DeviceProperties const device = select_device(options.device);
  Run run(options, device);
  bool fine = true;
  for (Problem const& problem : options.every_pick ? recorded(*bundle, op, directions) : options.problems) {
    try {
      fine = run.add(problem, bundle ? from_bundle(*bundle, problem) : *library) && fine;
    } catch (std::runtime_error const& error) {  // the next problem may do better
      run.add_failure(problem, error.what());
      fine = false;
    }
  }
  Record protocol;
  protocol.add("rounds", number(options.rounds))
      .add("warm_up_seconds", number(kWarmUpSeconds))
      .add("l2", quoted(options.cold ? "cold" : "warm"))
      .add("samples", number(options.samples))
      .add("seed", std::to_string(options.seed));
  Record const environment = environment_of(device);
  if (!options.json.empty()) write_json(options.json, program, environment, protocol, run.results());
  if (!options.csv.empty()) write_csv(options.csv, environment, run.results());
  return fine ? 0 : 1;
}

}  // namespace

int run_benchmark(int count, char const* const* arguments, char const* program, Op op,
                  std::vector<Direction> const& directions) {
  return run_program(program, [&] { return body(count, arguments, program, op, directions); });
}

}  // namespace attention_autotuner::benchmarks

#include "benchmark.hpp"

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>

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
  chosen.digest = json::quoted(record.at("digest").string());
  chosen.kernel_digest = json::quoted(record.at("kernel_digest").string());
  return chosen;
}

Chosen from_bundle(Bundle const& bundle, Problem const& problem, Pick const& pick) {
  BundledKernel const& entry = bundle.kernels()[pick.kernel];
  return {bundle.kernel(pick), json::quoted(name_of(pick.layer)), pick.problem == problem.bucketed() ? "true" : "false",
          json::quoted(entry.digest), json::quoted(entry.kernel_digest)};
}

std::string json_of(Problem const& p) {
  auto const whole = [](int64_t value) { return std::to_string(value); };
  auto const boolean = [](bool value) { return std::string(value ? "true" : "false"); };
  Record fields;
  fields.add("op", json::quoted(name_of(p.op)))
      .add("direction", json::quoted(name_of(p.direction)))
      .add("dtype", json::quoted(name_of(p.dtype)))
      .add("batch", whole(p.batch))
      .add("heads_q", whole(p.heads_q))
      .add("heads_kv", whole(p.heads_kv))
      .add("seqlen_q", whole(p.seqlen_q))
      .add("seqlen_k", whole(p.seqlen_k))
      .add("dim_qk", whole(p.dim_qk))
      .add("dim_v", whole(p.dim_v))
      .add("causal", boolean(p.causal))
      .add("causal_alignment", json::quoted(name_of(p.causal_alignment)))
      .add("alignment_bytes", whole(p.alignment_bytes))
      .add("deterministic", boolean(p.deterministic))
      .add("mask", json::quoted(name_of(p.mask)))
      .add("form", json::quoted(name_of(p.form)));
  return fields.json();
}

std::string json_of(Check const& check) {
  Record fields;
  fields.add("output", json::quoted(check.output))
      .add("reason", json::quoted(check.reason))
      .add("rows", number(double(check.rows)))
      .add("max_error", number(check.max_error))
      .add("max_allowed", number(check.max_allowed))
      .add("norm_error", number(check.norm_error))
      .add("norm_allowed", number(check.norm_allowed));
  return fields.json();
}

class Run {
 public:
  Run(Options const& options, DeviceProperties const& device) : options_(options), device_(device) {}

  // Checks and times one problem; false where something is wrong with it, which its record says.
  bool add(Problem const& problem, Chosen const& chosen) {
    Record record;
    record.add("case", json::quoted(problem.describe()))
        .add("problem", json_of(problem))
        .add("kernel", json::quoted(chosen.kernel.info().name))
        .add("layer", chosen.layer)
        .add("exact", chosen.exact)
        .add("digest", chosen.digest)
        .add("kernel_digest", chosen.kernel_digest);
    std::string wrong;
    try {
      wrong = fill(problem, chosen, record);
    } catch (std::runtime_error const& error) {
      wrong = error.what();
    }
    record.add("error", wrong.empty() ? "null" : json::quoted(wrong));
    if (!wrong.empty()) std::printf("%-64s  FAILED: %s\n", problem.describe().c_str(), wrong.c_str());
    std::fflush(stdout);
    results_.push_back(record);
    return wrong.empty();
  }

  void add_failure(Problem const& problem, std::string const& reason) {
    Record record;
    results_.push_back(record.add("case", json::quoted(problem.describe()))
                           .add("problem", json_of(problem))
                           .add("error", json::quoted(reason)));
    std::printf("%-64s  FAILED: %s\n", problem.describe().c_str(), reason.c_str());
    std::fflush(stdout);
  }

  std::vector<Record> const& results() const { return results_; }

 private:
  // Adds to a record what is found; answers what is wrong.
  std::string fill(Problem const& problem, Chosen const& chosen, Record& record) {
    Kernel const& kernel = chosen.kernel;
    kernel.prepare(options_.device);
    int const sets = count_sets(problem.bytes_moved(), device_.l2_bytes, free_memory(), options_.cold);
    auto const made = make_case(problem, kernel, options_.device, sets, options_.seed);
    Stream const stream = Stream::standard();
    std::string wrong;
    std::vector<std::string> checks;
    if (options_.samples > 0) {
      for (Check const& check : made->verify(stream, options_.samples, options_.seed)) {
        checks.push_back(json_of(check));
        if (wrong.empty() && !check.reason.empty()) wrong = check.output + ": " + check.reason;
      }
    }
    record.add("verified", options_.samples > 0 && wrong.empty() ? "true" : "false").add("checks", array(checks));
    if (!wrong.empty()) return wrong;
    std::string const warmed_by = warm_up(kWarmUpSeconds);
    Timing const timing = measure(stream, sets, options_.rounds, options_.rest,
                                  [&](int set, Stream const& on) { made->launch(set, on); });
    double const tflops = problem.flops() / timing.median_us * 1e-6;
    double const gbytes = problem.bytes_moved() / timing.median_us * 1e-3;
    record.add("median_us", number(timing.median_us))
        .add("spread_us", number(timing.spread_us))
        .add("rounds", number(timing.rounds))
        .add("launches_a_round", number(timing.launches))
        .add("graph", timing.graph ? "true" : "false")
        .add("input_sets", number(sets))
        .add("warm_up", json::quoted(warmed_by))
        .add("workspace_bytes", number(double(made->workspace_bytes())))
        .add("tflops", number(tflops))
        .add("gbytes_per_s", number(gbytes));
    std::printf("%-64s  %10.2f us  +- %.2f  %7.1f TFLOP/s  %7.0f GB/s  %-9s  %s\n", problem.describe().c_str(),
                timing.median_us, timing.spread_us, tflops, gbytes, options_.samples > 0 ? "right" : "unchecked",
                chosen.layer == "null" ? "" : chosen.layer.c_str());
    return "";
  }

  Options const& options_;
  DeviceProperties const& device_;
  std::vector<Record> results_;
};

// The picks of a bundle that a program measures, in the order of the index.
std::vector<Pick> recorded(Bundle const& bundle, Op op, std::vector<Direction> const& directions) {
  std::vector<Pick> picks;
  for (Pick const& pick : bundle.picks()) {
    for (Direction const direction : directions) {
      if (pick.problem.op == op && pick.problem.direction == direction) picks.push_back(pick);
    }
  }
  if (picks.empty()) throw NoKernelError("the bundle " + bundle.folder() + " has no pick of " + name_of(op));
  return picks;
}

// What is measured: a problem, and how its kernel is found.
struct Task {
  Problem problem;
  std::function<Chosen()> choose;
};

std::vector<Task> tasks_of(Options const& options, Op op, std::vector<Direction> const& directions) {
  std::vector<Task> tasks;
  if (options.bundle.empty()) {
    Chosen const chosen = from_library(options.library);
    for (Problem const& problem : options.problems) tasks.push_back({problem, [chosen] { return chosen; }});
    return tasks;
  }
  Bundle const bundle(options.bundle);
  for (Problem const& problem : options.problems) {
    tasks.push_back({problem, [=] { return from_bundle(bundle, problem, bundle.pick(problem)); }});
  }
  if (!options.every_pick) return tasks;
  for (Pick const& pick : recorded(bundle, op, directions)) {
    tasks.push_back({pick.problem, [=] { return from_bundle(bundle, pick.problem, pick); }});
  }
  return tasks;
}

int body(int count, char const* const* arguments, char const* program, Op op,
         std::vector<Direction> const& directions) {
  Options options;
  if (parse_options(count, arguments, program, op, directions, options)) return 0;
  std::vector<Task> const tasks = tasks_of(options, op, directions);
  DeviceProperties const device = select_device(options.device);
  Run run(options, device);
  bool fine = true;
  for (Task const& task : tasks) {
    try {
      fine = run.add(task.problem, task.choose()) && fine;
    } catch (std::runtime_error const& error) {  // the next one may do better
      run.add_failure(task.problem, error.what());
      fine = false;
    }
  }
  Record protocol;
  protocol.add("rounds", number(options.rounds))
      .add("rest", number(options.rest))
      .add("warm_up_seconds", number(kWarmUpSeconds))
      .add("l2", json::quoted(options.cold ? "cold" : "warm"))
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

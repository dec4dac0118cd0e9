#include "options.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <optional>

namespace attention_autotuner::benchmarks {
namespace {

constexpr int kHelpColumn = 26;
constexpr double kMaxRest = 100;

// The sizes on the command line before they are problems; those that are not given follow others.
struct Shape {
  Problem base;
  std::vector<int64_t> seqlens = {4096};
  std::optional<int64_t> heads_kv, seqlen_k, dim_v;
  std::string first_flag;  // a flag of these, if there was one

  std::vector<Problem> problems() const {
    std::vector<Problem> values;
    for (int64_t const seqlen : seqlens) {
      Problem problem = base;
      problem.heads_kv = heads_kv.value_or(base.heads_q);
      problem.seqlen_q = seqlen;
      problem.seqlen_k = seqlen_k.value_or(seqlen);
      problem.dim_v = dim_v.value_or(base.dim_qk);
      values.push_back(problem);
    }
    return values;
  }
};

std::vector<int64_t> list(std::string const& flag, std::string const& text) {
  std::vector<int64_t> values;
  for (size_t begin = 0; begin <= text.size();) {
    size_t const end = std::min(text.find(',', begin), text.size());
    values.push_back(positive(flag, text.substr(begin, end - begin)));
    begin = end + 1;
  }
  return values;
}

void add_shape(CommandLine& line, Shape& shape, std::vector<Direction> const& directions) {
  auto const flag = [&line, &shape](char const* name, char const* value_name, char const* help, auto take) {
    line.flag(name, value_name, help, [=, &shape](std::string const& text) {
      shape.first_flag = name;
      take(text);
    });
  };
  auto const number = [flag](char const* name, char const* help, auto store) {
    flag(name, "N", help, [=](std::string const& text) { store(positive(name, text)); });
  };
  Problem& p = shape.base;
  if (directions.size() > 1) {
    flag("--direction", "NAME", "forward (default) or backward",
         [&p, directions](std::string const& text) { p.direction = one_of("--direction", text, directions); });
  }
  flag("--dtype", "NAME", "fp16 (default) or bf16",
       [&p](std::string const& text) { p.dtype = one_of<DType>("--dtype", text, {DType::kFp16, DType::kBf16}); });
  number("--batch", "sequences (4)", [&p](int64_t value) { p.batch = value; });
  number("--heads", "query heads (16)", [&p](int64_t value) { p.heads_q = value; });
  number("--heads-kv", "key/value heads (as --heads)", [&shape](int64_t value) { shape.heads_kv = value; });
  flag("--seqlen", "N[,N...]", "query rows, one measurement for each (4096)",
       [&shape](std::string const& text) { shape.seqlens = list("--seqlen", text); });
  if (p.op != Op::kRetention) {
    number("--seqlen-k", "key rows (as --seqlen)", [&shape](int64_t value) { shape.seqlen_k = value; });
  }
  number("--dim-qk", "head dim of Q and K (128)", [&p](int64_t value) { p.dim_qk = value; });
  number("--dim-v", "head dim of V (as --dim-qk)", [&shape](int64_t value) { shape.dim_v = value; });
  if (p.op == Op::kAttention) {
    flag("--causal", "", "rows see no key beyond their diagonal", [&p](std::string const&) { p.causal = true; });
    flag("--causal-alignment", "NAME", "bottom_right (default) or top_left", [&p](std::string const& text) {
      p.causal_alignment = one_of<CausalAlignment>("--causal-alignment", text,
                                                   {CausalAlignment::kBottomRight, CausalAlignment::kTopLeft});
    });
  } else {
    flag("--form", "NAME", "of forward: auto (default), parallel, chunkwise or recurrent",
         [&p](std::string const& text) {
           p.form = one_of<Form>("--form", text, {Form::kAuto, Form::kParallel, Form::kChunkwise, Form::kRecurrent});
         });
  }
  flag("--alignment-bytes", "N", "16 (default), or 2 for tensors off 16-byte alignment",
       [&p](std::string const& text) { p.alignment_bytes = positive("--alignment-bytes", text); });
  flag("--deterministic", "", "of backward: kernels whose results agree bit for bit only",
       [&p](std::string const&) { p.deterministic = true; });
}

void add_common(CommandLine& line, Options& options, std::vector<std::string>& documents) {
  line.flag("--bundle", "DIR", "kernels and picks that `attention-autotuner export --output DIR` wrote",
            [&options](std::string const& text) { options.bundle = text; });
  line.flag("--library", "FILE", "one kernel library instead, e.g. .../kernel.so of a store",
            [&options](std::string const& text) { options.library = text; });
  line.flag("--every-pick", "",
            "measure every pick of the bundle, each on its own problem, instead of those named below",
            [&options](std::string const&) { options.every_pick = true; });
  line.flag("--problem-json", "JSON",
            "a problem as the index of a bundle has it, instead of its sizes; may be repeated",
            [&documents](std::string const& text) { documents.push_back(text); });
}

void add_protocol(CommandLine& line, Options& options) {
  line.flag("--device", "N", "CUDA device (0)",
            [&options](std::string const& text) { options.device = int(not_negative("--device", text)); });
  line.flag("--rounds", "N", "samples, whose median is reported (10)",
            [&options](std::string const& text) { options.rounds = int(positive("--rounds", text)); });
  line.flag("--rest", "X",
            "leave the GPU idle between rounds, X times as long as a round took (0; at most 100), so that its power "
            "limit does not lower the clocks",
            [&options](std::string const& text) { options.rest = at_most("--rest", text, kMaxRest); });
  line.flag("--warm-l2", "", "one set of inputs, which stays in the L2 cache; else sets are rotated",
            [&options](std::string const&) { options.cold = false; });
  line.flag("--samples", "N", "rows of each output held against the formula (64); 0 measures without any check",
            [&options](std::string const& text) { options.samples = int(not_negative("--samples", text)); });
  line.flag("--seed", "N", "of the inputs and of the sample (0)",
            [&options](std::string const& text) { options.seed = uint64_t(not_negative("--seed", text)); });
  line.flag("--json", "FILE", "write results and environment",
            [&options](std::string const& text) { options.json = text; });
  line.flag("--csv", "FILE", "write results as a table", [&options](std::string const& text) { options.csv = text; });
}

int64_t whole(std::string const& flag, std::string const& text, int64_t least) {
  bool const digits = !text.empty() && text.size() <= 10 && text.find_first_not_of("0123456789") == std::string::npos;
  int64_t const value = digits ? std::stoll(text) : -1;
  if (value < least || value > INT32_MAX) {
    throw UsageError(flag + " must be a whole number of at least " + std::to_string(least) + ", got \"" + text + "\"");
  }
  return value;
}

}  // namespace

void CommandLine::flag(std::string name, std::string value_name, std::string help,
                       std::function<void(std::string const&)> const& take) {
  flags_.push_back({std::move(name), std::move(value_name), std::move(help), take});
}

bool CommandLine::parse(int count, char const* const* arguments, char const* program) const {
  for (int i = 1; i < count; ++i) {
    std::string const argument = arguments[i];
    if (argument == "--help") {
      std::printf("usage: %s [options]\n\n%s\n\n", program, purpose_.c_str());
      for (Flag const& flag : flags_) {
        std::string const head = "  " + flag.name + (flag.value_name.empty() ? "" : " " + flag.value_name);
        std::printf("%-*s %s\n", kHelpColumn, head.c_str(), flag.help.c_str());
      }
      std::printf("%-*s %s\n", kHelpColumn, "  --help", "this text");
      return true;
    }
    Flag const* match = nullptr;
    for (Flag const& flag : flags_) {
      if (flag.name == argument) match = &flag;
    }
    if (match == nullptr) throw UsageError("unknown option " + argument);
    if (match->value_name.empty()) {
      match->take("");
    } else if (i + 1 == count) {
      throw UsageError(argument + " needs a value");
    } else {
      match->take(arguments[++i]);
    }
  }
  return false;
}

int64_t positive(std::string const& flag, std::string const& text) { return whole(flag, text, 1); }
int64_t not_negative(std::string const& flag, std::string const& text) { return whole(flag, text, 0); }

double at_most(std::string const& flag, std::string const& text, double maximum) {
  char* end = nullptr;
  double const value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0' || !(value >= 0 && value <= maximum)) {
    char range[40];
    std::snprintf(range, sizeof(range), "from 0 to %g", maximum);
    throw UsageError(flag + " must be a number " + range + ", got \"" + text + "\"");
  }
  return value;
}

int run_program(char const* name, std::function<int()> const& body) {
  try {
    return body();
  } catch (UsageError const& error) {
    std::fprintf(stderr, "%s: %s (--help lists the options)\n", name, error.what());
    return 2;
  } catch (std::exception const& error) {
    std::fprintf(stderr, "%s: %s\n", name, error.what());
    return 1;
  }
}

bool parse_options(int count, char const* const* arguments, char const* program, Op op,
                   std::vector<Direction> const& directions, Options& options) {
  Shape shape;
  std::vector<std::string> documents;
  shape.base.op = op;
  shape.base.direction = directions.front();
  shape.base.causal = op == Op::kRetention;
  CommandLine line(std::string("Checks and times kernels of ") + name_of(op) +
                   (directions.size() > 1 ? "" : std::string(" ") + name_of(directions.front())) +
                   " against their formula on this GPU.");
  add_common(line, options, documents);
  add_shape(line, shape, directions);
  add_protocol(line, options);
  if (line.parse(count, arguments, program)) return true;
  if (options.bundle.empty() == options.library.empty()) throw UsageError("give either --bundle or --library");
  if (options.every_pick && (options.bundle.empty() || !documents.empty())) {
    throw UsageError("--every-pick needs --bundle and takes no --problem-json");
  }
  if (!shape.first_flag.empty() && (options.every_pick || !documents.empty())) {
    throw UsageError(shape.first_flag + " names a problem by its sizes, " +
                     (options.every_pick ? "--every-pick takes those of the bundle" : "--problem-json has them all"));
  }
  if (options.every_pick) return false;
  try {
    if (documents.empty()) options.problems = shape.problems();
    for (std::string const& document : documents) options.problems.push_back(Problem::from_json(document));
    for (Problem const& problem : options.problems) {
      problem.check();
      bool known = false;
      for (Direction const direction : directions) known = known || problem.direction == direction;
      if (problem.op != op || !known) throw UsageError("this program does not measure " + problem.describe());
    }
  } catch (UnsupportedProblemError const& error) {
    throw UsageError(error.what());
  }
  return false;
}

}  // namespace attention_autotuner::benchmarks

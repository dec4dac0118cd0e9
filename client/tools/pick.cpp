// attention_autotuner_pick: says which kernel of a bundle serves a problem. Runs without a GPU.
#include <cstdio>
#include <cstring>
#include <string>

#include "attention_autotuner/client.hpp"
#include "json.hpp"

namespace {

namespace at = attention_autotuner;
using at::json::quoted;

constexpr char kHelp[] =
    "usage: attention_autotuner_pick --bundle DIR [--problem-json JSON] [--check] [--load] [--trust-owner UID]\n"
    "\n"
    "Prints which kernel of a bundle serves a problem, as one JSON object, or, without a problem, a line for each of\n"
    "its picks.\n"
    "\n"
    "  --bundle DIR          the folder that `attention-autotuner export --output DIR` wrote\n"
    "  --problem-json JSON   fields that differ from the defaults, e.g. '{\"seqlen_q\": 1024, \"seqlen_k\": 1024}'\n"
    "  --check               hold every library of the bundle against its owner and its SHA-256 first\n"
    "  --load                load the pick's library and check its ABI and its name; needs no GPU\n"
    "  --trust-owner UID     the number of a user whose bundles are used beside one's own and root's; again for more\n"
    "  --help                this text\n";

std::string number(std::optional<double> value) {
  if (!value) return "null";
  char text[40];
  std::snprintf(text, sizeof(text), "%.17g", *value);
  return text;
}

void print_pick(at::Bundle const& bundle, at::Problem const& problem, bool load) {
  at::Pick const pick = bundle.pick(problem);
  at::BundledKernel const& kernel = bundle.kernels()[pick.kernel];
  if (load) bundle.kernel(pick);
  bool const exact = pick.problem == at::listed_as(problem, pick.layer);
  std::printf(
      "{\"problem\": %s, \"bucketed\": %s, \"name\": %s, \"layer\": %s, \"exact\": %s, \"distance\": %s, \"recorded\": "
      "%s, \"digest\": %s, \"library\": %s, \"median_us\": %s, \"estimate_us\": %s}\n",
      quoted(problem.describe()).c_str(), quoted(problem.bucketed().describe()).c_str(), quoted(kernel.name).c_str(),
      quoted(at::name_of(pick.layer)).c_str(), exact ? "true" : "false", number(pick.distance).c_str(),
      quoted(pick.problem.describe()).c_str(), quoted(kernel.digest).c_str(), quoted(kernel.library).c_str(),
      number(pick.median_us).c_str(), number(pick.estimate_us).c_str());
}

void print_all(at::Bundle const& bundle) {
  std::printf("%s: %zu kernels for %s (sm_%s), %zu picks, made by version %s\n", bundle.folder().c_str(),
              bundle.kernels().size(), bundle.arch().c_str(), bundle.build_arch().c_str(), bundle.picks().size(),
              bundle.package_version().c_str());
  for (at::Pick const& pick : bundle.picks()) {
    std::printf("%-9s  %-60s  %s\n", at::name_of(pick.layer), pick.problem.describe().c_str(),
                bundle.kernels()[pick.kernel].name.c_str());
  }
}

int fail(std::string const& reason) {
  std::fprintf(stderr, "attention_autotuner_pick: %s (--help lists the options)\n", reason.c_str());
  return 2;
}

}  // namespace

int main(int count, char** arguments) {
  std::string folder, problem;
  at::Bundle::Options options;
  bool check = false, load = false;
  for (int i = 1; i < count; ++i) {
    std::string const option = arguments[i];
    if (option == "--help") return std::fputs(kHelp, stdout) < 0;
    if (option == "--check") {
      check = true;
    } else if (option == "--load") {
      load = true;
    } else if (option != "--bundle" && option != "--problem-json" && option != "--trust-owner") {
      return fail("unknown option " + option);
    } else if (i + 1 == count) {
      return fail(option + " needs a value");
    } else if (option == "--trust-owner") {
      std::string const value = arguments[++i];
      bool const digits = !value.empty() && value.find_first_not_of("0123456789") == std::string::npos;
      if (!digits || value.size() > 10 || std::stoull(value) > UINT32_MAX) {
        return fail("--trust-owner must be the number of a user, got " + value);
      }
      options.trusted_owners.push_back(uint32_t(std::stoull(value)));
    } else {
      (option == "--bundle" ? folder : problem) = arguments[++i];
    }
  }
  if (folder.empty()) return fail("--bundle is missing");
  if (load && problem.empty()) return fail("--load needs --problem-json");
  try {
    at::Bundle const bundle(folder, options);
    if (check) bundle.verify();
    if (problem.empty()) {
      print_all(bundle);
    } else {
      print_pick(bundle, at::Problem::from_json(problem), load);
    }
  } catch (at::Error const& error) {
    std::fprintf(stderr, "attention_autotuner_pick: %s\n", error.what());
    return 1;
  }
  return 0;
}

#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>

#include "attention_autotuner/client.hpp"
#include "json.hpp"
#include "problem_json.hpp"
#include "sha256.hpp"
#include "trust.hpp"

namespace attention_autotuner {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kSchema = 1;
constexpr Layer kOrder[] = {Layer::kRecord, Layer::kShipped, Layer::kPredicted, Layer::kDefault};

std::string read_file(fs::path const& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream content;
  content << file.rdbuf();
  if (!file) throw BundleError("cannot read " + path.string());
  return content.str();
}

// In words: PTX is compiled again for newer GPUs, machine code of 90a is for that capability alone.
std::string built_for(BundledKernel const& kernel) {
  return "sm_" + kernel.target_arch + (kernel.target_ptx ? " and newer" : "");
}

// An index must not name files outside its bundle.
fs::path inside(fs::path const& folder, std::string const& relative) {
  fs::path const path(relative);
  bool leaves = path.empty() || path.is_absolute();
  for (auto const& part : path) leaves = leaves || part == "..";
  if (leaves) throw json::ParseError("\"library\" must be a path inside the bundle, got \"" + relative + "\"");
  return folder / path;
}

BundledKernel kernel_of(json::Value const& entry, fs::path const& folder) {
  BundledKernel kernel;
  kernel.name = entry.at("name").string();
  kernel.library = inside(folder, entry.at("library").string()).string();
  kernel.library_sha256 = entry.at("library_sha256").string();
  kernel.library_bytes = entry.at("library_bytes").integer();
  kernel.digest = entry.at("digest").string();
  kernel.kernel_digest = entry.at("kernel_digest").string();
  kernel.target_arch = entry.at("target").at("arch").string();
  kernel.target_ptx = entry.at("target").at("ptx").boolean();
  return kernel;
}

template <typename Type>
std::optional<Type> optional_of(json::Value const& value, Type (*get)(json::Value const&)) {
  if (value.is_null()) return std::nullopt;
  return get(value);
}

LaunchKnobs launch_of(json::Value const& pick) {
  LaunchKnobs knobs;
  json::Value const* const named = pick.find("launch");
  if (named == nullptr) return knobs;
  for (auto const& [name, value] : named->members()) {
    bool const known = name == "splits" || name == "row_blocks";
    if (!known || value.integer() < 1 || value.integer() > INT32_MAX) {
      throw json::ParseError("\"launch\" has \"" + name + "\" = " + std::to_string(value.integer()) +
                             ", which this program does not know");
    }
    (name == "splits" ? knobs.splits : knobs.row_blocks) = int32_t(value.integer());
  }
  return knobs;
}

Pick pick_of(json::Value const& entry, size_t kernels) {
  Pick pick;
  pick.problem = problem_of(entry.at("problem"), true);
  int64_t const index = entry.at("kernel").integer();
  if (index < 0 || index >= int64_t(kernels)) {
    throw json::ParseError("\"kernel\" is " + std::to_string(index) + ", there are " + std::to_string(kernels));
  }
  pick.kernel = size_t(index);
  pick.launch = launch_of(entry);
  pick.layer = layer_of(entry.at("layer").string());
  auto const number = +[](json::Value const& v) { return v.number(); };
  auto const string = +[](json::Value const& v) { return v.string(); };
  pick.gpu_name = optional_of(entry.at("gpu_name"), string);
  pick.median_us = optional_of(entry.at("median_us"), number);
  pick.estimate_us = optional_of(entry.at("estimate_us"), number);
  return pick;
}

// Calls with every element of an array; errors say which one.
template <typename Function>
void for_each(json::Value const& document, char const* name, Function function) {
  size_t index = 0;
  for (json::Value const& entry : document.at(name).array()) {
    std::string const where = "\"" + std::string(name) + "\"[" + std::to_string(index++) + "]: ";
    try {
      function(entry);
    } catch (json::ParseError const& error) {
      throw json::ParseError(where + error.what());
    } catch (UnsupportedProblemError const& error) {
      throw json::ParseError(where + error.what());
    }
  }
}

void check_library(BundledKernel const& kernel, fs::path const& folder, bool checksum,
                   std::vector<uint32_t> const& owners) {
  fs::path path = folder;
  for (auto const& part : fs::path(kernel.library).lexically_relative(folder)) check_trusted(path /= part, owners);
  std::error_code missing;
  auto const bytes = fs::file_size(kernel.library, missing);
  if (missing) throw BundleError("the bundle lacks " + kernel.library + ": " + missing.message());
  if (int64_t(bytes) != kernel.library_bytes) {
    throw BundleError(kernel.library + " is " + std::to_string(bytes) + " bytes, its index says " +
                      std::to_string(kernel.library_bytes) + ": the bundle is damaged");
  }
  if (checksum && file_sha256(kernel.library) != kernel.library_sha256) {
    throw BundleError(kernel.library + " does not match the SHA-256 in its index: the bundle is damaged");
  }
}

}  // namespace

struct Bundle::State {
  std::string folder, arch, build_arch, package_version;
  std::vector<BundledKernel> kernels;
  std::vector<Pick> picks;
  Options options;
  std::mutex mutex;
  std::map<size_t, Kernel> loaded;

  void read(json::Value const& document) {
    int64_t const schema = document.at("schema").integer();
    if (schema != kSchema) {
      throw json::ParseError("\"schema\" is " + std::to_string(schema) + ", this program reads " +
                             std::to_string(kSchema));
    }
    int64_t const abi = document.at("abi_version").integer();
    if (abi / 1000 != ATTENTION_AUTOTUNER_ABI_VERSION / 1000) {
      throw json::ParseError("its kernels speak ABI " + std::to_string(abi) + ", this program " +
                             std::to_string(ATTENTION_AUTOTUNER_ABI_VERSION));
    }
    package_version = document.at("package_version").string();
    arch = document.at("arch").string();
    build_arch = document.at("build_arch").string();
    for_each(document, "kernels", [this](json::Value const& v) { kernels.push_back(kernel_of(v, folder)); });
    for_each(document, "picks", [this](json::Value const& v) { picks.push_back(pick_of(v, kernels.size())); });
  }
};

Bundle::Bundle(std::string const& folder, Options options) : state_(std::make_shared<State>()) {
  fs::path const index = fs::path(folder) / "index.json";
  std::error_code unknown;
  if (!fs::exists(index, unknown)) {
    std::string const reason =
        unknown ? "index.json cannot be looked for: " + unknown.message() : "index.json is missing";
    throw BundleError("there is no bundle at " + folder + ": " + reason +
                      " (`attention-autotuner export --output DIR` writes one)");
  }
  state_->folder = fs::absolute(folder, unknown).string();
  if (unknown) throw BundleError("the folder of " + folder + " is not known: " + unknown.message());
  state_->options = std::move(options);
  check_trusted(folder, state_->options.trusted_owners);
  check_trusted(index, state_->options.trusted_owners);
  try {
    state_->read(json::parse(read_file(index)));
  } catch (json::ParseError const& error) {
    throw BundleError(index.string() + " cannot be used: " + error.what());
  }
}

void Bundle::verify() const {
  for (BundledKernel const& kernel : kernels()) check_library(kernel, folder(), true, state_->options.trusted_owners);
}

std::string const& Bundle::folder() const { return state_->folder; }
std::string const& Bundle::arch() const { return state_->arch; }
std::string const& Bundle::build_arch() const { return state_->build_arch; }
std::string const& Bundle::package_version() const { return state_->package_version; }
std::vector<BundledKernel> const& Bundle::kernels() const { return state_->kernels; }
std::vector<Pick> const& Bundle::picks() const { return state_->picks; }

Pick Bundle::pick(Problem const& problem) const {
  problem.check();
  for (Layer const layer : kOrder) {
    Problem const wanted = listed_as(problem, layer);
    Pick const* best = nullptr;
    double least = 0;
    for (Pick const& pick : state_->picks) {
      if (pick.layer != layer) continue;
      if (layer == Layer::kShipped && !serves_lengths(pick.problem, problem)) continue;
      auto apart = pick.problem == wanted ? -1.0 : distance(wanted, pick.problem);  // the very one before all
      if (!apart || (layer != Layer::kDefault && *apart > kMaxDistance)) continue;
      if (best == nullptr || *apart < least) best = &pick, least = *apart;
    }
    if (best == nullptr) continue;
    Pick nearest = *best;
    nearest.distance = least < 0 ? 0 : least;
    return nearest;
  }
  throw NoKernelError("the bundle " + folder() + " has no kernel for " + problem.describe() + ": none of its " +
                      std::to_string(picks().size()) + " picks is of that kind, padded head dims " +
                      std::to_string(problem.padded_dim_qk()) + "/" + std::to_string(problem.padded_dim_v()) +
                      " included");
}

Kernel Bundle::kernel(Pick const& pick) const {
  std::lock_guard<std::mutex> const lock(state_->mutex);
  auto const known = state_->loaded.find(pick.kernel);
  if (known != state_->loaded.end()) return known->second.with(pick.launch);
  if (pick.kernel >= kernels().size()) {
    throw NoKernelError("the pick is of another bundle: it names kernel " + std::to_string(pick.kernel) + " of " +
                        std::to_string(kernels().size()));
  }
  BundledKernel const& entry = kernels()[pick.kernel];
  check_library(entry, folder(), state_->options.verify_checksums, state_->options.trusted_owners);
  Kernel const kernel = Kernel::open(entry.library, entry.name, built_for(entry));
  return state_->loaded.emplace(pick.kernel, kernel).first->second.with(pick.launch);
}

}  // namespace attention_autotuner

#include <dlfcn.h>

#include <filesystem>
#include <mutex>
#include <set>

#include "attention_autotuner/client.hpp"

namespace attention_autotuner {

struct Kernel::State {
  std::string path, built_for;
  KernelInfo info;
  decltype(&attention_autotuner_prepare) prepare = nullptr;
  decltype(&attention_autotuner_workspace_bytes) workspace_bytes = nullptr;
  decltype(&attention_autotuner_launch) launch = nullptr;
  decltype(&attention_autotuner_status_string) status_string = nullptr;
  std::mutex mutex;
  std::set<int> prepared;
};

namespace {

template <typename Function>
void bind(Function& function, void* library, std::string const& path, char const* symbol) {
  function = reinterpret_cast<Function>(dlsym(library, symbol));
  if (function == nullptr) throw KernelError(path + " is no kernel library: it lacks " + symbol);
}

KernelInfo read_info(decltype(&attention_autotuner_get_kernel_info) get, std::string const& path) {
  attention_autotuner_kernel_info raw{};
  raw.struct_size = sizeof(raw);
  int32_t const status = get(&raw);
  if (status != ATTENTION_AUTOTUNER_OK) {
    throw KernelError(path + " does not describe itself: status " + std::to_string(status));
  }
  return {raw.name == nullptr ? "" : raw.name,
          raw.padded_dim_qk,
          raw.padded_dim_v,
          raw.block_m,
          raw.block_n,
          raw.num_threads,
          raw.static_smem_bytes,
          raw.dynamic_smem_bytes,
          raw.copy_bytes};
}

}  // namespace

Kernel Kernel::open(std::string const& file, std::string const& expected_name, std::string const& built_for) {
  std::string const library = std::filesystem::absolute(file).string();  // or a bare name would be searched for
  void* const handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    char const* const reason = dlerror();
    throw KernelError("cannot load the kernel library " + library + ": " + (reason ? reason : "no reason given"));
  }
  decltype(&attention_autotuner_abi_version) version = nullptr;
  bind(version, handle, library, "attention_autotuner_abi_version");
  if (version() / 1000 != ATTENTION_AUTOTUNER_ABI_VERSION / 1000) {
    throw KernelError(library + " was built for ABI " + std::to_string(version()) + ", this program speaks " +
                      std::to_string(ATTENTION_AUTOTUNER_ABI_VERSION) + ": export the bundle again");
  }
  auto state = std::make_shared<State>();
  state->path = library;
  state->built_for = built_for;
  bind(state->prepare, handle, library, "attention_autotuner_prepare");
  bind(state->workspace_bytes, handle, library, "attention_autotuner_workspace_bytes");
  bind(state->launch, handle, library, "attention_autotuner_launch");
  bind(state->status_string, handle, library, "attention_autotuner_status_string");
  decltype(&attention_autotuner_get_kernel_info) get_info = nullptr;
  bind(get_info, handle, library, "attention_autotuner_get_kernel_info");
  state->info = read_info(get_info, library);
  // Another kernel, of the other direction even, would take these params for its own.
  if (!expected_name.empty() && state->info.name != expected_name) {
    throw KernelError(library + " holds " + state->info.name + ", wanted " + expected_name);
  }
  return Kernel(std::move(state));
}

KernelInfo const& Kernel::info() const { return state_->info; }
std::string const& Kernel::path() const { return state_->path; }

void Kernel::prepare(int device) const {
  std::lock_guard<std::mutex> const lock(state_->mutex);
  if (state_->prepared.count(device) != 0) return;
  raise_for_status(state_->prepare(device), ("prepare it on device " + std::to_string(device)).c_str());
  state_->prepared.insert(device);
}

void Kernel::check_params(Op op, Direction direction) const {
  std::string const wanted = std::string(name_of(op)) + "_" + name_of(direction) + "_";
  if (info().name.compare(0, wanted.size(), wanted) != 0) {
    throw KernelError("the params are of " + std::string(name_of(op)) + " " + name_of(direction) + ", the kernel is " +
                      info().name);
  }
}

size_t Kernel::workspace_bytes_of(void const* params) const { return state_->workspace_bytes(params); }

void Kernel::launch_with(void const* params, void* workspace, void* stream, int device) const {
  int32_t const status = state_->launch(params, workspace, stream, device);
  if (status != ATTENTION_AUTOTUNER_OK) raise_for_status(status, "launch it");
}

void Kernel::raise_for_status(int32_t status, char const* action) const {
  if (status == ATTENTION_AUTOTUNER_OK) return;
  char const* const reason = state_->status_string(status);
  bool const of_device = status == ATTENTION_AUTOTUNER_BAD_DEVICE && !state_->built_for.empty();
  throw LaunchError("cannot " + std::string(action) + ": " + (reason ? reason : "no reason given") + " (status " +
                        std::to_string(status) + ", kernel " + info().name +
                        (of_device ? ", built for " + state_->built_for : "") + ")",
                    status);
}

}  // namespace attention_autotuner

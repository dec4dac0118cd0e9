#include "report.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <map>
#include <stdexcept>

namespace attention_autotuner::benchmarks {
namespace {

constexpr int kSchema = 1;
constexpr char kNvml[] = "libnvidia-ml.so.1";
constexpr int kClockSm = 1, kClockMemory = 2;  // nvmlClockType_t

// The little of NVML that is asked for, by its documented C interface; a machine without it answers nothing.
class Nvml {
 public:
  explicit Nvml(std::string const& pci_bus_id) : library_(dlopen(kNvml, RTLD_NOW | RTLD_LOCAL)) {
    if (library_ == nullptr || call<int (*)()>("nvmlInit_v2") != 0) return;
    char bus[64];
    std::snprintf(bus, sizeof(bus), "%s", pci_bus_id.c_str());
    ready_ = call<int (*)(char const*, void**)>("nvmlDeviceGetHandleByPciBusId_v2", bus, &device_) == 0;
  }
  ~Nvml() {
    if (library_ != nullptr) call<int (*)()>("nvmlShutdown");
  }
  Nvml(Nvml const&) = delete;
  Nvml& operator=(Nvml const&) = delete;

  std::string driver() {
    char version[96] = {};
    bool const known = ready_ && call<int (*)(char*, unsigned)>("nvmlSystemGetDriverVersion", version, 96u) == 0;
    return known ? json::quoted(version) : "null";
  }
  std::string clock(int kind) {
    return read([&](unsigned* value) {
      return call<int (*)(void*, int, unsigned*)>("nvmlDeviceGetClockInfo", device_, kind, value);
    });
  }
  std::string max_clock(int kind) {
    return read([&](unsigned* value) {
      return call<int (*)(void*, int, unsigned*)>("nvmlDeviceGetMaxClockInfo", device_, kind, value);
    });
  }
  std::string watts(char const* function) {
    return read([&](unsigned* value) { return call<int (*)(void*, unsigned*)>(function, device_, value); }, 1e-3);
  }
  std::string temperature() {
    constexpr int kGpu = 0;  // nvmlTemperatureSensors_t
    return read([&](unsigned* value) {
      return call<int (*)(void*, int, unsigned*)>("nvmlDeviceGetTemperature", device_, kGpu, value);
    });
  }

 private:
  template <typename Function, typename... Arguments>
  int call(char const* name, Arguments... arguments) {
    auto const function = reinterpret_cast<Function>(dlsym(library_, name));
    return function == nullptr ? -1 : function(arguments...);
  }
  template <typename Get>
  std::string read(Get get, double unit = 1.0) {
    unsigned value = 0;
    return ready_ && get(&value) == 0 ? number(value * unit) : "null";
  }

  void* library_;
  void* device_ = nullptr;
  bool ready_ = false;
};

std::string now() {
  std::time_t const seconds = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  std::tm calendar{};
  gmtime_r(&seconds, &calendar);
  char text[32];
  std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%S+00:00", &calendar);
  return text;
}

void write(std::string const& path, std::string const& content) {
  std::FILE* const file = std::fopen(path.c_str(), "w");
  bool written = file != nullptr && std::fwrite(content.data(), 1, content.size(), file) == content.size();
  if (file != nullptr) written = std::fclose(file) == 0 && written;
  if (!written) throw std::runtime_error("cannot write " + path);
}

// A value in a table: strings without their quotes, unless they hold what would end a cell.
std::string cell(std::string const& value) {
  if (value == "null") return "";
  if (value.front() != '"') return value;
  std::string inner;
  bool quotes = false;
  for (size_t i = 1; i + 1 < value.size(); ++i) {
    if (value[i] == '\\' && i + 2 < value.size()) ++i;
    if (value[i] == '"') inner += '"';
    inner += value[i];
    quotes = quotes || value[i] == '"' || value[i] == ',';
  }
  return quotes ? '"' + inner + '"' : inner;
}

}  // namespace

std::string number(double value) {
  if (!std::isfinite(value)) return "null";
  char text[40];
  std::snprintf(text, sizeof(text), "%.9g", value);
  return text;
}

std::string array(std::vector<std::string> const& values) {
  std::string out = "[";
  for (std::string const& value : values) out += (out.size() > 1 ? ", " : "") + value;
  return out + "]";
}

Record& Record::add(std::string name, std::string value) {
  members_.emplace_back(std::move(name), std::move(value));
  return *this;
}

std::string Record::json() const {
  std::string out = "{";
  for (auto const& [name, value] : members_) out += (out.size() > 1 ? ", " : "") + json::quoted(name) + ": " + value;
  return out + "}";
}

Record environment_of(DeviceProperties const& device) {
  Nvml nvml(device.pci_bus_id);
  Record record;
  record.add("gpu_name", json::quoted(device.name))
      .add("num_sms", number(device.num_sms))
      .add("compute_capability", json::quoted(device.compute_capability))
      .add("l2_bytes", number(double(device.l2_bytes)))
      .add("driver", nvml.driver())
      .add("cuda_driver", json::quoted(device.cuda_driver))
      .add("cuda_runtime", json::quoted(device.cuda_runtime))
      .add("sm_clock_mhz", nvml.clock(kClockSm))
      .add("memory_clock_mhz", nvml.clock(kClockMemory))
      .add("max_sm_clock_mhz", nvml.max_clock(kClockSm))
      .add("power_draw_w", nvml.watts("nvmlDeviceGetPowerUsage"))
      .add("power_limit_w", nvml.watts("nvmlDeviceGetEnforcedPowerLimit"))
      .add("temperature_c", nvml.temperature())
      .add("time_utc", json::quoted(now()));
  return record;
}

void write_json(std::string const& path, std::string const& benchmark, Record const& environment,
                Record const& protocol, std::vector<Record> const& results) {
  std::string out = "{\n \"schema\": " + std::to_string(kSchema) + ",\n \"benchmark\": " + json::quoted(benchmark) +
                    ",\n \"environment\": " + environment.json() + ",\n \"protocol\": " + protocol.json() +
                    ",\n \"results\": [\n";
  for (size_t i = 0; i < results.size(); ++i) {
    out += "  " + results[i].json() + (i + 1 < results.size() ? ",\n" : "\n");
  }
  write(path, out + " ]\n}\n");
}

void write_csv(std::string const& path, Record const& environment, std::vector<Record> const& results) {
  std::vector<std::string> columns;  // of all results: those that failed lack some
  auto const visit_fields = [&](Record const& result, auto const& visit) {
    for (Record const* part : {&result, &environment}) {
      for (auto const& [name, value] : part->members()) {
        if (value.front() != '[' && value.front() != '{') visit(name, value);
      }
    }
  };
  for (Record const& result : results) {
    visit_fields(result, [&](std::string const& name, std::string const&) {
      if (std::find(columns.begin(), columns.end(), name) == columns.end()) columns.push_back(name);
    });
  }
  std::string out;
  for (size_t i = 0; i < columns.size(); ++i) out += (i == 0 ? "" : ",") + columns[i];
  for (Record const& result : results) {
    std::map<std::string, std::string> cells;
    visit_fields(result, [&](std::string const& name, std::string const& value) { cells[name] = cell(value); });
    out += "\n";
    for (size_t i = 0; i < columns.size(); ++i) out += (i == 0 ? "" : ",") + cells[columns[i]];
  }
  write(path, out + "\n");
}

}  // namespace attention_autotuner::benchmarks

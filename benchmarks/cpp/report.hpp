// What a benchmark writes: results as JSON and CSV, with the environment without which a figure is none.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "gpu.hpp"
#include "json.hpp"

namespace attention_autotuner::benchmarks {

// One JSON value as text (strings: json::quoted); objects keep the order of their members.
std::string number(double value);  // null where it is not finite
std::string array(std::vector<std::string> const& values);

// A row of results: named JSON values. In a table a list is left out, and strings lose their quotes.
class Record {
 public:
  Record& add(std::string name, std::string value);
  std::string json() const;
  std::vector<std::pair<std::string, std::string>> const& members() const { return members_; }

 private:
  std::vector<std::pair<std::string, std::string>> members_;
};

// The GPU and its state, the driver and CUDA, and the time of day; what NVML does not tell is null.
Record environment_of(DeviceProperties const& device);

// Writes files whole, or throws std::runtime_error.
void write_json(std::string const& path, std::string const& benchmark, Record const& environment,
                Record const& protocol, std::vector<Record> const& results);
void write_csv(std::string const& path, Record const& environment, std::vector<Record> const& results);

}  // namespace attention_autotuner::benchmarks

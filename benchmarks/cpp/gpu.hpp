// All that the benchmarks ask of a GPU beside the kernels that they measure. gpu.cu answers with CUDA; the tests put a
// host's answer in its place, so that everything else is tried where there is no GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>

#include "attention_autotuner/client.hpp"
#include "numbers.hpp"

namespace attention_autotuner::benchmarks {

// A call of CUDA failed, or there is no such device.
class GpuError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct DeviceProperties {
  std::string name;
  std::string compute_capability;  // e.g. "9.0"
  std::string pci_bus_id;          // as NVML takes it
  std::string cuda_driver;         // the newest CUDA that the driver knows, e.g. "13.0"
  std::string cuda_runtime;        // that these programs were built with
  int num_sms = 0;
  size_t l2_bytes = 0;
};

// Makes a device current and describes it.
DeviceProperties select_device(int index);
size_t free_memory();
void synchronize();

// Device memory, aligned to 256 bytes.
class Memory {
 public:
  explicit Memory(size_t bytes);
  std::byte* data() const { return data_.get(); }
  size_t bytes() const { return bytes_; }

 private:
  size_t bytes_;
  std::unique_ptr<std::byte, void (*)(std::byte*)> data_;
};

void upload(void* to, void const* from, size_t bytes);
void download(void* to, void const* from, size_t bytes);
void fill_bytes(void* to, int byte, size_t bytes);
// normal(seed, index) for every index below count.
void fill_normal(void* to, size_t count, Number type, uint64_t seed);

// A stream of work; its handle is what kernels are launched on.
class Stream {
 public:
  Stream();
  // The one that CUDA gives everybody, on which torch works, too.
  static Stream standard();
  void* handle() const { return handle_.get(); }

 private:
  explicit Stream(void* handle);
  std::unique_ptr<void, void (*)(void*)> handle_;
};

// A moment on a stream.
class Event {
 public:
  Event();
  void record(Stream const& stream);
  // On the stream of a graph that is being made: every replay records it again.
  void record_in_graph(Stream const& captured);
  // Since another one; both must have passed.
  double microseconds_since(Event const& earlier) const;

 private:
  std::unique_ptr<void, void (*)(void*)> handle_;
};

// What a function puts on a stream, to be put on any stream at once.
class Graph {
 public:
  explicit Graph(std::function<void(Stream const& captured)> const& work);
  void replay(Stream const& stream) const;

 private:
  std::unique_ptr<void, void (*)(void*)> handle_;
};

// Keeps a stream busy for about this many cycles, while the host prepares what follows.
void spin(Stream const& stream, int64_t cycles);
// Multiplies matrices until the clocks are at their sustained level; answers by what: "cublas", as Python does, where
// that library is found, else "wmma", a kernel of its own.
std::string warm_up(double seconds);
// O and LSE by the formula, in fp32, with no kernel of a bundle: what a backward pass is given.
void attention_by_formula(AttentionForwardParams const& params, Number type);

}  // namespace attention_autotuner::benchmarks

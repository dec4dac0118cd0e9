// benchmarks/cpp/gpu.hpp without a GPU: memory, streams and events of the host, for kernels that run on it, so that the
// benchmarks are tried as a whole. Time is the host's.
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "gpu.hpp"
#include "reference.hpp"

namespace attention_autotuner::benchmarks {
namespace {

using Clock = std::chrono::steady_clock;

struct Recorded {
  std::function<void(Stream const&)> work;
};

void store(void* to, size_t index, Number type, float value) {
  if (type == Number::kFp32) {
    static_cast<float*>(to)[index] = value;
    return;
  }
  double const exact = rounded(value, type);
  uint16_t bits = 0;  // found by halves: decode() grows with the bits of a positive number
  for (int bit = 14; bit >= 0; --bit) {
    uint16_t const tried = uint16_t(bits | 1 << bit);
    float const number = decode(tried, type);
    if (number <= std::fabs(exact)) bits = tried;
  }
  static_cast<uint16_t*>(to)[index] = uint16_t(bits | (exact < 0 ? 0x8000 : 0));
}

}  // namespace

DeviceProperties select_device(int index) {
  if (index != 0) throw GpuError("there is no device " + std::to_string(index) + ": this machine has 1");
  DeviceProperties properties;
  properties.name = "a \"host\", at best";
  properties.compute_capability = "0.0";
  properties.pci_bus_id = "none";
  properties.cuda_driver = properties.cuda_runtime = "0.0";
  properties.num_sms = 1;
  properties.l2_bytes = 1 << 16;
  return properties;
}

size_t free_memory() { return size_t(1) << 30; }
void synchronize() {}

Memory::Memory(size_t bytes)
    : bytes_(bytes),
      data_(static_cast<std::byte*>(std::aligned_alloc(256, (bytes + 256) / 256 * 256)),
            [](std::byte* held) { std::free(held); }) {}

void upload(void* to, void const* from, size_t bytes) { std::memcpy(to, from, bytes); }
void download(void* to, void const* from, size_t bytes) { std::memcpy(to, from, bytes); }
void fill_bytes(void* to, int byte, size_t bytes) { std::memset(to, byte, bytes); }

void fill_normal(void* to, size_t count, Number type, uint64_t seed) {
  for (size_t i = 0; i < count; ++i) store(to, i, type, normal(seed, i));
}

Stream::Stream() : handle_(new int(0), [](void* held) { delete static_cast<int*>(held); }) {}
Stream::Stream(void* handle) : handle_(handle, [](void*) {}) {}
Stream Stream::standard() { return Stream(nullptr); }
Event::Event() : handle_(new Clock::time_point, [](void* held) { delete static_cast<Clock::time_point*>(held); }) {}
void Event::record(Stream const&) { *static_cast<Clock::time_point*>(handle_.get()) = Clock::now(); }
void Event::record_in_graph(Stream const& captured) { record(captured); }
double Event::microseconds_since(Event const& earlier) const {
  std::chrono::duration<double, std::micro> const apart =
      *static_cast<Clock::time_point*>(handle_.get()) - *static_cast<Clock::time_point*>(earlier.handle_.get());
  return apart.count();
}

// A host does what it is told at once; what was told is remembered.
Graph::Graph(std::function<void(Stream const&)> const& work)
    : handle_(new Recorded{work}, [](void* held) { delete static_cast<Recorded*>(held); }) {}
void Graph::replay(Stream const& stream) const { static_cast<Recorded*>(handle_.get())->work(stream); }

void spin(Stream const&, int64_t) {}
std::string warm_up(double) { return "nothing"; }

void attention_by_formula(AttentionForwardParams const& p, Number type) {
  auto const tensor = [&](Tensor const& from, int64_t heads, int64_t rows, int64_t columns) {
    HostTensor made{type, heads, rows, columns, std::vector<std::byte>(size_t(p.batch * heads * rows * columns) * 2)};
    std::memcpy(made.bytes.data(), from.data, made.bytes.size());
    return made;
  };
  HostInputs inputs;
  inputs.q = tensor(p.q, p.heads_q, p.seqlen_q, p.dim_qk);
  inputs.k = tensor(p.k, p.heads_kv, p.seqlen_k, p.dim_qk);
  inputs.v = tensor(p.v, p.heads_kv, p.seqlen_k, p.dim_v);
  Problem problem;
  problem.batch = p.batch, problem.heads_q = p.heads_q, problem.heads_kv = p.heads_kv;
  problem.seqlen_q = p.seqlen_q, problem.seqlen_k = p.seqlen_k, problem.dim_qk = p.dim_qk, problem.dim_v = p.dim_v;
  problem.causal = p.causal != 0;
  bool const top_left = p.causal_offset == 0;
  problem.causal_alignment = top_left ? CausalAlignment::kTopLeft : CausalAlignment::kBottomRight;
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t h = 0; h < p.heads_q; ++h) {
      for (int64_t i = 0; i < p.seqlen_q; ++i) {
        size_t const row = size_t((b * p.heads_q + h) * p.seqlen_q + i);
        Row const o = row_of("o", problem, p.softmax_scale, inputs, {b, h, i});
        for (size_t e = 0; e < o.exact.size(); ++e) {
          store(p.o.data, row * size_t(p.dim_v) + e, type, float(o.exact[e]));
        }
        p.lse[row] = float(row_of("lse", problem, p.softmax_scale, inputs, {b, h, i}).exact[0]);
      }
    }
  }
}

}  // namespace attention_autotuner::benchmarks

#include "measure.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <thread>

namespace attention_autotuner::benchmarks {
namespace {

// As in tuning/measure.py; a test compares them.
constexpr double kGraphBelowUs = 50.0;
constexpr double kSampleUs = 400.0;
constexpr int kMaxLaunches = 64;
constexpr int kMaxInputSets = 32;
constexpr double kRotationOverL2 = 3.0;
constexpr double kMaxMemoryShare = 0.5;
constexpr int64_t kHeadStartCycles = 400'000;
constexpr double kHeadStartCyclesASecond = 3e9;
constexpr int64_t kMaxHeadStartCycles = 60'000'000;

// One kernel with its events, its number of launches a sample, and its graph where it has one.
class Sampler {
 public:
  Sampler(Stream const& stream, int sets, Launch const& launch) : stream_(stream), sets_(sets), launch_(launch) {
    for (int i = 0; i < 3; ++i) launch_next(stream_);  // module load, first launch and clock ramps stay outside
    launches_ = 4;
    enqueue();
    synchronize();
    double const once = read_us();
    if (once >= kGraphBelowUs) {
      launches_ = std::max(1, std::min(kMaxLaunches, int(std::nearbyint(kSampleUs / once))));
      return;
    }
    launches_ = launches_per_replay(once, sets_);
    next_ = 0;
    // The events too, so that a sample is of the kernels alone, however long a launch of the graph takes.
    graph_ = std::make_unique<Graph>([this](Stream const& captured) {
      start_.record_in_graph(captured);
      for (int i = 0; i < launches_; ++i) launch_next(captured);
      end_.record_in_graph(captured);
    });
  }

  void enqueue() {
    if (graph_ != nullptr) {
      graph_->replay(stream_);
      return;
    }
    start_.record(stream_);
    for (int i = 0; i < launches_; ++i) launch_next(stream_);
    end_.record(stream_);
  }

  // Microseconds of one launch in the last sample; the stream must have been waited for.
  double read_us() const { return end_.microseconds_since(start_) / launches_; }
  int launches() const { return launches_; }
  bool graph() const { return graph_ != nullptr; }

 private:
  void launch_next(Stream const& stream) {
    launch_(next_, stream);
    next_ = (next_ + 1) % sets_;
  }

  Stream const& stream_;
  int sets_;
  Launch const& launch_;
  int next_ = 0, launches_ = 1;
  Event start_, end_;
  std::unique_ptr<Graph> graph_;
};

}  // namespace

int count_sets(double bytes_moved, size_t l2_bytes, size_t free_bytes, bool cold) {
  if (!cold) return 1;
  double const wanted = std::floor(kRotationOverL2 * double(l2_bytes) / bytes_moved) + 2;
  double const fits = std::floor(kMaxMemoryShare * double(free_bytes) / bytes_moved);
  return int(std::max(1.0, std::min({wanted, fits, double(kMaxInputSets)})));
}

int launches_per_replay(double once_us, int sets) {
  double const wanted = std::min(double(kMaxLaunches), kSampleUs / once_us);
  return sets * std::max(1, int(wanted / sets));
}

Timing measure(Stream const& stream, int sets, int rounds, double rest, Launch const& launch) {
  using Clock = std::chrono::steady_clock;
  using Seconds = std::chrono::duration<double>;
  Sampler sampler(stream, sets, launch);
  std::vector<double> samples;
  int64_t head_start = kHeadStartCycles;
  for (int round = 0; round < rounds; ++round) {
    auto const began = Clock::now();
    // Or samples would hold the time that the host takes to launch: what it took the last time is granted.
    spin(stream, head_start);
    auto const spinning = Clock::now();
    sampler.enqueue();
    Seconds const host = Clock::now() - spinning;
    head_start = std::clamp(int64_t(host.count() * kHeadStartCyclesASecond), kHeadStartCycles, kMaxHeadStartCycles);
    synchronize();
    Seconds const took = Clock::now() - began;
    samples.push_back(sampler.read_us());
    if (rest > 0 && round + 1 < rounds) std::this_thread::sleep_for(rest * took);
  }
  return {median_of(samples), spread_of(samples), rounds, sampler.launches(), sampler.graph()};
}

double median_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  size_t const half = values.size() / 2;
  return values.size() % 2 != 0 ? values[half] : (values[half - 1] + values[half]) / 2;
}

double spread_of(std::vector<double> values) {
  if (values.size() < 2) return 0;
  std::sort(values.begin(), values.end());
  size_t const quarter = (values.size() - 1) / 4;
  return (values[values.size() - 1 - quarter] - values[quarter]) / 2;
}

}  // namespace attention_autotuner::benchmarks

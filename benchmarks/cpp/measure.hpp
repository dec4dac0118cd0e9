// Timing by the protocol of the Python measurer (tuning/measure.py): warm clocks, cold L2, CUDA events, a graph for
// launches so short that the host would be felt, and the median of rounds with its spread.
#pragma once

#include <functional>
#include <vector>

#include "gpu.hpp"

namespace attention_autotuner::benchmarks {

inline constexpr double kWarmUpSeconds = 0.4;

struct Timing {
  double median_us = 0;
  double spread_us = 0;  // half the distance between the quartiles
  int rounds = 0;
  int launches = 0;  // of one round, whose mean is its sample
  bool graph = false;
};

// How many sets of inputs it takes that one has left the L2 when its turn comes again; 1 for warm timings.
int count_sets(double bytes_moved, size_t l2_bytes, size_t free_bytes, bool cold);

// Launches that one graph holds: whole rotations of the input sets, so that none is read from L2 at the next replay.
int launches_per_replay(double once_us, int sets);

// Enqueues a launch with a set of inputs on a stream.
using Launch = std::function<void(int set, Stream const& stream)>;

// Times launches with sets 0, 1, ... in turn. The GPU must be warm. It is left idle between rounds for `rest` times
// as long as a round took, so that a kernel that draws more power than the GPU may is timed at the clocks of one that
// does not, whatever the host does between rounds; with 0 rounds follow each other at once.
Timing measure(Stream const& stream, int sets, int rounds, double rest, Launch const& launch);

// The middle of values, and half the distance between their quartiles.
double median_of(std::vector<double> values);
double spread_of(std::vector<double> values);

}  // namespace attention_autotuner::benchmarks

// MMAs of warpgroups (WGMMA) as they are queued.
//
// All 128 threads of a warpgroup issue an MMA. Its operands are read when all have issued it or at the latest when the
// wait for its group ends, and its accumulators hold NaN in between.
#pragma once

#include "machine.h"

namespace emulation {

inline constexpr int kWarpgroup = 128;

// The sums of a warpgroup while MMAs that write them are in flight.
struct Accumulator {
  int columns;
  int uses = 0;                       // MMAs in flight
  float* registers[kWarpgroup] = {};  // of each thread
  std::vector<float> sums;            // [64][columns]
};

struct Mma {
  MmaShape shape;
  uint64_t a, b;
  bool accumulate;
  int group, joined = 0;
  uint32_t const* a_registers[kWarpgroup][4];
  uint32_t a_words[kWarpgroup][4];  // in them at the issue
  std::shared_ptr<Accumulator> accumulator;
  std::vector<uint32_t> chunks;           // of shared memory that it reads
  std::vector<float> a_values, b_values;  // once read: [64][16], [16][columns]
};

struct MmaQueue {
  std::deque<std::unique_ptr<Mma>> mmas;
  int first = 0;  // number of the first in the queue
  std::vector<std::shared_ptr<Accumulator>> accumulators;
  std::deque<int> commits;  // threads that have committed each group, from `completed` on
  int completed = 0;        // groups
  uint16_t actor = 0;       // whose time is `completed`; 0 before the first MMA
  bool due = false;         // an event will complete the next group
  WaitQueue queue;
};

}  // namespace emulation

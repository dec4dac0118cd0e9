// Device memory for the tensors of a case, laid out as torch's allocator lays out Python's, so that a launch meets as
// many pages of memory in both: the GPU looks up each of them, which a kernel of a few microseconds may feel.
#pragma once

#include <vector>

#include "gpu.hpp"

namespace attention_autotuner::benchmarks {

// A piece of a pool's memory.
struct Block {
  size_t segment = 0;  // of the pool, in the order in which they were allocated
  std::byte* data = nullptr;
  size_t bytes = 0;
};

class Pool {
 public:
  // New memory, which lives as long as the pool. Up to 1 MiB it shares segments of 2 MiB, below 10 MiB segments of 20
  // MiB, and begins at a multiple of 512 bytes in them; what is larger has a segment of its own, unless the rest of
  // another holds it.
  Block take(size_t bytes);

 private:
  struct Segment {
    Memory memory;
    bool small = false;
    size_t used = 0;
  };
  std::vector<Segment> segments_;
};

}  // namespace attention_autotuner::benchmarks

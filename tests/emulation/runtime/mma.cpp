// WGMMA; see mma.h.
#include "mma.h"

#ifdef __F16C__
#include <immintrin.h>
#endif

#include <bit>
#include <cmath>
#include <cstring>

namespace emulation {

namespace {

constexpr uint32_t kInFlight = 0x7fc0beef;  // NaN in accumulators

#ifndef __F16C__
// Of fp16, by its bits.
std::vector<float> const halves = [] {
  std::vector<float> values(65536);
  for (int i = 0; i < 65536; ++i) {
    int const exponent = i >> 10 & 31, mantissa = i & 1023;
    float const size = exponent == 31 ? (mantissa != 0 ? NAN : INFINITY)
                       : exponent > 0 ? std::ldexp(float(1024 + mantissa), exponent - 25)
                                      : std::ldexp(float(mantissa), -24);
    values[size_t(i)] = i >> 15 != 0 ? -size : size;
  }
  return values;
}();
#endif
float decode(uint16_t bits, bool bf16) {
  if (bf16) {
    uint32_t const word = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &word, 4);
    return value;
  }
#ifdef __F16C__
  return _cvtsh_ss(bits);
#else
  return halves[bits];
#endif
}

// A descriptor of an operand in shared memory.
struct Operand {
  uint32_t start, leading, stride;
  bool transposed;  // rows are what is summed over

  Operand(uint64_t descriptor, bool transposed)
      : start(uint32_t(descriptor & 0x3fff) << 4),
        leading(uint32_t(descriptor >> 16 & 0x3fff) << 4),
        stride(uint32_t(descriptor >> 32 & 0x3fff) << 4),
        transposed(transposed) {
    if (descriptor >> 62 != 1) fault("the swizzle %d of an operand is not emulated", int(descriptor >> 62));
    if ((descriptor >> 49 & 7) != 0) fault("the base offset of an operand is not emulated");
  }
  // Where an element lies: `depth` is of what is summed over, `other` of the rows of A or the columns of B.
  uint32_t address(int other, int depth) const {
    uint32_t const at = transposed
                            ? start + uint32_t(other / 64) * leading + uint32_t(depth / 8) * stride +
                                  uint32_t(depth % 8) * 128 + uint32_t(other % 64) * 2
                            : start + uint32_t(other / 8) * stride + uint32_t(other % 8) * 128 + uint32_t(depth) * 2;
    return at ^ (at >> 7 & 7) << 4;
  }
  // The chunks of 16 bytes that hold it.
  void list(std::vector<uint32_t>& chunks, int others) const {
    if (transposed) {
      for (int depth = 0; depth < 16; ++depth) {
        for (int other = 0; other < others; other += 8) chunks.push_back(address(other, depth));
      }
    } else {
      for (int other = 0; other < others; ++other) {
        for (int depth = 0; depth < 16; depth += 8) chunks.push_back(address(other, depth));
      }
    }
  }
};

// Reads an operand by chunks of eight elements to `values`, one step of `others` or of the depth apart.
void read_operand(Operand const& operand, SharedMemory& memory, int others, bool bf16, float* values, int per_other,
                  int per_depth) {
  int const across = operand.transposed ? 8 : 1, deep = operand.transposed ? 1 : 8;
  int const step = operand.transposed ? per_other : per_depth;
  for (int other = 0; other < others; other += across) {
    for (int depth = 0; depth < 16; depth += deep) {
      uint16_t bits[8];
      std::memcpy(bits, memory.raw(operand.address(other, depth), 16, "an MMA's read"), 16);
      float* const first = values + other * per_other + depth * per_depth;
      for (int i = 0; i < 8; ++i) first[i * step] = decode(bits[i], bf16);
    }
  }
}

void read_operands(Mma& mma, SharedMemory& memory) {
  if (!mma.b_values.empty()) return;
  MmaShape const& shape = mma.shape;
  mma.a_values.resize(64 * 16);
  if (shape.a_in_registers) {
    for (int thread = 0; thread < kWarpgroup; ++thread) {
      int const row = 16 * (thread / 32) + thread % 32 / 4, depth = 2 * (thread % 4);
      for (int i = 0; i < 4; ++i) {
        uint32_t const word = *mma.a_registers[thread][i];
        if (word != mma.a_words[thread][i]) {
          fault("thread %d of a warpgroup has changed a register of A that an MMA has yet to read", thread);
        }
        float* const pair = &mma.a_values[size_t((row + 8 * (i % 2)) * 16 + depth + 8 * (i / 2))];
        pair[0] = decode(uint16_t(word), shape.bf16);
        pair[1] = decode(uint16_t(word >> 16), shape.bf16);
      }
    }
  } else {
    read_operand(Operand(mma.a, shape.transposed_a), memory, 64, shape.bf16, mma.a_values.data(), 16, 1);
  }
  mma.b_values.resize(size_t(16 * shape.columns));
  Operand const b(mma.b, shape.transposed_b);
  read_operand(b, memory, shape.columns, shape.bf16, mma.b_values.data(), 1, shape.columns);
}

void compute(Mma const& mma) {
  int const columns = mma.shape.columns;
  for (int row = 0; row < 64; ++row) {
    float* __restrict const sums = &mma.accumulator->sums[size_t(row * columns)];
    if (!mma.accumulate) std::fill(sums, sums + columns, 0.0f);
    for (int depth = 0; depth < 16; ++depth) {
      float const a = mma.a_values[size_t(row * 16 + depth)];
      float const* __restrict const b = &mma.b_values[size_t(depth * columns)];
      for (int column = 0; column < columns; ++column) sums[column] += a * b[column];
    }
  }
}

// Visits a thread's accumulators: register and place in [64][columns].
template <typename Visit>
void visit_registers(Accumulator& accumulator, int thread, Visit&& visit) {
  int const row = 16 * (thread / 32) + thread % 32 / 4, first = 2 * (thread % 4);
  for (int i = 0; i < accumulator.columns / 2; ++i) {
    int const at = (row + 8 * (i / 2 % 2)) * accumulator.columns + 8 * (i / 4) + first + i % 2;
    visit(accumulator.registers[thread][i], accumulator.sums[size_t(at)]);
  }
}

void complete_group(Cta& cta, MmaQueue& queue);

void complete_when_due(Cta& cta, MmaQueue& queue) {
  if (queue.due || queue.commits.empty() || queue.commits.front() < kWarpgroup) return;
  queue.due = true;
  ++cta.events;
  later([&cta, &queue] { complete_group(cta, queue); });
}

void complete_group(Cta& cta, MmaQueue& queue) {
  while (!queue.mmas.empty() && queue.mmas.front()->group == queue.completed) {
    Mma& mma = *queue.mmas.front();
    read_operands(mma, cta.memory);
    compute(mma);
    for (uint32_t chunk : mma.chunks) cta.memory.has_read(chunk);
    Accumulator& accumulator = *mma.accumulator;
    if (--accumulator.uses == 0) {
      for (int thread = 0; thread < kWarpgroup; ++thread) {
        visit_registers(accumulator, thread, [thread](float& held, float sum) {
          if (std::bit_cast<uint32_t>(held) != kInFlight) {
            fault("thread %d of a warpgroup has written an accumulator of an MMA in flight", thread);
          }
          held = sum;
        });
      }
      std::erase(queue.accumulators, mma.accumulator);
    }
    queue.mmas.pop_front();
    ++queue.first;
  }
  queue.commits.pop_front();
  ++queue.completed;
  queue.due = false;
  --cta.events;
  queue.queue.wake();
  complete_when_due(cta, queue);
}

MmaQueue& own_queue() { return *current->cta->mmas[size_t(current->linear / kWarpgroup)]; }

}  // namespace

void issue_mma(MmaShape const& shape, float* d, uint64_t a, uint32_t const* const* a_registers, uint64_t b,
               bool accumulate) {
  Thread& self = *current;
  MmaQueue& queue = own_queue();
  int const lane = self.linear % kWarpgroup;
  if (!self.fenced) fault("an MMA without a fence since the last group");
  int const at = self.issued++ - queue.first;
  if (at == int(queue.mmas.size())) {
    auto made = std::make_unique<Mma>();
    made->shape = shape;
    made->a = a;
    made->b = b;
    made->accumulate = accumulate;
    made->group = self.committed;
    for (auto const& held : queue.accumulators) {
      if (held->registers[lane] == d) made->accumulator = held;
    }
    if (made->accumulator == nullptr) {
      made->accumulator = std::make_shared<Accumulator>();
      made->accumulator->columns = shape.columns;
      made->accumulator->sums.resize(size_t(64 * shape.columns));
      queue.accumulators.push_back(made->accumulator);
    }
    ++made->accumulator->uses;
    if (!shape.a_in_registers) Operand(a, shape.transposed_a).list(made->chunks, 64);
    Operand(b, shape.transposed_b).list(made->chunks, shape.columns);
    if (queue.actor == 0) queue.actor = self.cta->new_actor();
    Moment const done{queue.actor, uint32_t(self.committed + 1)};
    for (uint32_t chunk : made->chunks) self.cta->memory.will_read(chunk, done, "an MMA's read");
    queue.mmas.push_back(std::move(made));
  }
  Mma& mma = *queue.mmas[size_t(at)];
  if (!(mma.shape == shape) || mma.a != a || mma.b != b || mma.accumulate != accumulate ||
      mma.group != self.committed) {
    fault("threads of a warpgroup issue different MMAs");
  }
  if (lane % 32 == 0) {  // every warp has to know of what it reads
    for (uint32_t chunk : mma.chunks) self.cta->memory.check_visible(chunk / 16 * 16, 16, "an MMA's read");
  }
  for (int i = 0; shape.a_in_registers && i < 4; ++i) {
    mma.a_registers[lane][i] = a_registers[i];
    mma.a_words[lane][i] = *a_registers[i];
  }
  Accumulator& accumulator = *mma.accumulator;
  if (accumulator.columns != shape.columns) fault("MMAs of different shapes on one accumulator");
  if (accumulator.registers[lane] == nullptr) {
    accumulator.registers[lane] = d;
    visit_registers(accumulator, lane, [](float& held, float& sum) {
      sum = held;
      held = std::bit_cast<float>(kInFlight);
    });
  }
  if (accumulator.registers[lane] != d) fault("threads of a warpgroup mean different accumulators");
  if (++mma.joined == kWarpgroup && early()) read_operands(mma, self.cta->memory);
}
void fence_mma() { current->fenced = true; }
void commit_mma() {
  Thread& self = *current;
  MmaQueue& queue = own_queue();
  self.fenced = false;
  size_t const at = size_t(self.committed++ - queue.completed);
  if (at == queue.commits.size()) queue.commits.push_back(0);
  ++queue.commits[at];
  complete_when_due(*self.cta, queue);
}
void wait_mma(int pending) {
  Thread& self = *current;
  MmaQueue& queue = own_queue();
  maybe_yield();
  int const wanted = self.committed - pending;
  wait_until(queue.queue, [&] { return queue.completed >= wanted; }, "MMAs up to group %d", wanted);
  if (wanted > 0) self.clock.learn({queue.actor, uint32_t(wanted)});
}
void multiply_in_warp(float (&sums)[4], Words const& operands, bool bf16) {
  Words mine = operands;
  std::memcpy(&mine.w[6], sums, sizeof(sums));
  Words const* const all = meet("mma.sync", ~0u, mine, [bf16](Words* lanes) {
    float a[16][16], b[16][8], d[16][8];
    for (int lane = 0; lane < 32; ++lane) {
      uint32_t const* const words = lanes[lane].w;
      int const row = lane / 4, pair = 2 * (lane % 4);
      for (int word = 0; word < 4; ++word) {
        float* const two = &a[row + 8 * (word % 2)][pair + 8 * (word / 2)];
        two[0] = decode(uint16_t(words[word]), bf16);
        two[1] = decode(uint16_t(words[word] >> 16), bf16);
      }
      for (int word = 0; word < 2; ++word) {
        b[pair + 8 * word][row] = decode(uint16_t(words[4 + word]), bf16);
        b[pair + 8 * word + 1][row] = decode(uint16_t(words[4 + word] >> 16), bf16);
      }
      for (int i = 0; i < 4; ++i) d[row + 8 * (i / 2)][pair + i % 2] = std::bit_cast<float>(words[6 + i]);
    }
    for (int row = 0; row < 16; ++row) {
      float sums[8];
      std::memcpy(sums, d[row], sizeof(sums));
      for (int depth = 0; depth < 16; ++depth) {
        for (int column = 0; column < 8; ++column) sums[column] += a[row][depth] * b[depth][column];
      }
      std::memcpy(d[row], sums, sizeof(sums));
    }
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        lanes[lane].w[6 + i] = std::bit_cast<uint32_t>(d[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2]);
      }
    }
  });
  std::memcpy(sums, &all[current->lane()].w[6], sizeof(sums));
}
bool mmas_done(Cta const& cta) {
  for (auto const& queue : cta.mmas) {
    if (!queue->mmas.empty()) return false;
  }
  return true;
}

}  // namespace emulation

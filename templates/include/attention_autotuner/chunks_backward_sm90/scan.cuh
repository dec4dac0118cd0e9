// States before super-chunks from what each super-chunk adds, where kernels of one call start before those ahead end.
#pragma once

#include <cstdint>

#include "attention_autotuner/common/scalars.cuh"
#include "attention_autotuner/sm90/roles.cuh"

namespace attention_autotuner {

inline constexpr int kScanThreads = 256;
inline constexpr int kScanElements = 4;  // of a thread, whose loads are in flight together

// As retention_scan of common/states.cuh, with the loads of two rounds in flight. blockIdx.y is the sequence.
template <bool Reversed>
__global__ void __launch_bounds__(kScanThreads)
    chunk_scan_sm90(float* states, float const* first, float* last, float const* log2_gamma, int heads, int supers,
                    int unknown, int elements, int super_chunk, int seqlen) {
  launch_dependent_grids();
  int const begin = blockIdx.x * kScanThreads * kScanElements + int(threadIdx.x), sequence = blockIdx.y;
  float const log2 = log2_gamma[sequence % heads];
  using Values = float[kScanElements];
  auto const visit = [begin, elements](auto&& values_at) {
#pragma unroll
    for (int i = 0; i < kScanElements; ++i) {
      int const element = begin + i * kScanThreads;
      if (element < elements) values_at(i, element);
    }
  };
  auto const load = [&visit](Values& values, float const* source) {
    visit([&values, source](int i, int element) { values[i] = source[element]; });
  };
  auto const store = [&visit](float* target, Values const& values) {
    visit([&values, target](int i, int element) { target[element] = values[i]; });
  };
  auto const super_at = [supers](int step) { return Reversed ? supers - 1 - step : step; };
  auto const slot_at = [=](int step) { return states + (int64_t(sequence) * supers + super_at(step)) * elements; };
  Values state = {}, added = {}, next = {};
  if (first != nullptr) load(state, first + int64_t(sequence) * elements);
  wait_on_dependent_grids();
  int const known = supers - unknown;
  if (known > 0) load(added, slot_at(0));
  for (int step = 0; step < known; ++step) {
    if (step + 1 < known) load(next, slot_at(step + 1));
    float const factor = exp2f(log2 * float(minimum(super_chunk, seqlen - super_at(step) * super_chunk)));
    store(slot_at(step), state);
#pragma unroll
    for (int i = 0; i < kScanElements; ++i) {
      state[i] = fmaf(state[i], factor, added[i]);
      added[i] = next[i];
    }
  }
  if (unknown > 0) store(slot_at(known), state);
  if (last != nullptr) store(last + int64_t(sequence) * elements, state);
}

}  // namespace attention_autotuner

#include "pool.hpp"

#include <algorithm>

namespace attention_autotuner::benchmarks {
namespace {

// Bytes, as in torch's c10/core/AllocatorConfig.h; a test compares them.
constexpr size_t kMinBlockSize = 512;
constexpr size_t kSmallSize = 1048576;
constexpr size_t kSmallBuffer = 2097152;
constexpr size_t kMinLargeAlloc = 10485760;
constexpr size_t kLargeBuffer = 20971520;
constexpr size_t kRoundLarge = 2097152;

size_t rounded_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

size_t segment_bytes(size_t bytes) {
  if (bytes <= kSmallSize) return kSmallBuffer;
  return bytes < kMinLargeAlloc ? kLargeBuffer : rounded_up(bytes, kRoundLarge);
}

}  // namespace

Block Pool::take(size_t bytes) {
  size_t const taken = rounded_up(std::max(bytes, size_t(1)), kMinBlockSize);
  bool const small = taken <= kSmallSize;
  auto const left = [](Segment const& segment) { return segment.memory.bytes() - segment.used; };
  Segment* best = nullptr;  // the fullest that holds it
  for (Segment& segment : segments_) {
    bool const fits = segment.small == small && left(segment) >= taken;
    if (fits && (best == nullptr || left(segment) < left(*best))) best = &segment;
  }
  if (best == nullptr) {
    segments_.push_back({Memory(segment_bytes(taken)), small});
    best = &segments_.back();
  }
  std::byte* const data = best->memory.data() + best->used;
  best->used += taken;
  return {size_t(best - segments_.data()), data, bytes};
}

}  // namespace attention_autotuner::benchmarks

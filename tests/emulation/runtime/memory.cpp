// Shared memory, its barriers, and what asynchronous operations do with it; see machine.h.
#include <algorithm>
#include <cstring>

#include "machine.h"

namespace emulation {

SharedMemory::SharedMemory(uint32_t base, uint32_t bytes)
    : base_(base), bytes_(bytes, char(0xff)), chunks_((base % 16 + bytes + 15) / 16 + 1), words_(chunks_.size() * 4) {}

char* SharedMemory::raw(uint32_t address, uint32_t bytes, char const* what) {
  if (address < base_ || uint64_t(address) + bytes > uint64_t(base_) + bytes_.size()) {
    fault("%s of %u bytes at %#x, outside of the %zu bytes of shared memory from %#x on", what, bytes, address,
          bytes_.size(), base_);
  }
  return bytes_.data() + (address - base_);
}
Chunk& SharedMemory::chunk(uint32_t address, char const* what) {
  raw(address, 1, what);
  return chunks_[address / 16 - base_ / 16];
}
void SharedMemory::check_barriers(uint32_t address, uint32_t bytes, char const* what) {
  if (barriers.empty()) return;
  for (uint32_t word = address / 8 * 8; word < address + bytes; word += 8) {
    if (word >= base_ && chunk(word, what).barrier[word / 8 % 2]) fault("%s over the barrier at %#x", what, word);
  }
}

void SharedMemory::read(uint32_t address, void* target, uint32_t bytes) {
  char const* const source = raw(address, bytes, "a read");
  if (address % bytes != 0 && bytes <= 16) fault("a read of %u bytes at %#x is not aligned", bytes, address);
  check_barriers(address, bytes, "a read");
  if (chunk(address, "a read").loading) fault("a read at %#x of what a copy has yet to bring", address);
  std::memcpy(target, source, bytes);
  note_read(address, bytes, current->now(), "a read");
}
void SharedMemory::write(uint32_t address, void const* source, uint32_t bytes) {
  char* const target = raw(address, bytes, "a write");
  if (address % bytes != 0 && bytes <= 16) fault("a write of %u bytes at %#x is not aligned", bytes, address);
  check_barriers(address, bytes, "a write");
  Chunk& chunk = this->chunk(address, "a write");
  if (chunk.loading) fault("a write at %#x to what a copy has yet to bring", address);
  if (chunk.readers > 0) fault("a write at %#x to what an MMA or a copy has yet to read", address);
  note_write(address, bytes, current->now(), "a write");
  std::memcpy(target, source, bytes);
  chunk.writer = uint16_t(current->linear + 1);
  current->unfenced.push_back(address / 16 * 16);
}

std::string SharedMemory::describe(Moment moment) const {
  for (auto const& [address, barrier] : barriers) {
    if (barrier.actor == moment.actor)
      return "a copy that the barrier at +" + std::to_string(address - base_) + " counts";
  }
  Cta const& cta = *current->cta;
  bool const other = moment.actor < cta.first_actor || moment.actor >= cta.first_actor + cta.actors;
  if (other) return "another CTA of the cluster";
  size_t const actor = moment.actor - cta.first_actor;
  return actor < cta.threads.size() ? "thread " + std::to_string(actor) : "an MMA or a TMA store";
}
void SharedMemory::check_visible(uint32_t address, uint32_t bytes, char const* what) {
  for (uint32_t at = address; at < address + bytes; at += 4) {
    Word const& word = words_[at / 4 - base_ / 16 * 4];
    if (!current->clock.knows(word.written)) {
      fault("%s of %#x races with the write of %s", what, at, describe(word.written).c_str());
    }
  }
}
void SharedMemory::note_read(uint32_t address, uint32_t bytes, Moment done, char const* what) {
  check_visible(address, bytes, what);
  for (uint32_t at = address; at < address + bytes; at += 4) words_[at / 4 - base_ / 16 * 4].read(done, current->clock);
}
void SharedMemory::note_write(uint32_t address, uint32_t bytes, Moment done, char const* what) {
  check_visible(address, bytes, what);
  for (uint32_t at = address; at < address + bytes; at += 4) {
    Word& word = words_[at / 4 - base_ / 16 * 4];
    Moment const read = word.unknown_read(current->clock);
    if (read.time != 0) fault("%s of %#x races with the read of %s", what, at, describe(read).c_str());
    word.write(done);
  }
}

void SharedMemory::will_read(uint32_t address, Moment done, char const* what) {
  Chunk& chunk = this->chunk(address, what);
  if (chunk.loading) fault("%s of %#x, which a copy has yet to bring", what, address);
  if (chunk.writer != 0) {
    fault("%s of %#x, which thread %d has written without a fence for the async proxy", what, address,
          chunk.writer - 1);
  }
  note_read(address / 16 * 16, 16, done, what);
  ++chunk.readers;
}
void SharedMemory::will_write(uint32_t address, Moment done, char const* what) {
  raw(address, 16, what);
  check_barriers(address, 16, what);
  Chunk& chunk = this->chunk(address, what);
  if (chunk.loading) fault("%s to %#x, which another copy has yet to bring", what, address);
  if (chunk.readers > 0) fault("%s to %#x, which an MMA or a copy has yet to read", what, address);
  note_write(address, 16, done, what);
  chunk.loading = true;
  chunk.writer = 0;
}
void SharedMemory::fence_async() {
  for (uint32_t address : current->unfenced) {
    Chunk& chunk = this->chunk(std::max(address, base_), "a fence");
    if (chunk.writer == current->linear + 1) chunk.writer = 0;
  }
  current->unfenced.clear();
}

MBarrier& SharedMemory::barrier(uint32_t address) {
  auto const held = barriers.find(address);
  if (held == barriers.end()) fault("there is no barrier at %#x", address);
  if (current != nullptr && !current->clock.knows(held->second.initialised)) {
    fault("the barrier at %#x is used by a thread that does not know of its initialisation", address);
  }
  return held->second;
}

namespace {

void end_phase_if_due(MBarrier& barrier) {
  if (barrier.pending > 0 || barrier.bytes != 0) return;
  barrier.pending = barrier.arrivals;
  ++barrier.phase;
  barrier.released.join(barrier.coming);
  barrier.released.learn({barrier.actor, uint32_t(barrier.phase)});
  barrier.queue.wake();
}

}  // namespace

void init_barrier(uint32_t address, int arrivals) {
  SharedMemory& memory = current->cta->memory;
  if (address % 8 != 0) fault("a barrier at %#x is not aligned", address);
  memory.raw(address, 8, "a barrier");
  if (arrivals < 1) fault("a barrier of %d arrivals", arrivals);
  if (memory.barriers.count(address) != 0) fault("the barrier at %#x is initialised twice", address);
  MBarrier& barrier = memory.barriers[address];
  memory.chunk(address, "a barrier").barrier[address / 8 % 2] = true;
  barrier.arrivals = barrier.pending = arrivals;
  barrier.initialised = current->now();
  barrier.actor = current->cta->new_actor();
}
void expect_bytes(uint32_t address, int bytes) { current->cta->memory.barrier(address).bytes += bytes; }
void arrive(uint32_t address, int count) {
  MBarrier& barrier = current->cta->memory.barrier(address);
  if (barrier.pending < count) fault("one arrival too many at the barrier at %#x", address);
  current->release(barrier.coming);
  barrier.pending -= count;
  end_phase_if_due(barrier);
  maybe_yield();
}
void complete_bytes(Cta& cta, uint32_t address, int64_t bytes) {
  MBarrier& barrier = cta.memory.barrier(address);
  barrier.bytes -= bytes;
  end_phase_if_due(barrier);
}
namespace {

constexpr int kRankShift = 24;  // of an address in another CTA

Cta& cta_of(uint32_t address, char const* what) {
  auto const& ctas = current->cta->cluster->ctas;
  uint32_t const rank = (address >> kRankShift) - 1;
  if (rank >= ctas.size()) fault("%s at %#x, which is no address of a cluster", what, address);
  if (ctas[rank] == nullptr) fault("%s in CTA %u of the cluster, which has ended", what, rank);
  return *ctas[rank];
}
uint32_t local(uint32_t address) { return address & ((1u << kRankShift) - 1); }

}  // namespace

uint32_t remote_address(uint32_t address, int rank) { return address | uint32_t(rank + 1) << kRankShift; }
void arrive_remotely(uint32_t address) {
  MBarrier& barrier = cta_of(address, "an arrival").memory.barrier(local(address));
  if (barrier.pending < 1) fault("one arrival too many at the barrier at %#x of another CTA", local(address));
  current->release(barrier.coming);
  --barrier.pending;
  end_phase_if_due(barrier);
  maybe_yield();
}
void store_remotely(uint32_t target, uint32_t const (&words)[4], uint32_t barrier) {
  Cta& cta = cta_of(target, "a store");
  if (&cta != &cta_of(barrier, "a store's barrier")) fault("a store to one CTA that the barrier of another counts");
  uint32_t const place = local(target), counting = local(barrier);
  if (place % 16 != 0) fault("a store of 16 bytes at %#x is not aligned", place);
  MBarrier const& counted = cta.memory.barrier(counting);
  cta.memory.will_write(place, {counted.actor, uint32_t(counted.phase + 1)}, "a store from another CTA");
  ++cta.events;
  later([&cta, place, counting, held = std::vector<uint32_t>(words, words + 4)] {
    std::memcpy(cta.memory.raw(place, 16, "a store from another CTA"), held.data(), 16);
    cta.memory.has_written(place);
    --cta.events;
    complete_bytes(cta, counting, 16);
  });
  maybe_yield();
}

void wait_parity(uint32_t address, int parity) {
  maybe_yield();
  MBarrier& barrier = current->cta->memory.barrier(address);
  wait_until(
      barrier.queue, [&] { return int(barrier.phase & 1) != parity; },
      "parity %d of the barrier at +%#x (phase %d, %d of %d arrivals and %lld bytes to come by then)", parity,
      address - current->cta->memory.base(), int(barrier.phase), barrier.pending, barrier.arrivals,
      static_cast<long long>(barrier.bytes));
  current->clock.join(barrier.released);
}

}  // namespace emulation

// Gatherings of threads: lanes of a warp, named barriers, and the barrier of a cluster; see machine.h.
#include <cstring>

#include "machine.h"

namespace emulation {

void end_generation(NamedBarrier& barrier) {
  barrier.arrived = barrier.expected = 0;
  barrier.released.join(barrier.coming);
  ++barrier.generation;
  barrier.queue.wake();
}

Words* meet(char const* what, uint32_t mask, Words const& mine, std::function<void(Words*)> const& action) {
  Thread& self = *current;
  int const lane = self.lane();
  if ((mask >> lane & 1) == 0) fault("%s: lane %d is not in its mask %08x", what, lane, mask);
  Rendezvous& gathering = self.cta->warps[size_t(self.linear / 32)].gathering(mask);
  if (gathering.arrived == 0) {
    gathering.what = what;
  } else if (gathering.what != what && std::strcmp(gathering.what, what) != 0) {
    fault("lanes of a warp part: one is at %s, others at %s", what, gathering.what);
  }
  uint64_t const generation = gathering.generation;
  Words* const words = gathering.words[generation % 2];
  words[lane] = mine;
  gathering.arrived |= uint32_t(1) << lane;
  if (gathering.arrived == mask) {
    if (action) action(words);
    gathering.arrived = 0;
    ++gathering.generation;
    gathering.queue.wake();
  } else {
    wait_until(
        gathering.queue, [&] { return gathering.generation != generation; }, "%s with the lanes %08x", what, mask);
  }
  return words;
}

void sync_warp(uint32_t mask) {
  meet("__syncwarp", mask, {}, [mask](Words*) {
    size_t const first = size_t(current->linear / 32 * 32);
    Clock all;
    for (size_t lane = 0; lane < 32; ++lane) {
      if ((mask >> lane & 1) != 0) current->cta->threads[first + lane]->release(all);
    }
    for (size_t lane = 0; lane < 32; ++lane) {
      if ((mask >> lane & 1) != 0) current->cta->threads[first + lane]->clock.join(all);
    }
  });
}

namespace {

// Counts an arrival; whether that was the last.
bool count_named(int id, int threads) {
  if (id < 0 || id > 15) fault("named barrier %d", id);
  NamedBarrier& barrier = current->cta->named[id];
  if (threads > 0 && threads % 32 != 0) fault("named barrier %d for %d threads", id, threads);
  if (barrier.arrived == 0) barrier.expected = threads;
  if (barrier.expected != threads) {
    fault("named barrier %d: one thread says %d threads, others said %d", id, threads, barrier.expected);
  }
  int const wanted = threads < 0 ? current->cta->alive : threads;
  current->release(barrier.coming);
  if (++barrier.arrived < wanted) return false;
  end_generation(barrier);
  return true;
}

}  // namespace

void sync_named(int id, int threads) {
  maybe_yield();
  NamedBarrier& barrier = current->cta->named[id & 15];
  uint64_t const generation = barrier.generation;
  if (!count_named(id, threads)) {
    wait_until(
        barrier.queue, [&] { return barrier.generation != generation; },
        "named barrier %d of %d threads, %d of them there by then", id, threads, barrier.arrived);
  }
  current->clock.join(barrier.released);
}
void arrive_named(int id, int threads) {
  count_named(id, threads);
  maybe_yield();
}

void arrive_in_cluster() {
  Cluster& cluster = *current->cta->cluster;
  NamedBarrier& barrier = cluster.barrier;
  int wanted = 0;
  for (Cta const* cta : cluster.ctas) wanted += cta == nullptr ? 0 : cta->alive;
  current->cluster_generation = barrier.generation;
  current->release(barrier.coming);
  if (++barrier.arrived == wanted) end_generation(barrier);
  maybe_yield();
}
void wait_in_cluster() {
  NamedBarrier& barrier = current->cta->cluster->barrier;
  wait_until(
      barrier.queue, [&] { return barrier.generation != current->cluster_generation; },
      "the cluster's barrier, %d threads there by then", barrier.arrived);
  current->clock.join(barrier.released);
}

}  // namespace emulation

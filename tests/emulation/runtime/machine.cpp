// Fibers, the scheduler and gatherings of threads; see machine.h.
#include "machine.h"

#include <malloc.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <random>

#include "mma.h"

namespace emulation {

Settings settings;
Thread* current = nullptr;
Index3 grid_size, block_size;
WaitQueue releases;

namespace {

constexpr size_t kStackBytes = 256 << 10;
constexpr size_t kOtherActors = 160;

Context scheduler_context;
ucontext_t scheduler_start;
std::vector<Fiber*> free_fibers;
std::vector<Thread*> ready;
size_t ready_first = 0;  // of the queue `ready`, under policies in turn
// Events that are due; under the random policy a hasty one may come while threads can run, the others wait for
// idleness.
struct Event {
  std::function<void()> action;
  bool hasty;
};
std::deque<Event> events;
std::mt19937_64 random_source;
std::string fault_text;
bool faulted = false;
Launch const* launched = nullptr;

bool chance(int one_in) { return random_source() % uint64_t(one_in) == 0; }

void make_ready(Thread* thread) {
  thread->state = Thread::State::kReady;
  ready.push_back(thread);
}

// In a function of its own: the compiler's form of longjmp may not stand in one that calls its form of setjmp.
[[noreturn]] __attribute__((noinline)) void go_to(Context& context) { __builtin_longjmp(context, 1); }

// Back to the scheduler; returns when this thread is picked again.
void leave() {
  if (__builtin_setjmp(current->fiber->context) == 0) go_to(scheduler_context);
}

void end_generation(NamedBarrier& barrier) {
  barrier.arrived = barrier.expected = 0;
  barrier.released.join(barrier.coming);
  ++barrier.generation;
  barrier.queue.wake();
}

void run_thread() {
  launched->body();
  current->state = Thread::State::kDone;
  Cta& cta = *current->cta;
  --cta.alive;
  // Threads that have ended do not hold up __syncthreads().
  NamedBarrier& all = cta.named[0];
  if (all.expected < 0 && all.arrived > 0 && all.arrived == cta.alive) {
    end_generation(all);
  }
}

// A fiber runs threads one after another: to start one takes two system calls.
void run_threads() {
  while (true) {
    run_thread();
    leave();
  }
}

Fiber* take_fiber() {
  if (!free_fibers.empty()) {
    Fiber* const fiber = free_fibers.back();
    free_fibers.pop_back();
    return fiber;
  }
  void* const stack =
      mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stack == MAP_FAILED) std::abort();
  // Stacks that began at the same place of a page would take each other's cache lines.
  static size_t made = 0;
  return new Fiber{stack, made++ % 61 * 1088};
}

void resume(Thread* thread) {
  current = thread;
  if (__builtin_setjmp(scheduler_context) == 0) {
    Fiber& fiber = *thread->fiber;
    if (fiber.started) go_to(fiber.context);
    fiber.started = true;
    ucontext_t start;
    getcontext(&start);
    start.uc_stack.ss_sp = fiber.stack;
    start.uc_stack.ss_size = kStackBytes - fiber.indent;
    start.uc_link = nullptr;
    makecontext(&start, run_threads, 0);
    swapcontext(&scheduler_start, &start);
  }
  current = nullptr;
}

// Threads of a warp that starve while others can run.
struct Starved {
  Cta* cta = nullptr;
  int warp = 0, picks = 0;
  bool holds(Thread const* thread) const { return thread->cta == cta && thread->linear / 32 == warp; }
} starved;

Thread* pick_in_turn() {
  Thread* const thread = ready[ready_first++];
  if (ready_first == ready.size()) {
    ready.clear();
    ready_first = 0;
  } else if (ready_first > 4096) {
    ready.erase(ready.begin(), ready.begin() + ptrdiff_t(ready_first));
    ready_first = 0;
  }
  return thread;
}
Thread* pick_random() {
  size_t at = random_source() % ready.size();
  if (--starved.picks <= 0) {
    starved.picks = 32 << random_source() % 11;
    starved.cta = chance(3) ? nullptr : ready[at]->cta;
    starved.warp = ready[at]->linear / 32;
  }
  for (int attempt = 0; attempt < 8 && starved.holds(ready[at]); ++attempt) at = random_source() % ready.size();
  Thread* const thread = ready[at];
  ready[at] = ready.back();
  ready.pop_back();
  return thread;
}

void fire(size_t at) {
  auto const action = std::move(events[at].action);
  events.erase(events.begin() + ptrdiff_t(at));
  if (__builtin_setjmp(scheduler_context) == 0) action();  // fault() comes back here
}

std::string text_of_wait(Thread const& thread) {
  char text[160] = "";
  if (thread.waits_for != nullptr) thread.waits_for(thread.waited, text, sizeof(text));
  return text;
}
std::string describe_waiting(std::vector<std::unique_ptr<Cta>> const& ctas) {
  std::string text;
  for (auto const& cta : ctas) {
    auto const& threads = cta->threads;
    for (size_t first = 0; first < threads.size();) {
      size_t last = first + 1;
      auto same = [&](Thread const& a, Thread const& b) {
        return a.state == b.state && text_of_wait(a) == text_of_wait(b);
      };
      while (last < threads.size() && same(*threads[first], *threads[last])) ++last;
      Thread const& thread = *threads[first];
      if (thread.state != Thread::State::kDone) {
        char line[256];
        snprintf(line, sizeof(line), "\n  CTA %u, threads %zu to %zu: %s", cta->index.x, first, last - 1,
                 text_of_wait(thread).c_str());
        text += line;
      }
      first = last;
    }
  }
  return text;
}

void schedule(Launch const& launch, std::vector<std::unique_ptr<Cta>>& ctas) {
  uint64_t const total = uint64_t(launch.grid.x) * launch.grid.y * launch.grid.z;
  uint64_t next = 0;
  int const count = int(launch.block.x * launch.block.y * launch.block.z);
  auto start = [&](std::shared_ptr<Cluster> const& cluster, int rank, uint32_t base) {
    Index3 const index{unsigned(next % launch.grid.x), unsigned(next / launch.grid.x % launch.grid.y),
                       unsigned(next / launch.grid.x / launch.grid.y)};
    ++next;
    ctas.push_back(std::make_unique<Cta>(index, count, base, launch.shared_bytes, cluster, rank, launch.cluster));
    cluster->ctas.push_back(ctas.back().get());
    for (auto& thread : ctas.back()->threads) {
      thread->fiber = take_fiber();
      make_ready(thread.get());
    }
  };
  while (!faulted) {
    size_t const held = size_t(std::max(launch.cluster, settings.multiprocessors));
    while (next < total && ctas.size() + size_t(launch.cluster) <= held) {
      // Shared memory starts at any multiple of 16 that no kernel chose.
      uint32_t const base = 1024 + 16 * uint32_t(random_source() % 64);
      auto const cluster = std::make_shared<Cluster>();
      for (int rank = 0; rank < launch.cluster; ++rank) start(cluster, rank, base);
    }
    if (settings.policy == Policy::kEager) {
      while (!events.empty() && !faulted) fire(0);
    } else if (settings.policy == Policy::kRandom && !events.empty() && chance(50)) {
      size_t const at = random_source() % events.size();
      if (events[at].hasty) fire(at);
    }
    if (faulted) break;
    if (ready.empty()) {
      if (ctas.empty()) return;
      if (events.empty()) {
        fault_text = "deadlock:" + describe_waiting(ctas);
        faulted = true;
        return;
      }
      fire(random_source() % events.size());
      continue;
    }
    Thread* const thread = settings.policy == Policy::kRandom ? pick_random() : pick_in_turn();
    resume(thread);
    if (faulted || thread->cta->alive > 0) continue;
    Cta* const cta = thread->cta;
    if (cta->events > 0 || !mmas_done(*cta)) {
      fault_text = "a CTA has ended while copies or MMAs of its shared memory are in flight";
      faulted = true;
    }
    for (auto const& ended : cta->threads) free_fibers.push_back(ended->fiber);
    if (starved.cta == cta) starved.cta = nullptr;
    cta->cluster->ctas[size_t(cta->rank)] = nullptr;
    ctas.erase(std::find_if(ctas.begin(), ctas.end(), [cta](auto const& held) { return held.get() == cta; }));
  }
}

}  // namespace

void fault(char const* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  if (!faulted) {
    fault_text = text;
    if (current != nullptr) {
      snprintf(text, sizeof(text), " (CTA %u, thread %d)", current->cta->index.x, current->linear);
      fault_text += text;
    }
  }
  faulted = true;
  go_to(scheduler_context);
}
std::string const& last_fault() { return fault_text; }

Cta::~Cta() = default;
Cta::Cta(Index3 index, int count, uint32_t base, uint32_t bytes, std::shared_ptr<Cluster> cluster, int rank,
         int cluster_size)
    : index(index),
      cluster(std::move(cluster)),
      rank(rank),
      warps(size_t(count + 31) / 32),
      memory(base, bytes),
      alive(count),
      actors(size_t(count)),
      first_actor(size_t(rank) * (size_t(count) + kOtherActors)) {
  for (int i = 0; i < (count + 127) / 128; ++i) mmas.push_back(std::make_unique<MmaQueue>());
  for (int i = 0; i < count; ++i) {
    threads.push_back(std::make_unique<Thread>());
    Thread& thread = *threads.back();
    thread.cta = this;
    thread.linear = i;
    thread.clock.times.resize(first_actor + size_t(count));
    thread.clock.times[thread.actor()] = 1;
    thread.index = {unsigned(i) % block_size.x, unsigned(i) / block_size.x % block_size.y,
                    unsigned(i) / block_size.x / block_size.y};
  }
}

uint16_t Cta::new_actor() {
  if (actors >= threads.size() + kOtherActors) fault("more barriers and threads that store than are emulated");
  return uint16_t(first_actor + actors++);
}

void WaitQueue::wake() {
  for (Thread* thread : threads) make_ready(thread);
  threads.clear();
}

void yield() {
  make_ready(current);
  leave();
}
void maybe_yield() {
  if (settings.policy != Policy::kRandom || chance(4)) yield();
}
void park(WaitQueue& queue) {
  current->state = Thread::State::kWaiting;
  queue.threads.push_back(current);
  leave();
}
void later(std::function<void()> event) { events.push_back({std::move(event), chance(2)}); }
bool early() {
  return settings.policy == Policy::kEager || (settings.policy == Policy::kRandom && random_source() % 2 == 0);
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

int run(Launch const& launch) {
  // What a CTA takes is given back to the next one, not to the system, which would clear every page again.
  static bool const kept = mallopt(M_MMAP_THRESHOLD, 64 << 20) != 0 && mallopt(M_TRIM_THRESHOLD, 512 << 20) != 0;
  if (!kept) std::abort();
  launched = &launch;
  grid_size = launch.grid;
  block_size = launch.block;
  faulted = false;
  fault_text.clear();
  events.clear();
  releases.threads.clear();
  ready.clear();
  ready_first = 0;
  starved = {};
  random_source.seed(settings.seed);
  std::vector<std::unique_ptr<Cta>> ctas;
  schedule(launch, ctas);
  for (auto const& cta : ctas) {
    for (auto const& thread : cta->threads) {
      thread->fiber->started &= thread->state == Thread::State::kDone;  // what a fault ended is given up
      free_fibers.push_back(thread->fiber);
    }
  }
  events.clear();
  return faulted ? 1 : 0;
}

}  // namespace emulation

// Called where an index is outside of an array, whose place in the source comes first.
struct OutOfBounds {
  char const* file;
  uint32_t line, column;
};
extern "C" void __ubsan_handle_out_of_bounds_abort(OutOfBounds const* place, uintptr_t index) {
  emulation::fault("%s:%u: index %lld is out of bounds", place->file, place->line, static_cast<long long>(index));
}

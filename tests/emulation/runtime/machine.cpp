// Fibers, the scheduler and launches; see machine.h.
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
WaitQueue releases;

struct Running {
  Launch launch;
  Running* ahead;  // null where it begins when all ahead have ended
  std::vector<std::unique_ptr<Cta>> ctas;
  std::vector<Thread*> ready = {};
  size_t ready_first = 0;           // of the queue `ready`, under policies in turn
  uint64_t begun = 0, letting = 0;  // CTAs, and how many of them let the next launch begin or have ended
  uint64_t held = 0;                // of those that let it begin, how many have not ended
  bool holds = true;                // see let_next_begin()
  bool ended = false;
  WaitQueue others = {}, end = {};

  uint64_t total() const { return uint64_t(launch.grid.x) * launch.grid.y * launch.grid.z; }
};

namespace {

constexpr size_t kStackBytes = 256 << 10;
constexpr size_t kOtherActors = 160;
constexpr uint64_t kHeldCtas = 8;

constexpr int kAheadYields = 4096;

// See put_ahead().
struct Ahead {
  std::vector<Range> read, written;
  std::vector<std::string> read_contents, written_contents;
};

Ahead ahead;
Context scheduler_context;
ucontext_t scheduler_start;
std::vector<Fiber*> free_fibers;
// Events that are due; under the random policy a hasty one may come while threads can run, the others wait for
// idleness.
struct Event {
  std::function<void()> action;
  bool hasty;
  Running* of;
};
std::deque<Event> events;
std::mt19937_64 random_source;
std::string fault_text;
bool faulted = false;
uint32_t picks = 0;
Running* acting = nullptr;    // whose thread or event goes on
std::deque<Running> running;  // in the order of their launches, of which none waits for a later one

bool chance(int one_in) { return random_source() % uint64_t(one_in) == 0; }

void make_ready(Thread* thread) {
  thread->state = Thread::State::kReady;
  thread->cta->running->ready.push_back(thread);
}

// In a function of its own: the compiler's form of longjmp may not stand in one that calls its form of setjmp.
[[noreturn]] __attribute__((noinline)) void go_to(Context& context) { __builtin_longjmp(context, 1); }

// Back to the scheduler; returns when this thread is picked again.
void leave() {
  if (__builtin_setjmp(current->fiber->context) == 0) go_to(scheduler_context);
}

void run_thread() {
  current->cta->running->launch.body();
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
  acting = thread->cta->running;
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

Thread* pick_in_turn(Running& from) {
  Thread* const thread = from.ready[from.ready_first++];
  if (from.ready_first == from.ready.size()) {
    from.ready.clear();
    from.ready_first = 0;
  } else if (from.ready_first > 4096) {
    from.ready.erase(from.ready.begin(), from.ready.begin() + ptrdiff_t(from.ready_first));
    from.ready_first = 0;
  }
  return thread;
}
Thread* pick_random(std::vector<Thread*>& ready) {
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
  acting = events[at].of;
  auto const action = std::move(events[at].action);
  events.erase(events.begin() + ptrdiff_t(at));
  if (__builtin_setjmp(scheduler_context) == 0) action();  // fault() comes back here
}

// Something that is due, of one launch or of any; false if nothing is.
bool fire_any(Running const* of) {
  auto const counts = [of](Event const& event) { return of == nullptr || event.of == of; };
  size_t const count = size_t(std::count_if(events.begin(), events.end(), counts));
  if (count == 0) return false;
  size_t left = random_source() % count, at = 0;
  while (!counts(events[at]) || left-- > 0) ++at;
  fire(at);
  return true;
}

std::string text_of_wait(Thread const& thread) {
  char text[160] = "";
  if (thread.waits_for != nullptr) thread.waits_for(thread.waited, text, sizeof(text));
  return text;
}
void describe_waiting(std::vector<std::unique_ptr<Cta>> const& ctas, std::string& text) {
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
}

// Starts as many CTAs of a launch as run at once.
void start_ctas(Running& of) {
  Launch const& launch = of.launch;
  size_t const most = size_t(std::max(launch.cluster, settings.multiprocessors)) + of.held;
  while (of.begun < of.total() && of.ctas.size() + size_t(launch.cluster) <= most) {
    // Shared memory starts at any multiple of 16 that no kernel chose.
    uint32_t const base = 1024 + 16 * uint32_t(random_source() % 64);
    auto const cluster = std::make_shared<Cluster>();
    for (int rank = 0; rank < launch.cluster; ++rank) {
      Index3 const index{unsigned(of.begun % launch.grid.x), unsigned(of.begun / launch.grid.x % launch.grid.y),
                         unsigned(of.begun / launch.grid.x / launch.grid.y)};
      ++of.begun;
      of.ctas.push_back(std::make_unique<Cta>(&of, index, base, cluster, rank));
      cluster->ctas.push_back(of.ctas.back().get());
      for (auto& thread : of.ctas.back()->threads) {
        thread->fiber = take_fiber();
        make_ready(thread.get());
      }
    }
  }
}

// Counts a CTA that lets the next launch begin, if it is the first time.
void count_letting(Cta& cta) {
  if (cta.lets_next_begin) return;
  cta.lets_next_begin = true;
  ++cta.running->letting;
  cta.running->others.wake();
}

void end_cta(Cta* cta) {
  if (cta->events > 0 || !mmas_done(*cta)) {
    fault_text = "a CTA has ended while copies or MMAs of its shared memory are in flight";
    faulted = true;
  }
  for (auto const& thread : cta->threads) free_fibers.push_back(thread->fiber);
  if (starved.cta == cta) starved.cta = nullptr;
  cta->cluster->ctas[size_t(cta->rank)] = nullptr;
  Running& of = *cta->running;
  if (cta->held) --of.held;
  count_letting(*cta);
  of.ctas.erase(std::find_if(of.ctas.begin(), of.ctas.end(), [cta](auto const& held) { return held.get() == cta; }));
  if (!of.ctas.empty() || of.begun < of.total()) return;
  of.ended = true;
  of.end.wake();
}

// Where CTAs that are held keep others from letting the next launch begin; false if none is.
bool stop_holding() {
  for (Running& launched : running) {
    if (launched.others.threads.empty()) continue;
    launched.holds = false;
    launched.others.wake();
    return true;
  }
  return false;
}

void run_thread_of(Running& of) {
  Thread* const thread = settings.policy == Policy::kRandom ? pick_random(of.ready) : pick_in_turn(of);
  resume(thread);
  if (!faulted && thread->cta->alive == 0) end_cta(thread->cta);
}

// Runs a thread, or lets come what is due; false if nothing goes on. Launches are taken in order under the eager
// policy, at random or the last first under the random one, and under the lazy one the last goes on until it waits, and
// what is due with it: so has what it does not wait for not been done. Only now and then are they in order, as threads
// may ask again and again for what those ahead do.
bool go_on() {
  bool const several = running.size() > 1, now_and_then = ++picks % 1024 == 0;
  bool const in_order =
      settings.policy == Policy::kEager || now_and_then || (settings.policy == Policy::kRandom && several && chance(2));
  auto const has_ready = [](Running const& launched) { return !launched.ready.empty(); };
  if (in_order) {
    auto const first = std::find_if(running.begin(), running.end(), has_ready);
    if (first != running.end()) return run_thread_of(*first), true;
  }
  for (auto at = running.rbegin(); at != running.rend(); ++at) {
    if (has_ready(*at)) return run_thread_of(*at), true;
    if (several && settings.policy == Policy::kLazy && fire_any(&*at)) return true;
  }
  return fire_any(nullptr);
}

void schedule() {
  while (!faulted) {
    bool may_begin = true;
    for (Running& launched : running) {
      if (may_begin && !launched.ended) start_ctas(launched);
      may_begin = may_begin && launched.letting == launched.total();
    }
    if (settings.policy == Policy::kEager) {
      while (!events.empty() && !faulted) fire(0);
    } else if (settings.policy == Policy::kRandom && !events.empty() && chance(50)) {
      size_t const at = random_source() % events.size();
      if (events[at].hasty) fire(at);
    }
    if (faulted) break;
    if (go_on()) continue;
    if (std::all_of(running.begin(), running.end(), [](Running const& launched) { return launched.ended; })) return;
    if (stop_holding()) continue;
    fault_text = "deadlock:";
    for (Running const& launched : running) describe_waiting(launched.ctas, fault_text);
    faulted = true;
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
Cta::Cta(Running* running, Index3 index, uint32_t base, std::shared_ptr<Cluster> cluster, int rank)
    : running(running),
      index(index),
      cluster(std::move(cluster)),
      rank(rank),
      memory(base, running->launch.shared_bytes) {
  Index3 const& block = running->launch.block;
  int const count = int(block.x * block.y * block.z);
  warps.resize(size_t(count + 31) / 32);
  alive = count;
  actors = size_t(count);
  first_actor = size_t(rank) * (size_t(count) + kOtherActors);
  for (int i = 0; i < (count + 127) / 128; ++i) mmas.push_back(std::make_unique<MmaQueue>());
  for (int i = 0; i < count; ++i) {
    threads.push_back(std::make_unique<Thread>());
    Thread& thread = *threads.back();
    thread.cta = this;
    thread.linear = i;
    thread.clock.times.resize(first_actor + size_t(count));
    thread.clock.times[thread.actor()] = 1;
    thread.index = {unsigned(i) % block.x, unsigned(i) / block.x % block.y, unsigned(i) / block.x / block.y};
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
void later(std::function<void()> event) { events.push_back({std::move(event), chance(2), acting}); }
bool early() {
  return settings.policy == Policy::kEager || (settings.policy == Policy::kRandom && random_source() % 2 == 0);
}

Launch const& launch_of(Cta const& cta) { return cta.running->launch; }

void put_ahead(std::vector<Range> const& read, std::vector<Range> const& written) {
  auto const contents = [](Range const& range) { return std::string(range.data, range.bytes); };
  ahead = {read, written, {}, {}};
  for (Range const& range : read) {
    ahead.read_contents.push_back(contents(range));
    std::memset(range.data, 0xFF, range.bytes);  // not a number
  }
  for (Range const& range : written) ahead.written_contents.push_back(contents(range));
}
static void run_ahead(Ahead const& held) {
  let_next_begin();
  for (int i = 0; i < kAheadYields; ++i) yield();
  for (size_t i = 0; i < held.written.size(); ++i) {
    if (std::memcmp(held.written[i].data, held.written_contents[i].data(), held.written[i].bytes) != 0) {
      fault("a call has written before the kernel ahead of it has ended");
    }
  }
  for (size_t i = 0; i < held.read.size(); ++i) {
    std::memcpy(held.read[i].data, held.read_contents[i].data(), held.read[i].bytes);
  }
}
static void submit_ahead() {
  if (ahead.read.empty()) return;
  auto const held = std::make_shared<Ahead>(std::move(ahead));
  ahead = {};
  running.push_back({{{1, 1, 1}, {1, 1, 1}, 0, [held] { run_ahead(*held); }}, nullptr});
}

void submit(Launch launch) {
  submit_ahead();
  if (faulted || (!launch.early && !finish())) return;
  Running* const ahead = running.empty() ? nullptr : &running.back();
  running.push_back({std::move(launch), ahead});
}
void let_next_begin() {
  Cta& cta = *current->cta;
  Running& of = *cta.running;
  count_letting(cta);
  maybe_yield();
  if (settings.policy != Policy::kLazy || &of == &running.back()) return;
  // Its last CTAs go on after the next launch has begun, so that little of what they do has been done by then.
  if (!cta.held) ++of.held;
  cta.held = true;
  uint64_t const enough = std::min(of.letting + kHeldCtas, of.total());
  wait_until(
      of.others, [&of, enough] { return !of.holds || of.letting >= enough; }, "other CTAs to let the next begin");
}
void wait_for_ahead() {
  Running* const ahead = current->cta->running->ahead;
  if (ahead != nullptr) wait_until(ahead->end, [ahead] { return ahead->ended; }, "the end of the launch ahead");
}

void forget_fault() {
  faulted = false;
  fault_text.clear();
}
bool finish() {
  // What a CTA takes is given back to the next one, not to the system, which would clear every page again.
  static bool const kept = mallopt(M_MMAP_THRESHOLD, 64 << 20) != 0 && mallopt(M_TRIM_THRESHOLD, 512 << 20) != 0;
  if (!kept) std::abort();
  if (running.empty() || faulted) return !faulted;
  events.clear();
  releases.threads.clear();
  starved = {};
  picks = 0;
  random_source.seed(settings.seed);
  schedule();
  for (Running const& launched : running) {
    for (auto const& cta : launched.ctas) {
      for (auto const& thread : cta->threads) {
        thread->fiber->started &= thread->state == Thread::State::kDone;  // what a fault ended is given up
        free_fibers.push_back(thread->fiber);
      }
    }
  }
  running.clear();
  events.clear();
  return !faulted;
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

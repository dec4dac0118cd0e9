// The emulated machine: CTAs of threads, each a fiber, a scheduler, and what threads wait for.
//
// One fiber runs at a time and gives way only inside the functions here, so that the machine's state needs no locks. A
// mistake of a kernel ends the launch by fault(), whose text the launch's error carries.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "clocks.h"

namespace emulation {

struct Thread;
struct Cta;

struct Index3 {
  unsigned x = 1, y = 1, z = 1;
};

// When copies and MMAs complete, and in which order threads run.
enum class Policy {
  kLazy,    // nothing completes before every thread waits; threads in turn
  kEager,   // everything completes at once; threads in turn
  kRandom,  // by the seed, with warps that starve for a while
};

struct Settings {
  Policy policy = Policy::kLazy;
  uint64_t seed = 0;
  int multiprocessors = 2;
  std::string mutant;  // which of the source's mutations is live
};
extern Settings settings;

// Ends the launch; does not return.
[[noreturn]] __attribute__((format(printf, 1, 2))) void fault(char const* format, ...);

// Threads that wait for something to change.
struct WaitQueue {
  std::vector<Thread*> threads;
  void wake();
};

// What lanes of a warp give to an operation that they do together, and get from it.
struct Words {
  uint32_t w[10];  // an MMA: four of A, two of B, four sums
};
struct Rendezvous {
  char const* what = nullptr;
  uint32_t mask = 0, arrived = 0;
  uint64_t generation = 0;
  Words words[2][32];
  WaitQueue queue;
};

struct Warp {
  Rendezvous all;                       // lanes
  std::map<uint32_t, Rendezvous> some;  // by mask
  Rendezvous& gathering(uint32_t mask) { return mask == ~0u ? all : some[mask]; }
};

struct NamedBarrier {
  int expected = 0, arrived = 0;
  Clock coming, released;  // of those who arrive, of all until the last generation
  uint64_t generation = 0;
  WaitQueue queue;
};

struct MBarrier {
  int arrivals = 0, pending = 0;
  int64_t bytes = 0;  // still to come
  uint64_t phase = 0;
  Moment initialised;
  uint16_t actor = 0;      // whose time is the phase
  Clock coming, released;  // of arrivals in this phase, of all until the last
  WaitQueue queue;
};

// A chunk of 16 bytes of shared memory.
struct Chunk {
  uint16_t readers = 0;  // MMAs and copies that have yet to read it
  uint16_t writer = 0;   // thread + 1 whose write the async proxy may not see yet
  bool loading = false;  // a copy has yet to write it
  bool barrier[2] = {};  // in each half
};

// Shared memory of a CTA, addressed as the kernels do.
class SharedMemory {
 public:
  SharedMemory(uint32_t base, uint32_t bytes);
  uint32_t base() const { return base_; }
  // Moves the start to a multiple, before anything is known of the memory.
  void align(uint32_t bytes) { base_ = base_ / bytes * bytes; }
  char* data() { return bytes_.data(); }
  void read(uint32_t address, void* target, uint32_t bytes);
  void write(uint32_t address, void const* source, uint32_t bytes);
  // Of the async proxy, without checks but bounds.
  char* raw(uint32_t address, uint32_t bytes, char const* what);
  Chunk& chunk(uint32_t address, char const* what);
  // An asynchronous operation will read (or write) a chunk until some moment, has read it, has written it.
  void will_read(uint32_t address, Moment done, char const* what);
  void has_read(uint32_t address) { --chunk(address, "").readers; }
  void will_write(uint32_t address, Moment done, char const* what);
  // What the calling thread reads of a chunk has to be visible to it.
  void check_visible(uint32_t address, uint32_t bytes, char const* what);
  void has_written(uint32_t address) { chunk(address, "").loading = false; }
  void fence_async();

  std::unordered_map<uint32_t, MBarrier> barriers;
  MBarrier& barrier(uint32_t address);

 private:
  void check_barriers(uint32_t address, uint32_t bytes, char const* what);
  void note_write(uint32_t address, uint32_t bytes, Moment done, char const* what);
  void note_read(uint32_t address, uint32_t bytes, Moment done, char const* what);
  std::string describe(Moment moment) const;
  uint32_t base_;
  std::vector<char> bytes_;
  std::vector<Chunk> chunks_;
  std::vector<Word> words_;
};

struct MmaQueue;

// Where something goes on, as the compiler's form of setjmp has it, which keeps no more than it must.
using Context = void* [5];

// A stack, and where what runs on it goes on.
struct Fiber {
  void* stack;
  size_t indent;  // of what runs on it, from the stack's end
  Context context;
  bool started = false;
};

// A cp.async of 16 bytes, of which `existing` are copied.
struct Copy {
  uint32_t target, existing;
  void const* source;
};

struct Thread {
  enum class State { kReady, kWaiting, kDone };
  Cta* cta = nullptr;
  Index3 index;
  int linear = 0;
  State state = State::kReady;
  // Writes what a thread that waits waits for, which `waited` is a part of.
  void (*waits_for)(void const* waited, char* text, size_t bytes) = nullptr;
  void const* waited = nullptr;
  Fiber* fiber = nullptr;
  // WGMMA
  int issued = 0, committed = 0;
  bool fenced = false;
  Clock clock;
  // TMA stores and cp.async, by groups
  std::shared_ptr<int> open_stores;  // how many of a group have yet to read
  std::vector<std::shared_ptr<int>> store_groups;
  uint16_t store_actor = 0;  // 0 before the first store
  WaitQueue store_queue;
  std::vector<uint32_t> unfenced;                // chunks
  uint64_t cluster_generation = 0;               // of the cluster's barrier at which it arrived
  std::pair<uint64_t, uint32_t> acquired{0, 0};  // the place that was last read with acquire, and what it held
  std::vector<Copy> copies;
  std::vector<std::vector<Copy>> copy_groups;

  int lane() const { return linear % 32; }
  size_t actor() const;  // among those of the cluster
  Moment now() const { return {uint16_t(actor()), clock.times[actor()]}; }
  // What this thread did is for others to learn.
  void release(Clock& to) {
    to.join(clock);
    ++clock.times[actor()];
  }
};

// CTAs that reach each other's shared memory; a launch without clusters has ones of a single CTA.
struct Cluster {
  std::vector<Cta*> ctas;  // by rank; null once one has ended
  NamedBarrier barrier;
};

struct Running;  // a launch that has not ended

struct Cta {
  Running* running;
  Index3 index;
  std::shared_ptr<Cluster> cluster;
  int rank;
  std::vector<std::unique_ptr<Thread>> threads;
  std::vector<Warp> warps;
  std::vector<std::unique_ptr<MmaQueue>> mmas;  // of each warpgroup
  NamedBarrier named[16];
  SharedMemory memory;
  alignas(16) char static_memory[16384];  // of the one array that a kernel may declare; without checks
  int alive = 0;
  int events = 0;      // that are due
  size_t actors;       // so far: threads and others
  size_t first_actor;  // of the cluster's
  bool lets_next_begin = false;
  bool held = false;     // while others do not
  bool refused = false;  // a vote of its threads

  Cta(Running* running, Index3 index, uint32_t base, std::shared_ptr<Cluster> cluster, int rank);
  ~Cta();
  uint16_t new_actor();
};

inline size_t Thread::actor() const { return cta->first_actor + size_t(linear); }

extern Thread* current;
extern WaitQueue releases;  // of global memory

// Lets others run.
void yield();
// The same, sometimes.
void maybe_yield();
// Until `ready` holds; asked again whenever the queue is woken. `format` says what for.
template <typename Ready, typename... Values>
void wait_until(WaitQueue& queue, Ready&& ready, char const* format, Values... values);
void park(WaitQueue& queue);

// Something that the hardware does later, at a time of its choosing.
void later(std::function<void()> event);
// A coin that is heads under the eager policy, tails under the lazy one.
bool early();

// A gathering of the lanes in `mask` runs `action` on what all have brought. Returns it for all lanes.
Words* meet(char const* what, uint32_t mask, Words const& mine, std::function<void(Words*)> const& action = {});

// __syncwarp()
void sync_warp(uint32_t mask);
void sync_named(int id, int threads);
void arrive_named(int id, int threads);
void end_generation(NamedBarrier& barrier);

// WGMMA
struct MmaShape {
  int columns;
  bool bf16, a_in_registers, transposed_a, transposed_b;
  bool operator==(MmaShape const&) const = default;
};
void issue_mma(MmaShape const& shape, float* d, uint64_t a, uint32_t const* const* a_registers, uint64_t b,
               bool accumulate);
void fence_mma();
void commit_mma();
void wait_mma(int pending);
bool mmas_done(Cta const& cta);
// An MMA of a warp, 16x8x16: `operands` are four words of A and two of B.
void multiply_in_warp(float (&sums)[4], Words const& operands, bool bf16);

// mbarriers
void init_barrier(uint32_t address, int arrivals);
void expect_bytes(uint32_t address, int bytes);
void arrive(uint32_t address, int count = 1);
void wait_parity(uint32_t address, int parity);
void complete_bytes(Cta& cta, uint32_t address, int64_t bytes);

// Clusters: an address of this CTA's shared memory as one of the CTA of a rank, and what can be done there.
uint32_t remote_address(uint32_t address, int rank);
void arrive_remotely(uint32_t address);
void store_remotely(uint32_t target, uint32_t const (&words)[4], uint32_t barrier);
void arrive_in_cluster();
void wait_in_cluster();

// Copies of TMA tiles: what a descriptor says, and its uses.
struct TensorMap {
  char* data;
  int element_bytes, rank;
  uint64_t sizes[5], strides[5];  // elements, bytes
  uint32_t tile[5];
};
void load_tensor(uint32_t target, TensorMap const& tensor, uint32_t barrier, std::vector<int> const& coordinates);
// Into the CTAs of a mask of ranks, each of which counts the bytes at its own barrier.
void load_tensor_multicast(uint32_t target, TensorMap const& tensor, uint32_t barrier,
                           std::vector<int> const& coordinates, uint32_t ranks);
void load_bytes(uint32_t target, char const* source, uint32_t bytes, uint32_t barrier);
void store_tensor(TensorMap const& tensor, uint32_t source, std::vector<int> const& coordinates);
// Floats of shared memory, added to global memory.
void reduce_bytes(float* target, uint32_t source, uint32_t bytes);
void store_bytes(float* target, uint32_t source, uint32_t bytes);
void commit_stores();
void wait_stores(int pending);

// Launches
struct Launch {
  Index3 grid, block;
  uint32_t shared_bytes;
  std::function<void()> body;
  int cluster = 1;     // CTAs
  bool early = false;  // it may begin while the launch ahead runs
};
Launch const& launch_of(Cta const& cta);
// Memory that a call reads or writes.
struct Range {
  char* data;
  uint64_t bytes;
};
// Of the next call: a launch of somebody else is ahead of it in the stream, which lets the next one begin at once. What
// the call reads is there at the end of that launch, and what it writes must be untouched until then.
void put_ahead(std::vector<Range> const& read, std::vector<Range> const& written);
// Runs what was launched before, if this one is not early, and keeps this one until the next or finish(). After a fault
// nothing runs until forget_fault().
void submit(Launch launch);
// Runs to the end what was launched; false after a fault.
bool finish();
void forget_fault();
// griddepcontrol: all CTAs of a launch have to let the next one begin, which may wait for the end of the one ahead.
void let_next_begin();
void wait_for_ahead();
std::string const& last_fault();

// --- inline ----------------------------------------------------------------------------------------------------------

template <typename Ready, typename... Values>
void wait_until(WaitQueue& queue, Ready&& ready, char const* format, Values... values) {
  if (ready()) return;
  // The text is written only if it is read, at a deadlock.
  auto const say = [&](char* text, size_t bytes) { snprintf(text, bytes, format, values...); };
  current->waited = &say;
  current->waits_for = [](void const* waited, char* text, size_t bytes) {
    (*static_cast<decltype(say)*>(waited))(text, bytes);
  };
  while (!ready()) park(queue);
  current->waits_for = nullptr;
}

}  // namespace emulation

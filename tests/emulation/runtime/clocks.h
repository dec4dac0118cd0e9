// What happens before what in a CTA, by vector clocks, so that races show in every interleaving.
//
// Actors are the threads, and what acts beside them: a barrier whose phases bring copies, the MMAs of a warpgroup, the
// TMA stores of a thread. An actor's time goes on when it releases what it did; others learn of it when they acquire.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

namespace emulation {

// A moment of an actor.
struct Moment {
  uint16_t actor = 0xffff;  // none
  uint32_t time = 0;
};

struct Clock {
  std::vector<uint32_t> times;  // of actors: what is known of them; nothing of those behind the last

  bool knows(Moment moment) const {
    return moment.actor == 0xffff || (moment.actor < times.size() && times[moment.actor] >= moment.time);
  }
  void join(Clock const& other) {
    size_t const count = other.times.size();
    if (times.size() < count) times.resize(count);
    uint32_t* __restrict const mine = times.data();
    uint32_t const* __restrict const theirs = other.times.data();
    for (size_t i = 0; i < count; ++i) mine[i] = std::max(mine[i], theirs[i]);
  }
  void learn(Moment moment) {
    if (times.size() <= moment.actor) times.resize(size_t(moment.actor) + 1);
    times[moment.actor] = std::max(times[moment.actor], moment.time);
  }
};

// The last accesses to four bytes of shared memory.
struct Word {
  static constexpr int kHeld = 3;
  Moment written;
  Moment reads[kHeld];
  std::unique_ptr<std::vector<Moment>> more;  // reads

  // A read that may not have happened before `clock`, or none.
  Moment unknown_read(Clock const& clock) const {
    for (Moment const& read : reads) {
      if (!clock.knows(read)) return read;
    }
    if (more != nullptr) {
      for (Moment const& read : *more) {
        if (!clock.knows(read)) return read;
      }
    }
    return {};
  }
  // Notes a read; ones that it knows of need not be kept.
  void read(Moment moment, Clock const& clock) {
    for (Moment& held : reads) {
      if (held.actor == moment.actor || clock.knows(held)) {
        held = moment;
        return;
      }
    }
    if (more == nullptr) more = std::make_unique<std::vector<Moment>>();
    for (Moment& held : *more) {
      if (held.actor == moment.actor || clock.knows(held)) {
        held = moment;
        return;
      }
    }
    more->push_back(moment);
  }
  void write(Moment moment) {
    written = moment;
    for (Moment& held : reads) held = {};
    more = nullptr;
  }
};

}  // namespace emulation

// The order of work: what a stream, and the host, know to be over. From it follow races, and when copies arrive.
//
// A clock of a stream has a count for each stream: "of stream s, the first n pieces of work are over when my next piece
// begins". Work of a stream counts up its own entry; waiting for an event takes the larger of each pair of entries. Two
// pieces of work that touch the same bytes, one of them writing, are a race unless the later one's clock has counted the
// earlier one: then, and only then, a GPU may run them in either order.
//
// The host has one clock for all its threads. They order each other by means that nothing here sees (locks, queues), so
// that a wait by one counts for all: a race between work that two threads start may be missed, none is made up.
#pragma once
#include "schedules.h"

#include <cstring>
#include <list>

namespace sim {
// ---- copies on their way --------------------------------------------------------------------------------------------
// A copy between pinned memory and a device that does not block. A GPU makes it some time after it was queued; here it
// is made as late as the program itself allows, so that whoever does not wait sees what he may see on a GPU:
// - on a device it arrives when a piece of work begins that comes after it (until then its memory holds NaN);
// - at the host it arrives when the host has waited for it (until then NaN, too);
// - until the host has waited, pinned memory belongs to the copy: what the host writes there is noticed when it waits.
struct Copy {
  Moment moment;
  bool to_host;
  char* host;
  std::vector<char> bytes;  // what it carries: as they were when it was queued, which is what its stream's order says
  char* device = nullptr;   // where it still has to arrive
  bool overlaps(const char* begin, size_t size) const { return host < begin + size && begin < host + bytes.size(); }
};
inline std::list<Copy> copies;  // in the order in which they were queued

inline void arrive_at_device(Copy& copy) {
  if (copy.device) std::memcpy(copy.device, copy.bytes.data(), copy.bytes.size());
  copy.device = nullptr;
}
// The end of a copy, for the host: it may have pinned memory back.
inline std::string end_copy(Copy& copy) {
  std::string mistake;
  if (copy.to_host) {
    for (size_t i = 0; i < copy.bytes.size() && mistake.empty(); i++)
      if (static_cast<unsigned char>(copy.host[i]) != kPoison)
        mistake = "the host wrote pinned memory before a copy of a device had arrived there";
    std::memcpy(copy.host, copy.bytes.data(), copy.bytes.size());
  } else {
    if (std::memcmp(copy.host, copy.bytes.data(), copy.bytes.size()) != 0)
      mistake = "pinned memory was written while a copy to the device still read it";
    arrive_at_device(copy);
  }
  return mistake;
}
inline void arrive_at_devices(const Clock& clock) {
  for (Copy& copy : copies)
    if (copy.moment.is_over(clock)) arrive_at_device(copy);
}
// Ends the copies that `is_over` names. All of them, before a mistake is told: it may be raised.
template <class IsOver>
void end_copies(IsOver&& is_over) {
  std::string mistake;
  for (auto it = copies.begin(); it != copies.end();) {
    if (!is_over(*it)) {
      ++it;
      continue;
    }
    std::string its = end_copy(*it);
    if (!its.empty()) mistake = its;
    it = copies.erase(it);
  }
  if (!mistake.empty()) problem(mistake);
}
// A copy is about to be queued at `moment`, after all that `clock` knows, and uses these bytes of pinned memory.
inline void queue_after_others(const Clock& clock, const char* host, size_t size, bool to_host) {
  for (Copy& copy : copies)
    if (copy.overlaps(host, size) && (copy.to_host || to_host) && !copy.moment.is_over(clock))
      problem(std::string("race: a copy ") + (to_host ? "writes" : "reads") + " pinned memory that a copy on another stream still " +
              (copy.to_host ? "writes" : "reads"));
  // Those before it have done what it relies on: theirs is the memory that it reads, or overwrites.
  end_copies([&](Copy& copy) {
    return copy.overlaps(host, size) && (copy.to_host || to_host) && copy.moment.is_over(clock);
  });
}

// ---- a kernel that broke --------------------------------------------------------------------------------------------
// The call that queued it returned. Whoever waits for it next hears of it, and from then on every call does: the
// device is lost for this process.
struct Breakage {
  bool is_broken = false, is_known = false;
  Moment moment;
};
inline Breakage breakages[kDevices];
inline void check_device(int device) {
  if (breakages[device].is_known) raise_runtime_error(700, "an illegal memory access was encountered", "ErrorIllegalAddress");
}
inline void break_device(int device) {
  if (!breakages[device].is_broken)
    breakages[device] = {true, false, {current_key(device), stream_clock[current_key(device)][current_key(device)]}};
}

// ---- steps of the clocks --------------------------------------------------------------------------------------------
// One more piece of work on the thread's stream of a device: after all that the host has waited for, and that its own
// stream knows. Returns its clock.
inline Clock& begin_work(int device) {
  check_device(device);
  Clock& clock = stream_clock[current_key(device)];
  join(clock, host_clock);
  clock[current_key(device)]++;
  arrive_at_devices(clock);
  recording.open(current_key(device), clock);
  return clock;
}
inline void host_waits(const Clock& clock) {
  join(host_clock, clock);
  end_copies([](Copy& copy) { return copy.moment.is_over(host_clock); });
  for (int device = 0; device < kDevices; device++) {
    Breakage& breakage = breakages[device];
    if (!breakage.is_broken || breakage.is_known || !breakage.moment.is_over(host_clock)) continue;
    breakage.is_known = true;
    check_device(device);
  }
}
inline void host_waits_for_device(int device) {
  Clock all = host_clock;
  for (int stream = 0; stream < kStreams; stream++) join(all, stream_clock[key_of(device, stream)]);
  host_waits(all);
}

// ---- who used a block of memory -------------------------------------------------------------------------------------
struct Use {
  size_t begin, end;  // bytes of the device
  Moment moment;
  bool writes;
  bool was_freed;  // by a tensor that had this memory before
  std::string by;
};
class Uses {
 public:
  void add(Use use, const Clock& clock) {
    for (const Use& other : uses_) {
      if (other.moment.stream == use.moment.stream || other.begin >= use.end || use.begin >= other.end) continue;
      if ((!other.writes && !use.writes) || other.moment.is_over(clock)) continue;
      std::ostringstream text;
      text << "race: " << use.by << (use.writes ? " writes " : " reads ");
      if (other.was_freed)
        text << "memory of a freed tensor that another stream still uses (" << other.by << ")";
      else
        text << "what another stream " << (other.writes ? "wrote (" : "reads (") << other.by << ") without waiting for it";
      problem(text.str());
    }
    // Who comes after this use comes after those that it covers.
    std::erase_if(uses_, [&](const Use& other) {
      bool inside = use.begin <= other.begin && other.end <= use.end;
      bool same_stream = other.moment.stream == use.moment.stream;
      return inside && (use.writes ? same_stream || other.moment.is_over(clock) : same_stream && !other.writes);
    });
    if (uses_.size() >= prune_at_) {
      forget(host_clock);
      prune_at_ = std::max<size_t>(32, 2 * uses_.size());
    }
    uses_.push_back(std::move(use));
  }
  // The uses of memory that this block takes over. What comes after a use that covers another one comes after both: the
  // other is left out, or a block that is freed and taken again all the time would collect them without end.
  void inherit(const Uses& freed, size_t begin, size_t end) {
    auto covers = [](const Use& late, const Use& early) {
      return late.was_freed && early.was_freed && late.moment.stream == early.moment.stream &&
             late.moment.count >= early.moment.count && late.begin <= early.begin && early.end <= late.end &&
             (late.writes || !early.writes);
    };
    for (Use use : freed.uses_) {
      if (use.begin >= end || begin >= use.end || use.moment.is_over(host_clock)) continue;
      use.begin = std::max(use.begin, begin);
      use.end = std::min(use.end, end);
      use.was_freed = true;
      if (std::any_of(uses_.begin(), uses_.end(), [&](const Use& other) { return covers(other, use); })) continue;
      std::erase_if(uses_, [&](const Use& other) { return covers(use, other); });
      uses_.push_back(std::move(use));
    }
  }
  void forget(const Clock& clock) {  // all later work comes after these
    std::erase_if(uses_, [&](const Use& use) { return use.moment.is_over(clock); });
  }
  bool empty() const { return uses_.empty(); }

 private:
  std::vector<Use> uses_;
  size_t prune_at_ = 32;
};
}  // namespace sim

// Other orders of the same work. While a step is recorded, each piece of work leaves the bytes that it wrote and a hash
// of those that it read; `replay` runs the pieces once more, in a random order of those that the clocks allow. Streams
// get ahead of each other by chance, as far as nothing makes them wait.
//
// No kernel runs again: one that reads the recorded bytes writes the recorded bytes, one that reads others is told, and
// writes NaN. A copy to a device has NaN in its target from its begin to its end, between which other streams go on.
// Memory is NaN once it is freed, and when it is allocated. What the host does is as it was: it is not delayed.
//
// Collectives are not recorded.
#pragma once
#include "clocks.h"

#include <cmath>
#include <cstring>
#include <deque>
#include <functional>
#include <random>

namespace sim {
constexpr int kPoison = 0xFF;  // every byte of memory without a value: NaN, or -1

struct Bytes {
  char* begin;
  size_t size;
  std::string_view view() const { return {begin, size}; }
  void poison() const { std::memset(begin, kPoison, size); }
};
struct RecordedWork {
  std::string by;  // what did it
  Moment moment;
  Clock clock;
  std::vector<Bytes> allocated;                     // while it was queued
  std::vector<std::pair<Bytes, size_t>> reads;      // and their hash
  std::vector<std::pair<Bytes, std::string>> writes;  // and what was there when it was over
  bool takes_time = false;                          // a copy to a device
};

struct OpenWork {
  int recording = 0;
  RecordedWork* work = nullptr;
};

class Recording {
 public:
  bool is_on = false;

  // Bytes of tensors in use are as they are now when a replay begins.
  void begin(std::vector<Bytes> in_use) {
    is_on = true;
    number_++;
    works_.clear();
    at_begin_.clear();
    for (Bytes bytes : in_use) at_begin_.emplace_back(bytes, std::string(bytes.view()));
    begin_ = stream_clock;
  }
  size_t size() const { return works_.size(); }

  // The last piece of work of this thread's stream, until `close`.
  void open(int stream, const Clock& clock) {
    if (!is_on) return;
    close();
    works_.push_back({"", {stream, clock[stream]}, clock, {}, {}, {}, false});
    open_ = {number_, &works_.back()};
  }
  void use(Bytes bytes, bool writes, const std::string& by) {
    RecordedWork* work = current();
    if (work == nullptr) return;
    if (work->by.empty()) work->by = by;
    if (!writes || reads_what_it_writes(by)) work->reads.emplace_back(bytes, hash_of(bytes));
    if (writes) work->writes.emplace_back(bytes, std::string());
  }
  void close() {
    RecordedWork* work = current();
    if (work == nullptr) return;
    for (auto& [bytes, content] : work->writes) content.assign(bytes.begin, bytes.size);
    open_.work = nullptr;
  }
  // Of a copy that is under way: its target gets these bytes.
  void close_copy(const std::vector<char>& content) {
    RecordedWork* work = current();
    if (work == nullptr) return;
    for (auto& write : work->writes) write.second.assign(content.begin(), content.end());
    work->takes_time = true;
    open_.work = nullptr;
  }
  // Memory of a stream's pool that a tensor gets or leaves.
  void poison(Bytes bytes, int stream, bool is_allocated) {
    if (!is_on) return;
    if (RecordedWork* work = current(); is_allocated && work != nullptr && work->moment.stream == stream) {
      work->allocated.push_back(bytes);
      return;
    }
    Clock& clock = stream_clock[stream];
    join(clock, host_clock);
    clock[stream]++;
    works_.push_back({is_allocated ? "an allocation" : "a free", {stream, clock[stream]}, clock, {bytes}, {}, {}, false});
  }

  // One order. Returns what the first piece of work was that read other bytes than it had; "" if there was none.
  std::string replay(uint64_t seed, std::vector<Bytes> in_use) {
    is_on = false;
    std::vector<std::pair<Bytes, std::string>> now;
    for (Bytes bytes : in_use) now.emplace_back(bytes, std::string(bytes.view()));
    for (auto& [bytes, content] : at_begin_) std::memcpy(bytes.begin, content.data(), bytes.size);
    std::string problem = run(seed);
    for (auto& [bytes, content] : now) std::memcpy(bytes.begin, content.data(), bytes.size);
    return problem;
  }

 private:
  std::deque<RecordedWork> works_;
  std::vector<std::pair<Bytes, std::string>> at_begin_;
  std::array<Clock, kDevices * kStreams> begin_{};
  int number_ = 0;  // of recordings
  static inline thread_local OpenWork open_;
  RecordedWork* current() const { return is_on && open_.recording == number_ ? open_.work : nullptr; }

  static size_t hash_of(Bytes bytes) { return std::hash<std::string_view>()(bytes.view()); }
  // add_ does; fill_ does not, nor does the `out` of any other.
  static bool reads_what_it_writes(const std::string& by) {
    std::string name = by.substr(0, by.find(' '));
    static const std::set<std::string> overwrite = {"copy_", "aten::fill_", "aten::zero_", "aten::normal_", "aten::uniform_",
                                                    "aten::random_", "aten::bernoulli_", "aten::exponential_"};
    return name.ends_with("_") && overwrite.count(name) == 0;
  }

  std::string run(uint64_t seed) {
    std::mt19937_64 random(seed);
    std::map<int, std::deque<RecordedWork*>> queues;
    std::map<int, uint64_t> done;  // of each stream that has work
    for (RecordedWork& work : works_) {
      queues[work.moment.stream].push_back(&work);
      done[work.moment.stream] = begin_[work.moment.stream][work.moment.stream];
    }
    // How likely a stream is to go on: one may be far ahead of the others, and later far behind.
    std::map<int, double> haste;
    auto draw_haste = [&] {
      for (auto& [stream, queue] : queues) haste[stream] = std::exp(std::uniform_real_distribution<double>(-4, 4)(random));
    };
    std::map<int, bool> is_under_way;  // whether the copy at the head of a queue has begun
    std::string problem;
    for (size_t left = works_.size(); left > 0;) {
      if (std::uniform_int_distribution<int>(0, 31)(random) == 0 || haste.empty()) draw_haste();
      std::vector<int> ready;
      std::vector<double> weights;
      for (auto& [stream, queue] : queues) {
        if (queue.empty()) continue;
        bool waits = false;
        for (auto& [other, count] : done) waits |= other != stream && queue.front()->clock[other] > count && !queues[other].empty();
        if (waits) continue;
        ready.push_back(stream);
        weights.push_back(haste[stream]);
      }
      int stream = ready[std::discrete_distribution<size_t>(weights.begin(), weights.end())(random)];
      RecordedWork& work = *queues[stream].front();
      if (work.takes_time && !std::exchange(is_under_way[stream], true)) {
        for (auto& write : work.writes) write.first.poison();
        continue;
      }
      is_under_way[stream] = false;
      do_again(work, problem);
      done[stream] = work.moment.count;
      queues[stream].pop_front();
      left--;
    }
    return problem;
  }
  static void do_again(const RecordedWork& work, std::string& problem) {
    for (Bytes bytes : work.allocated) bytes.poison();
    bool is_same = true;
    for (auto& [bytes, hash] : work.reads) is_same &= hash_of(bytes) == hash;
    if (!is_same && problem.empty())
      problem = work.by + ", number " + std::to_string(work.moment.count) + " of stream " +
                std::to_string(work.moment.stream % kStreams) + ", reads other bytes";
    for (auto& [bytes, content] : work.writes) {
      if (is_same)
        std::memcpy(bytes.begin, content.data(), content.size());
      else
        bytes.poison();
    }
  }
};
inline Recording recording;
}  // namespace sim

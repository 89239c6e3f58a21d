// The clocks of streams and of the host, which order.h explains.
#pragma once
#include "common.h"

#include <algorithm>
#include <array>

namespace sim {
constexpr int kStreams = 33;  // of a device: the default one, and PyTorch's pool of 32, handed out in turn
using Clock = std::array<uint64_t, kDevices * kStreams>;
inline std::array<Clock, kDevices * kStreams> stream_clock{};
inline Clock host_clock{};
inline thread_local int64_t current_stream[kDevices] = {0};
inline int64_t last_stream[kDevices] = {0};

inline int key_of(int device, int64_t stream) { return device * kStreams + static_cast<int>(stream); }
inline int current_key(int device) { return key_of(device, current_stream[device]); }
inline void join(Clock& to, const Clock& from) {
  for (size_t i = 0; i < to.size(); i++) to[i] = std::max(to[i], from[i]);
}

struct Moment {  // a piece of work, by its stream and its number there
  int stream = 0;
  uint64_t count = 0;
  bool is_over(const Clock& clock) const { return clock[stream] >= count; }
};
}  // namespace sim

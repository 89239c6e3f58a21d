// What torch.profiler asks of a device: a time before and after each operator.
//
// A build for CPUs has none, and throws for each question; the profiler catches it, and prints it with a stack whose
// names take a second to find. Kernels run when they are queued, so that the host's clock has their times.
#pragma once

#include "streams.h"

#include <chrono>

#include <torch/csrc/profiler/stubs/base.h>

namespace sim {
struct Profiling final : torch::profiler::impl::ProfilerStubs {
  using Event = torch::profiler::impl::ProfilerVoidEventStub;
  static int64_t now() {
    auto since = std::chrono::system_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
  }
  void record(c10::DeviceIndex* device, Event* event, int64_t* cpu_ns) const override {
    int64_t time = now();
    if (device) *device = static_cast<c10::DeviceIndex>(current_device);
    *event = std::make_shared<int64_t>(time);
    if (cpu_ns) *cpu_ns = time;
  }
  float elapsed(const Event* from, const Event* to) const override {  // in microseconds
    int64_t nanoseconds = *static_cast<int64_t*>(to->get()) - *static_cast<int64_t*>(from->get());
    return static_cast<float>(nanoseconds) / 1000;
  }
  void mark(const char*) const override {}
  void rangePush(const char*) const override {}
  void rangePop() const override {}
  bool enabled() const override { return true; }
  void onEachDevice(std::function<void(int)> work) const override {
    for (int d = 0; d < num_devices; d++) work(d);
  }
  void synchronize() const override {}
};
inline Profiling profiling;
}  // namespace sim

// Streams, events, random numbers, and what ATen asks a runtime for (its hooks).
#pragma once
#include "memory.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/XPUHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>

namespace sim {
struct Event {
  Clock clock{};
  Moment moment;
  std::chrono::steady_clock::time_point when;  // kernels have run when their call returns: so has what is before it
  bool was_asked = false;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Device numbered(int d) { return {kType, static_cast<c10::DeviceIndex>(d)}; }
  static int number_of(c10::Device d) { return d.index() < 0 ? current_device : d.index(); }
  static c10::Stream stream(int d, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, numbered(d), id);
  }

  c10::DeviceType type() const override { return kType; }
  c10::Device getDevice() const override { return numbered(current_device); }
  void setDevice(c10::Device d) const override {
    if (d.index() < 0) return;
    if (d.index() >= num_devices) raise_runtime_error(101, "invalid device ordinal", "ErrorInvalidDevice");
    current_device = d.index();
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.index() >= 0) current_device = d.index();
  }
  c10::Device exchangeDevice(c10::Device d) const override {
    c10::Device before = getDevice();
    setDevice(d);
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(num_devices); }

  c10::Stream getStream(c10::Device d) const override { return stream(number_of(d), current_stream[number_of(d)]); }
  c10::Stream getDefaultStream(c10::Device d) const override { return stream(number_of(d), 0); }
  c10::Stream getNewStream(c10::Device d, int = 0) const override {
    Trace trace;
    Locked locked;
    check_process();
    int64_t& last = last_stream[number_of(d)];
    last = last % (kStreams - 1) + 1;
    trace.tell = [id = last](auto& listener) { listener.trace_gpu_stream_creation(kType, static_cast<uintptr_t>(id)); };
    return stream(number_of(d), last);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool = false) const override { return getNewStream(d); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    int d = s.device_index();
    auto before = stream(d, current_stream[d]);
    current_stream[d] = s.id();
    return before;
  }
  // virtual since torch 2.10
  void* getStreamNativeHandle(const c10::Stream s) const { return reinterpret_cast<void*>(s.id()); }
  // What is over by the host's waits alone. A first question is answered with "not yet" otherwise, as a GPU may do; the
  // second with "yes", so that whoever asks until then goes on.
  bool queryStream(const c10::Stream& s) const override {
    Locked locked;
    int key = key_of(s.device_index(), s.id());
    check_device(s.device_index());
    if (stream_clock[key][key] <= host_clock[key]) return true;
    static std::set<int> asked;
    if (asked.insert(key).second) return false;
    asked.erase(key);
    host_waits(stream_clock[key]);
    return true;
  }
  void synchronizeStream(const c10::Stream& s) const override {
    Trace trace{[id = s.id()](auto& listener) {
      listener.trace_gpu_stream_synchronization(kType, static_cast<uintptr_t>(id));
    }};
    Locked locked;
    check_process();
    note_wait("Stream.synchronize");
    host_waits(stream_clock[key_of(s.device_index(), s.id())]);
    check_device(s.device_index());
  }
  void synchronizeDevice(const c10::DeviceIndex d) const override {
    Trace trace{[](auto& listener) { listener.trace_gpu_device_synchronization(kType); }};
    Locked locked;
    check_process();
    note_wait("synchronize", true);
    host_waits_for_device(number_of(numbered(d)));
    check_device(number_of(numbered(d)));
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const override {
    device_memory.recordStream(data, s);
  }

  void record(void** event, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    bool is_new = *event == nullptr;
    if (is_new) *event = new Event();
    Trace trace{[is_new, address = number_of_address(*event), id = s.id()](auto& listener) {
      if (is_new) listener.trace_gpu_event_creation(kType, address);
      listener.trace_gpu_event_record(kType, address, static_cast<uintptr_t>(id));
    }};
    Locked locked;
    check_process();
    check_device(s.device_index());
    auto* e = static_cast<Event*>(*event);
    int key = key_of(s.device_index(), s.id());
    join(stream_clock[key], host_clock);
    e->clock = stream_clock[key];
    e->moment = {key, stream_clock[key][key]};
    e->when = std::chrono::steady_clock::now();
    e->was_asked = false;
  }
  void block(void* event, const c10::Stream& s) const override {
    Trace trace;
    if (event) {
      trace.tell = [event, id = s.id()](auto& listener) {
        listener.trace_gpu_event_wait(kType, number_of_address(event), static_cast<uintptr_t>(id));
      };
    }
    Locked locked;
    check_device(s.device_index());
    if (event) join(stream_clock[key_of(s.device_index(), s.id())], static_cast<Event*>(event)->clock);
  }
  bool queryEvent(void* event) const override {
    Locked locked;
    auto* e = static_cast<Event*>(event);
    if (e == nullptr) return true;
    check_device(e->moment.stream / kStreams);
    if (!e->moment.is_over(host_clock) && !std::exchange(e->was_asked, true)) return false;
    host_waits(e->clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    Trace trace;
    if (event) {
      trace.tell = [event](auto& listener) {
        listener.trace_gpu_event_synchronization(kType, number_of_address(event));
      };
    }
    Locked locked;
    note_wait("Event.synchronize", true);
    if (event == nullptr) return;
    host_waits(static_cast<Event*>(event)->clock);
    check_device(static_cast<Event*>(event)->moment.stream / kStreams);
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    auto from = static_cast<Event*>(begin)->when, to = static_cast<Event*>(end)->when;
    return std::chrono::duration<double, std::milli>(to - from).count();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (event) Trace{[event](auto& listener) { listener.trace_gpu_event_deletion(kType, number_of_address(event)); }};
    delete static_cast<Event*>(event);
  }
};
inline Guard guard;

// ---- random numbers -------------------------------------------------------------------------------------------------
// Of a device: the CPU's generator, with a state of its own.
struct Generator final : c10::GeneratorImpl {
  at::Generator inner = at::detail::createCPUGenerator();
  explicit Generator(int d) : c10::GeneratorImpl(Guard::numbered(d), c10::DispatchKeySet(kKey)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.device().is_cpu(), "RNG state must be a torch.ByteTensor");
    inner.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->inner = inner.clone();
    return copy;
  }
};
inline at::Generator& default_generator(int d) {
  static at::Generator all[kDevices];
  if (d < 0) d = current_device;
  if (!all[d].defined()) all[d] = at::make_generator<Generator>(d);
  return all[d];
}
inline at::Generator& inner_of(const at::Generator& generator) {
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->inner;
}
inline bool hand_out_defaults = false;  // torch.Generator(device) is the default one: so Python gets to it

// ---- hooks ----------------------------------------------------------------------------------------------------------
#define SIM_JOIN_(a, b) a##b
#define SIM_JOIN(a, b) SIM_JOIN_(a, b)
using HooksBase = at::SIM_JOIN(SIMULATED_KEY, HooksInterface);
struct Hooks final : HooksBase {
  template <class... Arguments>
  explicit Hooks(Arguments&&...) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return guard.deviceCount(); }
  void setCurrentDevice(c10::DeviceIndex d) const override { guard.setDevice({kType, d}); }
  c10::DeviceIndex getCurrentDevice() const override { return guard.getDevice().index(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override { return guard.exchangeDevice({kType, d}).index(); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override { return exchangeDevice(d); }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  at::Device getDeviceFromPtr(void* p) const override {
    int d = device_of(p);
    TORCH_CHECK(d >= 0, "The specified pointer resides on host memory and is not registered with any CUDA device.");
    return Guard::numbered(d);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex d) const override { return default_generator(d); }
  at::Generator getNewGenerator(c10::DeviceIndex d) const override {
    return hand_out_defaults ? default_generator(d) : at::make_generator<Generator>(d < 0 ? sim::current_device : d);
  }
  c10::DeviceIndex current_device() const override { return guard.getDevice().index(); }
  void deviceSynchronize(c10::DeviceIndex d) const override { guard.synchronizeDevice(d); }
  // Of another type for each kind
  decltype(std::declval<HooksBase>().getNumGPUs()) getNumGPUs() const override {
    return static_cast<decltype(std::declval<HooksBase>().getNumGPUs())>(num_devices);
  }
#ifndef SIM_XPU
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  long versionCUDART() const override { return 13000; }  // NOLINT: the type of ATen's interface
  at::Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
#else
  bool hasXPU() const override { return true; }
#endif
};
}  // namespace sim

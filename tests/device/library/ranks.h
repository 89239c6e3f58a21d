// Collectives between simulated devices: what NCCL does for tensors of GPUs, with gloo underneath.
//
// As with NCCL, a call returns at once and its work has a stream of its own, which waits for what the caller's stream
// was given before; `wait` makes the caller's stream wait for that, and not the host. What a call reads is read when it
// is made. What it writes is there after `wait` alone: until then it is NaN, as late as a device may be. Each group has
// a stream, so that a tensor that is used without `wait` shows as a race, too.
#pragma once
#include "attention.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace sim {
using c10d::Work;
using Tensors = std::vector<Tensor>;

// From a call until `wait`: the tensors of the device, each with its copy on the host. It keeps them alive, as NCCL's
// own Work does.
struct Exchange final : Work {
  int device;
  Clock end{};  // of the stream of the collective
  std::vector<std::pair<Tensor, Tensor>> reads, writes;
  std::vector<c10::intrusive_ptr<Work>> on_hosts;
  bool has_arrived = false;
  std::mutex arriving;

  explicit Exchange(int device) : device(device) {}
  ~Exchange() override {
    if (has_arrived || (reads.empty() && writes.empty())) return;
    static auto* never_waited_for = new std::vector<std::pair<Tensor, Tensor>>;  // gloo may still use the copies
    Locked locked;
    never_waited_for->insert(never_waited_for->end(), reads.begin(), reads.end());
    never_waited_for->insert(never_waited_for->end(), writes.begin(), writes.end());
  }
  bool wait(std::chrono::milliseconds timeout) override {
    std::lock_guard<std::mutex> once(arriving);
    if (!has_arrived)  // in truth the host waits here; the simulated one goes on
      for (auto& work : on_hosts) work->wait(timeout);
    std::vector<std::pair<Tensor, Tensor>> let_go[2];  // after the lock: Python may free a tensor, for which it locks
    Locked locked;
    if (!has_arrived)
      for (auto& [tensor, copy] : writes) view_of(tensor).copy_(copy);
    has_arrived = true;
    join(stream_clock[current_key(device)], end);
    reads.swap(let_go[0]);
    writes.swap(let_go[1]);
    return true;
  }
  void synchronize() override { wait(c10d::kUnsetTimeout); }
  bool isCompleted() override {
    for (auto& work : on_hosts)
      if (!work->isCompleted()) return false;
    return true;
  }
  bool isSuccess() const override { return true; }
};

struct DeviceRanks final : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> gloo;
  std::map<int, int64_t> streams;  // by device
  std::vector<c10::intrusive_ptr<Exchange>> together;
  bool collects = false;
  explicit DeviceRanks(c10::intrusive_ptr<c10d::Backend> gloo)
      : c10d::Backend(gloo->getRank(), gloo->getSize()), gloo(std::move(gloo)) {
    setGroupUid(this->gloo->getGroupUid());
    setGroupDesc(this->gloo->getGroupDesc());
  }

  const std::string getBackendName() const override { return "nccl"; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo->setTimeout(timeout); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return gloo->getSequenceNumberForGroup(); }

  // A call: `stage` names what it reads and writes and gives their copies; `on_hosts` hands these to gloo.
  struct Call {
    DeviceRanks* ranks;
    c10::intrusive_ptr<Exchange> exchange;
    const char* name;
    int64_t before;  // the caller's stream
    Call(DeviceRanks* ranks, const Tensor& any, const char* name) : ranks(ranks), name(name) {
      TORCH_CHECK(is_ours(any), "No backend type associated with device type ", any.device());
      int d = any.device().index();
      exchange = c10::make_intrusive<Exchange>(d);
      Locked locked;
      check_process();
      calls[std::string("nccl::") + name]++;
      before = current_stream[d];
      if (!ranks->streams.count(d)) ranks->streams[d] = guard.getNewStream(any.device()).id();
      int64_t own = ranks->streams[d];
      join(stream_clock[key_of(d, own)], stream_clock[key_of(d, before)]);
      current_stream[d] = own;
      begin_work(d);
    }
    ~Call() { current_stream[exchange->device] = before; }
    Tensor stage(const Tensor& tensor, bool reads, bool writes) {
      TORCH_CHECK(is_ours(tensor) && tensor.device().index() == exchange->device,
                  "Expected all tensors to be on the same device in ", name);
      TORCH_CHECK(tensor.is_non_overlapping_and_dense(), "Tensors must be contiguous");
      Locked locked;
      Tensor copy = at::empty(tensor.sizes(), tensor.options().device(at::kCPU));
      if (reads) {
        use(tensor, exchange->device, false, name);
        copy.copy_(view_of(tensor));
        exchange->reads.emplace_back(tensor, copy);
      }
      if (writes) {
        use(tensor, exchange->device, true, name);
        exchange->writes.emplace_back(tensor, copy);
      }
      return copy;
    }
    Tensors stage(const Tensors& tensors, bool reads, bool writes) {
      Tensors copies;
      for (auto& tensor : tensors) copies.push_back(stage(tensor, reads, writes));
      return copies;
    }
    c10::intrusive_ptr<Work> queued(c10::intrusive_ptr<Work> on_hosts) {
      Locked locked;
      int d = exchange->device;
      for (auto& [tensor, copy] : exchange->writes) {  // not there yet
        auto begin = tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize());
        if (tensor.numel()) std::memset(seen(tensor.storage().data()) + begin, kPoison, tensor.nbytes());
      }
      exchange->end = stream_clock[current_key(d)];
      exchange->on_hosts.push_back(std::move(on_hosts));
      if (ranks->collects) ranks->together.push_back(exchange);
      return exchange;
    }
  };

  // Calls between these two are one: none of them waits for another's neighbor.
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { collects = true; }
  c10::intrusive_ptr<Work> endCoalescing() override {
    collects = false;
    if (together.empty()) return nullptr;
    auto all = c10::make_intrusive<Exchange>(together[0]->device);
    for (auto& exchange : together) {
      join(all->end, exchange->end);
      all->on_hosts.insert(all->on_hosts.end(), exchange->on_hosts.begin(), exchange->on_hosts.end());
      all->reads.insert(all->reads.end(), exchange->reads.begin(), exchange->reads.end());
      all->writes.insert(all->writes.end(), exchange->writes.begin(), exchange->writes.end());
      exchange->reads.clear();
      exchange->writes.clear();
    }
    together.clear();
    return all;
  }

  c10::intrusive_ptr<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    Call call(this, tensors[0], "broadcast");
    bool is_root = options.rootRank == getRank();
    auto copies = call.stage(tensors, is_root, !is_root);
    return call.queued(gloo->broadcast(copies, options));
  }
  c10::intrusive_ptr<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    Call call(this, tensors[0], "all_reduce");
    auto copies = call.stage(tensors, true, true);
    return call.queued(gloo->allreduce(copies, options));
  }
  c10::intrusive_ptr<Work> allreduce_coalesced(Tensors& tensors,
                                               const c10d::AllreduceCoalescedOptions& options) override {
    Call call(this, tensors[0], "all_reduce");
    auto copies = call.stage(tensors, true, true);
    return call.queued(gloo->allreduce_coalesced(copies, options));
  }
  c10::intrusive_ptr<Work> reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    Call call(this, tensors[0], "reduce");
    auto copies = call.stage(tensors, true, options.rootRank == getRank());
    return call.queued(gloo->reduce(copies, options));
  }
  c10::intrusive_ptr<Work> allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                     const c10d::AllgatherOptions& options) override {
    Call call(this, inputs[0], "all_gather");
    auto copies = call.stage(inputs, true, false);
    std::vector<Tensors> gathered;
    for (auto& tensors : outputs) gathered.push_back(call.stage(tensors, false, true));
    return call.queued(gloo->allgather(gathered, copies, options));
  }
  c10::intrusive_ptr<Work> _allgather_base(Tensor& output, Tensor& input,
                                           const c10d::AllgatherOptions& options) override {
    Call call(this, input, "all_gather_single");
    Tensor copy = call.stage(input, true, false), gathered = call.stage(output, false, true);
    return call.queued(gloo->_allgather_base(gathered, copy, options));
  }
  // Of several tensors, as DTensor's `full_tensor` and `redistribute` ask for of one.
  c10::intrusive_ptr<Work> allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                           const c10d::AllgatherOptions& options) override {
    Call call(this, inputs[0], "all_gather_single");
    auto copies = call.stage(inputs, true, false), gathered = call.stage(outputs, false, true);
    return call.queued(gloo->allgather_into_tensor_coalesced(gathered, copies, options));
  }
  c10::intrusive_ptr<Work> reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                           const c10d::ReduceScatterOptions& options) override {
    Call call(this, inputs[0], "reduce_scatter_single");
    auto copies = call.stage(inputs, true, false), sums = call.stage(outputs, false, true);
    return call.queued(gloo->reduce_scatter_tensor_coalesced(sums, copies, options));
  }
  c10::intrusive_ptr<Work> reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    Call call(this, outputs[0], "reduce_scatter");
    std::vector<Tensors> copies;
    for (auto& tensors : inputs) copies.push_back(call.stage(tensors, true, false));
    auto sums = call.stage(outputs, false, true);
    return call.queued(gloo->reduce_scatter(sums, copies, options));
  }
  c10::intrusive_ptr<Work> _reduce_scatter_base(Tensor& output, Tensor& input,
                                                const c10d::ReduceScatterOptions& options) override {
    Call call(this, input, "reduce_scatter_single");
    Tensor copy = call.stage(input, true, false), sums = call.stage(output, false, true);
    return call.queued(gloo->_reduce_scatter_base(sums, copy, options));
  }
  c10::intrusive_ptr<Work> alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes,
                                         std::vector<int64_t>& input_sizes,
                                         const c10d::AllToAllOptions& options) override {
    Call call(this, input, "all_to_all_single");
    Tensor copy = call.stage(input, true, false), received = call.stage(output, false, true);
    return call.queued(gloo->alltoall_base(received, copy, output_sizes, input_sizes, options));
  }
  c10::intrusive_ptr<Work> send(Tensors& tensors, int rank, int tag) override {
    Call call(this, tensors[0], "send");
    auto copies = call.stage(tensors, true, false);
    return call.queued(gloo->send(copies, rank, tag));
  }
  c10::intrusive_ptr<Work> recv(Tensors& tensors, int rank, int tag) override {
    Call call(this, tensors[0], "recv");
    auto copies = call.stage(tensors, false, true);
    return call.queued(gloo->recv(copies, rank, tag));
  }
  c10::intrusive_ptr<Work> barrier(const c10d::BarrierOptions& options) override { return gloo->barrier(options); }
};

// Tensors of devices travel by the backend above in this group, whose own one for them is gloo's.
void use_device_ranks(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  auto gloo = group->getBackend(kType);
  group->setBackend(kType, c10d::ProcessGroup::BackendType::CUSTOM, c10::make_intrusive<DeviceRanks>(gloo));
}
}  // namespace sim

TORCH_LIBRARY(simulated, m) {
  m.def("use_device_ranks", &sim::use_device_ranks);
  // UntypedStorage.resize_, which FSDP2 calls, asks a CPU build for the device's kernel in vain.
  m.def("resize_storage", [](at::Storage storage, int64_t bytes) { sim::resize_bytes(storage, bytes); });
}

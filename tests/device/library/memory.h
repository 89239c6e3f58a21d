// Memory of the devices, and pinned memory of the host.
//
// A device's memory has two addresses. The one that tensors name may not be touched: a host access ends the process, as
// on a GPU. Kernels use the other. Both are reserved once for each device and become real page by page.
//
// The allocator follows PyTorch's: a freed block stays in the pool of the stream that allocated it, and only that
// stream gets it again; memory of another stream is given to no one before it was given back to the driver, for which
// the host waits. A block that other streams were recorded on (`record_stream`) is in no pool before the host has
// waited for them. Blocks have their own size, rounded to 512 bytes: there are no segments, and so no fragmentation.
#pragma once
#include "order.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/GPUTrace.h>
#include <sys/mman.h>

#include <functional>

namespace sim {
constexpr size_t kAddresses = 1ull << 39;  // of a device: more than any has bytes
constexpr size_t kRound = 512;
constexpr size_t kPage = 4096;
constexpr size_t kMostPoison = 256ull << 20;  // a larger block would take the host's memory for nothing
constexpr size_t kGiveBack = 16ull << 20;     // smaller ones are freed and taken all the time: fresh pages cost more
constexpr size_t kKept = 128ull << 20;        // of larger ones so much stays with the process, for the next
constexpr int kFresh = -1;                    // the pool of addresses that no stream has

struct Block {
  size_t size;
  int pool;  // the stream that allocated it
  Uses uses;
  std::set<int> recorded;  // streams
};
struct Leaving {  // freed, but recorded on streams that may still use it
  size_t offset, size;
  int pool;
  std::vector<Moment> until;
};
struct FreeRange {
  size_t size;
  int pool;
};
struct Arena {
  char* named = nullptr;  // what tensors name
  char* seen = nullptr;   // what kernels use
  size_t capacity = 1ull << 30;
  double fraction = 1.0;
  std::map<size_t, Block> used;             // by offset
  std::map<size_t, FreeRange> free_ranges;  // by offset; neighbors of one pool are one range
  std::map<int, std::set<std::pair<size_t, size_t>>> pools;  // the same ranges: pool -> (size, offset)
  std::map<size_t, std::pair<size_t, Uses>> former;          // offset -> size and uses of freed blocks
  std::list<Leaving> leaving;
  std::map<size_t, size_t> kept;  // offset -> size of large freed blocks whose pages the host did not get back
  size_t kept_bytes = 0;
  size_t copied_in = 0, copied_out = 0;  // bytes, from the host and to it
  size_t allocated = 0, peak = 0, reserved = 0, reserved_peak = 0, count = 0, total_count = 0, ooms = 0, retries = 0;

  bool has_named(const void* p) const { return named && p >= named && p < named + kAddresses; }
  bool has_seen(const void* p) const { return seen && p >= seen && p < seen + kAddresses; }
  size_t limit() const { return static_cast<size_t>(static_cast<double>(capacity) * fraction); }

  // The host's pages of a freed block: whole ones alone, the others hold bytes of neighbors.
  void give_pages_back(size_t offset, size_t size) const {
    size_t first = (offset + kPage - 1) / kPage * kPage, last = (offset + size) / kPage * kPage;
    if (first < last) madvise(seen + first, last - first, MADV_DONTNEED);
  }
  void keep_or_give_back(size_t offset, size_t size) {
    if (size < kGiveBack) return;
    if (kept_bytes + size > kKept) return give_pages_back(offset, size);
    kept[offset] = size;
    kept_bytes += size;
  }
  // Kept blocks of which these bytes are used again are kept no more.
  void use_again(size_t offset, size_t size) {
    auto block = kept.lower_bound(offset);
    if (block != kept.begin() && std::prev(block)->first + std::prev(block)->second > offset) --block;
    while (block != kept.end() && block->first < offset + size) {
      kept_bytes -= block->second;
      block = kept.erase(block);
    }
  }
  void add_free(size_t offset, size_t size, int pool) {
    auto next = free_ranges.lower_bound(offset);
    if (next != free_ranges.end() && next->first == offset + size && next->second.pool == pool) {
      size += next->second.size;
      next = take_free(next);
    }
    if (next != free_ranges.begin()) {
      auto previous = std::prev(next);
      if (previous->first + previous->second.size == offset && previous->second.pool == pool) {
        offset = previous->first;
        size += previous->second.size;
        take_free(previous);
      }
    }
    free_ranges[offset] = {size, pool};
    pools[pool].insert({size, offset});
  }
  std::map<size_t, FreeRange>::iterator take_free(std::map<size_t, FreeRange>::iterator range) {
    pools[range->second.pool].erase({range->second.size, range->first});
    return free_ranges.erase(range);
  }
  // The smallest range of the pool that holds `size` bytes; what is left of it stays there. kAddresses: there is none.
  size_t take(int pool, size_t size) {
    auto& ranges = pools[pool];
    auto best = ranges.lower_bound({size, 0});
    if (best == ranges.end()) return kAddresses;
    auto [found, offset] = *best;
    take_free(free_ranges.find(offset));
    if (found > size) add_free(offset + size, found - size, pool);
    return offset;
  }
  // Blocks whose recorded streams the host has waited for go back to their pools.
  void end_leaving() {
    std::erase_if(leaving, [&](const Leaving& block) {
      for (const Moment& moment : block.until)
        if (!moment.is_over(host_clock)) return false;
      add_free(block.offset, block.size, block.pool);
      return true;
    });
  }
  // Everything that is free becomes the driver's again. The driver waits for the device first.
  void give_back(int device) {
    bool has_any = !leaving.empty();
    for (auto& [pool, ranges] : pools) has_any |= pool != kFresh && !ranges.empty();
    if (!has_any) return;
    waits["memory given back"]++;
    host_waits_for_device(device);
    end_leaving();
    std::vector<std::pair<size_t, size_t>> cached;
    for (auto& [offset, range] : free_ranges)
      if (range.pool != kFresh) cached.emplace_back(offset, range.size);
    for (auto& [offset, size] : cached) {
      take_free(free_ranges.find(offset));
      add_free(offset, size, kFresh);
    }
    reserved = allocated;
    for (auto& [offset, size] : kept) give_pages_back(offset, size);
    kept.clear();
    kept_bytes = 0;
    former.clear();  // the host has waited for whoever used it
  }
};
inline Arena arenas[kDevices];

inline Arena& arena(int device) {
  Arena& a = arenas[device];
  if (a.named) return a;
  // Private and anonymous: a fork has a copy of its own, so that a child never changes its parent's tensors.
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* named = mmap(nullptr, kAddresses, PROT_NONE, flags, -1, 0);
  void* seen = mmap(nullptr, kAddresses, PROT_READ | PROT_WRITE, flags, -1, 0);
  TORCH_CHECK(named != MAP_FAILED && seen != MAP_FAILED, "no address space for a simulated device");
  madvise(seen, kAddresses, MADV_DONTDUMP);
  a.named = static_cast<char*>(named);
  a.seen = static_cast<char*>(seen);
  a.add_free(kRound, kAddresses - kRound, kFresh);
  return a;
}
inline int device_of(const void* p) {
  for (int d = 0; d < kDevices; d++)
    if (arenas[d].has_named(p)) return d;
  return -1;
}
inline bool is_seen(const void* p) {
  for (auto& a : arenas)
    if (a.has_seen(p)) return true;
  return false;
}
inline char* seen(const void* p) {  // the address at which kernels use it
  if (p == nullptr) return nullptr;
  int d = device_of(p);
  TORCH_CHECK(d >= 0, "the simulated GPU was given an address of the host");
  return arenas[d].seen + (static_cast<const char*>(p) - arenas[d].named);
}

// Bytes [begin, end) of a device's address `base` are used by a piece of work of the thread's stream of `device`.
inline void note_use(const void* base, size_t begin, size_t end, int device, bool writes, const std::string& by) {
  int d = device_of(base);
  if (d < 0 || begin == end) return;
  Arena& a = arenas[d];
  size_t offset = static_cast<size_t>(static_cast<const char*>(base) - a.named);
  auto it = a.used.upper_bound(offset);
  if (it == a.used.begin()) return;
  int stream = current_key(device);
  const Clock& clock = stream_clock[stream];
  recording.use({a.seen + offset + begin, end - begin}, writes, by);
  std::prev(it)->second.uses.add({offset + begin, offset + end, {stream, clock[stream]}, writes, false, by}, clock);
}

// ---- after a fork ---------------------------------------------------------------------------------------------------
// The driver of a GPU serves the process that began with it. A child may free tensors, and nothing else.
inline bool is_in_use = false, is_forked = false;
inline void check_process() {
  if (is_forked) {
    problem("fork: a child uses a device that its parent had begun to use");
    raise_runtime_error(3, "initialization error", "ErrorInitializationError");
  }
  is_in_use = true;
}
struct Forks {
  Forks() {
    pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); }, [] {
      new (&mutex) std::recursive_mutex();  // it belongs to the parent's thread
      is_forked |= is_in_use;
    });
  }
};
inline Forks forks;

// What PyTorch's sanitizer of races listens to. It takes Python's lock: nobody calls it inside of ours.
struct Trace {
  std::function<void(const c10::impl::PyInterpreterVTable&)> tell;
  ~Trace() {
    const c10::impl::PyInterpreter* listener = c10::impl::GPUTrace::get_trace();
    if (listener && tell && !is_forked) tell(*listener->vtable_);
  }
};
inline uintptr_t number_of_address(const void* p) { return reinterpret_cast<uintptr_t>(p); }

// ---- the allocator of the devices -----------------------------------------------------------------------------------
inline void release(void* p) {
  Trace trace{[p](auto& listener) { listener.trace_gpu_memory_deallocation(kType, number_of_address(p)); }};
  Locked locked;
  int d = device_of(p);
  if (d < 0) return;
  Arena& a = arenas[d];
  size_t offset = static_cast<size_t>(static_cast<char*>(p) - a.named);
  auto it = a.used.find(offset);
  if (it == a.used.end()) return;
  Block& block = it->second;
  size_t size = block.size;
  a.allocated -= size;
  a.count--;
  if (!is_forked) a.keep_or_give_back(offset, size);
  Leaving leaving{offset, size, block.pool, {}};
  if (block.recorded.empty() && size <= kMostPoison) recording.poison({a.seen + offset, size}, block.pool, false);
  for (int stream : block.recorded) leaving.until.push_back({stream, stream_clock[stream][stream]});
  block.uses.forget(host_clock);
  if (!block.uses.empty()) a.former[offset] = {size, std::move(block.uses)};
  a.used.erase(it);
  a.leaving.push_back(std::move(leaving));
  a.end_leaving();
}

struct DeviceMemory final : c10::DeviceAllocator {
  at::DataPtr allocate(size_t wanted) override {
    Trace trace;
    Locked locked;
    check_process();
    int d = current_device;
    check_device(d);
    Arena& a = arena(d);
    c10::Device device(kType, static_cast<c10::DeviceIndex>(d));
    if (wanted == 0) return {nullptr, nullptr, &release, device};
    size_t size = (wanted + kRound - 1) / kRound * kRound;
    int pool = current_key(d);
    a.end_leaving();
    size_t offset = a.take(pool, size);
    if (offset == kAddresses && a.reserved + size > a.limit()) {  // no room for new memory
      a.retries++;
      a.give_back(d);
      if (a.reserved + size > a.limit()) raise_out_of_memory(a, d, size);
    }
    if (offset == kAddresses) {
      offset = a.take(kFresh, size);
      TORCH_CHECK(offset != kAddresses, "no address space left in a simulated device");
      a.reserved += size;
    }
    // Whoever used these bytes last may still do so on another stream.
    Block block{size, pool, {}, {}};
    auto old = a.former.lower_bound(offset);
    if (old != a.former.begin() && std::prev(old)->first + std::prev(old)->second.first > offset) --old;
    while (old != a.former.end() && old->first < offset + size) {
      auto [begin, former] = *old;
      size_t end = begin + former.first;
      a.former.erase(old);
      block.uses.inherit(former.second, offset, offset + size);
      // What lies outside of this block keeps them.
      if (begin < offset) a.former[begin] = {offset - begin, former.second};
      if (end > offset + size) a.former[offset + size] = {end - offset - size, former.second};
      old = a.former.lower_bound(std::max(begin + 1, std::min(end, offset + size)));
    }
    a.used[offset] = std::move(block);
    a.use_again(offset, size);
    std::memset(a.seen + offset, kPoison, std::min(size, kMostPoison));
    recording.poison({a.seen + offset, std::min(size, kMostPoison)}, pool, true);
    a.allocated += size;
    a.count++;
    a.total_count++;
    a.peak = std::max(a.peak, a.allocated);
    a.reserved_peak = std::max(a.reserved_peak, a.reserved);
    char* p = a.named + offset;
    trace.tell = [p](auto& listener) { listener.trace_gpu_memory_allocation(kType, number_of_address(p)); };
    return {p, p, &release, device};
  }
  [[noreturn]] static void raise_out_of_memory(Arena& a, int d, size_t size) {
    a.ooms++;
    size_t free = a.capacity > a.reserved ? a.capacity - a.reserved : 0;
    std::ostringstream text;
    text << runtime << " out of memory. Tried to allocate " << format_size(size) << ". GPU " << d
         << " has a total capacity of " << format_size(a.capacity) << " of which " << format_size(free) << " is free. ";
    if (runtime != "HIP")
      text << "Including non-PyTorch memory, this process has " << format_size(a.reserved) << " memory in use. ";
    if (a.fraction < 1) text << format_size(a.limit()) << " allowed; ";
    text << "Of the allocated memory " << format_size(a.allocated) << " is allocated by PyTorch, and "
         << format_size(a.reserved - a.allocated) << " is reserved by PyTorch but unallocated. If reserved but "
         << "unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid "
         << "fragmentation.  See documentation for Memory Management  "
         << "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)";
    throw c10::OutOfMemoryError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, text.str());
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(seen(to), seen(from), n); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    Locked locked;
    for (int d = 0; d < kDevices; d++)
      if (arenas[d].named) arenas[d].give_back(d);
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    Locked locked;
    int d = device_of(data.get());
    if (d < 0) return;
    Arena& a = arenas[d];
    auto it = a.used.find(static_cast<size_t>(static_cast<char*>(data.get()) - a.named));
    int key = key_of(stream.device_index(), stream.id());
    if (it != a.used.end() && it->second.pool != key) it->second.recorded.insert(key);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex d) override {
    Locked locked;
    Arena& a = arena(d);
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto set = [](auto& stat, size_t current, size_t peak) {
      stat[0].current = static_cast<int64_t>(current);
      stat[0].peak = static_cast<int64_t>(peak);
    };
    set(stats.allocated_bytes, a.allocated, a.peak);
    set(stats.active_bytes, a.allocated, a.peak);
    set(stats.reserved_bytes, a.reserved, a.reserved_peak);
    set(stats.allocation, a.count, a.count);
    stats.num_ooms = static_cast<int64_t>(a.ooms);
    stats.num_alloc_retries = static_cast<int64_t>(a.retries);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex d) override {
    Locked locked;
    Arena& a = arena(d);
    a.peak = a.allocated;
    a.reserved_peak = a.reserved;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex d) {  // virtual since torch 2.10
    Locked locked;
    Arena& a = arena(d);
    return {a.capacity > a.reserved ? a.capacity - a.reserved : 0, a.capacity};
  }
};
inline DeviceMemory device_memory;

// ---- pinned memory --------------------------------------------------------------------------------------------------
// As PyTorch's caching allocator has it: a block is a power of two, and stays pinned when it is freed; the next tensor
// of that size gets it, once the copies that use it are over.
struct PinnedMemory final : at::HostAllocator {
  struct Pinned {
    size_t size;
    bool is_free;
  };
  std::map<char*, Pinned> blocks;
  size_t bytes = 0, peak = 0;  // also of those that are free
  size_t used = 0;             // of tensors

  at::DataPtr allocate(size_t n) override {
    Locked locked;
    if (n == 0) return {nullptr, nullptr, &free_block, c10::Device(c10::kCPU)};
    check_process();
    size_t size = 1;
    while (size < n) size *= 2;
    char* p = nullptr;
    for (auto& [address, block] : blocks)
      if (block.is_free && block.size == size && !has_copies(address, size)) p = address;
    if (p == nullptr) {
      p = static_cast<char*>(std::aligned_alloc(kPage, std::max(size, kPage)));
      TORCH_CHECK(p != nullptr, runtime, " error: out of memory");  // as hipHostMalloc says it
      bytes += size;
      peak = std::max(peak, bytes);
    }
    blocks[p] = {size, false};
    used += size;
    std::memset(p, kPoison, n);
    return {p, p, &free_block, c10::Device(c10::kCPU)};
  }
  static bool has_copies(const char* p, size_t size) {
    for (const Copy& copy : copies)
      if (copy.overlaps(p, size)) return true;
    return false;
  }
  static void free_block(void* p);
  bool contains(const void* p) {
    auto it = blocks.upper_bound(const_cast<char*>(static_cast<const char*>(p)));
    return it != blocks.begin() && p < (--it)->first + it->second.size;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
  bool record_event(void*, void*, c10::Stream) override { return true; }  // `copies` knows
  void empty_cache() override {
    Locked locked;
    std::erase_if(blocks, [&](auto& item) {
      if (!item.second.is_free || has_copies(item.first, item.second.size)) return false;
      bytes -= item.second.size;
      std::free(item.first);
      return true;
    });
  }
  at::HostStats get_stats() override {
    Locked locked;
    at::HostStats stats;
    stats.allocated_bytes.current = static_cast<int64_t>(bytes);
    stats.allocated_bytes.peak = static_cast<int64_t>(peak);
    return stats;
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {
    Locked locked;
    peak = bytes;
  }
};
inline PinnedMemory pinned_memory;
inline void PinnedMemory::free_block(void* p) {
  Locked locked;
  auto it = pinned_memory.blocks.find(static_cast<char*>(p));
  if (it == pinned_memory.blocks.end()) return;
  it->second.is_free = true;
  pinned_memory.used -= it->second.size;
}
inline bool is_pinned(const void* p) {
  Locked locked;
  return pinned_memory.contains(p);
}
}  // namespace sim

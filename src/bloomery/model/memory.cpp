// Memory of PyTorch's tensors on a CPU: malloc's, in blocks that fit into what tensors of their size have freed.
//
// PyTorch asks glibc for 64 aligned bytes, and glibc then looks for room that is 96 bytes larger than the tensor, of which
// it gives back what it did not need. So a tensor does not fit where one of its size was, between others that stay: a
// quarter to a half of the activations were holes. Here each block is asked for as it is, with room to align it inside.

#include <c10/core/CPUAllocator.h>

#include <cstdint>
#include <cstdlib>

namespace {

constexpr std::size_t ALIGNMENT = 64;  // c10's; malloc's own is 16

// What malloc gave stands in the word before the tensor.
void** block_of(void* tensor) {
  return static_cast<void**>(tensor) - 1;
}

void release(void* tensor) {
  if (tensor != nullptr) {
    c10::profiledCPUMemoryReporter().Delete(tensor);
    std::free(*block_of(tensor));
  }
}

class Filling final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    void* tensor = nullptr;
    if (bytes > 0) {
      void* block = bytes < PTRDIFF_MAX - ALIGNMENT ? std::malloc(bytes + ALIGNMENT) : nullptr;
      if (block == nullptr) {
        return torchs_->allocate(bytes);  // which raises PyTorch's error
      }
      // 16 to 64 bytes further.
      const auto address = reinterpret_cast<std::uintptr_t>(block) / ALIGNMENT * ALIGNMENT + ALIGNMENT;
      tensor = reinterpret_cast<void*>(address);
      *block_of(tensor) = block;
      c10::profiledCPUMemoryReporter().New(tensor, bytes);
    }
    return {tensor, tensor, &release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }

  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }

 private:
  c10::Allocator* torchs_ = c10::GetDefaultCPUAllocator();
};

}  // namespace

extern "C" void fill_freed_memory() {
  static Filling allocator;
  c10::SetCPUAllocator(&allocator, 1);
}

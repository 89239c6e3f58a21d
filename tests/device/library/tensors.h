// Tensors of a device: how they are made, seen by kernels of the CPU, and copied.
#pragma once
#include "streams.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>

namespace sim {
inline bool is_ours(const Tensor& t) { return t.defined() && t.device().type() == kType; }

// The same bytes as a tensor of the CPU.
inline Tensor view_of(const Tensor& t) {
  auto options = at::TensorOptions().dtype(t.dtype()).device(at::kCPU);
  if (t.numel() == 0) return at::empty_strided(t.sizes(), t.strides(), options);
  char* base = seen(t.storage().data()) + t.storage_offset() * static_cast<int64_t>(t.itemsize());
  Tensor view = at::from_blob(base, t.sizes(), t.strides(), options);
  if (t.is_conj()) view._set_conj(true);
  if (t.is_neg()) view._set_neg(true);
  return view;
}
// A piece of work of `device` uses the bytes of a tensor: from its first to its last, also those between them that a
// strided one leaves out.
inline void use(const Tensor& t, int device, bool writes, const std::string& by) {
  if (!is_ours(t) || t.numel() == 0) return;
  size_t begin = static_cast<size_t>(t.storage_offset()) * t.itemsize();
  size_t length = at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.itemsize());
  note_use(t.storage().data(), begin, begin + length, device, writes, by);
}
// What Python calls an operator, and where from, while a race is traced.
inline std::string named(const std::string& name) {
  const char* place = hear_launch ? hear_launch(name.c_str()) : nullptr;
  return place ? name + " at " + place : name;
}

// ---- factories ------------------------------------------------------------------------------------------------------
inline c10::ScalarType checked(std::optional<c10::ScalarType> dtype) {
  c10::ScalarType type = dtype.value_or(c10::get_default_dtype_as_scalartype());
  TORCH_CHECK(has_float64 || type != at::kDouble, "Required aspect fp64 is not supported on the device");
  return type;
}
inline Tensor empty_memory_format(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype,
                                  std::optional<c10::Layout>, std::optional<c10::Device> device,
                                  std::optional<bool> pin, std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard on(device.value_or(guard.getDevice()));
  auto type = checked(dtype);
  return Tensor(at::detail::empty_generic(size, &device_memory, c10::DispatchKeySet(kKey), type, format));
}
inline Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                            std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard on(device.value_or(guard.getDevice()));
  auto type = checked(dtype);
  return Tensor(at::detail::empty_strided_generic(size, stride, &device_memory, c10::DispatchKeySet(kKey), type));
}
inline void resize_bytes(const c10::Storage& storage, size_t bytes) {
  c10::DeviceGuard on(storage.device());
  auto data = device_memory.allocate(bytes);
  Locked locked;
  size_t kept = std::min(bytes, storage.nbytes());
  if (kept) {
    int d = storage.device().index();
    begin_work(d);
    note_use(storage.data(), 0, kept, d, false, "resize_");
    note_use(data.get(), 0, kept, d, true, "resize_");
    std::memcpy(seen(data.get()), seen(storage.data()), kept);
    recording.close();
  }
  storage.set_data_ptr_noswap(std::move(data));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}
inline const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat>) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  auto offset = static_cast<size_t>(self.storage_offset());
  size_t bytes = at::detail::computeStorageNbytesContiguous(size, self.itemsize(), offset);
  if (bytes > self.storage().nbytes()) resize_bytes(self.storage(), bytes);
  return self;
}
inline Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size,
                           c10::IntArrayRef stride) {
  TORCH_CHECK(source.device() == self.device(), "Attempted to set the storage of a tensor on device \"", self.device(),
              "\" to a storage on different device \"", source.device(),
              "\".  This is no longer allowed; the devices must match.");
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.data() == nullptr || (stride.empty() && !size.empty()))
    impl->set_sizes_contiguous(size);
  else
    impl->set_sizes_and_strides(size, stride);
  return self;
}
inline Tensor& set_whole_storage(Tensor& self, at::Storage source) {
  auto n = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, {n}, {1});
}
inline Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
inline Tensor& set_empty(Tensor& self) { return set_tensor(self, at::empty({0}, self.options())); }

// ---- copies ---------------------------------------------------------------------------------------------------------
// By the rules of PyTorch's own (aten/src/ATen/native/cuda/Copy.cu): which stream, what waits, what is staged.

// Within a device, or from one to another: on the stream of the source, which the other's stream waits for, and which
// waits for it.
inline void copy_on_devices(const Tensor& self, const Tensor& source, const Tensor& shaped) {
  std::string by = named("copy_");
  int from = source.device().index(), to = self.device().index();
  Locked locked;
  check_process();
  check_device(to);
  if (from != to) join(stream_clock[current_key(from)], stream_clock[current_key(to)]);
  const Clock& clock = begin_work(from);
  use(source, from, false, by);
  use(self, from, true, by);
  if (from != to) join(stream_clock[current_key(to)], clock);
  view_of(self).copy_(view_of(shaped));
  recording.close();
}
// Between a device and the host, with one layout and dtype: as bytes.
inline void copy_bytes(const Tensor& self, const Tensor& from, bool non_blocking) {
  bool to_host = is_ours(from);
  const Tensor& ours = to_host ? from : self;
  const Tensor& theirs = to_host ? self : from;
  std::string by = named("copy_");
  int d = ours.device().index();
  auto* host = static_cast<char*>(theirs.data_ptr());
  size_t bytes = theirs.nbytes();
  Locked locked;
  (to_host ? arena(d).copied_out : arena(d).copied_in) += bytes;
  check_process();
  Clock& clock = begin_work(d);
  use(ours, d, !to_host, by);
  if (non_blocking && is_pinned(host)) {
    queue_after_others(clock, host, bytes, to_host);
    char* device = seen(ours.storage().data()) + ours.storage_offset() * static_cast<int64_t>(ours.itemsize());
    char* read = to_host ? device : host;
    Copy copy{{current_key(d), clock[current_key(d)]}, to_host, host, {read, read + bytes}, to_host ? nullptr : device};
    std::memset(to_host ? host : device, kPoison, bytes);
    if (to_host)
      recording.close();
    else
      recording.close_copy(copy.bytes);
    copies.push_back(std::move(copy));
    return;
  }
  // Memory that is not pinned: the driver waits for the stream, whatever the caller asked for.
  note_wait(to_host ? "copy to the host" : "copy to the device");
  host_waits(clock);
  if (to_host)
    theirs.copy_(view_of(ours));
  else
    view_of(ours).copy_(theirs);
  recording.close();
}
inline Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.numel() == 0) return self;
  {
    Locked locked;
    calls["aten::copy_"]++;
  }
  Tensor from = source.expand_as(self);
  TORCH_CHECK((is_ours(self) || self.is_cpu()) && (is_ours(from) || from.is_cpu()), "no copies between ",
              self.device(), " and ", from.device());
  c10::DeviceGuard on(is_ours(source) ? source.device() : self.device());
  if (is_ours(self) && is_ours(source)) {
    copy_on_devices(self, source, from);
    return self;
  }
  bool same_dtype = self.scalar_type() == from.scalar_type();
  bool is_plain = self.is_conj() == from.is_conj() && self.is_neg() == from.is_neg();
  if (same_dtype && is_plain && self.strides() == from.strides() && self.is_non_overlapping_and_dense()) {
    copy_bytes(self, from, non_blocking);
    return self;
  }
  // Others are made contiguous first. A copy that does not block changes the dtype on the device, one that does on the
  // host, where it takes no memory of the device.
  Tensor staged_self, staged_from;
  if (is_ours(from) == non_blocking) {
    staged_self = self.is_contiguous() ? self : at::empty_like(self, at::MemoryFormat::Contiguous);
    staged_from = from.to(self.scalar_type()).resolve_conj().resolve_neg().contiguous();
  } else {
    staged_self = self.is_contiguous() && same_dtype ? self : at::empty(self.sizes(), self.options().dtype(from.dtype()));
    staged_from = from.resolve_conj().resolve_neg().contiguous();
  }
  copy_bytes(staged_self, staged_from, non_blocking);
  if (!staged_self.is_same(self)) self.copy_(staged_self, non_blocking);
  return self;
}
inline void record_stream(Tensor& self, c10::Stream stream) {
  device_memory.recordStream(self.storage().data_ptr(), stream);
}
inline at::Scalar local_scalar_dense(const Tensor& self) {
  std::string by = named("item");
  int d = self.device().index();
  c10::DeviceGuard on(self.device());
  Locked locked;
  check_process();
  const Clock& clock = begin_work(d);
  use(self, d, false, by);
  note_wait("item");
  recording.close();
  host_waits(clock);
  return at::_local_scalar_dense(view_of(self));
}
}  // namespace sim

// Every operator: the checks of a GPU, then the CPU's kernel on the same bytes.
#pragma once
#include "tensors.h"

#include <torch/library.h>

namespace sim {
using c10::IValue;
using Names = std::set<std::string>;

// The host reads what these computed, on a GPU, to know the size of their result or to check it.
inline const Names kWaits = {"aten::nonzero",        "aten::equal",   "aten::masked_select", "aten::_unique2",
                             "aten::unique_dim",     "aten::_unique", "aten::bincount",      "aten::unique_consecutive",
                             "aten::multinomial"};
// These take tensors of the host beside those of a device: indices, sources.
inline const Names kMixes = {"aten::index",           "aten::index_put_", "aten::_index_put_impl_", "aten::index_put",
                             "aten::_foreach_copy_", "aten::_foreach_copy", "aten::copy", "aten::set_"};
// Their kernels on the CPU draw from the CPU's default generator.
inline const Names kDraws = {"aten::native_dropout", "aten::_fused_dropout", "aten::rand",
                             "aten::randn",          "aten::randint",        "aten::randperm"};
// CUDA's kernels for these depend on the order of atomic operations: an error with use_deterministic_algorithms, by the
// list in the docstring of that function.
inline const Names kNotDeterministic = {
    "aten::avg_pool3d_backward", "aten::_adaptive_avg_pool2d_backward", "aten::_adaptive_avg_pool3d_backward",
    "aten::adaptive_max_pool2d_backward", "aten::fractional_max_pool2d_backward", "aten::fractional_max_pool3d_backward",
    "aten::max_unpool2d", "aten::max_unpool3d", "aten::upsample_linear1d_backward", "aten::upsample_bilinear2d_backward",
    "aten::upsample_bicubic2d_backward", "aten::upsample_trilinear3d_backward", "aten::reflection_pad1d_backward",
    "aten::reflection_pad2d_backward", "aten::reflection_pad3d_backward", "aten::nll_loss2d_forward",
    "aten::_ctc_loss_backward", "aten::put_", "aten::histc", "aten::grid_sampler_2d_backward",
    "aten::grid_sampler_3d_backward", "aten::kthvalue"};

struct Argument {
  const c10::Argument* declared;
  IValue* value;
  bool is_written() const { return declared->alias_info() && declared->alias_info()->isWrite(); }
  template <class Use>
  void each_tensor(Use&& use) const {
    if (value->isTensor() && value->toTensor().defined()) use(value->toTensor());
    if (value->isTensorList())
      for (const Tensor& t : value->toTensorVector())
        if (t.defined()) use(t);
    if (value->isOptionalTensorList())
      for (const std::optional<Tensor>& t : value->toOptionalTensorVector())
        if (t.has_value() && t->defined()) use(*t);
  }
};

struct Call {
  const c10::FunctionSchema& schema;
  std::string name;
  std::vector<Argument> arguments;
  std::vector<std::pair<Tensor, bool>> ours;        // and whether it is written
  std::vector<std::pair<Tensor, Tensor>> seen_as;   // ours, and what the CPU's kernel gets for it
  std::optional<c10::Device> target;
  int device = 0;

  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack) : schema(op.schema()), name(schema.name()) {
    size_t first = stack->size() - schema.arguments().size();
    for (size_t i = 0; i < schema.arguments().size(); i++)
      arguments.push_back({&schema.arguments()[i], &(*stack)[first + i]});
    Locked locked;
    calls[name]++;
    if (name.rfind("aten::", 0) != 0) missing[name]++;
  }
  const IValue* value_of(const std::string& argument) const {
    for (const Argument& a : arguments)
      if (a.declared->name() == argument) return a.value;
    return nullptr;
  }

  // The device that computes: the one of its tensors, which must be one; numbers of the host (no dimensions) may be
  // anywhere.
  void find_device() {
    bool mixes = kMixes.count(name) > 0;
    std::string other;
    for (const Argument& argument : arguments) {
      argument.each_tensor([&](const Tensor& t) {
        if (is_ours(t)) {
          if (target && *target != t.device() && other.empty()) other = t.device().str();
          if (!target) target = t.device();
          ours.emplace_back(t, argument.is_written());
        } else if (t.dim() > 0 && !t.device().is_meta()) {
          other = t.device().str();
        }
      });
      if (argument.value->isDevice() && argument.value->toDevice().type() == kType && !target)
        target = argument.value->toDevice();
    }
    TORCH_CHECK(other.empty() || ours.empty() || mixes,
                "Expected all tensors to be on the same device, but found at least two devices, ",
                target.value_or(guard.getDevice()), " and ", other, "! (when checking argument in ", name, ")");
    device = target && target->index() >= 0 ? target->index() : current_device;
  }

  // It takes its place in the stream, and uses its tensors.
  void begin() {
    std::string by = named(name);
    bool waits = kWaits.count(name) > 0;
    if (name == "aten::repeat_interleave") waits = value_of("repeats")->isTensor() && value_of("output_size")->isNone();
    // A mask becomes indices first (`nonzero`), unless one number is written: that is a fill. (Reads by a mask call
    // `nonzero` themselves.)
    if (name.rfind("aten::index_put", 0) == 0 || name == "aten::_index_put_impl_") {
      const Tensor& value = value_of("values")->toTensor();
      if (value.numel() != 1 || is_ours(value))
        for (const std::optional<Tensor>& t : value_of("indices")->toOptionalTensorVector())
          waits |= t.has_value() && is_ours(*t) && (t->scalar_type() == at::kBool || t->scalar_type() == at::kByte);
    }
    Locked locked;
    check_process();
    const Clock& clock = begin_work(device);
    for (auto& [t, writes] : ours) use(t, device, writes, by);
    if (name == breaking_operator && breaks_after-- == 0) {
      if (breaking_kills) {
        std::fprintf(stderr, "Memory access fault by GPU node-%d on address %p. Reason: Page not present or supervisor "
                     "privilege.\n", device + 1, ours.empty() ? nullptr : ours[0].first.storage().data());
        std::abort();
      }
      break_device(device);
    }
    if (!waits) return;
    note_wait(name);
    host_waits(clock);
  }
  // What it writes is there.
  static void end() {
    Locked locked;
    recording.close();
  }
  void check_determinism() const {
    if (!at::globalContext().deterministicAlgorithms()) return;
    bool alerts = kNotDeterministic.count(name) > 0;
    bool floats = !ours.empty() && (at::isFloatingType(ours[0].first.scalar_type()) || ours[0].first.is_complex());
    if (name == "aten::cumsum" || name == "aten::cumsum_") alerts = floats;
    if (name == "aten::median" || name == "aten::nanmedian") alerts = value_of("dim") != nullptr;
    if (name == "aten::bincount") alerts = value_of("weights")->isTensor();
    if (name.rfind("aten::scatter_reduce", 0) == 0) alerts = value_of("reduce")->toStringRef() == "prod";
    if (name == "aten::_embedding_bag_dense_backward") alerts = value_of("mode")->toInt() == 2;  // max
    if (alerts) at::globalContext().alertNotDeterministic(name.substr(6) + "_cuda_kernel");
  }

  // Each tensor of ours becomes a view of its bytes, each generator of the device the one inside it.
  Tensor seen_by_cpu(const Tensor& t, bool writes) {
    if (!is_ours(t)) return t;
    for (auto& [own, view] : seen_as)
      if (own.is_same(t)) return view;
    // A kernel may resize what it writes, if it is empty: not a view, then, but a tensor that is copied afterwards.
    Tensor view = writes && t.numel() == 0 ? at::empty(t.sizes(), t.options().device(at::kCPU)) : view_of(t);
    seen_as.emplace_back(t, view);
    return view;
  }
  bool takes_generator = false;
  void convert_arguments() {
    for (Argument& argument : arguments) {
      IValue& value = *argument.value;
      bool writes = argument.is_written();
      if (value.isTensor() && value.toTensor().defined()) {
        value = seen_by_cpu(value.toTensor(), writes);
      } else if (value.isTensorList()) {
        c10::List<Tensor> views;
        for (const Tensor& t : value.toTensorVector()) views.push_back(seen_by_cpu(t, writes));
        value = IValue(views);
      } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> views;
        for (const std::optional<Tensor>& t : value.toOptionalTensorVector())
          views.push_back(t.has_value() && t->defined() ? std::optional<Tensor>(seen_by_cpu(*t, writes)) : t);
        value = IValue(views);
      } else if (value.isDevice() && value.toDevice().type() == kType) {
        value = IValue(c10::Device(at::kCPU));
      } else if (value.isGenerator()) {
        takes_generator = true;
        auto given = value.toGenerator();
        TORCH_CHECK(given.device().type() == kType, "Expected a '", kType, "' device type for generator but found '",
                    given.device().type(), "'");
        TORCH_CHECK(given.device().index() == device, "a generator of ", given.device(), " for tensors of ",
                    Guard::numbered(device));  // PyTorch takes it; nobody means it
        value = IValue(inner_of(given));
      } else if (value.isNone() && argument.declared->name() == "generator") {
        takes_generator = true;
        value = IValue(inner_of(default_generator(device)));
      }
    }
  }

  // Kernels that take no generator draw from the CPU's default one: it is the device's while they run.
  void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    if (takes_generator || !kDraws.count(name)) return op.callBoxed(stack);
    static std::mutex swapped;
    std::lock_guard<std::mutex> alone(swapped);
    auto* cpu = at::detail::getDefaultCPUGenerator().unsafeGetGeneratorImpl();
    auto* own = inner_of(default_generator(device)).unsafeGetGeneratorImpl();
    auto kept = cpu->get_state();
    cpu->set_state(*own->get_state());
    op.callBoxed(stack);
    own->set_state(*cpu->get_state());
    cpu->set_state(*kept);
  }
  void write(const Tensor& own, const Tensor& value) {
    if (value.numel() == 0) return;
    Locked locked;
    use(own, device, true, name);
    view_of(own).copy_(value);
  }

  // What the kernel returned, as tensors of the device.
  Tensor own(const Tensor& result) {
    if (!result.defined() || !result.device().is_cpu()) return result;
    for (auto& [own, view] : seen_as)
      if (view.is_same(result)) return own;
    if (result.numel() && is_seen(result.const_data_ptr()))  // a view of an argument
      for (auto& [own, view] : seen_as) {
        if (own.numel() == 0) continue;
        const char* base = seen(own.storage().data());
        auto* at_ = static_cast<const char*>(result.const_data_ptr());
        if (at_ < base || at_ >= base + own.storage().nbytes()) continue;
        auto made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(own.storage()), c10::DispatchKeySet(kKey),
                                                             result.dtype());
        made.unsafeGetTensorImpl()->set_storage_offset((at_ - base) / static_cast<int64_t>(result.itemsize()));
        made.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides());
        return made;
      }
    if (ours.empty() && !target) return result;
    c10::Device on = Guard::numbered(device);
    Tensor made = result.is_non_overlapping_and_dense()
                      ? empty_strided(result.sizes(), result.strides(), result.scalar_type(), {}, on, {})
                      : empty_memory_format(result.sizes(), result.scalar_type(), {}, on, {}, {});
    write(made, result);
    return made;
  }
  void return_results(torch::jit::Stack* stack) {
    for (auto& [own, view] : seen_as)  // those that the kernel has resized
      if (view.sizes() != own.sizes()) {
        own.resize_(view.sizes());
        write(own, view);
      }
    bool is_faulty = name == faulty_operator;
    auto returned = [&](const Tensor& result) {
      Tensor made = own(result);
      if (is_faulty && is_ours(made) && made.numel() && at::isFloatingType(made.scalar_type()))
        view_of(made).mul_(faulty_factor);
      return made;
    };
    for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++) {
      IValue& value = (*stack)[i];
      if (value.isTensor()) {
        value = returned(value.toTensor());
      } else if (value.isTensorList()) {
        c10::List<Tensor> all;
        for (const Tensor& t : value.toTensorVector()) all.push_back(returned(t));
        value = IValue(all);
      }
    }
  }
};

inline void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call call(op, stack);
  call.find_device();
  c10::DeviceGuard on(Guard::numbered(call.device));
  call.check_determinism();
  call.begin();
  at::AutoDispatchBelowADInplaceOrView below;
  call.convert_arguments();
  call.run(op, stack);
  call.return_results(stack);
  call.end();
}
}  // namespace sim

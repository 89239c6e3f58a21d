// PyTorch's fused RMS norm, as CUDA and ROCm have it. A CPU build has a composite of other operators instead, which
// keeps the normalized inputs for backward; the fused operator keeps its input and one number per row. Its temporary
// tensors are registers of a GPU: here they are the host's.
#pragma once
#include "operators.h"

namespace sim {
struct RMSNormCall : Call {
  Tensor x, weight;
  std::vector<int64_t> axes;  // that are normed: the last ones

  RMSNormCall(const c10::OperatorHandle& op, torch::jit::Stack* stack) : Call(op, stack) {
    find_device();
    begin();
    x = wide("input");
    const IValue* given = value_of("weight");
    if (given->isTensor() && given->toTensor().defined()) weight = wide("weight");
    for (int64_t i = 1; i <= static_cast<int64_t>(value_of("normalized_shape")->toIntVector().size()); i++)
      axes.push_back(-i);
  }
  Tensor wide(const char* argument) const {  // in float32 at least, on the host
    Tensor view = view_of(value_of(argument)->toTensor());
    return view.scalar_type() == at::kDouble ? view : view.to(at::kFloat);
  }
  at::ScalarType type_of(const char* argument) const { return value_of(argument)->toTensor().scalar_type(); }
  void give(torch::jit::Stack* stack, const Tensor& first, const Tensor& second) {
    torch::jit::drop(*stack, arguments.size());
    torch::jit::push(*stack, first, second);
    return_results(stack);
    end();
  }
};
inline void rms_norm(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  RMSNormCall call(op, stack);
  c10::DeviceGuard on(Guard::numbered(call.device));
  at::ScalarType type = call.type_of("input");
  const IValue* eps = call.value_of("eps");
  double smallest = type == at::kDouble ? std::numeric_limits<double>::epsilon() : std::numeric_limits<float>::epsilon();
  Tensor rstd = call.x.square().mean(call.axes, true).add(eps->isNone() ? smallest : eps->toDouble()).rsqrt();
  Tensor normed = call.x * rstd;
  if (call.weight.defined()) normed.mul_(call.weight);
  call.give(stack, normed.to(type), rstd);
}
inline void rms_norm_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  RMSNormCall call(op, stack);
  c10::DeviceGuard on(Guard::numbered(call.device));
  Tensor grad = call.wide("grad_out"), rstd = call.wide("rstd");
  std::vector<bool> wanted;
  for (bool one : call.value_of("output_mask")->toBoolList()) wanted.push_back(one);
  Tensor normed = call.x * rstd, scaled = call.weight.defined() ? grad * call.weight : grad, grad_x, grad_weight;
  if (wanted[0])
    grad_x = ((scaled - normed * (scaled * normed).mean(call.axes, true)) * rstd).to(call.type_of("input"));
  if (wanted[1] && call.weight.defined()) {
    auto rows = static_cast<int64_t>(call.x.dim() - call.axes.size());
    Tensor product = grad * normed;
    grad_weight = (rows ? product.flatten(0, rows - 1).sum(0) : product).to(call.type_of("weight"));
  }
  call.give(stack, grad_x, grad_weight);
}
}  // namespace sim

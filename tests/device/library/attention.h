// PyTorch's fused attention on a GPU: which of its kernels is chosen, and each of them by the CPU's own flash kernel.
#pragma once
#include "operators.h"

#include <ATen/native/transformers/attention.h>

namespace sim {
enum Chosen : int64_t { kMath = 0, kFlash = 1, kEfficient = 2 };  // at::SDPBackend

inline bool has_groups(const Tensor& q, const Tensor& k) { return q.size(1) != k.size(1); }
// Key/value heads (B, K, T, E), each as often as its group has query heads.
inline Tensor repeated(const Tensor& t, const Tensor& q) {
  if (!has_groups(q, t)) return t;
  return t.repeat_interleave(q.size(1) / t.size(1), 1);
}
inline Tensor summed_groups(const Tensor& grad, const Tensor& t) {
  if (grad.size(1) == t.size(1)) return grad;
  return grad.reshape({t.size(0), t.size(1), grad.size(1) / t.size(1), t.size(2), t.size(3)}).sum(2);
}

// flash: 16 bits, no mask; memory-efficient: also float32 and masks without a gradient, no groups. Dropout has a kernel
// on a GPU that the CPU lacks.
inline int64_t fused_sdp_choice(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask,
                                double dropout_p, bool is_causal, std::optional<double>, bool) {
  auto& context = at::globalContext();
  bool has_mask = mask.has_value() && mask->defined();
  bool fits = fused_attention && q.dim() == 4 && k.dim() == 4 && dropout_p == 0 && q.size(3) == k.size(3) &&
              q.size(3) == v.size(3) && q.size(3) <= 256 && q.numel() > 0 && k.numel() > 0 &&
              q.scalar_type() == k.scalar_type() && q.scalar_type() == v.scalar_type();
  bool short_type = q.scalar_type() == at::kHalf || q.scalar_type() == at::kBFloat16;
  if (fits && short_type && !has_mask && context.userEnabledFlashSDP()) return kFlash;
  bool masks = !has_mask || (!mask->requires_grad() && !is_causal);
  if (fits && masks && (short_type || q.scalar_type() == at::kFloat) && !has_groups(q, k) &&
      context.userEnabledMemEfficientSDP())
    return kEfficient;
  TORCH_CHECK(context.userEnabledMathSDP(), "No available kernel. Aborting execution.");
  return kMath;
}
using Tensors3 = std::tuple<Tensor, Tensor, Tensor>;
using Tensors4 = std::tuple<Tensor, Tensor, Tensor, Tensor>;
inline Tensor random_state(const Tensor& q) { return at::empty({2}, q.options().dtype(at::kLong)); }

inline std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> flash(
    const Tensor& q, const Tensor& k, const Tensor& v, double dropout_p, bool is_causal, bool,
    std::optional<double> scale) {
  auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(q, repeated(k, q), repeated(v, q), dropout_p,
                                                                    is_causal, {}, scale);
  return {out, lse, Tensor(), Tensor(), q.size(2), k.size(2), random_state(q), random_state(q), Tensor()};
}
inline Tensors3 flash_backward(const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v,
                               const Tensor& out, const Tensor& lse, const Tensor&, const Tensor&, c10::SymInt,
                               c10::SymInt, double dropout_p, bool is_causal, const Tensor&, const Tensor&,
                               std::optional<double> scale) {
  auto [grad_q, grad_k, grad_v] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      grad_out, q, repeated(k, q), repeated(v, q), out, lse, dropout_p, is_causal, {}, scale);
  return {grad_q, summed_groups(grad_k, k), summed_groups(grad_v, v)};
}
inline Tensors4 efficient(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& bias, bool,
                          double dropout_p, bool is_causal, std::optional<double> scale) {
  auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout_p, is_causal, bias, scale);
  return {out, lse, random_state(q), random_state(q)};
}
inline Tensors4 efficient_backward(const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v,
                                   const Tensor& bias, const Tensor& out, const Tensor& lse, const Tensor&,
                                   const Tensor&, double dropout_p, std::array<bool, 4>, bool is_causal,
                                   std::optional<double> scale) {
  if (!grad_out.defined()) return {};
  std::optional<Tensor> mask = bias.defined() ? std::optional<Tensor>(bias) : std::nullopt;
  auto [grad_q, grad_k, grad_v] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      grad_out, q, k, v, out, lse, dropout_p, is_causal, mask, scale);
  return {grad_q, grad_k, grad_v, Tensor()};
}

// ---- documents of different lengths in one row ----------------------------------------------------------------------
// aten::_flash_attention_forward and _backward with borders (cum_seq), (T, H, E) each. A kernel on the device reads the
// borders: the host does not wait. The arguments differ between versions of PyTorch, so that they are taken by name.
struct Documents {
  std::vector<int64_t> begins;  // of each, and the end
  bool is_causal;
  int64_t left, right;
  std::optional<double> scale;

  explicit Documents(const Call& call) {
    const IValue* borders = call.value_of("cum_seq_q");
    TORCH_CHECK(borders->isTensor(), "the simulated GPU has _flash_attention_forward with borders alone");
    Tensor all = view_of(borders->toTensor()).to(at::kLong).contiguous();
    begins.assign(all.const_data_ptr<int64_t>(), all.const_data_ptr<int64_t>() + all.numel());
    is_causal = call.value_of("is_causal")->toBool();
    left = number(call, "window_size_left");
    right = number(call, "window_size_right");
    if (const IValue* given = call.value_of("scale"); given->isDouble()) scale = given->toDouble();
  }
  static int64_t number(const Call& call, const std::string& name) {
    const IValue* given = call.value_of(name);
    return given->isNone() ? -1 : given->toInt();
  }
  bool has_window() const { return left > 0 || right > 0; }
  std::optional<Tensor> mask(int64_t length, const Tensor& like) const {
    if (!has_window()) return {};
    Tensor row = at::arange(length).unsqueeze(1), column = at::arange(length).unsqueeze(0);
    Tensor hidden = at::zeros({length, length}, at::kBool);
    if (left >= 0) hidden.logical_or_(column < row - left);
    if (is_causal || right >= 0) hidden.logical_or_(column > row + std::max<int64_t>(right, 0));
    return at::zeros({length, length}, like.options()).masked_fill(hidden, -std::numeric_limits<double>::infinity());
  }
  template <class Each>
  void each(Each&& run) const {
    for (size_t i = 0; i + 1 < begins.size(); i++)
      if (begins[i + 1] > begins[i]) run(begins[i], begins[i + 1] - begins[i]);
  }
  bool causal() const { return (is_causal || (left < 0 && right == 0)) && !has_window(); }
  // (t, H, E) of one document as (1, H, t, E)
  static Tensor rows(const Tensor& t, int64_t begin, int64_t length) {
    return t.narrow(0, begin, length).transpose(0, 1).unsqueeze(0).contiguous();
  }
  static Tensor back(const Tensor& t) { return t.squeeze(0).transpose(0, 1); }
};
inline std::vector<Tensor> begin_documents(Call& call, std::initializer_list<const char*> tensors) {
  call.find_device();
  call.begin();
  std::vector<Tensor> views;
  for (const char* name : tensors) views.push_back(view_of(call.value_of(name)->toTensor()));
  return views;
}
inline void varlen(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call call(op, stack);
  auto views = begin_documents(call, {"query", "key", "value"});
  c10::DeviceGuard on(Guard::numbered(call.device));
  at::AutoDispatchBelowADInplaceOrView below;
  const Tensor &q = views[0], &k = views[1], &v = views[2];
  Documents documents(call);
  Tensor out = at::zeros_like(q), lse = at::zeros({q.size(1), q.size(0)}, q.options().dtype(at::kFloat));
  documents.each([&](int64_t begin, int64_t length) {
    Tensor its_q = Documents::rows(q, begin, length);
    auto [its, its_lse] = at::_scaled_dot_product_flash_attention_for_cpu(
        its_q, repeated(Documents::rows(k, begin, length), its_q), repeated(Documents::rows(v, begin, length), its_q), 0,
        documents.causal(), documents.mask(length, q), documents.scale);
    out.narrow(0, begin, length).copy_(Documents::back(its));
    lse.narrow(1, begin, length).copy_(its_lse.squeeze(0));
  });
  torch::jit::drop(*stack, call.arguments.size());
  Tensor state = at::zeros({2}, at::kLong);
  for (const Tensor& result : {call.own(out), call.own(lse), call.own(state), call.own(state.clone()), Tensor()})
    stack->push_back(result);
  call.end();
}
inline void varlen_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call call(op, stack);
  auto views = begin_documents(call, {"query", "key", "value", "grad_out", "out", "logsumexp"});
  c10::DeviceGuard on(Guard::numbered(call.device));
  at::AutoDispatchBelowADInplaceOrView below;
  const Tensor &q = views[0], &k = views[1], &v = views[2];
  Documents documents(call);
  Tensor grad_q = at::zeros_like(q), grad_k = at::zeros_like(k), grad_v = at::zeros_like(v);
  documents.each([&](int64_t begin, int64_t length) {
    Tensor its_q = Documents::rows(q, begin, length), its_k = Documents::rows(k, begin, length);
    Tensor its_v = Documents::rows(v, begin, length);
    Tensor its_lse = views[5].narrow(1, begin, length).t().contiguous().t().unsqueeze(0);
    auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        Documents::rows(views[3], begin, length), its_q, repeated(its_k, its_q), repeated(its_v, its_q),
        Documents::rows(views[4], begin, length), its_lse, 0, documents.causal(), documents.mask(length, q),
        documents.scale);
    grad_q.narrow(0, begin, length).copy_(Documents::back(dq));
    grad_k.narrow(0, begin, length).copy_(Documents::back(summed_groups(dk, its_k)));
    grad_v.narrow(0, begin, length).copy_(Documents::back(summed_groups(dv, its_v)));
  });
  torch::jit::drop(*stack, call.arguments.size());
  for (const Tensor& result : {call.own(grad_q), call.own(grad_k), call.own(grad_v)}) stack->push_back(result);
  call.end();
}
}  // namespace sim

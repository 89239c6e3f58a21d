"""A mixture of experts: a router chooses a few of many MLPs for each token, which a product per expert computes.

Tokens are sorted by their experts, so that each expert multiplies consecutive rows once; every sum is over a fixed
order, and the same tokens give the same numbers, bit for bit. What an expert computes of a token does not depend on the
other tokens.

N tokens, D width, E experts, K that a token meets, S = N K pairs of a token and an expert, O outputs and I inputs of a
matrix, F width inside an expert.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from bloomery.facts.config import Experts, ModelConfig
from bloomery.facts.counting import Shape
from bloomery.model.norms import widened, working_dtype

OSS_SLOPE = 1.702  # of the sigmoid in gpt-oss' activation


class Choice(NamedTuple):
    """What a router decides. `scores_NE` of all experts, float32 at least; `experts_NK`: the chosen ones, int64."""

    logits_NE: Tensor
    scores_NE: Tensor
    experts_NK: Tensor
    weights_NK: Tensor


class RouterLoad(NamedTuple):
    """Sums over the real tokens of a layer, float32: what balance losses and reports are made of.

    `counts_E`: how many tokens chose each expert. `scores_E`: the sum of each expert's probability, with a gradient.
    `squares`: the sum of the squared logsumexp of the logits, with a gradient. `entropy`: the sum of each token's.
    """

    tokens: Tensor
    counts_E: Tensor
    scores_E: Tensor
    squares: Tensor
    entropy: Tensor


class Router(nn.Module):
    """The scores of all experts and the choice among them, in float32 at least; its product, too."""

    bias: nn.Parameter | None
    e_score_correction_bias: nn.Parameter | None

    def __init__(self, config: ModelConfig, experts: Experts) -> None:
        super().__init__()
        self.facts = experts
        self.weight = nn.Parameter(torch.empty(experts.count, config.hidden_size))
        self.bias = nn.Parameter(torch.empty(experts.count)) if experts.bias else None
        self.e_score_correction_bias = None
        if experts.choice_bias:
            self.e_score_correction_bias = nn.Parameter(
                torch.empty(experts.count), requires_grad=False
            )

    def forward(self, x_ND: Tensor) -> Choice:
        facts = self.facts
        wide_ND = widened(x_ND)
        with torch.autocast(x_ND.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.to(wide_ND.dtype)
            logits_NE = F.linear(wide_ND, self.weight.to(wide_ND.dtype), bias)
        scores_NE = logits_NE.sigmoid() if facts.scores == "sigmoid" else logits_NE.softmax(-1)
        experts_NK = self.chosen(scores_NE.detach())
        if facts.softmax_of_chosen:
            weights_NK = logits_NE.gather(1, experts_NK).softmax(-1)
        else:
            weights_NK = scores_NE.gather(1, experts_NK)
        if facts.normalize:
            weights_NK = weights_NK / (weights_NK.sum(-1, keepdim=True) + facts.least_sum)
        return Choice(logits_NE, scores_NE, experts_NK, weights_NK * facts.weight_scale)

    def chosen(self, scores_NE: Tensor) -> Tensor:
        """int64 [N, K]: the experts of each token, the best first."""
        facts = self.facts
        if self.e_score_correction_bias is not None:
            scores_NE = scores_NE + self.e_score_correction_bias
        if facts.groups > 1:
            scores_NGe = scores_NE.unflatten(1, (facts.groups, -1))
            group_scores_NG = scores_NGe.topk(facts.best_of_group, dim=-1).values.sum(-1)
            best_groups = group_scores_NG.topk(facts.groups_per_token, dim=-1).indices
            is_open_NG = torch.zeros_like(group_scores_NG, dtype=torch.bool).scatter_(
                1, best_groups, True
            )
            scores_NE = scores_NGe.masked_fill(~is_open_NG[..., None], -torch.inf).flatten(1)
        return scores_NE.topk(facts.per_token, dim=-1).indices


class ExpertMLPs(nn.Module):
    """The experts of a layer, stacked. Gate and up are one matrix, the rows of gate first."""

    gate_up_proj_bias: nn.Parameter | None
    down_proj_bias: nn.Parameter | None

    def __init__(
        self, config: ModelConfig, experts: Experts, activation: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.facts = experts
        self.gated = config.gated_mlp
        self.activate = activation
        width = config.hidden_size
        inner = experts.width * (2 if config.gated_mlp else 1)
        self.gate_up_proj = nn.Parameter(torch.empty(experts.count, inner, width))
        self.gate_up_proj_bias = None
        if experts.bias:
            self.gate_up_proj_bias = nn.Parameter(torch.empty(experts.count, inner))
        self.down_proj = nn.Parameter(torch.empty(experts.count, width, experts.width))
        self.down_proj_bias = None
        if experts.bias:
            self.down_proj_bias = nn.Parameter(torch.empty(experts.count, width))

    def forward(self, x_ND: Tensor, choice: Choice) -> Tensor:
        """[N, D]: for each token the weighted sum of what its experts make of it."""
        order_S, place_S, ends_E = sorted_by_expert(choice.experts_NK, self.facts.count)
        rows_SD = _Sorted.apply(x_ND, order_S, place_S)  # type: ignore[no-untyped-call]  # torch's `apply`
        inner_SF = self.activated(
            grouped_linear(rows_SD, self.gate_up_proj, self.gate_up_proj_bias, ends_E)
        )
        outputs_SD = grouped_linear(inner_SF, self.down_proj, self.down_proj_bias, ends_E)
        outputs_SD = _Unsorted.apply(outputs_SD, order_S, place_S)  # type: ignore[no-untyped-call]
        outputs_NKD = outputs_SD.unflatten(0, choice.experts_NK.shape)
        weights_NK = choice.weights_NK.to(outputs_NKD.dtype)
        summed: Tensor = (outputs_NKD * weights_NK[..., None]).sum(1)
        return summed

    def activated(self, x: Tensor) -> Tensor:
        if not self.gated:
            return self.activate(x)
        gate, up = x.chunk(2, dim=-1)
        if self.facts.clamp is None:
            return self.activate(gate) * up
        # gpt-oss: openai/gpt-oss, gpt_oss/torch/model.py, `swiglu`
        gate = gate.clamp(max=self.facts.clamp)
        up = up.clamp(-self.facts.clamp, self.facts.clamp)
        return gate * torch.sigmoid(OSS_SLOPE * gate) * (up + 1)


class MixtureOfExperts(nn.Module):
    """In place of an MLP: the experts that the router chooses, and beside them one that every token meets."""

    def __init__(
        self,
        config: ModelConfig,
        experts: Experts,
        activation: Callable[[Tensor], Tensor],
        shared_expert: nn.Module | None,
    ) -> None:
        super().__init__()
        self.shared_expert = shared_expert
        self.shared_expert_gate = None
        if experts.shared_gate:
            self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False)
        self.gate = Router(config, experts)
        self.experts = ExpertMLPs(config, experts, activation)

    def forward(self, x_BTD: Tensor, is_real_BT: Tensor | None) -> tuple[Tensor, RouterLoad | None]:
        """[B, T, D], and in training the load of the experts; `is_real_BT`: no padding. None: every token is real."""
        x_ND = x_BTD.flatten(0, -2)
        choice: Choice = self.gate(x_ND)
        y_BTD: Tensor = self.experts(x_ND, choice).view_as(x_BTD)
        if self.shared_expert is not None:
            shared_BTD = self.shared_expert(x_BTD)
            if self.shared_expert_gate is not None:
                shared_BTD = shared_BTD * self.shared_expert_gate(x_BTD).sigmoid()
            y_BTD = y_BTD + shared_BTD
        if not self.training:
            return y_BTD, None
        return y_BTD, load_of(choice, None if is_real_BT is None else is_real_BT.flatten())


def load_of(choice: Choice, is_real_N: Tensor | None) -> RouterLoad:
    """The sums of a layer over its real tokens. Probabilities of sigmoids are their shares of a token's sum."""
    scores_NE = choice.scores_NE
    probabilities_NE = scores_NE / scores_NE.sum(-1, keepdim=True)
    logsums_N = choice.logits_NE.logsumexp(-1)
    is_chosen_NE = torch.zeros_like(scores_NE).scatter_(1, choice.experts_NK, 1.0)
    real_N = torch.ones_like(logsums_N) if is_real_N is None else is_real_N.to(logsums_N.dtype)
    known_NE = probabilities_NE.detach()
    return RouterLoad(
        tokens=real_N.sum(),
        counts_E=real_N @ is_chosen_NE,
        scores_E=real_N @ probabilities_NE,
        squares=real_N @ logsums_N.square(),
        entropy=-(real_N @ torch.special.xlogy(known_NE, known_NE).sum(-1)),
    )


def sorted_by_expert(experts_NK: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The order of pairs by their expert, int64 [S]; the place of each pair in it; and where the rows of each expert
    end, int32 [E].
    """
    experts_S = experts_NK.flatten()
    order_S = experts_S.argsort(stable=True)
    place_S = torch.empty_like(order_S).scatter_(
        0, order_S, torch.arange(len(order_S), device=order_S.device)
    )
    # A search in the sorted experts, which the host need not wait for.
    numbers_E = torch.arange(count, device=experts_S.device)
    ends_E = torch.searchsorted(experts_S[order_S], numbers_E, right=True, out_int32=True)
    return order_S, place_S, ends_E


class _Sorted(torch.autograd.Function):
    """x [N, D] to the rows [S, D] of the sorted pairs. Backward adds the K rows of a token in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, order_S: Tensor, place_S: Tensor) -> Tensor:
        ctx.save_for_backward(place_S)
        ctx.tokens = len(x_ND)
        per_token = len(order_S) // len(x_ND)
        return x_ND[order_S // per_token]

    @staticmethod
    def backward(ctx: Any, grad_SD: Tensor) -> tuple[Tensor, None, None]:
        (place_S,) = ctx.saved_tensors
        return grad_SD[place_S].unflatten(0, (ctx.tokens, -1)).sum(1), None, None


class _Unsorted(torch.autograd.Function):
    """Sorted rows [S, D] in the order of the pairs."""

    @staticmethod
    def forward(ctx: Any, x_SD: Tensor, order_S: Tensor, place_S: Tensor) -> Tensor:
        ctx.save_for_backward(order_S)
        return x_SD[place_S]

    @staticmethod
    def backward(ctx: Any, grad_SD: Tensor) -> tuple[Tensor, None, None]:
        (order_S,) = ctx.saved_tensors
        return grad_SD[order_S], None, None


def grouped_linear(
    x_SI: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None, ends_E: Tensor
) -> Tensor:
    """[S, O]: the rows up to `ends_E` of each expert times its matrix, in the dtype that autocast gives products."""
    dtype = working_dtype(x_SI)
    result: Tensor = _grouped(x_SI.to(dtype), weight_EOI, bias_EO, ends_E)
    return result


def _spans(ends_E: Tensor) -> list[tuple[int, int, int]]:
    """(expert, first row, end) of the experts that have rows. The host waits for a device here."""
    ends = ends_E.tolist()
    starts = [0, *ends[:-1]]
    return [
        (expert, start, end)
        for expert, (start, end) in enumerate(zip(starts, ends, strict=True))
        if start < end
    ]


@torch.library.custom_op("bloomery::grouped_linear", mutates_args=())
def _grouped(x_SI: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None, ends_E: Tensor) -> Tensor:
    with torch.autocast(x_SI.device.type, enabled=False):
        result_SO = x_SI.new_empty(len(x_SI), weight_EOI.shape[1])
        for expert, start, end in _spans(ends_E):
            matrix = weight_EOI[expert].to(x_SI.dtype)
            bias = None if bias_EO is None else bias_EO[expert].to(x_SI.dtype)
            result_SO[start:end] = F.linear(x_SI[start:end], matrix, bias)
        return result_SO


@torch.library.custom_op("bloomery::grouped_linear_inputs", mutates_args=())
def _grouped_inputs(grad_SO: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """The gradient of the rows."""
    with torch.autocast(grad_SO.device.type, enabled=False):
        grad_SI = grad_SO.new_empty(len(grad_SO), weight_EOI.shape[2])
        for expert, start, end in _spans(ends_E):
            torch.mm(
                grad_SO[start:end], weight_EOI[expert].to(grad_SO.dtype), out=grad_SI[start:end]
            )
        return grad_SI


@torch.library.custom_op("bloomery::grouped_linear_weights", mutates_args=())
def _grouped_weights(grad_SO: Tensor, x_SI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """The gradient of the matrices, 0 of an expert without rows, in their dtype."""
    with torch.autocast(grad_SO.device.type, enabled=False):
        grad_EOI = torch.zeros_like(weight_EOI)
        for expert, start, end in _spans(ends_E):
            grad_EOI[expert] = grad_SO[start:end].t() @ x_SI[start:end]
        return grad_EOI


class _Context(Protocol):
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    bias: Tensor | None

    def save_for_backward(self, *tensors: Tensor) -> None: ...


def _save(ctx: _Context, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    x_SI, weight_EOI, bias_EO, ends_E = inputs
    ctx.save_for_backward(x_SI, weight_EOI, ends_E)
    ctx.bias = bias_EO


def _differentiate(ctx: _Context, grad_SO: Tensor) -> tuple[Tensor | None, ...]:
    x_SI, weight_EOI, ends_E = ctx.saved_tensors
    needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
    grad_SO = grad_SO.contiguous()
    grad_x = _grouped_inputs(grad_SO, weight_EOI, ends_E) if needs_x else None
    grad_weight = None
    if needs_weight:
        grad_weight = _grouped_weights(grad_SO, x_SI, weight_EOI, ends_E)
    grad_bias = None
    if needs_bias and ctx.bias is not None:
        # The sum of an expert's rows is its product with ones.
        ones = grad_SO.new_ones(len(grad_SO), 1)
        stack = ctx.bias[..., None]
        grad_bias = _grouped_weights(grad_SO, ones, stack, ends_E).squeeze(-1)
    return grad_x, grad_weight, grad_bias, None


@_grouped.register_fake
def _grouped_fake(
    x_SI: Tensor, weight_EOI: Tensor, _bias_EO: Tensor | None, _ends_E: Tensor
) -> Tensor:
    return x_SI.new_empty(len(x_SI), weight_EOI.shape[1])


@_grouped_inputs.register_fake
def _grouped_inputs_fake(grad_SO: Tensor, weight_EOI: Tensor, _ends_E: Tensor) -> Tensor:
    return grad_SO.new_empty(len(grad_SO), weight_EOI.shape[2])


@_grouped_weights.register_fake
def _grouped_weights_fake(
    _grad_SO: Tensor, _x_SI: Tensor, weight_EOI: Tensor, _ends_E: Tensor
) -> Tensor:
    return torch.empty_like(weight_EOI)


_grouped.register_autograd(_differentiate, setup_context=_save)


@register_flop_formula(torch.ops.bloomery.grouped_linear)
def _flops(x: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    """Of each row with one matrix, as torch counts products."""
    return 2 * x[0] * weight[1] * weight[2]


@register_flop_formula(torch.ops.bloomery.grouped_linear_inputs)
def _flops_of_inputs(grad: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    return 2 * grad[0] * weight[1] * weight[2]


@register_flop_formula(torch.ops.bloomery.grouped_linear_weights)
def _flops_of_weights(grad: Shape, x: Shape, *_: Any, **__: Any) -> int:
    return 2 * grad[0] * grad[1] * x[1]

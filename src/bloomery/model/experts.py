"""A mixture of experts: a router chooses a few of many MLPs for each token, which a product per expert computes.

Tokens are sorted by their experts, so that each expert multiplies consecutive rows once; every sum is over a fixed
order, and the same tokens give the same numbers, bit for bit. What an expert computes of a token does not depend on the
other tokens.

N tokens, D width, E experts, K that a token meets, S = N K pairs of a token and an expert, O outputs and I inputs of a
matrix, F width inside an expert.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from bloomery.core.device import multiplies_groups
from bloomery.facts.config import Experts, ModelConfig
from bloomery.facts.counting import Shape
from bloomery.model import compiled_pointwise
from bloomery.model.io.parameters import local
from bloomery.model.norms import RMSNorm, widened, working_dtype


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


NO_LOADS: Mapping[int, RouterLoad] = MappingProxyType({})  # by layer


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
            shape = (1, experts.count) if experts.boxed_choice_bias else (experts.count,)
            self.e_score_correction_bias = nn.Parameter(torch.empty(shape), requires_grad=False)
        if experts.normed_router:
            width = config.hidden_size
            self.norm = RMSNorm(width, config.norm_eps, unit_offset=False, has_weight=False)
            self.scale = nn.Parameter(torch.empty(width))
            self.per_expert_scale = nn.Parameter(torch.empty(experts.count))

    def forward(self, x_ND: Tensor) -> Choice:
        facts = self.facts
        if facts.normed_router:
            x_ND = self.norm(x_ND, torch.promote_types(x_ND.dtype, torch.float32))
            x_ND = x_ND * self.scale.to(x_ND.dtype) * x_ND.shape[-1] ** -0.5
        with torch.autocast(x_ND.device.type, enabled=False):
            logits_NE: Tensor = _WideProduct.apply(x_ND, self.weight)  # type: ignore[no-untyped-call]  # torch's `apply`
            if self.bias is not None:
                logits_NE = logits_NE + self.bias.to(logits_NE.dtype)
        scores_NE = logits_NE.sigmoid() if facts.scores == "sigmoid" else logits_NE.softmax(-1)
        experts_NK = self.chosen(scores_NE.detach())
        if torch.is_grad_enabled():
            experts_NK = _kept_choice(experts_NK)
        if facts.softmax_of_chosen:
            weights_NK = logits_NE.gather(1, experts_NK).softmax(-1)
        else:
            weights_NK = scores_NE.gather(1, experts_NK)
        if facts.normalize:
            sums_N1 = weights_NK.sum(-1, keepdim=True)
            least = facts.least_sum
            weights_NK = weights_NK / (
                sums_N1.clamp(min=least) if facts.clamps_sum else sums_N1 + least
            )
        weights_NK = weights_NK * facts.weight_scale
        if facts.normed_router:
            weights_NK = weights_NK * self.per_expert_scale.to(weights_NK.dtype)[experts_NK]
        return Choice(logits_NE, scores_NE, experts_NK, weights_NK)

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


class Journey(Protocol):
    """The way of the rows of one forward to the ranks that hold their experts, and back.

    `experts_R`: of each row that arrives here, its expert among those of this rank, int64.
    """

    experts_R: Tensor

    def there(self, x_S: Tensor) -> Tensor:
        """Rows [S, ...] in the order of their experts to those that arrive here, [R, ...]."""

    def back(self, x_R: Tensor) -> Tensor:
        """The way back, [S, ...]."""


class ExpertExchange(Protocol):
    """Of the `size` ranks that divide the experts of each layer (`parallel.expert`)."""

    size: int

    def begin(self, ends_E: Tensor) -> Journey:
        """`ends_E`: where the rows of each expert end, int32. The host waits for the counts of all ranks."""


class Arrivals(Protocol):
    """The matrices that a forward multiplies, where they are still being copied (`parallel.streamed_experts`).

    `ends_E`: where the rows of each expert end, int32, on the host.
    """

    ends_E: Tensor

    def wait(self, stack: str, expert: int) -> None:
        """Work that is queued from now on may read the matrix of an expert."""


class ExpertMLPs(nn.Module):
    """The experts of a layer, stacked. Gate and up are one matrix, the rows of gate first.

    `exchange`: where ranks divide the experts, each has some of every stack. `arrivals`: where the matrices of the next
    forward arrive one by one; it keeps nothing for backward.
    """

    exchange: ExpertExchange | None = None
    arrivals: Arrivals | None = None
    gate_up_proj_bias: nn.Parameter | None
    down_proj_bias: nn.Parameter | None

    def __init__(
        self,
        config: ModelConfig,
        experts: Experts,
        activation: Callable[[Tensor], Tensor],
        backend: str = "math",
    ) -> None:
        super().__init__()
        self.facts = experts
        has_compiled_form = config.activation == "silu" or experts.clamp is not None
        self.fuses_gate = backend == "compiled" and config.gated_mlp and has_compiled_form
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
        # By the name of a stack: its numbers where they are quantized, and what an adapter adds to its products.
        self.quantized = nn.ModuleDict()
        self.lora = nn.ModuleDict()

    def forward(self, x_ND: Tensor, choice: Choice) -> Tensor:
        """[N, D]: for each token the weighted sum of what its experts make of it."""
        if self.exchange is None:
            return self.mixed(x_ND, choice.experts_NK, choice.weights_NK)

        # A token goes to each of its experts as a row with one expert and its weight. The rows come back weighted, and
        # are added in the order of one rank.
        pairs = sorted_by_expert(choice.experts_NK, self.facts.count)
        journey = self.exchange.begin(pairs.ends_E)
        rows_SD = _Sorted.apply(x_ND.to(working_dtype(x_ND)), pairs)  # type: ignore[no-untyped-call]  # torch's `apply`
        weights_S1 = choice.weights_NK.flatten()[pairs.order_S][:, None]
        y_RD = self.mixed(
            journey.there(rows_SD), journey.experts_R[:, None], journey.there(weights_S1)
        )
        y_ND: Tensor = _Summed.apply(journey.back(y_RD), pairs)  # type: ignore[no-untyped-call]  # torch's `apply`
        return y_ND

    def mixed(self, x_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor) -> Tensor:
        """[N, D]: of experts that are here.

        Weights multiply what enters the last product, which is linear: its results need not be kept for them.
        """
        ranks = 1 if self.exchange is None else self.exchange.size
        pairs = sorted_by_expert(experts_NK, self.facts.count // ranks)
        weights_S = weights_NK.flatten()[pairs.order_S]
        gate_up_SF = self.product(
            x_ND, "gate_up_proj", pairs, self.gate_up_proj_bias, is_sorted=False
        )
        inner_SF = self.weighted(gate_up_SF, weights_S)
        outputs_SD = self.product(inner_SF, "down_proj", pairs)
        y_ND: Tensor = _Summed.apply(outputs_SD, pairs)  # type: ignore[no-untyped-call]  # torch's `apply`
        if self.down_proj_bias is not None:
            bias_ND = self._weighted_bias(local(self.down_proj_bias), experts_NK, weights_NK)
            y_ND = y_ND + bias_ND.to(y_ND.dtype)
        return y_ND

    def product(
        self,
        x: Tensor,
        stack: str,
        pairs: "Pairs",
        bias_EO: Tensor | None = None,
        *,
        is_sorted: bool = True,
    ) -> Tensor:
        """`grouped_linear` by the stack of this name, quantized or not, and its adapter.

        The only place where a stack is multiplied.
        """
        bias_EO = None if bias_EO is None else local(bias_EO)
        y_SO: Tensor
        if self.arrivals is not None:
            y_SO = self._product_by_arrival(
                x, stack, pairs, bias_EO, self.arrivals, is_sorted=is_sorted
            )
        elif stack in self.quantized:
            y_SO = self.quantized[stack](x, pairs, bias_EO, is_sorted=is_sorted)
        else:
            weight_EOI = local(getattr(self, stack))
            y_SO = grouped_linear(x, weight_EOI, pairs, bias_EO, is_sorted=is_sorted)
        if stack in self.lora:
            y_SO = self.lora[stack](y_SO, x, pairs, is_sorted=is_sorted)
        return y_SO

    def _product_by_arrival(
        self,
        x: Tensor,
        stack: str,
        pairs: "Pairs",
        bias_EO: Tensor | None,
        arrivals: Arrivals,
        *,
        is_sorted: bool,
    ) -> Tensor:
        """One expert after the other, also where a kernel would multiply all at once."""
        dtype = working_dtype(x)
        quantized: Any = self.quantized[stack] if stack in self.quantized else None  # noqa: SIM401  # no dict
        weight_EOI = None if quantized is not None else local(getattr(self, stack))

        def matrix_of(expert: int) -> Tensor:
            arrivals.wait(stack, expert)
            if weight_EOI is not None:
                return weight_EOI[expert].to(dtype)
            matrix_OI: Tensor = quantized.matrix(expert, dtype)
            return matrix_OI

        with torch.autocast(x.device.type, enabled=False):
            return products_by_expert(
                x.to(dtype),
                matrix_of,
                quantized.stored.outputs if weight_EOI is None else weight_EOI.shape[1],
                bias_EO,
                arrivals.ends_E,
                pairs.order_S,
                0 if is_sorted else pairs.per_token,
            )

    @staticmethod
    def _weighted_bias(bias_ED: Tensor, experts_NK: Tensor, weights_NK: Tensor) -> Tensor:
        """[N, D]: the biases of each token's experts times their weights."""
        weights_NE = weights_NK.new_zeros(len(weights_NK), len(bias_ED))
        weights_NE = weights_NE.scatter(1, experts_NK, weights_NK)
        with torch.autocast(bias_ED.device.type, enabled=False):
            return weights_NE @ bias_ED.to(weights_NE.dtype)

    def weighted(self, x_SF: Tensor, weights_S: Tensor) -> Tensor:
        """The activation of sorted rows times their weights. Backward computes it again: its input alone is kept."""
        if self.fuses_gate and compiled_pointwise.can_weigh(x_SF, weights_S):
            if self.facts.clamp is None:
                return compiled_pointwise.weighted_gate(x_SF, weights_S)
            return compiled_pointwise.weighted_gate(
                x_SF, weights_S, limit=self.facts.clamp, slope=self.facts.slope, offset=1.0
            )
        inner_SF: Tensor = _Weighted.apply(x_SF, weights_S, self.activated)  # type: ignore[no-untyped-call]  # torch's `apply`
        return inner_SF

    def activated(self, x: Tensor) -> Tensor:
        if not self.gated:
            return self.activate(x)
        gate, up = x.chunk(2, dim=-1)
        if self.facts.clamp is None:
            return self.activate(gate) * up
        # gpt-oss: openai/gpt-oss, gpt_oss/torch/model.py, `swiglu`
        gate = gate.clamp(max=self.facts.clamp)
        up = up.clamp(-self.facts.clamp, self.facts.clamp)
        return gate * torch.sigmoid(self.facts.slope * gate) * (up + 1)


class MixtureOfExperts(nn.Module):
    """In place of an MLP: the experts that the router chooses, and beside them one that every token meets."""

    def __init__(
        self,
        config: ModelConfig,
        experts: Experts,
        activation: Callable[[Tensor], Tensor],
        shared_expert: nn.Module | None,
        backend: str = "math",
    ) -> None:
        super().__init__()
        self.shared_expert = shared_expert
        self.shared_expert_gate = None
        if experts.shared_gate:
            self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False)
        self.gate = Router(config, experts)
        self.experts = ExpertMLPs(config, experts, activation, backend)

    def forward(self, x_BTD: Tensor, is_real_BT: Tensor | None) -> tuple[Tensor, RouterLoad | None]:
        """[B, T, D], and the load of the experts over the tokens that are no padding; None where nobody asks for it."""
        y_BTD, load = self.chosen(x_BTD, x_BTD, is_real_BT)
        return (y_BTD if self.shared_expert is None else y_BTD + self.shared(x_BTD)), load

    def chosen(
        self, x_BTD: Tensor, routed_BTD: Tensor, is_real_BT: Tensor | None
    ) -> tuple[Tensor, RouterLoad | None]:
        """What the experts make of x that the router chooses for `routed_BTD`, and their load."""
        choice: Choice = self.gate(routed_BTD.flatten(0, -2))
        y_BTD: Tensor = self.experts(x_BTD.flatten(0, -2), choice).view_as(x_BTD)
        return y_BTD, None if is_real_BT is None else load_of(choice, is_real_BT.flatten())

    def shared(self, x_BTD: Tensor) -> Tensor:
        """What the expert makes that every token meets."""
        assert self.shared_expert is not None
        y_BTD: Tensor = self.shared_expert(x_BTD)
        if self.shared_expert_gate is not None:
            y_BTD = y_BTD * self.shared_expert_gate(x_BTD).sigmoid()
        return y_BTD


def load_of(choice: Choice, is_real_N: Tensor) -> RouterLoad:
    """The sums of a layer over its real tokens. Probabilities of sigmoids are their shares of a token's sum."""
    # Half precision would round counts from 257 on.
    with torch.autocast(is_real_N.device.type, enabled=False):
        scores_NE = choice.scores_NE
        probabilities_NE = scores_NE / scores_NE.sum(-1, keepdim=True)
        logsums_N = choice.logits_NE.logsumexp(-1)
        is_chosen_NE = torch.zeros_like(scores_NE).scatter_(1, choice.experts_NK, 1.0)
        real_N = is_real_N.to(logsums_N.dtype)
        known_NE = probabilities_NE.detach()
        return RouterLoad(
            tokens=real_N.sum(),
            counts_E=summed_by(real_N, is_chosen_NE),
            scores_E=summed_by(real_N, probabilities_NE),
            squares=real_N.dot(logsums_N.square()),
            entropy=-real_N.dot(torch.special.xlogy(known_NE, known_NE).sum(-1)),
        )


@torch.library.custom_op("bloomery::kept_choice", mutates_args=())
def _kept_choice(experts_NK: Tensor) -> Tensor:
    """A copy, which activation checkpointing keeps (`parallel.apply`): a recomputation whose scores are rounded in
    another way would send a token to other experts than the forward did, and the gradient would be of neither.
    """
    return experts_NK.clone()


@_kept_choice.register_fake
def _kept_choice_fake(experts_NK: Tensor) -> Tensor:
    return torch.empty_like(experts_NK)


def summed_by(weights_N: Tensor, values_NE: Tensor) -> Tensor:
    """[E]. torch's product of a vector changes its result in place, which selective checkpointing refuses."""
    return (weights_N[None] @ values_NE)[0]


class Pairs(NamedTuple):
    """Pairs of a token and an expert, sorted by expert.

    `order_S`: the pairs in that order, int64, pair s being of token s // K; `place_S`: where each pair is in it;
    `ends_E`: where the rows of each expert end, int32.
    """

    order_S: Tensor
    place_S: Tensor
    ends_E: Tensor
    per_token: int

    @property
    def tokens_S(self) -> Tensor:
        return self.order_S // self.per_token


def sorted_by_expert(experts_NK: Tensor, count: int) -> Pairs:
    """The pairs of a token are in the order in which they were chosen, those of an expert in that of the tokens."""
    experts_S = experts_NK.flatten()
    order_S = experts_S.argsort(stable=True)
    place_S = torch.empty_like(order_S).scatter_(
        0, order_S, torch.arange(len(order_S), device=order_S.device)
    )
    # A search in the sorted experts, which the host need not wait for.
    numbers_E = torch.arange(count, device=experts_S.device)
    ends_E = torch.searchsorted(experts_S[order_S], numbers_E, right=True, out_int32=True)
    return Pairs(order_S, place_S, ends_E, experts_NK.shape[1])


class _Sorted(torch.autograd.Function):
    """Rows of tokens [N, D] to those of the sorted pairs [S, D]."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, pairs: Pairs) -> Tensor:
        ctx.pairs = pairs
        return x_ND.index_select(0, pairs.tokens_S)

    @staticmethod
    def backward(ctx: Any, grad_SD: Tensor) -> tuple[Tensor, None]:
        return summed(grad_SD, ctx.pairs), None


class _Summed(torch.autograd.Function):
    """Sorted rows [S, D] to the sum of each token's K rows [N, D], in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x_SD: Tensor, pairs: Pairs) -> Tensor:
        ctx.pairs = pairs
        return summed(x_SD, pairs)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None]:
        return grad_ND.index_select(0, ctx.pairs.tokens_S), None


def summed(x_SD: Tensor, pairs: Pairs) -> Tensor:
    """Sorted rows [S, D] to the sum over the pairs of each token, [N, D]."""
    is_eager = not torch.compiler.is_compiling()
    if is_eager and x_SD.device.type == "cpu" and x_SD.dtype == torch.float32:
        # The same numbers in the same order, bit for bit, without a copy of all rows; torch's compiler makes none.
        place_NK = pairs.place_S.view(-1, pairs.per_token)
        return F.embedding_bag(place_NK, x_SD, mode="sum")
    rows_NKD: Tensor = x_SD.index_select(0, pairs.place_S).unflatten(0, (-1, pairs.per_token))
    return rows_NKD.sum(1)


class _Weighted(torch.autograd.Function):
    """`ExpertMLPs.weighted` by PyTorch."""

    @staticmethod
    def forward(
        ctx: Any, x_SF: Tensor, weights_S: Tensor, activated: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.save_for_backward(x_SF, weights_S)
        ctx.activated = activated
        return activated(x_SF) * weights_S[:, None].to(x_SF.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SF: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x_SF, weights_S = ctx.saved_tensors
        with torch.enable_grad():
            x_SF = x_SF.detach().requires_grad_()
            inner_SF = ctx.activated(x_SF)
        grad_weights = None
        if ctx.needs_input_grad[1]:
            products_SF = widened(grad_SF) * widened(inner_SF.detach())
            grad_weights = products_SF.sum(-1).to(weights_S.dtype)
        (grad_x,) = torch.autograd.grad(inner_SF, x_SF, grad_SF * weights_S[:, None].to(x_SF.dtype))
        return grad_x, grad_weights, None


class _WideProduct(torch.autograd.Function):
    """x W^T in float32 at least; x is kept as it came."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_ED: Tensor) -> Tensor:
        ctx.save_for_backward(x_ND, weight_ED)
        wide_ND = widened(x_ND)
        return F.linear(wide_ND, weight_ED.to(wide_ND.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NE: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_ND, weight_ED = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad
        grad_x = (grad_NE @ weight_ED.to(grad_NE.dtype)).to(x_ND.dtype) if needs_x else None
        grad_weight = None
        if needs_weight:
            grad_weight = (grad_NE.t() @ widened(x_ND)).to(weight_ED.dtype)
        return grad_x, grad_weight


def grouped_linear(
    x: Tensor,
    weight_EOI: Tensor,
    pairs: Pairs,
    bias_EO: Tensor | None = None,
    *,
    is_sorted: bool = True,
) -> Tensor:
    """[S, O]: each row times the matrix of its expert, in the dtype that autocast gives products.

    x: the rows of the sorted pairs [S, I]; with `is_sorted=False` those of tokens [N, I], of which each expert takes
    its own: no sorted copy is kept.
    """
    per_token = 0 if is_sorted else pairs.per_token
    result: Tensor = _grouped(
        x.to(working_dtype(x)),
        weight_EOI,
        bias_EO,
        pairs.ends_E,
        pairs.order_S,
        pairs.place_S,
        per_token,
    )
    return result


# Bytes of which `grouped_mm` takes rows and strides.
GROUPED_ALIGNMENT = 16
GROUPED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def takes_groups(x: Tensor, weight_EOI: Tensor) -> bool:
    """Whether one kernel multiplies the rows of all experts, for which the host does not wait.

    Not where the stack has another dtype than the rows, and is larger than they and their results: a copy of all of it
    would exist at once. LoRA matrices are smaller.
    """
    if not multiplies_groups(x.device):
        return False
    widths = (weight_EOI.shape[1], weight_EOI.shape[2])
    is_aligned = all(width * x.itemsize % GROUPED_ALIGNMENT == 0 for width in widths)
    takes_copy = weight_EOI.numel() <= len(x) * sum(widths)
    takes_dtype = x.dtype == weight_EOI.dtype or takes_copy
    return is_aligned and takes_dtype and x.dtype in GROUPED_DTYPES


def group_product(rows: Tensor, matrices: Tensor, ends_E: Tensor) -> Tensor:
    """`grouped_mm`, whose results past the last row of a group are undefined: every row is of a group here."""
    product: Tensor = F.grouped_mm(rows, matrices, offs=ends_E)
    return product


def expert_of_rows(ends_E: Tensor, count: int) -> Tensor:
    """int64 [S]: the expert of each sorted row."""
    return torch.searchsorted(ends_E, torch.arange(count, device=ends_E.device), right=True)


def spans(ends_E: Tensor) -> list[tuple[int, int, int]]:
    """(expert, first row, end) of the experts that have rows. The host waits for a device here."""
    ends = ends_E.tolist()
    starts = [0, *ends[:-1]]
    return [
        (expert, start, end)
        for expert, (start, end) in enumerate(zip(starts, ends, strict=True))
        if start < end
    ]


def steady_rows(x: Tensor, count: int) -> int:
    """How many rows a product of an expert with `count` rows takes, some of them for nothing.

    For half precision on a CPU oneDNN compiles a kernel for each number of rows, which takes ten times as long as the
    product of 256 rows, and keeps 1,024 kernels. Experts have other numbers of rows in every step: below 32 there are
    few, above it sixteenths to eighths of a number are.
    """
    if x.device.type != "cpu" or x.itemsize != 2 or count <= 32:
        return count
    step: int = max(32, 2 ** (count.bit_length() - 4))
    return -(-count // step) * step


def rows_of(x: Tensor, order_S: Tensor, per_token: int, start: int, end: int) -> Tensor:
    """Rows `start` to `end` of the sorted pairs, from rows of tokens or, where `per_token` is 0, of pairs.

    Behind the last pair they are zeros.
    """
    last = min(end, len(order_S))
    rows = x.index_select(0, order_S[start:last] // per_token) if per_token else x[start:last]
    return rows if last == end else F.pad(rows, (0, 0, 0, end - last))


def multiply(rows: Tensor, matrix_OI: Tensor, bias_O: Tensor | None, *, out: Tensor) -> None:
    """A linear map of some rows into `out`, without a copy of what it makes unless `out` has fewer rows."""
    if len(out) < len(rows):
        out.copy_(F.linear(rows, matrix_OI, bias_O)[: len(out)])
    elif bias_O is None:
        torch.mm(rows, matrix_OI.t(), out=out)
    else:
        torch.addmm(bias_O, rows, matrix_OI.t(), out=out)


def products_by_expert(
    x: Tensor,
    matrix_of: Callable[[int], Tensor],
    outputs: int,
    bias_EO: Tensor | None,
    ends_E: Tensor,
    order_S: Tensor,
    per_token: int,
) -> Tensor:
    """[S, O]: the rows of one expert after the other; `matrix_of` makes its matrix [O, I] in the dtype of x."""
    result_SO = x.new_empty(len(order_S), outputs)
    for expert, start, end in spans(ends_E):
        # Steady rows reach into those of the next experts, whose own products come later and replace them.
        stop = start + steady_rows(x, end - start)
        rows = rows_of(x, order_S, per_token, start, stop)
        bias = None if bias_EO is None else bias_EO[expert].to(x.dtype)
        multiply(rows, matrix_of(expert), bias, out=result_SO[start:stop])
    return result_SO


def gradients_by_expert(
    grad_SO: Tensor, matrix_of: Callable[[int], Tensor], inputs: int, ends_E: Tensor
) -> Tensor:
    """[S, I]: the gradient of the rows of `products_by_expert`, which is a product with the transposed matrices."""
    order_S = torch.empty(len(grad_SO), device="meta")  # its length alone counts for rows of pairs
    return products_by_expert(
        grad_SO, lambda expert: matrix_of(expert).t(), inputs, None, ends_E, order_S, per_token=0
    )


@torch.library.custom_op("bloomery::grouped_linear", mutates_args=())
def _grouped(
    x: Tensor,
    weight_EOI: Tensor,
    bias_EO: Tensor | None,
    ends_E: Tensor,
    order_S: Tensor,
    place_S: Tensor,
    per_token: int,
) -> Tensor:
    del place_S  # for the gradient of tokens
    with torch.autocast(x.device.type, enabled=False):
        if takes_groups(x, weight_EOI):
            rows = rows_of(x, order_S, per_token, 0, len(order_S))
            result_SO = group_product(rows.contiguous(), weight_EOI.to(x.dtype).mT, ends_E)
            if bias_EO is not None:
                result_SO += bias_EO.to(x.dtype)[expert_of_rows(ends_E, len(order_S))]
            return result_SO
        return products_by_expert(
            x,
            lambda expert: weight_EOI[expert].to(x.dtype),
            weight_EOI.shape[1],
            bias_EO,
            ends_E,
            order_S,
            per_token,
        )


@torch.library.custom_op("bloomery::grouped_linear_inputs", mutates_args=())
def _grouped_inputs(
    grad_SO: Tensor,
    weight_EOI: Tensor,
    ends_E: Tensor,
    order_S: Tensor,
    place_S: Tensor,
    per_token: int,
) -> Tensor:
    """The gradient of the rows; of tokens the sum over their pairs, in a fixed order."""
    with torch.autocast(grad_SO.device.type, enabled=False):
        if takes_groups(grad_SO, weight_EOI):
            grad_SI = group_product(grad_SO, weight_EOI.to(grad_SO.dtype), ends_E)
        else:
            grad_SI = gradients_by_expert(
                grad_SO,
                lambda expert: weight_EOI[expert].to(grad_SO.dtype),
                weight_EOI.shape[2],
                ends_E,
            )
        pairs = Pairs(order_S, place_S, ends_E, per_token)
        return summed(grad_SI, pairs) if per_token else grad_SI


@torch.library.custom_op("bloomery::grouped_linear_weights", mutates_args=())
def _grouped_weights(
    grad_SO: Tensor,
    x: Tensor,
    weight_EOI: Tensor,
    ends_E: Tensor,
    order_S: Tensor,
    per_token: int,
) -> Tensor:
    """The gradient of the matrices, 0 of an expert without rows, in their dtype."""
    with torch.autocast(grad_SO.device.type, enabled=False):
        if takes_groups(grad_SO, weight_EOI):
            rows = rows_of(x, order_S, per_token, 0, len(order_S))
            grad_EOI = group_product(grad_SO.t(), rows.contiguous(), ends_E).to(weight_EOI.dtype)
            # Of a group without rows a kernel may leave memory as it was.
            is_empty_E = torch.diff(ends_E, prepend=ends_E.new_zeros(1)) == 0
            return grad_EOI.masked_fill_(is_empty_E[:, None, None], 0)
        grad_EOI = torch.empty_like(weight_EOI)
        experts_with_rows = spans(ends_E)
        for expert in set(range(len(grad_EOI))).difference(span[0] for span in experts_with_rows):
            grad_EOI[expert].zero_()
        for expert, start, end in experts_with_rows:
            # Steady rows past those of the expert count for nothing: their gradients are zeros.
            stop = start + steady_rows(grad_SO, end - start)
            rows = rows_of(x, order_S, per_token, start, stop)
            grad = grad_SO[start:end]
            if end < stop:
                grad = F.pad(grad, (0, 0, 0, stop - end))
            if grad_EOI.dtype == rows.dtype:
                torch.mm(grad.t(), rows, out=grad_EOI[expert])
            else:
                grad_EOI[expert] = grad.t() @ rows
        return grad_EOI


class _Context(Protocol):
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    bias: Tensor | None
    per_token: int

    def save_for_backward(self, *tensors: Tensor) -> None: ...


def _save(ctx: _Context, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    x, weight_EOI, bias_EO, ends_E, order_S, place_S, per_token = inputs
    # Frozen experts need no rows for their gradient.
    rows = x if weight_EOI.requires_grad else x.new_empty(0)
    ctx.save_for_backward(rows, weight_EOI, ends_E, order_S, place_S)
    ctx.bias = bias_EO
    ctx.per_token = per_token


def _differentiate(ctx: _Context, grad_SO: Tensor) -> tuple[Tensor | None, ...]:
    x, weight_EOI, ends_E, order_S, place_S = ctx.saved_tensors
    needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    grad_SO = grad_SO.contiguous()
    grad_x = grad_weight = grad_bias = None
    if needs_x:
        grad_x = _grouped_inputs(grad_SO, weight_EOI, ends_E, order_S, place_S, ctx.per_token)
    if needs_weight:
        grad_weight = _grouped_weights(grad_SO, x, weight_EOI, ends_E, order_S, ctx.per_token)
    if needs_bias and ctx.bias is not None:
        # The sum of an expert's rows is its product with ones.
        ones = grad_SO.new_ones(len(grad_SO), 1)
        stack = ctx.bias[..., None]
        grad_bias = _grouped_weights(grad_SO, ones, stack, ends_E, order_S, 0).squeeze(-1)
    return grad_x, grad_weight, grad_bias, None, None, None, None


@_grouped.register_fake
def _grouped_fake(
    x: Tensor, weight_EOI: Tensor, _bias: Tensor | None, _ends: Tensor, order_S: Tensor, *_: Any
) -> Tensor:
    return x.new_empty(len(order_S), weight_EOI.shape[1])


@_grouped_inputs.register_fake
def _grouped_inputs_fake(
    grad_SO: Tensor,
    weight_EOI: Tensor,
    _ends: Tensor,
    _order: Tensor,
    _place: Tensor,
    per_token: int,
) -> Tensor:
    return grad_SO.new_empty(len(grad_SO) // max(1, per_token), weight_EOI.shape[2])


@_grouped_weights.register_fake
def _grouped_weights_fake(_grad_SO: Tensor, _x: Tensor, weight_EOI: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(weight_EOI)


_grouped.register_autograd(_differentiate, setup_context=_save)


@register_flop_formula(torch.ops.bloomery.grouped_linear)
def _flops(
    _x: Shape, weight: Shape, _bias: Shape, _ends: Shape, order: Shape, *_: Any, **__: Any
) -> int:
    """Of each row with one matrix, as torch counts products."""
    return 2 * order[0] * weight[1] * weight[2]


@register_flop_formula(torch.ops.bloomery.grouped_linear_inputs)
def _flops_of_inputs(grad: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    return 2 * grad[0] * weight[1] * weight[2]


@register_flop_formula(torch.ops.bloomery.grouped_linear_weights)
def _flops_of_weights(grad: Shape, _x: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    return 2 * grad[0] * weight[1] * weight[2]

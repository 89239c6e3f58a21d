"""What runs on the last hidden states inside `Decoder.forward`: scores of labels, or logits.

Legend: B batch, T time, D width, V vocabulary, N rows (positions with a label to learn), C rows of one chunk.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

R = TypeVar("R")


class Head(Protocol):
    def __call__(self, hidden_BTD: Tensor, output: nn.Linear, softcap: float | None) -> Tensor: ...


@dataclass(frozen=True)
class Logits:
    """Every logit, [B, T, V]."""

    def __call__(self, hidden_BTD: Tensor, output: nn.Linear, softcap: float | None) -> Tensor:
        return capped(output(hidden_BTD), softcap)


@dataclass(frozen=True)
class LastLogits:
    """The logits of the last position, [B, V]."""

    def __call__(self, hidden_BTD: Tensor, output: nn.Linear, softcap: float | None) -> Tensor:
        return capped(output(hidden_BTD[:, -1]), softcap)


@dataclass(frozen=True)
class LabelScores:
    """The float32 log-probability of each label, [B, T]; 0 where the weight is 0.

    Logits exist for `chunk` rows at a time, forward and backward, and are computed anew in backward; those of a single
    chunk are kept instead. Rows of weight 0 are left out before the matmul.
    `compiled`: what lies between the matmuls is one kernel each way, for chunks of one shape.
    """

    labels_BT: Tensor
    weights_BT: Tensor
    chunk: int
    compiled: bool = False

    def __call__(self, hidden_BTD: Tensor, output: nn.Linear, softcap: float | None) -> Tensor:
        assert set(dict(output.named_parameters())) == {"weight"}, "only the weight of the output layer is read"
        flat_ND, labels_N, weights_N = hidden_BTD.flatten(0, 1), self.labels_BT.flatten(), self.weights_BT.flatten()
        settings = Settings(softcap, min(self.chunk, len(labels_N)), self.compiled)
        if torch.compiler.is_compiling():  # shapes stay as they are
            scores_N = label_scores(flat_ND, output.weight, labels_N, settings) * (weights_N != 0)
        else:
            learned = weights_N.nonzero().squeeze(1)
            scores = label_scores(flat_ND[learned], output.weight, labels_N[learned], settings)
            scores_N = scores.new_zeros(len(labels_N)).index_copy(0, learned, scores)
        return scores_N.view(self.labels_BT.shape)


@dataclass(frozen=True)
class Settings:
    softcap: float | None
    chunk: int
    compiled: bool


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """c tanh(logits / c), Gemma 2's final soft-cap (arXiv:2408.00118, 2.1)."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def label_scores(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, settings: Settings) -> Tensor:
    """log softmax(hidden @ weight.T)[label], float32 [N] (float64 stays). Autocast decides what the matmuls run in."""
    kind, num_rows = hidden_ND.device.type, len(labels_N)
    compute = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight_VD.dtype
    if settings.compiled:
        spare = -num_rows % settings.chunk
        hidden_ND, labels_N = F.pad(hidden_ND, (0, 0, 0, spare)), F.pad(labels_N, (0, spare))
    inputs = hidden_ND.to(compute), weight_VD, labels_N, settings
    scores_N: Tensor = _LabelScores.apply(*inputs)  # type: ignore[no-untyped-call]
    return scores_N[:num_rows]


def _log_sums(logits_CV: Tensor, softcap: float | None) -> Tensor:
    return torch.logsumexp(capped(_exact(logits_CV), softcap), 1)


def _to_other_gradient(logits_CV: Tensor, sums_C: Tensor, grad_C: Tensor, softcap: float | None) -> None:
    """Turns logits into -grad times the softmax, through the soft-cap: right everywhere but at the label."""
    exact_CV, slope_CV = _exact(logits_CV), None
    if softcap is not None:
        exact_CV = exact_CV.div_(softcap).tanh_()
        slope_CV = exact_CV.square().neg_().add_(1)
        exact_CV = exact_CV.mul_(softcap)
    gradient_CV = exact_CV.sub_(sums_C[:, None]).exp_().mul_(-grad_C[:, None])
    logits_CV.copy_(gradient_CV if slope_CV is None else gradient_CV.mul_(slope_CV))


def _label_gradient(scores_C: Tensor, sums_C: Tensor, grad_C: Tensor, softcap: float | None) -> Tensor:
    """grad (1 - share of the label), through the soft-cap."""
    gradient_C = -torch.expm1(scores_C) * grad_C
    return gradient_C if softcap is None else gradient_C * (1 - ((scores_C + sums_C) / softcap).square())


def _exact(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


@functools.cache
def _compiled(function: Callable[..., R]) -> Callable[..., R]:
    return torch.compile(function, dynamic=False)


def _chosen(function: Callable[..., R], settings: Settings) -> Callable[..., R]:
    return _compiled(function) if settings.compiled else function


class _Context(Protocol):
    """What forward leaves for backward."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    settings: Settings

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _LabelScores(torch.autograd.Function):
    """Saves a log-sum-exp a row and, of several chunks, recomputes the logits in backward: a matmul more, less memory.

    Takes any upstream gradient. Logits that were kept become their gradient: a second backward is refused by autograd.
    """

    @staticmethod
    def forward(
        ctx: _Context, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, settings: Settings
    ) -> Tensor:
        weight, log_sums = weight_VD.to(hidden_ND.dtype), _chosen(_log_sums, settings)
        chunks = zip(torch.split(hidden_ND, settings.chunk), torch.split(labels_N, settings.chunk), strict=True)
        scores, sums = [], []
        for hidden_CD, labels_C in chunks:
            logits_CV = hidden_CD @ weight.T
            sums.append(log_sums(logits_CV, settings.softcap))
            labelled_C = logits_CV.gather(1, labels_C[:, None]).squeeze(1)
            scores.append(capped(_exact(labelled_C), settings.softcap) - sums[-1])
        scores_N, sums_N = torch.cat(scores), torch.cat(sums)
        kept = (logits_CV,) if len(sums) == 1 else ()
        ctx.save_for_backward(hidden_ND, weight_VD, labels_N, scores_N, sums_N, *kept)
        ctx.settings = settings
        return scores_N

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, labels_N, scores_N, sums_N, *kept = ctx.saved_tensors
        settings, weight = ctx.settings, weight_VD.to(hidden_ND.dtype)
        to_other_gradient = _chosen(_to_other_gradient, settings)
        d_hidden = torch.empty_like(hidden_ND)
        d_weight = torch.zeros_like(weight_VD, dtype=sums_N.dtype) if ctx.needs_input_grad[1] else None
        for start in range(0, len(hidden_ND), settings.chunk):
            rows = slice(start, start + settings.chunk)
            hidden_CD, sums_C, grad_C = hidden_ND[rows], sums_N[rows], grad_N[rows]
            gradient_CV = kept[0] if kept else hidden_CD @ weight.T  # logits, so far
            to_other_gradient(gradient_CV, sums_C, grad_C, settings.softcap)
            labelled_C = _label_gradient(scores_N[rows], sums_C, grad_C, settings.softcap)
            every_C = torch.arange(len(hidden_CD), device=hidden_ND.device)
            # scatter_ says the same, in a pass over all of the vocabulary on a CPU
            gradient_CV[every_C, labels_N[rows]] = labelled_C.to(weight.dtype)
            d_hidden[rows] = gradient_CV @ weight
            if d_weight is None:
                continue
            if d_weight.dtype == weight.dtype:
                d_weight.addmm_(gradient_CV.T, hidden_CD)
            else:
                d_weight += gradient_CV.T @ hidden_CD
        return d_hidden, None if d_weight is None else d_weight.to(weight_VD.dtype), None, None

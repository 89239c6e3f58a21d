"""What runs on the last hidden states inside `Decoder.forward`: scores of labels, or logits.

Legend: B batch, T time, D width, V vocabulary, N rows (positions with a label to learn), C rows of one chunk.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


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

    Logits exist for `chunk` rows at a time, forward and backward; rows of weight 0 are left out before the matmul.
    """

    labels_BT: Tensor
    weights_BT: Tensor
    chunk: int

    def __call__(self, hidden_BTD: Tensor, output: nn.Linear, softcap: float | None) -> Tensor:
        assert set(dict(output.named_parameters())) == {"weight"}, "only the weight of the output layer is read"
        learned = self.weights_BT.flatten().nonzero().squeeze(1)
        hidden_ND = hidden_BTD.flatten(0, 1)[learned]
        labels_N = self.labels_BT.flatten()[learned]
        scores_N = label_scores(hidden_ND, output.weight, labels_N, softcap=softcap, chunk=self.chunk)
        flat = scores_N.new_zeros(self.labels_BT.numel()).index_copy(0, learned, scores_N)
        return flat.view(self.labels_BT.shape)


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """c tanh(logits / c), Gemma 2's final soft-cap (arXiv:2408.00118, 2.1)."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def label_scores(
    hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, *, softcap: float | None, chunk: int
) -> Tensor:
    """log softmax(hidden @ weight.T)[label], float32 [N] (float64 stays). Autocast decides what the matmuls run in."""
    kind = hidden_ND.device.type
    compute = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight_VD.dtype
    inputs = hidden_ND.to(compute), weight_VD, labels_N, softcap, chunk, compute
    scores_N: Tensor = _LabelScores.apply(*inputs)  # type: ignore[no-untyped-call]
    return scores_N


def _logits(hidden_CD: Tensor, weight_VD: Tensor, softcap: float | None) -> Tensor:
    logits_CV = hidden_CD @ weight_VD.T
    return capped(logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32)), softcap)


class _Context(Protocol):
    """What forward leaves for backward."""

    saved_tensors: tuple[Tensor, ...]
    softcap: float | None
    chunk: int
    compute: torch.dtype

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _LabelScores(torch.autograd.Function):
    """Saves a log-sum-exp a row, recomputes a chunk's logits in backward: one matmul more, any upstream gradient."""

    @staticmethod
    def forward(
        ctx: _Context,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        softcap: float | None,
        chunk: int,
        compute: torch.dtype,
    ) -> Tensor:
        weight = weight_VD.to(compute)
        scores, sums = [], []
        for hidden_CD, labels_C in zip(torch.split(hidden_ND, chunk), torch.split(labels_N, chunk), strict=True):
            logits_CV = _logits(hidden_CD, weight, softcap)
            sums.append(torch.logsumexp(logits_CV, 1))
            scores.append(logits_CV.gather(1, labels_C[:, None]).squeeze(1) - sums[-1])
        ctx.save_for_backward(hidden_ND, weight_VD, labels_N, torch.cat(sums))
        ctx.softcap, ctx.chunk, ctx.compute = softcap, chunk, compute
        return torch.cat(scores)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, labels_N, sums_N = ctx.saved_tensors
        weight = weight_VD.to(ctx.compute)
        d_hidden = torch.empty_like(hidden_ND)
        d_weight = torch.zeros_like(weight_VD, dtype=sums_N.dtype)
        for start in range(0, len(hidden_ND), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            logits_CV = _logits(hidden_ND[rows], weight, ctx.softcap)
            slope = 1 - (logits_CV / ctx.softcap).square() if ctx.softcap is not None else None
            grad_C1 = grad_N[rows, None]
            d_logits = logits_CV.sub_(sums_N[rows, None]).exp_().mul_(-grad_C1)
            d_logits.scatter_add_(1, labels_N[rows, None], grad_C1)
            if slope is not None:
                d_logits.mul_(slope)
            d_logits = d_logits.to(ctx.compute)
            d_hidden[rows] = d_logits @ weight
            if ctx.compute == d_weight.dtype:
                d_weight.addmm_(d_logits.T, hidden_ND[rows])
            else:
                d_weight += d_logits.T @ hidden_ND[rows]
        return d_hidden, d_weight.to(weight_VD.dtype), None, None, None, None

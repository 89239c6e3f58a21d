"""Heads on the last hidden states inside `Decoder.forward`: log-probabilities of labels, logits, or values.

Legend: B batch, T time, D width, V vocabulary, N rows (positions with a label to learn), C rows of one chunk,
U entries of one tile of the vocabulary.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from bloomery.model import compiled_scores
from bloomery.model.limits import CPU_TILE
from bloomery.model.norms import widened

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
class Hidden:
    """The last hidden states after the final norm, float32 [B, T, D]: those that embeddings are pooled from."""

    def __call__(self, hidden_BTD: Tensor, output: nn.Linear, softcap: float | None) -> Tensor:
        del output, softcap
        return hidden_BTD.float()


@dataclass(frozen=True)
class Values:
    """One float32 number a position, [B, T], of an output layer with one row: a reward model's."""

    def __call__(self, hidden_BTD: Tensor, output: nn.Linear, softcap: float | None) -> Tensor:
        assert output.out_features == 1 and softcap is None, "this model gives logits"
        # bfloat16 would give values three digits
        with torch.autocast(hidden_BTD.device.type, enabled=False):
            return F.linear(widened(hidden_BTD), widened(output.weight)).squeeze(-1)


@functools.cache
def compiled_once(function: Callable[..., R]) -> Callable[..., R]:
    """The function as one kernel of torch's compiler."""
    return torch.compile(function, dynamic=False)


def tile_size(weight_VD: Tensor) -> int:
    """Entries of the vocabulary whose logits exist at once: a CPU's caches hold few, a GPU takes all."""
    return CPU_TILE if weight_VD.device.type == "cpu" else len(weight_VD)


@dataclass(frozen=True)
class ScoreOperators:
    """What the passes over logits are made of. A simulation hands in those of the device that it stands for."""

    fuse: Callable[[Callable[..., Any]], Callable[..., Any]] = compiled_once
    tile_size: Callable[[Tensor], int] = tile_size
    add_log_sums: Callable[..., None] = compiled_scores.add_log_sums
    to_gradient: Callable[..., None] = compiled_scores.to_gradient


SCORE_OPERATORS = ScoreOperators()


@dataclass(frozen=True)
class LabelScores:
    """The float32 log-probability of each label, [B, T]; 0 where the weight is 0.

    Logits exist for `chunk` rows at a time (and on a CPU for a tile of the vocabulary), forward and backward, and are
    recomputed in backward; where one piece is all there is, it is kept instead. Rows of weight 0 are left out before
    the matmul. `compiled`: one kernel of torch's compiler each way between the matmuls, for chunks of one shape.
    `native`: `model.compiled_scores` in its place, for rows as many as there are, on a CPU. `into_grad`: backward
    adds to the weight's `.grad` and returns no gradient, which saves a copy; hooks are not called.
    """

    labels_BT: Tensor
    loss_mask_BT: Tensor
    chunk: int
    compiled: bool = False
    into_grad: bool = False
    native: bool = False
    operators: ScoreOperators = SCORE_OPERATORS

    def __call__(self, hidden_BTD: Tensor, output: nn.Linear, softcap: float | None) -> Tensor:
        known = {"weight"} if output.bias is None else {"weight", "bias"}
        assert set(dict(output.named_parameters())) == known, (
            "only weight and bias of the output layer are read"
        )
        flat_ND = hidden_BTD.flatten(0, 1)
        labels_N = self.labels_BT.flatten()
        loss_mask_N = self.loss_mask_BT.flatten()
        weight_VD = output.weight
        into_grad = self.into_grad
        # one more input, which is always 1; the joined matrix is no parameter
        if output.bias is not None:
            flat_ND = F.pad(flat_ND, (0, 1), value=1.0)
            into_grad = False
            weight_VD = torch.cat((weight_VD, output.bias[:, None]), 1)
        settings = Settings(
            softcap,
            min(self.chunk, len(labels_N)),
            self.compiled,
            into_grad,
            self.native,
            self.operators,
        )
        if torch.compiler.is_compiling():  # shapes stay as they are
            scores_N = label_scores(flat_ND, weight_VD, labels_N, settings) * (loss_mask_N != 0)
        else:
            learned = loss_mask_N.nonzero().squeeze(1)
            scores = label_scores(flat_ND[learned], weight_VD, labels_N[learned], settings)
            scores_N = scores.new_zeros(len(labels_N)).index_copy(0, learned, scores)
        return scores_N.view(self.labels_BT.shape)


@dataclass(frozen=True)
class Settings:
    softcap: float | None
    chunk: int
    compiled: bool
    into_grad: bool = False
    native: bool = False
    operators: ScoreOperators = SCORE_OPERATORS


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """c tanh(logits / c), Gemma 2's final soft-cap (arXiv:2408.00118, 2.1)."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def label_scores(
    hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, settings: Settings
) -> Tensor:
    """log softmax(hidden @ weight.T)[label], float32 [N] (float64 stays). Autocast decides what the matmuls run in."""
    kind = hidden_ND.device.type
    num_rows = len(labels_N)
    compute = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight_VD.dtype
    if settings.native and settings.softcap is None and compute in compiled_scores.DTYPES:
        settings = replace(settings, compiled=False)
    elif settings.native:
        settings = replace(settings, native=False)
    spare = (
        -num_rows % settings.chunk
        if settings.compiled
        else _spare(num_rows, settings, compute, kind)
    )
    if spare:
        hidden_ND = F.pad(hidden_ND, (0, 0, 0, spare))
        labels_N = F.pad(labels_N, (0, spare))
    inputs = hidden_ND.to(compute), weight_VD, labels_N, settings
    scores_N: Tensor = _LabelScores.apply(*inputs)  # type: ignore[no-untyped-call]  # torch's `apply`
    return scores_N[:num_rows]


def _spare(num_rows: int, settings: Settings, compute: torch.dtype, kind: str) -> int:
    """Rows of zeros to put behind so that shapes repeat: a CPU keeps 0.7 MB of half-precision kernels for each product.

    In steps of 64 rows, a sixteenth of many at most. Float32 has no kernels of its own for a shape. Rows that nearly
    are a chunk, as of plain text, have few shapes and stay: lengthened, they made a step of the demo a tenth slower.
    Compiled passes over their logits are quicker than products with an odd number of rows, and they are lengthened.
    """
    chunk = settings.chunk
    few_shapes = 0 <= chunk - num_rows < 16 and not settings.native
    if kind != "cpu" or compute not in (torch.bfloat16, torch.float16) or few_shapes:
        return 0
    spare = -num_rows % max(64, 1 << max(0, num_rows.bit_length() - 5))
    return min(spare, chunk - num_rows) if num_rows <= chunk else spare


def _log_sums(logits_CV: Tensor, softcap: float | None) -> Tensor:
    return torch.logsumexp(capped(widened(logits_CV), softcap), 1)


def _to_other_gradient(
    logits_CV: Tensor, sums_C: Tensor, grad_C: Tensor, softcap: float | None
) -> None:
    """Turns logits into -grad times the softmax, through the soft-cap: right everywhere but at the label."""
    exact_CV = widened(logits_CV)
    slope_CV = None
    if softcap is not None:
        exact_CV = exact_CV.div_(softcap).tanh_()
        slope_CV = exact_CV.square().neg_().add_(1)
        exact_CV = exact_CV.mul_(softcap)
    gradient_CV = exact_CV.sub_(sums_C[:, None]).exp_().mul_(-grad_C[:, None])
    logits_CV.copy_(gradient_CV if slope_CV is None else gradient_CV.mul_(slope_CV))


def _chosen(function: Callable[..., R], settings: Settings) -> Callable[..., R]:
    return settings.operators.fuse(function) if settings.compiled else function


class _Context(Protocol):
    """The autograd context."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    settings: Settings

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _LabelScores(torch.autograd.Function):
    """Saves a log-sum-exp a row and, of several pieces, recomputes the logits in backward: a matmul more, less memory.

    Takes any upstream gradient. Logits that were kept become their gradient: a second backward is refused by autograd.
    """

    @staticmethod
    def forward(
        ctx: _Context, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, settings: Settings
    ) -> Tensor:
        log_sums = _chosen(_log_sums, settings)
        exact = torch.promote_types(hidden_ND.dtype, torch.float32)
        sums_N = hidden_ND.new_full(labels_N.shape, float("-inf"), dtype=exact)
        labelled_N = torch.zeros_like(sums_N)
        for entries in _slices(len(weight_VD), settings.operators.tile_size(weight_VD)):
            weight_UD = weight_VD[entries].to(hidden_ND.dtype)
            for rows in _slices(len(hidden_ND), settings.chunk):
                logits_CU = hidden_ND[rows] @ weight_UD.T
                if settings.native:
                    settings.operators.add_log_sums(
                        logits_CU, labels_N[rows], entries.start, sums_N[rows], labelled_N[rows]
                    )
                    continue
                sums_N[rows] = torch.logaddexp(sums_N[rows], log_sums(logits_CU, settings.softcap))
                place_C, inside_C = _places(labels_N[rows], entries)
                found_C = logits_CU.gather(1, place_C[:, None]).squeeze(1).to(exact)
                labelled_N[rows] = torch.where(inside_C, found_C, labelled_N[rows])
        scores_N = capped(labelled_N, settings.softcap) - sums_N
        kept = (logits_CU,) if logits_CU.shape == (len(hidden_ND), len(weight_VD)) else ()
        ctx.save_for_backward(hidden_ND, weight_VD, labels_N, scores_N, sums_N, *kept)
        ctx.settings = settings
        return scores_N

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, labels_N, scores_N, sums_N, *kept = ctx.saved_tensors
        settings = ctx.settings
        to_other_gradient = _chosen(_to_other_gradient, ctx.settings)
        d_hidden = torch.zeros_like(hidden_ND, dtype=sums_N.dtype)
        d_weight = None
        if ctx.needs_input_grad[1] and settings.into_grad:
            if weight_VD.grad is None:
                weight_VD.grad = torch.zeros_like(weight_VD)
            d_weight = weight_VD.grad
        elif ctx.needs_input_grad[1]:
            d_weight = torch.zeros_like(weight_VD, dtype=sums_N.dtype)
        grad_N = grad_N.contiguous()  # that of a sum is one number, expanded
        # grad (1 - share of the label), through the soft-cap
        label_N = -torch.expm1(scores_N) * grad_N
        if settings.softcap is not None:
            label_N = label_N * (1 - ((scores_N + sums_N) / settings.softcap).square())
        for entries in _slices(len(weight_VD), settings.operators.tile_size(weight_VD)):
            weight_UD = weight_VD[entries].to(hidden_ND.dtype)
            for rows in _slices(len(hidden_ND), settings.chunk):
                gradient_CU = kept[0] if kept else hidden_ND[rows] @ weight_UD.T  # logits, so far
                if settings.native:
                    settings.operators.to_gradient(
                        gradient_CU,
                        labels_N[rows],
                        entries.start,
                        sums_N[rows],
                        grad_N[rows],
                        label_N[rows],
                    )
                else:
                    to_other_gradient(gradient_CU, sums_N[rows], grad_N[rows], settings.softcap)
                    place_C, inside_C = _places(labels_N[rows], entries)
                    every_C = torch.arange(len(place_C), device=place_C.device)
                    # equals scatter_, which passes over the whole vocabulary on a CPU
                    others_C = gradient_CU[every_C, place_C]
                    own_C = label_N[rows].to(gradient_CU.dtype)
                    gradient_CU[every_C, place_C] = torch.where(inside_C, own_C, others_C)
                d_hidden[rows] += gradient_CU @ weight_UD
                if d_weight is None:
                    continue
                if d_weight.dtype == gradient_CU.dtype:
                    d_weight[entries].addmm_(gradient_CU.T, hidden_ND[rows])
                else:
                    d_weight[entries] += gradient_CU.T @ hidden_ND[rows]
        given = None if d_weight is None or settings.into_grad else d_weight.to(weight_VD.dtype)
        return d_hidden.to(hidden_ND.dtype), given, None, None


def _slices(size: int, step: int) -> list[slice]:
    """All of `size`, at least one slice: for a stable shape without loss tokens."""
    return [slice(start, min(start + step, size)) for start in range(0, size, step)] or [
        slice(0, 0)
    ]


def _places(labels_C: Tensor, entries: slice) -> tuple[Tensor, Tensor]:
    """Where in a tile each label stands, and whether it does; elsewhere the place is a valid one that means nothing."""
    place_C = labels_C - entries.start
    return place_C.clamp(0, entries.stop - entries.start - 1), (place_C >= 0) & (
        labels_C < entries.stop
    )


@dataclass(frozen=True)
class Teacher:
    """`hidden` gives the last hidden states [B, T, S] of the batch, `output` and `softcap` what becomes of them."""

    hidden: Callable[[], Tensor]
    output: nn.Linear
    softcap: float | None


@dataclass(frozen=True)
class Divergence:
    """float32 [2, B, T]: the log-probability of each label, and KL(teacher || model) at that position in nats.

    Both are 0 where the weight is 0. The divergence is of softmax(logits / temperature). Logits of both models exist
    for `chunk` rows at a time and are recomputed in backward. Embeddings of one vocabulary may be padded to
    different sizes: to the teacher, what the model has more is impossible.
    """

    labels_BT: Tensor
    loss_mask_BT: Tensor
    chunk: int
    temperature: float
    teacher: Teacher

    def __call__(self, hidden_BTD: Tensor, output: nn.Linear, softcap: float | None) -> Tensor:
        learned = (self.loss_mask_BT.flatten() != 0).nonzero().squeeze(1)
        with torch.no_grad():
            taught_NS = self.teacher.hidden().flatten(0, 1)[learned]
        shared = min(output.out_features, self.teacher.output.out_features)
        heads = output.weight, output.bias, *_first(self.teacher.output, shared)
        piece = partial(_scored, caps=(softcap, self.teacher.softcap), temperature=self.temperature)
        hidden_ND = hidden_BTD.flatten(0, 1)[learned]
        labels_N = self.labels_BT.flatten()[learned]
        pieces = [
            checkpoint(
                piece, h_CD, t_CS, *heads, labels_C, use_reentrant=False, preserve_rng_state=False
            )
            for h_CD, t_CS, labels_C in zip(
                *(torch.split(x, self.chunk) for x in (hidden_ND, taught_NS, labels_N)), strict=True
            )
        ]
        found_2N = torch.cat(pieces, 1)
        whole = found_2N.new_zeros(2, self.labels_BT.numel()).index_copy(1, learned, found_2N)
        return whole.view(2, *self.labels_BT.shape)


def _first(output: nn.Linear, rows: int) -> tuple[Tensor, Tensor | None]:
    """Some architectures of transformers have a bias on their logits."""
    return output.weight[:rows], None if output.bias is None else output.bias[:rows]


def _scored(
    h_CD: Tensor,
    t_CS: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    weight_VS: Tensor,
    taught_bias_V: Tensor | None,
    labels_C: Tensor,
    *,
    caps: tuple[float | None, float | None],
    temperature: float,
) -> Tensor:
    """[2, C]."""
    logits_CV = capped(widened(F.linear(h_CD.to(weight_VD.dtype), weight_VD, bias_V)), caps[0])
    with torch.no_grad():
        taught_CV = capped(
            widened(F.linear(t_CS.to(weight_VS.dtype), weight_VS, taught_bias_V)), caps[1]
        )
        taught_CV = torch.log_softmax(taught_CV / temperature, 1)
    scores_C = torch.log_softmax(logits_CV, 1).gather(1, labels_C[:, None]).squeeze(1)
    learned_CV = torch.log_softmax(logits_CV / temperature, 1)[:, : len(weight_VS)]
    divergence_C = (taught_CV.exp() * (taught_CV - learned_CV)).sum(1)
    return torch.stack([scores_C, divergence_C])

"""Heads on the last hidden states inside `Decoder.forward`: log-probabilities of labels, logits, or values.

Legend: B batch, T time, D width, V vocabulary, N rows (the positions that a loss is computed for), C rows of one
chunk, U entries of one tile of the vocabulary.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bloomery.facts.limits import CPU_TILE
from bloomery.model import compiled_scores
from bloomery.model.norms import widened

Result = TypeVar("Result")


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
class PositionLogits:
    """The logits of one position of each sequence, [B, V]."""

    positions_B: Tensor

    def __call__(self, hidden_BTD: Tensor, output: nn.Linear, softcap: float | None) -> Tensor:
        sequences_B = torch.arange(len(hidden_BTD), device=hidden_BTD.device)
        return capped(output(hidden_BTD[sequences_B, self.positions_B]), softcap)


@dataclass(frozen=True)
class Hidden:
    """The last hidden states after the final norm, float32 [B, T, D]: those that embeddings are pooled from."""

    def __call__(self, hidden_BTD: Tensor, output: nn.Linear, softcap: float | None) -> Tensor:
        del output, softcap
        return hidden_BTD.float()


@dataclass(frozen=True)
class HiddenRows:
    """The last hidden states after the final norm at some positions of the flattened batch, [N, D]."""

    positions_N: Tensor

    def __call__(self, hidden_BTD: Tensor, output: nn.Linear, softcap: float | None) -> Tensor:
        del output, softcap
        return hidden_BTD.flatten(0, 1)[self.positions_N]


@dataclass(frozen=True)
class Values:
    """One float32 number a position, [B, T], of an output layer with one row: a reward model's."""

    def __call__(self, hidden_BTD: Tensor, output: nn.Linear, softcap: float | None) -> Tensor:
        assert output.out_features == 1 and softcap is None, "this model gives logits"
        # Outside of autocast: bfloat16 would leave three digits of a value.
        with torch.autocast(hidden_BTD.device.type, enabled=False):
            return F.linear(widened(hidden_BTD), widened(output.weight)).squeeze(-1)


@dataclass(frozen=True)
class ScoresAndValues:
    """float32 [3, B, T]: what `scores` gives with its entropies, and the value of each position by `value_head`."""

    scores: "LabelScores"
    value_head: nn.Linear

    def __call__(self, hidden_BTD: Tensor, output: nn.Linear, softcap: float | None) -> Tensor:
        results_2BT = self.scores(hidden_BTD, output, softcap)
        values_BT = Values()(hidden_BTD, self.value_head, None)
        return torch.cat([results_2BT, values_BT[None]])


@functools.cache
def compiled_once(function: Callable[..., Result]) -> Callable[..., Result]:
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
class ScoreSettings:
    """How the scores of labels are computed.

    Logits exist for `chunk` rows at a time (and on a CPU for a tile of the vocabulary), forward and backward, and are
    recomputed in backward; where one piece is all there is, it is kept instead. `compiled`: one kernel of torch's
    compiler each way between the matmuls, for chunks of one shape. `native`: `model.compiled_scores` in its place, for
    rows as many as there are, on a CPU. `into_grad`: backward adds to the weight's `.grad` and returns no gradient,
    which saves a copy; hooks are not called. `temperature` divides the logits first. `entropy`: the result has the
    entropy of each distribution in nats in second place, without a gradient but for `entropy_gradient`. `softcap`: the
    model's; its head sets it.
    """

    chunk: int
    compiled: bool = False
    into_grad: bool = False
    native: bool = False
    operators: ScoreOperators = SCORE_OPERATORS
    temperature: float = 1.0
    entropy: bool = False
    entropy_gradient: bool = False
    softcap: float | None = None


@dataclass(frozen=True)
class LabelScores:
    """The float32 log-probability of each label, [B, T]; with `settings.entropy` [2, B, T]. 0 where the weight is 0.

    Rows of weight 0 are left out before the matmul. `loss_positions_N`: the others, where they are known: else the host
    waits for the device, which finds them.
    """

    labels_BT: Tensor
    loss_mask_BT: Tensor
    settings: ScoreSettings
    loss_positions_N: Tensor | None = None

    def __call__(self, hidden_BTD: Tensor, output: nn.Linear, softcap: float | None) -> Tensor:
        parameter_names = {name for name, _ in output.named_parameters()}
        readable_names = {"weight"} if output.bias is None else {"weight", "bias"}
        assert parameter_names == readable_names, (
            "only weight and bias of the output layer are read"
        )
        hidden_ND = hidden_BTD.flatten(0, 1)
        labels_N = self.labels_BT.flatten()
        loss_mask_N = self.loss_mask_BT.flatten()
        weight_VD = output.weight
        into_grad = self.settings.into_grad
        temperature = self.settings.temperature

        # Logits are linear in the hidden states, which are divided in their place: c tanh(l / c) / t is
        # (c / t) tanh((l / t) / (c / t)).
        if temperature != 1.0:
            hidden_ND = hidden_ND / temperature
            softcap = None if softcap is None else softcap / temperature

        # A bias is the weight of one more input, which is always 1. The joined matrix is no parameter
        # and has no `.grad` to add to.
        if output.bias is not None:
            hidden_ND = F.pad(hidden_ND, (0, 1), value=1.0 / temperature)
            weight_VD = torch.cat((weight_VD, output.bias[:, None]), 1)
            into_grad = False

        settings = replace(
            self.settings,
            chunk=min(self.settings.chunk, len(labels_N)),
            into_grad=into_grad,
            softcap=softcap,
        )

        # torch's compiler needs shapes that stay: there all positions are scored, and masked after it.
        if torch.compiler.is_compiling():
            all_results = label_scores(hidden_ND, weight_VD, labels_N, settings)
            return (all_results * (loss_mask_N != 0)).view(
                *all_results.shape[:-1], *self.labels_BT.shape
            )

        loss_positions = self.loss_positions_N
        if loss_positions is None:
            loss_positions = loss_mask_N.nonzero().squeeze(1)
        results = label_scores(
            hidden_ND[loss_positions], weight_VD, labels_N[loss_positions], settings
        )
        blank_results = results.new_zeros(*results.shape[:-1], len(labels_N))
        all_results = blank_results.index_copy(-1, loss_positions, results)
        return all_results.view(*results.shape[:-1], *self.labels_BT.shape)


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """c tanh(logits / c), Gemma 2's final soft-cap (arXiv:2408.00118, 2.1)."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def capped_logits(
    hidden_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, softcap: float | None
) -> Tensor:
    """[C, V] of hidden states, in float32 or wider."""
    return capped(widened(F.linear(hidden_CD.to(weight_VD.dtype), weight_VD, bias_V)), softcap)


def label_scores(
    hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, settings: ScoreSettings
) -> Tensor:
    """log softmax(hidden @ weight.T)[label], float32 [N] (float64 stays). Autocast decides what the matmuls run in.

    With `settings.entropy` [2, N]: the entropy of each row's distribution in second place.
    """
    device_type = hidden_ND.device.type
    num_rows = len(labels_N)
    compute_dtype = weight_VD.dtype
    if torch.is_autocast_enabled(device_type):
        compute_dtype = torch.get_autocast_dtype(device_type)

    # The native passes have neither a soft-cap nor a gradient of entropies, and support two dtypes; where they run,
    # torch's compiler has nothing to fuse.
    is_plain = settings.softcap is None and not settings.entropy_gradient
    if settings.native and is_plain and compute_dtype in compiled_scores.DTYPES:
        settings = replace(settings, compiled=False)
    elif settings.native:
        settings = replace(settings, native=False)

    # Rows of zeros are added where that lets kernels repeat; their scores are cut off again.
    if settings.compiled:
        num_padding = -num_rows % settings.chunk
    else:
        num_padding = _num_padding_rows(num_rows, settings, compute_dtype, device_type)
    if num_padding:
        hidden_ND = F.pad(hidden_ND, (0, 0, 0, num_padding))
        labels_N = F.pad(labels_N, (0, num_padding))
    scores_N, entropies_N = _LabelScores.apply(  # type: ignore[no-untyped-call]  # torch's `apply`
        hidden_ND.to(compute_dtype), weight_VD, labels_N, settings
    )
    results: Tensor = torch.stack([scores_N, entropies_N]) if settings.entropy else scores_N
    return results[..., :num_rows]


def _num_padding_rows(
    num_rows: int, settings: ScoreSettings, compute_dtype: torch.dtype, device_type: str
) -> int:
    """Rows of zeros that make shapes repeat: a CPU keeps 0.7 MB of half-precision kernels for each shape of a product.

    The number of rows is rounded up to a multiple of 64, and of a sixteenth of them where they are many. Float32 has
    no kernels of its own for a shape.
    """
    if device_type != "cpu" or compute_dtype not in (torch.bfloat16, torch.float16):
        return 0

    # Chunks that are nearly full, as those of plain text, have few shapes: padding them made a step of
    # the demo a tenth slower. The native passes gain more than that from an even number of rows.
    chunk = settings.chunk
    if 0 <= chunk - num_rows < 16 and not settings.native:
        return 0

    multiple = max(64, 1 << max(0, num_rows.bit_length() - 5))
    num_padding = -num_rows % multiple
    if num_rows <= chunk:
        return min(num_padding, chunk - num_rows)
    return num_padding


def _log_sums(logits_CV: Tensor, softcap: float | None) -> Tensor:
    return torch.logsumexp(capped(widened(logits_CV), softcap), 1)


def _add_mean_logits(
    means_C: Tensor, sums_C: Tensor, logits_CU: Tensor, softcap: float | None
) -> None:
    """Takes a tile into the mean logit under the softmax so far, in place. `sums_C`: log-sum-exps before the tile."""
    exact_CU = capped(widened(logits_CU), softcap)
    tile_sums_C = exact_CU.logsumexp(1)
    tile_means_C = ((exact_CU - tile_sums_C[:, None]).exp() * exact_CU).sum(1)
    new_sums_C = torch.logaddexp(sums_C, tile_sums_C)
    means_C.mul_((sums_C - new_sums_C).exp()).add_(tile_means_C * (tile_sums_C - new_sums_C).exp())


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


def _to_gradient_with_entropy(
    logits_CV: Tensor,
    sums_C: Tensor,
    grad_C: Tensor,
    entropy_grad_C: Tensor,
    entropies_C: Tensor,
    softcap: float | None,
) -> None:
    """As `_to_other_gradient`, and the gradient of the entropies: of a logit l with probability p it is p (m - l).

    m is the mean logit.
    """
    exact_CV = capped(widened(logits_CV), softcap)
    probabilities_CV = (exact_CV - sums_C[:, None]).exp()
    means_C = sums_C - entropies_C
    if softcap is not None:
        probabilities_CV = probabilities_CV * (1 - (exact_CV / softcap).square())
    slopes_CV = (means_C[:, None] - exact_CV) * entropy_grad_C[:, None] - grad_C[:, None]
    logits_CV.copy_(slopes_CV.mul_(probabilities_CV))


def _fused(function: Callable[..., Result], settings: ScoreSettings) -> Callable[..., Result]:
    return settings.operators.fuse(function) if settings.compiled else function


class _Context(Protocol):
    """The autograd context."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    settings: ScoreSettings

    def save_for_backward(self, *tensors: Tensor) -> None: ...

    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...


class _LabelScores(torch.autograd.Function):
    """Saves one log-sum-exp per row. Backward recomputes logits that are several tiles: one more matmul, less memory.

    Backward supports any upstream gradient. Logits that were saved are overwritten by their gradient, and autograd
    refuses a second backward.
    """

    @staticmethod
    def forward(
        ctx: _Context,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        settings: ScoreSettings,
    ) -> tuple[Tensor, Tensor]:
        log_sums = _fused(_log_sums, settings)
        sum_dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
        sums_N = hidden_ND.new_full(labels_N.shape, float("-inf"), dtype=sum_dtype)
        label_logits_N = torch.zeros_like(sums_N)
        mean_logits_N = torch.zeros_like(sums_N) if settings.entropy else None

        # Two numbers are taken from each tile of logits: what it adds to the log-sum-exp of its rows,
        # and the logits of the labels that are inside it.
        for entries in slices(len(weight_VD), settings.operators.tile_size(weight_VD)):
            weight_UD = weight_VD[entries].to(hidden_ND.dtype)
            for rows in slices(len(hidden_ND), settings.chunk):
                logits_CU = hidden_ND[rows] @ weight_UD.T
                if mean_logits_N is not None:
                    _add_mean_logits(mean_logits_N[rows], sums_N[rows], logits_CU, settings.softcap)
                if settings.native:
                    settings.operators.add_log_sums(
                        logits_CU, labels_N[rows], entries.start, sums_N[rows], label_logits_N[rows]
                    )
                    continue
                sums_N[rows] = torch.logaddexp(sums_N[rows], log_sums(logits_CU, settings.softcap))
                column_C, inside_C = _label_columns(labels_N[rows], entries)
                tile_logits_C = logits_CU.gather(1, column_C[:, None]).squeeze(1).to(sum_dtype)
                label_logits_N[rows] = torch.where(inside_C, tile_logits_C, label_logits_N[rows])
        scores_N = capped(label_logits_N, settings.softcap) - sums_N

        # Where a single tile was all logits, backward takes it as it is.
        saved_logits: tuple[Tensor, ...] = ()
        if logits_CU.shape == (len(hidden_ND), len(weight_VD)):
            saved_logits = (logits_CU,)
        # Of a distribution with logits l: log sum exp(l) - sum p l.
        entropies_N = sums_N.new_empty(0) if mean_logits_N is None else sums_N - mean_logits_N
        if not settings.entropy_gradient:
            ctx.mark_non_differentiable(entropies_N)
        ctx.save_for_backward(
            hidden_ND, weight_VD, labels_N, scores_N, sums_N, entropies_N, *saved_logits
        )
        ctx.settings = settings
        return scores_N, entropies_N

    @staticmethod
    @once_differentiable
    def backward(
        ctx: _Context, grad_N: Tensor, entropy_grad_N: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, labels_N, scores_N, sums_N, entropies_N, *saved_logits = (
            ctx.saved_tensors
        )
        settings = ctx.settings
        to_other_gradient = _fused(_to_other_gradient, settings)
        to_gradient_with_entropy = _fused(_to_gradient_with_entropy, settings)

        # The gradient of the weight is added to its `.grad` directly, to a tensor of its own, or, of a
        # frozen weight, not computed.
        d_hidden = torch.zeros_like(hidden_ND, dtype=sums_N.dtype)
        d_weight = None
        if ctx.needs_input_grad[1] and settings.into_grad:
            if weight_VD.grad is None:
                weight_VD.grad = torch.zeros_like(weight_VD)
            d_weight = weight_VD.grad
        elif ctx.needs_input_grad[1]:
            d_weight = torch.zeros_like(weight_VD, dtype=sums_N.dtype)

        # The gradient of a label's own logit is grad (1 - softmax), through the slope of the soft-cap.
        # Of a sum of scores the upstream gradient is one number, expanded; the kernels need a row of them.
        grad_N = grad_N.contiguous()
        label_gradient_N = -torch.expm1(scores_N) * grad_N
        capped_logits_N = scores_N + sums_N
        if settings.entropy_gradient:
            entropy_grad_N = entropy_grad_N.contiguous()
            means_N = sums_N - entropies_N
            label_gradient_N += scores_N.exp() * (means_N - capped_logits_N) * entropy_grad_N
        if settings.softcap is not None:
            label_gradient_N = label_gradient_N * (
                1 - (capped_logits_N / settings.softcap).square()
            )

        for entries in slices(len(weight_VD), settings.operators.tile_size(weight_VD)):
            weight_UD = weight_VD[entries].to(hidden_ND.dtype)
            for rows in slices(len(hidden_ND), settings.chunk):
                # A tile of logits becomes its gradient in place.
                gradient_CU = saved_logits[0] if saved_logits else hidden_ND[rows] @ weight_UD.T
                if settings.native:
                    settings.operators.to_gradient(
                        gradient_CU,
                        labels_N[rows],
                        entries.start,
                        sums_N[rows],
                        grad_N[rows],
                        label_gradient_N[rows],
                    )
                else:
                    if settings.entropy_gradient:
                        to_gradient_with_entropy(
                            gradient_CU,
                            sums_N[rows],
                            grad_N[rows],
                            entropy_grad_N[rows],
                            entropies_N[rows],
                            settings.softcap,
                        )
                    else:
                        to_other_gradient(gradient_CU, sums_N[rows], grad_N[rows], settings.softcap)
                    column_C, inside_C = _label_columns(labels_N[rows], entries)
                    # Indexing equals scatter_, which passes over the whole vocabulary on a CPU.
                    row_C = torch.arange(len(column_C), device=column_C.device)
                    other_gradient_C = gradient_CU[row_C, column_C]
                    label_gradient_C = label_gradient_N[rows].to(gradient_CU.dtype)
                    gradient_CU[row_C, column_C] = torch.where(
                        inside_C, label_gradient_C, other_gradient_C
                    )

                # Two matmuls take it to the inputs.
                d_hidden[rows] += gradient_CU @ weight_UD
                if d_weight is None:
                    continue
                if d_weight.dtype == gradient_CU.dtype:
                    d_weight[entries].addmm_(gradient_CU.T, hidden_ND[rows])
                else:
                    d_weight[entries] += gradient_CU.T @ hidden_ND[rows]

        returned_d_weight = None
        if d_weight is not None and not settings.into_grad:
            returned_d_weight = d_weight.to(weight_VD.dtype)
        return d_hidden.to(hidden_ND.dtype), returned_d_weight, None, None


def slices(size: int, step: int) -> list[slice]:
    """All of `size` in slices of `step`; of size 0 one empty slice, so that a step without loss tokens has a graph."""
    pieces = [slice(start, min(start + step, size)) for start in range(0, size, step)]
    return pieces or [slice(0, 0)]


def _label_columns(labels_C: Tensor, entries: slice) -> tuple[Tensor, Tensor]:
    """The column of each label in a tile, and whether the label is inside it; if not, the column means nothing."""
    column_C = labels_C - entries.start
    inside_C = (column_C >= 0) & (labels_C < entries.stop)
    return column_C.clamp(0, entries.stop - entries.start - 1), inside_C

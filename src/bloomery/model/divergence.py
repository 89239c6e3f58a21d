"""The divergence of a model from its teacher, as a head inside `Decoder.forward`.

Legend: B batch, T time, D width, S width of a teacher, V vocabulary, N rows (the positions that a loss is computed
for), C rows of one chunk, R results of a position.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bloomery.facts.limits import CPU_BLOCK
from bloomery.model.heads import capped, slices
from bloomery.model.norms import widened


@dataclass(frozen=True)
class Teacher:
    """`hidden` gives the last hidden states [N, S] of the batch at its loss positions [N]; `output` and `softcap` make
    logits of them. `output`: None where both are those of the model itself.
    """

    hidden: Callable[[Tensor], Tensor]
    output: nn.Linear | None = None
    softcap: float | None = None


# Rows of `Divergence`, beside the log-probabilities of both models.
DIVERGENCE = 1
AGREEMENT = 3
ENTROPY = 4
DivergenceKind = Literal["forward_kl", "reverse_kl", "jsd"]


@dataclass(frozen=True)
class DivergenceMeasure:
    """How a teacher's distribution t and the model's m at a position are compared, both at `temperature`.

    forward_kl: KL(t || m). reverse_kl: KL(m || t). jsd: beta KL(t || x) + (1 - beta) KL(m || x) of the mixture x =
    beta t + (1 - beta) m (arXiv:2306.13649, equation 1). Entries that the teacher does not have are impossible to it;
    but of reverse_kl and jsd, which would be infinite, the model's distribution over the others is taken.
    """

    kind: DivergenceKind = "forward_kl"
    temperature: float = 1.0
    jsd_beta: float = 0.5

    def __call__(
        self, logprobs_CV: Tensor, teacher_logprobs_CV: Tensor, *, is_whole: bool
    ) -> Tensor:
        """[C], in nats, of log-probabilities of the entries that both have; `is_whole`: the model has no others."""
        if self.kind == "forward_kl":
            return _kl(teacher_logprobs_CV, logprobs_CV)
        if not is_whole:
            logprobs_CV = torch.log_softmax(logprobs_CV, 1)  # over these entries alone
        if self.kind == "reverse_kl":
            return _kl(logprobs_CV, teacher_logprobs_CV)
        beta = self.jsd_beta
        mixture_CV = torch.logaddexp(
            logprobs_CV + math.log1p(-beta), teacher_logprobs_CV + math.log(beta)
        )
        return beta * _kl(teacher_logprobs_CV, mixture_CV) + (1 - beta) * _kl(
            logprobs_CV, mixture_CV
        )


def _kl(logprobs_CV: Tensor, other_logprobs_CV: Tensor) -> Tensor:
    """[C]: KL of the first from the second."""
    return (logprobs_CV.exp() * (logprobs_CV - other_logprobs_CV)).sum(1)


@dataclass(frozen=True)
class Divergence:
    """float32 [4, B, T] of each position: the log-probability of its label, the divergence from the teacher in nats,
    the teacher's log-probability of the label, and 1 where both think the same token the likeliest; with `entropy`
    [5, B, T], last the entropy of the model's distribution in nats, without a gradient but for `entropy_gradient`.

    All are 0 where the weight is 0. Log-probabilities are of softmax(logits); those of `at_temperature` and the
    teacher's, as the divergence and the entropy, of softmax(logits / temperature). Logits of both models exist
    for `chunk` rows at a time and are recomputed in backward. Embeddings of one vocabulary may be padded to
    different sizes: to the teacher, entries that only the model has are impossible.
    """

    labels_BT: Tensor
    loss_mask_BT: Tensor
    chunk: int
    measure: DivergenceMeasure
    teacher: Teacher
    at_temperature: bool = False
    loss_positions_N: Tensor | None = None  # as in `LabelScores`
    entropy: bool = False
    entropy_gradient: bool = False

    def __call__(self, hidden_BTD: Tensor, output: nn.Linear, softcap: float | None) -> Tensor:
        # Only positions with a loss are computed: their hidden states are taken out of the batch.
        loss_positions = self.loss_positions_N
        if loss_positions is None:
            loss_positions = self.loss_mask_BT.flatten().nonzero().squeeze(1)
        with torch.no_grad():
            teacher_hidden_NS = self.teacher.hidden(loss_positions)
        hidden_ND = hidden_BTD.flatten(0, 1)[loss_positions]
        labels_N = self.labels_BT.flatten()[loss_positions]

        # The teacher's head is cut to the entries that both vocabularies have. Some architectures of
        # transformers have a bias on their logits.
        teacher_output, teacher_softcap = self.teacher.output, self.teacher.softcap
        if teacher_output is None:
            teacher_output, teacher_softcap = output, softcap
        num_shared = min(output.out_features, teacher_output.out_features)
        teacher_bias = None if teacher_output.bias is None else teacher_output.bias[:num_shared]
        heads = (output.weight, output.bias, teacher_output.weight[:num_shared], teacher_bias)

        compared = partial(
            _scores_and_divergence,
            softcap=softcap,
            teacher_softcap=teacher_softcap,
            measure=self.measure,
            at_temperature=self.at_temperature,
            entropy=self.entropy,
            entropy_gradient=self.entropy_gradient,
        )
        loss_results: Tensor = _Compared.apply(  # type: ignore[no-untyped-call]  # torch's `apply`
            hidden_ND, *heads, teacher_hidden_NS, labels_N, self.chunk, compared
        )

        # Back at their positions in the batch, with zeros between them.
        blank_results = loss_results.new_zeros(len(loss_results), self.labels_BT.numel())
        all_results = blank_results.index_copy(1, loss_positions, loss_results)
        return all_results.view(-1, *self.labels_BT.shape)


# Of the logits [C, V] of the model and its teacher and the labels [C], what is asked of them.
Compared = Callable[[Tensor, Tensor, Tensor], Tensor]


class _ComparedContext(Protocol):
    """What `_Compared` keeps from forward for backward."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    dtype: torch.dtype
    chunk: int
    compared: Compared

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...


class _Compared(torch.autograd.Function):
    """Compares a model with its teacher in rows of `chunk`; backward computes both models' logits again.

    A CPU passes over logits a few rows at a time, which its caches hold: over those of a chunk the passes would take
    several times as long as the matmuls.
    """

    @staticmethod
    def forward(
        ctx: _ComparedContext,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        teacher_weight_VS: Tensor,
        teacher_bias_V: Tensor | None,
        teacher_hidden_NS: Tensor,
        labels_N: Tensor,
        chunk: int,
        compared: Compared,
    ) -> Tensor:
        device = weight_VD.device.type
        ctx.dtype = weight_VD.dtype
        if torch.is_autocast_enabled(device):
            ctx.dtype = torch.get_autocast_dtype(device)
        ctx.chunk = chunk
        ctx.compared = compared
        model = (hidden_ND, weight_VD, bias_V)
        teacher = (teacher_hidden_NS, teacher_weight_VS, teacher_bias_V)
        ctx.save_for_backward(*model, *teacher, labels_N)
        results = list[Tensor]()
        for rows, logits_CV, teacher_logits_CV in _logits_of_both(model, teacher, ctx):
            labels_C = labels_N[rows]
            results += [
                compared(logits_CV[block], teacher_logits_CV[block], labels_C[block])
                for block in _blocks(logits_CV)
            ]
        return torch.cat(results, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: _ComparedContext, gradient_RN: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, bias_V, *teacher, labels_N = ctx.saved_tensors
        model = (hidden_ND, weight_VD, bias_V)
        sum_dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
        weight = weight_VD.to(ctx.dtype)
        d_hidden = torch.empty_like(hidden_ND)
        d_weight = d_bias = None
        if ctx.needs_input_grad[1]:
            d_weight = torch.zeros_like(weight_VD, dtype=sum_dtype)
        if ctx.needs_input_grad[2]:
            d_bias = torch.zeros_like(bias_V, dtype=sum_dtype)
        for rows, logits_CV, teacher_logits_CV in _logits_of_both(model, teacher, ctx):
            labels_C = labels_N[rows]
            gradient_RC = gradient_RN[:, rows]
            for block in _blocks(logits_CV):
                # Logits become their gradient in place.
                block_logits = logits_CV[block].detach().requires_grad_()
                with torch.enable_grad():
                    results = ctx.compared(block_logits, teacher_logits_CV[block], labels_C[block])
                (gradient,) = torch.autograd.grad(results, block_logits, gradient_RC[:, block])
                logits_CV[block] = gradient
            d_hidden[rows] = (logits_CV @ weight).to(d_hidden.dtype)
            if d_weight is not None:
                d_weight += logits_CV.T @ hidden_ND[rows].to(ctx.dtype)
            if d_bias is not None:
                d_bias += logits_CV.sum(0, dtype=sum_dtype)
        returned_d_weight = None if d_weight is None else d_weight.to(weight_VD.dtype)
        returned_d_bias = None if d_bias is None else d_bias.to(bias_V.dtype)
        return d_hidden, returned_d_weight, returned_d_bias, *[None] * 6


def _logits_of_both(
    model: Sequence[Tensor | None], teacher: Sequence[Tensor | None], ctx: _ComparedContext
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Rows with the logits of the model and of its teacher, in the dtype of matmuls.

    Of each its hidden states [N, D], weight [V, D] and bias [V] or None.
    """
    hidden, weight, bias = (None if tensor is None else tensor.to(ctx.dtype) for tensor in model)
    teacher_hidden, teacher_weight, teacher_bias = (
        None if tensor is None else tensor.to(ctx.dtype) for tensor in teacher
    )
    assert hidden is not None and weight is not None
    assert teacher_hidden is not None and teacher_weight is not None
    for rows in slices(len(hidden), ctx.chunk):
        logits_CV = F.linear(hidden[rows], weight, bias)
        yield rows, logits_CV, F.linear(teacher_hidden[rows], teacher_weight, teacher_bias)


def _blocks(logits_CV: Tensor) -> list[slice]:
    """Rows that are passed over at once."""
    num_rows = len(logits_CV)
    if logits_CV.device.type == "cpu":
        num_rows = CPU_BLOCK // logits_CV.shape[1]
    return slices(len(logits_CV), max(1, num_rows))


def _scores_and_divergence(
    raw_logits_CV: Tensor,
    raw_teacher_logits_CV: Tensor,
    labels_C: Tensor,
    *,
    softcap: float | None,
    teacher_softcap: float | None,
    measure: DivergenceMeasure,
    at_temperature: bool,
    entropy: bool,
    entropy_gradient: bool,
) -> Tensor:
    """[4, C] or [5, C], as in `Divergence`. The raw logits are those without a soft-cap, in any dtype."""
    temperature = measure.temperature
    logits_CV = capped(widened(raw_logits_CV), softcap)
    with torch.no_grad():
        teacher_logits_CV = capped(widened(raw_teacher_logits_CV), teacher_softcap)
        teacher_logprobs_CV = _logprobs(teacher_logits_CV, temperature)

    # Each pass over the vocabulary costs as much as a part of the matmul: none is made twice.
    num_shared = teacher_logprobs_CV.shape[1]
    logprobs_CV = _logprobs(logits_CV, temperature)
    is_scored = at_temperature or temperature == 1
    scored_CV = logprobs_CV if is_scored else torch.log_softmax(logits_CV, 1)
    scores_C = scored_CV.gather(1, labels_C[:, None]).squeeze(1)
    divergence_C = measure(
        logprobs_CV[:, :num_shared], teacher_logprobs_CV, is_whole=num_shared == logits_CV.shape[1]
    )
    with torch.no_grad():
        shared_labels_C1 = labels_C[:, None].clamp(max=num_shared - 1)
        teacher_scores_C = teacher_logprobs_CV.gather(1, shared_labels_C1).squeeze(1)
        agree_C = (logits_CV.argmax(1) == teacher_logprobs_CV.argmax(1)).to(scores_C.dtype)
    entropies = []
    if entropy:
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropies = [-(logprobs_CV.exp() * logprobs_CV).sum(1)]
    return torch.stack([scores_C, divergence_C, teacher_scores_C, agree_C, *entropies])


def _logprobs(logits_CV: Tensor, temperature: float) -> Tensor:
    return torch.log_softmax(logits_CV if temperature == 1 else logits_CV / temperature, 1)

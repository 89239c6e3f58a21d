"""A teacher of another tokenizer: log-probabilities of spans of text that both models have in tokens of their own.

Let s be a span, with the student's tokens y and the teacher's tokens z of its bytes. Its log ratio is
R(s) = sum over y of log m(y) - sum over z of log t(z), and -R(s) is the advantage of the span, thus of each of its
tokens: log m(s) is the sum of theirs. With one token per span this is the estimator of a sampled token. The chain rule
over merged tokens is that of TRL's GOLD (pull requests 4765 and 5885), spans by bytes as there; one advantage per span,
without any ratio of a part of it, is policy gradient with spans as actions (arXiv:2306.13649, section 3, for tokens).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from bloomery.data.batch import Batch
from bloomery.infer.forward import eval_mode, forward_all, loss_positions_in, to_device
from bloomery.model.decoder import Decoder
from bloomery.model.heads import LabelScores, ScoreSettings
from bloomery.parallel.mesh import SINGLE_RANK, Mesh
from bloomery.train.objectives.losses import LossParts, sum_and_count
from bloomery.train.rl.rollout import SPANS, TEACHER_SPANS, teacher_batch

# In extras of a batch: float32 [B, T], at each token the teacher's log-probability of the span that it is in.
TEACHER_SPAN_LOGPS = "teacher_span_logps"


def count_aligned_tokens(batch: Batch) -> float:
    return float((batch.loss_mask * (batch.extras[SPANS] >= 0)).sum())


@final
@dataclass(frozen=True)
class SpanTeacherPass:
    """Completes the micro-batches of a step with `TEACHER_SPAN_LOGPS`, before the step and without gradients.

    `together`: micro-batches that share each load of streamed weights; None: all of the step.
    """

    teacher: Decoder
    settings: ScoreSettings
    precision: str
    together: int | None = 1
    mesh: Mesh = SINGLE_RANK

    def __call__(self, model: Decoder, batches: Sequence[Batch]) -> list[Batch]:
        del model
        together = len(batches) if self.together is None else self.together
        device = self.teacher.device
        completed = []
        with eval_mode(self.teacher):
            for start in range(0, len(batches), together):
                group = batches[start : start + together]
                texts = [to_device(teacher_batch(batch), device) for batch in group]
                heads = [
                    LabelScores(text.labels, text.loss_mask, self.settings, loss_positions_in(text))
                    for text in texts
                ]
                outputs = forward_all(self.teacher, texts, heads, precision=self.precision)
                for batch, output in zip(group, outputs, strict=True):
                    # A span may be on two of the ranks that share its sequence.
                    full_batch = batch.full_batch or batch
                    spans_BT = full_batch.extras[SPANS].to(device)
                    teacher_spans_BT = full_batch.extras[TEACHER_SPANS].to(device)
                    scores_BT = self.mesh.all_gather_tokens(output.head)
                    logps_BT = at_tokens(span_sums(scores_BT, teacher_spans_BT), spans_BT)
                    completed.append(
                        batch.with_extras(**{TEACHER_SPAN_LOGPS: self.mesh.own_tokens(logps_BT)})
                    )
        return completed


def span_sums(values_BT: Tensor, spans_BT: Tensor) -> Tensor:
    """[B, T]: at each number of a span the sum over its tokens. `spans_BT`: the number, within its row; -1 for none."""
    rows, length = spans_BT.shape
    first_of_row = torch.arange(rows, device=spans_BT.device)[:, None] * length
    span_indices = (first_of_row + spans_BT.clamp(min=0)).flatten()
    of_spans = torch.where(spans_BT >= 0, values_BT, 0.0).flatten()
    return torch.zeros_like(of_spans).index_add(0, span_indices, of_spans).view(rows, length)


def at_tokens(sums_BT: Tensor, spans_BT: Tensor) -> Tensor:
    """[B, T]: at each token the value of its span, 0 without one."""
    return torch.where(spans_BT >= 0, sums_BT.gather(1, spans_BT.clamp(min=0)), 0.0)


@final
@dataclass(frozen=True)
class SpanScores:
    """float32 [4, B, T], in the places of `Divergence`: the log-probability of each label, the log ratio of its span
    per token of the span, that of the whole span, and 1 in spans; then the entropy where `scores` have one.

    All but the log-probabilities and the entropy are without a gradient.
    """

    scores: LabelScores
    batch: Batch
    mesh: Mesh = SINGLE_RANK

    def __call__(self, hidden_BTD: Tensor, output: nn.Linear, softcap: float | None) -> Tensor:
        results = self.scores(hidden_BTD, output, softcap)
        entropies = []
        scores_BT = results
        if self.scores.settings.entropy:
            scores_BT = results[0]
            entropies = [results[1]]
        with torch.no_grad():
            # A span has its tokens' loss or none; its tokens may be on two of the ranks that share a sequence.
            full_batch = self.batch.full_batch or self.batch
            spans_BT = torch.where(full_batch.loss_mask != 0, full_batch.extras[SPANS], -1)
            in_span_BT = (spans_BT >= 0).to(scores_BT.dtype)
            all_scores_BT = self.mesh.all_gather_tokens(scores_BT)
            all_logps_BT = at_tokens(span_sums(all_scores_BT, spans_BT), spans_BT)
            all_lengths_BT = at_tokens(span_sums(in_span_BT, spans_BT), spans_BT)
            is_aligned_BT, logps_BT, lengths_BT = map(
                self.mesh.own_tokens, (in_span_BT, all_logps_BT, all_lengths_BT)
            )
            ratios_BT = is_aligned_BT * (logps_BT - self.batch.extras[TEACHER_SPAN_LOGPS])
            shares_BT = ratios_BT / lengths_BT.clamp(min=1)
        return torch.stack([scores_BT, shares_BT, ratios_BT, is_aligned_BT, *entropies])


def span_loss(output_4BT: Tensor, loss_mask_BT: Tensor) -> LossParts:
    """The log ratio of each span once; its gradient is that of the span's log-probability, weighed by the log ratio.

    Over all spans that could have been sampled, the mean of the gradient is that of KL(model || teacher) of spans.
    """
    scores_BT, shares_BT, ratios_BT, is_aligned_BT = output_4BT
    weights_BT = loss_mask_BT * is_aligned_BT.detach()
    losses_BT = shares_BT.detach() + ratios_BT.detach() * (scores_BT - scores_BT.detach())
    is_loss_token_BT = loss_mask_BT != 0
    metrics = {
        "log_ratio": sum_and_count(shares_BT, weights_BT != 0),
        "aligned": sum_and_count(is_aligned_BT, is_loss_token_BT),
    }
    return LossParts((losses_BT * weights_BT).sum(), weights_BT.sum(), metrics)

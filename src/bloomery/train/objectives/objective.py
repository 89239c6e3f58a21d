"""An objective: the head that the decoder runs, the loss of its output as sums, and what both are built from."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from bloomery.data.batch import Batch
from bloomery.facts.objectives import LossUnit
from bloomery.infer.forward import eval_mode, forward_all, loss_positions_in, to_device
from bloomery.model.adapters.lora import adapters_disabled
from bloomery.model.decoder import Decoder
from bloomery.model.heads import Head, LabelScores, ScoresAndValues, ScoreSettings
from bloomery.parallel.context import all_tokens
from bloomery.parallel.mesh import Mesh
from bloomery.recipe.objectives import ObjectiveSection
from bloomery.train.objectives.losses import LossParts
from bloomery.train.scorers.client import ScoredTeacher

Before = Callable[[Decoder, Sequence[Batch]], list[Batch]]


def count_loss_tokens(batch: Batch) -> float:
    return float(batch.loss_mask.sum())


@dataclass(frozen=True)
class Objective:
    """`head`: what the decoder computes for a micro-batch; `loss`: its loss as sums.

    `count`: what a step divides by, known before the first backward; equals the count of `loss`. `before` completes
    the micro-batches of a step first, all `together` or each on its own. Both take batches on the host. `loss_unit`:
    what the loss is counted per; per token it is in nats. `rows`: of numbers that the head gives, before [B, T].
    """

    head: Callable[[Batch], Head]
    loss: Callable[[Tensor, Batch], LossParts]
    count: Callable[[Batch], float] = count_loss_tokens
    before: Before | None = None
    together: bool = False
    loss_unit: LossUnit = "token"
    rows: tuple[int, ...] = ()


@dataclass(frozen=True)
class Scoring:
    """The head of per-token objectives; logits exist for at most `chunk` positions at once.

    The head adds the output layer's gradient to its `.grad` itself. With `entropy` it gives [2, B, T], and with a
    `value_head`, too, [3, B, T].
    """

    settings: ScoreSettings
    value_head: nn.Linear | None = None

    def __call__(self, batch: Batch) -> LabelScores | ScoresAndValues:
        scores = self.label_scores(batch)
        return scores if self.value_head is None else ScoresAndValues(scores, self.value_head)

    def label_scores(self, batch: Batch) -> LabelScores:
        settings = replace(self.settings, into_grad=True)
        return LabelScores(batch.labels, batch.loss_mask, settings, loss_positions_in(batch))


def batch_label_scores(
    model: Decoder, batch: Batch, settings: ScoreSettings, *, precision: str
) -> Tensor:
    """float32 [B, T]: the log-probability of each loss token, 0 elsewhere."""
    (scores_BT,) = all_label_scores(model, [batch], settings, precision=precision)
    return scores_BT


def all_label_scores(
    model: Decoder, batches: Sequence[Batch], settings: ScoreSettings, *, precision: str
) -> list[Tensor]:
    """`batch_label_scores` of each; every layer computes all of them before the next one."""
    heads = [
        LabelScores(batch.labels, batch.loss_mask, settings, loss_positions_in(batch))
        for batch in batches
    ]
    outputs = forward_all(model, batches, heads, precision=precision)
    # Stages of a pipeline without the head have no scores, and nobody reads theirs.
    return [
        output.head if model.ends_here else torch.zeros_like(batch.loss_mask)
        for output, batch in zip(outputs, batches, strict=True)
    ]


def in_groups(batches: Sequence[Batch], size: int, device: torch.device) -> Iterator[list[Batch]]:
    """The batches on the device, at most `size` at once."""
    for start in range(0, len(batches), size):
        yield [to_device(batch, device) for batch in batches[start : start + size]]


@contextmanager
def as_reference(model: Decoder, copy: Decoder | None) -> Iterator[Decoder]:
    """Inside the block, in evaluation mode: the frozen copy of the start, else `model` without its adapter."""
    if copy is not None:
        with eval_mode(copy):
            yield copy
        return
    with eval_mode(model), adapters_disabled(model):
        yield model


@dataclass(frozen=True)
class BaseScores:
    """Completes batches with reference log-probabilities: of `copy`, or of the base model, without its adapter.

    `together`: batches that share each load of streamed weights.
    """

    settings: ScoreSettings
    precision: str
    copy: Decoder | None = None
    together: int = 1

    def __call__(self, model: Decoder, batches: Sequence[Batch]) -> list[Batch]:
        device = model.device
        with as_reference(model, self.copy) as reference:
            scores = [
                scores_BT
                for group in in_groups(batches, self.together, device)
                for scores_BT in all_label_scores(
                    reference, group, self.settings, precision=self.precision
                )
            ]
        return [
            batch.with_extras(reference=scores_BT)
            for batch, scores_BT in zip(batches, scores, strict=True)
        ]


@dataclass(frozen=True)
class ObjectiveInputs:
    """What objectives are built from. `base_scores`: None where a file has the reference log-probabilities.

    `load_teacher`: of a distillation alone; None on a stage without the head. `together`: micro-batches that share each
    load of streamed weights. `aligns_texts`: the teacher has another tokenizer. `scored_teacher`: one in scoring
    processes, in place of one that is loaded here.
    """

    objective: ObjectiveSection
    precision: str
    scoring: Scoring
    base_scores: BaseScores | None
    mesh: Mesh
    load_teacher: Callable[[], Decoder | None]
    together: int = 1
    aligns_texts: bool = False
    scored_teacher: ScoredTeacher | None = None


def full_batch_of(batch: Batch) -> Batch:
    assert batch.full_batch is not None, "a source keeps it where texts have one loss"
    return batch.full_batch


def own_share(count: Callable[[Batch], float], mesh: Mesh) -> Callable[[Batch], float]:
    """A count of texts, which may be on several ranks: each of those that share sequences counts its share of all."""
    if mesh.context == 1:
        return count
    return lambda batch: count(full_batch_of(batch)) / mesh.context


# In extras of a batch: the teacher's last hidden states [N, S] at its loss tokens.
TEACHER_HIDDEN = "teacher_hidden"


def of_all_tokens(output: Tensor, batch: Batch, mesh: Mesh) -> tuple[Tensor, Batch]:
    """The head's output for all tokens of the sequences that ranks share, from this rank's; and their batch, with what
    was computed of this rank's tokens.
    """
    full_batch = full_batch_of(batch)
    scored_later = {
        name: mesh.all_gather_tokens(tensor) if tensor.ndim else tensor
        for name, tensor in batch.extras.items()
        if name not in full_batch.extras and name != TEACHER_HIDDEN
    }
    return all_tokens(output, mesh), full_batch.with_extras(**scored_later)


def one_after_the_other(*all_before: Before | None) -> Before | None:
    """One that does what each of these does, in their order; None for none."""
    present = [before for before in all_before if before is not None]
    if len(present) < 2:
        return present[0] if present else None

    def together(model: Decoder, batches: Sequence[Batch]) -> list[Batch]:
        completed = list(batches)
        for before in present:
            completed = before(model, completed)
        return completed

    return together

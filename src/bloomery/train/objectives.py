"""What training minimises: a head for the decoder to run, and how its output becomes sums."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from bloomery.data.loader import Batch
from bloomery.errors import UserError
from bloomery.model.decoder import Decoder
from bloomery.model.heads import Head, LabelScores
from bloomery.plan.types import Plan
from bloomery.recipe.schema import OrPo, Preference, SimPo
from bloomery.train.losses import (
    LossParts,
    Pairs,
    dpo_loss,
    ipo_loss,
    next_token_loss,
    orpo_loss,
    pairs_of,
    simpo_loss,
    there_pairs,
)

Before = Callable[[Decoder, Sequence[Batch]], list[Batch]]


def learned_labels(batch: Batch) -> float:
    """How many labels of a batch on the host are learned."""
    return float(batch.weights.sum())


@dataclass(frozen=True)
class Objective:
    """`head` says what the decoder computes for a micro-batch, `loss` what that is worth.

    `count` is what a step divides by, of a batch on the host, so that it is known before the first backward; it equals
    the count of `loss`. `before` completes the micro-batches of a whole step before that, on the host, too. `per` names
    what is counted.
    """

    head: Callable[[Batch], Head]
    loss: Callable[[Tensor, Batch], LossParts]
    count: Callable[[Batch], float] = learned_labels
    before: Before | None = None
    per: Literal["token", "pair", "answer"] = "token"


@dataclass(frozen=True)
class Scoring:
    """How labels are scored: the logits of at most `chunk` rows exist at once.

    The output layer's gradient is added to its `.grad` by the head itself.
    """

    chunk: int
    compiled: bool = False

    def __call__(self, batch: Batch) -> LabelScores:
        return LabelScores(batch.labels, batch.weights, self.chunk, self.compiled, into_grad=True)


def build_objective(plan: Plan) -> Objective:
    """What the plan says is minimised."""
    scoring, asked = Scoring(plan.model.score_chunk, plan.train.compile), plan.objective
    if asked.kind in ("pretrain", "sft"):
        return likelihood(scoring)
    if isinstance(asked, Preference):
        return preference(asked, scoring)
    if isinstance(asked, SimPo | OrPo):
        return preference(asked, scoring)
    raise UserError(
        f"objective.kind={asked.kind} is not in this version of Bloomery",
        where="objective.kind",
        remedy="set objective.kind to pretrain, sft, dpo, ipo, simpo or orpo",
        code=2,
    )


def pretraining(*, score_chunk: int, compiled: bool = False) -> Objective:
    """Every label of weight 1 is learned."""
    return likelihood(Scoring(score_chunk, compiled))


def likelihood(scoring: Scoring) -> Objective:
    """Nats a learned label: pretraining and supervised fine-tuning differ in the weights that the data gives."""
    return Objective(head=scoring, loss=lambda scores_BT, batch: next_token_loss(scores_BT, batch.weights))


def preference(asked: Preference | SimPo | OrPo, scoring: Scoring) -> Objective:
    """Of two answers the chosen one is made likelier."""

    def loss(scores_BT: Tensor, batch: Batch) -> LossParts:
        pairs = _pairs(scores_BT, batch)
        if isinstance(asked, SimPo):
            return simpo_loss(pairs, beta=asked.beta, gamma=asked.gamma)
        if isinstance(asked, OrPo):
            return orpo_loss(pairs, beta=asked.beta)
        assert batch.reference is not None, "the scores of the model of the start come with the batch"
        reference = _pairs(batch.reference.to(scores_BT.dtype), batch)
        if asked.kind == "ipo":
            return ipo_loss(pairs, reference, beta=asked.beta)
        return dpo_loss(pairs, reference, beta=asked.beta, label_smoothing=asked.label_smoothing)

    return Objective(head=scoring, loss=loss, count=_count_pairs, per="pair")


def _pairs(scores_BT: Tensor, batch: Batch) -> Pairs:
    assert batch.sequences is not None, "pairs are numbered"
    return pairs_of(scores_BT, batch.weights, batch.sequences)


def _count_pairs(batch: Batch) -> float:
    assert batch.sequences is not None, "pairs are numbered"
    return float(there_pairs(batch.sequences).sum())

"""What training minimises: a head for the decoder to run, and how its output becomes sums."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from bloomery.data.loader import Batch
from bloomery.model.heads import Head, LabelScores


class LossParts(NamedTuple):
    """Sums, never means: whoever knows the count of the whole step divides, once."""

    total: Tensor  # nats, summed over the learned tokens of a micro-batch
    count: Tensor  # type: ignore[assignment]  # how many those are; hides tuple.count


@dataclass(frozen=True)
class Objective:
    """`head` says what the decoder computes for a micro-batch, `loss` what that is worth."""

    head: Callable[[Batch], Head]
    loss: Callable[[Tensor, Batch], LossParts]


def next_token_loss(scores_BT: Tensor, weights_BT: Tensor) -> LossParts:
    """Negative log-likelihood of the labels; scores are float32 log-probabilities."""
    return LossParts(-(scores_BT * weights_BT).sum(), weights_BT.sum())


def pretraining(*, score_chunk: int, compiled: bool = False) -> Objective:
    """Every label of weight 1 is learned; the logits of at most `score_chunk` rows exist at once.

    The output layer's gradient is added to its `.grad` by the head itself.
    """
    return Objective(
        head=lambda batch: LabelScores(batch.labels, batch.weights, score_chunk, compiled, into_grad=True),
        loss=lambda scores_BT, batch: next_token_loss(scores_BT, batch.weights),
    )

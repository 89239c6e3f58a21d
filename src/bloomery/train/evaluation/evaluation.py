"""Looking at a model in the middle of training, without leaving a trace: the loss on the validation split."""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from bloomery.data.loading.loader import Batch, Loader
from bloomery.model.decoder import Decoder
from bloomery.monitor.events import EvalDone
from bloomery.plan.types import EvalPlan
from bloomery.train.forward import looking, to_device
from bloomery.train.objectives.build import Objective
from bloomery.train.objectives.losses import added, means
from bloomery.train.step import compute_loss


@dataclass(frozen=True)
class Evaluation:
    """`loss` is nats per scored token, or what the objective has a pair or an answer; `bytes` are those that the scored
    tokens stand for, None where the loss is not about them.
    """

    loss: float
    tokens: int
    bytes: int | None
    seconds: float
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def perplexity(self) -> float | None:
        """None of a loss that is not nats per token."""
        if self.bytes is None:
            return None
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Nats to bits, per byte of text: what a compressor would need. None when no byte was scored."""
        return self.loss * self.tokens / math.log(2) / self.bytes if self.bytes else None

    def event(self, step: int) -> EvalDone:
        """What is told of it; a loss that is not finite is None there."""
        return EvalDone(
            step=step,
            loss=_finite(self.loss),
            perplexity=_finite(self.perplexity),
            bits_per_byte=_finite(self.bits_per_byte),
            tokens=self.tokens,
            seconds=self.seconds,
            metrics=self.metrics,
        )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def evaluate(
    model: Decoder,
    loader: Loader,
    objective: Objective,
    *,
    plan: EvalPlan,
    precision: str,
    token_bytes: np.ndarray,
    limit: int | None,
) -> Evaluation | None:
    """Loss over the rows of `loader`, the validation split, in batches of one shape. None when nothing can be scored.

    `token_bytes`: int32 [vocabulary], how many bytes of text each id stands for. `limit`: rows read at most.
    """
    begun = time.perf_counter()
    device = next(model.parameters()).device
    total, count, tokens, size = 0.0, 0, 0, 0
    sums: dict[str, Tensor] = {}
    batches: Iterable[Batch] = loader.validation_batches(plan.micro_batch, limit=limit)
    with looking(model):
        for batch in completed(model, batches, objective):
            parts = compute_loss(model, to_device(batch, device), objective, precision=precision)
            total += float(parts.total)
            count += round(float(parts.count))
            sums = added(sums, parts.metrics)
            tokens += int((batch.weights > 0).sum())
            size += scored_bytes(batch, token_bytes)
    if count == 0:
        return None
    scored = size if objective.per == "token" else None
    return Evaluation(total / count, tokens, scored, time.perf_counter() - begun, means(sums))


def completed(model: Decoder, batches: Iterable[Batch], objective: Objective) -> Iterator[Batch]:
    """With what the objective asks the model before it scores them; all are read at once only where all must be known.

    KTO alone needs that, for its drift: 4 bytes a token on the model's device.
    """
    if objective.before is None:
        yield from batches
        return
    parts: Iterable[Sequence[Batch]] = [list(batches)] if objective.together else ([batch] for batch in batches)
    for part in parts:
        yield from objective.before(model, part)


def scored_bytes(batch: Batch, token_bytes: np.ndarray) -> int:
    """Bytes of the labels whose weight is not 0."""
    return int(token_bytes[batch.labels[batch.weights > 0].numpy()].sum())

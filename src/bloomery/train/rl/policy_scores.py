"""What the model that trains, or its reference model, says about completions: log-probabilities and values."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from bloomery.data.batch import Batch
from bloomery.infer.forward import eval_mode, forward_all
from bloomery.model.decoder import Decoder
from bloomery.model.heads import Head
from bloomery.plan.types import TrainPlan
from bloomery.train.objectives.objective import Scoring, as_reference, in_groups
from bloomery.train.rl.rollout import (
    Complete,
    MicroBatchShape,
    RolloutSample,
    completion_span,
    pack_for_rank,
    samples_of_rank,
)
from bloomery.train.state import TrainState

# Rows of a policy's head: the log-probability of each label, and with a value head the value of each position.
LOGPS = 0
VALUES = 2


@final
class PolicyScores:
    """Computes them as training does, on all ranks, which call it together."""

    def __init__(
        self,
        state: TrainState,
        scoring: Callable[[Batch], Head],
        reference: Decoder | None,
        train: TrainPlan,
        complete: Complete,
        before: Callable[[Decoder, Sequence[Batch]], list[Batch]] | None = None,
    ) -> None:
        """`scoring`: the head of a micro-batch, which gives rows of numbers. `reference`: the frozen copy of the start;
        None where the model without its adapter is the reference.

        `complete`: micro-batches, with the pictures of their samples. `before`: what a head needs in its micro-batches,
        computed first.
        """
        self._state = state
        self._scoring = scoring
        self._reference = reference
        self._precision = train.precision
        self._together = train.stream_micro_batches
        self._complete = complete
        self._before = before

    def logps(
        self,
        samples: Sequence[RolloutSample],
        shape: MicroBatchShape,
        *,
        of_reference: bool = False,
    ) -> list[list[float]]:
        """Of every sample's tokens under the model as it is, or under its reference model."""
        return self.rows_of_head(samples, shape, (LOGPS,), of_reference=of_reference)[0]

    def rows_of_head(
        self,
        samples: Sequence[RolloutSample],
        shape: MicroBatchShape,
        rows: Sequence[int],
        *,
        of_reference: bool = False,
    ) -> list[list[list[float]]]:
        """Of each of these rows of the head's output the numbers of every sample's tokens.

        Log-probabilities are 0 for a sample without loss.
        """
        # 1. Ranks share out the samples, and take equally many forwards.
        model = self._state.model
        device = model.device
        mesh = self._state.model_and_optimizer.mesh
        batches, places = pack_for_rank(samples, shape, mesh, complete=self._complete)

        if self._before is not None:
            batches = self._before(model, batches)

        # 2. The outputs for this rank's samples. The value head is of the policy alone.
        scoring = self._scoring
        if of_reference and isinstance(scoring, Scoring):
            scoring = replace(scoring, value_head=None)
        outputs = list[Tensor]()
        scored = as_reference(model, self._reference) if of_reference else _as_it_is(model)
        with scored as scored_model:
            for group in in_groups(batches, self._together, device):
                heads = [scoring(batch) for batch in group]
                for output in forward_all(scored_model, group, heads, precision=self._precision):
                    if mesh.last_stage:
                        outputs.append(torch.stack([output.head[row] for row in rows]))
        own_numbers = None
        if mesh.last_stage:
            # The host waits once for all micro-batches.
            outputs_on_host = mesh.all_gather_tokens(torch.stack(outputs).cpu())
            own_numbers = [
                outputs_on_host[
                    place.micro_batch, :, place.row, completion_span(sample, place)
                ].tolist()
                for sample, place in zip(samples_of_rank(samples, mesh), places, strict=True)
            ]

        # 3. Those of all: the ranks of the last stage have them, and of those that share sequences the first one.
        numbers: list[list[list[float]]] = [[] for _ in samples]
        numbers_by_rank = mesh.all_gather_json(own_numbers if mesh.context_rank == 0 else None)
        first_of_last_stage = mesh.world - mesh.data_world
        for first, numbers_of_group in enumerate(
            numbers_by_rank[first_of_last_stage :: mesh.context]
        ):
            numbers[first :: mesh.sequence_world] = numbers_of_group
        return [[of_sample[row] for of_sample in numbers] for row in range(len(rows))]


@contextmanager
def _as_it_is(model: Decoder) -> Iterator[Decoder]:
    with eval_mode(model):
        yield model

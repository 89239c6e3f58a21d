"""Health of each step: update sizes, unchanged parameters, labels that are not the next tokens."""

import math
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn

from bloomery.data.batch import Batch
from bloomery.model.divergence import Divergence
from bloomery.model.heads import LabelScores, ScoresAndValues
from bloomery.model.io.parameters import local
from bloomery.monitor.events import StepHealth
from bloomery.train.objectives.objective import Objective

SAMPLE = 4096  # elements of each tensor: its root mean square to about 1%
POSITIONS = 8192  # of a step whose labels are checked
EARLY = frozenset((1, 2, 3, 5, 10, 15, 20, 30, 40, 50, 100))
Ints = np.ndarray[Any, np.dtype[np.int64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]
SCHEDULER = Path("/proc/thread-self/schedstat")


class ParameterUpdate(NamedTuple):
    """What an update did to one parameter. `change` and `size`: the norms of its change and of its previous value."""

    num_elements: int
    is_matrix: bool
    change: float
    size: float
    # Whether its gradient existed and was not all zero; None: gradients were gone already.
    has_gradient: bool | None


@final
class HealthCheck:
    """Measures parameters before and after an update, without random numbers or writes to the run's tensors.

    `parameters`: the trainable ones; of a stage of a pipeline those that it owns. `is_adapter`: LoRA matrices start at
    zero, so their update ratio means nothing.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, is_adapter: bool = False) -> None:
        self._parameters = dict(parameters)
        self._is_adapter = is_adapter
        self._updates: dict[str, ParameterUpdate] = {}
        self._last_report = time.monotonic()
        self._last_core_wait = core_wait_seconds()

    def due(self, step: int, every: int) -> bool:
        """Whether to measure this step."""
        return step in EARLY or step % every == 0

    @contextmanager
    def watching(self, *, gradients: bool = True) -> Iterator[None]:
        """Wraps the update. `gradients`: they still exist, so find those that are None or zero."""
        has_gradient: Mapping[str, bool] = self._gradients_are_there() if gradients else {}

        # The change of a sample of each parameter, next to its size before the update.
        old_samples = [_sampled(p).clone() for p in self._parameters.values()]
        yield
        if not self._parameters:
            return  # a stage of a pipeline without trainable parameters
        new_samples = [_sampled(p) for p in self._parameters.values()]
        changes = torch._foreach_sub(new_samples, old_samples)
        norms = [
            torch.stack(list(torch._foreach_norm(samples, 2, dtype=torch.float32)))
            for samples in (changes, old_samples)
        ]
        self._updates = {
            name: ParameterUpdate(p.numel(), p.ndim > 1, change, size, has_gradient.get(name))
            for (name, p), change, size in zip(
                self._parameters.items(), *torch.stack(norms).tolist(), strict=True
            )
        }

    def _gradients_are_there(self) -> dict[str, bool]:
        """Of each parameter: whether it has a gradient that is not all zero."""
        gradients = {
            name: local(p.grad) for name, p in self._parameters.items() if p.grad is not None
        }
        is_there = dict.fromkeys(self._parameters, False)
        if gradients:
            largest = torch.stack(list(torch._foreach_norm(list(gradients.values()), math.inf)))
            is_there |= dict(zip(gradients, (largest != 0).tolist(), strict=True))
        return is_there

    def take_updates(self) -> dict[str, ParameterUpdate]:
        """By name; empty unless an update was made since the last call."""
        updates = self._updates
        self._updates = {}
        return updates

    def report(
        self,
        step: int,
        batches: Sequence[Batch],
        objective: Objective,
        *,
        updates: Mapping[str, ParameterUpdate],
        compiled: bool,
    ) -> StepHealth:
        """The measurements of a step on `batches`; `updates`: of the whole model, empty if no update was made."""
        # The update: by how much matrices changed, and which parameters did not.
        update_ratios = [
            update.change / update.size
            for update in updates.values()
            if update.is_matrix and update.size > 0 and math.isfinite(update.change)
        ]
        unchanged = {name: update for name, update in updates.items() if update.change == 0}
        largest_first = sorted(unchanged, key=lambda name: (-unchanged[name].num_elements, name))
        unchanged_share = None
        no_gradient_share = None
        if updates:
            num_elements = sum(update.num_elements for update in updates.values())
            num_unchanged = sum(update.num_elements for update in unchanged.values())
            unchanged_share = num_unchanged / num_elements
            if all(update.has_gradient is not None for update in updates.values()):
                num_without = sum(
                    update.num_elements for update in updates.values() if not update.has_gradient
                )
                no_gradient_share = num_without / num_elements

        # The process: its time since the last report, how long it waited for a core, its compiled graphs.
        time_now = time.monotonic()
        core_wait = core_wait_seconds()
        core_wait_since = None
        if core_wait is not None and self._last_core_wait is not None:
            core_wait_since = core_wait - self._last_core_wait
        graphs = None
        dynamo_utils = sys.modules.get("torch._dynamo.utils")
        if compiled and dynamo_utils is not None:
            graphs = int(dynamo_utils.counters["stats"]["unique_graphs"])

        labels = label_facts(batches, objective)
        has_ratio = bool(update_ratios) and not self._is_adapter
        health = StepHealth(
            step=step,
            update_ratio=median(update_ratios) if has_ratio else None,
            unchanged_share=unchanged_share,
            unchanged=next(iter(largest_first), ""),
            no_gradient_share=no_gradient_share,
            labels_next=labels.next_share,
            labels_own=labels.own_share,
            labels_after=labels.after_next_share,
            pair_excess=labels.pair_excess,
            seconds=time_now - self._last_report,
            core_wait_seconds=core_wait_since,
            graphs=graphs,
        )

        # The next report begins here.
        self._last_report = time_now
        self._last_core_wait = core_wait
        return health


def untrained_kinds(updates: Mapping[str, ParameterUpdate]) -> dict[str, int]:
    """The kinds of adapted modules ("q_proj", "experts.down_proj") that no gradient reached, and their tensors.

    By LoRA's B: the gradient of A is 0 as long as B is. Empty where no kind has a gradient: that is a matter of the
    loss, not of a kind.
    """
    tensors = Counter[str]()
    reached = Counter[str]()
    for name, update in updates.items():
        module, _, matrix = name.rpartition(".")
        if matrix != "lora_B":
            continue
        path, _, leaf = module.rpartition(".")
        kind = f"experts.{leaf}" if path.endswith(".experts.lora") else leaf
        tensors[kind] += 1
        # Gradients that are gone already have left their update.
        has_gradient = update.change > 0 if update.has_gradient is None else update.has_gradient
        reached[kind] += has_gradient
    if not any(reached.values()):
        return {}
    return {kind: count for kind, count in tensors.items() if not reached[kind]}


def _sampled(parameter: nn.Parameter) -> Tensor:
    """Evenly spaced elements. The odd stride visits every column of a matrix whose width is a power of two."""
    flat = local(parameter.detach()).view(-1)
    return flat[:: max(1, flat.numel() // SAMPLE) | 1]


@dataclass(frozen=True)
class LabelFacts:
    """Fractions of the labels that equal a token of the input; None without tokens to compare."""

    own_share: float | None = None  # the token at their position
    next_share: float | None = None
    after_next_share: float | None = None
    pair_excess: float | None = None


def label_facts(batches: Sequence[Batch], objective: Objective) -> LabelFacts:
    """Whether labels are the next tokens, and whether the order of tokens is random."""
    # Some batches, and some of their rows, are enough. An objective without labels has nothing to compare.
    checked_batches = list(batches)[: max(1, POSITIONS // batches[0].tokens.numel())]
    all_heads = map(objective.head, checked_batches)
    label_heads = (head.scores if isinstance(head, ScoresAndValues) else head for head in all_heads)
    heads = [head for head in label_heads if isinstance(head, LabelScores | Divergence)]
    if len(heads) < len(checked_batches):
        return LabelFacts()
    rows = slice(max(1, POSITIONS // batches[0].tokens.shape[1]))
    tokens: Ints = torch.cat([batch.tokens for batch in checked_batches]).numpy()[rows]
    labels: Ints = torch.cat([head.labels_BT for head in heads]).numpy()[rows]
    documents: Ints = torch.cat([batch.documents for batch in checked_batches]).numpy()[rows]
    scored: Bools = torch.cat([head.loss_mask_BT != 0 for head in heads]).numpy()[rows]

    # The share of labels that equal the token so many positions later in their document: it should be 1 for one.
    shares: list[float | None] = []
    for distance in range(3):
        end = tokens.shape[1] - distance
        in_document = scored[:, :end] & (documents[:, :end] == documents[:, distance:])
        is_equal = labels[:, :end] == tokens[:, distance:]
        shares.append(float(is_equal[in_document].mean()) if in_document.any() else None)
    own_share, next_share, after_next_share = shares
    excess = pair_excess(tokens[scored], labels[scored])
    return LabelFacts(own_share, next_share, after_next_share, excess)


def pair_excess(tokens: Ints, labels: Ints) -> float | None:
    """How many times as often two (token, label) pairs coincide as for independent tokens.

    The rate of equal pairs over the product of the rates of equal tokens and labels: 1 for shuffled text, more for
    real text. None where chance alone gives less than one coincidence.
    """
    count = len(tokens)
    pairs = tokens.astype(np.int64) * 2**32 + labels

    def coincidences(values: Ints) -> float:
        """The number of ordered pairs of positions with equal values."""
        counts = np.unique(values, return_counts=True)[1].astype(np.float64)
        return float((counts * (counts - 1)).sum())

    expected = coincidences(tokens) * coincidences(labels) / max(1.0, count * (count - 1.0))
    return coincidences(pairs) / expected if expected >= 1 else None


def core_wait_seconds() -> float | None:
    """Seconds that this thread was runnable but waiting for a core; None where Linux does not report it."""
    try:
        return int(SCHEDULER.read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return None

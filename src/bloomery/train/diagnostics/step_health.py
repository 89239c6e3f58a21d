"""Health of a run's attention kernel before the first step, and of each step.

The kernel: a build for another GPU, or an override of the GPU's architecture, may compute wrong numbers instead of
crashing. A step: update sizes, unchanged parameters, labels that are not the next tokens, slow ranks.
"""

import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from bloomery.data.batch import Batch
from bloomery.model.attention.attend import attend, layout_of
from bloomery.model.backend_checks import check_head, check_rows
from bloomery.model.decoder import Attention, Decoder
from bloomery.model.heads import Divergence, LabelScores
from bloomery.model.io.parameters import local
from bloomery.monitor.events import StepHealth
from bloomery.plan.types import RunPlan
from bloomery.train.forward import eval_mode, precision_context
from bloomery.train.objectives import Objective
from bloomery.train.run import Unsound

SAMPLE = 4096  # elements of each tensor: its root mean square to about 1%
POSITIONS = 8192  # of a step whose labels are checked
EARLY = frozenset((1, 2, 3, 5, 10, 15, 20, 30, 40, 50, 100))
Ints = np.ndarray[Any, np.dtype[np.int64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]
SCHEDULER = Path("/proc/thread-self/schedstat")


@final
class HealthCheck:
    """Measures parameters before and after an update, without random numbers or writes to the run's tensors.

    `parameters`: the trainable ones. `is_adapter`: LoRA matrices start at zero, so their update ratio means nothing.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, is_adapter: bool = False) -> None:
        self._parameters = dict(parameters)
        self._is_adapter = is_adapter
        self._sizes = {name: p.numel() for name, p in self._parameters.items()}
        self._all = max(1, sum(self._sizes.values()))
        # by tensor: norms of the change and of the previous value
        self._moved: list[tuple[float, float]] = []
        self._without: float | None = None  # fraction of parameters without a gradient
        self._since = time.monotonic()
        self._waited = core_wait_seconds()

    def due(self, step: int, every: int) -> bool:
        """Whether to measure this step."""
        return step in EARLY or step % every == 0

    @contextmanager
    def watching(self, *, gradients: bool = True) -> Iterator[None]:
        """Wraps the update. `gradients`: they still exist, so count those that are None or zero."""
        self._without = None
        if gradients:
            some = {
                name: local(p.grad) for name, p in self._parameters.items() if p.grad is not None
            }
            most = list(torch._foreach_norm(list(some.values()), math.inf)) if some else []
            zero = dict(zip(some, (torch.stack(most) == 0).tolist(), strict=True)) if most else {}
            self._without = (
                sum(size for name, size in self._sizes.items() if zero.get(name, True)) / self._all
            )
        before = [_sampled(p).clone() for p in self._parameters.values()]
        yield
        changes = torch._foreach_sub([_sampled(p) for p in self._parameters.values()], before)
        norms = [
            torch.stack(list(torch._foreach_norm(x, 2, dtype=torch.float32)))
            for x in (changes, before)
        ]
        self._moved = list(zip(*torch.stack(norms).tolist(), strict=True))

    def report(
        self, step: int, batches: Sequence[Batch], objective: Objective, *, compiled: bool
    ) -> StepHealth:
        """The measurements of a step on `batches`; of its labels alone if no update was made."""
        ratios = [
            change / size
            for parameter, (change, size) in zip(
                self._parameters.values(), self._moved, strict=False
            )
            if parameter.ndim > 1 and size > 0 and math.isfinite(change)
        ]
        still = [
            name for name, (change, _) in zip(self._sizes, self._moved, strict=False) if change == 0
        ]
        now = time.monotonic()
        waited = core_wait_seconds()
        labels = label_facts(batches, objective)
        utils = sys.modules.get("torch._dynamo.utils")  # counts compiled graphs
        health = StepHealth(
            step=step,
            update_ratio=median(ratios) if ratios and not self._is_adapter else None,
            unchanged_share=sum(self._sizes[name] for name in still) / self._all
            if self._moved
            else None,
            unchanged=max(still, key=lambda name: self._sizes[name], default=""),
            no_gradient_share=self._without if self._moved else None,
            labels_next=labels.next,
            labels_own=labels.own,
            labels_after=labels.after,
            pair_excess=labels.pair_excess,
            seconds=now - self._since,
            core_wait_seconds=None
            if waited is None or self._waited is None
            else waited - self._waited,
            graphs=int(utils.counters["stats"]["unique_graphs"])
            if compiled and utils is not None
            else None,
        )
        self._moved = []
        self._without = None
        self._since = now
        self._waited = waited
        return health


def _sampled(parameter: nn.Parameter) -> Tensor:
    """Evenly spaced elements. The odd stride visits every column of a matrix whose width is a power of two."""
    flat = local(parameter.detach()).view(-1)
    return flat[:: max(1, flat.numel() // SAMPLE) | 1]


@dataclass(frozen=True)
class LabelFacts:
    """Fractions of the loss tokens; None without tokens to compare."""

    own: float | None = None  # equal to the token at their position
    next: float | None = None
    after: float | None = None  # equal to the token after the next
    pair_excess: float | None = None


def label_facts(batches: Sequence[Batch], objective: Objective) -> LabelFacts:
    """Whether labels are the next tokens, and whether the order of tokens is random."""
    taken = list(batches)[: max(1, POSITIONS // batches[0].tokens.numel())]
    heads = [
        head for head in map(objective.head, taken) if isinstance(head, LabelScores | Divergence)
    ]
    if len(heads) < len(taken):  # an objective without labels
        return LabelFacts()
    rows = slice(max(1, POSITIONS // batches[0].tokens.shape[1]))
    tokens: Ints = torch.cat([batch.tokens for batch in taken]).numpy()[rows]
    labels: Ints = torch.cat([head.labels_BT for head in heads]).numpy()[rows]
    documents: Ints = torch.cat([batch.documents for batch in taken]).numpy()[rows]
    scored: Bools = torch.cat([head.loss_mask_BT != 0 for head in heads]).numpy()[rows]
    shares: list[float | None] = []
    # fraction of labels equal to the token `ahead` positions later in the document
    for ahead in range(3):
        end = tokens.shape[1] - ahead
        inside = scored[:, :end] & (documents[:, :end] == documents[:, ahead:])
        same = labels[:, :end] == tokens[:, ahead:]
        shares.append(float(same[inside].mean()) if inside.any() else None)
    own, following, after = shares
    return LabelFacts(own, following, after, pair_excess(tokens[scored], labels[scored]))


def pair_excess(first: Ints, second: Ints) -> float | None:
    """How many times as often two (first, second) pairs coincide as for independent tokens.

    The rate of equal pairs over the product of the rates of equal firsts and seconds: 1 for shuffled text, more for
    real text. None where chance alone gives less than one coincidence.
    """
    count = len(first)
    pairs = first.astype(np.int64) * 2**32 + second
    # Ordered pairs of positions with equal values.
    counts = [
        np.unique(values, return_counts=True)[1].astype(np.float64)
        for values in (pairs, first, second)
    ]
    both, left, right = (float((n * (n - 1)).sum()) for n in counts)
    expected = left * right / max(1.0, count * (count - 1.0))
    return both / expected if expected >= 1 else None


def core_wait_seconds() -> float | None:
    """Seconds that this thread was runnable but waiting for a core; None where Linux does not report it."""
    try:
        return int(SCHEDULER.read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return None


# Ranks that all others wait for

TIMES = 1.3  # of the median
STEPS = 100
SLOW_STEPS = 50


@final
class Stragglers:
    """Each rank is named once."""

    def __init__(self) -> None:
        self._last = deque[tuple[float, ...]](maxlen=STEPS)
        self._named = set[int]()

    def note(self, seconds: Sequence[float]) -> dict[int, float]:
        """`seconds` of one step that each rank worked, without waiting for others.

        The ranks to name now, and how many times the median their work takes.
        """
        median = statistics.median_low(seconds)
        self._last.append(tuple(each / median if median else 1.0 for each in seconds))
        found = dict[int, float]()
        for rank in range(len(seconds)):
            slow = [times[rank] for times in self._last if times[rank] > TIMES]
            if len(slow) >= SLOW_STEPS and rank not in self._named:
                self._named.add(rank)
                found[rank] = statistics.median(slow)
        return found


TOKENS = 128
# The largest rounding error relative to the largest value; float32 may be TF32 on a GPU.
TOLERANCE = {"float32": 2e-3, "float16": 2e-2, "bfloat16": 4e-2, "bfloat16-pure": 4e-2}


def check_attention(model: Decoder, plan: RunPlan) -> None:
    """Compare output and gradients with the math backend in float32, on two packed documents; RNG states are kept.
    Layers of transformers with the native head are compared to transformers' forward.

    Raises Unsound when they differ by more than rounding or are non-finite; UserError for transformers' layers.
    """
    limit = TOLERANCE[plan.train.precision]
    packed = plan.data.layout == "packed"
    if plan.model.config.transformers_backend is not None:
        with eval_mode(model), precision_context(plan.train.precision, plan.train.device):
            check_head(model, limit)
            check_rows(model, limit, packed=packed)
        return
    if plan.model.attention == "math":
        return
    parts = [part for part in model.modules() if isinstance(part, Attention)]
    kinds = {(part.window, part.scale) for part in parts}
    for window, scale in sorted(kinds, key=str):
        error = difference(plan, window=window, scale=scale)
        if not error <= limit:
            what = (
                f"error {error:.2g}, at most {limit:.2g} is rounding"
                if error == error
                else "non-finite output"
            )
            raise Unsound(
                f"wrong results of {plan.model.attention} attention in {plan.train.precision} on this device: {what}",
                where=f"the check before the first step, PyTorch {torch.__version__}",
                fix="run `bloomery doctor --probe`; or set train.attention=blockwise, which needs no such kernel",
            )


def difference(plan: RunPlan, *, window: int | None, scale: float) -> float:
    """The largest error of output and gradients, relative to the largest value of each; NaN if any is non-finite."""
    config = plan.model.config
    device = torch.device(plan.train.device)
    length = min(TOKENS, plan.data.sequence_length)
    draw = torch.Generator().manual_seed(0)
    heads = config.num_heads, config.num_kv_heads, config.num_kv_heads, config.num_heads
    q, k, v, upstream = (
        torch.randn(2, length, n, config.head_dim, generator=draw).transpose(1, 2) for n in heads
    )
    documents = torch.arange(length).ge(length // 3).long().expand(2, length)
    alone = plan.model.attention == "sdpa"  # one document per sequence

    def results(backend: str, where: torch.device, precision: str) -> list[Tensor]:
        kind = torch.bfloat16 if precision == "bfloat16-pure" else torch.float32
        inputs = [x.to(where, kind).requires_grad_() for x in (q, k, v)]
        to_q, to_k, to_v = inputs
        layout = layout_of(None if alone else documents.to(where), backend=backend)
        with precision_context(precision, where.type):
            out = attend(
                to_q,
                to_k,
                to_v,
                layout,
                backend=backend,
                window=window,
                softcap=config.attention_softcap,
                scale=scale,
                dropout=0.0,
            )
        return [out.detach(), *torch.autograd.grad(out, inputs, upstream.to(where, out.dtype))]

    actual = results(plan.model.attention, device, plan.train.precision)
    exact = results("math", torch.device("cpu"), "float32")
    shares = [
        (a.float().cpu() - b).abs().max() / b.abs().max()
        for a, b in zip(actual, exact, strict=True)
    ]
    return float(torch.stack(shares).max())  # NaN wins

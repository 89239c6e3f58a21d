"""Times steps of the training loop with the model, optimizer states and batches of a plan."""

import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, final

import torch

from bloomery.core.errors import UserError
from bloomery.core.units import GIB
from bloomery.data.batch import Batch
from bloomery.data.loader import Loader
from bloomery.data.order import Cursor
from bloomery.plan.types import RunPlan
from bloomery.train.diagnostics.step_health import core_wait_seconds
from bloomery.train.objectives import build_objective, with_text_structure
from bloomery.train.process import peak_memory_gib, set_up_process
from bloomery.train.state import build_state
from bloomery.train.step import train_step

MOST_ROUNDS = 20
MUCH_LONGER = 4.0  # than asked for: a round after which there is no second one
OVERFLOWS = 20  # float16 lowers its loss scale until gradients fit: at most so many skipped steps
SHARE = 0.01  # of the learning rate: the same cost, and random tokens do not make weights diverge


def measure(job: Mapping[str, Any], *, on_phase: Callable[[str], None]) -> dict[str, Any]:
    """A step with the longest documents for the peak, then timed steps with the run's dataset where it is prepared.

    Raises torch's out-of-memory errors, and UserError for a damaged dataset or when no step is finite.
    """
    plan = RunPlan.model_validate(job["plan"])
    set_up_process(plan)
    if plan.train.device == "cpu":
        bound_memory(plan.memory.limit)
    on_phase("building the model")
    rig = Rig(plan)
    together = min(2, plan.train.accumulation)
    longest = longest_batches(plan, together)
    on_phase("compiling" if plan.train.compile else "warming up")
    rig.warm_up(longest)
    batches = longest
    if job["text"] == "prepared":  # the run's first micro-batches
        data = plan.data
        sequences = plan.train.micro_batch_size
        seed = plan.train.seed
        loader = Loader(
            data.prepared, sequence_length=data.sequence_length, layout=data.layout, seed=seed
        )
        read = [
            loader.batch(Cursor(seed, number * sequences), sequences) for number in range(together)
        ]
        batches = [with_text_structure(batch, plan) for batch in read]
    rig.seconds(batches)
    on_phase("measuring")
    begun = time.perf_counter()
    waited = core_wait_seconds()
    times = list(
        rounds(
            lambda number: rig.seconds(batches[:number]),
            plan.train.accumulation,
            seconds=job["seconds"],
        )
    )
    share = (
        None
        if waited is None
        else ((core_wait_seconds() or waited) - waited) / (time.perf_counter() - begun)
    )
    reserved = torch.cuda.max_memory_reserved() / GIB if plan.train.device == "cuda" else None
    peak = peak_memory_gib(plan.train.device)
    figures = {
        "step_seconds": times,
        "peak_gib": peak,
        "reserved_gib": reserved,
        "core_wait": share,
    }
    return {"outcome": "ok"} | figures


@final
class Rig:
    """The objects of a training step."""

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan.train
        self._model_and_optimizer = build_state(plan).model_and_optimizer
        self._objective = build_objective(plan)

    def warm_up(self, batches: list[Batch]) -> None:
        """The first step: creates the optimizer's states and compiles. Raises UserError."""
        if not any(self._step(batches) for _ in range(OVERFLOWS)):
            raise UserError(
                f"no finite step in {OVERFLOWS} attempts",
                fix="set train.precision=float32 to check whether float16 is the cause",
            )

    def seconds(self, batches: list[Batch]) -> float:
        """Seconds of one optimizer step over these micro-batches, with the device's work."""
        self._wait()
        begun = time.perf_counter()
        self._step(batches)
        self._wait()
        return time.perf_counter() - begun

    def _step(self, batches: list[Batch]) -> bool:
        return train_step(
            self._model_and_optimizer, batches, self._objective, plan=self._plan, lr_scale=SHARE
        ).taken

    def _wait(self) -> None:
        if self._plan.device == "cuda":
            torch.cuda.synchronize()


def rounds(step: Callable[[int], float], accumulation: int, *, seconds: float) -> Iterator[float]:
    """Seconds of whole optimizer steps. Of many micro-batches two are run: each more costs what the second one did.

    At least two rounds, or a single one that took several times as long as was asked for.
    """
    begun = time.perf_counter()
    for number in range(MOST_ROUNDS):
        taken = time.perf_counter() - begun
        if number and taken > (seconds if number >= 2 else MUCH_LONGER * max(1.0, seconds)):
            return
        if accumulation <= 2:
            yield step(accumulation)
        else:
            one = step(1)
            two = step(2)
            yield one + (accumulation - 1) * max(0.0, two - one)


def longest_batches(plan: RunPlan, count: int) -> list[Batch]:
    """Random tokens, one document per sequence, no masked labels: the most work of a micro-batch."""
    numbers = torch.Generator().manual_seed(plan.train.seed)
    batches = []
    sequences = plan.train.micro_batch_size
    length = plan.data.sequence_length
    for _ in range(count):
        text = torch.randint(
            plan.model.config.vocab_size, (sequences, length + 1), generator=numbers
        )
        batch = Batch(
            tokens=text[:, :-1].contiguous(),
            labels=text[:, 1:].contiguous(),
            loss_mask=torch.ones(sequences, length),
            positions=torch.arange(length).repeat(sequences, 1),
            documents=torch.zeros(sequences, length, dtype=torch.int64),
        )
        batches.append(with_text_structure(batch, plan))
    return batches


def bound_memory(limit: float) -> None:
    """An allocation beyond the limit fails as on a full machine, before other programs suffer. Linux alone."""
    if not sys.platform.startswith("linux"):
        return
    status = Path("/proc/self/status").read_text()
    kib = {key: int(status.split(f"{key}:")[1].split()[0]) for key in ("VmData", "VmRSS")}
    allowed = int(kib["VmData"] * 1024 + max(0.0, limit - kib["VmRSS"] * 1024))
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))

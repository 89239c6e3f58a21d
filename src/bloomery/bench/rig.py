"""Times steps of the training loop with the model, optimizer states and batches of a plan."""

import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, final

import torch

from bloomery.core.device import memory_stats, synchronize
from bloomery.core.errors import UserError
from bloomery.core.units import GIB
from bloomery.data.batch import Batch
from bloomery.data.loader import Loader
from bloomery.data.order import Cursor
from bloomery.data.top_scores import scores_files
from bloomery.model.io.weights import init_weights
from bloomery.plan.types import RunPlan
from bloomery.train.checkpoint.checkpointed_model import DrawWeights
from bloomery.train.diagnostics.step_health import core_wait_seconds
from bloomery.train.kernels import fastest_tiles_of, tile_workload, use_tiles
from bloomery.train.objectives.build import build_objective, with_text_structure
from bloomery.train.process import peak_memory_gib, set_up_process
from bloomery.train.state import build_state
from bloomery.train.step import StepResult, train_step

MOST_ROUNDS = 20
# There is no second round after one that took this many times the seconds to measure.
MUCH_LONGER = 4.0
OVERFLOWS = 20  # float16 lowers its loss scale until gradients fit: at most so many skipped steps
# A small learning rate costs the same, and random tokens do not make the weights diverge.
LR_SCALE = 0.01
# A step that learns nothing can be fast. So a measured setting also takes some steps on one micro-batch, at a learning
# rate that lowers its loss and that even a rate without warm-up does not make diverge.
LEARNING_STEPS = 5
LEARNING_LR_SCALE = 0.1


def measure(
    job: Mapping[str, Any], *, on_phase: Callable[[str], None], draw: DrawWeights = init_weights
) -> dict[str, Any]:
    """A step with the longest documents for the peak, then timed steps with the run's dataset where it is prepared.

    With `job["learns"]` also a few steps on one micro-batch, to see its loss fall. Raises torch's out-of-memory errors,
    and UserError for a damaged dataset or when no step is finite.
    """
    plan = RunPlan.model_validate(job["plan"])
    if plan.train.scoring_devices:
        raise UserError(
            "not supported: measuring a step that another device scores",
            where="parallel.scoring_devices",
            fix="bench with parallel.scoring_devices=0",
            code=2,
        )
    set_up_process(plan.train, memory_limit=plan.memory.limit)
    if plan.train.device == "cpu":
        bound_memory(plan.memory.limit)
    on_phase("building the model")
    rig = Rig(plan, draw)

    # The longest documents come first: they need the most memory that a step of this run can need.
    num_batches = min(2, plan.train.accumulation)
    batches = longest_batches(plan, num_batches)
    on_phase("compiling" if plan.train.compile else "warming up")
    rig.warm_up(batches)
    if job["text"] == "prepared":
        batches = first_batches(plan, num_batches)
    rig.seconds(batches)

    # Before the timed steps, whose number depends on the speed: the same losses each time.
    learning = None
    if job["learns"]:
        on_phase("learning")
        learning = rig.learn(batches[:1])

    # Whole steps are timed, and how long the thread waited for a core meanwhile.
    on_phase("measuring")
    begin_seconds = time.perf_counter()
    core_wait_before = core_wait_seconds()
    step_times = list(
        rounds(
            lambda number: rig.seconds(batches[:number]),
            plan.train.accumulation,
            seconds=job["seconds"],
        )
    )
    core_wait = None
    if core_wait_before is not None:
        core_wait_after = core_wait_seconds() or core_wait_before
        core_wait = (core_wait_after - core_wait_before) / (time.perf_counter() - begin_seconds)
    reserved_bytes = memory_stats(plan.train.device).get("reserved_bytes.all.peak")
    return {
        "outcome": "ok",
        "step_seconds": step_times,
        "peak_gib": peak_memory_gib(plan.train.device),
        "reserved_gib": None if reserved_bytes is None else reserved_bytes / GIB,
        "core_wait": core_wait,
        "learning": learning,
    }


@final
class Rig:
    """The objects of a training step."""

    def __init__(self, plan: RunPlan, draw: DrawWeights = init_weights) -> None:
        self._plan = plan.train
        self._model_and_optimizer = build_state(plan, draw=draw).model_and_optimizer
        self._objective = build_objective(plan)
        if plan.model.attention == "triton":
            workload = tile_workload(plan.model, plan.train, plan.data)
            tiles = fastest_tiles_of(workload, plan.train.device)
            use_tiles(tiles, workload, plan.train.device)

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
        begin_seconds = time.perf_counter()
        self._step(batches)
        self._wait()
        return time.perf_counter() - begin_seconds

    def learn(self, batches: list[Batch]) -> dict[str, float]:
        """The loss before and after some steps on the same micro-batches, and the first one's gradient norm."""
        steps = [
            self._train(batches, lr_scale=LEARNING_LR_SCALE) for _ in range(LEARNING_STEPS + 1)
        ]
        return {
            "steps": LEARNING_STEPS,
            "loss_before": steps[0].loss,
            "loss_after": steps[-1].loss,
            "grad_norm": steps[0].grad_norm,
        }

    def _step(self, batches: list[Batch]) -> bool:
        return self._train(batches, lr_scale=LR_SCALE).taken

    def _train(self, batches: list[Batch], *, lr_scale: float) -> StepResult:
        return train_step(
            self._model_and_optimizer, batches, self._objective, plan=self._plan, lr_scale=lr_scale
        )

    def _wait(self) -> None:
        synchronize(self._plan.device)


def rounds(step: Callable[[int], float], accumulation: int, *, seconds: float) -> Iterator[float]:
    """Seconds of whole optimizer steps. Of many micro-batches two are run: each more costs what the second one did.

    At least two rounds, or a single one that took several times as long as was asked for.
    """
    begin_seconds = time.perf_counter()
    for round_index in range(MOST_ROUNDS):
        elapsed = time.perf_counter() - begin_seconds
        # The first round always runs, and a second one unless the first was much too long.
        allowed_seconds = seconds if round_index >= 2 else MUCH_LONGER * max(1.0, seconds)
        if round_index and elapsed > allowed_seconds:
            return
        if accumulation <= 2:
            yield step(accumulation)
        else:
            one_batch_seconds = step(1)
            two_batch_seconds = step(2)
            yield one_batch_seconds + (accumulation - 1) * max(
                0.0, two_batch_seconds - one_batch_seconds
            )


def first_batches(plan: RunPlan, count: int) -> list[Batch]:
    """The first micro-batches of the run, from its prepared dataset."""
    data = plan.data
    sequences = plan.train.micro_batch_size
    seed = plan.train.seed
    scores = plan.objective.stored_scores
    loader = Loader(
        data.prepared,
        sequence_length=data.sequence_length,
        layout=data.layout,
        seed=seed,
        top_scores=() if scores is None else scores_files(scores),
    )
    batches = []
    for number in range(count):
        batch = loader.batch(Cursor(seed, number * sequences), sequences)
        batches.append(with_text_structure(batch, plan))
    return batches


def longest_batches(plan: RunPlan, count: int) -> list[Batch]:
    """Random tokens, one document per sequence, no masked labels: the most work of a micro-batch."""
    generator = torch.Generator().manual_seed(plan.train.seed)
    batches = []
    sequences = plan.train.micro_batch_size
    length = plan.data.sequence_length
    for _ in range(count):
        # One token more than the length, so that inputs and labels are the same text, shifted by one.
        tokens = torch.randint(
            plan.model.config.vocab_size, (sequences, length + 1), generator=generator
        )
        batch = Batch(
            tokens=tokens[:, :-1].contiguous(),
            labels=tokens[:, 1:].contiguous(),
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

"""Parts `races` and `waits`: copies that run beside the work, and where the host waits for the device."""

import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, final

from bloomery.bench.gpu_check.agreement import MODES
from bloomery.bench.gpu_check.child import PartJob, rows_of
from bloomery.bench.gpu_check.results import Row
from bloomery.bench.gpu_check.small_runs import SmallRuns
from bloomery.core.device import can, races_raise, warn_of_waits
from bloomery.monitor.events import StepDone

SOURCE = str(Path(__file__).parents[2])

# By case: what copies beside the work. More layers than the other parts have: more copies are under way at once.
LAYERS = ("model.num_layers=6",)
OFFLOADED_STATES = ("optimizer.offload=true", "optimizer.state_dtype=int8")
OFFLOADED = {
    **{
        f"activations {mode}": (
            f"train.activation_checkpointing={mode}",
            "train.offload_activations=true",
        )
        for mode in MODES
    },
    "states": OFFLOADED_STATES,
}
NOT_OFFLOADED = {"states": ("optimizer.state_dtype=int8",)}
TINY_OFFLOADED = ("activations none", "states")
REPEATS = 3  # of each case without the sanitizer: a race need not show at once
TINY_REPEATS = 1


def races(job: PartJob) -> Iterator[Row]:
    """For each case a row of the sanitizer, which looks for events between accesses, and one of bits."""
    if not can(job.device, "streams"):
        yield Row(case="streams", outcome="skipped", message=f"{job.device} has no streams")
        return
    runs = SmallRuns(job.folder, job.device)
    cases: list[tuple[str, Callable[[], Row]]] = []
    for name in TINY_OFFLOADED if job.tiny else OFFLOADED:
        cases.append((f"{name}: sanitizer", partial(_sanitized_row, job, runs, name)))
        cases.append((f"{name}: bits", partial(_bits_row, job, runs, name)))
    yield from rows_of(job, cases)


def _overrides(job: PartJob, overrides: tuple[str, ...]) -> tuple[str, ...]:
    return overrides if job.tiny else (*LAYERS, *overrides)


def _sanitized_row(job: PartJob, runs: SmallRuns, name: str) -> Row:
    case = f"{name}: sanitizer"
    plan = runs.on_device(runs.plan("texts", *_overrides(job, OFFLOADED[name])))
    with races_raise(runs.device) as is_watched:
        if not is_watched:
            return Row(case=case, outcome="skipped", message="this PyTorch has no sanitizer")
        try:
            runs.run(plan)
        except Exception as error:
            # Its errors are of a class of its own, in a private module.
            if type(error).__name__ != "CUDASanitizerErrors":
                raise
            return Row(case=case, outcome="wrong", message=_first_access(str(error)))
    return Row(case=case)


def _first_access(report: str) -> str:
    """Of a report of several pages: what was found, without its stack traces."""
    lines = [line.strip() for line in report.splitlines() if line.strip()]
    named = [line for line in lines if line.startswith(("CSAN", "Access", "Current", "Previous"))]
    return " ".join(named or lines)[:300]


def _bits_row(job: PartJob, runs: SmallRuns, name: str) -> Row:
    plain_overrides = _overrides(job, NOT_OFFLOADED.get(name, ()))
    plain = runs.run(runs.on_device(runs.plan("texts", *plain_overrides)))
    plan = runs.on_device(runs.plan("texts", *_overrides(job, OFFLOADED[name])))
    num_repeats = TINY_REPEATS if job.tiny else REPEATS
    repeats = [runs.run(plan) for _ in range(num_repeats)]
    others = [number for number, each in enumerate(repeats, 1) if each.tensors != plain.tensors]
    numbers = {"repeats": num_repeats, "same_bits": not others}
    if not others:
        return Row(case=f"{name}: bits", numbers=numbers)
    losses = " ".join(f"{loss:.6g}" for loss in repeats[others[0] - 1].losses.values())
    expected = " ".join(f"{loss:.6g}" for loss in plain.losses.values())
    message = f"run {others[0]} of {num_repeats}: losses {losses}, not offloaded {expected}"
    return Row(case=f"{name}: bits", outcome="wrong", message=message, numbers=numbers)


# Waits

# By case: micro-batches of a step.
MICRO_BATCHES = {"one micro-batch": 32, "four micro-batches": 8}
MEASURED_STEP = 3  # the last; earlier ones also set up what later ones use


def waits(job: PartJob) -> Iterator[Row]:
    """The waits of a step, which must not become more with more micro-batches."""
    if not warn_of_waits(job.device, is_on=False):
        message = f"PyTorch cannot count the waits of {job.device}"
        yield Row(case="waits", outcome="skipped", message=message)
        return
    runs = SmallRuns(job.folder, job.device)
    earlier_counts: list[Counter[str]] = []
    cases = [
        (name, partial(_waits_row, runs, name, sequences, earlier_counts))
        for name, sequences in MICRO_BATCHES.items()
    ]
    yield from rows_of(job, cases)


def _waits_row(
    runs: SmallRuns, name: str, sequences: int, earlier_counts: list[Counter[str]]
) -> Row:
    plan = runs.on_device(runs.plan("texts", f"train.micro_batch_size={sequences}"))
    waits_by_place = _Waits(runs.device).of_last_step(runs, plan)
    earlier_counts.append(waits_by_place)
    more = waits_by_place - earlier_counts[0]
    if not waits_by_place:
        # Each step reads its loss: a count that misses that misses others, too.
        return Row(case=name, outcome="failed", message="not one wait was counted")
    message = ""
    if more:
        places = ", ".join(f"{place} {count}" for place, count in more.most_common(6))
        message = f"{more.total()} more than with one micro-batch: {places}"
    return Row(
        case=name,
        outcome="wrong" if more else "ok",
        message=message,
        numbers={"waits": waits_by_place.total(), "places": dict(waits_by_place.most_common())},
    )


@final
class _Waits:
    """Counts PyTorch's warnings of one step by the line of Bloomery that it came from."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._counts: Counter[str] = Counter()

    def of_last_step(self, runs: SmallRuns, plan: Any) -> Counter[str]:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = self._note
            try:
                runs.run(plan, on_event=self._switch)
            finally:
                warn_of_waits(self._device, is_on=False)
        return self._counts

    def _switch(self, event: object) -> None:
        if isinstance(event, StepDone):
            warn_of_waits(self._device, is_on=event.step == MEASURED_STEP - 1)

    def _note(self, message: Warning | str, *_: object, **__: object) -> None:
        if "synchronizing" not in str(message):
            return
        # The innermost line of Bloomery outside this counter; "outside" in autograd's own threads.
        frames = [
            frame
            for frame in traceback.extract_stack()
            if frame.filename.startswith(SOURCE) and frame.filename != __file__
        ]
        place = "outside"
        if frames:
            place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno} {frames[-1].name}"
        self._counts[place] += 1

"""The first steps of a real run, then what fails on day six: evaluation, sampling, save, kill, resume. No torch."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, final

from bloomery.core.errors import UserError
from bloomery.core.units import Duration
from bloomery.monitor.events import (
    EvalDone,
    Event,
    Recovered,
    RunStarted,
    Sampled,
    Saved,
    StepDone,
    Warned,
    read_events,
)
from bloomery.plan.store import read_plan
from bloomery.plan.types import RunPlan
from bloomery.recipe.load import LoadedRecipe
from bloomery.runs.lifecycle import resume, start
from bloomery.runs.signals import StopRequests
from bloomery.train.sealed import NOT_SAVED

STEPS = 3
EVALUATED_BATCHES = 4  # of the validation split: enough to show that it works, and what all of it takes
LONG = 10_000  # steps of a run that must not end by itself
ROUNDING = 1e-2  # by how much a repeated loss may differ where bits are not promised: half precision, another order

E = TypeVar("E", bound=Event)


class KilledOnPurpose(BaseException):
    """The training process was killed on purpose."""


@final
@dataclass
class Rehearsal:
    """What the rehearsal saw. Times are seconds; `saved` is the checkpoint that the run came back to."""

    plan: RunPlan  # of the real run, not of the rehearsal
    events: list[Event] = field(default_factory=list)
    before: dict[int, float | None] = field(default_factory=dict)  # losses after the checkpoint, until the kill
    after: dict[int, float | None] = field(default_factory=dict)  # the same steps once more
    killed: float = 0.0
    began: float = field(default_factory=time.time)

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def saved(self) -> Saved:
        return self.of(Saved)[0]

    @property
    def prepare_seconds(self) -> float:
        """Until the first process was ready to step: text, plan, weights."""
        return self.of(RunStarted)[0].time - self.began

    @property
    def step_seconds(self) -> float:
        steps = self.of(StepDone)
        return statistics.median(step.step_seconds for step in (steps[1:] or steps))

    @property
    def back_seconds(self) -> float:
        """From the kill to the first step that was taken again."""
        return next(event.time for event in self.of(StepDone) if event.time > self.killed) - self.killed

    @property
    def sample_seconds(self) -> float | None:
        """Of all prompts together, once; None without prompts."""
        drawn = self.of(Sampled)[: len(self.plan.sample.prompts)]
        if not drawn:
            return None
        before = [e.time for e in (*self.of(StepDone), *self.of(EvalDone)) if e.step == drawn[0].step]
        return drawn[-1].time - max((time for time in before if time <= drawn[0].time), default=drawn[0].time)

    @property
    def exact(self) -> bool:
        """Whether bits are promised here."""
        return self.plan.train.device == "cpu" or self.plan.train.deterministic

    @property
    def differing(self) -> list[int]:
        """The steps whose loss is another the second time, up to rounding where bits are not promised."""
        pairs = [(step, self.before[step], loss) for step, loss in self.after.items()]
        return [
            step for step, one, two in pairs
            if one != two
            and (self.exact or one is None or two is None or not math.isclose(one, two, rel_tol=ROUNDING))
        ]  # fmt: skip


Told = Callable[[Rehearsal, Event], None]  # what was seen so far, this event included


def rehearse(loaded: LoadedRecipe, folder: Path, *, devices: str | None, told: Told) -> Rehearsal:
    """Trains, evaluates, samples, saves, is killed, resumes, stops; all in `folder`, a run's folder afterwards.

    `told` hears of each event until the kill. Raises UserError where the real run would fail, and KeyboardInterrupt
    when it is stopped.
    """
    seen: list[Rehearsal] = []

    def edit(plan: RunPlan) -> RunPlan:
        seen.append(Rehearsal(plan, began=began))
        return shortened(plan)

    def until_killed(event: Event, requests: StopRequests) -> None:
        if seen:
            seen[0].events.append(event)
            told(seen[0], event)
            _until_killed(seen[0], event, requests)

    began = time.time()
    try:
        start(loaded, run_dir=folder, devices=devices, quiet=True, edit=edit, watch=until_killed)
        raise KeyboardInterrupt  # it does not end by itself
    except KilledOnPurpose:
        seen[0].killed = time.time()
    return _repeated(seen[0], folder)


def shortened(plan: RunPlan) -> RunPlan:
    """The real shapes, rates and text; looks soon and at little of the split, and tells no tracker."""
    train, looks = plan.train, plan.eval
    limit = EVALUATED_BATCHES * looks.micro_batch_size
    return plan.model_copy(
        update={
            "train": train.model_copy(update={"steps": None if train.steps is None else max(train.steps, LONG)}),
            "eval": looks.model_copy(
                update={
                    "every_steps": STEPS - 1,
                    "sequences": min(looks.sequences or limit, limit),
                    "early_stopping_patience": None,
                }
            ),
            "checkpoint": plan.checkpoint.model_copy(update={"every_steps": LONG}),
            "lengths": plan.lengths
            and plan.lengths.model_copy(
                update={"evaluation": Duration(STEPS - 1, "steps"), "checkpoint": Duration(LONG, "steps")}
            ),
            "logging": plan.logging.model_copy(update={"trackers": (), "commands": ()}),
        }
    )


def _until_killed(seen: Rehearsal, event: Event, requests: StopRequests) -> None:
    """After the first step a checkpoint is asked for; once it stands and a step was taken after it, all is killed.

    Step STEPS comes after the evaluation, which a run without validation text leaves out.
    """
    if isinstance(event, StepDone) and event.step == 1:
        requests.ask_save()
    if isinstance(event, Warned) and NOT_SAVED in event.reason:
        why = event.reason.partition(f"{NOT_SAVED}: ")[2]
        raise UserError(
            f"the checkpoint could not be written: {why}",
            where="its first checkpoint",
            fix="make room on the disk or mend the folder's permissions; another place: --run-dir FOLDER",
        )
    saves = seen.of(Saved)
    if saves:
        seen.before = {step.step: step.loss for step in seen.of(StepDone) if step.step > saves[0].step}
    if seen.before and max(step.step for step in seen.of(StepDone)) >= STEPS:
        raise KilledOnPurpose


def _repeated(seen: Rehearsal, folder: Path) -> Rehearsal:
    """The run comes back, and is stopped once all that was lost has been done again."""
    last = max(seen.before)

    def until_repeated(event: Event, requests: StopRequests) -> None:
        seen.events.append(event)
        if isinstance(event, StepDone) and event.step in seen.before:
            seen.after[event.step] = event.loss
        if isinstance(event, StepDone) and event.step == last and not requests.asked:
            requests.ask(0)

    run = resume(folder, quiet=True, watch=until_repeated)
    if set(seen.after) != set(seen.before):
        raise KeyboardInterrupt
    if seen.differing:
        step = seen.differing[0]
        promise = "to the last bit" if seen.exact else f"up to {ROUNDING:.0%}"
        raise UserError(
            f"step {step} does not repeat after a kill: its loss was {seen.before[step]} and is {seen.after[step]}, and"
            f" equality {promise} is promised here",
            where=str(run.folder),
            fix="please report it with that folder's plan.json, machine.json and events.jsonl",
        )
    return seen


def incidents(folder: Path) -> tuple[str, ...]:
    """What the rehearsal was warned of or recovered from, each once."""
    found = [event for event in read_events(folder / "events.jsonl") if isinstance(event, Warned | Recovered)]
    return tuple(dict.fromkeys(event.reason for event in found))


@final
@dataclass(frozen=True)
class Outlook:
    """What the real run will need, from what the rehearsal measured. Bytes and seconds; None: its length is unknown."""

    seconds: float | None
    checkpoints: int
    events: int | None
    free: int

    @property
    def disk(self) -> int:
        return self.checkpoints + (self.events or 0)

    @property
    def fits(self) -> bool:
        return self.disk <= self.free


def outlook(seen: Rehearsal, folder: Path, *, free: int) -> Outlook:
    """Checkpoints: those that are kept, the best, and one being written. Steps, evaluations and samples as measured."""
    plan = seen.plan
    steps = plan.train.steps
    lines = (folder / "events.jsonl").stat().st_size / max(1, len(seen.of(StepDone)))
    checkpoints = seen.saved.bytes * (plan.checkpoint.keep + 2)
    if steps is None:
        return Outlook(plan.train.seconds, checkpoints, None, free)
    looks = steps // plan.eval.every_steps + 1 if plan.eval.every_steps else 0
    rows = validation_rows(plan, folder)
    share = max(1.0, rows / max(1, EVALUATED_BATCHES * plan.eval.micro_batch_size))
    evaluation = sum(look.seconds for look in seen.of(EvalDone)[:1]) * share
    waits = 0.0 if plan.checkpoint.async_save else seen.saved.seconds * (steps // plan.checkpoint.every_steps + 1)
    seconds = steps * seen.step_seconds + looks * (evaluation + (seen.sample_seconds or 0.0)) + waits
    return Outlook(seconds, checkpoints, round(lines * steps), free)


def validation_rows(plan: RunPlan, folder: Path) -> int:
    """Rows that an evaluation of the real run reads."""
    from bloomery.data.shards.format import read_manifest

    tokens = read_manifest(read_plan(folder / "plan.json").data.prepared).validation.tokens
    rows = -(-tokens // plan.data.sequence_length)
    return min(rows, plan.eval.sequences or rows)

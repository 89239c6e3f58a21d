"""A run for the report: its events, plan, machine, recipe and diagnosis."""

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from bloomery.core.errors import UserError
from bloomery.core.files import read_whole
from bloomery.core.units import GIB, Duration, format_count, format_seconds
from bloomery.data.shards import Manifest
from bloomery.hardware.machine import Machine
from bloomery.monitor.diagnosis import diagnose_run
from bloomery.monitor.events import (
    DeviceStats,
    EvalDone,
    Event,
    ExpertLoad,
    Recovered,
    Resumed,
    RunStarted,
    Sampled,
    Saved,
    StepDone,
    TaskDone,
    last_per_step,
)
from bloomery.monitor.history import Diagnosis
from bloomery.plan.advise import ROUNDING, Claim, KnownRange, compare_claims
from bloomery.plan.types import RunPlan, Verdict
from bloomery.recipe.load import load_recipe
from bloomery.recipe.schema import Claims
from bloomery.recipe.values import ClaimedRange
from bloomery.report.charts import Mark
from bloomery.view.curves import KeptCurves, RunCurves
from bloomery.view.incidents import Incident
from bloomery.view.planned_figures import diagnosis_facts, figures_of_plan
from bloomery.view.reader import RunReader
from bloomery.view.recorded_run import contradicted, log_check_of
from bloomery.view.run_view import RunView
from bloomery.view.summary import RunSummary

_NEAR = 0.05  # relative distance from the claimed step to its evaluation
_REPORTED = ("kill", "resume", "skip", "rewind", "warning", "stop", "failure")
M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True)
class Repeated:
    """Steps that a resume repeated, and how many of them have different results."""

    first: int
    last: int
    steps: int
    different: int


@dataclass(frozen=True)
class RunRecord:
    """Content of a run folder; None: unknown."""

    folder: Path
    summary: RunSummary
    steps: list[StepDone]
    evals: list[EvalDone]
    expert_loads: list[ExpertLoad]
    samples: list[Sampled]
    tasks: list[TaskDone]
    saves: list[Saved]
    device_samples: list[DeviceStats]  # of repeated steps, too: they take time and power
    incidents: list[Incident]
    repeated: Repeated | None
    started: RunStarted | None
    plan: RunPlan | None
    machine: Machine | None
    manifest: Manifest | None
    recipe: str
    expected: Claims
    diagnoses: tuple[Diagnosis, ...]
    lost: str | None = None  # about damaged events

    @property
    def state(self) -> str:
        """done, stopped, failed, or unfinished (running or killed)."""
        return self.summary.ended.status if self.summary.ended else "unfinished"

    @property
    def tokens_per_second(self) -> float | None:
        """Over all steps, skipped ones included, without evaluations and checkpoints."""
        seconds = sum(step.step_seconds for step in self.steps)
        tokens = sum(step.step_seconds * step.tokens_per_second for step in self.steps)
        return tokens / seconds if seconds else None

    @property
    def utilization(self) -> float | None:
        """MFU over all steps; None if the peak FLOP/s of the device is unknown."""
        if self.plan is None or self.tokens_per_second is None:
            return None
        return figures_of_plan(self.plan, self.machine).utilization(self.tokens_per_second)

    @property
    def marks(self) -> list[Mark]:
        """Incidents and checkpoints for the loss chart. A failure is drawn like a kill."""
        kinds = {
            "kill": "kill",
            "failure": "kill",
            "resume": "resume",
            "skip": "skip",
            "rewind": "rewind",
        }
        drawn = [Mark(i.step, kinds[i.kind], i.text) for i in self.incidents if i.kind in kinds]
        return [*(Mark(save.step, "save", "checkpoint") for save in self.saves), *drawn]


def read_run_record(folder: Path) -> RunRecord:
    """Raises UserError when the folder holds no events."""
    reader = RunReader(folder, whole_view())
    events = reader.read_all()
    log_check = log_check_of(folder, events, reader.tail)
    if not events:
        lost = (
            "this run has no events yet"
            if log_check.problem is None
            else f"nothing to report: {log_check.problem}"
        )
        raise UserError(
            lost, where=str(folder / "events.jsonl"), fix="report after the first event of the run"
        )
    summary = reader.view.summary
    if contradicted(folder, summary.ended, summary.step):
        summary.ended = None
    plan = _read(folder / "plan.json", RunPlan)
    recipe = folder / "recipe.yaml"
    machine = _read(folder / "machine.json", Machine)
    # Of a repeated step, and of a task that was scored again, the last event counts.
    samples = {
        (event.step, event.prompt, event.image): event
        for event in events
        if isinstance(event, Sampled)
    }
    tasks = {(e.task, e.metric, e.against, e.step): e for e in events if isinstance(e, TaskDone)}
    return RunRecord(
        folder=folder,
        summary=summary,
        lost=log_check.problem,
        steps=last_per_step(events, StepDone),
        evals=[summary.evaluations[step] for step in sorted(summary.evaluations)],
        expert_loads=last_per_step(events, ExpertLoad),
        samples=[samples[key] for key in sorted(samples)],
        tasks=list(tasks.values()),
        saves=last_per_step(events, Saved),
        device_samples=[event for event in events if isinstance(event, DeviceStats)],
        incidents=reported(reader.view.incidents),
        repeated=repeated_steps(events),
        started=reader.view.started,
        plan=plan,
        machine=machine,
        manifest=_read(plan.data.prepared / "manifest.json", Manifest) if plan else None,
        recipe=recipe.read_text(encoding="utf-8") if recipe.is_file() else "",
        expected=_expected(recipe),
        diagnoses=tuple(diagnose_run(events, diagnosis_facts(plan, machine))) if plan else (),
    )


def whole_view() -> RunView:
    """With every incident, and without curves: the page draws from each step."""
    return RunView(curves=RunCurves(KeptCurves(names=frozenset())), incidents=deque())


def _read(path: Path, kind: type[M]) -> M | None:
    """None when the file is missing or not readable by this version."""
    try:
        return kind.model_validate_json(read_whole(path))
    except (OSError, ValidationError):
        return None


def _expected(recipe: Path) -> Claims:
    try:
        return load_recipe(recipe).recipe.claims
    except UserError:
        return Claims()


def reported(incidents: Iterable[Incident]) -> list[Incident]:
    """What explains a curve or the end of a run, once: a skipped step has two events, of which the second says why."""
    shown: list[Incident] = []
    for incident in incidents:
        if incident.kind not in _REPORTED:
            continue
        is_told_again = (
            shown and incident.kind == shown[-1].kind == "skip" and incident.step == shown[-1].step
        )
        if is_told_again:
            shown.pop()
        shown.append(incident)
    return shown


def repeated_steps(events: Iterable[Event]) -> Repeated | None:
    """Compares loss and gradient norm of every step that a resume repeated, bitwise."""
    first_results: dict[int, tuple[float | None, float | None]] = {}
    compared: dict[int, bool] = {}
    resumed_at: int | None = None
    for event in events:
        if isinstance(event, Resumed):
            resumed_at = event.step
        elif isinstance(event, Recovered):
            resumed_at = None  # it continues with other data on purpose
        elif isinstance(event, StepDone):
            results = (event.loss, event.grad_norm)
            if resumed_at is not None and event.step in first_results:
                compared[event.step] = first_results[event.step] == results
            first_results[event.step] = results
    if not compared:
        return None
    different = sum(not same for same in compared.values())
    return Repeated(min(compared), max(compared), len(compared), different)


def measured_claims(record: RunRecord) -> tuple[Verdict, ...]:
    """One verdict per claim of the recipe, from the measured figures."""
    summary = record.summary
    dataset_tokens = record.manifest.train.tokens if record.manifest else 0

    def at_the_end(claimed: ClaimedRange, value: float, text: str) -> KnownRange | str:
        """For a claim about the whole run: too much is wrong at any time, too little only at the end."""
        decided = record.state == "done" or value > claimed[1] * (1 + ROUNDING)
        return KnownRange(value, value, text) if decided else f"{text} so far"

    def known(claim: Claim, claimed: ClaimedRange) -> KnownRange | str:
        match claim:
            case "tokens":
                return at_the_end(claimed, summary.tokens, f"{format_count(summary.tokens)} tokens")
            case "epochs":
                if not dataset_tokens:
                    return "the prepared dataset is missing"
                epochs = summary.tokens / dataset_tokens
                text = f"{epochs:.2f} epochs of {format_count(dataset_tokens)} tokens"
                return at_the_end(claimed, epochs, text)
            case "tokens_per_second":
                speed = record.tokens_per_second
                if speed is None:
                    return "not measured"
                return KnownRange(speed, speed, f"{speed:,.0f} tokens/s")
            case "duration":
                seconds = summary.training_seconds
                return at_the_end(claimed, seconds, f"training time {format_seconds(seconds)}")
            case "step_time":
                if not record.steps:
                    return "not measured"
                seconds = statistics.median(step.step_seconds for step in record.steps)
                return KnownRange(seconds, seconds, f"median {format_seconds(seconds)}")
            case "memory":
                peak = summary.peak_gib
                if not peak:
                    return "not measured"
                return KnownRange(peak * GIB, peak * GIB, f"peak memory {peak:.2f} GiB")
        return _perplexity(record, claim, dataset_tokens)

    return compare_claims(record.expected, known)


def _perplexity(record: RunRecord, claimed_at: Duration, dataset_tokens: int) -> KnownRange | str:
    """The perplexity of the evaluation nearest to a point of the run, or why there is none."""
    summary = record.summary
    tokens_per_step = summary.tokens / summary.step if summary.step else None
    amount = claimed_at.amount

    # The point of the claim in steps; None where its unit cannot be converted yet.
    claimed_step: float | None = None
    match claimed_at.unit:
        case "steps":
            claimed_step = amount
        case "tokens" if tokens_per_step:
            claimed_step = amount / tokens_per_step
        case "epochs" if tokens_per_step and record.manifest:
            claimed_step = amount * dataset_tokens / tokens_per_step
        case "percent" if summary.planned_steps:
            claimed_step = amount / 100 * summary.planned_steps
        case "seconds":
            began = summary.began or 0.0
            later_steps = (step.step for step in record.steps if step.time - began >= amount)
            claimed_step = next(later_steps, None)

    evaluations = [
        (event.step, event.perplexity) for event in record.evals if event.perplexity is not None
    ]
    if claimed_step is None or not evaluations:
        return "no evaluation"
    step, perplexity = min(evaluations, key=lambda evaluation: abs(evaluation[0] - claimed_step))
    if abs(step - claimed_step) > max(_NEAR * claimed_step, 1):
        return f"no evaluation near it; the nearest is at step {step:,}"
    return KnownRange(perplexity, perplexity, f"{perplexity:.4g} at step {step:,}")

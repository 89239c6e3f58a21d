"""Trains and judges the runs of a sweep, one after another, as far as they are not done. No torch.

Each run is started and resumed as `bloomery train` and `bloomery resume` do it. Nothing but the runs and their scores
is stored: a sweep that was killed looks at them, resumes the unfinished run bitwise, and goes on.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

from bloomery.core.errors import UserError
from bloomery.core.progress import progress
from bloomery.core.run_folder import RunFolder, is_run
from bloomery.core.run_lock import hold_run_lock
from bloomery.core.signals import StopRequests
from bloomery.hardware.machine import Machine
from bloomery.infer.model_folder import saved_steps
from bloomery.launch.exit_codes import DONE, STOPPED
from bloomery.monitor.events import Event, Phase, RunStarted, StepDone, read_events
from bloomery.monitor.words import progress_text
from bloomery.plan.types import RunPlan
from bloomery.runs.flow import EndedRun
from bloomery.runs.lifecycle import resume, start
from bloomery.sweep.points import REDUCTION, Point
from bloomery.sweep.ranking import Judged, best_first
from bloomery.sweep.scores import Metric, judge
from bloomery.sweep.store import Score, SweepFolder
from bloomery.view.summary import summary_of


@final
@dataclass(frozen=True)
class Failure:
    """A run without a figure, and why."""

    point: Point
    reason: str


@final
@dataclass(frozen=True)
class SweepEnd:
    """What a sweep has found. `code`: 0, 75 or 130 as of a run that was stopped, 1 where no run has a figure.

    `left_out`: not started, since the budget does not allow another run.
    """

    code: int
    judged: tuple[Judged, ...]
    failures: tuple[Failure, ...] = ()
    left_out: tuple[Point, ...] = ()
    # Those that successive halving did not train to the end, the longest first and of these the best.
    dropped: tuple[Judged, ...] = ()


@final
@dataclass(frozen=True)
class Sweep:
    """`on_line` gets a line for each run that is done. `measure`: as in `lifecycle.start`.

    `expected_seconds`: of a run by the plan, None where that is unknown; `budget_seconds`: of all runs together.
    `command`: the words after `bloomery` that continue it.
    """

    folder: SweepFolder
    points: Sequence[Point]
    metric: Metric
    on_line: Callable[[str, str], None]
    devices: str | None = None
    budget_seconds: float | None = None
    expected_seconds: float | None = None
    measure: Callable[[RunPlan, Machine], None] | None = None
    command: Sequence[str] = ()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No other process works on this sweep meanwhile. Its file has the runs from here on. Raises UserError."""
        with hold_run_lock(RunFolder(self.folder.path)):
            self.folder.describe(
                self.points,
                self.command,
                metric=self.metric.name,
                metric_kind=self.metric.kind,
                lower_is_better=self.metric.lower_is_better,
            )
            yield

    def run(self) -> SweepEnd:
        """Trains and judges every run that is not done. A run that fails does not stop the others.

        Raises UserError when another process works on this sweep.
        """
        judged: list[Judged] = []
        failures: list[Failure] = []
        left_out: list[Point] = []
        with self._alone():
            for number, point in enumerate(self.points, 1):
                if self._over_budget(point):
                    left_out.append(point)
                    continue
                try:
                    outcome = self._finish(point, number)
                except UserError as error:
                    failures.append(Failure(point, error.problem))
                    self.on_line("failed", f"{point.text}: {error.problem}")
                    continue
                if isinstance(outcome, EndedRun):  # stopped: the user goes on later
                    rest = tuple(self.points[number - 1 :])
                    return SweepEnd(outcome.code, tuple(judged), tuple(failures), rest)
                judged.append(Judged(point.name, outcome.value, outcome.scores, outcome.step))
        code = DONE if judged else 1
        return SweepEnd(code, tuple(judged), tuple(failures), tuple(left_out))

    def halve(self, rungs_by_name: Mapping[str, Sequence[int]]) -> SweepEnd:
        """Trains all runs to their first rung, the best third of them to the second, and so on (`points.rungs_of`).

        A run goes on exactly where it stopped, so that one that reaches the end is that of a grid, bit by bit. Which
        ones go on follows from the stored scores alone: equal ones in the order of the runs.
        """
        failures: list[Failure] = []
        dropped: list[Judged] = []
        points = list(self.points)
        with self._alone():
            num_rungs = min(map(len, rungs_by_name.values()))
            for rung in range(num_rungs):
                is_last = rung == num_rungs - 1
                judged: list[Judged] = []
                for number, point in enumerate(points, 1):
                    step = None if is_last else rungs_by_name[point.name][rung]
                    try:
                        outcome = self._finish(point, number, step)
                    except UserError as error:
                        failures.append(Failure(point, error.problem))
                        self.on_line("failed", f"{point.text}: {error.problem}")
                        continue
                    if isinstance(outcome, EndedRun):
                        rest = tuple(points[number - 1 :])
                        return SweepEnd(outcome.code, (), tuple(failures), rest, tuple(dropped))
                    judged.append(Judged(point.name, outcome.value, outcome.scores, outcome.step))
                in_order = best_first(judged, lower_is_better=self.metric.lower_is_better)
                if is_last:
                    break
                kept = max(1, len(points) // REDUCTION)
                dropped = [*in_order[kept:], *dropped]
                kept_names = {run.name for run in in_order[:kept]}
                points = [point for point in points if point.name in kept_names]
        return SweepEnd(
            DONE if judged else 1, tuple(judged), tuple(failures), dropped=tuple(dropped)
        )

    def _finish(self, point: Point, number: int, step: int | None = None) -> Score | EndedRun:
        """The score of a run, trained and judged where it is not; the run where the user has stopped it.

        `step`: of a rung, after which the run waits; None: it trains to its end, and its best checkpoint is judged.
        """
        folder = self.folder.run(point)
        path = self.folder.score_file(point.name, self.metric.name, step)
        stored_score = self.folder.read_score(path, self.metric.kind)
        if stored_score is not None:
            return stored_score
        if step is None or step not in saved_steps(folder.checkpoints):
            ended_run = self._train(point, number, step)
            if ended_run is not None:
                return ended_run
        progress(f"{self._title(point, number)}: evaluating")
        wanted_step = "best" if step is None else str(step)
        score = judge(folder, self.metric, step=wanted_step, devices=self.devices)
        self.folder.write_score(path, score)
        seconds = seconds_of(self.folder.run(point))
        self.on_line(
            f"run {number}", f"{point.text}: {self.metric.kind} {score.value:.4f}, {seconds:.0f} s"
        )
        return score

    def _train(self, point: Point, number: int, stop_at: int | None) -> EndedRun | None:
        """Starts the run, or resumes it, up to a step or to its end; None once it is there.

        The run where the user has stopped it. Raises UserError.
        """
        folder = self.folder.run(point)
        steps: int | None = None
        user_stopped = False

        def watch(event: Event, requests: StopRequests) -> None:
            nonlocal steps, user_stopped
            user_stopped = requests.stop_requested
            if isinstance(event, RunStarted):
                steps = event.steps or None
            if not isinstance(event, RunStarted | Phase | StepDone):
                return
            if text := progress_text(event, steps):
                progress(f"{self._title(point, number)}: {text}")

        progress(f"{self._title(point, number)}: starting")
        if is_run(folder.path):
            ended_run = resume(
                folder.path,
                devices=self.devices,
                quiet=True,
                watch=watch,
                own_recipe=point.recipe.recipe,
                stop_at=stop_at,
            )
        else:
            ended_run = start(
                point.recipe,
                run_dir=folder.path,
                devices=self.devices,
                quiet=True,
                watch=watch,
                measure=self.measure,
                stop_at=stop_at,
            )
        is_there = ended_run.code == DONE
        if ended_run.code == STOPPED and stop_at is not None and not user_stopped:
            is_there = stop_at in saved_steps(folder.checkpoints)
        return None if is_there else ended_run

    def _title(self, point: Point, number: int) -> str:
        return f"run {number} of {len(self.points)} ({point.text})"

    def _over_budget(self, point: Point) -> bool:
        """Whether this run, not begun, would end after the budget, by the mean of the runs before it or the plan."""
        if self.budget_seconds is None or is_run(self.folder.run(point).path):
            return False
        seconds = [
            seconds_of(self.folder.run(other))
            for other in self.points
            if is_run(self.folder.run(other).path)
        ]
        expected_seconds = self.expected_seconds or 0.0
        if seconds:
            expected_seconds = sum(seconds) / len(seconds)
        return sum(seconds) + expected_seconds > self.budget_seconds


def seconds_of(folder: RunFolder) -> float:
    """The wall time of a run's processes so far."""
    return summary_of(read_events(folder.events)).seconds if folder.events.exists() else 0.0

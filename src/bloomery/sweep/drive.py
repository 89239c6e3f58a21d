"""Trains and judges the runs of a sweep, one after another or one per device, as far as they are not done. No torch.

Each run is started and resumed as `bloomery train` and `bloomery resume` do it. Nothing but the runs and their scores
is stored: a sweep that was killed looks at them, resumes the unfinished run bitwise, and goes on.
"""

import contextvars
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import final

from bloomery.core.errors import UserError
from bloomery.core.progress import progress
from bloomery.core.run_folder import RunFolder, is_run
from bloomery.core.run_lock import hold_run_lock
from bloomery.core.signals import StopRequests, stop_requests
from bloomery.data.prepare.prepare import finished_manifest, prepared_folder
from bloomery.hardware.machine import Machine
from bloomery.infer.model_folder import saved_steps
from bloomery.launch.exit_codes import DONE, STOPPED
from bloomery.monitor.events import Event, Phase, RunStarted, StepDone, read_events
from bloomery.monitor.words import progress_text
from bloomery.plan.types import RunPlan
from bloomery.runs.flow import INTERRUPTED, EndedRun
from bloomery.runs.lifecycle import resume, start
from bloomery.sweep.points import REDUCTION, Point
from bloomery.sweep.ranking import Judged, best_first
from bloomery.sweep.scores import Metric, judge
from bloomery.sweep.store import Score, SweepFolder
from bloomery.view.summary import summary_of

LOOK_SECONDS = 0.2  # between two looks for a Ctrl+C while threads train


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


# The step of a run at a rung; None at the last one.
StepOf = Callable[[Point, int], int | None]


@final
@dataclass(frozen=True)
class Task:
    """A run to train to a rung's step, or to its end, and to judge."""

    point: Point
    step: int | None = None


@final
@dataclass
class Outcome:
    """Mutable: what the tasks have found. `judged`: by name and step. `code`: of a run that was stopped, else 0."""

    judged: dict[tuple[str, int | None], Judged] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    code: int = 0

    def note(self, task: Task, result: Score | EndedRun | Failure) -> None:
        if isinstance(result, Failure):
            self.failures.append(result)
        elif isinstance(result, EndedRun):
            self.code = self.code or result.code
        else:
            name = task.point.name
            self.judged[name, task.step] = Judged(name, result.value, result.scores, result.step)

    def judged_at(self, step: int | None, points: Sequence[Point]) -> tuple[Judged, ...]:
        """Those judged at a step, None: at their end, in the order of `points`."""
        keys = [(point.name, step) for point in points]
        return tuple(self.judged[key] for key in keys if key in self.judged)


@final
class Threads:
    """What the threads of a sweep share: whether all runs shall save and stop, and who prepares a dataset."""

    def __init__(self) -> None:
        self.asked = False
        self._preparing = threading.Lock()
        self._requests: list[StopRequests] = []
        self._lock = threading.Lock()

    @contextmanager
    def alone_where_it_prepares(self, point: Point) -> Iterator[None]:
        """Inside the block no other run prepares a dataset, unless that of this run is prepared already.

        A second run that needs the same dataset waits until the first one has it.
        """
        with self._preparing:
            folder = prepared_folder(point.recipe, Path.cwd())
            if finished_manifest(point.recipe, folder) is None:
                yield
                return
        yield

    def add(self, requests: StopRequests) -> None:
        """The requests of a run that trains; its stop is requested at once where that was asked."""
        with self._lock:
            if not any(known is requests for known in self._requests):
                self._requests.append(requests)
            asked = self.asked
        if asked:
            requests.ask(signal.SIGTERM)

    def ask(self) -> None:
        """Every run that trains saves and stops; one that is evaluated is evaluated to its end."""
        with self._lock:
            self.asked = True
            all_requests = list(self._requests)
        for requests in all_requests:
            if not requests.stop_requested:
                requests.ask(signal.SIGTERM)


@final
@dataclass(frozen=True)
class Sweep:
    """`on_line` gets a line for each run that is done. `measure`: as in `lifecycle.start`.

    `slots`: where runs train, each as `-d` names devices; of several each trains one run at a time, all at once.
    `expected_seconds`: of a run by the plan, None where that is unknown; `budget_seconds`: of the whole sweep.
    `command`: the words after `bloomery` that continue it.
    """

    folder: SweepFolder
    points: Sequence[Point]
    metric: Metric
    on_line: Callable[[str, str], None]
    slots: Sequence[str | None] = (None,)
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
        queue = deque(self.points)

        def next_task() -> Task | None:
            while queue:
                point = queue.popleft()
                if not self._over_budget(point):
                    return Task(point)
            return None

        with self._alone():
            outcome = self._work(next_task)
        judged = outcome.judged_at(None, self.points)
        known = {run.name for run in judged} | {end.point.name for end in outcome.failures}
        left_out = tuple(point for point in self.points if point.name not in known)
        code = outcome.code or (DONE if judged else 1)
        return SweepEnd(code, judged, tuple(outcome.failures), left_out)

    def halve(self, rungs_by_name: Mapping[str, Sequence[int]]) -> SweepEnd:
        """Trains all runs to their first rung, the best third of them to the second, and so on (`points.rungs_of`).

        A run goes on exactly where it stopped, so that one that reaches the end is that of a grid, bit by bit. On one
        device the runs of a rung are compared when all of them have reached it, and which ones go on follows from the
        stored scores alone: equal ones in the order of the runs. On several devices none waits for the slowest run of a
        rung (`_next_of_asha`).
        """
        num_rungs = min(map(len, rungs_by_name.values()))

        def step_of(point: Point, rung: int) -> int | None:
            return None if rung == num_rungs - 1 else rungs_by_name[point.name][rung]

        outcome = Outcome()
        with self._alone():
            if len(self.slots) > 1:
                outcome = self._work(self._next_of_asha(outcome, step_of, num_rungs), outcome)
            else:
                survivors = list(self.points)
                for rung in range(num_rungs):
                    tasks = iter([Task(point, step_of(point, rung)) for point in survivors])
                    self._work(partial(next, tasks, None), outcome)
                    if outcome.code:
                        break
                    kept = max(1, len(survivors) // REDUCTION)
                    names = self._best_names(outcome, survivors, rung, step_of)[:kept]
                    survivors = [point for point in survivors if point.name in names]

        # The runs that stay at a rung, the longest trained ones first and of these the best.
        finished = outcome.judged_at(None, self.points)
        dropped: dict[str, Judged] = {}
        for rung in reversed(range(num_rungs - 1)):
            runs = [
                outcome.judged[point.name, step]
                for point in self.points
                if (point.name, step := step_of(point, rung)) in outcome.judged
            ]
            for run in best_first(runs, lower_is_better=self.metric.lower_is_better):
                if run.name not in {run.name for run in finished}:
                    dropped.setdefault(run.name, run)
        known = {run.name for run in finished} | set(dropped)
        known |= {end.point.name for end in outcome.failures}
        left_out = tuple(point for point in self.points if point.name not in known)
        code = outcome.code or (DONE if finished else 1)
        return SweepEnd(code, finished, tuple(outcome.failures), left_out, tuple(dropped.values()))

    def _best_names(
        self, outcome: "Outcome", points: Sequence[Point], rung: int, step_of: StepOf
    ) -> list[str]:
        """The runs that have reached a rung, best first; of equal ones the first stays first."""
        runs = [
            outcome.judged[key]
            for point in points
            if (key := (point.name, step_of(point, rung))) in outcome.judged
        ]
        in_order = best_first(runs, lower_is_better=self.metric.lower_is_better)
        return [run.name for run in in_order]

    def _next_of_asha(
        self, outcome: "Outcome", step_of: StepOf, num_rungs: int
    ) -> Callable[[], "Task | None"]:
        """The next task of asynchronous successive halving: `get_job` of Li et al. 2018, algorithm 2.

        From the highest rung down, a run is promoted that is among the best third of those that have reached its rung
        so far; where there is none, the next run begins. Which runs go on may then depend on which are fast. All that
        the decision needs are the stored scores, with which a sweep that was killed begins.
        """
        promoted: set[tuple[str, int]] = set()
        for point in self.points:
            for rung in range(num_rungs):
                task = Task(point, step_of(point, rung))
                path = self.folder.score_file(point.name, self.metric.name, task.step)
                stored_score = self.folder.read_score(path, self.metric.kind)
                if stored_score is not None:
                    outcome.note(task, stored_score)
                    promoted.add((point.name, rung - 1))
        queue = deque(
            point for point in self.points if (point.name, step_of(point, 0)) not in outcome.judged
        )
        by_name = {point.name: point for point in self.points}

        def next_task() -> Task | None:
            for rung in reversed(range(num_rungs - 1)):
                names = self._best_names(outcome, self.points, rung, step_of)
                for name in names[: len(names) // REDUCTION]:
                    if (name, rung) not in promoted:
                        promoted.add((name, rung))
                        point = by_name[name]
                        return Task(point, step_of(point, rung + 1))
            if queue:
                point = queue.popleft()
                return Task(point, step_of(point, 0))
            return None

        return next_task

    def _work(
        self, next_task: Callable[[], "Task | None"], outcome: "Outcome | None" = None
    ) -> "Outcome":
        """Does the tasks, as many at once as there are slots, until there is none or the user stops one.

        `next_task` is asked by one thread at a time, after the outcomes of the tasks before it are noted.
        """
        outcome = outcome or Outcome()
        if len(self.slots) == 1:
            while not outcome.code and (task := next_task()) is not None:
                outcome.note(task, self._done(task, self.slots[0], None))
            return outcome

        # A thread for each device: training and evaluating are children of it, which end with it. A thread without a
        # task waits, since a run that ends may promote one.
        changed = threading.Condition()
        shared = Threads()
        working = 0

        def serve(slot: str | None) -> None:
            nonlocal working
            while True:
                with changed:
                    while (task := None if shared.asked else next_task()) is None:
                        if shared.asked or not working:
                            return
                        changed.wait()
                    working += 1
                result = self._done(task, slot, shared)
                with changed:
                    working -= 1
                    outcome.note(task, result)
                    changed.notify_all()
                if outcome.code:
                    shared.ask()

        def begin(slot: str | None) -> threading.Thread:
            run = contextvars.copy_context().run
            thread = threading.Thread(target=run, args=(serve, slot), name=f"sweep on {slot}")
            thread.daemon = True  # a second Ctrl+C ends at once, and the children with it
            thread.start()
            return thread

        with stop_requests() as requests:
            threads = [begin(slot) for slot in self.slots]
            try:
                while any(thread.is_alive() for thread in threads):
                    time.sleep(LOOK_SECONDS)
                    if requests.stop_requested:
                        shared.ask()
            except KeyboardInterrupt:
                outcome.code = INTERRUPTED
        if shared.asked:
            outcome.code = outcome.code or STOPPED
        return outcome

    def _done(
        self, task: "Task", slot: str | None, threads: Threads | None
    ) -> Score | EndedRun | Failure:
        """The score of a task, the run where it was stopped, or why it has failed."""
        name = task.point.name
        try:
            self.folder.write_failure(name, "")
            return self._finish(task, slot, threads)
        except UserError as error:
            self.on_line("failed", f"{task.point.text}: {error.problem}")
            # Where the disk is full, the line above is all that says so.
            with suppress(UserError):
                self.folder.write_failure(name, error.problem)
            return Failure(task.point, error.problem)

    def _finish(self, task: "Task", slot: str | None, threads: Threads | None) -> Score | EndedRun:
        """The score of a run, trained and judged where it is not; the run where the user has stopped it.

        A rung's run waits after its step; another trains to its end, and its best checkpoint is judged.
        """
        point, step = task.point, task.step
        folder = self.folder.run(point)
        path = self.folder.score_file(point.name, self.metric.name, step)
        stored_score = self.folder.read_score(path, self.metric.kind)
        if stored_score is not None:
            return stored_score
        if step is None or step not in saved_steps(folder.checkpoints):
            ended_run = self._train(point, step, slot, threads)
            if ended_run is not None:
                return ended_run
        title = self._title(point, slot)
        progress(f"{title}: evaluating")
        wanted_step = "best" if step is None else str(step)
        score = judge(folder, self.metric, step=wanted_step, devices=slot)
        self.folder.write_score(path, score)
        seconds = seconds_of(self.folder.run(point))
        number = self.points.index(point) + 1
        self.on_line(
            f"run {number}", f"{point.text}: {self.metric.kind} {score.value:.4f}, {seconds:.0f} s"
        )
        return score

    def _train(
        self, point: Point, stop_at: int | None, slot: str | None, threads: Threads | None
    ) -> EndedRun | None:
        """Starts the run, or resumes it, up to a step or to its end; None once it is there.

        The run where the user has stopped it. Raises UserError.
        """
        folder = self.folder.run(point)
        steps: int | None = None
        user_stopped = False
        title = self._title(point, slot)

        def watch(event: Event, requests: StopRequests) -> None:
            nonlocal steps, user_stopped
            if threads is not None:
                threads.add(requests)
            if isinstance(event, RunStarted):
                prepared.close()
            user_stopped = requests.stop_requested
            if isinstance(event, RunStarted):
                steps = event.steps or None
            if not isinstance(event, RunStarted | Phase | StepDone):
                return
            if text := progress_text(event, steps):
                progress(f"{title}: {text}")

        progress(f"{title}: starting")
        with ExitStack() as prepared:
            if threads is not None:
                prepared.enter_context(threads.alone_where_it_prepares(point))
                if threads.asked:
                    return EndedRun(folder.path, STOPPED)
            if is_run(folder.path):
                ended_run = resume(
                    folder.path,
                    devices=slot,
                    quiet=True,
                    watch=watch,
                    own_recipe=point.recipe.recipe,
                    stop_at=stop_at,
                )
            else:
                ended_run = start(
                    point.recipe,
                    run_dir=folder.path,
                    devices=slot,
                    quiet=True,
                    watch=watch,
                    measure=self.measure,
                    stop_at=stop_at,
                )
        is_there = ended_run.code == DONE
        if ended_run.code == STOPPED and stop_at is not None and not user_stopped:
            is_there = stop_at in saved_steps(folder.checkpoints)
        return None if is_there else ended_run

    def _title(self, point: Point, slot: str | None) -> str:
        number = self.points.index(point) + 1
        place = f" on {slot}" if len(self.slots) > 1 else ""
        return f"run {number} of {len(self.points)} ({point.text}){place}"

    def _over_budget(self, point: Point) -> bool:
        """Whether this run, not begun, would end after the budget.

        A run takes the mean of those that are done, or else what the plan says. One that trains now will take as long.
        """
        if self.budget_seconds is None or is_run(self.folder.run(point).path):
            return False
        done_seconds: list[float] = []
        other_seconds: list[float] = []
        for other in self.points:
            folder = self.folder.run(other)
            if is_run(folder.path):
                is_done = self.folder.score_file(other.name, self.metric.name).exists()
                (done_seconds if is_done else other_seconds).append(seconds_of(folder))
        expected_seconds = self.expected_seconds or 0.0
        if done_seconds:
            expected_seconds = sum(done_seconds) / len(done_seconds)
        total = sum(done_seconds) + sum(max(taken, expected_seconds) for taken in other_seconds)
        return (total + expected_seconds) / len(self.slots) > self.budget_seconds


def seconds_of(folder: RunFolder) -> float:
    """The wall time of a run's processes so far."""
    return summary_of(read_events(folder.events)).seconds if folder.events.exists() else 0.0

"""A run after its events so far: figures, curves and incidents, which terminals, studio and the report draw."""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import final

from bloomery.core.text import harmless
from bloomery.monitor.events import (
    Event,
    ExpertLoad,
    RunEnded,
    RunStarted,
    Sampled,
    Saved,
    StepDone,
    TaskDone,
    Warned,
    as_shown,
    last_kept_step,
)
from bloomery.view.curves import RunCurves
from bloomery.view.incidents import KILLED, Incident, incident_of
from bloomery.view.step_columns import StepColumns, in_groups
from bloomery.view.summary import RunSummary, Status, status_of_end

MOST_INCIDENTS = 200
MOST_SAMPLES = 200
MOST_SAVES = 100


@final
@dataclass
class RunView:
    """Mutable: the state of a run after the events that `add` was given."""

    summary: RunSummary = field(default_factory=RunSummary)
    curves: RunCurves = field(default_factory=RunCurves)
    started: RunStarted | None = None  # the newest
    # The newest; of a report all of them.
    incidents: deque[Incident] = field(default_factory=lambda: deque(maxlen=MOST_INCIDENTS))
    # At most MOST_SAMPLES, in the order of the file: of many evaluations the first, the newest and some between.
    samples: list[Sampled] = field(default_factory=list)
    saves: deque[Saved] = field(default_factory=lambda: deque(maxlen=MOST_SAVES))
    # The newest by task, metric and the model of a comparison.
    tasks: dict[tuple[str, str, str], TaskDone] = field(default_factory=dict)
    diagnoses: dict[str, Warned] = field(default_factory=dict)  # by their cause
    expert_load: ExpertLoad | None = None  # the newest, of a mixture
    # When the last process of the run began; of one that did not come so far, when the one before it ended.
    began_at: float = 0.0
    _ended_at: float = 0.0

    def add(self, event: Event) -> None:
        """Events in the order of the file."""
        if isinstance(event, StepDone):
            self.add_steps(StepColumns.of((event,)))
            return
        event = as_shown(event)

        # A run was killed after its last step.
        if self.summary.clock.shows_kill(event):
            step = self.summary.last_step.step if self.summary.last_step is not None else 0
            seconds = self.summary.clock.seconds
            self.incidents.append(Incident(step, event.time, seconds, "kill", KILLED))
        self.summary.add(event)
        self.curves.add(event)
        last_kept = last_kept_step(event)
        if last_kept is not None and self.expert_load is not None:
            self.expert_load = self.expert_load if self.expert_load.step <= last_kept else None
        match event:
            case ExpertLoad():
                self.expert_load = event
            case Sampled():
                self.samples.append(event)
                if len(self.samples) > MOST_SAMPLES:
                    self.samples = _thinned(self.samples)
            case Saved():
                self.saves.append(event)
            case TaskDone():
                self.tasks[event.task, event.metric, event.against] = event
            case Warned() if event.cause:
                self.diagnoses[event.cause] = event
            case RunStarted():
                self.started = event
                self.began_at = self._ended_at = event.time
            case RunEnded():
                self.began_at = self._ended_at
                self._ended_at = event.time
        incident = incident_of(event, self.summary.clock.seconds)
        if incident is not None and incident.kind != "save":
            self.incidents.append(incident)

    def add_all(self, events: Iterable[Event]) -> None:
        """Those of a long run at an eighth of the cost of `add`."""
        for group in in_groups(events):
            self.add_group(group)

    def add_group(self, group: Event | StepColumns) -> None:
        if isinstance(group, StepColumns):
            self.add_steps(group)
        else:
            self.add(group)

    def add_steps(self, steps: StepColumns) -> None:
        """As `add` of each."""
        seconds_at_steps = self.summary.add_steps(steps)
        self.curves.add_steps(steps, seconds_at_steps)
        seconds_of = dict(zip(steps.time, seconds_at_steps, strict=True)) if steps.skipped else {}
        for step in steps.skipped:
            incident = incident_of(step, seconds_of[step.time])
            assert incident is not None  # a step without a loss is one
            self.incidents.append(incident)

    def note(self, step: int, text: str) -> None:
        """A line of its own among the incidents."""
        now, seconds = time.time(), self.summary.clock.seconds
        self.incidents.append(Incident(step, now, seconds, "note", harmless(text)))

    @property
    def saved(self) -> Saved | None:
        """The newest checkpoint."""
        return self.saves[-1] if self.saves else None

    def shown_incidents(self) -> Iterator[Incident]:
        """The oldest first. Of an error that the run has left behind, the first line is enough."""
        went_on = max(
            (at for at, i in enumerate(self.incidents) if i.kind in ("resume", "rewind", "skip")),
            default=-1,
        )
        for at, incident in enumerate(self.incidents):
            if at < went_on:
                yield replace(incident, text=incident.text.partition("\n")[0])
            else:
                yield incident

    def restart(self) -> None:
        """A new process resumes the run: the end of the previous one is no longer its state."""
        self.summary.ended = None
        self.summary.stopping = False
        self.summary.phase = None
        self.summary.recent.clear()
        self.incidents.clear()

    @property
    def state(self) -> Status:
        """starting, running, stopping, or the status of RunEnded."""
        if self.summary.ended is not None:
            return status_of_end(self.summary.ended)
        if self.summary.stopping:
            return "stopping"
        return "running" if self.summary.recent else "starting"


def _thinned(samples: list[Sampled]) -> list[Sampled]:
    """Those of the first and of every second step from the newest back; the newest where one step has most of them."""
    steps = sorted({sample.step for sample in samples})
    kept_steps = {steps[0], *steps[::-2]}
    kept_samples = [sample for sample in samples if sample.step in kept_steps]
    return kept_samples if len(kept_samples) <= MOST_SAMPLES else kept_samples[-MOST_SAMPLES:]

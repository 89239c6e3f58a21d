"""What a run has recorded: events.jsonl checked against its plan and checkpoints. No torch."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bloomery.core.errors import UserError
from bloomery.core.files import read_whole
from bloomery.infer.model_folder import saved_steps, step_folder
from bloomery.monitor.events import Event, Resumed, RunEnded, RunStarted, StepDone, Tail


@dataclass(frozen=True)
class LogCheck:
    """What events.jsonl holds. `missing_steps`: those without an event, before a later step or checkpoint.

    `last_step`: the last one with an event. `end`: the event of the run's end, unless the run continued.
    """

    missing_steps: tuple[range, ...]
    unreadable_lines: int
    last_step: int
    end: RunEnded | None

    @property
    def problem(self) -> str | None:
        """One sentence; None when every event is present."""
        parts = []
        if self.missing_steps:
            spans = [
                f"{steps[0]:,} to {steps[-1]:,}" if len(steps) > 1 else f"{steps[0]:,}"
                for steps in self.missing_steps
            ]
            shown_spans = ", ".join(spans[:5])
            if len(spans) > 5:
                shown_spans += f" and {len(spans) - 5:,} more ranges"
            parts.append(f"events.jsonl has no event of steps {shown_spans}")
        if self.unreadable_lines:
            lines = "1 line" if self.unreadable_lines == 1 else f"{self.unreadable_lines:,} lines"
            parts.append(f"{lines} of {'it' if parts else 'events.jsonl'} cannot be read")
        if not parts:
            return None
        return "; ".join(parts) + ": charts and figures lack them, the weights are not affected"


def read_log_check(run_dir: Path) -> LogCheck:
    """Raises UserError when events or checkpoints cannot be read."""
    tail = Tail(run_dir / "events.jsonl")
    return log_check_of(run_dir, tail.read(is_complete=True), tail)


def log_check_of(run_dir: Path, events: Iterable[Event], tail: Tail) -> LogCheck:
    """Of events that `tail` has read, or reads as they are taken. Raises UserError as `read_log_check`."""
    recorded_steps = set[int]()
    end = None
    for event in events:
        if isinstance(event, StepDone):
            recorded_steps.add(event.step)
        # Whatever comes after an end says that the run continued.
        if isinstance(event, RunEnded | RunStarted | Resumed | StepDone):
            end = event if isinstance(event, RunEnded) else None
    last_step = max([*recorded_steps, *saved_steps(run_dir / "checkpoints")], default=0)
    return LogCheck(
        _gaps(recorded_steps, last_step), tail.unknown_lines, max(recorded_steps, default=0), end
    )


def _gaps(steps: Iterable[int], last_step: int) -> tuple[range, ...]:
    """The ranges of steps between 1 and `last_step` that are missing."""
    gaps = []
    previous_step = 0
    for step in sorted({step for step in steps if 0 < step <= last_step} | {last_step + 1}):
        if step > previous_step + 1:
            gaps.append(range(previous_step + 1, step))
        previous_step = step
    return tuple(gaps)


def planned_end(run_dir: Path) -> tuple[int | None, int | None]:
    """Planned steps and early-stopping patience; None where unknown."""
    plan = _json(run_dir / "plan.json")
    return _integer(plan, "train", "steps"), _integer(plan, "eval", "early_stopping_patience")


def contradicted(run_dir: Path, end: RunEnded | None, step: int) -> bool:
    """Whether RunEnded reports "done" before the planned steps, without early stopping."""
    if end is None or end.status != "done":
        return False
    planned_steps, patience = planned_end(run_dir)
    return planned_steps is not None and patience is None and step < planned_steps


def is_done(run_dir: Path) -> bool:
    """Whether the newest checkpoint is of the last planned step, or of the step of early stopping."""
    planned_steps, patience = planned_end(run_dir)
    steps = saved_steps(run_dir / "checkpoints")
    if not steps or planned_steps is None:
        return False
    if steps[-1] >= planned_steps:
        return True
    state = _json(step_folder(run_dir / "checkpoints", steps[-1]) / "state.json")
    evaluations = _integer(state, "progress", "evaluations_since_best")
    return patience is not None and evaluations is not None and evaluations >= patience


def _json(path: Path) -> Any:
    try:
        return json.loads(read_whole(path))
    except (OSError, ValueError, RecursionError, UserError):
        return None


def _integer(content: Any, section: str, key: str) -> int | None:
    values = content.get(section) if isinstance(content, dict) else None
    value = values.get(key) if isinstance(values, dict) else None
    return value if isinstance(value, int) else None

"""The recorded history of a run: events.jsonl checked against its plan and checkpoints. No torch."""

import json
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bloomery.core.errors import UserError
from bloomery.core.files import read_whole
from bloomery.monitor.events import Resumed, RunEnded, RunStarted, StepDone, Tail
from bloomery.recipe.values import LONGEST_PROFILE
from bloomery.train.model_folder import saved_steps, step_folder

PROFILE = "profile"  # folder of traces and memory lists
PROFILE_ASKED = "profile-asked"  # request file: how many steps to record
NOT_RECORDED = "cannot write the profile"


class Stopped(Exception):
    """The run was stopped before the first step or during an evaluation."""


class OutOfMemory(UserError):
    """A micro-batch of one sequence does not fit."""


class Diverged(UserError):
    """Loss, gradients or weights stayed non-finite after skipping and rewinding."""


class Unsound(UserError):
    """A kernel computes wrong numbers."""


def asked_steps(request: Path) -> int:
    """The number of steps in the request file; 0 without a valid one."""
    try:
        words = read_whole(request, most=100).decode()
    except (OSError, ValueError, UserError):
        return 0
    return min(int(words), LONGEST_PROFILE) if words.isdecimal() else 0


def name_of(folder: Path) -> str:
    """The argument of `bloomery resume`: the name under runs/, else the path, quoted."""
    return shlex.quote(folder.name if folder.parent == Path("runs").absolute() else str(folder))


@dataclass(frozen=True)
class History:
    """`missing`: ranges of steps without an event, before a later step or checkpoint."""

    missing: tuple[range, ...]
    unreadable_lines: int
    last_step: int  # with an event
    ended: RunEnded | None  # unless the run continued

    @property
    def problem(self) -> str | None:
        """One sentence; None when every event is present."""
        parts = []
        if self.missing:
            spans = [
                f"{run[0]:,} to {run[-1]:,}" if len(run) > 1 else f"{run[0]:,}"
                for run in self.missing
            ]
            more = f" and {len(spans) - 5:,} more ranges" if len(spans) > 5 else ""
            parts.append(f"events.jsonl has no event of steps {', '.join(spans[:5])}{more}")
        if self.unreadable_lines:
            lines = "1 line" if self.unreadable_lines == 1 else f"{self.unreadable_lines:,} lines"
            parts.append(f"{lines} of {'it' if parts else 'events.jsonl'} cannot be read")
        if not parts:
            return None
        return "; ".join(parts) + ": charts and figures lack them, the weights are not affected"


def read_history(run_dir: Path) -> History:
    """Raises UserError when events or checkpoints cannot be read."""
    tail = Tail(run_dir / "events.jsonl")
    steps = set[int]()
    ended = None
    for event in tail.read(whole=True):
        if isinstance(event, StepDone):
            steps.add(event.step)
        if isinstance(event, RunEnded | RunStarted | Resumed | StepDone):
            ended = event if isinstance(event, RunEnded) else None
    reached = max([*steps, *saved_steps(run_dir / "checkpoints")], default=0)
    return History(_gaps(steps, reached), tail.unknown_lines, max(steps, default=0), ended)


def _gaps(steps: Iterable[int], reached: int) -> tuple[range, ...]:
    """The runs of steps between 1 and `reached` that are missing."""
    found = []
    before = 0
    for step in sorted({step for step in steps if 0 < step <= reached} | {reached + 1}):
        if step > before + 1:
            found.append(range(before + 1, step))
        before = step
    return tuple(found)


def planned_end(run_dir: Path) -> tuple[int | None, int | None]:
    """Planned steps and early-stopping patience; None where unknown."""
    plan = _json(run_dir / "plan.json")
    return _integer(plan, "train", "steps"), _integer(plan, "eval", "early_stopping_patience")


def contradicted(run_dir: Path, ended: RunEnded | None, step: int) -> bool:
    """Whether RunEnded reports "done" before the planned steps, without early stopping."""
    planned, patience = planned_end(run_dir)
    return (
        ended is not None
        and ended.status == "done"
        and planned is not None
        and patience is None
        and step < planned
    )


def is_done(run_dir: Path) -> bool:
    """Whether the newest checkpoint is of the last planned step, or of the step of early stopping."""
    planned, patience = planned_end(run_dir)
    steps = saved_steps(run_dir / "checkpoints")
    if not steps or planned is None:
        return False
    if steps[-1] >= planned:
        return True
    state = _json(step_folder(run_dir / "checkpoints", steps[-1]) / "state.json")
    waited = _integer(state, "progress", "evaluations_since_best")
    return patience is not None and waited is not None and waited >= patience


def _json(path: Path) -> Any:
    try:
        return json.loads(read_whole(path))
    except (OSError, ValueError, RecursionError, UserError):
        return None


def _integer(content: Any, section: str, key: str) -> int | None:
    held = content.get(section) if isinstance(content, dict) else None
    value = held.get(key) if isinstance(held, dict) else None
    return value if isinstance(value, int) else None

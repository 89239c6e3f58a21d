"""What happened in a run beside its steps: kills, stops, resumes, skipped steps, warnings and failures, in words."""

from dataclasses import dataclass
from typing import Literal, final

from bloomery.monitor.events import (
    Event,
    Recovered,
    Resumed,
    RunEnded,
    Saved,
    StepDone,
    Warned,
)
from bloomery.monitor.words import incident_text

KILLED = "killed (SIGKILL, crash or power loss)"
IncidentKind = Literal[
    "kill",
    "resume",
    "skip",
    "rewind",
    "warning",
    "stop",
    "failure",
    "end",
    "save",
    "note",
]


@final
@dataclass(frozen=True)
class Incident:
    """`time`: seconds since 1970; `seconds`: of training until then."""

    step: int
    time: float
    seconds: float
    kind: IncidentKind
    text: str


def incident_of(event: Event, seconds: float) -> Incident | None:
    """None for a measurement. A kill has no event: what runs on without an end tells it."""
    text = incident_text(event)
    return (
        None if text is None else Incident(event.step, event.time, seconds, _kind_of(event), text)
    )


def _kind_of(event: Event) -> IncidentKind:
    match event:
        case StepDone():
            return "skip"
        case Resumed():
            return "resume"
        case Recovered():
            return "rewind" if event.action.startswith("back to") else "skip"
        case Warned():
            return "warning"
        case RunEnded(status="done"):
            return "end"
        case RunEnded():
            return "stop" if event.status == "stopped" else "failure"
        case Saved():
            return "save"
    return "note"

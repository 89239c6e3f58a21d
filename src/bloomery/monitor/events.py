"""What happens in a run, as values. `events.jsonl` holds one object a line; everything that shows a run reads it."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Event:
    """`step` counts finished optimizer steps; `time` is seconds since 1970."""

    step: int = 0
    time: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    version: str
    parameters: int
    steps: int
    attention: str  # the kernel that runs
    device: str
    because: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Phase(Event):
    """Work before, between or after steps: `done` of `total` units, `total` 0 while it is unknown."""

    name: str
    done: float = 0
    total: float = 0


@dataclass(frozen=True, kw_only=True)
class StepDone(Event):
    """One optimizer step. `loss` is nats per learned token, None when the step was skipped as not finite."""

    loss: float | None
    learning_rate: float
    grad_norm: float | None
    tokens: int  # since the start of training, positions of the layout
    tokens_per_second: float
    samples_per_second: float
    step_seconds: float
    data_wait_seconds: float
    memory_gib: float


@dataclass(frozen=True, kw_only=True)
class EvalDone(Event):
    loss: float  # nats per token
    perplexity: float
    bits_per_byte: float | None
    tokens: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Sampled(Event):
    prompt: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Saved(Event):
    path: str
    bytes: int
    seconds: float
    best: bool = False


@dataclass(frozen=True, kw_only=True)
class GpuSampled(Event):
    device: int
    utilisation: float | None = None
    memory_gib: float | None = None
    temperature: float | None = None
    power: float | None = None


@dataclass(frozen=True, kw_only=True)
class Warned(Event):
    because: str


@dataclass(frozen=True, kw_only=True)
class Recovered(Event):
    because: str
    action: str  # what the run does now


@dataclass(frozen=True, kw_only=True)
class Resumed(Event):
    path: str  # the checkpoint, or "" when the run starts over
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RunEnded(Event):
    why: str  # "done", "stopped", "failed: ..."


Emit = Callable[[Event], None]
KINDS: dict[str, type[Event]] = {kind.__name__: kind for kind in Event.__subclasses__()}


def to_json(event: Event) -> str:
    return json.dumps({"event": type(event).__name__, **asdict(event)}, allow_nan=False, ensure_ascii=False)


def from_json(line: str) -> Event | None:
    """None for a line that a kill cut short, or of a kind that this version does not know."""
    try:
        entry: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    kind = KINDS.get(entry.pop("event", ""))
    if kind is None:
        return None
    known = {f.name for f in fields(kind)}
    return kind(**{key: value for key, value in entry.items() if key in known})


def read_events(path: Path) -> Iterator[Event]:
    """Every event in the order of writing; a missing file has none."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            event = from_json(line)
            if event is not None:
                yield event


def last_per_step(events: Iterator[Event], kind: type[Event]) -> list[Any]:
    """Events of one kind, a resumed run's repeated steps replaced by their last telling, by step."""
    by_step = {event.step: event for event in events if isinstance(event, kind)}
    return [by_step[step] for step in sorted(by_step)]

"""Many consecutive steps by field instead of one by one, which costs a fraction: for views of long runs. No torch."""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import isnan
from operator import itemgetter
from pathlib import Path
from typing import Any, final

from bloomery.monitor.events import (
    LONGEST_LINE,
    Decode,
    DeviceStats,
    Event,
    ExpertLoad,
    Saved,
    StepDone,
    StepHealth,
    Tail,
    TaskDone,
    from_json,
    is_whole,
)

NEWEST = 50  # steps that are there as events, too
_MOST = 4000  # steps together
_SKIPPED = 200  # steps without a loss that are there as events: more are not shown
_STEP = b'{"event": "StepDone", '  # how the line of a step begins
# Events that may be handled before the steps around them: no figure depends on their order.
_BETWEEN_STEPS = (DeviceStats, ExpertLoad, Saved, StepHealth, TaskDone)
_BETWEEN_STEP_LINES = tuple(b'{"event": "%s", ' % kind.__name__.encode() for kind in _BETWEEN_STEPS)
_NAN = float("nan")


@final
@dataclass(frozen=True)
class StepColumns:
    """At least one step, in the order of the file. The names are those of `StepDone`; NaN: None, or no such metric."""

    step: Sequence[int]
    time: "array[float]"
    loss: "array[float]"
    learning_rate: "array[float]"
    grad_norm: "array[float]"
    tokens: "array[float]"
    tokens_per_second: "array[float]"
    step_seconds: "array[float]"
    memory_gib: "array[float]"
    metrics: Mapping[str, "array[float]"]
    newest: Sequence[StepDone]  # at most NEWEST
    skipped: Sequence[StepDone]  # without a loss, the newest

    @classmethod
    def of(cls, steps: Sequence[StepDone]) -> "StepColumns":
        """At least one step."""
        skipped = [step for step in steps if step.loss is None][-_SKIPPED:]
        rows = [_FIELDS_OF(vars(step)) for step in steps]
        return _columns(rows, newest=steps[-NEWEST:], skipped=skipped)


AS_EVENTS = ("newest", "skipped")  # fields that hold whole steps
_FIELDS = tuple(field.name for field in fields(StepColumns) if field.name not in AS_EVENTS)
# Raises KeyError for a line of an older version that lacks one of them: see `parse_steps`.
_FIELDS_OF = itemgetter(*_FIELDS)
_NULLABLE = ("loss", "grad_norm")  # null in a skipped step


def _columns(
    rows: Sequence[tuple[Any, ...]], *, newest: Sequence[StepDone], skipped: Sequence[StepDone]
) -> StepColumns:
    """`rows`: the fields of each step. Raises TypeError or OverflowError where one has another type than `StepDone`."""
    columns = zip(*rows, strict=True)
    by_name: dict[str, Sequence[Any]] = dict(zip(_FIELDS, columns, strict=True))
    steps = by_name.pop("step")
    metrics = by_name.pop("metrics")
    if {*map(type, steps)} != {int} or {*map(type, metrics)} != {dict}:
        raise TypeError
    for name in _NULLABLE:
        by_name[name] = [_NAN if value is None else value for value in by_name[name]]
    names = dict.fromkeys(name for values in metrics if values for name in values)
    return StepColumns(
        step=steps,
        metrics={name: array("d", [m.get(name, _NAN) for m in metrics]) for name in names},
        newest=newest,
        skipped=skipped,
        **{name: array("d", values) for name, values in by_name.items()},
    )


@final
@dataclass(frozen=True)
class ParsedSteps:
    """Lines of steps by field, with those that are needed as events, too: what another process hands over."""

    columns: StepColumns  # without `newest` and `skipped`
    newest: Sequence[bytes]
    skipped: Sequence[bytes]

    def with_events(self, decode: Decode) -> StepColumns:
        """Raises ValueError where one of the lines is not as this version writes it."""
        parsed = [
            [from_json(line, decode) for line in lines] for lines in (self.newest, self.skipped)
        ]
        newest, skipped = [[e for e in events if isinstance(e, StepDone)] for events in parsed]
        if len(newest) + len(skipped) < len(self.newest) + len(self.skipped):
            raise ValueError("a line that is no step")
        return replace(self.columns, newest=newest, skipped=skipped)


def parse_steps(lines: Sequence[bytes], decode: Decode) -> ParsedSteps | None:
    """The steps of these lines; None where they are few, or one of them is not as this version writes it."""
    if len(lines) <= NEWEST or max(map(len, lines)) > LONGEST_LINE or not all(map(is_whole, lines)):
        return None
    try:
        # The other fields are freed line by line: to hold all of them would take most of the time.
        rows = [_FIELDS_OF(decode(line)) for line in lines]
        columns = _columns(rows, newest=(), skipped=())
    except (ValueError, RecursionError, KeyError, TypeError, OverflowError):
        # Of an older version, for one, which lacks a field (KeyError): these lines are read one by one, where the
        # field has the default of `StepDone`; a line without a field that has none is an unknown line.
        return None
    skipped = [line for line, loss in zip(lines, columns.loss, strict=True) if isnan(loss)]
    return ParsedSteps(columns, lines[-NEWEST:], skipped[-_SKIPPED:])


def together(lines: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Consecutive steps, and each other line by itself. Those that no figure depends on come before the steps."""
    step_lines: list[bytes] = []
    for line in lines:
        if line.startswith(_STEP):
            step_lines.append(line)
            continue
        if step_lines and not line.startswith(_BETWEEN_STEP_LINES):
            yield step_lines
            step_lines = []
        yield [line]
    if step_lines:
        yield step_lines


def read_groups(tail: Tail, *, is_complete: bool = False) -> Iterator[Event | StepColumns]:
    """What `tail` has not read yet. An event that no figure depends on may come before the steps around it.

    `is_complete`: nothing more is written, and the text after the last newline is a line.
    """
    for lines in tail.chunks(is_complete=is_complete):
        for some in together(lines):
            parsed = parse_steps(some, tail.decode)
            try:
                columns = None if parsed is None else parsed.with_events(tail.decode)
            except ValueError:
                columns = None
            if columns is None:
                yield from in_groups(tail.events_of(some))
            else:
                tail.read_lines += len(some)
                yield columns


def read_ends(path: Path, most: int, decode: Decode) -> Iterator[Event | StepColumns]:
    """As `read_groups` of the first and of the last `most` bytes of a long file, and of the whole of a short one."""
    size = path.stat().st_size if path.exists() else 0
    if size <= 2 * most:
        yield from read_groups(Tail(path, decode=decode), is_complete=True)
        return
    yield from read_groups(Tail(path, decode=decode, end=most))
    # Its first line is cut, and is no event.
    yield from read_groups(Tail(path, size - most, decode), is_complete=True)


def in_groups(events: Iterable[Event | StepColumns]) -> Iterator[Event | StepColumns]:
    """As `read_groups`, of events that are there; steps that are together already stay so."""
    steps: list[StepDone] = []
    for event in events:
        if isinstance(event, StepDone):
            steps.append(event)
        if steps and (len(steps) == _MOST or not isinstance(event, (StepDone, *_BETWEEN_STEPS))):
            yield StepColumns.of(steps)
            steps = []
        if not isinstance(event, StepDone):
            yield event
    if steps:
        yield StepColumns.of(steps)

"""Many consecutive steps by field instead of one by one, which costs a fraction: for views of long runs. No torch."""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import isnan
from operator import itemgetter
from typing import Any, final

from bloomery.monitor.events import (
    LONGEST_LINE,
    Decode,
    DeviceStats,
    Event,
    Saved,
    StepDone,
    StepHealth,
    Tail,
    TaskDone,
    from_entry,
    from_json,
    is_whole,
)

NEWEST = 50  # steps that are there as events, too
_MOST = 4000  # steps together
_SKIPPED = 200  # steps without a loss that are there as events: more are not shown
_STEP = b'{"event": "StepDone", '  # how the line of a step begins
# Events that may be handled before the steps around them: no figure depends on their order.
_BETWEEN_STEPS = (DeviceStats, Saved, StepHealth, TaskDone)
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


_FIELDS = tuple(field.name for field in fields(StepColumns))[: -len(("newest", "skipped"))]
_FIELDS_OF = itemgetter(*_FIELDS)


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
    for name in ("loss", "grad_norm"):
        by_name[name] = [_NAN if value is None else value for value in by_name[name]]
    names = dict.fromkeys(name for values in metrics if values for name in values)
    return StepColumns(
        step=steps,
        metrics={name: array("d", [m.get(name, _NAN) for m in metrics]) for name in names},
        newest=newest,
        skipped=skipped,
        **{name: array("d", values) for name, values in by_name.items()},
    )


def _decoded(lines: Sequence[bytes], decode: Decode) -> StepColumns | None:
    """The steps of these lines; None where one of them is not as this version writes it."""
    if max(map(len, lines)) > LONGEST_LINE or not all(map(is_whole, lines)):
        return None
    try:
        # The other fields are freed line by line: to hold all of them would take most of the time.
        rows = [_FIELDS_OF(decode(line)) for line in lines[:-NEWEST]]
        newest_entries = [decode(line) for line in lines[-NEWEST:]]
        rows += map(_FIELDS_OF, newest_entries)
        columns = _columns(rows, newest=(), skipped=())
    except (ValueError, RecursionError, KeyError, TypeError, OverflowError):
        return None
    skipped = [line for line, loss in zip(lines, columns.loss, strict=True) if isnan(loss)]
    events = (
        [from_entry(entry) for entry in newest_entries],
        [from_json(line, decode) for line in skipped[-_SKIPPED:]],
    )
    newest, without_loss = [[e for e in some if isinstance(e, StepDone)] for some in events]
    if len(newest) + len(without_loss) < sum(map(len, events)):
        return None
    return replace(columns, newest=newest, skipped=without_loss)


def read_groups(tail: Tail) -> Iterator[Event | StepColumns]:
    """What `tail` has not read yet. An event that no figure depends on may come before the steps around it."""
    for lines in tail.chunks():
        step_lines: list[bytes] = []
        for line in lines:
            if line.startswith(_STEP):
                step_lines.append(line)
                continue
            for event in tail.events_of([line]):
                if step_lines and not isinstance(event, _BETWEEN_STEPS):
                    yield from _steps_of(tail, step_lines)
                    step_lines = []
                yield event
        if step_lines:
            yield from _steps_of(tail, step_lines)


def _steps_of(tail: Tail, lines: Sequence[bytes]) -> Iterator[Event | StepColumns]:
    columns = _decoded(lines, tail.decode) if len(lines) > NEWEST else None
    if columns is None:
        yield from in_groups(tail.events_of(lines))
    else:
        tail.read_lines += len(lines)
        yield columns


def in_groups(events: Iterable[Event]) -> Iterator[Event | StepColumns]:
    """As `read_groups`, of events that are there."""
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

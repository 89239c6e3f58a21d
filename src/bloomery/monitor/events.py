"""The events of a run. `events.jsonl` holds one JSON object per line; every view of a run reads this file."""

import json
import math
import os
import shlex
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Any, Self, TypeVar, final, get_args, get_origin

from bloomery.core.errors import UserError
from bloomery.core.files import open_regular
from bloomery.core.text import harmless, redact_secrets

E = TypeVar("E", bound="Event")


@dataclass(frozen=True, kw_only=True)
class Event:
    """`step` counts finished optimizer steps; `time` is seconds since 1970."""

    step: int = 0
    time: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """The first event of a run, and of each resumed part of it."""

    schema: int  # of the events that follow; readers refuse another one
    version: str  # of Bloomery
    world_size: int = 1  # ranks
    mesh: dict[str, int] = field(default_factory=dict)  # devices by axis, without those of 1
    parameters: int  # of the model, frozen ones included
    trainable: int | None = None  # parameters; None: all
    steps: int  # of the whole run
    attention: str  # the kernel that runs
    device: str  # the name of the GPU or CPU
    reasons: dict[str, str] = field(default_factory=dict)  # of the planner's choices
    loss_unit: str = "token"  # the loss is nats per loss token, or per label, pair or response
    epochs: str = ""  # of the dataset, as text
    build_seconds: float = 0.0  # to compile C++ for this machine, which happens once
    steps_per_rollout: int | None = (
        None  # that train on the same completions; None: none are sampled
    )


@dataclass(frozen=True, kw_only=True)
class Phase(Event):
    """Work before, between or after steps."""

    name: str  # such as prepare, compile, reference, paused, stopping
    done: float = 0  # units
    total: float = 0  # units; 0 while it is unknown


@dataclass(frozen=True, kw_only=True)
class StepDone(Event):
    """One optimizer step, written for every step."""

    # Nats per loss token, or per `loss_unit`; None: not finite, and the step was skipped.
    loss: float | None
    learning_rate: float
    grad_norm: float | None  # before clipping
    tokens: int  # since the start of training, padding included
    tokens_per_second: float  # of all devices
    sequences_per_second: float
    step_seconds: float
    data_wait_seconds: float  # of `step_seconds`
    memory_gib: float  # peak, of the fullest rank
    loss_tokens: int | None = None  # labels that are not masked
    metrics: dict[str, float] = field(default_factory=dict)  # of the objective: means over the step
    # A part of `step_seconds`, by axis of the mesh.
    communication_seconds: dict[str, float] = field(default_factory=dict)
    # Parts of `step_seconds`, where the step drew completions: drawing them, and waiting for their rewards.
    rollout_seconds: float | None = None
    reward_seconds: float | None = None

    @property
    def update_seconds(self) -> float:
        """The step without sampling completions and their rewards."""
        return self.step_seconds - (self.rollout_seconds or 0.0) - (self.reward_seconds or 0.0)


@dataclass(frozen=True, kw_only=True)
class StepHealth(Event):
    """Statistics of a few early steps and of every `logging.every`-th step; None: unknown.

    Shares of parameters count their elements. Times are those since the previous `StepHealth`.
    """

    update_ratio: float | None = None  # RMS of a matrix's update / RMS of the matrix, the median
    unchanged_share: float | None = None  # of parameters in tensors that the step did not change
    unchanged: str = ""  # the largest of these tensors
    # Share of the parameters in tensors whose gradient is absent or zero.
    no_gradient_share: float | None = None
    # Share of the labels that are the next token: 1 unless labels are wrong.
    labels_next: float | None = None
    labels_own: float | None = None  # that are the input token at their position
    labels_after: float | None = None  # that are the token after the next
    # How often two pairs of adjacent tokens are the same, relative to chance.
    pair_excess: float | None = None
    seconds: float = 0.0
    core_wait_seconds: float | None = None  # in which the training thread waited for a CPU core
    graphs: int | None = None  # compiled so far


@dataclass(frozen=True, kw_only=True)
class ExpertLoad(Event):
    """The load of each expert of a mixture in one step: every `logging.every`-th, and fewer later in a long run.

    `metrics` of `StepDone` have the summary of every step, by names that begin with `router/`.
    """

    # By layer: tokens that chose each expert, relative to an even load. 1 is fair, 0 an expert without tokens.
    ratios: dict[str, list[float]]

    def rows(self) -> list[tuple[int, list[float]]]:
        """By layer, in order. A file may hold anything: rows without numbers, or of another length, are left out."""
        rows = [
            (int(layer), ratios)
            for layer, ratios in self.ratios.items()
            if layer.isascii()
            and layer.isdigit()
            and ratios
            and all(isinstance(ratio, int | float) and ratio >= 0 for ratio in ratios)
        ]
        return sorted(row for row in rows if len(row[1]) == len(rows[0][1]))


@dataclass(frozen=True, kw_only=True)
class EvalDone(Event):
    """One evaluation on the validation set."""

    # Nats per token, or per pair or response; minus the reward of completions; None when not finite.
    loss: float | None
    perplexity: float | None  # None for objectives without a next-token loss
    bits_per_byte: float | None  # None for objectives without a next-token loss
    tokens: int  # evaluated
    seconds: float
    # Metrics of the objective: means over the validation set.
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TaskDone(Event):
    """One metric of `bloomery eval RUN --task FILE` or `--against MODEL`, at the step of the checkpoint."""

    task: str
    kind: str  # multiple-choice, exact-match, functions or text
    metric: str  # such as acc, exact_match, bits_per_byte
    items: int  # scored
    value: float | None
    low: float | None = None  # of the 95% confidence interval
    high: float | None = None
    interval: str = ""  # wilson, bootstrap or none
    against: str = ""  # the other model of a comparison
    against_value: float | None = None
    against_low: float | None = None
    against_high: float | None = None
    difference: float | None = None  # `value` - `against_value`
    difference_low: float | None = None
    difference_high: float | None = None
    p_value: float | None = None  # of no difference, two-sided
    test: str = ""  # mcnemar-exact, sign-flip-exact or sign-flip


@dataclass(frozen=True, kw_only=True)
class Sampled(Event):
    """One completion of a prompt from `sample.prompts`."""

    prompt: str
    completion: str
    # The prompt was a user message in the chat template; otherwise the completion continues its text.
    chat: bool = False
    image: str = ""  # before the prompt: a small copy of it, as a path in the run folder

    @property
    def whole(self) -> str:
        """Prompt and completion as text."""
        return f"{self.prompt}\n{self.completion}" if self.chat else self.prompt + self.completion

    @property
    def titled(self) -> str:
        """`whole`, after the name of its image, where no image can be shown."""
        name = self.image.rpartition("/")[2].rsplit("-", 2)[0]  # without size and digest
        return f"[{name}] {self.whole}" if name else self.whole


@dataclass(frozen=True, kw_only=True)
class Saved(Event):
    """One checkpoint."""

    path: str
    bytes: int
    seconds: float  # until it was on the disk
    stall_seconds: float = 0.0  # of these, those in which training waited
    best: bool = False  # has the lowest validation loss, or the highest reward, so far
    # The best weights, of a step without a checkpoint: nothing resumes from them.
    weights_only: bool = False


@dataclass(frozen=True, kw_only=True)
class DeviceStats(Event):
    """One device; None: not readable. The training process fills in the last four fields, the launcher the others."""

    device: int  # index of the GPU; -1 is the CPU
    name: str = ""
    # Covered by the sample: utilization and power are means, temperature is the peak.
    seconds: float = 0.0
    utilization: float | None = None  # percent of the time
    memory_gib: float | None = None  # in use by all processes
    memory_total_gib: float | None = None
    temperature: float | None = None  # degrees Celsius, of the junction where known
    power: float | None = None  # watts
    clock_mhz: float | None = None
    throttled: str | None = None  # reasons; "" when it is not throttled
    # The device whose `power` includes this one: two dies of one board.
    shared_with: int | None = None
    allocated_gib: float | None = None  # by tensors of the training process, at the end of a step
    reserved_gib: float | None = None  # by the caching allocator
    fragmentation: float | None = None  # share of `reserved_gib` that is free between tensors
    alloc_retries: int | None = None  # cache flushes of the allocator before a retry


CPU_DEVICE = -1  # as `DeviceStats.device`


@dataclass(frozen=True, kw_only=True)
class Warned(Event):
    """One warning."""

    reason: str  # the text of the warning
    cause: str = ""  # id of a diagnosis, so that each is reported once


@dataclass(frozen=True, kw_only=True)
class StepChecked(Event):
    """One step of a small model on the run's GPU, compared with the CPU before the first step."""

    device: str  # the name of the GPU
    arch: str  # such as gfx1030 or sm_90
    torch: str  # the version of PyTorch
    driver: str = ""
    precision: str
    problem: str = ""  # the part at fault and what is wrong with it; "": the GPU is right
    detail: str = ""  # the error, and what rounding explains
    fix: str = ""  # a setting under which the GPU is right
    # A part that gives different bits when it is computed twice.
    unrepeatable: str = ""
    not_compared: str = ""  # such as the updates of an optimizer without a formula
    seconds: float = 0.0  # that the check took
    from_cache: bool = (
        False  # of an earlier run on this GPU, with this PyTorch, driver and settings
    )


@dataclass(frozen=True, kw_only=True)
class Recovered(Event):
    """The run continued after an error."""

    reason: str  # the error
    action: str  # of the run: skip, restart from a checkpoint, safer settings


@dataclass(frozen=True, kw_only=True)
class Resumed(Event):
    """The run continues from a checkpoint."""

    path: str  # the checkpoint, or "" when the run starts over
    seconds: float = 0.0  # since the process began: imports, model, checkpoint


@dataclass(frozen=True, kw_only=True)
class RunEnded(Event):
    """The last event of a run."""

    status: str  # done, stopped or failed
    error: str = ""  # of a failed run: what failed
    where: str = ""  # of a failed run: the place of the error
    fix: str = ""  # of a failed run: what to do about it
    # Of a failed run on several hosts: the one at fault, or "n3,n4" where it is one of these.
    host: str = ""


Emit = Callable[[Event], None]
SCHEMA = 2  # of events.jsonl, in every RunStarted
KINDS: dict[str, type[Event]] = {kind.__name__: kind for kind in Event.__subclasses__()}


def _accepted(annotation: Any) -> tuple[type, ...]:
    """The types that a field may have in JSON, for isinstance: a whole float is an int."""
    members = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    plain = tuple(get_origin(member) or member for member in members)
    return (*plain, int) if float in plain else plain


_ACCEPTED = {kind: {f.name: _accepted(f.type) for f in fields(kind)} for kind in KINDS.values()}
_VALUE_TYPES = {
    kind: {
        f.name: _accepted(get_args(f.type)[1]) for f in fields(kind) if get_origin(f.type) is dict
    }
    for kind in KINDS.values()
}
_REQUIRED = {
    kind: frozenset(
        f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING
    )
    for kind in KINDS.values()
}


def _finite(value: object) -> object:
    """JSON has no NaN: a value that is not finite is null, which readers show as "skipped"; a metric is left out."""
    if isinstance(value, dict):
        return {
            key: metric
            for key, metric in value.items()
            if not isinstance(metric, float) or math.isfinite(metric)
        }
    return None if isinstance(value, float) and not math.isfinite(value) else value


def without_secrets(event: E) -> E:
    """The event without secrets: the last output of a failing child process may contain a token."""
    return _reworded(event, redact_secrets)


def as_shown(event: E) -> E:
    """The event without terminal escape sequences, which a dataset or a file name may contain."""
    return _reworded(event, harmless)


_TEXTS = {
    kind: tuple(name for name, types in _ACCEPTED[kind].items() if str in types)
    for kind in _ACCEPTED
}


def _reworded(event: E, change: Callable[[str], str]) -> E:
    names = _TEXTS[type(event)]
    if not names:  # steps, by far the most events
        return event
    texts = {name: text for name in names if isinstance(text := getattr(event, name), str)}
    clean: dict[str, Any] = {name: change(text) for name, text in texts.items()}
    return event if clean == texts else replace(event, **clean)


def to_json(event: Event) -> str:
    entry = {key: _finite(value) for key, value in asdict(event).items()}
    return json.dumps({"event": type(event).__name__, **entry}, allow_nan=False, ensure_ascii=False)


LONGEST_LINE = 2**20  # bytes; a longer line is no event
CHUNK_BYTES = 2**20  # of a read
_LOOK_BYTES = 2**14  # for the end of a line
_STAMP = b', "crc32": "'
_STAMP_BYTES = len(', "crc32": "00000000"}')
# Fields and types of lines that were accepted: a million lines of a run have a few of them.
_ACCEPTED_SHAPES: set[tuple[object, ...]] = set()
_MOST_SHAPES = 1000
_END_OF_TIME = 253_402_300_800  # the year 10000, in seconds since 1970
Decode = Callable[[bytes], Any]


def decode_json(line: bytes) -> Any:
    """Raises ValueError or RecursionError, also for numbers that JSON parsers of 64 bits refuse: NaN, 1e999, 10**20.

    One of them in one run would make every list of runs fail that adds it up or shows it.
    """
    entry = json.loads(line.decode("utf-8", errors="replace"))
    if not _are_of_64_bits([entry]):
        raise ValueError("a number beyond 64 bits")
    return entry


def _are_of_64_bits(values: Iterable[Any]) -> bool:
    """Whether all numbers in JSON values are finite, and whole ones below 2**64."""
    for value in values:
        kind = type(value)
        if kind is float:
            if not math.isfinite(value):
                return False
        elif kind is int:
            if not -(2**63) <= value < 2**64:
                return False
        elif kind is dict:
            if not _are_of_64_bits(value.values()):
                return False
        elif kind is list and not _are_of_64_bits(value):
            return False
    return True


def fast_decode() -> Decode:
    """The JSON parser of orjson, where it is installed; what it refuses, Python's own decides."""
    try:
        import orjson
    except ImportError:
        return decode_json

    def decode(line: bytes) -> Any:
        try:
            return orjson.loads(line)
        except ValueError:
            return decode_json(line)

    return decode


def stamped_line(entry: str) -> bytes:
    """The line of a JSON object, with the CRC-32 of the bytes before it as the last entry, and a newline."""
    body = entry[:-1].encode("utf-8", errors="backslashreplace")
    return body + b'%b%08x"}\n' % (_STAMP, zlib.crc32(body))


def is_whole(line: bytes) -> bool:
    """Whether it ends with the right checksum of its bytes."""
    return line[-_STAMP_BYTES:] == b'%b%08x"}' % (_STAMP, zlib.crc32(line[:-_STAMP_BYTES]))


def is_damaged(line: bytes) -> bool:
    """Whether it ends with a checksum of other bytes. A line without one is not."""
    return line[-_STAMP_BYTES:].startswith(_STAMP) and not is_whole(line)


def from_json(line: str | bytes, decode: Decode = decode_json) -> Event | None:
    """None for a truncated or damaged line and for an unknown kind of event.

    A line without a CRC is accepted. Raises UserError for a run of another event schema. `decode`: a faster parser.
    """
    content = line.encode("utf-8", errors="replace") if isinstance(line, str) else line
    content = content.rstrip()
    if is_damaged(content):
        return None
    try:
        entry = decode(content)
    except (ValueError, RecursionError):
        return None
    return from_entry(entry)


def from_entry(entry: Any) -> Event | None:
    """The event of a parsed line, which belongs to it from then on; None and UserError as in `from_json`."""
    if not isinstance(entry, dict):
        return None
    name = entry.pop("event", None)
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is RunStarted and entry.get("schema") != SCHEMA:
        version = f"Bloomery {entry.get('version', 'of an unknown version')}"
        raise UserError(
            f"{version} wrote this run with another event schema", fix=f"open it with {version}"
        )
    if kind is None:
        return None
    entry.pop("crc32", None)

    # Checking every field costs more than parsing the line: fields of accepted types are not checked again.
    shape = (kind, *entry, *map(type, entry.values()))
    if shape not in _ACCEPTED_SHAPES:
        accepted = _ACCEPTED[kind]
        if not _REQUIRED[kind] <= entry.keys():
            return None
        if not all(isinstance(entry[key], accepted[key]) for key in entry.keys() & accepted):
            return None
        if accepted.keys() >= entry.keys() and len(_ACCEPTED_SHAPES) < _MOST_SHAPES:
            _ACCEPTED_SHAPES.add(shape)
        entry = {key: value for key, value in entry.items() if key in accepted}
    if not 0 <= entry.get("time", 0) < _END_OF_TIME:
        return None
    for name, types in _VALUE_TYPES[kind].items():
        values = entry.get(name)
        if values and not all(isinstance(value, types) for value in values.values()):
            return None
    if len(entry) < len(_ACCEPTED[kind]):
        return kind(**entry)
    # The constructor of a frozen dataclass sets one field at a time: half of the cost of reading a line.
    event = object.__new__(kind)
    object.__setattr__(event, "__dict__", entry)
    return event


@final
class EventLog:
    """Appends events to `events.jsonl`; an emitted event survives a kill of the process (`fsync`: a power loss).

    Several processes may write one file: each event is one `write` on an append-only descriptor, and begins a new line
    even after the truncated line of a killed writer.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open_regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, event: Event) -> None:
        """Raises UserError when the disk is full, or the file was moved or deleted."""
        line = stamped_line(to_json(without_secrets(event)))
        if not self._in_place():
            raise UserError(
                "the run folder was moved or deleted during training",
                where=str(self.path),
                fix="resume the run from its new place: `bloomery resume FOLDER`",
            )
        try:
            size = os.fstat(self._file).st_size
            rest = line if size == 0 or os.pread(self._file, 1, size - 1) == b"\n" else b"\n" + line
            while rest:  # a full disk accepts a part and fails on the next call
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            raise UserError(
                f"cannot write an event: {error.strerror}",
                where=str(self.path),
                fix=f"free disk space, then `bloomery resume {shlex.quote(str(self.path.parent))}`",
            ) from error

    def _in_place(self) -> bool:
        try:
            return os.path.samestat(self.path.lstat(), os.fstat(self._file))
        except FileNotFoundError:
            return False

    def fsync(self) -> None:
        """Everything emitted so far is on the disk when this returns."""
        os.fsync(self._file)

    def close(self) -> None:
        """The second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def read_events(path: Path) -> Iterator[Event]:
    """Every event in order; none of a missing file. Raises UserError if the path is not a regular file."""
    yield from Tail(path).read(is_complete=True)


@final
class Tail:
    """Reads the new events of a growing file; an incomplete line is read once it is complete."""

    def __init__(
        self, path: Path, start: int = 0, decode: Decode = decode_json, end: int | None = None
    ) -> None:
        self.path = path
        self._end = end  # no byte after it is read
        self._position = start
        self.decode = decode
        self._rest = b""
        self.read_lines = self.unknown_lines = 0  # unknown: damaged or of another version

    def read(self, *, is_complete: bool = False) -> Iterator[Event]:
        """Every new event; `is_complete`: nothing more is written, and the text after the last newline is a line."""
        for lines in self.chunks(is_complete=is_complete):
            yield from self.events_of(lines)

    def pieces(self, most: int) -> list[tuple[int, int]]:
        """Where whole lines that are not read yet begin and end in the file: of about `most` bytes each, together up to
        the last newline. None where there are not enough for two."""
        start = self._position - len(self._rest)
        try:
            file = open_regular(self.path)
        except FileNotFoundError:
            return []
        try:
            size = os.fstat(file).st_size
            if size - start < 2 * most:
                return []
            # A line that goes on for longer than a look for its end stays in one piece.
            borders = [start]
            for place in range(start + most, size, most):
                newline = os.pread(file, _LOOK_BYTES, place).find(b"\n")
                if newline >= 0 and place + newline >= borders[-1]:
                    borders.append(place + newline + 1)
            last = max(borders[-1], size - _LOOK_BYTES)
            newline = os.pread(file, size - last, last).rfind(b"\n")
            if newline >= 0:
                borders.append(last + newline + 1)
        finally:
            os.close(file)
        return list(pairwise(borders))

    @property
    def whole_lines_end(self) -> int:
        """The byte after the last line that has been read whole."""
        return self._position - len(self._rest)

    def go_on_at(self, position: int) -> None:
        """The lines before this byte, where one begins, have been read elsewhere."""
        self._position = position
        self._rest = b""

    def chunks(self, *, is_complete: bool = False) -> Iterator[list[bytes]]:
        """The new lines, those of CHUNK_BYTES at a time."""
        while True:
            try:
                with os.fdopen(open_regular(self.path), "rb") as file:
                    file.seek(self._position)
                    size = (
                        CHUNK_BYTES
                        if self._end is None
                        else min(CHUNK_BYTES, self._end - self._position)
                    )
                    chunk = file.read(size)
            except FileNotFoundError:
                break
            self._position += len(chunk)
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            if len(self._rest) > LONGEST_LINE:
                lines = [*lines, self._rest]
                self._rest = b""
            yield list(filter(None, lines))
            # The end of the file: to open it again, only to see that, would cost a shared file system a call.
            if len(chunk) < CHUNK_BYTES:
                break
        if is_complete:
            last_line = self._rest
            self._rest = b""
            if last_line:
                yield [last_line]

    def events_of(self, lines: Iterable[bytes]) -> Iterator[Event]:
        """In order; damaged, too long and unknown lines are counted and left out."""
        for line in lines:
            event = None
            if len(line) <= LONGEST_LINE:
                event = from_json(line, self.decode)
            self.read_lines += 1
            self.unknown_lines += event is None
            if event is not None:
                yield event


def follow_events(
    path: Path, until: Callable[[], bool], *, start: int = 0, poll_seconds: float = 0.1
) -> Iterator[Event]:
    """Events of a file as they are written, beginning at byte `start`, until the writer has ended and all is read.

    `until` is called before each read, so that the last events are not missed. The file may not exist yet.
    """
    tail = Tail(path, start)
    while True:
        has_ended = until()
        yield from tail.read()
        if has_ended:
            return
        time.sleep(poll_seconds)


def last_kept_step(event: Event) -> int | None:
    """A run that goes on from an earlier step, at a resume or a rewind, takes the later ones again: the last step that
    stays. None for any other event."""
    return event.step if isinstance(event, Resumed | Recovered) else None


def last_per_step(events: Iterable[Event], kind: type[E]) -> list[E]:
    """Events of one kind by step: the last one of a repeated step, none of the steps that a resume discards."""
    by_step: dict[int, E] = {}
    for event in events:
        if (last_kept := last_kept_step(event)) is not None:
            by_step = {step: kept for step, kept in by_step.items() if step <= last_kept}
        elif isinstance(event, kind):
            by_step[event.step] = event
    return [by_step[step] for step in sorted(by_step)]

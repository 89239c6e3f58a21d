"""Processes that parse long event files for one that shows them: on several cores, while its pages answer. No torch.

A process is asked for a range of whole lines, and answers with a line of JSON and the bytes that it describes: columns
of steps as arrays, and the lines of everything else as they are. It ends when the pipe of its questions is closed.
"""

import json
import os
import subprocess
import sys
import threading
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import IO, Any, final

from bloomery.core.child import python_module
from bloomery.core.errors import UserError
from bloomery.monitor.events import Decode, Event, Tail, fast_decode
from bloomery.view.step_columns import (
    AS_EVENTS,
    ParsedSteps,
    StepColumns,
    in_groups,
    parse_steps,
    read_groups,
    together,
)

PIECE_BYTES = 2**21  # of a question
MOST_PROCESSES = 2
_COLUMNS = [
    field.name for field in fields(StepColumns) if field.name not in ("step", "metrics", *AS_EVENTS)
]
Part = ParsedSteps | list[bytes]  # of an answer: steps, or lines as they are


@final
class ReaderProcesses:
    """Mutable: the processes, begun when the first long file is read. Several threads may read at once."""

    def __init__(self) -> None:
        self._count = max(1, min(MOST_PROCESSES, os.cpu_count() or 1))
        self._waiting = 2 * self._count  # questions of one file
        # Each thread speaks with one process.
        self._threads = ThreadPoolExecutor(self._count, thread_name_prefix="event-reader")
        self._of_thread = threading.local()
        self._all: list[subprocess.Popen[bytes]] = []
        self._is_closed = False

    def begin(self) -> None:
        """Begins the processes before the first long file is read, which then waits for no start of Python."""
        for _ in range(self._count):
            self._threads.submit(self._process)

    @property
    def begun(self) -> int:
        """How many processes have been begun so far."""
        return len(self._all)

    def groups(self, tail: Tail) -> Iterator[Event | StepColumns]:
        """As `read_groups`. The first time that a file is read; from then on little is new, and read here. After
        `close` the rest of a file stays unread."""
        pieces = deque(() if tail.read_lines else tail.pieces(PIECE_BYTES))
        answers: deque[tuple[int, int, Future[list[Part] | None]]] = deque()
        while pieces or answers:
            while pieces and len(answers) < self._waiting:
                if self._is_closed:
                    return
                start, end = pieces.popleft()
                answer = self._threads.submit(self._parse, tail.path, start, end)
                answers.append((start, end, answer))
            start, end, answer = answers.popleft()
            try:
                parts = answer.result()
            except CancelledError:
                return
            yield from _groups_of(parts, start, end, tail)
        yield from read_groups(tail)

    def close(self) -> None:
        """Ends the processes."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._all:
            process.kill()  # a thread that waits for its answer goes on
        self._threads.shutdown()
        for process in self._all:
            # One that was killed before has left a question unread.
            with suppress(BrokenPipeError), process:
                process.kill()

    def _process(self) -> "subprocess.Popen[bytes]":
        """That of this thread. Raises OSError where none can be begun."""
        process: subprocess.Popen[bytes] | None = getattr(self._of_thread, "process", None)
        if process is None or process.poll() is not None:
            process = self._of_thread.process = _begun()
            self._all.append(process)
        return process

    def _parse(self, path: Path, start: int, end: int) -> list[Part] | None:
        """What a process has read; None where it could not, or is gone."""
        question = json.dumps({"path": os.fspath(path.absolute()), "start": start, "end": end})
        process = None
        try:
            process = self._process()
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(question.encode() + b"\n")
            process.stdin.flush()
            return _received(process.stdout)
        except (OSError, ValueError):
            if process is not None:  # what it would answer later is of no use
                process.kill()
            return None


def _begun() -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        python_module(__name__),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl+C ends the process that asks, and with it this one
    )


def _groups_of(
    parts: list[Part] | None, start: int, end: int, tail: Tail
) -> Iterator[Event | StepColumns]:
    """Of whole lines from one byte to another, which `tail` has read with that; read here where `parts` are unknown."""
    groups: list[StepColumns | list[bytes]] | None = None
    if parts is not None:
        try:
            groups = [
                part.with_events(tail.decode) if isinstance(part, ParsedSteps) else part
                for part in parts
            ]
        except ValueError:
            groups = None
    if groups is None:
        piece = Tail(tail.path, start, tail.decode, end)
        yield from read_groups(piece)
        tail.read_lines += piece.read_lines
        tail.unknown_lines += piece.unknown_lines
    else:
        for group in groups:
            if isinstance(group, StepColumns):
                tail.read_lines += len(group.step)
                yield group
            else:
                yield from in_groups(tail.events_of(group))
    tail.go_on_at(end)


def _parts(path: Path, start: int, end: int, decode: Decode) -> Iterator[Part]:
    for lines in Tail(path, start, decode, end).chunks():
        for some in together(lines):
            yield parse_steps(some, decode) or some


def _sent(parts: Sequence[Part]) -> bytes:
    """An answer."""
    description: list[Any] = []
    content: list[bytes] = []

    def add(lines: Sequence[bytes]) -> int:
        content.append(b"\n".join(lines))
        return len(content[-1])

    for part in parts:
        if isinstance(part, ParsedSteps):
            columns = part.columns
            content.append(array("Q", columns.step).tobytes())
            content += [getattr(columns, name).tobytes() for name in _COLUMNS]
            content += [values.tobytes() for values in columns.metrics.values()]
            names = list(columns.metrics)
            description.append([len(columns.step), names, add(part.newest), add(part.skipped)])
        else:
            description.append(add(part))
    return json.dumps(description).encode() + b"\n" + b"".join(content)


def _received(pipe: IO[bytes]) -> list[Part]:
    """An answer. Raises ValueError where it ends too early."""

    def read(count: int) -> bytes:
        content = pipe.read(count)
        if len(content) < count:
            raise ValueError("the process is gone")
        return content

    def values(typecode: str, count: int) -> "array[Any]":
        return array(typecode, read(8 * count))

    parts: list[Part] = []
    for description in json.loads(pipe.readline()):
        if isinstance(description, int):
            parts.append(read(description).split(b"\n"))
            continue
        count, names, newest, skipped = description
        columns = StepColumns(
            step=values("Q", count),
            **{name: values("d", count) for name in _COLUMNS},
            metrics={name: values("d", count) for name in names},
            newest=(),
            skipped=(),
        )
        lines = [read(size).split(b"\n") if size else [] for size in (newest, skipped)]
        parts.append(ParsedSteps(columns, *lines))
    return parts


def main() -> None:
    """Answers questions from the standard input."""
    decode = fast_decode()
    for line in sys.stdin.buffer:
        question = json.loads(line)
        path = Path(question["path"])
        try:
            answer = _sent([*_parts(path, question["start"], question["end"], decode)])
        except (OSError, UserError, OverflowError):
            answer = b"\n"  # is no JSON: who asked reads by itself, and words the error
        sys.stdout.buffer.write(answer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()

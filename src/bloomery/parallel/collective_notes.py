"""The last collective of each rank, in memory that outlives it: who is behind when ranks hang. Does not import torch.

On a GPU the host waits for the device and not inside a collective, so stacks do not tell which rank the others wait
for. Every collective is therefore counted twice: when a rank enters it and when it is over, on a GPU by events of the
device. The rank that all others wait for has entered fewer. Experimental: it found that rank in tests with pretended
hosts, and was never needed on a cluster.
"""

import mmap
import os
import struct
import tempfile
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, final

# entered, finished, and the names of the collectives that did this last.
_LAYOUT = struct.Struct("<qq64s64s")
POLL_SECONDS = 1.0  # between two looks at the events of a device


@final
@dataclass(frozen=True)
class CollectiveNote:
    """How many collectives a rank has entered and finished, and the last of each."""

    entered: int
    finished: int
    entered_name: str
    finished_name: str

    @property
    def waits(self) -> bool:
        """Whether it is inside a collective."""
        return self.entered > self.finished

    def __str__(self) -> str:
        finished = f"collective {self.finished:,} ({self.finished_name}) is its last finished one"
        if not self.finished:
            finished = "it has finished no collective"
        waiting = f", it waits in {self.entered:,} ({self.entered_name})" if self.waits else ""
        return f"{finished}{waiting}"


class DeviceEvent(Protocol):
    """What `core.device.recorded_event` returns."""

    def query(self) -> bool:
        """Whether the device has reached it."""


@final
class CollectiveNotes:
    """Counts the collectives of this process."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | bytearray = bytearray(_LAYOUT.size)
        self._entered = 0
        self._finished = 0
        self._entered_name = self._finished_name = b""
        # By the device, in the order of the host: names, starts and ends.
        self._under_way = deque[tuple[str, DeviceEvent, DeviceEvent]]()
        self._first_has_started = False
        self._poller: threading.Thread | None = None
        self._device_is_gone = False
        self._lock = threading.Lock()

    def write_to(self, descriptor: int) -> None:
        """From here on into the memory of a SharedNote, which its owner reads even after this process was killed."""
        self._memory = mmap.mmap(descriptor, _LAYOUT.size)

    def enter(self, name: str) -> None:
        """The host, or the device, begins a collective, for which it may have to wait."""
        with self._lock:
            self._entered += 1
            self._entered_name = name.encode()
            self._write()

    def finish(self, name: str) -> None:
        """The collective that was entered last is over."""
        with self._lock:
            self._finished += 1
            self._finished_name = name.encode()
            self._write()

    def follow(self, name: str, start: DeviceEvent, end: DeviceEvent) -> None:
        """The device will enter a collective at `start` and has finished it at `end`; a thread looks after them."""
        if self._device_is_gone:
            return
        self._under_way.append((name, start, end))
        if self._poller is None:
            self._poller = threading.Thread(target=self._keep_polling, daemon=True, name="notes")
            self._poller.start()

    def poll(self) -> None:
        """Count what the device has begun and finished by now."""
        while self._under_way:
            name, start, end = self._under_way[0]
            if not self._first_has_started:
                if not start.query():
                    return
                self._first_has_started = True
                self.enter(name)
            if not end.query():
                return
            self.finish(name)
            self._first_has_started = False
            self._under_way.popleft()

    def _keep_polling(self) -> None:
        pause = threading.Event()
        while not pause.wait(POLL_SECONDS):
            try:
                self.poll()
            except RuntimeError:  # the training thread reports it
                self._device_is_gone = True
                self._under_way.clear()
                return

    def _write(self) -> None:
        _LAYOUT.pack_into(
            self._memory,
            0,
            self._entered,
            self._finished,
            self._entered_name,
            self._finished_name,
        )


@final
class SharedNote:
    """The memory for the notes of one child process, as its parent sees it."""

    def __init__(self) -> None:
        """`descriptor`: to be passed to the child."""
        if hasattr(os, "memfd_create"):  # Linux
            self.descriptor = os.memfd_create("bloomery-notes")
        else:
            self.descriptor, path = tempfile.mkstemp(prefix="bloomery-")
            Path(path).unlink()  # gone with the last process that has it open
        # All of it now: a child that writes to a mapped page for which the disk has no room dies of SIGBUS.
        os.write(self.descriptor, bytes(_LAYOUT.size))

    def read(self) -> CollectiveNote | None:
        """None before the first collective."""
        entered, finished, *names = _LAYOUT.unpack(os.pread(self.descriptor, _LAYOUT.size, 0))
        entered_name, finished_name = (
            name.rstrip(b"\0").decode(errors="replace") for name in names
        )
        note = CollectiveNote(entered, finished, entered_name, finished_name)
        return note if entered else None

    def close(self) -> None:
        os.close(self.descriptor)


def rank_behind(notes: Mapping[int, CollectiveNote]) -> int | None:
    """The rank that the others wait for; None where the notes do not tell.

    It computes while others are inside a collective; or all are inside, and it is in an earlier one than the others.
    The stages of a pipeline call different collectives, and only the first rule finds one of them.
    """
    waiting_ranks = [rank for rank, note in notes.items() if note.waits]
    computing_ranks = [rank for rank in notes if rank not in waiting_ranks]
    if not waiting_ranks:
        return None
    candidates = computing_ranks or waiting_ranks
    first = min(candidates, key=lambda rank: (notes[rank].entered, rank))
    if computing_ranks:
        return first
    entered = sorted(note.entered for note in notes.values())
    return first if len(entered) > 1 and entered[0] < entered[1] else None

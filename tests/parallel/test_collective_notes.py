"""The notes of a rank's collectives: what its parent reads of a process that cannot tell any more."""

import os
import signal
import subprocess
import sys
import tempfile

import pytest

from bloomery.parallel.clock import CommunicationClock
from bloomery.parallel.collective_notes import (
    CollectiveNote,
    CollectiveNotes,
    SharedNote,
    rank_behind,
)


class Moment:
    """An event of a device that has not come yet."""

    def __init__(self) -> None:
        self.reached = False

    def query(self) -> bool:
        return self.reached


def note(entered: int, finished: int) -> CollectiveNote:
    return CollectiveNote(entered, finished, "all_reduce", "all_reduce")


@pytest.mark.parametrize(
    ("notes", "behind"),
    [
        ({0: note(8, 7), 1: note(7, 7), 2: note(8, 7)}, 1),
        # A GPU that computes while the others are many collectives ahead of it on their hosts, yet wait in one.
        ({0: note(8, 7), 1: note(8, 7), 2: note(3, 3)}, 2),
        # All are inside a collective: one in an earlier one than the others, or all in the same.
        ({0: note(9, 8), 1: note(9, 8), 2: note(8, 7)}, 2),
        ({0: note(9, 8), 1: note(9, 8)}, None),
        # Nobody waits.
        ({0: note(9, 9), 1: note(9, 9)}, None),
        # Stages of a pipeline count differently: the one that computes is awaited.
        ({0: note(90, 89), 1: note(200, 200), 2: note(180, 179)}, 1),
        ({}, None),
    ],
)
def test_the_rank_that_the_others_wait_for(notes, behind) -> None:
    assert rank_behind(notes) == behind


def test_a_device_is_where_its_events_say_and_not_where_its_host_is(monkeypatch) -> None:
    shared = SharedNote()
    notes = CollectiveNotes()
    notes.write_to(shared.descriptor)
    # No thread: the test looks after the events.
    monkeypatch.setattr(CollectiveNotes, "_keep_polling", lambda self: None)
    first, second = ((Moment(), Moment()) for _ in range(2))
    notes.follow("first", *first)
    notes.follow("second", *second)
    notes.poll()
    assert shared.read() is None  # the host has passed both, the device neither
    first[0].reached = True
    notes.poll()
    assert shared.read() == CollectiveNote(1, 0, "first", "")
    first[1].reached = True
    notes.poll()
    notes.enter("of the host")
    assert shared.read() == CollectiveNote(2, 1, "of the host", "first")
    second[0].reached = second[1].reached = True
    notes.poll()
    notes.poll()
    assert shared.read() == CollectiveNote(3, 2, "second", "second")
    shared.close()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("call", ["measure", "noted"])
def test_a_rank_is_out_of_a_collective_that_raises(monkeypatch, device, call) -> None:
    """Out of memory in a gather of weights: while the rank still saves, the others wait for it and not for the next."""
    clock = CommunicationClock()
    shared = SharedNote()
    clock.notes.write_to(shared.descriptor)
    monkeypatch.setattr(CollectiveNotes, "_keep_polling", lambda self: None)
    event = Moment()
    event.reached = True
    monkeypatch.setattr("bloomery.parallel.clock.recorded_event", lambda device: event)
    block = clock.noted("gather", device)
    if call == "measure":
        block = clock.measure("shard", device, name="gather")
    with pytest.raises(RuntimeError, match="out of memory"), block:
        raise RuntimeError("out of memory")
    clock.notes.poll()
    left = shared.read()
    shared.close()
    assert left is not None and (left.entered, left.finished) == (1, 1)
    if (device, call) == ("cpu", "measure"):
        assert clock.waited_seconds > 0


def test_the_memory_of_notes_needs_no_disk_once_it_is_there(monkeypatch, tmp_path) -> None:
    """A child that writes to a page without room on the disk would die of SIGBUS."""
    if hasattr(os, "memfd_create"):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    shared = SharedNote()
    status = os.fstat(shared.descriptor)
    assert status.st_blocks * 512 >= status.st_size > 0
    assert shared.read() is None
    shared.close()


def test_the_notes_of_a_killed_process_can_be_read() -> None:
    shared = SharedNote()
    program = (
        "import os, signal\n"
        "from bloomery.parallel.collective_notes import CollectiveNotes\n"
        "notes = CollectiveNotes()\n"
        f"notes.write_to({shared.descriptor})\n"
        "notes.enter('x' * 100)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], pass_fds=[shared.descriptor])
    assert ended.returncode == -signal.SIGKILL
    assert shared.read() == CollectiveNote(1, 0, "x" * 64, "")
    shared.close()

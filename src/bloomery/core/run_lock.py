"""The lock of a run folder: one training process at a time, also over hosts that share the folder. No torch."""

import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bloomery.core.errors import UserError
from bloomery.core.files import (
    abandoned,
    in_place,
    irregular,
    open_regular,
    read_whole,
    remove,
    try_lock,
    write_durably,
)
from bloomery.core.run_folder import RunFolder
from bloomery.core.signals import receives_signals

if TYPE_CHECKING:
    pass


def host_name() -> str:
    return platform.node() or "localhost"


def start_mark(pid: int) -> str | None:
    """A text that distinguishes this process from any later one with the same pid; None when it is dead."""
    if not sys.platform.startswith("linux"):
        listed = subprocess.run(
            ["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
        )
        return listed.stdout.strip() or None
    try:
        after_name = (
            Path(f"/proc/{pid}/stat")
            .read_text(encoding="utf-8", errors="replace")
            .rpartition(")")[2]
            .split()
        )
    except OSError:
        return None
    boot = ""
    with suppress(OSError):  # some containers hide it
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    # Fields 3 and 22 of proc(5): the state, and the time when the process started.
    state = after_name[0]
    started = after_name[19]
    return None if state in "ZX" else f"{boot} {started}"


BEAT_SECONDS = 20.0  # the holder of a lock updates its time this often


DEAD_SECONDS = 120.0  # a lock of another host without an update for this time is taken over


PATIENCE_SECONDS = 5.0  # for the ranks of a run that was just killed


@contextmanager
def explained_write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write the run folder: {error.strerror}",
            where=str(error.filename or path),
            fix="correct the permissions or free disk space; for a new run, use another --run-dir",
        ) from error


@contextmanager
def hold_run_lock(folder: RunFolder) -> Iterator[tuple[int, ...]]:
    """Locks the folder for one training process; yields the lock's descriptors, which ranks inherit.

    The kernel releases its lock when the holders exit; it covers the folder too, since the file may be deleted. The
    text of the file (pid, start time, host) identifies the holder on other hosts, where file locks may not work. A lock
    of a dead process is taken over; one of another host, after two minutes without an update. Raises UserError when the
    run is in use, and for a link in the folder.
    """
    with ExitStack() as stack:
        with explained_write_errors(folder.path):
            folder_descriptor = os.open(folder.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, folder_descriptor)
            lock_descriptor = open_regular(folder.lock, os.O_RDWR | os.O_CREAT)
            stack.callback(os.close, lock_descriptor)
        text = _acquire(folder, folder_descriptor, lock_descriptor)
        try:
            with explained_write_errors(folder.path):
                for path in folder.path.iterdir():
                    if abandoned(path):  # temporary files of killed processes
                        remove(path)
                    elif path.is_symlink():  # never write through a link
                        raise irregular(path)
            with _beating(folder.lock, lock_descriptor, text):
                yield folder_descriptor, lock_descriptor
        finally:
            os.ftruncate(lock_descriptor, 0)
            if holder_of(folder.lock) == json.loads(text):  # the file was deleted and written again
                os.truncate(folder.lock, 0)


def _acquire(folder: RunFolder, folder_descriptor: int, lock_descriptor: int) -> str:
    """Writes the lock; returns its text."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (try_lock(folder_descriptor) and try_lock(lock_descriptor)):
        holder = holder_of(folder.lock)
        if alive(holder) or time.monotonic() > deadline:
            raise _in_use(folder, holder)
        time.sleep(0.1)
    holder = holder_of(folder.lock)
    if holder and (alive(holder) if holder["host"] == host_name() else beats(folder.lock)):
        raise _in_use(folder, holder)
    holder_entry: dict[str, Any] = {
        "pid": os.getpid(),
        "started": start_mark(os.getpid()),
        "host": host_name(),
    }
    # Events before this time are another process's.
    holder_entry |= {"receives_signals": receives_signals(), "since": time.time()}
    text = json.dumps(holder_entry)
    with explained_write_errors(folder.path):
        os.ftruncate(lock_descriptor, 0)
        os.pwrite(lock_descriptor, text.encode(), 0)
        os.fsync(lock_descriptor)
    return text


def holder_of(lock: Path) -> dict[str, Any]:
    """The text of the lock; empty when it is free or truncated."""
    try:
        entry: Any = json.loads(read_whole(lock, most=10_000))
    except (ValueError, OSError, RecursionError, UserError):
        return {}
    is_complete = (
        isinstance(entry, dict)
        and {"pid", "started", "host"} <= entry.keys()
        and isinstance(entry["pid"], int)
    )
    return entry if is_complete else {}


def alive(holder: dict[str, Any]) -> bool:
    """Whether that process is alive on this host; a later one with the same pid is not it.

    A holder that could not tell when it began is any living process with its pid.
    """
    if not holder or holder["host"] != host_name():
        return False
    mark = start_mark(int(holder["pid"]))
    return mark is not None and holder["started"] in (mark, None)


def worked_on(folder: Path) -> bool:
    """Whether the run is running, here or on another machine that updates the lock."""
    lock = folder / "lock"
    try:
        descriptor = open_regular(lock)
    except (
        OSError,
        UserError,
    ):  # a pipe, a folder or a link is no lock: `hold_run_lock` reports it
        return False
    try:
        if not try_lock(descriptor, shared=True):
            return True
    finally:
        os.close(descriptor)
    try:
        if not lock.stat().st_size:  # emptied at the end of the run
            return False
        holder = holder_of(lock)
        # A time far in the future is not an update.
        silent = abs(time.time() - lock.stat().st_mtime)
    except OSError:
        return False
    return bool(holder) and (
        alive(holder) if holder["host"] == host_name() else silent < DEAD_SECONDS
    )


def beats(lock: Path) -> bool:
    """Whether the holder on another host still updates the lock, by the file server's clock.

    A time far in the future is not an update: it would lock the run until then.
    """
    probe = lock.with_name(f".tmp-clock-{os.getpid()}")
    probe.unlink(missing_ok=True)
    descriptor = open_regular(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        return abs(os.fstat(descriptor).st_mtime - lock.stat().st_mtime) < DEAD_SECONDS
    finally:
        os.close(descriptor)
        probe.unlink(missing_ok=True)


def _in_use(folder: RunFolder, holder: dict[str, Any]) -> UserError:
    holder_text = f"process {holder['pid']} on {holder['host']}" if holder else "another process"
    on_host = f" (on {holder['host']})" if holder and holder["host"] != host_name() else ""
    stop = (
        f"`bloomery stop {folder.name}`{on_host}" if holder else "wait until that process has ended"
    )
    stop += f"; if that machine no longer exists, delete {folder.lock}" if on_host else ""
    return UserError(
        f"the run is in use by {holder_text}",
        where=str(folder.path),
        fix=f"{stop}; or use another --run-dir",
    )


@contextmanager
def _beating(lock: Path, descriptor: int, text: str) -> Iterator[None]:
    end_event = threading.Event()

    def beat() -> None:
        while not end_event.wait(BEAT_SECONDS):
            os.utime(descriptor)
            # A full disk or a deleted folder: writing events reports that.
            with suppress(OSError, UserError):
                if not in_place(lock, descriptor) and holder_of(lock) in ({}, json.loads(text)):
                    write_durably(lock, text)  # the file was deleted

    thread = threading.Thread(target=beat, name="lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end_event.set()
        thread.join()

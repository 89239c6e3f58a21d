"""The folder of a run: how it is made, and who may write in it. No torch."""

import json
import os
import platform
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from bloomery.core.errors import UserError
from bloomery.core.files import abandoned, irregular, open_regular, read_whole, remove, try_lock, write_durably
from bloomery.core.text import expanded
from bloomery.plan.store import RUN_FILE, begin
from bloomery.recipe.load import LoadedRecipe, dump_recipe
from bloomery.runs.signals import can_hear
from bloomery.train.run import name_of


def host_name() -> str:
    return platform.node() or "localhost"


def start_mark(pid: int) -> str | None:
    """A text that tells this process from any later one of the same number; None when it is dead."""
    if not sys.platform.startswith("linux"):
        told = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
        return told.stdout.strip() or None
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    state, started = after_name[0], after_name[19]  # fields 3 and 22 of proc(5)
    return None if state in "ZX" else f"{boot} {started}"


BEAT_SECONDS = 20.0  # how often the holder of a lock shows that it lives
DEAD_SECONDS = 120.0  # a lock of another host that has been silent for so long is taken over
PATIENCE_SECONDS = 5.0  # for the ranks of a run that was just killed
_FIRST_DRAFTS = re.compile(r"\.tmp-(run\.json|recipe\.yaml|machine\.json|metrics\.json|lock|clock)-\d+")
_BEFORE_A_PLAN = ("events.jsonl", "log.txt", "metrics.json", "machine.json")  # what a run has written by then


@final
@dataclass(frozen=True)
class RunFolder:
    """Where everything of a run lies."""

    path: Path

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.yaml"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def machine(self) -> Path:
        return self.path / "machine.json"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def log(self) -> Path:
        return self.path / "log.txt"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def fallback(self) -> Path:
        """After a death that a safer plan may prevent: that plan."""
        return self.path / "safer.json"

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    @property
    def name(self) -> str:
        """What a person types after `bloomery resume`."""
        return name_of(self.path)


def propose_folder(recipe_name: str) -> Path:
    """`runs/<recipe>-<date>-<time>` below the working folder, made unique by a number when it is taken."""
    name = re.sub(r"[^\w.-]+", "-", recipe_name)[:80].strip("-.") or "run"
    base = Path("runs").absolute() / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    tries = (base.with_name(f"{base.name}-{number}") if number else base for number in range(1000))
    return next(folder for folder in tries if not folder.exists())


@contextmanager
def new_run(loaded: LoadedRecipe, path: Path) -> Iterator[tuple[RunFolder, tuple[int, ...]]]:
    """Makes the folder with its lock and its recipe; yields it and the lock's descriptors, held inside the block.

    A run that ended before it had a plan is taken over. Raises UserError when the folder holds another run or anything
    else, is in use, or cannot be made.
    """
    folder = RunFolder(expanded(path).absolute())
    with _explained(folder.path):
        _refuse_occupied(folder)
        folder.path.mkdir(parents=True, exist_ok=True)
    with locked(folder) as lock:
        with _explained(folder.path):
            _refuse_occupied(folder)  # somebody else may have been as quick
            for name in _BEFORE_A_PLAN:
                (folder.path / name).unlink(missing_ok=True)
            begin(folder.path, {folder.recipe.name: dump_recipe(loaded)})
        yield folder, lock


def _refuse_occupied(folder: RunFolder) -> None:
    # Less the drafts that a kill in its first moments leaves.
    entries = folder.path.iterdir() if folder.path.is_dir() else ()
    names = {entry.name for entry in entries if not _FIRST_DRAFTS.fullmatch(entry.name)}
    own = {folder.lock.name, folder.recipe.name}
    if own <= names <= {*own, RUN_FILE, *_BEFORE_A_PLAN}:  # a log beside a lock alone is another program's
        return  # a run ended here before it had a plan: nothing was computed yet, and nothing else lies here
    if folder.recipe.exists():
        raise UserError(
            "this folder already holds a run, and nothing of it is overwritten",
            where=str(folder.path),
            fix=f"`bloomery resume {folder.name}` goes on with it; another --run-dir starts a new one",
        )
    if names - {folder.lock.name, RUN_FILE}:
        raise UserError(
            "the run folder is not empty, and nothing in it is overwritten",
            where=str(folder.path),
            fix="name a folder that does not exist yet with --run-dir",
        )


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"the run folder cannot be written: {error.strerror}",
            where=str(error.filename or path),
            fix="mend the permissions or the disk; for a new run --run-dir names another place",
        ) from error


@contextmanager
def locked(folder: RunFolder) -> Iterator[tuple[int, ...]]:
    """Only one process at a time trains in a folder; yields the lock's descriptors, which ranks inherit.

    The kernel's lock dies with its holders; it is on the folder, too, as people delete files. The text in the file
    (process, start time, host) says who they are, and guards against other hosts where file locks do not reach them: a
    lock whose process is dead is taken over, one of another host when it has been silent for two minutes. Raises
    UserError when the run is in use, and when a link leads out of its folder.
    """
    with ExitStack() as stack:
        with _explained(folder.path):
            place = os.open(folder.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, place)
            descriptor = open_regular(folder.lock, os.O_RDWR | os.O_CREAT)
            stack.callback(os.close, descriptor)
        text = _acquire(folder, place, descriptor)
        try:
            with _explained(folder.path):
                for path in folder.path.iterdir():
                    if abandoned(path):  # what killed processes were writing
                        remove(path)
                    elif path.is_symlink():  # nothing is written through one
                        raise irregular(path)
            with _beating(folder.lock, descriptor, text):
                yield place, descriptor
        finally:
            os.ftruncate(descriptor, 0)
            if holder_of(folder.lock) == json.loads(text):  # it was deleted, and stands again
                os.truncate(folder.lock, 0)


def _acquire(folder: RunFolder, place: int, descriptor: int) -> str:
    """The text that the lock holds from here on."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (try_lock(place) and try_lock(descriptor)):
        holder = holder_of(folder.lock)
        if alive(holder) or time.monotonic() > deadline:
            raise _in_use(folder, holder)
        time.sleep(0.1)
    holder = holder_of(folder.lock)
    if holder and (alive(holder) if holder["host"] == host_name() else beats(folder.lock)):
        raise _in_use(folder, holder)
    who: dict[str, Any] = {"pid": os.getpid(), "started": start_mark(os.getpid()), "host": host_name()}
    who |= {"hears": can_hear(), "since": time.time()}  # events of before are another process's
    text = json.dumps(who)
    with _explained(folder.path):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)
        os.fsync(descriptor)
    return text


def holder_of(lock: Path) -> dict[str, Any]:
    """Who wrote the lock; empty when nobody holds it or the text was cut short."""
    try:
        entry: Any = json.loads(read_whole(lock, most=10_000))
    except (ValueError, OSError, RecursionError, UserError):
        return {}
    whole = isinstance(entry, dict) and {"pid", "started", "host"} <= entry.keys() and isinstance(entry["pid"], int)
    return entry if whole else {}


def alive(holder: dict[str, Any]) -> bool:
    """Whether that very process lives, on this host: a later one of the same number is another."""
    return bool(holder) and holder["host"] == host_name() and start_mark(int(holder["pid"])) == holder["started"]


def worked_on(folder: Path) -> bool:
    """Whether a process works on the run: here, or on another machine whose lock shows a sign of life."""
    lock = folder / "lock"
    try:
        descriptor = os.open(lock, os.O_RDONLY)
    except OSError:
        return False
    try:
        if not try_lock(descriptor, shared=True):
            return True
    finally:
        os.close(descriptor)
    try:
        if not lock.stat().st_size:  # who ends empties it
            return False
        holder = holder_of(lock)
        silent = abs(time.time() - lock.stat().st_mtime)  # a time far ahead is no sign of life
    except OSError:
        return False
    return bool(holder) and (alive(holder) if holder["host"] == host_name() else silent < DEAD_SECONDS)


def beats(lock: Path) -> bool:
    """Whether the holder on another host shows that it lives, by the file server's clock.

    A time far ahead is no beat: it would lock the run until then.
    """
    probe = lock.with_name(f".tmp-clock-{os.getpid()}")
    probe.unlink(missing_ok=True)
    descriptor = open_regular(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        return abs(os.fstat(descriptor).st_mtime - lock.stat().st_mtime) < DEAD_SECONDS
    finally:
        os.close(descriptor)
        probe.unlink(missing_ok=True)


def _in_place(lock: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(lock.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _in_use(folder: RunFolder, holder: dict[str, Any]) -> UserError:
    who = f"process {holder['pid']} on {holder['host']}" if holder else "another process"
    there = f" (on {holder['host']})" if holder and holder["host"] != host_name() else ""
    stop = f"`bloomery stop {folder.name}`{there} saves and stops it" if holder else "wait until that one has ended"
    stop += f"; if that machine is gone, delete {folder.lock}" if there else ""
    return UserError(
        f"this run is in use: {who} is working on it",
        where=str(folder.path),
        fix=f"{stop}; or train into another --run-dir",
    )


@contextmanager
def _beating(lock: Path, descriptor: int, text: str) -> Iterator[None]:
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(BEAT_SECONDS):
            os.utime(descriptor)
            with suppress(OSError, UserError):  # no room, or the run's folder is gone: its events say so
                if not _in_place(lock, descriptor) and holder_of(lock) in ({}, json.loads(text)):
                    write_durably(lock, text)  # somebody deleted it; who asks who works here finds out again

    thread = threading.Thread(target=beat, name="lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()

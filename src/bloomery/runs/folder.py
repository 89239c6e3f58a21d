"""The run folder: its files, how it is created, its lock, and how a command-line argument names it. No torch."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from bloomery.core.errors import UserError
from bloomery.core.files import (
    abandoned,
    irregular,
    open_regular,
    read_whole,
    remove,
    try_lock,
    write_durably,
)
from bloomery.core.text import closest, expanded
from bloomery.core.units import format_bytes
from bloomery.plan.store import RUN_FILE, begin
from bloomery.recipe.load import LoadedRecipe, dump_recipe
from bloomery.runs.signals import receives_signals
from bloomery.train.run import name_of

if TYPE_CHECKING:
    from bloomery.infer.load import Use


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
_FIRST_DRAFTS = re.compile(
    r"\.tmp-(run\.json|recipe\.yaml|machine\.json|metrics\.json|lock|clock)-\d+"
)
# Files of a run without a plan.
_BEFORE_A_PLAN = ("events.jsonl", "log.txt", "metrics.json", "machine.json")


@final
@dataclass(frozen=True)
class RunFolder:
    """The paths of a run."""

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
        """The fallback plan for `bloomery resume --recover`, after a crash."""
        return self.path / "fallback.json"

    @property
    def excluded_hosts(self) -> Path:
        """Hosts that a failed start has named, one per line: its job returns to the queue without them."""
        return self.path / "excluded-hosts.txt"

    @property
    def stop_request(self) -> Path:
        """Exists after `bloomery stop` of a Slurm job, whose script then does not return it to the queue."""
        return self.path / "stop-requested"

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    @property
    def name(self) -> str:
        """The argument for `bloomery resume`."""
        return name_of(self.path)


def exclude_hosts(folder: RunFolder, hosts: Sequence[str]) -> None:
    """Adds the hosts to those that a job script leaves out. A full disk, or a deleted folder, prevents it quietly."""
    with suppress(OSError, UserError):
        known_hosts = []
        if folder.excluded_hosts.is_file():
            known_hosts = read_whole(folder.excluded_hosts).decode(errors="replace").split()
        all_hosts = dict.fromkeys([*known_hosts, *hosts])
        write_durably(folder.excluded_hosts, "".join(f"{host}\n" for host in all_hosts))


def propose_folder(recipe_name: str) -> Path:
    """`runs/<recipe>-<date>-<time>` in the working folder, with a number where that exists."""
    name = re.sub(r"[^\w.-]+", "-", recipe_name)[:80].strip("-.") or "run"
    base = Path("runs").absolute() / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    tries = (base.with_name(f"{base.name}-{number}") if number else base for number in range(1000))
    return next(folder for folder in tries if not folder.exists())


def refuse_little_disk(folder: Path, needed_bytes: int) -> None:
    """Raises UserError where not even the first checkpoint, of `needed_bytes`, fits. Later ones make room."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise UserError(
            f"{format_bytes(free_bytes)} of disk are free, "
            f"and a checkpoint of this run needs {format_bytes(needed_bytes)}",
            where=str(folder),
            fix=f"free {format_bytes(needed_bytes - free_bytes)}, or pass a --run-dir on another disk",
        )


@contextmanager
def new_run(loaded_recipe: LoadedRecipe, path: Path) -> Iterator[tuple[RunFolder, tuple[int, ...]]]:
    """Creates the folder with its lock and its recipe; yields it and the lock's descriptors, held inside the block.

    Takes over a run that ended before it had a plan. Raises UserError when the folder has another run or any other
    file, is in use, or cannot be created.
    """
    folder = RunFolder(expanded(path).absolute())
    with _explained(folder.path):
        _refuse_occupied(folder)
        folder.path.mkdir(parents=True, exist_ok=True)
    with locked(folder) as lock:
        with _explained(folder.path):
            _refuse_occupied(folder)  # again: another process may have created a run meanwhile
            for name in _BEFORE_A_PLAN:
                (folder.path / name).unlink(missing_ok=True)
            begin(folder.path, {folder.recipe.name: dump_recipe(loaded_recipe)})
        yield folder, lock


def _refuse_occupied(folder: RunFolder) -> None:
    # Without the temporary files of an early kill.
    entries = folder.path.iterdir() if folder.path.is_dir() else ()
    names = {entry.name for entry in entries if not _FIRST_DRAFTS.fullmatch(entry.name)}
    run_files = {folder.lock.name, folder.recipe.name}
    if (
        run_files <= names <= {*run_files, RUN_FILE, "ranks", *_BEFORE_A_PLAN}
    ):  # a log with a lock but no recipe is another program's
        return  # only a run that ended before it had a plan: nothing is lost
    if folder.recipe.exists():
        raise UserError(
            "the run folder already has a run; nothing was overwritten",
            where=str(folder.path),
            fix=f"`bloomery resume {folder.name}` continues it; another --run-dir starts a new run",
        )
    if names - {folder.lock.name, RUN_FILE}:
        raise UserError(
            "the run folder is not empty; nothing was overwritten",
            where=str(folder.path),
            fix="set --run-dir to a new folder",
        )


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write the run folder: {error.strerror}",
            where=str(error.filename or path),
            fix="correct the permissions or free disk space; for a new run, use another --run-dir",
        ) from error


@contextmanager
def locked(folder: RunFolder) -> Iterator[tuple[int, ...]]:
    """Locks the folder for one training process; yields the lock's descriptors, which ranks inherit.

    The kernel releases its lock when the holders exit; it covers the folder too, since the file may be deleted. The
    text of the file (pid, start time, host) identifies the holder on other hosts, where file locks may not work. A lock
    of a dead process is taken over; one of another host, after two minutes without an update. Raises UserError when the
    run is in use, and for a link in the folder.
    """
    with ExitStack() as stack:
        with _explained(folder.path):
            folder_descriptor = os.open(folder.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, folder_descriptor)
            lock_descriptor = open_regular(folder.lock, os.O_RDWR | os.O_CREAT)
            stack.callback(os.close, lock_descriptor)
        text = _acquire(folder, folder_descriptor, lock_descriptor)
        try:
            with _explained(folder.path):
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
    with _explained(folder.path):
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
    except (OSError, UserError):  # a pipe, a folder or a link is no lock: `locked` reports it
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


def _in_place(lock: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(lock.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


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
                if not _in_place(lock, descriptor) and holder_of(lock) in ({}, json.loads(text)):
                    write_durably(lock, text)  # the file was deleted

    thread = threading.Thread(target=beat, name="lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end_event.set()
        thread.join()


def is_run(folder: Path) -> bool:
    """A run folder has its recipe from the start."""
    return (folder / "recipe.yaml").is_file()


def all_runs() -> list[Path]:
    """The run folders in `runs/`, newest last."""
    root = Path("runs")
    dated_folders: list[tuple[float, str, Path]] = []
    for folder in root.iterdir() if root.is_dir() else ():
        # A run may be deleted between two looks at it.
        with suppress(OSError):
            if is_run(folder):
                date = (folder / "recipe.yaml").stat().st_mtime
                dated_folders.append((date, folder.name, folder))
    return [folder for _, _, folder in sorted(dated_folders)]


def existing(folder: Path) -> RunFolder:
    """The run in `folder`. Raises UserError when there is none."""
    run = RunFolder(expanded(folder).absolute())
    if not run.recipe.is_file():
        raise UserError(
            "not a run folder", where=str(run.path), fix="`bloomery runs` lists the runs in runs/"
        )
    return run


def find_run(name: str) -> Path:
    """The run folder: a path, a name under `runs/`, a unique prefix of one, or `last`. Raises UserError (code 2)."""
    runs = all_runs()
    if name == "last" and runs:
        return runs[-1]
    for folder in (expanded(name), Path("runs") / name) if name else ():
        if is_run(folder):
            return folder
    where = str(Path("runs").resolve())
    prefix = name.removeprefix("runs/").rstrip("/")
    alike = [folder for folder in runs if prefix and folder.name.startswith(prefix)]
    if len(alike) == 1:
        return alike[0]
    if alike:
        fix = "use one of " + ", ".join(folder.name for folder in alike[-8:])
        raise UserError(f"{len(alike)} runs start with {name!r}", where=where, fix=fix, code=2)
    if not runs:
        fix = "start one with `bloomery demo` or `bloomery train RECIPE`, or cd to the folder with runs/"
        raise UserError(f"no run {name!r}: there are no runs", where=where, fix=fix, code=2)
    names = [folder.name for folder in runs]
    similar = closest(name, ["last", *names], count=3, cutoff=0.4) or names[-3:]
    raise UserError(
        f"no run {name!r}", where=where, fix="similar names: " + ", ".join(similar), code=2
    )


def model_path(name: str) -> Path:
    """The folder of MODEL: a model, an adapter or a run; downloads a Hub id. Raises UserError.

    BASE+ADAPTER stays one path; `infer.model_folder.find_model` splits it.
    """
    folder = expanded(name)
    if name and any((folder / file).is_file() for file in ("config.json", "adapter_config.json")):
        return folder
    if "+" in name and not folder.exists() and not (Path("runs") / name).exists():
        base, _, adapter = name.partition("+")
        return Path(f"{model_path(base)}+{model_path(adapter)}")
    is_known_run = is_run(Path("runs") / name) or name == "last"
    if not folder.exists() and not is_known_run and name:
        from bloomery.hub import fetch_model, is_hub_id

        if is_hub_id(name):
            return fetch_model(name)
    return folder if name and folder.is_dir() and not is_known_run else find_run(name)


def chosen_use(devices: str = "auto", quantize: str | None = None) -> "Use":
    """The device and quantization of a model. Sets environment variables, so torch must not be imported yet.

    Raises UserError for a device that does not exist or that this PyTorch cannot use.
    """
    from bloomery.hardware.detect import detect
    from bloomery.hardware.profile import apply_environment, build_profile
    from bloomery.runs.devices import narrowed

    machine = narrowed(detect(), devices)
    profile = build_profile(machine)
    apply_environment(machine)
    from bloomery.infer.load import Use

    return Use.of(profile, quantize, machine=machine, requested_device=devices)

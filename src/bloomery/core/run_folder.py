"""The run folder: its files, and how a command-line argument names it. No torch."""

import re
import shlex
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, final

from bloomery.core.errors import UserError
from bloomery.core.files import (
    read_whole,
    write_durably,
)
from bloomery.core.text import closest, expanded

if TYPE_CHECKING:
    pass


SWEEP_FILE = "sweep.json"


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
    def pause_request(self) -> Path:
        """While it exists, training waits between two steps."""
        return self.path / "pause"

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    @property
    def name(self) -> str:
        """The argument for `bloomery resume`."""
        return resume_argument(self.path)


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


def is_run(folder: Path) -> bool:
    """A run folder has its recipe from the start."""
    return (folder / "recipe.yaml").is_file()


def all_runs() -> list[Path]:
    """The run folders in `runs/`, newest last, without those of sweeps."""
    return runs_below(Path("runs"))


def is_sweep(folder: Path) -> bool:
    """The folder of a sweep has the runs below it."""
    return (folder / SWEEP_FILE).is_file()


def all_sweeps() -> list[Path]:
    """The folders of sweeps in `runs/`, by name."""
    root = Path("runs")
    return sorted(folder for folder in root.iterdir() if is_sweep(folder)) if root.is_dir() else []


def find_sweep(name: str) -> Path | None:
    """The folder of a sweep: a path, or a name under `runs/`; None where `name` is none."""
    folders = (expanded(name), Path("runs") / name) if name else ()
    return next((folder for folder in folders if is_sweep(folder)), None)


def runs_below(folder: Path) -> list[Path]:
    """The run folders in `folder`, newest last."""
    dated_folders: list[tuple[float, str, Path]] = []
    for run in folder.iterdir() if folder.is_dir() else ():
        # A run may be deleted between two looks at it.
        with suppress(OSError):
            if is_run(run):
                dated_folders.append(((run / "recipe.yaml").stat().st_mtime, run.name, run))
    return [run for _, _, run in sorted(dated_folders)]


def every_run() -> list[Path]:
    """The run folders in `runs/` and in the sweeps there, newest last."""
    dated_folders: list[tuple[float, str, Path]] = []
    for run in [*all_runs(), *(run for sweep in all_sweeps() for run in runs_below(sweep))]:
        with suppress(OSError):
            dated_folders.append(((run / "recipe.yaml").stat().st_mtime, run.name, run))
    return [run for _, _, run in sorted(dated_folders)]


def existing(folder: Path) -> RunFolder:
    """The run in `folder`. Raises UserError when there is none."""
    run = RunFolder(expanded(folder).absolute())
    if not run.recipe.is_file():
        raise UserError(
            "not a run folder", where=str(run.path), fix="`bloomery runs` lists the runs in runs/"
        )
    return run


def find_run(name: str) -> Path:
    """The run folder: a path, a name under `runs/`, a unique prefix of one, or `last`. Raises UserError (code 2).

    A run of a sweep is SWEEP/RUN; `last` is the newest of all runs, those of sweeps included.
    """
    runs = all_runs()
    if name == "last" and (newest_runs := every_run()[-1:]):
        return newest_runs[0]
    for folder in (expanded(name), Path("runs") / name) if name else ():
        if is_run(folder):
            return folder
        if is_sweep(folder):
            problem = f"{name!r} is a sweep of several runs"
            runs_of_it = [f"{folder.name}/{run.name}" for run in runs_below(folder)]
            fix = "name one of its runs: " + ", ".join(runs_of_it[:4] or ["SWEEP/RUN"])
            fix += "; `bloomery report SWEEP` ranks them"
            raise UserError(problem, where=str(folder.resolve()), fix=fix, code=2)
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


def resume_argument(folder: Path) -> str:
    """The argument of `bloomery resume`: the name under runs/, in a sweep SWEEP/RUN, else the path, quoted."""
    runs = Path("runs").absolute()
    is_known = folder.parent == runs or (folder.parent.parent == runs and is_sweep(folder.parent))
    return shlex.quote(str(folder.relative_to(runs) if is_known else folder))

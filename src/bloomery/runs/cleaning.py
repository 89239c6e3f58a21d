"""What can be deleted: runs that are named, and what no run uses any more: prepared datasets, drafts, caches. No torch.

A prepared dataset is used by a run whose plan names it: resuming, evaluating and reporting that run read it.
"""

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bloomery.core.errors import UserError
from bloomery.core.files import (
    abandoned,
    cache_folder,
    open_regular,
    read_whole,
    remove,
    size_of,
    try_lock,
)
from bloomery.core.held_files import claimed
from bloomery.core.run_folder import (
    SWEEP_FILE,
    RunFolder,
    all_sweeps,
    every_run,
    is_run,
    is_sweep,
    runs_below,
)
from bloomery.core.run_lock import worked_on
from bloomery.core.units import counted
from bloomery.data.prepare.prepare import prepared_folder
from bloomery.data.shards import MANIFEST
from bloomery.infer.held_model import being_read
from bloomery.infer.model_folder import manifests_of
from bloomery.plan.store import RUN_FILE
from bloomery.recipe.load import load_recipe

UNUSED_DAYS = 30  # a file of the cache that was neither read nor written for so long
Kind = Literal["run", "sweep", "prepared dataset", "draft", "cache"]


@dataclass(frozen=True)
class Leftover:
    """Something to delete. `loss`: what is lost with it, "" when it is made again by itself."""

    path: Path
    kind: Kind
    bytes: int
    reason: str
    loss: str = ""


def deletable(folder: Path) -> Leftover:
    """The run or the sweep as something to delete.

    Raises UserError for one in progress, for one with a checkpoint that is being read, and for a folder that is more
    than that.
    """
    path = folder.absolute()
    runs = runs_below(path) if is_sweep(path) else [path]
    if worked_on(folder) or any(map(worked_on, runs)):
        problem = f"the {'sweep' if is_sweep(path) else 'run'} is running"
        running = next((run for run in runs if worked_on(run)), path)
        fix = f"`bloomery stop {RunFolder(running).name}`, then run this again"
        raise UserError(problem, where=str(folder), fix=fix)
    with claimed(_held_files(path)) as held_file:
        if held_file is not None:
            raise being_read(held_file)
    names = {entry.name for entry in folder.iterdir()}
    working_folder = Path.cwd()
    if (
        not names & {RUN_FILE, SWEEP_FILE, "lock", "events.jsonl"}
        or ".git" in names
        or path.resolve() in (working_folder, *working_folder.parents)
    ):
        problem = "the folder is not that of a run alone; nothing was deleted"
        raise UserError(
            problem, where=str(folder), fix="delete it yourself, if you want that", code=2
        )
    steps = sum(len(list((run / "checkpoints").glob("step-*"))) for run in runs)
    loss = counted(steps, "checkpoints") if steps else "no checkpoint"
    if is_sweep(path):
        loss = f"{counted(len(runs), 'runs')}, {loss}"
    users = sorted(
        run.name
        for run in every_run()
        if not run.absolute().is_relative_to(path) and _starts_from(run, path)
    )
    if users:
        loss += f"; {', '.join(users)} started from it and cannot be resumed without it"
    kind: Kind = "sweep" if is_sweep(path) else "run"
    return Leftover(folder, kind, size_of(folder), "named", loss)


def _held_files(path: Path) -> list[Path]:
    """The files that readers of the checkpoints of a run or a sweep hold; of anything else none."""
    runs = runs_below(path) if is_sweep(path) else [path]
    return [manifest for run in runs for manifest in manifests_of(run)]


def leftovers() -> tuple[list[Leftover], list[str]]:
    """What no run in runs/ uses, and reasons why something else is kept."""
    unused = list[Leftover]()
    notes = list[str]()
    used_data = dict[Path, str]()
    unknown = list[str]()
    for run in every_run():
        folder = data_of(run)
        if folder is None:
            unknown.append(run.name)
        else:
            used_data[folder.resolve()] = run.name
    if unknown:
        notes.append(
            f"all prepared datasets are kept: it is not known which one {', '.join(unknown)} uses"
        )
    else:
        unused += _unused_data(used_data)
    if used_data:
        notes.append(f"kept for runs: {counted(len(used_data), 'prepared datasets')}")
    for folder_to_search in (
        Path(),
        Path("prepared"),
        Path("runs"),
        *all_sweeps(),
        *every_run(),
        *(run / "checkpoints" for run in every_run()),
    ):
        if folder_to_search.is_dir() and not worked_on(folder_to_search):
            unused += [
                Leftover(path, "draft", size_of(path), "of a process that was killed")
                for path in sorted(folder_to_search.iterdir())
                if path.name.rpartition("-")[2].isdecimal() and abandoned(path)
            ]
    unused += _old_caches()
    return unused, notes


def data_of(run: Path) -> Path | None:
    """The prepared dataset of a run: from its plan, before that from its recipe; None where neither can be read."""
    with suppress(OSError, ValueError, KeyError, TypeError, UserError):
        return Path(json.loads(read_whole(run / "plan.json"))["data"]["prepared"])
    with suppress(OSError, UserError):
        return prepared_folder(load_recipe(run / "recipe.yaml"), Path.cwd())
    return None


def _starts_from(run: Path, other_run: Path) -> bool:
    """Whether the model of a run is in the folder of another run."""
    with suppress(OSError, ValueError, KeyError, TypeError, UserError):
        source = json.loads(read_whole(run / "plan.json"))["model"]["source"]
        return source is not None and Path(source).resolve().is_relative_to(other_run.resolve())
    return False


def _unused_data(used_data: dict[Path, str]) -> Iterator[Leftover]:
    root = Path("prepared")
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        if (
            folder.name.startswith(".tmp-")
            or folder.resolve() in used_data
            or not folder.is_dir()
            or folder.is_symlink()
        ):
            continue
        if any(
            used_folder.is_relative_to(folder.resolve()) for used_folder in used_data
        ) or _is_prepared_now(folder):
            continue
        if any(
            used_folder.parent.name == root.name and used_folder.name == folder.name
            for used_folder in used_data
        ):
            continue  # the plan has the path from before the folders were moved
        if (folder / MANIFEST).is_file() or (folder / ".lock").is_file():
            loss = "prepared again from its source when a recipe needs it"
            yield Leftover(
                folder, "prepared dataset", size_of(folder), "no run in runs/ uses it", loss
            )


def _is_prepared_now(folder: Path) -> bool:
    try:
        descriptor = open_regular(folder / ".lock", os.O_RDONLY)
    except (OSError, UserError):
        return False
    try:
        return not try_lock(descriptor, shared=True)
    finally:
        os.close(descriptor)


def _old_caches() -> Iterator[Leftover]:
    """Compiled functions and measurements of this machine that nothing has used for a month."""
    folder = cache_folder()
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        facts = path.lstat()
        if time.time() - max(facts.st_atime, facts.st_mtime) > UNUSED_DAYS * 86400:
            yield Leftover(path, "cache", size_of(path), f"unused for {UNUSED_DAYS} days")


def delete(leftovers: Sequence[Leftover]) -> Iterator[Leftover]:
    """Deletes, and yields each one that is gone. A run disappears at once: a kill leaves a draft for the next `clean`.

    Raises UserError where something cannot be deleted.
    """
    for leftover in leftovers:
        path = leftover.path
        is_there = is_sweep(path) if leftover.kind == "sweep" else is_run(path)
        if leftover.kind in ("run", "sweep") and (not is_there or worked_on(path)):
            raise UserError(
                f"the {leftover.kind} was started or changed meanwhile",
                where=str(path),
                fix="run this again",
            )
        try:
            with claimed(_held_files(path)) as held_file:
                if held_file is not None:
                    raise being_read(held_file)
                if path.is_dir() and not path.is_symlink():
                    draft = path.absolute().with_name(f".tmp-{path.name[:80]}-{os.getpid()}")
                    path.rename(draft)
                    path = draft
            remove(path)
        except OSError as error:
            problem = f"cannot be deleted: {error.strerror}"
            fix = "correct its owner or permissions, then run this again"
            raise UserError(problem, where=str(error.filename or leftover.path), fix=fix) from error
        yield leftover

"""A new run folder, with its lock and its recipe. No torch."""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from bloomery.core.errors import UserError
from bloomery.core.run_folder import RunFolder
from bloomery.core.run_lock import explained_write_errors, hold_run_lock
from bloomery.core.text import expanded
from bloomery.core.units import format_bytes
from bloomery.plan.store import RUN_FILE, begin
from bloomery.recipe.load import LoadedRecipe, dump_recipe

if TYPE_CHECKING:
    pass


_FIRST_DRAFTS = re.compile(
    r"\.tmp-(run\.json|recipe\.yaml|machine\.json|metrics\.json|lock|clock)-\d+"
)


# Files of a run without a plan.
_BEFORE_A_PLAN = ("events.jsonl", "log.txt", "metrics.json", "machine.json")


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
    with explained_write_errors(folder.path):
        _refuse_occupied(folder)
        folder.path.mkdir(parents=True, exist_ok=True)
    with hold_run_lock(folder) as lock:
        with explained_write_errors(folder.path):
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

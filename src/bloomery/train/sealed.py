"""Checkpoint folders that are complete and valid, or ignored. No torch: launchers read them too.

A folder is written under a temporary name, every file hashed and flushed, `MANIFEST.json` last, then renamed. A kill
leaves the old state or the new one. Flipped bits, truncated and missing files are found by their hash before use.
"""

import hashlib
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any

from bloomery.core.errors import UserError
from bloomery.core.files import flush_to_disk, remove, write_durably
from bloomery.core.seals import added_to, stamped, unstamped
from bloomery.plan.store import read_identity

MANIFEST = "MANIFEST.json"
BEST = "best.json"
FORMAT = 2
NOT_SAVED = "was not saved, training continues"  # identifies the warning of a failed save


@dataclass(frozen=True)
class Lineage:
    """The origin of a checkpoint: run, digest of the plan, step and seal of the previous checkpoint."""

    run: str = ""
    plan: str = ""
    before: tuple[int, str] | None = None


def seal(folder: Path, lineage: Lineage = Lineage()) -> None:
    """Hash and flush every file of `folder`, then write its manifest. The caller renames the folder.

    All files get the folder's mode without x: safetensors writes 0600.
    """
    files, mode = {}, folder.stat().st_mode & 0o666
    for path in sorted(folder.iterdir()):
        path.chmod(mode)
        flush_to_disk(path)
        files[path.name] = {"sha256": _digest(path), "bytes": path.stat().st_size}
    (folder / MANIFEST).write_text(stamped({"format": FORMAT, **asdict(lineage), "files": files}), encoding="utf-8")
    flush_to_disk(folder / MANIFEST)
    flush_to_disk(folder)


def damage(folder: Path) -> str | None:
    """The problem with a sealed folder as text; None when every file is as written and no other one was added."""
    try:
        manifest = unstamped(folder / MANIFEST)
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except ValueError as error:
        return f"{MANIFEST} cannot be read ({error})"
    match manifest:
        case {"format": int(version), "files": dict(files)} if version == FORMAT:
            if (stray := added_to(folder, [MANIFEST, *files])) is not None:
                return f"{stray.name} was added"
            wrongs = (_file_damage(folder / name, entry) for name, entry in files.items())
            return next((wrong for wrong in wrongs if wrong is not None), None)
        case {"format": int(version)}:
            return f"{'a newer' if version > FORMAT else 'an older'} Bloomery wrote it (format {version})"
    return f"{MANIFEST} is damaged"


def refuse_other_run(folder: Path) -> None:
    """Raises UserError for a valid checkpoint of another run, or of another history of this one."""
    checkpoints, manifest = folder.parent, unstamped(folder / MANIFEST)
    head = read_identity(checkpoints.parent)
    if head is None:
        return
    problem = None
    if manifest["run"] != head.run:
        problem = "the checkpoint is from another run"
    elif manifest["plan"] not in head.plans:
        problem = "the checkpoint was saved with a plan that this run never had"
    elif manifest["before"] is not None:
        step, stamp = manifest["before"]
        if seal_of(step_folder(checkpoints, step)) not in (stamp, None):
            problem = f"the checkpoint does not follow the one of step {step:,} in this folder"
    if problem is not None:
        fix = f"move it out of {checkpoints}; `bloomery resume` then uses the previous one"
        raise UserError(problem, where=str(folder), fix=fix)


def seal_of(folder: Path) -> str | None:
    """The seal of a folder; None if missing or damaged."""
    try:
        return str(unstamped(folder / MANIFEST)["sha256"])
    except (FileNotFoundError, ValueError):
        return None


def _file_damage(path: Path, entry: dict[str, Any]) -> str | None:
    try:
        found = path.stat()
        size = found.st_size
        if not S_ISREG(found.st_mode):
            return f"{path.name} is not a regular file"
        if size != entry["bytes"]:
            return f"{path.name} has {size:,} bytes instead of {entry['bytes']:,}"
        return None if _digest(path) == entry["sha256"] else f"{path.name} has changed since it was written"
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:08d}"


def saved_steps(checkpoints: Path) -> list[int]:
    """The steps with a folder, damaged or not, oldest first.

    Raises UserError when the folder exists and cannot be read.
    """
    try:
        names = [path.name for path in checkpoints.iterdir() if path.name.startswith("step-") and path.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(
            f"cannot read the checkpoints: {error.strerror}",
            where=str(checkpoints),
            fix="fix the permissions of that folder, then run the command again",
        ) from error
    numbers = (name.removeprefix("step-") for name in names)
    return sorted(int(number) for number in numbers if number.isdecimal())


def newest_valid(checkpoints: Path, *, on_damage: Callable[[str], None]) -> Path | None:
    """The newest valid checkpoint, or None. Calls `on_damage` for newer, damaged ones. Raises as `refuse_other_run`."""
    for step in reversed(saved_steps(checkpoints)):
        folder = step_folder(checkpoints, step)
        wrong = damage(folder)
        if wrong is None:
            refuse_other_run(folder)
            return folder
        on_damage(f"checkpoint {folder.name} is damaged and ignored: {wrong}")
    return None


def note_best(checkpoints: Path, step: int) -> None:
    """Record that the checkpoint of `step` has the lowest validation loss."""
    write_durably(checkpoints / BEST, stamped({"step": step}))


def best_step(checkpoints: Path) -> int | None:
    """The step with the lowest validation loss, from best.json. Raises UserError when that is damaged."""
    try:
        return int(unstamped(checkpoints / BEST)["step"])
    except FileNotFoundError:
        return None
    except ValueError as error:
        problem = f"cannot read which checkpoint is best: {error}"
        fix = "delete it and pass --step; the next best checkpoint writes it again"
        raise UserError(problem, where=str(checkpoints / BEST), fix=fix) from error


def remove_folder(folder: Path) -> None:
    """Delete a sealed folder, renamed first: a kill never leaves a damaged checkpoint. Of a symlink, only the link."""
    doomed = folder.with_name(f".tmp-{folder.name}-{os.getpid()}-gone")
    folder.rename(doomed)
    remove(doomed)


def clear_drafts(checkpoints: Path) -> None:
    """Delete the remains of killed saves. The caller holds the run's lock."""
    for path in checkpoints.glob(".tmp-*"):
        remove(path)

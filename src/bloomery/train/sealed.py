"""Folders that are complete and undamaged, or count as absent. No torch: launchers look at checkpoints too.

A sealed folder is written beside its place, every file hashed and flushed to the disk, `MANIFEST.json` last, then
renamed. A kill at any moment leaves either the old state or the new one; a flipped bit, a cut file or a missing one is
found by its hash before anything is read from it.
"""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from stat import S_ISREG
from typing import Any

from bloomery.disk import flush_to_disk, read_whole, remove
from bloomery.errors import UserError

MANIFEST = "MANIFEST.json"
FORMAT = 1
NOT_SAVED = "was not saved, training goes on"  # how the warning of a failed save is told from others


def seal(folder: Path) -> None:
    """Hash and flush every file of `folder`, then write its manifest. The caller renames the folder to its place.

    All files get the mode that the umask gives: safetensors writes 0600.
    """
    files, mode = {}, folder.stat().st_mode & 0o666
    for path in sorted(folder.iterdir()):
        path.chmod(mode)
        flush_to_disk(path)
        files[path.name] = {"sha256": _digest(path), "bytes": path.stat().st_size}
    body = {"format": FORMAT, "files": files}
    (folder / MANIFEST).write_text(json.dumps({**body, "sha256": _body_digest(body)}, indent=1), encoding="utf-8")
    flush_to_disk(folder / MANIFEST)
    flush_to_disk(folder)


def damage(folder: Path) -> str | None:
    """What is wrong with a sealed folder, in a few words; None when every file is as it was written."""
    try:
        manifest: Any = json.loads(read_whole(folder / MANIFEST))
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except UserError as error:
        return error.problem
    except (ValueError, OSError, RecursionError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    match manifest:
        case {"format": int(version), **_kept} if version > FORMAT:
            return f"a newer Bloomery wrote it (format {version})"
        case {"format": int(version), "files": dict(files), "sha256": str(stamp)}:
            if stamp == _body_digest({"format": version, "files": files}):
                wrongs = (_file_damage(folder / name, entry) for name, entry in files.items())
                return next((wrong for wrong in wrongs if wrong is not None), None)
    return f"{MANIFEST} is damaged"


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


def _body_digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:08d}"


def saved_steps(checkpoints: Path) -> list[int]:
    """The steps that have a folder, damaged or not, oldest first.

    Raises UserError when the folder is there and cannot be read: what it holds is not known, which is not none.
    """
    try:
        names = [path.name for path in checkpoints.iterdir() if path.name.startswith("step-") and path.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(
            f"the checkpoints cannot be read: {error.strerror}",
            where=str(checkpoints),
            remedy="fix the permissions of that folder, then run the command again",
        ) from error
    numbers = (name.removeprefix("step-") for name in names)
    return sorted(int(number) for number in numbers if number.isdecimal())


def newest_valid(checkpoints: Path, *, on_damage: Callable[[str], None]) -> Path | None:
    """The newest checkpoint with all files as they were written, or None; `on_damage` hears of newer, damaged ones."""
    for step in reversed(saved_steps(checkpoints)):
        folder = step_folder(checkpoints, step)
        wrong = damage(folder)
        if wrong is None:
            return folder
        on_damage(f"checkpoint {folder.name} is damaged and not used: {wrong}")
    return None


def best_step(checkpoints: Path) -> int | None:
    """The step with the best evaluation so far, as the last save noted it."""
    try:
        noted: Any = json.loads(read_whole(checkpoints / "best.json"))
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return noted["step"] if isinstance(noted, dict) and isinstance(noted.get("step"), int) else None


def remove_folder(folder: Path) -> None:
    """Delete a sealed folder; a kill halfway leaves a draft for the next start to clear, never a damaged checkpoint.

    Of one that lies elsewhere only the link goes.
    """
    doomed = folder.with_name(f".tmp-{folder.name}-{os.getpid()}-gone")
    folder.rename(doomed)
    remove(doomed)


def clear_drafts(checkpoints: Path) -> None:
    """Delete what killed saves left behind. Only for the holder of the run's lock."""
    for path in checkpoints.glob(".tmp-*"):
        remove(path)

"""The folders of a MODEL argument: a run's valid checkpoint, a model folder, an adapter and its base.

No torch: launchers read them too. A checkpoint is complete and valid, or ignored: it is written under a temporary name,
every file hashed and flushed, `MANIFEST.json` last, then renamed. A kill leaves the old state or the new one. Flipped
bits, truncated and missing files are found by their hash before use.
"""

import errno
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any

from bloomery.core.errors import UserError
from bloomery.core.files import (
    added_to,
    flush_to_disk,
    open_input,
    read_whole,
    remove,
    stamped,
    unstamped,
    write_durably,
)
from bloomery.core.held_files import HeldFiles, claimed
from bloomery.model.adapters.settings import base_folder, is_adapter_folder
from bloomery.plan.store import read_identity, read_plan
from bloomery.recipe.schema import Quantize

MANIFEST = "MANIFEST.json"
STATE = "state.json"
BEST = "best.json"
FORMAT = 2
NOT_SAVED = "was not saved, training continues"  # identifies the warning of a failed save


@dataclass(frozen=True)
class Lineage:
    """The origin of a checkpoint: run, digest of the plan, step and seal of the previous checkpoint."""

    run: str = ""
    plan: str = ""
    before: tuple[int, str] | None = None


@dataclass(frozen=True)
class FileEntry:
    """The entry of a file in a manifest."""

    sha256: str
    bytes: int


def seal(
    folder: Path, lineage: Lineage = Lineage(), *, written: Mapping[str, FileEntry] | None = None
) -> None:
    """Hash and flush every file of `folder`, then write its manifest. The caller renames the folder.

    `written`: the files that were hashed and flushed by those who wrote them; they are not read again.
    All files get the folder's mode without x: safetensors writes 0600. Raises OSError.
    """
    written = {} if written is None else written
    files = {}
    mode = folder.stat().st_mode & 0o666
    for path in sorted({*folder.iterdir(), *(folder / name for name in written)}):
        path.chmod(mode)
        size = path.stat().st_size
        entry = written.get(path.name)
        if entry is None:
            flush_to_disk(path)
            entry = FileEntry(_digest(path), size)
        elif size != entry.bytes:
            problem = f"{path.name} has {size:,} bytes instead of {entry.bytes:,}"
            raise OSError(errno.EIO, problem)
        files[path.name] = asdict(entry)
    (folder / MANIFEST).write_text(
        stamped({"format": FORMAT, **asdict(lineage), "files": files}), encoding="utf-8"
    )
    flush_to_disk(folder / MANIFEST)
    flush_to_disk(folder)


def damage(folder: Path, *, worker: int = 0, workers: int = 1) -> str | None:
    """The problem with a sealed folder as text; None when every file is as written and no other one was added.

    Of several workers each hashes its share of the files, and compares the sizes of all.
    """
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
            for number, (name, entry) in enumerate(files.items()):
                # Few files are spread over the workers of all hosts.
                hashing_worker = number * max(1, workers // len(files)) % workers
                hashes = hashing_worker == worker
                if (problem := _file_damage(folder / name, entry, hashes=hashes)) is not None:
                    return problem
            return _other_step(folder) if STATE in files and worker == 0 else None
        case {"format": int(version)}:
            age = "a newer" if version > FORMAT else "an older"
            return f"{age} Bloomery wrote it (format {version})"
    return f"{MANIFEST} is damaged"


def _other_step(folder: Path) -> str | None:
    """The problem with a checkpoint that lies under the name of another step; None for one under its own name."""
    named = re.fullmatch(r"(?:step|best)-([0-9]{8,})", folder.name)
    if named is None:  # a copy under a name of the user's own
        return None
    try:
        step = json.loads(read_whole(folder / STATE))["step"]
    except (OSError, UserError, ValueError, KeyError, TypeError, RecursionError):
        return f"{STATE} does not name its step"
    return None if step == int(named[1]) else f"it is the checkpoint of step {step}, renamed"


def refuse_other_run(folder: Path) -> None:
    """Raises UserError for a valid checkpoint of another run, or of another history of this one."""
    checkpoints = folder.parent
    manifest = unstamped(folder / MANIFEST)
    identity = read_identity(checkpoints.parent)
    if identity is None:
        return

    # Of another run, of a plan of no history of this run, or after another checkpoint than the one that is here.
    problem = None
    if manifest["run"] != identity.run:
        problem = "the checkpoint is from another run"
    elif manifest["plan"] not in identity.plans:
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


def previous_of(folder: Path) -> tuple[int, str] | None:
    """Step and seal of the checkpoint before this one; None for the first, and where its manifest cannot be read."""
    try:
        previous = unstamped(folder / MANIFEST)["before"]
    except (FileNotFoundError, ValueError, KeyError):
        return None
    return None if previous is None else (int(previous[0]), str(previous[1]))


def _file_damage(path: Path, entry: dict[str, Any], *, hashes: bool) -> str | None:
    """The problem with one file, compared with its entry in the manifest; None where it is as written.

    `hashes`: whether its content is compared, too.
    """
    try:
        file_stat = path.stat()
        size = file_stat.st_size
        if not S_ISREG(file_stat.st_mode):
            return f"{path.name} is not a regular file"
        if size != entry["bytes"]:
            return f"{path.name} has {size:,} bytes instead of {entry['bytes']:,}"
        if hashes and _digest(path) != entry["sha256"]:
            return f"{path.name} has changed since it was written"
        return None
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"
    except UserError as error:
        return f"{path.name} cannot be read ({error.problem})"


def _digest(path: Path) -> str:
    with open_input(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:08d}"


def weights_folder(checkpoints: Path, step: int) -> Path:
    """The folder of the best weights of a step that has no whole checkpoint."""
    return checkpoints / f"best-{step:08d}"


def folder_of_step(checkpoints: Path, step: int) -> Path:
    """The checkpoint of a step, else its best weights; it may be missing."""
    folder = step_folder(checkpoints, step)
    return folder if folder.is_dir() else weights_folder(checkpoints, step)


def saved_steps(checkpoints: Path) -> list[int]:
    """The steps with a checkpoint to resume from, damaged or not, oldest first. Raises UserError as `_steps_of`."""
    return _steps_of(checkpoints, "step-")


def best_weight_steps(checkpoints: Path) -> list[int]:
    """The steps of which only the weights are saved, oldest first. Raises UserError as `_steps_of`."""
    return _steps_of(checkpoints, "best-")


def _steps_of(checkpoints: Path, prefix: str) -> list[int]:
    """Raises UserError when the folder exists and cannot be read."""
    try:
        names = [
            path.name
            for path in checkpoints.iterdir()
            if path.name.startswith(prefix) and path.is_dir()
        ]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(
            f"cannot read the checkpoints: {error.strerror}",
            where=str(checkpoints),
            fix="fix the permissions of that folder, then run the command again",
        ) from error
    numbers = (name.removeprefix(prefix) for name in names)
    return sorted(int(number) for number in numbers if number.isdecimal())


def newest_valid(
    checkpoints: Path, *, on_damage: Callable[[str], None], holds: HeldFiles | None = None
) -> Path | None:
    """The newest valid checkpoint, or None. Calls `on_damage` for newer, damaged ones. Raises as `refuse_other_run`.

    `holds`: as in `model_folder`.
    """
    damaged_steps = set[int]()
    # The steps are listed again after each: the run that writes them may delete one meanwhile.
    while steps := [step for step in saved_steps(checkpoints) if step not in damaged_steps]:
        folder = step_folder(checkpoints, steps[-1])
        problem = _problem_of_held(folder, holds)
        if problem is None:
            refuse_other_run(folder)
            return folder
        if folder.is_dir():
            damaged_steps.add(steps[-1])
            on_damage(f"checkpoint {folder.name} is damaged and ignored: {problem}")
    return None


def _problem_of_held(folder: Path, holds: HeldFiles | None) -> str | None:
    """`damage` of a folder that `holds` keeps from now on, if it is given and the folder is still there."""
    manifest = folder / MANIFEST
    if holds is not None and manifest.is_file() and not holds.take(manifest):
        return "it was deleted meanwhile"
    return damage(folder)


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


def best_on_disk(checkpoints: Path) -> int | None:
    """The step of the best checkpoint; None without one, and where best.json is damaged."""
    try:
        step = best_step(checkpoints)
    except UserError:
        return None
    return step if step is not None and folder_of_step(checkpoints, step).is_dir() else None


def restore_best(checkpoints: Path, *, step: int, best: int | None) -> bool:
    """The best checkpoint is again the one of step `best`, as it was at `step`; whether it is on disk. Needs the lock.

    Best weights of later steps are deleted: the run takes these steps again.
    """
    # Noted before any is deleted: a reader of the best one finds it deleted, and then reads here which one is the best.
    is_on_disk = best is not None and folder_of_step(checkpoints, best).is_dir()
    if best is not None and is_on_disk:
        note_best(checkpoints, best)
    else:
        (checkpoints / BEST).unlink(missing_ok=True)

    # One that is being read stays until the next save, which deletes what is not the best.
    for later in best_weight_steps(checkpoints):
        if later > step:
            remove_unread(weights_folder(checkpoints, later))
    return best is None or is_on_disk


def remove_unread(folder: Path) -> bool:
    """`remove_folder`, unless somebody reads it (`held_model`); whether it was deleted."""
    with claimed([folder / MANIFEST]) as held_file:
        if held_file is not None:
            return False
        # Nobody finds it under this name: what is left is deleted without the lock.
        aside = _renamed_aside(folder, "gone")
    remove(aside)
    return True


def manifests_of(run_dir: Path) -> list[Path]:
    """The files that readers of the run's checkpoints hold."""
    return sorted((run_dir / "checkpoints").glob(f"*/{MANIFEST}"))


def remove_folder(folder: Path) -> None:
    """Delete a sealed folder, renamed first: a kill never leaves a damaged checkpoint. Of a symlink, only the link."""
    remove(_renamed_aside(folder, "gone"))


def put_in_place(draft: Path, folder: Path) -> None:
    """Rename a sealed draft to `folder`, whose old content is deleted after that, which may take long.

    A kill between the two renames leaves the old content to `clear_drafts`, which puts it back.
    """
    old_folder = _renamed_aside(folder, "before") if folder.exists() else None
    draft.rename(folder)
    if old_folder is not None:
        flush_to_disk(folder.parent)
        remove(old_folder)


def _renamed_aside(folder: Path, suffix: str) -> Path:
    aside = folder.with_name(f".tmp-{folder.name}-{os.getpid()}-{suffix}")
    folder.rename(aside)
    return aside


def clear_drafts(checkpoints: Path) -> None:
    """Delete the remains of killed saves, but put back a checkpoint that was not replaced yet. Needs the run's lock."""
    for path in checkpoints.glob(".tmp-*"):
        replaced = re.fullmatch(r"\.tmp-(.+)-\d+-before", path.name)
        if replaced and not (checkpoints / replaced[1]).exists():
            path.rename(checkpoints / replaced[1])
        else:
            remove(path)


TOKENIZERS = ("tokenizer.json", "tokenizer.model")


@dataclass(frozen=True)
class Trained:
    """Quantization, precision and device of the run that wrote a checkpoint."""

    quantize: Quantize
    precision: str
    device: str


@dataclass(frozen=True)
class ModelFiles:
    """`weights`: a folder with config.json, or with adapter_config.json; then `base` is the base model's folder."""

    weights: Path
    base: Path | None
    tokenizer: Path
    trained: Trained | None = None  # None: not a run's checkpoint, or the plan has another format


def find_model(model: Path, step: str = "best", holds: HeldFiles | None = None) -> ModelFiles:
    """Resolve a MODEL argument as `model_folder`, or BASE+ADAPTER. Raises UserError.

    A run may delete what is found at any time: whoever reads the files uses `held_model`.
    """
    base, adapter = base_and_adapter(model)
    weights = model_folder(adapter, step, holds)
    if not is_adapter_folder(weights):
        if base is not None:
            fix = "name the folder of an adapter, or a run that trained one, after the +"
            raise UserError(f"not an adapter: {adapter.name}", where=str(adapter), fix=fix)
        return ModelFiles(weights, None, weights, _trained(weights))
    base_weights = base_folder(weights) if base is None else model_folder(base, holds=holds)
    if base is None and holds is not None and (base_weights / MANIFEST).is_file():
        holds.take(base_weights / MANIFEST)
    has_tokenizer = any((weights / name).is_file() for name in TOKENIZERS)
    tokenizer = weights if has_tokenizer else base_weights
    return ModelFiles(weights, base_weights, tokenizer, _trained(weights))


def deletion(folder: Path) -> UserError:
    """The error for a folder that was deleted, or replaced by another of its name, while it was read."""
    what_happened = "replaced" if folder.is_dir() else "deleted"
    if folder.parent.name != "checkpoints":
        problem = f"{folder.name} was {what_happened} meanwhile"
        return UserError(problem, where=str(folder), fix="run the command again")
    step = folder.name.rpartition("-")[2].lstrip("0") or "0"
    left_steps = ", ".join(str(number) for number in saved_steps(folder.parent)) or "none"
    return UserError(
        f"the checkpoint of step {step} was {what_happened} meanwhile; left: {left_steps}",
        where=str(folder),
        fix="run the command again with --step best or one of these; checkpoint.keep keeps more of them",
    )


def _trained(weights: Path) -> Trained | None:
    """How the run of a checkpoint trained, by its plan.json; None for other folders."""
    path = weights.parent.parent / "plan.json"
    if weights.parent.name != "checkpoints" or not path.is_file():
        return None
    try:
        plan = read_plan(path)
    except UserError:  # another format: the weights are usable
        return None
    return Trained(plan.quantize, plan.train.precision, plan.train.device)


def base_and_adapter(model: Path) -> tuple[Path | None, Path]:
    """(BASE, ADAPTER) where both are folders, else (None, model): a folder's name may contain a +."""
    if model.exists():
        return None, model
    text = str(model)
    for position, letter in enumerate(text):
        base = Path(text[:position])
        adapter = Path(text[position + 1 :])
        if letter == "+" and base.is_dir() and adapter.is_dir():
            return base, adapter
    return None, model


def model_folder(run_or_folder: Path, step: str = "best", holds: HeldFiles | None = None) -> Path:
    """The folder with config.json or adapter_config.json.

    `step`: a number, "last", or "best" (the last without an evaluation). Skips damaged newest checkpoints with a
    warning on stderr; a damaged checkpoint named by its number is an error. Raises UserError without a usable one.
    `holds`: keeps the folder, and keeps it before it is checked, so that no run deletes it until these end.
    """
    if not run_or_folder.is_dir():
        raise UserError(
            f"no such folder: {run_or_folder.name}",
            where=str(run_or_folder),
            fix="name a run or a model folder",
        )

    # A folder of a model, which may be a checkpoint that was copied out of its run.
    if (run_or_folder / "config.json").is_file() or is_adapter_folder(run_or_folder):
        if step not in ("best", "last"):
            problem = f"not a run, so --step {step} does not apply"
            raise UserError(problem, where=str(run_or_folder), fix="leave out --step", code=2)
        if (run_or_folder / MANIFEST).is_file():
            _refuse_unsound(
                run_or_folder,
                holds,
                f"name another folder; delete {MANIFEST} if you changed the files yourself",
            )
        if not run_or_folder.is_dir():
            raise deletion(run_or_folder)
        return run_or_folder

    # A run with checkpoints, or with none yet.
    checkpoints = run_or_folder / "checkpoints"
    steps = sorted({*saved_steps(checkpoints), *best_weight_steps(checkpoints)})
    if not steps and not (run_or_folder / "recipe.yaml").is_file():
        raise UserError(
            f"neither a model nor a run: {run_or_folder.name}",
            where=str(run_or_folder),
            fix="name a run, or a folder with config.json and model.safetensors",
        )
    if not steps:
        raise UserError(
            "no checkpoint yet",
            where=str(checkpoints),
            fix="wait for the first checkpoint, continue with `bloomery resume`, or name a run of `bloomery runs`",
        )

    # A step that was named is the one, or an error.
    if step not in ("best", "last"):
        choices = ", ".join(str(number) for number in steps)
        if not step.isdecimal() or int(step) not in steps:
            raise UserError(
                f"no such checkpoint: {step[:40]!r}",
                where=str(checkpoints),
                code=2,
                fix=f"choose best, last or one of {choices}",
            )
        folder = folder_of_step(checkpoints, int(step))
        _refuse_unsound(folder, holds, f"choose another of {choices}")
        return folder

    # The best, else the newest that is not damaged.
    best = best_step(checkpoints) if step == "best" else None
    while best is not None:
        folder = folder_of_step(checkpoints, best)
        best_problem = _problem_of_held(folder, holds)
        if best_problem is None:
            refuse_other_run(folder)
            return folder
        if folder.is_dir():
            warning = f"best checkpoint {folder.name} is damaged, using the last: {best_problem}"
            print(f"warning: {warning}", file=sys.stderr)
            break
        # A run notes another best one before it deletes this one.
        missing_step = best
        best = best_step(checkpoints)
        if best == missing_step:
            warning = f"the best checkpoint, of step {best}, is missing: using the last"
            print(f"warning: {warning}", file=sys.stderr)
            break
    newest = newest_valid(
        checkpoints,
        on_damage=lambda problem: print(f"warning: {problem}", file=sys.stderr),
        holds=holds,
    )
    if newest is None and not saved_steps(checkpoints):
        fix = "use --step best, wait for the first checkpoint, or continue with `bloomery resume`"
        raise UserError("no checkpoint yet, only the best weights", where=str(checkpoints), fix=fix)
    if newest is None:
        fix = "`bloomery resume` trains from the start"
        raise UserError("every checkpoint of this run is damaged", where=str(checkpoints), fix=fix)
    return newest


def _refuse_unsound(folder: Path, holds: HeldFiles | None, fix: str) -> None:
    """Raises UserError for a checkpoint that is damaged, deleted or from another run."""
    if problem := _problem_of_held(folder, holds):
        if not folder.is_dir():
            raise deletion(folder)
        raise UserError(f"damaged checkpoint: {problem}", where=str(folder), fix=fix)
    refuse_other_run(folder)

"""run.json: which run a folder is, and the seals of what it reads. No torch.

The id is made once for each run. Files of the run are replaced with `write_sealed`: for a moment their old and their
new digest count, so that a kill in between leaves a run that can be resumed.
"""

import secrets
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ValidationError

from bloomery.core import __version__
from bloomery.core.errors import UserError
from bloomery.core.files import digest_of, read_whole, stamped, unstamped, write_durably
from bloomery.plan.types import RunPlan

RUN_FILE = "run.json"
PLAN_FILE = "plan.json"
FORMAT = 4  # of recipe.yaml and plan.json in a run's folder
_AS_IT_WAS = "put it back as it was; to train with other settings, start a new run: `bloomery train RECIPE key=value`"


class RunIdentity(BaseModel, frozen=True):
    """`format`: that of the run's other files. `version`: the Bloomery that began the run. `files`: the digests that
    each small file may have. `plans`: of every plan so far, the newest last. `models`: of the weights that the run
    began with, by role.
    """

    run: str
    format: int = 1
    version: str = ""
    files: dict[str, tuple[str, ...]] = {}
    plans: tuple[str, ...] = ()
    models: dict[str, str] = {}


def read_identity(folder: Path) -> RunIdentity | None:
    """None in a folder without one: not every plan is trained by `bloomery train`.

    Raises UserError when it is damaged or has another format.
    """
    path = folder / RUN_FILE
    try:
        head = RunIdentity.model_validate(unstamped(path))
    except FileNotFoundError:
        return None
    except (ValueError, ValidationError) as error:
        problem = "the seal of the run is damaged: its other files cannot be checked"
        raise UserError(
            problem, where=str(path), fix="put it back from a copy, or start a new run"
        ) from error
    if head.format != FORMAT:
        writer = (
            f"Bloomery {head.version}"
            if head.version
            else "the version that the first line of events.jsonl names"
        )
        problem = f"the run has format {head.format}; Bloomery {__version__} reads format {FORMAT}"
        raise UserError(
            problem,
            where=str(path),
            fix=f"use {writer}, or start a new run: `bloomery train RECIPE`",
        )
    return head


def require_identity(folder: Path) -> RunIdentity:
    """Raises UserError in a folder without one."""
    head = read_identity(folder)
    if head is None:
        problem = "the seal of the run is missing: its other files cannot be checked"
        raise UserError(
            problem, where=str(folder / RUN_FILE), fix="put it back from a copy, or start a new run"
        )
    return head


def begin(folder: Path, files: Mapping[str, str]) -> None:
    """A new run, with its first files."""
    _write(folder, RunIdentity(run=secrets.token_hex(8), format=FORMAT, version=__version__))
    write_sealed(folder, files)


def write_sealed(folder: Path, files: Mapping[str, str]) -> None:
    """Replaces files of a run, each in one step. Where there is no head there are no seals, either."""
    head = read_identity(folder)
    if head is None:
        for name, text in files.items():
            write_durably(folder / name, text)
        return
    new_digests = {name: digest_of(text.encode()) for name, text in files.items()}
    old_and_new = {
        name: (*head.files.get(name, ()), digest) for name, digest in new_digests.items()
    }
    plans = (
        (*head.plans, new_digests[PLAN_FILE])
        if PLAN_FILE in new_digests and new_digests[PLAN_FILE] not in head.plans[-1:]
        else head.plans
    )
    head = head.model_copy(update={"files": head.files | old_and_new, "plans": plans})
    _write(folder, head)
    for name, text in files.items():
        write_durably(folder / name, text)
    final_digests = {name: (digest,) for name, digest in new_digests.items()}
    _write(folder, head.model_copy(update={"files": head.files | final_digests}))


def read_sealed(path: Path, *, fix: str = _AS_IT_WAS) -> bytes:
    """A file of a run, as it was written. Raises UserError when it changed since, and OSError."""
    content = read_whole(path)
    head = read_identity(path.parent)
    if head is not None and digest_of(content) not in head.files.get(path.name, ()):
        raise UserError(f"{path.name} has changed since the run wrote it", where=str(path), fix=fix)
    return content


CHANGED_MODEL = (
    "model is not the one that the run began with: its weights or its config.json changed"
)


def note_model(folder: Path, role: str, digest: str, *, changed: str = CHANGED_MODEL) -> None:
    """Remembers the weights of a run when they are first read, and raises UserError when they are others later.
    `changed`: the rest of that sentence.
    """
    head = read_identity(folder)
    if head is None or head.models.get(role) == digest:
        return
    if role in head.models:
        raise UserError(
            f"the {role} {changed}",
            where=str(folder),
            fix="put back what it was, or start a new run",
        )
    _write(folder, head.model_copy(update={"models": head.models | {role: digest}}))


def _write(folder: Path, head: RunIdentity) -> None:
    write_durably(folder / RUN_FILE, stamped(head.model_dump(mode="json")))


def write_plan(plan: RunPlan, path: Path) -> None:
    """Replaces the file in one step: a reader sees the old plan or the new one. The run's head lists both."""
    write_sealed(path.parent, {path.name: dumped(plan)})


def dumped(plan: RunPlan) -> str:
    """The content of plan.json."""
    return plan.model_dump_json(indent=1) + "\n"


def read_plan(path: Path) -> RunPlan:
    """Raises UserError when there is no plan, it changed since it was written, or this version cannot read it."""
    try:
        return RunPlan.model_validate_json(read_sealed(path))
    except FileNotFoundError as missing:
        raise UserError(
            "this run has no plan yet", where=str(path), fix="bloomery resume starts it over"
        ) from missing
    except ValidationError as broken:
        first_error = broken.errors()[0]
        key = ".".join(map(str, first_error["loc"])) or "the file"
        problem = f"the plan cannot be read: {key}: {first_error['msg']}"
        raise UserError(
            problem, where=str(path), fix="start a new run from its recipe.yaml"
        ) from broken

"""Which code of a run its user has asked for: hooks, and the files of Python rewards. Does not import torch.

A run folder may come from somebody else, and its recipe.yaml would then start their code on this machine. So code of a
run starts only where this user has named it: in a recipe passed to `train`, in an override, or with `--trust-code`.
That is noted in the user's state folder, outside of the run, by the run's id: a run that is moved keeps its notes.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from bloomery.core.errors import UserError
from bloomery.core.files import digest_of, read_input, state_folder
from bloomery.core.run_folder import resume_argument
from bloomery.plan.store import read_identity
from bloomery.plan.types import EpisodesPlan, RunPlan
from bloomery.recipe.rewards import PythonReward
from bloomery.recipe.schema import Command, Recipe


def commands_of(recipe: Recipe) -> frozenset[str]:
    """The hooks of `logging.trackers`."""
    return frozenset(sink.command for sink in recipe.logging.trackers if isinstance(sink, Command))


def reward_files(recipe: Recipe | RunPlan) -> tuple[Path, ...]:
    """The Python files of rewards, tools and the environment: code that training runs."""
    episodes = recipe.episodes if isinstance(recipe, RunPlan) else EpisodesPlan.of(recipe)
    places = [reward.python for reward in recipe.rewards if isinstance(reward, PythonReward)]
    places += () if episodes is None else episodes.files
    return tuple(dict.fromkeys(Path(place.rpartition(":")[0]) for place in places))


def names_code(plan: RunPlan) -> bool:
    """Whether the plan's run starts code of its user."""
    return bool(plan.logging.commands or reward_files(plan))


def note_code(run_dir: Path, *, commands: Iterable[str] = (), files: Iterable[Path] = ()) -> None:
    """Notes that the user has asked for these hooks and these files of rewards in this run.

    Raises OSError where the state folder cannot be written.
    """
    notes = [_note(run_dir, f"command {command}") for command in commands]
    for file in files:
        notes += _notes_of_file(run_dir, file)
    for note in notes:
        note.parent.mkdir(parents=True, exist_ok=True)
        note.touch()


def noted_commands(run_dir: Path, commands: Iterable[str]) -> frozenset[str]:
    """Those that the user has asked for in this run."""
    return frozenset(
        command for command in commands if _note(run_dir, f"command {command}").exists()
    )


def refuse_foreign_rewards(run_dir: Path, recipe: Recipe | RunPlan, *, command: str) -> None:
    """Raises UserError for a file of Python rewards that this user has not asked for in this run.

    `command`: what was refused, as it would be typed: with --trust-code it is done.
    """
    for file in reward_files(recipe):
        if not any(note.exists() for note in _notes_of_file(run_dir, file)):
            raise UserError(
                "the rewards of this run are Python code, and nothing here notes that you asked for it",
                where=str(file),
                fix=f"read that file, then run: bloomery {command} {resume_argument(run_dir)} --trust-code",
            )


def _notes_of_file(run_dir: Path, file: Path) -> list[Path]:
    """One by its place, so that it may be edited, and one by its content, so that it may be moved with its run.

    A file in the run's own folder comes with the run, from wherever that is: only its content counts.
    """
    notes = []
    if not file.resolve().is_relative_to(run_dir.resolve()):
        notes.append(_note(run_dir, f"reward {file.resolve()}"))
    if file.is_file():
        notes.append(_note(run_dir, f"reward of content {digest_of(read_input(file))}"))
    return notes


def _note(run_dir: Path, code: str) -> Path:
    """Of a folder without an id, its place is the run."""
    identity = read_identity(run_dir)
    run = str(run_dir.resolve()) if identity is None else identity.run
    name = f"{run}\0{code}".encode(errors="surrogateescape")
    return state_folder() / "hooks" / hashlib.sha256(name).hexdigest()

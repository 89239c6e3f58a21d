"""Which hooks of a run folder may run: those that you started or resumed it with, in that place. No torch."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from bloomery.disk import state_folder
from bloomery.recipe.schema import Command, Recipe


def commands_of(recipe: Recipe) -> frozenset[str]:
    """The hooks of `monitor.to`."""
    return frozenset(sink.command for sink in recipe.monitor.to if isinstance(sink, Command))


def remember(run_dir: Path, commands: Iterable[str]) -> None:
    """Notes in your home folder that you asked for these hooks. Raises OSError when that cannot be written."""
    for command in commands:
        note = _note(run_dir, command)
        note.parent.mkdir(parents=True, exist_ok=True)
        note.touch()


def remembered(run_dir: Path, commands: Iterable[str]) -> frozenset[str]:
    """Those of them that `remember` has noted: a folder that came from elsewhere has none, whatever its files say."""
    return frozenset(command for command in commands if _note(run_dir, command).exists())


def _note(run_dir: Path, command: str) -> Path:
    name = f"{run_dir.resolve()}\0{command}".encode(errors="surrogateescape")
    return state_folder() / "hooks" / hashlib.sha256(name).hexdigest()

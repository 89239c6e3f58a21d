"""How a run ended."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import final

from bloomery.errors import UserError


class MemoryFull(UserError):
    """Even a single row at once does not fit."""


class Unsound(UserError):
    """A kernel does not compute what it should."""


def name_of(folder: Path) -> str:
    """What a person types after `bloomery resume`: its name under runs/, else its path, quoted."""
    return shlex.quote(folder.name if folder.parent == Path("runs").absolute() else str(folder))


@final
@dataclass(frozen=True)
class Run:
    """`code` is 0 when the run is done, 75 when it stopped and can be resumed, 130 after a second Ctrl+C.

    `again`: it was done before, and nothing was left to do.
    """

    folder: Path
    code: int
    again: bool = False

    @property
    def name(self) -> str:
        """`name_of` its folder."""
        return name_of(self.folder)

"""How a run ended, and what is asked of one that goes on through files in its folder. No torch."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import final

from bloomery.disk import read_whole
from bloomery.errors import UserError
from bloomery.recipe.schema import LONGEST_TRACE

PROFILE = "profile"  # the folder of what was recorded of steps
PROFILE_ASKED = "profile-asked"  # the file that holds how many steps somebody wants recorded
NOT_RECORDED = "what was recorded of the run could not be written"


class MemoryFull(UserError):
    """Even a single row at once does not fit."""


class Diverged(UserError):
    """Losses, gradients or weights are no numbers any more, and skipping and rewinding have not helped."""


class Unsound(UserError):
    """A kernel does not compute what it should."""


def asked_steps(request: Path) -> int:
    """How many steps somebody wants recorded; 0 without such a wish, or when the file says nothing sensible."""
    try:
        words = read_whole(request, most=100).decode()
    except (OSError, ValueError, UserError):
        return 0
    return min(int(words), LONGEST_TRACE) if words.isdecimal() else 0


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

"""How a run ended."""

from dataclasses import dataclass
from pathlib import Path
from typing import final


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
        """What `bloomery resume` and the other verbs call it: its name under runs/, else its path."""
        return self.folder.name if self.folder.parent == Path("runs").absolute() else str(self.folder)

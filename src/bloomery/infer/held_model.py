"""Models that are held while they are read: a run that prunes its checkpoints leaves one that has a reader. No torch.

A reader has a shared lock on the checkpoint's manifest (`core.held_files`). It needs no right to write, adds no file to
a sealed folder, and goes with the process. A model without a manifest is no checkpoint, and no run deletes it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bloomery.core.errors import UserError
from bloomery.core.held_files import HeldFiles
from bloomery.infer.model_folder import ModelFiles, deletion, find_model, model_folder


@contextmanager
def held_model(model: Path, step: str = "best") -> Iterator[ModelFiles]:
    """`find_model`: its folders stay until the block ends. Raises UserError.

    Whoever has read everything into memory leaves the block: a long use needs no files.
    """
    with HeldFiles() as holds, _explained(holds):
        yield find_model(model, step, holds)


@contextmanager
def held_folder(run_or_folder: Path, step: str = "best") -> Iterator[Path]:
    """`model_folder`: it stays until the block ends. Raises UserError."""
    with HeldFiles() as holds, _explained(holds):
        yield model_folder(run_or_folder, step, holds)


def being_read(held_file: Path) -> UserError:
    """The error where the folder of a held file should be deleted or moved."""
    return UserError(
        f"{held_file.parent.name} is being read by another command",
        where=str(held_file.parent),
        fix="wait until that command has ended, or stop it, then run this again",
    )


@contextmanager
def _explained(holds: HeldFiles) -> Iterator[None]:
    """An error becomes one about the deletion of a held folder where that has happened.

    The lock prevents it, but for file systems without locks, for people who delete files, and for a run that went back
    and saved a step again. Of that last one no error may tell: what was read may mix the two.
    """
    try:
        yield
    except Exception as error:
        # A wrong command line stays what it is.
        is_usage = isinstance(error, UserError) and error.code == 2
        lost_file = None if is_usage else holds.lost()
        if lost_file is None:
            raise
        raise deletion(lost_file.parent) from error
    lost_file = holds.lost()
    if lost_file is not None and lost_file.exists():
        raise deletion(lost_file.parent)

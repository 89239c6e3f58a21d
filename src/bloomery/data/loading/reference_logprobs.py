"""Log-probabilities of each stored token under the reference model: float32 files next to the shards."""

from pathlib import Path
from types import TracebackType
from typing import Any, final

import numpy as np

from bloomery.core import seals
from bloomery.core.errors import UserError
from bloomery.core.files import flush_to_disk, write_durably
from bloomery.core.seals import Blocks, digests_of_file, stamped, unstamped

Values = np.ndarray[Any, np.dtype[np.float32]]
Places = np.ndarray[Any, np.dtype[np.int64]]


def seal_of(path: Path) -> Path:
    """The file with the digests of a file of values."""
    return path.with_suffix(".json")


@final
class ReferenceWriter:
    """Writes a file of one value per token of a split; values not added are NaN. The file appears complete, when the
    block ends without error, after its digests. `run`: the run that it belongs to.

    An error or a kill leaves a draft, with which the next block continues.
    """

    def __init__(self, path: Path, tokens: int, run: str = "") -> None:
        self._path, self._draft, self._tokens = path, path.with_name(f".{path.name}.tmp"), tokens
        self._run = run

    def __enter__(self) -> "ReferenceWriter":
        self._path.parent.mkdir(parents=True, exist_ok=True)
        begun = self._draft.is_file() and self._draft.stat().st_size == 4 * self._tokens
        self._values = np.memmap(self._draft, np.float32, "r+" if begun else "w+", shape=(self._tokens,))
        if not begun:
            self._values[:] = np.nan
            self._values.flush()  # after a power loss, values not computed must not read as 0
        return self

    def has(self, stored: Places) -> bool:
        """Whether every token of `stored` was added."""
        return not np.isnan(self._values[stored[stored >= 0]]).any()

    def add(self, stored: Places, values: Values) -> None:
        """Store the log-probabilities `values` of the tokens at `stored` (-1: none), given the tokens before them."""
        known = stored >= 0
        self._values[stored[known]] = values[known]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._values.flush()
        del self._values
        if kind is not None:
            return
        flush_to_disk(self._draft)
        write_durably(seal_of(self._path), stamped({"run": self._run, "blocks": digests_of_file(self._draft)}))
        self._draft.replace(self._path)


@final
class Reference:
    """The values of a split. Each block is checked when it is first read."""

    def __init__(self, path: Path, tokens: int, run: str = "") -> None:
        """Raises UserError when the file or its digests are missing, damaged, or of other shards or another run."""
        self._path, self._fix = path, f"delete {path}; training computes it again"
        size = path.stat().st_size if path.is_file() else -1
        if size != 4 * tokens:
            problem = f"file has {size:,} bytes where the shards' {tokens:,} tokens take 4 each"
            raise UserError(problem if size >= 0 else "file is missing", where=str(path), fix=self._fix)
        try:
            seal = unstamped(seal_of(path))
        except (FileNotFoundError, ValueError) as error:
            raise UserError("its digests are missing or damaged", where=str(seal_of(path)), fix=self._fix) from error
        if seal.get("run") != run:
            raise UserError("file belongs to another run", where=str(path), fix=self._fix)
        self._values = np.memmap(path, np.float32, "r")
        self._blocks = Blocks(self._values.data, tuple(seal["blocks"]), path, fix=self._fix)

    def of(self, stored: Places, loss_mask: Values) -> Values:
        """The values of the labels of a sequence, 0 where the label is masked. Raises UserError for a value that was
        never computed, and for a damaged one.
        """
        places = np.maximum(stored, 0)
        self._blocks.check_blocks(np.unique(4 * places // seals.BLOCK).tolist())
        values: Values = np.where(loss_mask > 0, self._values[places], np.float32(0))
        if not np.isfinite(values).all():
            problem = "file has no value for a loss token: data.packing or data.sequence_length were others"
            raise UserError(problem, where=str(self._path), fix=self._fix)
        return values

"""What the model of the start says of each stored token: float32 log-probabilities beside the shards."""

import os
from pathlib import Path
from types import TracebackType
from typing import Any, final

import numpy as np

from bloomery.errors import UserError

Values = np.ndarray[Any, np.dtype[np.float32]]


@final
class ReferenceWriter:
    """A file of one value a token of a split; what nobody adds is NaN. It appears whole, when the block ends well.

    A block that ended otherwise, or a kill, leaves a draft, and the next block goes on with it.
    """

    def __init__(self, path: Path, tokens: int) -> None:
        self._path, self._draft, self._tokens = path, path.with_name(f".{path.name}.tmp"), tokens

    def __enter__(self) -> "ReferenceWriter":
        self._path.parent.mkdir(parents=True, exist_ok=True)
        begun = self._draft.is_file() and self._draft.stat().st_size == 4 * self._tokens
        self._values = np.memmap(self._draft, np.float32, "r+" if begun else "w+", shape=(self._tokens,))
        if not begun:
            self._values[:] = np.nan
            self._values.flush()  # after a power cut, what was not computed must not read as 0
        return self

    def has(self, stored: np.ndarray[Any, np.dtype[np.int64]]) -> bool:
        """Whether every token of `stored` was added."""
        return not np.isnan(self._values[stored[stored >= 0]]).any()

    def add(self, stored: np.ndarray[Any, np.dtype[np.int64]], values: Values) -> None:
        """The log-probability `values` of the tokens at `stored` (-1: of none), given their pasts."""
        known = stored >= 0
        self._values[stored[known]] = values[known]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._values.flush()
        del self._values
        if kind is not None:
            return
        with self._draft.open("rb") as file:
            os.fsync(file.fileno())
        self._draft.replace(self._path)


def open_reference(path: Path, tokens: int) -> Values:
    """float32 [tokens]. Raises UserError when the file is missing or belongs to other shards."""
    size = path.stat().st_size if path.is_file() else -1
    if size != 4 * tokens:
        problem = "is missing" if size < 0 else f"has {size:,} bytes where the shards' {tokens:,} tokens take 4 each"
        raise UserError(problem, where=str(path), remedy=f"delete it ({path}), and training computes it again")
    return np.memmap(path, np.float32, "r")


def reference_of(values: Values, stored: np.ndarray[Any, np.dtype[np.int64]], learned: Values, where: Path) -> Values:
    """The values of a row's labels, 0 where nothing is learned. Raises UserError for one that was never computed."""
    found: Values = np.where(learned > 0, values[np.maximum(stored, 0)], np.float32(0))
    if not np.isfinite(found).all():
        raise UserError(
            "has no value for a token that is learned: it was computed for another layout or length",
            where=str(where),
            remedy=f"delete it ({where}), and training computes it again",
        )
    return found

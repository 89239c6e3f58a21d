"""Log-probabilities of a split's tokens under the reference model: one float32 per token, in a file of the run."""

from pathlib import Path
from types import TracebackType
from typing import Any, final

import numpy as np

from bloomery.core import files
from bloomery.core.errors import UserError
from bloomery.core.files import (
    Blocks,
    digests_of_file,
    flush_to_disk,
    stamped,
    unstamped,
    write_durably,
)

Scores = np.ndarray[Any, np.dtype[np.float32]]
TokenIndices = np.ndarray[Any, np.dtype[np.int64]]
SCORE_BYTES = 4


def digests_file(path: Path) -> Path:
    """The file with the digests of a file of scores."""
    return path.with_suffix(".json")


@final
class ReferenceWriter:
    """Writes one score per token of a split; a token without a score has NaN.

    The file appears complete, after its digests, when the block ends without error. An error or a kill leaves a draft,
    with which the next block continues. `run` is the id of the run that the file belongs to.
    """

    def __init__(self, path: Path, tokens: int, run: str = "") -> None:
        self._path = path
        self._draft = path.with_name(f".{path.name}.tmp")
        self._tokens = tokens
        self._run = run

    def __enter__(self) -> "ReferenceWriter":
        self._path.parent.mkdir(parents=True, exist_ok=True)
        size = SCORE_BYTES * self._tokens
        has_draft = self._draft.is_file() and self._draft.stat().st_size == size
        self._scores = np.memmap(
            self._draft, np.float32, "r+" if has_draft else "w+", shape=(self._tokens,)
        )
        if not has_draft:
            self._scores[:] = np.nan
            self._scores.flush()  # after a power loss, scores not computed must not read as 0
        return self

    def has(self, label_indices: TokenIndices) -> bool:
        """Whether every one of these tokens (-1: none) has a score."""
        return not np.isnan(self._scores[label_indices[label_indices >= 0]]).any()

    def add(self, label_indices: TokenIndices, scores: Scores) -> None:
        """Store the scores of these tokens (-1: none), given the tokens before them."""
        is_stored = label_indices >= 0
        self._scores[label_indices[is_stored]] = scores[is_stored]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._scores.flush()
        del self._scores
        if kind is not None:
            return
        flush_to_disk(self._draft)
        digests = {"run": self._run, "blocks": digests_of_file(self._draft)}
        write_durably(digests_file(self._path), stamped(digests))
        self._draft.replace(self._path)


@final
class ReferenceScores:
    """The scores of a split. Each block of the file is checked when it is first read."""

    def __init__(self, path: Path, tokens: int, run: str = "") -> None:
        """Raises UserError when the file or its digests are missing, damaged, or of other shards or another run."""
        self._path = path
        self._fix = f"delete {path}; training computes it again"
        self._refuse_other_size(tokens)
        try:
            digests = unstamped(digests_file(path))
        except (FileNotFoundError, ValueError) as error:
            raise UserError(
                "its digests are missing or damaged", where=str(digests_file(path)), fix=self._fix
            ) from error
        if digests.get("run") != run:
            raise UserError("file belongs to another run", where=str(path), fix=self._fix)
        self._scores = np.memmap(path, np.float32, "r")
        self._blocks = Blocks(self._scores.data, tuple(digests["blocks"]), path, fix=self._fix)

    def _refuse_other_size(self, tokens: int) -> None:
        if not self._path.is_file():
            raise UserError("file is missing", where=str(self._path), fix=self._fix)
        size = self._path.stat().st_size
        if size != SCORE_BYTES * tokens:
            problem = f"file has {size:,} bytes where the shards' {tokens:,} tokens take 4 each"
            raise UserError(problem, where=str(self._path), fix=self._fix)

    def of_labels(self, label_indices: TokenIndices, loss_mask: Scores) -> Scores:
        """The scores of a sequence's labels [T], 0 where the label is masked.

        Raises UserError for a score that was never computed, and for a damaged one.
        """
        indices = np.maximum(label_indices, 0)
        blocks = np.unique(SCORE_BYTES * indices // files.BLOCK)
        self._blocks.check_blocks(blocks.tolist())
        scores: Scores = np.where(loss_mask > 0, self._scores[indices], np.float32(0))
        if not np.isfinite(scores).all():
            problem = "file has no value for a loss token: data.packing or data.sequence_length were others"
            raise UserError(problem, where=str(self._path), fix=self._fix)
        return scores

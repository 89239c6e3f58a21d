"""Rows of a split: where each begins, and what of it is learned.

packed  the stream of a source's documents cut every T positions; a row knows its documents: attention keeps them apart
padded  one document a row, cut at T
fixed   the stream cut every T positions, documents not kept apart

A position is learned when its label, the next token of the stream, belongs to the same document (fixed: to the same
source).
"""

from dataclasses import dataclass
from typing import Any, Literal, final

import numpy as np

from bloomery.data.shards import Split

Layout = Literal["packed", "padded", "fixed"]
Ids = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Row:
    """int64 and float32 arrays [T]; see loader.Batch."""

    tokens: Ids
    labels: Ids
    weights: np.ndarray[Any, np.dtype[np.float32]]
    positions: Ids
    documents: Ids


def part_rows(tokens: int, documents: int, *, sequence_length: int, layout: Layout) -> int:
    """Rows of one source. The last token has no label, so that it takes no position of its own."""
    return documents if layout == "padded" else -(-max(tokens - 1, 0) // sequence_length)


@final
class Rows:
    """Row `index` of part `part` of a split, padded with `pad_id` to `sequence_length`."""

    def __init__(self, split: Split, *, sequence_length: int, layout: Layout, pad_id: int | None) -> None:
        self._split, self._length, self._layout = split, sequence_length, layout
        self._pad_id = pad_id or 0
        self.counts = [
            part_rows(p.tokens, p.documents, sequence_length=sequence_length, layout=layout) for p in split.record.parts
        ]

    def read(self, part: int, index: int) -> Row:
        assert 0 <= index < self.counts[part]
        if self._layout == "padded":
            return self._document_row(self._split.part_starts[part][1] + index)
        return self._stream_row(part, index)

    def empty(self) -> Row:
        """A row of padding."""
        return self._row(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64))

    def _document_row(self, document: int) -> Row:
        start, end = int(self._split.bounds[document]), int(self._split.bounds[document + 1])
        count = min(end - start, self._length + 1)
        ids = self._split.tokens[start : start + count]
        return self._row(ids, np.zeros(count, np.int64), np.zeros(count, np.int64))

    def _stream_row(self, part: int, index: int) -> Row:
        first, end = self._split.part_starts[part][0], self._split.part_starts[part + 1][0]
        start = first + index * self._length
        ids = self._split.tokens[start : min(start + self._length + 1, end)]
        if self._layout == "fixed":
            return self._row(ids, np.zeros(len(ids), np.int64), np.zeros(len(ids), np.int64))
        return self._row(ids, *self._documents(start, len(ids)))

    def _documents(self, start: int, count: int) -> tuple[Ids, Ids]:
        """Number of the document of each token, from 0 in this row, and where in the row that document begins."""
        bounds = self._split.bounds
        first = int(np.searchsorted(bounds, start, side="right")) - 1
        last = int(np.searchsorted(bounds, start + count - 1, side="right"))
        inner = np.asarray(bounds[first + 1 : last]).astype(np.int64) - start
        begins = np.concatenate([np.zeros(1, np.int64), inner])
        numbers = np.searchsorted(begins, np.arange(count), side="right") - 1
        return numbers, begins[numbers]

    def _row(self, ids: Ids, documents: Ids, begins: Ids) -> Row:
        """One more token than positions where the stream goes on; the rest is padding (document -1, weight 0)."""
        count, length = max(min(len(ids) - 1, self._length), 0), self._length
        tokens = np.full(length, self._pad_id, np.int64)
        labels, positions = np.full(length, self._pad_id, np.int64), np.zeros(length, np.int64)
        numbers, weights = np.full(length, -1, np.int64), np.zeros(length, np.float32)
        tokens[:count], labels[:count] = ids[:count], ids[1 : count + 1]
        numbers[:count], positions[:count] = documents[:count], np.arange(count) - begins[:count]
        weights[:count] = documents[1 : count + 1] == documents[:count]
        return Row(tokens, labels, weights, positions, numbers)

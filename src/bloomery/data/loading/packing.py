"""Rows of a split: where each begins, and what of it is learned.

Of plain text:
packed  the stream of a source's documents cut every T positions; a row knows its documents: attention keeps them apart
padded  one document a row, cut at T
fixed   the stream cut every T positions, documents not kept apart

Of structured text (conversations, pairs), which is never cut in the middle: see fitting
packed  as many as fit, chosen best-fit; attention keeps them apart, positions begin anew
padded  one a row; both answers of a pair share theirs
fixed   as of plain text; for conversations alone

A row is of one source. A source of text beside conversations has the rows that it has alone.

A position is learned when its label, the next token of the stream, belongs to the same document (fixed: to the same
source) and, in structured text, is marked as learned.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

import numpy as np

from bloomery.core.errors import UserError
from bloomery.data.shards.format import DOCUMENTS_PER_UNIT, Manifest, Split

Ids = np.ndarray[Any, np.dtype[np.int64]]
_BITS = 10  # of a word of _Rooms: two small integers are faster to search than one large


@final
class _FreeSpace:
    """Rows by how much room they have, and the least room that is enough, in O(capacity / 2^20)."""

    def __init__(self, capacity: int) -> None:
        self._sequences: list[list[int]] = [[] for _ in range(capacity + 1)]
        self._words = [0] * ((capacity >> _BITS) + 1)  # bit r of word w: a row has room (w << _BITS) + r
        self._used = 0  # bit w: word w is not 0

    def put(self, room: int, row: int) -> None:
        if not self._sequences[room]:
            word = room >> _BITS
            self._words[word] |= 1 << (room & (1 << _BITS) - 1)
            self._used |= 1 << word
        self._sequences[room].append(row)

    def take(self, length: int) -> tuple[int, int] | None:
        """A row with the least room of at least `length`, and that room."""
        word = length >> _BITS
        low = length & (1 << _BITS) - 1
        bits = self._words[word] >> low << low
        if not bits:
            later = self._used >> word + 1 << word + 1
            if not later:
                return None
            word = _lowest(later)
            bits = self._words[word]
        room = (word << _BITS) + _lowest(bits)
        row = self._sequences[room].pop()
        if not self._sequences[room]:
            self._words[word] ^= 1 << (room & (1 << _BITS) - 1)
            if not self._words[word]:
                self._used ^= 1 << word
        return row, room


def _lowest(bits: int) -> int:
    """The number of the lowest bit that is set."""
    return (bits & -bits).bit_length() - 1


def best_fit(lengths: Ids, capacity: int) -> Ids:
    """The row of each text: longest first (of equal ones the first), each into the row that it leaves least room in
    (of equal ones the latest), a new one when it fits nowhere. O(n log n); the rows need at most 11/9 of the fewest
    possible and 6/9 of one more (Dosa 2007).

    `lengths`: each from 1 to `capacity`.
    """
    assert not len(lengths) or 1 <= lengths.min() <= lengths.max() <= capacity
    rooms, rows = _FreeSpace(capacity), 0
    found = np.zeros(len(lengths), np.int64)
    order = np.argsort(-lengths, kind="stable")
    for text, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        place = rooms.take(length)
        if place is None:
            place = rows, capacity
            rows += 1
        row, room = place
        found[text] = row
        if room > length:
            rooms.put(room - length, row)
    return found


@dataclass(frozen=True)
class PackedSource:
    """`units` in the order of the rows; those of row r are starts[r] up to starts[r + 1]. `lengths` [units of the
    source, answers]: what is kept of each text.
    """

    units: Ids
    starts: Ids
    lengths: Ids
    truncated: int  # units that lost their end
    cut: int  # tokens that these lost
    dropped: int  # units that were longer, and of which nothing learned was left
    all_masked: int  # units that hold nothing to learn at any length

    @property
    def rows(self) -> int:
        return len(self.starts) - 1


def pack_source(split: Split, part: int, *, sequence_length: int, layout: Literal["packed", "padded"]) -> PackedSource:
    """The rows of one source of a structured split. Deterministic; a million units in about a second."""
    (_, begin), (_, end) = split.part_starts[part], split.part_starts[part + 1]
    answers = DOCUMENTS_PER_UNIT[split.kind]
    bounds = np.asarray(split.bounds[begin : end + 1]).astype(np.int64)
    whole = np.diff(bounds).reshape(-1, answers)
    first = np.zeros(end - begin, np.int64) if split.first is None else np.asarray(split.first[begin:end], np.int64)
    return pack_units(whole, first.reshape(-1, answers), sequence_length=sequence_length, layout=layout)


def pack_units(whole: Ids, first: Ids, *, sequence_length: int, layout: Literal["packed", "padded"]) -> PackedSource:
    """`whole`: tokens of each text [units, answers]; `first`: where in each the first learned token is."""
    lengths = truncated_lengths(whole, sequence_length)
    learns = (first < whole).all(1)
    kept = np.flatnonzero((first < lengths).all(1))
    shorter = lengths[kept] < whole[kept]
    rows = np.arange(len(kept))
    if layout == "packed":
        rows = best_fit(lengths[kept].sum(1), sequence_length)
    order = np.argsort(rows, kind="stable")
    count = int(rows.max()) + 1 if len(rows) else 0
    return PackedSource(
        units=kept[order],
        starts=np.searchsorted(rows[order], np.arange(count + 1)),
        lengths=lengths,
        truncated=int(shorter.any(1).sum()),
        cut=int((whole[kept] - lengths[kept]).sum()),
        dropped=int(learns.sum()) - len(kept),
        all_masked=int((~learns).sum()),
    )


def truncated_lengths(whole: Ids, sequence_length: int) -> Ids:
    """What a row keeps of each text of a unit, from its start."""
    if whole.shape[1] == 1:
        return np.minimum(whole, sequence_length)
    return np.minimum(whole, np.maximum(sequence_length // 2, sequence_length - whole[:, ::-1]))


Layout = Literal["packed", "padded", "fixed"]


@dataclass(frozen=True)
class PackedSequence:
    """int64 and float32 arrays [T]; see loader.Batch. `stored`: which token of the split a label is, -1 where the
    label belongs to another document; `kto_labels`: of the documents, of kto alone.
    """

    tokens: Ids
    labels: Ids
    loss_mask: np.ndarray[Any, np.dtype[np.float32]]
    positions: Ids
    documents: Ids
    stored: Ids
    kto_labels: Ids | None = None


@dataclass(frozen=True)
class _Span:
    """Tokens that a row is made of, one more than it has positions: number and begin (in the row) of each one's
    document, its place in the split, and whether it is learned.
    """

    ids: Ids
    documents: Ids
    begins: Ids
    places: Ids
    loss_mask: np.ndarray[Any, np.dtype[np.bool_]] | None = None
    kto_labels: Ids | None = None


def count_plain_sequences(tokens: int, documents: int, *, sequence_length: int, layout: Layout) -> int:
    """Rows of one source of plain text. The last token has no label, so that it takes no position of its own."""
    return documents if layout == "padded" else -(-max(tokens - 1, 0) // sequence_length)


def pairs_need_packing() -> UserError:
    return UserError(
        "the layout fixed cuts the text anywhere, and a pair must stay in one row",
        where="data.layout",
        fix="set data.packing=true",
    )


@dataclass(frozen=True)
class SequenceCounts:
    """Rows of each source, and of structured text what was cut and dropped."""

    counts: list[int]
    packed: list[PackedSource]


@functools.lru_cache(maxsize=4)  # a run asks several times before it begins
def count_sequences(folder: Path, manifest: Manifest, *, sequence_length: int, layout: Layout) -> SequenceCounts:
    """Of the train split. Raises UserError as Rows does."""
    if manifest.kind != "text":
        split = Split(folder, manifest, "train")
        rows = PackedSequences(split, sequence_length=sequence_length, layout=layout, pad_id=manifest.pad_id)
        return SequenceCounts(rows.counts, rows.packed)
    parts = manifest.train.parts
    counts = [
        count_plain_sequences(p.tokens, p.documents, sequence_length=sequence_length, layout=layout) for p in parts
    ]
    return SequenceCounts(counts, [])


@final
class PackedSequences:
    """Row `index` of part `part` of a split, padded with `pad_id` to `sequence_length`.

    `packed` says for each source of structured text what was cut and dropped. Raises UserError for a layout that cuts
    pairs.
    """

    def __init__(self, split: Split, *, sequence_length: int, layout: Layout, pad_id: int | None) -> None:
        self._split, self._length, self._layout = split, sequence_length, layout
        self._pad_id = pad_id or 0
        parts = split.record.parts
        if layout == "fixed" and DOCUMENTS_PER_UNIT[split.kind] > 1:
            raise pairs_need_packing()
        self._packed_sources: dict[int, PackedSource] = {}
        if layout != "fixed" and split.kind != "text":
            structured = [number for number, part in enumerate(parts) if not part.plain]
            self._packed_sources = {
                number: pack_source(split, number, sequence_length=sequence_length, layout=layout)
                for number in structured
            }
        self.packed = list(self._packed_sources.values())
        self.counts = [
            self._packed_sources[number].rows
            if number in self._packed_sources
            else count_plain_sequences(p.tokens, p.documents, sequence_length=sequence_length, layout=layout)
            for number, p in enumerate(parts)
        ]

    def read(self, part: int, index: int) -> PackedSequence:
        assert 0 <= index < self.counts[part]
        if part in self._packed_sources:
            return self._row(self._packed(part, index))
        if self._layout == "padded":
            return self._document_row(self._split.part_starts[part][1] + index)
        return self._stream_row(part, index)

    def empty(self) -> PackedSequence:
        """A row of padding."""
        none = np.zeros(0, np.int64)
        kto_labels = none if self._split.kind == "kto" else None
        return self._row(_Span(none, none, none, none, None, kto_labels))

    def _packed(self, part: int, index: int) -> _Span:
        packed, answers = self._packed_sources[part], DOCUMENTS_PER_UNIT[self._split.kind]
        units = packed.units[packed.starts[index] : packed.starts[index + 1]]
        numbers = (units[:, None] * answers + np.arange(answers)).ravel() + self._split.part_starts[part][1]
        sizes = packed.lengths[units].ravel()
        starts = np.asarray(self._split.bounds[numbers]).astype(np.int64)
        ends = np.cumsum(sizes)
        documents = np.repeat(np.arange(len(sizes)), sizes)
        begins = np.repeat(ends - sizes, sizes)
        places = np.arange(len(documents)) - begins + np.repeat(starts, sizes)
        texts = list(zip(starts.tolist(), (starts + sizes).tolist(), strict=True))
        ids = np.concatenate([self._split.tokens[start:end] for start, end in texts])
        assert self._split.loss_mask is not None
        loss_mask = np.concatenate([self._split.loss_mask[start:end] for start, end in texts]) > 0
        kto_labels = None
        if self._split.kto_labels is not None:
            kto_labels = np.repeat(np.asarray(self._split.kto_labels[numbers]).astype(np.int64), sizes)
        return _Span(
            ids=np.append(ids, self._pad_id),  # the last position has a label, too, of another document
            documents=np.append(documents, -1),
            begins=np.append(begins, 0),
            places=np.append(places, -1),
            loss_mask=np.append(loss_mask, False),
            kto_labels=kto_labels,
        )

    def _document_row(self, document: int) -> PackedSequence:
        start, end = int(self._split.bounds[document]), int(self._split.bounds[document + 1])
        count = min(end - start, self._length + 1)
        none = np.zeros(count, np.int64)
        return self._row(_Span(self._split.tokens[start : start + count], none, none, start + np.arange(count)))

    def _stream_row(self, part: int, index: int) -> PackedSequence:
        first, end = self._split.part_starts[part][0], self._split.part_starts[part + 1][0]
        start = first + index * self._length
        stop = min(start + self._length + 1, end)
        ids, places = self._split.tokens[start:stop], np.arange(start, stop)
        loss_mask = None if self._split.loss_mask is None else self._split.loss_mask[start:stop] > 0
        if self._layout == "fixed":
            none = np.zeros(len(ids), np.int64)
            return self._row(_Span(ids, none, none, places, loss_mask))
        return self._row(_Span(ids, *self._documents(start, len(ids)), places, loss_mask))

    def _documents(self, start: int, count: int) -> tuple[Ids, Ids]:
        """Number of the document of each token, from 0 in this row, and where in the row that document begins."""
        bounds = self._split.bounds
        first = int(np.searchsorted(bounds, start, side="right")) - 1
        last = int(np.searchsorted(bounds, start + count - 1, side="right"))
        inner = np.asarray(bounds[first + 1 : last]).astype(np.int64) - start
        begins = np.concatenate([np.zeros(1, np.int64), inner])
        numbers = np.searchsorted(begins, np.arange(count), side="right") - 1
        return numbers, begins[numbers]

    def _row(self, of: _Span) -> PackedSequence:
        """One more token than positions where the stream goes on; the rest is padding (document -1, weight 0)."""
        count, length = max(min(len(of.ids) - 1, self._length), 0), self._length

        def padded(values: Ids, fill: int) -> Ids:
            row = np.full(length, fill, np.int64)
            row[:count] = values[:count]
            return row

        together = of.documents[1 : count + 1] == of.documents[:count]
        loss_mask = np.zeros(length, np.float32)
        loss_mask[:count] = together if of.loss_mask is None else together & of.loss_mask[1 : count + 1]
        return PackedSequence(
            tokens=padded(of.ids, self._pad_id),
            labels=padded(of.ids[1:], self._pad_id),
            loss_mask=loss_mask,
            positions=padded(np.arange(count) - of.begins[:count], 0),
            documents=padded(of.documents, -1),
            stored=padded(np.where(together, of.places[1 : count + 1], -1), -1),
            kto_labels=None if of.kto_labels is None else padded(of.kto_labels, 0),
        )

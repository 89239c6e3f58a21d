"""Sample packing: the sequences of a split, their document masking and their loss mask.

A split has sources, which its record calls parts, one after the other. The units of a source are documents of plain
text, conversations, or pairs; the split stores each text of a unit as a document, two for a pair. A sequence has
`sequence_length` (T) tokens of one source. Its layout follows from data.packing and data.document_masking.

Plain text, the units of which may be cut anywhere:
packed  the concatenated documents of a source, cut every T tokens; no attention across documents
padded  one document per sequence, cut at T (packing: false)
fixed   as packed, with attention across documents, and positions that run on (document_masking: false)

Conversations and pairs:
packed  whole units, as many per sequence as fit (best fit); no attention across them, positions restart at 0
padded  one unit per sequence; both responses of a pair share it
fixed   as for plain text; not for pairs

Packed and padded cut a unit that is longer than a sequence at its end. A source of plain text in a dataset of
conversations has the sequences that it has alone.

The loss mask is 1 where the label, the next token, belongs to the same document (fixed: the same source) and, in
conversations and pairs, to a text that is trained on.
"""

import functools
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, final

import numpy as np

from bloomery.core.errors import UserError
from bloomery.data.shards import DOCUMENTS_PER_UNIT, Manifest, Split

Ids = np.ndarray[Any, np.dtype[np.int64]]
Layout = Literal["packed", "padded", "fixed"]
NO_EXTRAS: Mapping[str, Ids] = MappingProxyType({})


@dataclass(frozen=True)
class PackedSequence:
    """int64 and float32 arrays [T]; see Batch. `label_indices`: where each label stands among the split's tokens, by
    which scores of a reference model are found; -1 where it belongs to another document.
    """

    tokens: Ids
    labels: Ids
    loss_mask: np.ndarray[Any, np.dtype[np.float32]]
    positions: Ids
    documents: Ids
    label_indices: Ids
    extras: Mapping[str, Ids]
    pictures: tuple[int, ...] = ()  # their numbers in the split, in the order of their tokens


@dataclass(frozen=True)
class PackedSource:
    """The packing of a source: sequence s holds the conversations or pairs units[starts[s]:starts[s + 1]].
    `lengths` [units of the source, texts per unit]: the tokens kept of each text.
    """

    units: Ids
    starts: Ids
    lengths: Ids
    truncated_units: int
    truncated_tokens: int
    dropped_units: (
        int  # longer than a sequence; the part that fits has no loss token, or is no part
    )
    uncut_units: int  # of these, those that are never cut, as they have pictures
    all_masked_units: int  # without a loss token at any length

    @property
    def sequences(self) -> int:
        return len(self.starts) - 1


@final
class PackedSequences:
    """Sequence `index` of source `part` of a split, padded with `pad_id` to `sequence_length`.

    `counts`: the sequences of each source. `packed_sources`: how those of conversations and pairs are packed, by their
    number. Raises UserError for a layout that cuts pairs.
    """

    def __init__(
        self, split: Split, *, sequence_length: int, layout: Layout, pad_id: int | None
    ) -> None:
        self._split = split
        self._length = sequence_length
        self._layout = layout
        self._pad_id = pad_id or 0  # any token will do: padding is seen by padding alone
        if layout == "fixed" and DOCUMENTS_PER_UNIT[split.kind] > 1:
            raise pairs_need_packing()
        if layout == "fixed" and split.pictures is not None:
            raise pictures_need_packing()

        # Conversations and pairs are placed now, as only that tells how many sequences they fill.
        # Plain text is cut every T tokens, so that its sequences are found when they are read.
        self.packed_sources: dict[int, PackedSource] = {}
        self.counts = list[int]()
        for number, part in enumerate(split.record.parts):
            if layout == "fixed" or split.kind == "text" or part.plain:
                count = count_plain_sequences(
                    part.tokens, part.documents, sequence_length=sequence_length, layout=layout
                )
            else:
                packed_source = pack_source(
                    split, number, sequence_length=sequence_length, layout=layout
                )
                self.packed_sources[number] = packed_source
                count = packed_source.sequences
            self.counts.append(count)

    def read(self, part: int, index: int) -> PackedSequence:
        assert 0 <= index < self.counts[part]
        if part in self.packed_sources:
            return self._read_units(part, index)
        return self._read_cut_text(part, index)

    def padding(self) -> PackedSequence:
        """A sequence of padding alone, with which the last batch of a split is filled up."""
        no_tokens = np.zeros(0, np.int64)
        extras = {"kto_labels": no_tokens} if self._split.kind == "kto" else {}
        return self._sequence(no_tokens, no_tokens, no_tokens, no_tokens, extras=extras)

    def _read_cut_text(self, part: int, index: int) -> PackedSequence:
        """A sequence of a source that is cut anywhere."""
        split = self._split
        # Padded, a sequence is one document; else the next T tokens of the source.
        (first_token, first_document) = split.part_starts[part]
        if self._layout == "padded":
            document = first_document + index
            start, end = (int(bound) for bound in split.bounds[document : document + 2])
        else:
            start = first_token + index * self._length
            (end, _) = split.part_starts[part + 1]

        # One token more than positions: the label of the last one.
        stop = min(start + self._length + 1, end)
        # Only the packed layout separates the documents of a sequence.
        if self._layout == "packed":
            documents, document_starts = self._documents(start, stop - start)
        else:
            documents = document_starts = np.zeros(stop - start, np.int64)
        is_trained = None if split.loss_mask is None else split.loss_mask[start:stop] > 0
        return self._sequence(
            split.tokens[start:stop],
            documents,
            document_starts,
            np.arange(start, stop),
            is_trained,
        )

    def _documents(self, start: int, count: int) -> tuple[Ids, Ids]:
        """For `count` tokens of the split from `start` on: the document of each, numbered from 0 in this sequence, and
        where in it that document starts. One that began in an earlier sequence starts at 0 here: nothing of it is seen.
        """
        bounds = self._split.bounds
        first_document = int(np.searchsorted(bounds, start, side="right")) - 1
        last_document = int(np.searchsorted(bounds, start + count - 1, side="right"))
        later_starts = np.asarray(bounds[first_document + 1 : last_document]).astype(np.int64)
        starts = np.concatenate([np.zeros(1, np.int64), later_starts - start])
        numbers = np.searchsorted(starts, np.arange(count), side="right") - 1
        return numbers, starts[numbers]

    def _read_units(self, part: int, index: int) -> PackedSequence:
        """A sequence of whole conversations or pairs."""
        split = self._split
        packed_source = self.packed_sources[part]
        # The documents of the sequence's units, and where the tokens kept of each stand in the split.
        texts_per_unit = DOCUMENTS_PER_UNIT[split.kind]
        units = packed_source.units[packed_source.starts[index] : packed_source.starts[index + 1]]
        (_, first_document) = split.part_starts[part]
        documents_of_units = units[:, None] * texts_per_unit + np.arange(texts_per_unit)
        document_numbers = documents_of_units.ravel() + first_document
        sizes = packed_source.lengths[units].ravel()
        starts = np.asarray(split.bounds[document_numbers]).astype(np.int64)
        ranges = list(zip(starts.tolist(), (starts + sizes).tolist(), strict=True))

        # Of each token: its text, numbered from 0, where that starts in the sequence, and its index in the split.
        ends_in_sequence = np.cumsum(sizes)
        documents = np.repeat(np.arange(len(sizes)), sizes)
        document_starts = np.repeat(ends_in_sequence - sizes, sizes)
        indices = np.arange(len(documents)) - document_starts + np.repeat(starts, sizes)
        tokens = np.concatenate([split.tokens[start:end] for start, end in ranges])
        assert split.loss_mask is not None
        is_trained = np.concatenate([split.loss_mask[start:end] for start, end in ranges]) > 0
        extras = dict[str, Ids]()
        if split.kto_labels is not None:
            label_of_text = np.asarray(split.kto_labels[document_numbers]).astype(np.int64)
            extras["kto_labels"] = np.repeat(label_of_text, sizes)

        # Cut text goes on after a sequence, with the label of its last position. Nothing goes on after whole units: a
        # token of no document stands in for that label.
        return self._sequence(
            np.append(tokens, self._pad_id),
            np.append(documents, -1),
            np.append(document_starts, 0),
            np.append(indices, -1),
            np.append(is_trained, False),
            extras,
            self._pictures(document_numbers.tolist()),
        )

    def _pictures(self, documents: Sequence[int]) -> tuple[int, ...]:
        pictures = self._split.pictures
        if pictures is None:
            return ()
        return tuple(number for document in documents for number in pictures.of_document(document))

    def _sequence(
        self,
        tokens: Ids,
        documents: Ids,
        document_starts: Ids,
        indices: Ids,
        is_trained: np.ndarray[Any, np.dtype[np.bool_]] | None = None,
        extras: Mapping[str, Ids] = NO_EXTRAS,
        pictures: tuple[int, ...] = (),
    ) -> PackedSequence:
        """The sequence of these tokens, of which the last is a label only. The positions left are padding: document -1,
        loss mask 0.

        Of each token: the number of its document and where that starts in the sequence, its index in the split, and
        whether it is trained on (None: every one).
        """
        length = self._length
        count = max(len(tokens) - 1, 0)

        def fill_up(values: Ids, padding: int) -> Ids:
            filled = np.full(length, padding, np.int64)
            filled[:count] = values[:count]
            return filled

        # A label counts where it continues the document of its position, and is trained on.
        same_document = documents[1 : count + 1] == documents[:count]
        has_loss = same_document
        if is_trained is not None:
            has_loss = same_document & is_trained[1 : count + 1]
        loss_mask = np.zeros(length, np.float32)
        loss_mask[:count] = has_loss
        return PackedSequence(
            tokens=fill_up(tokens, self._pad_id),
            labels=fill_up(tokens[1:], self._pad_id),
            loss_mask=loss_mask,
            positions=fill_up(np.arange(count) - document_starts[:count], 0),
            documents=fill_up(documents, -1),
            label_indices=fill_up(np.where(same_document, indices[1 : count + 1], -1), -1),
            extras={name: fill_up(values, 0) for name, values in extras.items()},
            pictures=pictures,
        )


def pictures_need_packing() -> UserError:
    problem = (
        "without document masking the dataset is cut at any token, and a picture must stay whole"
    )
    return UserError(problem, where="data.document_masking", fix="set data.document_masking=true")


def pairs_need_packing() -> UserError:
    problem = "without document masking the dataset is cut at any token, and a pair must stay in one sequence"
    return UserError(problem, where="data.document_masking", fix="set data.document_masking=true")


@dataclass(frozen=True)
class SequenceCounts:
    """Sequences of each source; of conversations and pairs also how they are packed."""

    counts: list[int]
    packed: list[PackedSource]


@functools.lru_cache(maxsize=4)  # a run asks several times before it begins
def count_sequences(
    folder: Path, manifest: Manifest, *, sequence_length: int, layout: Layout
) -> SequenceCounts:
    """The sequences of the train split. Raises UserError as PackedSequences does.

    Each prompt counts as one: how many sequences its completions fill is known when they are generated.
    """
    if manifest.kind == "prompts":
        return SequenceCounts([part.documents for part in manifest.train.parts], [])
    if manifest.kind != "text":
        split = Split(folder, manifest, "train")
        sequences = PackedSequences(
            split, sequence_length=sequence_length, layout=layout, pad_id=manifest.pad_id
        )
        return SequenceCounts(sequences.counts, list(sequences.packed_sources.values()))
    # The manifest is enough for plain text: no shard is opened.
    counts = [
        count_plain_sequences(
            part.tokens, part.documents, sequence_length=sequence_length, layout=layout
        )
        for part in manifest.train.parts
    ]
    return SequenceCounts(counts, [])


def count_plain_sequences(
    tokens: int, documents: int, *, sequence_length: int, layout: Layout
) -> int:
    """Sequences of one source of plain text. The last token has no label, so that it takes no position of its own."""
    if layout == "padded":
        return documents
    return -(-max(tokens - 1, 0) // sequence_length)


def pack_source(
    split: Split, part: int, *, sequence_length: int, layout: Literal["packed", "padded"]
) -> PackedSource:
    """The sequences of one source of conversations or pairs. Deterministic; a million units in about a second."""
    (_, first_document) = split.part_starts[part]
    (_, last_document) = split.part_starts[part + 1]
    texts_per_unit = DOCUMENTS_PER_UNIT[split.kind]
    # Of each text: its tokens, and the index of its first loss token, which is its length where it has none.
    bounds = np.asarray(split.bounds[first_document : last_document + 1]).astype(np.int64)
    full_lengths = (bounds[1:] - bounds[:-1]).reshape(-1, texts_per_unit)
    first_loss_tokens = np.zeros_like(full_lengths)
    if split.first_loss_tokens is not None:  # a split without documents has no such file
        first_by_text = split.first_loss_tokens[first_document:last_document]
        first_loss_tokens = np.asarray(first_by_text, np.int64).reshape(-1, texts_per_unit)

    stays_whole = None
    if split.pictures is not None:
        has_pictures = split.pictures.are_in(first_document, last_document)
        stays_whole = np.asarray(has_pictures.reshape(-1, texts_per_unit).any(1))
    return pack_units(
        full_lengths,
        first_loss_tokens,
        sequence_length=sequence_length,
        layout=layout,
        stays_whole=stays_whole,
    )


def pack_units(
    full_lengths: Ids,
    first_loss_tokens: Ids,
    *,
    sequence_length: int,
    layout: Literal["packed", "padded"],
    stays_whole: np.ndarray[Any, np.dtype[np.bool_]] | None = None,
) -> PackedSource:
    """The sequences of units, by the tokens of their texts and the index of the first loss token of each, which is its
    length where it has none: both [units, texts per unit].

    `stays_whole` [units]: those that are dropped where they would be cut, as a cut could go through a picture.
    """
    # A unit is packed when every text of it has a loss token in the part that fits: a pair with one
    # masked side has no margin to train on.
    lengths = truncated_lengths(full_lengths, sequence_length)
    has_loss_tokens = (first_loss_tokens < full_lengths).all(1)
    fits = (first_loss_tokens < lengths).all(1)
    would_be_cut = np.zeros_like(fits)
    if stays_whole is not None:
        would_be_cut = has_loss_tokens & stays_whole & (lengths < full_lengths).any(1)
        fits &= ~would_be_cut
    packed_units = np.flatnonzero(fits)
    cut_tokens = full_lengths[packed_units] - lengths[packed_units]

    # Sequences are numbered as they were opened; within one, units keep the order of the source.
    if layout == "packed":
        sequence_of_unit = best_fit(lengths[packed_units].sum(1), sequence_length)
    else:
        sequence_of_unit = np.arange(len(packed_units))
    by_sequence = np.argsort(sequence_of_unit, kind="stable")
    num_sequences = int(sequence_of_unit.max()) + 1 if len(sequence_of_unit) else 0
    return PackedSource(
        units=packed_units[by_sequence],
        starts=np.searchsorted(sequence_of_unit[by_sequence], np.arange(num_sequences + 1)),
        lengths=lengths,
        truncated_units=int((cut_tokens > 0).any(1).sum()),
        truncated_tokens=int(cut_tokens.sum()),
        dropped_units=int(has_loss_tokens.sum()) - len(packed_units),
        uncut_units=int(would_be_cut.sum()),
        all_masked_units=int((~has_loss_tokens).sum()),
    )


def truncated_lengths(full_lengths: Ids, sequence_length: int) -> Ids:
    """Tokens kept of each text of a unit, from its start: [units, texts per unit], as `full_lengths`.

    The two texts of a pair share a sequence. Each may have half of it, and what the other leaves of its half.
    """
    if full_lengths.shape[1] == 1:
        return np.minimum(full_lengths, sequence_length)
    left_by_other = sequence_length - full_lengths[:, ::-1]
    return np.minimum(full_lengths, np.maximum(sequence_length // 2, left_by_other))


def best_fit(lengths: Ids, capacity: int) -> Ids:
    """The sequence of each text by best-fit decreasing: longest first (of equal ones the first), each into the sequence
    where it leaves the least room (of equal ones the one that came to its size last), else into a new one. O(n log n).
    The number of sequences is at most 11/9 of the optimum plus 6/9 (Dosa 2007).

    `lengths`: each from 1 to `capacity`.
    """
    assert not len(lengths) or 1 <= lengths.min() <= lengths.max() <= capacity
    # The numbers of free tokens that sequences have, sorted, each once, and the sequences that have it: the best fit is
    # then one search.
    free_sizes = list[int]()
    sequences_by_free: dict[int, list[int]] = defaultdict(list)
    num_sequences = 0
    sequence_of_text = np.zeros(len(lengths), np.int64)

    longest_first = np.argsort(-lengths, kind="stable")
    sorted_lengths = lengths[longest_first].tolist()
    for text, length in zip(longest_first.tolist(), sorted_lengths, strict=True):
        size_index = bisect_left(free_sizes, length)
        if size_index == len(free_sizes):
            sequence = num_sequences
            free_tokens = capacity
            num_sequences += 1
        else:
            free_tokens = free_sizes[size_index]
            sequence = sequences_by_free[free_tokens].pop()
            if not sequences_by_free[free_tokens]:
                del free_sizes[size_index]
        sequence_of_text[text] = sequence

        # A full sequence takes no other text.
        free_after = free_tokens - length
        if free_after > 0:
            if not sequences_by_free[free_after]:
                insort(free_sizes, free_after)
            sequences_by_free[free_after].append(sequence)
    return sequence_of_text

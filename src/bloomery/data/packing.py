"""Sample packing: the sequences of a split, their document masking and their loss mask.

Layouts of plain text (recipe: data.packing, data.document_masking):
packed  the concatenated documents of a source, cut every T tokens; no attention across documents
padded  one document per sequence, cut at T (packing: false)
fixed   as packed, with attention across documents (document_masking: false)

Layouts of conversations and pairs, which are only ever cut at their end:
packed  as many per sequence as fit (best fit); no attention across them, positions restart at 0
padded  one per sequence; both responses of a pair share it
fixed   as for plain text; not for pairs

A sequence has tokens of one source. Plain text next to conversations is packed as it is without them.

The loss mask is 1 where the label, the next token, belongs to the same document (fixed: the same source) and, in
conversations and pairs, to a text that is trained on.
"""

import functools
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, final

import numpy as np

from bloomery.core.errors import UserError
from bloomery.data.shards import DOCUMENTS_PER_UNIT, Manifest, Split

Ids = np.ndarray[Any, np.dtype[np.int64]]
NO_EXTRAS: Mapping[str, Ids] = MappingProxyType({})


def best_fit(lengths: Ids, capacity: int) -> Ids:
    """The sequence of each text by best-fit decreasing: longest first (of equal ones the first), each into the sequence
    where it leaves the least room (of equal ones the latest), else into a new one. O(n log n). The number of sequences
    is at most 11/9 of the optimum plus 6/9 (Dosa 2007).

    `lengths`: each from 1 to `capacity`.
    """
    assert not len(lengths) or 1 <= lengths.min() <= lengths.max() <= capacity
    # How many free positions a sequence has: each number once, sorted, with the sequences that have
    # it. The best fit is then one search.
    free_sizes = list[int]()
    sequences_by_free: dict[int, list[int]] = defaultdict(list)
    count = 0
    sequence_of_text = np.zeros(len(lengths), np.int64)
    longest_first = np.argsort(-lengths, kind="stable")
    sorted_lengths = lengths[longest_first].tolist()
    for text, length in zip(longest_first.tolist(), sorted_lengths, strict=True):
        smallest_fit = bisect_left(free_sizes, length)
        if smallest_fit == len(free_sizes):
            sequence = count
            free_tokens = capacity
            count += 1
        else:
            free_tokens = free_sizes[smallest_fit]
            sequence = sequences_by_free[free_tokens].pop()
            if not sequences_by_free[free_tokens]:
                del free_sizes[smallest_fit]
        sequence_of_text[text] = sequence
        # A full sequence takes no other text.
        free_after = free_tokens - length
        if free_after > 0:
            if not sequences_by_free[free_after]:
                insort(free_sizes, free_after)
            sequences_by_free[free_after].append(sequence)
    return sequence_of_text


@dataclass(frozen=True)
class PackedSource:
    """The packing of a source: sequence s holds the conversations or pairs units[starts[s]:starts[s + 1]].
    `lengths` [units of the source, texts per unit]: the tokens kept of each text.
    """

    units: Ids
    starts: Ids
    lengths: Ids
    truncated: int  # units cut at their end
    cut: int  # tokens that they lost
    dropped: int  # units longer than a sequence without a loss token in the part that fits
    all_masked: int  # units without a loss token at any length

    @property
    def sequences(self) -> int:
        return len(self.starts) - 1


def pack_source(
    split: Split, part: int, *, sequence_length: int, layout: Literal["packed", "padded"]
) -> PackedSource:
    """The sequences of one source of conversations or pairs. Deterministic; a million units in about a second."""
    (_, first_document) = split.part_starts[part]
    (_, last_document) = split.part_starts[part + 1]
    texts_per_unit = DOCUMENTS_PER_UNIT[split.kind]
    # Of each text: its tokens, and the index of its first loss token.
    bounds = np.asarray(split.bounds[first_document : last_document + 1]).astype(np.int64)
    full_lengths = (bounds[1:] - bounds[:-1]).reshape(-1, texts_per_unit)
    if split.first_loss_tokens is None:
        first_by_text = np.zeros(last_document - first_document, np.int64)
    else:
        of_part = split.first_loss_tokens[first_document:last_document]
        first_by_text = np.asarray(of_part, np.int64)
    first_loss_tokens = first_by_text.reshape(-1, texts_per_unit)
    # A unit is packed when every text of it has a loss token in the part that fits: a pair with one
    # masked side has no margin to train on.
    lengths = truncated_lengths(full_lengths, sequence_length)
    trainable = (first_loss_tokens < full_lengths).all(1)
    packed_units = np.flatnonzero((first_loss_tokens < lengths).all(1))
    cut_tokens = full_lengths[packed_units] - lengths[packed_units]
    # Sequences are numbered as they were opened; within one, units keep the order of the source.
    if layout == "packed":
        sequence_of_unit = best_fit(lengths[packed_units].sum(1), sequence_length)
    else:
        sequence_of_unit = np.arange(len(packed_units))
    by_sequence = np.argsort(sequence_of_unit, kind="stable")
    count = int(sequence_of_unit.max()) + 1 if len(sequence_of_unit) else 0
    return PackedSource(
        units=packed_units[by_sequence],
        starts=np.searchsorted(sequence_of_unit[by_sequence], np.arange(count + 1)),
        lengths=lengths,
        truncated=int((cut_tokens > 0).any(1).sum()),
        cut=int(cut_tokens.sum()),
        dropped=int(trainable.sum()) - len(packed_units),
        all_masked=int((~trainable).sum()),
    )


def truncated_lengths(full_lengths: Ids, sequence_length: int) -> Ids:
    """Tokens kept of each text of a unit, from its start: a pair shares the sequence, a short side leaves room."""
    if full_lengths.shape[1] == 1:
        return np.minimum(full_lengths, sequence_length)
    left_by_other = sequence_length - full_lengths[:, ::-1]
    return np.minimum(full_lengths, np.maximum(sequence_length // 2, left_by_other))


Layout = Literal["packed", "padded", "fixed"]


@dataclass(frozen=True)
class PackedSequence:
    """int64 and float32 arrays [T]; see Batch. `label_indices`: where each label stands among the split's tokens, -1
    where it belongs to another document.
    """

    tokens: Ids
    labels: Ids
    loss_mask: np.ndarray[Any, np.dtype[np.float32]]
    positions: Ids
    documents: Ids
    label_indices: Ids
    extras: Mapping[str, Ids]


def count_plain_sequences(
    tokens: int, documents: int, *, sequence_length: int, layout: Layout
) -> int:
    """Sequences of one source of plain text. The last token has no label, so that it takes no position of its own."""
    if layout == "padded":
        return documents
    return -(-max(tokens - 1, 0) // sequence_length)


def pairs_need_packing() -> UserError:
    problem = "without document masking the dataset is cut at any token, and a pair must stay in one sequence"
    return UserError(problem, where="data.document_masking", fix="set data.document_masking=true")


@dataclass(frozen=True)
class SequenceCounts:
    """Sequences of each source; of conversations and pairs also the truncated and dropped ones."""

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
        return SequenceCounts(sequences.counts, sequences.packed)
    counts = [
        count_plain_sequences(
            part.tokens, part.documents, sequence_length=sequence_length, layout=layout
        )
        for part in manifest.train.parts
    ]
    return SequenceCounts(counts, [])


@final
class PackedSequences:
    """Sequence `index` of source `part` of a split, padded with `pad_id` to `sequence_length`.

    `packed`: how each source of conversations or pairs is packed. Raises UserError for a layout that cuts pairs.
    """

    def __init__(
        self, split: Split, *, sequence_length: int, layout: Layout, pad_id: int | None
    ) -> None:
        self._split = split
        self._length = sequence_length
        self._layout = layout
        self._pad_id = pad_id or 0
        if layout == "fixed" and DOCUMENTS_PER_UNIT[split.kind] > 1:
            raise pairs_need_packing()
        # Conversations and pairs are placed now, as only that tells how many sequences they fill.
        # Plain text is cut every T tokens, so that its sequences are found when they are read.
        self._packed_sources: dict[int, PackedSource] = {}
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
                self._packed_sources[number] = packed_source
                count = packed_source.sequences
            self.counts.append(count)
        self.packed = list(self._packed_sources.values())

    def read(self, part: int, index: int) -> PackedSequence:
        assert 0 <= index < self.counts[part]
        if part in self._packed_sources:
            return self._read_packed(part, index)
        return self._read_plain(part, index)

    def padding(self) -> PackedSequence:
        """A sequence of padding alone."""
        no_tokens = np.zeros(0, np.int64)
        extras = {"kto_labels": no_tokens} if self._split.kind == "kto" else {}
        return self._padded(no_tokens, no_tokens, no_tokens, no_tokens, extras=extras)

    def _read_plain(self, part: int, index: int) -> PackedSequence:
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
            documents, begins = self._documents(start, stop - start)
        else:
            documents = begins = np.zeros(stop - start, np.int64)
        trained = None if split.loss_mask is None else split.loss_mask[start:stop] > 0
        return self._padded(
            split.tokens[start:stop], documents, begins, np.arange(start, stop), trained
        )

    def _read_packed(self, part: int, index: int) -> PackedSequence:
        split = self._split
        packed = self._packed_sources[part]
        # The documents of the sequence's units, and where the tokens kept of each stand in the split.
        texts_per_unit = DOCUMENTS_PER_UNIT[split.kind]
        units = packed.units[packed.starts[index] : packed.starts[index + 1]]
        (_, first_document) = split.part_starts[part]
        documents_of_units = units[:, None] * texts_per_unit + np.arange(texts_per_unit)
        document_numbers = documents_of_units.ravel() + first_document
        sizes = packed.lengths[units].ravel()
        starts = np.asarray(split.bounds[document_numbers]).astype(np.int64)
        ranges = list(zip(starts.tolist(), (starts + sizes).tolist(), strict=True))
        # Of each token: its text, numbered from 0, where that begins in the sequence, and its index in the split.
        ends_in_sequence = np.cumsum(sizes)
        documents = np.repeat(np.arange(len(sizes)), sizes)
        begins = np.repeat(ends_in_sequence - sizes, sizes)
        indices = np.arange(len(documents)) - begins + np.repeat(starts, sizes)
        tokens = np.concatenate([split.tokens[start:end] for start, end in ranges])
        assert split.loss_mask is not None
        trained = np.concatenate([split.loss_mask[start:end] for start, end in ranges]) > 0
        extras = dict[str, Ids]()
        if split.kto_labels is not None:
            label_of_text = np.asarray(split.kto_labels[document_numbers]).astype(np.int64)
            extras["kto_labels"] = np.repeat(label_of_text, sizes)
        # The last position also has a label, of another document.
        return self._padded(
            np.append(tokens, self._pad_id),
            np.append(documents, -1),
            np.append(begins, 0),
            np.append(indices, -1),
            np.append(trained, False),
            extras,
        )

    def _documents(self, start: int, count: int) -> tuple[Ids, Ids]:
        """The document of each token, numbered from 0 in this sequence, and where in it that document begins."""
        bounds = self._split.bounds
        first_document = int(np.searchsorted(bounds, start, side="right")) - 1
        last_document = int(np.searchsorted(bounds, start + count - 1, side="right"))
        inner = np.asarray(bounds[first_document + 1 : last_document]).astype(np.int64) - start
        begins = np.concatenate([np.zeros(1, np.int64), inner])
        numbers = np.searchsorted(begins, np.arange(count), side="right") - 1
        return numbers, begins[numbers]

    def _padded(
        self,
        tokens: Ids,
        documents: Ids,
        begins: Ids,
        indices: Ids,
        trained: np.ndarray[Any, np.dtype[np.bool_]] | None = None,
        extras: Mapping[str, Ids] = NO_EXTRAS,
    ) -> PackedSequence:
        """A sequence of tokens, one more than it has positions where the text continues. The rest is padding: document
        -1, mask 0. Of each token: the number of its document and where that begins in the sequence, its index in the
        split, and whether it is trained on (None: every one).
        """
        count = max(min(len(tokens) - 1, self._length), 0)
        length = self._length

        def padded(values: Ids, fill: int) -> Ids:
            filled = np.full(length, fill, np.int64)
            filled[:count] = values[:count]
            return filled

        # A label counts where it continues the document of its position, and is trained on.
        same_document = documents[1 : count + 1] == documents[:count]
        has_loss = same_document
        if trained is not None:
            has_loss = same_document & trained[1 : count + 1]
        loss_mask = np.zeros(length, np.float32)
        loss_mask[:count] = has_loss
        return PackedSequence(
            tokens=padded(tokens, self._pad_id),
            labels=padded(tokens[1:], self._pad_id),
            loss_mask=loss_mask,
            positions=padded(np.arange(count) - begins[:count], 0),
            documents=padded(documents, -1),
            label_indices=padded(np.where(same_document, indices[1 : count + 1], -1), -1),
            extras={name: padded(values, 0) for name, values in extras.items()},
        )

"""Batches of a prepared dataset: index arithmetic from a step's number to its sequences.

With them, log-probabilities of each stored token under the reference model: float32 files next to the shards.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

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
from bloomery.data.packing import Layout, PackedSequence, PackedSequences
from bloomery.data.shards import SplitName, open_split, read_manifest

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
        self._path = path
        self._draft = path.with_name(f".{path.name}.tmp")
        self._tokens = tokens
        self._run = run

    def __enter__(self) -> "ReferenceWriter":
        self._path.parent.mkdir(parents=True, exist_ok=True)
        begun = self._draft.is_file() and self._draft.stat().st_size == 4 * self._tokens
        self._values = np.memmap(
            self._draft, np.float32, "r+" if begun else "w+", shape=(self._tokens,)
        )
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
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._values.flush()
        del self._values
        if kind is not None:
            return
        flush_to_disk(self._draft)
        write_durably(
            seal_of(self._path), stamped({"run": self._run, "blocks": digests_of_file(self._draft)})
        )
        self._draft.replace(self._path)


@final
class Reference:
    """The values of a split. Each block is checked when it is first read."""

    def __init__(self, path: Path, tokens: int, run: str = "") -> None:
        """Raises UserError when the file or its digests are missing, damaged, or of other shards or another run."""
        self._path = path
        self._fix = f"delete {path}; training computes it again"
        size = path.stat().st_size if path.is_file() else -1
        if size != 4 * tokens:
            problem = f"file has {size:,} bytes where the shards' {tokens:,} tokens take 4 each"
            raise UserError(
                problem if size >= 0 else "file is missing", where=str(path), fix=self._fix
            )
        try:
            seal = unstamped(seal_of(path))
        except (FileNotFoundError, ValueError) as error:
            raise UserError(
                "its digests are missing or damaged", where=str(seal_of(path)), fix=self._fix
            ) from error
        if seal.get("run") != run:
            raise UserError("file belongs to another run", where=str(path), fix=self._fix)
        self._values = np.memmap(path, np.float32, "r")
        self._blocks = Blocks(self._values.data, tuple(seal["blocks"]), path, fix=self._fix)

    def of(self, stored: Places, loss_mask: Values) -> Values:
        """The values of the labels of a sequence, 0 where the label is masked. Raises UserError for a value that was
        never computed, and for a damaged one.
        """
        places = np.maximum(stored, 0)
        self._blocks.check_blocks(np.unique(4 * places // files.BLOCK).tolist())
        values: Values = np.where(loss_mask > 0, self._values[places], np.float32(0))
        if not np.isfinite(values).all():
            problem = "file has no value for a loss token: data.packing or data.sequence_length were others"
            raise UserError(problem, where=str(self._path), fix=self._fix)
        return values


_MASK = 2**64 - 1


def mix(*values: int) -> int:
    """64 well-mixed bits of some integers: the finalizer of SplitMix64 (Steele, Lea, Flood 2014), chained."""
    state = 0
    for value in values:
        state = (state ^ (value & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


def feistel(position: int, *, size: int, key: int) -> int:
    """A keyed bijection of 0 .. size - 1: four Feistel rounds over the next even power of two, walked until the
    result is inside.
    """
    assert 0 <= position < size
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    while True:
        left = position >> half
        right = position & low
        for turn in range(4):
            left, right = right, left ^ mix(key, turn, right) & low
        position = left << half | right
        if position < size:
            return position


@dataclass(frozen=True)
class Batch:
    """One micro-batch; every tensor is [B, T].

    `labels[b, t]` is the token after `tokens[b, t]`. `loss_mask` is 1 where you train on that label, and 0 at the end
    of a document and on padding. `positions` count from the start of the document, or of the sequence where a document
    continues from the sequence before. `documents` number the documents of a sequence from 0 (padding: -1).

    Of conversations and pairs, else None: `sequences` number the texts of the micro-batch from 0 (padding: -1); 2i and
    2i + 1 are the chosen and the rejected response of a pair. `kto_labels` are 1 for a desirable response, 0 for an
    undesirable one. `reference` is each label's log-probability under the reference model. `baseline`, one number, is
    the KL term that the rewards of a step are measured from (kto).
    """

    tokens: Tensor  # int64
    labels: Tensor  # int64
    loss_mask: Tensor  # float32
    positions: Tensor  # int64
    documents: Tensor  # int64
    sequences: Tensor | None = None  # int64
    kto_labels: Tensor | None = None  # int64
    reference: Tensor | None = None  # float32
    baseline: Tensor | None = None  # float32, []

    def each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        """The same batch with `change` applied to every tensor."""
        tensors: dict[str, Tensor] = {
            name: tensor for name, tensor in vars(self).items() if tensor is not None
        }
        return Batch(**{name: change(tensor) for name, tensor in tensors.items()})


@dataclass(frozen=True)
class Cursor:
    """The data state of a run: the next sequence is f(seed, consumed)."""

    seed: int
    consumed: int  # sequences


@final
class Loader:
    """Batches of a prepared folder. Sequence i of a run is f(seed, i), whatever the number of ranks.

    An epoch contains a source of weight w floor(w) times, and a fraction w - floor(w) of its sequences once more; the
    fraction changes with the epoch. Raises UserError as `read_manifest` does, and when the split has no sequence.

    `reference`: the file for Batch.reference, which a ReferenceWriter filled from `stored_batches` for `run`.
    """

    def __init__(
        self,
        prepared: Path,
        *,
        sequence_length: int,
        layout: Layout,
        seed: int,
        split: SplitName = "train",
        data_rank: int = 0,
        data_world: int = 1,
        reference: Path | None = None,
        run: str = "",
    ) -> None:
        manifest = read_manifest(prepared)
        opened = open_split(prepared, split, manifest)
        self.kind = manifest.kind
        self.tokens = opened.record.tokens
        self._sequences = PackedSequences(
            opened, sequence_length=sequence_length, layout=layout, pad_id=manifest.pad_id
        )
        self._reference = None if reference is None else Reference(reference, self.tokens, run)
        self._seed = seed
        self._data_rank = data_rank
        self._data_world = data_world
        weights = [part.weight if split == "train" else 1.0 for part in opened.record.parts]
        self._visits = [
            round(count * weight)
            for count, weight in zip(self._sequences.counts, weights, strict=True)
        ]
        self._ends = np.cumsum(self._visits)
        self.sequences = sum(self._visits)
        if self.sequences == 0:
            if not self.tokens:
                fix = "add text, or set data.validation"
                raise UserError(f"the {split} split is empty", where=str(prepared), fix=fix)
            problem = f"no loss tokens in the {split} split: all labels within data.sequence_length are masked"
            fix = "raise data.sequence_length; bloomery prepare RECIPE --check prints the figures"
            raise UserError(problem, where=str(prepared), fix=fix)

    def batch(self, cursor: Cursor, size: int, *, filled: int | None = None) -> Batch:
        """This rank's part of `size` places: every data_world-th, starting with its data_rank.

        The first `filled` places (default: all) hold the next sequences, the others one of padding each: every rank
        computes batches of one shape, whatever number of sequences a step has.
        """
        assert size % self._data_world == 0, (
            f"{size} places cannot be divided by {self._data_world} ranks"
        )
        assert cursor.seed == self._seed, "the cursor belongs to another run"
        end = cursor.consumed + (size if filled is None else filled)
        indices = range(cursor.consumed + self._data_rank, cursor.consumed + size, self._data_world)
        return self._stack(
            [
                self._sequences.read(*self.place(index)) if index < end else self._sequences.empty()
                for index in indices
            ]
        )

    def place(self, index: int) -> tuple[int, int]:
        """(source, sequence in it) of the index-th sequence of the run."""
        epoch, position = divmod(index, self.sequences)
        number = feistel(position, size=self.sequences, key=mix(self._seed, epoch))
        part = int(np.searchsorted(self._ends, number, side="right"))
        count = self._sequences.counts[part]
        turn, place = divmod(number - int(self._ends[part]) + self._visits[part], count)
        if (turn + 1) * count > self._visits[part]:
            place = feistel(place, size=count, key=mix(self._seed, epoch, part + 1))
        return part, place

    def validation_batches(self, sequences: int, limit: int | None = None) -> Iterator[Batch]:
        """This rank's batches of `sequences` sequences in the order of the split. The last one is padded, with loss
        mask 0.

        `limit`: the most sequences, of all ranks together, spread evenly over the split.
        """
        count = min(self.sequences, limit or self.sequences)
        for start in range(0, count, sequences * self._data_world):
            places = (
                start + self._data_rank + self._data_world * offset for offset in range(sequences)
            )
            yield self._stack(
                [
                    self._in_order(place * self.sequences // count)
                    if place < count
                    else self._sequences.empty()
                    for place in places
                ]
            )

    @property
    def stored_sequences(self) -> int:
        """The number of sequences of `stored_batches`, of all ranks together and without padding."""
        return sum(self._sequences.counts)

    def stored_batches(self, sequences: int) -> Iterator[tuple[Batch, Tensor]]:
        """This rank's part of all sequences of the split, once and in order. The int64 [B, T] is the place of each
        label among the split's tokens (-1: none). The last batch is padded.
        """
        counts = np.cumsum(self._sequences.counts)
        for start in range(0, int(counts[-1]), sequences * self._data_world):
            read = list[PackedSequence]()
            for place in (
                start + self._data_rank + self._data_world * offset for offset in range(sequences)
            ):
                part = int(np.searchsorted(counts, place, side="right"))
                index = place - int(counts[part - 1] if part else 0)
                read.append(
                    self._sequences.read(part, index)
                    if part < len(counts)
                    else self._sequences.empty()
                )
            yield (
                self._stack(read),
                torch.from_numpy(np.stack([sequence.stored for sequence in read])),
            )

    def _stack(self, sequences: list[PackedSequence]) -> Batch:
        def stacked(arrays: list[np.ndarray[Any, np.dtype[Any]]]) -> Tensor:
            return torch.from_numpy(np.stack(arrays))

        reference = None
        if self._reference is not None:
            reference = stacked(
                [self._reference.of(row.stored, row.loss_mask) for row in sequences]
            )
        kto_labels = [row.kto_labels for row in sequences if row.kto_labels is not None]
        return Batch(
            tokens=stacked([row.tokens for row in sequences]),
            labels=stacked([row.labels for row in sequences]),
            loss_mask=stacked([row.loss_mask for row in sequences]),
            positions=stacked([row.positions for row in sequences]),
            documents=stacked([row.documents for row in sequences]),
            sequences=stacked(_numbered(sequences)) if self._sequences.packed else None,
            kto_labels=stacked(kto_labels) if self.kind == "kto" else None,
            reference=reference,
        )

    def _in_order(self, number: int) -> PackedSequence:
        part = int(np.searchsorted(self._ends, number, side="right"))
        return self._sequences.read(
            part,
            (number - int(self._ends[part]) + self._visits[part]) % self._sequences.counts[part],
        )


def _numbered(sequences: list[PackedSequence]) -> list[np.ndarray[Any, np.dtype[Any]]]:
    """Documents numbered across all sequences of the batch; padding stays -1."""
    numbers = [sequence.documents for sequence in sequences]
    begins = np.cumsum([0, *(int(each.max()) + 1 for each in numbers[:-1])])
    return [
        np.where(each < 0, -1, each + begin)
        for each, begin in zip(numbers, begins.tolist(), strict=True)
    ]


@final
class Prefetcher:
    """Reads ahead in a thread. `next()` returns the batches from `cursor` on and raises the thread's error.

    `sequences`: places of a batch, of all ranks together. `per_step`: sequences of a step, at whose start `cursor` is;
    its last batch is filled up with padding. Default: every batch is full.
    """

    def __init__(
        self,
        loader: Loader,
        cursor: Cursor,
        *,
        sequences: int,
        per_step: int | None = None,
        depth: int = 2,
        pin_memory: bool = False,
    ) -> None:
        self._loader = loader
        self._cursor = cursor
        self._size = sequences
        self._pin = pin_memory
        self._per_step = sequences if per_step is None else per_step
        self._left_in_step = self._per_step
        self._depth = depth
        self._ahead = deque[Future[Batch]]()

    def __enter__(self) -> "Prefetcher":
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        for _ in range(self._depth):
            self._read_one()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._thread.shutdown(cancel_futures=True)

    def next(self) -> Batch:
        """The next batch; blocks while it is read."""
        batch = self._ahead[0].result()  # a failed one stays and raises again
        self._ahead.popleft()
        self._read_one()
        return batch

    def _read_one(self) -> None:
        cursor = self._cursor
        filled = min(self._size, self._left_in_step)
        self._cursor = Cursor(cursor.seed, cursor.consumed + filled)
        self._left_in_step = self._left_in_step - filled or self._per_step
        self._ahead.append(self._thread.submit(self._read, cursor, filled))

    def _read(self, cursor: Cursor, filled: int) -> Batch:
        batch = self._loader.batch(cursor, self._size, filled=filled)
        return batch.each(Tensor.pin_memory) if self._pin else batch

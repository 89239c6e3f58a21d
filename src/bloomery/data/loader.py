"""Batches of a prepared dataset: index arithmetic from a step's number to its sequences."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from bloomery.core.errors import UserError
from bloomery.data.batch import Batch
from bloomery.data.order import Cursor, Visits
from bloomery.data.packing import Ids, Layout, PackedSequence, PackedSequences
from bloomery.data.pictures.batches import PictureLoader
from bloomery.data.reference_scores import ReferenceScores
from bloomery.data.shards import DOCUMENTS_PER_UNIT, SplitName, open_split, read_manifest
from bloomery.data.top_scores import TopScores


@final
class Loader:
    """Batches of a prepared folder. Sequence i of a run is f(seed, i), whatever the number of ranks.

    An epoch visits the sequences of each source as often as its weight says (`Visits`). Raises UserError as
    `read_manifest` does, and when an epoch has no visit.

    `context` ranks share the sequences of each data rank: of them this rank has the `context_rank`-th part.

    `reference`: a file of log-probabilities under a reference model, for the batches' extra "reference". A
    ReferenceWriter filled it from `stored_batches`, for the run with the id `run`. `top_scores`: files of a teacher's
    likeliest tokens, for the extras "top_ids" and "top_logps".

    `prepare`: of each batch, for the device that it goes to.
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
        context_rank: int = 0,
        context: int = 1,
        reference: Path | None = None,
        run: str = "",
        top_scores: Sequence[Path] = (),
        prepare: Callable[[Batch], Batch] | None = None,
    ) -> None:
        manifest = read_manifest(prepared)
        opened_split = open_split(prepared, split, manifest)
        self.tokens = opened_split.record.tokens
        self._packing = PackedSequences(
            opened_split, sequence_length=sequence_length, layout=layout, pad_id=manifest.pad_id
        )
        self._reference = (
            None if reference is None else ReferenceScores(reference, self.tokens, run)
        )
        self._top_scores = TopScores(top_scores, opened_split) if top_scores else None
        self._stored_pictures = opened_split.pictures
        self._pictures: PictureLoader | None = None
        self._has_pairs = DOCUMENTS_PER_UNIT[opened_split.kind] > 1
        if manifest.has_pictures:
            # Both answers of a pair are after the pictures of one prompt.
            self._pictures = PictureLoader(prepared, shares=self._has_pairs)
        self._prepare = prepare
        self._seed = seed
        self._data_rank = data_rank
        self._data_world = data_world
        self._context_rank = context_rank
        self._context = context
        # A source is visited as often in an epoch as its weight says; validation has every sequence once.
        weights = [part.weight if split == "train" else 1.0 for part in opened_split.record.parts]
        self._visits = Visits(self._packing.counts, weights, seed)
        self.sequences = len(self._visits)  # of an epoch
        if self.sequences == 0:
            raise self._no_sequences(prepared, split)

    def _no_sequences(self, prepared: Path, split: SplitName) -> UserError:
        if not self.tokens:
            fix = "add text, or set data.validation"
            return UserError(f"the {split} split is empty", where=str(prepared), fix=fix)
        if any(self._packing.counts):
            problem = f"no sequence of the {split} split is read: the weights of the sources round to none"
            fix = "raise the weights in data.sources"
            return UserError(problem, where=str(prepared), fix=fix)
        problem = f"no loss tokens in the {split} split: all labels within data.sequence_length are masked"
        fix = "raise data.sequence_length; bloomery prepare RECIPE --check prints the figures"
        return UserError(problem, where=str(prepared), fix=fix)

    def batch(self, cursor: Cursor, size: int, *, filled: int | None = None) -> Batch:
        """This rank's part of a micro-batch of `size` sequences: every data_world-th, starting with its data_rank.

        The first `filled` (default: all) are the next ones of the run, the others are padding: every rank computes
        batches of one shape, whatever number of sequences a step has.
        """
        assert size % self._data_world == 0, (
            f"{size} sequences cannot be divided by {self._data_world} ranks"
        )
        assert cursor.seed == self._seed, "the cursor belongs to another run"
        end = cursor.consumed + (size if filled is None else filled)
        indices = range(cursor.consumed + self._data_rank, cursor.consumed + size, self._data_world)
        return self._stacked(
            [
                self._packing.read(*self.locate(index)) if index < end else self._packing.padding()
                for index in indices
            ]
        )

    def locate(self, index: int) -> tuple[int, int]:
        """Where the index-th sequence of the run is stored: its source, and its number there."""
        return self._visits.locate(index)

    def validation_batches(self, batch_size: int, limit: int | None = None) -> Iterator[Batch]:
        """This rank's batches, in the order of the split. The last one is padded, with loss mask 0.

        `batch_size`: sequences of a batch of this rank. `limit`: the most sequences, of all ranks together, spread
        evenly over the split.
        """
        count = min(self.sequences, limit or self.sequences)
        for indices in self._indices_by_batch(count, batch_size):
            yield self._stacked(
                [
                    self._packing.read(*self._visits.in_order(index * self.sequences // count))
                    if index < count
                    else self._packing.padding()
                    for index in indices
                ]
            )

    @property
    def stored_sequences(self) -> int:
        """The number of sequences of `stored_batches`, of all ranks together and without padding."""
        return sum(self._packing.counts)

    def stored_batches(self, batch_size: int) -> Iterator[tuple[Batch, Tensor]]:
        """This rank's part of all sequences of the split, each once and in order, whatever the weights.

        `batch_size`: sequences of a batch of this rank. The int64 [B, T] is the index of each label among the split's
        tokens (-1: none). The last batch is padded.
        """
        ends = np.cumsum(self._packing.counts)
        count = int(ends[-1])
        for indices in self._indices_by_batch(count, batch_size):
            sequences_read = list[PackedSequence]()
            for index in indices:
                if index < count:
                    source = int(np.searchsorted(ends, index, side="right"))
                    source_start = int(ends[source - 1]) if source else 0
                    sequences_read.append(self._packing.read(source, index - source_start))
                else:
                    sequences_read.append(self._packing.padding())
            yield (
                self._stacked(sequences_read),
                _stack(sequence.label_indices for sequence in sequences_read),
            )

    def _indices_by_batch(self, count: int, batch_size: int) -> Iterator[Sequence[int]]:
        """This rank's indices of each batch, dealt out in turn; beyond `count` in the last one.

        Every rank has as many batches, because all meet in each.
        """
        size_of_all = batch_size * self._data_world
        for start in range(0, count, size_of_all):
            yield range(start + self._data_rank, start + size_of_all, self._data_world)

    def _stacked(self, packed: list[PackedSequence]) -> Batch:
        names = packed[0].extras  # of every sequence, padding too
        extras = {name: _stack(sequence.extras[name] for sequence in packed) for name in names}
        if self._reference is not None:
            extras["reference"] = _stack(
                self._reference.of_labels(sequence.label_indices, sequence.loss_mask)
                for sequence in packed
            )
        if self._top_scores is not None:
            scores = [
                self._top_scores.of_labels(sequence.label_indices, sequence.loss_mask)
                for sequence in packed
            ]
            extras["top_ids"] = _stack(top_ids for top_ids, _ in scores)
            extras["top_logps"] = _stack(logps for _, logps in scores)
        tokens = _stack(sequence.tokens for sequence in packed)
        documents = _stack(sequence.documents for sequence in packed)
        pictures = axes = None
        if self._pictures is not None:
            stored = self._stored_pictures
            numbers = [number for sequence in packed for number in sequence.pictures]
            contents = [] if stored is None else [stored[number] for number in numbers]
            pictures = self._pictures.pictures_of(contents, tokens)
            axes = self._pictures.axes_of(pictures, tokens, documents)
        batch = Batch(
            tokens=tokens,
            labels=_stack(sequence.labels for sequence in packed),
            loss_mask=_stack(sequence.loss_mask for sequence in packed),
            positions=_stack(sequence.positions for sequence in packed),
            documents=documents,
            sequences=_stack(_numbered_texts(packed)) if self._packing.packed_sources else None,
            extras=extras,
            pictures=pictures,
            axes=axes,
        )
        part = batch.part(self._context_rank, self._context, keeps_whole=self._has_pairs)
        return part if self._prepare is None else self._prepare(part)


def _stack(arrays: Iterable[np.ndarray[Any, np.dtype[Any]]]) -> Tensor:
    return torch.from_numpy(np.stack(list(arrays)))


def _numbered_texts(packed: list[PackedSequence]) -> list[Ids]:
    """The documents of each sequence, numbered across the whole batch; padding stays -1.

    Kernels that see the batch as one row of tokens tell its documents apart by these.
    """
    numbered = list[Ids]()
    first_number = 0
    for sequence in packed:
        documents = sequence.documents
        numbered.append(np.where(documents < 0, -1, documents + first_number))
        first_number += int(documents.max()) + 1
    return numbered


@final
class Prefetcher:
    """Reads ahead in a thread. `next()` returns the batches from `cursor` on and raises the thread's error.

    `batch_size`: sequences of a micro-batch, of all ranks together. `step_size`: sequences of a step; the last batch of
    each step is filled up with padding, and `cursor` is at the start of one. Default: every batch is full.
    """

    def __init__(
        self,
        loader: Loader,
        cursor: Cursor,
        *,
        batch_size: int,
        step_size: int | None = None,
        depth: int = 2,
    ) -> None:
        self._loader = loader
        self._cursor = cursor
        self._batch_size = batch_size
        self._step_size = batch_size if step_size is None else step_size
        self._left_in_step = self._step_size
        self._depth = depth
        self._queue = deque[Future[Batch]]()

    def __enter__(self) -> "Prefetcher":
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        for _ in range(self._depth):
            self._request_batch()
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
        batch = self._queue[0].result()  # a failed one stays and raises again
        self._queue.popleft()
        self._request_batch()
        return batch

    def _request_batch(self) -> None:
        cursor = self._cursor
        filled = min(self._batch_size, self._left_in_step)
        self._cursor = Cursor(cursor.seed, cursor.consumed + filled)
        self._left_in_step -= filled
        if self._left_in_step == 0:
            self._left_in_step = self._step_size
        self._queue.append(self._thread.submit(self._read, cursor, filled))

    def _read(self, cursor: Cursor, filled: int) -> Batch:
        return self._loader.batch(cursor, self._batch_size, filled=filled)

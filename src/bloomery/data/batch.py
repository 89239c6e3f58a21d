"""The micro-batch: tokens, labels and masks, what an objective adds to them, and where things stand in them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import final

from torch import Tensor

from bloomery.data.pictures.batches import Pictures


@dataclass(frozen=True)
class Places:
    """What the host reads off a batch, because it would have to wait for a device that finds it: how many there are.

    `loss_positions`: those of the flattened batch whose label has a loss, int64 [N]. `document_offsets` and
    `document_reach`: what attention needs of the documents it sees (`model.attention`); the reach stays on the host.
    """

    loss_positions: Tensor
    document_offsets: Tensor
    document_reach: Tensor

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> "Places":
        """The same places with `change` applied to those that a device reads."""
        return replace(
            self,
            loss_positions=change(self.loss_positions),
            document_offsets=change(self.document_offsets),
        )


@final
class LateExtras(Mapping[str, Tensor]):
    """Extras of a batch with one that another process still computes: reading that one waits for it."""

    def __init__(
        self, present: Mapping[str, Tensor], name: str, wait: Callable[[], Tensor]
    ) -> None:
        """`name`: of the extra that `wait` gives, the same tensor each time."""
        self._present = dict(present)
        self._name = name
        self._wait = wait

    def with_present(self, tensors: Mapping[str, Tensor]) -> "LateExtras":
        """These with further ones, which do not replace the late one."""
        assert self._name not in tensors
        return LateExtras({**self._present, **tensors}, self._name, self._wait)

    def __getitem__(self, name: str) -> Tensor:
        return self._wait() if name == self._name else self._present[name]

    def __contains__(self, name: object) -> bool:
        return name == self._name or name in self._present

    def __iter__(self) -> Iterator[str]:
        yield from self._present
        yield self._name

    def __len__(self) -> int:
        return len(self._present) + 1


@dataclass(frozen=True)
class Batch:
    """One micro-batch; every field is a tensor [B, T], but for `whole_documents`, `full_batch` and `places`.

    `labels[b, t]` is the token after `tokens[b, t]`. `loss_mask` is 1 where the model is trained on that label, and 0
    at the end of a document and on padding. `positions` count from the start of the document, or of the sequence where
    a document continues from the sequence before. `documents` number the documents of a sequence from 0 (padding: -1).

    `sequences`, of conversations and pairs, number the texts of the micro-batch from 0 (padding: -1); 2i and 2i + 1
    are the chosen and the rejected response of a pair.

    Where several ranks share each sequence, T counts the tokens of this rank, and `whole_documents` are the documents
    of all tokens, which attention needs. `full_batch` is the batch of all tokens, where a loss needs whole texts.

    `extras` hold what the objective reads besides, by name:

    kto_labels  int64 [B, T]: 1 on a desirable response, 0 on an undesirable one
    reference   float32 [B, T]: each label's log-probability under the reference model
    baseline    float32 []: the KL term from which KTO measures the rewards of a step

    `places`: of this loss mask and these documents; a batch that changes them has none. Without them a device is asked.

    `pictures`: of its sequences; None without any. `axes`: int64 [3, B, T], positions in time, row and column, for a
    model that has them.
    """

    tokens: Tensor  # int64
    labels: Tensor  # int64
    loss_mask: Tensor  # float32
    positions: Tensor  # int64
    documents: Tensor  # int64
    sequences: Tensor | None = None  # int64
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    whole_documents: Tensor | None = None  # int64
    places: Places | None = None
    pictures: Pictures | None = None
    axes: Tensor | None = None
    full_batch: "Batch | None" = None

    def tensors(self) -> list[Tensor]:
        """Every tensor of the batch, extras included."""
        fields = (self.tokens, self.labels, self.loss_mask, self.positions, self.documents)
        optional_fields = (self.sequences, self.whole_documents, self.axes)
        of_pictures = [] if self.pictures is None else [*self.pictures.inputs.values()]
        present = [tensor for tensor in optional_fields if tensor is not None]
        of_full_batch = [] if self.full_batch is None else self.full_batch.tensors()
        return [*fields, *present, *self.extras.values(), *of_pictures, *of_full_batch]

    @property
    def attended_documents(self) -> Tensor:
        """The documents of the tokens that attention sees."""
        return self.documents if self.whole_documents is None else self.whole_documents

    def part(self, index: int, of: int, *, keeps_whole: bool = False) -> "Batch":
        """The batch of one of `of` ranks that share each sequence. Labels are next to their tokens, also at a cut.

        `keeps_whole`: it has this batch as its `full_batch`.
        """
        if of == 1:
            return self
        assert self.pictures is None and self.axes is None, "the plan refuses that"
        length = self.tokens.shape[1] // of
        tokens = slice(index * length, (index + 1) * length)
        cut = self.map_tensors(lambda tensor: tensor[:, tokens].contiguous())
        return replace(
            cut, whole_documents=self.documents, full_batch=self if keeps_whole else None
        )

    def with_extras(self, **tensors: Tensor) -> "Batch":
        """The same batch with these extras added or replaced."""
        if isinstance(self.extras, LateExtras):
            return replace(self, extras=self.extras.with_present(tensors))
        return replace(self, extras={**self.extras, **tensors})

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        """The same batch with `change` applied to every tensor, without `places`: they may differ then."""
        return Batch(
            tokens=change(self.tokens),
            labels=change(self.labels),
            loss_mask=change(self.loss_mask),
            positions=change(self.positions),
            documents=change(self.documents),
            sequences=None if self.sequences is None else change(self.sequences),
            extras={name: change(tensor) for name, tensor in self.extras.items()},
            whole_documents=(
                None if self.whole_documents is None else change(self.whole_documents)
            ),
            pictures=None if self.pictures is None else self.pictures.map_tensors(change),
            axes=None if self.axes is None else change(self.axes),
            full_batch=None if self.full_batch is None else self.full_batch.map_tensors(change),
        )

"""A rollout: completions that the policy sampled, with what training on them needs; a part of every checkpoint."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from bloomery.data.batch import Batch
from bloomery.data.tokenizer.alignment import Span
from bloomery.infer.forward import pinned
from bloomery.parallel.mesh import Mesh
from bloomery.plan.types import DataPlan, TrainPlan
from bloomery.train.rl.teacher_texts import ReadCompletion

T = TypeVar("T")

DRAWN_LOGPS = "drawn_logps"  # the name of sampled log-probabilities in checkpoints
TARGETS = ("advantages", "values", "returns")  # the fields of TokenTargets
# In extras of a batch, int64 [B, T]: the span of text that a token is in, by the place of its first token in the row of
# the model that trains, -1 for none; and those of the tokens that a teacher of another tokenizer reads.
SPANS = "spans"
TEACHER_SPANS = "teacher_spans"


@final
@dataclass(frozen=True)
class TokenTargets:
    """Of each token of a completion: its advantage, its value as it was sampled, and the value to train towards."""

    advantages: tuple[float, ...]
    values: tuple[float, ...]
    returns: tuple[float, ...]


@final
@dataclass(frozen=True)
class RolloutSample:
    """A prompt and a completion of it.

    `sampled_logps`: of each token as it was sampled; `old_logps`: under the model that trained when it was sampled,
    None where only that model trains on it. `has_loss`: False for a completion that is not trained on, and counts as a
    completion. `targets`: with a value head, in place of one `advantage`. `prompt_number`: of the prompt in the run,
    from which its pictures are read again. `given`: from where to where the completion was not sampled, but given, as
    results of tools are: such tokens have no loss. `teacher_prompt_ids`: the prompt as a teacher has it, where that is
    another one; `teacher_completion`: the completion as one of another tokenizer has it.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    sampled_logps: tuple[float, ...]
    advantage: float = 0.0
    old_logps: tuple[float, ...] | None = None
    has_loss: bool = True
    targets: TokenTargets | None = None
    prompt_number: int = -1
    given: tuple[tuple[int, int], ...] = ()
    teacher_prompt_ids: tuple[int, ...] | None = None
    teacher_completion: ReadCompletion | None = None

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)

    @property
    def room(self) -> int:
        """Tokens that it takes of a sequence: the model and its teacher have it at the same place."""
        if self.teacher_prompt_ids is None:
            return len(self)
        return max(len(self), len(self.teacher_prompt_ids) + len(self.taught_ids))

    @property
    def taught_ids(self) -> tuple[int, ...]:
        """The completion in tokens of the teacher."""
        return (
            self.completion_ids if self.teacher_completion is None else self.teacher_completion.ids
        )

    @property
    def num_sampled(self) -> int:
        """Tokens of the completion that were not given."""
        return len(self.completion_ids) - sum(end - start for start, end in self.given)

    @property
    def is_sampled(self) -> list[bool]:
        """Of each token of the completion, whether it was sampled and not given."""
        flags = [True] * len(self.completion_ids)
        for start, end in self.given:
            flags[start:end] = [False] * (end - start)
        return flags

    def extras(self) -> dict[str, float | tuple[float, ...]]:
        """What a loss needs of the completion, by its name in `Batch.extras`: of all tokens alike, or of each."""
        extras: dict[str, float | tuple[float, ...]] = {
            "advantages": self.advantage,
            "sampled_logps": self.sampled_logps,
        }
        if self.old_logps is not None:
            extras["old_logps"] = self.old_logps
        if self.targets is not None:
            extras |= {name: getattr(self.targets, name) for name in TARGETS}
        return extras


@final
@dataclass(frozen=True)
class Rollout:
    """Samples in the order in which they were sampled, those of a prompt in a row.

    `first_step`: how many optimizer steps the run had taken before they were sampled; `num_steps`: how many train on
    them. `num_prompts`: how many prompts of the dataset they took.
    """

    first_step: int
    num_steps: int
    num_prompts: int
    samples: tuple[RolloutSample, ...]

    def is_over(self, step: int) -> bool:
        """Whether a run that has taken so many steps needs it no more."""
        return step >= self.first_step + self.num_steps

    def tensors(self) -> dict[str, Tensor]:
        """For a checkpoint; with `scalars` all there is."""
        tensors = {
            "prompt_lengths": torch.tensor([len(sample.prompt_ids) for sample in self.samples]),
            "completion_lengths": torch.tensor(
                [len(sample.completion_ids) for sample in self.samples]
            ),
            "prompt_ids": torch.tensor(
                [id_ for sample in self.samples for id_ in sample.prompt_ids]
            ),
            "completion_ids": torch.tensor(
                [id_ for sample in self.samples for id_ in sample.completion_ids]
            ),
            DRAWN_LOGPS: torch.tensor(
                [logp for sample in self.samples for logp in sample.sampled_logps]
            ),
            "advantages": torch.tensor([sample.advantage for sample in self.samples]),
            "has_loss": torch.tensor([sample.has_loss for sample in self.samples]),
            "prompt_numbers": torch.tensor([sample.prompt_number for sample in self.samples]),
        }
        given = [
            (number, *span) for number, sample in enumerate(self.samples) for span in sample.given
        ]
        if given:
            tensors["given"] = torch.tensor(given)
        teacher_prompts = [
            sample.teacher_prompt_ids
            for sample in self.samples
            if sample.teacher_prompt_ids is not None
        ]
        if teacher_prompts:
            tensors["teacher_prompt_lengths"] = torch.tensor(list(map(len, teacher_prompts)))
            tensors["teacher_prompt_ids"] = torch.tensor(
                [id_ for prompt_ids in teacher_prompts for id_ in prompt_ids]
            )
        completions = [
            sample.teacher_completion
            for sample in self.samples
            if sample.teacher_completion is not None
        ]
        if completions:
            tensors["teacher_completion_lengths"] = torch.tensor(
                [len(completion.ids) for completion in completions]
            )
            tensors["teacher_completion_ids"] = torch.tensor(
                [id_ for completion in completions for id_ in completion.ids], dtype=torch.int64
            )
            tensors["teacher_completion_spans"] = torch.tensor(
                [
                    (number, *span)
                    for number, completion in enumerate(completions)
                    for span in completion.spans
                ],
                dtype=torch.int64,
            ).view(-1, 5)
        if all(sample.old_logps is not None for sample in self.samples):
            tensors["old_logps"] = torch.tensor(
                [logp for sample in self.samples for logp in sample.old_logps or ()]
            )
        targets = [sample.targets for sample in self.samples if sample.targets is not None]
        if targets:
            tensors |= {
                f"targets.{name}": torch.tensor(
                    [number for of_sample in targets for number in getattr(of_sample, name)]
                )
                for name in TARGETS
            }
        return tensors

    def scalars(self) -> dict[str, int]:
        return {
            "first_step": self.first_step,
            "num_steps": self.num_steps,
            "num_prompts": self.num_prompts,
        }

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> "Rollout":
        """From a checkpoint."""
        prompt_lengths = tensors["prompt_lengths"].tolist()
        completion_lengths = tensors["completion_lengths"].tolist()

        def pieces(name: str, lengths: list[int]) -> list[tuple[Any, ...]]:
            return [tuple(piece.tolist()) for piece in tensors[name].split(lengths)]

        prompts = pieces("prompt_ids", prompt_lengths)
        completions = pieces("completion_ids", completion_lengths)
        sampled_logps = pieces(DRAWN_LOGPS, completion_lengths)
        old_logps: list[tuple[float, ...] | None] = [None] * len(prompts)
        if "old_logps" in tensors:
            old_logps = list(pieces("old_logps", completion_lengths))
        targets: list[TokenTargets | None] = [None] * len(prompts)
        if f"targets.{TARGETS[0]}" in tensors:
            columns_of_targets = [pieces(f"targets.{name}", completion_lengths) for name in TARGETS]
            targets = [
                TokenTargets(*of_sample) for of_sample in zip(*columns_of_targets, strict=True)
            ]
        # Checkpoints of versions before rollouts had pictures have no numbers of prompts.
        prompt_numbers = [-1] * len(prompts)
        if "prompt_numbers" in tensors:
            prompt_numbers = tensors["prompt_numbers"].tolist()
        given: list[tuple[tuple[int, int], ...]] = [()] * len(prompts)
        if "given" in tensors:
            for number, start, end in tensors["given"].tolist():
                given[number] += ((start, end),)
        teacher_prompts: list[tuple[int, ...] | None] = [None] * len(prompts)
        if "teacher_prompt_ids" in tensors:
            lengths = tensors["teacher_prompt_lengths"].tolist()
            teacher_prompts = list(pieces("teacher_prompt_ids", lengths))
        teacher_completions: list[ReadCompletion | None] = [None] * len(prompts)
        if "teacher_completion_ids" in tensors:
            lengths = tensors["teacher_completion_lengths"].tolist()
            spans: list[tuple[Span, ...]] = [()] * len(prompts)
            for number, *span in tensors["teacher_completion_spans"].tolist():
                spans[number] += (Span(*span),)
            teacher_completions = [
                ReadCompletion(ids, spans_of_sample)
                for ids, spans_of_sample in zip(
                    pieces("teacher_completion_ids", lengths), spans, strict=True
                )
            ]
        columns = zip(
            prompts,
            completions,
            sampled_logps,
            tensors["advantages"].tolist(),
            old_logps,
            tensors["has_loss"].tolist(),
            targets,
            prompt_numbers,
            given,
            teacher_prompts,
            teacher_completions,
            strict=True,
        )
        samples = tuple(RolloutSample(*column) for column in columns)
        first_step, num_steps, num_prompts = (
            int(scalars[name]) for name in ("first_step", "num_steps", "num_prompts")
        )
        return cls(first_step, num_steps, num_prompts, samples)

    def with_old_logps(self, old_logps: Sequence[Sequence[float]]) -> "Rollout":
        samples = (
            replace(sample, old_logps=tuple(logps))
            for sample, logps in zip(self.samples, old_logps, strict=True)
        )
        return replace(self, samples=tuple(samples))


@final
@dataclass(frozen=True)
class SamplePlace:
    """Where a sample is in its micro-batches: `start` is the position of its first token in the row."""

    micro_batch: int
    row: int
    start: int


@final
@dataclass(frozen=True)
class MicroBatchShape:
    """A micro-batch of a step: so many sequences of so many tokens, in pinned memory for a device that copies it."""

    rows: int
    length: int
    pin_memory: bool = False

    @classmethod
    def of(cls, train: TrainPlan, data: DataPlan) -> "MicroBatchShape":
        return cls(train.micro_batch_size, data.sequence_length, data.pin_memory)


PlacedSamples = Sequence[tuple[RolloutSample, SamplePlace]]
# A micro-batch with what its samples, in the order of their tokens, have beside tokens: their pictures.
Complete = Callable[[Batch, PlacedSamples], Batch]


def without_pictures(batch: Batch, members: PlacedSamples) -> Batch:
    del members
    return batch


def pack_for_rank(
    samples: Sequence[RolloutSample],
    shape: MicroBatchShape,
    mesh: Mesh,
    *,
    complete: Complete = without_pictures,
) -> tuple[list[Batch], list[SamplePlace]]:
    """The micro-batches of a rank, as many as every rank has, and the places of its samples in them.

    `samples_of_rank` are in them. Ranks that share sequences each have a part of their tokens; `places` are those in
    all tokens. The stages of a pipeline have the same.
    """
    length = shape.length
    rows = shape.rows
    own_samples = samples_of_rank(samples, mesh)
    batches, places = pack(own_samples, length=length, rows=rows, complete=complete)
    most_batches = max(
        num_batches(place_samples(samples[first :: mesh.sequence_world], length=length, rows=rows))
        for first in range(mesh.sequence_world)
    )
    while len(batches) < most_batches:
        batches.append(empty_batch(samples, length=length, rows=rows, complete=complete))
    batches = [batch.part(mesh.context_rank, mesh.context, keeps_whole=True) for batch in batches]
    return [pinned(batch) for batch in batches] if shape.pin_memory else batches, places


def samples_of_rank(samples: Sequence[T], mesh: Mesh) -> Sequence[T]:
    """What a rank trains on of the samples of a step, or of what there is of each: as many as every rank, in turn."""
    return samples[mesh.sequence_rank :: mesh.sequence_world]


def pack(
    samples: Sequence[RolloutSample],
    *,
    length: int,
    rows: int,
    complete: Complete = without_pictures,
) -> tuple[list[Batch], list[SamplePlace]]:
    """Micro-batches of `rows` sequences of `length` tokens with all samples, and the place of each sample.

    A sample is a document of a packed sequence. Its completion has the loss. The last micro-batch may have rows of
    padding.
    """
    places = place_samples(samples, length=length, rows=rows)
    batches = []
    for number in range(num_batches(places)):
        members = [
            (sample, place)
            for sample, place in zip(samples, places, strict=True)
            if place.micro_batch == number
        ]
        batch = _batch_of(members, samples[0], length=length, rows=rows)
        in_order = sorted(members, key=lambda member: (member[1].row, member[1].start))
        batches.append(complete(batch, in_order))
    return batches, places


def place_samples(samples: Sequence[RolloutSample], *, length: int, rows: int) -> list[SamplePlace]:
    """Each sample goes into the first sequence that has room, and `rows` sequences into a micro-batch."""
    used_tokens: list[int] = []
    sequences_and_starts: list[tuple[int, int]] = []
    for sample in samples:
        assert sample.room <= length, "prompt and completion fit into a sequence"
        sequence = next(
            (number for number, used in enumerate(used_tokens) if used + sample.room <= length),
            len(used_tokens),
        )
        if sequence == len(used_tokens):
            used_tokens.append(0)
        sequences_and_starts.append((sequence, used_tokens[sequence]))
        used_tokens[sequence] += sample.room
    return [
        SamplePlace(sequence // rows, sequence % rows, start)
        for sequence, start in sequences_and_starts
    ]


def num_batches(places: Sequence[SamplePlace]) -> int:
    return max((place.micro_batch + 1 for place in places), default=0)


def empty_batch(
    samples: Sequence[RolloutSample],
    *,
    length: int,
    rows: int,
    complete: Complete = without_pictures,
) -> Batch:
    """A micro-batch without samples, for a rank that has fewer of `samples` than others."""
    return complete(_batch_of([], samples[0], length=length, rows=rows), [])


def _batch_of(
    members: Sequence[tuple[RolloutSample, SamplePlace]],
    example: RolloutSample,
    *,
    length: int,
    rows: int,
) -> Batch:
    """`example`: one of the samples, which all have the same extras."""
    tokens, labels, positions = (torch.zeros(rows, length, dtype=torch.int64) for _ in range(3))
    documents, sequences = (torch.full((rows, length), -1) for _ in range(2))
    loss_mask = torch.zeros(rows, length)
    extras = {name: torch.zeros(rows, length) for name in example.extras()}
    if example.teacher_prompt_ids is not None:
        extras |= _teacher_extras(members, length=length, rows=rows)
    if example.teacher_completion is not None:
        extras |= _span_extras(members, length=length, rows=rows)
    num_documents = [0] * rows
    for number, (sample, place) in enumerate(members):
        ids = torch.tensor([*sample.prompt_ids, *sample.completion_ids])
        span = slice(place.start, place.start + len(ids))
        tokens[place.row, span] = ids
        labels[place.row, span.start : span.stop - 1] = ids[1:]
        positions[place.row, span] = torch.arange(len(ids))
        documents[place.row, span] = num_documents[place.row]
        num_documents[place.row] += 1
        sequences[place.row, span] = number
        # The label of a position is the token after it.
        scored = completion_span(sample, place)
        loss_mask[place.row, scored] = float(sample.has_loss)
        for start, end in sample.given:
            loss_mask[place.row, scored.start + start : scored.start + end] = 0.0
        for name, numbers in sample.extras().items():
            extras[name][place.row, scored] = torch.tensor(numbers)
    return Batch(tokens, labels, loss_mask, positions, documents, sequences, extras)


def _teacher_extras(members: PlacedSamples, *, length: int, rows: int) -> dict[str, Tensor]:
    """The batch as the teacher reads it: other prompts at the same places, before the same completions."""
    tokens, labels, positions = (torch.zeros(rows, length, dtype=torch.int64) for _ in range(3))
    documents = torch.full((rows, length), -1)
    loss_mask = torch.zeros(rows, length)
    num_documents = [0] * rows
    for sample, place in members:
        assert sample.teacher_prompt_ids is not None
        ids = torch.tensor([*sample.teacher_prompt_ids, *sample.taught_ids])
        span = slice(place.start, place.start + len(ids))
        tokens[place.row, span] = ids
        labels[place.row, span.start : span.stop - 1] = ids[1:]
        positions[place.row, span] = torch.arange(len(ids))
        documents[place.row, span] = num_documents[place.row]
        num_documents[place.row] += 1
        first = span.stop - 1 - len(sample.taught_ids)
        compared = _sampled_parts(sample)
        if sample.teacher_completion is not None:
            compared = [
                (span.other_start, span.other_end) for span in sample.teacher_completion.spans
            ]
        for start, end in compared:
            loss_mask[place.row, first + start : first + end] = float(sample.has_loss)
    return {
        "teacher_tokens": tokens,
        "teacher_labels": labels,
        "teacher_positions": positions,
        "teacher_documents": documents,
        "teacher_loss_mask": loss_mask,
    }


def _sampled_parts(sample: RolloutSample) -> list[tuple[int, int]]:
    """From where to where tokens of the completion were sampled."""
    starts = [0, *(end for _, end in sample.given)]
    ends = [*(start for start, _ in sample.given), len(sample.completion_ids)]
    return list(zip(starts, ends, strict=True))


def _span_extras(members: PlacedSamples, *, length: int, rows: int) -> dict[str, Tensor]:
    """`SPANS` and `TEACHER_SPANS`, at the positions whose labels are their tokens."""
    numbers, teacher_numbers = (torch.full((rows, length), -1) for _ in range(2))
    for sample, place in members:
        assert sample.teacher_prompt_ids is not None and sample.teacher_completion is not None
        first = completion_span(sample, place).start
        teacher_first = place.start + len(sample.teacher_prompt_ids) - 1
        for span in sample.teacher_completion.spans:
            number = first + span.start
            numbers[place.row, number : first + span.end] = number
            teacher_span = slice(teacher_first + span.other_start, teacher_first + span.other_end)
            teacher_numbers[place.row, teacher_span] = number
    return {SPANS: numbers, TEACHER_SPANS: teacher_numbers}


def teacher_batch(batch: Batch) -> Batch:
    """The batch as a teacher reads it: its loss tokens are the same, in the same order, if it has this tokenizer."""
    if "teacher_tokens" not in batch.extras:
        return batch
    tokens, labels, loss_mask, positions, documents = (
        batch.extras[f"teacher_{name}"]
        for name in ("tokens", "labels", "loss_mask", "positions", "documents")
    )
    whole_documents = None
    if batch.full_batch is not None:
        whole_documents = batch.full_batch.extras["teacher_documents"]
    return Batch(tokens, labels, loss_mask, positions, documents, whole_documents=whole_documents)


def completion_span(sample: RolloutSample, place: SamplePlace) -> slice:
    """The positions in the sample's row whose labels are its completion."""
    end = place.start + len(sample) - 1
    return slice(end - len(sample.completion_ids), end)

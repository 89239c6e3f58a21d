"""What a run knows of its prompts: how many it sampled, and which taught nothing; a part of every checkpoint."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, final

import torch
from torch import Tensor

from bloomery.data.prompts import Prompts

Treatment = Literal["keep", "defer", "drop"]
FOR_GOOD = 2**62  # an epoch that no run reaches
MOST_DOUBLINGS = 20  # of the epochs that a prompt is left out for


@dataclass
class PromptCounts:
    """Of the whole run. A prompt that two rollouts sample counts twice.

    `without_variance`: whose completions had one reward, `filled`: of them, those that were trained on for want of
    others. `rounds`: of further prompts in place of such. `easy`, `hard`: always right, always wrong. `skipped`: passed
    over in the order of the data, as they are left out.
    """

    sampled: int = 0
    without_variance: int = 0
    rounds: int = 0
    filled: int = 0
    easy: int = 0
    hard: int = 0
    skipped: int = 0

    def metrics(self) -> dict[str, float]:
        """Of one rollout."""
        return {f"prompts/{name}": float(count) for name, count in asdict(self).items()}

    def add(self, others: "PromptCounts") -> None:
        for name, count in asdict(others).items():
            setattr(self, name, getattr(self, name) + count)


@final
@dataclass(frozen=True)
class LeftOut:
    """A prompt that has been always right, or always wrong, `times` in a row: it is left out up to `last_epoch`."""

    times: int
    last_epoch: int


@final
@dataclass
class PromptHistory:
    """The state of a run's choice of prompts. `left_out`: by the row of the dataset."""

    counts: PromptCounts = field(default_factory=PromptCounts)
    left_out: dict[int, LeftOut] = field(default_factory=dict)

    def copied(self) -> "PromptHistory":
        return PromptHistory(replace(self.counts), dict(self.left_out))

    def next_numbers(self, prompts: Prompts, first: int, count: int) -> tuple[list[int], int]:
        """The next `count` prompts from number `first` on that are not left out, and the number after the last one.

        Where every prompt of an epoch is left out, none is any more.
        """
        numbers = list[int]()
        number = first
        num_passed = 0
        while len(numbers) < count:
            entry = self.left_out.get(prompts.document(number))
            if entry is None or entry.last_epoch < number // len(prompts):
                numbers.append(number)
                num_passed = 0
            else:
                num_passed += 1
            if num_passed == len(prompts):
                self.left_out.clear()
                number = number - num_passed
                num_passed = 0
            number += 1
        return numbers, number

    def note(self, prompts: Prompts, number: int, treatment: Treatment) -> None:
        """`treatment`: of the prompt of that number by its newest completions; keep: of one that teaches, too."""
        document = prompts.document(number)
        if treatment == "keep":
            self.left_out.pop(document, None)
            return
        before = self.left_out.get(document)
        times = 1 if before is None else before.times + 1
        epochs = 2 ** min(times - 1, MOST_DOUBLINGS)
        epoch = number // len(prompts)
        last_epoch = FOR_GOOD if treatment == "drop" else epoch + epochs
        self.left_out[document] = LeftOut(times, last_epoch)

    def num_left_out(self, epoch: int) -> int:
        """How many rows are left out in that epoch."""
        return sum(entry.last_epoch >= epoch for entry in self.left_out.values())

    def tensors(self) -> dict[str, Tensor]:
        """For a checkpoint; with `scalars` all there is."""
        rows = [
            [document, entry.times, entry.last_epoch] for document, entry in self.left_out.items()
        ]
        return {"left_out": torch.tensor(rows)} if rows else {}

    def scalars(self) -> dict[str, Any]:
        return {"counts": asdict(self.counts)}

    @classmethod
    def of(
        cls, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any] | None
    ) -> "PromptHistory":
        """From a checkpoint; `scalars` None: of a version that kept none."""
        if scalars is None:
            return cls()
        rows = tensors["left_out"].tolist() if "left_out" in tensors else []
        return cls(
            PromptCounts(**scalars["counts"]),
            {document: LeftOut(times, last_epoch) for document, times, last_epoch in rows},
        )

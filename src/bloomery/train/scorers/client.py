"""What a training rank asks of processes that score: what a teacher thinks of micro-batches, the values of texts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Protocol, final
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from bloomery.core.child import Channel, Message
from bloomery.core.errors import UserError
from bloomery.data.batch import Batch, LateExtras
from bloomery.model.decoder import Decoder
from bloomery.train.scorers.messages import packed_tensors, tensors_of, unpacked_tensors

# A teacher is read from a disk, or scores a long rollout, in that time. Ranks without progress are ended much earlier.
ANSWER_SECONDS = 1800.0


@final
class Answer:
    """Of one request; a connection fills it when it arrives, unless nobody holds it any more."""

    message: Message | None = None


@final
class Scorer:
    """One scoring process, as a training rank sees it. It answers requests in their order."""

    def __init__(self, channel: Channel, name: str, *, resume_command: str) -> None:
        """`name`: of the process, in errors."""
        self._channel = channel
        self._name = name
        self._fix = resume_command
        self._number = 0
        self._awaited = WeakValueDictionary[int, Answer]()
        self._description: Message | None = None

    def close(self) -> None:
        self._channel.close()

    def description(self) -> Message:
        """What the process says of its models, once they are loaded. Raises UserError where they cannot be."""
        if self._description is None:
            self._description = self._next()
        return self._description

    def ask(self, message: Mapping[str, Any], content: bytes = b"") -> Answer:
        """Sends a request; several may be under way. Raises UserError."""
        self.description()
        self._number += 1
        answer = Answer()
        self._awaited[self._number] = answer
        numbered = {**message, "number": self._number}
        if not self._channel.send(numbered, content, seconds=ANSWER_SECONDS):
            raise self._silent()
        return answer

    def wait(self, answer: Answer) -> Message:
        """Raises torch.OutOfMemoryError where the process had too little memory for this request, and UserError where
        it has failed or ended, or does not answer.
        """
        while answer.message is None:
            message = self._next()
            # Of a step that ended early, such as out of memory, nobody awaits the rest.
            if (awaited := self._awaited.get(message["number"])) is not None:
                awaited.message = message
        if "out_of_memory" in answer.message:
            # As of this rank's own device: smaller micro-batches are scored in smaller pieces.
            raise torch.OutOfMemoryError(
                f"out of memory in {self._name} {answer.message['out_of_memory']}"
            )
        return answer.message

    def _next(self) -> Message:
        message = self._channel.next(ANSWER_SECONDS)
        if message == "silent":
            raise self._silent()
        if message == "ended":
            raise UserError(
                f"{self._name} has ended: it was killed, or crashed",
                where="its last lines are in the log of the run",
                fix=f"on an out-of-memory kill (see `dmesg`), free host memory; then `{self._fix}`",
            )
        if "error" in message:
            error = UserError(**message["error"])
            error.where = f"{error.where} ({self._name})" if error.where else self._name
            raise error
        return message

    def _silent(self) -> UserError:
        return UserError(
            f"{self._name} does not answer: it is stopped, or stuck in a driver",
            where="parallel.scoring_devices",
            fix=self._fix,
        )


@final
class Scorers:
    """The scoring processes that serve this rank. Several share its requests."""

    def __init__(self, scorers: Sequence[Scorer]) -> None:
        self._scorers = tuple(scorers)

    def wait_until_loaded(self) -> None:
        """Raises UserError where a teacher or a reward model cannot be loaded."""
        for scorer in self._scorers:
            scorer.description()

    def longest_text(self, reward_model: str) -> int:
        """How many tokens a reward model reads at most."""
        lengths: Mapping[str, int] = self._scorers[0].description()["reward_models"]
        return lengths[reward_model]

    def with_teacher(self, batches: Sequence[Batch], *, name: str) -> list[Batch]:
        """The micro-batches with what their teacher adds, the extra `name`. All are sent at once, and each is awaited
        where it is read.
        """
        completed = []
        for number, batch in enumerate(batches):
            scorer = self._scorers[number % len(self._scorers)]
            header, content = packed_tensors(tensors_of(batch))
            request = {"kind": "teacher", "tensors": header, "places": batch.places is not None}
            answer = scorer.ask(request, content)
            late = cache(partial(_tensor_of, scorer, answer, name))
            completed.append(replace(batch, extras=LateExtras(batch.extras, name, late)))
        return completed

    def values(
        self, reward_model: str, forwards: Sequence[Sequence[list[int]]], *, tokens_per_forward: int
    ) -> list[list[float]]:
        """The values of texts under a reward model, in groups that share a forward."""
        asked = []
        for number, texts in enumerate(forwards):
            scorer = self._scorers[number % len(self._scorers)]
            request = {
                "kind": "values",
                "model": reward_model,
                "texts": list(texts),
                "tokens_per_forward": tokens_per_forward,
            }
            asked.append((scorer, scorer.ask(request)))
        return [scorer.wait(answer)["values"] for scorer, answer in asked]


@final
@dataclass(frozen=True)
class TeacherOutput:
    """The output layer of a teacher whose layers are in another process: it makes logits of hidden states here."""

    lm_head: nn.Linear
    final_softcap: float | None


def _tensor_of(scorer: Scorer, answer: Answer, name: str) -> Tensor:
    message = scorer.wait(answer)
    return unpacked_tensors(message["tensors"], message.get("content", b""))[name]


class TeacherScorers(Protocol):
    """What completes micro-batches with the numbers of a teacher: `Scorers`, and a simulation in their place."""

    def with_teacher(self, batches: Sequence[Batch], *, name: str) -> list[Batch]:
        """As `Scorers.with_teacher`."""


@final
@dataclass(frozen=True)
class ScoredTeacher:
    """A teacher in scoring processes. `load_output`: its output layer, which stays here."""

    scorers: TeacherScorers
    load_output: Callable[[], TeacherOutput]


@final
@dataclass(frozen=True)
class ScoredBefore:
    """The pass of a teacher before a step, computed by scoring processes while the step already trains.

    `name`: of the extra that it adds to micro-batches.
    """

    scorers: TeacherScorers
    name: str

    def __call__(self, model: Decoder, batches: Sequence[Batch]) -> list[Batch]:
        del model
        return self.ask(batches)

    def ask(self, batches: Sequence[Batch]) -> list[Batch]:
        """Micro-batches that were sent ahead of their step stay as they are."""
        if all(self.name in batch.extras for batch in batches):
            return list(batches)
        return self.scorers.with_teacher(batches, name=self.name)

"""A conversation with a model: what was said, what of it still fits into the model, and how it is put to it"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, final

from bloomery.data.examples import Message
from bloomery.errors import UserError

if TYPE_CHECKING:
    from bloomery.data.chat_form import Form
    from bloomery.data.tokenizer import Tokenizer
    from bloomery.model.decoder import Decoder
    from bloomery.model.sampling import Sampling

SHARE = 4  # an answer gets max_tokens, but makes a chat forget no more than a quarter of the context for that


@final
class Session:
    """What was said, and the model that answers. `system` goes before it all and is never forgotten."""

    def __init__(
        self, decoder: "Decoder", tokenizer: "Tokenizer", form: "Form", sampling: "Sampling", *,
        system: str | None = None,
    ) -> None:  # fmt: skip
        from bloomery.model.sampling import Past

        self.decoder, self.tokenizer, self.form, self.system = decoder, tokenizer, form, system
        self.sampling = replace(sampling, stop_ids=form.ends)
        self.said: list[Message] = []
        self.past = Past(decoder)
        self.forgotten = 0  # turns that the model no longer sees
        self._answers = 0

    @property
    def turns(self) -> list[Message]:
        return [*self._opening(), *self.said]

    def _opening(self) -> list[Message]:
        return [Message("system", self.system)] if self.system else []

    def answer(self, text: str) -> Iterator[str]:
        """The answer in pieces; an answer that is broken off stays as far as it came.

        Raises UserError, and then nothing was said.
        """
        from bloomery.generate import continued

        question = Message("user", text)
        ids = self._fitting([*self.said, question])
        self.said.append(question)
        sampling = replace(self.sampling, seed=self.sampling.seed + self._answers)  # the same words may draw anew
        self._answers += 1
        pieces: list[str] = []
        try:
            for piece in continued(self.decoder, self.tokenizer, ids, sampling, self.form.stops, self.past):
                pieces.append(piece)
                yield piece
        finally:
            self.said.append(Message("assistant", "".join(pieces)))

    def _fitting(self, said: list[Message]) -> list[int]:
        """The ids of what still fits, with room for an answer: the oldest turns go first, up to the next question."""
        context = self.decoder.config.max_positions
        room = max(1, min(self.sampling.max_tokens, context // SHARE))
        system = self._opening()
        starts = [at for at, message in enumerate(said) if message.role == "user"]
        for start in [at for at in starts if at >= self.forgotten] or starts[-1:]:
            ids = self.form.put([*system, *said[start:]])
            if len(ids) + room <= context or (start == starts[-1] and len(ids) < context):
                self.forgotten = start
                return ids
        raise UserError(
            f"this message has {len(ids):,} tokens, and the model reads {context:,} with its answer",
            where="the chat", remedy="say it in fewer words" + (", or shorten the system prompt" if system else ""),
        )  # fmt: skip

    def reset(self) -> None:
        self.said.clear()
        self.forgotten = 0

    def save(self, path: Path) -> None:
        """Appends the conversation to a JSONL file, as a row that can be trained on. Raises UserError."""
        row = {"messages": [{"role": turn.role, "content": turn.content} for turn in self.turns]}
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        except OSError as error:
            problem = f"cannot be written: {error.strerror}"
            raise UserError(problem, where=str(path), remedy="name another file") from error

"""Prompts as a teacher has them: by its own chat template, or with a hint that the model that trains does not get."""

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, final

from bloomery.core.errors import UserError
from bloomery.data.chat.render import Renderer, as_message
from bloomery.data.chat.turns import Turns
from bloomery.data.examples import Example, Message
from bloomery.data.pictures.encoder import saved_vision
from bloomery.data.prompts import Prompt, Prompts
from bloomery.data.shards import read_manifest
from bloomery.data.tokenizer.templates import NONE
from bloomery.data.tokenizer.tokenizer import Tokenizer
from bloomery.facts.prompt_templates import filled
from bloomery.train.rl.teacher_texts import TEACHER_VARIABLES

KEY = "objective.teacher_prompt_template"
Variables = Mapping[str, bool | int | float | str]
NO_VARIABLES: Variables = MappingProxyType({})
NUM_CHECKED = 10_000  # of each split, before the first step: 3 s of chat templates


@final
class TeacherPrompts(AbstractContextManager["TeacherPrompts"]):
    """Formats them as the prompts of the prepared dataset are: by the chat template, or as texts.

    A context, which ends the process of the chat template. `turns`: of episodes, whose prompts are conversations with
    tools; None for other completions.
    """

    def __init__(
        self,
        template: str | None,
        prepared: Path,
        tokenizer: Tokenizer,
        *,
        longest: int,
        variables: Variables = NO_VARIABLES,
        chats: bool = False,
    ) -> None:
        """`template`: None for the prompts of the dataset. `tokenizer`: the teacher's. `longest`: tokens of a prompt.
        `variables`: of the chat template. `chats`: texts are turns of a user, as in episodes.

        Raises UserError for a dataset with pictures.
        """
        if saved_vision(prepared) is not None:
            problem = "another prompt of the teacher"
            fix = f"remove {KEY}, or the pictures"
            if template is None:
                problem = "a teacher with another tokenizer"
                fix = "choose a teacher with the same tokenizer, or remove the pictures"
            raise UserError(
                f"not supported yet: {problem} in a dataset with pictures",
                where="objective.teacher" if template is None else KEY,
                fix=fix,
            )
        self._template = template
        self._longest = longest
        is_chat = chats or read_manifest(prepared).turns
        self.tokenizer = tokenizer
        self.turns: Turns | None = None
        self.renderer = Renderer(
            tokenizer,
            template=None if is_chat else NONE,
            train_on="assistant",
            variables=variables if is_chat else {},
            variables_key=TEACHER_VARIABLES,
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.renderer.close()

    def check(self, prompts: Prompts) -> None:
        """Raises UserError, as `ids_of`, for the first prompts."""
        for prompt in islice(prompts, NUM_CHECKED):
            self.ids_of(prompt)

    def ids_of(self, prompt: Prompt, opening: Sequence[Message] | None = None) -> tuple[int, ...]:
        """The prompt of the teacher. `opening`: the messages with which an episode began, in place of the prompt's.

        Raises UserError for a column that the row does not have, and for a prompt that leaves no room for the longest
        completion.
        """
        columns = {
            name: _text(value) for name, value in prompt.columns.items() if value is not None
        }
        messages = list(opening or ())
        if opening is None and prompt.messages is not None:
            messages = [as_message(turn) for turn in prompt.messages]
        elif opening is None and self.turns is not None:
            messages = [Message("user", prompt.text)]
        if messages:
            last = max(n for n, turn in enumerate(messages) if n == 0 or turn.role == "user")
            text = self._filled(columns, messages[last].content)
            messages[last] = replace(messages[last], content=text)
        if self.turns is not None:
            ids = self.turns.prompt(messages)
        else:
            told = tuple(messages) if messages else self._filled(columns, prompt.text)
            (encoded,) = self.renderer.encode(Example(KEY, "prompt", told, ()))
            ids = encoded.ids
        if len(ids) > self._longest:
            beginning = prompt.text[:60]
            raise UserError(
                f"the teacher's prompt has {len(ids):,} tokens, and room for {self._longest:,} next to the"
                f" longest completion: {beginning!r}",
                where="objective.teacher" if self._template is None else KEY,
                fix=f"set data.sequence_length at least {len(ids) - self._longest:,} higher, shorten the"
                " demonstration, or set a smaller objective.max_completion_length",
            )
        return tuple(ids)

    def _filled(self, columns: Mapping[str, str], prompt: str) -> str:
        if self._template is None:
            return prompt
        return filled(self._template, {**columns, "prompt": prompt}, where=KEY)


def _text(value: Any) -> str:
    """A column's value: a text as it is, the contents of messages one after the other, else JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and value and all(_is_message(turn) for turn in value):
        return "\n".join(turn["content"] for turn in value)
    return json.dumps(value, ensure_ascii=False)


def _is_message(turn: Any) -> bool:
    return isinstance(turn, dict) and isinstance(turn.get("content"), str)

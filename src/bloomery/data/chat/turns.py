"""Several turns of a model with tools, token in, token out: what a turn adds is never a rendering of what was sampled.

Tokenizers are no bijection: the text of sampled ids has other ids when it is encoded again, and log-probabilities would
be those of tokens that nobody sampled.
"""

from collections.abc import Mapping, Sequence
from typing import Any, final

from bloomery.data.chat.render import Renderer
from bloomery.data.chat.tool_arguments import Json
from bloomery.data.chat.tool_forms import call_ends, tool_format
from bloomery.data.chat.tools import ToolCall, calls_in
from bloomery.data.examples import Message
from bloomery.data.tokenizer.tokenizer import Tokenizer


@final
class Turns:
    """Prompts with tools, calls in answers, and results between two answers. Raises UserError for a template without
    tools.
    """

    def __init__(self, renderer: Renderer, tokenizer: Tokenizer, tools: Sequence[Json]) -> None:
        self._renderer = renderer
        self._tokenizer = tokenizer
        self._tools = tuple(tools)
        self.form = tool_format(renderer.rendered) if tools else None
        # What ends an answer that calls a tool may end no other: gpt-oss has a token for it, GLM the result's header.
        self.call_ends = (
            () if self.form is None else call_ends(renderer.rendered, self.form, tokenizer)
        )
        self._ends = dict.fromkeys(self.call_ends, True)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a conversation up to the header of the answer, with the tools. Raises UserError."""
        return self._renderer.prompt(messages, self._tools)

    def read(self, ids: Sequence[int]) -> tuple[str, list[ToolCall]]:
        """The text of an answer beside its calls, and these. `ids`: without the one that ended it."""
        return self.read_text(self._tokenizer.decode(list(ids)))

    def read_text(self, text: str) -> tuple[str, list[ToolCall]]:
        """As `read`, of the text of an answer."""
        return (text, []) if self.form is None else calls_in(text, self.form, self._tools)

    def ends_turn(self, token: int) -> bool:
        """Whether the template ends an answer that calls a tool with this token."""
        if token not in self._ends:
            text = self._renderer.rendered((Message("user", ""), _called([_ANY])), self._tools)
            self._ends[token] = self._tokenizer.spelled(token).decode(errors="replace") in text
        return self._ends[token]

    def check(self, end_id: int) -> None:
        """Raises UserError for a template that cannot go on after an answer which this token ended."""
        if self.form is not None:
            self.given([_ANY], ["result"], end_id)

    def given(
        self,
        calls: Sequence[ToolCall],
        results: Sequence[str],
        end_id: int,
        variables: Mapping[str, Any] | None = None,
        *,
        num_earlier: int = 0,
    ) -> list[int]:
        """The ids that follow an answer with these calls, which `end_id` ended, up to the header of the next one.

        `variables`: of the template, besides messages and tools. `num_earlier`: calls of the conversation before these,
        for a template that numbers them.
        """
        answer = _called(calls)
        of_tools = [
            Message("tool", result, name=call.name, call_id=call.id)
            for call, result in zip(calls, results, strict=True)
        ]
        end = self._tokenizer.spelled(end_id).decode()
        turns: tuple[Message, ...] = (Message("user", ""), answer)
        if num_earlier and self.form is not None and self.form.is_numbered:
            earlier = [ToolCall("tool", "{}", f"earlier{number}") for number in range(num_earlier)]
            results_before = (Message("tool", "", name="tool", call_id=call.id) for call in earlier)
            turns = (turns[0], _called(earlier), *results_before, answer)
        return self._renderer.continued(turns, of_tools, self._tools, end, variables)


_ANY = ToolCall("tool", "{}", "call00000")  # Mistral's templates take ids of nine letters


def _called(calls: Sequence[ToolCall]) -> Message:
    return Message("assistant", "", calls=tuple(map(call_json, calls)))


def call_json(call: ToolCall) -> dict[str, Any]:
    """A call as chat templates take it, without its arguments: what follows it does not depend on them."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": {}}}

"""Thoughts of a model before its answer, such as `<think>`: how a chat template marks them, and how they are split off.

An answer has at most one thought, and begins with it: markup further on is text. The markup: `data.chat.thoughts`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from bloomery.data.chat.channels import ChannelParser, Channels
from bloomery.data.chat.deltas import Delta
from bloomery.data.chat.thoughts import ThoughtFormat, Unwrapped
from bloomery.data.chat.tool_arguments import Json, held
from bloomery.data.chat.tool_forms import ToolFormat
from bloomery.data.chat.tools import ToolParser


@final
class ThoughtParser:
    """Splits an answer while it is written. `inside`: the prompt has begun the thought."""

    def __init__(self, form: ThoughtFormat, *, inside: bool) -> None:
        self.form = form
        self.done = False
        self.inside = inside
        self._begun = False  # some of the thought was returned
        self._text = ""

    def push(self, piece: str) -> tuple[str, str]:
        """What is certain so far: a part of the thought, and a part of the answer after it."""
        if self.done:
            return "", piece
        self._text += piece
        if not self.inside and not self._enter():
            return "", self._all() if self.done else ""
        if not self._begun:
            self._text = self._text.lstrip()
        end = self._text.find(self.form.closing)
        if end >= 0:
            thought = self._text[:end].rstrip()
            rest = self._text[end + len(self.form.closing) :]
            self._text = ""
            self.done = True
            return thought, rest
        # White space and the beginning of the markup are held back: they may end the thought.
        num_held = held(self._text, self.form.closing)
        certain = self._text[: len(self._text) - num_held].rstrip()
        self._text = self._text[len(certain) :]
        self._begun = self._begun or bool(certain)
        return certain, ""

    def flush(self) -> tuple[str, str]:
        """What is left at the end: of a thought without an end, or text that began like one."""
        text = self._all()
        self.done = True
        return (text.rstrip(), "") if self.inside else ("", text)

    def _enter(self) -> bool:
        """Whether the answer begins with a thought; `done` where it does not."""
        text = self._text.lstrip()
        if text.startswith(self.form.opening):
            self._text = text.removeprefix(self.form.opening)
            self.inside = True
        elif not self.form.opening.startswith(text):
            self.done = True
        return self.inside

    def _all(self) -> str:
        text = self._text
        self._text = ""
        return text


@final
class AnswerParser:
    """Thought, content and calls of one answer while it is written."""

    def __init__(
        self,
        tools: ToolFormat | None,
        thoughts: ThoughtFormat | None,
        *,
        inside: bool,
        offered: Sequence[Json] = (),
        around: Sequence[str] = (),
    ) -> None:
        """`offered`: the tools that a call may name. `around`: markup around the answer."""
        self._unwrapped = Unwrapped(around)
        self._tools = None if tools is None else ToolParser(tools, offered)
        self._thoughts = None if thoughts is None else ThoughtParser(thoughts, inside=inside)
        self._begun = False  # some of the answer after a thought was returned

    @property
    def calls(self) -> int:
        return 0 if self._tools is None else self._tools.calls

    def push(self, piece: str) -> list[Delta]:
        """What is certain so far."""
        if self._thoughts is None:
            return self._answer(piece)
        return self._split(*self._thoughts.push(piece))

    def flush(self) -> list[Delta]:
        """What is left at the end."""
        deltas = [] if self._thoughts is None else self._split(*self._thoughts.flush())
        if self._tools is not None:
            return deltas + self._tools.flush()
        rest = self._unwrapped.flush()
        return [*deltas, Delta(content=rest)] if rest else deltas

    def _split(self, thought: str, answer: str) -> list[Delta]:
        assert self._thoughts is not None
        deltas = [Delta(thought=thought)] if thought else []
        # White space between a thought and the answer is neither's.
        if self._thoughts.inside and not self._begun:
            answer = answer.lstrip()
        self._begun = self._begun or bool(answer)
        return deltas + self._answer(answer)

    def _answer(self, piece: str) -> list[Delta]:
        if self._tools is not None:
            return self._tools.push(piece)
        content = self._unwrapped.push(piece)
        return [Delta(content=content)] if content else []


@final
@dataclass(frozen=True)
class AnswerForm:
    """How the text of an answer is read: its calls, its thought, whether the prompt has begun the thought, the tools
    that a call may name, and the markup around the answer.
    """

    tools: ToolFormat | None = None
    thoughts: ThoughtFormat | Channels | None = None
    inside: bool = False
    offered: Sequence[Json] = ()
    around: Sequence[str] = ()

    def parser(self) -> AnswerParser | ChannelParser:
        if isinstance(self.thoughts, Channels):
            return ChannelParser(self.thoughts)
        return AnswerParser(
            self.tools,
            self.thoughts,
            inside=self.inside,
            offered=self.offered,
            around=self.around,
        )


def parsed_whole(form: AnswerForm, text: str) -> Sequence[Delta]:
    """The parts of an answer that has ended."""
    parser = form.parser()
    return [*parser.push(text), *parser.flush()]

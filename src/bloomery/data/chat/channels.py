"""Answers that are messages of channels, as gpt-oss writes them: thoughts, text for the user, and calls of functions.

    <|channel|>analysis<|message|>thought<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json
    <|message|>{"a": 1}<|call|>

The recipient of a call stands in front of the channel, or in it. The form: OpenAI's guide to the harmony format.
"""

import re
import secrets
from dataclasses import dataclass
from typing import final

from bloomery.data.chat.deltas import Delta
from bloomery.data.chat.tool_arguments import held


@final
@dataclass(frozen=True)
class Channels:
    """The tokens around a message, and the names of the channels and of the functions' namespace."""

    start: str
    channel: str
    constrain: str
    message: str
    ends: tuple[str, ...]
    thought: str
    namespace: str

    @property
    def markup(self) -> tuple[str, ...]:
        return (self.start, self.channel, self.constrain, self.message, *self.ends)

    @property
    def thought_opening(self) -> str:
        return f"{self.channel}{self.thought}{self.message}"


HARMONY = Channels(
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
    ("<|end|>", "<|call|>", "<|return|>"),
    "analysis",
    "functions.",
)
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


def channels_of(template: str) -> Channels | None:
    """The channels that the text of a chat template writes; None where it writes none."""
    return HARMONY if HARMONY.thought_opening in template else None


def spoken_in(answer: str, form: Channels) -> str | None:
    """The text of a whole answer without its thoughts; None where nothing follows them."""
    parser = ChannelParser(form)
    text = "".join(delta.content for delta in [*parser.push(answer), *parser.flush()])
    return text or None


@final
class ChannelParser:
    """Reads an answer while it is written, from behind `<|start|>assistant` on."""

    def __init__(self, form: Channels) -> None:
        self.form = form
        self.calls = 0
        self._text = ""
        self._is_header = True
        self._is_first = True
        self._is_thought = False
        self._is_call = False
        self._has_thought = False
        self._has_content = False
        self._marks = (*form.ends, form.start)

    def push(self, piece: str) -> list[Delta]:
        """What is certain so far."""
        self._text += piece
        return [delta for delta in iter(self._next, None) if delta != Delta()]

    def flush(self) -> list[Delta]:
        """What is left at the end: of a message without an end, or text that is no message."""
        text = self._text
        self._text = ""
        if not text:
            return []
        if not self._is_header:
            return [self._part(text)]
        # A model that does not write channels still answers.
        return [Delta(content=text)] if self._is_first and self.form.channel not in text else []

    def _next(self) -> Delta | None:
        """One more part; an empty one where only the state changed; None where more text is needed."""
        if self._is_header:
            header, mark, rest = self._text.partition(self.form.message)
            if not mark:
                return None
            self._text = rest
            self._is_header = False
            self._is_first = False
            return self._begin(header)
        marks = [(self._text.find(mark), mark) for mark in self._marks if mark in self._text]
        if marks:
            end, mark = min(marks)
            body = self._text[:end]
            self._text = self._text[end + len(mark) :]
            self._is_header = True
            return self._part(body) if body else Delta()
        num_held = max(held(self._text, mark) for mark in self._marks)
        certain = self._text[: len(self._text) - num_held]
        self._text = self._text[len(certain) :]
        return self._part(certain) if certain else None

    def _begin(self, header: str) -> Delta:
        recipient = _RECIPIENT.search(header)
        channel = header.partition(self.form.channel)[2].strip()
        self._is_call = recipient is not None
        self._is_thought = recipient is None and channel.startswith(self.form.thought)
        if recipient is not None:
            self.calls += 1
            name = recipient[1].removeprefix(self.form.namespace)
            return Delta(call=self.calls - 1, name=name, id=f"call_{secrets.token_hex(12)}")
        # Two messages of one kind are two paragraphs.
        if self._is_thought and self._has_thought:
            return Delta(thought="\n\n")
        if not self._is_thought and self._has_content:
            return Delta(content="\n\n")
        return Delta()

    def _part(self, text: str) -> Delta:
        if self._is_call:
            return Delta(call=self.calls - 1, arguments=text)
        if self._is_thought:
            self._has_thought = True
            return Delta(thought=text)
        self._has_content = True
        return Delta(content=text)

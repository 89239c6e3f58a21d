"""Tool calls in text, read back in the form in which a chat template writes them, while they are written."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, final

from bloomery.data.chat.channels import ChannelParser
from bloomery.data.chat.deltas import Delta
from bloomery.data.chat.thoughts import Unwrapped
from bloomery.data.chat.tool_arguments import Arguments, Json, JsonArguments, held
from bloomery.data.chat.tool_forms import ToolFormat


@final
class ToolParser:
    """Reads the calls in an answer while it is written. `tools`: whose schemas tell strings from other values."""

    def __init__(self, form: ToolFormat, tools: Sequence[Json] = ()) -> None:
        self.form = form
        self.calls = 0
        self._schemas = {
            tool["function"]["name"]: tool["function"].get("parameters") for tool in tools
        }
        self._text = ""
        self._inside = False
        self._state: Literal["content", "head", "arguments", "tail", "over"] = (
            "content" if form.opening else "head"
        )
        self._arguments: Arguments = JsonArguments()
        self._unwrapped = Unwrapped(form.around)
        self._head = form.head()
        self._after = form.after()

    def push(self, piece: str) -> list[Delta]:
        """What is certain so far."""
        self._text += piece
        deltas = [self._plain(delta) for delta in iter(self._next, None)]
        return [delta for delta in deltas if delta != Delta()]

    def flush(self) -> list[Delta]:
        """What is left at the end: text that began like a call, and was none."""
        deltas = [self._plain(delta) for delta in self._rest()]
        deltas.append(Delta(content=self._unwrapped.flush()))
        return [delta for delta in deltas if delta != Delta()]

    def _plain(self, delta: Delta) -> Delta:
        """Without the markup around an answer."""
        return replace(delta, content=self._unwrapped.push(delta.content))

    def _rest(self) -> list[Delta]:
        text = self._text
        self._text = ""
        if self._state == "arguments":
            rest = self._arguments.ends_with(text)
            return [Delta(call=self.calls - 1, arguments=rest)] if rest else []
        is_behind = self._state in ("tail", "over")
        if is_behind or not text or (self.calls and not text.strip()):
            return []
        return [Delta(content=(self.form.opening if self._inside else "") + text)]

    def _next(self) -> Delta | None:
        """One more part; an empty one where only the state changed; None where more text is needed."""
        if self._state == "content":
            return self._content()
        if self._state == "head":
            return self._begin()
        if self._state == "arguments":
            return self._continue()
        if self._state == "tail":
            return self._end()
        self._text = ""  # behind an answer that is a call
        return None

    def _content(self) -> Delta | None:
        start = self._text.find(self.form.opening)
        if start >= 0:
            content = self._text[:start]
            self._text = self._text[start + len(self.form.opening) :]
            self._state = "head"
            self._inside = True
            return Delta(content="" if self.calls and not content.strip() else content)
        # The beginning of an opening is held back, and white space that may stand before one.
        num_held = held(self._text, self.form.opening)
        certain = self._text[: len(self._text) - num_held].rstrip()
        self._text = self._text[len(certain) :]
        return Delta(content=certain) if certain else None

    def _begin(self) -> Delta | None:
        match = self._head.match(self._text)
        if match is not None:
            self._text = self._text[match.end() :]
            self._state = "arguments"
            self.calls += 1
            name = match["name"]
            self._arguments = self.form.arguments(self._schemas.get(name))
            if self.form.id_letters and not self.form.is_numbered:
                id_ = self.form.id_written(name, match["id"])
            else:
                id_ = self.form.id_of(secrets.token_hex(12))
            return Delta(call=self.calls - 1, name=name, id=id_)
        beginning = self._text.lstrip()
        is_first = not self.form.opening and not self.calls
        if is_first and beginning and not beginning.startswith(self.form.begins):
            # An answer that is no call.
            content = self._text
            self._text = ""
            return Delta(content=content)
        return None

    def _continue(self) -> Delta | None:
        """Up to the end of the arguments."""
        piece, self._text, has_ended = self._arguments.read(self._text)
        if has_ended:
            self._state = "tail"
        if piece:
            return Delta(call=self.calls - 1, arguments=piece)
        return Delta() if has_ended else None

    def _end(self) -> Delta | None:
        if self.form.several:
            match = self._after.match(self._text)
            if match is None:
                return None
            self._text = self._text[match.end() :]
            self._inside = match["closing"] is None
            if self._inside:
                self._state = "head"
            else:
                self._state = "content" if self.form.opening else "over"
            return Delta()
        if not self.form.opening:
            self._state = "over"
            return Delta()
        start = self._text.find(self.form.closing.strip())
        if start < 0:
            return None
        self._text = self._text[start + len(self.form.closing.strip()) :]
        self._state = "content"
        self._inside = False
        return Delta()


@dataclass(frozen=True)
class ToolCall:
    """A call that an answer makes. `arguments`: as the model wrote them, perhaps no JSON."""

    name: str
    arguments: str
    id: str


def parser_of(form: ToolFormat, tools: Sequence[Json] = ()) -> "ToolParser | ChannelParser":
    """What reads the calls of an answer. `tools`: whose schemas tell strings from other values."""
    if form.channels is not None:
        return ChannelParser(form.channels)
    return ToolParser(form, tools)


def calls_in(
    answer: str, form: ToolFormat, tools: Sequence[Json] = ()
) -> tuple[str, list[ToolCall]]:
    """The text of a whole answer beside its calls, and these. The ids are the places of the calls, unless the model
    writes them. Thoughts in a channel of their own are left out.
    """
    parser = parser_of(form, tools)
    content = ""
    names = list[str]()
    ids = list[str]()
    arguments = list[str]()
    for delta in [*parser.push(answer), *parser.flush()]:
        content += delta.content
        if delta.name is not None:
            names.append(delta.name)
            writes_ids = form.id_letters and not form.is_numbered
            ids.append(delta.id if writes_ids and delta.id else form.id_of(str(len(ids))))
            arguments.append("")
        elif delta.call is not None:
            arguments[delta.call] += delta.arguments
    return content.strip(), [
        ToolCall(name, written, id_)
        for name, written, id_ in zip(names, arguments, ids, strict=True)
    ]

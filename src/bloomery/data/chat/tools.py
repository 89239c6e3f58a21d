"""Tool calls in text: the form in which a chat template writes them, and how they are read back.

The form is found in what the template renders for a call.
"""

import json
import re
import secrets
from dataclasses import dataclass
from typing import Any, Literal, final

from bloomery.core.errors import UserError
from bloomery.data.chat.render import RenderTurns
from bloomery.data.examples import Message

Json = dict[str, Any]
MARKER = "probe_tool"
_CALL = {"name": MARKER, "arguments": {"probe_argument": "probe_value"}}
_PROBE = (
    Message("user", "a"),
    Message("assistant", "", calls=({"id": "a1b2c3d4e", "type": "function", "function": _CALL},)),
)
_TOOL: Json = {
    "type": "function",
    "function": {
        "name": MARKER,
        "description": "d",
        "parameters": {"type": "object", "properties": {"probe_argument": {"type": "string"}}},
    },
}
_ARGUMENTS = re.escape(json.dumps(_CALL["arguments"]))
_HERMES = re.compile(
    rf'<tool_call>\n\{{"name": "{MARKER}", "arguments": {_ARGUMENTS}\}}\n</tool_call>'
)
_MISTRAL = re.compile(rf'\[TOOL_CALLS\]( ?)\[\{{"name": "{MARKER}", "arguments": {_ARGUMENTS}')
_LLAMA = re.compile(rf'\{{"name": "{MARKER}", "parameters": {_ARGUMENTS}\}}')


@final
@dataclass(frozen=True)
class ToolFormat:
    """How calls are written: `opening`, calls like `{"name": ..., ARGUMENTS: {...}}` after `before`, and `closing`.

    `several`: one opening may hold several calls, in a list. Without an opening the whole answer is one call.
    """

    opening: str
    before: str
    arguments: Literal["arguments", "parameters"]
    closing: str
    several: bool = False

    @property
    def id_length(self) -> int:
        """Mistral's templates refuse ids of another length."""
        return 9 if self.several else 24


def tool_format(render: RenderTurns) -> ToolFormat:
    """The form that a chat template renders. Raises UserError for a template without tools, or with another form."""
    try:
        text = render(_PROBE, (_TOOL,))
        with_tools = render(_PROBE[:1], (_TOOL,))
    except UserError as error:
        problem = f"the chat template takes no tools: {error.problem}"
        raise UserError(problem, where=error.where, fix=error.fix) from error
    if MARKER not in with_tools:
        problem = "the chat template takes no tools"
        fix = "choose a model whose template does, or the template qwen"
        raise UserError(problem, where="the chat template", fix=fix)
    if _HERMES.search(text):
        return ToolFormat("<tool_call>", "\n", "arguments", "\n</tool_call>")
    if match := _MISTRAL.search(text):
        return ToolFormat("[TOOL_CALLS]", f"{match[1]}[", "arguments", "]", several=True)
    if _LLAMA.search(text):
        return ToolFormat("", "", "parameters", "")
    raise UserError(
        "the chat template writes tool calls in a form that is not supported; supported are those of Hermes and Qwen, "
        "Llama 3.1 and Mistral",
        where="the chat template",
        fix="choose the template qwen, or leave out tools",
    )


@dataclass(frozen=True)
class Delta:
    """A part of an answer: content, thought, or a piece of the arguments of a call, whose first part has its name and
    id.
    """

    content: str = ""
    thought: str = ""
    call: int | None = None
    name: str | None = None
    id: str | None = None
    arguments: str = ""


@final
class ToolParser:
    """Reads the calls in an answer while it is written."""

    def __init__(self, form: ToolFormat) -> None:
        self.form = form
        self.calls = 0
        self._text = ""
        self._inside = False
        self._state: Literal["content", "head", "arguments", "tail"] = (
            "content" if form.opening else "head"
        )
        self._depth = 0
        self._quoted = False
        self._escaped = False
        self._head = re.compile(
            rf'[\s\[,]*\{{\s*"name":\s*"([^"]*)",\s*"{form.arguments}":\s*(?=\{{)'
        )

    def push(self, piece: str) -> list[Delta]:
        """What is certain so far."""
        self._text += piece
        deltas = list[Delta]()
        while (delta := self._next()) is not None:
            if delta != Delta():
                deltas.append(delta)
        return deltas

    def flush(self) -> list[Delta]:
        """What is left at the end: text that began like a call, and was none."""
        text = self._text
        self._text = ""
        if self._state == "tail" or not text or (self.calls and not text.strip()):
            return []
        if self._state == "arguments":
            return [Delta(call=self.calls - 1, arguments=text)]
        return [Delta(content=(self.form.opening if self._inside else "") + text)]

    def _next(self) -> Delta | None:
        """One more part; an empty one where only the state changed; None where more text is needed."""
        if self._state == "content":
            return self._content()
        if self._state == "head":
            return self._begin()
        if self._state == "arguments":
            return self._continue()
        return self._end()

    def _content(self) -> Delta | None:
        start = self._text.find(self.form.opening)
        if start >= 0:
            content = self._text[:start]
            self._text = self._text[start + len(self.form.opening) :]
            self._state = "head"
            self._inside = True
            return Delta(content="" if self.calls and not content.strip() else content)
        # The beginning of an opening is held back, and white space that may stand before one.
        opening = self.form.opening
        num_held = next(
            (n for n in range(len(opening) - 1, 0, -1) if self._text.endswith(opening[:n])), 0
        )
        certain = self._text[: len(self._text) - num_held].rstrip()
        self._text = self._text[len(certain) :]
        return Delta(content=certain) if certain else None

    def _begin(self) -> Delta | None:
        match = self._head.match(self._text)
        if match is not None:
            self._text = self._text[match.end() :]
            self._state = "arguments"
            self.calls += 1
            name = secrets.token_hex(16)[: self.form.id_length]
            return Delta(
                call=self.calls - 1, name=match[1], id=name if self.form.several else f"call_{name}"
            )
        beginning = self._text.lstrip(" \n[,")
        if not self.form.opening and beginning and not beginning.startswith("{"):
            # An answer that is no call.
            content = self._text
            self._text = ""
            return Delta(content=content)
        return None

    def _continue(self) -> Delta | None:
        """Up to the brace that closes the arguments."""
        for index, letter in enumerate(self._text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped = letter == "\\"
                self._quoted = letter != '"'
            elif letter == '"':
                self._quoted = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth == 0:
                    piece = self._text[: index + 1]
                    self._text = self._text[index + 1 :]
                    self._state = "tail"
                    return Delta(call=self.calls - 1, arguments=piece)
        piece = self._text
        self._text = ""
        return Delta(call=self.calls - 1, arguments=piece) if piece else None

    def _end(self) -> Delta | None:
        if not self.form.opening:
            self._text = ""
            return None
        if self.form.several:  # `}`, perhaps after an id, then a comma or the end of the list
            match = re.match(r"[^}]*\}\s*([,\]])", self._text)
            if match is None:
                return None
            self._text = self._text[match.end() :]
            self._state, self._inside = ("head", True) if match[1] == "," else ("content", False)
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


def calls_in(answer: str, form: ToolFormat) -> tuple[str, list[ToolCall]]:
    """The text of a whole answer beside its calls, and these. The ids are the places of the calls."""
    parser = ToolParser(form)
    content = ""
    names = list[str]()
    arguments = list[str]()
    for delta in [*parser.push(answer), *parser.flush()]:
        content += delta.content
        if delta.name is not None:
            names.append(delta.name)
            arguments.append("")
        elif delta.call is not None:
            arguments[delta.call] += delta.arguments
    return content.strip(), [
        ToolCall(name, written, f"{place:0{form.id_length}d}" if form.several else f"call_{place}")
        for place, (name, written) in enumerate(zip(names, arguments, strict=True))
    ]

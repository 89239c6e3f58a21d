"""Tool calls in text: the form in which a chat template writes them, and how they are read back.

The form is found in what the template renders for a call.
"""

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, final

from bloomery.core.errors import UserError
from bloomery.data.chat.render import RenderTurns
from bloomery.data.chat.tool_arguments import (
    Arguments,
    Json,
    JsonArguments,
    KeywordArguments,
    MarkedArguments,
    Parameters,
    held,
    loose,
)
from bloomery.data.examples import Message

MARKER = "probe_tool"
_ARGUMENTS: Json = {"probe_argument": "probe_value"}
_CALL = {"name": MARKER, "arguments": _ARGUMENTS}
_TOOLS_FIX = "choose a model whose template does, or set data.chat.template=qwen"
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


@final
@dataclass(frozen=True)
class ToolFormat:
    """How calls are written: `opening`, `before` and a call, which is a name within `name`, its arguments and `end`;
    then `closing`.

    Arguments are a JSON object, or `parameters`. `several`: one opening may hold several calls, in a list. `between`:
    what stands between two calls. Without an opening the whole answer is one call. `nine_letters`: of an id, for
    templates that refuse others.
    """

    opening: str
    before: str
    name: tuple[str, str]
    end: str
    closing: str
    parameters: Parameters | None = None
    several: bool = False
    between: str = "\n"
    nine_letters: bool = False

    def written(self, name: str, arguments: Json, *, whole: bool = True) -> str:
        """A call as the template writes it. `whole`: with what closes it."""
        text = self.opening + self.before + name.join(self.name)
        text += (
            json.dumps(arguments, ensure_ascii=False)
            if self.parameters is None
            else self.parameters.written(arguments)
        )
        return text + self.end + self.closing if whole else text

    def id_of(self, letters: str) -> str:
        """An id of a call, of letters and digits that name it."""
        return letters[-9:].rjust(9, "0") if self.nine_letters else f"call_{letters}"

    def arguments(self, schema: Json | None) -> Arguments:
        """What reads the arguments of one call."""
        if self.parameters is None:
            return JsonArguments()
        if self.parameters.quote:
            return KeywordArguments()
        return MarkedArguments(self.parameters, self.end, self.closing.strip(), schema)


def _json_call(arguments: str) -> tuple[str, str]:
    return '{"name": "', f'", "{arguments}": '


_HERMES = ToolFormat("<tool_call>", "\n", _json_call("arguments"), "}", "\n</tool_call>")
_MISTRAL = ToolFormat(
    "[TOOL_CALLS]",
    " [",
    _json_call("arguments"),
    "}",
    "]",
    several=True,
    between=", ",
    nine_letters=True,
)
# The first whose call a template writes. What a model is of says which ones write it.
FORMS = {
    "Hermes and Qwen up to 3 and Granite 4": (_HERMES,),
    "Qwen 3.5 and Qwen3-Coder": (
        ToolFormat(
            "<tool_call>",
            "\n",
            ("<function=", ">\n"),
            "</function>",
            "\n</tool_call>",
            Parameters("<parameter=", ">\n", "\n</parameter>\n"),
        ),
    ),
    "GLM 4.5 and later": (
        ToolFormat(
            "<tool_call>",
            "",
            ("", "\n"),
            "",
            "</tool_call>",
            Parameters("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
        ),
        ToolFormat(
            "<tool_call>",
            "",
            ("", ""),
            "",
            "</tool_call>",
            Parameters("<arg_key>", "</arg_key><arg_value>", "</arg_value>"),
            between="",
        ),
    ),
    "Mistral": (_MISTRAL, replace(_MISTRAL, before="[")),
    "Ministral 3": (
        ToolFormat("[TOOL_CALLS]", "", ("", "[ARGS]"), "", "", between="", nine_letters=True),
    ),
    "LFM 2.5": (
        ToolFormat(
            "<|tool_call_start|>",
            "[",
            ("", "("),
            ")",
            "]<|tool_call_end|>",
            Parameters("", "=", "", ", ", quote="'"),
            several=True,
            between=", ",
        ),
    ),
    "Olmo 3": (
        ToolFormat(
            "<function_calls>",
            "",
            ("", "("),
            ")",
            "</function_calls>",
            Parameters("", "=", "", ", ", quote='"'),
            several=True,
        ),
    ),
    "Llama 3.1": (ToolFormat("", "", _json_call("parameters"), "}", ""),),
}


def tool_format(render: RenderTurns) -> ToolFormat:
    """The form that a chat template renders. Raises UserError for a template without tools, or with another form."""
    try:
        text = render(_PROBE, (_TOOL,))
        with_tools = render(_PROBE[:1], (_TOOL,))
    except UserError as error:
        problem = f"the chat template takes no tools: {error.problem}"
        raise UserError(problem, where=error.where, fix=_TOOLS_FIX) from error
    if MARKER not in with_tools:
        problem = "the chat template takes no tools"
        raise UserError(problem, where="the chat template", fix=_TOOLS_FIX)
    for forms in FORMS.values():
        for form in forms:
            # An id may follow the arguments in a list.
            if form.written(MARKER, _ARGUMENTS, whole=not form.several) in text:
                return form
    raise UserError(
        "the chat template writes tool calls in a form that is not supported; supported are those of "
        + "; ".join(FORMS),
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
    """Reads the calls in an answer while it is written. `tools`: whose schemas tell strings from other values."""

    def __init__(self, form: ToolFormat, tools: Sequence[Json] = ()) -> None:
        self.form = form
        self.calls = 0
        self._schemas = {
            tool["function"]["name"]: tool["function"].get("parameters") for tool in tools
        }
        self._text = ""
        self._inside = False
        self._state: Literal["content", "head", "arguments", "tail"] = (
            "content" if form.opening else "head"
        )
        self._arguments: Arguments = JsonArguments()
        before, after = map(loose, form.name)
        begins = r"\{"
        if form.parameters is not None:
            begins = r"\S" if form.parameters.quote else "<"
        self._head = re.compile(rf'[\s\[,]*{before}([^"<>\n]*?){after}\s*(?={begins})')

        end = rf"[^}}]*{re.escape(form.end)}" if form.parameters is None else ""
        more = re.escape(form.between.strip()) or r"(?=\w)"
        closing = re.escape(form.closing.strip())
        self._after = re.compile(rf"{end}\s*(?:(?P<closing>{closing})|{more})")

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
        if self._state == "arguments":
            rest = self._arguments.ends_with(text)
            return [Delta(call=self.calls - 1, arguments=rest)] if rest else []
        if self._state == "tail" or not text or (self.calls and not text.strip()):
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
            self._arguments = self.form.arguments(self._schemas.get(match[1]))
            id_ = self.form.id_of(secrets.token_hex(12))
            return Delta(call=self.calls - 1, name=match[1], id=id_)
        beginning = self._text.lstrip(" \n[,")
        if not self.form.opening and beginning and not beginning.startswith("{"):
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
        if not self.form.opening:
            self._text = ""
            return None
        if (
            self.form.several
        ):  # in JSON an id may follow the arguments; then another call, or the end of the list
            match = self._after.match(self._text)
            if match is None:
                return None
            self._text = self._text[match.end() :]
            is_over = match["closing"] is not None
            self._state, self._inside = ("content", False) if is_over else ("head", True)
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


def calls_in(
    answer: str, form: ToolFormat, tools: Sequence[Json] = ()
) -> tuple[str, list[ToolCall]]:
    """The text of a whole answer beside its calls, and these. The ids are the places of the calls."""
    parser = ToolParser(form, tools)
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
        ToolCall(name, written, form.id_of(str(place)))
        for place, (name, written) in enumerate(zip(names, arguments, strict=True))
    ]

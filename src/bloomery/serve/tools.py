"""Tool calls: the form in which a chat template writes them, a grammar of that form, and how they are read back.

The form is found in what the template renders for a call. The grammar lets a model write any text, but once it begins a
call, name and arguments follow the schemas of the tools.
"""

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

from bloomery.core.errors import UserError
from bloomery.data.chat.render import RenderTurns
from bloomery.data.examples import Message
from bloomery.data.tokenizer.tokenizer import Tokenizer

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
# Between keys and items models write what json.dumps does; free white space is where small ones never end.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


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
        fix = "serve a model whose template does, or pass --template qwen"
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
        fix="pass --template qwen, or leave out tools",
    )


@final
@dataclass(frozen=True)
class AnswerRules:
    """What an answer may be: calls of `tools`, JSON of `schema`, or without a schema any text.

    `required`: a call and nothing else; `parallel`: or several. `thought`: markup of a thought before it, whose
    beginning the prompt may have (`inside`); None: there is none.
    """

    tools: Sequence[Json] = ()
    required: bool = False
    parallel: bool = False
    schema: Json | None = None
    thought: tuple[str, str] | None = None
    inside: bool = False


def answer_grammar(
    rules: AnswerRules, form: ToolFormat | None, tokenizer: Tokenizer, ends: Sequence[int]
) -> str:
    """In llguidance's Lark. `form`: how calls are written; `ends`: tokens that end a text, which no thought holds."""
    lines = ["%llguidance {}"]
    if rules.schema is not None:
        lines.append(f"answer: %json {json.dumps({**rules.schema, 'x-guidance': _SPACING})}")
    if rules.tools:
        assert form is not None
        lines += _call_rules(rules, form, tokenizer)

    # Without a schema and an obligation the answer is any text, which may be a thought, too.
    if not rules.required and rules.schema is None:
        assert form is not None
        return "\n".join([*lines, _free_text(form, _marker(form.opening, tokenizer))])
    choices = ["calls"] if rules.tools else []
    choices += ["answer"] if rules.schema is not None and not rules.required else []
    lines.append("body: " + " | ".join(choices))
    if rules.thought is None:
        return "\n".join([*lines, "start: body"])
    opening, closing = (_marker(mark, tokenizer) for mark in rules.thought)
    lines.append(_thought_rule(closing, ends))
    begin = "thought space" if rules.inside else f"({opening} thought space)?"
    return "\n".join([*lines, "space: /[ \\n]{0,4}/", f"start: {begin} body"])


def _call_rules(rules: AnswerRules, form: ToolFormat, tokenizer: Tokenizer) -> list[str]:
    opening = _marker(form.opening, tokenizer)
    closing = _marker(form.closing.strip(), tokenizer)
    lines = []
    for number, tool in enumerate(rules.tools):
        function = tool["function"]
        schema = function.get("parameters") or {"additionalProperties": False}
        # OpenAI's functions promise their schema only where they are strict: in others, keywords that the library
        # lacks are left to the model.
        guidance = _SPACING if function.get("strict") else {**_SPACING, "lenient": True}
        head = f'{{"name": {json.dumps(function["name"])}, "{form.arguments}": '
        lines.append(f"arguments_{number}: %json {_object(schema, guidance)}")
        lines.append(f'call_{number}: {json.dumps(head)} arguments_{number} "}}"')
    lines.append("call: " + " | ".join(f"call_{number}" for number in range(len(rules.tools))))
    lead = json.dumps(form.before)
    space = form.closing.removesuffix(form.closing.strip())
    end = f"{json.dumps(space)} {closing}" if space else closing
    if not form.opening:
        return [*lines, "calls: call"]
    if form.several:
        further = ' (", " call)*' if rules.parallel else ""
        calls = f"{lead} call{further} {end}"
    else:
        further = f' ("\\n" {opening} {lead} call {end})*' if rules.parallel else ""
        calls = f"{lead} call {end}{further}"
    return [*lines, f"calls: {opening} {calls}", f"begun: {calls}"]


def _object(schema: Json, guidance: Json) -> str:
    return json.dumps({"type": "object", **schema, "x-guidance": guidance})


def _free_text(form: ToolFormat, opening: str) -> str:
    """Free text may hold every token but the one that opens a call."""
    if not form.opening:
        return "start: TEXT? | calls\nTEXT: /[^{](.|\\n)*/"
    if opening.startswith("<["):
        return f"start: text | text calls\ntext: <[^{opening[2:-2]}]>*"
    return f"start: TEXT | head begun\nhead[lazy]: /(.|\\n)*/ {opening}\nTEXT: /(.|\\n)*/"


def _thought_rule(closing: str, ends: Sequence[int]) -> str:
    """Any text up to the end of the thought."""
    if closing.startswith("<["):
        excluded = ",".join([closing[2:-2], *map(str, ends)])
        return f"thought: <[^{excluded}]>* {closing}"
    return f"thought[lazy]: /(.|\\n)*/ {closing}"


def _marker(text: str, tokenizer: Tokenizer) -> str:
    """A token of its own where the vocabulary has one: llguidance takes such tokens for no text."""
    token = tokenizer.id_of(text) if text else None
    return json.dumps(text) if token is None else f"<[{token}]>"


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

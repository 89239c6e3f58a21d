"""Answers of a form: a grammar of tool calls and of JSON, in the form that a chat template writes.

The grammar lets a model write any text, but once it begins a call, name and arguments follow the schemas of the tools.
"""

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import final

from bloomery.core.errors import UserError
from bloomery.data.chat.channels import Channels
from bloomery.data.chat.thoughts import ThoughtFormat
from bloomery.data.chat.tool_arguments import Json, Parameters, kind_of, kinds_of, value_text
from bloomery.data.chat.tool_forms import ID, ToolFormat
from bloomery.data.tokenizer.tokenizer import Tokenizer
from bloomery.infer.grammar_trials import unsupported_schema
from bloomery.serve.bare_arguments import BareRules

# Between keys and items models write what json.dumps does; free white space is where small ones never end.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Text that is free up to a mark obeys no more than these; of a strict tool, others are an error.
_OF_ANY_TEXT = {"type", "title", "description", "default", "examples", "anyOf"}
MOST_CHARACTERS = (
    2**23
)  # of a grammar: a request of 2 MiB that repeats its definitions would take gigabytes


@final
@dataclass(frozen=True)
class AnswerRules:
    """What an answer may be: calls of `tools`, JSON of `schema`, or without a schema any text.

    `required`: a call and nothing else; `parallel`: or several. `thought`: how a thought before it is marked, whose
    beginning the prompt may have (`inside`); None: there is none.
    """

    tools: Sequence[Json] = ()
    required: bool = False
    parallel: bool = False
    schema: Json | None = None
    thought: ThoughtFormat | Channels | None = None
    inside: bool = False


def answer_grammar(
    rules: AnswerRules, form: ToolFormat | None, tokenizer: Tokenizer, ends: Sequence[int]
) -> str:
    """In llguidance's Lark. `form`: how calls are written; `ends`: tokens that end a text, which no thought holds."""
    if isinstance(rules.thought, Channels):
        return _channel_grammar(rules, rules.thought, tokenizer, ends)
    lines = ["%llguidance {}"]
    if rules.schema is not None:
        lines.append(f"answer: %json {json.dumps({**rules.schema, 'x-guidance': _SPACING})}")
    if rules.tools:
        assert form is not None
        lines += _call_rules(rules, form, tokenizer, ends)

    # Without a schema and an obligation the answer is any text, which may be a thought, too.
    if not rules.required and rules.schema is None:
        assert form is not None
        return "\n".join([*lines, _free_text(form, _markup(form.opening, tokenizer))])
    choices = ["calls"] if rules.tools else []
    choices += ["answer"] if rules.schema is not None and not rules.required else []
    lines.append("body: " + " | ".join(choices))
    if rules.thought is None:
        return "\n".join([*lines, "start: body"])
    opening = _marker(rules.thought.opening, tokenizer)
    closing = _marker(rules.thought.closing, tokenizer)
    lines.append(_text_up_to("thought", closing, ends))
    begin = "thought space" if rules.inside else f"({opening} thought space)?"
    return "\n".join([*lines, "space: /[ \\n]{0,4}/", f"start: {begin} body"])


def _call_rules(
    rules: AnswerRules, form: ToolFormat, tokenizer: Tokenizer, ends: Sequence[int]
) -> list[str]:
    opening = _markup(form.opening, tokenizer)
    lines = list[str]()
    num_characters = 0
    for number, tool in enumerate(rules.tools):
        function = tool["function"]
        schema = function.get("parameters") or {"additionalProperties": False}
        # OpenAI's functions promise their schema only where they are strict: in others, keywords that the library
        # lacks are left to the model.
        strict = bool(function.get("strict"))
        guidance = _SPACING if strict else {**_SPACING, "lenient": True}
        rule = f"arguments_{number}"
        if form.parameters is None:
            lines.append(f"{rule}: %json {_object(schema, guidance)}")
        elif form.parameters.has_bare_names:
            quote = _marker(form.parameters.quote, tokenizer)
            lines += BareRules(rule, schema, strict=strict, quote=quote, text="bare_text").lines
        else:
            of_tool = _ParameterRules(
                form.parameters, schema, guidance, strict, tokenizer, ends
            ).lines(rule)
            lines += of_tool
            num_characters += sum(map(len, of_tool))
            _refuse_long(num_characters)
        before, after = (
            f" /{form.id_letters}/ ".join(_markup(mark, tokenizer) for mark in part.split(ID))
            for part in form.name
        )
        end = _markup(form.end, tokenizer)
        lines.append(f"call_{number}: {before} {json.dumps(function['name'])} {after} {rule} {end}")
    if form.parameters is not None and form.parameters.has_bare_names:
        quote = _marker(form.parameters.quote, tokenizer)
        lines.append(_text_up_to("bare_text", quote, ends))
    lines.append("call: " + " | ".join(f"call_{number}" for number in range(len(rules.tools))))
    lead = _markup(form.before, tokenizer)
    end = _markup(form.closing, tokenizer)
    between = _markup(form.between, tokenizer)
    if form.several:
        further = f" ({between} call)*" if rules.parallel else ""
        calls = f"{lead} call{further} {end}"
    elif not form.opening:
        calls = "call"
    else:
        further = f" ({between} {opening} {lead} call {end})*" if rules.parallel else ""
        calls = f"{lead} call {end}{further}"
    if not form.opening:
        return [*lines, f"calls: {calls}"]
    return [*lines, f"calls: {opening} {calls}", f"begun: {calls}"]


def _channel_grammar(
    rules: AnswerRules, channels: Channels, tokenizer: Tokenizer, ends: Sequence[int]
) -> str:
    """An answer of messages: thoughts and text for the user, then a call or the final text."""
    marks = (channels.start, channels.channel, channels.message, channels.ends[0])
    ids = [tokenizer.id_of(mark) for mark in (*marks, channels.constrain, *channels.ends)]
    if None in ids:
        mark = next(mark for mark in marks if tokenizer.id_of(mark) is None)
        raise UserError(
            f"the tokenizer has no token {mark}, which the chat template writes",
            where="the tokenizer",
            fix="use the tokenizer of the model that the chat template belongs to",
        )
    start, channel, message, end = (f"<[{tokenizer.id_of(mark)}]>" for mark in marks)
    constrain = f"<[{tokenizer.id_of(channels.constrain)}]>"
    excluded = ",".join(map(str, sorted({*ends, *(id_ for id_ in ids if id_ is not None)})))
    lines = [
        "%llguidance {}",
        f"text: <[^{excluded}]>*",
        f'thought: {channel} "{channels.thought}" {message} text',
        f'remark: {channel} "commentary" {message} text',
        f'again: {end} {start} "assistant"',
    ]
    final = "text"
    if rules.schema is not None:
        final = f"%json {json.dumps({**rules.schema, 'x-guidance': _SPACING})}"
    lines += [f"answer: {final}", f'final: {channel} "final" {message} answer']

    # The recipient of a call stands in front of the channel, or in it, where models write it.
    content = f'(" " {constrain}? "json")?'
    for number, tool in enumerate(rules.tools):
        function = tool["function"]
        schema = function.get("parameters") or {"additionalProperties": False}
        guidance = _SPACING if function.get("strict") else {**_SPACING, "lenient": True}
        name = json.dumps(f" to={channels.namespace}{function['name']}")
        lines.append(f"arguments_{number}: %json {_object(schema, guidance)}")
        lines.append(
            f'call_{number}: ({name} {channel} "commentary" | {channel} "commentary" {name})'
            f" {content} {message} arguments_{number}"
        )
    calls = [f"call_{number}" for number in range(len(rules.tools))]
    before = "(thought again)?" if rules.required or rules.schema else "((thought | remark) again)*"
    choices = calls if rules.required else ["final", *calls]
    return "\n".join([*lines, f"start: {before} ({' | '.join(choices)})"])


@final
@dataclass(frozen=True)
class _ParameterRules:
    """The grammar of arguments that are written one by one, in the order of their schema, as in JSON."""

    marks: Parameters
    schema: Json
    guidance: Json
    strict: bool
    tokenizer: Tokenizer
    ends: Sequence[int]

    def lines(self, rule: str) -> list[str]:
        """The rule of all arguments, and those of each. Raises UserError for a schema that is not supported."""
        properties = self.schema.get("properties", {})
        required = self.schema.get("required", [])
        kind = self.schema.get("type", "object")
        if kind != "object" or not isinstance(properties, dict) or not isinstance(required, list):
            raise unsupported_schema("arguments are an object of properties, some of them required")
        begin = _markup(self.marks.before, self.tokenizer)
        num_characters = 0
        lines, order = list[str](), list[tuple[str, bool]]()
        for place, (name, schema) in enumerate(properties.items()):
            of_value = self._value(f"{rule}_{place}", f"{begin} {json.dumps(name)}", schema)
            lines += of_value
            order.append((f"{rule}_{place}", name in required))
            # Each argument that names a definition has a copy of all of them.
            num_characters += sum(map(len, of_value))
            _refuse_long(num_characters)
        # Others are written where the schema asks for them, or says nothing of its arguments.
        further = self.schema.get("additionalProperties", not properties)
        last = '""'
        separator = json.dumps(self.marks.separator)
        if further is not False:
            other = f"{rule}_other"
            lines += self._value(other, f"{begin} /[A-Za-z0-9_.-]{{1,64}}/", further)
            last = f"({separator} {other})*"
            lines.append(f"{rule}_begin_{len(order)}: ({other} {last})?")
        else:
            lines.append(f'{rule}_begin_{len(order)}: ""')
        lines.append(f"{rule}_more_{len(order)}: {last}")
        # A separator stands before each but the first that is written.
        for place, (name, is_required) in reversed(list(enumerate(order))):
            begins = f"{name} {rule}_more_{place + 1}"
            goes_on = f"{separator} {begins}"
            if not is_required:
                begins += f" | {rule}_begin_{place + 1}"
                goes_on += f" | {rule}_more_{place + 1}"
            lines += [f"{rule}_begin_{place}: {begins}", f"{rule}_more_{place}: {goes_on}"]
        return [*lines, f"{rule}: {rule}_begin_0"]

    def _value(self, rule: str, begin: str, schema: object) -> list[str]:
        """A parameter with its marks. A value that may be a string is any text up to the mark.

        `begin`: what stands up to the end of its name.
        """
        described = schema if isinstance(schema, dict) else {}
        after = _markup(self.marks.after, self.tokenizer)
        allowed = [described["const"]] if "const" in described else described.get("enum")
        if allowed == []:
            raise unsupported_schema("an enum without values")
        if isinstance(allowed, list) and not self.marks.quote:
            choices = (
                f"{self._head(begin, kind_of(value))} {json.dumps(value_text(value))}"
                for value in allowed
            )
            return [f"{rule}: ({' | '.join(choices)}) {after}"]
        kinds = kinds_of(schema, self.schema)
        if self.marks.quote or "string" not in kinds:
            return self._json(rule, begin, described, kinds)
        if self.strict and not _is_plain(described):
            raise unsupported_schema(
                "a strict tool's rules of a text, which calls of this chat template write without quotes"
            )
        if self.marks.kind_names and kinds != {"string"}:
            # Where the type is named, what is no text is JSON.
            others = kinds - {"string"}
            of_others = {**described, "type": sorted(others)}
            return [
                *self._text(f"{rule}_string", begin),
                *self._json(f"{rule}_other", begin, of_others, others),
                f"{rule}: {rule}_string | {rule}_other",
            ]
        return self._text(rule, begin)

    def _head(self, begin: str, kind: str) -> str:
        return f"{begin} {_markup(self.marks.between_of(kind), self.tokenizer)}"

    def _json(self, rule: str, begin: str, described: Json, kinds: Collection[str]) -> list[str]:
        """A value that is JSON, of some types."""
        value = json.dumps({**described, "x-guidance": self.guidance})
        if '"$ref"' in value:
            definitions = {
                key: self.schema[key] for key in ("$defs", "definitions") if key in self.schema
            }
            value = json.dumps({**definitions, **described, "x-guidance": self.guidance})
        heads = dict.fromkeys(self._head(begin, kind) for kind in sorted(kinds))
        after = _markup(self.marks.after, self.tokenizer)
        return [f"{rule}_json: %json {value}", f"{rule}: ({' | '.join(heads)}) {rule}_json {after}"]

    def _text(self, rule: str, begin: str) -> list[str]:
        """A value that is any text."""
        head = self._head(begin, "string")
        # Where the mark is a token, the white space before it is the model's to write.
        name = self.marks.after.strip()
        mark = _markup(name, self.tokenizer)
        space = json.dumps(self.marks.after.partition(name)[2])
        if not _is_token(mark) and " <[" not in mark:
            mark = json.dumps(self.marks.after)
            space = ""
        text = _text_up_to(f"{rule}_text", mark, self.ends)
        return [text, f"{rule}: {head} {rule}_text {space}"]


def _is_plain(schema: Json) -> bool:
    """Whether any text obeys a schema of scalars, as far as its type goes."""
    alternatives = schema.get("anyOf", [])
    return schema.keys() <= _OF_ANY_TEXT and all(
        isinstance(each, dict) and each.get("type") not in ("object", "array") and _is_plain(each)
        for each in alternatives
    )


def _refuse_long(num_characters: int) -> None:
    if num_characters > MOST_CHARACTERS:
        raise unsupported_schema(
            f"definitions that many arguments name: a grammar of more than {MOST_CHARACTERS:,} characters"
        )


def _object(schema: Json, guidance: Json) -> str:
    return json.dumps({"type": "object", **schema, "x-guidance": guidance})


def _free_text(form: ToolFormat, opening: str) -> str:
    """Free text may hold every token but the one that opens a call."""
    if not form.opening:
        return f"start: TEXT? | calls\nTEXT: /[^\\{form.begins}](.|\\n)*/"
    if _is_token(opening):
        return f"start: text | text calls\ntext: <[^{opening[2:-2]}]>*"
    return f"start: TEXT | head begun\n{_text_up_to('head', opening, ())}\nTEXT: /(.|\\n)*/"


def _text_up_to(rule: str, closing: str, ends: Sequence[int]) -> str:
    """Any text up to a mark, and the mark, which may have tokens of its own."""
    if _is_token(closing):
        excluded = ",".join([closing[2:-2], *map(str, ends)])
        return f"{rule}: <[^{excluded}]>* {closing}"
    before, token, behind = closing.partition(" <[")
    if token:
        # No text holds a token: what stands in front of it is the end of the text.
        end = re.escape(json.loads(before)).replace("/", "\\/")
        return f"{rule}: /(.|\\n)*{end}/ <[{behind}"
    return f"{rule}[lazy]: /(.|\\n)*/ {closing}"


def _is_token(markup: str) -> bool:
    return re.fullmatch(r"<\[\d+\]>", markup) is not None


def _markup(text: str, tokenizer: Tokenizer) -> str:
    """A text in which marks such as `[ARGS]` may be tokens."""
    marks = r"</?[\w:]+>|<\|?\w+\|?>|<[|｜][^<>]*[|｜]>|｜\w+｜|\[[A-Z_]+\]"
    pieces = re.split(f"({marks})", text)
    parts = [
        _marker(piece, tokenizer) if place % 2 else json.dumps(piece)
        for place, piece in enumerate(pieces)
    ]
    return " ".join(part for part in parts if part != '""') or '""'


def _marker(text: str, tokenizer: Tokenizer) -> str:
    """A token of its own where the vocabulary has one: llguidance takes such tokens for no text."""
    token = tokenizer.id_of(text) if text else None
    return json.dumps(text) if token is None else f"<[{token}]>"

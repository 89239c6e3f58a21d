"""Answers of a form: a grammar of tool calls and of JSON, in the form that a chat template writes.

The grammar lets a model write any text, but once it begins a call, name and arguments follow the schemas of the tools.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from bloomery.data.chat.tools import Json, ToolFormat
from bloomery.data.tokenizer.tokenizer import Tokenizer

# Between keys and items models write what json.dumps does; free white space is where small ones never end.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


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

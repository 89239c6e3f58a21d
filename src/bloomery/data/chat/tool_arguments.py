"""The arguments of a call as a model writes them: a JSON object, or parameters one by one, as markup.

Both are read while they are written, and become the text of a JSON object, as OpenAI's clients expect it.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, final

Json = dict[str, Any]
KINDS = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})
KIND = "{kind}"  # in what stands between a name and a value: where the type of the value is named
_PYTHON = {
    "True": "true",
    "False": "false",
    "None": "null",
}  # templates with `| string` write these


@final
@dataclass(frozen=True)
class Parameters:
    """Each argument as `before`, its name, `between`, its value and `after`, with `separator` between two of them.

    Values are JSON; strings are as they are, or within `quote`. `kind_names`: of JSON's types, by which `between` says
    in place of KIND what the value is.
    """

    before: str
    between: str
    after: str
    separator: str = ""
    quote: str = ""
    kind_names: Mapping[str, str] = field(default_factory=dict)

    def written(self, arguments: Json) -> str:
        return self.separator.join(
            f"{self.before}{name}{self.between_of(kind_of(value))}{self._value(value)}{self.after}"
            for name, value in arguments.items()
        )

    def between_of(self, kind: str) -> str:
        """What stands between a name and a value of one of JSON's types."""
        return self.between.replace(KIND, self.kind_names.get(kind, ""))

    def kinds_named(self, name: str) -> frozenset[str]:
        """The types that a name says; none for an unknown name."""
        return frozenset(kind for kind, known in self.kind_names.items() if known == name)

    def between_pattern(self) -> str:
        """An expression of what stands between: group `kind` is the name of the type, which a model may leave out."""
        before_kind, kind, after_kind = self.between.partition(KIND)
        if not kind:
            return f"{loose(self.between)}(?P<kind>(?!))?"
        named = f'{loose(before_kind)}(?P<kind>[^"<>\\n]*){loose(after_kind)}'
        # Without the attribute its quotes are missing, too.
        return f"(?:{named}|{loose(before_kind[:1] + after_kind[1:])})"

    def _value(self, value: object) -> str:
        if self.has_bare_names:
            return self._bare(value)
        if self.quote != "'" or not isinstance(value, str):
            return json.dumps(value, ensure_ascii=False) if self.quote else value_text(value)
        return "'" + json.dumps(value, ensure_ascii=False)[1:-1].replace("'", "\\'") + "'"

    @property
    def has_bare_names(self) -> bool:
        """Whether strings stand between marks of their own, and names of objects without any."""
        return self.quote not in ("", "'", '"')

    def _bare(self, value: object) -> str:
        if isinstance(value, str):
            return self.quote + value + self.quote
        if isinstance(value, Mapping):
            return "{" + ",".join(f"{key}:{self._bare(item)}" for key, item in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(self._bare, value)) + "]"
        return json.dumps(value)


def value_text(value: object) -> str:
    """A value as templates write it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def kinds_of(schema: object, root: Json) -> frozenset[str]:
    """JSON's types that a schema allows; all of them where it does not say. `root` has its definitions."""
    return _kinds(schema, root, 8, {})


def _kinds(
    schema: object, root: Json, depth: int, of_references: dict[str, frozenset[str]]
) -> frozenset[str]:
    """`of_references`: the types of definitions that have been read. Each is read once, however often it is named; one
    that holds itself allows all of them there.
    """
    if not isinstance(schema, Mapping) or not depth:
        return KINDS
    kinds = KINDS
    if isinstance(schema.get("type"), str | list):
        named = schema["type"]
        kinds = frozenset([named] if isinstance(named, str) else map(str, named))
    allowed = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(allowed, list):
        kinds &= frozenset(map(kind_of, allowed))
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            kinds &= frozenset[str]().union(
                *(_kinds(each, root, depth - 1, of_references) for each in schema[key])
            )
    if isinstance(schema.get("allOf"), list):
        for each in schema["allOf"]:
            kinds &= _kinds(each, root, depth - 1, of_references)
    reference = schema.get("$ref")
    if isinstance(reference, str):
        if reference not in of_references:
            of_references[reference] = KINDS
            definition = definition_of(reference, root)
            of_references[reference] = _kinds(definition, root, depth - 1, of_references)
        kinds &= of_references[reference]
    return kinds


def definition_of(reference: str, root: Json) -> object:
    """The part of a schema that "#/$defs/name" names; None where it leads nowhere."""
    if not reference.startswith("#/"):
        return None
    definition: object = root
    for name in reference.split("/")[1:]:
        definition = definition.get(name) if isinstance(definition, Mapping) else None
    return definition


def kind_of(value: object) -> str:
    """JSON's type of a value."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        # 2.0 is an integer for JSON Schema, too; 1e999 is infinite.
        return "integer" if isinstance(value, int) or value.is_integer() else "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def value_of(text: str, kinds: frozenset[str]) -> str:
    """A value as JSON. A string is written as it is, so quotes belong to it; a text that is no JSON is a string."""
    try:
        value = json.loads(_PYTHON.get(text.strip(), text))
        kind = kind_of(value)
    except (ValueError, OverflowError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    is_allowed = kind in kinds or (kind == "integer" and "number" in kinds)
    if kind == "string" or (not is_allowed and "string" in kinds):
        return json.dumps(text, ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False)


class Arguments(Protocol):
    """Reads the arguments of one call."""

    def read(self, text: str) -> tuple[str, str, bool]:
        """JSON that is certain, the text that is left, and whether the arguments have ended."""

    def ends_with(self, text: str) -> str:
        """JSON at the end of an answer whose arguments have not ended."""


@final
class JsonArguments:
    """A JSON object, which a brace ends."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = False
        self._escaped = False

    def read(self, text: str) -> tuple[str, str, bool]:
        for index, letter in enumerate(text):
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
                    return text[: index + 1], text[index + 1 :], True
        return text, "", False

    def ends_with(self, text: str) -> str:
        return text


@final
class MarkedArguments:
    """Parameters one by one, up to `end`, or to `closing` after it. `schema`: of the arguments; without one, any.

    Text between parameters stays where it is, and the arguments are then no JSON.
    """

    def __init__(self, marks: Parameters, end: str, closing: str, schema: Json | None) -> None:
        self._end = end
        self._closing = closing
        self._schema: Json = schema or {}
        self._marks = marks
        self._mark = marks.before
        line = marks.between.endswith("\n")
        # One line break may stand before a value; more of them are the value's.
        self._name = re.compile(
            f"{re.escape(marks.before)}([^<>\n]*?){marks.between_pattern()}"
            + (r"[ \t]*(?:\n|(?=[^ \t\n]))" if line else "")
        )
        self._after = marks.after.strip()
        self._line = "\n" if marks.after.startswith("\n") else ""
        self._written = 0  # parameters so far
        self._kinds: frozenset[str] | None = None  # of the value that is read
        self._begun = False

    def read(self, text: str) -> tuple[str, str, bool]:
        found = ""
        while True:
            if self._kinds is None:
                piece, text, state = self._between(text)
            else:
                piece, text, state = self._value(text, self._kinds)
            found += piece
            if state is not None:
                return found, text, state

    def ends_with(self, text: str) -> str:
        return json.dumps(text, ensure_ascii=False)[1:-1] if self._kinds is not None else text

    def _between(self, text: str) -> tuple[str, str, bool | None]:
        """As `read`; None: go on."""
        rest = text.lstrip()
        opening = "" if self._written else "{"
        if self._end and rest.startswith(self._end):
            return opening + "}", rest.removeprefix(self._end), True
        if rest.startswith(self._closing):  # without an end, or the model left it out
            return opening + "}", rest, True
        if match := self._name.match(rest):
            properties = self._schema.get("properties")
            known = properties.get(match[1]) if isinstance(properties, Mapping) else None
            named = self._marks.kinds_named(match["kind"] or "")
            self._kinds = named or kinds_of(known, self._schema)
            self._begun = False
            head = f"{opening or ', '}{json.dumps(match[1], ensure_ascii=False)}: "
            self._written += 1
            return head, rest[match.end() :], None
        if rest.startswith(self._mark) or any(
            mark.startswith(rest) for mark in (self._mark, self._end, self._closing)
        ):
            return "", rest, False
        # Neither a parameter nor the end of the call.
        self._written += 1
        return opening + rest[0], rest[1:], None

    def _value(self, text: str, kinds: frozenset[str]) -> tuple[str, str, bool | None]:
        end = text.find(self._after)
        if end >= 0:
            value = text[:end].removesuffix(self._line)
            self._kinds = None
            rest = text[end + len(self._after) :]
            if kinds != {"string"}:
                return value_of(value, kinds), rest, None
            quote = "" if self._begun else '"'
            return f'{quote}{json.dumps(value, ensure_ascii=False)[1:-1]}"', rest, None
        if kinds != {"string"}:
            return "", text, False
        num_held = max(held(text, self._after), held(text, self._line + self._after))
        certain = text[: len(text) - num_held]
        quote = "" if self._begun else '"'
        self._begun = True
        return (
            quote + json.dumps(certain, ensure_ascii=False)[1:-1],
            text[len(certain) :],
            False,
        )


@final
class KeywordArguments:
    """Arguments as those of a call in Python, up to the bracket that closes them: `a="x", b=[1, 'y', True]`.

    What no JSON can be made of stays as it is written.
    """

    _TOKEN = re.compile(
        r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\w+\s*=|\b(?:True|False|None)\b|\w+|[()\[\]{}]""",
        re.DOTALL,
    )

    def __init__(self) -> None:
        self._pieces = list[str]()
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def read(self, text: str) -> tuple[str, str, bool]:
        for index, letter in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quote:
                self._escaped = letter == "\\"
                self._quote = "" if letter == self._quote else self._quote
            elif letter in "'\"":
                self._quote = letter
            elif letter == ")" and not self._depth:
                return self.ends_with(text[:index]) + "}", text[index + 1 :], True
            else:
                self._depth += (letter in "([{") - (letter in ")]}")
        self._pieces.append(text)
        return "", "", False

    def ends_with(self, text: str) -> str:
        depth = 0

        def as_json(match: re.Match[str]) -> str:
            nonlocal depth
            token = match[0]
            depth += (token in "([{") - (token in ")]}")
            if token.startswith("'"):
                inner = re.sub(r'\\(.)|"', _without_single_quotes, token[1:-1], flags=re.DOTALL)
                return f'"{inner}"'
            if token.endswith("=") and not depth:
                return json.dumps(token[:-1].strip(), ensure_ascii=False) + ": "
            return _PYTHON.get(token, token)

        return "{" + self._TOKEN.sub(as_json, "".join(self._pieces) + text)


@final
class BareArguments:
    """Arguments between braces, with bare names and with strings between two marks `quote`: `n:1,text:<|"|>a<|"|>`.

    A string holds every letter as it is. What no JSON can be made of stays as it is written.
    """

    def __init__(self, quote: str) -> None:
        self._quote = quote
        self._text = ""
        self._place = 0  # up to which the text was read
        self._depth = 0
        self._is_quoted = False

    def read(self, text: str) -> tuple[str, str, bool]:
        self._text += text
        while self._place < len(self._text):
            if self._is_quoted:
                end = self._text.find(self._quote, self._place)
                if end < 0:
                    return "", "", False
                self._place = end + len(self._quote)
                self._is_quoted = False
                continue
            next_letters = self._text[self._place : self._place + len(self._quote)]
            if next_letters == self._quote:
                self._is_quoted = True
                self._place += len(self._quote)
                continue
            if self._quote.startswith(next_letters):  # it may be a mark when more is written
                return "", "", False
            letter = next_letters[0]
            if letter == "}" and not self._depth:
                arguments = self.ends_with("", self._text[: self._place])
                return arguments + "}", self._text[self._place + 1 :], True
            self._depth += (letter in "{[") - (letter in "}]")
            self._place += 1
        return "", "", False

    def ends_with(self, text: str, whole: str | None = None) -> str:
        pieces = (self._text + text if whole is None else whole).split(self._quote)
        # Every second piece is a string; one without an end is none.
        written = "{"
        for number, piece in enumerate(pieces):
            if number % 2 == 0:
                written += self._without_bare_names(piece)
            elif number < len(pieces) - 1:
                written += json.dumps(piece, ensure_ascii=False)
            else:
                written += self._quote + piece
        return written

    def _without_bare_names(self, text: str) -> str:
        """Names in front of a colon get quotes, and values of Python become those of JSON."""

        def as_json(match: re.Match[str]) -> str:
            return f"{match[1]}{json.dumps(match[2], ensure_ascii=False)}:"

        named = re.sub(r"((?:^|[{,])\s*)([^\s{}\[\],:\"]+)\s*:", as_json, text)
        return re.sub(r"\b(?:True|False|None)\b", lambda match: _PYTHON[match[0]], named)


def _without_single_quotes(match: re.Match[str]) -> str:
    """An escape or a quote of a text within single quotes, for one within double quotes."""
    if match[0] == '"':
        return '\\"'
    return "'" if match[1] == "'" else match[0]


def held(text: str, mark: str) -> int:
    """How many characters at the end of a text may begin the mark."""
    return next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)


def loose(text: str) -> str:
    """An expression of markup, with any white space where it may have some."""
    return r"\s*".join(map(re.escape, re.findall(r"[{}]|[^\s{}]+", text)))

"""YAML 1.2 as plain values with their file and line. Tags, duplicate keys and oversized files are refused."""

import math
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, final

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError, YAMLStreamError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)
from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode
from ruamel.yaml.parser import Parser

KeyPath = tuple[str | int, ...]

MAX_BYTES = 1_000_000
MAX_DEPTH = 32
MAX_ALIASES = 64
MAX_VALUES = 5_000  # after aliases are written out; a recipe of 300 lines holds about 400
_CORE = "tag:yaml.org,2002:"
_HINTS = (  # (ruamel.yaml's message, its usual cause)
    (
        "expected alphabetic or numeric character",
        'a value that starts with * or & needs quotes: glob: "*.go"',
    ),
    (
        "mapping values are not allowed",
        "a second colon in one line: put the value in quotes, or check the indentation",
    ),
    (
        "could not find expected ':'",
        "a key without a colon, or a value that began in the line above",
    ),
    ("unexpected end of stream", "a quote or a bracket is never closed"),
    ("<block end>", "the indentation does not fit the lines above"),
    ("expected ',' or", "a comma or a closing bracket is missing"),
    ("cannot start any token", "this character needs quotes around the value"),
    ("undefined alias", 'a value that starts with * needs quotes: glob: "*.go"'),
    ("another document", "a recipe is one document: remove the second ---"),
    ("special characters are not allowed", "the file holds control characters: is it a text file?"),
)


@dataclass(frozen=True)
class Origin:
    """Where a value was written, and the folder that relative paths in it start from."""

    place: str
    folder: Path


@dataclass(frozen=True)
class Mistake:
    """One thing that is wrong in a recipe."""

    path: KeyPath
    place: str
    problem: str
    fix: str = ""

    @property
    def key(self) -> str:
        return ".".join(map(str, self.path))


@dataclass
class YamlDocument:
    """The content of one file or one override."""

    data: Any
    origins: dict[KeyPath, Origin] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)


class _TooMuch(Exception):
    """A limit of this module was reached: what the recipe does, and what to do about it."""

    def __init__(
        self, what: str, fix: str = "write the values out, in a file of ordinary size"
    ) -> None:
        super().__init__(what, fix)


def read_yaml(text: str, *, source: str, folder: Path) -> YamlDocument:
    """Parse `text`. Nothing is raised for bad input: the document lists its mistakes, each with its line.

    >>> read_yaml("rate: 1e-4", source="a.yaml", folder=Path()).data
    {'rate': 0.0001}
    """
    document = _document(text, source)
    origins = {path: replace(origin, folder=folder) for path, origin in document.origins.items()}
    return YamlDocument(deepcopy(document.data), origins, list(document.mistakes))


@lru_cache(maxsize=256)  # points of a sweep, and recipes with one parent, read the same texts again
def _document(text: str, source: str) -> YamlDocument:
    """The document of `text`, with the working folder as that of its origins."""
    reader = _Reader(source)
    try:
        if len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
            raise _TooMuch(
                f"is larger than {MAX_BYTES // 1_000_000} MB; a recipe is a page of text"
            )
        yaml = YAML(typ="safe", pure=True)
        yaml.Parser = _BoundedParser
        node = yaml.compose(text)
        data = None if node is None else reader.value(node, ())
    except (YAMLError, YAMLStreamError, _TooMuch) as error:
        line, problem, fix = _explain(error, text)
        place = f"{source} line {line}" if line else source
        return YamlDocument(None, {}, [Mistake((), place, problem, fix)])
    return YamlDocument(data, reader.origins, reader.mistakes)


@final
class _BoundedParser(Parser):
    """Counts the events that the composer takes, which recurses as deep as the file nests. Raises _TooMuch."""

    levels = 0
    aliases = 0
    scalars = 0

    def get_event(self) -> Any:
        event = super().get_event()
        self.scalars += isinstance(event, ScalarEvent)
        if self.scalars > 2 * MAX_VALUES:  # a key and its value each
            raise _TooMuch(
                f"holds more than {MAX_VALUES:,} values",
                "a recipe is a page of text; is it a data file?",
            )
        self.levels += isinstance(event, MappingStartEvent | SequenceStartEvent)
        self.levels -= isinstance(event, MappingEndEvent | SequenceEndEvent)
        self.aliases += isinstance(event, AliasEvent)
        if self.levels > MAX_DEPTH:
            raise _TooMuch(f"is nested more than {MAX_DEPTH} levels deep")
        if self.aliases > MAX_ALIASES:
            raise _TooMuch(f"uses more than {MAX_ALIASES} aliases (*name)")
        if isinstance(event, DocumentStartEvent) and event.version not in (None, (1, 2)):
            raise _TooMuch(
                "asks for another YAML version; recipes are YAML 1.2", "remove the %YAML line"
            )
        return event


def _explain(error: Exception, text: str) -> tuple[int, str, str]:
    """(line or 0, what is wrong, what to do)."""
    if isinstance(error, _TooMuch):
        return 0, f"the recipe {error.args[0]}", error.args[1]
    for number, line in enumerate(text.splitlines(), 1):
        indent = line[: len(line) - len(line.lstrip())]
        if "\t" in indent and line.strip():
            return number, "the line is indented with a tab", "YAML wants spaces"
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    problem = error.problem if isinstance(error, MarkedYAMLError) else None
    message = problem or str(error).splitlines()[0]
    hints = (cause for words, cause in _HINTS if words in message)
    hint = next(hints, "see `bloomery recipes show everything`")
    return (mark.line + 1 if mark is not None else 0), f"this is not YAML: {message}", hint


class _Reader:
    """Walks the node graph once; collects origins and mistakes."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.origins: dict[KeyPath, Origin] = {}
        self.mistakes: list[Mistake] = []
        self.values = 0

    def value(self, node: Any, path: KeyPath) -> Any:
        self.values += 1
        if self.values > 2 * MAX_VALUES or len(path) > MAX_DEPTH:
            raise _TooMuch("grows without end when its aliases (*name) are written out")
        place = self._place(node)
        self.origins.setdefault(path, Origin(place, Path()))
        if isinstance(node, MappingNode) and str(node.tag) == _CORE + "map":
            return self._mapping(node, path)
        if isinstance(node, SequenceNode) and str(node.tag) == _CORE + "seq":
            return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        if isinstance(node, ScalarNode):
            return self._scalar(node, path)
        return self._wrong(
            path, place, f"the tag {node.tag} is not allowed", "write the plain value"
        )

    def _mapping(self, node: MappingNode, path: KeyPath) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        first_lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            key = key_node.value
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, ScalarNode):
                self._wrong(path, self._place(key_node), "a key must be a plain word")
            elif str(key_node.tag) == _CORE + "merge":
                problem = "the merge key << is not part of YAML 1.2"
                self._wrong((*path, key), self._place(key_node), problem, "use `extends`")
            elif key in first_lines:
                problem = f"duplicate key: first used in line {first_lines[key]}"
                self._wrong((*path, key), self._place(key_node), problem, "remove one of the two")
            else:
                first_lines[key] = line
                self.origins[*path, key] = Origin(self._place(key_node), Path())
                mapping[key] = self.value(value_node, (*path, key))
        return mapping

    def _scalar(self, node: ScalarNode, path: KeyPath) -> Any:
        kind = str(node.tag).removeprefix(_CORE)
        text = node.value
        if "\0" in text:
            return self._wrong(
                path, self._place(node), "holds a NUL character, which no text or name has"
            )
        if any(0xD800 <= ord(letter) < 0xE000 for letter in text):
            return self._wrong(path, self._place(node), "holds half a character (a lone surrogate)")
        if kind in ("str", "timestamp", "value", "merge"):
            return text
        if kind == "null":
            return None
        if kind == "bool":
            return text.lower() == "true"
        number = _number(text) if kind in ("int", "float") else None
        if number is not None:
            return number
        if kind in ("int", "float"):
            return self._wrong(path, self._place(node), f"{text[:40]!r} is not a usable number")
        return self._wrong(
            path, self._place(node), f"the tag {node.tag} is not allowed", "write the plain value"
        )

    def _wrong(self, path: KeyPath, place: str, problem: str, fix: str = "") -> None:
        self.mistakes.append(Mistake(path, place, problem, fix))

    def _place(self, node: Any) -> str:
        return f"{self.source} line {node.start_mark.line + 1}"


def _number(text: str) -> int | float | None:
    """The value of a YAML 1.2 number, or None (infinite, not a number, or of absurd length)."""
    plain = text.replace("_", "").lower()
    if len(plain) > 40 or "inf" in plain or "nan" in plain:
        return None
    base = {"0x": 16, "0o": 8, "0b": 2}.get(plain.lstrip("+-")[:2])
    try:
        if base is not None:
            return int(plain, base)
        number = int(plain) if plain.lstrip("+-").isdigit() else float(plain)
        return number if math.isfinite(number) else None
    except (ValueError, OverflowError):
        return None

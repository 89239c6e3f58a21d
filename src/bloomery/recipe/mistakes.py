"""Errors of pydantic as messages for users: place, key, problem and fix."""

import re
from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from bloomery.core.errors import UserError
from bloomery.core.text import did_you_mean, redact_secrets
from bloomery.recipe.aliases import fields, look_up, look_up_value, sections
from bloomery.recipe.schema import Recipe
from bloomery.recipe.yaml import KeyPath, Mistake, Origin

_SECRET_KEY = re.compile(
    r"(?i)^((hf|hub|auth|access|api|bearer|wandb)_?token|token|.*api_?key|passw(or)?d|.*secret.*)$"
)
_SECRET_VALUE = re.compile(  # Hugging Face, OpenAI and similar, GitHub, GitLab, Amazon
    r"(?<![A-Za-z0-9])(hf_[A-Za-z0-9]{30,}|sk-([a-z]+\d*-)?[A-Za-z0-9]{24,}|gh[pousr]_[A-Za-z0-9]{30,}|glpat-[\w-]{20}|AKIA[0-9A-Z]{16})"
)
_URL_LOGIN = re.compile(r"://[^/\s:@]+:[^/\s@]+@")
_EXPECTED = {  # pydantic's error type -> the values allowed
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a smaller number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "string_too_short": "text that is not empty",
    "list_type": "a list: [a, b]",
    "tuple_type": "a list: [a, b]",
    "dict_type": "keys with values",
    "model_type": "keys with values",
    "model_attributes_type": "keys with values",
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
}
_MOST_SHOWN = 25  # mistakes
_SECTION_ERRORS = ("model_type", "model_attributes_type")  # a value in the place of a section
_SHOWN_KEYS = 4
_LONGEST_NUMBER = 40  # characters; a longer one is text without quotes, too
_ABSENT = object()
_SWITCHES = {"on": "true", "yes": "true", "off": "false", "no": "false"}  # text in YAML 1.2
_NO_SUCH_KEY = "no such key"
_LINE = "\n       "
_EVERY_KEY = "`bloomery recipes show everything` shows every key"
_PATTERNS = {
    "every-": "none, selective, full or every-N (every-2)",
    "A-Za-z0-9": "letters, digits, dots and dashes",
}


def refuse(name: str, mistakes: list[Mistake]) -> None:
    """Raise one UserError (code 2) that lists all mistakes; do nothing when there are none."""
    unique = list(dict.fromkeys(mistakes))
    if not unique:
        return

    def reading_order(mistake: Mistake) -> tuple[str, int]:
        place, _, line = mistake.place.rpartition(" line ")
        return (place, int(line)) if place else (mistake.place, 0)

    shown = sorted(unique, key=reading_order)[:_MOST_SHOWN]

    # Where a key has no answer, the keys of its section are listed, once.
    lines = [_EVERY_KEY]
    unanswered = [
        mistake for mistake in shown if mistake.problem == _NO_SUCH_KEY and not mistake.fix
    ]
    for section in dict.fromkeys(mistake.path[:-1] for mistake in reversed(unanswered)):
        if keys := dict.fromkeys(name for model in models_at(section) for name in fields(model)):
            lines.insert(
                0, f"keys of {'.'.join(map(str, section)) or 'a recipe'}: {', '.join(keys)}"
            )
    fix = _LINE.join(lines)

    # One mistake is the message itself; several are its rows.
    if len(unique) == 1:
        mistake = shown[0]
        parts = [mistake.key, mistake.problem]
        if mistake.problem == _NO_SUCH_KEY:
            parts.reverse()
        problem = ": ".join(filter(None, parts))
        raise UserError(problem, where=mistake.place, fix=mistake.fix or fix, code=2)
    number = f"{len(unique)} mistakes"
    if len(shown) < len(unique):
        number = f"many mistakes, the first {len(shown)}"
    rows = [f"the recipe {name} has {number}:", *map(_row, shown)]
    raise UserError(_LINE.join(rows), fix=fix, code=2)


def _row(mistake: Mistake) -> str:
    if mistake.problem == _NO_SUCH_KEY and mistake.fix.startswith("`"):  # the fix repeats the key
        return f"{mistake.place}: {mistake.fix}"
    row = ": ".join(filter(None, [mistake.place, mistake.key, mistake.problem]))
    return f"{row}; {mistake.fix}" if mistake.fix else row


def from_pydantic(
    error: ValidationError, data: Any, origins: Mapping[KeyPath, Origin]
) -> list[Mistake]:
    """The mistakes at each key that pydantic reports; the members of a union are merged into one."""
    groups: dict[KeyPath, list[ErrorDetails]] = {}
    for detail in error.errors()[: 2 * _MOST_SHOWN]:
        groups.setdefault(_written_path(detail, data), []).append(detail)
    mistakes = list[Mistake]()
    for path, details in groups.items():
        # Where a union also allows a word, a section that was given counts by the errors inside it alone.
        has_inner = any(len(other) > len(path) and other[: len(path)] == path for other in groups)
        about_keys = {"extra_forbidden", "missing"} & {detail["type"] for detail in details}
        if about_keys or not has_inner:
            mistakes += _mistakes(path, details, data, origins)
    return mistakes


def _written_path(detail: ErrorDetails, data: Any) -> KeyPath:
    """pydantic's location without the names of union members, which are no keys."""
    path: list[str | int] = []
    for part in detail["loc"]:
        if (inner := value_below(data, part, _ABSENT)) is not _ABSENT:
            data = inner
            path.append(part)
    if detail["type"] == "missing" and isinstance(detail["loc"][-1], str):
        path.append(detail["loc"][-1])
    return tuple(path)


def value_below(data: Any, part: str | int, absent: object = None) -> Any:
    """The value below a key or an index of nested data, else `absent`."""
    if isinstance(data, dict):
        return data.get(part, absent)
    return (
        data[part]
        if isinstance(data, list) and isinstance(part, int) and part < len(data)
        else absent
    )


def _mistakes(
    path: KeyPath, details: list[ErrorDetails], data: Any, origins: Mapping[KeyPath, Origin]
) -> list[Mistake]:
    error_type = details[0]["type"]
    value = details[0]["input"]
    place = place_of(path, origins)
    own_name = ".".join(map(str, path))

    # Keys that are missing or unknown, and sections of no known kind.
    if error_type == "missing":
        in_list = isinstance(reduce(value_below, path, data), list)
        problem = "a value is missing in this list" if in_list else "is missing"
        return [Mistake(path, place, problem)]
    if error_type == "extra_forbidden":
        return _unknown(path, value, reduce(value_below, path[:-1], data), origins)
    if error_type in ("union_tag_invalid", "union_tag_not_found"):
        return _kind(path, value, origins)

    # A value of another program has an answer in the table; a section's name may be a key of another program.
    alias = None
    if not isinstance(value, dict):
        alias = look_up_value(path, value) or look_up_value((*path, "kind"), value)
        if alias is None and len(path) == 1:
            alias = look_up(path, value, {})
    # The name of the section itself is no answer to a value in its place: its keys are.
    if alias is not None and own_name in alias.edits:
        alias = None
    fix = str(alias or "")
    if not fix and error_type in _SECTION_ERRORS:
        fix = _keys_of(path)

    # What is allowed instead: a sentence of the schema's own, words, or kinds of values.
    if error_type == "value_error" and len(details) == 1:
        return [Mistake(path, place, str(details[0]["ctx"]["error"]), fix)]
    allowed = [str(detail.get("ctx", {}).get("expected", "")) for detail in details]
    words = [
        word or number for text in allowed for word, number in re.findall(r"'([^']*)'|(\d+)", text)
    ]
    sentences = [
        str(detail["ctx"]["error"]) for detail in details if detail["type"] == "value_error"
    ]
    if sentences and words:
        problem = f"{sentences[0]}, or {_listed(words)}"
        return [Mistake(path, place, problem, fix or _nearest(value, words))]
    expectations = dict.fromkeys(
        _expectation(detail) for detail in details if detail["type"] != "literal_error"
    )
    expected = [*words, *(part for text in expectations for part in text.split(" or "))]
    problem = f"must be {_listed(expected)}, not {_shown(value)}"
    if "false" in expected and isinstance(value, str) and value in _SWITCHES:
        fix = f"write {_SWITCHES[value]}"
    fix = fix or _nearest(value, words)
    number = r"\s*[+-]?(\d[\d_]*\.?\d*|\.\d+)(e[+-]?\d+)?\s*"
    is_quoted_number = isinstance(value, str) and re.fullmatch(number, value, re.I)
    if not fix and is_quoted_number and len(value) < _LONGEST_NUMBER:
        wants_number = any(detail["type"] in ("int_type", "float_type") for detail in details)
        fix = "remove the quotes" if wants_number else ""
    return [Mistake(path, place, problem, fix)]


def _keys_of(path: KeyPath) -> str:
    """The first keys of a section, as they are written."""
    names = [name for model in models_at(path) for name in fields(model)][:_SHOWN_KEYS]
    keys = [".".join(map(str, (*path, name))) for name in names]
    return f"set one of its keys: {', '.join(keys)}" if keys else ""


def _unknown(
    path: KeyPath, value: Any, siblings: Any, origins: Mapping[KeyPath, Origin]
) -> list[Mistake]:
    """A key that the schema does not have; of a section that it does not have, the keys with an answer."""
    alias = look_up(path, value, siblings if isinstance(siblings, dict) else {})
    if alias is None and isinstance(value, dict):
        inner = [
            mistake
            for key in value
            for mistake in _unknown((*path, key), value[key], value, origins)
        ]
        if any(mistake.fix for mistake in inner):
            return inner
    return [Mistake(path, place_of(path, origins), _NO_SUCH_KEY, str(alias or ""))]


def _kind(path: KeyPath, value: Any, origins: Mapping[KeyPath, Origin]) -> list[Mistake]:
    """A section without a `kind`, or with one that does not exist: its other keys may have an answer."""
    models = models_at(path)
    kinds = [kind for model in models for kind in get_args(fields(model)["kind"])]
    section = value if isinstance(value, dict) else {"kind": value}
    known_names = {name for model in models for name in fields(model)}
    unknown_keys = [
        mistake
        for key in section
        if key not in known_names
        for mistake in _unknown((*path, key), section[key], section, origins)
    ]

    # `type: dpo` is answered with `objective.kind=dpo`: nothing more is missing.
    kind_path = (*path, "kind")
    kind_key = ".".join(map(str, kind_path))
    if "kind" not in section and any(f"`{kind_key}=" in mistake.fix for mistake in unknown_keys):
        return unknown_keys

    # The kind in another program's words, the only one that has these keys, or one of a similar name.
    alias = look_up_value(kind_path, section.get("kind"))
    if alias is None and "kind" not in section:
        answers = (look_up_value((*path, key), value) for key, value in section.items())
        names_kind = f"{kind_key}="
        alias = next(
            (
                answer
                for answer in answers
                if answer and any(edit.startswith(names_kind) for edit in answer.edits)
            ),
            None,
        )
    fitting = [model for model in models if section.keys() & known_names <= fields(model).keys()]
    if alias:
        fix = str(alias)
    elif "kind" in section:
        fix = _nearest(section["kind"], kinds)
    elif len(fitting) == 1:
        fix = f"add `{kind_key}={get_args(fields(fitting[0])['kind'])[0]}`"
    else:
        fix = ""
    mistake = Mistake(kind_path, place_of(path, origins), f"must be {_listed(kinds)}", fix)
    return [mistake, *unknown_keys]


def _expectation(detail: ErrorDetails) -> str:
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    if detail["type"] == "string_pattern_mismatch":
        return next(words for part, words in _PATTERNS.items() if part in detail["ctx"]["pattern"])
    if detail["type"] == "too_long":
        return f"a list of {detail['ctx']['max_length']} values"
    bounds = {
        key: f"{bound:g}" if isinstance(bound, int | float) else bound
        for key, bound in detail.get("ctx", {}).items()
    }
    return _EXPECTED.get(detail["type"], detail["msg"]).format(**bounds)


def place_of(path: KeyPath, origins: Mapping[KeyPath, Origin]) -> str:
    """The file and line of a value, or of the nearest section around it."""
    for length in range(len(path), -1, -1):
        if path[:length] in origins:
            return origins[path[:length]].place
    return "the recipe"


def _listed(words: list[str]) -> str:
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _shown(value: object) -> str:
    if isinstance(value, dict | list):
        return "a section" if isinstance(value, dict) else "a list"
    if value is None:
        return "empty"
    return str(value).lower() if isinstance(value, bool) else repr(value)[:60]


def _nearest(value: object, words: list[str]) -> str:
    return "" if value is None else did_you_mean(str(value), words, "", cutoff=0.5)


def models_at(path: KeyPath) -> list[type[BaseModel]]:
    """The section classes of a key path (several where a union allows several)."""
    models: list[type[BaseModel]] = [Recipe]
    for part in path:
        if isinstance(part, str):
            models = [inner for outer in models for inner in sections(fields(outer).get(part))]
    return models


def secrets(data: Any, origins: Mapping[KeyPath, Origin], path: KeyPath = ()) -> Iterator[Mistake]:
    """Passwords and tokens: a recipe is copied into every run folder and report."""
    fix = "set it in the environment (HF_TOKEN, WANDB_API_KEY); revoke it if you shared this file"
    items = (
        data.items()
        if isinstance(data, dict)
        else enumerate(data)
        if isinstance(data, list)
        else ()
    )
    for key, value in items:
        inner = (*path, key)
        problem = ""
        named = isinstance(key, str) and _SECRET_KEY.match(key) and path[-1:] != ("columns",)
        if named and isinstance(value, str | int):
            problem = "secrets do not belong in a recipe"
        elif isinstance(value, str) and _URL_LOGIN.search(value):
            problem = "holds a password in a URL"
        elif isinstance(value, str) and (
            _SECRET_VALUE.search(value) or (key == "command" and redact_secrets(value, {}) != value)
        ):
            problem = "looks like an access token"
        if problem:
            yield Mistake(inner, place_of(inner, origins), problem, fix)
        else:
            yield from secrets(value, origins, inner)

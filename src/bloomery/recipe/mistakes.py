"""Turns what pydantic found into sentences: where it stands, what is wrong, which word was probably meant."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from bloomery.core.errors import UserError
from bloomery.core.text import closest, did_you_mean, redact_secrets
from bloomery.recipe.schema import Recipe
from bloomery.recipe.yaml import KeyPath, Mistake, Origin

_SECRET_KEY = re.compile(
    r"(?i)^((hf|hub|auth|access|api|bearer|wandb)_?token|token|.*api_?key|passw(or)?d|.*secret.*)$"
)
_SECRET_VALUE = re.compile(  # Hugging Face, OpenAI and its like, GitHub, GitLab, Amazon; no harmless name is one
    r"(?<![A-Za-z0-9])(hf_[A-Za-z0-9]{30,}|sk-([a-z]+\d*-)?[A-Za-z0-9]{24,}|gh[pousr]_[A-Za-z0-9]{30,}|glpat-[\w-]{20}|AKIA[0-9A-Z]{16})"
)
_URL_LOGIN = re.compile(r"://[^/\s:@]+:[^/\s@]+@")
_EXPECTED = {  # pydantic's error type -> what would have been right
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
_MOST_TOLD = 25  # mistakes
_ABSENT = object()
_EVERY_KEY = "`bloomery recipes show everything` shows every key"
_PATTERNS = {"every-": "none, selective, full or every-N (every-2)", "A-Za-z0-9": "letters, digits, dots and dashes"}


def refuse(name: str, mistakes: list[Mistake]) -> None:
    """Raise one UserError (code 2) that lists all mistakes; do nothing when there are none."""
    unique = list(dict.fromkeys(mistakes))
    if not unique:
        return
    if len(unique) == 1:
        only = unique[0]
        key = f"{only.key}: " if only.path else ""
        raise UserError(f"{key}{only.problem}", where=only.place, fix=only.fix or _EVERY_KEY, code=2)
    rows = [_row(mistake) for mistake in sorted(unique, key=_reading_order)[:_MOST_TOLD]]
    told = f"{len(unique)} mistakes" if len(rows) == len(unique) else f"many mistakes, the first {len(rows)} are"
    problem = f"the recipe {name} has {told}\n" + "\n".join(rows)
    raise UserError(problem, fix=_EVERY_KEY, code=2)


def _row(mistake: Mistake) -> str:
    parts = [mistake.place, mistake.key, mistake.problem]
    return "  " + ": ".join(filter(None, parts)) + (f"; {mistake.fix}" if mistake.fix else "")


def _reading_order(mistake: Mistake) -> tuple[str, int]:
    place, _, line = mistake.place.rpartition(" line ")
    return (place, int(line)) if place else (mistake.place, 0)


def from_pydantic(error: ValidationError, data: Any, origins: Mapping[KeyPath, Origin]) -> list[Mistake]:
    """One mistake for each key that pydantic complains about. Members of a union are merged into one sentence."""
    groups: dict[KeyPath, list[ErrorDetails]] = {}
    for detail in error.errors()[: 2 * _MOST_TOLD]:
        groups.setdefault(_written_path(detail, data), []).append(detail)
    kept = {path: found for path, found in groups.items() if not _explained_deeper(path, found, groups)}
    return [_mistake(path, found, data, origins) for path, found in kept.items()]


def _written_path(detail: ErrorDetails, data: Any) -> KeyPath:
    """pydantic's location without the names of union members, which nobody wrote."""
    path: list[str | int] = []
    for part in detail["loc"]:
        if (inner := step(data, part, _ABSENT)) is not _ABSENT:
            data = inner
            path.append(part)
    if detail["type"] == "missing" and isinstance(detail["loc"][-1], str):
        path.append(detail["loc"][-1])
    return tuple(path)


def step(data: Any, part: str | int, absent: object = None) -> Any:
    """What stands below a key or an index of nested data, else `absent`."""
    if isinstance(data, dict):
        return data.get(part, absent)
    return data[part] if isinstance(data, list) and isinstance(part, int) and part < len(data) else absent


def _explained_deeper(path: KeyPath, found: list[ErrorDetails], groups: Mapping[KeyPath, object]) -> bool:
    """A section was given where a union also allows a word: only what is wrong inside the section counts."""
    deeper = any(len(other) > len(path) and other[: len(path)] == path for other in groups)
    return deeper and all(detail["type"] not in ("extra_forbidden", "missing") for detail in found)


def _mistake(path: KeyPath, found: list[ErrorDetails], data: Any, origins: Mapping[KeyPath, Origin]) -> Mistake:
    kind, value = found[0]["type"], found[0]["input"]
    place = place_of(path, origins)
    if kind == "missing":
        if isinstance(_at(data, path), list):
            return Mistake(path, place, "a value is missing in this list")
        return Mistake(path, place, "is missing")
    if kind == "extra_forbidden":
        return Mistake(path, place, "there is no such key", _nearest_key(path))
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        tags = found[0]["ctx"].get("expected_tags", "'none', 'lora', 'dora', 'peft'")
        return Mistake(
            (*path, "kind"), place, f"must be {_listed(_quoted(tags))}", _nearest(_at(value, ("kind",)), _quoted(tags))
        )
    if kind == "value_error" and len(found) == 1:
        return Mistake(path, place, str(found[0]["ctx"]["error"]))
    words = [word for detail in found for word in _quoted(str(detail.get("ctx", {}).get("expected", "")))]
    told = [str(detail["ctx"]["error"]) for detail in found if detail["type"] == "value_error"]
    if told and words:  # a sentence of its own, and the words that would do as well
        return Mistake(path, place, f"{told[0]}, or {_listed(words)}", _nearest(value, words))
    others = dict.fromkeys(_expectation(detail) for detail in found if detail["type"] != "literal_error")
    expected = [*words, *(part for other in others for part in other.split(" or "))]
    return Mistake(
        path,
        place,
        f"must be {_listed(expected)}, not {_shown(value)}",
        _nearest(value, words) or _unquoted(value, found),
    )


def _expectation(detail: ErrorDetails) -> str:
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    if detail["type"] == "string_pattern_mismatch":
        return next(words for part, words in _PATTERNS.items() if part in detail["ctx"]["pattern"])
    if detail["type"] == "too_long":
        return f"a list of {detail['ctx']['max_length']} values"
    bounds = {
        key: f"{bound:g}" if isinstance(bound, int | float) else bound for key, bound in detail.get("ctx", {}).items()
    }
    return _EXPECTED.get(detail["type"], detail["msg"]).format(**bounds)


def _unquoted(value: object, found: list[ErrorDetails]) -> str:
    wants_number = any(detail["type"] in ("int_type", "float_type") for detail in found)
    return "remove the quotes" if wants_number and isinstance(value, str) and _is_number(value) else ""


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def place_of(path: KeyPath, origins: Mapping[KeyPath, Origin]) -> str:
    """Where the value was written, or the nearest section around it."""
    for length in range(len(path), -1, -1):
        if path[:length] in origins:
            return origins[path[:length]].place
    return "the recipe"


def _at(data: Any, path: KeyPath) -> Any:
    for part in path:
        data = step(data, part)
    return data


def _quoted(text: str) -> list[str]:
    return re.findall(r"'([^']*)'", text)


def _listed(words: list[str]) -> str:
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _shown(value: object) -> str:
    if isinstance(value, dict | list):
        return "a section" if isinstance(value, dict) else "a list"
    shown = (
        {None: "empty", True: "true", False: "false"}.get(value)
        if value is None or isinstance(value, bool)
        else repr(value)
    )
    return str(shown)[:60]


def _nearest(value: object, words: list[str]) -> str:
    return "" if value is None else did_you_mean(str(value), words, "", cutoff=0.5)


def models_at(path: KeyPath) -> list[type[BaseModel]]:
    """The section classes that may stand at a key path (several where a union allows several)."""
    found: list[type[BaseModel]] = [Recipe]
    for part in path:
        if isinstance(part, str):
            found = [inner for outer in found for inner in _models(_fields(outer).get(part))]
    return found


def _fields(model: type[BaseModel]) -> dict[str, Any]:
    """Annotation by the name that people write."""
    return {field.alias or name: field.annotation for name, field in model.model_fields.items()}


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _models(inner)]


def all_keys(model: type[BaseModel] = Recipe, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every key of the schema as a path, sections before what they hold."""
    for name, annotation in _fields(model).items():
        yield (*path, name)
        for inner in _models(annotation):
            yield from all_keys(inner, (*path, name))


def _nearest_key(path: KeyPath) -> str:
    key = str(path[-1])
    siblings = [name for model in models_at(path[:-1]) for name in _fields(model)]
    near = closest(key, siblings)
    elsewhere = dict.fromkeys(".".join(known) for known in all_keys() if known[-1] == key)
    meant = near or list(elsewhere)
    prefix = ".".join(map(str, path[:-1])) + "." if near and len(path) > 1 else ""
    return f"did you mean {prefix}{meant[0]}?" if meant else "known here: " + ", ".join(dict.fromkeys(siblings))


def _holds_token(value: str, *, command: bool) -> bool:
    """Of a command whatever `redact_secrets` would hide: nobody writes a password there that is none."""
    return bool(_SECRET_VALUE.search(value)) or (command and redact_secrets(value, {}) != value)


def secrets(data: Any, origins: Mapping[KeyPath, Origin], path: KeyPath = ()) -> Iterator[Mistake]:
    """Passwords and tokens never belong in a recipe: it is copied into every run and report."""
    fix = "keep it in the environment (HF_TOKEN, WANDB_API_KEY) and revoke it if this file was shared"
    items: Iterable[tuple[str | int, Any]] = (
        data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    )
    for key, value in items:
        inner = (*path, key)
        if (
            isinstance(key, str)
            and _SECRET_KEY.match(key)
            and path[-1:] != ("columns",)
            and isinstance(value, str | int)
        ):
            yield Mistake(inner, place_of(inner, origins), "secrets do not belong in a recipe", fix)
        elif isinstance(value, str) and _URL_LOGIN.search(value):
            yield Mistake(inner, place_of(inner, origins), "holds a password in a URL", fix)
        elif isinstance(value, str) and _holds_token(value, command=key == "command"):
            yield Mistake(inner, place_of(inner, origins), "this looks like an access token", fix)
        else:
            yield from secrets(value, origins, inner)

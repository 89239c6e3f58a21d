"""A recipe as a form and as YAML, both ways, and its plan for this machine. Does not import torch."""

import io
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.error import YAMLError

from bloomery.core.errors import UserError, of_the_system, system_errors_worded
from bloomery.core.text import harmless
from bloomery.hub import PREFIX, cached_model, is_hub_id, local_model
from bloomery.model.io.stored import is_bare
from bloomery.plan.gather import models_of
from bloomery.plan.notes import is_dataset_assumed, missing_datasets, plan_notes
from bloomery.plan.page import page
from bloomery.plan.price import kept_price, run_cost
from bloomery.plan.reward_code import refuse_missing_reward_files
from bloomery.plan.types import RunPlan
from bloomery.random_models import is_random
from bloomery.recipe.load import dump_recipe, json_schema, load_text
from bloomery.recipe.schema import Recipe
from bloomery.recipe.yaml import read_yaml
from bloomery.runs.devices import planned_report
from bloomery.studio.plan_picture import PlanPicture, picture_of, planned_values, usual_values

KeyPath = tuple[str, ...]
_HIDDEN = ("name", "extends", "claims", "rewards")  # keys that are no section: the YAML has them
MOST_WHOLE = 1e15  # larger numbers have an exponent
SOURCE = "recipe"  # where the keys of the text come from, in messages


@dataclass(frozen=True)
class FormField:
    """A key of a section. `options`: the allowed words; empty: any text. `default`: as YAML."""

    path: KeyPath
    description: str
    default: str
    options: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return ".".join(self.path)


@dataclass(frozen=True)
class FormSection:
    name: str
    description: str
    fields: tuple[FormField, ...]


@dataclass(frozen=True)
class Planned:
    """The plan of a recipe, or why there is none. `suggestions`: edits, and what each changes."""

    name: str = ""
    fits: bool = False
    lines: tuple[str, ...] = ()
    picture: PlanPicture | None = None
    suggestions: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()  # what the plan could not read
    warnings: tuple[str, ...] = ()
    usual: Mapping[str, str] = field(default_factory=dict)  # by key
    chosen: Mapping[str, str] = field(default_factory=dict)  # what the plan trains with, by key
    # Why `train` would end at once, each with the key that it is about.
    blockers: tuple[tuple[str, str], ...] = ()
    values: Mapping[str, Any] | None = None  # of the whole recipe, with defaults
    origins: Mapping[str, str] = field(default_factory=dict)  # where each key came from
    problem: str = ""
    fix: str = ""
    where: str = ""  # of the problem, where it is one

    @property
    def is_startable(self) -> bool:
        return self.picture is not None and not self.problem and not self.blockers

    def problem_at(self, key: str) -> str:
        """The mistake at a key, in the words of the command line."""
        *problem, where = self.problem.splitlines() or [""]
        if where == key:  # of the plan: one mistake, and then its key
            return " ".join(problem)
        for line in self.problem.splitlines():
            _, found, rest = f" {line}".partition(f" {key}: ")
            if found:
                return rest
        return ""


@cache
def _schema() -> dict[str, Any]:
    return json_schema()


def sections_of(values: Mapping[str, Any]) -> list[FormSection]:
    """The sections of the form; of a section with kinds, the keys of the kind that the recipe has."""
    sections = []
    for name, schema in _schema()["properties"].items():
        if name in _HIDDEN:
            continue
        fields = tuple(_fields(_variant(schema, values.get(name)), (name,)))
        if fields:
            sections.append(FormSection(name, schema.get("description", ""), fields))
    return sections


def _resolved(schema: dict[str, Any]) -> dict[str, Any]:
    reference = schema.get("$ref")
    if reference is None:
        return schema
    definition: dict[str, Any] = _schema()["$defs"][reference.rpartition("/")[2]]
    return definition


def _variant(schema: dict[str, Any], value: Any) -> dict[str, Any]:
    """The object that holds the keys of a section."""
    schema = _resolved(schema)
    for choice in schema.get("anyOf", ()):
        mapping = choice.get("discriminator", {}).get("mapping", {})
        if mapping:
            kind = value.get("kind") if isinstance(value, Mapping) else value
            reference = mapping.get(str(kind)) or next(iter(mapping.values()))
            variant = dict(_resolved({"$ref": reference}))
            kinds = {"enum": list(mapping), "description": "Which one."}
            variant["properties"] = {**variant.get("properties", {}), "kind": kinds}
            return variant
        if "$ref" in choice:
            return _resolved(choice)
    return schema


def _fields(schema: dict[str, Any], path: KeyPath) -> list[FormField]:
    fields = []
    for name, member in schema.get("properties", {}).items():
        inner = _resolved(member)
        if "properties" in inner:
            fields += _fields(inner, (*path, name))
            continue
        fields.append(
            FormField(
                path=(*path, name),
                description=member.get("description", inner.get("description", "")),
                default=value_text(member["default"]) if "default" in member else "",
                options=_options(member),
            )
        )
    return sorted(fields, key=lambda field: field.path[-1] != "kind")


def _options(schema: dict[str, Any]) -> tuple[str, ...]:
    """The allowed words of a key, where nothing but words is allowed."""
    words: list[str] = []
    for choice in (schema, *schema.get("anyOf", ())):
        if "enum" in choice:
            words += [value_text(value) for value in choice["enum"]]
        elif "const" in choice:
            words.append(value_text(choice["const"]))
        elif choice.get("type") == "boolean":
            words += ["true", "false"]
        elif choice.get("type") == "null":
            words.append("null")
        elif choice is not schema or "type" in choice:
            return ()
    return tuple(dict.fromkeys(words))


def as_typed(value: Any) -> Any:
    """A number as people write it: 3 epochs, not 3.0."""
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < MOST_WHOLE
    return int(value) if is_whole else value


def value_text(value: Any) -> str:
    """A value as it is written in a recipe."""
    value = as_typed(value)
    writer = YAML()
    writer.default_flow_style = True
    writer.width = 10_000
    stream = io.StringIO()
    writer.dump([value], stream)
    return stream.getvalue().strip()[1:-1].strip()


def value_at(values: Mapping[str, Any] | None, path: KeyPath) -> Any:
    """None where the recipe has no such key."""
    value: Any = values
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def with_key(text: str, path: KeyPath, value: str) -> str:
    """The YAML with one key changed, its comments and its order kept. An empty value removes the key.

    Several values with commas are a list. Raises UserError where the YAML or the value cannot be read.
    """
    key = ".".join(path)
    # What the reader of recipes takes is small and flat: the editor of ruamel.yaml has no limits.
    data = _plain_value(text, key)
    if not isinstance(data, dict | None):
        raise _unreadable("a recipe is made of sections", key)
    values = _plain_value(f"[{value}]", key, what="the value")
    new_value = values[0] if len(values) == 1 else values
    editor = YAML()
    editor.width = 10_000
    editor.preserve_quotes = True
    try:
        document = CommentedMap() if data is None else editor.load(text)
    except (YAMLError, ValueError) as error:  # such as a date that no calendar has
        raise _unreadable(str(error).partition("\n")[0], key) from error
    section = document
    for name in path[:-1]:
        inner = section.get(name)
        if not isinstance(inner, CommentedMap):
            if not isinstance(inner, str | None):
                raise _unreadable(f"{name} is no section", key)
            # `adapter: lora` is short for a section with that kind.
            kind = {} if inner is None else {"kind": inner}
            inner = section[name] = CommentedMap(kind)
        section = inner
    if value.strip():
        # Keys of another kind would be mistakes.
        if path[-1] == "kind" and section.get("kind") != new_value:
            section.clear()
        section[path[-1]] = new_value
    else:
        section.pop(path[-1], None)
        if not section and len(path) > 1:
            document.pop(path[0], None)
    stream = io.StringIO()
    editor.dump(document, stream)
    return stream.getvalue()


def _plain_value(text: str, key: str, what: str = "the YAML") -> Any:
    document = read_yaml(text, source=SOURCE, folder=Path())
    if document.mistakes:
        mistake = document.mistakes[0]
        place = f"{mistake.place}: " if what == "the YAML" else ""
        raise _unreadable(f"{place}{mistake.problem}", key, what)
    return document.data


def _unreadable(problem: str, key: str, what: str = "the YAML") -> UserError:
    return UserError(f"{what} cannot be read: {problem}", where=key, fix="correct it first")


def with_edits(text: str, edits: Mapping[str, str]) -> str:
    """The YAML with several keys changed, each as `with_key` does."""
    for key, value in edits.items():
        text = with_key(text, tuple(key.split(".")), value)
    return text


def mistake_among(text: str, key: str, values: Collection[str]) -> str:
    """Why one of the values is none of the recipe's `key`; "" where each is."""
    for value in values:
        try:
            load_text(with_edits(text, {key: value}), name="recipe", source=SOURCE)
        except UserError as error:
            problem = Planned(problem=_text_of(error), where=error.where).problem_at(key)
            return f"{value}: {problem or harmless(error.problem)}"
    return ""


DEFAULT_LINE = re.compile(r"\s*\S+: .*  # default")


def without_defaults(text: str, name: str) -> str:
    """The complete recipe of a run without the keys that nobody set, as their comments say.

    The recipe stays as it is where it would be another one: a default may have changed since.
    """
    lines = [line for line in text.splitlines() if not DEFAULT_LINE.fullmatch(line)]

    # A section is left out with its last key: nothing deeper follows its line.
    kept_lines = list[str]()
    for line in reversed(lines):
        depth = len(line) - len(line.lstrip())
        next_depth = len(kept_lines[-1]) - len(kept_lines[-1].lstrip()) if kept_lines else 0
        is_empty_section = line.endswith(":") and not line.lstrip().startswith("#")
        if not (is_empty_section and next_depth <= depth):
            kept_lines.append(line)
    shorter_text = "\n".join(reversed(kept_lines)) + "\n"
    try:
        recipes = [
            load_text(each, name=name, source=SOURCE).recipe for each in (text, shorter_text)
        ]
    except UserError:  # planning the recipe reports it
        return text
    # A run's folder is seldom called as its recipe.
    whole, shorter = (recipe.model_copy(update={"name": name}) for recipe in recipes)
    return shorter_text if whole == shorter else text


def inherited_keys(complete_text: str) -> frozenset[str]:
    """The keys of a run's recipe that another recipe or a generated one had set, as their comments say."""
    keys = set[str]()
    sections = list[str]()
    for line in complete_text.splitlines():
        match = re.match(r"( *)([^\s:#]+):", line)
        if match is None:
            continue
        sections = [*sections[: len(match[1]) // 2], match[2]]
        if re.search(r"  # (packaged recipe|--model) ", line):
            keys.add(".".join(sections))
    return frozenset(keys)


def planned(text: str, name: str) -> Planned:
    """The plan for this machine, and every mistake in the words of the command line."""
    try:
        with system_errors_worded():
            loaded_recipe = load_text(text, name=name, source=SOURCE)
    except UserError as error:
        return Planned(problem=_text_of(error), fix=harmless(error.fix), where=error.where)
    recipe = loaded_recipe.recipe
    parts: dict[str, Any] = {
        "name": loaded_recipe.name,
        "values": YAML(typ="safe", pure=True).load(dump_recipe(loaded_recipe)),
        "origins": loaded_recipe.provenance,
    }
    try:
        with system_errors_worded():
            report, machine = planned_report(loaded_recipe)
            report = report.model_copy(update={"cost": run_cost(report.plan, kept_price())})
            refuse_missing_reward_files(recipe.rewards)
            plan = report.plan
            blockers = tuple(_blockers(recipe, plan))
            notes = [harmless(note) for note in plan_notes(recipe, plan, is_local=True)]
            if is_dataset_assumed(recipe):  # the page asks for the data in its own words
                notes = []
    except UserError as error:
        return Planned(**parts, problem=_text_of(error), fix=harmless(error.fix), where=error.where)
    lines = page(report, machine, source=loaded_recipe.name, commands=[])
    return Planned(
        **parts,
        fits=plan.fits,
        lines=tuple(harmless(line) for line in lines),
        picture=picture_of(report, machine),
        suggestions=tuple({each.edit: each.saves for each in report.suggestions}.items()),
        notes=tuple(note for note in notes if not _is_told(note, blockers)),
        warnings=tuple(map(harmless, report.warnings)),
        usual=usual_values(recipe, plan),
        chosen=planned_values(plan),
        blockers=blockers,
    )


def _is_told(note: str, blockers: Collection[tuple[str, str]]) -> bool:
    """Whether a question says it already: that data or weights are missing."""
    keys = {key for key, _ in blockers}
    starts = {"data.path": "data.path does not exist", "model.from": "no weights in"}
    return any(note.startswith(start) for key, start in starts.items() if key in keys)


def _blockers(recipe: Recipe, plan: RunPlan) -> Iterator[tuple[str, str]]:
    """Why `train` would end at once, each with the key that it is about."""
    is_offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    offline = "is not on this machine, and HF_HUB_OFFLINE prevents the download"
    for name in models_of(recipe):
        if is_offline and is_hub_id(name) and cached_model(name, weights=True) is None:
            yield "model.from", f"{name} {offline}"
        if not is_random(name) and not is_hub_id(name) and is_bare(local_model(name)):
            yield "model.from", harmless(f"no weights in {name}: `bloomery train` would fail")
    if is_dataset_assumed(recipe):
        yield "data", "no dataset is chosen"
        return
    for path in missing_datasets(recipe, plan):
        if path.startswith(PREFIX):
            if is_offline:
                yield "data.path", f"{path} {offline}"
        else:
            yield "data.path", harmless(f"no such file or folder: {path}")


def _text_of(error: UserError) -> str:
    return harmless("\n".join(filter(None, (error.problem, error.where))))


def write_recipe(text: str, name: str) -> Path:
    """A recipe file with this text in the working folder; another name where a file with other text exists.

    Raises UserError where it cannot be written.
    """
    content = _content(text, name)
    while True:
        path = proposed_path(text, name)
        try:
            if path.exists():  # with this text
                return path
            file = path.open("xb")
        except FileExistsError:  # made meanwhile
            continue
        except OSError as error:
            raise _unwritable(path, error) from error
        try:
            with file:
                file.write(content)
        except OSError as error:
            path.unlink(missing_ok=True)  # half a recipe is none
            raise _unwritable(path, error) from error
        return path


def proposed_path(text: str, name: str) -> Path:
    """Where `write_recipe` would write: a name that is free, or of a file with this text. Raises UserError."""
    content = _content(text, name)
    for number in range(1, 1000):
        path = Path(f"{name}.yaml" if number == 1 else f"{name}-{number}.yaml")
        try:
            if not path.exists() or (path.is_file() and path.read_bytes() == content):
                return path
        except OSError as error:
            raise _unwritable(path, error) from error
    raise UserError("too many recipes of this name", where=name, fix="set `name`")


def _content(text: str, name: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        problem = f"no file holds the character {text[error.start]!r}"
        raise UserError(problem, where=name, fix="remove it") from error


def _unwritable(path: Path, error: OSError) -> UserError:
    worded = of_the_system(error)
    return UserError(
        f"cannot write the recipe: {error.strerror}",
        where=str(path),
        fix=worded.fix if worded else "start studio in another folder",
    )

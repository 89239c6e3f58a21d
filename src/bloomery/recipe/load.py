"""Reads recipes: a file or a packaged name, what it extends, and what the command line overrides."""

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from bloomery.core.errors import UserError
from bloomery.core.text import closest, expanded
from bloomery.core.units import Duration
from bloomery.recipe.mistakes import (
    from_pydantic,
    models_at,
    place_of,
    refuse,
    secrets,
    value_below,
)
from bloomery.recipe.objectives import OWN_TEACHERS
from bloomery.recipe.plugins import refuse_unusable
from bloomery.recipe.schema import LENGTHS, Recipe
from bloomery.recipe.tools import refuse_file_of_a_tool, refuse_script
from bloomery.recipe.values import write_duration, write_memory
from bloomery.recipe.yaml import (
    MAX_BYTES,
    MAX_DEPTH,
    KeyPath,
    Mistake,
    Origin,
    YamlDocument,
    read_yaml,
)

# Keys that exclude each other: a layer that sets one of them drops the others that it would inherit.
_ALTERNATIVES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("model", ("from", "preset", "family")),
    ("tokenizer", ("from", "train")),
    ("data", ("path", "builtin", "sources")),
    ("train", tuple(LENGTHS)),
    ("train", ("tokens_per_step", "batch_size")),
)
# A complete recipe of a run has this next to batch_size: it sets nothing.
_UNSET = (("tokens_per_step", "auto"),)
# Sections that need one of their alternatives, and an example.
_NEEDED = {"model": "model: {preset: go-coder-small}", "data": "data: {path: my-folder}"}
# Sections that a scalar stands for: `adapter: lora` is `adapter: {kind: lora}`.
_WITH_KIND: tuple[KeyPath, ...] = (
    ("objective",),
    ("adapter",),
    ("quantize",),
    ("optimizer",),
    ("tokenizer", "train"),
    ("model", "rope_scaling"),
)
# Another kind has other keys: it drops those that it would inherit.
_KIND_REPLACES: tuple[KeyPath, ...] = (("adapter",), ("optimizer", "schedule"))
_COMMAND_LINE = "command line"
_HEADER = "# The recipe of this run, complete: every key, and where its value came from.\n"


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe whose paths are absolute. `provenance`: where each key (`train.seed`) got its value."""

    recipe: Recipe
    name: str
    provenance: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _RecipeFile:
    name: str
    path: Path
    packaged: bool

    @property
    def label(self) -> str:
        if self.packaged:
            return f"packaged recipe {self.name}"
        here = self.path.is_relative_to(Path.cwd())
        return str(self.path.relative_to(Path.cwd()) if here else self.path)


def packaged() -> dict[str, Path]:
    """The recipes that come with Bloomery, by name."""
    folder = Path(__file__).parent.parent / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


# Fine-tuning recipes by the release of their model, the newest first; then pretraining and the demos.
NEWEST_FIRST = (
    "qwen3.8",
    "gemma4",
    "qwen3.5",
    "lfm2.5",
    "ministral3",
    "olmo3",
    "granite4",
    "gpt-oss",
    "smollm3",
    "qwen3-vl",
    "qwen3",
    "gemma3",
    "smolvlm2",
    "phi4",
    "olmoe",
    "granite3.1",
    "llama3.2",
    "qwen2.5",
    "llama3.1",
    "frontier-llama3.1",
    "llama2",
    "moe",
    "go-coder",
    "demo",
)


def by_release(name: str) -> int:
    """The rank of a recipe in the list: the index of its family in NEWEST_FIRST."""
    ranks = (rank for rank, family in enumerate(NEWEST_FIRST) if name.startswith(family))
    return next(ranks, len(NEWEST_FIRST))


def twins() -> list[str]:
    """The packaged recipes NAME-tiny that are another one, NAME, with a small random model and data of this machine."""
    names = packaged()
    return [
        name for name in names if name.endswith("-tiny") and name.removesuffix("-tiny") in names
    ]


def load_recipe(source: str | Path, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Read a recipe file or a packaged recipe. Raises UserError (code 2) that lists everything wrong in it.

    Relative paths start at the file that holds them; in packaged recipes and overrides, at the working folder.
    A model or tokenizer that is no local folder is left as it is: an id on the Hugging Face Hub.
    """
    file = _find(source)
    _refuse_unwritable_names(file.path)
    return _loaded(file.name, file.label, _extended(file, ()), overrides)


def load_text(text: str, *, name: str, source: str, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """As `load_recipe`, for YAML without a file; `source` names where its keys come from."""
    _refuse_unwritable_names(Path.cwd())
    document = _with_kinds(read_yaml(text, source=source, folder=Path.cwd()))
    path = Path.cwd() / f"{_safe_name(name)}.yaml"
    return _loaded(_safe_name(name), source, _onto_parent(document, source, path, ()), overrides)


def merged_text(text: str, overrides: Sequence[str]) -> dict[str, Any]:
    """The keys of a YAML text and of overrides, as they are written: without defaults and unchecked."""
    document = _with_kinds(read_yaml(text, source="", folder=Path.cwd()))
    layers = [document, *(_with_kinds(_override(override)) for override in overrides)]
    merged = reduce(_merged, layers)
    return merged.data if isinstance(merged.data, dict) else {}


def _loaded(name: str, label: str, base: YamlDocument, overrides: Sequence[str]) -> LoadedRecipe:
    layers = [base, *(_with_kinds(_override(override)) for override in overrides)]
    document = reduce(_merged, layers)

    # All mistakes are collected, so that one message lists them.
    mistakes = [*document.mistakes, *secrets(document.data, document.origins)]
    recipe = None
    if isinstance(document.data, dict):
        data = document.data | {"name": document.data.get("name") or _safe_name(name)}
        data = _with_paths(data, document.origins)
        recipe, invalid_keys = _validated(data, document.origins)
        mistakes += invalid_keys
    elif not mistakes:
        mistakes.append(
            Mistake((), label, "the recipe holds no keys", "see `bloomery recipes show everything`")
        )
    if mistakes:
        refuse_file_of_a_tool(base.data, label, name)

    # The first mistake of each key: what follows from it would only repeat it.
    firsts = {mistake.path or mistake: mistake for mistake in reversed(mistakes)}
    refuse(name, list(firsts.values())[::-1])
    assert recipe is not None and recipe.name is not None
    return LoadedRecipe(recipe, recipe.name, provenance(recipe, document.origins))


def json_schema() -> dict[str, Any]:
    """The JSON schema of a recipe, for editors: `# yaml-language-server: $schema=bloomery.schema.json`."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Bloomery recipe"}
    schema = Recipe.model_json_schema(by_alias=True)
    owners = {"tokenizer": schema["$defs"]["TokenizerSection"], "model": schema["$defs"]["Model"]}
    for *section, key in _WITH_KIND:
        properties = (owners[str(section[0])] if section else schema)["properties"]
        models = [model for model in models_at((*section, key)) if "kind" in model.model_fields]
        kinds = [
            kind for model in models for kind in get_args(model.model_fields["kind"].annotation)
        ]
        described = {
            name: properties[key].pop(name)
            for name in ("description", "default")
            if name in properties[key]
        }
        properties[key] = {"anyOf": [{"enum": kinds}, properties[key]]} | described
    with_units: dict[str, Any] = _with_units(schema | head)
    return with_units


def _with_units(schema: Any) -> Any:
    """Defaults that are lengths or sizes, in recipe notation: "1000 steps", "4GiB"."""
    if isinstance(schema, dict):
        if set(schema) == {"amount", "unit"}:
            return write_duration(Duration(**schema))
        written = {key: _with_units(value) for key, value in schema.items()}
        if written.get("format") == "bytes" and isinstance(written.get("default"), int):
            written["default"] = write_memory(written["default"])
        return written
    return [_with_units(value) for value in schema] if isinstance(schema, list) else schema


def dump_recipe(loaded: LoadedRecipe) -> str:
    """The whole recipe as YAML, each key with its origin as a comment; it loads to the same Recipe."""
    return _HEADER + "\n".join(_dumped(loaded.recipe, loaded.provenance, ())) + "\n"


def unset_keys(complete_text: str) -> set[str]:
    """The keys of `dump_recipe`'s text that nobody set, such as "train.seed": their comments say so."""
    keys = set[str]()
    sections = list[str]()
    for line in complete_text.splitlines():
        match = re.fullmatch(r"( *)([^\s:#]+):(.*)", line)
        if match is None:
            continue
        depth = len(match[1]) // 2
        path = [*sections[:depth], match[2]]
        sections = path
        if match[3].endswith("  # default"):
            keys.add(".".join(path))
    return keys


def provenance(
    recipe: BaseModel, origins: Mapping[KeyPath, Origin], path: KeyPath = ()
) -> dict[str, str]:
    """Where each key came from: "my.yaml line 12", "packaged recipe X line 3", "command line" or "default"."""
    places: dict[str, str] = {}
    for key, value in _items(recipe):
        inner = (*path, key)
        if isinstance(value, BaseModel):
            places |= provenance(value, origins, inner)
        else:
            place = origins[inner].place if inner in origins else "default"
            places[".".join(map(str, inner))] = place
    return places


def _refuse_unwritable_names(path: Path) -> None:
    """JSON and YAML hold text, and a name whose bytes are none in this locale cannot be written into them."""
    for folder in (path.absolute(), Path.cwd()):
        if any(0xD800 <= ord(letter) < 0xE000 for letter in str(folder)):
            fix = "set LANG=C.UTF-8, or rename the folder"
            problem = "the name of this folder is not text in this locale"
            raise UserError(problem, where=ascii(str(folder)), fix=fix, code=2)


# Finding and merging


def _find(source: str | Path, folder: Path | None = None) -> _RecipeFile:
    """The packaged recipe of this name, else the file. Raises UserError with a similar name."""
    packaged_recipes = packaged()
    name = str(source)
    if isinstance(source, str) and name in packaged_recipes:
        return _RecipeFile(name, packaged_recipes[name], True)
    path = expanded(name) if folder is None else folder / expanded(name)
    if path.is_file():
        return _RecipeFile(path.stem, path.absolute(), False)
    if path.is_dir():
        raise UserError(
            f"{name} is a folder, not a recipe",
            where=str(path),
            fix="name the YAML file in it",
            code=2,
        )

    # A name with the suffix of YAML is a file: files next to it are likelier than packaged recipes, whose names hold
    # points, too. Of a name without it, only the suffix may be missing.
    is_yaml = path.suffix in (".yaml", ".yml")
    stem = path.stem if is_yaml else path.name
    files = path.parent.glob("*.y*ml")
    neighbors = {file.stem: str(path.with_name(file.name)) for file in files}
    similar = [
        neighbors[neighbor] for neighbor in closest(stem, neighbors, cutoff=0.5 if is_yaml else 1.0)
    ]
    similar = similar or closest(stem, packaged_recipes, cutoff=0.5)
    fix = "`bloomery recipes list` lists the packaged recipes"
    if similar:
        fix = f"did you mean {similar[0]}?"
    raise UserError(f"there is no recipe {name!r}", where=str(path.absolute()), fix=fix, code=2)


def _safe_name(stem: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._")[:100] or "recipe"


def _read(file: _RecipeFile) -> YamlDocument:
    folder = Path.cwd() if file.packaged else file.path.parent
    refuse_script(file.path)
    try:
        with file.path.open("rb") as stream:
            text = stream.read(MAX_BYTES + 1).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        problem = f"the file is not UTF-8 text (byte {error.start})"
        return YamlDocument(None, {}, [Mistake((), file.label, problem, "save it as UTF-8")])
    except OSError as error:
        problem = f"the recipe cannot be read: {error.strerror}"
        raise UserError(problem, where=str(file.path), fix="fix its permissions", code=2) from error
    return read_yaml(text, source=file.label, folder=folder)


def _extended(file: _RecipeFile, children: tuple[Path, ...]) -> YamlDocument:
    """A file merged onto what it extends. `children`: the files that extend it."""
    return _onto_parent(_with_kinds(_read(file)), file.label, file.path, children)


def _onto_parent(
    document: YamlDocument, label: str, recipe_path: Path, children: tuple[Path, ...]
) -> YamlDocument:
    """The recipe of a file, merged onto what it extends. `label`: its name in messages."""
    if not isinstance(document.data, dict):
        if document.data is not None:
            problem = "a recipe is made of sections (model:, data:, train:)"
            fix = "see `bloomery recipes show everything`"
            document.mistakes.append(Mistake((), label, problem, fix))
        return YamlDocument(None, document.origins, document.mistakes)
    parent = document.data.pop("extends", None)
    if parent is None:
        return document

    # What is wrong with the parent is a mistake of this key; the other keys are checked as well.
    place = place_of(("extends",), document.origins)

    def without_parent(problem: str, fix: str = "") -> YamlDocument:
        document.mistakes.append(Mistake(("extends",), place, problem, fix))
        return document

    if not isinstance(parent, str):
        return without_parent("must be the name of a packaged recipe or a file")
    try:
        base_file = _find(parent, recipe_path.parent)
    except UserError as error:
        return without_parent(error.problem, error.fix)
    if base_file.path in (*children, recipe_path):
        chain = " -> ".join(path.name for path in (*children, recipe_path, base_file.path))
        return without_parent(f"recipes extend each other in a circle: {chain}")
    base = _extended(base_file, (*children, recipe_path))
    if isinstance(base.data, dict):
        base.data.pop("name", None)
    return _merged(base, document)


def _with_kinds(document: YamlDocument) -> YamlDocument:
    """The document with `{kind: value}` for each scalar that stands for a section."""
    for path in _WITH_KIND:
        holder = document.data
        for part in path[:-1]:
            holder = value_below(holder, part)
        if isinstance(holder, dict) and isinstance(value := holder.get(path[-1]), str):
            holder[path[-1]] = {"kind": value}
            document.origins[*path, "kind"] = document.origins[path]
    return document


# Sections that a recipe may do without.
_OPTIONAL: tuple[KeyPath, ...] = (("adapter",), ("quantize",))


def _override(override: str) -> YamlDocument:
    """`section.key=value` as a document; the value is YAML, and text where it cannot be."""
    dotted_key, equals, text = override.partition("=")
    path = tuple(dotted_key.strip().split("."))

    def refused(problem: str, fix: str = "", at: KeyPath = ()) -> YamlDocument:
        return YamlDocument({}, {}, [Mistake(at, _COMMAND_LINE, problem, fix)])

    if not equals or not all(path):
        return refused(f"{dotted_key[:80]!r} is no override", "write train.epochs=2")
    if len(path) > MAX_DEPTH:
        return refused(f"an override is nested more than {MAX_DEPTH} levels deep")
    if path[0] == "extends":
        return refused("belongs in a file", "name the recipe to extend as RECIPE", path)

    value = read_yaml(text, source=_COMMAND_LINE, folder=Path.cwd())
    if value.mistakes and text.lstrip()[:1] not in ("[", "{", '"', "'", "!"):
        value = YamlDocument(text)  # data.glob=*.go is not YAML: keep the text
    if path in _OPTIONAL and text.strip() in ("null", "~"):
        value = YamlDocument("none")  # null would keep what the recipe has, in silence

    # The value's own paths lie below the key; each section on the way has an origin, too.
    sections = [path[:length] for length in range(1, len(path) + 1)]
    values = [path + inner for inner in value.origins]
    origins = dict.fromkeys([*sections, *values], Origin(_COMMAND_LINE, Path.cwd()))
    mistakes = [
        Mistake(path + mistake.path, _COMMAND_LINE, mistake.problem, mistake.fix)
        for mistake in value.mistakes
    ]
    data = value.data
    for part in reversed(path):
        data = {part: data}
    return YamlDocument(data, origins, mistakes)


def _merged(base: YamlDocument, over: YamlDocument) -> YamlDocument:
    """`over` laid onto `base`: sections merge key by key, everything else is replaced."""
    mistakes = base.mistakes + over.mistakes
    if not isinstance(base.data, dict) or not isinstance(over.data, dict):
        usable = over if isinstance(over.data, dict) else base
        return YamlDocument(usable.data, usable.origins, mistakes)
    origins = dict(base.origins)
    data = _laid(base.data, over.data, (), origins)
    origins |= {path: origin for path, origin in over.origins.items() if path}
    return YamlDocument(data, origins, mistakes)


def _laid(
    base: dict[str, Any], over: dict[str, Any], path: KeyPath, origins: dict[KeyPath, Origin]
) -> dict[str, Any]:
    """The keys of `over` laid onto those of `base` at `path`; origins of replaced keys are removed in place."""
    result = dict(base)
    for key in _dropped(base, over, path, origins):
        result.pop(key, None)
        _forget(origins, (*path, key))
    for key, value in over.items():
        inner = (*path, key)
        # `claims: {}` empties it
        if value and isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = _laid(result[key], value, inner, origins)
        elif value is None and isinstance(result.get(key), dict):
            continue  # `train:` with nothing below it changes nothing
        else:
            _forget(origins, inner)
            result[key] = value
    return result


def _dropped(
    base: dict[str, Any], over: dict[str, Any], path: KeyPath, origins: Mapping[KeyPath, Origin]
) -> list[str]:
    """The inherited keys that the upper layer's values make meaningless."""
    if path in _KIND_REPLACES and "kind" in over and over["kind"] != base.get("kind"):
        return list(base)
    if path == ("model",) and over.get("from") is not None:
        # A pretrained model has its own sizes.
        return [key for key in base if key != "implementation"]
    dropped = [
        key
        for section, choices in _ALTERNATIVES
        if path == (section,) and any(over.get(key) is not None for key in choices)
        for key in choices
        if key in base and key not in over
    ]
    if path == ("train",) and _outgrown(base, over, origins):
        dropped.append("micro_batch_size")
    # Settings of the reader belong to the dataset that they were written for. On the command line the order of
    # overrides does not matter, so those of the path's own layer stay.
    if path == ("data",) and over.get("path") is not None:
        readers = [
            key
            for key in ("glob", "format", "columns")
            if (*path, key) in origins and key not in over
        ]
        dropped += [key for key in readers if origins[*path, key].place != _COMMAND_LINE]
    return dropped


def _outgrown(
    base: Mapping[str, Any], over: Mapping[str, Any], origins: Mapping[KeyPath, Origin]
) -> bool:
    """Whether a recipe's micro-batch does not divide the batch size of the layer above it: the plan chooses another."""
    batch_size = over.get("batch_size")
    micro_batch_size = base.get("micro_batch_size")
    if type(batch_size) is not int or type(micro_batch_size) is not int:
        return False
    if "micro_batch_size" in over or micro_batch_size < 1:
        return False
    origin = origins.get(("train", "micro_batch_size"))
    typed = origin is not None and origin.place == _COMMAND_LINE
    return batch_size % micro_batch_size > 0 and not typed


def _forget(origins: dict[KeyPath, Origin], path: KeyPath) -> None:
    for inner in [inner for inner in origins if inner[: len(path)] == path]:
        del origins[inner]


# Checking

# Keys whose values may be names of plug-ins -> their kind.
_PLUGIN_KEYS = {
    ("model", "family"): "families",
    ("optimizer", "kind"): "optimizers",
    ("objective", "kind"): "objectives",
}


def _validated(
    data: dict[str, Any], origins: Mapping[KeyPath, Origin]
) -> tuple[Recipe | None, list[Mistake]]:
    # A section with nothing below it is the section with its defaults.
    section_names = Recipe.model_fields.keys() - {"name", "extends"}
    sections: dict[str, Any] = {"model": {}, "data": {}}
    for key, value in data.items():
        sections[key] = {} if value is None and key in section_names else value
    for (section, key), kind in _PLUGIN_KEYS.items():
        refuse_unusable(kind, value_below(sections.get(section), key))
    mistakes = list(_contradictions(sections, origins))
    try:
        return Recipe.model_validate_json(json.dumps(sections), strict=True), mistakes
    except ValidationError as error:
        return None, from_pydantic(error, sections, origins) + mistakes


def mistakes_in(data: dict[str, Any]) -> list[Mistake]:
    """What a recipe of these keys would be refused for."""
    return _validated(data, {})[1]


def _contradictions(
    data: Mapping[str, Any], origins: Mapping[KeyPath, Origin]
) -> Iterator[Mistake]:
    """Alternatives that are set together, or not at all where one is needed; and an impossible validation share."""
    for section, choices in _ALTERNATIVES:
        values = data.get(section, {})
        if not isinstance(values, dict):
            continue
        given_keys = [
            key
            for key in choices
            if values.get(key) not in (None, []) and (key, values[key]) not in _UNSET
        ]
        if len(given_keys) > 1:
            problem = f"sets {' and '.join(given_keys)}, but only one of them can be set"
            place = place_of((section, given_keys[-1]), origins)
            yield Mistake((section,), place, problem, f"keep one of {', '.join(given_keys)}")
        if not given_keys and section in _NEEDED:
            problem = f"needs one of {', '.join(choices)}"
            yield Mistake((section,), place_of((section,), origins), problem, _NEEDED[section])

    validation = data["data"].get("validation") if isinstance(data["data"], dict) else None
    if validation is not None and not _is_path(validation) and not _is_share(validation):
        path = ("data", "validation")
        problem = (
            "must be a share from 0% to 50%, the path of another dataset, or a split of the dataset"
        )
        yield Mistake(path, place_of(path, origins), problem)


def _is_share(value: object) -> bool:
    if isinstance(value, str) and re.fullmatch(r"\s*[0-9.]+\s*%\s*", value):
        return 0 <= float(value.strip().rstrip("%")) <= 50
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 0.5


def _is_path(value: object) -> bool:
    return isinstance(value, str) and not value.strip().endswith("%")


# Paths


def _with_paths(data: dict[str, Any], origins: Mapping[KeyPath, Origin]) -> dict[str, Any]:
    """The same recipe with absolute paths."""
    result: dict[str, Any] = json.loads(json.dumps(data))
    for pattern, change in _PATHS:
        for path, section in _sections_at(result, pattern[:-1]):
            if isinstance(value := section.get(pattern[-1]), str):
                places = (
                    origins.get((*path, pattern[-1])[:length])
                    for length in range(len(pattern), 0, -1)
                )
                folder = next((place.folder for place in places if place), Path.cwd())
                section[pattern[-1]] = change(value, folder)
    return result


def _sections_at(
    data: Any, pattern: KeyPath, path: KeyPath = ()
) -> Iterator[tuple[KeyPath, dict[str, Any]]]:
    """The sections at a path, in which * is every item of a list."""
    if not pattern and isinstance(data, dict):
        yield path, data
    elif pattern:
        keys = range(len(data)) if pattern[0] == "*" and isinstance(data, list) else pattern[:1]
        for key in keys:
            yield from _sections_at(value_below(data, key), pattern[1:], (*path, key))


def _absolute_or_split(value: str, folder: Path) -> str:
    """A fraction or a plain name that is no path (auto, or a split of the dataset) unchanged; else a path."""
    is_plain_name = re.fullmatch(r"[\w-]+", value) and not (folder / value).exists()
    return value if is_plain_name or not _is_path(value) else _absolute(value, folder)


def _path_or_hub_id(value: str, folder: Path) -> str:
    """ORG/NAME is a dataset on the Hub, unless a file or a folder ORG is here or NAME ends as a file does."""
    hub_id = re.fullmatch(r"(?P<org>[A-Za-z0-9][\w.-]*)/[\w.-]*?(?P<suffix>\.[A-Za-z]\w*)?", value)
    is_path = hub_id is None or hub_id["suffix"] or (folder / hub_id["org"]).exists()
    return _absolute(value, folder) if is_path else f"hub:{value}"


def _absolute(value: str, folder: Path) -> str:
    if "://" in value or value.startswith("hub:"):
        return value
    return str((folder / expanded(value)).absolute())


def _found_from_anywhere(command: str, folder: Path) -> str:
    """A command whose program and other words such as ./hook.sh are absolute paths: hooks run in the run's folder."""
    try:
        words = shlex.split(command)
    except ValueError:
        return command  # which is refused as such
    path_numbers = [
        number
        for number, word in enumerate(words)
        if word.startswith(("./", "../", "~/")) or (number == 0 and "/" in word)
    ]
    for number in path_numbers:
        words[number] = _absolute(words[number], folder)
    return shlex.join(words) if path_numbers else command


def _local_or_name(value: str, folder: Path) -> str:
    """A path when it exists or can only be one; otherwise a name such as a Hub id."""
    path = folder / expanded(value)
    exists = len(value) < 500 and "\n" not in value and path.exists()
    return str(path.absolute()) if exists or value.startswith((".", "/", "~")) else value


def _teacher(value: str, folder: Path) -> str:
    """As `_local_or_name`, but for the words of a model that teaches itself: a folder of that name is `./base`."""
    return value if value in OWN_TEACHERS else _local_or_name(value, folder)


def _file_of_function(value: str, folder: Path) -> str:
    """FILE:FUNCTION with the absolute path of the file."""
    file, colon, function = value.rpartition(":")
    return f"{_absolute(file, folder)}:{function}" if file and colon else value


_PATHS: tuple[tuple[tuple[str, ...], Callable[[str, Path], str]], ...] = (
    (("data", "path"), _path_or_hub_id),
    (("data", "sources", "*", "path"), _path_or_hub_id),
    (("data", "pictures"), _absolute),
    (("data", "sources", "*", "pictures"), _absolute),
    (("data", "prepared"), _absolute),
    (("data", "validation"), _absolute_or_split),
    (("logging", "trackers", "command"), _found_from_anywhere),
    (("logging", "trackers", "*", "command"), _found_from_anywhere),
    (("model", "from"), _local_or_name),
    (("tokenizer", "from"), _local_or_name),
    (("data", "chat", "template"), _local_or_name),
    (("objective", "teacher"), _teacher),
    (("objective", "teacher_scores"), _absolute),
    (("sample", "prompts", "*", "image"), _absolute),
    (("rewards", "*", "python"), _file_of_function),
    (("tools", "*", "python"), _file_of_function),
    (("environment", "python"), _file_of_function),
    (("rewards", "*", "model"), _local_or_name),
)


# Writing


def _items(section: BaseModel) -> Iterator[tuple[str, Any]]:
    """The keys in recipe notation, and their values."""
    for name, info in type(section).model_fields.items():
        yield info.alias or name, getattr(section, name)
    yield from (section.model_extra or {}).items()


def _dumped(section: BaseModel, origin: Mapping[str, str], path: tuple[str, ...]) -> Iterator[str]:
    indent = "  " * len(path)
    written = section.model_dump(mode="json", by_alias=True)
    for key, value in _items(section):
        if isinstance(value, BaseModel):
            yield f"{indent}{key}:"
            yield from _dumped(value, origin, (*path, key))
        elif (
            comment := origin.get(".".join((*path, key)), "default")
        ) != "default" or value is not None:
            yield f"{indent}{key}: {json.dumps(written[key], ensure_ascii=False)}  # {comment}"

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
from bloomery.recipe.mistakes import from_pydantic, models_at, place_of, refuse, secrets, step
from bloomery.recipe.schema import LENGTHS, Recipe
from bloomery.recipe.values import write_duration
from bloomery.recipe.yaml import MAX_BYTES, MAX_DEPTH, Document, KeyPath, Mistake, Origin, read_yaml

# Keys that exclude each other: a layer that sets one of them drops the others that it would inherit.
_ALTERNATIVES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("model", ("from", "preset", "family")),
    ("tokenizer", ("from", "train")),
    ("data", ("path", "builtin", "sources")),
    ("train", tuple(LENGTHS)),
    ("train", ("tokens_per_step", "batch_size")),
)
_UNSET = (("tokens_per_step", "auto"),)  # next to batch_size in the complete recipe of a run
# one of its alternatives
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
# another kind has other keys
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
        near = self.path.is_relative_to(Path.cwd())
        path = self.path.relative_to(Path.cwd()) if near else self.path
        return f"packaged recipe {self.name}" if self.packaged else str(path)


def packaged() -> dict[str, Path]:
    """The recipes that come with Bloomery, by name."""
    folder = Path(__file__).parent.parent / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load_recipe(source: str | Path, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Read a recipe file or a packaged recipe. Raises UserError (code 2) that lists everything wrong in it.

    Relative paths start at the file that holds them; in packaged recipes and overrides, at the working folder.
    A model or tokenizer that is no local folder is left as it is: an id on the Hugging Face Hub.
    """
    found = _find(source)
    _refuse_unwritable_names(found.path)
    return _loaded(found.name, found.label, _extended(found, ()), overrides)


def load_text(text: str, *, name: str, source: str, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """As `load_recipe`, for YAML without a file; `source` names where its keys come from."""
    _refuse_unwritable_names(Path.cwd())
    own = _with_kinds(read_yaml(text, source=source, folder=Path.cwd()))
    return _loaded(_safe_name(name), source, own, overrides)


def merged_text(text: str, overrides: Sequence[str]) -> dict[str, Any]:
    """The keys of a YAML text and of overrides, as they are written: without defaults and unchecked."""
    own = _with_kinds(read_yaml(text, source="", folder=Path.cwd()))
    merged = reduce(_merged, [own, *(_with_kinds(_override(word)) for word in overrides)])
    return merged.data if isinstance(merged.data, dict) else {}


def _loaded(name: str, label: str, own: Document, overrides: Sequence[str]) -> LoadedRecipe:
    document = reduce(_merged, [own, *(_with_kinds(_override(word)) for word in overrides)])
    mistakes = [*document.mistakes, *secrets(document.data, document.origins)]
    recipe = None
    if isinstance(document.data, dict):
        data = document.data | {"name": document.data.get("name") or _safe_name(name)}
        data = _with_paths(data, document.origins)
        recipe, wrong = _validated(data, document.origins)
        mistakes += wrong
    elif not mistakes:
        mistakes.append(
            Mistake((), label, "the recipe holds no keys", "see `bloomery recipes show everything`")
        )
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
    found: dict[str, Any] = _with_lengths(schema | head)
    return found


def _with_lengths(schema: Any) -> Any:
    """Defaults that are lengths, in recipe notation: "1000 steps"."""
    if isinstance(schema, dict):
        if set(schema) == {"amount", "unit"}:
            return write_duration(Duration(**schema))
        return {key: _with_lengths(value) for key, value in schema.items()}
    return [_with_lengths(value) for value in schema] if isinstance(schema, list) else schema


def dump_recipe(loaded: LoadedRecipe) -> str:
    """The whole recipe as YAML, each key with its origin as a comment; it loads to the same Recipe."""
    return _HEADER + "\n".join(_dumped(loaded.recipe, loaded.provenance, ())) + "\n"


def provenance(
    recipe: BaseModel, origins: Mapping[KeyPath, Origin], path: KeyPath = ()
) -> dict[str, str]:
    """Where each key came from: "my.yaml line 12", "packaged recipe X line 3", "command line" or "default"."""
    found: dict[str, str] = {}
    for key, value in _items(recipe):
        inner = (*path, key)
        if isinstance(value, BaseModel):
            found |= provenance(value, origins, inner)
        else:
            found[".".join(map(str, inner))] = (
                origins[inner].place if inner in origins else "default"
            )
    return found


def _refuse_unwritable_names(path: Path) -> None:
    """JSON and YAML hold text, and a name whose bytes are none in this locale cannot be written into them."""
    for folder in (path.absolute(), Path.cwd()):
        if any(0xD800 <= ord(letter) < 0xE000 for letter in str(folder)):
            fix = "set LANG=C.UTF-8, or rename the folder"
            problem = "the name of this folder is not text in this locale"
            raise UserError(problem, where=ascii(str(folder)), fix=fix, code=2)


# Finding and merging


def _find(source: str | Path, folder: Path | None = None) -> _RecipeFile:
    known = packaged()
    text = str(source)
    if isinstance(source, str) and text in known:
        return _RecipeFile(text, known[text], True)
    path = expanded(text)
    path = path if folder is None else folder / path
    if path.is_file():
        return _RecipeFile(path.stem, path.absolute(), False)
    if path.is_dir():
        raise UserError(
            f"{text} is a folder, not a recipe",
            where=str(path),
            fix="name the YAML file in it",
            code=2,
        )
    files = (
        {file.stem: str(path.with_name(file.name)) for file in path.parent.glob("*.y*ml")}
        if path.suffix
        else {}
    )
    near = [files[stem] for stem in closest(path.stem, files, cutoff=0.5)]
    near = near or closest(path.stem, known, cutoff=0.5)
    fix = (
        f"did you mean {near[0]}?" if near else "`bloomery recipes list` lists the packaged recipes"
    )
    raise UserError(f"there is no recipe {text!r}", where=str(path.absolute()), fix=fix, code=2)


def _safe_name(stem: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._")[:100] or "recipe"


def _read(file: _RecipeFile) -> Document:
    folder = Path.cwd() if file.packaged else file.path.parent
    try:
        with file.path.open("rb") as stream:
            text = stream.read(MAX_BYTES + 1).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        problem = f"the file is not UTF-8 text (byte {error.start})"
        return Document(None, {}, [Mistake((), file.label, problem, "save it as UTF-8")])
    except OSError as error:
        problem = f"the recipe cannot be read: {error.strerror}"
        raise UserError(problem, where=str(file.path), fix="fix its permissions", code=2) from error
    return read_yaml(text, source=file.label, folder=folder)


def _extended(file: _RecipeFile, seen: tuple[Path, ...]) -> Document:
    """A file merged onto what it extends."""
    own = _with_kinds(_read(file))
    if not isinstance(own.data, dict):
        if own.data is not None:
            problem = "a recipe is made of sections (model:, data:, train:)"
            own.mistakes.append(
                Mistake((), file.label, problem, "see `bloomery recipes show everything`")
            )
        return Document(None, own.origins, own.mistakes)
    parent = own.data.pop("extends", None)
    if parent is None:
        return own
    place = place_of(("extends",), own.origins)
    if not isinstance(parent, str):
        own.mistakes.append(
            Mistake(("extends",), place, "must be the name of a packaged recipe or a file")
        )
        return own
    try:
        base = _find(parent, file.path.parent)
    except UserError as error:
        own.mistakes.append(Mistake(("extends",), place, error.problem, error.fix))
        return own
    if base.path in (*seen, file.path):
        chain = " -> ".join(path.name for path in (*seen, file.path, base.path))
        own.mistakes.append(
            Mistake(("extends",), place, f"recipes extend each other in a circle: {chain}")
        )
        return own
    below = _extended(base, (*seen, file.path))
    if isinstance(below.data, dict):
        below.data.pop("name", None)
    return _merged(below, own)


def _with_kinds(document: Document) -> Document:
    """The document with `{kind: value}` for each scalar that stands for a section."""
    for path in _WITH_KIND:
        holder = document.data
        for part in path[:-1]:
            holder = step(holder, part)
        if isinstance(holder, dict) and isinstance(value := holder.get(path[-1]), str):
            holder[path[-1]] = {"kind": value}
            document.origins[*path, "kind"] = document.origins[path]
    return document


def _override(word: str) -> Document:
    """`section.key=value` as a document; the value is YAML, and text where it cannot be."""
    dotted, equals, text = word.partition("=")
    place = _COMMAND_LINE
    parts = tuple(dotted.strip().split("."))
    if not equals or not all(parts):
        problem = f"{dotted[:80]!r} is no override"
        return Document({}, {}, [Mistake((), place, problem, "write train.epochs=2")])
    if len(parts) > MAX_DEPTH:
        return Document(
            {}, {}, [Mistake((), place, f"an override is nested more than {MAX_DEPTH} levels deep")]
        )
    if parts[0] == "extends":
        return Document(
            {},
            {},
            [Mistake(parts, place, "belongs in a file", "name the recipe to extend as RECIPE")],
        )
    value = read_yaml(text, source=place, folder=Path.cwd())
    if value.mistakes and text.lstrip()[:1] not in ("[", "{", '"', "'", "!"):
        value = Document(text)  # data.glob=*.go is not YAML: keep the text
    origin = Origin(place, Path.cwd())
    paths = [
        *(parts[:length] for length in range(1, len(parts) + 1)),
        *(parts + path for path in value.origins),
    ]
    mistakes = [
        Mistake(parts + wrong.path, place, wrong.problem, wrong.fix) for wrong in value.mistakes
    ]
    data = value.data
    for part in reversed(parts):
        data = {part: data}
    return Document(data, dict.fromkeys(paths, origin), mistakes)


def _merged(base: Document, over: Document) -> Document:
    """`over` laid onto `base`: sections merge key by key, everything else is replaced."""
    mistakes = base.mistakes + over.mistakes
    if not isinstance(base.data, dict) or not isinstance(over.data, dict):
        kept = over if isinstance(over.data, dict) else base
        return Document(kept.data, kept.origins, mistakes)
    origins = dict(base.origins)
    data = _laid(base.data, over.data, (), origins)
    return Document(
        data, origins | {path: origin for path, origin in over.origins.items() if path}, mistakes
    )


def _laid(
    base: dict[str, Any], over: dict[str, Any], path: KeyPath, origins: dict[KeyPath, Origin]
) -> dict[str, Any]:
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
        # a pretrained model has its own sizes
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
    # its reader settings are those of another dataset
    if path == ("data",) and over.get("path") is not None:
        readers = [
            key
            for key in ("glob", "format", "columns")
            if (*path, key) in origins and key not in over
        ]
        # overrides: in any order
        dropped += [key for key in readers if origins[*path, key].place != _COMMAND_LINE]
    return dropped


def _outgrown(
    base: Mapping[str, Any], over: Mapping[str, Any], origins: Mapping[KeyPath, Origin]
) -> bool:
    """Whether a recipe's micro-batch does not divide the batch size of the layer above it: the plan chooses another."""
    batch = over.get("batch_size")
    micro = base.get("micro_batch_size")
    if type(batch) is not int or type(micro) is not int or "micro_batch_size" in over or micro < 1:
        return False
    path = ("train", "micro_batch_size")
    return batch % micro > 0 and not (path in origins and origins[path].place == _COMMAND_LINE)


def _forget(origins: dict[KeyPath, Origin], path: KeyPath) -> None:
    for known in [known for known in origins if known[: len(path)] == path]:
        del origins[known]


# Checking


def _validated(
    data: dict[str, Any], origins: Mapping[KeyPath, Origin]
) -> tuple[Recipe | None, list[Mistake]]:
    sections = {key for key, field in Recipe.model_fields.items() if key not in ("name", "extends")}
    filled = {
        key: {} if value is None and key in sections else value for key, value in data.items()
    }
    filled = {"model": {}, "data": {}} | filled
    mistakes = list(_contradictions(filled, origins))
    try:
        return Recipe.model_validate_json(json.dumps(filled), strict=True), mistakes
    except ValidationError as error:
        return None, from_pydantic(error, filled, origins) + mistakes


def mistakes_in(data: dict[str, Any]) -> list[Mistake]:
    """What a recipe of these keys would be refused for."""
    return _validated(data, {})[1]


def _contradictions(
    data: Mapping[str, Any], origins: Mapping[KeyPath, Origin]
) -> Iterator[Mistake]:
    for section, choices in _ALTERNATIVES:
        given = data.get(section, {})
        if not isinstance(given, dict):
            continue
        said = [
            key
            for key in choices
            if given.get(key) not in (None, []) and (key, given[key]) not in _UNSET
        ]
        if len(said) > 1:
            problem = f"sets {' and '.join(said)}, but only one of them can be set"
            yield Mistake(
                (section,),
                place_of((section, said[-1]), origins),
                problem,
                f"keep one of {', '.join(said)}",
            )
        if not said and section in _NEEDED:
            problem = f"needs one of {', '.join(choices)}"
            yield Mistake((section,), place_of((section,), origins), problem, _NEEDED[section])
    held_out = data["data"].get("validation") if isinstance(data["data"], dict) else None
    if isinstance(held_out, str) and re.fullmatch(r"\s*[0-9.]+\s*%\s*", held_out):
        is_share = 0 <= float(held_out.strip().rstrip("%")) <= 50
    else:
        is_share = (
            isinstance(held_out, int | float)
            and not isinstance(held_out, bool)
            and 0 <= held_out <= 0.5
        )
    if held_out is not None and not _is_path(held_out) and not is_share:
        problem = (
            "must be a share from 0% to 50%, the path of another dataset, or a split of the dataset"
        )
        yield Mistake(("data", "validation"), place_of(("data", "validation"), origins), problem)


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
            yield from _sections_at(step(data, key), pattern[1:], (*path, key))


def _absolute_or_split(value: str, folder: Path) -> str:
    """A fraction or a plain name that is no path (auto, or a split of the dataset) unchanged; else a path."""
    plain = not _is_path(value) or (
        re.fullmatch(r"[\w-]+", value) and not (folder / value).exists()
    )
    return value if plain else _absolute(value, folder)


def _path_or_hub_id(value: str, folder: Path) -> str:
    """ORG/NAME is a dataset on the Hub, unless a file or a folder ORG is here or NAME ends as a file does."""
    found = re.fullmatch(r"(?P<org>[A-Za-z0-9][\w.-]*)/[\w.-]*?(?P<suffix>\.[A-Za-z]\w*)?", value)
    local = found is None or found["suffix"] or (folder / found["org"]).exists()
    return _absolute(value, folder) if local else f"hub:{value}"


def _absolute(value: str, folder: Path) -> str:
    return (
        value
        if "://" in value or value.startswith("hub:")
        else str((folder / expanded(value)).absolute())
    )


def _found_from_anywhere(command: str, folder: Path) -> str:
    """A command whose program and other words such as ./hook.sh are absolute paths: hooks run in the run's folder."""
    try:
        words = shlex.split(command)
    except ValueError:
        return command  # which is refused as such
    paths = [
        at
        for at, word in enumerate(words)
        if word.startswith(("./", "../", "~/")) or (not at and "/" in word)
    ]
    for at in paths:
        words[at] = _absolute(words[at], folder)
    return shlex.join(words) if paths else command


def _local_or_name(value: str, folder: Path) -> str:
    """A path when it exists or can only be one; otherwise a name such as a Hub id."""
    local = folder / expanded(value)
    named = value.startswith((".", "/", "~")) or (
        len(value) < 500 and "\n" not in value and local.exists()
    )
    return str(local.absolute()) if named else value


_PATHS: tuple[tuple[tuple[str, ...], Callable[[str, Path], str]], ...] = (
    (("data", "path"), _path_or_hub_id),
    (("data", "sources", "*", "path"), _path_or_hub_id),
    (("data", "prepared"), _absolute),
    (("data", "validation"), _absolute_or_split),
    (("logging", "trackers", "command"), _found_from_anywhere),
    (("logging", "trackers", "*", "command"), _found_from_anywhere),
    (("model", "from"), _local_or_name),
    (("tokenizer", "from"), _local_or_name),
    (("data", "chat", "template"), _local_or_name),
    (("objective", "teacher"), _local_or_name),
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

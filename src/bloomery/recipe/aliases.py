"""Keys and values of other programs and of version 1 of the recipe, and what to write instead (table: aliases.toml)."""

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from bloomery.core.errors import one_line
from bloomery.core.text import closest, letters_apart
from bloomery.facts.optimizers import OPTIMIZERS
from bloomery.recipe.schema import Recipe
from bloomery.recipe.yaml import KeyPath, read_yaml

_MICRO_BATCH = (
    "per_device_train_batch_size",
    "per_gpu_train_batch_size",
    "micro_batch_size",
    "batch_size",
)
ROLLOUTS = "TRL rollouts"  # the table of files that train on completions
_SIMILAR = 0.8  # difflib ratio of names that may be the same one, misspelled
_MISTAKES = 2  # letters: `active_steps` is not `save_steps`
_SAFE = re.compile(r"[\w./<>|@+-][\w ./:<>|@+%-]*")


@dataclass(frozen=True)
class Alias:
    """An answer. `edits`: overrides (section.key=value, or section.key alone); none: `reason` says what to do."""

    name: str
    program: str = ""
    edits: tuple[str, ...] = ()
    reason: str = ""
    guess: bool = False

    def __str__(self) -> str:
        if self.guess:
            names = " or ".join(filter(None, [", ".join(self.edits[:-1]), self.edits[-1]]))
            return f"did you mean {names}?"
        # as the command line takes them: a value with blanks in quotes; the key alone where it is long
        shown = []
        for edit in self.edits:
            key, equals, value = edit.partition("=")
            quotes = '"' if " " in value and '"' not in value and value[:1] not in "[{" else ""
            shown.append(
                f"`{key}`" if len(edit) > 120 else f"`{key}{equals}{quotes}{value}{quotes}`"
            )
        use = (
            "use " + " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]])) if shown else ""
        )
        use = f"{use} ({self.reason})" if use and self.reason else use or self.reason
        return one_line(f"`{self.name}`{f' ({self.program})' if self.program else ''}: {use}")


@dataclass(frozen=True)
class _Row:
    name: str
    program: str
    answers: str | Mapping[str, str]


def look_up(
    path: KeyPath, value: Any, siblings: Mapping[str, Any], *, program: str = ""
) -> Alias | None:
    """What to write for a key that the schema does not have, or None. `siblings`: the keys next to it.

    The row of this name in the table (of `program` first), else up to three keys of a similar name.
    """
    names = tuple(part for part in path if isinstance(part, str))
    name = ".".join(names)
    if names[0] == "trl":  # Axolotl hands the keys of this section to GRPOConfig
        program = ROLLOUTS
    at_top = _row(f".{names[-1]}", program) if len(names) == 1 else None
    row = at_top or _row(name, program) or _row(names[-1], program)
    if row is not None:
        return _answer(row, name, value, siblings)
    for beginning, reason in _table()["families"].items():
        if name.startswith(beginning) or names[-1].startswith(beginning):
            return Alias(name, reason=reason)
    if isinstance(value, dict) and value:
        return None  # a section: its keys have answers of their own
    return _near(names, value)


def look_up_value(path: KeyPath, value: Any) -> Alias | None:
    """What to write for a value that the key at `path` does not take, or None."""
    key = ".".join(part for part in path if isinstance(part, str))
    if isinstance(value, str | int | float) and (edits := _translated(f"{key}={plain(value)}")):
        return Alias(str(value).lower() if isinstance(value, bool) else str(value), "", *edits)
    return None


def accepted(edit: str, *others: str) -> bool:
    """Whether the schema takes the value of an edit; `others`, such as the `kind`s, stand in the same recipe."""
    data: dict[str, Any] = {"model": {}, "data": {}}
    for written in (*others, edit):
        key, _, text = written.partition("=")
        *parents, last = key.split(".")
        section = data
        for part in parents:
            section = section.setdefault(part, {})
        section[last] = read_yaml(text, source="", folder=Path()).data
    try:
        Recipe.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        path = edit.partition("=")[0].split(".")
        for detail in error.errors():
            # A location holds the names of union members, too: only parts of the key count.
            wrong_path = [part for part in detail["loc"] if part in path]
            if detail["type"] == "union_tag_invalid":
                wrong_path.append("kind")
            if wrong_path[: len(path)] == path:
                return False
    return True


def _near(names: Sequence[str], value: Any) -> Alias | None:
    """Up to three keys of a similar name; with the value where one key has this name in another section."""
    keys: dict[str, list[str]] = {}
    for key in known_keys():
        if key[0] != "claims" and "sources" not in key and key[-1] not in ("kind", "name"):
            keys.setdefault(_normal(key[-1]), []).append(".".join(key))
    name = _normal(names[-1])
    same_name = keys.get(name, [])
    if len(same_name) == 1:
        return Alias(".".join(names), edits=_with_value(same_name[0].split("."), value))

    # A misspelled name of another program leads to the keys of its row.
    for row_name, row in _rows("").items():
        if isinstance(row.answers, str) and row_name not in keys:
            edits, _ = _split(row.answers)
            keys[row_name] = [edit.partition("=")[0] for edit in edits if edit[:1] != "@"]
    similar_names = [name] if same_name else closest(name, keys, count=3, cutoff=_SIMILAR)
    similar_names = [each for each in similar_names if letters_apart(name, each) <= _MISTAKES]
    similar = dict.fromkeys(key for near_name in similar_names for key in keys[near_name])

    # Those of the same section are likelier.
    section = ".".join(names[:-1]) + "."
    nearest = sorted(similar, key=lambda key: not key.startswith(section))[:3]
    return Alias(".".join(names), edits=tuple(nearest), guess=True) if nearest else None


# The table


def optimizer_kinds() -> str:
    """ "adamw, muon or adafactor": those of Bloomery and of installed packages."""
    *kinds, last_kind = OPTIMIZERS
    return f"{', '.join(kinds)} or {last_kind}"


@cache
def _table() -> dict[str, Any]:
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    return tomllib.loads(text.replace("{optimizer kinds}", optimizer_kinds()))


@cache
def _rows(program: str) -> dict[str, _Row]:
    """Every row by its name in lower case without signs; those of `program` win."""
    tables = {name: rows for name, rows in _table().items() if name not in ("families", "values")}
    first_tables = ["TRL", ROLLOUTS] if program == ROLLOUTS else [program] * (program in tables)
    ordered = [name for name in tables if name not in first_tables][::-1] + first_tables
    # In other files `temperature` and its like may be any key of the recipe with that name.
    recipe_names = set() if program == ROLLOUTS else {key[-1] for key in known_keys()}
    return {
        _normal(name): _Row(name, "TRL" if owner == ROLLOUTS else owner, row)
        for owner in ordered
        for name, row in tables[owner].items()
        if owner != ROLLOUTS or name not in recipe_names
    }


def _row(name: str, program: str) -> _Row | None:
    """The row of a name in any spelling: learning_rate, learningRate, --learning-rate."""
    return _rows(program).get(_normal(name))


def _normal(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.lower())


def _answer(row: _Row, shown: str, value: Any, siblings: Mapping[str, Any]) -> Alias | None:
    text = row.answers if isinstance(row.answers, str) else _chosen(row.answers, value)
    if isinstance(value, dict) and (
        text is not row.answers or re.search(r"@|(?<!columns)=\{\w*\}", text)
    ):
        return None  # a section: its keys have answers of their own
    if text.startswith("@"):
        edits, reason = CALLS[text[1:]](value, siblings)
    else:
        edits, reason = _split(text)
        edits = [_filled(edit, value, siblings) for edit in edits]
        reason = _filled(reason, value, siblings)

    # A value of another program may have a row of its own; one that the schema refuses is left to the user.
    usable_edits = list[str]()
    reasons = [reason] if reason else []
    for edit in edits:
        translated_edits, value_reason = _translated(edit) or ((edit,), "")
        usable_edits += map(_accepted_part, translated_edits)
        reasons += [value_reason] if value_reason else []
    return Alias(shown, row.program, tuple(usable_edits), "; ".join(reasons))


def _accepted_part(edit: str) -> str:
    """The edit, or its key alone where the schema refuses the value."""
    return edit if "=" not in edit or accepted(edit) else edit.partition("=")[0]


def _chosen(answers: Mapping[str, str], value: Any) -> str:
    value_name = str(plain(value)).lower()
    by_name = {name.lower(): text for name, text in answers.items()}
    return by_name.get(value_name, answers["else"])


def _split(text: str) -> tuple[list[str], str]:
    edits, _, reason = text.partition("#")
    return [edit.strip() for edit in edits.split("; ") if edit.strip()], reason.strip()


def _translated(edit: str) -> tuple[tuple[str, ...], str] | None:
    """The edits and the reason for a value that the table has under the key of an edit."""
    key, _, value = edit.partition("=")
    rows = {_value_name(name): row for name, row in _table()["values"].get(key, {}).items()}
    name = _value_name(value)
    patterns = (pattern for pattern in rows if "*" in pattern and fnmatchcase(name, pattern))
    is_ours = name in OPTIMIZERS  # no pattern is for them
    text = rows.get(name) or (None if is_ours else rows.get(next(patterns, "")))
    # A row may still say that an optimizer is not supported which was added since.
    if text is None or (is_ours and text.startswith("#")):
        return None
    texts, reason = _split(text)
    edits = (part if re.match(r"[a-z_.]+=", part) else f"{key}={part}" for part in texts)
    return tuple(edits), reason


def _value_name(value: str) -> str:
    return re.sub(r"[\s_-]+", "_", value.strip("\"'").lower())


# Values


def _filled(edit: str, value: Any, siblings: Mapping[str, Any]) -> str:
    """A template with the user's value; the key alone where the value cannot be written there."""

    unusable = "\0"  # marks a value that the format refuses

    def fill(placeholder: re.Match[str]) -> str:
        name, default = placeholder.groups()
        if default is not None:
            return str(plain(siblings.get(name, default)))
        text = FORMATS[name](value)
        return unusable if text is None else text

    text = re.sub(r"\{([a-z_0-9]*)(?::([^{}]*))?\}", fill, edit)
    return text.partition("=")[0] if unusable in text else text


def plain(value: Any) -> str | None:
    """A value as YAML on one line; None for none."""
    if value is None or value == "":
        return None
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() and abs(value) < 1e15 else repr(value)
    if isinstance(value, list):
        return f"[{', '.join(str(plain(item)) for item in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {plain(item)}" for key, item in value.items()) + "}"
    safe = isinstance(value, int) or (_SAFE.fullmatch(value) and ": " not in value)
    return str(value) if safe else json.dumps(value)


def _number(value: Any) -> float | None:
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _percent(value: Any) -> str | None:
    """0.05 -> "5%"."""
    number = _number(value)
    return f"{number * 100:.6g}%" if number is not None and 0 <= number < 1 else None


def _steps(value: Any) -> str | None:
    """500 -> "500 steps"; a share of the run as a percentage; words such as "2 epochs" as they are."""
    number = _number(value)
    if number is None:
        return plain(value) if isinstance(value, str) and value[:1].isdigit() else None
    if 0 < number < 1:
        return _percent(number)
    return f"{number:.0f} steps" if number >= 0 else None


def _per_epoch(value: Any) -> str | None:
    """4 (times per epoch) -> "0.25 epochs"."""
    number = _number(value)
    return f"{1 / number:.4g} epochs" if number and number > 0 else None


def _listed(value: Any) -> str | None:
    """ "a,b" -> "[a, b]"."""
    items = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    return plain(items if isinstance(items, list) else [items])


FORMATS: dict[str, Callable[[Any], str | None]] = {
    "": plain,
    "steps": _steps,
    "percent": _percent,
    "per_epoch": _per_epoch,
    "list": _listed,
}


def _accumulation(value: Any, siblings: Mapping[str, Any]) -> tuple[list[str], str]:
    """`train.batch_size` with its value when the micro-batch size is known, and the formula."""
    sizes = (siblings[name] for name in _MICRO_BATCH if isinstance(siblings.get(name), int))
    micro_batch_size = next(sizes, None)
    if micro_batch_size is None or not isinstance(value, int):
        reason = "sequences per step: micro-batch size x gradient accumulation x devices"
        return ["train.batch_size"], reason
    reason = f"sequences per step: {micro_batch_size} x {value}, times the number of devices"
    return [f"train.batch_size={micro_batch_size * value}"], reason


def _length(value: Any, siblings: Mapping[str, Any]) -> tuple[list[str], str]:
    """Version 1: "3 epochs", "2000 steps", "10B tokens", "8h" -> the key of that unit."""
    del siblings
    text = str(plain(value))
    amount = re.sub(r"\s*(steps?|epochs?|tokens?)$", "", text)
    unit = re.findall(r"(step|epoch|token)s?$", text)
    if not unit and not amount.isdigit():
        return [f"train.max_time={text}"], ""
    key = {"epoch": "epochs", "token": "max_tokens"}.get("".join(unit), "max_steps")
    return [f"train.{key}={amount.replace(' ', '')}"], ""


_AXOLOTL_COLUMNS = {
    "field_messages": "messages",
    "field_instruction": "instruction",
    "field_input": "input",
    "field_output": "output",
    "field_system": "system",
    "field_chosen": "chosen",
    "field_rejected": "rejected",
    "field_prompt": "prompt",
    "field": "text",
    "text_column": "text",
    "message_field_role": "role",
    "message_field_content": "content",
    "field_label": "label",
    "field_tools": "tools",
    "field_completion": "completion",
}
# Types of Axolotl's datasets (prompt_strategies/): the format, and the columns that differ from the usual ones.
_AXOLOTL_TYPES: Mapping[str, tuple[str, dict[str, str]]] = {
    "alpaca": ("alpaca", {}),
    "alpaca_chat.load_qa": ("alpaca", {"instruction": "question", "output": "answer"}),
    "alpaca_w_system.load_open_orca": (
        "alpaca",
        {"system": "system_prompt", "instruction": "question", "output": "response"},
    ),
    "chat_template": ("messages", {}),
    "completion": ("text", {}),
    "gpteacher": ("alpaca", {"output": "response"}),
    "oasst": ("alpaca", {"instruction": "INSTRUCTION", "output": "RESPONSE"}),
    "pretrain": ("text", {}),
    "sharegpt": ("sharegpt", {}),
}
# The same under `rl`, by the last part of the type: the column of the prompt, "" where the sides hold it.
_AXOLOTL_PROMPTS = {
    "argilla": "instruction",
    "argilla_chat": "",
    "chat_template": "messages",
    "default": "messages",
    "icr": "input",
    "intel": "question",
    "passthrough": "prompt",
    "prompt_pairs": "prompt",
    "ultra": "prompt",
}
_PAIR_METHODS = ("dpo", "ipo", "simpo", "orpo", "reward")


def _datasets(value: Any, siblings: Mapping[str, Any]) -> tuple[list[str], str]:
    """Axolotl's list of datasets as data.path, data.format and data.columns, or data.sources."""
    aliases = dataset_aliases("datasets", value, method=method_of_axolotl(siblings))
    return [edit for alias in aliases for edit in alias.edits] or ["data.path"], _FORMATTED


_FORMATTED = "the chat template formats the prompts"


def method_of_axolotl(keys: Mapping[str, Any]) -> str:
    """`rl` of a file of Axolotl, or reward; "" for supervised fine-tuning."""
    method = keys.get("rl")
    if isinstance(method, str) and method:
        return method.lower()
    return "reward" if keys.get("reward_model") is True else ""


def dataset_aliases(name: str, value: Any, *, method: str = "") -> Iterator[Alias]:
    """An answer for each key of the datasets of Axolotl or TRL, however deep: mapped, or with a reason.

    `method`: the training method, which decides what the type of a dataset means.
    """
    entries = value if isinstance(value, list) else [value]
    datasets: list[tuple[str, str | dict[str, Any]]] = []
    for number, entry in enumerate(entries):
        # A mapping where a list is usual has no number: its keys are named as they are written.
        place = f"{name}[{number}]" if isinstance(value, list) else name
        if isinstance(entry, str | dict):
            datasets.append((place, entry))
        else:
            yield Alias(place, reason="no dataset: it has no path")

    # One dataset has keys of its own; several are one list.
    sources = [_source(dataset, place, method) for place, dataset in datasets]
    if len(sources) == 1:
        for key, (part, origin) in sources[0].items():
            reason = _FORMATTED if key == "format" and part != "text" else ""
            yield Alias(origin, edits=(f"data.{key}={plain(part)}",), reason=reason)
    elif sources:
        text = plain([{key: part for key, (part, _) in source.items()} for source in sources])
        origins = ", ".join(origin for source in sources for _, origin in source.values())
        yield Alias(origins, edits=(f"data.sources={text}",), reason=_FORMATTED)

    # Every other key has an answer of its own.
    for (place, dataset), source in zip(datasets, sources, strict=True):
        used = {origin for _, origins in source.values() for origin in origins.split(", ")}
        for path, part in leaves(dataset if isinstance(dataset, dict) else {}, (place,)):
            if ".".join(path) not in used and part not in (None, "", [], {}):
                yield _dataset_alias(path, part)


def _dataset_alias(path: tuple[str, ...], value: Any) -> Alias:
    """The answer for a key of a dataset that names neither the dataset nor its columns."""
    name = ".".join(path)
    for part in reversed(path[1:]):
        if part == "roles_to_train":
            return _trained_roles(name, value)
        if "roles" in path[:-1]:  # {user: [human]}
            part = "roles"
        row = _row(f"datasets.{part}", "Axolotl") or _row(part, "Axolotl")
        if (alias := row and _answer(row, name, value, {})) and not (
            alias.edits and "data.columns" in alias.edits[0]
        ):
            return alias
    return Alias(name)


def _trained_roles(name: str, value: Any) -> Alias:
    """`data.chat.train_on` of the roles whose turns are trained on."""
    asked = {str(role).lower() for role in (value if isinstance(value, list) else [value])}
    roles = {_ROLES.get(role, role) for role in asked}
    if roles == {"assistant"}:
        return Alias(name, edits=("data.chat.train_on=assistant",))
    if {"assistant", "user"} <= roles:
        reason = "" if "system" in roles else "trains on system messages, too"
        return Alias(name, edits=("data.chat.train_on=all",), reason=reason)
    return Alias(name, reason="not supported: data.chat.train_on is assistant, all or last")


_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant"}


def leaves(
    value: Mapping[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every key under which there are no more keys, with its path and its value."""
    for key, part in value.items():
        if isinstance(part, dict) and part:
            yield from leaves(part, (*path, str(key)))
        else:
            yield (*path, str(key)), part


def _source(
    dataset: str | Mapping[str, Any], place: str, method: str
) -> dict[str, tuple[Any, str]]:
    """The keys of a source, each with the names of the keys that it comes from."""
    if isinstance(dataset, str):
        return {"path": (dataset, place)}
    dataset_type = dataset.get("type")

    # Columns are named next to the type, or inside it where it is a section.
    named_columns = {f"{place}.{name}": (name, column) for name, column in dataset.items()}
    if isinstance(dataset_type, dict):
        for name, column in dataset_type.items():
            named_columns[f"{place}.type.{name}"] = (name, column)
    columns = dict[str, str]()
    origins = list[str]()
    for origin, (name, column) in named_columns.items():
        if name in _AXOLOTL_COLUMNS and isinstance(column, str) and column:
            columns[_AXOLOTL_COLUMNS[name]] = column
            origins.append(origin)
    mapping = dataset.get("message_property_mappings")
    for role in ("role", "content"):
        if isinstance(mapping, dict) and isinstance(mapping.get(role), str):
            columns[role] = mapping[role]
            origins.append(f"{place}.message_property_mappings.{role}")

    # The type names the format and columns; those that the file names win.
    type_name = (
        str(dataset_type or "").partition(":")[0] if not isinstance(dataset_type, dict) else ""
    )
    by_type = _AXOLOTL_TYPES.get(type_name) or _AXOLOTL_TYPES.get(type_name.partition(".")[0])
    data_format, usual_columns = by_type or ("", {})
    if method in _PAIR_METHODS or method == "kto" or columns.keys() & {"chosen", "rejected"}:
        # The messages of preferences are the prompt.
        data_format = "kto" if method == "kto" else "preference"
        prompt = _prompt_column(type_name, method)
        if "messages" in columns:
            prompt = columns.pop("messages")
        usual_columns = {"prompt": prompt} if prompt else {}
    columns = {**usual_columns, **columns}
    renamed_columns = {role: column for role, column in columns.items() if role != column}
    if usual_columns and renamed_columns and not isinstance(dataset_type, dict) and type_name:
        origins.append(f"{place}.type")

    path = dataset.get("path")
    path_origin = f"{place}.path"
    if (file := file_of_builder(path, dataset.get("data_files"))) is not None:
        path, path_origin = file, f"{place}.path, {place}.data_files"
    revision = dataset.get("revision")
    if isinstance(path, str) and isinstance(revision, str) and _HUB_ID.fullmatch(path):
        path = f"hub:{path.removeprefix('hub:')}@{revision}"
        path_origin = f"{place}.path, {place}.revision"

    parts = {
        "path": (path, path_origin),
        "format": (data_format, place if isinstance(dataset_type, dict) else f"{place}.type"),
        "columns": (renamed_columns, ", ".join(origins)),
    }
    source = {key: part for key, part in parts.items() if part[0]}
    if not renamed_columns and origins and "path" in source:  # usual names, which need no setting
        source["path"] = (path, f"{path_origin}, {', '.join(origins)}")
    return source


_BUILDERS = ("arrow", "csv", "json", "parquet", "text")


def file_of_builder(path: Any, data_files: Any) -> str | None:
    """The file of `path: json, data_files: rows.jsonl`, which names a builder of datasets; None for other paths."""
    files = data_files if isinstance(data_files, list) else [data_files]
    is_file = path in _BUILDERS and len(files) == 1 and isinstance(files[0], str) and files[0]
    return files[0] if is_file else None


def _prompt_column(type_name: str, method: str) -> str:
    """The column of the prompt in a dataset of preferences or labeled responses, by its type; "" for none."""
    if type_name.startswith("bradley_terry"):
        return "input"
    strategy = type_name.rpartition(".")[2]
    if type_name.startswith("chat_template.argilla") or (strategy == "argilla" and method != "kto"):
        return ""
    if type_name.partition(".")[0] in ("chatml", "llama3") and strategy == "default":
        return "prompt"
    return _AXOLOTL_PROMPTS.get(strategy, "")


_HUB_ID = re.compile(r"(?:hub:)?[\w.-]+/[\w.-]+")


def _dataset_names(value: Any, siblings: Mapping[str, Any]) -> tuple[list[str], str]:
    """LLaMA-Factory's names of dataset_info.json as files of its folder."""
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    if not isinstance(names, list) or "/" in str(value):
        return [f"data.path={plain(value)}"], ""
    paths = [f"{siblings.get('dataset_dir') or 'data'}/{name}.json" for name in names]
    edit = (
        f"data.path={paths[0]}"
        if len(paths) == 1
        else f"data.sources={plain([{'path': path} for path in paths])}"
    )
    return [edit], "name the file, folder or Hub id: dataset_info.json is not read"


def _micro_batches_per_step(siblings: Mapping[str, Any]) -> int | None:
    """Gradient accumulation; None where it is no number."""
    accumulation = siblings.get("gradient_accumulation_steps", 1)
    is_count = isinstance(accumulation, int) and not isinstance(accumulation, bool)
    return accumulation if is_count and accumulation > 0 else None


def _generation_steps(value: Any, siblings: Mapping[str, Any]) -> tuple[list[str], str]:
    """TRL counts micro-batches of a rollout, a recipe optimizer steps."""
    accumulation = _micro_batches_per_step(siblings)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1 or accumulation is None:
        return ["objective.steps_per_generation"], "optimizer steps per pass over a rollout"
    reason = f"optimizer steps: {value} micro-batches of TRL, {accumulation} of them per step"
    if value % accumulation == 0:
        return [f"objective.steps_per_generation={value // accumulation}"], reason
    if accumulation % value == 0:  # several rollouts of the same weights are one
        return ["objective.steps_per_generation=1"], reason
    return ["objective.steps_per_generation"], f"{reason}: no whole number"


def _generation_batch(value: Any, siblings: Mapping[str, Any]) -> tuple[list[str], str]:
    """The completions of a rollout on one device, as optimizer steps."""
    sizes = (siblings[name] for name in _MICRO_BATCH if isinstance(siblings.get(name), int))
    micro_batch_size = next(sizes, 8)  # TRL's default
    if not isinstance(value, int) or micro_batch_size < 1 or value % micro_batch_size:
        reason = "completions per rollout: train.batch_size times objective.steps_per_generation"
        return ["objective.steps_per_generation"], reason
    return _generation_steps(value // micro_batch_size, siblings)


# Reward functions that are a part of TRL, as verifiers.
_TRL_REWARDS: Mapping[str, dict[str, Any]] = {
    "accuracy_reward": {"verifier": "math", "column": "solution"},
    "accuracy": {"verifier": "math", "column": "solution"},  # of open-r1 and ms-swift
    "reasoning_accuracy_reward": {"verifier": "math", "column": "solution"},
    # `trl grpo` calls it with these lengths.
    "get_soft_overlong_punishment": {
        "verifier": "soft_overlong",
        "max_completion_len": 1280,
        "soft_punish_cache": 256,
    },
    "think_format_reward": {
        "verifier": "regex",
        "pattern": "(?s)^<think>(?!.*<think>).*?</think>.*$",
    },
}


def _rewards(value: Any, siblings: Mapping[str, Any]) -> tuple[list[str], str]:
    """Names of reward functions as `rewards`: a module is a file next to the recipe, a Hub id a reward model."""
    names = value if isinstance(value, list) else [value]
    if not names or not all(isinstance(name, str) and name for name in names):
        return ["rewards"], "a list of functions, verifiers and reward models"
    rewards = []
    for name in names:
        if name in _TRL_REWARDS:
            rewards.append(dict(_TRL_REWARDS[name]))
        elif name == "soft_overlong" and (punishment := _soft_overlong(siblings)) is not None:
            rewards.append(punishment)
        elif "/" in name:
            rewards.append({"model": name})
        else:
            rewards.append({"python": _place(name, "rewards")})
    model = siblings.get("reward_model_name_or_path")
    if isinstance(model, str) and model:
        rewards.append({"model": model})
    weights = _weights(siblings, len(names))
    for reward, weight in zip(rewards, weights or (), strict=False):
        reward["weight"] = weight
    return [f"rewards={json.dumps(rewards)}"], "files are relative to the recipe"


def _soft_overlong(siblings: Mapping[str, Any]) -> dict[str, Any] | None:
    """The reward of ms-swift, whose lengths are keys of their own; None without them."""
    longest = siblings.get("soft_max_length") or siblings.get("max_completion_length", 512)
    cache = siblings.get("soft_cache_length")
    if not isinstance(longest, int) or not isinstance(cache, int):
        return None
    return {
        "verifier": "soft_overlong",
        "max_completion_len": longest,
        "soft_punish_cache": cache,
    }


def _weights(siblings: Mapping[str, Any], count: int) -> list[float] | None:
    """Of each reward; None where they are no list of as many numbers."""
    weights = siblings.get("reward_weights")
    if not isinstance(weights, list) or len(weights) != count:
        return None
    numbers = [number for weight in weights if (number := _number(weight)) is not None]
    return numbers if len(numbers) == count else None


def _reward_model(value: Any, siblings: Mapping[str, Any]) -> tuple[list[str], str]:
    """A reward, next to those of functions where there are some."""
    if siblings.get("reward_funcs"):
        return [], "part of rewards"
    return [f"rewards={json.dumps([{'model': value}])}"], ""


def _reward_weights(value: Any, siblings: Mapping[str, Any]) -> tuple[list[str], str]:
    functions = siblings.get("reward_funcs")
    count = len(functions) if isinstance(functions, list) else 1
    if functions and _weights({"reward_weights": value}, count) is not None:
        return [], "part of rewards: each has its weight"
    return [], "set the weight of each of the rewards"


def _tool_rounds(value: Any, _siblings: Mapping[str, Any]) -> tuple[list[str], str]:
    """TRL counts the rounds of calls between answers."""
    rounds = _number(value)
    if rounds is None or rounds < 0 or rounds != int(rounds):
        return ["objective.max_turns"], "answers of an episode: one more than rounds of calls"
    return [f"objective.max_turns={int(rounds) + 1}"], "answers: one more than rounds of calls"


def _place(name: str, file: str) -> str:
    """FILE:NAME of a dotted name, whose module is a file next to the recipe; without one, of `file`."""
    module, _, last = name.rpartition(".")
    return f"{module.replace('.', '/') or file}.py:{last}"


def _tools(value: Any, _siblings: Mapping[str, Any]) -> tuple[list[str], str]:
    names = value if isinstance(value, list) else [value]
    if not names or not all(isinstance(name, str) and name for name in names):
        return ["tools"], "a list of functions"
    entries = [{"python": _place(name, "tools")} for name in names]
    return [f"tools={json.dumps(entries)}"], "files are relative to the recipe"


def _environment(value: Any, _siblings: Mapping[str, Any]) -> tuple[list[str], str]:
    if not isinstance(value, str) or not value:
        return ["environment.python"], "FILE:CLASS"
    return [f"environment.python={_place(value, 'environment')}"], "relative to the recipe"


CALLS = {
    "generation_batch": _generation_batch,
    "generation_steps": _generation_steps,
    "rewards": _rewards,
    "reward_model": _reward_model,
    "reward_weights": _reward_weights,
    "tool_rounds": _tool_rounds,
    "tools": _tools,
    "environment": _environment,
    "accumulation": _accumulation,
    "length": _length,
    "datasets": _datasets,
    "dataset_names": _dataset_names,
}


def _with_value(key: Sequence[str], value: Any) -> tuple[str, ...]:
    text = plain(value)
    edit = ".".join(key) if text is None or isinstance(value, dict) else f"{'.'.join(key)}={text}"
    edits, _ = _translated(edit) or ((edit,), "")
    return tuple(map(_accepted_part, edits))


# Keys of the schema


@cache
def known_keys() -> tuple[tuple[str, ...], ...]:
    return tuple(dict.fromkeys(all_keys()))


def all_keys(
    model: type[BaseModel] = Recipe, path: tuple[str, ...] = ()
) -> Iterator[tuple[str, ...]]:
    """Every key of the schema as a path, sections before their keys."""
    for name, annotation in fields(model).items():
        yield (*path, name)
        for inner in sections(annotation):
            yield from all_keys(inner, (*path, name))


def fields(model: type[BaseModel]) -> dict[str, Any]:
    """Annotations by the name that users write."""
    return {field.alias or name: field.annotation for name, field in model.model_fields.items()}


def sections(annotation: Any) -> list[type[BaseModel]]:
    """The section classes of an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in sections(inner)]

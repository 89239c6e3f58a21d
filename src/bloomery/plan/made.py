"""A recipe from a model and a dataset: the objective that fits the rows, with the settings of packaged recipes."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bloomery import hub
from bloomery.core.errors import UserError, one_line
from bloomery.core.files import read_at_most
from bloomery.core.text import expanded
from bloomery.core.units import MIB
from bloomery.data.sources.documents import column_use, describe_rows, peek, sources_of
from bloomery.data.sources.files import (
    CODE,
    DATA,
    TABLES,
    TEXT,
    list_files,
    other_splits,
    suffix_of,
)
from bloomery.data.sources.splits import validation_split
from bloomery.data.sources.task_sets import runs_code
from bloomery.data.tokenizer.templates import own_templates, templates_in
from bloomery.facts.columns import COLUMN_NAMES, ColumnUse
from bloomery.facts.objectives import OBJECTIVES
from bloomery.facts.optimizers import USUAL_OPTIMIZER
from bloomery.facts.published import published_config
from bloomery.plan.learning_rates import usual_optimizer
from bloomery.recipe.load import merged_text
from bloomery.recipe.schema import Recipe, Source

SUGGESTED = "Qwen/Qwen2.5-0.5B-Instruct"  # a chat model that a CPU can fine-tune, too
_LENGTH = 1024
_READ = 16 * MIB  # of a JSON file


@dataclass(frozen=True)
class _Method:
    """The training method for rows of one kind, with the settings of packaged recipes."""

    name: str
    objective: dict[str, Any]
    reason: str
    epochs: int

    def sections(self, objective: str, typed: Mapping[str, Any]) -> dict[str, Any]:
        """The sections after this objective, with the optimizer of its method. `typed`: the keys that were typed."""
        adapter = {"kind": "lora", "rank": 16, "alpha": 32, "target_modules": ["all-linear"]}
        adapter_kind = _typed_kind(typed, "adapter") or ("none" if self is _TEXT else "lora")
        usual = usual_optimizer(
            objective if objective in OBJECTIVES else str(self.objective["kind"]),
            adapter=str(_at(typed, ("adapter", "method")) or adapter_kind),
            optimizer=_typed_kind(typed, "optimizer") or USUAL_OPTIMIZER,
        )
        optimizer = {
            "learning_rate": usual.rates.start,
            "weight_decay": usual.weight_decay,
            "schedule": "cosine",
            "warmup": usual.warmup,
        }
        return {
            **({} if self is _TEXT else {"adapter": adapter}),
            "optimizer": optimizer,
            "train": {"epochs": self.epochs},
            "checkpoint": {"keep": 2},
            "eval": {"every": "12.5%"},
        }


_SFT = _Method("lora", {"kind": "sft"}, "trains on the responses", 3)
_TEXT = _Method("text", {"kind": "pretrain"}, "plain text: trains on every token", 1)
_PAIRS = _Method(
    "dpo-lora",
    {"kind": "dpo", "beta": 0.1},
    "each row has a chosen and a rejected response",
    1,
)
_KTO = _Method(
    "kto-lora",
    {"kind": "kto", "beta": 0.1},
    "each response is labeled desirable or undesirable",
    1,
)
_TOKENS = replace(_SFT, reason="trains on the tokens that the labels do not mask")
_OF_ROWS = {"preference": _PAIRS, "kto": _KTO, "tokens": _TOKENS}
# Other objectives that train on rows of a format.
_ALSO = {
    "preference": "ipo, simpo, orpo, reward, kto",
    "messages": "pretrain, on every token",
    "sharegpt": "pretrain, on every token",
    "alpaca": "pretrain, on every token; grpo, on the prompts",
    "completion": "pretrain, on every token; grpo, on the prompts",
    "tokens": "pretrain",
}
_OF_DATA = {"any": _TEXT, "sft": _SFT, "kto": _KTO, "pairs": _PAIRS}


ASSUMED = "assumed-conversations.jsonl"  # data.path of a plan without a dataset


@dataclass(frozen=True)
class MadeRecipe:
    """A generated recipe. `text`: without what was typed next to it, which `load_text` merges; `complete_text`: with
    it, as a file that trains the same.
    """

    name: str
    text: str
    complete_text: str


def made_recipe(
    model: str, data: str | None, overrides: Sequence[str] = (), *, planning: bool = False
) -> MadeRecipe:
    """The recipe for a model, a dataset and the keys that were typed. Raises UserError for data that do not exist or
    cannot be read.

    A plan needs no dataset: without `data`, or with one of the Hub that is not downloaded, conversations are assumed.
    """
    typed = merged_text("{}", overrides)
    source = _source(ASSUMED if data is None else _place(data), typed.get("data"))
    assumed = data is None or (
        planning and source.path.startswith(hub.PREFIX) and not _downloaded(source.path)
    )
    kind = _typed_kind(typed, "objective")
    # Rows with a prompt and an answer are conversations, unless the model generates the completions.
    objective = OBJECTIVES.get(str(kind))
    data_kind = None if objective is None else objective.data_kind
    format_found = ("auto", {}) if assumed else peek(source, data_kind)
    method = _OF_DATA.get(data_kind or "") or (
        _TEXT if format_found is None else _OF_ROWS.get(format_found[0], _SFT)
    )
    format, columns = format_found or ("auto", {})
    is_shown = (
        method is _SFT or method is _TEXT or method is _OF_ROWS.get(format)
    )  # not typed alone
    facts = _facts(model)
    sections: dict[str, Any] = {
        "model": {"from": model},
        "data": {
            "path": source.path,
            **({"format": format, "columns": columns} if columns else {}),
            "sequence_length": min(_LENGTH, int(facts.get("positions") or _LENGTH)),
            "validation": "auto" if not assumed and _own_validation(source, method) else "5%",
            **(
                {"chat": {"template": "chatml"}}
                if facts.get("bare") and method is not _TEXT and format != "tokens"
                else {}
            ),
        },
        "objective": method.objective
        if kind in (None, method.objective["kind"])
        else {"kind": kind},
        **method.sections(str(kind or method.objective["kind"]), typed),
    }
    objective_text = method.reason
    use = ColumnUse() if assumed else _column_use(source, format_found, method)
    if kind is None and (also := _other_reading(use)):
        objective_text += f"; also possible: {also}"
    elif format in _ALSO and kind is None:
        objective_text += f"; also possible: {_ALSO[format]}"
    comments = {
        ("data", "path"): _reading(use),
        ("data", "chat"): "the model has no chat template",
        ("objective",): objective_text
        if is_shown and sections["objective"] == method.objective
        else "",
    }
    text = _written(sections, comments)
    merged = merged_text(text, overrides)
    unchanged = {
        path: comment
        for path, comment in comments.items()
        if _at(merged, path) == _at(sections, path)
    }
    name = f"{Path(model.partition('@')[0]).name or 'model'}-{method.name}".lower()
    return MadeRecipe(name, text, _written(merged, unchanged))


_ROWS = 16  # rows whose columns a comment describes
# What a column is called in a comment, where its role is not a noun.
_NOUNS = {
    "messages": "conversation",
    "conversations": "conversation",
    "chosen": "chosen response",
    "rejected": "rejected response",
    "system": "system message",
    "output": "response",
    "completion": "response",
    "input": "input after it",
}


def _column_use(
    source: Source, format_found: tuple[str, dict[str, str]] | None, method: _Method
) -> ColumnUse:
    """What became of the columns of the first rows, read as the recipe reads them."""
    format, columns = format_found or ("auto", {})
    if columns:
        source = source.model_copy(update={"format": format, "columns": columns})
    return column_use(source, OBJECTIVES[method.objective["kind"]].data_kind, rows=_ROWS)


def _reading(use: ColumnUse) -> str:
    """What the columns were taken for: "question is the prompt, answer the response; not read: id". "" for a dataset of
    texts alone.
    """
    first, *others = [
        f"{name} is the {_NOUNS.get(role, role)}" for role, name in use.roles.items()
    ] or [""]
    read = ", ".join([first, *(text.replace(" is the ", " the ", 1) for text in others)])
    notes = "; ".join(use.notes())
    return "; ".join(part for part in [read, f"not read: {notes}" if notes else ""] if part)


def _other_reading(use: ColumnUse) -> str:
    """What the columns may be instead: another response; for a text column, the response to a prompt in another column,
    or a prompt. "" without any.
    """
    responses = [name for name in use.unread_columns if name.lower() in COLUMN_NAMES["output"]]
    if responses and "output" in use.roles:
        return f"{responses[0]} as the response, with data.columns={{output: {responses[0]}}}"
    text = use.roles.get("text")
    if text is None:
        return ""
    if text.lower() in COLUMN_NAMES["instruction"]:
        return "grpo, on these prompts"
    prompts = [name for name in use.unread_columns if name.lower() in COLUMN_NAMES["instruction"]]
    if not prompts:
        return ""
    columns = f"{{instruction: {prompts[0]}, output: {text}}}"
    return f"sft, with data.format=alpaca data.columns={shlex.quote(columns)}"


def _typed_kind(typed: Mapping[str, Any], section: str) -> str | None:
    value = typed.get(section)
    return str(value["kind"]) if isinstance(value, dict) and "kind" in value else None


def _source(path: str, typed: Any) -> Source:
    """The dataset with what was typed about it, where that is valid: loading the recipe reports what is not."""
    section = typed if isinstance(typed, dict) else {}
    try:
        return Source(
            **(
                {"path": path}
                | {key: section[key] for key in ("glob", "format", "columns") if key in section}
            )
        )
    except ValidationError:
        return Source(path=path)


def _own_validation(source: Source, method: _Method) -> bool:
    """Whether the dataset has a validation split of its own."""
    return validation_split(other_splits(source, rows=method is not _TEXT)) is not None


def _at(section: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        section = section.get(key) if isinstance(section, dict) else None
    return section


def _written(sections: Mapping[str, Any], comments: Mapping[tuple[str, ...], str]) -> str:
    """YAML with a line for each section, and one for each key of `data`."""
    lines = list[str]()
    for name, section in sections.items():
        if name == "data" and isinstance(section, dict):
            lines.append("data:")
            lines += [
                f"  {key}: {_flow(value)}{_remark(comments, name, key)}"
                for key, value in section.items()
            ]
        else:
            lines.append(f"{name}: {_flow(section)}{_remark(comments, name)}")
    return "\n".join(lines) + "\n"


def _remark(comments: Mapping[tuple[str, ...], str], *path: str) -> str:
    comment = comments.get(path)
    return f"   # {one_line(comment)}" if comment else ""  # names of columns are the dataset's


# text that YAML needs no quotes for
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*|[0-9]+(\.[0-9]+)?%")
_WORDS_OF_YAML = ("true", "false", "null", "yes", "no", "on", "off")


def _flow(value: Any) -> str:
    """A value as YAML on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_flow(key)}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS_OF_YAML:
        return value
    return json.dumps(value, ensure_ascii=False)


def reading_lines(recipe: Recipe) -> list[str]:
    """How the datasets on this disk are read, where that was a choice: a line for each. Raises UserError without
    files.
    """
    kind = recipe.objective.spec.data_kind
    sources = [
        source
        for source in sources_of(recipe.data)
        if hub.data_place(source.path).exists() and not runs_code([source])
    ]
    lines = [describe_rows(source, kind) for source in sources]
    return [line for line in lines if line is not None]


def _downloaded(path: str) -> bool:
    """Of `hub:ORG/NAME`. Raises UserError for what is no such name."""
    return hub.data_place(path).exists()


def _place(data: str) -> str:
    """A path that exists, as it is; an id of the Hub as `hub:ORG/NAME`."""
    if data.startswith(hub.PREFIX) or expanded(data).exists() or not hub.is_hub_id(data):
        return data if data.startswith(hub.PREFIX) else str(expanded(data))
    return hub.PREFIX + data


def _facts(model: str) -> dict[str, Any]:
    """`positions`, and whether it is `bare` of a chat template, as far as files on this disk show."""
    folder = hub.cached_model(model)
    if folder is None:
        table_entry = published_config(model)
        return {} if table_entry is None else {"positions": table_entry.max_positions}
    config = _json(folder / "config.json")
    tokenizer = _json(folder / "tokenizer_config.json")
    positions = config.get("max_position_embeddings") or config.get("n_positions")
    bare = not (own_templates(tokenizer) or templates_in(folder))
    return {"positions": positions if isinstance(positions, int) else None, "bare": bare}


def _json(path: Path) -> dict[str, Any]:
    """{} for a damaged file: loading the model reports it."""
    try:
        with path.open("rb") as file:
            content = json.loads(read_at_most(file, _READ))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def refuse_data(name: str) -> None:
    """Raises UserError for a dataset or a model where a recipe should be, with the command that was meant."""
    path = expanded(name)
    if not name or not path.exists() or path.suffix.lower() in (".yaml", ".yml"):
        return
    if path.is_dir() and (path / "config.json").is_file():
        command = f"bloomery train --model {shlex.quote(name)} --data FILE"
        raise UserError(
            "that is a model, not a recipe", where=name, fix=f"`{command}` trains it", code=2
        )
    if not _is_data(path):
        return
    try:
        format_found = peek(Source(path=str(path)))
    except UserError:  # which training on it reports
        format_found = None
    if format_found is None:
        command = f"bloomery train go-coder-tiny data.path={shlex.quote(name)}"
        fix = f"`{command}` trains a new model on its text"
    else:
        fix = f"`bloomery train --model {SUGGESTED} --data {shlex.quote(name)}` trains a chat model on it"
    raise UserError("that is a dataset, not a recipe", where=name, fix=fix, code=2)


def _is_data(path: Path) -> bool:
    if path.is_dir():
        if any(path.glob("*.y*ml")):
            return False
        try:
            return bool(list_files(Source(path=str(path))))
        except UserError:
            return False
    suffix = suffix_of(path)
    if suffix != ".json":
        return suffix in DATA | TABLES | TEXT | CODE
    with path.open("rb") as file:
        head = read_at_most(file, _READ).lstrip()
    sections = {f'"{key}"'.encode() for key in Recipe.model_fields}
    return head[:1] == b"[" or not any(section in head for section in sections)

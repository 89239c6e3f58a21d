"""A recipe from a model and a dataset: the objective that fits the rows, with the settings of packaged recipes."""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bloomery import hub
from bloomery.core.errors import UserError
from bloomery.core.text import expanded
from bloomery.core.units import MIB
from bloomery.data.sources.documents import describe_columns, describe_rows, peek, sources_of
from bloomery.data.sources.files import CODE, DATA, TABLES, TEXT, list_files, suffix_of
from bloomery.data.tokenizer.templates import own_templates, templates_in
from bloomery.model.published import published_config
from bloomery.recipe.schema import Recipe, Source

SUGGESTED = "Qwen/Qwen2.5-0.5B-Instruct"  # a chat model that a CPU can fine-tune, too
_LENGTH = 1024
_READ = 16 * MIB  # of a JSON file
_LORA = "adapter: {kind: lora, rank: 16, alpha: 32, target_modules: [all-linear]}\n"
_SPEED = "optimizer: {{learning_rate: {rate}, weight_decay: {decay}, schedule: cosine, warmup: {warmup}}}\n"


@dataclass(frozen=True)
class _Method:
    """The training method for rows of one kind."""

    method: str
    objective: str
    reason: str
    settings: str
    epochs: int


def _method(method: str, objective: str, reason: str, *, rate: str, epochs: int, warmup: str = "3%") -> _Method:
    decay, adapter = ("0.1", "") if objective == "{kind: pretrain}" else ("0.0", _LORA)
    return _Method(method, objective, reason, adapter + _SPEED.format(rate=rate, decay=decay, warmup=warmup), epochs)


_SFT = _method("lora", "{kind: sft}", "trains on the responses", rate="2e-4", epochs=3)
_TEXT = _method("text", "{kind: pretrain}", "plain text: trains on every token", rate="2e-5", epochs=1)
_METHODS = {
    "preference": _method("dpo-lora", "{kind: dpo, beta: 0.1}", "each row has a chosen and a rejected response",
                       rate="5e-5", epochs=1, warmup="10%"),
    "kto": _method("kto-lora", "{kind: kto, beta: 0.1}", "each response is labeled desirable or undesirable",
                rate="5e-5", epochs=1, warmup="10%"),
}  # fmt: skip


ASSUMED = "assumed-conversations.jsonl"  # data.path of a plan without a dataset


def made_recipe(model: str, data: str | None, *, planning: bool = False) -> tuple[str, str]:
    """The recipe as YAML, and its name. Raises UserError for data that do not exist or cannot be read.

    A plan needs no dataset: without `data`, or with one of the Hub that is not downloaded, conversations are assumed.
    """
    source = Source(path=ASSUMED if data is None else _place(data))
    assumed = data is None or (planning and source.path.startswith(hub.PREFIX) and not _downloaded(source.path))
    found = ("auto", {}) if assumed else peek(source)
    method = _TEXT if found is None else _METHODS.get(found[0], _SFT)
    format, columns = found or ("auto", {})
    facts = _facts(model)
    length = min(_LENGTH, int(facts.get("positions") or _LENGTH))
    template = ["  chat: {template: chatml}   # the model has no chat template"] if facts.get("bare") else []
    lines = [
        f"model: {{from: {json.dumps(model)}}}",
        "data:",
        f"  path: {json.dumps(source.path)}",
        *([f"  format: {format}"] if columns else []),
        *([f"  columns: {json.dumps(columns)}   # {describe_columns(columns)}"] if columns else []),
        f"  sequence_length: {length}",
        "  validation: 5%",
        *(template if method is not _TEXT else []),
        f"objective: {method.objective}   # {method.reason}",
    ]
    train = f"train: {{epochs: {method.epochs}}}\n"
    text = (
        "\n".join(lines) + "\n" + method.settings + train + "checkpoint: {every: 25%, keep: 2}\neval: {every: 12.5%}\n"
    )
    return text, f"{Path(model.partition('@')[0]).name or 'model'}-{method.method}".lower()


def reading_lines(recipe: Recipe) -> list[str]:
    """How the datasets on this disk are read, where that was a choice: a line for each. Raises UserError without
    files.
    """
    kind = recipe.objective.spec.data_kind
    here = [source for source in sources_of(recipe.data) if hub.data_place(source.path).exists()]
    lines = [describe_rows(source, kind) for source in here]
    return [line for line in lines if line is not None]


def _downloaded(place: str) -> bool:
    """Of `hub:ORG/NAME`. Raises UserError for what is no such name."""
    return hub.data_place(place).exists()


def _place(data: str) -> str:
    """A path that exists, as it is; an id of the Hub as `hub:ORG/NAME`."""
    if data.startswith(hub.PREFIX) or expanded(data).exists() or not hub.is_hub_id(data):
        return data if data.startswith(hub.PREFIX) else str(expanded(data))
    return hub.PREFIX + data


def _facts(model: str) -> dict[str, Any]:
    """`positions`, and whether it is `bare` of a chat template, as far as files on this disk show."""
    folder = hub.cached_model(model)
    if folder is None:
        known = published_config(model)
        return {} if known is None else {"positions": known.max_positions}
    config, tokenizer = _json(folder / "config.json"), _json(folder / "tokenizer_config.json")
    positions = config.get("max_position_embeddings") or config.get("n_positions")
    bare = not (own_templates(tokenizer) or templates_in(folder))
    return {"positions": positions if isinstance(positions, int) else None, "bare": bare}


def _json(path: Path) -> dict[str, Any]:
    """{} for a damaged file: loading the model reports it."""
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(_READ))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def refuse_data(name: str) -> None:
    """Raises UserError for a dataset or a model where a recipe should be, with the command that was meant."""
    path = expanded(name)
    if not name or not path.exists() or path.suffix.lower() in (".yaml", ".yml"):
        return
    if path.is_dir() and (path / "config.json").is_file():
        command = f"bloomery train --model {shlex.quote(name)} --data FILE"
        raise UserError("that is a model, not a recipe", where=name, fix=f"`{command}` trains it", code=2)
    if not _is_data(path):
        return
    try:
        found = peek(Source(path=str(path)))
    except UserError:  # which training on it reports
        found = None
    if found is None:
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
        head = file.read(_READ).lstrip()
    sections = {f'"{key}"'.encode() for key in Recipe.model_fields}
    return head[:1] == b"[" or not any(section in head for section in sections)

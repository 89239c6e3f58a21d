"""tokenizer.json as others write it, made safe before the library sees it."""

import json
import math
import re
from pathlib import Path
from typing import Any

from bloomery.data import templates
from bloomery.disk import read_input
from bloomery.errors import UserError
from bloomery.units import MIB

MAX_FILE = 512 * MIB
MOST_GROWTH = 64.0  # of Llama, Gemma, T5 and all others that we know: 2 or less
_MOST_PREPENDED = 16.0  # letters
_ANOTHER = "download or save the tokenizer again"
_ROLES = {
    "bos_token": ("<s>", "<|begin_of_text|>", "<bos>", "<|startoftext|>", "<|endoftext|>"),
    "eos_token": ("</s>", "<|end_of_text|>", "<eos>", "<|endoftext|>"),
    "pad_token": ("<pad>", "<|pad|>", "[PAD]", "<|finetune_right_pad_id|>"),
    "unk_token": ("<unk>", "[UNK]"),
}
Json = dict[str, Any]


def read_json(path: Path) -> Json:
    """An object from a file that somebody else wrote. Raises UserError when it is none."""
    try:
        value = json.loads(read_input(path, MAX_FILE).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError("is not JSON, or is cut short", where=str(path), remedy="copy or download it again") from error
    if not isinstance(value, dict):
        raise UserError("holds no JSON object", where=str(path), remedy=_ANOTHER)
    return value


def canonical(description: Json) -> str:
    """One spelling for one tokenizer, without padding and truncation, which are a user's wish and not the
    tokenizer's.
    """
    kept = {key: value for key, value in description.items() if key not in ("padding", "truncation")}
    return json.dumps({**kept, "padding": None, "truncation": None}, ensure_ascii=False, sort_keys=True)


def check_ids(description: Json, where: str) -> None:
    """Ids and tokens must be one to one and dense enough for an embedding. Raises UserError."""
    model = description.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict | list):
        raise UserError("describes no tokenizer: model.vocab is missing", where=where, remedy=_ANOTHER)
    vocab = model["vocab"]
    if not vocab:
        raise UserError("describes no tokenizer: its vocabulary is empty", where=where, remedy=_ANOTHER)
    try:
        ids = dict(vocab) if isinstance(vocab, dict) else {entry[0]: index for index, entry in enumerate(vocab)}
        added = {entry["content"]: entry["id"] for entry in description.get("added_tokens") or []}
    except (TypeError, KeyError, IndexError) as error:
        problem = "describes no tokenizer: the vocabulary is malformed"
        raise UserError(problem, where=where, remedy=_ANOTHER) from error
    if isinstance(vocab, list) and len(ids) != len(vocab):
        raise UserError("the vocabulary holds a token twice", where=where, remedy=_ANOTHER)
    for token, index in added.items():
        if ids.setdefault(token, index) != index:
            problem = f"token {token!r} has two ids, {ids[token]} and {index}"
            raise UserError(problem, where=where, remedy=_ANOTHER)
    _check_range(ids, where)


def check_growth(description: Json, where: str) -> float:
    """How many times as many letters a text may have behind the normalizer as before. Raises UserError for one, or a
    decoder, that makes texts so much longer that no memory holds them.
    """
    grown = {part: _growth(description.get(part)) for part in ("normalizer", "decoder")}
    for part, factor in grown.items():
        if factor > MOST_GROWTH:
            told = f"{factor:,.0f}" if factor < 1e15 else "endlessly many"
            raise UserError(f"its {part} makes a text up to {told} times as long", where=where, remedy=_ANOTHER)
    return grown["normalizer"]


def _growth(step: object) -> float:
    """Of Replace and Prepend, which write what the file says; of other steps the growth is Unicode's."""
    if not isinstance(step, dict):
        return 1.0
    parts = [part for key in ("normalizers", "decoders") for part in _entries(step.get(key))]
    own = 1.0
    if step.get("type") == "Replace":
        pattern, content = step.get("pattern"), step.get("content")
        plain = pattern.get("String") if isinstance(pattern, dict) else None
        written = len(content) if isinstance(content, str) else 0
        own = max(1.0, written / len(plain)) if plain and isinstance(plain, str) else max(
            1.0, written + _matches_nothing(pattern)
        )
    elif step.get("type") == "Prepend":
        own = max(1.0, len(str(step.get("prepend"))) / _MOST_PREPENDED)
    return own * math.prod(map(_growth, parts))


def _matches_nothing(pattern: object) -> float:
    """1 when an expression may match between two letters, where what it writes is added and replaces nothing."""
    expression = pattern.get("Regex") if isinstance(pattern, dict) else None
    if not isinstance(expression, str) or re.search(r"\(\?|\\[bBAzZG]|[\^$|]", expression):
        return 1.0
    try:
        return float(re.fullmatch(expression, "") is not None)
    except (re.error, RecursionError, OverflowError):
        return 1.0


def _entries(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _check_range(ids: Json, where: str) -> None:
    owners: dict[int, str] = {}
    for token, index in ids.items():
        if type(index) is not int or not 0 <= index <= 2 * len(ids) + 1024:
            problem = f"token {token!r} has the impossible id {index!r} among {len(ids):,} tokens"
            raise UserError(problem, where=where, remedy=_ANOTHER)
        if owners.setdefault(index, token) is not token:
            problem = f"id {index} belongs to two tokens, {owners[index]!r} and {token!r}"
            raise UserError(problem, where=where, remedy=_ANOTHER)


def added_token(token: str, index: int) -> Json:
    """An entry of added_tokens: found in a text as it is spelt, whatever stands beside it."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": index, "content": token, **flags}


def roles(description: Json, config: Json) -> dict[str, str | None]:
    """Which tokens begin and end a document, pad and stand for the unknown: what the configuration says, else the
    usual names.
    """
    added = description.get("added_tokens") or []
    named = added if isinstance(added, list) else []  # check_ids refuses what is malformed
    present = {str(entry.get("content")) for entry in named if isinstance(entry, dict)}
    found: dict[str, str | None] = {}
    for role, usual in _ROLES.items():
        said = config.get(role)
        said = said.get("content") if isinstance(said, dict) else said
        if role in config:
            found[role] = said if isinstance(said, str) else None
        else:
            found[role] = next((name for name in usual if name in present), None)
    return found


def configuration(folder: Path) -> Json:
    """tokenizer_config.json with what older folders keep in special_tokens_map.json and with chat templates in files
    of their own; empty without any.
    """
    merged: Json = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            merged |= {
                key: value for key, value in read_json(folder / name).items() if value is not None or key in _ROLES
            }
    files = templates.beside(folder)
    own = {**templates.own_templates(merged), **files}
    if files:  # they come before what the configuration holds, as in transformers
        merged[templates.KEY] = (
            own["default"] if list(own) == ["default"] else [{"name": name, "template": own[name]} for name in own]
        )
    return merged

"""A tokenizer.json made of vocab.json and merges.txt, as older folders of GPT-2 and Qwen have them.

The two files do not say how a text is split before bytes are merged: the tokenizer's class does, that of
tokenizer_config.json or of the model's type. A folder of another class is refused.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bloomery.core.errors import UserError
from bloomery.core.files import read_input
from bloomery.data.tokenizer.roles import (
    ANOTHER,
    MAX_FILE,
    ROLES,
    added_around,
    name_of,
    read_json,
    roles,
)

VOCABULARY = "vocab.json"
MERGES = "merges.txt"
Json = dict[str, Any]
_SPLITS_AS_GPT2 = ("GPT2Tokenizer", "GPTNeoXTokenizer", "CodeGenTokenizer")
# Of transformers' models/qwen2.
_PATTERNS = {
    "Qwen2Tokenizer": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
_COMPOSES = ("GPTNeoXTokenizer", "Qwen2Tokenizer")  # letters and their accents: NFC
_SETTINGS = ("single_word", "lstrip", "rstrip", "normalized")
_FIX = (
    "make a tokenizer.json: python -c \"from transformers import AutoTokenizer as T; T.from_pretrained('FOLDER')"
    ".save_pretrained('NEW_FOLDER')\", and set tokenizer.from to the new folder"
)


def described(folder: Path, config: Json) -> Json:
    """The tokenizer.json of a folder with vocab.json and merges.txt. Raises UserError."""
    class_name = str(config.get("tokenizer_class") or "")
    if class_name not in (*_SPLITS_AS_GPT2, *_PATTERNS):
        named = class_name or "none that transformers knows"
        problem = f"{VOCABULARY} without tokenizer.json: how texts are split depends on the tokenizer's class, {named}"
        raise UserError(problem, where=str(folder), fix=_FIX.replace("FOLDER", str(folder), 1))
    if not (folder / MERGES).is_file():
        raise UserError(f"{VOCABULARY} without {MERGES}", where=str(folder), fix=ANOTHER)
    vocabulary = read_json(folder / VOCABULARY)
    if not all(type(index) is int for index in vocabulary.values()):
        raise UserError(
            "the ids of the vocabulary are not numbers",
            where=str(folder / VOCABULARY),
            fix=ANOTHER,
        )
    byte_level: Json = {
        "type": "ByteLevel",
        "add_prefix_space": bool(config.get("add_prefix_space")),
        "trim_offsets": True,
        "use_regex": class_name in _SPLITS_AS_GPT2,
    }
    splitter = byte_level
    if class_name in _PATTERNS:
        pattern = {"Regex": _PATTERNS[class_name]}
        split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
        splitter = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    added_tokens = _added_tokens(folder, config, vocabulary)
    description: Json = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens,
        "normalizer": {"type": "NFC"} if class_name in _COMPOSES else None,
        "pre_tokenizer": splitter,
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": _merges(folder / MERGES),
        },
    }

    # Without a tokenizer.json, transformers asks the configuration what a text begins and ends with.
    ids = {**vocabulary, **{entry["content"]: entry["id"] for entry in added_tokens}}
    names = roles(description, config)

    def added(key: str, role: str) -> dict[str, int]:
        name = names[role]
        return {name: ids[name]} if config.get(key) is True and name in ids and name else {}

    before = added("add_bos_token", "bos_token")
    after = added("add_eos_token", "eos_token")
    if before or after:
        description["post_processor"] = added_around(before, after)
    return description


def _merges(path: Path) -> list[list[str]]:
    """The pairs of merges.txt, in their order. Raises UserError."""
    try:
        lines = read_input(path, MAX_FILE).decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise UserError("file is not UTF-8", where=str(path), fix=ANOTHER) from error
    is_headed = lines[0].startswith("#version")
    pairs = [line.removesuffix("\r").split(" ") for line in lines[is_headed:] if line.strip()]
    if any(len(pair) != 2 for pair in pairs):
        raise UserError("a line is not a pair of tokens", where=str(path), fix=ANOTHER)
    return pairs


def _added_tokens(folder: Path, config: Json, vocabulary: Mapping[str, int]) -> list[Json]:
    """Tokens that match in a text: those that the configuration or added_tokens.json lists, and special ones."""
    entries: dict[str, Json] = {}
    listed = config.get("added_tokens_decoder")
    if isinstance(listed, Mapping):
        for index, settings in listed.items():
            name = name_of(settings)
            if name is None or not str(index).isdigit():
                raise UserError("added_tokens_decoder is malformed", where=str(folder), fix=ANOTHER)
            entries[name] = _entry(
                name, int(index), settings if isinstance(settings, Mapping) else {}
            )
    elif (folder / "added_tokens.json").is_file():
        for name, index in read_json(folder / "added_tokens.json").items():
            entries[name] = _entry(name, index, {})

    # Special tokens that are in the vocabulary match as well.
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens")
    names: Iterable[object] = extra.values() if isinstance(extra, Mapping) else extra or ()
    role_names = roles({}, config)
    for token in (*(role_names[role] for role in ROLES), *names):
        name = name_of(token)
        if name is None:
            continue
        if name in vocabulary and name not in entries:
            entries[name] = _entry(name, vocabulary[name], {"special": True})
        elif name in entries:
            entries[name]["special"] = True
    return sorted(entries.values(), key=lambda entry: str(entry["id"]).zfill(12))


def _entry(name: str, index: int, settings: Mapping[str, Any]) -> Json:
    flags = {key: settings.get(key) is True for key in _SETTINGS}
    return {"id": index, "content": name, **flags, "special": settings.get("special") is True}

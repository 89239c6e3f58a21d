"""Folders with vocab.json and merges.txt alone have the ids of transformers, or are refused with a way out."""

import json
from pathlib import Path
from typing import Any

import pytest

from bloomery.core.errors import UserError
from bloomery.data.tokenizer.tokenizer import load_tokenizer

transformers = pytest.importorskip("transformers")
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402

TEXTS = [
    "The quick brown fox jumps over 12345 dogs; it's fine.\n\n\tdef f(x):\n        return x\r\n",
    "naïve Größe 東京 🙂 e\u0301 नमस्ते",
    "<|endoftext|>a<|im_start|>user\nhi<|im_end|>",
    "  two  spaces",
]
ADDED = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def model() -> dict[str, Any]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS[:2] * 5, trainer)
    model_settings: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    return model_settings


def folder_of(
    folder: Path,
    model: dict[str, Any],
    settings: dict[str, Any],
    *,
    in_vocabulary: bool,
    **files: Any,
) -> Path:
    vocabulary = dict(model["vocab"])
    if in_vocabulary:
        vocabulary |= {name: len(vocabulary) + n for n, name in enumerate(ADDED)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def added_tokens(model: dict[str, Any]) -> dict[str, Any]:
    plain_settings = dict.fromkeys(["lstrip", "rstrip", "normalized", "single_word"], False)
    start = len(model["vocab"])
    return {
        str(start + number): {"content": name, "special": True, **plain_settings}
        for number, name in enumerate(ADDED)
    }


def assert_ids_of_transformers(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    library_tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert tokenizer.encode_prompt(text) == library_tokenizer.encode(text), text
        assert tokenizer.decode(tokenizer.encode(text)) == library_tokenizer.decode(
            library_tokenizer.encode(text, add_special_tokens=False)
        )
    id_of_token = {**tokenizer.description["model"]["vocab"]}
    id_of_token |= {
        entry["content"]: entry["id"] for entry in tokenizer.description["added_tokens"]
    }
    names = (
        library_tokenizer.bos_token,
        library_tokenizer.eos_token,
        library_tokenizer.pad_token,
        library_tokenizer.unk_token,
    )
    # A role whose token is in neither file gets a new id there, which no model has a row for.
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.unk_id) == tuple(
        id_of_token.get(name) for name in names
    )
    # So does the tokenizer.json that is saved of it.
    tokenizer.save(folder / "saved")
    saved_tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "saved")
    assert [saved_tokenizer.encode(text) for text in TEXTS] == [
        library_tokenizer.encode(text) for text in TEXTS
    ]


CLASSES = ["GPT2Tokenizer", "GPT2TokenizerFast", "Qwen2Tokenizer", "GPTNeoXTokenizer"]  # fmt: skip


@pytest.mark.parametrize("name", CLASSES)
def test_ids_follow_the_tokenizer_class_of_the_configuration(tmp_path, model, name):
    config = {"tokenizer_class": name, "add_prefix_space": False}
    assert_ids_of_transformers(folder_of(tmp_path, model, config, in_vocabulary=True))


@pytest.mark.parametrize("model_type", ["gpt2", "qwen2", "opt", "phi", "starcoder2"])
def test_ids_follow_the_type_of_the_model(tmp_path, model, model_type):
    assert_ids_of_transformers(
        folder_of(tmp_path, model, {}, in_vocabulary=True, config={"model_type": model_type})
    )


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "Qwen2Tokenizer"])
def test_added_tokens_of_the_configuration_are_read(tmp_path, model, name):
    config = {
        "tokenizer_class": name,
        "added_tokens_decoder": added_tokens(model),
        "additional_special_tokens": ADDED[1:],
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
    }
    assert_ids_of_transformers(folder_of(tmp_path, model, config, in_vocabulary=False))


def test_added_tokens_of_the_older_files_are_read(tmp_path, model):
    start = len(model["vocab"])
    files = {
        "added_tokens": {name: start + number for number, name in enumerate(ADDED)},
        "special_tokens_map": {"eos_token": "<|im_end|>", "additional_special_tokens": ADDED},
    }
    config = {"tokenizer_class": "Qwen2Tokenizer"}
    assert_ids_of_transformers(folder_of(tmp_path, model, config, in_vocabulary=False, **files))


def test_the_configuration_adds_a_begin_token(tmp_path, model):
    config = {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True}
    folder = folder_of(tmp_path, model, config, in_vocabulary=True)
    tokenizer = load_tokenizer(folder)
    library_tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.prefix == [len(model["vocab"])]
    assert [tokenizer.encode_prompt(text) for text in TEXTS[:2]] == [
        *map(library_tokenizer.encode, TEXTS[:2])
    ]


def test_a_folder_of_an_unknown_tokenizer_class_is_refused(tmp_path, model):
    for config in ({}, {"tokenizer_class": "PreTrainedTokenizerFast"}, {"tokenizer_class": "X"}):
        folder = folder_of(tmp_path, model, config, in_vocabulary=True)
        with pytest.raises(UserError, match=r"depends on the tokenizer's class") as caught:
            load_tokenizer(folder)
        assert "save_pretrained" in str(caught.value.fix)


@pytest.mark.parametrize("name", ["vocab.txt", "tekken.json", "tiktoken.model"])
def test_other_vocabulary_files_are_refused_by_name(tmp_path, name):
    (tmp_path / name).write_text("[PAD]\n")
    with pytest.raises(UserError, match="only " + name) as caught:
        load_tokenizer(tmp_path)
    assert "save_pretrained" in str(caught.value.fix)


def test_damaged_vocabulary_files_are_refused(tmp_path, model):
    config = {"tokenizer_class": "GPT2Tokenizer"}
    folder = folder_of(tmp_path, model, config, in_vocabulary=True)
    (folder / "merges.txt").write_text("#version: 0.2\na b c\n")
    with pytest.raises(UserError, match="not a pair"):
        load_tokenizer(folder)
    (folder / "merges.txt").unlink()
    with pytest.raises(UserError, match=r"without merges\.txt"):
        load_tokenizer(folder)
    (folder / "merges.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="UTF-8"):
        load_tokenizer(folder)
    (folder / "vocab.json").write_text('{"a": "0"}')
    with pytest.raises(UserError):
        load_tokenizer(folder)

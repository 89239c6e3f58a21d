"""A language model that was trained inside a multimodal one becomes whole again: its tower, its names, its files."""

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from torch import Tensor

from bloomery.model.io.safetensors import Spec, TensorReader, write_tensors
from bloomery.model.io.stored import (
    INDEX,
    LANGUAGE,
    SINGLE,
    StoredTensor,
    all_tensors_of,
    find_tensors,
    stored_tensors,
    vision_tensors,
    weight_files,
)
from bloomery.model.io.weights import SHARD_BYTES, write_json, write_shards

NOTHING: Mapping[str, Tensor] = MappingProxyType({})
# What a whole model has beside weights, config and tokenizer.
PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.jinja",
    "chat_template.json",
)


def make_whole(folder: Path, base: Path, changed: Mapping[str, Tensor] = NOTHING) -> None:
    """In place: a folder with the language model of `base` alone becomes a model with the tower of `base`, bit for bit.

    `changed`: what was trained of the tower, by the names of the base's files. Raises UserError where a file cannot be
    read.
    """
    text = find_tensors(folder)
    prefixes = language_prefixes(base)
    tensors = {_whole_name(name, prefixes): tensor for name, tensor in text.items()}
    tensors |= vision_tensors(base)
    text_files = weight_files(folder)

    draft = folder / "whole"
    draft.mkdir()
    _write(draft, tensors, changed)
    for path in (*text_files, folder / INDEX, folder / SINGLE):
        path.unlink(missing_ok=True)
    for path in draft.iterdir():
        path.rename(folder / path.name)
    draft.rmdir()
    write_json(folder / "config.json", _whole_config(folder, base))
    _copy_processor(folder, base)


def write_changed(folder: Path, base: Path, changed: Mapping[str, Tensor]) -> None:
    """Writes the whole model of `base` into a folder that exists, bit for bit but for the tensors that changed."""
    _write(folder, all_tensors_of(base), changed)
    shutil.copyfile(base / "config.json", folder / "config.json")
    _copy_processor(folder, base)


def _write(folder: Path, stored: Mapping[str, StoredTensor], changed: Mapping[str, Tensor]) -> None:
    def spec(name: str) -> Spec:
        tensor = changed.get(name, stored[name])
        return tuple(tensor.shape), tensor.dtype

    with TensorReader() as reader:

        def tensor_of(name: str) -> Tensor:
            return changed[name].cpu() if name in changed else reader.read(stored[name])

        def write_shard(file: Path, names: list[str]) -> None:
            write_tensors(file, {name: spec(name) for name in names}, tensor_of)

        sizes = {name: math.prod(spec(name)[0]) * spec(name)[1].itemsize for name in stored}
        write_shards(folder, sizes, SHARD_BYTES, write_shard)


def _copy_processor(folder: Path, base: Path) -> None:
    for name in PROCESSOR_FILES:
        if (base / name).is_file() and not (folder / name).exists():
            shutil.copyfile(base / name, folder / name)


def language_prefixes(base: Path) -> dict[str, str]:
    """The names of a language model's parts inside a multimodal model: "model." becomes "model.language_model."."""
    names = all_tensors_of(base)
    return {
        text: prefix
        for prefix, text in LANGUAGE.items()
        if any(name.startswith(prefix) for name in names)
    }


def _whole_name(name: str, prefixes: dict[str, str]) -> str:
    for text, prefix in prefixes.items():
        if name.startswith(text):
            return prefix + name.removeprefix(text)
    return name


def _whole_config(folder: Path, base: Path) -> dict[str, object]:
    """That of the base, with the vocabulary and the dtype of the folder's."""
    whole: dict[str, object] = json.loads((base / "config.json").read_text(encoding="utf-8"))
    text = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    changed = {key: text[key] for key in ("vocab_size", "dtype", "torch_dtype") if key in text}
    inner = whole.get("text_config")
    if isinstance(inner, dict):
        whole["text_config"] = inner | changed
    return whole | {key: value for key, value in changed.items() if key in whole}


def is_inside_whole(adapter: Path) -> bool:
    """Whether an adapter was trained inside a multimodal model, with pictures: its tensors have names there."""
    file = adapter / "adapter_model.safetensors"
    inside = tuple(f"base_model.model.{prefix}" for prefix in LANGUAGE)
    return file.is_file() and any(name.startswith(inside) for name in stored_tensors(file))

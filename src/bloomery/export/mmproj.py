"""The vision tower and the projector of a multimodal model as a second GGUF file, which llama.cpp reads pictures with
(`--mmproj`).

`facts/gguf_projectors.py` says what it is made of. The file does not name the model, so that one with a frozen tower is
bitwise identical to that of its base.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bloomery.core import __version__
from bloomery.core.errors import UserError
from bloomery.core.progress import progress
from bloomery.data.tokenizer.tokenizer import Tokenizer
from bloomery.export.gguf_format import BLOCK, GgufTensor, encoded
from bloomery.export.gguf_import import dequantized_tensor, read_gguf
from bloomery.export.gguf_writing import FILE_TYPES, PlannedTensor, write_file
from bloomery.export.verify import error_share
from bloomery.facts.config_fields import HfKeys
from bloomery.facts.gguf_projectors import (
    GGUF_PROJECTORS,
    Change,
    GgufProjector,
    Stated,
    tower_settings,
)
from bloomery.facts.pictures import Vision
from bloomery.infer.model_folder import ModelFiles
from bloomery.model.io.safetensors import TensorReader
from bloomery.model.io.stored import MTP, StoredTensor, read_object, vision_tensors
from bloomery.model.io.whole_models import NOTHING

BREAK = "v.token_embd.img_break"
PATCHES = ("v.patch_embd.weight", "v.patch_embd.weight.1", "mm.patch_merger.weight")
MMPROJ_TYPES = ("f32", "f16", "bf16", "q8_0")  # that llama.cpp's conversion makes of a tower
NUMBER = r"(?<=[._])\d+(?=\.)"  # of a layer or a part, in a name
PROCESSOR_FIX = "put the preprocessor_config.json there that was published with the weights"


@dataclass(frozen=True)
class TowerTensor:
    """A tensor of the file, computed from a stored one when it is asked for."""

    name: str
    shape: tuple[int, ...]
    kind: str
    values: Callable[[], Tensor]

    def planned(self) -> PlannedTensor:
        def chunks() -> Iterator[memoryview]:
            yield encoded(self.values().contiguous(), self.kind, self.name).data

        return PlannedTensor(self.name, self.shape, self.kind, chunks)


@dataclass(frozen=True)
class Mmproj:
    """What an mmproj file of type `kind` has. `notes`: what llama.cpp computes otherwise, a sentence each."""

    metadata: Mapping[str, Stated]
    tensors: tuple[TowerTensor, ...]
    kind: str
    notes: tuple[str, ...] = ()


# The graph of the language model


def text_graph_name(plain_name: str, vision: Vision | None) -> str:
    """What llama.cpp calls the graph of a language model that sees pictures, by the name of the same one for text.

    Those with positions in three axes have graphs of their own, which compute texts as the plain ones do.
    """
    if vision is None or vision.kind not in GGUF_PROJECTORS:
        return plain_name
    return GGUF_PROJECTORS[vision.kind].text_graph.get(plain_name, plain_name)


def num_deep_layers(vision: Vision) -> int:
    """How many layers of the language model get features of inner layers of the tower; 0 where its graph has none."""
    projector = GGUF_PROJECTORS.get(vision.kind)
    if projector is None or not projector.deepstack:
        return 0
    return len(tower_settings(json.loads(vision.raw_config), projector)["deepstack_visual_indexes"])


# What the file has


def plan_mmproj(
    files: ModelFiles,
    vision: Vision,
    kind: str,
    reader: TensorReader,
    tokenizer: Tokenizer,
    embedding: Callable[[int], Tensor],
    changed: Mapping[str, Tensor] = NOTHING,
) -> Mmproj | str:
    """The file of the model's tower, or why llama.cpp cannot compute it, as a sentence.

    `kind`: the type of the language model's file; where llama.cpp has no towers of it, the tower's is f16. `embedding`:
    of a token, by its id. `changed`: what an adapter changes of the tower, by the names of the base's files. Raises
    UserError for damaged files.
    """
    folder = files.base or files.weights
    projector = GGUF_PROJECTORS.get(vision.kind)
    if projector is None:
        return f"llama.cpp's projectors for {vision.kind} are not known here"
    hf = json.loads(vision.raw_config)
    settings = tower_settings(hf, projector)
    stored_tensors = _tower_tensors(folder)
    processor = projector.processor | _processor_settings(folder)
    settings["processor"] = processor
    if (problem := _unsupported(projector, settings)) is not None:
        return problem
    if (problem := _missing(stored_tensors, processor)) is not None:
        return problem
    kind = kind if kind in MMPROJ_TYPES else "f16"
    changed = {_todays_name(name): tensor for name, tensor in changed.items()}

    def values_of(name: str) -> Tensor:
        return changed[name] if name in changed else reader.read(stored_tensors[name])

    tensors: list[TowerTensor] = []
    left_out = []
    for name, stored in sorted(stored_tensors.items()):
        if name.startswith(projector.left_out):
            left_out.append(name)
            continue
        tensors_of_name = _tensors_of(
            name,
            tuple(stored.shape),
            partial(values_of, name),
            projector=projector,
            settings=settings,
            kind=kind,
        )
        if tensors_of_name is None:
            return f"llama.cpp's projector {projector.name} has no tensor for {name}"
        tensors += tensors_of_name
    if projector.break_token is not None:
        token = tokenizer.id_of(projector.break_token)
        if token is None:
            return f"the tokenizer has no {projector.break_token}, which llama.cpp puts between rows of a picture"
        row = embedding(token)
        tensors.append(TowerTensor(BREAK, tuple(row.shape), "f32", lambda: row))
    layers = {
        int(found[1]) for each in tensors if (found := re.match(r"v\.blk\.(\d+)\.", each.name))
    }
    if layers != set(range(settings["num_hidden_layers"])):
        return f"the files have {len(layers)} layers of the tower, and config.json {settings['num_hidden_layers']}"
    metadata = _metadata(projector, settings, hf, processor)
    notes = tuple(_differences(vision, projector, settings, left_out, hf))
    return Mmproj(metadata, tuple(tensors), kind, notes)


def _unsupported(projector: GgufProjector, settings: HfKeys) -> str | None:
    graph = f"llama.cpp's projector {projector.name}"
    for key, values in projector.fixed.items():
        value = settings.get(key, values[0])
        if value not in values:
            return f"{graph} computes {key} {values[0]!r}, and the tower has {value!r}"
    heads = settings["num_attention_heads"]
    width = settings["hidden_size"] / heads if heads else 0
    if settings.get("head_dim", width) != width:
        return f"{graph} has heads of {width:g} numbers, and the tower of {settings['head_dim']}"
    if settings.get("num_key_value_heads", heads) != heads:
        return f"{graph} has keys for each of {heads} heads, and the tower fewer"
    for key in ("image_size", "patch_size"):
        if isinstance(settings.get(key, 0), list | tuple):
            return (
                f"{graph} has square pictures and patches, and the tower has {key} {settings[key]}"
            )
    if (
        "fullatt_block_indexes" in settings
        and not projector.describe(settings)["vision.n_wa_pattern"]
    ):
        layers = settings["fullatt_block_indexes"]
        return f"{graph} has full attention in each n-th layer, and the tower in {layers}"
    return None


def _missing(tensors: Mapping[str, StoredTensor], processor: HfKeys) -> str | None:
    if not tensors:
        return "the folder has no weights of the tower"
    for key in ("image_mean", "image_std"):
        numbers = processor.get(key)
        if not isinstance(numbers, list) or len(numbers) != 3:
            return (
                f"{key} in preprocessor_config.json is {str(numbers)[:40]}, and not three numbers"
            )
    return None


def _differences(
    vision: Vision, projector: GgufProjector, settings: HfKeys, left_out: list[str], hf: HfKeys
) -> Iterator[str]:
    """What llama.cpp computes otherwise with pictures, a sentence each."""
    if "gelu" in (settings.get("hidden_act"), settings.get("projector_hidden_act")):
        yield (
            "llama.cpp computes GELU by tanh, the parts of this model that read pictures the exact form: "
            "activations differ by 5e-4"
        )
    width = _language_model(hf)["hidden_size"]
    if projector.name == "gemma4uv" or (
        projector.name == "gemma4v" and width not in _CAUSAL_WIDTHS
    ):
        layers = {"none": "no layer", "windows": "layers with a window", "all": "all layers"}
        yield (
            "llama.cpp lets tokens of a picture see those after them in all layers, this model in "
            f"{layers[vision.both_ways]}"
        )
    yield from projector.differences(settings)
    if any(name.startswith(("audio_", "embed_audio.")) for name in left_out):
        yield "the mmproj file has no part for audio: llama.cpp hears nothing"


# Of Gemma 4 E2B and E4B, by which llama.cpp knows them: tools/mtmd/mtmd.cpp, mtmd_decode_use_non_causal.
_CAUSAL_WIDTHS = (1536, 2560)


def _language_model(hf: HfKeys) -> HfKeys:
    text = hf.get("text_config")
    return hf | text if isinstance(text, dict) else hf


def _tower_tensors(folder: Path) -> dict[str, StoredTensor]:
    """By transformers' names today."""
    return {
        _todays_name(name): tensor
        for name, tensor in vision_tensors(folder).items()
        if not name.startswith(MTP)
    }


def _todays_name(name: str) -> str:
    """Files of different years put "model." in front, or a module between."""
    name = name.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.")
    # Of Gemma 4: a linear layer that may be clipped.
    return name.replace(".linear.weight", ".weight")


def _processor_settings(folder: Path) -> HfKeys:
    """Of the image processor, which files of different years have by itself or in processor_config.json."""
    settings: HfKeys = {}
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (folder / name).is_file():
            stated = read_object(folder / name, fix=PROCESSOR_FIX)
            inner = stated.get("image_processor")
            settings |= stated | (inner if isinstance(inner, dict) else {})
    return settings


def _metadata(
    projector: GgufProjector, settings: HfKeys, hf: HfKeys, processor: HfKeys
) -> dict[str, Stated]:
    sizes = {
        "image_size": "image_size",
        "patch_size": "patch_size",
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        "block_count": "num_hidden_layers",
        "attention.head_count": "num_attention_heads",
    }
    described = {f"clip.{key}": value for key, value in projector.describe(settings).items()}
    return {
        "clip.has_vision_encoder": True,
        "clip.vision.projection_dim": _language_model(hf)["hidden_size"],
        **{f"clip.vision.{key}": settings[name] for key, name in sizes.items() if name in settings},
        "clip.vision.image_mean": [float(number) for number in processor["image_mean"]],
        "clip.vision.image_std": [float(number) for number in processor["image_std"]],
        projector.key: projector.name,
        **described,
    }


def _tensors_of(
    name: str,
    shape: tuple[int, ...],
    read: Callable[[], Tensor],
    *,
    projector: GgufProjector,
    settings: HfKeys,
    kind: str,
) -> list[TowerTensor] | None:
    """What the file has of a tensor of the model; None where it has no name for it."""
    numbers = re.findall(NUMBER, name)
    number = numbers[0] if numbers else ""
    patterns = (name, re.sub(NUMBER, "{}", name))
    # A parameter may have a name of its own, apart from its module's.
    known = [
        (pattern, leaf)
        for one in patterns
        for pattern, leaf in ((one, ""), (one.rpartition(".")[0], one.rpartition(".")[2]))
        if pattern in projector.tensors
    ]
    if not known:
        return None
    pattern, leaf = known[0]
    if "deepstack" in pattern:  # counted in the model, named by their layer in the file
        number = str(settings["deepstack_visual_indexes"][int(number)])
    target = projector.tensors[pattern].format(number)
    change = projector.changes.get(pattern)
    heads = settings["num_attention_heads"]

    # Names and shapes follow from a tensor without memory.
    blank = _changed(target, leaf, torch.empty(shape, device="meta"), change, heads)

    def values(file_name: str) -> Tensor:
        return _changed(target, leaf, read(), change, heads)[file_name]

    return [
        TowerTensor(
            file_name,
            tuple(tensor.shape),
            type_of(file_name, tuple(tensor.shape), kind, projector),
            partial(values, file_name),
        )
        for file_name, tensor in blank.items()
    ]


def _changed(
    target: str, leaf: str, values: Tensor, change: Change | None, heads: int
) -> dict[str, Tensor]:
    """The tensors of the file, by name, that stand for one of the model."""
    if values.ndim == 0:  # limits of a clipped linear layer
        values = values.unsqueeze(0)
    name = f"{target}.{leaf}" if leaf else target
    is_matrix = values.ndim > 1
    if change == "thirds":
        thirds = values.chunk(3)
        return {
            f"{target}{letter}.{leaf}": part for letter, part in zip("qkv", thirds, strict=True)
        }
    if change == "frames" and is_matrix:
        return {name: values[:, :, 0], f"{name}.1": values[:, :, 1]}
    if change == "channels_first" and is_matrix:
        side = round((values.shape[1] / 3) ** 0.5)
        return {name: values.reshape(-1, side, side, 3).permute(0, 3, 1, 2)}
    if change == "colors":
        side = round((values.shape[-1] / 3) ** 0.5)
        by_pixel = values.unflatten(-1, (side, side, 3))
        return {name: by_pixel.movedim(-1, -3).flatten(-3)}
    if change == "axes_first":
        return {name: values.movedim(1, 0)}
    if change == "pairs":
        return {name: GgufTensor(name, (), tuple(values.shape), heads=heads).apply(values)}
    return {name: values.float() + 1 if change == "plus_one" else values}


def type_of(name: str, shape: tuple[int, ...], kind: str, projector: GgufProjector) -> str:
    """The type of one tensor, as llama.cpp's conversion has it (`conversion/base.py`, `prepare_tensors`)."""
    if len(shape) == 1:
        return "f32"
    if name in projector.types:
        return projector.types[name]
    if name in PATCHES:
        return "f16" if kind == "f16" else "f32"
    if name == "v.position_embd.weight" or not name.endswith(".weight"):
        return "f32"
    return "f16" if kind == "q8_0" and shape[-1] % BLOCK else kind


# Writing and checking


def write_mmproj(path: Path, mmproj: Mmproj, library: Any) -> None:
    """Raises UserError for numbers that are not finite, or that the type cannot hold."""
    writer = library.GGUFWriter(path, "clip")
    writer.add_type("mmproj")
    writer.add_string("general.exported_by", f"bloomery {__version__}")
    writer.add_file_type(library.LlamaFileType[FILE_TYPES[mmproj.kind]])
    for key, value in mmproj.metadata.items():
        _adders(writer)[type(value)](key, value)
    writer.add_quantization_version(library.GGML_QUANT_VERSION)
    write_file(writer, path, [tensor.planned() for tensor in mmproj.tensors], library)


def _adders(writer: Any) -> Mapping[type, Callable[[str, Any], None]]:
    return {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }


def verify_mmproj(path: Path, mmproj: Mmproj, *, where: Path) -> str:
    """A sentence on the check that passed. Raises UserError where a tensor of the file is not the model's."""
    _, stored = read_gguf(path)
    assert stored.keys() == {tensor.name for tensor in mmproj.tensors}
    for number, tensor in enumerate(mmproj.tensors, 1):
        progress(f"comparing tensor {number:,} of {len(mmproj.tensors):,}")
        block = stored[tensor.name]
        expected = tensor.values().float()
        if tensor.shape != tuple(reversed(block.shape)) or not (
            error_share(dequantized_tensor(block), expected, block.tensor_type.name) <= 1.0
        ):
            raise UserError(
                f"{tensor.name} of the file is not the model's",
                where=str(where),
                fix="add --no-verify to export without this check; report this bug",
            )
    return f"mmproj      all {len(stored)} tensors equal the model's within the rounding of their types"

"""Models as files: the stored name of each parameter, and the file of each tensor. No torch.

Only complete safetensors files of a model's own folder count, and only their headers are read here.
"""

import json
import math
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, BinaryIO

from bloomery.core.errors import UserError
from bloomery.core.files import open_input, read_input
from bloomery.core.units import counted
from bloomery.facts.config import ModelConfig, StoredBuffer, StoredConversion
from bloomery.facts.counting import (
    Shape,
    expert_parts,
    is_expert_stack,
    layers,
    parameter_shapes,
    unstacked_shapes,
)
from bloomery.facts.families import FAMILIES
from bloomery.facts.family import StoredExperts, StoredNames
from bloomery.hub import PICKLE_SUFFIXES
from bloomery.model.io.expert_tensors import expert_names, take_experts
from bloomery.model.io.lines import Lines
from bloomery.model.io.packed import FLOAT8, Packing, joined, packing_notes, refuse_unsaid
from bloomery.model.io.tensor_names import transformers_names

if TYPE_CHECKING:
    import torch


LARGEST_CONFIG = 16 * 2**20


def read_object(path: Path, *, fix: str) -> dict[str, Any]:
    """The JSON object in a config file of a model or an adapter. Raises UserError."""
    if path.stat().st_size > LARGEST_CONFIG:
        raise UserError(f"{path.name} is larger than 16 MiB", where=str(path), fix=fix)
    try:
        raw_object = json.loads(read_input(path, LARGEST_CONFIG))
    except (ValueError, RecursionError) as error:
        # Python appends advice on long numbers, which is not meant for our reader.
        reason = str(error).partition(";")[0]
        raise UserError(f"{path.name} is not JSON: {reason}", where=str(path), fix=fix) from error
    if not isinstance(raw_object, dict):
        raise UserError(f"{path.name} holds no object", where=str(path), fix=fix)
    return raw_object


@dataclass(frozen=True)
class TensorLocation:
    """The name of a stored tensor, and the rows of it that a parameter is: `first` and the next `rows` ones.

    `stored_rows`: how many the stored tensor has. `transposed`: it is stored as [inputs, outputs]. `stacked`: its rows
    are those of so many matrices of equal size, of experts, and are stored as [matrices, rows, inputs]. `interleaved`:
    the two halves of the rows of each matrix take turns there.
    """

    name: str
    transposed: bool = False
    first: int = 0
    rows: int = 0
    stored_rows: int = 0
    stacked: int = 0
    interleaved: bool = False

    def stored_shape(self, shape: Shape) -> Shape:
        """The shape of the stored tensor, for a parameter of `shape`."""
        if not shape:
            return ()
        stored_shape = (self.stored_rows, *shape[1:])
        if self.stacked:
            matrix = (self.stored_rows // self.stacked, *shape[1:])
            return (self.stacked, *(reversed(matrix) if self.transposed else matrix))
        return tuple(reversed(stored_shape)) if self.transposed else stored_shape


# Planning an adapter asks for the same model hundreds of times.
@cache
def tensor_locations(config: ModelConfig) -> Mapping[str, TensorLocation]:
    """The location of each parameter by our name, in the order of `parameter_shapes`; of stacks of experts, that of
    each of their parts (`counting.expert_parts`).
    """
    locations: dict[str, TensorLocation] = {}
    # The transformers backend lists its parameters itself; of those that files keep in another form, the location is
    # that in transformers' memory (`read_headers` finds their tensors).
    if config.transformers_backend is not None:
        for name, stored_name, shape in config.transformers_backend.parameters:
            locations[name] = TensorLocation(stored_name, rows=shape[0], stored_rows=shape[0])
        return MappingProxyType(locations)
    family = FAMILIES.get(config.family)
    stored = StoredNames() if family is None else family.stored
    shapes = parameter_shapes(config)

    def renamed(path: str) -> str:
        for prefix, stored_prefix in stored.renamed.items():
            if path == prefix or path.startswith(prefix + "."):
                return stored_prefix + path[len(prefix) :]
        return path

    for name, shape in shapes.items():
        if is_expert_stack(name):
            locations |= _expert_locations(name, shape, stored.experts or StoredExperts())
            continue
        # "model.layers.0.mlp.up_proj.weight" has the layer "model.layers.0", the module
        # "mlp.up_proj" and the kind "weight": only modules of a layer are fused or transposed.
        path, _, kind = name.rpartition(".")
        layer = ""
        module = path
        if path.startswith("model.layers."):
            parts = path.split(".")
            layer = ".".join(parts[:3])
            module = ".".join(parts[3:])
        # A fused tensor stacks the rows of its modules in order; any other module is stored alone.
        fused_modules: tuple[str, ...] = (module,)
        stored_module = module
        for modules, fused_module in stored.fused.items():
            if module in modules:
                fused_modules = modules
                stored_module = fused_module
                break
        part_shapes = [
            shapes[".".join(filter(None, (layer, part, kind)))] for part in fused_modules
        ]
        module_rows = [part_shape[0] if part_shape else 1 for part_shape in part_shapes]
        # A parameter may have a name of its own, apart from its module's.
        own_name = stored.renamed.get(f"{stored_module}.{kind}")
        stored_path = (renamed(stored_module), kind) if own_name is None else (own_name,)
        locations[name] = TensorLocation(
            name=".".join(filter(None, (renamed(layer), *stored_path))),
            transposed=stored.transposed and layer != "" and len(shape) == 2,
            first=sum(module_rows[: fused_modules.index(module)]),
            rows=shape[0] if shape else 1,
            stored_rows=sum(module_rows),
        )
    return MappingProxyType(locations)


def _expert_locations(
    name: str, shape: Shape, stored: StoredExperts
) -> Iterator[tuple[str, TensorLocation]]:
    """Of each part of a stack of experts."""
    layer, _, stack = name.rpartition(".mlp.experts.")
    matrices = shape[0]
    for part in expert_parts(name, shape):
        if stack in stored.stacks:
            yield (
                part.name,
                TensorLocation(
                    f"{layer}.{stored.stacks[stack]}",
                    first=part.expert * shape[1] + part.first,
                    rows=part.rows,
                    transposed=stored.transposed and len(shape) == 3,
                    stored_rows=matrices * shape[1],
                    stacked=matrices,
                    interleaved=stored.interleaved and part.rows < shape[1],
                ),
            )
        else:
            _, module, kind = part.name.rsplit(".", 2)
            stored_module = stored.modules.get(module, module)
            stored_name = f"{layer}.{stored.prefix}.{part.expert}.{stored_module}.{kind}"
            yield part.name, TensorLocation(stored_name, rows=part.rows, stored_rows=part.rows)


SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
LARGEST_INDEX = 256 * 2**20
LONGEST_NAME = 200
AGAIN = "download or save the model again"
DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
    # Codes of quantized checkpoints, each with a rule of its format (`packed`).
    "U32": "uint32",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
WEIGHTS = ("F64", "F32", "F16", "BF16")  # what a weight may be stored as
# Buffers that old checkpoints carry although they follow from the config.
COMPUTED = (
    ".rotary_emb.inv_freq",
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
)
VALUES = "score.weight"  # of a reward model
HEADS = (
    "lm_head.weight",
    "embed_out.weight",
)  # the names of the head that models of transformers have
# How the names of an embedding end: Llama and most others, GPT-2 and its relatives, GPT-NeoX, BLOOM.
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
COMPARED_NUMBERS = 2**20  # of two tensors at a time


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its first byte, what safetensors calls its dtype, and its shape.

    `lines`: its rows are some lines of the matrix that begins at `offset`; None: they lie there one after the other.
    `packing`: of a quantized matrix, which lies in several tensors; `kind` is what its numbers are rounded to.
    """

    path: Path
    offset: int
    kind: str
    shape: tuple[int, ...]
    lines: Lines | None = None
    packing: Packing | None = None

    @property
    def dtype(self) -> "torch.dtype":
        import torch

        dtype: torch.dtype = getattr(torch, DTYPES[self.kind])
        return dtype


def is_bare(folder: Path) -> bool:
    """Whether the folder has no weights: a config alone, enough for a plan."""
    return (
        not any((folder / name).is_file() for name in (SINGLE, INDEX)) and _pickled(folder) is None
    )


def _pickled(folder: Path) -> str | None:
    """The name of a pickle in the folder, or None."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return next((name for name in names if name.endswith(PICKLE_SUFFIXES)), None)


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights: `model.safetensors`, else the shards that the index names, as transformers
    chooses. Raises UserError without any, and for an index that cannot be read.
    """
    if (folder / SINGLE).is_file():
        return [inside(folder, SINGLE)]
    return [inside(folder, name) for name in sorted(set(_weight_map(folder).values()))]


def _weight_map(folder: Path) -> dict[str, str]:
    """The file of each tensor, from the index."""
    index = folder / INDEX
    if not index.is_file():
        raise _no_weights(folder)

    # An index comes with a download: it may hold anything.
    if index.stat().st_size > LARGEST_INDEX:
        raise UserError("the index is larger than 256 MiB", where=str(index), fix=AGAIN)
    try:
        weight_map = json.loads(read_input(index, LARGEST_INDEX))["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError("the index holds no weight_map", where=str(index), fix=AGAIN) from error
    if not isinstance(weight_map, dict) or not all(
        isinstance(file_name, str) for file_name in weight_map.values()
    ):
        raise UserError(
            "weight_map does not name a file for each tensor", where=str(index), fix=AGAIN
        )
    return weight_map


def _no_weights(folder: Path) -> UserError:
    """The error for a folder without weights that are read, with what it has instead."""
    if (pickle := _pickled(folder)) is not None:
        return UserError(
            f"{pickle} is a pickle, which can run code when it is opened: only safetensors are read",
            where=str(folder),
            fix="use a copy of the model in safetensors, or save it again with save_pretrained",
        )
    others = sorted(path.name for path in folder.glob("*.safetensors")) if folder.is_dir() else []
    if not others:
        return UserError(
            "no model.safetensors is here",
            where=str(folder),
            fix="give the folder of a saved model",
        )
    # Shards without their index, or one file under another name, such as model.fp16.safetensors.
    fix = f"rename {others[0]} to {SINGLE}"
    if len(others) > 1:
        fix = f"download {INDEX}, too, or rename the one that you mean to {SINGLE}"
    listed = ", ".join(name[:60] for name in others[:3]) + (", ..." if len(others) > 3 else "")
    return UserError(
        f"no model.safetensors is here, and no index that names {listed}",
        where=str(folder),
        fix=fix,
    )


def inside(folder: Path, name: str) -> Path:
    """The path of a file of the folder. Raises UserError for a name that could be elsewhere, or a missing file.

    A link may only lead to a file of the same folder or of the Hub's cache next to it.
    """
    path = folder / name
    if (
        Path(name).name != name
        or name in ("", ".", "..")
        or not name.isprintable()
        or len(name) > LONGEST_NAME
    ):
        problem = f"the index names {name[:80]!r}, which is not a file of this folder"
        raise UserError(problem, where=str(folder), fix="use a copy from a source that you trust")
    if not path.is_file():
        raise UserError(f"{name} is missing", where=str(folder), fix="download the model again")
    target = path.resolve()
    home = folder.resolve()
    # models--x--y/snapshots/<commit>/file -> models--x--y/blobs/<hash>
    blobs = home.parent.parent / "blobs"
    if target.parent not in (home, blobs if home.parent.name == "snapshots" else home):
        fix = "put the file itself there, if you trust it"
        raise UserError(
            f"{name} is a link that leads out of the folder", where=str(folder), fix=fix
        )
    return path


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, by name.

    Raises UserError when the file is damaged, which the safetensors library finds from its header and length.
    """
    from safetensors import SafetensorError, safe_open

    open_input(path).close()  # the library would wait for a pipe
    # The library checks that header and length agree. Offsets are read from the header itself.
    try:
        with safe_open(path, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        problem = f"the file cannot be read as safetensors: {error}"[:200]
        raise UserError(problem, where=str(path), fix=AGAIN) from error

    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """The library keeps one of two entries of a name; which one, each reader decides for itself."""
        entries = dict(pairs)
        if len(entries) < len(pairs):
            (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
            raise UserError(f"{twice[:80]!r} is in the header twice", where=str(path), fix=AGAIN)
        return entries

    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length), object_pairs_hook=refuse_duplicates)
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            problem = f"{name} is stored as {entry['dtype']}, which Bloomery cannot read"
            raise UserError(problem, where=str(path), fix=f"save it as one of {', '.join(WEIGHTS)}")
    start = 8 + length
    return {
        name: StoredTensor(
            path, start + entry["data_offsets"][0], entry["dtype"], tuple(entry["shape"])
        )
        for name, entry in header.items()
    }


def find_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a model folder: `model.safetensors`, or the shards that its index names.

    Raises UserError for a missing file, a shard outside the folder, a tensor in two shards, or pickled weights.
    """
    return _text_tensors(all_tensors_of(folder))


def all_tensors_of(folder: Path) -> dict[str, StoredTensor]:
    """Under their names in the files; those of a quantized matrix are one."""
    tensors = _tensors_of_files(folder)
    if not (folder / "config.json").is_file():
        return tensors
    return joined(tensors, read_object(folder / "config.json", fix=AGAIN), folder)


def _tensors_of_files(folder: Path) -> dict[str, StoredTensor]:
    if (folder / SINGLE).is_file():
        return stored_tensors(inside(folder, SINGLE))

    # The shards' own headers say what they hold. Of a tensor in two of them, nothing says which is
    # meant.
    weight_map = _weight_map(folder)
    tensors: dict[str, StoredTensor] = {}
    for shard_name in sorted(set(weight_map.values())):
        shard_tensors = stored_tensors(inside(folder, shard_name))
        if repeated_names := tensors.keys() & shard_tensors.keys():
            raise UserError(
                f"{min(repeated_names)} is in two shards",
                where=str(folder / shard_name),
                fix=AGAIN,
            )
        tensors |= shard_tensors

    if missing_names := weight_map.keys() - tensors.keys():
        raise UserError(
            f"{min(missing_names)} is in the index but in no shard",
            where=str(folder / INDEX),
            fix=AGAIN,
        )
    return tensors


# Prefixes of the language model of a multimodal one, as published and as transformers 5 names it; then of what is not
# read.
LANGUAGE = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
}
MTP = "mtp."  # further layers that guess tokens; transformers does not read them either
VISION = (
    "visual.",
    "model.visual.",
    MTP,
    "vision_tower.",
    "model.audio_tower.",
    "model.embed_audio.",
    "model.embed_vision.",
    "model.vision_embedder.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
    "model.vision_model.",
    "model.connector.",
)


def _text_tensors(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """A multimodal model keeps its language model alone, under that model's own names."""
    if not any(name.startswith(tuple(LANGUAGE)) for name in tensors):
        return {name: tensor for name, tensor in tensors.items() if not name.startswith(VISION)}
    text_tensors = {}
    for name, tensor in tensors.items():
        prefix = next((prefix for prefix in LANGUAGE if name.startswith(prefix)), "")
        if not name.startswith(VISION):
            text_tensors[LANGUAGE.get(prefix, "") + name.removeprefix(prefix)] = tensor
    return text_tensors


def vision_tensors(folder: Path) -> dict[str, StoredTensor]:
    """What a multimodal model has beside its language model, by the names of its files. Raises UserError as
    `find_tensors` does.
    """
    tensors = all_tensors_of(folder)
    return {name: tensor for name, tensor in tensors.items() if name.startswith(VISION)}


def _unread_parts(
    all_tensors: Mapping[str, StoredTensor],
    text_tensors: Mapping[str, StoredTensor],
    *,
    sees: bool,
) -> list[str]:
    """A line on what a multimodal model has beside its language model. `sees`: its tower is read, too."""
    unread_names = [name for name in all_tensors if name.startswith(MTP if sees else VISION)]
    if len(all_tensors) == len(text_tensors) or not unread_names:
        return []
    parts = sorted(
        {
            next(prefix for prefix in VISION if name.startswith(prefix)).rstrip(".")
            for name in unread_names
        }
    )
    unread = f"{counted(len(unread_names), 'tensors')} of {', '.join(parts)}"
    return [f"{unread} are not read" + ("" if sees else ": it is opened as its language model")]


def dtype_of(folder: Path) -> "torch.dtype":
    """What a copy of the folder is written in: of most of its numbers; of quantized weights, what theirs have.

    A few numbers may have more digits than the others: those that choose experts.
    """
    tensors = list(find_tensors(folder).values())
    packed = next((tensor for tensor in tensors if tensor.packing is not None), None)
    if packed is not None:
        return packed.dtype
    numbers = Counter[str]()
    for tensor in tensors:
        numbers[tensor.kind] += math.prod(tensor.shape)
    ((kind, _),) = numbers.most_common(1)
    return next(tensor for tensor in tensors if tensor.kind == kind).dtype


def stored_in(folder: Path, name: str) -> dict[str, StoredTensor]:
    """The tensors of one file of the folder. Raises UserError as `find_tensors` does."""
    return stored_tensors(inside(folder, name))


def refuse_whole_numbers(name: str, tensor: StoredTensor) -> None:
    """Raises UserError for a weight of whole numbers or truth values: a cast would train something else.

    Codes of a quantized matrix are such numbers, where nothing says how they are scaled.
    """
    if tensor.kind in FLOAT8:
        raise UserError(
            f"{name[:120]} is stored as {tensor.kind}, and config.json does not say how it is scaled",
            where=str(tensor.path),
            fix="take the config.json of that model, with its quantization_config, or the unquantized model",
        )
    if tensor.kind not in WEIGHTS:
        problem = f"{name[:120]} is stored as {tensor.kind}, and weights are floating-point numbers"
        raise UserError(
            problem, where=str(tensor.path), fix=f"save it as one of {', '.join(WEIGHTS)}"
        )


@dataclass(frozen=True)
class StoredParameters:
    """A folder's tensors as the parameters of a config; several of these may share a stored tensor.

    Of parameters that transformers makes of tensors in another form, these are here, by the names of files.

    `notes`: a line on each thing that is read in another way than the files say. `is_renamed`: transformers would not
    find the tensors under the names that they have.
    """

    by_name: dict[str, StoredTensor]
    notes: tuple[str, ...] = ()
    is_renamed: bool = False


def stored_parameters(
    folder: Path, config: ModelConfig, *, headless: bool = False, shared_head: bool = False
) -> dict[str, StoredTensor]:
    """`read_headers` without its notes."""
    return read_headers(folder, config, headless=headless, shared_head=shared_head).by_name


def read_headers(
    folder: Path,
    config: ModelConfig,
    *,
    headless: bool = False,
    shared_head: bool = False,
    sees: bool = False,
) -> StoredParameters:
    """Where each parameter lies. Reads headers alone.

    `sees`: what reads pictures is read, too, so that no note says otherwise. `headless`: the values head may be
    missing. `shared_head`: a head that the folder lacks is its embedding. Raises UserError when another tensor is
    missing, unexpected, or of another shape than in the config, or no floating-point numbers.
    """
    shapes = unstacked_shapes(config)
    locations = tensor_locations(config)
    conversions = {} if config.transformers_backend is None else _conversions(config)
    expected_names = {location.name for location in locations.values()} | conversions.keys()
    embedding = locations["model.embed_tokens.weight"].name
    all_tensors = all_tensors_of(folder)
    stored = _text_tensors(all_tensors)
    where = str(next(iter(stored.values())).path if stored else folder)
    stored = {as_saved(name, config): tensor for name, tensor in stored.items()}
    known_names = expected_names.union(expert_names(config))
    named = transformers_names(stored, known_names, embedding, where)
    tensors = dict(named.by_name)
    notes = [*_unread_parts(all_tensors, stored, sees=sees), *named.notes]
    if (
        (folder / SINGLE).is_file()
        and (folder / INDEX).is_file()
        and not _is_index_of_single(folder)
    ):
        notes.append(f"{SINGLE} is read, and not the shards of {INDEX}, as transformers does")

    # Weights that are tied are one tensor, which may have either name.
    head = next((name for name in HEADS if name in tensors), None)
    if config.tie_embeddings and embedding not in tensors and head is not None:
        tensors[embedding] = tensors.pop(head)
        notes.append(f"{head} is the embedding, too: the weights are tied")
    elif shared_head and HEADS[0] in expected_names and head is None and embedding in tensors:
        tensors[HEADS[0]] = tensors[embedding]

    # Matrices of experts are found in either form, and then have the shape that they need.
    experts = take_experts(tensors, config, where=where)
    expected_names -= {locations[name].name for name in experts}
    for name, tensor in experts.items():
        refuse_whole_numbers(name, tensor)

    # Of parameters that files keep in another form, transformers also opens the form of its memory.
    read_conversions = {
        stored_name: conversion
        for stored_name, conversion in conversions.items()
        if not all(locations[name].name in tensors for name in conversion.parameters)
    }
    converted = {name for each in read_conversions.values() for name in each.parameters}
    expected_names -= conversions.keys() - read_conversions.keys()
    expected_names -= {locations[name].name for name in converted}

    # Codes without a word of how they are scaled are named first: their scales would be surplus.
    for stored_name in expected_names & tensors.keys():
        refuse_whole_numbers(stored_name, tensors[stored_name])

    # More tensors than the config has mean another architecture. Buffers that follow from the
    # config are no surplus, nor is the head's weight where the embedding is tied to it or a values
    # head replaces it.
    surplus_names = {
        name for name in tensors.keys() - expected_names if not name.endswith(COMPUTED)
    }
    if config.tie_embeddings or config.head == "values":
        surplus_names -= set(HEADS)
    if config.transformers_backend is not None:
        surplus_names -= {buffer.name for buffer in config.transformers_backend.buffers}
    if unused_names := surplus_names & _unused_keys(config):
        surplus_names -= unused_names
        notes.append(
            f"{len(unused_names)} tensors of layers that use the keys of another, such as {min(unused_names)}, are not"
            " read, as in transformers"
        )
    if surplus_names and expected_names <= tensors.keys():
        raise UserError(
            f"{min(surplus_names)} has no place in a {config.family} model",
            where=where,
            fix="config.json is of another architecture, or another program added that tensor: "
            "save the language model alone",
        )

    # Each parameter needs its tensor, in the shape that the config gives it and in floating-point
    # numbers.
    for name, location in locations.items():
        if name in experts or name in converted:
            continue
        location_tensor = tensors.get(location.name)
        expected_shape = location.stored_shape(shapes[name])
        if location_tensor is None and headless and name == VALUES:
            continue
        if location_tensor is None:
            refuse_unsaid(location.name, tensors, where=str(folder))
        if location_tensor is None:
            raise _missing(location.name, config, folder)
        if location_tensor.shape != expected_shape:
            raise UserError(
                f"{location.name} is {list(location_tensor.shape)}; "
                f"config.json makes it {list(expected_shape)}",
                where=str(location_tensor.path),
                fix="put the config.json there that was saved with these weights",
            )
    parameters = {
        name: tensors[location.name]
        for name, location in locations.items()
        if location.name in tensors
    }
    parameters |= experts
    for name, conversion in read_conversions.items():
        parameters[name] = _part_of_conversion(name, conversion, tensors, folder)
    notes += packing_notes(parameters)
    return StoredParameters(parameters, tuple(notes), is_renamed=bool(named.notes))


def _conversions(config: ModelConfig) -> dict[str, StoredConversion]:
    """By each tensor of files that it reads."""
    backend = config.transformers_backend
    assert backend is not None
    return {name: conversion for conversion in backend.conversions for name, _ in conversion.stored}


def _part_of_conversion(
    name: str,
    conversion: StoredConversion,
    tensors: Mapping[str, StoredTensor],
    folder: Path,
) -> StoredTensor:
    """Raises UserError where it is missing or has another shape."""
    tensor = tensors.get(name)
    expected_shape = dict(conversion.stored)[name]
    if tensor is None:
        raise UserError(f"{name} is missing", where=str(folder), fix=AGAIN)
    if tensor.shape != expected_shape:
        raise UserError(
            f"{name} is {list(tensor.shape)}; config.json makes it {list(expected_shape)}",
            where=str(tensor.path),
            fix="put the config.json there that was saved with these weights",
        )
    return tensor


def _unused_keys(config: ModelConfig) -> set[str]:
    """What files hold of layers that use the keys and values of another, though nothing computes with it."""
    return {
        f"{layer.name}.self_attn.{module}.weight"
        for layer in layers(config)
        if layer.keys_of is not None
        for module in ("k_proj", "v_proj", "k_norm", "v_norm")
    }


def as_saved(name: str, config: ModelConfig) -> str:
    """transformers also reads the names that its modules have in memory."""
    family = FAMILIES.get(config.family)
    if family is None or config.transformers_backend is not None:
        return name
    path, _, kind = name.rpartition(".")
    for ending, ending_in_memory in family.stored.in_memory.items():
        if path.endswith(f".{ending_in_memory}"):
            return f"{path.removesuffix(ending_in_memory)}{ending}.{kind}"
    return name


def _missing(name: str, config: ModelConfig, folder: Path) -> UserError:
    problem = f"{name} is missing"
    fix = "save or download it again"
    if name in HEADS and not config.tie_embeddings:
        problem = f"{name} is missing, and config.json does not tie the head to the embedding"
        fix = (
            "save the model with its head (AutoModelForCausalLM); where the head is the embedding, "
            'set "tie_word_embeddings": true in config.json'
        )
    return UserError(problem, where=str(folder), fix=fix)


def _is_index_of_single(folder: Path) -> bool:
    """Whether the index names model.safetensors alone."""
    try:
        return set(_weight_map(folder).values()) <= {SINGLE}
    except UserError:  # an index that is not read may be damaged
        return False


def has_own_head(folder: Path) -> bool:
    """Whether the files hold a head that is not the embedding: transformers then ties them in no case.

    False where there are no weights yet, or files that `find_tensors` refuses.
    """
    if not any((folder / name).is_file() for name in (SINGLE, INDEX)):
        return False
    try:
        # An index answers for most models, without a look at their shards.
        if not (folder / SINGLE).is_file() and not any(map(_is_head, _weight_map(folder))):
            return False
        tensors = find_tensors(folder)
    except UserError:
        return False
    heads = [tensor for name, tensor in tensors.items() if _is_head(name)]
    embeddings = [tensor for name, tensor in tensors.items() if name.endswith(EMBEDDINGS)]
    if len(heads) != 1 or len(embeddings) != 1:
        return False
    return not _same_values(heads[0], embeddings[0], heads[0].path.stat().st_mtime_ns)


def read_buffer(buffer: StoredBuffer, tensor: StoredTensor) -> StoredBuffer:
    """The buffer with the numbers of a file. Raises UserError where they are of another shape or kind."""
    shape = tensor.shape
    if shape != buffer.shape or tensor.kind not in WEIGHTS:
        raise UserError(
            f"{buffer.name} is {list(shape)} of {tensor.kind}; config.json makes it {list(buffer.shape)} numbers",
            where=str(tensor.path),
            fix="put the config.json there that was saved with these weights",
        )
    with tensor.path.open("rb") as file:
        numbers = _numbers(file, tensor, 0, math.prod(shape))
    return replace(buffer, dtype=DTYPES[tensor.kind], numbers=tuple(numbers.tolist()))


def _is_head(name: str) -> bool:
    return name in HEADS or name.endswith(tuple(f".{head}" for head in HEADS))


# A plan asks for the same config many times.
@lru_cache(maxsize=64)
def _same_values(first: StoredTensor, second: StoredTensor, mtime_ns: int) -> bool:
    """Whether two tensors hold the same numbers, in whatever formats. `mtime_ns`: of their files, for the cache."""
    import numpy as np

    del mtime_ns
    if first.shape != second.shape or first.kind not in WEIGHTS or second.kind not in WEIGHTS:
        return False
    if first.packing is not None or second.packing is not None:
        return first.packing == second.packing
    count = math.prod(first.shape)
    with first.path.open("rb") as first_file, second.path.open("rb") as second_file:
        for start in range(0, count, COMPARED_NUMBERS):
            size = min(COMPARED_NUMBERS, count - start)
            numbers = [
                _numbers(file, tensor, start, size)
                for file, tensor in ((first_file, first), (second_file, second))
            ]
            if not np.array_equal(*numbers):
                return False
    return True


def _numbers(file: BinaryIO, tensor: StoredTensor, start: int, size: int) -> Any:
    """The tensor's numbers from `start` on, as a float64 array: every stored format is exact in it."""
    import numpy as np

    width = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}[tensor.kind]
    file.seek(tensor.offset + start * width)
    content = file.read(size * width)
    if tensor.kind == "BF16":  # the upper half of a float32
        return (np.frombuffer(content, "<u2").astype("<u4") << 16).view("<f4").astype("f8")
    kind = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}[tensor.kind]
    return np.frombuffer(content, kind).astype("f8")

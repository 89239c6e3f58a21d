"""Models as files: the stored name of each parameter, and the file of each tensor. No torch.

Only complete safetensors files of a model's own folder count, and only their headers are read here.
"""

import json
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from bloomery.core.errors import UserError
from bloomery.hub import PICKLE_SUFFIXES
from bloomery.model.config import ModelConfig
from bloomery.model.counting import Shape, parameter_shapes

if TYPE_CHECKING:
    import torch


LARGEST_CONFIG = 16 * 2**20


def read_object(path: Path, *, fix: str) -> dict[str, Any]:
    """The JSON object in a config file of a model or an adapter. Raises UserError."""
    if path.stat().st_size > LARGEST_CONFIG:
        raise UserError(f"{path.name} is larger than 16 MiB", where=str(path), fix=fix)
    try:
        raw_object = json.loads(path.read_text(encoding="utf-8"))
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

    `stored_rows`: how many the stored tensor has. `transposed`: it is stored as [inputs, outputs].
    """

    name: str
    transposed: bool = False
    first: int = 0
    rows: int = 0
    stored_rows: int = 0

    def stored_shape(self, shape: Shape) -> Shape:
        """The shape of the stored tensor, for a parameter of `shape`."""
        stored_shape = (self.stored_rows, *shape[1:])
        return tuple(reversed(stored_shape)) if self.transposed else stored_shape


@dataclass(frozen=True)
class Storage:
    """`renamed`: prefixes of a name; `fused`: stored modules by the native modules that they contain, in order."""

    renamed: Mapping[str, str]
    fused: Mapping[tuple[str, ...], str]
    transposed: bool = False  # the matrices of its layers
    outermost: str = "model."  # the prefix that a model saved without its head lacks


PLAIN = Storage({}, {})
STORAGE: Mapping[str, Storage] = MappingProxyType(
    {
        "phi3": Storage(
            {},
            {
                ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"): "self_attn.qkv_proj",
                ("mlp.gate_proj", "mlp.up_proj"): "mlp.gate_up_proj",
            },
        ),
        "gpt2": Storage(
            {
                "model.embed_tokens": "transformer.wte",
                "model.embed_positions": "transformer.wpe",
                "model.norm": "transformer.ln_f",
                "model.layers": "transformer.h",
                "input_layernorm": "ln_1",
                "post_attention_layernorm": "ln_2",
                "self_attn.o_proj": "attn.c_proj",
                "mlp.up_proj": "mlp.c_fc",
                "mlp.down_proj": "mlp.c_proj",
            },
            {("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"): "attn.c_attn"},
            transposed=True,
            outermost="transformer.",
        ),
    }
)


# Planning an adapter asks for the same model hundreds of times.
@cache
def tensor_locations(config: ModelConfig) -> Mapping[str, TensorLocation]:
    """The location of each parameter by our name, in the order of `parameter_shapes`."""
    locations: dict[str, TensorLocation] = {}
    # The transformers backend lists its parameters itself, and none of them is fused or transposed.
    if config.transformers_backend is not None:
        for name, stored_name, shape in config.transformers_backend.parameters:
            locations[name] = TensorLocation(stored_name, rows=shape[0], stored_rows=shape[0])
        return MappingProxyType(locations)
    storage = STORAGE.get(config.family, PLAIN)
    shapes = parameter_shapes(config)

    def renamed(path: str) -> str:
        for prefix, stored_prefix in storage.renamed.items():
            if path == prefix or path.startswith(prefix + "."):
                return stored_prefix + path[len(prefix) :]
        return path

    for name, shape in shapes.items():
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
        for modules, fused_module in storage.fused.items():
            if module in modules:
                fused_modules = modules
                stored_module = fused_module
                break
        module_rows = [
            shapes[".".join(filter(None, (layer, fused, kind)))][0] for fused in fused_modules
        ]
        locations[name] = TensorLocation(
            name=".".join(filter(None, (renamed(layer), renamed(stored_module), kind))),
            transposed=storage.transposed and layer != "" and len(shape) == 2,
            first=sum(module_rows[: fused_modules.index(module)]),
            rows=shape[0],
            stored_rows=sum(module_rows),
        )
    return MappingProxyType(locations)


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


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its first byte, what safetensors calls its dtype, and its shape."""

    path: Path
    offset: int
    kind: str
    shape: tuple[int, ...]

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


def _weight_map(folder: Path) -> dict[str, str] | None:
    """The file of each tensor from the index; None for a model in one file."""
    # A folder without an index has one file, or no weights that are read here.
    index = folder / INDEX
    if not index.is_file():
        if (folder / SINGLE).is_file():
            return None
        if (pickle := _pickled(folder)) is not None:
            raise UserError(
                f"{pickle} is a pickle, which can run code when it is opened: only safetensors are read",
                where=str(folder),
                fix="use a copy of the model in safetensors, or save it again with save_pretrained",
            )
        raise UserError(
            "no model.safetensors is here",
            where=str(folder),
            fix="give the folder of a saved model",
        )

    # An index comes with a download: it may hold anything.
    if index.stat().st_size > LARGEST_INDEX:
        raise UserError("the index is larger than 256 MiB", where=str(index), fix=AGAIN)
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError("the index holds no weight_map", where=str(index), fix=AGAIN) from error
    if not isinstance(weight_map, dict) or not all(
        isinstance(file_name, str) for file_name in weight_map.values()
    ):
        raise UserError(
            "weight_map does not name a file for each tensor", where=str(index), fix=AGAIN
        )
    return weight_map


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
            raise UserError(problem, where=str(path), fix=f"save it as one of {', '.join(DTYPES)}")
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
    weight_map = _weight_map(folder)
    if weight_map is None:
        return _text_tensors(stored_tensors(inside(folder, SINGLE)))

    # The shards' own headers say what they hold. Of a tensor in two of them, nothing says which is
    # meant.
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
    return _text_tensors(tensors)


# Prefixes of the language model of a multimodal one, as published and as transformers 5 names it; then of the rest.
LANGUAGE = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
VISION = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
)


def _text_tensors(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """A multimodal model keeps its language model alone, under that model's own names."""
    if not any(name.startswith(tuple(LANGUAGE)) for name in tensors):
        return tensors
    text_tensors = {}
    for name, tensor in tensors.items():
        prefix = next((prefix for prefix in LANGUAGE if name.startswith(prefix)), "")
        if not name.startswith(VISION):
            text_tensors[LANGUAGE.get(prefix, "") + name.removeprefix(prefix)] = tensor
    return text_tensors


def stored_in(folder: Path, name: str) -> dict[str, StoredTensor]:
    """The tensors of one file of the folder. Raises UserError as `find_tensors` does."""
    return stored_tensors(inside(folder, name))


def refuse_whole_numbers(name: str, tensor: StoredTensor) -> None:
    """Raises UserError for a weight of whole numbers or truth values: a cast would train something else."""
    if tensor.kind not in WEIGHTS:
        problem = f"{name[:120]} is stored as {tensor.kind}, and weights are floating-point numbers"
        raise UserError(
            problem, where=str(tensor.path), fix=f"save it as one of {', '.join(WEIGHTS)}"
        )


def stored_parameters(
    folder: Path, config: ModelConfig, *, headless: bool = False
) -> dict[str, StoredTensor]:
    """Where each of our parameters lies (several may share a stored tensor). Reads headers alone.

    `headless`: the values head may be missing. Raises UserError when another tensor is missing, unexpected, or of
    another shape than in the config, or no floating-point numbers.
    """
    tensors = find_tensors(folder)
    shapes = parameter_shapes(config)
    locations = tensor_locations(config)
    expected_names = {location.name for location in locations.values()}

    # A model that was saved without its head lacks the outermost prefix in every name.
    if not expected_names & tensors.keys():
        prefix = STORAGE.get(config.family, PLAIN).outermost
        prefixed_tensors = {}
        for name, tensor in tensors.items():
            full_name = name if name.startswith("lm_head.") else prefix + name
            prefixed_tensors[full_name] = tensor
        tensors = prefixed_tensors

    # More tensors than the config has mean another architecture. Buffers that follow from the
    # config are no surplus, nor is the head's weight where the embedding is tied to it or a values
    # head replaces it.
    surplus_names = {
        name for name in tensors.keys() - expected_names if not name.endswith(COMPUTED)
    }
    if config.tie_embeddings or config.head == "values":
        surplus_names -= {"lm_head.weight", "embed_out.weight"}
    if surplus_names and expected_names <= tensors.keys():
        raise UserError(
            f"{min(surplus_names)} has no place in a {config.family} model",
            where=str(next(iter(tensors.values())).path),
            fix="config.json is of another architecture",
        )

    # Each parameter needs its tensor, in the shape that the config gives it and in floating-point
    # numbers.
    for name, location in locations.items():
        location_tensor = tensors.get(location.name)
        expected_shape = location.stored_shape(shapes[name])
        if location_tensor is None and headless and name == VALUES:
            continue
        if location_tensor is None and f"{location.name}_packed" in tensors:
            raise UserError(
                "the weights are quantized (compressed-tensors), which Bloomery does not read",
                where=str(folder),
                fix="use the model that it was made from, or transformers",
            )
        if location_tensor is None:
            raise UserError(
                f"{location.name} is missing", where=str(folder), fix="save or download it again"
            )
        if location_tensor.shape != expected_shape:
            raise UserError(
                f"{location.name} is {list(location_tensor.shape)}; "
                f"config.json makes it {list(expected_shape)}",
                where=str(location_tensor.path),
                fix="put the config.json there that was saved with these weights",
            )
        refuse_whole_numbers(location.name, location_tensor)
    return {
        name: tensors[location.name]
        for name, location in locations.items()
        if location.name in tensors
    }

"""Models as files: the stored name of each parameter, and the file of each tensor. Only
whole safetensors files of a model's own folder count, and only their headers are read here. No torch.
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
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        # Python's advice on long numbers is not for our reader
        reason = str(error).partition(";")[0]
        raise UserError(f"{path.name} is not JSON: {reason}", where=str(path), fix=fix) from error
    if not isinstance(found, dict):
        raise UserError(f"{path.name} holds no object", where=str(path), fix=fix)
    return found


@dataclass(frozen=True)
class TensorLocation:
    """A stored tensor, and the rows of it that are ours; `transposed`: it is stored as [inputs, outputs]."""

    name: str
    transposed: bool = False
    first: int = 0
    rows: int = 0
    of: int = 0

    @property
    def whole(self) -> bool:
        return self.rows == self.of

    def stored_shape(self, shape: Shape) -> Shape:
        """The shape of the stored tensor, for a parameter of `shape`."""
        whole = (self.of, *shape[1:])
        return tuple(reversed(whole)) if self.transposed else whole


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


@cache  # planning an adapter asks for the same model hundreds of times
def places(config: ModelConfig) -> Mapping[str, TensorLocation]:
    """By the name of our parameter, in the order of `parameter_shapes`."""
    if config.transformers_backend is not None:
        return MappingProxyType(
            {
                ours: TensorLocation(theirs, rows=shape[0], of=shape[0])
                for ours, theirs, shape in config.transformers_backend.parameters
            }
        )
    storage = STORAGE.get(config.family, PLAIN)
    shapes = parameter_shapes(config)

    def renamed(path: str) -> str:
        for ours, theirs in storage.renamed.items():
            if path == ours or path.startswith(ours + "."):
                return theirs + path[len(ours) :]
        return path

    found = {}
    for name, shape in shapes.items():
        path, _, kind = name.rpartition(".")  # model.layers.0.mlp.up_proj, weight
        layer = ""
        module = path
        if path.startswith("model.layers."):
            parts = path.split(".")
            layer = ".".join(parts[:3])
            module = ".".join(parts[3:])
        together, stored = next(
            ((p, s) for p, s in storage.fused.items() if module in p), ((module,), module)
        )
        rows = [shapes[".".join(filter(None, (layer, part, kind)))][0] for part in together]
        target = ".".join(filter(None, (renamed(layer), renamed(stored), kind)))
        transposed = storage.transposed and layer != "" and len(shape) == 2
        found[name] = TensorLocation(
            target, transposed, sum(rows[: together.index(module)]), shape[0], sum(rows)
        )
    return MappingProxyType(found)


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
class Stored:
    """A tensor in a file: its first byte, what safetensors calls its dtype, and its shape."""

    path: Path
    offset: int
    kind: str
    shape: tuple[int, ...]

    @property
    def dtype(self) -> "torch.dtype":
        import torch

        found: torch.dtype = getattr(torch, DTYPES[self.kind])
        return found


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
    if index.stat().st_size > LARGEST_INDEX:
        raise UserError("the index is larger than 256 MiB", where=str(index), fix=AGAIN)
    try:
        raw_config = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError("the index holds no weight_map", where=str(index), fix=AGAIN) from error
    if not isinstance(raw_config, dict) or not all(
        isinstance(name, str) for name in raw_config.values()
    ):
        raise UserError(
            "weight_map does not name a file for each tensor", where=str(index), fix=AGAIN
        )
    return raw_config


def inside(folder: Path, name: str) -> Path:
    """A plain file name; a link may only lead to a file of the same folder or of the Hub's cache next to it."""
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


def stored_tensors(path: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file. Raises UserError when it is damaged: the safetensors library checks its header
    and length.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        problem = f"the file cannot be read as safetensors: {error}"[:200]
        raise UserError(problem, where=str(path), fix=AGAIN) from error

    def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """The library keeps one of two entries of a name; which one, each reader decides for itself."""
        entries = dict(pairs)
        if len(entries) < len(pairs):
            (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
            raise UserError(f"{twice[:80]!r} is in the header twice", where=str(path), fix=AGAIN)
        return entries

    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length), object_pairs_hook=each_once)
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            problem = f"{name} is stored as {entry['dtype']}, which Bloomery cannot read"
            raise UserError(problem, where=str(path), fix=f"save it as one of {', '.join(DTYPES)}")
    start = 8 + length
    return {
        name: Stored(path, start + entry["data_offsets"][0], entry["dtype"], tuple(entry["shape"]))
        for name, entry in header.items()
    }


def find_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of a model folder: `model.safetensors`, or the shards that its index names.

    Raises UserError for a missing file, a shard outside the folder, a tensor in two shards, or pickled weights.
    """
    raw_config = _weight_map(folder)
    if raw_config is None:
        return _text_tensors(stored_tensors(inside(folder, SINGLE)))
    found: dict[str, Stored] = {}
    for name in sorted(set(raw_config.values())):
        tensors = stored_tensors(inside(folder, name))
        if twice := found.keys() & tensors.keys():
            raise UserError(f"{min(twice)} is in two shards", where=str(folder / name), fix=AGAIN)
        found |= tensors
    if missing := raw_config.keys() - found.keys():
        raise UserError(
            f"{min(missing)} is in the index but in no shard", where=str(folder / INDEX), fix=AGAIN
        )
    return _text_tensors(found)


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


def _text_tensors(found: dict[str, Stored]) -> dict[str, Stored]:
    """Those of a multimodal model's language model under the names that it has alone; any other model's as they are."""
    if not any(name.startswith(tuple(LANGUAGE)) for name in found):
        return found
    named = {}
    for name, stored in found.items():
        prefix = next((prefix for prefix in LANGUAGE if name.startswith(prefix)), "")
        if not name.startswith(VISION):
            named[LANGUAGE.get(prefix, "") + name.removeprefix(prefix)] = stored
    return named


def stored_in(folder: Path, name: str) -> dict[str, Stored]:
    """The tensors of one file of the folder. Raises UserError as `find_tensors` does."""
    return stored_tensors(inside(folder, name))


def refuse_whole_numbers(name: str, stored: Stored) -> None:
    """Raises UserError for a weight of whole numbers or truth values: a cast would train something else."""
    if stored.kind not in WEIGHTS:
        problem = f"{name[:120]} is stored as {stored.kind}, and weights are floating-point numbers"
        raise UserError(
            problem, where=str(stored.path), fix=f"save it as one of {', '.join(WEIGHTS)}"
        )


def stored_parameters(
    folder: Path, config: ModelConfig, *, headless: bool = False
) -> dict[str, Stored]:
    """Where each of our parameters lies (several may share a stored tensor). Reads headers alone.

    `headless`: the values head may be missing. Raises UserError when another tensor is missing, unexpected, or of
    another shape than in the config, or no floating-point numbers.
    """
    found = find_tensors(folder)
    shapes = parameter_shapes(config)
    where = places(config)
    expected_names = {place.name for place in where.values()}
    # a model saved without its head lacks the outermost prefix
    if not expected_names & found.keys():
        prefix = STORAGE.get(config.family, PLAIN).outermost
        found = {
            name if name.startswith("lm_head.") else prefix + name: stored
            for name, stored in found.items()
        }
    surplus = {name for name in found.keys() - expected_names if not name.endswith(COMPUTED)}
    surplus -= (
        {"lm_head.weight", "embed_out.weight"}
        if config.tie_embeddings or config.head == "values"
        else set()
    )
    if surplus and expected_names <= found.keys():
        raise UserError(
            f"{min(surplus)} has no place in a {config.family} model",
            where=str(next(iter(found.values())).path),
            fix="config.json is of another architecture",
        )
    for name, place in where.items():
        stored = found.get(place.name)
        expected = place.stored_shape(shapes[name])
        if stored is None and headless and name == VALUES:
            continue
        if stored is None and f"{place.name}_packed" in found:
            raise UserError(
                "the weights are quantized (compressed-tensors), which Bloomery does not read",
                where=str(folder),
                fix="use the model that it was made from, or transformers",
            )
        if stored is None:
            raise UserError(
                f"{place.name} is missing", where=str(folder), fix="save or download it again"
            )
        if stored.shape != expected:
            raise UserError(
                f"{place.name} is {list(stored.shape)}; config.json makes it {list(expected)}",
                where=str(stored.path),
                fix="put the config.json there that was saved with these weights",
            )
        refuse_whole_numbers(place.name, stored)
    return {name: found[place.name] for name, place in where.items() if place.name in found}

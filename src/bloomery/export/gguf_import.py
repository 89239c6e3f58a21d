"""A GGUF file as a folder in Hugging Face format, with float weights.

The header is read here, within bounds that follow from the length of the file: a file cannot make the reader wait, take
memory or leave its own bytes. Only then does the gguf package see tensors, to dequantize them.
"""

import math
import mmap
import re
import struct
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from bloomery.core.errors import UserError
from bloomery.core.files import open_input
from bloomery.data.tokenizer.roles import added_around
from bloomery.data.tokenizer.sentencepiece import bpe_of_pieces
from bloomery.data.tokenizer.tokenizer import JsonBackend, Tokenizer
from bloomery.export.gguf_experts import expert_config, stated_weights
from bloomery.export.gguf_format import (
    ALIGNMENT,
    CONTROL,
    NORMAL,
    NOT_TURNING,
    PRE_TOKENIZERS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    GgufTensor,
    gguf_library,
    gguf_tensors,
    splits,
)
from bloomery.export.layouts import DTYPES, Exported, draft_of, finished_export
from bloomery.facts.config import ModelConfig
from bloomery.facts.counting import (
    Rotation,
    is_expert_stack,
    layers,
    parameter_shapes,
)
from bloomery.facts.families import FAMILIES
from bloomery.facts.family import Family
from bloomery.facts.gguf_graphs import PLAIN_GRAPH, GgufGraph
from bloomery.facts.gguf_projectors import GGUF_PROJECTORS
from bloomery.facts.hf_config import config_from_hf
from bloomery.model.io.parameters import dtype_in, unstacked
from bloomery.model.io.weights import write_json, write_model_piecewise
from bloomery.model.rope import frequencies

Array = np.ndarray[Any, Any]
Json = dict[str, Any]
_AGAIN = "download the file again, from a source that you trust"
# Bytes of a value, and its code in `struct`, by the number of its type.
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING = 8
_ARRAY = 9
MOST_KEYS = 4096
MOST_TENSORS = 2**17
# of all arrays together: a Python object each; Gemma's 262,144 tokens take 1.3 million
MOST_ENTRIES = 2**22
MOST_HEADER = 2**26  # bytes of strings and numbers that are kept
LONGEST_NAME = 256
MOST_LAYERS = 2**12
# `general.file_type`, and the type of the same size that no tensor of such a file has: read as that one, its bytes are
# other numbers, and nothing else in the file tells.
_FOREIGN_TYPE = {1: "BF16", 32: "F16", 2: "IQ4_NL", 25: "Q4_0"}


# Graphs of language models that see pictures, which compute texts as the graphs for text do.
PLAIN_GRAPHS = {
    graph: plain_graph
    for projector in GGUF_PROJECTORS.values()
    for plain_graph, graph in projector.text_graph.items()
}


@dataclass(frozen=True)
class StoredGgufTensor:
    """A tensor of the file as it is stored; `shape`: the fastest dimension first, as in the file."""

    data: Array
    tensor_type: Any
    shape: tuple[int, ...]
    name: str

    def rows(self, start: int, stop: int) -> "StoredGgufTensor":
        """Some rows of a matrix, or of all matrices of a stack below each other, or some numbers of a vector."""
        if len(self.shape) == 1:
            bytes_per_number = len(self.data) // self.shape[0]
            data = self.data[start * bytes_per_number : stop * bytes_per_number]
            return StoredGgufTensor(
                data, self.tensor_type, (len(data) // bytes_per_number,), self.name
            )
        data = self.data.reshape(-1, self.data.shape[-1])[start:stop]
        return StoredGgufTensor(data, self.tensor_type, (self.shape[0], len(data)), self.name)


@final
class _Header:
    """A cursor over the bytes of a file, every step of which is checked."""

    def __init__(self, content: Any, path: Path) -> None:
        self.content = content
        self.path = path
        self.position = 0
        self.kept = 0
        self.entries = 0

    def refuse(self, problem: str) -> UserError:
        return UserError(f"not a valid GGUF file: {problem}", where=str(self.path), fix=_AGAIN)

    def take(self, size: int) -> bytes:
        if size > len(self.content) - self.position:
            raise self.refuse(
                f"{size:,} bytes are stated at {self.position:,}, and the file ends before"
            )
        self.kept += size
        if self.kept > MOST_HEADER:
            raise self.refuse(f"its header is larger than {MOST_HEADER:,} bytes")
        self.position += size
        piece: bytes = self.content[self.position - size : self.position]
        return piece

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize(code)))[0]

    def string(self, longest: int = MOST_HEADER) -> str:
        size = self.number("Q")
        if size > longest:
            raise self.refuse(f"a text of {size:,} bytes is stated at {self.position:,}")
        try:
            return self.take(size).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.refuse(f"a text before {self.position:,} is not UTF-8") from error

    def value(self) -> Any:
        kind = self.number("I")
        if kind == _STRING:
            return self.string()
        if kind in _CODES:
            return self.number(_CODES[kind])
        if kind != _ARRAY:
            raise self.refuse(f"a value has the unknown type {kind}")
        inner = self.number("I")
        count = self.number("Q")
        if inner == _ARRAY:
            raise self.refuse("an array holds arrays")
        least_bytes = 8 if inner == _STRING else _SIZES.get(inner)
        if least_bytes is None:
            raise self.refuse(f"an array has the unknown type {inner}")
        self.entries += count
        most_bytes = len(self.content) - self.position
        if count * least_bytes > most_bytes or self.entries > MOST_ENTRIES:
            raise self.refuse(f"an array of {count:,} entries is stated at {self.position:,}")
        if inner == _STRING:
            return [self.string() for _ in range(count)]
        return list(struct.unpack(f"<{count}{_CODES[inner]}", self.take(count * least_bytes)))


def read_gguf(path: Path) -> tuple[Json, dict[str, StoredGgufTensor]]:
    """The metadata and the tensors, which stay in the file until they are used. Raises UserError for a file whose
    header is damaged or made to harm. As in llama.cpp, each tensor begins where the one before it ends; the last one
    ends with the file.
    """
    with open_input(path) as file:
        file_size = path.stat().st_size
        if file_size < 24:
            raise UserError("not a valid GGUF file: it is too short", where=str(path), fix=_AGAIN)
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    # The first 24 bytes: a tensor takes at least 32 bytes of header, and a key 13.
    header = _Header(content, path)
    if header.take(4) != b"GGUF":
        raise header.refuse("it does not begin with GGUF")
    if (version := header.number("I")) not in (2, 3):
        raise header.refuse(f"its version is {version}, and 2 and 3 are known")
    num_tensors = header.number("Q")
    num_keys = header.number("Q")
    most_tensors = min(MOST_TENSORS, file_size // 32)
    if num_tensors > most_tensors or num_keys > min(MOST_KEYS, file_size // 13):
        raise header.refuse(
            f"{num_tensors:,} tensors and {num_keys:,} keys are stated in {file_size:,} bytes"
        )

    # The metadata, then name, shape, type and place of each tensor.
    metadata: Json = {}
    for _ in range(num_keys):
        key = header.string(LONGEST_NAME)
        if key in metadata:
            raise header.refuse(f"{key} is stated twice")
        metadata[key] = header.value()
    infos = [_tensor_info(header) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", ALIGNMENT)
    is_power_of_two = type(alignment) is int and alignment > 0 and not alignment & (alignment - 1)
    if not is_power_of_two or not 8 <= alignment <= 2**16:
        raise header.refuse(f"its alignment is {str(alignment)[:20]}")

    # The tensors: known types and whole blocks, one after the other, up to the end of the file.
    data_start = -(-header.position // alignment) * alignment
    library = gguf_library()
    types_by_number = {int(kind): kind for kind in library.GGMLQuantizationType}
    memory = np.frombuffer(content, dtype=np.uint8)
    file_type = metadata.get("general.file_type")
    foreign_type = _FOREIGN_TYPE.get(file_type) if isinstance(file_type, int) else None
    # Gemma 3's mmproj has one tensor in float16 in files of any type.
    if metadata.get("general.architecture") == "clip":
        foreign_type = None
    tensors: dict[str, StoredGgufTensor] = {}
    tensors_end = 0
    for name, shape, type_number, offset in infos:
        if type_number not in types_by_number:
            raise header.refuse(f"{name} has the unknown type {type_number}")
        if name in tensors:
            raise header.refuse(f"{name} is stated twice")
        tensor_type = types_by_number[type_number]
        block_numbers, block_bytes = library.GGML_QUANT_SIZES[tensor_type]
        if not shape or 0 in shape or shape[0] % block_numbers:
            raise header.refuse(f"{name} has the shape {list(shape)}")
        if offset != tensors_end:
            raise header.refuse(
                f"{name} is stated at {offset:,}; the tensors before it end at {tensors_end:,}"
            )
        num_bytes = math.prod(shape) // block_numbers * block_bytes
        if data_start + offset + num_bytes > file_size:
            raise header.refuse(f"{name} is outside the file")
        if tensor_type.name == foreign_type:
            raise header.refuse(
                f"{name} has the type {foreign_type}, which no tensor of such a file has"
            )
        row_bytes = shape[0] // block_numbers * block_bytes
        data = memory[data_start + offset :][:num_bytes]
        stored = data.reshape((*reversed(shape[1:]), row_bytes))
        tensors[name] = StoredGgufTensor(stored, tensor_type, shape, name)
        tensors_end = offset + -(-num_bytes // alignment) * alignment
    surplus_bytes = file_size - data_start - tensors_end
    if tensors and surplus_bytes > 0:
        raise header.refuse(f"{surplus_bytes:,} bytes follow the last tensor")
    return metadata, tensors


def _tensor_info(header: _Header) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape, number of the type, and offset."""
    name = header.string(LONGEST_NAME)
    dimensions = header.number("I")
    if dimensions > 4:
        raise header.refuse(f"{name[:80]} has {dimensions:,} dimensions")
    shape = tuple(header.number("Q") for _ in range(dimensions))
    return name, shape, header.number("I"), header.number("Q")


def dequantized_tensor(block: Any) -> Tensor:
    """Float32, of a StoredGgufTensor or of the gguf package's own. Raises UserError for numbers that are not finite."""
    library = gguf_library()
    data = np.ascontiguousarray(block.data)
    # stored as bytes here, typed there
    if data.dtype == np.uint8 and int(block.tensor_type) in (0, 1):
        data = data.view(np.float32 if int(block.tensor_type) == 0 else np.float16)
    try:
        with np.errstate(all="ignore"):  # what is not finite is refused below
            values = library.quants.dequantize(data, block.tensor_type)
    except (
        NotImplementedError,
        ValueError,
    ) as error:  # a type it only names; rows that are no whole blocks
        problem = f"the gguf package cannot dequantize {block.tensor_type.name}"
        raise UserError(
            problem, where="the file", fix="use a file of type f16, q8_0, q4_0 or a K type"
        ) from error
    if not np.isfinite(values).all():
        name = getattr(block, "name", "a tensor")
        raise UserError(f"{name} holds numbers that are not finite", where="the file", fix=_AGAIN)
    shape = [int(size) for size in reversed(block.shape)]
    return torch.from_numpy(np.array(values, dtype=np.float32).reshape(shape))


# The config


def _graph_named(family: Family, name: str) -> GgufGraph:
    graphs = (family.gguf, family.gguf_mixture)
    return next(graph for graph in graphs if graph is not None and graph.name == name)


def _family_of(architecture: str, names: list[str], fact: Callable[..., Any]) -> str:
    """Of several families with one graph, the one whose models have what the file states: the first that has experts,
    weighed as there, a window in some layers, and a shared expert, or none of them.
    """
    has_experts = bool(fact("expert_count"))
    has_window = fact("attention.sliding_window") is not None
    has_shared = fact("expert_shared_feed_forward_length") is not None

    def fits(name: str) -> tuple[bool, bool, bool]:
        graph = _graph_named(FAMILIES[name], architecture)
        known = graph.experts
        fits_experts = not has_experts
        if known is not None:
            fits_experts = stated_weights(fact, known) in known.weights
            fits_experts = fits_experts if has_experts else known.optional
        return (
            fits_experts,
            (graph.window_period > 0) == has_window,
            (FAMILIES[name].gguf_mixture is not None) == has_shared,
        )

    return max(names, key=fits)


def config_of(metadata: Json, tensors: Mapping[str, StoredGgufTensor], path: Path) -> ModelConfig:
    """Raises UserError for an architecture or a value that is not known."""
    stated_name = metadata.get("general.architecture")
    architecture = PLAIN_GRAPHS.get(str(stated_name), stated_name)
    # Of several families with one graph the first stands for them, of those whose layers have a window if the file
    # states one: it does not say more.
    names_by_graph: dict[str, list[str]] = {}
    for name, known in FAMILIES.items():
        for known_graph in (known.gguf, known.gguf_mixture):
            if known_graph is not None:
                names_by_graph.setdefault(known_graph.name, []).append(name)
    if not isinstance(architecture, str) or architecture not in names_by_graph:
        problem = f"{str(architecture)[:40]!r} is not a supported GGUF architecture"
        fix = f"supported: {', '.join(sorted(names_by_graph))}"
        raise UserError(problem, where=str(path), fix=fix)

    def fact(name: str, default: Any = None) -> Any:
        return metadata.get(f"{stated_name}.{name}", default)

    family_name = _family_of(architecture, names_by_graph[architecture], fact)
    family = FAMILIES[family_name]
    graph = _graph_named(family, architecture)

    # Sizes, which config_from_hf checks: until then a damaged file may state anything here.
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise UserError("token_embd.weight is missing", where=str(path), fix=_AGAIN)
    num_layers = fact("block_count")
    num_heads = fact("attention.head_count")
    hidden_size = fact("embedding_length")
    mlp_width = fact("feed_forward_length")
    if graph.states_windows and isinstance(mlp_width, list):
        mlp_width = next(iter(mlp_width), None)
    if isinstance(num_heads, list) or isinstance(mlp_width, list):
        raise UserError(
            "its layers differ in their sizes", where=str(path), fix="choose another model"
        )
    are_sizes = type(num_heads) is int and type(hidden_size) is int and num_heads > 0
    width_per_head = hidden_size // num_heads if are_sizes else None
    head_dim = fact("attention.key_length", width_per_head)
    kv_heads = fact("attention.head_count_kv", num_heads)
    latent_keys = _latent_config(fact) if "latent_attention" in graph.free else {}
    if latent_keys:
        kv_heads = num_heads
        head_dim = latent_keys["qk_rope_head_dim"]
    heads_by_layer: list[Any] | None = None
    if "mixers" in graph.free and isinstance(kv_heads, list):  # of other layers than attention 0
        heads_by_layer = kv_heads
        kv_heads = next((count for count in heads_by_layer if count), None)
    norm_eps = fact("attention.layer_norm_rms_epsilon", fact("attention.layer_norm_epsilon"))
    if isinstance(norm_eps, float):
        norm_eps = float(f"{norm_eps:.6g}")  # 1e-05 as float32 is 9.9999997e-06
    values = {
        "vocab_size": embedding.shape[-1],
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "intermediate_size": mlp_width,
        "num_heads": num_heads,
        "head_dim": head_dim,
        "num_kv_heads": kv_heads,
        "max_positions": fact("context_length"),
        "norm_eps": norm_eps,
    }

    # A config.json of the family: sizes, biases as the tensors show them, special tokens.
    raw_config: Json = {"model_type": family_name}
    for name, hf_name in family.keys.items():
        if name in values:
            raw_config[hf_name] = values[name]
    for name, hf_name in family.flags.items():
        # The first fact that a key stands for decides.
        shown = _BIASED_TENSORS.get(name)
        graph_value = {**PLAIN_GRAPH, **graph.fixed}.get(name)
        is_set = graph_value if shown is None else f"blk.0.{shown}.bias" in tensors
        raw_config.setdefault(hf_name, is_set)
    if "qk_norm" in graph.free:
        raw_config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in tensors
    if family.gguf_mixture is not None:  # Granite 4, which may also have Mamba, or not rotate
        raw_config["position_embedding_type"] = "rope"
        if type(num_layers) is int:
            raw_config["layer_types"] = ["full_attention"] * min(num_layers, MOST_LAYERS)
    if heads_by_layer is not None:
        raw_config["layer_types"] = [
            "full_attention" if count else "conv" for count in heads_by_layer
        ]
    if graph.has_delta_nets:
        raw_config |= _delta_nets(fact)
    if graph.experts is not None:
        _refuse_other_experts(fact, tensors, path)
    has_choice_bias = any(name.endswith(".exp_probs_b.bias") for name in tensors)
    raw_config |= expert_config(fact, graph, has_choice_bias=has_choice_bias) | latent_keys
    raw_config["tie_word_embeddings"] = "output.weight" not in tensors
    for role, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        raw_config[f"{role}_token_id"] = metadata.get(f"tokenizer.ggml.{name}_token_id")

    # What the graph of a family fixes, or llama.cpp assumes where the file says nothing.
    attention_softcap, final_softcap = graph.default_softcaps or (None, None)
    if "attention_softcap" in graph.free:
        raw_config["attn_logit_softcapping"] = fact("attn_logit_softcapping", attention_softcap)
    if "final_softcap" in graph.free:
        raw_config["final_logit_softcapping"] = fact("final_logit_softcapping", final_softcap)
    raw_config |= {key: fact(name) for key, name in graph.keys.items()}
    if "norm_placement" in graph.free:
        raw_config["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in tensors
    if "local_rope_theta" in graph.free and not graph.states_windows:
        theta = fact("rope.freq_base", 10000.0) if graph.plain_window_rotation else 10000.0
        raw_config["rope_local_base_freq"] = fact("rope.freq_base_swa", theta)
    raw_config["sliding_window"] = None
    if graph.window_period:
        raw_config["sliding_window"] = fact("attention.sliding_window", graph.default_window)
        is_largest = num_layers == graph.full_scale_layers
        scale_width = width_per_head if is_largest and are_sizes else head_dim
        raw_config["query_pre_attn_scalar"] = scale_width
    if graph.unrotated_period and type(num_layers) is int:
        raw_config["no_rope_layers"] = [
            int((layer + 1) % graph.unrotated_period != 0)
            for layer in range(min(num_layers, MOST_LAYERS))
        ]
    if graph.states_windows:
        raw_config |= _stated_windows(fact, tensors, path)
    elif family.facts.get("positions") != "learned":
        # llama.cpp always rounds YaRN's limits, and takes a model in which they are not for one in which they are.
        raw_config |= _rope(fact, tensors, head_dim, path, truncates=not graph.rounds_yarn)
    if graph.plain_window_rotation and family.has_local_rope:
        plain = {"rope_type": "default", "rope_theta": raw_config["rope_theta"]}
        scaled = raw_config["rope_parameters"]
        raw_config["rope_parameters"] = {"full_attention": scaled, "sliding_attention": plain}
    if "query_scale" in graph.free:
        growth = {"llama_4_scaling_beta": fact("attention.temperature_scale", 0.0)}
        raw_config["rope_parameters"] |= growth
    return config_from_hf(raw_config, where=str(path))


def _refuse_other_experts(
    fact: Callable[..., Any], tensors: Mapping[str, StoredGgufTensor], path: Path
) -> None:
    """Raises UserError where the metadata states more layers or experts than the file has: each would get a name before
    any is missed.
    """
    count = fact("expert_count", 0)
    stacks = [each for name, each in tensors.items() if name.endswith(".ffn_down_exps.weight")]
    num_layers = fact("block_count")
    if count and type(num_layers) is int and num_layers > len(tensors):
        problem = f"{num_layers:,} layers are stated, and the file has {len(tensors):,} tensors"
        raise UserError(problem, where=str(path), fix=_AGAIN)
    if count and not stacks:
        problem = (
            f"{str(count)[:20]} experts are stated, and the file has no blk.N.ffn_down_exps.weight"
        )
        raise UserError(problem, where=str(path), fix=_AGAIN)
    for stack in stacks:
        if len(stack.shape) != 3 or stack.shape[-1] != count:
            shape = list(reversed(stack.shape))
            problem = f"{stack.name} is {shape}; its metadata makes it of {str(count)[:20]} experts"
            raise UserError(problem, where=str(path), fix=_AGAIN)


def _latent_config(fact: Callable[..., Any]) -> Json:
    """The keys of config.json about multi-head latent attention."""
    rotary_width = fact("rope.dimension_count")
    key_width = fact("attention.key_length_mla")
    are_sizes = type(rotary_width) is int and type(key_width) is int
    return {
        "q_lora_rank": fact("attention.q_lora_rank") or None,
        "kv_lora_rank": fact("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotary_width,
        "qk_nope_head_dim": key_width - rotary_width if are_sizes else None,
        "v_head_dim": fact("attention.value_length_mla"),
    }


def _stated_windows(fact: Any, tensors: Mapping[str, StoredGgufTensor], path: Path) -> Json:
    """The keys of config.json of a model whose metadata states windows and sizes one by one."""
    pattern = fact("attention.sliding_window_pattern")
    if (
        not isinstance(pattern, list)
        or len(pattern) != fact("block_count")
        or set(pattern) != {False, True}
    ):
        problem = "its metadata does not state which of its layers have a window"
        raise UserError(problem, where=str(path), fix="choose another model")
    kv_heads = fact("attention.head_count_kv")
    mlp_widths = fact("feed_forward_length")

    def kv_heads_of(layer: int) -> Any:
        if not isinstance(kv_heads, list):
            return kv_heads
        return kv_heads[layer] if layer < len(kv_heads) else None

    full = pattern.index(False)
    factors = tensors.get("rope_freqs.weight")
    turns = torch.ones(1) if factors is None else dequantized_tensor(factors)
    num_turning = int((turns < NOT_TURNING / 2).sum())
    share = num_turning / turns.numel()
    if int(share * 2 * turns.numel() // 2) != num_turning:  # rounded down, as transformers counts
        share = (num_turning + 0.5) / turns.numel()
    theta = fact("rope.freq_base", 10000.0)
    return {
        "layer_types": ["sliding_attention" if has else "full_attention" for has in pattern],
        "sliding_window": fact("attention.sliding_window"),
        "head_dim": fact("attention.key_length_swa"),
        "global_head_dim": fact("attention.key_length"),
        "num_key_value_heads": kv_heads_of(pattern.index(True)),
        "num_global_key_value_heads": kv_heads_of(full),
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in tensors,
        "num_kv_shared_layers": fact("attention.shared_kv_layers", 0),
        "use_double_wide_mlp": isinstance(mlp_widths, list) and len(set(mlp_widths)) > 1,
        "hidden_size_per_layer_input": fact("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": tensors["token_embd.weight"].shape[-1],
        "rope_parameters": {
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": fact("rope.freq_base_swa", 10000.0),
            },
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": theta,
                "partial_rotary_factor": share,
            },
        },
    }


def _delta_nets(fact: Any) -> Json:
    """The keys of config.json about delta nets."""
    num_value_heads = fact("ssm.time_step_rank")
    inner_size = fact("ssm.inner_size")
    are_sizes = type(num_value_heads) is int and type(inner_size) is int and num_value_heads > 0
    return {
        "full_attention_interval": fact("full_attention_interval", 4),
        "linear_conv_kernel_dim": fact("ssm.conv_kernel"),
        "linear_num_key_heads": fact("ssm.group_count"),
        "linear_num_value_heads": num_value_heads,
        "linear_key_head_dim": fact("ssm.state_size"),
        "linear_value_head_dim": inner_size // num_value_heads if are_sizes else None,
    }


_BIASED_TENSORS = {"attention_bias": "attn_q", "output_bias": "attn_output", "mlp_bias": "ffn_up"}


def _rope(
    fact: Any,
    tensors: Mapping[str, StoredGgufTensor],
    head_dim: Any,
    path: Path,
    *,
    truncates: bool,
) -> Json:
    """The keys of config.json about rotary positions."""
    theta = fact("rope.freq_base", 10000.0)
    context = fact("context_length")
    rotary_width = fact("rope.dimension_count", head_dim)
    original_context = fact("rope.scaling.original_context_length", context)
    scaling_type = fact("rope.scaling.type", "none")
    factor = fact("rope.scaling.factor", 1.0)
    raw_config: Json = {"rope_theta": theta}
    if rotary_width != head_dim and head_dim:
        raw_config["partial_rotary_factor"] = rotary_width / head_dim

    # Llama 3's and LongRoPE's scaling are tensors of factors, the others are keys.
    factors = {
        kind: [float(number) for number in dequantized_tensor(tensors[name])]
        for kind, name in (
            ("all", "rope_freqs.weight"),
            ("short", "rope_factors_short.weight"),
            ("long", "rope_factors_long.weight"),
        )
        if name in tensors
    }
    scaling: Json = {"rope_type": "default"}
    attention_factor = fact("rope.scaling.attn_factor")
    if scaling_type == "linear":
        scaling = {"rope_type": "linear", "factor": factor}
    elif scaling_type == "yarn":
        scaling = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original_context,
            "beta_fast": fact("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": fact("rope.scaling.yarn_beta_slow", 1.0),
            "truncate": fact("rope.scaling.yarn_truncate", truncates),
        }
        log_multiplier = fact("rope.scaling.yarn_log_multiplier")
        if isinstance(log_multiplier, float):  # a tenth of it, of latent attention
            mscale = float(f"{10 * log_multiplier:.6g}")
            scaling |= {"mscale": mscale, "mscale_all_dim": mscale}
        # llama.cpp multiplies the stated factor by YaRN's own.
        if attention_factor is not None and isinstance(factor, float) and factor > 0:
            own_factor = 0.1 * math.log(factor) + 1.0
            scaling["attention_factor"] = attention_factor * own_factor
    elif "short" in factors and "long" in factors:
        raw_config["original_max_position_embeddings"] = original_context
        scaling = {
            "rope_type": "longrope",
            "short_factor": factors["short"],
            "long_factor": factors["long"],
            "factor": context / original_context,
            "attention_factor": 1.0 if attention_factor is None else attention_factor,
        }
    elif any(abs(number - 1) > 1e-6 for number in factors.get("all", [])):
        scaling = _llama3(factors["all"], theta, context)
    elif scaling_type not in ("none", "longrope"):
        raise UserError(
            f"RoPE scaling {str(scaling_type)[:40]!r} is not known",
            where=str(path),
            fix="choose another model",
        )
    raw_config["rope_parameters"] = {"rope_theta": theta, **scaling}
    return raw_config


def _llama3(factors: list[float], theta: float, context: int) -> Json:
    """Llama 3's settings that give these factors; else LongRoPE's, which state any."""
    for factor in (8.0, 32.0):
        stated = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        sizes = {
            "vocab_size": 8,
            "hidden_size": 2 * len(factors),
            "num_attention_heads": 1,
            "num_hidden_layers": 1,
            "intermediate_size": 8,
            "rope_theta": theta,
            "max_position_embeddings": context,
        }
        config = config_from_hf({"model_type": "llama", **sizes, "rope_scaling": stated})
        rotation = Rotation(width=2 * len(factors), theta=theta, scaling=config.rope_scaling)
        plain = frequencies(config, replace(rotation, scaling=None), 0)
        stretched = frequencies(config, rotation, 0)
        if np.allclose((plain / stretched).numpy(), factors, rtol=1e-4):
            return stated
    return {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "factor": 1.0,
        "original_max_position_embeddings": context,
        "attention_factor": 1.0,
    }


# The tokenizer


def tokenizer_of(metadata: Json, path: Path) -> Tokenizer:
    """Raises UserError for a tokenizer that is not known."""

    def refuse(problem: str) -> UserError:
        fix = "choose a file with a BPE or SentencePiece tokenizer"
        return UserError(problem, where=str(path), fix=fix)

    def key(name: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{name}", default)

    kind = key("model")
    tokens = key("tokens")
    types = key("token_type")
    if kind not in ("gpt2", "llama", "gemma4"):
        raise refuse(f"tokenizer {str(kind)[:40]!r} is not known")
    if not _is_list_of_texts(tokens):
        raise refuse("the file has no list of tokens")
    if types is None:
        types = [NORMAL] * len(tokens)
    if not isinstance(types, list) or len(types) != len(tokens):
        raise refuse("the file has another number of tokens than of their types")

    def key_token(name: str) -> str | None:
        index = key(f"{name}_token_id")
        is_id = type(index) is int and 0 <= index < len(tokens)
        return tokens[index] if is_id else None

    # The vocabulary without the tokens that only fill it up.
    vocabulary: dict[str, int] = {}
    for index, (token, token_type) in enumerate(zip(tokens, types, strict=True)):
        if token_type == UNUSED and re.fullmatch(r"\[PAD\d+\]", token):
            continue
        if token in vocabulary:
            raise refuse(f"the token {token[:40]!r} is stated twice")
        vocabulary[token] = index
    added_tokens = [
        {
            "id": index,
            "content": token,
            "special": types[index] != USER_DEFINED,
            "single_word": False,
            "lstrip": False,
            "rstrip": strips_after(token, metadata),
            "normalized": False,
        }
        for token, index in vocabulary.items()
        if types[index] in (CONTROL, USER_DEFINED, UNKNOWN)
    ]
    description: Json = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens,
        "post_processor": None,
        "normalizer": None,
        "pre_tokenizer": None,
    }
    merges = key("merges")
    if kind != "llama" and (
        not _is_list_of_texts(merges) or any(merge.count(" ") != 1 for merge in merges)
    ):
        raise refuse("the file has no list of merges")
    if kind == "gpt2":
        pre_tokenizer = key("pre", "default")
        if pre_tokenizer not in PRE_TOKENIZERS:
            known = ", ".join(PRE_TOKENIZERS)
            raise refuse(
                f"pre-tokenizer {str(pre_tokenizer)[:40]!r} is not known; these are: {known}"
            )
        description |= _byte_level_bpe(vocabulary, merges, pre_tokenizer)
    elif kind == "gemma4":
        description |= _sentencepiece_steps(prefixed=False)
        description["model"] = {
            "type": "BPE",
            "unk_token": key_token("unknown"),
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [merge.split(" ") for merge in merges],
        }
    else:
        scores = key("scores")
        if not isinstance(scores, list) or len(scores) != len(tokens) or UNKNOWN not in types:
            raise refuse("the file has no score for each token, or no unknown token")
        pieces = list(zip(tokens, scores, types, strict=True))
        description |= _sentencepiece_steps(prefixed=bool(key("add_space_prefix", True)))
        description["model"] = bpe_of_pieces(pieces, True)

    # Special tokens by their role, and a BOS token before each text where the file asks for it.
    config: Json = {}
    for role, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (token := key_token(name)) is not None:
            config[f"{role}_token"] = token
    bos = config.get("bos_token")
    if bos is not None and (kind == "gemma4" or key("add_bos_token", kind == "llama")):
        description["post_processor"] = added_around({bos: vocabulary[bos]}, {})
    chat_template = metadata.get("tokenizer.chat_template")
    if isinstance(chat_template, str):
        config["chat_template"] = chat_template
    control_tokens = {name for name in config.values() if name in vocabulary}
    return Tokenizer(JsonBackend(description, str(path), control_tokens), config)


def _byte_level_bpe(vocabulary: dict[str, int], merges: list[str], pre_tokenizer: str) -> Json:
    patterns, ignores_merges = PRE_TOKENIZERS[pre_tokenizer]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    steps = [*splits(patterns)["pretokenizers"], byte_level]
    return {
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": ignores_merges,
            "vocab": vocabulary,
            "merges": [merge.split(" ") for merge in merges],
        },
    }


def _sentencepiece_steps(*, prefixed: bool) -> Json:
    """What is done before and after SentencePiece's BPE. `prefixed`: a space is put before a text, and taken away again
    when it is decoded.
    """
    normalizers: list[Json] = [{"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    decoders: list[Json] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefixed:
        normalizers.insert(0, {"type": "Prepend", "prepend": "▁"})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "decoder": {"type": "Sequence", "decoders": decoders},
    }


def strips_after(token: str, metadata: Json) -> bool:
    """Whether white space after a special token is dropped: llama.cpp does so in models that are named Phi-3."""
    name = str(metadata.get("general.name", "")).lower()
    is_phi3 = re.search("phi-?3", name) is not None
    return is_phi3 and token not in ("<unk>", "<s>", "<|endoftext|>")


def _is_list_of_texts(value: object) -> bool:
    return isinstance(value, list) and len(value) > 0 and isinstance(value[0], str)


# The folder


def import_gguf(path: Path, out: Path, *, dtype: str | None = None) -> Exported:
    """Writes the new folder `out`, completely or not at all: weights one tensor at a time, config, tokenizer and
    generation settings. `dtype`: None keeps float32, float16 and bfloat16, and takes bfloat16 for quantized weights.
    Raises UserError.
    """
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        raise UserError(
            "the path is a folder, and `import` takes a GGUF file",
            where=str(path),
            fix=f"name the file: {files[0]}"
            if files
            else "use a folder in Hugging Face format as it is",
            code=2,
        )
    metadata, tensors = read_gguf(path)
    if metadata.get("general.architecture") == "clip":
        raise UserError(
            "this is an mmproj file: the vision tower of a model, without its language model",
            where=str(path),
            fix="name the GGUF file of the language model, which is imported as a text model",
        )
    if metadata.get("general.type", "model") != "model":
        problem = f"the file holds a {str(metadata['general.type'])[:40]}, not a model"
        raise UserError(problem, where=str(path), fix="name the GGUF file of a model")
    config = config_of(metadata, tensors, path)
    tokenizer = tokenizer_of(metadata, path)
    if tokenizer.vocab_size > config.vocab_size:
        problem = (
            f"the file has {tokenizer.vocab_size:,} tokens and embeddings of {config.vocab_size:,}"
        )
        raise UserError(problem, where=str(path), fix=_AGAIN)
    # The tensors of each parameter; of a tied head the embedding.
    pieces: dict[str, list[GgufTensor]] = {}
    for piece in gguf_tensors(config):
        for name in piece.parts:
            known_pieces = pieces.setdefault(name, [])
            if not known_pieces or piece.head_rows is not None:
                known_pieces.append(piece)
    needed_pieces = [piece for known_pieces in pieces.values() for piece in known_pieces]
    _refuse_other_tensors(tensors, needed_pieces, config, path)

    # A tensor of the file may hold several parameters: it is dequantized once for all of them.
    kept_types = {"F32": "float32", "F16": "float16"}
    stored_type = tensors[_last_matrix(config)].tensor_type.name
    target = dtype or kept_types.get(stored_type, "bfloat16")
    shapes = parameter_shapes(config)
    last_values: dict[str, Tensor] = {}

    def read_whole(piece: GgufTensor) -> Tensor:
        if piece.name not in last_values:
            last_values.clear()
            last_values[piece.name] = piece.apply(
                dequantized_tensor(tensors[piece.name]).reshape(-1, *piece.row_shape), undo=True
            )
        return last_values[piece.name]

    def read_parameter(name: str) -> Tensor:
        shape = shapes[name]
        own_dtype = dtype_in(config, name, DTYPES[target])
        if is_expert_stack(name):
            # Expert by expert in the dtype of the folder: a stack in float32 may be gigabytes.
            values = torch.empty(shape, dtype=own_dtype)
            for part_name, part in unstacked(name, values):
                part.copy_(
                    _part_of_stack(tensors, part_name, pieces[part_name][0]).view(part.shape)
                )
        elif pieces[name][0].head_rows is not None:
            # Each of the tensors has some of its rows, and 0 in all others.
            values = torch.stack([read_whole(piece) for piece in pieces[name]]).sum(0)
        else:
            piece = pieces[name][0]
            values = read_whole(piece)
            if len(piece.parts) > 1:
                rows = values.split([shapes[part][0] for part in piece.parts])
                values = rows[piece.parts.index(name)]
        parameter: Tensor = values.reshape(shape).to(own_dtype)
        if not torch.isfinite(parameter).all():
            problem = f"{name} has numbers beyond the range of {target}"
            raise UserError(problem, where=str(path), fix="add --type float32")
        return parameter

    with draft_of(out) as draft:
        write_model_piecewise(read_parameter, config, DTYPES[target], draft)
        tokenizer.save(draft)
        write_json(draft / "generation_config.json", _generation_settings(metadata, config))

    counts = Counter(block.tensor_type.name for block in tensors.values())
    types = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    proof = f"{len(tensors)} tensors ({types}) as {target}, {tokenizer.vocab_size:,} tokens"
    proofs = [proof]
    if any(path.parent.glob("mmproj*.gguf")):
        proofs.append("the language model alone: no tower is made of the mmproj file beside it")
    return finished_export(out, proofs)


def _last_matrix(config: ModelConfig) -> str:
    """The tensor whose type stands for that of the file: the last matrix of the first layer."""
    first_layer = [piece.name for piece in gguf_tensors(config) if piece.name.startswith("blk.0.")]
    return next(
        name
        for name in ("blk.0.ffn_down.weight", "blk.0.ffn_down_exps.weight")
        if name in first_layer
    )


def _part_of_stack(tensors: Mapping[str, StoredGgufTensor], name: str, piece: GgufTensor) -> Tensor:
    """The matrix or bias of one expert, of a tensor of all: only its rows are dequantized."""
    block = tensors[piece.name]
    num_rows = math.prod(piece.shape[:-1]) // len(piece.parts)
    first = piece.parts.index(name) * num_rows
    return dequantized_tensor(block.rows(first, first + num_rows)).reshape(-1)


def _refuse_other_tensors(
    tensors: Mapping[str, StoredGgufTensor],
    pieces: Collection[GgufTensor],
    config: ModelConfig,
    path: Path,
) -> None:
    """Raises UserError where the file lacks one of the pieces, has it in another shape, or has more than the model."""
    for piece in pieces:
        if piece.name not in tensors:
            raise UserError(f"{piece.name} is missing", where=str(path), fix=_AGAIN)
        shape = tuple(reversed(tensors[piece.name].shape))
        if shape != piece.shape:
            problem = f"{piece.name} is {list(shape)}; its metadata makes it {list(piece.shape)}"
            raise UserError(problem, where=str(path), fix=_AGAIN)
    names = {piece.name for piece in gguf_tensors(config)} | {"output.weight"}
    # llama.cpp converts, and does not read, what a file has of keys where a layer uses those of another.
    names |= {
        f"blk.{layer.number}.{name}.weight"
        for layer in layers(config)
        if layer.keys_of is not None
        for name in ("attn_k", "attn_v", "attn_k_norm")
    }
    surplus_names = {name for name in tensors if name not in names and not name.startswith("rope_")}
    if surplus_names:
        problem = f"{min(surplus_names)[:80]} has no place in the model"
        raise UserError(problem, where=str(path), fix="choose another model")


def _generation_settings(metadata: Json, config: ModelConfig) -> Json:
    """A text ends with any of the tokens that end a text, a turn or a message."""
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    end_ids = list(dict.fromkeys(index for index in ends if type(index) is int))
    settings: Json = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": end_ids[0] if len(end_ids) == 1 else end_ids or None,
        "pad_token_id": config.pad_token_id,
    }
    return {key: value for key, value in settings.items() if value is not None}

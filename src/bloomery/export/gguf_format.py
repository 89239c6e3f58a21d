"""What llama.cpp computes of a model, and tensors, types and vocabularies as a GGUF file states them."""

import importlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bloomery.core.errors import UserError
from bloomery.core.extras import install_extra
from bloomery.export import K_TYPES
from bloomery.export.gguf_experts import ROUTER_TENSOR, expert_problem, stacked_parts
from bloomery.facts.config import ModelConfig
from bloomery.facts.counting import (
    LATENT_EPS,
    Layer,
    Shape,
    attention_layers,
    is_expert_stack,
    layers,
    parameter_shapes,
    smallest_window,
)
from bloomery.facts.families import FAMILIES, family_label
from bloomery.facts.gguf_graphs import (
    BARE_TENSORS,
    LAYER_TENSORS,
    OUTER_TENSORS,
    PLAIN_GRAPH,
    GgufGraph,
)
from bloomery.model.rope import frequencies

ALIGNMENT = 32
BLOCK = 32  # numbers that share a scale in q8_0 and q4_0
# that a K type stores together; llama-quantize takes q5_0, q5_1 or q8_0 for other rows
K_BLOCK = 256
# Matrices that stay q8_0 in a file of q4_0.
FINER = ("token_embd.weight", "output.weight", "per_layer_token_embd.weight")
# The factor that llama.cpp divides a frequency by where a pair of numbers does not turn, as its conversion writes it.
NOT_TURNING = 1e30
# Matrices that llama.cpp reads in float32 alone.
KEPT = (
    "position_embd.weight",
    ".shortconv.conv.weight",
    ".ssm_conv1d.weight",
    f".{ROUTER_TENSOR}.weight",
)
ELSEWHERE = "export it with --to hf, which transformers and vLLM run"
Array = np.ndarray[Any, Any]


def gguf_library() -> Any:
    """The gguf package, loaded when needed. Raises UserError where it is not installed."""
    try:
        return importlib.import_module("gguf")
    except ImportError as error:
        fix = install_extra("gguf")
        raise UserError("the gguf package is not installed", where="--to gguf", fix=fix) from error


# What a graph of llama.cpp computes


def graph_of(config: ModelConfig) -> GgufGraph | None:
    """The graph of llama.cpp that computes the config's family; None where none is known."""
    family = FAMILIES.get(config.family)
    if family is None or config.transformers_backend is not None:
        return None
    return family.gguf if config.experts is None else family.gguf_mixture or family.gguf


def supported_graph(config: ModelConfig) -> GgufGraph:
    """The same, for a config that `unsupported` has let through."""
    graph = graph_of(config)
    assert graph is not None, f"{config.family} has no graph of llama.cpp"
    return graph


def unsupported(config: ModelConfig) -> str | None:
    """Why llama.cpp cannot compute this model, or None."""
    architecture = graph_of(config)
    if architecture is None and config.transformers_backend is None:
        return f"the graph of llama.cpp for {family_label(config)} is not known here"
    if architecture is None:
        return f"{config.family} runs through transformers, and its tensors have no GGUF names here"
    graph = f"llama.cpp's {architecture.name} graph"

    # Facts that the graph fixes. GPT-2's exact GELU is exported, and named as a difference.
    facts = {**PLAIN_GRAPH, **architecture.fixed}
    if architecture.takes_exact_gelu and config.activation == "gelu":
        facts["activation"] = "gelu"
    for fact, graph_value in facts.items():
        value = getattr(config, fact)
        if fact not in architecture.free and value != graph_value:
            return f"{graph} computes {fact} {graph_value!r}, and the model has {value!r}"
    if (problem := expert_problem(config, architecture)) is not None:
        return f"{graph} {problem}"
    if architecture.states_windows:
        if (problem := _other_windows(config)) is not None:
            return f"{graph} {problem}"
    elif config.layer_sizes:
        return f"{graph} has layers of one size, and the model's differ"
    first_layer = first_with_heads(config)
    if config.short_convolution is not None and config.short_convolution.bias:
        return f"{graph} has no biases in convolutions, and the model does"
    if architecture.has_delta_nets and attention_interval(config) is None:
        return f"{graph} has attention in each n-th layer, and the model in others"
    sizes = config.delta_net
    if sizes is not None and sizes.key_head_dim != sizes.value_head_dim:
        return f"{graph} has values as wide as keys in delta nets, and the model has not"
    if sizes is not None and sizes.projections != architecture.delta_projections:
        return f"{graph} has other projections of delta nets than the model"
    if architecture.own_keys and first_layer.num_kv_heads != first_layer.num_heads:
        return f"{graph} has keys for each head, and the model has {first_layer.num_kv_heads}"
    if config.latent_attention is not None and (problem := _other_latent(config)) is not None:
        return f"{graph} {problem}"
    if architecture.full_width and first_layer.query_width != config.hidden_size:
        return (
            f"{graph} needs heads of {config.hidden_size} numbers together, and the model has "
            f"{first_layer.query_width}"
        )
    scaling = config.rope_scaling
    is_proportional = scaling is not None and scaling.kind == "proportional"
    if scaling is not None and is_proportional != architecture.states_windows:
        return f"{graph} has no {scaling.kind} RoPE scaling"
    is_unrounded = scaling is not None and scaling.kind == "yarn" and not scaling.truncate
    if is_unrounded and not architecture.rounds_yarn:
        return f"{graph} rounds YaRN's limits (truncate), and the model does not"
    if (growth := config.query_scale) is not None and (
        scaling is None or scaling.kind != "yarn" or scaling.original_max_positions != growth.every
    ):
        return f"{graph} lets queries grow by YaRN's original context, and the model has none of it"

    if architecture.plain_window_rotation and config.local_rope_theta not in (
        None,
        config.rope_theta,
    ):
        return (
            f"{graph} rotates layers with a window by a base of {config.rope_theta:g} as all others,"
            f" and the model by {config.local_rope_theta:g}"
        )

    # Windows, and the scale of attention in graphs that have them.
    numbers = range(config.num_layers)
    if period := architecture.window_period:
        window = smallest_window(config)
        graph_windows = tuple(window if layer % period < period - 1 else None for layer in numbers)
        may_slide = architecture.window_layers in (0, config.num_layers)
        if architecture.window_layers and may_slide != (window is not None):
            count = architecture.window_layers
            return f"{graph} has windows in models of {count} layers, and in no other"
        needs_windows = architecture.default_window is not None or window is not None
        windows = tuple(layer.window for layer in layers(config))
        if needs_windows and (window is None or windows != graph_windows):
            return (
                f"{graph} has a window in every layer but each {period}th, and the model has "
                "another pattern"
            )
        is_largest = config.num_layers == architecture.full_scale_layers
        scale_width = first_layer.head_dim
        if is_largest:
            scale_width = config.hidden_size // first_layer.num_heads
        graph_scale = scale_width**-0.5
        scale = first_layer.attention_scale
        if not math.isclose(scale, graph_scale, rel_tol=1e-6):
            return f"{graph} scales attention by {graph_scale:.4g}, and the model by {scale:.4g}"
    softcaps = (config.attention_softcap, config.final_softcap)
    if architecture.default_softcaps is not None and None in softcaps:
        return f"{graph} caps logits and attention, and the model does not"

    # A graph may leave out the rotation in each n-th layer; where it has windows, only of a model that has them.
    if period := architecture.unrotated_period:
        rotates_all = architecture.window_period > 0 and smallest_window(config) is None
        graph_rotary_layers = tuple(rotates_all or (layer + 1) % period != 0 for layer in numbers)
        rotary_layers = tuple(layer.rotation is not None for layer in layers(config))
        if rotary_layers != graph_rotary_layers:
            return f"{graph} rotates in all layers but each {period}th, and the model in others"
    return None


def _other_windows(config: ModelConfig) -> str | None:
    """What a graph that states windows and sizes one by one computes, where the model differs from it; or None."""
    windowed = [layer for layer in layers(config) if layer.window is not None]
    full = [layer for layer in layers(config) if layer.window is None]
    if not windowed or not full:
        return "has layers with a window and layers without, and the model has one kind"
    if len({layer.window for layer in windowed}) > 1:
        return "has one window, and the model's differ"
    for kind in (windowed, full):
        if len({(layer.num_heads, layer.head_dim) for layer in kind}) > 1:
            return (
                "has heads of one width and number in all layers of a kind, and the model's differ"
            )
    if windowed[0].num_heads != full[0].num_heads:
        return "has as many heads in every layer, and the model has not"
    # It counts back from the first layer without own keys: one for full attention, two for a window.
    first_shared = config.num_layers - config.num_kv_shared_layers
    for layer in layers(config)[first_shared:]:
        lender = first_shared - (1 if layer.window is None else 2)
        if layer.keys_of != lender:
            return f"gives layer {layer.number} the keys of layer {lender}, the model those of {layer.keys_of}"
    return None


# Layers of models in which llama.cpp takes queries for made of one matrix, and their vocabulary where it asks for it.
_LITE_MODELS = ((26, None), (27, None), (48, 128256))


def _other_latent(config: ModelConfig) -> str | None:
    """What the graph of latent attention computes, where the model differs from it; or None."""
    latent = config.latent_attention
    assert latent is not None
    sizes = ((config.num_layers, None), (config.num_layers, config.vocab_size))
    if latent.query_rank is not None and any(size in _LITE_MODELS for size in sizes):
        return f"makes queries by one matrix in models of {config.num_layers} layers, and the model by two"
    scaling = config.rope_scaling
    if scaling is None:
        return None
    factor = scaling.attention_factor
    if scaling.kind != "yarn" or scaling.mscale_all_dim is None or factor is None or factor != 1.0:
        return "scales scores by YaRN's mscale_all_dim, and mscale must be the same number"
    return None


def attention_interval(config: ModelConfig) -> int | None:
    """n, where each n-th layer has attention and all others a delta net; None where that is not so."""
    interval = 1 + next(
        (number for number, mixer in enumerate(config.mixers) if mixer == "attention"), 0
    )
    expected = tuple(
        "delta_net" if (number + 1) % interval else "attention"
        for number in range(config.num_layers)
    )
    return interval if config.mixers == expected else None


def first_with_heads(config: ModelConfig) -> Layer:
    """The layer whose heads stand for those of all others: a graph of llama.cpp has one size of them, or one for
    layers with a window, and one for the others, which comes first in its metadata.
    """
    graph = graph_of(config)
    if graph is not None and graph.states_windows:
        return next(layer for layer in layers(config) if layer.window is None)
    return next(iter(attention_layers(config)), layers(config)[0])


def graph_differences(config: ModelConfig, description: Mapping[str, Any]) -> tuple[str, ...]:
    """What llama.cpp computes differently, one sentence each. `description`: of the tokenizer."""
    graph = supported_graph(config)
    sentences = []
    window = smallest_window(config)
    if window and window < config.max_positions and not graph.window_period:
        sentences.append(
            f"llama.cpp ignores the sliding window: texts above {window:,} tokens are read whole"
        )
    if graph.takes_exact_gelu and config.activation == "gelu":
        sentences.append(
            "llama.cpp computes GPT-2's GELU by tanh, this model the exact form: activations "
            "differ by 5e-4"
        )
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "dynamic":
        sentences.append(
            f"llama.cpp has no dynamic RoPE scaling: texts above {config.max_positions:,} tokens "
            "differ"
        )
    if scaling is not None and scaling.kind == "yarn" and not scaling.truncate:
        sentences.append(
            "llama.cpp rounds the limits of YaRN, which this model does not (truncate): frequencies "
            "between them differ by some percent"
        )
    if scaling is not None and scaling.kind == "longrope":
        limit = scaling.original_max_positions or config.max_positions
        sentences.append(
            "llama.cpp chooses LongRoPE's factors by its context size: run it with -c "
            f"{limit} for short texts"
        )
    if config.latent_attention is not None and config.norm_eps != LATENT_EPS:
        sentences.append(
            f"llama.cpp adds {config.norm_eps:g} in the norms inside latent attention, this model "
            f"{LATENT_EPS:g}"
        )
    if composes(description):
        sentences.append(
            "llama.cpp does not normalize Unicode (NFC, NFKC): decomposed letters become other "
            "tokens"
        )
    return tuple(sentences)


def composes(description: Mapping[str, Any]) -> bool:
    """Whether the tokenizer normalizes Unicode, which llama.cpp's BPE does not."""
    return (
        re.search(r'"type": "(NFK?[CD]|Precompiled)"', json.dumps(description.get("normalizer")))
        is not None
    )


# Tensors


@dataclass(frozen=True)
class ValueHeads:
    """Where a tensor has the value heads of a delta net: from the row or column `first` on, `width` for each.

    The decoder has those of a key head next to each other, the file the first ones of all key heads, then the second
    ones: ggml repeats keys as a whole.
    """

    key_heads: int
    per_key: int
    width: int
    first: int = 0
    in_columns: bool = False

    def apply(self, numbers: Tensor, *, undo: bool = False) -> Tensor:
        axis = 1 if self.in_columns else 0
        before, heads = numbers.split([self.first, numbers.shape[axis] - self.first], axis)
        order = (self.key_heads, self.per_key)[:: -1 if undo else 1]
        parts = heads.unflatten(axis, (*order, self.width))
        return torch.cat((before, parts.transpose(axis, axis + 1).flatten(axis, axis + 2)), axis)


@dataclass(frozen=True)
class HeadRows:
    """Which rows of a matrix a tensor has, of one that two tensors share: `slices`, each the first of some rows and how
    many, of each of the `heads` groups of `rows` rows; those of a slice of all heads come before the next slice.

    `turned`: rows and inputs of each head change places.
    """

    heads: int
    rows: int
    slices: tuple[tuple[int, int], ...]
    turned: bool = False

    def apply(self, matrix: Tensor, *, undo: bool = False) -> Tensor:
        """`undo`: the matrix with 0 in all other rows."""
        if undo:
            return self._scattered(matrix)
        heads = matrix.unflatten(0, (self.heads, self.rows))
        slices = (heads[:, first : first + count] for first, count in self.slices)
        return torch.cat(
            [(part.transpose(1, 2) if self.turned else part).flatten(0, 1) for part in slices]
        )

    def _scattered(self, rows: Tensor) -> Tensor:
        if self.turned:
            rows = rows.unflatten(0, (self.heads, -1)).transpose(1, 2).flatten(0, 1)
        matrix = rows.new_zeros(self.heads, self.rows, rows.shape[1])
        counts = [self.heads * count for _, count in self.slices]
        for (first, count), part in zip(self.slices, rows.split(counts), strict=True):
            matrix[:, first : first + count] = part.unflatten(0, (self.heads, count))
        return matrix.flatten(0, 1)


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of the file. `parts`: our parameters, or parts of stacks of experts, one below the other; empty for one
    that is computed.

    `heads`: of q or k, whose rows are interleaved; 0: they are in the same order. `shift` is added to each number.
    `value_heads`: of a delta net, which have another order. `is_decay`: the file has -exp of each number. `head_rows`:
    the tensor has some rows of its part alone.
    """

    name: str
    parts: tuple[str, ...]
    shape: tuple[int, ...]
    heads: int = 0
    shift: float = 0.0
    value_heads: ValueHeads | None = None
    is_decay: bool = False
    head_rows: HeadRows | None = None

    @property
    def moves_rows(self) -> bool:
        """Whether rows have another order in the file."""
        if self.head_rows is not None:
            return True
        has_columns = self.value_heads is not None and self.value_heads.in_columns
        return self.heads > 0 or (self.value_heads is not None and not has_columns)

    def as_rows(self, values: Tensor) -> Tensor:
        """Some numbers of the tensor as rows of it: a bias of one expert is a row, and a vector has none."""
        return values.reshape(-1, *self.row_shape)

    @property
    def row_shape(self) -> Shape:
        """Of a row in the file; of a vector ()."""
        return self.shape[-1:] if len(self.shape) > 1 else ()

    def apply_to_pair(self, A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
        """LoRA's matrices of this one: what moves its columns moves A's, all else is done to B."""
        if self.value_heads is not None and self.value_heads.in_columns:
            return self.value_heads.apply(A), B
        return A, self.apply(B)

    def apply(self, rows: Tensor, *, undo: bool = False) -> Tensor:
        """The decoder's rows in the order of the file, shifted; `undo`: the reverse.

        The two numbers that are rotated together stand half a head apart in the decoder, side by side in the file.
        """
        if rows.ndim == 3:  # a convolution of each number by itself: the file leaves out the 1
            rows = rows.squeeze(1)
        if self.head_rows is not None:
            rows = self.head_rows.apply(rows, undo=undo)
        if self.heads:
            half = rows.shape[0] // self.heads // 2
            order = (self.heads, half, 2) if undo else (self.heads, 2, half)
            heads = rows.reshape(*order, *rows.shape[1:])
            rows = heads.swapaxes(1, 2).reshape(rows.shape)
        if self.value_heads is not None:
            rows = self.value_heads.apply(rows, undo=undo)
        if self.is_decay:
            return rows.neg().log() if undo else rows.exp().neg()
        if not self.shift:
            return rows
        return rows + (-self.shift if undo else self.shift)


def gguf_tensors(config: ModelConfig) -> tuple[GgufTensor, ...]:
    """Every tensor of the file that holds parameters, in order."""
    graph = supported_graph(config)
    shapes = parameter_shapes(config)
    norm_is_before = config.norm_placement == "before"
    pieces: dict[str, GgufTensor] = {}
    for name, shape in shapes.items():
        module, _, kind = name.rpartition(".")
        number, _, inner = name.removeprefix("model.layers.").partition(".")
        if is_expert_stack(name):
            assert graph.experts is not None, "`unsupported` refuses experts of other graphs"
            for target, stack_parts in stacked_parts(name, shape, graph.experts):
                stack = f"blk.{number}.{target}"
                rows = sum(part.rows for part in stack_parts) // shape[0]
                names = tuple(part.name for part in stack_parts)
                pieces[stack] = GgufTensor(stack, names, (shape[0], rows, *shape[2:]))
            continue
        if shared_pieces := _shared_pieces(config, number, name, inner):
            pieces |= {piece.name: piece for piece in shared_pieces}
            continue
        if module in OUTER_TENSORS:
            prefix = ""
            target = graph.renamed.get(module, OUTER_TENSORS[module])
            modules: tuple[str, ...] = (module,)
        else:
            # A module of a layer, alone or fused with others.
            inner_module = inner.rpartition(".")[0]
            if target := BARE_TENSORS.get(inner, ""):
                bare = f"blk.{number}.{target}"
                pieces[bare] = GgufTensor(
                    bare,
                    (name,),
                    # the choice bias of ERNIE is a matrix of one row
                    shape[-1:],
                    value_heads=_value_heads(config, target),
                    is_decay=kind == "A_log",
                )
                continue
            prefix = f"blk.{number}."
            inner_modules: tuple[str, ...] = (inner_module,)
            target = LAYER_TENSORS.get(inner_module, "")
            if inner_module == "post_attention_layernorm":
                target = "ffn_norm" if norm_is_before else "post_attention_norm"
            target = graph.renamed.get(inner_module, target)
            for fused_modules, fused_target in graph.fused.items():
                if inner_module in fused_modules:
                    inner_modules = fused_modules
                    target = fused_target
            modules = tuple(f"model.layers.{number}.{inner}" for inner in inner_modules)
            assert target, f"{module} has no name in a GGUF file"
        parts = tuple(f"{part}.{kind}" for part in modules)
        num_rows = sum(shapes[part][0] for part in parts)

        # q and k of graphs that rotate neighbors, and Gemma's norms, whose graph multiplies without adding 1.
        heads = 0
        if graph.interleaved and not config.rope_interleave and target in ("attn_q", "attn_k"):
            layer = layers(config)[int(number)]
            heads = layer.num_heads if target == "attn_q" else layer.num_kv_heads
        shift = (
            1.0
            if config.norm.endswith("unit_offset")
            and "norm" in target
            and target != "ssm_norm"  # of a delta net, which has no offset
            and kind == "weight"
            else 0.0
        )
        tensor = f"{prefix}{target}.{kind}"
        inner_shape = shape[2:] if len(shape) == 3 else shape[1:]
        file_shape = (num_rows, *inner_shape)
        if target.endswith("_shexp") and num_rows == 1:  # the gate of a shared expert
            file_shape = inner_shape
        order = _value_heads(config, target)
        piece = GgufTensor(tensor, parts, file_shape, heads, shift, order)
        pieces.setdefault(tensor, piece)
    if graph.has_own_head and config.tie_embeddings:
        embedding = "model.embed_tokens.weight"
        pieces["output.weight"] = GgufTensor("output.weight", (embedding,), shapes[embedding])
    return tuple(pieces.values())


def _value_heads(config: ModelConfig, target: str) -> ValueHeads | None:
    """Where a tensor of a delta net has its value heads; None: nowhere, or their order is the same."""
    sizes = config.delta_net
    if sizes is None or sizes.num_key_heads == sizes.num_value_heads:
        return None
    if not supported_graph(config).repeats_keys:
        return None
    per_key = sizes.num_value_heads // sizes.num_key_heads

    def heads(width: int, first: int = 0, *, in_columns: bool = False) -> ValueHeads:
        return ValueHeads(sizes.num_key_heads, per_key, width, first, in_columns)

    return {
        "attn_qkv": heads(sizes.value_head_dim, 2 * sizes.key_width),
        "ssm_conv1d": heads(sizes.value_head_dim, 2 * sizes.key_width),
        "attn_gate": heads(sizes.value_head_dim),
        "ssm_beta": heads(1),
        "ssm_alpha": heads(1),
        "ssm_dt.bias": heads(1),
        "ssm_a": heads(1),
        "ssm_out": heads(sizes.value_head_dim, in_columns=True),
    }.get(target)


def _shared_pieces(
    config: ModelConfig, number: str, name: str, inner: str
) -> tuple[GgufTensor, ...]:
    """The tensors among which the file divides a matrix; of most parameters none."""
    latent = config.latent_attention
    if inner == "self_attn.kv_b_proj.weight" and latent is not None:
        heads = layers(config)[int(number)].num_heads
        plain, value = latent.plain_width, latent.value_width
        keys = HeadRows(heads, plain + value, ((0, plain),), turned=True)
        values = HeadRows(heads, plain + value, ((plain, value),))
        return (
            _divided(number, "attn_k_b", name, keys, (heads, latent.rank, plain)),
            _divided(number, "attn_v_b", name, values, (heads, value, latent.rank)),
        )
    sizes = config.delta_net
    if inner == "linear_attn.in_proj_qkvz.weight" and sizes is not None:
        heads = sizes.num_key_heads
        key = sizes.key_head_dim
        value = sizes.value_width // heads
        rows = 2 * (key + value)
        queries_keys_values = HeadRows(heads, rows, ((0, key), (key, key), (2 * key, value)))
        gate = HeadRows(heads, rows, ((2 * key + value, value),))
        inputs = config.hidden_size
        return (
            _divided(
                number, "attn_qkv", name, queries_keys_values, (heads * (2 * key + value), inputs)
            ),
            _divided(number, "attn_gate", name, gate, (heads * value, inputs)),
        )
    return ()


def _divided(number: str, target: str, name: str, rows: HeadRows, shape: Shape) -> GgufTensor:
    return GgufTensor(f"blk.{number}.{target}.weight", (name,), shape, head_rows=rows)


def computed_tensors(config: ModelConfig) -> dict[str, Array]:
    """The factors of rotary frequencies, for the stretching that is stated as tensors."""
    scaling = config.rope_scaling
    graph = supported_graph(config)
    if graph.states_windows:
        rotation = first_with_heads(config).rotation
        assert rotation is not None, "the family rotates every head"
        plain = frequencies(config, replace(rotation, scaling=None), 0)
        scaled = frequencies(config, rotation, 0)
        return {"rope_freqs.weight": torch.where(scaled > 0, plain / scaled, NOT_TURNING).numpy()}
    if scaling is None or scaling.kind not in ("llama3", "longrope"):
        return {}
    if scaling.kind == "longrope":
        return {
            f"rope_factors_{kind}.weight": np.array(factors, dtype=np.float32)
            for kind, factors in (("long", scaling.long_factor), ("short", scaling.short_factor))
        }
    rotation = next(layer.rotation for layer in layers(config) if layer.rotation is not None)
    plain = frequencies(config, replace(rotation, scaling=None), 0)
    scaled = frequencies(config, rotation, 0)
    return {"rope_freqs.weight": (plain / scaled).numpy()}


def type_of(name: str, shape: tuple[int, ...], kind: str) -> str:
    """The type of one tensor: vectors, biases, positions, convolutions and routers stay float32; rows that are no
    multiple of a block are f16.
    """
    if len(shape) == 1 or name.endswith((*KEPT, ".bias")):
        return "f32"
    if kind in ("q8_0", "q4_0"):
        if shape[-1] % BLOCK:
            return "f16"
        return "q8_0" if name in FINER else kind
    return kind


def fallbacks(config: ModelConfig, kind: str) -> Iterator[str]:
    """One sentence about matrices that have another type than the one that was asked for."""
    if kind in ("f16", "bf16", "f32"):
        return
    block, other_type = (K_BLOCK, "a larger type") if kind in K_TYPES else (BLOCK, "f16")
    widths = [
        piece.shape[-1]
        for piece in gguf_tensors(config)
        if len(piece.shape) > 1 and not piece.name.endswith((*KEPT, ".bias"))
    ]
    count = sum(width % block != 0 for width in widths)
    if count:
        yield (
            f"{count} of {len(widths)} matrices are {other_type}: their rows are no multiple of "
            f"{block}"
        )


def bytes_in_file(shape: tuple[int, ...], kind: str) -> int:
    per_block = {
        "f32": 4 * BLOCK,
        "f16": 2 * BLOCK,
        "bf16": 2 * BLOCK,
        "q8_0": 2 + BLOCK,
        "q4_0": 2 + BLOCK // 2,
    }
    return math.prod(shape) * per_block[kind] // BLOCK


def encoded(values: Tensor, kind: str, name: str) -> Array:
    """Rows as the bytes of the file. Raises UserError for numbers that the type cannot hold."""
    float_dtypes = {"f16": torch.float16, "bf16": torch.bfloat16}
    rounded = values.to(float_dtypes.get(kind, torch.float32))
    # One pass, a tenth of isfinite's time; both ends are NaN where one number is.
    smallest, largest = torch.aminmax(rounded)
    if not math.isfinite(float(smallest)) or not math.isfinite(float(largest)):
        if kind == "f16" and bool(torch.isfinite(values).all()):
            raise UserError(
                f"{name} has numbers above 65,504", where="--type f16", fix="use --type bf16 or f32"
            )
        raise UserError(
            f"{name} has numbers that are not finite",
            where="the model's weights",
            fix="choose an earlier --step",
        )
    if kind in ("q8_0", "q4_0"):
        library = gguf_library()
        tensor_type = library.GGMLQuantizationType[kind.upper()]
        quantized: Array = library.quants.quantize(rounded.numpy(), tensor_type)
        return quantized
    return rounded.view(torch.uint8).numpy()


# The vocabulary

# The expressions that llama.cpp splits text with, one after the other, by its name of the pre-tokenizer, and whether
# it takes a word that is a token without merging (llama-vocab.cpp).
_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LATER = r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?"
    + _UPPER
    + "*"
    + _LOWER
    + "+%s|"
    + r"[^\r\n\p{L}\p{N}]?"
    + _UPPER
    + "+"
    + _LOWER
    + "*%s"
)
_MARKED = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
PRE_TOKENIZERS: Mapping[str, tuple[tuple[str, ...], bool]] = MappingProxyType(
    {
        "gpt-2": ((_GPT2,), False),
        "smollm": ((r"\p{N}", _GPT2), False),
        "llama-bpe": ((_CONTRACTIONS + _LATER % "{1,3}",), True),
        "dbrx": ((_CONTRACTIONS + _LATER % "{1,3}",), False),
        "qwen2": ((_CONTRACTIONS + _LATER % "",), False),
        "tekken": ((_CASED % ("", "") + r"|\p{N}" + _TAIL,), True),
        "gpt-4o": (
            (_CASED % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?") + r"|\p{N}{1,3}" + _TAIL,),
            False,
        ),
        "deepseek-v3": ((r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", _MARKED), False),
    }
)

_SPLIT_PROBE = (
    "Hello world, I'll see you're ADA'S \tand\r\n\r\n  it's 2026 1234567 3.14e-5\n\n\n    def f(x):\n\treturn x/2 "
    "# done!?\n größer naïve café e\u0301 ÀB McDonald iPhone XMLHttp 東京都に行く 世界 カタカナ 한국어 العربية ไทย "
    "🙂🙃👩\u200d💻 … -- «quoted» $5.00 a_b x==y && !z\u00a0nbsp\u3000wide ½ ² Ⅷ /path/to//file.py\n/ \n  trailing   "
)
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # token types of GGUF


@dataclass(frozen=True)
class GgufVocabulary:
    """A tokenizer as llama.cpp states it: `model` is gpt2 (byte-level BPE), llama or gemma4 (SentencePiece's BPE, in
    scores or in merges).
    """

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    scores: list[float]
    merges: list[str]
    space_prefix: bool


def vocabulary(
    description: Mapping[str, Any], size: int, *, where: str, merged: bool = False
) -> GgufVocabulary:
    """Of a tokenizer.json, filled to the model's `size` with unused tokens. Raises UserError for one that llama.cpp
    does not have. `merged`: SentencePiece's BPE is stated in merges, where it puts no space before a text.
    """

    def refuse(problem: str) -> UserError:
        return UserError(f"llama.cpp has no such tokenizer: {problem}", where=where, fix=ELSEWHERE)

    model = description["model"]
    if model.get("type") != "BPE":
        raise refuse(f"its model is {model.get('type')}, and BPE can be exported")
    refused_keys = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    if any(model.get(key) for key in refused_keys):
        raise refuse("its BPE has dropout, a prefix or a suffix")
    added_tokens = description.get("added_tokens") or []
    largest_id = max([*model["vocab"].values(), *(token["id"] for token in added_tokens)])
    if largest_id >= size:
        raise UserError(
            f"the tokenizer has id {largest_id:,} and the model {size:,} tokens",
            where=where,
            fix="put the tokenizer there that the model was trained with",
        )

    # Ids without a token stay unused; added tokens have a type of their own.
    is_sentencepiece = bool(model.get("byte_fallback"))
    tokens = [f"[PAD{number}]" for number in range(size)]
    types = [UNUSED] * size
    for token, index in model["vocab"].items():
        is_byte = is_sentencepiece and re.fullmatch("<0x[0-9A-F]{2}>", token) is not None
        tokens[index] = token
        types[index] = BYTE if is_byte else NORMAL
    for added_token in added_tokens:
        index = added_token["id"]
        tokens[index] = added_token["content"]
        types[index] = CONTROL if added_token.get("special") else USER_DEFINED
        if added_token["content"] == model.get("unk_token"):
            types[index] = UNKNOWN

    pairs = [merge if isinstance(merge, list) else merge.split(" ") for merge in model["merges"]]
    merges = [" ".join(pair) for pair in pairs]
    scores = [0.0] * size
    if not is_sentencepiece:
        pre_tokenizer = _pre_tokenizer(description, refuse)
        return GgufVocabulary("gpt2", pre_tokenizer, tokens, types, scores, merges, False)

    # SentencePiece has scores instead of merges: the text that is merged first has the largest.
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(pairs):
        ranks.setdefault("".join(pair), rank)
    for index, token in enumerate(tokens):
        if types[index] == NORMAL:
            scores[index] = -float(ranks.get(token, len(pairs)))
    steps = [description.get("normalizer"), description.get("pre_tokenizer")]
    steps_text = json.dumps(steps, ensure_ascii=False)
    prepends_space = (
        '"prepend": "▁"' in steps_text
        or re.search('"prepend_scheme": "(always|first)"', steps_text) is not None
    )
    has_spaces = any(merge.count(" ") != 1 for merge in merges)
    if merged and not prepends_space and not has_spaces:
        return GgufVocabulary("gemma4", "gemma4", tokens, types, scores, merges, False)
    return GgufVocabulary("llama", "default", tokens, types, scores, [], prepends_space)


def _pre_tokenizer(description: Mapping[str, Any], refuse: Callable[[str], UserError]) -> str:
    """llama.cpp's name of the pre-tokenizer that splits a text as this one does. Raises UserError for another."""
    from tokenizers import Tokenizer as Library

    def word_spans(pre_tokenizer: object) -> list[tuple[int, int]]:
        """Start and end of each word of the probe."""
        model = {"type": "BPE", "vocab": {}, "merges": []}
        tokenizer = {"version": "1.0", "model": model, "pre_tokenizer": pre_tokenizer}
        library = Library.from_str(json.dumps(tokenizer))
        return [span for _, span in library.pre_tokenizer.pre_tokenize_str(_SPLIT_PROBE)]

    pre_tokenizer = description.get("pre_tokenizer")
    text = json.dumps(pre_tokenizer)
    if '"ByteLevel"' not in text or '"add_prefix_space": true' in text:
        raise refuse("its pre-tokenizer is not byte-level, or adds a space before the text")
    spans = word_spans(pre_tokenizer)
    fitting_names = [
        name
        for name, (patterns, _) in PRE_TOKENIZERS.items()
        if word_spans(splits(patterns)) == spans
    ]
    if not fitting_names:
        raise refuse("its pre-tokenizer splits words in another way than those of llama.cpp")
    # Of several the one that also takes a word that is a token without merging it, or does not.
    ignores_merges = bool(description["model"].get("ignore_merges"))
    return min(fitting_names, key=lambda name: PRE_TOKENIZERS[name][1] != ignores_merges)


def splits(patterns: tuple[str, ...]) -> dict[str, Any]:
    """The pre-tokenizer of the tokenizers library that splits with one expression after the other."""
    steps = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns
    ]
    return {"type": "Sequence", "pretokenizers": steps}

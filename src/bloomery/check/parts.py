"""The parts of a training step, each by itself on the device and in float32 on the CPU, from the same inputs.

A whole step rounds some hundred times, and a part a few times: what a part computes wrong shows at a hundredth of the
size that it needs to show in a step, and has a name.

B batch, T time, D width, H query heads, K key/value heads, E head width.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from bloomery.check.attention import ROUNDINGS_OF_ATTENTION, AttentionKernel, attention_numbers
from bloomery.check.comparison import (
    SEED,
    Numbers,
    PartResult,
    backward_numbers,
    drawn,
    wrong_quantities,
)
from bloomery.check.rounding import UNIT_ROUNDOFF, bound_in, typical_size
from bloomery.check.small_model import MASKED_SHARE, ModelPair, Side
from bloomery.check.whole_step import ROUNDINGS_OF_LAYER
from bloomery.data.batch import Batch
from bloomery.facts.config import Mixer, ModelConfig
from bloomery.facts.counting import Layer, layers, layers_by_attention
from bloomery.infer.forward import matmul_dtype
from bloomery.model.adapters.lora import LoraLinear, adapters_disabled
from bloomery.model.attention.attend import layout_of
from bloomery.model.decoder import MLP, Backbone, Block, Decoder, LayerOutput
from bloomery.model.experts import MixtureOfExperts
from bloomery.model.io.weights import QuantizedLinear, quantized_weights
from bloomery.model.norms import RMSNorm
from bloomery.model.rope import rotate

Kind = Literal[
    "dequantization",
    "matmul",
    "adapter",
    "norm",
    "rotary",
    "attention",
    "mixer",
    "experts",
    "activation",
    "embedding",
    "head",
    "layer",
    "compiled layer",
    "optimizer",
    "step",
]
# Roundings to the dtype of matmuls from the inputs of a part to its results or gradients. The weights that a matmul
# reads are rounded once, and so is what it writes; an adapter adds two matmuls, a scale and a sum.
ROUNDINGS: Mapping[Kind, int] = {
    "dequantization": 1,
    "matmul": 4,
    "adapter": 12,
    "norm": 2,
    "rotary": 2,
    "attention": ROUNDINGS_OF_ATTENTION,
    "mixer": 25,  # four projections and what they project to, a convolution, norm and gate, and the same back
    "experts": 20,  # two products, an activation and weights between them, a sum; and the same back
    "activation": 5,
    "embedding": 2,
    "head": 6,
    "layer": ROUNDINGS_OF_LAYER,
    "compiled layer": ROUNDINGS_OF_LAYER,
}


@final
@dataclass(frozen=True)
class StepPart:
    """`name`: what a user reads, such as q_proj. `compute`: the numbers of one side, by quantity.

    `terms`: of its longest sum.
    """

    name: str
    kind: Kind
    compute: Callable[[Side], Numbers]
    terms: int
    extra: float = 0.0  # of the bound: an error that inputs bring

    def bound(self, side: Side, *, numbers: Tensor) -> float:
        """`numbers`: the device's, which may have another dtype than its matmuls."""
        in_attention = self.kind in ("attention", "layer", "compiled layer")
        roundoff = side.roundoff(in_attention=in_attention)
        bound = bound_in(numbers.dtype, roundoff, roundings=ROUNDINGS[self.kind], terms=self.terms)
        return bound + self.extra


def examine_part(part: StepPart, pair: ModelPair) -> PartResult:
    """Computes the part twice on the device and once on the CPU. Raises what the device raises."""
    exact = numbers_on_cpu(part, pair)
    first = numbers_on_device(part, pair)
    spoil_free_memory(pair.tested.device)
    second = numbers_on_device(part, pair)
    wrong = wrong_quantities(
        (first, second), exact, lambda numbers: part.bound(pair.tested, numbers=numbers)
    )
    bits_differ = any(not torch.equal(first[name], second[name]) for name in first)
    return PartResult(wrong, bits_differ)


def spoil_free_memory(device: torch.device) -> None:
    """Fills what a GPU's allocator has free with NaN: a kernel that reads what nobody wrote then shows it.

    Blocks of both pools of PyTorch's allocator: it serves small tensors from the second one.
    """
    if device.type == "cpu":
        return
    blocks = [torch.full((2**24,), math.nan, device=device) for _ in range(4)]
    blocks += [torch.full((2**16,), math.nan, device=device) for _ in range(64)]
    del blocks


def numbers_on_device(part: StepPart, pair: ModelPair) -> Numbers:
    return part.compute(pair.tested)


def numbers_on_cpu(part: StepPart, pair: ModelPair) -> Numbers:
    return part.compute(pair.exact)


def parts_of(pair: ModelPair) -> Iterator[StepPart]:
    """The parts of the small model, the ones that others are made of first."""
    model = pair.tested.model
    config = model.config
    num_tokens = pair.batch.tokens.numel()

    # Weights that are read, and matmuls with them.
    if dict(quantized_weights(model)):
        yield StepPart("dequantization", "dequantization", _dequantized_weights(pair), 1)
    for path, module in _linear_maps(model):
        yield from _matmul_parts(path, module, pair, num_tokens)

    # What stands between matmuls.
    for path, width in _norms(model):
        is_stream = "layernorm" in path or path == "model.norm"
        compute = _module_numbers(path, width, pair, is_stream=is_stream)
        yield StepPart(path.rpartition(".")[2], "norm", compute, max(width, num_tokens))
    if any(layer.rotation is not None for layer in layers(config)):
        # Angles are products of positions and frequencies: float32 keeps so much of them.
        extra = 8 * UNIT_ROUNDOFF[torch.float32] * pair.batch.tokens.shape[1]
        yield StepPart("rotary positions", "rotary", rotated, 1, extra=extra)
    for layer in layers_by_attention(config):
        compute = _attention_numbers(layer, pair)
        name = "attention" if layer.window is None else "attention with a window"
        yield StepPart(name, "attention", compute, pair.batch.tokens.shape[1])
    for layer in _layers_by_mixer(config):
        if layer.mixer != "attention":
            name = layer.mixer.replace("_", " ")
            terms = max(config.hidden_size, num_tokens)
            yield StepPart(name, "mixer", _mixer_numbers(layer, pair), terms)
    yield StepPart("MLP activation", "activation", _activation_numbers(pair), 1)
    mixtures = [layer for layer in layers(config) if layer.experts is not None]
    if mixtures:
        terms = max(mixtures[0].intermediate_size, config.hidden_size, num_tokens)
        yield StepPart("experts", "experts", _expert_numbers(mixtures[0], pair), terms)
    yield StepPart("embedding", "embedding", embedded_rows, num_tokens)
    yield StepPart(
        "cross-entropy head", "head", _head_numbers(pair), max(config.vocab_size, num_tokens)
    )

    # A layer of them all; compiled it is another program.
    widest_inner = max(layer.intermediate_size for layer in layers(config))
    layer_terms = max(widest_inner, config.hidden_size, num_tokens)
    yield StepPart("layer", "layer", _layer_numbers(pair, compiled=False), layer_terms)
    if pair.tested.plan.train.compile:
        yield StepPart(
            "compiled layer", "compiled layer", _layer_numbers(pair, compiled=True), layer_terms
        )


def _layers_by_mixer(config: ModelConfig) -> list[Layer]:
    """The first layer with each mixer."""
    first_layers: dict[Mixer, Layer] = {}
    for layer in layers(config):
        first_layers.setdefault(layer.mixer, layer)
    return list(first_layers.values())


def _linear_maps(model: Decoder) -> Iterator[tuple[str, nn.Module]]:
    """Those of the first layer, and of the first one with each other mixer those of the mixer."""
    for index, layer in enumerate(_layers_by_mixer(model.config)):
        for matrix in layer.matrices:
            if index == 0 or not matrix.name.startswith("mlp."):
                path = f"{layer.name}.{matrix.name}"
                yield path, model.get_submodule(path)


def block_of(side: Side, layer: int = 0) -> Block:
    block = side.model.model.layers[layer]
    assert isinstance(block, Block)
    return block


def _computed(
    side: Side,
    name: str,
    compute: Callable[..., Tensor],
    inputs: Mapping[str, tuple[Tensor, torch.dtype]],
    modules: Mapping[str, nn.Module],
    *,
    gradient: Tensor | None = None,
) -> Numbers:
    """`backward_numbers` of a side."""
    return backward_numbers(
        name,
        compute,
        inputs,
        modules,
        device=side.device,
        precision=side.plan.train.precision,
        gradient=gradient,
    )


# The parts


def _dequantized_weights(pair: ModelPair) -> Callable[[Side], Numbers]:
    """Of the device as floats in the dtype of matmuls; the exact model has them as its weights, in float32."""
    names = [name for name, _ in quantized_weights(pair.tested.model)]
    dtype = matmul_dtype(pair.tested.plan.train.precision)

    def numbers(side: Side) -> Numbers:
        stored = dict(quantized_weights(side.model))
        if stored:
            return {name: stored[name].dequantized(dtype) for name in names}
        return {name: side.model.get_parameter(name).detach() for name in names}

    return numbers


def _matmul_parts(
    path: str, module: nn.Module, pair: ModelPair, num_tokens: int
) -> Iterator[StepPart]:
    """The linear map without its adapter, then with it."""
    name = path.rpartition(".")[2]
    width = _input_width(module)
    numbers = _module_numbers(path, width, pair, is_stream=False)
    terms = max(width, num_tokens)
    if isinstance(module, LoraLinear):

        def base_numbers(side: Side) -> Numbers:
            with adapters_disabled(side.model):
                return numbers(side)

        yield StepPart(name, "matmul", base_numbers, terms)
        yield StepPart(f"adapter of {name}", "adapter", numbers, terms)
    elif isinstance(module, nn.Linear | QuantizedLinear):
        yield StepPart(name, "matmul", numbers, terms)
    else:  # a module of PEFT
        yield StepPart(f"adapter of {name}", "adapter", numbers, terms)


def _input_width(module: nn.Module) -> int:
    """Of a linear map, quantized, adapted or plain; 0 for anything else."""
    stored = getattr(module, "stored", None)
    width = getattr(module, "in_features", None) or getattr(stored, "inputs", None)
    return int(width or 0)


def _norms(model: Decoder) -> Iterator[tuple[str, int]]:
    """One norm of each kind: those of the first layer, and the last."""
    for path, module in model.named_modules():
        is_norm = path.endswith("norm") and hasattr(module, "eps")
        if is_norm and (path.startswith("model.layers.0.") or path == "model.norm"):
            width = module.width if isinstance(module, RMSNorm) else len(module.weight)
            yield path, width


def _module_numbers(
    path: str, width: int, pair: ModelPair, *, is_stream: bool
) -> Callable[[Side], Numbers]:
    """Of a module of one tensor. Norms get rows as small as their epsilon, next to rows of size 1."""
    leading = tuple(pair.batch.tokens.shape)
    dtype = _stream_dtype(pair) if is_stream else matmul_dtype(pair.tested.plan.train.precision)
    x = drawn(f"{path}, input", (*leading, width), dtype)
    epsilon = getattr(pair.tested.model.get_submodule(path), "eps", None)
    if epsilon is not None:
        sizes = torch.ones(*leading, 1)
        sizes[:, ::2] = epsilon**0.5
        x = (x * sizes).to(dtype).float()

    def numbers(side: Side) -> Numbers:
        module = side.model.get_submodule(path)
        return _computed(side, path, module, {"the input": (x, dtype)}, {"": module})

    return numbers


def _stream_dtype(pair: ModelPair) -> torch.dtype:
    """Of the residual stream: that of the embeddings."""
    return pair.tested.model.model.embed_tokens.weight.dtype


def rotated(side: Side) -> Numbers:
    """Queries of the first layer that rotates, at the positions of the plan's sequences."""
    model = side.model
    config = model.config
    length = side.plan.data.sequence_length
    positions = torch.arange(length, device=side.device)[None]
    assert isinstance(model.model, Backbone)
    tables = zip(layers(config), model.model.rotary(positions), strict=True)
    layer, rotary = next((layer, table) for layer, table in tables if table is not None)
    dtype = matmul_dtype(side.plan.train.precision)
    shape = (1, length, layer.num_heads, layer.head_dim)
    x = drawn("rotary, input", shape, torch.bfloat16)
    return _computed(
        side,
        "rotary",
        lambda x_BTHE: rotate(x_BTHE, rotary, dtype),
        {"the input": (x, dtype)},
        {},
    )


def _attention_numbers(layer: Layer, pair: ModelPair) -> Callable[[Side], Numbers]:
    """Of the layer's heads, window and scale on the documents of the batch."""
    config = pair.tested.plan.model.config
    dtype = matmul_dtype(pair.tested.plan.train.precision)
    sequences, length = pair.batch.tokens.shape
    heads = {"q": layer.num_heads, "k": layer.num_kv_heads, "v": layer.num_kv_heads}
    drawn_inputs = {
        name: drawn(f"attention, {name}", (sequences, length, count, layer.head_dim), dtype)
        for name, count in heads.items()
    }
    is_masked = pair.tested.plan.model.attention != "sdpa"

    def numbers(side: Side) -> Numbers:
        attention = block_of(side, layer.number).self_attn
        return attention_numbers(
            drawn_inputs,
            pair.batch.documents if is_masked else None,
            AttentionKernel(
                side.plan.model.attention,
                window=attention.window,
                scale=attention.scale,
                softcap=config.attention_softcap,
            ),
            device=side.device,
            precision=side.plan.train.precision,
        )

    return numbers


def _mixer_numbers(layer: Layer, pair: ModelPair) -> Callable[[Side], Numbers]:
    """Of another mixer than attention, on the documents of the batch."""
    dtype = matmul_dtype(pair.tested.plan.train.precision)
    shape = (*pair.batch.tokens.shape, layer.hidden_size)
    x = drawn(f"{layer.mixer}, input", shape, dtype)
    is_masked = pair.tested.plan.model.attention != "sdpa"

    def numbers(side: Side) -> Numbers:
        mixer = block_of(side, layer.number).mixer
        documents = pair.batch.documents.to(side.device) if is_masked else None
        layout = layout_of(documents, backend=side.plan.model.attention)
        return _computed(
            side,
            layer.mixer,
            lambda x_BTD: mixer(x_BTD, None, layout, None),
            {"the input": (x, dtype)},
            {"": mixer},
        )

    return numbers


def _activation_numbers(pair: ModelPair) -> Callable[[Side], Numbers]:
    """What the MLP does between its matmuls."""
    config = pair.tested.plan.model.config
    dtype = matmul_dtype(pair.tested.plan.train.precision)
    shape = (*pair.batch.tokens.shape, layers(config)[0].intermediate_size)
    names = ("gate", "up") if config.gated_mlp else ("up",)
    drawn_inputs = {name: drawn(f"activation, {name}", shape, dtype) for name in names}

    def numbers(side: Side) -> Numbers:
        mlp = block_of(side).mlp
        activate = mlp.act_fn if isinstance(mlp, MLP) else mlp.experts.activate

        def activated(first: Tensor, *gated: Tensor) -> Tensor:
            return math.prod(gated, start=activate(first))

        inputs = {name: (x, dtype) for name, x in drawn_inputs.items()}
        return _computed(side, "activation", activated, inputs, {})

    return numbers


def _expert_numbers(layer: Layer, pair: ModelPair) -> Callable[[Side], Numbers]:
    """The experts of a layer and their router."""
    dtype = matmul_dtype(pair.tested.plan.train.precision)
    x = drawn("experts, input", (*pair.batch.tokens.shape, layer.hidden_size), dtype)

    def numbers(side: Side) -> Numbers:
        mixture = block_of(side, layer.number).mlp
        assert isinstance(mixture, MixtureOfExperts)
        return _computed(
            side,
            "experts",
            lambda x_BTD: mixture.chosen(x_BTD, x_BTD, None)[0],
            {"the input": (x, dtype)},
            {"gate": mixture.gate, "experts": mixture.experts},
        )

    return numbers


def embedded_rows(side: Side) -> Numbers:
    """Rows of the embedding, and the sum of the gradients of each row."""
    model = side.model
    backbone = model.model
    assert isinstance(backbone, Backbone)
    generator = torch.Generator().manual_seed(SEED)
    # Few tokens, often: the gradient of a row is a sum.
    tokens = torch.randint(
        min(64, model.config.vocab_size),
        (2, side.plan.train.tokens_per_step // 2),
        generator=generator,
    ).to(side.device)
    positions = torch.arange(tokens.shape[1], device=side.device)
    if model.config.positions == "learned":
        positions = positions % model.config.max_positions
    modules: dict[str, nn.Module] = {"embed_tokens.": backbone.embed_tokens}
    if model.config.positions == "learned":
        modules["embed_positions."] = backbone.embed_positions
    return _computed(side, "embedding", lambda: backbone.embed(tokens, positions), {}, modules)


def _head_numbers(pair: ModelPair) -> Callable[[Side], Numbers]:
    """Log-probabilities of labels, less those of equal logits, and the gradients of their sum.

    Hidden states are as large as it takes for logits of deviation 1.
    """
    config = pair.tested.plan.model.config
    sequences, length = pair.batch.tokens.shape
    weight_size = typical_size(pair.exact.model.lm_head.weight)
    x = drawn("head, input", (sequences, length, config.hidden_size), torch.float32)
    x = (x / (weight_size * config.hidden_size**0.5)).to(torch.bfloat16).float()
    generator = torch.Generator().manual_seed(SEED)
    labels = torch.randint(config.vocab_size, (sequences, length), generator=generator)
    mask = (torch.rand(sequences, length, generator=generator) >= MASKED_SHARE).float()
    zeros = torch.zeros_like(labels)
    host_batch = Batch(labels, labels, mask, zeros, zeros)

    def numbers(side: Side) -> Numbers:
        model = side.model
        batch = host_batch.map_tensors(lambda tensor: tensor.to(side.device))
        head = side.objective.head(batch)

        def scored(hidden_BTD: Tensor) -> Tensor:
            scores_BT = head(hidden_BTD, model.lm_head, config.final_softcap)
            return (scores_BT + math.log(config.vocab_size)) * batch.loss_mask

        return _computed(
            side,
            "head",
            scored,
            {"the input": (x, matmul_dtype(side.plan.train.precision))},
            {"lm_head.": model.lm_head},
            gradient=-mask / float(mask.sum()),
        )

    return numbers


def _layer_numbers(pair: ModelPair, *, compiled: bool) -> Callable[[Side], Numbers]:
    """The first layer on a residual stream of size 1. A compiled block's `forward` is what was compiled of it."""
    config = pair.tested.plan.model.config
    dtype = _stream_dtype(pair)
    shape = (*pair.batch.tokens.shape, config.hidden_size)
    x = drawn("layer, input", shape, dtype)
    inputs = {"the input": (x, dtype)}
    if width := config.per_layer_input_size:
        inputs_dtype = matmul_dtype(pair.tested.plan.train.precision)
        drawn_input = drawn("layer, its input", (*shape[:-1], width), inputs_dtype)
        inputs["the layer's input"] = (drawn_input, inputs_dtype)

    def numbers(side: Side) -> Numbers:
        model = side.model
        block = block_of(side)
        batch = pair.batch.map_tensors(lambda tensor: tensor.to(side.device))
        backend = side.plan.model.attention
        is_masked = pair.tested.plan.model.attention != "sdpa"
        layout = layout_of(batch.documents if is_masked else None, backend=backend)
        assert isinstance(model.model, Backbone)
        rotary = model.model.rotary(batch.positions)[0]
        run: Callable[..., Any] = block if compiled else block.forward

        def stream(x_BTD: Tensor, *own_input: Tensor) -> Tensor:
            output: Tensor | LayerOutput = run(x_BTD, rotary, layout, None, *own_input)
            return output.x_BTD if isinstance(output, LayerOutput) else output

        return _computed(side, "layer", stream, inputs, {"": block})

    return numbers

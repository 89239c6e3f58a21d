"""The parts of a training step, each by itself on the device and in float32 on the CPU, from the same inputs.

A whole step rounds some hundred times, and a part a few times: what a part computes wrong shows at a hundredth of the
size that it needs to show in a step, and has a name.

B batch, T time, D width, H query heads, K key/value heads, E head width.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor, nn

from bloomery.check.exact_numbers import exact_optimizer, has_formula, products_of
from bloomery.check.rounding import (
    UNIT_ROUNDOFF,
    bound_of,
    root_mean_square,
    tile_error,
)
from bloomery.check.small_model import MASKED_SHARE, SEED, Pair, Side
from bloomery.check.whole_step import (
    ROUNDINGS_OF_LAYER,
    Difference,
    natural_size,
    update_error,
)
from bloomery.data.batch import Batch
from bloomery.facts.optimizers import OPTIMIZERS, USUAL_OPTIMIZER, is_in_layer
from bloomery.infer.forward import matmul_dtype, precision_context
from bloomery.model.adapters.lora import LoraLinear, adapters_disabled
from bloomery.model.attention.attend import attend, layout_of
from bloomery.model.decoder import Backbone, Block, Decoder
from bloomery.model.io.parameters import stream
from bloomery.model.io.weights import QuantizedLinear, quantized_weights
from bloomery.model.rope import rotate
from bloomery.train.optim.build import build_optimizer

Kind = Literal[
    "dequantization",
    "matmul",
    "adapter",
    "norm",
    "rotary",
    "attention",
    "activation",
    "embedding",
    "head",
    "layer",
    "compiled layer",
    "optimizer",
    "step",
]
Numbers = dict[str, Tensor]
RESULT = "results"
# Roundings to the dtype of matmuls from the inputs of a part to its results or gradients. The weights that a matmul
# reads are rounded once, and so is what it writes; an adapter adds two matmuls, a scale and a sum.
ROUNDINGS: Mapping[Kind, int] = {
    "dequantization": 1,
    "matmul": 4,
    "adapter": 12,
    "norm": 2,
    "rotary": 2,
    "attention": 8,  # scores, shares and the values' sum; each again in backward, and the sum over a row
    "activation": 5,
    "embedding": 2,
    "head": 6,
    "layer": ROUNDINGS_OF_LAYER,
    "compiled layer": ROUNDINGS_OF_LAYER,
}
OPTIMIZER_STEPS = 3
OPTIMIZER_ROWS = 256  # of a matrix that is updated in float64
OPTIMIZER_COLUMNS = 1024


@final
@dataclass(frozen=True)
class Part:
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
        roundoff = max(
            side.roundoff(in_attention=in_attention), UNIT_ROUNDOFF.get(numbers.dtype, 0.0)
        )
        return bound_of(roundoff, roundings=ROUNDINGS[self.kind], terms=self.terms) + self.extra


@final
@dataclass(frozen=True)
class PartResult:
    """`different_bits`: the device gave other bits when it computed the same once more."""

    differences: tuple[Difference, ...]
    different_bits: bool


def examine_part(part: Part, pair: Pair) -> PartResult:
    """Computes the part twice on the device and once on the CPU. Raises what the device raises."""
    exact = on_cpu(part, pair)
    first = on_device(part, pair)
    spoil_free_memory(pair.tested.device)
    second = on_device(part, pair)
    wrong_quantities = []
    for quantity, exact_numbers in exact.items():
        least_size = natural_size(quantity, exact)
        bound = part.bound(pair.tested, numbers=first.get(quantity, exact_numbers))
        # Wrong in either run counts: memory that is read before it is written may hold the right numbers once. A
        # gradient that does not exist is wrong, too.
        error = max(
            tile_error(numbers[quantity], exact_numbers, least_size=least_size)
            if quantity in numbers
            else math.inf
            for numbers in (first, second)
        )
        if not error <= bound:
            wrong_quantities.append(Difference(quantity, error, bound))
    bits_differ = any(not torch.equal(first[name], second[name]) for name in first)
    return PartResult(tuple(wrong_quantities), bits_differ)


def spoil_free_memory(device: torch.device) -> None:
    """Fills what a GPU's allocator has free with NaN: a kernel that reads what nobody wrote then shows it.

    Blocks of both pools of PyTorch's allocator: it serves small tensors from the second one.
    """
    if device.type == "cpu":
        return
    blocks = [torch.full((2**24,), math.nan, device=device) for _ in range(4)]
    blocks += [torch.full((2**16,), math.nan, device=device) for _ in range(64)]
    del blocks


def on_device(part: Part, pair: Pair) -> Numbers:
    return part.compute(pair.tested)


def on_cpu(part: Part, pair: Pair) -> Numbers:
    return part.compute(pair.exact)


def parts_of(pair: Pair) -> Iterator[Part]:
    """The parts of the small model, the ones that others are made of first."""
    model = pair.tested.model
    block = block_of(pair.tested)
    config = model.config
    num_tokens = pair.batch.tokens.numel()

    # Weights that are read, and matmuls with them.
    if dict(quantized_weights(model)):
        yield Part("dequantization", "dequantization", _dequantized_weights(pair), 1)
    for path, module in block.named_modules():
        if path.endswith("_proj") and hasattr(module, "forward") and _input_width(module):
            yield from _matmul_parts(path, module, pair, num_tokens)

    # What stands between matmuls.
    for path, width in _norms(model):
        is_stream = "layernorm" in path or path == "model.norm"
        compute = _module_numbers(path, width, pair, is_stream=is_stream)
        yield Part(path.rpartition(".")[2], "norm", compute, max(width, num_tokens))
    if config.positions == "rotary":
        # Angles are products of positions and frequencies: float32 keeps so much of them.
        extra = 8 * UNIT_ROUNDOFF[torch.float32] * pair.batch.tokens.shape[1]
        yield Part("rotary positions", "rotary", rotated, 1, extra=extra)
    windows = [config.window(layer) for layer in range(config.num_layers)]
    for window in dict.fromkeys(windows):
        compute = _attention_numbers(windows.index(window), pair)
        name = "attention" if window is None else "attention with a window"
        yield Part(name, "attention", compute, pair.batch.tokens.shape[1])
    yield Part("MLP activation", "activation", _activation_numbers(pair), 1)
    yield Part("embedding", "embedding", embedded, num_tokens)
    yield Part(
        "cross-entropy head", "head", _head_numbers(pair), max(config.vocab_size, num_tokens)
    )

    # A layer of them all; compiled it is another program.
    layer_terms = max(config.intermediate_size, config.hidden_size, num_tokens)
    yield Part("layer", "layer", _layer_numbers(pair, compiled=False), layer_terms)
    if pair.tested.plan.train.compile:
        yield Part(
            "compiled layer", "compiled layer", _layer_numbers(pair, compiled=True), layer_terms
        )


def block_of(side: Side, layer: int = 0) -> Block:
    block = side.model.model.layers[layer]
    assert isinstance(block, Block)
    return block


# Inputs, the same numbers on both sides


def drawn(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Normal numbers that `dtype` holds exactly, float32 on the CPU."""
    numbers = torch.empty(shape).normal_(generator=stream(SEED, name))
    return numbers.to(dtype).float()


def _on_side(side: Side, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The input of a side: float32 where it computes in float32, else in `dtype`."""
    is_float32 = side.plan.train.precision == "float32"
    return tensor.to(side.device, torch.float32 if is_float32 else dtype)


def backward_numbers(
    side: Side,
    name: str,
    compute: Callable[..., Tensor],
    inputs: Mapping[str, Tensor],
    modules: Mapping[str, nn.Module],
    *,
    gradient: Tensor | None = None,
) -> Numbers:
    """The result of `compute` of the inputs, and the gradients of these and of the modules' trainable parameters.

    Backward begins with `gradient`, or with drawn numbers, and runs outside of autocast, as in a step.
    """
    leaves = {leaf: tensor.detach().requires_grad_() for leaf, tensor in inputs.items()}
    parameters = {
        f"{prefix}{parameter_name}": parameter
        for prefix, module in modules.items()
        for parameter_name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    for parameter in parameters.values():
        parameter.grad = None
    with precision_context(side.plan.train.precision, side.device.type):
        result = compute(*leaves.values())
    if result.requires_grad:
        if gradient is None:
            gradient = drawn(f"{name}, gradient", tuple(result.shape), torch.bfloat16)
        torch.autograd.backward(result, gradient.to(side.device, result.dtype))
    numbers = {RESULT: result.detach().clone()}
    for leaf, tensor in (*leaves.items(), *parameters.items()):
        if tensor.grad is not None:
            numbers[f"gradient of {leaf}"] = tensor.grad
    for parameter in parameters.values():
        parameter.grad = None
    return numbers


# The parts


def _dequantized_weights(pair: Pair) -> Callable[[Side], Numbers]:
    """Of the device as floats in the dtype of matmuls; the exact model has them as its weights, in float32."""
    names = [name for name, _ in quantized_weights(pair.tested.model)]
    dtype = matmul_dtype(pair.tested.plan.train.precision)

    def numbers(side: Side) -> Numbers:
        stored = dict(quantized_weights(side.model))
        if stored:
            return {name: stored[name].dequantized(dtype) for name in names}
        return {name: side.model.get_parameter(name).detach() for name in names}

    return numbers


def _matmul_parts(path: str, module: nn.Module, pair: Pair, num_tokens: int) -> Iterator[Part]:
    """The linear map without its adapter, then with it."""
    name = path.rpartition(".")[2]
    width = _input_width(module)
    numbers = _module_numbers(f"model.layers.0.{path}", width, pair, is_stream=False)
    terms = max(width, num_tokens)
    if isinstance(module, LoraLinear):

        def base_numbers(side: Side) -> Numbers:
            with adapters_disabled(side.model):
                return numbers(side)

        yield Part(name, "matmul", base_numbers, terms)
        yield Part(f"adapter of {name}", "adapter", numbers, terms)
    elif isinstance(module, nn.Linear | QuantizedLinear):
        yield Part(name, "matmul", numbers, terms)
    else:  # a module of PEFT
        yield Part(f"adapter of {name}", "adapter", numbers, terms)


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
            yield path, len(module.weight)


def _module_numbers(
    path: str, width: int, pair: Pair, *, is_stream: bool
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
        return backward_numbers(
            side, path, module, {"the input": _on_side(side, x, dtype)}, {"": module}
        )

    return numbers


def _stream_dtype(pair: Pair) -> torch.dtype:
    """Of the residual stream: that of the embeddings."""
    return pair.tested.model.model.embed_tokens.weight.dtype


def rotated(side: Side) -> Numbers:
    """Queries of the first layer that rotates, at the positions of the plan's sequences."""
    model = side.model
    config = model.config
    length = side.plan.data.sequence_length
    positions = torch.arange(length, device=side.device)[None]
    assert isinstance(model.model, Backbone)
    rotary = next((table for table in model.model.rotary(positions) if table is not None), None)
    assert rotary is not None
    dtype = matmul_dtype(side.plan.train.precision)
    shape = (1, length, config.num_heads, config.head_dim)
    x = drawn("rotary, input", shape, torch.bfloat16)
    return backward_numbers(
        side,
        "rotary",
        lambda x_BTHE: rotate(x_BTHE, rotary, dtype),
        {"the input": _on_side(side, x, dtype)},
        {},
    )


def _attention_numbers(layer: int, pair: Pair) -> Callable[[Side], Numbers]:
    """Of the layer's heads, window and scale on the documents of the batch."""
    config = pair.tested.plan.model.config
    dtype = matmul_dtype(pair.tested.plan.train.precision)
    sequences, length = pair.batch.tokens.shape
    heads = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
    drawn_inputs = {
        name: drawn(f"attention, {name}", (sequences, length, count, config.head_dim), dtype)
        for name, count in heads.items()
    }
    is_masked = pair.tested.plan.model.attention != "sdpa"

    def numbers(side: Side) -> Numbers:
        attention = block_of(side, layer).self_attn
        documents = pair.batch.documents.to(side.device) if is_masked else None
        layout = layout_of(documents, backend=side.plan.model.attention)

        def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q_BHTE, k_BKTE, v_BKTE = (tensor.transpose(1, 2) for tensor in (q, k, v))
            return attend(
                q_BHTE,
                k_BKTE,
                v_BKTE,
                layout,
                backend=attention.backend,
                window=attention.window,
                softcap=config.attention_softcap,
                scale=attention.scale,
                dropout=0.0,
            )

        inputs = {name: _on_side(side, x, dtype) for name, x in drawn_inputs.items()}
        return backward_numbers(side, "attention", attended, inputs, {})

    return numbers


def _activation_numbers(pair: Pair) -> Callable[[Side], Numbers]:
    """What the MLP does between its matmuls."""
    config = pair.tested.plan.model.config
    dtype = matmul_dtype(pair.tested.plan.train.precision)
    shape = (*pair.batch.tokens.shape, config.intermediate_size)
    names = ("gate", "up") if config.gated_mlp else ("up",)
    drawn_inputs = {name: drawn(f"activation, {name}", shape, dtype) for name in names}

    def numbers(side: Side) -> Numbers:
        activate = block_of(side).mlp.activate

        def activated(first: Tensor, *gated: Tensor) -> Tensor:
            return math.prod(gated, start=activate(first))

        inputs = {name: _on_side(side, x, dtype) for name, x in drawn_inputs.items()}
        return backward_numbers(side, "activation", activated, inputs, {})

    return numbers


def embedded(side: Side) -> Numbers:
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
    return backward_numbers(
        side, "embedding", lambda: backbone.embed(tokens, positions), {}, modules
    )


def _head_numbers(pair: Pair) -> Callable[[Side], Numbers]:
    """Log-probabilities of labels, less those of equal logits, and the gradients of their sum.

    Hidden states are as large as it takes for logits of deviation 1.
    """
    config = pair.tested.plan.model.config
    sequences, length = pair.batch.tokens.shape
    weight_size = root_mean_square(pair.exact.model.lm_head.weight)
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

        return backward_numbers(
            side,
            "head",
            scored,
            {"the input": _on_side(side, x, matmul_dtype(side.plan.train.precision))},
            {"lm_head.": model.lm_head},
            gradient=-mask / float(mask.sum()),
        )

    return numbers


def _layer_numbers(pair: Pair, *, compiled: bool) -> Callable[[Side], Numbers]:
    """The first layer on a residual stream of size 1. A compiled block's `forward` is what was compiled of it."""
    config = pair.tested.plan.model.config
    dtype = _stream_dtype(pair)
    shape = (*pair.batch.tokens.shape, config.hidden_size)
    x = drawn("layer, input", shape, dtype)

    def numbers(side: Side) -> Numbers:
        model = side.model
        block = block_of(side)
        batch = pair.batch.map_tensors(lambda tensor: tensor.to(side.device))
        backend = side.plan.model.attention
        is_masked = pair.tested.plan.model.attention != "sdpa"
        layout = layout_of(batch.documents if is_masked else None, backend=backend)
        assert isinstance(model.model, Backbone)
        rotary = model.model.rotary(batch.positions)[0]
        run = block if compiled else block.forward
        return backward_numbers(
            side,
            "layer",
            lambda x_BTD: run(x_BTD, rotary, layout),
            {"the input": _on_side(side, x, dtype)},
            {"": block},
        )

    return numbers


# The optimizer


def examine_optimizer(pair: Pair) -> PartResult:
    """Three updates of each kind of trainable parameter against the formula in float64, with rates at which the update,
    the decay and the corrections of the first steps are as large as the weights.

    Of an optimizer without a formula, only whether the device repeats its updates bit by bit.
    """
    side = pair.tested
    plan = side.plan.optimizer
    spec = OPTIMIZERS[plan.kind]
    adamw_rate = OPTIMIZERS[
        USUAL_OPTIMIZER
    ].loud_rate  # of what an optimizer with a rate of its own leaves
    rates = (
        {"learning_rate": spec.loud_rate}
        if spec.own_rate is None
        else {"learning_rate": adamw_rate, spec.own_rate.key: spec.loud_rate}
    )
    # The decay of one update is a tenth of the weight, where the recipe has any.
    decay = 0.1 / spec.loud_rate if plan.weight_decay else 0.0
    loud_plan = plan.model_copy(update={**rates, "weight_decay": decay})
    loud_side = Side(
        side.plan.model_copy(update={"optimizer": loud_plan}), side.model_and_optimizer
    )

    runs = [_updated(loud_side) for _ in range(2)]
    different_bits = any(not torch.equal(runs[0][name][0], runs[1][name][0]) for name in runs[0])
    wrong_quantities = []
    for name, (weight, before, exact) in runs[0].items():
        if exact is None:
            continue
        products = products_of(plan, name, tuple(before.shape), side.device)
        for run in runs:
            weight = run[name][0]
            error, bound = update_error(
                loud_side, weight, before, exact, products, steps=OPTIMIZER_STEPS
            )
            if not error <= bound:
                wrong_quantities.append(Difference(f"update of {name}", error, bound))
    return PartResult(tuple(wrong_quantities), different_bits)


def _updated(side: Side) -> dict[str, tuple[Tensor, Tensor, Tensor | None]]:
    """Of a slice of one parameter of each name in a layer and each other one: the weight after the updates on the
    device, before them, and after them by the formula; None where the optimizer has none.
    """
    parameters = _sample(side.model_and_optimizer.optimizer.named_parameters)
    holder = nn.Module()
    weights: dict[str, nn.Parameter] = {}
    before: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        shape = tuple(
            min(size, most)
            for size, most in zip(
                parameter.shape, (OPTIMIZER_ROWS, OPTIMIZER_COLUMNS), strict=False
            )
        )
        values = 0.02 * drawn(f"{name}, weight", shape, parameter.dtype)
        weight = nn.Parameter(values.to(parameter.dtype).to(side.device))
        weights[name] = weight
        before[name] = weight.detach().double().cpu()
        _hold(holder, name, weight)

    optimizer = build_optimizer(holder, side.plan.optimizer, seed=SEED)
    compared = weights if has_formula(side.plan.optimizer) else {}
    exact = {name: before[name] for name in compared}
    exact_optimizers = {
        name: exact_optimizer(side.plan.optimizer, name, tuple(weight.shape))
        for name, weight in compared.items()
    }
    for step in range(OPTIMIZER_STEPS):
        for name, weight in weights.items():
            gradient = 1e-3 * drawn(f"{name}, gradient {step}", tuple(weight.shape), torch.float32)
            weight.grad = gradient.to(weight.dtype).to(side.device)
            if name in compared:
                exact[name] = exact_optimizers[name].step(exact[name], weight.grad.double().cpu())
        optimizer.step(1.0)
    return {
        name: (weight.detach(), before[name], exact.get(name)) for name, weight in weights.items()
    }


def _sample(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """One parameter of each shape, dtype and place: inside layers or not."""
    sample: dict[object, tuple[str, nn.Parameter]] = {}
    for name, parameter in parameters.items():
        key = (tuple(parameter.shape), parameter.dtype, is_in_layer(name))
        sample.setdefault(key, (name, parameter))
    return dict(sample.values())


def _hold(holder: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Gives the module the parameter under its full name, which an optimizer's groups depend on."""
    *folders, leaf = name.split(".")
    for folder in folders:
        if folder not in dict(holder.named_children()):
            holder.add_module(folder, nn.Module())
        holder = holder.get_submodule(folder)
    holder.register_parameter(leaf, parameter)

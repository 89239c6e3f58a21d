"""Seconds of a step by operation: matmuls and attention by FLOPs, everything else by bytes moved.

Attention in Triton kernels of Bloomery's own: by their instructions (estimate/kernels.py). On a CPU, which computes one
operator after the other: also by the operators called (estimate/operators.py).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bloomery.facts.counting import (
    Shape,
    block_norms,
    flops_per_token,
    input_products,
    is_expert_stack,
)
from bloomery.facts.limits import CPU_TILE, storage_bytes
from bloomery.facts.optimizers import OPTIMIZERS
from bloomery.hardware.machine import Machine, ProductRates
from bloomery.hardware.profile import Profile
from bloomery.hardware.specs import cpu_efficiency
from bloomery.plan.estimate import delta_net, experts
from bloomery.plan.estimate.activations import keeps_scores, recomputed_shares
from bloomery.plan.estimate.kernels import ScoreSeconds, TiledScores, kernel_seconds
from bloomery.plan.estimate.operators import (
    operator_seconds,
    operators_of_micro_batch,
    rule_operators,
)
from bloomery.plan.estimate.states import TrainedLayer, TrainedModel
from bloomery.plan.estimate.step import StepShape
from bloomery.plan.estimate.towers import tower_flops
from bloomery.plan.types import Estimate

# Bytes moved per token and value of a width, forward and backward, in half precision: (eager, compiled).
EAGER_NORM = {
    "layer": 38.0,
    "layer_unit_offset": 48.0,
    "rms": 100.0,
    "rms_unit_offset": 110.0,
}  # an RMS norm is eight small kernels, a layer norm is one
COMPILED_NORM = 20.0
RESIDUALS = (24.0, 8.0)  # both additions of a layer
ROTARY = (80.0, 16.0)  # per value of q and k
HEADS = (24.0, 8.0)  # splitting and joining heads, biases: per value of q, k, v and the output
CONVOLUTION = (90.0, 40.0)  # of three taps with a gate before and after, per value of the width
GATED = (28.0, 14.0)  # act(gate) * up: per value of the inner width
PLAIN = (10.0, 8.0)
DROPOUT = (20.0, 4.0)
QUADRATIC = (64.0, 30.0)  # per score, where every score of attention is kept
# per score of a tile: blockwise attention in plain PyTorch; only the causal half exists
TILES = 60.0
LOSS = {"plain": (30.0, 16.0), "kept": (12.0, 8.0), "chunked": (16.0, 12.0)}  # per logit
CLIPPING = 3  # passes over the gradient: its norm, and its scaling
CASTS = 6.0  # bytes per parameter and micro-batch: autocast's half-precision copies

COMPILED_GAIN = 1.15  # on a CPU; measured: 3 to 35%
# Of a checked CPU: the share of its products' rate that matmuls of a step reach, and the share of its copies' rate that
# everything between them does (small kernels, casts, the optimizer). Two AMX cores take 0.118 s for a step of the demo,
# two of an AMD EPYC 0.177 s, two without bf16 instructions 0.41 s.
CHECKED_PRODUCTS = (0.55, 0.80, 0.95)
CHECKED_COPIES = (0.09, 0.125, 0.20)
# Where the check timed the products of a step by themselves, again and again: the share of their rates that they reach
# between others. Matrix units, so many times as fast as float32, wait for memory: with AMX, SmolLM2, 0.57 with LoRA and
# 0.70 with all weights.
TIMED_PRODUCTS = (0.60, 0.85, 1.0)
MATRIX_PRODUCTS = (0.45, 0.65, 0.90)
MATRIX_UNITS = 4.0
# Attention in bfloat16 computes exponentials beside its products: at most so many times a core's float32 products,
# measured with AMX, whose products are seven times as fast.
VECTOR_SHARE = 2.0
# Bytes per second of a core that C++ of ours and fused AdamW move in one pass: this share of its copies' rate, at most
# so many, and the range. Measured with AMX (copies of 26 GB/s): RMS norms 11 GB/s, gates 7, AdamW 9.
STREAMED_COPIES = 0.31
STREAMED_BYTES = 10e9
STREAMED_RANGE = (0.65, 1.0, 1.6)
# Of the rate of wide matrices a CPU's products of rank r reach r / (r + NARROW): measured with 4, 8, 16, 32 and 64 and
# 1,024 tokens 0.16, 0.34, 0.62, 0.73 and 0.74 of it, in bfloat16 on a core of an AMD EPYC.
NARROW = 10.0
# Bytes that a CPU moves at its copies' share while it dequantizes a weight in plain PyTorch: 0.8 to 1.8 ns for nf4 and
# 0.4 to 0.8 for int8 on the same core, whose share is 12 GB/s.
DEQUANTIZED = {"nf4": 14.0, "int8": 7.0}
ADDED = 6.0  # bytes per value where LoRA's part is added to the output, and its gradient to that of the input

BANDWIDTH_SHARE = (0.60, 0.80, 0.90)  # of the memory's rate that simple kernels reach
# of the matmul rate: flash kernels reach 50 to 70% of it (arXiv:2307.08691)
FUSED_ATTENTION_SHARE = 0.6
# Attention's backward in units of its forward: recomputed scores make five matmuls against two.
FLASH_BACKWARD = 2.5
QUADRATIC_BACKWARD = 2.0
RULE_BACKWARD = 3.0  # of a delta net: the gradients of its products, which are computed once more
FLOAT32_SHARE = 1 / 8  # of a GPU's rate in half precision, where the table has none of float32
ON_DEVICE = (
    "matmul",
    "attention",
    "vision tower",
    "delta rules",
    "memory-bound",
)  # parts of a step
LAUNCHES = (110, 45)  # kernels of a layer and micro-batch, forward and backward: eager, compiled
LAUNCH_SECONDS = 6e-6
LAYER_INPUTS = "model.per_layer_model_projection.weight"  # makes what layers are given of tokens


@dataclass(frozen=True, kw_only=True)
class Products:
    """FLOPs, or FLOP/s, of a step's matrix products by kind.

    `wide` makes outputs and gradients of inputs, `weights` gradients of weights; `narrow`: of LoRA's matrices.
    """

    wide: float
    weights: float
    narrow: float

    def times(self, factor: float) -> "Products":
        return Products(
            wide=self.wide * factor, weights=self.weights * factor, narrow=self.narrow * factor
        )

    def seconds_at(self, rates: "Products") -> float:
        return self.wide / rates.wide + self.weights / rates.weights + self.narrow / rates.narrow


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Training rates of a device: FLOP/s as a share of its peak, and bytes/s (None: part of the share)."""

    peak: float
    share: tuple[float, float, float]  # low, typical, high
    float32_peak: float | None = None  # of delta rules, which are float32 in every precision
    bandwidth: float | None = None
    bandwidth_share: tuple[float, float, float] = BANDWIDTH_SHARE
    kernels: Mapping[str, ScoreSeconds] | None = None  # of the attention backend `triton`
    operators: tuple[float, float, float] | None = None  # seconds of each, on a CPU
    # FLOP/s of each kind, on a CPU whose products of a step were timed, and the share of them in a step
    products: "Products | None" = None
    product_share: tuple[float, float, float] = TIMED_PRODUCTS
    attention_peak: float | None = None  # of compiled attention
    streamed: float | None = (
        None  # bytes/s of code that passes over memory once, on a CPU that was measured
    )

    def shared(self, ranks: int) -> "Rate":
        """The rate of each of so many processes on the cores of one CPU."""
        return replace(
            self,
            peak=self.peak / ranks,
            products=self.products and self.products.times(1 / ranks),
            attention_peak=self.attention_peak and self.attention_peak / ranks,
            streamed=self.streamed and self.streamed / ranks,
            float32_peak=self.float32_peak and self.float32_peak / ranks,
            bandwidth=self.bandwidth and self.bandwidth / ranks,
        )


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """Recomputation in backward, as shares of forward's work in the layers."""

    products: float
    attention: float
    between: float
    rules: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Work:
    """Work of one device in an optimizer step: FLOPs, bytes, kernel launches."""

    products: float
    attention: float
    between: float  # bytes between matmuls
    update: float  # bytes of the optimizer
    launches: float = 0.0
    scores: TiledScores | None = None  # of the attention backend `triton`
    # On a CPU: the operators called one after the other, and the FLOPs of the optimizer.
    operators: float = 0.0
    rules: float = 0.0  # FLOPs of delta rules
    update_products: float = 0.0
    by_kind: Products | None = None  # `products`, where the kinds differ in speed
    # On a CPU: whether `between` and `update` are those of code that passes over memory once.
    streams: bool = False
    streams_update: bool = False
    tower: float = 0.0  # FLOPs of what reads pictures

    def with_shard_of_update(self, shard: int) -> "Work":
        """The work of one of so many devices that update the parameters together."""
        return replace(
            self, update=self.update / shard, update_products=self.update_products / shard
        )


def device_rate(
    profile: Profile, machine: Machine, *, precision: str, width: int, compiled: bool
) -> Rate | None:
    """None when the table does not have the device in this precision."""
    dtype = "bfloat16" if precision.startswith("bfloat16") else precision
    if profile.accelerator is not None:
        gpu = profile.gpu
        arch = profile.arch
        peak = gpu.peak_flops(dtype) if gpu is not None else None
        if gpu is None or arch is None or arch.efficiency is None or peak is None:
            return None
        return Rate(
            peak=peak,
            float32_peak=gpu.peak_flops("float32"),
            share=arch.efficiency,
            bandwidth=gpu.bandwidth_gbs * 1e9,
        )

    # A CPU: measured on this machine where it was checked, else the table's rate of a core.
    gain = COMPILED_GAIN if compiled else 1.0
    cores = machine.host.cpu_cores
    check = machine.cpu_check
    if check is not None and dtype in check.gflops:
        product_gflops = check.gflops[dtype]
        float32_gflops = check.gflops.get("float32", product_gflops)
        vectors = VECTOR_SHARE * float32_gflops
        return Rate(
            peak=product_gflops * 1e9 * cores * gain,
            float32_peak=float32_gflops * 1e9 * cores,
            share=CHECKED_PRODUCTS,
            bandwidth=check.copy_gbs * 1e9 * cores * gain,
            bandwidth_share=CHECKED_COPIES,
            operators=operator_seconds(check),
            products=_measured_products(check.products.get(dtype, ()), width, cores),
            product_share=MATRIX_PRODUCTS
            if product_gflops > MATRIX_UNITS * float32_gflops
            else TIMED_PRODUCTS,
            attention_peak=min(FUSED_ATTENTION_SHARE * max(product_gflops, vectors), vectors)
            * 1e9
            * cores
            if dtype == "bfloat16"
            else None,
            streamed=min(STREAMED_COPIES * check.copy_gbs * 1e9, STREAMED_BYTES) * cores,
        )
    gflops_per_core = profile.cpu.gflops.get(dtype) if profile.cpu else None
    if gflops_per_core is None:
        return None
    float32_gflops = profile.cpu.gflops.get("float32", gflops_per_core) if profile.cpu else 0.0
    low, typical, high = cpu_efficiency(width, dtype)
    return Rate(
        peak=gflops_per_core * 1e9 * cores,
        float32_peak=float32_gflops * 1e9 * cores,
        share=(low, min(0.95, typical * gain), min(1.0, high * gain)),
        operators=operator_seconds(None),
    )


def _measured_products(measured: Sequence[ProductRates], width: int, cores: int) -> Products | None:
    """FLOP/s of matrices of this width: between the two that were measured next to it, in logarithms."""
    if not measured:
        return None
    below = max((each for each in measured if each.width <= width), default=measured[0], key=_width)
    above = min(
        (each for each in measured if each.width >= width), default=measured[-1], key=_width
    )
    share = 0.0
    if below.width < above.width:
        share = math.log(width / below.width) / math.log(above.width / below.width)

    def rate(low: float, high: float) -> float:
        return float(low * (high / low) ** share * 1e9 * cores)

    return Products(
        wide=rate(
            2 / (1 / below.forward + 1 / below.inputs), 2 / (1 / above.forward + 1 / above.inputs)
        ),
        weights=rate(below.weights, above.weights),
        narrow=rate(below.narrow, above.narrow),
    )


def _width(rates: ProductRates) -> int:
    return rates.width


def layer_traffic(step: StepShape, layer: TrainedLayer) -> float:
    """Bytes per token of one layer, forward and backward, without attention's scores."""
    config = step.config
    facts = layer.layer
    compiled = int(step.compiled)
    width = config.hidden_size
    projected_width = facts.query_width + (facts.key_width if facts.keys_of is None else 0)
    norm = COMPILED_NORM if step.compiled else EAGER_NORM[config.norm]
    num_norms = len(block_norms(facts.norm_placement, facts.experts))
    total = num_norms * norm * width + RESIDUALS[compiled] * width
    total += HEADS[compiled] * 2 * projected_width
    total += (GATED if facts.gated_mlp else PLAIN)[compiled] * facts.intermediate_size
    if facts.per_layer_input_size:
        total += (norm + RESIDUALS[compiled] / 2) * width
        total += GATED[compiled] * facts.per_layer_input_size
    if facts.rotation is not None:
        total += ROTARY[compiled] * projected_width
    if facts.delta_net is not None:
        total += delta_net.traffic_per_token(facts.delta_net)
    if facts.short_convolution is not None:
        total += CONVOLUTION[compiled] * width
    if config.residual_dropout:
        total += DROPOUT[compiled] * width
    return total * step.element_bytes / 2


def score_traffic(step: StepShape, layer: TrainedLayer) -> float:
    """Bytes per token of one layer for attention's scores: none where a fused kernel keeps them on the chip."""
    num_heads = layer.layer.num_heads
    length = step.sequence_length
    if keeps_scores(step):
        return QUADRATIC[int(step.compiled)] * num_heads * length * step.element_bytes / 2
    if step.attention == "blockwise":
        return TILES * num_heads * length / 2 * step.element_bytes / 2
    return 0.0


def attention_flops(step: StepShape, layer: TrainedLayer) -> float:
    """FLOPs per token of one layer's scores in forward."""
    return 4.0 * _keys_per_query(step, layer) * layer.layer.query_width


def rule_flops(step: StepShape, layer: TrainedLayer) -> float:
    """FLOPs per token of a delta net's rule in forward, its triangular systems included; 0 of another mixer."""
    facts = layer.layer
    if facts.delta_net is None:
        return 0.0
    return facts.mixer_flops(step.sequence_length) + facts.solve_flops(step.sequence_length)


def _keys_per_query(step: StepShape, layer: TrainedLayer) -> float:
    """All keys where scores are kept, else those of the causal window, averaged over queries.

    In a window of w of T tokens the first w queries see w/2 on average and all later ones w: w - w^2 / 2T.
    """
    length = step.sequence_length
    if keeps_scores(step):
        return float(length)
    window = min(length, layer.layer.window or length)
    return window - window**2 / (2 * length)


def _tiled_scores(step: StepShape, forwards: float, tokens: int) -> TiledScores:
    """Of the attention backend `triton`. `forwards`: how often each score is computed before its backward."""
    queries = tokens * sum(step.model.by_layer(lambda layer: float(layer.layer.num_heads)))
    scores = tokens * sum(
        step.model.by_layer(lambda layer: _keys_per_query(step, layer) * layer.layer.num_heads)
    )
    return TiledScores(
        forward=scores * forwards,
        forward_queries=queries * forwards,
        backward=scores,
        backward_queries=queries,
    )


def recompute(step: StepShape) -> Recompute:
    """What activation checkpointing computes again, layer by layer."""
    shares = recomputed_shares(step.checkpointing, step.model.layer_numbers)

    def share_of(work_by_layer: Sequence[float]) -> float:
        work = sum(work_by_layer)
        recomputed_work = sum(
            share * work for share, work in zip(shares, work_by_layer, strict=True)
        )
        return recomputed_work / work if work else 0.0

    model = step.model
    return Recompute(
        products=share_of([float(layer.layer.active_products) for layer in model.layers]),
        attention=share_of(model.by_layer(lambda layer: attention_flops(step, layer))),
        between=share_of(model.by_layer(lambda layer: layer_traffic(step, layer))),
        rules=share_of(model.by_layer(lambda layer: rule_flops(step, layer))),
    )


def keeps_logits(step: StepShape) -> bool:
    """Whether backward takes the logits of forward: all are one chunk, on a CPU of one tile of the vocabulary."""
    one_tile = step.on_gpu or step.head_outputs <= CPU_TILE
    return one_tile and step.score_chunk >= step.tokens_per_micro_batch


def work_of(
    step: StepShape,
    *,
    tokens: int,
    clips: bool = True,
    recomputed: Recompute | None = None,
    loss: str = "",
) -> Work:
    """The step of one device over `tokens` tokens: of the model, or of the stage of a pipeline that it has.

    `recomputed` and `loss`: of another program, where they differ.
    """
    model = step.model
    recomputed = recomputed or recompute(step)
    loss = loss or ("kept" if keeps_logits(step) else "chunked")
    micro_batches = tokens / step.tokens_per_micro_batch
    counting_forwards = int(step.counts_first and micro_batches > 1)

    # FLOPs per token.
    by_kind = product_flops(step, recomputed, chunked=loss == "chunked")
    counted = counting_forwards * 2.0 * sum(layer.layer.active_products for layer in model.layers)
    by_kind = replace(by_kind, wide=by_kind.wide + counted)
    products = by_kind.wide + by_kind.weights + by_kind.narrow * _narrow_factor(step)
    attention_backward = QUADRATIC_BACKWARD if keeps_scores(step) else FLASH_BACKWARD
    attention_forwards = 1 + step.extra_forwards + counting_forwards + recomputed.attention
    attention = sum(model.by_layer(lambda layer: attention_flops(step, layer))) * (
        attention_forwards + attention_backward
    )

    rule_forwards = 1 + step.extra_forwards + counting_forwards + recomputed.rules
    rules = sum(model.by_layer(lambda layer: rule_flops(step, layer))) * (
        rule_forwards + RULE_BACKWARD
    )

    # Bytes between matmuls. On a CPU compiled steps are faster as a whole, and casts make up for the bytes that half
    # precision saves.
    in_one_pass = not step.on_gpu and step.attention == "compiled"  # C++ has norms, gates, too
    traffic_step = (
        step if step.on_gpu else replace(step, compiled=in_one_pass, precision="bfloat16")
    )
    layer_bytes = sum(
        model.by_layer(
            lambda layer: layer_traffic(traffic_step, layer) + score_traffic(traffic_step, layer)
        )
    )
    if not step.on_gpu:
        layer_bytes += ADDED * sum(sum(shape) for shape in _adapted_shapes(step))
    logit_bytes = 0.0
    if model.has_head:
        logit_bytes = LOSS[loss][int(traffic_step.compiled)] * step.head_outputs * step.loss_share
    between = layer_bytes * (1 + recomputed.between / 3) + logit_bytes
    between = between * (1 + step.extra_forwards / 3) * tokens
    between += layer_bytes * counting_forwards / 3 * tokens
    between += (_cast_bytes(step) + _dequantize_bytes(step, recomputed)) * micro_batches
    between += _expert_bytes(step, recomputed) * micro_batches

    # Weights and states are read and written, gradients read, and scaled where they are clipped.
    states = model.optimizer_bytes(step.optimizer, step.precision)
    weights = model.trainable_bytes(step.precision)
    update = 3 * weights + 2 * states + (CLIPPING * weights if clips else 0)

    kernels = float(LAUNCHES[int(step.compiled)] * len(model.layers))
    kernels += sum(model.by_layer(lambda layer: rule_operators(step, layer)))
    return Work(
        products=products * tokens,
        tower=0.0
        if step.pictures is None
        else tower_flops(
            step.pictures,
            sequences=tokens / step.sequence_length,
            checkpointing=step.checkpointing,
        ),
        streams=in_one_pass,
        streams_update=not step.on_gpu and step.optimizer == "adamw",
        by_kind=None if step.on_gpu else by_kind.times(tokens),
        attention=attention * tokens,
        rules=rules * tokens,
        between=between,
        update=update,
        launches=kernels * micro_batches if step.on_gpu else 0.0,
        operators=0.0
        if step.on_gpu
        else operators_of_micro_batch(step, recomputed=recomputed.between + counting_forwards)
        * micro_batches,
        update_products=0.0
        if step.on_gpu
        else OPTIMIZERS[step.optimizer].update_flops(model.layer_matrices),
        scores=_tiled_scores(step, attention_forwards, tokens)
        if step.attention == "triton"
        else None,
    )


def _adapted_shapes(step: StepShape) -> list[tuple[int, int]]:
    """Outputs and inputs of every adapted matrix."""
    return [
        (adapted.outputs, adapted.inputs)
        for layer in step.model.layers
        for adapted in layer.layer.matrices
        if layer.adapter_rank(adapted.name)
    ]


def _cast_bytes(step: StepShape) -> float:
    """Bytes of autocast's copies per micro-batch, where weights are wider than the inputs of matmuls."""
    model = step.model
    trainable = model.trainable_count
    bytes_per_weight = model.trainable_bytes(step.precision) / max(1, trainable)
    if bytes_per_weight <= step.element_bytes:
        return 0.0
    return CASTS * (trainable if step.mode.frozen else model.weight_count)


def _expert_bytes(step: StepShape, recomputed: Recompute) -> float:
    """Bytes per micro-batch of reading the experts that its tokens reach."""
    passes = 2 + recomputed.products + step.extra_forwards
    return sum(
        step.model.by_layer(
            lambda layer: experts.read_bytes(
                step,
                layer.layer,
                is_trained=any(map(is_expert_stack, layer.trained)),
                passes=passes,
            )
        )
    )


def _dequantize_bytes(step: StepShape, recomputed: Recompute) -> float:
    """Bytes per micro-batch of dequantizing every matrix: read quantized, written, in each pass over the layers."""
    mode = step.mode
    if mode.quantize_kind == "none":
        return 0.0
    shapes = [
        shape
        for layer in step.model.layers
        for shape in (
            *((matrix.outputs, matrix.inputs) for matrix in layer.layer.matrices),
            *experts.stacked_matrices(layer.layer),
        )
    ]
    values = sum(map(math.prod, shapes))
    if not step.on_gpu:
        return DEQUANTIZED[mode.quantize_kind] * values * (2 + recomputed.products)
    read_bytes = sum(
        storage_bytes(shape, mode.quantize_kind, mode.double_quant) for shape in shapes
    )
    written_bytes = step.element_bytes * values
    return float(read_bytes + written_bytes) * (2 + recomputed.products)


def product_flops(step: StepShape, recomputed: Recompute, *, chunked: bool) -> Products:
    """FLOPs per token: forward, gradients of inputs, gradients of trainable weights, recomputation."""
    model = step.model
    products = 2.0 * sum(layer.layer.active_products for layer in model.layers)
    weight_gradients = 2.0 * sum(
        model.by_layer(lambda layer: _values_met(layer.trained, layer.layer.expert_share))
    )
    if model.has_layer_inputs:
        products += 2.0 * input_products(step.config)
        if LAYER_INPUTS in model.trained:
            weight_gradients += 2.0 * input_products(step.config)
    adapter = 2.0 * _values_met(model.adapter)
    head = 2.0 * step.head_outputs * step.config.hidden_size * step.loss_share
    head_passes = 2 + chunked
    # The reference model: the layers and the head, without the adapters.
    if not model.has_head:
        head = 0.0
    elif model.trains_head:
        weight_gradients += head
    extra = step.extra_forwards * (products + head)
    if step.teacher is not None and step.teacher_place == "device" and model.has_head:
        extra += flops_per_token(step.teacher, step.sequence_length, backward=False)
    return Products(
        wide=products * (2 + recomputed.products) + head * head_passes + extra,
        weights=weight_gradients,
        narrow=adapter * (3 + recomputed.products),
    )


def _narrow_factor(step: StepShape) -> float:
    """Of a CPU whose products were timed at one shape: how much longer those of LoRA's matrices take."""
    shapes = [shape for shape in step.model.adapter.values() if len(shape) == 2]
    if step.on_gpu or not shapes:
        return 1.0
    as_wide = sum(math.prod(shape) * (1 + NARROW / min(shape)) for shape in shapes)
    return as_wide / sum(map(math.prod, shapes))


def useful_flops(model: TrainedModel, sequence_length: int) -> float:
    """FLOPs per token as in `facts.counting`, without gradients of frozen weights, with those of adapters."""
    config = model.config

    def frozen_in(layer: TrainedLayer) -> float:
        shapes = {name: shape for name, shape in layer.layer.shapes if name not in layer.trained}
        return _values_met(shapes, layer.layer.expert_share)

    frozen_values = sum(model.by_layer(frozen_in))
    if LAYER_INPUTS not in model.trained:
        frozen_values += input_products(config)
    if not model.trains_head:
        frozen_values += (1 if config.head == "values" else config.vocab_size) * config.hidden_size
    adapter_values = _values_met(model.adapter)
    return flops_per_token(config, sequence_length) - 2.0 * frozen_values + 6.0 * adapter_values


def _values_met(shapes: Mapping[str, Shape], expert_share: float = 1.0) -> float:
    """Values of these matrices that compute a token: all, but of experts the share that it meets."""
    return sum(
        math.prod(shape) * (expert_share if ".experts." in name else 1.0)
        for name, shape in shapes.items()
        if len(shape) == 2 or (len(shape) == 3 and is_expert_stack(name))
    )


def step_parts(work: Work, rate: Rate) -> dict[str, Estimate]:
    """Seconds of a step by operation. On a CPU the bytes are part of the matmuls' share."""

    def seconds(amount: float, peak: float, shares: tuple[float, float, float]) -> Estimate:
        """Seconds for so many FLOPs or bytes at these shares of the peak rate."""
        low, typical, high = (amount / (peak * share) for share in reversed(shares))
        return Estimate(value=typical, low=low, high=high, origin="table")

    parts = {
        "matmul": seconds(work.products, rate.peak, rate.share),
        "attention": seconds(work.attention, rate.peak, rate.share),
    }
    if rate.products is not None and work.by_kind is not None:
        alone = work.by_kind.seconds_at(rate.products)
        parts["matmul"] = seconds(alone, 1.0, rate.product_share)
    if work.tower:
        wide = rate.products.wide if rate.products else rate.peak
        share = rate.product_share if rate.products else rate.share
        parts["vision tower"] = seconds(work.tower, wide, share)
    if work.rules:
        peak = rate.float32_peak or rate.peak * FLOAT32_SHARE
        parts["delta rules"] = seconds(work.rules, peak, rate.share)
    if rate.operators is not None and work.operators:
        low, typical, high = (work.operators * each for each in rate.operators)
        parts["operators"] = Estimate(value=typical, low=low, high=high, origin="table")
    if rate.bandwidth is None:
        return parts
    parts["attention"] = parts["attention"].scaled(1 / FUSED_ATTENTION_SHARE)
    if rate.attention_peak is not None:
        parts["attention"] = seconds(work.attention, rate.attention_peak, rate.share)
    if work.scores is not None and rate.kernels is not None:
        low, typical, high = kernel_seconds(work.scores, rate.kernels)
        parts["attention"] = Estimate(value=typical, low=low, high=high, origin="table")

    def passes(bytes_moved: float, peak: float, *, once: bool) -> Estimate:
        if once and rate.streamed is not None:
            return seconds(bytes_moved, rate.streamed, STREAMED_RANGE)
        return seconds(bytes_moved, peak, rate.bandwidth_share)

    parts["memory-bound"] = passes(work.between, rate.bandwidth, once=work.streams)
    parts["optimizer"] = passes(work.update, rate.bandwidth, once=work.streams_update)
    if work.update_products:
        products = seconds(work.update_products, rate.peak, rate.share)
        parts["optimizer"] = total({"bytes": parts["optimizer"], "products": products})

    # Small kernels that finish before the host has launched the next ones leave the device idle.
    device_seconds = sum(parts[name].value for name in ON_DEVICE if name in parts)
    idle = max(0.0, work.launches * LAUNCH_SECONDS - device_seconds)
    if idle > 0:
        parts["kernel launches"] = Estimate(value=idle, low=0.0, high=2 * idle, origin="table")
    return parts


def total(parts: Mapping[str, Estimate]) -> Estimate:
    """The sum of parts that run one after the other; all may be slow together."""
    estimates = list(parts.values())
    measured = next((part for part in estimates if part.origin == "measured"), None)
    return Estimate(
        value=sum(part.value for part in estimates),
        low=sum(part.low for part in estimates),
        high=sum(part.high for part in estimates),
        origin="table" if measured is None else "measured",
        by="" if measured is None else measured.by,
    )

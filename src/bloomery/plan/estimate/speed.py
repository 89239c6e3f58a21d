"""Seconds of a step by operation: matmuls and attention by FLOPs, everything else by bytes moved.

Measurements of a device correct the estimates: each is multiplied by measured over estimated.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from pydantic import TypeAdapter, ValidationError

from bloomery.core.units import GIB
from bloomery.hardware.calibration import OWN, Calibration, Point, calibrations
from bloomery.hardware.machine import Machine
from bloomery.hardware.profile import Profile
from bloomery.hardware.specs import cpu_efficiency
from bloomery.model.config import ModelConfig
from bloomery.model.counting import Shape, flops_per_token, layers, parameter_count
from bloomery.model.limits import storage_bytes
from bloomery.plan.estimate.memory import estimate_memory, keeps_scores, kept_layers
from bloomery.plan.estimate.states import FULL, StepShape, TrainedModel, in_layers
from bloomery.plan.types import Estimate, MemoryEstimate, RunPlan
from bloomery.recipe.schema import Recipe

EAGER_NORM = {
    "layer": 38.0,
    "rms": 100.0,
    "rms_unit_offset": 110.0,
}  # an RMS norm is eight small kernels, a layer norm is one
COMPILED_NORM = 20.0
RESIDUALS = (24.0, 8.0)  # (eager, compiled): both additions of a layer
ROTARY = (80.0, 16.0)  # per number of q and k
HEADS = (24.0, 8.0)  # splitting and joining heads, biases: per number of q, k, v and the output
GATED = (28.0, 14.0)  # act(gate) * up: per number of the inner width
PLAIN = (10.0, 8.0)
DROPOUT = (20.0, 4.0)
QUADRATIC = (64.0, 30.0)  # per score, where every score of attention is kept
# per score of a tile: blockwise attention in plain PyTorch; only the causal half exists
TILES = 60.0
LOSS = {"plain": (30.0, 16.0), "kept": (12.0, 8.0), "chunked": (16.0, 12.0)}  # per logit
CLIPPING = 3  # passes over the gradient: its norm, and its scaling
CASTS = 6.0  # bytes per parameter and micro-batch: autocast's half-precision copies


def layer_traffic(step: StepShape) -> float:
    """Bytes per token of one layer, forward and backward, without attention's scores."""
    config = step.config
    at = int(step.compiled)
    width = config.hidden_size
    inner = config.intermediate_size
    norm = COMPILED_NORM if step.compiled else EAGER_NORM[config.norm]
    total = len(config.block_norms) * norm * width + RESIDUALS[at] * width
    total += HEADS[at] * 2 * (config.query_width + config.key_width)
    total += (GATED if config.gated_mlp else PLAIN)[at] * inner
    if config.positions == "rotary":
        total += ROTARY[at] * (config.query_width + config.key_width)
    if config.residual_dropout:
        total += DROPOUT[at] * width
    return total * step.element / 2


def score_traffic(step: StepShape) -> float:
    """Bytes per token of one layer for attention's scores: none where a fused kernel keeps them on the chip."""
    config = step.config
    length = step.sequence_length
    if keeps_scores(step):
        return QUADRATIC[int(step.compiled)] * config.num_heads * length * step.element / 2
    if step.attention == "blockwise":
        return TILES * config.num_heads * length / 2 * step.element / 2
    return 0.0


COMPILED_GAIN = 1.15  # on a CPU; measured: 3 to 35%
# Of a checked CPU: the share of its products' rate that matmuls of a step reach, and the share of its copies' rate that
# everything between them does (small kernels, casts, the optimizer). Two AMX cores take 0.118 s for a step of the demo,
# two of an AMD EPYC 0.177 s, two without bf16 instructions 0.41 s: docs/decisions.md.
CHECKED_PRODUCTS = (0.55, 0.80, 0.95)
CHECKED_COPIES = (0.09, 0.125, 0.20)
BANDWIDTH_SHARE = (0.60, 0.80, 0.90)  # of the memory's rate that simple kernels reach
# of the matmul rate: flash kernels reach 50 to 70% of it (arXiv:2307.08691)
FUSED_ATTENTION_SHARE = 0.6
FLASH_BACKWARD = 2.5  # five matmuls against two in forward: scores are recomputed
LAUNCHES = (110, 45)  # kernels of a layer and micro-batch, forward and backward: eager, compiled
LAUNCH_SECONDS = 6e-6


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Training rates of a device: FLOP/s as a share of its peak, and bytes/s (None: part of the share)."""

    peak: float
    share: tuple[float, float, float]  # low, typical, high
    bandwidth: float | None = None
    bandwidth_share: tuple[float, float, float] = BANDWIDTH_SHARE

    def shared(self, ranks: int) -> "Rate":
        """Of each of so many processes on the cores of one CPU."""
        return replace(
            self, peak=self.peak / ranks, bandwidth=self.bandwidth and self.bandwidth / ranks
        )


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """Recomputation in backward, as shares of forward's work in the layers."""

    products: float
    attention: float
    between: float


@dataclass(frozen=True, kw_only=True)
class Work:
    """Work of one device in an optimizer step: FLOPs, bytes, kernel launches."""

    products: float
    attention: float
    between: float  # bytes
    update: float  # bytes of the optimizer
    launches: float = 0.0


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
        return Rate(peak=peak, share=arch.efficiency, bandwidth=gpu.bandwidth_gbs * 1e9)
    gain = COMPILED_GAIN if compiled else 1.0
    check = machine.cpu_check
    if check is not None and dtype in check.gflops:
        return Rate(
            peak=check.gflops[dtype] * 1e9 * machine.host.cpu_cores * gain,
            share=CHECKED_PRODUCTS,
            bandwidth=check.copy_gbs * 1e9 * machine.host.cpu_cores * gain,
            bandwidth_share=CHECKED_COPIES,
        )
    per_core = profile.cpu.gflops.get(dtype) if profile.cpu else None
    if per_core is None:
        return None
    low, typical, high = cpu_efficiency(width, dtype)
    return Rate(
        peak=per_core * 1e9 * machine.host.cpu_cores,
        share=(low, min(0.95, typical * gain), min(1.0, high * gain)),
    )


def recompute(step: StepShape) -> Recompute:
    share = 1 - kept_layers(step.checkpointing, step.config.num_layers) / max(
        1, step.config.num_layers
    )
    return Recompute(products=share, attention=share, between=share)


def work_of(
    step: StepShape,
    *,
    tokens: int,
    clips: bool = True,
    again: Recompute | None = None,
    loss: str = "",
) -> Work:
    """The step of one device over `tokens` tokens.

    `again` and `loss`: of another program, where they differ.
    """
    config = step.config
    model = step.model
    again = again or recompute(step)
    count = parameter_count(config)
    trained = model.trained_count
    loss = loss or ("kept" if step.score_chunk >= step.tokens_per_micro_batch else "chunked")
    products = product_flops(step, again, chunked=loss == "chunked")
    quadratic = 4.0 * _keys(step) * config.query_width * config.num_layers
    attention = quadratic * (
        1 + step.extra_forwards + (2.0 if keeps_scores(step) else FLASH_BACKWARD) + again.attention
    )
    # On a CPU compiled steps are faster as a whole, and casts make up for the bytes that half precision saves.
    moved = step if step.on_gpu else replace(step, compiled=False, precision="bfloat16")
    between = (
        config.num_layers * (layer_traffic(moved) + score_traffic(moved)) * (1 + again.between / 3)
    )
    passes = tokens / step.tokens_per_micro_batch
    states = model.optimizer_bytes(step.optimizer, step.precision) / max(1, trained)
    weight = model.learning_bytes(step.precision) / max(1, trained)
    casts = (
        CASTS * (trained if step.mode.frozen else count) * passes if weight > step.element else 0.0
    )
    if step.mode.base != "none":  # dequantizing every matrix once: read quantized, written
        matrices = [matrix for layer in layers(step.config) for matrix in layer.matrices]
        read = sum(
            storage_bytes((each.outputs, each.inputs), step.mode.base, step.mode.double)
            for each in matrices
        )
        dequantized = float(read + step.element * sum(each.size for each in matrices))
        casts += dequantized * (2 + again.products) * passes
    between += LOSS[loss][int(moved.compiled)] * step.outputs * step.loss_share
    between = between * (1 + step.extra_forwards / 3) * tokens + casts
    # Weights and states are read and written, gradients read, and scaled where they are clipped.
    update = trained * (3 * weight + 2 * states + (CLIPPING * weight if clips else 0))
    return Work(
        products=products * tokens,
        attention=attention * tokens,
        between=between,
        update=update,
        launches=LAUNCHES[int(step.compiled)] * config.num_layers * passes if step.on_gpu else 0.0,
    )


def product_flops(step: StepShape, again: Recompute, *, chunked: bool) -> float:
    """FLOPs per token: forward, gradients of inputs, gradients of trainable weights, recomputation."""
    config = step.config
    model = step.model
    products = 2.0 * sum(layer.active_products for layer in layers(config))
    learning = 2.0 * _met(
        {name: s for name, s in in_layers(model.trained).items() if len(s) == 2}, config
    )
    adapter = 2.0 * sum(math.prod(s) for s in model.adapter.values() if len(s) == 2)
    head = 2.0 * step.outputs * config.hidden_size * step.loss_share
    scored = head * (2 + model.head_learns + chunked)
    extra = step.extra_forwards * (products + head)  # without the adapters
    if step.teacher is not None:
        extra += flops_per_token(step.teacher, step.sequence_length, backward=False)
    return (
        products * (2 + again.products) + learning + adapter * (3 + again.products) + scored + extra
    )


def useful_flops(model: TrainedModel, sequence_length: int) -> float:
    """FLOPs per token as in `model.counting`, without gradients of frozen weights, with those of adapters."""
    config = model.config
    kept = {
        name: s
        for name, s in model.frozen.items()
        if len(s) == 2 and (".layers." in name or "head" in name)
    }
    if config.tie_embeddings and not model.head_learns:
        kept["head"] = (config.vocab_size, config.hidden_size)
    adapter = sum(math.prod(shape) for shape in model.adapter.values() if len(shape) == 2)
    return flops_per_token(config, sequence_length) - 2.0 * _met(kept, config) + 6.0 * adapter


def _met(shapes: Mapping[str, Shape], config: ModelConfig) -> float:
    """Numbers of these matrices that compute a token: all, but of experts the part that it meets."""
    part = 1.0 if config.experts is None else config.experts.per_token / config.experts.count
    return sum(
        math.prod(shape) * (part if ".experts." in name else 1.0) for name, shape in shapes.items()
    )


def _keys(step: StepShape) -> float:
    """Keys per query, averaged over queries and layers: all where scores are kept, else those of the causal window.

    In a window of w of T tokens the first w queries see w/2 on average and all later ones w: w - w^2 / 2T.
    """
    length = step.sequence_length
    windows = step.config.sliding_window or (None,)
    if keeps_scores(step):
        return float(length)
    reach = [min(length, window or length) for window in windows]
    return sum(window - window**2 / (2 * length) for window in reach) / len(reach)


def step_parts(work: Work, rate: Rate) -> dict[str, Estimate]:
    """Seconds of a step by operation. On a CPU the bytes are part of the matmuls' share."""

    def seconds(amount: float, each: float, shares: tuple[float, float, float]) -> Estimate:
        """Of FLOPs or bytes at these shares of the rate of each."""
        low, typical, high = (amount / (each * share) for share in reversed(shares))
        return Estimate(value=typical, low=low, high=high, origin="table")

    parts = {
        name: seconds(amount, rate.peak, rate.share)
        for name, amount in (("matmul", work.products), ("attention", work.attention))
    }
    if rate.bandwidth is None:
        return parts
    parts["attention"] = parts["attention"].scaled(1 / FUSED_ATTENTION_SHARE)
    parts["memory-bound"] = seconds(work.between, rate.bandwidth, rate.bandwidth_share)
    parts["optimizer"] = seconds(work.update, rate.bandwidth, rate.bandwidth_share)
    busy = sum(parts[name].value for name in ("matmul", "attention", "memory-bound"))
    waiting = max(0.0, work.launches * LAUNCH_SECONDS - busy)
    if waiting > 0:
        parts["kernel launches"] = Estimate(
            value=waiting, low=0.0, high=2 * waiting, origin="table"
        )
    return parts


def total(parts: dict[str, Estimate]) -> Estimate:
    """The sum of parts that run one after the other; all may be slow together."""
    ends = list(parts.values())
    measured = next((part for part in ends if part.origin == "measured"), None)
    return Estimate(
        value=sum(part.value for part in ends),
        low=sum(part.low for part in ends),
        high=sum(part.high for part in ends),
        origin="table" if measured is None else "measured",
        by="" if measured is None else measured.by,
    )


# doublings of width between a measured model and this one, beyond which a measurement is ignored
NEAR = 2.0
# half an interval, of the value: own measurements, contributed ones
SPREAD = {True: 0.10, False: 0.25}
# of the model's width, and as much again for each doubling of the micro-batch's tokens
SPREAD_PER_DOUBLING = 0.10

# for the same micro-batch; as much again for each doubling, and twice that for a contributed one
MEMORY_SPREAD = 0.05

TableMemory = Callable[[StepShape], MemoryEstimate]
TableSeconds = Callable[[StepShape, int], float | None]  # of a step over so many tokens


@dataclass(frozen=True, kw_only=True)
class NearestMeasurement:
    """The measurement nearest to the planned step."""

    source: Calibration
    point: Point
    distance: float  # doublings

    @property
    def own(self) -> bool:
        return self.source.contributor == OWN

    @property
    def reason(self) -> str:
        who = (
            "measured on this machine"
            if self.own
            else f"measured by {self.source.contributor} on {self.source.device}"
        )
        return f"{who} on {self.source.day} with {self.point.micro_batch_size} x {self.point.sequence_length:,} tokens"


def corrected(
    parts: Mapping[str, Estimate],
    step: StepShape,
    measurements: Sequence[Calibration],
    *,
    seconds: TableSeconds,
) -> dict[str, Estimate]:
    """The parts of a step, each times measured over estimated seconds of the nearest measured step.

    Without a measurement that is near enough they stay unchanged.
    """
    known = nearest(step, measurements)
    there = None if known is None else measured_step(known, step)
    if known is None or there is None:  # nothing is near enough, or a model that is unknown
        return dict(parts)
    tokens = known.point.micro_batch_size * known.point.accumulation * known.point.sequence_length
    expected = seconds(there, tokens)
    if not expected:
        return dict(parts)
    factor = tokens / known.point.tokens_per_second / expected
    spread = 1 + SPREAD[known.own] + SPREAD_PER_DOUBLING * known.distance
    return {
        name: _around(part.value * factor, spread, by=known.reason) for name, part in parts.items()
    }


def corrected_memory(
    table: MemoryEstimate,
    step: StepShape,
    measurements: Sequence[Calibration],
    *,
    memory: TableMemory,
) -> MemoryEstimate:
    """The estimate times measured over estimated peak of the same model with nearly as many tokens."""
    known = nearest(
        step, [source for source in measurements if _shape(_config(source)) == _shape(step.config)]
    )
    unlike = known is None or known.distance > NEAR or known.point.setting != step.setting
    there = None if known is None or unlike else measured_step(known, step)
    if known is None or there is None:
        return table
    expected = memory(there)
    counted = expected.allocated if step.on_gpu else expected.total
    factor = known.point.peak_gib * GIB / counted
    # a run also maps the dataset, evaluates and copies checkpoints; a measured step does not
    if not step.on_gpu:
        factor = max(1.0, factor)
    parts = {
        name: part if name == "context" else part * factor for name, part in table.parts.items()
    }
    spread = 1 + MEMORY_SPREAD * (1 + known.distance) * (1 if known.own else 2)
    total = sum(parts.values())
    ends = {"parts": parts, "low": total / spread, "high": total * spread, "origin": "measured"}
    return table.model_copy(update=ends)


def _around(value: float, spread: float, *, by: str) -> Estimate:
    return Estimate(value=value, low=value / spread, high=value * spread, origin="measured", by=by)


def compile_gain(
    measurements: Sequence[Calibration], *, model: ModelConfig, precision: str, setting: str
) -> float | None:
    """Uncompiled over compiled step time of this model; None where no measurement of the device has both."""
    for source in measurements:
        if _shape(_config(source)) != _shape(model):
            continue
        best = {True: 0.0, False: 0.0}
        for point in source.points:
            if (point.precision, point.setting) == (precision, setting):
                best[point.compiled] = max(best[point.compiled], point.tokens_per_second)
        if all(best.values()):
            return best[True] / best[False]
    return None


def nearest(step: StepShape, measurements: Sequence[Calibration]) -> NearestMeasurement | None:
    """Among points of the same precision and compilation; own measurements before contributed ones."""
    found = []
    for source, point in ((each, point) for each in measurements for point in each.points):
        if (point.precision, point.compiled) != (step.precision, step.compiled) or _width(
            source
        ) is None:
            continue
        if point.setting in ("", step.setting):
            sequences = abs(
                math.log2(
                    point.micro_batch_size * point.sequence_length / step.tokens_per_micro_batch
                )
            )
            settings = (point.activation_checkpointing != step.checkpointing) + (
                point.attention != step.attention
            )
            distance = _width_doublings(step, source) + sequences + 0.5 * settings
            found.append(NearestMeasurement(source=source, point=point, distance=distance))
    near = [known for known in found if _width_doublings(step, known.source) <= NEAR]
    return min(
        near, key=lambda k: (not k.own, k.point.setting != step.setting, k.distance), default=None
    )


def measured_step(known: NearestMeasurement, step: StepShape) -> StepShape | None:
    """The measured step on the device of `step`; None for a model that this version cannot read."""
    config = _config(known.source)
    if config is None:
        return None
    point = known.point
    plain = replace(step, extra_forwards=0, teacher=None, offloading=False, loss_share=1.0)
    return replace(
        step if point.setting else plain,
        model=TrainedModel(config, step.mode if point.setting else FULL),
        sequence_length=point.sequence_length,
        micro_batch_size=point.micro_batch_size,
        optimizer=point.optimizer,
        attention=point.attention,
        checkpointing=point.activation_checkpointing,
        score_chunk=point.micro_batch_size * point.sequence_length,
    )


def _width_doublings(step: StepShape, source: Calibration) -> float:
    width = _width(source)
    return math.inf if width is None else abs(math.log2(width / step.config.hidden_size))


def _width(source: Calibration) -> int | None:
    width = source.model.get("hidden_size")
    return width if isinstance(width, int) and width > 0 else None


def _config(source: Calibration) -> ModelConfig | None:
    return _parsed(json.dumps(source.model, sort_keys=True))


@cache
def _parsed(text: str) -> ModelConfig | None:
    try:
        return TypeAdapter(ModelConfig).validate_json(text)
    except ValidationError:
        return None


def _shape(config: ModelConfig | None) -> ModelConfig | None:
    """Without ids of special tokens, which are unknown before `prepare`."""
    return (
        None
        if config is None
        else replace(config, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    )


@dataclass(frozen=True, kw_only=True)
class StepEstimator:
    """Bytes and seconds of any step on one device, corrected by measurements of that device.

    `limit`: bytes that a plan may use of it. `clips`: whether gradients are clipped.
    """

    machine: Machine
    profile: Profile
    measurements: tuple[Calibration, ...]
    limit: float
    clips: bool

    @classmethod
    def of(cls, asked: Recipe | RunPlan, machine: Machine, profile: Profile) -> "StepEstimator":
        device = profile.accelerator
        share = profile.memory_share.value
        limit = share * device.usable_bytes if device else float(machine.host.memory_free_bytes)
        clips = asked.train.max_grad_norm is not None
        return cls(
            machine=machine,
            profile=profile,
            measurements=calibrations(machine),
            limit=limit,
            clips=clips,
        )

    def memory(self, step: StepShape) -> MemoryEstimate:
        def table(other: StepShape) -> MemoryEstimate:
            return estimate_memory(other, limit=self.limit)

        return corrected_memory(table(step), step, self.measurements, memory=table)

    def rate(self, step: StepShape) -> Rate | None:
        width = step.config.hidden_size
        return device_rate(
            self.profile,
            self.machine,
            precision=step.precision,
            width=width,
            compiled=step.compiled,
        )

    def step_parts(self, step: StepShape, tokens: int) -> dict[str, Estimate] | None:
        """Seconds of a step over so many tokens, by operation; None where the device is unknown."""

        def table(other: StepShape, tokens: int) -> dict[str, Estimate] | None:
            rate = self.rate(other)
            return (
                None
                if rate is None
                else step_parts(work_of(other, tokens=tokens, clips=self.clips), rate)
            )

        def seconds(other: StepShape, tokens: int) -> float | None:
            parts = table(other, tokens)
            return None if parts is None else total(parts).value

        parts = table(step, tokens)
        return None if parts is None else corrected(parts, step, self.measurements, seconds=seconds)

"""Bytes at the peak of a training step on one device, from shapes alone.

A step has few moments at which memory can peak: the scores in forward and in backward, the backward of each layer, that
of the embeddings, and the optimizer's update. Each is counted from what the code keeps and in which type
(docs/memory.md); the peak is the largest. Symbols: n tokens of a micro-batch, L layers, s tokens of a row, h width,
a heads, f width inside the MLP, V vocabulary. For a GPT block in half precision Korthikanti et al. (arXiv:2205.05198)
count 34 h bytes a token and layer; with a residual stream of float32 it is 38 h.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from bloomery.core.units import GIB, MIB
from bloomery.model.config import ModelConfig
from bloomery.model.counting import layers, parameter_count
from bloomery.plan.estimate.activations import (
    backward_bytes,
    end_bytes,
    kept_by_layer,
    kept_layers,
    last_norm_bytes,
    layer_bytes,
)
from bloomery.plan.estimate.states import (
    adapter_bytes,
    each,
    frozen_element,
    head_learns,
    head_name,
    held_bytes,
    largest,
    layer_learning_bytes,
    learning_bytes,
    optimizer_bytes,
    parameters,
    update_bytes,
)
from bloomery.plan.estimate.step_shape import Occupancy
from bloomery.plan.types import MemoryEstimate, Origin

SPREAD = 0.20  # nobody has shown an estimate from shapes alone to be nearer on a GPU
FRAGMENTATION = {True: 0.05, False: 0.15}  # of a caching allocator, by whether it has expandable segments
FORWARD_DIVERGENCE, BACKWARD_DIVERGENCE = 20, 28  # bytes of a logit of each model: model.heads.Divergence, uncompiled
CPU_RUNTIME = 420 * MIB  # the interpreter, PyTorch, its buffers and what malloc cannot give back: docs/memory.md
CPU_FRAGMENTATION = {False: 0.25, True: 0.14}  # of the activations, by whether blocks are compiled: docs/memory.md
CPU_PEFT = 60 * MIB  # imported beside them
CPU_KERNELS = 3e6  # of half-precision attention, kept for each length of a document: model.per_document
CPU_TILE = 4096  # entries of the vocabulary whose logits exist at once on a CPU: model.heads


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What is alive beside weights and states."""

    gradients: float
    activations: float
    scores: float = 0.0
    copies: float = 0.0
    temporaries: float = 0.0

    @property
    def total(self) -> float:
        return self.gradients + self.activations + self.scores + self.copies + self.temporaries


def estimate_memory(load: Occupancy, *, limit: float, origin: Origin = "table") -> MemoryEstimate:
    """What a step holds at its peak, by part, in bytes; the interval is 20% to each side."""
    parts = tensor_bytes(load)
    parts |= around(load, parts)
    total = sum(parts.values())
    return MemoryEstimate(parts=parts, low=total * (1 - SPREAD), high=total * (1 + SPREAD), limit=limit, origin=origin)


def around(load: Occupancy, parts: Mapping[str, float]) -> dict[str, float]:
    """What the allocator and the runtime hold on top of these tensors.

    malloc keeps what a layer frees between tensors that stay, and the next layer's larger ones do not fit there.
    """
    if not load.on_gpu:
        kept = CPU_KERNELS * document_lengths(load.sequence_length)
        runtime = CPU_RUNTIME + (CPU_PEFT if load.way.theirs else 0)
        holes = {"fragmentation": CPU_FRAGMENTATION[load.compiled] * parts["activations"], "runtime": runtime}
        return holes | ({"kernels": kept} if keeps_kernels(load) else {})
    tensors = sum(parts.values())
    return {"fragmentation": FRAGMENTATION[load.expandable] * tensors, "context": load.context_bytes}


def keeps_kernels(load: Occupancy) -> bool:
    """Whether attention in half precision is computed document by document, with kernels for each length."""
    return load.attention == "per_document" and load.element < 4


def document_lengths(longest: int) -> int:
    """How many there are, as `model.per_document` lengthens documents: steps of 64, an eighth of a power of two."""
    short, octaves = min(longest, 1024), max(0.0, math.log2(max(1, longest) / 1024))
    return -(-short // 64) + math.ceil(8 * octaves)


def tensor_bytes(load: Occupancy) -> dict[str, float]:
    """Live tensors alone at the fullest moment, without what an allocator or a runtime adds."""
    return tensors_at(load, max(moments(load), key=lambda moment: moment.total))


def tensors_at(load: Occupancy, moment: Moment) -> dict[str, float]:
    """All live tensors at a moment."""
    config, way = load.config, load.way
    parts = {
        "weights": held_bytes(config, way, load.precision),
        "adapter": adapter_bytes(config, way),
        "gradients": moment.gradients,
        "optimizer": 0.0 if way.away and load.on_gpu else optimizer_bytes(config, way, load.optimizer, load.precision),
        "activations": moment.activations,
        "scores": moment.scores,
    }
    if not way.frozen:
        parts.pop("adapter")
    if load.teacher is not None:
        parts["teacher"] = float(parameter_count(load.teacher) * load.element)
    if load.mixed:
        parts["half-precision copies"] = moment.copies
    parts["temporaries"] = moment.temporaries
    return parts


def moments(load: Occupancy) -> Iterator[Moment]:
    """Every moment of a step at which memory can peak, in the order in which they come."""
    config, way = load.config, load.way
    layers, ends = kept_by_layer(load), end_bytes(load)
    if load.offloading:  # the layer at work, and the one that is under way
        layers = [0.0] * (len(layers) - 2) + layers[-2:]
    whole = learning_bytes(config, way, load.precision)
    layer = layer_learning_bytes(config, way, load.precision)
    head = load.outputs * config.hidden_size * load.weight if head_learns(config, way) else 0
    update = update_bytes(config, way, load.optimizer, load.precision, on_gpu=load.on_gpu)
    if way.in_backward:
        whole, layer = largest(config, way, load.precision), 0.0
    before = whole if load.accumulating else 0.0
    copy = 2.0 * copied_numbers(load)
    kept = kept_layers(load.checkpointing, config.num_layers)
    activations = sum(layers) + ends
    scores, in_backward = score_bytes(load)
    # Autocast keeps its copies until forward ends, afterwards those that backward will read.
    yield Moment(gradients=before, activations=activations, scores=scores, copies=copy * len(layers))
    yield Moment(gradients=before or head, activations=activations, scores=in_backward, copies=copy * kept)
    inside, passing, last = layer_bytes(load), backward_bytes(load), last_norm_bytes(load)
    before_it = [0.0, *accumulate(layers)]
    for done in range(len(layers)):
        left = len(layers) - done
        reached = before or head + done * layer
        if way.in_backward:  # the head's moves with the next one; each later one at once
            reached = head if done == 0 else 0.0
        yield Moment(
            gradients=reached,
            activations=before_it[left - 1] + inside + ends - last,
            copies=copy * max(1.0, kept * left / len(layers)),
            temporaries=max(passing, update) if way.in_backward else passing,  # a gradient is used when it stands
        )
    doubled = head if load.accumulating or config.tie_embeddings else 0
    stream = load.rows * config.hidden_size * load.stream
    yield Moment(gradients=whole, activations=ends - last, temporaries=stream + doubled)
    yield Moment(gradients=whole, activations=0.0, temporaries=update)


def copied_numbers(load: Occupancy) -> int:
    """Of one layer what autocast copies in half precision: whatever products read that is wider."""
    way = load.way
    if not way.frozen:
        return _matrix_numbers(load.config) if load.mixed else 0
    learning = parameters(load.config, way).learning
    wide = {n for n in learning if ".layers.0." in n and each(n, way, load.precision) > load.element}
    return sum(math.prod(learning[name]) for name in wide if len(learning[name]) == 2)


def _matrix_numbers(config: ModelConfig) -> int:
    """Of one layer what products read: its matrices and their biases."""
    return sum(matrix.size + matrix.outputs * matrix.bias for matrix in layers(config)[0].matrices)


@dataclass(frozen=True)
class _Tile:
    """Logits that exist at once."""

    load: Occupancy
    entries: int = field(init=False)

    def __post_init__(self) -> None:
        whole = self.load.outputs
        object.__setattr__(self, "entries", whole if self.load.on_gpu else min(whole, CPU_TILE))

    @property
    def numbers(self) -> int:
        return min(self.load.score_chunk, self.load.rows) * self.entries

    @property
    def several(self) -> bool:
        """Whether this is not all there is: the logits before are let go of once the next ones are there."""
        return self.entries < self.load.outputs or self.load.score_chunk < self.load.rows

    @property
    def weights(self) -> int:
        return self.entries * self.load.config.hidden_size


def score_bytes(load: Occupancy) -> tuple[float, float]:
    """Bytes of the output layer's work in forward and in backward.

    Logits of one tile in the products' type. Uncompiled, a float32 copy lies beside them where they are half, and in
    forward their exponentials. Backward sums the gradient of the hidden states in float32, and adds that of the weight
    to the gradient itself; where that is wider the product lies beside it.
    """
    tile, h = _Tile(load), load.config.hidden_size
    if load.config.head == "values":  # computed in float32, and never in pieces
        widened = 4.0 * load.rows * h if load.element < 4 else 0.0
        return widened, 2 * widened
    if load.teacher is not None:
        return _divergence_bytes(load)
    wide = 4 * tile.numbers if load.element < 4 else 0
    eager = not load.compiled
    learning = head_learns(load.config, load.way)
    wider = load.weight if learning else frozen_element(head_name(load.config), load.precision)
    copy = 2 * tile.weights if load.element < wider else 0
    capped = 4 * tile.numbers if eager and load.config.final_softcap is not None else 0
    logits = load.element * tile.numbers + copy + capped
    before = load.element * tile.numbers if tile.several else 0
    forward = logits + max(before, wide + 4 * tile.numbers if eager else 0) + load.rows * h * load.element
    product = load.element * tile.weights if load.mixed and learning else 0
    backward = logits + max(before, wide if eager else 0, product) + 4 * load.rows * h
    return float(forward), float(backward)


def _divergence_bytes(load: Occupancy) -> tuple[float, float]:
    """Of distillation: both models' logits of a chunk and their float32 forms, computed again in backward."""
    assert load.teacher is not None
    entries = min(load.score_chunk, load.rows) * load.config.vocab_size
    hidden = load.rows * (load.config.hidden_size + 2 * load.teacher.hidden_size) * load.element
    return float(FORWARD_DIVERGENCE * entries + hidden), float(BACKWARD_DIVERGENCE * entries + hidden)


def gib(value: float) -> float:
    return value / GIB

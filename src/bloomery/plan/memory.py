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

from bloomery.model.config import ModelConfig
from bloomery.model.counting import Shape, matrices, parameter_count, parameter_shapes
from bloomery.plan.types import MemoryEstimate, Origin
from bloomery.units import GIB, MIB

SPREAD = 0.20  # nobody has shown an estimate from shapes alone to be nearer on a GPU
FRAGMENTATION = {True: 0.05, False: 0.15}  # of a caching allocator, by whether it has expandable segments
CPU_RUNTIME = 470 * MIB  # the interpreter, PyTorch and its buffers, resident; measured with PyTorch 2.13
CPU_TILE = 4096  # entries of the vocabulary whose logits exist at once on a CPU: model.heads
TILE = 256  # queries and keys of a tile of blockwise attention: model.blockwise
TILE_SCORES = {False: 2**20, True: 2**23}  # scores that exist at once, by on_gpu: model.blockwise
TILE_BYTES = 15  # a score of a tile in backward: three of float32, 16 random bits and a mask
INPUT_BYTES = 36  # a token: ids, labels, positions, documents, weight
SMALL_BYTES = 44  # a token: which labels are learned, their scores, sums and gradients
STACK = 2**24  # numbers of the matrices that Muon orthogonalises at once: train.optimizers


@dataclass(frozen=True, kw_only=True)
class Occupancy:
    """What decides how much memory a step takes."""

    config: ModelConfig
    sequence_length: int
    micro_batch: int  # rows
    precision: str
    optimizer: str
    attention: str
    checkpointing: str
    compiled: bool
    score_chunk: int
    context_bytes: float  # the runtime's own; 0: not a GPU
    on_gpu: bool
    expandable: bool = False  # the allocator's segments
    accumulating: bool = False  # several micro-batches a step: gradients are there from the second one on

    @property
    def rows(self) -> int:
        """Tokens of a micro-batch."""
        return self.micro_batch * self.sequence_length

    @property
    def element(self) -> int:
        """Bytes of an activation."""
        return 4 if self.precision == "float32" else 2

    @property
    def weight(self) -> int:
        """Bytes of a weight, of its gradient, and of a number of the residual stream."""
        return 2 if self.precision == "bfloat16-pure" else 4

    @property
    def mixed(self) -> bool:
        """Half-precision products over float32 weights."""
        return self.element < self.weight


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
    parts |= around(load, sum(parts.values()))
    total = sum(parts.values())
    return MemoryEstimate(parts=parts, low=total * (1 - SPREAD), high=total * (1 + SPREAD), limit=limit, origin=origin)


def around(load: Occupancy, tensors: float) -> dict[str, float]:
    """What the allocator and the runtime hold beside so many bytes of tensors."""
    if not load.on_gpu:
        return {"runtime": CPU_RUNTIME}
    return {"fragmentation": FRAGMENTATION[load.expandable] * tensors, "context": load.context_bytes}


def tensor_bytes(load: Occupancy) -> dict[str, float]:
    """Live tensors alone at the fullest moment, without what an allocator or a runtime adds."""
    peak = max(moments(load), key=lambda moment: moment.total)
    parts = {
        "weights": float(parameter_count(load.config) * load.weight),
        "gradients": peak.gradients,
        "optimizer": optimizer_bytes(load.config, load.optimizer, load.weight),
        "activations": peak.activations,
        "scores": peak.scores,
    }
    if load.mixed:
        parts["half-precision copies"] = peak.copies
    parts["temporaries"] = peak.temporaries
    return parts


def moments(load: Occupancy) -> Iterator[Moment]:
    """Every moment of a step at which memory can peak, in the order in which they come."""
    layers, ends = kept_by_layer(load), end_bytes(load)
    whole = parameter_count(load.config) * load.weight
    head, layer = load.config.vocab_size * load.config.hidden_size * load.weight, _layer_numbers(load.config)
    before = whole if load.accumulating else 0.0
    copy = 2.0 * _matrix_numbers(load.config) if load.mixed else 0.0
    kept = kept_layers(load.checkpointing, load.config.num_layers)
    activations = sum(layers) + ends
    scores, in_backward = score_bytes(load)
    # Autocast keeps its copies until forward ends, afterwards those that backward will read.
    yield Moment(gradients=before, activations=activations, scores=scores, copies=copy * len(layers))
    yield Moment(gradients=before or head, activations=activations, scores=in_backward, copies=copy * kept)
    inside, passing = layer_bytes(load), backward_bytes(load)
    for done in range(len(layers)):
        left = len(layers) - done
        yield Moment(
            gradients=before or head + done * layer * load.weight,
            activations=sum(layers[: left - 1]) + inside + ends - _last_norm(load),
            copies=copy * max(1.0, kept * left / len(layers)),
            temporaries=passing,
        )
    doubled = head if load.accumulating or load.config.tie_embeddings else 0
    stream = load.rows * load.config.hidden_size * load.weight
    yield Moment(gradients=whole, activations=ends - _last_norm(load), temporaries=stream + doubled)
    yield Moment(gradients=whole, activations=0.0, temporaries=update_bytes(load))


def optimizer_bytes(config: ModelConfig, kind: str, weight: int) -> float:
    """What the optimizer keeps from step to step."""
    return state_bytes(parameter_shapes(config), kind, weight)


def state_bytes(shapes: Mapping[str, Shape], kind: str, weight: int) -> float:
    """AdamW: two numbers a parameter; Muon: one for the blocks' matrices; Adafactor: rows and columns of matrices."""
    total = 0.0
    for name, shape in shapes.items():
        size = math.prod(shape)
        if kind == "muon" and len(shape) == 2 and ".layers." in name:
            total += size
        elif kind == "adafactor":
            total += sum(shape) if len(shape) == 2 else size
        else:
            total += 2 * size
    return total * weight


def update_bytes(load: Occupancy) -> float:
    """Scratch of the update: none in a fused AdamW."""
    shapes = [shape for shape in parameter_shapes(load.config).values() if len(shape) == 2]
    if load.optimizer == "adafactor":  # squares, estimate and update, of one parameter after the other or of all
        sizes = [math.prod(shape) for shape in shapes]
        return 2.0 * load.weight * (sum(sizes) if load.on_gpu else max(sizes))
    if load.optimizer == "muon":  # the step, its stack, and three of bfloat16 while they are orthogonalised
        inside = [(rows, columns) for _, rows, columns, _ in matrices(load.config)]
        return max((2 * load.weight + 6) * _stacked(shape, inside, load.config.num_layers) for shape in inside)
    return 0.0


def _stacked(shape: tuple[int, int], inside: list[tuple[int, int]], layers: int) -> int:
    """Numbers of all matrices of a shape, lying or standing, as far as one stack takes them."""
    size, alike = math.prod(shape), sum(sorted(other) == sorted(shape) for other in inside) * layers
    return size * min(alike, max(1, STACK // size))


def _layer_numbers(config: ModelConfig) -> int:
    names = parameter_shapes(config).items()
    return sum(math.prod(shape) for name, shape in names if name.startswith("model.layers.0."))


def _matrix_numbers(config: ModelConfig) -> int:
    """Of one layer what products read: its matrices and their biases."""
    return sum(rows * columns + rows * bias for _, rows, columns, bias in matrices(config))


def activation_bytes(load: Occupancy) -> float:
    """What all layers keep for backward, before the first of them runs it."""
    return sum(kept_by_layer(load))


def kept_by_layer(load: Occupancy) -> list[float]:
    """Bytes that each layer keeps for backward."""
    mode, whole = load.checkpointing, layer_bytes(load)
    if mode == "none":
        return [whole] * load.config.num_layers
    stream = float(load.rows * load.config.hidden_size * load.weight)
    if mode == "selective":
        return [stream + load.rows * _product_bytes(load)] * load.config.num_layers
    every = 1 if mode == "full" else int(mode.removeprefix("every-"))
    return [whole if layer % every else stream for layer in range(load.config.num_layers)]


def kept_layers(checkpointing: str, num_layers: int) -> int:
    """Layers that compute nothing again: none under `full`, half of one's work under `selective`, all but each n-th."""
    if checkpointing == "none":
        return num_layers
    if checkpointing == "full":
        return 0
    if checkpointing == "selective":
        return num_layers - num_layers // 2
    return num_layers - math.ceil(num_layers / int(checkpointing.removeprefix("every-")))


def layer_bytes(load: Occupancy) -> float:
    """What one layer keeps for backward when nothing of it is computed again."""
    masks = load.element * load.sequence_length if load.attention == "mask" else 0  # added to scores: not booleans
    scores = score_matrix_bytes(load) if keeps_scores(load) else 0.0
    return load.rows * (layer_bytes_per_token(load) + masks) + scores


def layer_bytes_per_token(load: Occupancy) -> float:
    """Of one layer, without quadratic scores: 38 h for a GPT block with dropout in half precision on a GPU."""
    config = load.config
    return load.element * config.hidden_size + _attention_bytes(load) + _norm_bytes(load) + _mlp_bytes(load)


def _norm_bytes(load: Occupancy) -> float:
    """Norms keep their inputs and a number or two a row; what dropout multiplies with stands here too.

    Inputs are the residual stream before a block's part and its half-precision result after it. A compiled block keeps
    the result of attention and computes the second sum of the residual stream again.
    """
    config, h = load.config, load.config.hidden_size
    stats = 8 if config.norm == "layer" else 4
    after = 4 if load.on_gpu and load.mixed and not load.compiled else load.element  # torch's kernel widens it
    inputs = {"before": [load.weight] * 2, "after": [after] * 2, "both": [load.weight, after, load.weight, after]}
    sizes = inputs[config.norm_placement]
    if load.compiled and config.norm_placement == "before":
        sizes = [load.weight, load.element]
    masked = 1 if load.on_gpu or load.compiled else load.element  # the CPU keeps what it multiplies with
    return sum(sizes) * h + stats * len(sizes) + (2 * masked * h if config.residual_dropout else 0)


def _attention_bytes(load: Occupancy) -> float:
    """q and attention's output, k and v, a log-sum-exp a head; a norm of q and k keeps its inputs."""
    config = load.config
    total = float(load.element * (2 * config.query_width + 2 * config.key_width))
    if config.qk_norm != "none":
        wide = 4 if load.on_gpu and load.mixed and not load.compiled else load.element
        total += wide * (config.query_width + config.key_width) + 4 * (config.num_heads + config.num_kv_heads)
    if not keeps_scores(load):
        total += 4 * config.num_heads
    elif load.attention != "math":  # PyTorch computes it in float32
        total += (4 - load.element) * (config.query_width + 2 * config.key_width)
    return total


def _mlp_bytes(load: Occupancy) -> float:
    """Its input, what enters and what leaves the activation, and for a gate the other factor and the product."""
    config = load.config
    inner = 4 if config.gated_mlp else 2
    if config.activation == "relu":  # it is differentiated from its result
        inner -= 1
    if config.gated_mlp and load.compiled:  # the activation is computed again
        inner = 3
    return load.element * (config.hidden_size + inner * config.intermediate_size)


def _product_bytes(load: Occupancy) -> float:
    """Of one layer and token what `selective` keeps: results of products, and of attention."""
    config = load.config
    inner = (2 if config.gated_mlp else 1) * config.intermediate_size
    widths = 2 * config.query_width + 2 * config.key_width + 2 * config.hidden_size + inner
    return load.element * widths + 4 * config.num_heads


def end_bytes(load: Occupancy) -> float:
    """What is kept outside the layers: inputs, the last norm's input, the rows that are scored, the first dropout."""
    config = load.config
    masked = 1 if load.on_gpu else load.weight
    dropout = masked * config.hidden_size if config.embedding_dropout else 0
    return _last_norm(load) + load.rows * (INPUT_BYTES + SMALL_BYTES + dropout)


def _last_norm(load: Occupancy) -> float:
    return float(load.rows * load.config.hidden_size * (load.weight + load.element))


def backward_bytes(load: Occupancy) -> float:
    """What passes through a layer in backward: its MLP, with all that it kept, and then its attention with the rest."""
    config, e = load.config, load.element
    stream = load.weight * config.hidden_size
    inner = (2 if config.gated_mlp else 1) * config.intermediate_size
    sizes = {name: rows * columns for name, rows, columns, _ in matrices(config)}
    fresh = max(sizes.values()) * (load.weight + (e if load.mixed else 0))  # a gradient before it is where it belongs
    mlp = load.rows * (stream + e * (config.hidden_size + inner)) + fresh
    behind = 0 if load.accumulating else sum(size for name, size in sizes.items() if name.startswith("mlp."))
    if load.compiled:  # a graph hands all gradients of its layer out together
        behind = _layer_numbers(config)
    ahead = load.rows * (stream + e * 2 * (config.query_width + config.key_width)) + behind * load.weight
    return max(mlp, ahead + attention_scratch(load) - load.rows * _mlp_bytes(load))


def attention_scratch(load: Occupancy) -> float:
    """What a kernel of attention takes in backward beside its gradients."""
    config = load.config
    if keeps_scores(load):
        return float(12 * config.num_heads * load.sequence_length * load.rows)  # three gradients of the scores, float32
    if load.attention == "blockwise":
        return _tile_bytes(load)
    if load.attention in ("per_document", "mask"):  # a gradient for each document, and then joined
        return float(load.element * load.rows * (config.query_width + 2 * config.key_width))
    return 4.0 * load.rows * config.query_width if load.on_gpu else 0.0  # flash sums the queries' gradient in float32


def _tile_bytes(load: Occupancy) -> float:
    config = load.config
    tile = config.num_heads * min(load.sequence_length, TILE) ** 2
    together = min(load.micro_batch, max(1, TILE_SCORES[load.on_gpu] // tile))  # rows
    copies = load.element * (3 * config.query_width + 2 * config.key_width) + 8 * config.key_width
    return float(together * (TILE_BYTES * tile + load.sequence_length * copies))


def keeps_scores(load: Occupancy) -> bool:
    """Whether attention holds a number for every pair of tokens: `math`, and PyTorch's CPU kernel under dropout."""
    fallback = not load.on_gpu and load.config.attention_dropout > 0 and load.attention in ("sdpa", "mask")
    return load.attention == "math" or fallback


def score_matrix_bytes(load: Occupancy) -> float:
    """What attention of a layer keeps when every score exists, computed in float32: softmax, dropout, their product."""
    dropped = load.config.attention_dropout > 0
    if load.attention != "math":
        each = 12  # PyTorch's: softmax, mask and product, all float32
    elif dropped:
        each = 4 + (1 if load.on_gpu else 4) + load.element
    else:
        each = 4 + (load.element if load.element < 4 else 0)
    return float(each * load.config.num_heads * load.sequence_length * load.rows)


def quadratic_bytes(load: Occupancy) -> float:
    """What PyTorch's fallback on a GPU keeps of a layer: softmax, dropout's mask and result, 5 a s^2 b."""
    each = 2 * load.element + 1 if load.config.attention_dropout else load.element
    return float(each * load.config.num_heads * load.sequence_length * load.rows)


@dataclass(frozen=True)
class _Tile:
    """Logits that exist at once."""

    load: Occupancy
    entries: int = field(init=False)

    def __post_init__(self) -> None:
        whole = self.load.config.vocab_size
        object.__setattr__(self, "entries", whole if self.load.on_gpu else min(whole, CPU_TILE))

    @property
    def numbers(self) -> int:
        return min(self.load.score_chunk, self.load.rows) * self.entries

    @property
    def several(self) -> bool:
        """Whether this is not all there is: the logits before are let go of once the next ones are there."""
        return self.entries < self.load.config.vocab_size or self.load.score_chunk < self.load.rows

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
    wide = 4 * tile.numbers if load.element < 4 else 0
    eager = not load.compiled
    copy = 2 * tile.weights if load.mixed else 0
    capped = 4 * tile.numbers if eager and load.config.final_softcap is not None else 0
    logits = load.element * tile.numbers + copy + capped
    before = load.element * tile.numbers if tile.several else 0
    forward = logits + max(before, wide + 4 * tile.numbers if eager else 0) + load.rows * h * load.element
    product = load.element * tile.weights if load.mixed else 0
    backward = logits + max(before, wide if eager else 0, product) + 4 * load.rows * h
    return float(forward), float(backward)


def gib(value: float) -> float:
    return value / GIB

"""Bytes at the peak of a training step on one device, from shapes alone.

Symbols: N parameters, L layers, b rows of a micro-batch, s tokens of a row, h width, a heads, f width inside the MLP,
V vocabulary. Activations follow Korthikanti et al. (arXiv:2205.05198): s b (34 h) bytes a layer for a GPT block in half
precision with dropout, 5 a s^2 b more where attention keeps every score. They are counted from the block's facts, so
that gated MLPs and grouped keys get theirs.
"""

import math
from dataclasses import dataclass

from bloomery.model.config import ModelConfig
from bloomery.model.counting import parameter_count, parameter_shapes
from bloomery.plan.types import MemoryEstimate, Origin
from bloomery.units import GIB, MIB

SPREAD = 0.20  # nobody has shown an estimate from shapes alone to be nearer
FRAGMENTATION = 0.15  # of a caching allocator on GPUs without expandable segments, of varying sizes
CPU_RUNTIME = 470 * MIB  # the interpreter, PyTorch and its buffers, resident; measured with PyTorch 2.13


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
        """Bytes of a weight and of its gradient."""
        return 2 if self.precision == "bfloat16-pure" else 4


def estimate_memory(load: Occupancy, *, limit: float, origin: Origin = "table") -> MemoryEstimate:
    """What a step holds at its peak, by part, in bytes; the interval is 20% to each side."""
    parts = tensor_bytes(load)
    if load.on_gpu:
        parts["fragmentation"] = FRAGMENTATION * sum(parts.values())
        parts["context"] = load.context_bytes
    else:
        parts["runtime"] = CPU_RUNTIME
    total = sum(parts.values())
    return MemoryEstimate(parts=parts, low=total * (1 - SPREAD), high=total * (1 + SPREAD), limit=limit, origin=origin)


def tensor_bytes(load: Occupancy) -> dict[str, float]:
    """Live tensors alone, without what an allocator or a runtime adds."""
    count = parameter_count(load.config)
    parts = {
        "weights": float(count * load.weight),
        "gradients": float(count * load.weight),
        "optimizer": optimizer_bytes(load.config, load.optimizer, load.weight),
        "activations": activation_bytes(load),
        "scores": score_bytes(load),
    }
    if load.precision in ("bfloat16", "float16"):
        parts["half-precision copies"] = 2.0 * count  # autocast keeps one of each weight until the step ends
    return parts


def optimizer_bytes(config: ModelConfig, kind: str, weight: int) -> float:
    """AdamW: two numbers a parameter; Muon: one for the blocks' matrices; Adafactor: rows and columns of matrices."""
    total = 0.0
    for name, shape in parameter_shapes(config).items():
        size = math.prod(shape)
        if kind == "muon" and len(shape) == 2 and ".layers." in name:
            total += size
        elif kind == "adafactor":
            total += sum(shape) if len(shape) == 2 else size
        else:
            total += 2 * size
    return total * weight


def activation_bytes(load: Occupancy) -> float:
    """What the layers keep for backward. Checkpointing keeps each layer's input and one layer's inside."""
    config = load.config
    inside = load.rows * layer_bytes_per_token(load) + (quadratic_bytes(load) if keeps_scores(load) else 0.0)
    layer_input = load.rows * config.hidden_size * load.element
    kept = kept_layers(load.checkpointing, config.num_layers)
    recomputed = config.num_layers - kept
    return kept * inside + (recomputed * layer_input + inside if recomputed else 0.0)


def kept_layers(checkpointing: str, num_layers: int) -> int:
    """Layers whose activations stay: none under `full`, half under `selective`, all but each n-th under `every-n`."""
    if checkpointing == "none":
        return num_layers
    if checkpointing == "full":
        return 0
    if checkpointing == "selective":
        return num_layers - num_layers // 2
    return num_layers - num_layers // int(checkpointing.removeprefix("every-"))


def layer_bytes_per_token(load: Occupancy) -> float:
    """Of one layer, without quadratic scores. 34 h for a GPT block with dropout in half precision."""
    config = load.config
    h, f = config.hidden_size, config.intermediate_size
    norms = len(config.block_norms) * h  # their inputs
    attention = h + 2 * config.query_width + 2 * config.key_width  # input of q, k, v; q and attention's output; k and v
    if config.qk_norm != "none":
        attention += config.query_width + config.key_width
    mlp = h + (4 if config.gated_mlp and not load.compiled else 3 if config.gated_mlp else 2) * f
    masks = 2 * h if config.residual_dropout else 0  # one byte each
    sums = 0 if keeps_scores(load) else 4 * config.num_heads  # the log-sum-exp of each query, float32
    return load.element * (norms + attention + mlp) + masks + sums


def keeps_scores(load: Occupancy) -> bool:
    """Whether attention holds a number for every pair of tokens: `math`, and PyTorch's CPU kernel under dropout."""
    fallback = not load.on_gpu and load.config.attention_dropout > 0 and load.attention in ("sdpa", "mask")
    return load.attention == "math" or fallback


def quadratic_bytes(load: Occupancy) -> float:
    """What attention of a layer keeps when every score exists: softmax, dropout's mask and result, 5 a s^2 b."""
    each = 2 * load.element + 1 if load.config.attention_dropout else load.element
    return float(each * load.config.num_heads * load.sequence_length * load.rows)


def score_bytes(load: Occupancy) -> float:
    """Logits of one chunk in float32 beside their half copy, and the output layer's gradient beside its addend."""
    half = 0 if load.precision == "float32" else 2
    logits = min(load.score_chunk, load.rows) * load.config.vocab_size * (4 + half)
    output_gradient = load.config.vocab_size * load.config.hidden_size * (4 + half)
    last_hidden = 2 * load.rows * load.config.hidden_size * load.element
    return float(logits + output_gradient + last_hidden)


def gib(value: float) -> float:
    return value / GIB

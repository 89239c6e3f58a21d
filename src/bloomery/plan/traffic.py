"""Bytes that the work between matrix products moves: norms, activations, the loss, the optimizer.

A kernel that reads one half-precision number and writes one moves 4 bytes. The counts below are those of forward and
backward together, per number of the width named; a third of them is forward. Compiled blocks fuse most. Eager counts
follow the operators that autograd runs; compiled ones the inputs and outputs that a fused kernel cannot avoid.
"""

from bloomery.model.counting import matrices
from bloomery.model.quantize_facts import storage_bytes
from bloomery.plan.activations import keeps_scores
from bloomery.plan.occupancy import Occupancy

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
TILES = 60.0  # per score of a tile: blockwise attention in plain PyTorch; only the causal half exists
LOSS = {"plain": (30.0, 16.0), "kept": (12.0, 8.0), "chunked": (16.0, 12.0)}  # per logit
CLIPPING = 3  # passes over the gradient: its norm, and its scaling
CASTS = 6.0  # bytes a parameter and micro-batch: autocast's half-precision copies


def layer_traffic(load: Occupancy) -> float:
    """Bytes per token of one layer, forward and backward, without attention's scores."""
    config, way = load.config, int(load.compiled)
    width, inner = config.hidden_size, config.intermediate_size
    norm = COMPILED_NORM if load.compiled else EAGER_NORM[config.norm]
    total = len(config.block_norms) * norm * width + RESIDUALS[way] * width
    total += HEADS[way] * 2 * (config.query_width + config.key_width)
    total += (GATED if config.gated_mlp else PLAIN)[way] * inner
    if config.positions == "rotary":
        total += ROTARY[way] * (config.query_width + config.key_width)
    if config.residual_dropout:
        total += DROPOUT[way] * width
    return total * load.element / 2


def score_traffic(load: Occupancy) -> float:
    """Bytes per token of one layer for attention's scores: none where a fused kernel keeps them on the chip."""
    config, length = load.config, load.sequence_length
    if keeps_scores(load):
        return QUADRATIC[int(load.compiled)] * config.num_heads * length * load.element / 2
    if load.attention == "blockwise":
        return TILES * config.num_heads * length / 2 * load.element / 2
    return 0.0


def dequantised_traffic(load: Occupancy) -> float:
    """Bytes of making every quantised matrix readable once: it is read as it is kept, and written."""
    if load.way.base == "none":
        return 0.0
    sizes = [(rows, columns) for _, rows, columns, _ in matrices(load.config)]
    kept = sum(storage_bytes(size, load.way.base, load.way.double) for size in sizes)
    return float(load.config.num_layers * (kept + load.element * sum(rows * columns for rows, columns in sizes)))


def loss_traffic(outputs: int, loss: str, *, compiled: bool) -> float:
    """Bytes per token from logits to their gradient. `loss`: plain, kept or chunked."""
    return LOSS[loss][int(compiled)] * outputs


def optimizer_traffic(parameters: float, *, weight: float, states: float, clips: bool) -> float:
    """Bytes of an optimizer step: weights and states are read and written, gradients read, and scaled where they are
    clipped. `states`: bytes of all states of a parameter.
    """
    return parameters * (3 * weight + 2 * states + (CLIPPING * weight if clips else 0))

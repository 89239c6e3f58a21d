"""Seconds in which a CPU calls operators, one after the other: Python, autograd and PyTorch around the computing.

An operator is a call that computes; views and allocations are part of its time. The counts are those that PyTorch
dispatches (tests/plan/test_operators.py compares them).
"""

from bloomery.facts.counting import DELTA_CHUNK, block_norms
from bloomery.facts.limits import delta_net_groups
from bloomery.hardware.machine import CpuCheck
from bloomery.plan.estimate.states import TrainedLayer
from bloomery.plan.estimate.step import StepShape

# Of an uncompiled block, forward and backward. One that is frozen has a forward and a gradient of its input.
PRODUCTS = 2
WEIGHT_GRADIENT = 1
CASTS = 2  # of a trainable weight and of its gradient, in mixed precision
# A norm of its own kind: an RMS norm is computed in float32, step by step.
NORMS = {"layer": 2, "layer_unit_offset": 4, "rms": 16, "rms_unit_offset": 18}
ROTARY = 26  # of queries and of keys
BIAS = 3  # the sum over its gradient, and casts of both
BETWEEN = 15  # attention, residual stream, activation and gate
# A delta net in place of attention: for each group of heads, and for each chunk of it. Backward computes both again.
DELTA_NET = 500
DELTA_NET_CHUNK = 40
COMPILED_DELTA_NET = 60  # in C++: convolution, rule, norm and gate
CONVOLUTION = 37  # in place of attention
# LoRA's two matrices: six products, their casts, the scale and the addition, with their gradients.
ADAPTER = 15
# Outside the layers, of a micro-batch: embedding, last norm, loss, and the passes over each tile of the vocabulary.
ENDS = 90
FORWARD = 0.4  # of all, the share of forward, which a recomputed layer has once more
COMPILED = 0.3  # what is left of the operators between products in a compiled block

# Seconds of each, low, typical and high. Measured on a core of an AMD EPYC: a block of width 64 on 8 tokens takes
# 3.1 ms for 108 of them at its best, between other programs; its parts alone, one by one, 2.0 ms.
SECONDS = (19e-6, 26e-6, 35e-6)
PYTHON_SECONDS = 6.7e-4  # of the loop of the check on that core


def operator_seconds(check: CpuCheck | None) -> tuple[float, float, float]:
    """Low, typical and high seconds of an operator; a core that is slower in Python is slower in calling them."""
    slower = 1.0 if check is None else check.python_seconds / PYTHON_SECONDS
    low, typical, high = SECONDS
    return low * slower, typical * slower, high * slower


def operators_of_micro_batch(step: StepShape, *, recomputed: float) -> float:
    """Forward and backward. `recomputed`: the share of the layers' forward that backward computes again."""
    in_layers = sum(step.model.by_layer(lambda layer: _operators_of(step, layer)))
    forwards = FORWARD * (recomputed + step.extra_forwards)
    return in_layers * (1 + forwards) + ENDS


def _operators_of(step: StepShape, layer: TrainedLayer) -> float:
    """Of one layer, forward and backward."""
    config = step.config
    facts = layer.layer
    trained = sum(len(shape) == 2 for shape in layer.trained.values())
    gradients = WEIGHT_GRADIENT + (CASTS if step.mixed and not step.mode.frozen else 0)
    products = PRODUCTS * len(facts.matrices) + gradients * trained
    adapters = ADAPTER * sum(name.endswith("lora_A") for name in layer.adapter)

    has_attention = facts.mixer == "attention"
    norms = len(block_norms(facts.norm_placement, facts.experts)) + (
        2 if config.qk_norm != "none" and has_attention else 0
    )
    between = NORMS[config.norm] * norms + BETWEEN
    between += BIAS * sum(matrix.bias for matrix in facts.matrices)
    if facts.rotation is not None:
        between += ROTARY
    if facts.short_convolution is not None:
        between += CONVOLUTION
    return (
        products
        + adapters
        + rule_operators(step, layer)
        + between * (COMPILED if step.compiled else 1.0)
    )


def rule_operators(step: StepShape, layer: TrainedLayer) -> float:
    """Of a delta net between its projections, forward and backward; 0 of another mixer.

    A GPU launches as many kernels.
    """
    sizes = layer.layer.delta_net
    if sizes is None:
        return 0.0
    if step.attention == "compiled":
        return COMPILED_DELTA_NET
    groups = delta_net_groups(sizes, step.tokens_per_micro_batch, on_cpu=not step.on_gpu)
    chunks = -(-step.sequence_length // DELTA_CHUNK)
    return float(groups * (DELTA_NET + DELTA_NET_CHUNK * chunks))

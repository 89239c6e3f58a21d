"""Memory and traffic of a gated delta net in a training step: what it keeps, and what passes through its backward.

Forward keeps the projections alone (`model.mixers.recomputed`); backward computes some heads at a time from them.
"""

from bloomery.facts.config import DeltaNet
from bloomery.facts.counting import DELTA_CHUNK
from bloomery.facts.limits import delta_net_groups
from bloomery.plan.estimate.step import StepShape

# Float32 values that exist at once while backward computes a head, per token: of its keys, of its values, of the pairs
# of a chunk, of the states between chunks, and of keys before they are repeated for value heads. Fitted to the peaks of
# 11 sizes on a CPU; each of them is within 1.5% of it, and with inputs of half precision within 3%.
KEYS = 12.9
VALUES = 7.7
PAIRS = 7.3
STATES = 1.8
UNREPEATED_KEYS = 3.8
# In C++ (`mixers.compiled`), bytes of a token: for each value that is read, which norm and gate widen, and each head;
# or passes over what was convolved, where keys are wider than values. Within 1.5% of ten sizes.
COMPILED_READ = 32.0
COMPILED_HEAD = 20.0
COMPILED_PASSES = 2.65
# Bytes per value that the passes between matmuls move, forward and backward, in half precision: the convolution by
# taps, SiLU and lengths; norm and gate of what is read.
CONVOLVED = 160.0
READ = 120.0


def projected_width(sizes: DeltaNet) -> int:
    """Numbers of a token that the projections of the input make."""
    return 2 * sizes.key_width + 2 * sizes.value_width + 2 * sizes.num_value_heads


def kept_bytes_per_token(
    step: StepShape, sizes: DeltaNet, *, keeps_input: bool, keeps_output: bool
) -> float:
    """`keeps_input`, `keeps_output`: whether gradients of weights read what is projected, and what is read."""
    width = projected_width(sizes)
    width += step.config.hidden_size if keeps_input else 0
    width += sizes.value_width if keeps_output else 0
    return float(step.element_bytes * width)


def product_bytes_per_token(step: StepShape, sizes: DeltaNet) -> float:
    """Results of its matmuls, which selective checkpointing keeps."""
    return float(step.element_bytes * (projected_width(sizes) + step.config.hidden_size))


def backward_scratch(step: StepShape, sizes: DeltaNet) -> float:
    """Bytes that the backward of what is between the projections has at once, its gradients included."""
    tokens = step.tokens_per_micro_batch
    if (
        step.attention == "compiled"
    ):  # what is convolved, and its gradient; gradients of projections
        convolved_width = 2 * sizes.key_width + sizes.value_width
        gradients = step.element_bytes * (convolved_width + sizes.value_width)
        return float(tokens * (2 * 4 * convolved_width + gradients))
    heads = sizes.num_value_heads
    if step.attention == "compiled":
        read = (
            2 * step.element_bytes * sizes.key_width
            + COMPILED_READ * sizes.value_width
            + COMPILED_HEAD * heads
        )
        convolved_width = 2 * sizes.key_width + sizes.value_width
        return tokens * max(read, COMPILED_PASSES * step.element_bytes * convolved_width)
    pairs = heads * DELTA_CHUNK
    states = heads * sizes.key_head_dim * sizes.value_head_dim / DELTA_CHUNK
    num_values = (
        KEYS * heads * sizes.key_head_dim
        + VALUES * sizes.value_width
        + PAIRS * pairs
        + STATES * states
        + UNREPEATED_KEYS * sizes.key_width
    )
    num_groups = delta_net_groups(sizes, tokens, on_cpu=not step.on_gpu)
    earlier_gradients = step.element_bytes * projected_width(sizes) * (num_groups - 1) / num_groups
    padded_tokens = step.micro_batch_size * (-(-step.sequence_length // DELTA_CHUNK) * DELTA_CHUNK)
    return 4 * num_values / num_groups * padded_tokens + earlier_gradients * tokens


def traffic_per_token(sizes: DeltaNet) -> float:
    """Bytes that a token moves between matmuls, forward and backward, in half precision."""
    convolved_width = 2 * sizes.key_width + sizes.value_width
    return CONVOLVED * convolved_width + READ * sizes.value_width

"""Memory and traffic of a mixture of experts in a training step (`model.experts`).

Of each pair of a token and an expert it keeps what gate and up make, and the weighted product of both where a gradient
of weights reads it; of each token what the router computes.
"""

import math

from bloomery.facts.config import Experts
from bloomery.facts.counting import Layer, Shape, is_expert_stack
from bloomery.plan.estimate.step import StepShape

# Float32 numbers of each expert that a token keeps: its logit, its score, its probability.
ROUTER_VALUES = 3
# Of each chosen expert, bytes that a token keeps: order and place of the pair, the choice, and its weight three times.
PAIR_BYTES = 8 + 8 + 8 + 3 * 4
# Float32 numbers of a pair's inner width while the gradient of its weight is summed, where they are widened.
WIDENED = 3


def kept_bytes_per_token(
    step: StepShape, layer: Layer, experts: Experts, *, keeps_input: bool, keeps_inner: bool
) -> float:
    """`keeps_input`, `keeps_inner`: whether gradients of weights read the input, and the rows before the last product.

    Without what the shared expert keeps, which is an MLP.
    """
    inner = experts.per_token * experts.width
    # Where devices divide the experts, a row arrives for each pair, and is sorted again; the router keeps the token.
    is_divided = step.expert > 1
    inputs = 1 + experts.per_token if is_divided else 1
    pair_bytes = PAIR_BYTES * (2 if is_divided else 1)
    width = inputs * step.config.hidden_size if keeps_input else 0
    width += (2 if layer.gated_mlp else 1) * inner
    width += inner if keeps_inner else 0
    router = 4 * ROUTER_VALUES * experts.count + pair_bytes * experts.per_token
    if experts.normed_router:
        # In float32: what its product reads, and what a gradient of the scale does; a statistic of the norm.
        router += 4 * step.config.hidden_size * (1 if step.mode.frozen else 2) + 4
    shared_gate = 2 * step.element_bytes * step.config.hidden_size if experts.shared_gate else 0
    return float(step.element_bytes * width + router + shared_gate)


def product_bytes_per_token(step: StepShape, layer: Layer, experts: Experts) -> float:
    """Results of its products, which selective checkpointing keeps: each pair has a row of the residual's width."""
    rows = (2 if layer.gated_mlp else 1) * experts.width + step.config.hidden_size
    router = 4 * experts.count
    return float(step.element_bytes * experts.per_token * rows + router)


def passing_bytes_per_token(step: StepShape, layer: Layer, experts: Experts) -> float:
    """The most that exists at once in backward, with the gradient of the stream beside it.

    First the gradients around the last product; then those of the activation, which is computed again, and of the
    weights; then those around the first product. Where devices divide the experts, what is sent and what arrives.
    """
    hidden = experts.per_token * step.config.hidden_size
    inner = experts.per_token * experts.width
    gates = 2 if layer.gated_mlp else 1
    widened = 4 * WIDENED * inner if step.element_bytes < 4 else step.element_bytes * inner
    return float(
        max(
            step.element_bytes * (hidden + inner),
            step.element_bytes * 2 * inner + widened,
            step.element_bytes * (2 + 2 * gates) * inner,
            step.element_bytes * (gates * inner + hidden + step.config.hidden_size),
            step.element_bytes * 3 * hidden if step.expert > 1 else 0,
        )
    )


def stacked_matrices(layer: Layer) -> tuple[Shape, ...]:
    """The matrices of all experts of a layer below each other, (rows, inputs): as they are quantized and counted."""
    return tuple(
        (shape[0] * shape[1], shape[2])
        for name, shape in layer.shapes
        if is_expert_stack(name) and len(shape) == 3
    )


def read_bytes(step: StepShape, layer: Layer, *, is_trained: bool, passes: float) -> float:
    """Bytes of experts that a micro-batch moves in a layer: read in each pass, and gradients written once.

    Its tokens reach few experts where they are few: of E experts E (1 - (1 - K / E)^N), chosen evenly.
    """
    if layer.experts is None:
        return 0.0
    # A device has its share of the experts, which the tokens of all that divide them reach.
    values = sum(map(math.prod, stacked_matrices(layer))) / step.expert
    met_share = 1 - (1 - layer.expert_share) ** (step.tokens_per_micro_batch * step.expert)
    moved_bytes = passes * step.element_bytes * met_share
    moved_bytes += 2 * step.weight_bytes if is_trained else 0
    return values * moved_bytes


def filling_tokens(step: StepShape, experts: Experts, *, flops: float, bandwidth: float) -> int:
    """Tokens of a micro-batch from which experts take longer to compute than to read: 2 N (K / E) / flops for each
    value, against its bytes / bandwidth.
    """
    rows = step.element_bytes * flops / (2 * bandwidth)
    return math.ceil(rows * experts.count / experts.per_token / step.expert)

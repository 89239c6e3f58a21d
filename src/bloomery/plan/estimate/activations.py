"""Bytes that a step keeps from forward for backward, layer by layer, and what passes through a layer in backward.

A frozen matrix needs its weight for the gradient of its input, and its input for nothing: an input that only a
gradient of weights reads is kept where the weight is trainable or has an adapter.
"""

import math
from collections.abc import Sequence

from bloomery.facts.attention import BACKENDS
from bloomery.facts.counting import EXPERT_NORMS, Layer, is_expert_stack
from bloomery.facts.limits import (
    ATTENTION_BLOCK,
    CPU_SCORES,
    DEQUANTIZE_SCRATCH_BYTES,
    DEQUANTIZED_ON_CPU,
    DEQUANTIZED_ON_GPU,
    GPU_SCORES,
)
from bloomery.plan.estimate import delta_net, experts
from bloomery.plan.estimate.states import TrainedLayer
from bloomery.plan.estimate.step import StepShape

# Bytes of a score of a tile in backward: three float32 values, 16 random bits and a mask.
TILE_SCORE_BYTES = 15
DELTA_NET_INPUTS = (
    *("q_proj", "k_proj", "v_proj"),
    *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    *("in_proj_qkvz", "in_proj_ba"),
)
MIXER_OUTPUT = {"delta_net": "linear_attn.out_proj", "short_convolution": "conv.out_proj"}
# Modules that read one input.
MODULES_WITH_ONE_INPUT = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("mlp.gate_proj", "mlp.up_proj"),
    tuple(f"linear_attn.{name}" for name in DELTA_NET_INPUTS),
)
INPUT_BYTES = 36  # per token: ids, labels, positions, documents, loss mask
LABEL_BYTES = 44  # per token: loss mask, logits of the labels, sums and gradients
# Of a number inside an MLP, while xIELU is differentiated: two float32 results, and two masks. Below float32 its input
# and its gradient are widened, too.
XIELU_SCRATCH = 10


def activation_bytes(step: StepShape) -> float:
    """Bytes that all layers keep for backward."""
    return sum(kept_by_layer(step))


def kept_by_layer(step: StepShape) -> list[float]:
    """Bytes that each layer keeps for backward."""
    mode = step.checkpointing
    full_bytes = step.model.by_layer(lambda layer: layer_bytes(step, layer))
    if mode == "none":
        return full_bytes
    tokens = step.tokens_per_micro_batch
    stream_bytes = float(tokens * step.config.hidden_size * step.residual_bytes)
    # Keys and values that later layers use stay, as part of what the layer returned.
    input_bytes = step.model.by_layer(
        lambda layer: (
            stream_bytes + (tokens * _key_bytes(step, layer) if layer.layer.lends_keys else 0.0)
        )
    )
    if mode == "selective":
        products = step.model.by_layer(lambda layer: tokens * _product_bytes_per_token(step, layer))
        scores = step.model.by_layer(lambda layer: _product_bytes_of_scores(step, layer))
        return [
            stream_bytes + product_bytes + score_bytes
            for product_bytes, score_bytes in zip(products, scores, strict=True)
        ]
    interval = checkpointing_interval(mode)
    return [
        kept_bytes if number % interval else recomputed_bytes
        for number, kept_bytes, recomputed_bytes in zip(
            step.model.layer_numbers, full_bytes, input_bytes, strict=True
        )
    ]


def checkpointing_interval(checkpointing: str) -> int:
    """Each so many layers one is recomputed, from the first on: 1 for `full`, n for `every-n`."""
    return 1 if checkpointing == "full" else int(checkpointing.removeprefix("every-"))


def kept_layers(checkpointing: str, num_layers: int) -> int:
    """Layers without recomputation: none for `full`, half of the work for `selective`, all but each n-th."""
    if checkpointing == "none":
        return num_layers
    if checkpointing == "selective":
        return num_layers - num_layers // 2
    return num_layers - math.ceil(num_layers / checkpointing_interval(checkpointing))


def recomputed_shares(checkpointing: str, layer_numbers: Sequence[int]) -> list[float]:
    """The share of the forward of each of these layers that backward computes again."""
    num_layers = len(layer_numbers)
    if checkpointing == "none":
        return [0.0] * num_layers
    if checkpointing == "selective":
        return [(num_layers // 2) / max(1, num_layers)] * num_layers
    interval = checkpointing_interval(checkpointing)
    return [0.0 if number % interval else 1.0 for number in layer_numbers]


def layer_bytes(step: StepShape, layer: TrainedLayer) -> float:
    """Bytes that one layer keeps for backward without recomputation."""
    # A mask is added to scores, so that it has their dtype.
    # Of every token of the sequence, also of those of other devices.
    mask_bytes = 0
    if step.attention == "mask":
        mask_bytes = step.element_bytes * step.sequence_length * step.context
    score_bytes = score_matrix_bytes(step, layer) if keeps_scores(step) else 0.0
    return (
        step.tokens_per_micro_batch * (layer_bytes_per_token(step, layer) + mask_bytes)
        + score_bytes
    )


def layer_bytes_per_token(step: StepShape, layer: TrainedLayer) -> float:
    """Without quadratic scores: 38 h for a GPT block with dropout in half precision on a GPU."""
    return (
        _mixer_bytes(step, layer)
        + _norm_bytes(step, layer)
        + _mlp_bytes(step, layer)
        + _own_input_bytes(step, layer)
        + _adapter_bytes(step, layer)
    )


def _product_bytes_per_token(step: StepShape, layer: TrainedLayer) -> float:
    """Results of a layer's matmuls and of attention."""
    facts = layer.layer
    return _mixer_product_bytes(step, facts) + _mlp_product_bytes(step, facts)


def _mlp_product_bytes(step: StepShape, facts: Layer) -> float:
    hidden_size = step.config.hidden_size
    gates = 2 if facts.gated_mlp else 1
    if facts.experts is None:
        return float(step.element_bytes * (hidden_size + gates * facts.intermediate_size))
    shared_width = facts.experts.shared_width
    shared = hidden_size + gates * shared_width if shared_width else 0
    products = experts.product_bytes_per_token(step, facts, facts.experts)
    return step.element_bytes * shared + products


def _mixer_product_bytes(step: StepShape, facts: Layer) -> float:
    hidden_size = step.config.hidden_size
    if facts.delta_net is not None:
        return delta_net.product_bytes_per_token(step, facts.delta_net)
    if facts.short_convolution is not None:
        return float(step.element_bytes * 4 * hidden_size)
    widths = hidden_size + (3 if step.config.attention_gate else 2) * facts.query_width
    if facts.keys_of is None:
        widths += (1 if facts.keys_are_values else 2) * facts.key_width
    if facts.per_layer_input_size:
        widths += facts.per_layer_input_size + hidden_size
    if step.context > 1:  # results of the exchanges, before and after attention
        widths += 2 * facts.query_width + 2 * facts.key_width
    return float(step.element_bytes * widths + 4 * facts.num_heads)


def _product_bytes_of_scores(step: StepShape, layer: TrainedLayer) -> float:
    """Of attention that is no operator of its own: the product of queries and keys."""
    if not keeps_scores(step):
        return 0.0
    is_cpu_fallback = bool(BACKENDS[step.attention].operators)  # PyTorch's, in float32
    return float((4 if is_cpu_fallback else step.element_bytes) * _scores(step, layer))


def _norm_bytes(step: StepShape, layer: TrainedLayer) -> float:
    """Norms keep their inputs and one or two statistics per token; masks of residual dropout are included.

    Inputs are the residual stream before a block's part and its half-precision result after it. A compiled block keeps
    the result of attention and recomputes the second sum of the residual stream.
    """
    config = step.config
    width = config.hidden_size
    statistic_bytes = 8 if config.norm.startswith("layer") else 4
    result_bytes = _norm_input_bytes(step)
    input_bytes = {
        "before": [step.residual_bytes] * 2,
        "after": [result_bytes] * 2,
        "both": [step.residual_bytes, result_bytes, step.residual_bytes, result_bytes],
        "shared": [step.residual_bytes],
    }[layer.layer.norm_placement]
    if step.compiled and layer.layer.norm_placement == "before":
        input_bytes = [step.residual_bytes, step.element_bytes]
    num_norms = len(input_bytes)
    if layer.layer.experts is not None and layer.layer.experts.own_norms:
        # Two more have results of their own, the one before the experts reads the stream that is kept already.
        input_bytes += [result_bytes] * 2
        num_norms += len(EXPERT_NORMS)
    # The CPU keeps the scaled mask.
    mask_bytes = 1 if step.on_gpu or step.compiled else step.element_bytes
    dropout_bytes = 2 * mask_bytes * width if config.residual_dropout else 0
    return sum(input_bytes) * width + statistic_bytes * num_norms + dropout_bytes


def _norm_input_bytes(step: StepShape) -> int:
    """Bytes of a half-precision value that a norm keeps: a GPU's kernel needs it as wide as the gains, which are
    float32 where they are trained, and under float16.
    """
    has_wide_gains = step.mixed and (not step.mode.frozen or step.precision == "float16")
    return 4 if step.on_gpu and has_wide_gains and not step.compiled else step.element_bytes


def _mixer_bytes(step: StepShape, layer: TrainedLayer) -> float:
    facts = layer.layer
    if facts.delta_net is not None:
        return delta_net.kept_bytes_per_token(
            step,
            facts.delta_net,
            keeps_input=_keeps_input(step, layer, *DELTA_NET_INPUTS),
            keeps_output=_keeps_input(step, layer, "out_proj"),
        )
    if facts.short_convolution is not None:
        return _convolution_bytes(step, layer)
    return _attention_bytes(step, layer)


def _convolution_bytes(step: StepShape, layer: TrainedLayer) -> float:
    """A gated convolution keeps both gates and what they multiply, before it and, in PyTorch, gated and after it."""
    widths = 3 if step.attention == "compiled" else 5
    widths += _keeps_input(step, layer, "in_proj") + _keeps_input(step, layer, "out_proj")
    return float(step.element_bytes * step.config.hidden_size * widths)


def _attention_bytes(step: StepShape, layer: TrainedLayer) -> float:
    """Attention keeps its input, q and its output, k and v, a log-sum-exp per head; a norm of q and k its inputs.

    A gate of its output keeps its sigmoid, and the product of both where o_proj does.
    """
    facts = layer.layer
    total = float(step.element_bytes * 2 * facts.query_width) + _key_bytes(step, layer)
    # Exchanged back, the output is another tensor, which o_proj may keep.
    if step.context > 1 and _keeps_input(step, layer, "o_proj"):
        total += step.element_bytes * facts.query_width
    if step.config.head_gate:
        gated_width = facts.query_width if _keeps_input(step, layer, "o_proj") else 0
        total += step.element_bytes * (gated_width + facts.num_heads)
    if step.config.attention_gate:
        gated = 1 + _keeps_input(step, layer, "o_proj")
        total += step.element_bytes * gated * facts.query_width
    if _keeps_input(step, layer, "q_proj", "k_proj", "v_proj"):
        total += step.element_bytes * step.config.hidden_size
    if step.config.qk_norm != "none":
        key_heads = facts.num_kv_heads if facts.keys_of is None else 0
        # The input of the norm of values is that of the norm of keys where both are one.
        has_two = step.config.value_norm and not (
            facts.keys_are_values and _norm_input_bytes(step) == step.element_bytes
        )
        normed_width = facts.query_width + (2 if has_two else 1) * key_heads * facts.head_dim
        # Heads that were rotated first are not rounded in between.
        is_rotated = step.config.qk_norm == "rotated_head" and facts.rotation is not None
        total += (4 if is_rotated else _norm_input_bytes(step)) * normed_width
        total += 4 * (facts.num_heads + (2 if step.config.value_norm else 1) * key_heads)
    if not keeps_scores(step):
        total += 4 * facts.num_heads
    elif step.attention != "math":  # PyTorch computes it in float32
        total += (4 - step.element_bytes) * (facts.query_width + 2 * facts.key_width)
    return total


def _key_bytes(step: StepShape, layer: TrainedLayer) -> float:
    """Of keys and values of a token; 0 where they are those of another layer."""
    facts = layer.layer
    return 0.0 if facts.keys_of is not None else float(2 * step.element_bytes * facts.key_width)


def _own_input_bytes(step: StepShape, layer: TrainedLayer) -> float:
    """The gate of what a layer is given of a token keeps its result, and the norm after the projection its input.

    What the layer is given is one tensor of all layers, which `end_bytes` counts.
    """
    size = layer.layer.per_layer_input_size
    if size == 0:
        return 0.0
    width = step.config.hidden_size
    kept_width = width if _keeps_input(step, layer, "per_layer_input_gate") else 0
    kept_width += size * (1 + _keeps_input(step, layer, "per_layer_projection"))
    if step.model.trains_layer_inputs:
        kept_width += size
    return float(step.element_bytes * kept_width + _norm_input_bytes(step) * width + 4)


def _mlp_bytes(step: StepShape, layer: TrainedLayer) -> float:
    """Of an MLP, or of experts and the one that every token meets."""
    mixture = layer.layer.experts
    if mixture is None:
        return _dense_mlp_bytes(step, layer, layer.layer.intermediate_size)
    gate_up_rank, down_rank = (
        layer.adapter_rank(f"mlp.experts.{stack}") for stack in ("gate_up_proj", "down_proj")
    )
    keeps_input = not step.mode.frozen or gate_up_rank > 0
    keeps_inner = not step.mode.frozen or down_rank > 0
    kept_bytes = experts.kept_bytes_per_token(
        step, layer.layer, mixture, keeps_input=keeps_input, keeps_inner=keeps_inner
    )
    # Of each pair, what is between the two matrices of an adapter.
    kept_bytes += step.element_bytes * mixture.per_token * (gate_up_rank + down_rank)
    if mixture.shared_width:
        kept_bytes += _dense_mlp_bytes(step, layer, mixture.shared_width)
        if keeps_input and not mixture.own_norms:  # one tensor is kept for both
            kept_bytes -= step.element_bytes * step.config.hidden_size
    return kept_bytes


def _dense_mlp_bytes(step: StepShape, layer: TrainedLayer, inner_width: int) -> float:
    """An MLP keeps its input, the input and output of the activation, and for a gate the other factor and the
    product.
    """
    config = step.config
    facts = layer.layer
    inner_tensors = 4 if facts.gated_mlp else 2
    if config.activation == "relu":  # it is differentiated from its result
        inner_tensors -= 1
    # One pass of torch's compiler or of C++ computes the activation and the product; backward computes it again.
    in_one_pass = step.compiled or (step.attention == "compiled" and config.activation == "silu")
    if facts.gated_mlp and in_one_pass:
        inner_tensors = 3
    if not _keeps_input(step, layer, "down_proj") and config.activation != "relu":
        inner_tensors -= 1
    input_width = config.hidden_size if _keeps_input(step, layer, "gate_proj", "up_proj") else 0
    # Where attention reads the same, one tensor is kept for both.
    if config.norm_placement == "shared" and _keeps_input(
        step, layer, "q_proj", "k_proj", "v_proj"
    ):
        input_width = 0
    return step.element_bytes * (input_width + inner_tensors * inner_width)


def _keeps_input(step: StepShape, layer: TrainedLayer, *modules: str) -> bool:
    """Whether one of these modules keeps its input for a gradient of weights; after dropout it keeps another."""
    return not step.mode.frozen or layer.reads_input(*modules, dropout=step.mode.dropout)


def _adapter_bytes(step: StepShape, layer: TrainedLayer) -> float:
    """Adapters of a layer keep the values between their two matmuls, and their own inputs after dropout.

    DoRA's scaling keeps the result that it scales. In half precision each PEFT layer casts its input itself;
    native adapters share the cast.
    """
    mode = step.mode
    element_bytes = step.element_bytes
    total = 0.0
    for matrix in layer.layer.matrices:
        rank = layer.adapter_rank(matrix.name)
        if not rank:
            continue
        total += element_bytes * rank * (2 if mode.pissa else 1)
        if mode.dropout:
            mask_bytes = 1 if step.on_gpu else element_bytes
            total += (element_bytes + mask_bytes) * matrix.inputs
        if mode.dora:
            total += element_bytes * matrix.outputs
    if mode.peft and element_bytes < 4:
        for modules in MODULES_WITH_ONE_INPUT:
            adapted = [module for module in modules if layer.adapter_rank(module)]
            total += element_bytes * step.config.hidden_size * max(0, len(adapted) - 1)
    return total


def end_bytes(step: StepShape) -> float:
    """Bytes kept outside the layers: inputs, the last norm's input, inputs of the head, embedding dropout.

    Of a stage of a pipeline, those of the ends that it has.
    """
    config = step.config
    mask_bytes = 1 if step.on_gpu else step.residual_bytes
    dropout_bytes = mask_bytes * config.hidden_size if config.embedding_dropout else 0
    if not step.model.embeds:
        dropout_bytes = 0
    label_bytes = LABEL_BYTES if step.model.has_head else 0
    layer_input_bytes = 0
    if step.model.has_layer_inputs:
        values = config.num_layers * config.per_layer_input_size
        layer_input_bytes = step.element_bytes * values
        if step.model.trains_layer_inputs:
            layer_input_bytes += _norm_input_bytes(step) * values + 4 * config.num_layers
            if step.element_bytes < step.residual_bytes:
                layer_input_bytes += step.element_bytes * config.hidden_size
    return last_norm_bytes(step) + step.tokens_per_micro_batch * (
        INPUT_BYTES + label_bytes + dropout_bytes + layer_input_bytes
    )


def last_norm_bytes(step: StepShape) -> float:
    if not step.model.has_head:
        return 0.0
    value_bytes = step.residual_bytes + step.element_bytes
    return float(step.tokens_per_micro_batch * step.config.hidden_size * value_bytes)


def backward_bytes(step: StepShape, layer: TrainedLayer) -> float:
    """Temporary bytes of a layer in backward: first its MLP, then its attention."""
    tokens = step.tokens_per_micro_batch
    facts = layer.layer
    hidden_size = step.config.hidden_size
    element_bytes = step.element_bytes
    stream_bytes = step.residual_bytes * hidden_size
    inner_width = (2 if facts.gated_mlp else 1) * facts.intermediate_size

    # The gradient of a matrix exists in the dtype of matmuls before it is widened and accumulated.
    sizes = {matrix.name: matrix.size for matrix in facts.matrices}
    trained_sizes = {
        name: size for name, size in sizes.items() if f"{name}.weight" in layer.trained
    }
    gradient_bytes = step.layer_gradient_bytes
    if gradient_bytes > element_bytes:
        gradient_bytes += element_bytes
    matrix_bytes = float(max(trained_sizes.values(), default=0) * gradient_bytes)
    is_quantized = step.mode.quantize_kind != "none"
    if is_quantized and facts.experts is not None:
        # While the matrix is made there is no result of the matmul yet.
        sizes_at_once = [
            round(math.prod(stack) / facts.experts.count)
            for stack in experts.stacked_matrices(facts)
        ]
        matrix_bytes += (
            _dequantized_bytes(step, [*sizes.values(), *sizes_at_once], hidden_size)
            - tokens * element_bytes * hidden_size
        )
    mlp_values = float(element_bytes * (hidden_size + inner_width))
    stacks = {
        name: math.prod(shape) for name, shape in layer.trained.items() if is_expert_stack(name)
    }
    if facts.experts is not None:
        mlp_values = experts.passing_bytes_per_token(step, facts, facts.experts)
        matrix_bytes = max(matrix_bytes, float(sum(stacks.values()) * step.layer_gradient_bytes))
    xielu_bytes = 0
    if step.config.activation == "xielu" and not step.compiled:
        xielu_bytes = (XIELU_SCRATCH + (0 if element_bytes == 4 else 8)) * facts.intermediate_size
    mlp_values += xielu_bytes
    mlp = tokens * (stream_bytes + mlp_values) + matrix_bytes
    if is_quantized and facts.experts is None:
        mlp = matrix_bytes + _quantized_mlp_bytes(step, layer, tokens * xielu_bytes)

    # Gradients of the MLP wait while the mixer is differentiated, unless they are accumulated or used at once. A
    # compiled graph returns all gradients of its layer together.
    waiting_modules = (
        ("mlp.",) if facts.mixer == "attention" else ("mlp.", MIXER_OUTPUT[facts.mixer])
    )
    waiting_values = sum(
        size for name, size in trained_sizes.items() if name.startswith(waiting_modules)
    ) + sum(stacks.values())
    if step.compiled and trained_sizes:
        waiting_values = layer.trainable_values
    elif step.accumulating or step.mode.fused_backward:
        waiting_values = 0
    scratch_bytes = mixer_scratch(step, layer)
    if is_quantized:  # the projections are differentiated before and after the operator
        projections = [size for name, size in sizes.items() if not name.startswith("mlp.")]
        scratch_bytes = max(scratch_bytes, _dequantized_bytes(step, projections, hidden_size))
    mixer = (
        tokens * (stream_bytes + element_bytes * _passing_width(layer))
        + waiting_values * step.layer_gradient_bytes
        + scratch_bytes
    )
    # By then what the MLP kept is free.
    return max(mlp, mixer - tokens * _mlp_bytes(step, layer))


def _quantized_mlp_bytes(step: StepShape, layer: TrainedLayer, activation_scratch: float) -> float:
    """Temporary bytes of an MLP of frozen matrices that are dequantized for each product, one at a time.

    N tokens, F values of the inner width, D of the stream; G is the gradient of the stream. In the order of a layer
    that is recomputed, beside all that the MLP keeps:

    1. down_proj forward, the end of the recomputation: G, its matrix, and either scratch of the dequantization or the
       product [N, D]; what an adapter adds to that, [N, D], and the mixer's result [N, D], which the block holds.
    2. down_proj backward, first its frozen part: G, its matrix, and either scratch or the gradient [N, F]. Under
       float16 a copy of G in half precision.
    3. The adapter's gradient [N, F] beside that one and their sum; down_proj's input [N, F] is free by then, if it was
       kept. Then the gradient that enters the product with the gate, [N, F], beside both that leave it.
    4. gate_proj and up_proj backward: as 2, but what the activation kept is free, as many [N, F] as their gradients
       and more, so that this is never the largest.

    The matrix and the gradients of 3 are never there together. Without recomputation 1 is a moment of forward, when G
    is not there.
    """
    facts = layer.layer
    config = step.config
    is_adapted = layer.adapter_rank("mlp.down_proj") > 0
    value_bytes = step.tokens_per_micro_batch * step.element_bytes
    stream_bytes = float(step.tokens_per_micro_batch * config.hidden_size * step.residual_bytes)
    sizes = [matrix.size for matrix in facts.matrices if matrix.name.startswith("mlp.")]

    forward = _dequantized_bytes(step, sizes, config.hidden_size)
    forward += (2 if is_adapted else 1) * value_bytes * config.hidden_size
    if step.checkpointing != "none":
        forward += stream_bytes

    down_proj = stream_bytes + _dequantized_bytes(step, sizes, facts.intermediate_size)
    if step.residual_bytes > step.element_bytes:
        down_proj += value_bytes * config.hidden_size

    # Of a plain MLP relu keeps what down_proj reads.
    frees_inner = _keeps_input(step, layer, "down_proj") and (
        facts.gated_mlp or config.activation != "relu"
    )
    num_gradients = max(2 if facts.gated_mlp else 1, 2 if is_adapted else 1)
    num_gradients += 0 if frees_inner else 1
    gradients = stream_bytes + num_gradients * value_bytes * facts.intermediate_size
    return max(forward, down_proj, gradients + activation_scratch)


def _dequantized_bytes(step: StepShape, sizes: Sequence[int], product_width: int) -> float:
    """Bytes of the largest of these matrices as floats, and of its product, or while there is none, of scratch."""
    largest = max(sizes, default=0)
    piece = min(largest, DEQUANTIZED_ON_GPU if step.on_gpu else DEQUANTIZED_ON_CPU)
    product_bytes = step.tokens_per_micro_batch * step.element_bytes * product_width
    return float(
        step.element_bytes * largest + max(DEQUANTIZE_SCRATCH_BYTES * piece, product_bytes)
    )


def _passing_width(layer: TrainedLayer) -> int:
    """Values per token whose gradients pass through a mixer at once, without what its scratch counts."""
    facts = layer.layer
    if facts.delta_net is not None:
        return facts.delta_net.value_width
    if facts.short_convolution is not None:
        return 4 * facts.hidden_size
    return 2 * (facts.query_width + facts.key_width)


def mixer_scratch(step: StepShape, layer: TrainedLayer) -> float:
    """Temporary bytes of a mixer in backward, in addition to gradients: its kernel's, and those of an exchange."""
    facts = layer.layer
    if facts.delta_net is not None:
        return delta_net.backward_scratch(step, facts.delta_net)
    if (
        facts.short_convolution is not None
    ):  # a wide gradient of the convolution's result, and of its input
        return float(8 * step.tokens_per_micro_batch * step.config.hidden_size)
    return _kernel_scratch(step, layer) + exchange_scratch(step, layer)


def exchange_scratch(step: StepShape, layer: TrainedLayer) -> float:
    """Bytes of what is sent and received in the exchange of queries, keys and values, or of their gradients."""
    if step.context == 1:
        return 0.0
    width = layer.layer.query_width + 2 * layer.layer.key_width
    return float(2 * step.element_bytes * step.tokens_per_micro_batch * width)


def _kernel_scratch(step: StepShape, layer: TrainedLayer) -> float:
    tokens = step.tokens_per_micro_batch
    facts = layer.layer
    query_width = facts.query_width
    key_width = facts.key_width
    if keeps_scores(step):
        # three gradients of the scores, float32
        return float(12 * facts.num_heads * step.sequence_length * tokens)
    if step.attention == "blockwise":
        num_heads = facts.num_heads // step.context
        tile_scores = num_heads * min(step.sequence_length, ATTENTION_BLOCK) ** 2
        scores_at_once = GPU_SCORES if step.on_gpu else CPU_SCORES
        sequences_at_once = min(step.micro_batch_size, max(1, scores_at_once // tile_scores))
        copy_bytes = step.element_bytes * (3 * query_width + 2 * key_width) + 8 * key_width
        token_bytes = copy_bytes / step.context  # of this device's share of the heads
        sequence_bytes = TILE_SCORE_BYTES * tile_scores + step.sequence_length * token_bytes
        return float(sequences_at_once * sequence_bytes)
    # a gradient for each document, then concatenated
    if step.attention in ("per_document", "mask"):
        return float(step.element_bytes * tokens * (query_width + 2 * key_width))
    if step.attention == "compiled":  # the gradients of keys and values by query head, float32
        return 8.0 * tokens * query_width if query_width != key_width else 0.0
    if step.attention == "triton":  # a float32 number for each query
        return 4.0 * tokens * facts.num_heads
    # flash sums the queries' gradient in float32
    return 4.0 * tokens * query_width if step.on_gpu else 0.0


def keeps_scores(step: StepShape) -> bool:
    """Whether attention keeps every score: `math`, and PyTorch's CPU kernel with dropout."""
    cpu_fallback = (
        not step.on_gpu and step.config.attention_dropout > 0 and step.attention in ("sdpa", "mask")
    )
    return not BACKENDS[step.attention].operators or cpu_fallback


def score_matrix_bytes(step: StepShape, layer: TrainedLayer) -> float:
    """Bytes that attention of a layer keeps with every score in float32: softmax, dropout, their product."""
    element_bytes = step.element_bytes
    if step.attention != "math":
        score_bytes = 12  # PyTorch's: softmax, mask and product, all float32
    elif step.config.attention_dropout > 0:
        score_bytes = 4 + (1 if step.on_gpu else 4) + element_bytes
    else:
        score_bytes = 4 + (element_bytes if element_bytes < 4 else 0)
    return float(score_bytes * _scores(step, layer))


def gpu_fallback_bytes(step: StepShape) -> float:
    """Bytes that PyTorch's GPU fallback keeps for backward: softmax, dropout mask and result, 5 a s^2 b per layer.

    At least those of one layer: a recomputed layer keeps them too, until its backward has run.
    """
    element_bytes = step.element_bytes
    score_bytes = 2 * element_bytes + 1 if step.config.attention_dropout else element_bytes
    by_layer = step.model.by_layer(lambda layer: float(score_bytes * _scores(step, layer)))
    num_kept = max(1, kept_layers(step.checkpointing, len(by_layer)))
    return sum(by_layer) * num_kept / len(by_layer)


def _scores(step: StepShape, layer: TrainedLayer) -> int:
    return layer.layer.num_heads * step.sequence_length * step.tokens_per_micro_batch

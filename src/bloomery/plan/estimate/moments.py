"""Live bytes at each moment of a step at which memory can peak, on one device that holds the whole model."""

import math
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from bloomery.facts.limits import CPU_BLOCK, CPU_TILE
from bloomery.model.adapters.settings import EMBEDDING
from bloomery.plan.estimate.activations import (
    backward_bytes,
    end_bytes,
    kept_by_layer,
    kept_layers,
    last_norm_bytes,
    layer_bytes,
)
from bloomery.plan.estimate.states import TrainedLayer, stays_float32
from bloomery.plan.estimate.step import StepShape

# Bytes per logit of each model, with the logits themselves on a GPU: model.divergence.Divergence, uncompiled.
FORWARD_DIVERGENCE = 20
BACKWARD_DIVERGENCE = 28


class StepMoment(NamedTuple):
    """Live bytes in addition to weights and states."""

    gradients: float
    activations: float
    logits: float = 0.0
    copies: float = 0.0
    temporaries: float = 0.0
    pictures: float = 0.0

    @property
    def total(self) -> float:
        model = self.gradients + self.activations + self.logits + self.copies + self.temporaries
        return model + self.pictures


def moments(step: StepShape) -> Iterator[StepMoment]:
    """Every moment of a step at which memory can peak, in order: the end of forward, the logits' backward, each layer's
    backward from the last to the first, the embeddings' backward, the update.

    A stage of a pipeline has the same moments, of the layers and the ends that are on it.
    """
    config = step.config
    model = step.model
    num_layers = len(model.layers)

    # Bytes of each layer, in the order of forward: kept for backward, with nothing recomputed, copied by autocast, ...
    kept_bytes = kept_by_layer(step)
    if step.offload_activations:  # the current layer and the next one
        kept_bytes = [0.0] * (num_layers - 2) + kept_bytes[-2:]
    in_full = model.by_layer(lambda layer: layer_bytes(step, layer))
    passing = model.by_layer(lambda layer: backward_bytes(step, layer))
    copies = model.by_layer(lambda layer: 2.0 * copied_values(step, layer))
    gradients = model.by_layer(lambda layer: model.layer_trainable_bytes(layer, step.precision))

    # ... and of the model: outside the layers, of all gradients, of the head's gradient, of the update.
    ends = end_bytes(step)
    last_norm = last_norm_bytes(step)
    all_gradients = model.trainable_bytes(step.precision)
    head_values = step.head_outputs * config.hidden_size
    head_gradient = head_values * step.weight_bytes if model.trains_head else 0
    embedding_values = math.prod(model.trained.get(f"{EMBEDDING}.weight", (0,)))
    embedding_gradient = embedding_values * step.weight_bytes
    update = model.update_bytes(step.optimizer, step.precision, on_gpu=step.on_gpu)
    fused_backward = step.mode.fused_backward
    if fused_backward:
        all_gradients = model.largest_bytes(step.precision)
    accumulated = all_gradients if step.accumulating else 0.0

    # Autocast keeps its copies until forward ends, then those that backward reads.
    logits_forward, logits_backward = logit_bytes(step)
    all_copies = sum(copies)
    read_share = kept_layers(step.checkpointing, num_layers) / num_layers
    yield StepMoment(
        gradients=accumulated,
        activations=sum(kept_bytes) + ends,
        logits=logits_forward,
        copies=all_copies,
    )
    yield StepMoment(
        gradients=accumulated or head_gradient,
        activations=sum(kept_bytes) + ends,
        logits=logits_backward,
        copies=all_copies * read_share,
    )

    # Gradients of what layers are given wait until those of all layers are there, to become one tensor.
    given_bytes = 0.0
    if model.trains_layer_inputs:
        given_bytes = float(
            step.tokens_per_micro_batch * config.per_layer_input_size * step.element_bytes
        )
    kept_before = [0.0, *accumulate(kept_bytes)]
    copied_before = [0.0, *accumulate(copies)]
    finished_gradients = 0.0
    for index in reversed(range(num_layers)):
        if fused_backward:
            # The head's weight is updated with the next one, each later one immediately.
            layer_gradients = head_gradient if index == num_layers - 1 else 0.0
        else:
            layer_gradients = accumulated or head_gradient + finished_gradients
        yield StepMoment(
            gradients=layer_gradients,
            activations=kept_before[index] + in_full[index] + ends - last_norm,
            copies=max(copies[index], read_share * copied_before[index + 1]),
            temporaries=(max(passing[index], update) if fused_backward else passing[index])
            + given_bytes * (num_layers - 1 - index),
        )
        finished_gradients += gradients[index]

    # A tied or accumulated head: its gradient exists a second time while it is added. On a stage without the head it is
    # that of the embeddings.
    second_gradient: float = head_gradient if step.accumulating or config.tie_embeddings else 0.0
    if not model.has_head:
        second_gradient = embedding_gradient if step.accumulating else 0
    table_values = math.prod(model.trained.get("model.embed_tokens_per_layer.weight", (0,)))
    if step.on_gpu and step.accumulating:  # a CPU adds the rows of a batch in place
        second_gradient = max(second_gradient, table_values * step.weight_bytes)
    stream: float = step.tokens_per_micro_batch * config.hidden_size * step.residual_bytes
    stream += 2 * given_bytes * num_layers
    yield StepMoment(
        gradients=all_gradients,
        activations=ends - last_norm,
        temporaries=stream + second_gradient if model.embeds else stream,
    )
    yield StepMoment(gradients=all_gradients, activations=0.0, temporaries=update)


def copied_values(step: StepShape, layer: TrainedLayer) -> int:
    """Values of a layer that autocast copies to half precision: wider inputs of matmuls."""
    if not step.mode.frozen:
        if not step.mixed:
            return 0
        # A CPU copies one expert at a time.
        stacks = layer.layer.stacked_values if step.on_gpu else 0
        return layer.layer.matrix_values + stacks
    groups = ((layer.trained, step.weight_bytes), (layer.adapter, step.mode.adapter_bytes))
    return sum(
        math.prod(shape)
        for shapes, weight_bytes in groups
        for shape in shapes.values()
        if weight_bytes > step.element_bytes and len(shape) == 2
    )


def kept_logit_bytes(step: StepShape) -> float:
    """Bytes of logits that a micro-batch keeps until its backward: all, where they are not computed again in chunks."""
    is_kept = (
        step.model.has_head
        and step.config.head == "tokens"
        and step.teacher_width is None
        and step.score_chunk >= step.tokens_per_micro_batch
        and (step.on_gpu or step.head_outputs <= CPU_TILE)
    )
    logits = step.tokens_per_micro_batch * step.head_outputs
    return float(step.element_bytes * logits) if is_kept else 0.0


def logit_bytes(step: StepShape) -> tuple[float, float]:
    """Temporary bytes of the output layer in forward and in backward.

    Logits of one tile have the dtype of matmuls. Uncompiled, half-precision logits have a float32 copy, and in forward
    exponentials. Backward sums the gradient of the hidden states in float32, and adds the gradient of the weight to
    the accumulated one; a wider dtype needs the result of the matmul too.
    """
    config = step.config
    tokens = step.tokens_per_micro_batch
    hidden_size = config.hidden_size
    element_bytes = step.element_bytes
    if not step.model.has_head:
        return 0.0, 0.0
    if config.head == "values":  # in float32, in one piece
        widened = 4.0 * tokens * hidden_size if element_bytes < 4 else 0.0
        return widened, 2 * widened
    if step.teacher_width is not None:
        # Distillation: both models' logits of a chunk, recomputed in backward, and what is made of them: on a CPU of a
        # few rows at a time.
        chunk_logits = min(step.score_chunk, tokens) * config.vocab_size
        made = chunk_logits if step.on_gpu else min(chunk_logits, CPU_BLOCK)
        both = 0 if step.on_gpu else 2 * element_bytes * chunk_logits
        hidden = tokens * (hidden_size + 2 * step.teacher_width) * element_bytes
        return (
            float(both + FORWARD_DIVERGENCE * made + hidden),
            float(both + BACKWARD_DIVERGENCE * made + hidden),
        )

    # The plan compiles both passes or neither.
    eager = not step.compiled and step.attention != "compiled"
    outputs_at_once = step.head_outputs if step.on_gpu else min(step.head_outputs, CPU_TILE)
    logits_at_once = min(step.score_chunk, tokens) * outputs_at_once
    weights_at_once = outputs_at_once * hidden_size
    trains_head = step.model.trains_head
    casts_weight = (
        step.mixed
        if trains_head
        else step.precision == "float16" and stays_float32(step.model.head_name)
    )
    softcaps = eager and config.final_softcap is not None
    logits = (
        element_bytes * logits_at_once
        + (2 * weights_at_once if casts_weight else 0)
        + (4 * logits_at_once if softcaps else 0)
    )
    # With more than one tile, a tile's logits are freed after the next ones are computed.
    several_tiles = outputs_at_once < step.head_outputs or step.score_chunk < tokens
    previous_logits = element_bytes * logits_at_once if several_tiles else 0
    float32_copy = 4 * logits_at_once if element_bytes < 4 else 0
    exponentials = 4 * logits_at_once
    forward = (
        logits
        + max(previous_logits, float32_copy + exponentials if eager else 0)
        + tokens * hidden_size * element_bytes
    )
    weight_gradient = element_bytes * weights_at_once if step.mixed and trains_head else 0
    backward = (
        logits
        + max(previous_logits, float32_copy if eager else 0, weight_gradient)
        + 4 * tokens * hidden_size
    )
    return float(forward), float(backward)

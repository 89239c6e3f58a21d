"""Memory of one device of FSDP2: shards of weights, gradients and states, and gathered layers."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from bloomery.facts.counting import Shape, is_layer_matrix, is_of_experts
from bloomery.facts.limits import storage_bytes
from bloomery.plan.estimate.memory import overhead_bytes, teacher_parts
from bloomery.plan.estimate.moments import StepMoment, moments
from bloomery.plan.estimate.reference import reference_bytes
from bloomery.plan.estimate.states import TrainedLayer, ValuesByExperts
from bloomery.plan.estimate.step import StepShape
from bloomery.plan.estimate.towers import TowerMemory, with_pictures

REDUCE_SCATTER_BYTES = 4  # per value: float32


def sharded_bytes(step: StepShape, shards: int) -> dict[str, float]:
    """Bytes at the peak by part."""
    model = step.model
    all_moments: Iterable[StepMoment] = sharded_moments(step, shards)
    if step.pictures is not None:
        all_moments = with_pictures(step, step.pictures, all_moments)
    peak = max(all_moments, key=lambda moment: moment.total)
    weights = model.weight_bytes(step.precision) + model.adapter_bytes
    states = 0.0 if step.mode.offload else model.optimizer_bytes(step.optimizer, step.precision)
    parts = {
        "weights": weights / shards * unevenness(model.values_by_experts, shards),
        "gradients": peak.gradients,
        "optimizer": states / shards * unevenness(model.trainable_by_experts, shards),
        "activations": peak.activations,
        "logits": peak.logits,
        "gathered layers": peak.copies,
        "temporaries": peak.temporaries,
    }
    parts |= teacher_parts(step)  # each rank has all of it, and of its tower
    if step.pictures is not None:
        tower = TowerMemory(step, step.pictures)
        parts["optimizer"] += 0.0 if step.mode.offload else tower.optimizer_bytes
        parts |= {"vision tower": tower.weight_bytes, "pictures": peak.pictures}
    if step.reference != "none":
        parts["reference model"] = reference_bytes(step, shards=shards)
    return parts | overhead_bytes(step, parts)


def sharded_moments(step: StepShape, shards: int) -> list[StepMoment]:
    """The moments of a step under FSDP2, block by block; `copies` are gathered weights and gradients.

    Weights of layers are gathered as `gathered_bytes` says, and so are their gradients. The embeddings and their
    gradient have their own dtype and stay gathered from forward to the end of backward. Next to the current layer, the
    prefetched layer and the float32 gradients of the layer in reduce-scatter are alive.
    """
    forward, logits, *layer_moments, embeddings, update = moments(
        replace(step, gathered=True, accumulating=False)
    )
    model = step.model
    layer_bytes, root_bytes = gathered_bytes(step)

    # Gradients: sharded ones of layers and root, the head's gathered one, those of a layer in reduce-scatter.
    trainable_values = [layer.trainable_values for layer in model.layers]
    trainable_root_values = model.trainable_count - sum(trainable_values)
    shard_bytes = step.weight_bytes / shards * unevenness(model.trainable_by_experts, shards)
    all_gradients = (sum(trainable_values) + trainable_root_values) * shard_bytes
    layer_gradients = sum(trainable_values) * shard_bytes
    accumulated = all_gradients if step.accumulating else 0.0
    head_values = step.config.vocab_size * step.config.hidden_size if model.trains_head else 0
    head_gradient = head_values * step.weight_bytes
    scattering = model.by_layer(
        lambda layer: (
            REDUCE_SCATTER_BYTES * gathered_values(step, {**layer.trained, **layer.adapter})
        )
    )

    # At the scores the last layer is not freed yet.
    last = len(layer_bytes) - 1
    copies = root_bytes + layer_bytes[last]
    sharded = [
        forward._replace(gradients=accumulated, copies=copies),
        logits._replace(gradients=accumulated + head_gradient, copies=copies),
    ]
    finished_values = 0
    for index, moment in zip(reversed(range(len(layer_bytes))), layer_moments, strict=True):
        copies = root_bytes + layer_bytes[index]
        if index > 0:  # nothing is prefetched behind the first layer
            copies += layer_bytes[index - 1]
        if index < last:
            copies += scattering[index + 1]
        gradients = max(accumulated, finished_values * shard_bytes) + head_gradient
        sharded.append(moment._replace(gradients=gradients, copies=copies))
        finished_values += trainable_values[index]

    # The gradient of the root is gathered, then float32 in its reduce-scatter.
    finished = max(accumulated, layer_gradients)
    root_gradient = trainable_root_values * step.weight_bytes
    sharded.append(
        embeddings._replace(gradients=finished + root_gradient, copies=root_bytes + scattering[0])
    )
    scattering_root = root_bytes + trainable_root_values * REDUCE_SCATTER_BYTES
    sharded.append(embeddings._replace(gradients=finished, copies=scattering_root, temporaries=0.0))
    sharded.append(update._replace(gradients=all_gradients))
    return sharded


def unevenness(values: ValuesByExperts, shards: int) -> float:
    """What the fullest shard holds of these parameters, over an equal part of them.

    Shards of a stack are some of its experts, each whole: of 8 experts over 16 devices half of these have one.
    """
    num_values = sum(values.values())
    fullest = sum(
        count * (-(-num_experts // shards) * shards / num_experts if num_experts else 1)
        for num_experts, count in values.items()
    )
    return fullest / num_values if num_values else 1.0


def gathered_values(step: StepShape, shapes: Mapping[str, Shape]) -> int:
    """Of the parameters of a layer, those that shards gather: experts that devices divide stay where they are."""
    return sum(
        math.prod(shape)
        for name, shape in shapes.items()
        if step.expert == 1 or not is_of_experts(name)
    )


def gathered_bytes(step: StepShape) -> tuple[list[float], float]:
    """Bytes of the whole weights of each layer, and of the embeddings, head and last norm, as shards gather them.

    Layers are gathered in the dtype of matmuls, quantized matrices as they are stored, and adapters in their dtype.
    """
    model, mode = step.model, step.mode

    def bytes_of(layer: TrainedLayer) -> float:
        quantized_values = 0
        quantized_bytes = 0
        own_experts = 0
        for name, shape in layer.layer.shapes:
            if step.expert > 1 and is_of_experts(name):
                own_experts += math.prod(shape)
                continue
            is_matrix = is_layer_matrix(f"{layer.layer.name}.{name}", shape)
            if mode.quantize_kind != "none" and is_matrix and name not in layer.trained:
                quantized_values += math.prod(shape)
                quantized_bytes += storage_bytes(shape, mode.quantize_kind, mode.double_quant)
        float_values = layer.layer.total_parameters - quantized_values - own_experts
        adapter_bytes = gathered_values(step, layer.adapter) * mode.adapter_bytes
        return float(float_values * step.element_bytes + quantized_bytes + adapter_bytes)

    layer_values = sum(layer.layer.total_parameters for layer in model.layers)
    root_value_bytes = step.element_bytes if mode.frozen else step.weight_bytes
    return model.by_layer(bytes_of), float((model.weight_count - layer_values) * root_value_bytes)

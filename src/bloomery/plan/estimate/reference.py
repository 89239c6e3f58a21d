"""Bytes of a frozen copy of the model, the reference of rollouts whose training changes the base."""

import math
from functools import lru_cache

from bloomery.facts.limits import STREAM_BUFFERS, storage_bytes
from bloomery.plan.estimate.states import TrainedModel
from bloomery.plan.estimate.step import StepShape
from bloomery.recipe.schema import Quantize


def reference_bytes(step: StepShape, *, shards: int = 1) -> float:
    """Of one device. Matrices of layers have the dtype of matmuls or are quantized, the rest that of the policy.

    A copy on the host has one layer at a time on the device, with embeddings, last norm and head; one of a policy whose
    layers stream has a ring of its own.
    """
    if step.reference == "none":
        return 0.0
    rest, by_layer = layer_sizes(step)
    in_layers = [sum(sizes) for sizes in by_layer.values()]
    if step.stream == "layers":
        return float(rest + STREAM_BUFFERS * max(in_layers, default=0))
    if step.reference == "host" and step.on_gpu:
        return float(rest + max(in_layers, default=0))
    return (rest + sum(in_layers)) / shards


def streamed_reference_bytes(step: StepShape) -> float:
    """On the host: the layers of a copy that streams with its policy."""
    if step.reference == "none" or step.stream != "layers":
        return 0.0
    _rest, by_layer = layer_sizes(step)
    return float(sum(map(sum, by_layer.values())))


def layer_sizes(step: StepShape) -> tuple[int, dict[str, list[int]]]:
    """Bytes of the tensors outside the layers, and of each tensor of each layer."""
    is_nf4 = step.reference == "nf4"
    return _layer_sizes(step.model, is_nf4, step.weight_bytes, step.element_bytes)


@lru_cache(maxsize=64)  # a plan compares many steps of one model
def _layer_sizes(
    model: TrainedModel, is_nf4: bool, weight_bytes: int, element_bytes: int
) -> tuple[int, dict[str, list[int]]]:
    mode = model.mode
    kind = "nf4" if is_nf4 else mode.quantize_kind
    rest = 0
    by_layer = dict[str, list[int]]()
    for name, shape in model.shapes.items():
        count = math.prod(shape)
        prefix, is_in_layer, path = name.partition(".layers.")
        if not is_in_layer:
            rest += count * weight_bytes
            continue
        if len(shape) < 2:
            size_bytes = count * weight_bytes
        elif kind != "none" and len(shape) == 2:
            double_quant = mode.double_quant
            if is_nf4:
                double_quant = Quantize().double_quant
            size_bytes = storage_bytes(shape, kind, double_quant)
        else:
            size_bytes = count * element_bytes
        layer = prefix + path.partition(".")[0]
        by_layer.setdefault(layer, []).append(size_bytes)
    return rest, by_layer

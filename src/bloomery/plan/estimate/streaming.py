"""Bytes of weights that live in the host's memory: on the device, on the host, and over the link between them.

The tensors are those of `parallel.streamed`: the device has a ring of buffers, each as large as the largest layer.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from bloomery.core.units import MIB
from bloomery.facts.config import ModelConfig
from bloomery.facts.counting import Shape, is_expert_stack, is_layer_matrix
from bloomery.facts.limits import (
    STREAM_BUFFERS,
    STREAM_STAGED,
    STREAM_STAGING_BUFFERS,
    STREAM_STAGING_BYTES,
    aligned_bytes,
    buffer_bytes,
    copies_chosen,
    pinned_together,
)
from bloomery.plan.estimate.activations import kept_by_layer, last_norm_bytes
from bloomery.plan.estimate.mode import TrainingMode
from bloomery.plan.estimate.moments import StepMoment, kept_logit_bytes, moments
from bloomery.plan.estimate.reference import streamed_reference_bytes
from bloomery.plan.estimate.states import TrainedLayer, TrainedModel, stays_float32
from bloomery.plan.estimate.step import StepShape

# Host memory of the process beside weights and states: interpreter, PyTorch, the GPU's runtime, batches.
HOST_RUNTIME = 2048 * MIB


def in_full(step: StepShape) -> bool:
    """Whether all parameters live on the host; with an adapter those that are frozen do."""
    return not step.mode.frozen


def layer_tensors(step: StepShape, layer: TrainedLayer) -> list[int]:
    """Bytes of each tensor of a layer that streams."""
    return [
        size
        for name, shape in layer.layer.shapes
        if step.stream == "layers" or is_expert_stack(name)
        if in_full(step) or name not in layer.trained
        for size in _tensor_bytes(step, layer, name, shape)
    ]


def _tensor_bytes(step: StepShape, layer: TrainedLayer, name: str, shape: Shape) -> tuple[int, ...]:
    """Of a parameter; of a quantized one those of its codes, scales, and scales of scales."""
    count = math.prod(shape)
    mode = step.mode
    if name in layer.trained:
        return (count * step.weight_bytes,)
    whole_name = f"{layer.layer.name}.{name}"
    if mode.quantize_kind != "none" and is_layer_matrix(whole_name, shape):
        return buffer_bytes(count, mode.quantize_kind, mode.double_quant)
    is_float32 = step.precision == "float16" and stays_float32(whole_name)
    return (count * (4 if is_float32 else step.element_bytes),)


def streamed_by_layer(step: StepShape) -> list[int]:
    """Bytes of each layer that are copied to the device in one piece."""
    return step.model.by_layer(
        lambda layer: sum(aligned_bytes(size) for size in layer_tensors(step, layer))
    )


def ring_bytes(step: StepShape) -> int:
    """Of the buffers on the device."""
    return STREAM_BUFFERS * max(streamed_by_layer(step))


def resident_weight_bytes(step: StepShape) -> float:
    """Of the weights that are on the device all the time: of a model that is trained in full, copies."""
    streamed = sum(step.model.by_layer(lambda layer: sum(layer_tensors(step, layer))))
    return max(0.0, step.model.weight_bytes(step.precision) - streamed)


def teacher_shape(step: StepShape, teacher: ModelConfig) -> StepShape:
    """The step of a frozen model whose layers stream, for its bytes on the device and on the host."""
    mode = TrainingMode(freezes_model=True, quantize_kind=step.teacher_quantize)
    return replace(
        step,
        model=TrainedModel(teacher, mode),
        stream="layers",
        teacher=None,
        teacher_stream=False,
        reference="none",
    )


def streamed_moments(step: StepShape) -> Iterator[StepMoment]:
    """The moments of `moments` on the device, whose weights and optimizer states are counted elsewhere.

    Several micro-batches of a load wait at each border of layers: forward's inputs, and in backward their gradients.
    Of a model that is trained in full, gradients of the layer and of those on their way to the host are on the device,
    and those of what is no layer.
    """
    plain = replace(step, stream="off", stream_micro_batches=1)
    forward, logits, *layer_moments, embeddings, update = moments(plain)
    if in_full(step):
        # Also those that will be added to others wait until all of their layer are there.
        layer_moments = list(moments(replace(plain, accumulating=False)))[2:-2]
    kept_bytes = kept_by_layer(plain)
    if step.offload_activations:
        kept_bytes = [0.0] * (len(kept_bytes) - 2) + kept_bytes[-2:]
    waiting = step.stream_micro_batches - 1
    stream_bytes = step.tokens_per_micro_batch * step.config.hidden_size * step.residual_bytes
    ends = forward.activations - sum(kept_bytes)
    # Each keeps what the head keeps of it until backward, which begins with all heads.
    all_waiting = waiting * (sum(kept_bytes) + ends + stream_bytes + kept_logit_bytes(plain))
    layer_gradients = [0.0] * len(kept_bytes)
    accumulated = head = sent = 0.0
    if in_full(step):
        model = step.model
        layer_gradients = model.by_layer(
            lambda layer: model.layer_trainable_bytes(layer, step.precision)
        )
        outer = model.trainable_bytes(step.precision) - sum(layer_gradients)
        head = outer if step.accumulating or waiting else logits.gradients
        accumulated = outer if step.accumulating or waiting else 0.0
        sent = STREAM_STAGED * max(layer_gradients) if step.accumulating else 0.0

    def at(moment: StepMoment, activations: float, gradients: float, copies: float) -> StepMoment:
        if not in_full(step):
            return moment._replace(activations=moment.activations + activations)
        return moment._replace(
            activations=moment.activations + activations,
            gradients=gradients,
            copies=copies,
        )

    copies = max(moment.copies for moment in layer_moments)
    yield at(forward, all_waiting, accumulated + sent, copies)
    yield at(logits, all_waiting, head + sent, 0.0)

    # Layers from the last to the first. Gradients of a layer leave together, when the last of them is there.
    kept_before = sum(kept_bytes)
    on_their_way = [sent / STREAM_STAGED] * STREAM_STAGED
    for index, moment in zip(reversed(range(len(kept_bytes))), layer_moments, strict=True):
        kept_before -= kept_bytes[index]
        # The first of a load runs while inputs of the others wait; the last one next to the sum of their gradients.
        behind = waiting * (kept_before + ends - last_norm_bytes(step) + stream_bytes)
        others = behind + waiting * kept_bytes[index]
        gradients = head + sum(on_their_way)
        yield at(moment, others, gradients, moment.copies)
        if waiting and in_full(step):
            gradients += layer_gradients[index]
            others = behind
            yield at(moment, others, gradients, moment.copies)
        if in_full(step):
            borders = kept_before + kept_bytes[index] + ends - last_norm_bytes(step)
            yield StepMoment(
                gradients=gradients + layer_gradients[index],
                activations=borders + others,
                temporaries=stream_bytes,
            )
            on_their_way = [*on_their_way, layer_gradients[index]][-STREAM_STAGED:]
    if not in_full(step):
        yield embeddings
        yield update
        return
    sent = sum(on_their_way)
    yield at(embeddings, 0.0, accumulated + embeddings.temporaries + sent, 0.0)


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Bytes on the host, by what holds them; `pinned`: of them, those that cannot be swapped out."""

    parts: dict[str, float]
    pinned: float

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def host_memory(step: StepShape, *, replicas: int = 1) -> HostMemory:
    """What a step of streamed weights holds on the host. Frozen weights of `replicas` on it are one copy."""
    memory = _policy_memory(step, replicas=replicas)
    reference = replicas * streamed_reference_bytes(step)
    if not reference:
        return memory
    is_pinned = step.stream_host == "pinned"
    return HostMemory(
        parts=memory.parts | {"reference model": reference},
        pinned=memory.pinned + (reference if is_pinned else 0.0),
    )


def _policy_memory(step: StepShape, *, replicas: int) -> HostMemory:
    model = step.model
    is_pinned = step.stream_host == "pinned"
    streamed = streamed_by_layer(step)

    def held(layers: list[int]) -> float:
        """Of layers that PyTorch pins in blocks, or of memory like any other."""
        return float(pinned_together(layers) if is_pinned else sum(layers))

    staging = 0.0
    if not is_pinned:
        staging = float(STREAM_STAGING_BUFFERS * min(STREAM_STAGING_BYTES, max(streamed)))
    if not in_full(step):
        # What replicas share is in no block.
        weights = held(streamed) if replicas == 1 else float(sum(streamed))
        parts = {"weights": weights, "runtime": replicas * (HOST_RUNTIME + staging)}
        if step.stream_host == "mapped":  # in files
            parts.pop("weights")
        return HostMemory(parts=parts, pinned=weights if is_pinned else replicas * staging)
    assert replicas == 1, "a plan refuses more"
    layers = [*streamed, aligned_bytes(math.ceil(resident_weight_bytes(step)))]
    weights = held(layers)
    # Sums of gradients have the places of weights. What is added to them passes through buffers that are pinned.
    gradients = held(layers)
    staged = 0.0
    if step.accumulating or not is_pinned:
        staged = float(STREAM_STAGED * pinned_together([max(streamed)]))
    parts = {
        "weights": weights,
        "gradients": gradients + staged,
        "optimizer states": model.optimizer_bytes(step.optimizer, step.precision),
        "runtime": HOST_RUNTIME + staging,
    }
    all_pinned = weights + gradients + staged
    return HostMemory(parts=parts, pinned=all_pinned if is_pinned else staging + staged)


def forward_bytes(step: StepShape, tokens: int) -> float:
    """Copied to the device for a forward without gradients, of so many tokens: all that streams.

    Of experts, few tokens copy those that they choose: of E experts E (1 - (1 - K / E)^N), chosen evenly.
    """

    def of_layer(layer: TrainedLayer) -> float:
        size = float(sum(aligned_bytes(size) for size in layer_tensors(step, layer)))
        experts = layer.layer.experts
        if step.stream != "experts" or experts is None:
            return size
        if not copies_chosen(tokens * experts.per_token, experts.count):
            return size
        return size * (1 - (1 - layer.layer.expert_share) ** tokens)

    return sum(step.model.by_layer(of_layer))


# Loads: which layers are copied, in the order of use.


class LoadOrder:
    """Which layers a ring of buffers must copy, as `parallel.streamed.LayerRing` does: what was used longest ago goes.

    Layers are asked for one after the other, each with the one that comes next.
    """

    def __init__(self) -> None:
        self._layers = list[int | None]([None] * STREAM_BUFFERS)
        self._used = [-1] * STREAM_BUFFERS
        self._uses = 0

    def load(self, layer: int, upcoming: int | None) -> list[int]:
        """The layers whose copies begin here, in order: one that is needed now, one that is needed next."""
        begun = []
        if layer not in self._layers:
            self._begin(layer, keep=None)
            begun.append(layer)
        self._uses += 1
        slot = self._layers.index(layer)
        self._used[slot] = self._uses
        if upcoming is not None and upcoming not in self._layers:
            self._begin(upcoming, keep=slot)
            begun.append(upcoming)
        return begun

    def _begin(self, layer: int, keep: int | None) -> None:
        slots = [slot for slot in range(STREAM_BUFFERS) if slot != keep]
        slot = min(
            slots, key=lambda slot: self._used[slot] if self._layers[slot] is not None else -1
        )
        self._layers[slot] = layer


@dataclass(frozen=True)
class Use:
    """A layer computes so many micro-batches: `loads` are the copies that begin when the work before it is over."""

    layer: int
    is_backward: bool
    loads: tuple[int, ...]
    micro_batches: int


def passes_over(step: StepShape, tokens: int) -> int:
    """Passes over all layers, each of `stream_micro_batches`, for so many tokens of a device."""
    return math.ceil(tokens / (step.tokens_per_micro_batch * step.stream_micro_batches))


def passes_of(step: StepShape, passes: int) -> tuple[tuple[Use, ...], ...]:
    """The uses of each pass over the layers in a step, which begins with no layer on the device.

    A reference model scores micro-batches together, as they are trained on; so is the load of experts counted.
    """
    sizes = streamed_by_layer(step)
    return _uses(
        len(sizes),
        tuple(layer for layer, size in enumerate(sizes) if size),
        forwards_before=step.extra_forwards + int(step.counts_first),
        together=step.stream_micro_batches,
        passes=passes,
    )


@lru_cache(maxsize=256)  # a plan compares many steps of one model
def _uses(
    num_layers: int, streamed: tuple[int, ...], *, forwards_before: int, together: int, passes: int
) -> tuple[tuple[Use, ...], ...]:
    following = dict(zip(streamed, [*streamed[1:], None], strict=True))
    preceding = dict(zip(streamed, [None, *streamed[:-1]], strict=True))
    order = LoadOrder()

    def load(layer: int, upcoming: int | None) -> tuple[int, ...]:
        return tuple(order.load(layer, upcoming)) if layer in following else ()

    all_uses = list[tuple[Use, ...]]()
    for _ in range(passes):
        uses = list[Use]()
        for _forward in range(forwards_before):
            for layer in range(num_layers):
                upcoming = following.get(layer)
                if upcoming is None and streamed:
                    upcoming = streamed[0]
                uses.append(Use(layer, False, load(layer, upcoming), together))
        for layer in range(num_layers):
            uses.append(Use(layer, False, load(layer, following.get(layer)), together))
        for layer in reversed(range(num_layers)):
            uses.append(Use(layer, True, load(layer, preceding.get(layer)), together))
        all_uses.append(tuple(uses))
    return tuple(all_uses)


def loads_of(step: StepShape, passes: int) -> list[int]:
    """How often each layer is copied to the device in a step."""
    # All passes after the second are alike.
    loads = [0] * len(step.model.layers)
    for number, uses in enumerate(passes_of(step, min(passes, 2))):
        times = passes - 1 if number == 1 else 1
        for use in uses:
            for layer in use.loads:
                loads[layer] += times
    return loads


def sent_bytes(step: StepShape, passes: int) -> float:
    """Bytes of gradients that leave the device in a step, of a model that is trained in full.

    Those of micro-batches that share a load are summed on the device while the host has none of the layer. Later each
    micro-batch's leave by themselves, so that sums are formed in the order of micro-batches. What is no layer sends
    once.
    """
    if not in_full(step):
        return 0.0
    layers = sum(
        step.model.by_layer(lambda layer: step.model.layer_trainable_bytes(layer, step.precision))
    )
    outer = step.model.trainable_bytes(step.precision) - layers
    return layers * (1 + (passes - 1) * step.stream_micro_batches) + outer

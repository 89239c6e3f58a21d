"""Seconds of a step whose weights stream: two queues, the device's kernels and the copies between it and the host."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from bloomery.facts.limits import STREAM_STAGED
from bloomery.hardware.host_links import HostLink
from bloomery.plan.estimate.activations import recomputed_shares
from bloomery.plan.estimate.host_update import host_update_seconds
from bloomery.plan.estimate.queues import Queues
from bloomery.plan.estimate.speed import FLASH_BACKWARD, attention_flops, rule_flops
from bloomery.plan.estimate.states import TrainedLayer
from bloomery.plan.estimate.step import StepShape
from bloomery.plan.estimate.streaming import (
    in_full,
    passes_of,
    streamed_by_layer,
    teacher_shape,
)
from bloomery.plan.types import Estimate

WAITING = "waiting for weights"  # a part of a step's seconds
WAITING_FOR_TEACHER = "waiting for the teacher"
HOST_PARTS = ("optimizer",)  # of a model that is trained in full
SIMULATED_PASSES = 3  # all later ones are alike
ADDED = 3  # bytes moved per byte of a gradient that is added to another on the host

End = Literal["low", "value", "high"]


@dataclass(frozen=True, kw_only=True)
class LayerSeconds:
    """Of a micro-batch: forward and backward of each layer, the latter with what it computes again; and the head."""

    forward: list[float]
    backward: list[float]
    head: float


@dataclass(frozen=True, kw_only=True)
class StreamedStep:
    """`seconds` of the passes of a step over the layers, of which the device computes in `computing`; and of the update
    on the host, which follows them.
    """

    seconds: float
    computing: float
    update: float

    @property
    def waiting(self) -> float:
        return max(0.0, self.seconds - self.computing)


def layer_seconds(step: StepShape, device_seconds: float) -> LayerSeconds:
    """`device_seconds` of a micro-batch, shared out by FLOPs."""
    recomputed = recomputed_shares(step.checkpointing, step.model.layer_numbers)

    def flops_of(layer: TrainedLayer) -> tuple[float, float]:
        """Per token: forward, and backward without recomputation."""
        products = 2.0 * layer.layer.active_products
        adapter = 2.0 * layer.adapter_values
        mixing = attention_flops(step, layer) + rule_flops(step, layer)
        gradients = products if layer.trained else 0.0
        return (
            products + adapter + mixing,
            products + gradients + 2 * adapter + FLASH_BACKWARD * mixing,
        )

    by_layer = step.model.by_layer(flops_of)
    forward = [flops for flops, _ in by_layer]
    backward = [
        flops + share * again for (again, flops), share in zip(by_layer, recomputed, strict=True)
    ]
    forward = [(1 + step.extra_forwards + int(step.counts_first)) * flops for flops in forward]
    chunked = step.score_chunk < step.tokens_per_micro_batch
    head = 2.0 * step.head_outputs * step.config.hidden_size * step.loss_share
    head *= 2 + step.model.trains_head + chunked + step.extra_forwards
    share = device_seconds / (sum(forward) + sum(backward) + head)
    return LayerSeconds(
        forward=[share * flops for flops in forward],
        backward=[share * flops for flops in backward],
        head=share * head,
    )


def queue_passes(
    queues: Queues,
    step: StepShape,
    times: LayerSeconds,
    passes: int,
    link: HostLink,
    *,
    faster: float = 1.0,
) -> list[float]:
    """Queues the tasks of a step's passes; the second in which the device ends each pass.

    A copy begins when the work that was queued before is over. Of a model that is trained in full gradients follow each
    layer to the host, which adds them to earlier ones: no more than STREAM_STAGED layers are on their way.
    """
    sizes = streamed_by_layer(step)
    full = in_full(step)
    alone, together = rates_to_device(step, link)
    to_device = (together if full else alone) * faster
    alone *= faster
    from_device = link.both_gbs * 1e9 * faster
    gradient_bytes = [0.0] * len(sizes)
    if full:
        gradient_bytes = step.model.by_layer(
            lambda layer: step.model.layer_trainable_bytes(layer, step.precision)
        )

    run = queues.run
    arrivals = dict[int, float]()
    sent = list[float]()
    pass_ends = list[float]()
    computed = 0.0  # the end of the device's last task
    settled = 0.0  # of the last addition on the host, for which later launches wait
    forwards = 1 + step.extra_forwards + int(step.counts_first)
    for number, uses in enumerate(passes_of(step, passes)):
        for position, use in enumerate(uses):
            for layer in use.loads:
                rate = to_device if use.is_backward else alone
                arrivals[layer] = run("to device", sizes[layer] / rate, computed)
            if use.is_backward and not uses[position - 1].is_backward:
                computed = run("device", step.stream_micro_batches * times.head, computed)
            seconds = times.forward[use.layer] / forwards
            if use.is_backward:
                seconds = times.backward[use.layer]
            arrived = arrivals.get(use.layer, 0.0)
            computed = run("device", use.micro_batches * seconds, arrived, settled)
            if use.is_backward and full:
                # Sums of the first pass leave once, those of later ones micro-batch by micro-batch.
                sent_bytes = gradient_bytes[use.layer] * (use.micro_batches if number else 1)
                sent.append(run("from device", sent_bytes / from_device, computed))
                if len(sent) > STREAM_STAGED:
                    moved = ADDED * sent_bytes if number else 0.0
                    settled = run("host", moved / (link.host_gbs * 1e9), sent.pop(0))
        pass_ends.append(computed)
    return pass_ends


def rates_to_device(step: StepShape, link: HostLink) -> tuple[float, float]:
    """Bytes/s of weights on their way to the device: alone, and while gradients leave."""
    if step.stream_host == "mapped":
        return link.disk_gbs * 1e9, link.disk_gbs * 1e9
    if step.stream_host == "staged":
        return link.pageable_gbs * 1e9, min(link.pageable_gbs, link.both_gbs) * 1e9
    return link.to_device_gbs * 1e9, link.both_gbs * 1e9


def with_teacher(
    parts: Mapping[str, Estimate],
    step: StepShape,
    link: HostLink,
    seconds: Callable[[StepShape], float],
) -> dict[str, Estimate]:
    """The parts of a step whose teacher streams once: what its layers take longer to arrive than to compute is waited
    for. `seconds`: of a step with or without a teacher, on the device.
    """
    assert step.teacher is not None
    untaught_step = replace(step, teacher=None, teacher_stream=False)
    forward_seconds = seconds(step) - seconds(untaught_step)
    shape = teacher_shape(step, step.teacher)
    alone, _ = rates_to_device(shape, link)
    waiting = max(0.0, sum(streamed_by_layer(shape)) / alone - forward_seconds)
    estimate = Estimate(value=waiting, low=waiting * 0.8, high=waiting * 1.5, origin="table")
    return {**parts, WAITING_FOR_TEACHER: estimate}


def streamed_step(
    step: StepShape,
    device_seconds: float,
    update_bytes: float,
    passes: int,
    link: HostLink,
    *,
    faster: float = 1.0,
) -> StreamedStep:
    """`device_seconds`: of all passes. `update_bytes`: that an update on the host moves. `faster`: the link."""
    times = layer_seconds(step, device_seconds / (passes * step.stream_micro_batches))
    simulated = min(passes, SIMULATED_PASSES)
    queues = Queues()
    ends = queue_passes(queues, step, times, simulated, link, faster=faster)
    seconds = queues.end
    if passes > simulated:
        seconds += (passes - simulated) * (ends[-1] - ends[-2])
    computing = queues.busy["device"] * passes / simulated
    update = host_update_seconds(step, update_bytes, link) if in_full(step) else 0.0
    return StreamedStep(seconds=seconds, computing=computing, update=update)


def streamed_parts(
    parts: Mapping[str, Estimate],
    step: StepShape,
    update_bytes: float,
    passes: int,
    link: HostLink,
) -> dict[str, Estimate]:
    """The seconds of a step by part, from those of the same step with all weights on the device."""
    on_device = {
        name: part for name, part in parts.items() if not (in_full(step) and name in HOST_PARTS)
    }
    ends: dict[End, tuple[float, float]] = {}
    links: tuple[tuple[End, float], ...] = (
        ("low", link.spread),
        ("value", 1.0),
        ("high", 1 / link.spread),
    )
    for end, faster in links:
        seconds = sum(getattr(part, end) for part in on_device.values())
        result = streamed_step(step, seconds, update_bytes, passes, link, faster=faster)
        ends[end] = result.waiting, result.update / faster
    origin = next(iter(parts.values())).origin
    by = next(iter(parts.values())).by
    streamed = dict(on_device)
    # A slower device hides more of a copy: the ends of the range change places.
    waits = sorted(waiting for waiting, _ in ends.values())
    streamed[WAITING] = Estimate(
        value=ends["value"][0], low=waits[0], high=waits[-1], origin=origin, by=by
    )
    if in_full(step):
        streamed["optimizer"] = Estimate(
            value=ends["value"][1],
            low=ends["low"][1],
            high=ends["high"][1],
            origin=origin,
            by=by,
        )
    return streamed


def hidden_from(step: StepShape, device_seconds: float, link: HostLink) -> int:
    """The tokens of a load from which on no copy is longer than the work beside it.

    `device_seconds`: of a micro-batch. In forward the next layer arrives while one computes; in backward, which
    computes more, gradients leave at the same time where all weights are trained.
    """
    times = layer_seconds(step, device_seconds)
    tokens = step.tokens_per_micro_batch
    sizes = streamed_by_layer(step)
    full = in_full(step)
    most = 0.0
    alone, together = rates_to_device(step, link)
    forwards = 1 + step.extra_forwards + int(step.counts_first)
    for size, forward, backward in zip(sizes, times.forward, times.backward, strict=True):
        most = max(
            most,
            size / alone / (forward / forwards) * tokens,
            size / (together if full else alone) / backward * tokens,
        )
    return math.ceil(most)

"""Whether weights live in the host's memory and stream through the device: the choice, its reasons and its figures."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal, NamedTuple

from bloomery.core import Choice
from bloomery.core.errors import UserError
from bloomery.core.units import format_bytes, format_seconds
from bloomery.facts.config import ModelConfig
from bloomery.hardware.host_links import DISK_GBS, HostLink
from bloomery.hardware.machine import Machine
from bloomery.hardware.profile import Profile
from bloomery.plan.batch import SAME_TIME, Measure, MicroBatching, StepSeconds
from bloomery.plan.choices import ASKED
from bloomery.plan.estimate.host_update import device_update_seconds
from bloomery.plan.estimate.measured import StepEstimator
from bloomery.plan.estimate.speed import total
from bloomery.plan.estimate.step import StepShape, Stream
from bloomery.plan.estimate.stream_time import WAITING, hidden_from
from bloomery.plan.estimate.streaming import (
    host_memory,
    in_full,
    loads_of,
    passes_over,
    ring_bytes,
    sent_bytes,
    streamed_by_layer,
)
from bloomery.plan.types import HostPlacement, RunPlan, StreamPlan
from bloomery.recipe.schema import Peft, Recipe, Train

KEY = "parallel.stream"
STREAMED_NEED = "weights that stream need"
# Of the time with all weights on the device, below which streaming is chosen where both fit: the estimate does not tell
# apart what is closer.
WORTH = 0.9
SEVERAL_DEVICES = (
    f"several devices; {KEY}=layers would stream a copy of the model through each of them"
)
FITS = "all weights fit on the device"
# Of the host's memory, that may be pinned: the system cannot move or swap it. Windows lets WSL pin half of it.
PINNED_SHARE = 0.75
WSL_PINNED_SHARE = 0.5
SANE_WAIT = (
    0.5  # of a step's time, in which the device waits for a disk, above which nobody should train
)
RECOMPUTED = "weights stream: each layer is computed again in backward, from its input"
UNCOMPILED = "weights stream: a layer's weights are in another buffer each time"


def refusals(
    recipe: Recipe, config: ModelConfig, profile: Profile, stream: Stream, *, devices: int
) -> Iterator[tuple[str, str]]:
    """Why weights do not stream in this way, with the fix; the first is the one to name."""
    device = profile.accelerator
    if device is None:
        yield "the weights of a CPU are in the host's memory already", f"set {KEY}=off"
    elif device.integrated:
        yield f"{device.name} and the CPU have one memory", f"set {KEY}=off"
    if devices > 1 and recipe.adapter.kind == "none":
        yield (
            "each of several devices would have a copy of all weights, gradients and states on the host",
            "set adapter.kind=lora, whose frozen weights they share, or train on one device",
        )
    if config.transformers_backend is not None:
        yield "not supported for the transformers implementation", f"set {KEY}=off"
    if isinstance(recipe.adapter, Peft):
        yield "PEFT's methods change the modules of layers", f"set {KEY}=off, or adapter.kind=lora"
    if recipe.optimizer.fused_backward:
        yield (
            "an optimizer inside backward updates weights on the device, and these are on the host",
            "set optimizer.fused_backward=false",
        )
    if stream == "layers" and recipe.train.activation_checkpointing not in ("auto", "full"):
        yield (
            "each layer is computed again in backward, when it has been loaded once more",
            "set train.activation_checkpointing=full",
        )
    if recipe.train.compile is True:
        yield "the weights of a layer are in another buffer each time", "set train.compile=auto"


def refuse_stream(recipe: Recipe, config: ModelConfig, profile: Profile, *, devices: int) -> None:
    """Raises UserError where the recipe asks for weights that stream, and something else in it excludes them."""
    stream = recipe.parallel.stream
    together = recipe.parallel.stream_micro_batches
    if stream == "off" and together not in ("auto", 1):
        raise UserError(
            "no weights stream whose loads micro-batches could share",
            where=f"parallel.stream_micro_batches={together}",
            fix=f"set {KEY}=layers, or leave parallel.stream_micro_batches out",
            code=2,
        )
    if stream in ("auto", "off"):
        return
    kind: Stream = "experts" if stream == "experts" else "layers"
    for reason, fix in refusals(recipe, config, profile, kind, devices=devices):
        raise UserError(
            f"weights cannot stream: {reason}", where=f"{KEY}={stream}", fix=fix, code=2
        )
    if stream == "experts" and config.experts is None:
        problem = "the model has no experts that could stream"
        raise UserError(problem, where=f"{KEY}=experts", fix=f"set {KEY}=layers", code=2)
    if stream == "experts" and recipe.adapter.kind == "none":
        problem = "only frozen experts stream: this recipe trains them"
        raise UserError(problem, where=f"{KEY}=experts", fix=f"set {KEY}=layers", code=2)


def _streamed(
    shape: StepShape,
    stream: Stream,
    estimator: StepEstimator,
    *,
    step_tokens: int,
    choose: Callable[[StepShape], MicroBatching],
) -> tuple[MicroBatching, StreamPlan]:
    """The step with weights that stream."""
    step = replace(shape, stream=stream, compiled=False)
    step = replace(step, stream_host=placement(step, estimator.machine))
    micro_batching = choose(step)
    if stream == "layers":
        micro_batching = replace(micro_batching, checkpointing=Choice("full", RECOMPUTED))
    step = micro_batching.step
    return micro_batching, stream_plan(step, estimator, step_tokens=step_tokens)


def placement(step: StepShape, machine: Machine) -> HostPlacement:
    """Pinned memory where the host has enough of it, else pageable memory; frozen weights in files where it has too
    little of both.
    """
    host = machine.host
    needed = host_memory(step)
    share = WSL_PINNED_SHARE if host.around.wsl else PINNED_SHARE
    if needed.total > host.memory_free_bytes and not in_full(step):
        return "mapped"
    return "pinned" if needed.pinned <= share * host.memory_bytes else "staged"


def host_choices(plan: StreamPlan) -> dict[str, Choice[str]]:
    """By key: where weights wait on the host, and where the update computes."""
    reasons = {
        "pinned": "pinned memory: the GPU copies from it without the CPU",
        "staged": "not all can be pinned: a thread copies weights through pinned buffers",
        "mapped": f"the host's memory is too small: files are read in each step, at {DISK_GBS:g} GB/s as assumed",
    }
    choices = {"parallel.stream_host": Choice[str](plan.host, reasons[plan.host])}
    if plan.update_seconds is not None and plan.update_over_link_seconds is not None:
        update = format_seconds(plan.update_seconds)
        other = format_seconds(plan.update_over_link_seconds)
        reason = (
            f"{update} per step; states that pass through the GPU, {other}, are not supported yet"
        )
        choices["optimizer.device"] = Choice("updated on the CPU", reason)
    return choices


def together(
    recipe: Recipe,
    step: StepShape,
    *,
    sequences: int,
    measure: Measure,
    seconds: StepSeconds,
) -> StepShape:
    """A step of so many sequences with the number of its micro-batches that share each load, where weights stream."""
    if step.stream == "off":
        return step
    return with_micro_batches(
        step,
        recipe.parallel.stream_micro_batches,
        accumulation=sequences // step.micro_batch_size,
        measure=measure,
        seconds=seconds,
    )


def with_micro_batches(
    step: StepShape,
    setting: int | Literal["auto"],
    *,
    accumulation: int,
    measure: Measure,
    seconds: StepSeconds,
) -> StepShape:
    """The step with the number of micro-batches that share each load of a layer.

    `auto`: the fewest with which the step takes no longer than with any larger number that fits.
    """
    if setting != "auto":
        return replace(step, stream_micro_batches=min(setting, accumulation))
    options = list[tuple[float, StepShape]]()
    together = 1
    while together <= accumulation:
        option = replace(step, stream_micro_batches=together)
        option_seconds = seconds(option)
        if option_seconds is None or (options and not measure(option).fits):
            break
        options.append((option_seconds, option))
        together *= 2
    if not options:
        return step
    fewest_seconds = min(option_seconds for option_seconds, _ in options)
    return next(
        option for option_seconds, option in options if option_seconds <= SAME_TIME * fewest_seconds
    )


def shape_on_replicas(recipe: Recipe, shape: StepShape, machine: Machine) -> StepShape:
    """The step of each of several devices, for which `auto` streams nothing. Their copy is in no files."""
    stream = recipe.parallel.stream
    if stream == "auto" or stream == "off":
        return shape
    step = replace(shape, stream=stream, compiled=False)
    is_pinned = placement(step, machine) == "pinned"
    return replace(step, stream_host="pinned" if is_pinned else "staged")


def on_replicas(
    recipe: Recipe, estimator: StepEstimator, step: StepShape, *, step_tokens: int, per_node: int
) -> tuple[Choice[Stream], StreamPlan | None]:
    """The choice and the figures of a step of `shape_on_replicas`, in which a device has so many tokens.

    Weights stream through each device of a host out of one copy. Raises UserError where a host has no room for it.
    """
    if step.stream == "off":
        is_asked = recipe.parallel.stream == "off"
        return Choice("off", ASKED if is_asked else SEVERAL_DEVICES), None
    plan = stream_plan(step, estimator, step_tokens=step_tokens, per_node=per_node)
    refuse_small_host(recipe, step, plan, estimator.machine)
    return Choice(step.stream, f"{ASKED}; {figures(plan)}"), plan


def settings_of(train: Train, step: StepShape) -> Train:
    """What remains to be chosen for steps like this one: layers that stream are computed again."""
    if step.stream != "layers":
        return train
    return train.model_copy(update={"activation_checkpointing": "full"})


def stream_plan(
    step: StepShape, estimator: StepEstimator, *, step_tokens: int, per_node: int = 1
) -> StreamPlan:
    """The figures of weights that stream through each of `per_node` devices of a host."""
    host = host_memory(step, replicas=per_node)
    sizes = streamed_by_layer(step)
    passes = passes_over(step, step_tokens)
    loads = loads_of(step, passes)
    tokens_per_load = step.tokens_per_micro_batch * step.stream_micro_batches
    link = estimator.host_link
    step_parts = estimator.step_parts(step, step_tokens)
    hidden = None
    of_micro_batch = replace(step, stream="off", stream_micro_batches=1)
    parts = estimator.step_parts(of_micro_batch, step.tokens_per_micro_batch)
    if link is not None and parts is not None:
        on_device = {name: part for name, part in parts.items() if name != "optimizer"}
        hidden = hidden_from(step, total(on_device).value, link)
    updates_here = link is not None and step_parts is not None and in_full(step)
    return StreamPlan(
        micro_batches=step.stream_micro_batches,
        buffer_bytes=float(ring_bytes(step)),
        host_bytes=host.parts,
        pinned_bytes=host.pinned,
        host_limit=float(estimator.machine.host.memory_free_bytes),
        loaded_bytes=float(sum(size * count for size, count in zip(sizes, loads, strict=True))),
        sent_bytes=sent_bytes(step, passes),
        tokens_per_load=tokens_per_load,
        hidden_from=hidden,
        waiting_share=None
        if step_parts is None or WAITING not in step_parts
        else step_parts[WAITING].value / total(step_parts).value,
        update_seconds=step_parts["optimizer"].value if step_parts and updates_here else None,
        update_over_link_seconds=device_update_seconds(step, link)
        if link and updates_here
        else None,
        host=step.stream_host,
        link="" if link is None else link_text(link, step.stream_host),
    )


def link_text(link: HostLink, host: HostPlacement) -> str:
    """The rate at which weights reach the device, and where that figure is from."""
    if host == "staged":
        return f"{link.pageable_gbs:.3g} GB/s through pinned buffers; pinned memory would give {link.text}"
    if host == "mapped":
        return (
            f"{link.disk_gbs:g} GB/s from files, as assumed; pinned memory would give {link.text}"
        )
    return link.text


def host_problem(step: StepShape, plan: StreamPlan, machine: Machine) -> str:
    """What the host lacks; "" where it has enough, or where reading files instead costs little."""
    is_sane = plan.waiting_share is not None and plan.waiting_share <= SANE_WAIT
    if plan.host == "mapped" and is_sane:
        return ""
    needed = host_memory(replace(step, stream_host="pinned")).total
    if needed <= plan.host_limit:
        return ""
    origin = {"assumed": ", assumed", "set": ", as set"}.get(machine.host.memory_origin, "")
    problem = (
        f"{STREAMED_NEED} {format_bytes(needed)} of host memory, of"
        f" {format_bytes(machine.host.memory_bytes)}{origin}, {format_bytes(plan.host_limit)} free"
    )
    if plan.host != "mapped":
        return problem
    seconds = format_seconds(plan.loaded_bytes / (DISK_GBS * 1e9))
    return f"{problem}; reading files in each step would take {seconds} at {DISK_GBS:g} GB/s, which is not sane"


def refuse_small_host(recipe: Recipe, step: StepShape, plan: StreamPlan, machine: Machine) -> None:
    """Raises UserError where the recipe asks for weights that stream, and the host has no room for them."""
    if problem := host_problem(step, plan, machine):
        raise UserError(
            problem,
            where=f"{KEY}={recipe.parallel.stream}",
            fix=ways_out(recipe, plan),
            code=2,
        )


def ways_out(recipe: Recipe, plan: StreamPlan) -> str:
    """What to set where the host's memory does not suffice."""
    ways = []
    if recipe.adapter.kind != "none" and recipe.quantize.kind == "none":
        ways.append("quantize.kind=nf4, which takes a quarter")
    if recipe.adapter.kind == "none":
        states = plan.host_bytes.get("optimizer states", 0.0)
        if recipe.optimizer.state_dtype != "int8" and states:
            ways.append("optimizer.state_dtype=int8")
        if recipe.train.precision != "bfloat16-pure":
            ways.append("train.precision=bfloat16-pure")
        ways.append("adapter.kind=lora")
    ways.append(f"{KEY}=off")
    return "set " + ", or ".join(ways)


def small_host(recipe: Recipe, plan: RunPlan) -> Iterator[str]:
    """Of a run that does not fit: what the host lacks for weights that stream."""
    reason = next((choice.reason for choice in plan.choices if choice.key == KEY), "")
    if not plan.fits and recipe.parallel.stream == "auto" and reason.startswith(STREAMED_NEED):
        yield f"{reason}; a machine with more could train it"


class StreamChoice(NamedTuple):
    """Where the weights of a step live, with the reason. `plan`: the figures of those that stream, None without any."""

    choice: Choice[Stream]
    micro_batching: MicroBatching
    plan: StreamPlan | None


def choose_stream(
    recipe: Recipe,
    config: ModelConfig,
    estimator: StepEstimator,
    shape: StepShape,
    *,
    step_tokens: int,
    choose: Callable[[StepShape], MicroBatching],
    seconds: Callable[[StepShape], float | None],
) -> StreamChoice:
    """Weights on the device where they fit, unless streaming them is faster; else the kind of streaming that fits.

    `shape`: the step with all weights on the device. `choose`: the micro-batches of a step; `seconds`: of a step, None
    where the device's speed is unknown. `auto` comes after all else that the plan chooses by itself: checkpointing,
    micro-batches, logits in chunks. Raises UserError where the recipe asks for what its host has no room for.
    """
    stream = recipe.parallel.stream
    machine = estimator.machine
    profile = estimator.profile
    refuse_stream(recipe, config, profile, devices=1)
    if stream in ("layers", "experts"):
        micro_batching, plan = _streamed(
            shape, stream, estimator, step_tokens=step_tokens, choose=choose
        )
        refuse_small_host(recipe, micro_batching.step, plan, machine)
        reason = f"{ASKED}; {figures(plan)}"
        return StreamChoice(Choice(stream, reason), micro_batching, plan)

    resident = choose(shape)

    def stays(reason: str) -> StreamChoice:
        return StreamChoice(Choice("off", reason), resident, None)

    if stream == "off":
        return stays(ASKED)
    kind: Stream = "experts" if streams_experts(recipe, config) else "layers"
    refusal = next(refusals(recipe, config, profile, kind, devices=1), None)
    if refusal is not None:
        return stays(refusal[0])
    # What streams is computed again in backward: only larger micro-batches can make up for it.
    fits_in_large = resident.step.checkpointing == "none" or not resident.step.accumulating
    if resident.memory.fits and fits_in_large:
        return stays(FITS)
    # Experts alone first: all else of a mixture is a small part of it.
    kinds: tuple[Stream, ...] = ("experts", "layers") if kind == "experts" else ("layers",)
    for kind in kinds:
        micro_batching, plan = _streamed(
            shape, kind, estimator, step_tokens=step_tokens, choose=choose
        )
        if micro_batching.memory.fits:
            break
    fits = micro_batching.memory.fits
    problem = host_problem(micro_batching.step, plan, machine)
    if resident.memory.fits:
        # Both fit: the estimate decides where it tells them apart.
        before = seconds(resident.step)
        after = seconds(micro_batching.step)
        if before is None or after is None or not fits or problem or after >= WORTH * before:
            return stays(FITS)
        reason = f"saves {1 - after / before:.0%} of the time; {figures(plan)}"
        return StreamChoice(Choice(kind, reason), micro_batching, plan)
    if problem:
        return stays(problem)
    if not fits:
        return stays("does not fit with streamed weights either")
    reason = f"all weights do not fit on the device; {figures(plan)}"
    return StreamChoice(Choice(kind, reason), micro_batching, plan)


def streams_experts(recipe: Recipe, config: ModelConfig) -> bool:
    """Whether the experts of the model are frozen, and can stream alone."""
    return config.experts is not None and recipe.adapter.kind != "none"


def figures(plan: StreamPlan) -> str:
    """Where the weights are, and whether their copies cost time."""
    buffers = f"{format_bytes(plan.buffer_bytes)} of layers on the GPU"
    host = f"{format_bytes(sum(plan.host_bytes.values()))} on the host"
    if plan.hidden_from is None:
        return f"{buffers}, {host}"
    hidden = "hidden" if plan.hidden else "not hidden"
    tokens = f"{plan.tokens_per_load:,} tokens per load, hidden from {plan.hidden_from:,}"
    return f"{buffers}, {host}; copies are {hidden}: {tokens}"

"""What a run says after each step: its loss and speed, slow ranks, and the health of its updates."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import final

from bloomery.core.device import is_accelerator, memory_stats
from bloomery.monitor.events import ExpertLoad, StepDone, Warned
from bloomery.parallel.clock import CommunicationClock
from bloomery.parallel.environment import node_name, without_host
from bloomery.plan.pipeline import stage_of
from bloomery.plan.types import TrainPlan
from bloomery.train.batch_source import StepBatches
from bloomery.train.context import RunContext, axes
from bloomery.train.diagnostics.step_health import ParameterUpdate, untrained_kinds
from bloomery.train.diagnostics.stragglers import worked_seconds
from bloomery.train.process import allocator_sample, peak_memory_gib
from bloomery.train.step import StepResult


@final
@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds of a step on this rank: computing, waiting on the device for other ranks, communicating by axis."""

    compute: float
    device_wait: float
    by_axis: Mapping[str, float]

    @classmethod
    def of(cls, clock: CommunicationClock, plan: TrainPlan, step_seconds: float) -> "StepTimes":
        """A rank that waits for others has computed less: stragglers are found by compute time alone."""
        by_axis = {axis: clock.seconds_by_axis().get(axis, 0.0) for axis in axes(plan)}
        waited_seconds = clock.waited_seconds
        device_wait = 0.0
        # Between GPUs a stage waits for its neighbors on the device, and so does a replica or a shard.
        if is_accelerator(plan.device):
            pipeline_seconds = by_axis.get("pipeline", 0.0)
            waited_seconds += pipeline_seconds
            device_wait = sum(by_axis.values()) - pipeline_seconds
        compute = max(0.0, step_seconds - waited_seconds)
        return cls(compute=compute, device_wait=device_wait, by_axis=by_axis)


@final
@dataclass(frozen=True)
class RankFigures:
    """What the ranks have told each other about a step."""

    memory_gib: Sequence[float]
    compute_seconds: Sequence[float]
    device_wait_seconds: Sequence[float]
    # Of the rank that waited least: the others waited for slower ones, too.
    communication_seconds: Mapping[str, float]


def report_step(
    context: RunContext,
    result: StepResult,
    step_batches: StepBatches,
    *,
    lr_scale: float,
    seconds: float,
    data_wait_seconds: float,
) -> None:
    """Emit StepDone, and the health of the step where it was measured. All ranks call it.

    Takes `fraction` as `read_clock`, and `seconds_since_save`.
    """
    train = context.plan.train
    figures = gather_figures(context, StepTimes.of(context.mesh.clock, train, seconds))

    tokens = train.tokens_per_step if step_batches.tokens is None else step_batches.tokens
    context.emit(
        StepDone(
            step=context.step,
            loss=result.loss if result.taken else None,
            learning_rate=context.plan.optimizer.learning_rate * lr_scale,
            grad_norm=result.grad_norm if result.taken else None,
            tokens=context.state.progress.tokens,
            tokens_per_second=tokens / seconds,
            sequences_per_second=train.sequences_per_step / seconds,
            step_seconds=seconds,
            data_wait_seconds=max(0.0, data_wait_seconds - sum(step_batches.seconds.values())),
            memory_gib=max(figures.memory_gib),
            loss_tokens=result.loss_tokens,
            metrics={**step_batches.metrics, **result.metrics},
            communication_seconds=dict(figures.communication_seconds),
            rollout_seconds=step_batches.seconds.get("rollout"),
            reward_seconds=step_batches.seconds.get("reward"),
        )
    )
    # A step of padding alone has no load.
    has_load = all(map(math.isfinite, chain.from_iterable(result.expert_load.values())))
    if result.expert_load and has_load:
        context.emit(
            ExpertLoad(
                step=context.step,
                ratios={
                    str(layer): [float(f"{ratio:.3g}") for ratio in ratios]
                    for layer, ratios in result.expert_load.items()
                },
            )
        )
    if context.mesh.world > 1:
        warn_of_slow_ranks(
            context, worked_seconds(figures.compute_seconds, figures.device_wait_seconds)
        )
    report_health(context, step_batches)


def reports_experts(step: int, every: int) -> bool:
    """Whether a step reports the load of each expert: every `every`-th, from 200 of them on every second, fourth ...

    A model of 48 layers with 128 experts has 30 KB of them in a step.
    """
    thinned = max(0, (step // (100 * every)).bit_length() - 1)
    return step % (every << thinned) == 0


def gather_figures(context: RunContext, times: StepTimes) -> RankFigures:
    """One collective for all that ranks tell each other after a step: at many ranks each takes its time.

    It carries the requests of the ranks along, and the first rank's clock: by that all ranks end and save alike.
    """
    mesh = context.mesh
    own_request = context.requests.after_step(context.step) if mesh.world > 1 else ()
    gathered = mesh.all_gather_floats(
        *own_request,
        context.own_fraction(),
        context.timer.elapsed - context.saved_at_seconds,
        peak_memory_gib(context.plan.train.device),
        times.compute,
        times.device_wait,
        *times.by_axis.values(),
    )
    if mesh.world > 1:
        context.requests.note([numbers[: len(own_request)] for numbers in gathered])

    # One row a rank becomes one column a figure.
    (
        (context.fraction, *_),
        (context.seconds_since_save, *_),
        memory_gib,
        compute_seconds,
        device_wait_seconds,
        *seconds_of_axes,
    ) = zip(*(numbers[len(own_request) :] for numbers in gathered), strict=True)
    least_seconds = [min(seconds_by_rank) for seconds_by_rank in seconds_of_axes]
    return RankFigures(
        memory_gib,
        compute_seconds,
        device_wait_seconds,
        dict(zip(times.by_axis, least_seconds, strict=True)),
    )


def warn_of_slow_ranks(context: RunContext, compute_seconds_by_rank: Sequence[float]) -> None:
    """Name, once, each rank that is slower than others with the same layers, and an uneven cut into stages."""
    hosts = context.mesh.hosts
    for straggler in context.stragglers.note(compute_seconds_by_rank):
        first_rank, *_, last_rank = (*straggler.ranks, straggler.ranks[-1])
        host = hosts[first_rank] if hosts else node_name()
        name = f"rank {first_rank} on {host}"
        if straggler.host:
            name = (
                f"host {host}, with {len(straggler.ranks)} ranks from {first_rank} to {last_rank},"
            )
        reason = (
            f"{name} takes {straggler.times:.1f} times as long for a step as most: the others wait"
        )
        if len(set(hosts)) > 1:
            reason += f"; to leave it out: {without_host(host)}"
        context.emit(Warned(step=context.step, reason=reason))
    slowest = context.stragglers.slowest_stage()
    if slowest is not None:
        index, ratio = slowest
        train = context.plan.train
        stage = stage_of(context.plan.model.config, index, train.pipeline, train.pipeline_layers)
        groups = ", ".join(f"{group.start} to {group.stop - 1}" for group in stage.groups)
        reason = (
            f"the cut into stages is uneven: stage {index + 1} of {train.pipeline} (layers {groups}) computes"
            f" {ratio:.1f} times as long as the fastest stage: the others wait"
        )
        context.emit(Warned(step=context.step, reason=reason))


def report_health(context: RunContext, step_batches: StepBatches) -> None:
    """Emit the health of the step, where it was measured, and the state of the allocator."""
    health_check = context.state.model_and_optimizer.health_check
    if health_check is None:
        return

    # Each stage of a pipeline has measured its own parameters.
    figures_by_name = context.mesh.gather_by_name(
        {name: update._asdict() for name, update in health_check.take_updates().items()}
    )
    updates = {name: ParameterUpdate(**figures) for name, figures in figures_by_name.items()}
    train = context.plan.train
    if context.mesh.first_rank:
        # A kind of modules that never trains is what people find after the run: once is enough.
        if context.step == 1 and (kinds := untrained_kinds(updates)):
            names = ", ".join(f"{kind} ({count:,} tensors)" for kind, count in kinds.items())
            context.emit(
                Warned(
                    step=1, reason=f"no gradient reached the adapter of {names}: it does not train"
                )
            )
        context.emit(
            health_check.report(
                context.step,
                step_batches.batches,
                context.objective,
                updates=updates,
                compiled=train.compile,
            )
        )
    allocator_stats = memory_stats(train.device)
    if allocator_stats:
        context.emit(allocator_sample(allocator_stats, step=context.step, device=context.device))

"""Layouts over several devices (copies, shards, a pipeline): the memory and the time of each, and the choice."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from bloomery.core.errors import UserError
from bloomery.core.units import counted
from bloomery.facts.counting import is_of_experts
from bloomery.facts.limits import refuse_split_int8_blocks, split_int8_block
from bloomery.hardware.host_links import HostLink
from bloomery.hardware.link_rates import measured_links, slowest_copy_gbs
from bloomery.hardware.machine import Machine
from bloomery.hardware.profile import Profile
from bloomery.hardware.vendors import ASSUMED_VENDOR, Vendor
from bloomery.plan import stages, streaming
from bloomery.plan.batch import MicroBatching, choose_micro_batching
from bloomery.plan.estimate.fabric import (
    Fabric,
    bus_gbs,
    communication_seconds,
    exposed_seconds,
    fabric_of,
)
from bloomery.plan.estimate.measured import StepEstimator
from bloomery.plan.estimate.mesh import MeshSplit, mesh_memory, on_device
from bloomery.plan.estimate.scoring import with_scoring
from bloomery.plan.estimate.speed import Rate, Work, step_parts, total, work_of
from bloomery.plan.estimate.stages import fullest_stage_bytes
from bloomery.plan.estimate.states import TrainedModel
from bloomery.plan.estimate.step import StepShape
from bloomery.plan.estimate.stream_time import streamed_parts, with_teacher
from bloomery.plan.estimate.streaming import passes_over
from bloomery.plan.rollouts import RolloutMoments
from bloomery.plan.support_matrix import AXES, refusals, refuse_unsupported
from bloomery.plan.types import Estimate, LayoutPlan, MemoryEstimate, ParallelPlan
from bloomery.plan.unsupported_layouts import refuse_context, refuse_divided_experts
from bloomery.recipe.schema import AssumedNetwork, Parallel, Recipe, Train

SIMPLER_LAYOUT_TIME = 1.03  # of the fastest layout: a simpler one is chosen up to this time
# Instead of a pipeline, whose waiting is estimated less exactly than computing, a layout without stages up to this.
NO_PIPELINE_TIME = 1.10
# Of a rank's sequences: empty ones that are added at most, where larger micro-batches then divide them.
PADDED_SHARE = 1 / 8
MOST_STAGES = 16  # of pipelines that are chosen without the recipe naming one
PartSeconds = dict[str, Estimate]  # of a step, by operation


@dataclass(frozen=True, kw_only=True)
class LayoutCandidate:
    """One planned layout: `micro_batching` of one device, `parts`: seconds of a step.

    `sequences`: those that each data-parallel rank computes in a step, with empty ones where they do not divide.
    """

    name: str
    split: MeshSplit
    sequences: int
    micro_batching: MicroBatching
    parts: PartSeconds | None  # None: the device's speed is unknown

    @property
    def seconds(self) -> Estimate | None:
        return None if self.parts is None else total(self.parts)

    @property
    def fits(self) -> bool:
        return self.micro_batching.memory.fits


@dataclass(frozen=True, kw_only=True)
class MeshWorkload:
    """The common input of all layouts. `limit`: bytes of one device that a plan may use.

    `rollout_moments`: of a run with rewards, whose memory may peak outside of steps. `devices`: of all ranks in their
    order, where they are unequal; `rate` and `limit` are then those of the slowest and of the smallest one.
    """

    step: StepShape
    sequences_per_step: int
    fabric: Fabric
    rate: Rate | None
    vendor: Vendor | None  # None: a CPU
    limit: float
    rollout_moments: RolloutMoments | None = None
    devices: tuple[stages.Device, ...] = ()
    host_link: HostLink | None = None  # over which weights stream; None: unknown

    @classmethod
    def of(
        cls,
        machine: Machine,
        profile: Profile,
        step: StepShape,
        estimator: StepEstimator,
        *,
        sequences_per_step: int,
        gpus: int,
        nodes: int,
        assumed_network: AssumedNetwork,
        rollout_moments: RolloutMoments | None = None,
    ) -> "MeshWorkload":
        """The step over `nodes` nodes of `gpus` devices like that of `profile`.

        Ranks of a CPU share its cores and memory, and their links, so that no measurement of an earlier run counts. An
        unlisted GPU is planned as one of ASSUMED_VENDOR. Raises UserError for unequal GPUs on several nodes.
        """
        on_cpu = profile.accelerator is None
        rate = estimator.rate(step)
        limit = estimator.limit

        # Each link of a ring is as fast as the slower of its two devices.
        measured = None if on_cpu else measured_links(machine, per_node=gpus, nodes=nodes)
        gpu_models = [peer.gpu for peer in profile.peers] or [profile.gpu]
        fabrics = [
            fabric_of(
                "CPU" if on_cpu else "" if gpu is None else gpu.link,
                per_node=gpus,
                nodes=nodes,
                assumed_network=assumed_network,
                measured=measured,
                copy_gbs=slowest_copy_gbs(machine),
            )
            for gpu in gpu_models
        ]

        # Where data-parallel ranks are unequal, all wait for the slowest, and the smallest bounds their memory.
        devices = tuple(
            stages.Device(peer.profile.accelerator.name, peer.rate(step), peer.limit)
            for peer in estimator.peers()
            if peer.profile.accelerator is not None
        )
        if devices:
            refuse_unequal_nodes(devices, gpus=gpus, nodes=nodes)
            pace = stages.slowest(devices, step)
            rate = pace.rate
            limit = pace.limit
        return cls(
            step=step,
            sequences_per_step=sequences_per_step,
            fabric=min(fabrics, key=lambda fabric: fabric.node_link.gbs),
            devices=devices,
            rate=rate.shared(gpus) if rate is not None and on_cpu else rate,
            vendor=None if on_cpu else profile.arch.vendor if profile.arch else ASSUMED_VENDOR,
            limit=limit / gpus if on_cpu else limit,
            rollout_moments=rollout_moments,
            host_link=estimator.host_link,
        )

    def step_memory(self, split: MeshSplit, step: StepShape) -> MemoryEstimate:
        """The memory of a step in that split."""
        return mesh_memory(
            step,
            self.cut(split, step),
            vendor=self.vendor,
            limit=self.limit,
            micro_batches=self.micro_batches(split, step),
            stage_limits=self.stage_limits(split, step),
        )

    def memory(self, split: MeshSplit) -> Callable[[StepShape], MemoryEstimate]:
        """The peak of a run whose steps are like this one, in that split."""

        def peak(step: StepShape) -> MemoryEstimate:
            step_memory = self.step_memory(split, step)
            if self.rollout_moments is None:
                return step_memory
            return self.rollout_moments.peak(step, step_memory, self.cut(split, step))

        return peak

    def cut(self, split: MeshSplit, step: StepShape) -> MeshSplit:
        """The split with the number of layers of each group, where a pipeline has not been cut yet."""
        if split.pipeline == 1 or split.layers:
            return split
        return stages.cut_layers(
            on_device(step, split),
            split,
            self.stage_devices(split, step),
            vendor=self.vendor,
            micro_batches=self.micro_batches(split, step),
        )

    def stage_devices(self, split: MeshSplit, step: StepShape) -> tuple[stages.Device, ...]:
        """The device of each stage: the ranks of a stage follow each other, and the slowest of them sets its pace."""
        if not self.devices:
            return (stages.Device("", self.rate, self.limit),) * split.pipeline
        ranks = split.replicate * split.shard
        return tuple(
            stages.slowest(self.devices[stage * ranks : (stage + 1) * ranks], step)
            for stage in range(split.pipeline)
        )

    def stage_limits(self, split: MeshSplit, step: StepShape) -> tuple[float, ...]:
        """Bytes of the device of each stage, where they are unequal."""
        if not self.devices or split.pipeline == 1:
            return ()
        return tuple(device.limit for device in self.stage_devices(split, step))

    def stage_rates(self, split: MeshSplit, step: StepShape) -> tuple[Rate, ...] | None:
        """None where the speed of a device is unknown."""
        rates = [device.rate for device in self.stage_devices(split, step)]
        known_rates = tuple(rate for rate in rates if rate is not None)
        return known_rates if len(known_rates) == len(rates) else None

    def micro_batches(self, split: MeshSplit, step: StepShape) -> int:
        """The micro-batches of the rank that gets most sequences of a step."""
        return -(-self.most_sequences(split) // step.micro_batch_size)

    def most_sequences(self, split: MeshSplit) -> int:
        """The sequences of the rank that gets most of a step: the others wait for it."""
        return -(-self.sequences_per_step // split.data_parallel)


def refuse_unequal_nodes(devices: Sequence[stages.Device], *, gpus: int, nodes: int) -> None:
    """Raises UserError for another number of devices than the unequal ones that are named."""
    if nodes == 1 and gpus == len(devices):
        return
    names = " + ".join(device.name for device in devices)
    raise UserError(
        f"unequal GPUs train together on one node, all of them: {names}",
        where=f"{counted(gpus * nodes, 'devices')}",
        fix="leave out --gpus and --nodes, or name GPUs of one model",
        code=2,
    )


def sizes_of(parallel: Parallel) -> tuple[int | Literal["auto"], ...]:
    """The recipe's sizes of replicate, shard and pipeline. Where one of the first two is set, no pipeline is chosen."""
    pipeline = parallel.pipeline
    if pipeline == "auto" and (parallel.replicate, parallel.shard) != ("auto", "auto"):
        pipeline = 1
    return parallel.replicate, parallel.shard, pipeline


def fewest_devices(parallel: Parallel) -> int:
    """The number of devices of which those of the recipe are a multiple, or which they are."""
    sizes = sizes_of(parallel)
    devices = math.prod(size for size in sizes if size != "auto")
    # Sizes that are open may have as many devices as share a sequence, or divide the experts.
    shared = math.lcm(devices, parallel.context, parallel.expert)
    return shared if "auto" in sizes else devices


def training_devices_of(parallel: Parallel, *, gpus: int, nodes: int) -> int:
    """Of the `gpus` devices that the command line names for each node, those that train; where it names none, others
    than these score.

    Raises UserError where none is left.
    """
    scoring = parallel.scoring_devices
    if gpus * nodes == 1 or scoring == 0:
        return gpus
    if gpus <= scoring:
        raise UserError(
            f"{counted(scoring, 'devices')} of each node score: of {gpus:,} none is left to train",
            where=f"parallel.scoring_devices={scoring}",
            fix=f"name more devices with --gpus, or set parallel.scoring_devices={gpus - 1}",
            code=2,
        )
    return gpus - scoring


def assumed_devices(parallel: Parallel, *, gpus: int, nodes: int) -> tuple[int, int]:
    """Devices per node, and nodes: those of the command line (more than one device in all), else one node with as many
    devices as the recipe splits over.

    Raises UserError where the two contradict each other.
    """
    sizes = sizes_of(parallel)
    devices = fewest_devices(parallel)
    if gpus * nodes == 1:
        return devices, 1
    if gpus * nodes % devices or ("auto" not in sizes and gpus * nodes != devices):
        split_over = f"the recipe splits over {counted(devices, 'devices')}"
        problem = f"{split_over}, the command line names {gpus * nodes:,}"
        set_keys = [
            key for key in ("replicate", "shard", "pipeline") if getattr(parallel, key) != "auto"
        ]
        larger_keys = [key for key in set_keys if getattr(parallel, key) > 1]
        edits = [f"parallel.{key}=auto" for key in larger_keys or set_keys]
        edits += [
            f"parallel.{key}=1"
            for key in ("context", "expert")
            if gpus * nodes % getattr(parallel, key)
        ]
        number = (
            f"a multiple of {devices:,} devices" if "auto" in sizes else counted(devices, "devices")
        )
        fix = f"name {number} with --nodes or --gpus, or set {' '.join(edits)}"
        raise UserError(problem, where="parallel", fix=fix, code=2)
    return gpus, nodes


def _splits(workload: MeshWorkload, recipe: Recipe) -> Iterator[tuple[str, MeshSplit]]:
    """The split of the recipe, else every split that the devices and the recipe's features allow. Simplest first, each
    with its name.

    Raises UserError where a feature of the recipe does not train over the split that it asks for, or over any.
    """
    fabric = workload.fabric
    parallel = recipe.parallel
    model = workload.step.model
    int8_states = recipe.optimizer.state_dtype == "int8"
    schedule = parallel.pipeline_schedule
    chunks = stages.chunks_of(parallel)

    # The recipe names a split: what it leaves to "auto" takes the devices that remain.
    copies, shards, num_stages = sizes_of(parallel)
    if num_stages != "auto":
        remaining = fabric.devices // num_stages
        if copies == "auto":
            copies = remaining // (1 if shards == "auto" else shards)
        split = MeshSplit(
            replicate=copies,
            shard=remaining // copies if shards == "auto" else shards,
            pipeline=num_stages,
            context=parallel.context,
            expert=parallel.expert,
            schedule=schedule if num_stages > 1 else "1f1b",
            chunks=chunks if num_stages > 1 else 1,
        )
        refuse_context(
            recipe, model.config, split.replicate * split.shard, teacher=workload.step.teacher
        )
        refuse_divided_experts(
            recipe, model.config, devices=split.replicate * split.shard, shard=split.shard
        )
        refuse_unsupported(
            recipe,
            model.config,
            replicate=split.replicate,
            shard=split.shard,
            pipeline=split.pipeline,
            context=split.context,
        )
        stages.refuse_few_layers(model.config.num_layers, split)
        if int8_states:
            _refuse_split_blocks(model, split)
        if num_stages > 1:
            name = "pipeline"
        elif split.shard == 1:
            name = "replicate"
        else:
            name = "shard" if split.replicate == 1 else "shard and replicate"
        yield name, split
        return

    # The recipe names no split: every one over all devices, without those that a feature of the recipe refuses.
    refuse_context(recipe, model.config, fabric.devices, teacher=workload.step.teacher)
    refuse_divided_experts(recipe, model.config, devices=fabric.devices)
    refuse_unsupported(recipe, model.config, context=parallel.context)
    whole = MeshSplit(context=parallel.context, expert=parallel.expert)
    splits = [
        ("replicate", replace(whole, replicate=fabric.devices)),
        ("shard", replace(whole, shard=fabric.devices)),
    ]
    if 1 < parallel.expert < fabric.devices:
        copies = fabric.devices // parallel.expert
        splits.append(
            ("shard and replicate", replace(whole, replicate=copies, shard=parallel.expert))
        )
    if fabric.nodes > 1 and fabric.per_node > 1:
        in_nodes = replace(whole, replicate=fabric.nodes, shard=fabric.per_node)
        splits.append(("shard in nodes", in_nodes))
    refused_axes = {axis for axis in AXES if refusals(recipe, axis, model.config)}
    if refused_axes == set(AXES):
        refuse_unsupported(recipe, model.config, replicate=fabric.devices)  # raises
    splits += [
        ("pipeline", replace(split, schedule=schedule, chunks=chunks, expert=parallel.expert))
        for split in _pipelines(workload, chunks)
    ]
    allowed = [
        (name, split)
        for name, split in splits
        if split.divides_experts
        and not ("replicate" in refused_axes and split.replicate > 1)
        and not ("shard" in refused_axes and split.shard > 1)
        and not ("pipeline" in refused_axes and split.pipeline > 1)
        and not (int8_states and _split_block(model, split))
    ]
    # None is left where only shards would train and their rows would split the blocks of int8 states.
    if not allowed:
        refuse_split_int8_blocks(model.trainable, fabric.devices)  # raises
    yield from allowed


def _split_block(model: TrainedModel, split: MeshSplit) -> str | None:
    """The first parameter of which a block of int8 states would span two devices."""
    if split.shard > 1:
        return split_int8_block(model.trainable, split.shard)
    divided = {name: shape for name, shape in model.trainable.items() if is_of_experts(name)}
    return split_int8_block(divided, split.expert) if split.expert > 1 else None


def _refuse_split_blocks(model: TrainedModel, split: MeshSplit) -> None:
    """Raises UserError where `_split_block` finds one."""
    if _split_block(model, split) is not None:
        refuse_split_int8_blocks(model.trainable, max(split.shard, split.expert))


def _pipelines(workload: MeshWorkload, chunks: int) -> Iterator[MeshSplit]:
    """The pipelines that may be chosen: of each number of stages one with copies, and one with shards inside each stage
    where its ranks are in a node.

    CPUs have none: all ranks share one memory and its cores. Nor have devices that share sequences. Ranks of a stage
    follow each other, so that a stage is in one node where stages are as many as nodes, or more.
    """
    fabric = workload.fabric
    if workload.vendor is None or workload.step.context > 1:
        return
    most_stages = min(
        max(fabric.per_node, fabric.nodes), MOST_STAGES, workload.step.config.num_layers // chunks
    )
    for num_stages in range(2, most_stages + 1):
        if fabric.devices % num_stages:
            continue
        ranks_per_stage = fabric.devices // num_stages
        yield MeshSplit(replicate=ranks_per_stage, pipeline=num_stages)
        shard = min(ranks_per_stage, fabric.per_node)
        if shard > 1 and ranks_per_stage % shard == 0:
            yield MeshSplit(replicate=ranks_per_stage // shard, shard=shard, pipeline=num_stages)


def _plan_layout(
    workload: MeshWorkload, recipe: Recipe, name: str, split: MeshSplit
) -> LayoutCandidate | None:
    """The layout of a split with its fastest micro-batches that fit.

    None for a pipeline that the sequences of a step do not fill. Raises UserError where the recipe asks for it.
    """
    # A pipeline that the recipe does not ask for is planned only where its sequences fill it.
    if split.pipeline > 1:
        misfit = _pipeline_misfit(workload, recipe, split)
        if recipe.parallel.pipeline != "auto":
            if misfit is not None:
                raise misfit
        elif misfit is not None or workload.most_sequences(split) < split.pipeline:
            return None

    uneven = workload.sequences_per_step % split.data_parallel > 0
    best: LayoutCandidate | None = None
    for train, sequences in _micro_batches(workload, recipe, split):
        micro_batching = choose_micro_batching(
            streaming.settings_of(train, workload.step),
            workload.step,
            sequences_per_step=sequences,
            measure=workload.memory(split),
            seconds=partial(step_seconds, workload, split, sequences),
            any_divisor=uneven,
            together=partial(
                streaming.together,
                recipe,
                sequences=sequences,
                measure=workload.memory(split),
                seconds=partial(step_seconds, workload, split, sequences),
            ),
        )
        # The size of a pipeline's micro-batches follows from their number, which the reason names.
        if split.pipeline > 1 and recipe.train.micro_batch_size == "auto":
            count = sequences // micro_batching.micro_batch_size.value
            reason = f"{counted(count, 'micro-batches')} per step for {split.pipeline} stages"
            if recipe.parallel.pipeline_microbatches != "auto":
                reason = f"parallel.pipeline_microbatches={count}"
            size = replace(micro_batching.micro_batch_size, reason=reason)
            micro_batching = replace(micro_batching, micro_batch_size=size)
        step = micro_batching.step
        planned_split = workload.cut(split, step)
        candidate = LayoutCandidate(
            name=name,
            split=planned_split,
            sequences=sequences,
            micro_batching=micro_batching,
            parts=_computed_parts(workload, planned_split, step, sequences),
        )

        # Sizes of a pipeline grow: where one does not fit, no later one does.
        if best is None or _order(candidate) < _order(best):
            best = candidate
        if split.pipeline > 1 and not candidate.fits:
            break
    return best


def step_seconds(
    workload: MeshWorkload, split: MeshSplit, sequences: int, step: StepShape
) -> float | None:
    """Of a step in these micro-batches; None where the device's speed is unknown."""
    parts = _computed_parts(workload, workload.cut(split, step), step, sequences)
    return None if parts is None else total(parts).value


def _computed_parts(
    workload: MeshWorkload, split: MeshSplit, step: StepShape, sequences: int
) -> PartSeconds | None:
    """`layout_parts` of the micro-batches that are computed: packed completions need fewer than sequences would."""
    if workload.rollout_moments is not None:
        sequences = workload.rollout_moments.packed_sequences(step, split)
    return layout_parts(workload, split, step, sequences)


def undivided(sequences: int, readers: str) -> str:
    verb = "does" if sequences == 1 else "do"
    return f"{counted(sequences, 'sequences')} per step {verb} not divide among {readers}"


def _pipeline_misfit(workload: MeshWorkload, recipe: Recipe, split: MeshSplit) -> UserError | None:
    """Why the stages cannot share the sequences of a step; None where they can."""
    if workload.sequences_per_step % split.data_parallel:
        copies = split.data_parallel
        need = -(-workload.sequences_per_step // copies) * copies * workload.step.sequence_length
        return UserError(
            undivided(workload.sequences_per_step, f"the {copies:,} copies of a pipeline"),
            where="train.tokens_per_step",
            fix=f"set train.tokens_per_step={need}, or remove parallel.pipeline",
            code=2,
        )
    sequences = workload.most_sequences(split)
    return stages.micro_batch_misfit(recipe, split, sequences)


def _micro_batches(
    workload: MeshWorkload, recipe: Recipe, split: MeshSplit
) -> Iterator[tuple[Train, int]]:
    """Settings of `train` with a micro-batch size to try, each with the sequences that every rank computes in a step.

    A pipeline wants many small micro-batches, everything else the fastest that fits. Where the sequences of a step do
    not divide among the ranks, a few more empty ones may allow a larger micro-batch (20 = 4 x 5 instead of 19).
    """
    train = recipe.train
    sequences = workload.most_sequences(split)

    # Sequences that do not divide. A few more empty ones are tried only with an estimated speed, which shows whether
    # they pay. A size of the recipe becomes the largest one up to it that divides them.
    if workload.sequences_per_step % split.data_parallel:
        most_padded = sequences
        if workload.rate is not None:
            most_padded += int(sequences * PADDED_SHARE)
        for padded_sequences in range(sequences, most_padded + 1):
            size = train.micro_batch_size
            if size != "auto":
                sizes = range(1, min(size, padded_sequences) + 1)
                size = max(divisor for divisor in sizes if padded_sequences % divisor == 0)
            yield train.model_copy(update={"micro_batch_size": size}), padded_sequences
        return

    # A size of the recipe is meant for one device. Over several the batch stays the same, and a rank's part is smaller:
    # the largest common divisor divides it.
    if train.micro_batch_size != "auto":
        size = math.gcd(train.micro_batch_size, sequences)
        # A pipeline that the recipe does not ask for gets a micro-batch for every stage at least.
        parallel = recipe.parallel
        if parallel.pipeline == "auto" and parallel.pipeline_microbatches == "auto":
            sizes = range(1, sequences // split.pipeline + 1)
            size = max(divisor for divisor in sizes if size % divisor == 0)
        yield train.model_copy(update={"micro_batch_size": size}), sequences
        return

    # A free size: `choose_micro_batching` searches the fastest, except for pipelines, whose sizes are tried here.
    if split.pipeline == 1:
        yield train, sequences
        return
    for size in stages.micro_batch_sizes(recipe, workload.step, split, sequences):
        yield train.model_copy(update={"micro_batch_size": size}), sequences


def _order(candidate: LayoutCandidate) -> tuple[bool, float]:
    """A key to sort by: layouts that fit first, by their time (by memory where it is unknown), then by memory."""
    seconds = candidate.seconds
    return (
        not candidate.fits,
        seconds.value
        if candidate.fits and seconds is not None
        else candidate.micro_batching.memory.total,
    )


def choose_layout(candidates: list[LayoutCandidate]) -> tuple[LayoutCandidate, str]:
    """The layout to train in, and the reason. `candidates`: simplest first.

    It is the simplest one that fits and takes at most 3% more time than the fastest: 10% more where that is a pipeline
    and the simpler one is not. Where none fits it is the one with the least memory.
    """
    best = min(candidates, key=_order)
    if not best.fits:
        return best, "no layout fits; this layout needs the least memory"
    if best.seconds is None:
        return best, "the speed of this device is unknown: the layout with the least memory"

    # Several candidates may have one name (pipelines): it does not fit where none of them does.
    fitting_names = {candidate.name for candidate in candidates if candidate.fits}
    all_names = dict.fromkeys(candidate.name for candidate in candidates)
    unfit_names = [name for name in all_names if name not in fitting_names]
    unfit_note = ""
    if unfit_names:
        verb = "does" if len(unfit_names) == 1 else "do"
        unfit_note = f"; {', '.join(unfit_names)} {verb} not fit"

    for candidate in candidates:
        avoids_pipeline = candidate.split.pipeline == 1 and best.split.pipeline > 1
        most_time = NO_PIPELINE_TIME if avoids_pipeline else SIMPLER_LAYOUT_TIME
        if (
            candidate.fits
            and candidate.seconds is not None
            and candidate.seconds.value <= best.seconds.value * most_time
        ):
            reason = "the fastest that fits"
            if candidate is not best:
                reason = f"simpler, within {most_time - 1:.0%} of the fastest"
            return candidate, reason + unfit_note
    raise AssertionError("the best layout is a candidate")


def layout_parts(
    workload: MeshWorkload,
    split: MeshSplit,
    step: StepShape,
    sequences: int,
    *,
    work: Work | None = None,
) -> PartSeconds | None:
    """Seconds of a step by operation. `sequences`: those of each data-parallel rank.

    `work`: the work of these sequences (default: that of the step), where a published run counts it in another way; not
    for pipelines.
    """
    if split.pipeline > 1:
        rates = workload.stage_rates(split, step)
        if rates is None:
            return None
        parts, _ = stages.pipeline_parts(step, split, rates, sequences)
    elif workload.rate is None:
        return None
    else:
        # A device computes all of its sequences, and updates its shard of the parameters.
        work = work or work_of(step, tokens=sequences * step.sequence_length // split.context)
        parts = step_parts(work.with_shard_of_update(split.shard), workload.rate)
        if step.stream != "off" and workload.host_link is not None:
            loads = passes_over(step, sequences * step.sequence_length)
            parts = streamed_parts(parts, step, work.update, loads, workload.host_link)
    computing = total(
        {name: part for name, part in parts.items() if name not in ("optimizer", "pipeline bubble")}
    )
    if step.teacher_stream and workload.rate is not None and workload.host_link is not None:
        # The ranks with the head load its layers, before the step's own pass over them.
        tokens = sequences * step.sequence_length // split.context
        rate = workload.rate
        parts = with_teacher(
            parts,
            step,
            workload.host_link,
            lambda other_step: total(step_parts(work_of(other_step, tokens=tokens), rate)).value,
        )
    passes = max(1, sequences // step.micro_batch_size)
    communication = communication_seconds(workload.fabric, split, step, sequences)
    parts["exposed communication"] = exposed_seconds(split, passes, computing.value, communication)
    if step.teacher_place != "device" and workload.rate is not None and split.pipeline == 1:
        tokens = sequences * step.sequence_length // split.context
        parts = with_scoring(parts, step, workload.rate, tokens)
    return parts


def _fullest_stage(workload: MeshWorkload, candidate: LayoutCandidate) -> int:
    """The stage of a pipeline that needs most memory."""
    split = candidate.split
    if split.pipeline == 1:
        return 0
    step = candidate.micro_batching.step
    stage, _ = fullest_stage_bytes(
        step,
        split,
        workload.micro_batches(split, step),
        limits=workload.stage_limits(split, step),
    )
    return stage


def _stage_seconds(workload: MeshWorkload, candidate: LayoutCandidate) -> tuple[float, ...]:
    """Seconds that each stage of a pipeline computes in a step; none without a pipeline or an estimated speed."""
    split = candidate.split
    step = candidate.micro_batching.step
    rates = workload.stage_rates(split, step)
    if split.pipeline == 1 or rates is None:
        return ()
    _, seconds = stages.pipeline_parts(step, split, rates, candidate.sequences)
    return seconds


def plan_mesh(workload: MeshWorkload, recipe: Recipe) -> tuple[LayoutCandidate, ParallelPlan]:
    """The best layout over the devices, and the plan with every layout that they, the batch and the recipe allow.

    Raises UserError where the recipe asks for a pipeline that its model or its batch does not go into.
    """
    fabric = workload.fabric
    candidates = [
        candidate
        for name, split in _splits(workload, recipe)
        if (candidate := _plan_layout(workload, recipe, name, split)) is not None
    ]

    def planned_layout(candidate: LayoutCandidate) -> LayoutPlan:
        split = candidate.split
        parts = candidate.parts or {}
        micro_batch_size = candidate.micro_batching.micro_batch_size.value
        exposed = parts.get("exposed communication")
        bubble = parts.get("pipeline bubble")
        return LayoutPlan(
            name=candidate.name,
            replicate=split.replicate,
            shard=split.shard,
            pipeline=split.pipeline,
            context=split.context,
            expert=split.expert,
            micro_batch_size=micro_batch_size,
            accumulation=candidate.sequences // micro_batch_size,
            activation_checkpointing=candidate.micro_batching.checkpointing.value,
            memory=candidate.micro_batching.memory,
            step_seconds=candidate.seconds,
            communication_seconds=communication_seconds(
                fabric, split, candidate.micro_batching.step, candidate.sequences
            ),
            exposed_seconds=exposed.value if exposed else 0.0,
            bubble_seconds=bubble.value if bubble else 0.0,
            pipeline_schedule=split.schedule,
            pipeline_layers=split.layers,
            fullest_stage=_fullest_stage(workload, candidate),
            stage_seconds=_stage_seconds(workload, candidate),
            stage_devices=tuple(
                device.name
                for device in workload.stage_devices(split, candidate.micro_batching.step)
                if device.name and split.pipeline > 1
            ),
            stage_limits=workload.stage_limits(split, candidate.micro_batching.step),
        )

    best, reason = choose_layout(candidates)
    node_link = fabric.node_link
    network = fabric.network
    return best, ParallelPlan(
        gpus=fabric.per_node,
        nodes=fabric.nodes,
        link=f"{node_link.name}: {node_link.gbs:g} GB/s ({node_link.reason})",
        network=f"{network.name}: {network.gbs:g} GB/s ({network.reason})" if network else "",
        assumed_network=recipe.parallel.network,
        bus_gbs=round(bus_gbs(fabric), 1),
        layouts=tuple(planned_layout(candidate) for candidate in candidates),
        chosen=candidates.index(best),
        reason=reason,
    )

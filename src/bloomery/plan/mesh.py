"""Several devices: replicate, shard, shard inside nodes, or pipeline: memory and time of each, and the choice."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from bloomery.core.errors import UserError
from bloomery.hardware.profile import Profile
from bloomery.model.limits import refuse_split_int8_blocks, split_int8_block
from bloomery.plan import stages
from bloomery.plan.batch import MicroBatching, choose_micro_batching
from bloomery.plan.estimate.mesh import MeshSplit, mesh_memory
from bloomery.plan.estimate.sharding import gathered_parameters
from bloomery.plan.estimate.speed import Rate, Work, step_parts, total, work_of
from bloomery.plan.estimate.stages import fullest_stage_bytes, stage_models
from bloomery.plan.estimate.step import StepShape
from bloomery.plan.types import Estimate, LayoutPlan, MemoryEstimate, ParallelPlan
from bloomery.plan.unsupported import AXES, refusals, refuse_unsupported
from bloomery.recipe.schema import Parallel, Recipe, Train

HIDDEN = (0.50, 0.85, 1.0)  # of what could run behind computing: low, typical, high
STEP_SECONDS = (5e-6, 20e-6)  # of one hop of a ring: inside a node, between nodes
SOCKET_GBS = 5.0  # of a node whose collectives go through TCP sockets


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link between devices of a node, or between nodes. `gbs`: GB/s per direction that a collective reaches."""

    name: str
    gbs: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """A node's devices and their links. `between`: of a whole node; None for one node."""

    per_node: int
    nodes: int
    inside: Link
    between: Link | None

    @property
    def devices(self) -> int:
        return self.per_node * self.nodes


# The rate of one device in a ring inside a node: nominal rate per direction, times the share of collective benchmarks.
_INSIDE: tuple[tuple[str, str, float, str], ...] = (
    (r"^CPU$", "shared memory", 2, "assumed: gloo between processes of one machine"),
    (r"NVLink5", "NVLink 5", 680, "75% of 900 GB/s per direction"),
    (r"NVLink4", "NVLink 4", 340, "75% of 450 GB/s per direction"),
    (r"NVLink3 600", "NVLink 3", 230, "77% of 300 GB/s per direction"),
    (r"NVLink2 300", "NVLink 2", 115, "77% of 150 GB/s per direction"),
    (r"7x xGMI", "xGMI, all to all", 310, "69% of seven links of 64 GB/s"),
    (
        r"GCD-GCD",
        "Infinity Fabric",
        80,
        "rings over links of 50 GB/s; 200 between the two dies of a GPU",
    ),
    (
        r"xGMI bridge|3 IF links|IF bridge",
        "PCIe 4",
        20,
        "a bridge joins at most four GPUs; not counted",
    ),
    (r"NVLink3 bridge", "PCIe 4", 20, "a bridge joins pairs; not counted"),
    (r"xGMI", "xGMI", 150, "assumed from MI300X with fewer links"),
    (r"no P2P", "PCIe through the host", 10, "no peer-to-peer copies between GeForce GPUs"),
    (r"PCIe[45]x8", "PCIe, 8 lanes", 10, "60% of 16 GB/s, as with PCIe 4"),
    (r"PCIe5", "PCIe 5", 40, "60% of 64 GB/s, with 16 lanes each"),
    (r"PCIe4", "PCIe 4", 20, "60% of 32 GB/s, with 16 lanes each"),
    (r"PCIe3", "PCIe 3", 10, "60% of 16 GB/s, with 16 lanes each"),
)
# The usual network of a node with such devices.
_BETWEEN: tuple[tuple[str, str, float, str], ...] = (
    (
        r"GCD-GCD",
        "Slingshot, 4 x 200 Gb/s per node",
        70,
        "70% of 100 GB/s; assumes the libfabric plugin of RCCL",
    ),
    (
        r"NVLink4|NVLink5|7x xGMI",
        "8 x 400 Gb/s per node",
        320,
        "assumed: 80% of one 400 Gb/s port per GPU",
    ),
    (
        r"NVLink3 600|xGMI;",
        "8 x 200 Gb/s per node",
        160,
        "assumed: 80% of one 200 Gb/s port per GPU",
    ),
    (r".", "10 Gb/s Ethernet", 1.0, "assumed: an ordinary network"),
)


def fabric_of(link: str, *, per_node: int, nodes: int, sockets: bool = False) -> Fabric:
    """The links of devices with this entry of the table, and the network that such nodes usually have."""
    between = None
    if nodes > 1:
        between = _first(_BETWEEN, link)
        if sockets:
            between = Link(
                name="TCP sockets", gbs=SOCKET_GBS, reason="assumed: no network plugin was loaded"
            )
    return Fabric(per_node=per_node, nodes=nodes, inside=_first(_INSIDE, link), between=between)


def _first(table: tuple[tuple[str, str, float, str], ...], link: str) -> Link:
    for pattern, name, gbs, reason in table:
        if re.search(pattern, link):
            return Link(name=name, gbs=gbs, reason=reason)
    return Link(name="PCIe", gbs=10.0, reason="assumed: the table names no link")


def gather_seconds(
    amount: float, fabric: Fabric, *, nodes: int | None = None, calls: int = 1
) -> float:
    """An all-gather, or a reduce-scatter, of `amount` bytes in `calls` pieces over all devices of so many nodes."""
    nodes = fabric.nodes if nodes is None else nodes
    ranks = fabric.per_node * nodes
    within_nodes = (
        amount * (ranks - 1) / ranks / (fabric.inside.gbs * 1e9) if fabric.per_node > 1 else 0.0
    )
    between_nodes = _outside(amount, fabric, nodes)
    hops = (fabric.per_node - 1) * STEP_SECONDS[0] + (nodes - 1) * STEP_SECONDS[1]
    return max(within_nodes, between_nodes) + calls * hops


def _outside(amount: float, fabric: Fabric, nodes: int) -> float:
    if nodes == 1 or fabric.between is None:
        return 0.0
    return amount * (nodes - 1) / nodes / (fabric.between.gbs * 1e9)


def reduce_seconds(amount: float, fabric: Fabric) -> float:
    """An all-reduce: a reduce-scatter and an all-gather."""
    return 2 * gather_seconds(amount, fabric)


def across_seconds(amount: float, fabric: Fabric) -> float:
    """An all-reduce between nodes alone, of `amount` bytes per node, sharded over its devices."""
    return 2 * (_outside(amount, fabric, fabric.nodes) + (fabric.nodes - 1) * STEP_SECONDS[1])


def exposed(seconds: float, window: float, index: int) -> float:
    """Seconds of a communication that compute does not hide; it can overlap with `window` seconds of compute."""
    hidden = HIDDEN[index]
    return max((1 - hidden) * seconds, seconds - hidden * window)


NEARLY = 1.03  # a simpler layout is worth so much time
NEARLY_A_PIPELINE = (
    1.10  # one without stages, whose waiting is estimated less exactly than computing
)
# more empty sequences per device, at most, where larger micro-batches then divide them
PADDED_SHARE = 1 / 8
MOST_STAGES = 16  # of pipelines that are chosen
Seconds = dict[str, Estimate]


@dataclass(frozen=True, kw_only=True)
class LayoutCandidate:
    """One planned layout: `micro_batching` of one device, `parts`: seconds of a step.

    `sequences`: those that each data-parallel rank computes in a step, with empty ones where they do not divide.
    """

    name: str
    split: MeshSplit
    sequences: int
    micro_batching: MicroBatching
    parts: Seconds | None  # None: the device's speed is unknown

    @property
    def seconds(self) -> Estimate | None:
        return None if self.parts is None else total(self.parts)

    @property
    def fits(self) -> bool:
        return self.micro_batching.memory.fits


@dataclass(frozen=True, kw_only=True)
class MeshWorkload:
    """The common input of all layouts. `limit`: bytes of one device that a plan may use."""

    step: StepShape
    sequences_per_step: int
    fabric: Fabric
    rate: Rate | None
    vendor: str
    limit: float

    @classmethod
    def of(
        cls,
        profile: Profile,
        step: StepShape,
        rate: Rate | None,
        *,
        sequences_per_step: int,
        gpus: int,
        nodes: int,
        limit: float,
    ) -> "MeshWorkload":
        """Over `nodes` nodes of `gpus` devices, as the table has them; ranks of a CPU share its cores and memory."""
        on_cpu = profile.accelerator is None
        link = "CPU" if on_cpu else "" if profile.gpu is None else profile.gpu.link
        return cls(
            step=step,
            sequences_per_step=sequences_per_step,
            fabric=fabric_of(link, per_node=gpus, nodes=nodes),
            rate=rate.shared(gpus) if rate is not None and on_cpu else rate,
            vendor="cpu" if on_cpu else profile.arch.vendor if profile.arch else "amd",
            limit=limit / gpus if on_cpu else limit,
        )

    def memory(self, split: MeshSplit) -> Callable[[StepShape], MemoryEstimate]:
        return lambda step: mesh_memory(
            step,
            self.cut(split, step),
            vendor=self.vendor,
            limit=self.limit,
            micro_batches=self.micro_batches(split, step),
        )

    def cut(self, split: MeshSplit, step: StepShape) -> MeshSplit:
        """The split with the layers of each group of a pipeline."""
        if split.pipeline == 1 or split.layers:
            return split
        return stages.cut(
            step,
            split,
            self.rate,
            vendor=self.vendor,
            limit=self.limit,
            micro_batches=self.micro_batches(split, step),
        )

    def micro_batches(self, split: MeshSplit, step: StepShape) -> int:
        """Of a step, those of the rank that gets most sequences."""
        return -(-self.most_sequences(split) // step.micro_batch_size)

    def most_sequences(self, split: MeshSplit) -> int:
        """Of a step, those of the rank that gets most of them: the others wait for it."""
        return -(-self.sequences_per_step // split.data_parallel)


def sizes_of(parallel: Parallel) -> tuple[int | Literal["auto"], ...]:
    """The recipe's sizes of replicate, shard and pipeline; a pipeline is not chosen beside a size that is set."""
    pipeline = parallel.pipeline
    if pipeline == "auto" and (parallel.replicate, parallel.shard) != ("auto", "auto"):
        pipeline = 1
    return parallel.replicate, parallel.shard, pipeline


def devices_of(parallel: Parallel, *, gpus: int, nodes: int) -> tuple[int, int]:
    """Devices per node, and nodes: of the command line, else one node with as many as the recipe splits over.

    Raises UserError where the two contradict each other.
    """
    sizes = sizes_of(parallel)
    devices = math.prod(size for size in sizes if size != "auto")
    if gpus * nodes == 1:
        return devices, 1
    if gpus * nodes % devices or ("auto" not in sizes and gpus * nodes != devices):
        problem = (
            f"the recipe splits over {devices:,} devices, the command line names {gpus * nodes:,}"
        )
        raise UserError(
            problem,
            where="parallel",
            fix="leave out --gpus and --nodes, or change the recipe",
            code=2,
        )
    return gpus, nodes


def _splits(workload: MeshWorkload, recipe: Recipe) -> Iterator[tuple[str, MeshSplit]]:
    """The split of the recipe, else every split that the devices and the recipe's features allow.

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
            schedule=schedule if num_stages > 1 else "1f1b",
            chunks=chunks if num_stages > 1 else 1,
        )
        refuse_unsupported(
            recipe,
            model.config,
            replicate=split.replicate,
            shard=split.shard,
            pipeline=split.pipeline,
        )
        stages.refuse_few_layers(model.config.num_layers, split)
        if split.shard > 1 and int8_states:
            refuse_split_int8_blocks(model.trainable, split.shard)
        axes = "shard" if split.replicate == 1 else "shard and replicate"
        yield "pipeline" if num_stages > 1 else "replicate" if split.shard == 1 else axes, split
        return

    # It names none: every split over all devices, without those that a feature of the recipe refuses.
    splits = [
        ("replicate", MeshSplit(replicate=fabric.devices)),
        ("shard", MeshSplit(shard=fabric.devices)),
    ]
    if fabric.nodes > 1 and fabric.per_node > 1:
        splits.append(("shard in nodes", MeshSplit(replicate=fabric.nodes, shard=fabric.per_node)))
    refused = {axis for axis in AXES if refusals(recipe, axis, model.config)}
    if refused == set(AXES):
        refuse_unsupported(recipe, model.config, replicate=fabric.devices)
    splits += [
        ("pipeline", replace(split, schedule=schedule, chunks=chunks))
        for split in _pipelines(workload, chunks)
    ]
    allowed = [
        (name, split)
        for name, split in splits
        if not ("replicate" in refused and split.replicate > 1)
        and not ("shard" in refused and split.shard > 1)
        and not ("pipeline" in refused and split.pipeline > 1)
        and not (int8_states and split.shard > 1 and split_int8_block(model.trainable, split.shard))
    ]
    if not allowed:  # of int8 states, where only shards would train
        refuse_split_int8_blocks(model.trainable, fabric.devices)
    yield from allowed


def _pipelines(workload: MeshWorkload, chunks: int) -> Iterator[MeshSplit]:
    """Pipelines that may be chosen: copies of each, and the same with shards inside stages, where a node holds them.

    On CPUs none: all ranks share one memory and its cores. Ranks of a stage follow each other, so that a stage is in
    one node where stages are as many as nodes, or more.
    """
    fabric = workload.fabric
    if workload.vendor == "cpu":
        return
    most_stages = min(
        max(fabric.per_node, fabric.nodes), MOST_STAGES, workload.step.config.num_layers // chunks
    )
    for num_stages in range(2, most_stages + 1):
        if fabric.devices % num_stages:
            continue
        ranks = fabric.devices // num_stages
        yield MeshSplit(replicate=ranks, pipeline=num_stages)
        shard = min(ranks, fabric.per_node)
        if shard > 1 and ranks % shard == 0:
            yield MeshSplit(replicate=ranks // shard, shard=shard, pipeline=num_stages)


def _plan_layout(
    workload: MeshWorkload, recipe: Recipe, name: str, split: MeshSplit
) -> LayoutCandidate | None:
    """With the fastest micro-batches that fit.

    None for a pipeline that the plan has no micro-batches or no cut for. Raises UserError where the recipe asks for it.
    """
    if split.pipeline > 1:
        is_chosen = recipe.parallel.pipeline == "auto"
        misfit = _pipeline_misfit(workload, recipe, split)
        if misfit is not None and not is_chosen:
            raise misfit
        if misfit is not None:
            return None
        # A pipeline that nobody asked for is one that its sequences fill.
        if is_chosen and workload.most_sequences(split) < split.pipeline:
            return None
    uneven = workload.sequences_per_step % split.data_parallel > 0
    best: LayoutCandidate | None = None
    for train, sequences in _micro_batches(workload, recipe, split):
        micro_batching = choose_micro_batching(
            train,
            workload.step,
            sequences_per_step=sequences,
            measure=workload.memory(split),
            any_divisor=uneven,
        )
        if split.pipeline > 1 and recipe.train.micro_batch_size == "auto":
            count = sequences // micro_batching.micro_batch_size.value
            reason = f"{count:,} micro-batches per step fill {split.pipeline} stages"
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
            parts=layout_parts(workload, planned_split, step, sequences),
        )
        if best is None or _order(candidate) < _order(best):
            best = candidate
        if split.pipeline > 1 and not candidate.fits:  # nor will a larger micro-batch
            break
    return best


def _pipeline_misfit(workload: MeshWorkload, recipe: Recipe, split: MeshSplit) -> UserError | None:
    """Why the step or the model of a recipe does not go into the stages."""
    if workload.sequences_per_step % split.data_parallel:
        copies = split.data_parallel
        need = -(-workload.sequences_per_step // copies) * copies * workload.step.sequence_length
        return UserError(
            f"{workload.sequences_per_step:,} sequences per step do not divide among"
            f" the {copies:,} copies of a pipeline",
            where="train.tokens_per_step",
            fix=f"set train.tokens_per_step={need}, or remove parallel.pipeline",
            code=2,
        )
    sequences = workload.most_sequences(split)
    return stages.micro_batch_misfit(recipe, split, sequences)


def _micro_batches(
    workload: MeshWorkload, recipe: Recipe, split: MeshSplit
) -> Iterator[tuple[Train, int]]:
    """Micro-batch sizes to try, each with the sequences that every rank computes in a step.

    A pipeline wants many small micro-batches, everything else the largest that fits. Where the sequences of a step do
    not divide among the ranks, a few more empty ones may allow a larger micro-batch (20 = 4 x 5 instead of 19).
    """
    train = recipe.train
    sequences = workload.most_sequences(split)
    if workload.sequences_per_step % split.data_parallel:
        # Without an estimated speed nothing says that more padding is worth it.
        most_sequences = (
            sequences + int(sequences * PADDED_SHARE) if workload.rate is not None else sequences
        )
        for padded in range(sequences, most_sequences + 1):
            size = train.micro_batch_size
            if size != "auto":
                size = max(
                    number for number in range(1, min(size, padded) + 1) if padded % number == 0
                )
            yield train.model_copy(update={"micro_batch_size": size}), padded
        return
    if train.micro_batch_size != "auto":  # the batch stays what one device would train on
        yield (
            train.model_copy(
                update={"micro_batch_size": math.gcd(train.micro_batch_size, sequences)}
            ),
            sequences,
        )
        return
    if split.pipeline == 1:
        yield train, sequences
        return
    for size in stages.micro_batch_sizes(recipe, workload.step, split, sequences):
        yield train.model_copy(update={"micro_batch_size": size}), sequences


def _order(candidate: LayoutCandidate) -> tuple[bool, float]:
    seconds = candidate.seconds
    return (
        not candidate.fits,
        seconds.value
        if candidate.fits and seconds is not None
        else candidate.micro_batching.memory.total,
    )


def choose(candidates: list[LayoutCandidate]) -> tuple[LayoutCandidate, str]:
    """The fastest layout that fits, a simpler one where it costs less than 3%; the smallest where none fits.

    Every other layout is simpler than a pipeline, and is chosen where it costs less than 10%.
    """
    best = min(candidates, key=_order)
    if not best.fits:
        return best, "no layout fits; this layout needs the least memory"
    if best.seconds is None:
        return best, "the speed of this device is unknown: the layout with the least memory"
    for candidate in candidates:  # simplest first
        is_simpler = candidate.split.pipeline == 1 and best.split.pipeline > 1
        nearly = NEARLY_A_PIPELINE if is_simpler else NEARLY
        if (
            candidate.fits
            and candidate.seconds is not None
            and candidate.seconds.value <= best.seconds.value * nearly
        ):
            fitting = {
                candidate_layout.name for candidate_layout in candidates if candidate_layout.fits
            }
            unfit = [
                candidate_layout.name
                for candidate_layout in candidates
                if candidate_layout.name not in fitting
            ]
            reason = (
                "the fastest that fits"
                if candidate is best
                else f"simpler, within {nearly - 1:.0%} of the fastest"
            )
            names = list(dict.fromkeys(unfit))
            do_not_fit = (
                f"; {', '.join(names)} {'does' if len(names) == 1 else 'do'} not fit"
                if names
                else ""
            )
            return candidate, reason + do_not_fit
    raise AssertionError("the best layout is a candidate")


def layout_parts(
    workload: MeshWorkload,
    split: MeshSplit,
    step: StepShape,
    sequences: int,
    *,
    work: Work | None = None,
) -> Seconds | None:
    """Seconds of a step over so many sequences of each data-parallel rank, by operation.

    `work`: of all these sequences, where a published run counts it in another way; not of pipelines.
    """
    if workload.rate is None:
        return None
    if split.pipeline > 1:
        parts, _ = stages.pipeline_parts(step, split, workload.rate, sequences)
    else:
        # The work of one device: all of its sequences, and of the optimizer its shard.
        work = work or work_of(step, tokens=sequences * step.sequence_length)
        parts = step_parts(replace(work, update=work.update / split.shard), workload.rate)
    computing = total(
        {name: part for name, part in parts.items() if name not in ("optimizer", "pipeline bubble")}
    )
    passes = max(1, sequences // step.micro_batch_size)
    communication = communication_seconds(workload, split, step, sequences)
    parts["exposed communication"] = _exposed(split, passes, computing.value, communication)
    return parts


def communication_seconds(
    workload: MeshWorkload, split: MeshSplit, step: StepShape, sequences: int
) -> dict[str, float]:
    """Of a step over so many sequences of each data-parallel rank, by axis, whether compute hides it or not.

    Of a pipeline, for the stage that has the most to send.
    """
    fabric = workload.fabric
    seconds = dict[str, float]()
    passes = max(1, sequences // step.micro_batch_size)
    stage_step = step
    if split.pipeline > 1:
        seconds["pipeline"] = passes * transfer_seconds(fabric, split, step)
        fabric = _inside_stages(fabric, split)
        heaviest = max(
            stage_models(step.model, split),
            key=lambda model: model.whole.trainable_bytes(step.precision),
        )
        stage_step = replace(step, model=heaviest.whole)
    gradients = stage_step.model.trainable_bytes(step.precision)
    if split.shard > 1:
        shard_fabric = replace(fabric, per_node=min(fabric.per_node, split.shard))
        nodes = fabric.nodes if split.shard > fabric.per_node else 1
        # Layers are gathered for forward and for backward, the last one and the root once.
        layer_values, root_values = gathered_parameters(stage_step)
        gathered_values = 2 * sum(layer_values) - layer_values[-1]
        root_bytes = step.element_bytes if step.mode.frozen else step.weight_bytes
        gathered_bytes = gathered_values * step.element_bytes + root_values * root_bytes
        num_layers = len(layer_values)
        gathering = gather_seconds(gathered_bytes, shard_fabric, nodes=nodes, calls=2 * num_layers)
        # Gradients are scattered in the weights' precision.
        scattering = gather_seconds(gradients, shard_fabric, nodes=nodes, calls=num_layers + 1)
        seconds["shard"] = passes * (gathering + scattering)
        if split.replicate > 1 and fabric.nodes > 1:
            seconds["replicate"] = across_seconds(gradients, fabric)
        elif split.replicate > 1:
            seconds["replicate"] = reduce_seconds(
                gradients / split.shard, replace(fabric, per_node=split.replicate)
            )
    elif split.replicate > 1:
        seconds["replicate"] = reduce_seconds(gradients, fabric)
    return seconds


def transfer_seconds(fabric: Fabric, split: MeshSplit, step: StepShape) -> float:
    """What a stage receives and sends of one micro-batch: the residual stream at each edge of its groups of layers, and
    its gradient. Stages wait for both.
    """
    stream_bytes = step.tokens_per_micro_batch * step.config.hidden_size * step.residual_bytes
    # Each group has an edge before and after it, but the first and the last group of the model, which are on the first
    # and the last stage.
    edges = 2 * split.chunks - (1 if split.pipeline == 2 else 0)
    rate = fabric.inside.gbs * 1e9
    hop_seconds = STEP_SECONDS[0]
    if fabric.between is not None:
        # The ranks of a node may send at once, each to its own in the next node.
        rate = min(rate, fabric.between.gbs * 1e9 / min(fabric.per_node, split.data_parallel))
        hop_seconds = STEP_SECONDS[1]
    return 2 * edges * (stream_bytes / rate + hop_seconds)


def _inside_stages(fabric: Fabric, split: MeshSplit) -> Fabric:
    """The devices of one stage, which follow each other."""
    per_node = min(fabric.per_node, split.data_parallel)
    nodes = split.data_parallel // per_node
    between = fabric.between if nodes > 1 else None
    return Fabric(per_node=per_node, nodes=nodes, inside=fabric.inside, between=between)


def _exposed(
    split: MeshSplit, passes: int, computing: float, seconds: Mapping[str, float]
) -> Estimate:
    """Communication that compute does not hide; transfers between pipeline stages never overlap."""
    bare = seconds.get("pipeline", 0.0)
    hidden = sum(seconds.values()) - bare
    window = computing
    if split.pipeline > 1:
        window = computing / passes
    elif split.shard == 1:
        window = computing * 2 / 3 / passes  # behind the last backward
    low, typical, high = (exposed(hidden, window, index) + bare for index in (2, 1, 0))
    return Estimate(value=typical, low=low, high=high, origin="table")


def _fullest_stage(workload: MeshWorkload, candidate: LayoutCandidate) -> int:
    """The stage of a pipeline that needs most memory."""
    split = candidate.split
    if split.pipeline == 1:
        return 0
    step = candidate.micro_batching.step
    stage, _ = fullest_stage_bytes(step, split, workload.micro_batches(split, step))
    return stage


def _stage_seconds(workload: MeshWorkload, candidate: LayoutCandidate) -> tuple[float, ...]:
    """In which each stage of a pipeline computes in a step."""
    split = candidate.split
    if split.pipeline == 1 or workload.rate is None:
        return ()
    step = candidate.micro_batching.step
    _, seconds = stages.pipeline_parts(step, split, workload.rate, candidate.sequences)
    return seconds


def plan_mesh(workload: MeshWorkload, recipe: Recipe) -> tuple[LayoutCandidate, ParallelPlan]:
    """The best layout over the devices, and every one that they, the batch and the recipe allow.

    Raises UserError where the recipe asks for a pipeline that its model or its batch does not go into.
    """
    fabric = workload.fabric
    candidates = [
        candidate
        for name, split in _splits(workload, recipe)
        if (candidate := _plan_layout(workload, recipe, name, split)) is not None
    ]

    def entry(candidate: LayoutCandidate) -> LayoutPlan:
        split = candidate.split
        parts = candidate.parts or {}
        micro_batch_size = candidate.micro_batching.micro_batch_size.value
        waits = parts.get("exposed communication")
        bubble = parts.get("pipeline bubble")
        return LayoutPlan(
            name=candidate.name,
            replicate=split.replicate,
            shard=split.shard,
            pipeline=split.pipeline,
            micro_batch_size=micro_batch_size,
            accumulation=candidate.sequences // micro_batch_size,
            activation_checkpointing=candidate.micro_batching.checkpointing.value,
            memory=candidate.micro_batching.memory,
            step_seconds=candidate.seconds,
            communication_seconds=communication_seconds(
                workload, split, candidate.micro_batching.step, candidate.sequences
            ),
            exposed_seconds=waits.value if waits else 0.0,
            bubble_seconds=bubble.value if bubble else 0.0,
            pipeline_schedule=split.schedule,
            pipeline_layers=split.layers,
            fullest_stage=_fullest_stage(workload, candidate),
            stage_seconds=_stage_seconds(workload, candidate),
        )

    best, reason = choose(candidates)
    node_link = fabric.inside
    network = fabric.between
    return best, ParallelPlan(
        gpus=fabric.per_node,
        nodes=fabric.nodes,
        link=f"{node_link.name}: {node_link.gbs:g} GB/s ({node_link.reason})",
        network=f"{network.name}: {network.gbs:g} GB/s ({network.reason})" if network else "",
        layouts=tuple(map(entry, candidates)),
        chosen=candidates.index(best),
        reason=reason,
    )

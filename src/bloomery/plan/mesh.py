"""Several devices: replicate, shard, shard inside nodes, or pipeline: memory and time of each, and the choice.

Pipelines are planned for comparison and never chosen, unless the recipe asks for one: this version trains none.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from bloomery.core.errors import UserError
from bloomery.hardware.profile import Profile
from bloomery.model.limits import refuse_split_int8_blocks, split_int8_block
from bloomery.plan.batch import MicroBatching, choose_micro_batching
from bloomery.plan.estimate import speed
from bloomery.plan.estimate.mesh import MeshSplit, mesh_memory
from bloomery.plan.estimate.sharding import gathered_parameters
from bloomery.plan.estimate.speed import Rate, step_parts, total, work_of
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
# more empty sequences per device, at most, where larger micro-batches then divide them
PADDED_SHARE = 1 / 8
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
        sequences = self.most_sequences(split)
        return lambda step: mesh_memory(
            step,
            split,
            vendor=self.vendor,
            limit=self.limit,
            micro_batches=-(-sequences // step.micro_batch_size),
        )

    def most_sequences(self, split: MeshSplit) -> int:
        """Of a step, those of the rank that gets most of them: the others wait for it."""
        return -(-self.sequences_per_step // split.data_parallel)


def devices_of(parallel: Parallel, *, gpus: int, nodes: int) -> tuple[int, int]:
    """Devices per node, and nodes: of the command line, else one node with as many as the recipe splits over.

    Raises UserError where the two contradict each other.
    """
    sizes = [parallel.replicate, parallel.shard, parallel.pipeline]
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

    # The recipe names a split: what it leaves to "auto" takes the devices that remain.
    if (parallel.replicate, parallel.shard, parallel.pipeline) != ("auto", "auto", 1):
        copies = parallel.replicate
        shards = parallel.shard
        stages = parallel.pipeline
        remaining = fabric.devices // stages
        if copies == "auto":
            copies = remaining // (1 if shards == "auto" else shards)
        split = MeshSplit(
            replicate=copies,
            shard=remaining // copies if shards == "auto" else shards,
            pipeline=stages,
        )
        refuse_unsupported(recipe, model.config, replicate=split.replicate, shard=split.shard)
        if split.shard > 1 and int8_states:
            refuse_split_int8_blocks(model.trainable, split.shard)
        axes = "shard" if split.replicate == 1 else "shard and replicate"
        yield "pipeline" if stages > 1 else "replicate" if split.shard == 1 else axes, split
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
        refuse_unsupported(recipe, model.config, replicate=fabric.devices, shard=1)
    allowed = [
        (name, split)
        for name, split in splits
        if not ("replicate" in refused and split.replicate > 1)
        and not ("shard" in refused and split.shard > 1)
        and not (int8_states and split.shard > 1 and split_int8_block(model.trainable, split.shard))
    ]
    if not allowed:  # of int8 states, where only shards would train
        refuse_split_int8_blocks(model.trainable, fabric.devices)
    yield from allowed
    if workload.vendor == "cpu":
        return
    stages = 2
    while stages <= min(fabric.per_node, workload.step.config.num_layers):
        if fabric.devices % stages == 0:
            yield "pipeline", MeshSplit(replicate=fabric.devices // stages, pipeline=stages)
        stages *= 2


def _plan_layout(
    workload: MeshWorkload, settings: Train, name: str, split: MeshSplit
) -> LayoutCandidate | None:
    """With the fastest micro-batches that fit. None for a pipeline whose copies do not divide the step's sequences."""
    uneven = workload.sequences_per_step % split.data_parallel > 0
    if uneven and split.pipeline > 1:
        return None
    best: LayoutCandidate | None = None
    for train, sequences in _micro_batches(workload, settings, split):
        micro_batching = choose_micro_batching(
            train,
            workload.step,
            sequences_per_step=sequences,
            measure=workload.memory(split),
            any_divisor=uneven,
        )
        candidate = LayoutCandidate(
            name=name,
            split=split,
            sequences=sequences,
            micro_batching=micro_batching,
            parts=layout_parts(workload, split, micro_batching.step, sequences),
        )
        if best is None or _order(candidate) < _order(best):
            best = candidate
        if split.pipeline > 1 and not candidate.fits:  # nor will a larger micro-batch
            break
    return best


def _micro_batches(
    workload: MeshWorkload, train: Train, split: MeshSplit
) -> Iterator[tuple[Train, int]]:
    """Micro-batch sizes to try, each with the sequences that every rank computes in a step.

    A pipeline wants many small micro-batches, everything else the largest that fits. Where the sequences of a step do
    not divide among the ranks, a few more empty ones may allow a larger micro-batch (20 = 4 x 5 instead of 19).
    """
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
    size = 1
    while size <= sequences and sequences % size == 0:
        yield train.model_copy(update={"micro_batch_size": size}), sequences
        size *= 2


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

    Only of layouts that this version trains, unless the recipe asks for a pipeline.
    """
    pipelines = [candidate for candidate in candidates if candidate.split.pipeline > 1]
    candidates = [
        candidate for candidate in candidates if candidate.split.pipeline == 1
    ] or candidates
    best = min(candidates, key=_order)
    if not best.fits:
        reason = "no layout fits; this layout needs the least memory"
        if best.split.pipeline == 1 and any(pipeline.fits for pipeline in pipelines):
            stages = min(pipeline.split.pipeline for pipeline in pipelines if pipeline.fits)
            reason += (
                f" (a pipeline of {stages} stages would fit, which this version does not train)"
            )
        return best, reason
    if best.seconds is None:
        return best, "the speed of this device is unknown: the layout with the least memory"
    for candidate in candidates:  # simplest first
        if (
            candidate.fits
            and candidate.seconds is not None
            and candidate.seconds.value <= best.seconds.value * NEARLY
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
                else f"simpler, within {NEARLY - 1:.0%} of the fastest"
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
    work: speed.Work | None = None,
) -> Seconds | None:
    """Seconds of a step over so many sequences of each data-parallel rank, by operation."""
    if workload.rate is None:
        return None
    tokens = sequences * step.sequence_length
    total_work = work or work_of(step, tokens=tokens)
    stages = split.pipeline
    # The work of one device: its stage's layers, and of the optimizer its shard.
    share = replace(
        total_work,
        products=total_work.products / stages,
        attention=total_work.attention / stages,
        between=total_work.between / stages,
        launches=total_work.launches / stages,
        update=total_work.update / (stages * split.shard),
    )
    parts = step_parts(share, workload.rate)
    passes = max(1, sequences // step.micro_batch_size)
    computing = total({name: part for name, part in parts.items() if name != "optimizer"})
    communication = communication_seconds(workload, split, step, sequences)
    parts["exposed communication"] = _exposed(split, passes, computing.value, communication)
    if split.pipeline > 1:
        parts["pipeline bubble"] = computing.scaled((split.pipeline - 1) / passes)
    return parts


def communication_seconds(
    workload: MeshWorkload, split: MeshSplit, step: StepShape, sequences: int
) -> dict[str, float]:
    """Of a step over so many sequences of each data-parallel rank, by axis, whether compute hides it or not."""
    fabric = workload.fabric
    config = step.config
    seconds = dict[str, float]()
    gradients = step.model.trainable_bytes(step.precision)
    passes = max(1, sequences // step.micro_batch_size)
    if split.shard > 1:
        shard_fabric = replace(fabric, per_node=min(fabric.per_node, split.shard))
        nodes = fabric.nodes if split.shard > fabric.per_node else 1
        # Layers are gathered for forward and for backward, the last one and the root once.
        layer_values, root_values = gathered_parameters(step)
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
    elif split.pipeline > 1:
        boundary = 4 * step.tokens_per_micro_batch * config.hidden_size * step.element_bytes
        seconds["pipeline"] = passes * boundary / (fabric.inside.gbs * 1e9)
        copies = replace(fabric, per_node=max(1, fabric.per_node // split.pipeline))
        if split.replicate > 1:
            seconds["replicate"] = reduce_seconds(gradients / split.pipeline, copies)
    elif split.replicate > 1:
        seconds["replicate"] = reduce_seconds(gradients, fabric)
    return seconds


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


def plan_mesh(workload: MeshWorkload, recipe: Recipe) -> tuple[LayoutCandidate, ParallelPlan]:
    """The best layout over the devices, and every one that they, the batch and the recipe allow.

    Raises UserError where the recipe asks for a pipeline whose copies do not divide the sequences of a step.
    """
    fabric = workload.fabric
    sequences_per_step = workload.sequences_per_step
    candidates = [
        candidate
        for name, split in _splits(workload, recipe)
        if (candidate := _plan_layout(workload, recipe.train, name, split)) is not None
    ]
    if not candidates:
        copies = fabric.devices // recipe.parallel.pipeline
        need = -(-sequences_per_step // copies) * copies * workload.step.sequence_length
        raise UserError(
            f"{sequences_per_step:,} sequences per step do not divide among the {copies:,} copies of a pipeline",
            where="train.tokens_per_step",
            fix=f"set train.tokens_per_step={need}, or remove parallel.pipeline",
            code=2,
        )

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

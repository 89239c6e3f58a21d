"""Links between devices and between nodes, and the seconds that a step in a layout communicates over them."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from bloomery.facts.counting import is_of_experts, layers
from bloomery.hardware.link_rates import MeasuredLinks
from bloomery.plan.estimate.activations import recomputed_shares
from bloomery.plan.estimate.mesh import MeshSplit
from bloomery.plan.estimate.sharding import gathered_bytes
from bloomery.plan.estimate.stages import stage_models
from bloomery.plan.estimate.step import StepShape
from bloomery.plan.types import Estimate
from bloomery.recipe.schema import AssumedNetwork

# Share of the communication that compute could hide which it does hide: least, usually, at most.
HIDDEN_SHARES = (0.50, 0.85, 1.0)
NODE_HOP_SECONDS = 5e-6  # of one hop of a ring inside a node
NETWORK_HOP_SECONDS = 20e-6  # of one hop between nodes
SOCKET_GBS = 5.0  # of a node whose collectives go through TCP sockets


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link between devices of a node, or between nodes. `gbs`: GB/s per direction that a collective reaches."""

    name: str
    gbs: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """Nodes of `per_node` devices each.

    `node_link`: of each device inside a node; `network`: of a whole node, None for one node. `pair_gbs`: measured
    between two devices of a node that send to each other alone; None: not measured, as in a ring. `stage_gbs`: measured
    between the stages of a pipeline, over any link.
    """

    per_node: int
    nodes: int
    node_link: Link
    network: Link | None
    pair_gbs: float | None = None
    stage_gbs: float | None = None

    @property
    def devices(self) -> int:
        return self.per_node * self.nodes


# By a pattern of the GPU table's entry, the first that matches: name, GB/s of one device in a ring inside a node, and
# the reason. The rate is the nominal one per direction, times the share that collective benchmarks reach.
_LINKS_INSIDE: tuple[tuple[str, str, float, str], ...] = (
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
# The usual network of a node with such devices, in the same form: GB/s of a whole node.
_NETWORKS: tuple[tuple[str, str, float, str], ...] = (
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


def fabric_of(
    link: str,
    *,
    per_node: int,
    nodes: int,
    assumed_network: AssumedNetwork = "auto",
    measured: MeasuredLinks | None = None,
    copy_gbs: float | None = None,
) -> Fabric:
    """The links of devices with this entry of the GPU table, and the network between their nodes: as an earlier run
    measured them, else as the tables say.

    `assumed_network`: the one that such nodes usually have, TCP sockets, or GB/s of a node. `measured`: of exactly
    these devices. `copy_gbs`: of the slowest copy between two of them, which no ring exceeds.
    """
    node_link = _first_match(_LINKS_INSIDE, link)
    network = None
    if nodes > 1 and assumed_network == "auto":
        network = _first_match(_NETWORKS, link)
    elif nodes > 1 and assumed_network == "tcp":
        reason = "assumed: collectives without a plugin for the network"
        network = Link(name="TCP sockets", gbs=SOCKET_GBS, reason=reason)
    elif nodes > 1:
        network = Link(name="your network", gbs=float(assumed_network), reason="parallel.network")

    if measured is not None:
        reason = f"measured before a run on {measured.day}"
        if nodes == 1:
            node_link = replace(node_link, gbs=measured.bus_gbs, reason=reason)
        elif network is not None and assumed_network == "auto":
            # The slower of the two sets the pace of an all-reduce (`bus_gbs`): the network, unless it goes at the rate
            # of the links inside a node, and then the network is at least as fast.
            ranks = per_node * nodes
            gbs = measured.bus_gbs * (nodes - 1) / nodes * ranks / (ranks - 1)
            if per_node == 1 or measured.bus_gbs < node_link.gbs:
                network = replace(network, gbs=round(gbs, 1), reason=reason)
    elif copy_gbs is not None and copy_gbs < node_link.gbs:
        reason = "the slowest copy between two of these GPUs, by `bloomery doctor --probe`"
        node_link = replace(node_link, gbs=copy_gbs, reason=reason)
    return Fabric(
        per_node=per_node,
        nodes=nodes,
        node_link=node_link,
        network=network,
        pair_gbs=copy_gbs if measured is None else measured.pair_gbs,
        stage_gbs=None if measured is None else measured.stage_gbs,
    )


def _first_match(table: tuple[tuple[str, str, float, str], ...], link: str) -> Link:
    for pattern, name, gbs, reason in table:
        if re.search(pattern, link):
            return Link(name=name, gbs=gbs, reason=reason)
    return Link(name="PCIe", gbs=10.0, reason="assumed: the table names no link")


def gather_seconds(
    amount: float, fabric: Fabric, *, nodes: int | None = None, calls: int = 1
) -> float:
    """Seconds of an all-gather, or a reduce-scatter, of `amount` bytes in `calls` pieces.

    It runs over all devices of `nodes` nodes (default: all), as one ring: the slowest link sets its pace.
    """
    nodes = fabric.nodes if nodes is None else nodes
    ranks = fabric.per_node * nodes
    within_nodes = (
        amount * (ranks - 1) / ranks / (fabric.node_link.gbs * 1e9) if fabric.per_node > 1 else 0.0
    )
    between_nodes = _network_seconds(amount, fabric, nodes)
    hop_seconds = (fabric.per_node - 1) * NODE_HOP_SECONDS + (nodes - 1) * NETWORK_HOP_SECONDS
    return max(within_nodes, between_nodes) + calls * hop_seconds


def _network_seconds(amount: float, fabric: Fabric, nodes: int) -> float:
    """Seconds in which the bytes of an all-gather pass the network of each node, without its hops."""
    if nodes == 1 or fabric.network is None:
        return 0.0
    return amount * (nodes - 1) / nodes / (fabric.network.gbs * 1e9)


def reduce_seconds(amount: float, fabric: Fabric) -> float:
    """Seconds of an all-reduce over all devices: a reduce-scatter and an all-gather."""
    return 2 * gather_seconds(amount, fabric)


def bus_gbs(fabric: Fabric) -> float:
    """GB/s of a large all-reduce over all devices, per device and direction: nccl-tests' bus bandwidth."""
    amount = 1e12  # so that hops do not count
    ranks = fabric.devices
    return 2 * (ranks - 1) / ranks * amount / reduce_seconds(amount, fabric) / 1e9


def reduce_between_nodes_seconds(amount: float, fabric: Fabric) -> float:
    """Seconds of an all-reduce between nodes alone, of `amount` bytes per node, sharded over its devices."""
    hop_seconds = (fabric.nodes - 1) * NETWORK_HOP_SECONDS
    return 2 * (_network_seconds(amount, fabric, fabric.nodes) + hop_seconds)


def exposed(seconds: float, window: float, hidden_share: float) -> float:
    """Seconds of a communication that compute does not hide; it can overlap with `window` seconds of compute."""
    return max((1 - hidden_share) * seconds, seconds - hidden_share * window)


def communication_seconds(
    fabric: Fabric, split: MeshSplit, step: StepShape, sequences: int
) -> dict[str, float]:
    """Seconds by axis that a device communicates in a step, whether compute hides them or not.

    `sequences`: of the step, those of each data-parallel rank. Of a pipeline it is the stage with the most to send.
    """
    seconds = dict[str, float]()
    passes = max(1, sequences // step.micro_batch_size)

    # A pipeline sends its residual stream once per micro-batch. The other axes are then those inside one stage: the one
    # with the most parameters to gather or reduce.
    stage_step = step
    if split.pipeline > 1:
        seconds["pipeline"] = passes * transfer_seconds(fabric, split, step)
        fabric = _inside_stages(fabric, split)
        heaviest_stage = max(
            stage_models(step.model, split),
            key=lambda stage: stage.model.trainable_bytes(step.precision),
        )
        stage_step = replace(step, model=heaviest_stage.model)
    gradients = stage_step.model.trainable_bytes(step.precision)
    # Experts that devices divide are summed over their copies alone.
    experts = _bytes_of_experts(stage_step) if split.expert > 1 else 0.0
    gradients -= experts

    # Shards gather their weights and scatter their gradients in every micro-batch; copies of shards reduce theirs once
    # per step, between nodes or between the groups of a node that hold a copy each.
    if split.shard > 1:
        shard_fabric = replace(fabric, per_node=min(fabric.per_node, split.shard))
        nodes = fabric.nodes if split.shard > fabric.per_node else 1
        # Layers are gathered for forward and for backward, the last one and the root once.
        layer_bytes, root_bytes = gathered_bytes(stage_step)
        gathered = 2 * sum(layer_bytes) - layer_bytes[-1] + root_bytes
        num_layers = len(layer_bytes)
        gathering = gather_seconds(gathered, shard_fabric, nodes=nodes, calls=2 * num_layers)
        # Gradients are scattered in the weights' precision.
        scattering = gather_seconds(gradients, shard_fabric, nodes=nodes, calls=num_layers + 1)
        seconds["shard"] = passes * (gathering + scattering)
        if split.replicate > 1 and fabric.nodes > 1:
            seconds["replicate"] = reduce_between_nodes_seconds(gradients, fabric)
        elif split.replicate > 1:
            seconds["replicate"] = reduce_seconds(
                gradients / split.shard, replace(fabric, per_node=split.replicate)
            )

    # Copies alone reduce their gradients once per step.
    elif split.replicate > 1:
        seconds["replicate"] = reduce_seconds(gradients, fabric)

    # Devices that share sequences exchange heads in every layer and micro-batch.
    if split.context > 1:
        seconds["context"] = passes * exchange_seconds(fabric, split, step)

    # Devices that divide the experts exchange rows there, and copies of experts sum their gradients once per step.
    if split.expert > 1:
        amount, num_calls = exchanged_rows(stage_step)
        seconds["expert"] = passes * all_to_all_seconds(fabric, split.expert, amount, num_calls)
        copies = split.replicate * split.shard // split.expert
        if copies > 1:
            reduced = replace(fabric, per_node=min(fabric.per_node, copies))
            seconds["replicate"] = seconds.get("replicate", 0.0) + reduce_seconds(
                experts / split.expert, reduced
            )
    return seconds


def _bytes_of_experts(step: StepShape) -> float:
    """Bytes of the gradients of all trained experts, or of their adapters."""
    model = step.model
    value_bytes = dict.fromkeys(model.adapter, model.mode.adapter_bytes)
    return float(
        sum(
            math.prod(shape) * value_bytes.get(name, step.weight_bytes)
            for name, shape in model.trainable.items()
            if is_of_experts(name)
        )
    )


def exchanged_rows(step: StepShape) -> tuple[float, int]:
    """Of a micro-batch: the bytes that a device puts into its all-to-alls of rows, and their number.

    A row goes to each expert of a token and comes back; the gradients go the other way. Layers that are computed again
    exchange again, except `selective`, which keeps what was received. Counts and weights of rows travel by themselves.
    """
    shares = recomputed_shares(step.checkpointing, step.model.layer_numbers)
    if step.checkpointing == "selective":
        shares = [0.0] * len(shares)
    rows = step.model.by_layer(
        lambda layer: 0 if layer.layer.experts is None else layer.layer.experts.per_token
    )
    passes = [
        (count, 2 + share + step.extra_forwards)
        for count, share in zip(rows, shares, strict=True)
        if count
    ]
    width = step.config.hidden_size * step.element_bytes
    amount = sum(2 * count * number for count, number in passes) * width
    return amount * step.tokens_per_micro_batch, round(sum(4 * number for _, number in passes))


def exchanged_bytes(step: StepShape) -> tuple[float, int]:
    """Of a micro-batch: the bytes that a device puts into its all-to-alls, and their number.

    Queries, keys and values go to attention and its output comes back; their gradients go the other way. Layers that
    are computed again exchange again, except `selective`, which keeps what was received. A teacher's layers
    exchange once.
    """
    shares = recomputed_shares(step.checkpointing, step.model.layer_numbers)
    if step.checkpointing == "selective":
        shares = [0.0] * len(shares)
    sizes = step.model.by_layer(
        lambda layer: float(2 * (layer.layer.query_width + layer.layer.key_width))
    )
    values = sum(
        size * (2 + share + step.extra_forwards) for size, share in zip(sizes, shares, strict=True)
    )
    num_calls = 2 * sum(2 + round(share) + step.extra_forwards for share in shares)
    if step.teacher is not None:  # one forward
        of_teacher = layers(step.teacher)
        values += sum(2.0 * (layer.query_width + layer.key_width) for layer in of_teacher)
        num_calls += 2 * len(of_teacher)
    return values * step.element_bytes * step.tokens_per_micro_batch, num_calls


def exchange_seconds(fabric: Fabric, split: MeshSplit, step: StepShape) -> float:
    """Seconds in which a device exchanges heads with those that share its sequences, of one micro-batch."""
    amount, num_calls = exchanged_bytes(step)
    return all_to_all_seconds(fabric, split.context, amount, num_calls)


def all_to_all_seconds(fabric: Fabric, size: int, amount: float, num_calls: int) -> float:
    """Seconds of so many all-to-alls among `size` neighbors, into which each puts `amount` bytes in all."""
    # Of what it has, a device keeps its own part; what goes to other nodes shares their network with its neighbors.
    rate = fabric.node_link.gbs * 1e9
    seconds = amount * (size - 1) / size / rate
    hop_seconds = NODE_HOP_SECONDS
    if size > fabric.per_node and fabric.network is not None:
        node_rate = fabric.network.gbs * 1e9
        beyond = amount * fabric.per_node * (size - fabric.per_node) / size
        seconds = max(seconds, beyond / node_rate)
        hop_seconds = NETWORK_HOP_SECONDS
    return seconds + num_calls * hop_seconds


def transfer_seconds(fabric: Fabric, split: MeshSplit, step: StepShape) -> float:
    """Seconds in which a stage receives and sends one micro-batch: the residual stream at each edge of its groups of
    layers, and its gradient. Stages wait for both.
    """
    stream_bytes = step.tokens_per_micro_batch * step.config.hidden_size * step.residual_bytes
    # Each group of layers has an edge before and after it, but the first group of the model has none before it, and the
    # last group none after it. A stage between the first and the last has all of its edges; of two stages, each lacks
    # one.
    edges = 2 * split.chunks - (1 if split.pipeline == 2 else 0)
    rate = (fabric.pair_gbs or fabric.node_link.gbs) * 1e9
    hop_seconds = NODE_HOP_SECONDS
    if fabric.network is not None:
        # The ranks of a node may send at once, each to its own in the next node.
        rate = min(rate, fabric.network.gbs * 1e9 / min(fabric.per_node, split.data_parallel))
        hop_seconds = NETWORK_HOP_SECONDS
    if fabric.stage_gbs is not None:
        rate = fabric.stage_gbs * 1e9
    return 2 * edges * (stream_bytes / rate + hop_seconds)


def _inside_stages(fabric: Fabric, split: MeshSplit) -> Fabric:
    """The devices of one stage: their ranks follow each other, so that they are in as few nodes as possible."""
    per_node = min(fabric.per_node, split.data_parallel)
    nodes = split.data_parallel // per_node
    network = fabric.network if nodes > 1 else None
    return replace(fabric, per_node=per_node, nodes=nodes, network=network)


def exposed_seconds(
    split: MeshSplit, passes: int, computing: float, seconds: Mapping[str, float]
) -> Estimate:
    """Seconds of communication that compute does not hide, of `seconds` by axis.

    `passes`: micro-batches of a step, `computing`: the seconds of their forward and backward.
    """
    # Stages wait for transfers, attention for heads, experts for rows; everything else can overlap with a window of
    # compute. Shards communicate all the time. Copies reduce their gradients during the last backward, which is two
    # thirds of the last micro-batch. In a pipeline the window is one micro-batch.
    transfer = sum(seconds.get(axis, 0.0) for axis in ("pipeline", "context", "expert"))
    overlapping = sum(seconds.values()) - transfer
    window = computing
    if split.pipeline > 1:
        window = computing / passes
    elif split.shard == 1:
        window = computing * 2 / 3 / passes

    # The most hidden gives the least exposed.
    high, typical, low = (
        transfer + exposed(overlapping, window, hidden_share) for hidden_share in HIDDEN_SHARES
    )
    return Estimate(value=typical, low=low, high=high, origin="table")

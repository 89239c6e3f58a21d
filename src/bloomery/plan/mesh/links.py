"""What exchanging tensors between devices takes: links of the table, and the collectives of each way to train.

Formulas (d ranks, N parameters of k bytes): a gradient sum moves 2 k N (d-1)/d bytes a rank; sharded weights three
times k N (d-1)/d a micro-batch, gathered forward and backward with gradients scattered; a pipeline 2 s b h bytes a
boundary, micro-batch and direction. A ring through several nodes moves its bytes once over each node's network.
"""

import re
from dataclasses import dataclass

from bloomery.core.units import GIB
from bloomery.hardware.specs.specs import GpuSpec

HIDDEN = (0.50, 0.85, 1.0)  # of what could run behind computing: low, typical, high
STEP_SECONDS = (5e-6, 20e-6)  # of one hop of a ring: inside a node, between nodes
SOCKET_GBS = 5.0  # of a node whose collectives go through TCP sockets
FIRST_CONTEXT = {"amd": 0.95 * GIB, "nvidia": 1.5 * GIB}  # measured on MI250X; ml-engineering, two ranks of CUDA
NEXT_CONTEXT = {"amd": 0.65 * GIB, "nvidia": 0.3 * GIB}


@dataclass(frozen=True, kw_only=True)
class Link:
    """What carries data between devices of a node, or between nodes. `gbs`: GB/s each way that a collective reaches."""

    name: str
    gbs: float
    because: str


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """A node's devices and what joins them. `between`: of a whole node; None for one node."""

    per_node: int
    nodes: int
    inside: Link
    between: Link | None

    @property
    def devices(self) -> int:
        return self.per_node * self.nodes


# What one device sends in a ring inside a node: nominal rate one way, times what collective benchmarks reach of it.
_INSIDE: tuple[tuple[str, str, float, str], ...] = (
    (r"NVLink5", "NVLink 5", 680, "75% of 900 GB/s a direction"),
    (r"NVLink4", "NVLink 4", 340, "75% of 450 GB/s a direction"),
    (r"NVLink3 600", "NVLink 3", 230, "77% of 300 GB/s a direction"),
    (r"NVLink2 300", "NVLink 2", 115, "77% of 150 GB/s a direction"),
    (r"7x xGMI", "xGMI, all to all", 310, "69% of seven links of 64 GB/s"),
    (r"GCD-GCD", "Infinity Fabric", 80, "rings over links of 50 GB/s; 200 between the two dies of a card"),
    (
        r"xGMI bridge|3 IF links|IF bridge",
        "PCIe 4",
        20,
        "a bridge joins pairs or fours at most; nothing is assumed of it",
    ),
    (r"NVLink3 bridge", "PCIe 4", 20, "a bridge joins pairs; nothing is assumed of it"),
    (r"xGMI", "xGMI", 150, "assumed from MI300X with fewer links"),
    (r"no P2P", "PCIe through the host", 10, "no direct copies between GeForce cards"),
    (r"PCIe[45]x8", "PCIe, 8 lanes", 10, "60% of 16 GB/s, as with PCIe 4"),
    (r"PCIe5", "PCIe 5", 40, "60% of 64 GB/s, with 16 lanes each"),
    (r"PCIe4", "PCIe 4", 20, "60% of 32 GB/s, with 16 lanes each"),
    (r"PCIe3", "PCIe 3", 10, "60% of 16 GB/s, with 16 lanes each"),
)
# What a node of such devices usually has to the outside; nobody states it on the command line.
_BETWEEN: tuple[tuple[str, str, float, str], ...] = (
    (r"GCD-GCD", "Slingshot, 4 x 200 Gb/s a node", 70, "70% of 100 GB/s; assumes the libfabric plugin of RCCL"),
    (r"NVLink4|NVLink5|7x xGMI", "8 x 400 Gb/s a node", 320, "assumed: 80% of one 400 Gb/s port a GPU"),
    (r"NVLink3 600|xGMI;", "8 x 200 Gb/s a node", 160, "assumed: 80% of one 200 Gb/s port a GPU"),
    (r".", "10 Gb/s Ethernet", 1.0, "assumed: an ordinary network"),
)


def fabric_of(spec: GpuSpec, *, per_node: int, nodes: int, sockets: bool = False) -> Fabric:
    """The links that the table gives a device of this kind, and the network that such nodes usually have."""
    between = None
    if nodes > 1:
        between = _first(_BETWEEN, spec.link)
        if sockets:
            between = Link(name="TCP sockets", gbs=SOCKET_GBS, because="assumed: no network plugin was loaded")
    return Fabric(per_node=per_node, nodes=nodes, inside=_first(_INSIDE, spec.link), between=between)


def _first(rows: tuple[tuple[str, str, float, str], ...], link: str) -> Link:
    for pattern, name, gbs, because in rows:
        if re.search(pattern, link):
            return Link(name=name, gbs=gbs, because=because)
    return Link(name="PCIe", gbs=10.0, because="assumed: the table names no link")


def gather_seconds(amount: float, fabric: Fabric, *, nodes: int | None = None, calls: int = 1) -> float:
    """An all-gather, or a reduce-scatter, of `amount` bytes in `calls` pieces over all devices of so many nodes."""
    nodes = fabric.nodes if nodes is None else nodes
    ranks = fabric.per_node * nodes
    inside = amount * (ranks - 1) / ranks / (fabric.inside.gbs * 1e9) if fabric.per_node > 1 else 0.0
    outside = _outside(amount, fabric, nodes)
    hops = (fabric.per_node - 1) * STEP_SECONDS[0] + (nodes - 1) * STEP_SECONDS[1]
    return max(inside, outside) + calls * hops


def _outside(amount: float, fabric: Fabric, nodes: int) -> float:
    if nodes == 1 or fabric.between is None:
        return 0.0
    return amount * (nodes - 1) / nodes / (fabric.between.gbs * 1e9)


def reduce_seconds(amount: float, fabric: Fabric) -> float:
    """An all-reduce: a reduce-scatter and an all-gather."""
    return 2 * gather_seconds(amount, fabric)


def across_seconds(amount: float, fabric: Fabric) -> float:
    """An all-reduce between nodes alone, of what each device of a node holds a share of: `amount` bytes a node."""
    return 2 * (_outside(amount, fabric, fabric.nodes) + (fabric.nodes - 1) * STEP_SECONDS[1])


def exposed(seconds: float, window: float, index: int) -> float:
    """What computing cannot hide of a communication that could run behind `window` seconds of it."""
    hidden = HIDDEN[index]
    return max((1 - hidden) * seconds, seconds - hidden * window)


def context_bytes(vendor: str, communicators: int) -> float:
    """What a collective library takes outside PyTorch's allocator."""
    return FIRST_CONTEXT[vendor] + NEXT_CONTEXT[vendor] * (communicators - 1) if communicators else 0.0

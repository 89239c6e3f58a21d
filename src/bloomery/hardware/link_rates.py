"""Measured rates of the links between this user's devices: by ranks before a first step, and by the probe of copies.

Does not import torch.
"""

import re
from collections.abc import Mapping

from bloomery.core.files import cache_folder, write_json
from bloomery.hardware.calibration import device_of, stored_entries
from bloomery.hardware.machine import Frozen, Machine

STORED = 50  # results
FILE = "links.json"
HOST_FILE = "host-links.json"
HOST_RATES = ("to_device", "from_device", "both", "pageable")


class MeasuredLinks(Frozen):
    """What ranks measured before a run's first step. Rates in GB/s per direction; contains no host name.

    `bus_gbs`: of an all-reduce over all devices, as nccl-tests prints it. `pair_gbs`: of the slowest pair of devices in
    a host, while all pairs exchange; None: one device per host. `stage_gbs`: of the slowest edge of a pipeline over the
    transport that the run took; None: no pipeline.
    """

    device: str  # the product name
    arch: str
    cpu: str  # of the host: another machine with such GPUs has other slots
    per_node: int
    nodes: int
    bus_gbs: float
    pair_gbs: float | None
    stage_gbs: float | None
    day: str  # 2026-11-21


def store_links(result: MeasuredLinks) -> bool:
    """Stores a result; it replaces an older one of the same devices. False: not writable.

    A run without a pipeline keeps what an earlier one measured of its edges.
    """
    earlier = stored_entries(FILE, MeasuredLinks)
    same = [links for links in earlier if _key(links) == _key(result)]
    if result.stage_gbs is None and same:
        result = result.model_copy(update={"stage_gbs": same[-1].stage_gbs})
    others = [links for links in earlier if _key(links) != _key(result)]
    results = [*others, result][-STORED:]
    return write_json(cache_folder() / FILE, [links.model_dump(mode="json") for links in results])


def measured_links(machine: Machine, *, per_node: int, nodes: int) -> MeasuredLinks | None:
    """The result of so many devices like the one that training would use on this machine; None where none is stored."""
    device = device_of(machine)
    key = (device.name, device.arch, machine.host.cpu_name, per_node, nodes)
    return next(
        (links for links in stored_entries(FILE, MeasuredLinks) if _key(links) == key), None
    )


class MeasuredHostLink(Frozen):
    """Copies between a GPU and its host, measured before a run whose weights stream, in GB/s. `both`: of both
    directions together.
    """

    device: str  # the product name
    arch: str
    cpu: str  # of the host
    to_device: float
    from_device: float
    both: float
    pageable: float
    day: str  # 2026-11-21


def store_host_link(machine: Machine, rates: Mapping[str, float], *, day: str) -> bool:
    """Stores rates of the device that training uses; they replace earlier ones of it. False: not writable."""
    device = device_of(machine)
    result = MeasuredHostLink(
        device=device.name,
        arch=device.arch,
        cpu=machine.host.cpu_name,
        day=day,
        **{name: round(rate, 2) for name, rate in rates.items()},
    )
    key = (result.device, result.arch, result.cpu)
    others = [
        link
        for link in stored_entries(HOST_FILE, MeasuredHostLink)
        if (link.device, link.arch, link.cpu) != key
    ]
    results = [*others, result][-STORED:]
    return write_json(
        cache_folder() / HOST_FILE, [link.model_dump(mode="json") for link in results]
    )


def measured_host_link(machine: Machine) -> tuple[dict[str, float], str] | None:
    """The stored rates of the device that training would use on this machine, or those of the probe; and where they
    are from.
    """
    device = device_of(machine)
    key = (device.name, device.arch, machine.host.cpu_name)
    for link in stored_entries(HOST_FILE, MeasuredHostLink):
        if (link.device, link.arch, link.cpu) == key:
            rates = {name: getattr(link, name) for name in HOST_RATES}
            return rates, f"measured before a run on {link.day}"
    probe = next((probe for probe in machine.probes if probe.name == "host-copies"), None)
    if probe is None or probe.outcome != "ok":
        return None
    try:
        rates = {name: float(probe.facts[name]) for name in HOST_RATES}
    except (KeyError, ValueError):
        return None
    return (rates, "measured by `doctor --probe`") if min(rates.values()) > 0 else None


def slowest_copy_gbs(machine: Machine) -> float | None:
    """GB/s of the slowest copy between two of the machine's GPUs, by the probe; None where it has not run."""
    probe = next((probe for probe in machine.probes if probe.name == "p2p"), None)
    if probe is None or probe.outcome != "ok":
        return None
    rates = [re.match(r"([\d.]+) GB/s", fact) for fact in probe.facts.values()]
    return min((float(rate[1]) for rate in rates if rate is not None), default=None)


def _key(links: MeasuredLinks) -> tuple[object, ...]:
    return links.device, links.arch, links.cpu, links.per_node, links.nodes

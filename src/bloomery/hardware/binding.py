"""Where a rank runs: the CPUs it may use, its GPU, and the CPUs next to that GPU. Does not import torch."""

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from bloomery.hardware.sites import Site

SHOWN_RANKS = 16  # of those on wrong CPUs, in the table


@final
@dataclass(frozen=True)
class Binding:
    """The place of one rank, as texts that travel: CPUs as Linux lists them, "1-7,65-71".

    `gpu`: the PCI address 0000:d1:00.0, "" without one or where it is unknown. `numa`: the NUMA node of that GPU, and
    `near_cpus` its CPUs; None and "" where the kernel does not state them.
    """

    host: str
    local_rank: int
    cpus: str
    gpu: str = ""
    numa: int | None = None
    near_cpus: str = ""

    def __str__(self) -> str:
        near = f", next to CPUs {self.near_cpus} (NUMA node {self.numa})" if self.near_cpus else ""
        gpu = f"GPU {self.gpu}{near}" if self.gpu else "no GPU"
        return f"{self.host}, local rank {self.local_rank}: CPUs {self.cpus}; {gpu}"


def read_binding(
    host: str, local_rank: int, gpu: str, *, cpus: set[int] | None = None, root: Path = Path("/")
) -> Binding:
    """The binding of this process, whose GPU has that PCI address. `cpus`: by default those that it may use."""
    if cpus is None:
        has_affinity = hasattr(os, "sched_getaffinity")  # not on macOS
        cpus = os.sched_getaffinity(0) if has_affinity else set(range(os.cpu_count() or 1))
    numa: int | None = None
    near_cpus = ""
    try:
        device = root / "sys/bus/pci/devices" / gpu
        number = int((device / "numa_node").read_text())
        if gpu and number >= 0:  # -1: this machine has one node, or its firmware states none
            numa = number
            near_cpus = (root / f"sys/devices/system/node/node{numa}/cpulist").read_text().strip()
    except (OSError, ValueError):
        numa = None  # another system, or a container that hides it
    return Binding(host, local_rank, cpu_list(cpus), gpu, numa, near_cpus)


def parse_cpus(text: str) -> set[int]:
    """The CPUs of "0-7,64-71"."""
    cpus = set[int]()
    for part in text.split(","):
        if part:
            first, _, last = part.partition("-")
            cpus |= set(range(int(first), int(last or first) + 1))
    return cpus


def cpu_list(cpus: set[int]) -> str:
    """The reverse of `parse_cpus`."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


@final
@dataclass(frozen=True)
class BindingReport:
    """`lines`: for the log. `warning`: what is wrong and how to start the ranks instead; "" where all is well."""

    lines: tuple[str, ...]
    warning: str = ""


def binding_report(
    bindings: Sequence[Binding], *, site: Site | None = None, is_slurm: bool = False
) -> BindingReport:
    """Whether each rank runs on the CPUs next to its GPU: those of the site's table, or of the GPU's NUMA node.

    Ranks that may use every CPU are wrong only under Slurm, where binding them is usual.
    """
    with_gpu = [rank for rank, binding in enumerate(bindings) if binding.gpu]
    ranks_named = f"{len(bindings)} ranks"
    if not with_gpu:
        return BindingReport((f"{ranks_named} without a GPU",))
    table = {} if site is None else {entry.bus: entry.cpus for entry in site.binding}

    # 1. The ranks of a host on fewer CPUs than ranks: a launcher has bound them all alike.
    crowded = _crowded_host(bindings, with_gpu)
    if crowded:
        host, shared_cpus, count = crowded
        problem = f"{count} ranks of {host} share the CPUs {shared_cpus}"
        return BindingReport((problem,), f"{problem}: {_fix(site, is_slurm)}")

    # 2. Each rank against the CPUs next to its GPU.
    wrong: dict[int, str] = {}
    unbound = 0
    unknown = 0
    for rank in with_gpu:
        binding = bindings[rank]
        near_cpus = table.get(binding.gpu.split(":")[-2], binding.near_cpus)
        cpus = parse_cpus(binding.cpus)
        if not near_cpus:
            unknown += 1
        elif cpus <= parse_cpus(near_cpus):
            continue
        elif not is_slurm and cpus > parse_cpus(near_cpus):
            unbound += 1
        else:
            wrong[rank] = near_cpus
    if wrong:
        first = min(wrong)
        binding = bindings[first]
        problem = f"{len(wrong)} of {ranks_named} do not run on the CPUs next to their GPU"
        example = (
            f"rank {first} on {binding.host} has CPUs {binding.cpus},"
            f" its GPU {binding.gpu} is next to {wrong[first]}"
        )
        return BindingReport(
            (problem, *_table(bindings, wrong)), f"{problem} ({example}): {_fix(site, is_slurm)}"
        )
    if unbound:
        return BindingReport((f"{ranks_named}, not bound to CPUs",))
    if unknown:
        return BindingReport((f"{ranks_named}; the NUMA nodes of {unknown} GPUs are unknown",))
    as_table = f", all as the table of {site.title}" if site is not None and table else ""
    return BindingReport((f"{ranks_named}, each on the CPUs next to its GPU{as_table}",))


def _crowded_host(bindings: Sequence[Binding], ranks: Sequence[int]) -> tuple[str, str, int] | None:
    """A host whose ranks with GPUs have fewer CPUs than ranks; its CPUs, and how many ranks."""
    ranks_by_host: Mapping[str, list[int]] = defaultdict(list)
    for rank in ranks:
        ranks_by_host[bindings[rank].host].append(rank)
    for host, ranks_of_host in ranks_by_host.items():
        cpus = set[int]().union(*(parse_cpus(bindings[rank].cpus) for rank in ranks_of_host))
        if len(cpus) < len(ranks_of_host):
            return host, cpu_list(cpus), len(ranks_of_host)
    return None


def _table(bindings: Sequence[Binding], wrong: Mapping[int, str]) -> list[str]:
    """The ranks on wrong CPUs, the first of them."""
    rows = [("rank", "host", "local", "CPUs", "GPU", "NUMA", "next to CPUs")]
    for rank in sorted(wrong)[:SHOWN_RANKS]:
        binding = bindings[rank]
        numa = "" if binding.numa is None else str(binding.numa)
        place = (binding.host, str(binding.local_rank), binding.cpus, binding.gpu, numa)
        rows.append((str(rank), *place, wrong[rank]))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    if len(wrong) > SHOWN_RANKS:
        lines.append(f"and {len(wrong) - SHOWN_RANKS} more")
    return lines


def _fix(site: Site | None, is_slurm: bool) -> str:
    if not is_slurm:
        return "start each rank with `numactl --cpunodebind=NODE`, the NUMA node of its GPU"
    if site is not None and (site.task_options or site.step_options):
        cores = [f"--cpus-per-task={site.cpus_per_gpu}"] if site.cpus_per_gpu else []
        options = " ".join([*site.task_options, *cores, *site.step_options])
        return f"start ranks with `srun {options}`, as the script of `bloomery slurm` does"
    return "start ranks with `srun --gpus-per-task=1 --gpu-bind=closest --cpus-per-task=N`, N the cores of a GPU"

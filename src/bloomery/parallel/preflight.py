"""Before the first step: ranks meet, compare what they are and where they run, and try their links.

The rank at fault is named.
"""

import hashlib
import os
import secrets
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from bloomery.core import __version__
from bloomery.core.device import current_index, is_accelerator, properties_of
from bloomery.core.errors import UserError
from bloomery.core.ports import port_taken
from bloomery.core.units import format_bytes, format_seconds
from bloomery.data.shards import read_manifest
from bloomery.hardware.binding import Binding, BindingReport, binding_report, read_binding
from bloomery.hardware.calibration import device_of
from bloomery.hardware.detect import detect
from bloomery.hardware.link_rates import MeasuredLinks
from bloomery.hardware.machine import Machine, visible_devices
from bloomery.hardware.sites import local_site
from bloomery.parallel import links, process_group
from bloomery.parallel.environment import (
    hosts_at_fault,
    node_name,
    rank_environment,
    without_host,
)
from bloomery.parallel.links import (
    GPU_FIX,
    LinkRates,
    PipelineTrial,
    run_within,
    try_neighbors,
    try_pipeline_links,
)
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.process_group import RanksMissing, join
from bloomery.plan.pipeline import rank_name
from bloomery.plan.types import RunPlan, TrainPlan

MOST_HOSTS = 4  # that a line lists with their ranks
LOCAL_DISK_BYTES = 100 * 2**20  # of a host's folder for temporary files: kernels are compiled there
SHARED_SECONDS = 5.0  # until a file of rank 0 is visible on every host
# float32 in the timed all-reduce
CPU_NUMBERS = 2**18
GPU_NUMBERS = 2**24
ALL_REDUCE = "all-reduce before the first step"
COLLECTIVE_FIX = f"{GPU_FIX}; try NCCL_P2P_DISABLE=1"
# Rows of float32 numbers that one rank sends another for its experts, or some times as many.
EXPERT_ROWS = 64
EXPERT_ROW_NUMBERS = 1024
ALL_TO_ALL = "all-to-all of the experts' rows before the first step"


@final
@dataclass(frozen=True)
class Preflight:
    """Result of the checks. `bytes_per_second`: bus bandwidth of the all-reduce, as in nccl-tests; `hosts`: by rank.

    `planned_gbs`: the plan's figure for that bandwidth, in GB/s; None: unknown. `rates`: of the links between the
    devices. `link`: how the stages of a pipeline reach each other; None without a pipeline.
    """

    hosts: tuple[str, ...]
    bytes_per_second: float
    reduced_bytes: int
    planned_gbs: float | None
    rates: LinkRates
    free_bytes: int
    seconds: float
    link: PipelineTrial | None = None

    def __str__(self) -> str:
        ranks_by_host = Counter(self.hosts)
        hosts = ", ".join(f"{count} on {host}" for host, count in ranks_by_host.items())
        if len(ranks_by_host) > MOST_HOSTS:
            hosts = f"on {len(ranks_by_host)} hosts, {_range(ranks_by_host.values())} on each"
        planned = "" if self.planned_gbs is None else f" (planned with {self.planned_gbs:g})"
        link = "" if self.link is None else f" {self.link};"
        return (
            f"{len(self.hosts)} ranks ({hosts}) agree; their products are exact; {self.rates};"
            f" all-reduce of {format_bytes(self.reduced_bytes)} at {self.bytes_per_second / 1e9:.3g} GB/s{planned};"
            f"{link} {format_bytes(self.free_bytes)} of disk are free"
        )


def links_of(preflight: Preflight, machine: Machine, *, day: str) -> MeasuredLinks:
    """The measured rates for later plans of such a machine's devices. `day`: 2026-11-21."""
    hosts = preflight.hosts
    device = device_of(machine)
    inside = [
        rate for (low, high), rate in preflight.rates.by_pair.items() if hosts[low] == hosts[high]
    ]
    return MeasuredLinks(
        device=device.name,
        arch=device.arch,
        cpu=machine.host.cpu_name,
        per_node=max(Counter(hosts).values()),
        nodes=len(set(hosts)),
        bus_gbs=round(preflight.bytes_per_second / 1e9, 2),
        pair_gbs=round(min(inside) / 1e9, 2) if inside else None,
        stage_gbs=None
        if preflight.link is None
        else round(preflight.link.bytes_per_second / 1e9, 2),
        day=day,
    )


def _range(counts: Iterable[int]) -> str:
    least, *_, most = sorted(counts)
    return f"{least}" if least == most else f"{least} to {most}"


@final
@dataclass(frozen=True)
class RankFacts:
    """What the ranks compare."""

    host: str
    torch: str
    bloomery: str
    plan: str  # digest
    device: str  # the GPU's id, "" on a CPU
    wrong_device: str  # what is wrong with its products, "" where they are right
    wrong_place: str  # why the plan is not for this device, "" where it is
    local_free_bytes: int  # in the folder for temporary files
    sees_run_folder: bool
    unreadable: str  # why the prepared dataset cannot be read, "" where it can


def meet(plan: TrainPlan) -> Mesh:
    """`join`, with its errors in one sentence. Raises UserError."""
    environment = rank_environment()
    this_rank = f"rank {environment.rank} on {node_name()}"
    try:
        return join(plan)
    except RanksMissing as error:
        missing_ranks = " and ".join(f"rank {rank}" for rank in error.ranks[:3])
        if len(error.ranks) > 3:
            missing_ranks += f" and {len(error.ranks) - 3} more"
        patience = format_seconds(process_group.JOIN_SECONDS)
        at_address = f", at {environment.address}" if environment.address else ""
        raise UserError(
            f"{missing_ranks} of {plan.ranks} did not arrive within {patience}",
            where=f"the meeting of all ranks before the first step{at_address}",
            fix="read the output of that rank; start as many processes as the launcher names, with the same command",
        ) from error
    except RuntimeError as error:
        reason = str(error)
        address = environment.address
        port = environment.port
        if "EADDRINUSE" in reason or "address already in use" in reason:
            raise port_taken(address, port) from error
        if isinstance(error, dist.DistError):
            at_address = f" at {address}:{port}" if address else ""
            first_line = reason.partition("\n")[0][:200]
            raise UserError(
                f"{this_rank} could not join the other ranks{at_address}: {first_line}",
                where="MASTER_ADDR, MASTER_PORT",
                fix="all hosts must reach that address; see whether another rank ended before",
            ) from error
        raise


def check_ranks(
    mesh: Mesh, plan: RunPlan, run_dir: Path, *, product_problem: Callable[[TrainPlan], str]
) -> Preflight | None:
    """Raises UserError, with the same sentence on every rank, when one of them cannot train with the others.

    None for one rank alone. `product_problem`: what is wrong with the products of this rank's device, "" for nothing.
    """
    if mesh.world == 1:
        return None
    start = time.perf_counter()

    # 1. Rank 0 writes a file into the run folder, which all must see; a file of an earlier start has another token.
    token: str = mesh.broadcast_json(secrets.token_hex(8))
    shared_file = run_dir / ".tmp-shared"
    if mesh.first_rank:
        shared_file.write_text(token)
    mesh.barrier()

    # 2. Every rank learns the facts of all, and judges them alike.
    wrong_place = place_problem(plan, mesh.rank)
    own_facts = _facts(plan, shared_file, token, product_problem(plan.train), wrong_place)
    facts_by_rank = [RankFacts(**facts) for facts in mesh.all_gather_json(asdict(own_facts))]
    mesh.barrier()
    if mesh.first_rank:
        shared_file.unlink(missing_ok=True)
    for check in CHECKS:
        error = check(facts_by_rank)
        if error is not None:
            raise error

    # 3. The links work, and how fast: those of the hosts first, over which ranks report what fails between GPUs.
    hosts = tuple(facts.host for facts in facts_by_rank)
    rates = try_neighbors(mesh, hosts, "cpu")
    reduced_bytes, bytes_per_second = _try_all_reduce(mesh, facts_by_rank)
    if _reduces_on_gpus(mesh):
        rates = try_neighbors(mesh, hosts, mesh.device)
    _try_all_to_all(mesh, facts_by_rank)
    rank_names = [f"{rank_name(rank, plan)} on {host}" for rank, host in enumerate(hosts)]
    link = try_pipeline_links(mesh, plan.train, rank_names)
    return Preflight(
        hosts=hosts,
        bytes_per_second=bytes_per_second,
        reduced_bytes=reduced_bytes,
        planned_gbs=None if plan.parallel is None else plan.parallel.bus_gbs,
        rates=rates,
        free_bytes=shutil.disk_usage(run_dir).free,
        seconds=time.perf_counter() - start,
        link=link,
    )


def place_problem(plan: RunPlan, rank: int) -> str:
    """Why the device of this rank is not that for which a pipeline over unequal GPUs was cut; "" where it is.

    The driver may count GPUs in another order than the plan does.
    """
    if plan.parallel is None or not plan.parallel.layout.stage_limits:
        return ""
    total_bytes = properties_of(plan.train.device).total_bytes
    planned_bytes = plan.memory_limit_of(rank)
    if not total_bytes or planned_bytes <= total_bytes:
        return ""
    name = plan.parallel.layout.stage_devices[rank // plan.train.ranks_per_stage]
    planned = f"{format_bytes(planned_bytes)} of a {name}"
    return f"has {format_bytes(total_bytes)}, and its stage was planned for {planned}"


def _facts(
    plan: RunPlan, shared_file: Path, token: str, wrong_device: str, wrong_place: str
) -> RankFacts:
    """The facts of this rank."""
    return RankFacts(
        host=node_name(),
        torch=torch.__version__,
        bloomery=__version__,
        plan=hashlib.sha256(plan.model_dump_json().encode()).hexdigest()[:16],
        device=_device_id(plan.train.device),
        wrong_device=wrong_device,
        wrong_place=wrong_place,
        local_free_bytes=shutil.disk_usage(tempfile.gettempdir()).free,
        sees_run_folder=_appears(shared_file, token),
        unreadable=_reading_problem(plan.data.prepared),
    )


def _appears(shared_file: Path, token: str) -> bool:
    """Whether the file of rank 0 is here; network file systems take a while to show it."""
    deadline = time.monotonic() + SHARED_SECONDS
    while not (shared_file.is_file() and shared_file.read_text() == token):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
    return True


def _device_id(device: str) -> str:
    """Of this very GPU; "" on a CPU, which ranks may share."""
    if not is_accelerator(device):
        return ""
    properties = properties_of(device)
    return properties.unit_id or properties.pci_address


def _reading_problem(prepared: Path) -> str:
    try:
        read_manifest(prepared)
    except (UserError, OSError) as error:
        reason = error.problem if isinstance(error, UserError) else str(error.strerror)
        return f"{prepared}: {reason}"
    return ""


def _named(facts_by_rank: Sequence[RankFacts], ranks: Sequence[int]) -> str:
    names = [f"rank {rank} on {facts_by_rank[rank].host}" for rank in ranks[:3]]
    if len(ranks) > 3:
        names.append(f"{len(ranks) - 3} more")
    return " and ".join(names)


def _at_fault(
    facts_by_rank: Sequence[RankFacts], ranks: Sequence[int], problem: str, *, where: str, fix: str
) -> UserError:
    """The error of these ranks; where others have hosts of their own, with their host and the line to leave it out."""
    host = hosts_at_fault([facts.host for facts in facts_by_rank], ranks)
    if not host:
        return UserError(problem, where=where, fix=fix)
    return UserError(
        problem, where=where, fix=f"{fix}; or leave the host out: {without_host(host)}", host=host
    )


def _check_run_folder(facts_by_rank: Sequence[RankFacts]) -> UserError | None:
    blind_ranks = [rank for rank, facts in enumerate(facts_by_rank) if not facts.sees_run_folder]
    if not blind_ranks:
        return None
    return _at_fault(
        facts_by_rank,
        blind_ranks,
        f"{_named(facts_by_rank, blind_ranks)} does not see what rank 0 writes into the run folder",
        where="--run-dir",
        fix="use a folder that all hosts share",
    )


def _check_versions(facts_by_rank: Sequence[RankFacts]) -> UserError | None:
    """Names the ranks whose version is not that of most, or not that of rank 0 where there is no majority."""
    versions = (
        ("torch", [facts.torch for facts in facts_by_rank], "install the same torch on all hosts"),
        (
            "Bloomery",
            [facts.bloomery for facts in facts_by_rank],
            "install the same Bloomery on all hosts",
        ),
        (
            "another plan,",
            [facts.plan for facts in facts_by_rank],
            "use a run folder that all hosts share; then `bloomery resume`",
        ),
    )
    for name, version_by_rank, fix in versions:
        usual_version, count = Counter(version_by_rank).most_common(1)[0]
        if 2 * count <= len(version_by_rank):
            usual_version = version_by_rank[0]
        other_ranks = [
            rank for rank, version in enumerate(version_by_rank) if version != usual_version
        ]
        if other_ranks:
            other_version = version_by_rank[other_ranks[0]]
            ranks = _named(facts_by_rank, other_ranks)
            return _at_fault(
                facts_by_rank,
                other_ranks,
                f"{ranks} has {name} {other_version}, and the other ranks have {usual_version}",
                where="the environment of that rank",
                fix=fix,
            )
    return None


def _check_dataset(facts_by_rank: Sequence[RankFacts]) -> UserError | None:
    blind_ranks = [rank for rank, facts in enumerate(facts_by_rank) if facts.unreadable]
    if not blind_ranks:
        return None
    return _at_fault(
        facts_by_rank,
        blind_ranks,
        f"{_named(facts_by_rank, blind_ranks)} cannot read the prepared dataset",
        where=facts_by_rank[blind_ranks[0]].unreadable,
        fix="mount that folder on all hosts, with permission to read",
    )


def _check_products(facts_by_rank: Sequence[RankFacts]) -> UserError | None:
    wrong_ranks = [rank for rank, facts in enumerate(facts_by_rank) if facts.wrong_device]
    if not wrong_ranks:
        return None
    return _at_fault(
        facts_by_rank,
        wrong_ranks,
        f"the device of {_named(facts_by_rank, wrong_ranks)} {facts_by_rank[wrong_ranks[0]].wrong_device}",
        where="a product with a known result, before the first step",
        fix="`bloomery doctor --probe` on that host",
    )


def _check_places(facts_by_rank: Sequence[RankFacts]) -> UserError | None:
    wrong_ranks = [rank for rank, facts in enumerate(facts_by_rank) if facts.wrong_place]
    if not wrong_ranks:
        return None
    return _at_fault(
        facts_by_rank,
        wrong_ranks,
        f"the device of {_named(facts_by_rank, wrong_ranks)} {facts_by_rank[wrong_ranks[0]].wrong_place}",
        where="the order of the GPUs",
        fix="unset the variables that select or order GPUs, and name the GPUs with --devices",
    )


def _check_local_disk(facts_by_rank: Sequence[RankFacts]) -> UserError | None:
    full_ranks = [
        rank
        for rank, facts in enumerate(facts_by_rank)
        if facts.local_free_bytes < LOCAL_DISK_BYTES
    ]
    if not full_ranks:
        return None
    free_bytes = facts_by_rank[full_ranks[0]].local_free_bytes
    return _at_fault(
        facts_by_rank,
        full_ranks,
        f"{_named(facts_by_rank, full_ranks)} has {format_bytes(free_bytes)} of disk for temporary files",
        where="the folder for temporary files, TMPDIR",
        fix="free disk space there, or set TMPDIR to another disk",
    )


def _check_devices(facts_by_rank: Sequence[RankFacts]) -> UserError | None:
    ranks_by_device: dict[tuple[str, str], list[int]] = {}
    for rank, facts in enumerate(facts_by_rank):
        if facts.device:
            ranks_by_device.setdefault((facts.host, facts.device), []).append(rank)
    for (_, device), ranks in ranks_by_device.items():
        if len(ranks) > 1:
            return _at_fault(
                facts_by_rank,
                ranks,
                f"{_named(facts_by_rank, ranks)} use the same GPU",
                where=device,
                fix="start one process per GPU",
            )
    return None


CHECKS: tuple[Callable[[Sequence[RankFacts]], UserError | None], ...] = (
    _check_run_folder,
    _check_versions,
    _check_dataset,
    _check_devices,
    _check_places,
    _check_local_disk,
    _check_products,
)


def _reduces_on_gpus(mesh: Mesh) -> bool:
    return is_accelerator(mesh.device) and not mesh.reduces_on_host


def _try_all_reduce(mesh: Mesh, facts_by_rank: Sequence[RankFacts]) -> tuple[int, float]:
    """Bytes of one all-reduce, and its bus bandwidth: the best of three. Raises UserError where a sum was wrong."""
    count = GPU_NUMBERS if _reduces_on_gpus(mesh) else CPU_NUMBERS
    expected = mesh.world * (mesh.world + 1) / 2
    best_seconds = float("inf")
    right_sums = list[bool]()
    for _ in range(3):
        numbers = torch.full((count,), float(mesh.rank + 1), device=mesh.device)

        def reduce_and_compare(numbers: Tensor = numbers) -> None:
            mesh.all_reduce(numbers)
            right_sums.append(bool((numbers == expected).all()))  # waits for the device

        mesh.barrier()
        start = time.perf_counter()
        failure = run_within(links.LINK_SECONDS, reduce_and_compare)
        best_seconds = min(best_seconds, time.perf_counter() - start)
        _refuse_missing(mesh, failure, "the sum of all ranks did not arrive", where=ALL_REDUCE)

    _refuse_wrong(
        mesh, facts_by_rank, all(right_sums), "received a wrong sum of all ranks", where=ALL_REDUCE
    )

    # A ring sends each byte 2 (n - 1) / n times, whatever its size: the bandwidth of a link.
    reduced_bytes = count * 4
    return reduced_bytes, 2 * (mesh.world - 1) / mesh.world * reduced_bytes / best_seconds


def _try_all_to_all(mesh: Mesh, facts_by_rank: Sequence[RankFacts]) -> None:
    """The ranks that divide the experts send each other rows as in training: other numbers of them to each, or none.

    Raises UserError where they do not arrive, or other rows do.
    """
    if mesh.expert_mesh is None:
        return
    size = mesh.expert
    own = mesh.expert_mesh.get_local_rank()

    def rows_between(sender: int, receiver: int) -> int:
        return EXPERT_ROWS * ((sender + 2 * receiver + 1) % (size + 1))

    def rows(sender: int, receiver: int) -> Tensor:
        """Which no other pair of ranks sends."""
        shape = (rows_between(sender, receiver), EXPERT_ROW_NUMBERS)
        return torch.full(shape, float(sender * size + receiver), device=mesh.device)

    sent = [rows_between(own, receiver) for receiver in range(size)]
    arriving = [rows_between(sender, own) for sender in range(size)]
    right_rows = list[bool]()

    def exchange_and_compare() -> None:
        numbers = torch.cat([rows(own, receiver) for receiver in range(size)])
        received = torch.full((sum(arriving), EXPERT_ROW_NUMBERS), -1.0, device=mesh.device)
        dist.all_to_all_single(received, numbers, arriving, sent, group=mesh.expert_group)
        expected = torch.cat([rows(sender, own) for sender in range(size)])
        right_rows.append(torch.equal(received, expected))  # waits for the device

    mesh.barrier()
    failure = run_within(links.LINK_SECONDS, exchange_and_compare)
    _refuse_missing(mesh, failure, "the experts' rows did not arrive", where=ALL_TO_ALL)
    _refuse_wrong(
        mesh,
        facts_by_rank,
        all(right_rows),
        "received wrong rows for its experts",
        where=ALL_TO_ALL,
    )


def _refuse_missing(mesh: Mesh, failure: str, problem: str, *, where: str) -> None:
    """Raises UserError where a rank had a failure: all wait for the one that is missing, and none can name it."""
    if mesh.any_rank(bool(failure)):
        first_failure = next(text for text in mesh.all_gather_json(failure) if text)
        raise UserError(f"{problem}: {first_failure}", where=where, fix=COLLECTIVE_FIX)


def _refuse_wrong(
    mesh: Mesh, facts_by_rank: Sequence[RankFacts], is_right: bool, problem: str, *, where: str
) -> None:
    """Raises UserError with the ranks where what arrived is not right."""
    right_by_rank = mesh.all_gather_floats(is_right)
    wrong_ranks = [rank for rank, (right,) in enumerate(right_by_rank) if not right]
    if wrong_ranks:
        raise _at_fault(
            facts_by_rank,
            wrong_ranks,
            f"{_named(facts_by_rank, wrong_ranks)} {problem}",
            where=where,
            fix=COLLECTIVE_FIX,
        )


# Where the ranks run


def check_binding(mesh: Mesh) -> BindingReport | None:
    """Prints where this rank runs; on every rank the verdict on all of them. None for one rank alone."""
    if mesh.world == 1:
        return None
    gpu = _gpu_address(mesh.device)
    binding = read_binding(node_name(), rank_environment().local_rank, gpu)
    print(f"binding: rank {mesh.rank} on {binding}", flush=True)
    bindings = [Binding(**entry) for entry in mesh.all_gather_json(asdict(binding))]
    return binding_report(bindings, site=local_site(), is_slurm="SLURM_JOB_ID" in os.environ)


def _gpu_address(device: str) -> str:
    """The PCI address of this rank's GPU; "" on a CPU, and where neither torch nor the kernel gives it."""
    if not is_accelerator(device):
        return ""
    pci_address = properties_of(device).pci_address
    if pci_address:
        return pci_address
    # An older torch counts the devices as `visible_devices` does.
    index = current_index(device)
    devices = visible_devices(detect())
    return devices[index].pci_address if index < len(devices) else ""

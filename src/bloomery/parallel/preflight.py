"""Before the first step: ranks meet, compare what they are and try their links. The rank at fault is named."""

import hashlib
import json
import os
import platform
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist

from bloomery.core import __version__
from bloomery.core.errors import UserError
from bloomery.core.units import format_bytes, format_seconds
from bloomery.data.shards import read_manifest
from bloomery.parallel import process_group
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.process_group import RanksMissing, join
from bloomery.plan.types import RunPlan, TrainPlan

SHARED_SECONDS = 5.0  # until a file of rank 0 is visible on every host
# float32 in the timed all-reduce
CPU_NUMBERS = 2**18
GPU_NUMBERS = 2**24


@final
@dataclass(frozen=True)
class Preflight:
    """Result of the checks. `bytes_per_second`: bus bandwidth of the all-reduce, as in nccl-tests; `hosts`: by rank."""

    hosts: tuple[str, ...]
    bytes_per_second: float
    reduced_bytes: int
    free_bytes: int
    seconds: float

    def __str__(self) -> str:
        hosts = Counter(self.hosts)
        where = ", ".join(f"{count} on {host}" for host, count in hosts.items())
        rate = f"all-reduce of {format_bytes(self.reduced_bytes)} at {format_bytes(int(self.bytes_per_second))}/s"
        return f"{len(self.hosts)} ranks ({where}) agree; {rate}; {format_bytes(self.free_bytes)} of disk are free"


def meet(plan: TrainPlan) -> Mesh:
    """`join`, with its errors in one sentence. Raises UserError."""
    rank = os.environ.get("RANK", "0")
    address = os.environ.get("MASTER_ADDR", "")
    if plan.ranks > 1 and plan.device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"rank {rank} on {platform.node()} sees no GPU",
            where="HIP_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES, CUDA_VISIBLE_DEVICES",
            fix="give each rank a GPU, or start fewer processes",
        )
    try:
        return join(plan)
    except RanksMissing as error:
        missing = " and ".join(f"rank {each}" for each in error.ranks[:3])
        more = f" and {len(error.ranks) - 3} more" if len(error.ranks) > 3 else ""
        raise UserError(
            f"{missing}{more} of {plan.ranks} did not arrive within {format_seconds(process_group.JOIN_SECONDS)}",
            where="the meeting of all ranks before the first step"
            + (f", at {address}" if address else ""),
            fix="read the output of that rank; start as many processes as the launcher names, with the same command",
        ) from error
    except RuntimeError as error:
        reason = str(error)
        port = os.environ.get("MASTER_PORT", "")
        if "EADDRINUSE" in reason or "address already in use" in reason:
            raise UserError(
                f"port {port} of {address} is taken, so the ranks cannot meet",
                where=f"MASTER_PORT={port}",
                fix="unset MASTER_PORT, or set a free one",
            ) from error
        if isinstance(error, dist.DistError):
            at = f" at {address}:{port}" if address else ""
            first_line = reason.partition("\n")[0][:200]
            raise UserError(
                f"rank {rank} on {platform.node()} could not join the other ranks{at}: {first_line}",
                where="MASTER_ADDR, MASTER_PORT",
                fix="all hosts must reach that address; see whether another rank ended before",
            ) from error
        raise


def check_ranks(mesh: Mesh, plan: RunPlan, run_dir: Path) -> Preflight | None:
    """Raises UserError, with the same sentence on every rank, when one of them cannot train with the others.

    None for one rank alone.
    """
    if mesh.world == 1:
        return None
    began = time.perf_counter()
    token = mesh.broadcast_str(secrets.token_hex(8))
    shared = run_dir / ".tmp-shared"
    if mesh.first_rank:
        shared.write_text(token)
    mesh.barrier()
    facts = [
        dict(json.loads(each))
        for each in mesh.all_gather_str(json.dumps(_facts(plan, shared, token)))
    ]
    mesh.barrier()
    if mesh.first_rank:
        shared.unlink(missing_ok=True)
    for check in CHECKS:
        if (error := check(facts)) is not None:
            raise error
    size, rate = _all_reduce(mesh, facts)
    return Preflight(
        hosts=tuple(str(fact["host"]) for fact in facts),
        bytes_per_second=rate,
        reduced_bytes=size,
        free_bytes=shutil.disk_usage(run_dir).free,
        seconds=time.perf_counter() - began,
    )


def _facts(plan: RunPlan, shared: Path, token: str) -> dict[str, Any]:
    """Of this rank: less than mesh.STRING_BYTES as JSON."""
    deadline = time.monotonic() + SHARED_SECONDS
    while (
        not (seen := shared.is_file() and shared.read_text() == token)
        and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    device = ""
    if plan.train.device == "cuda":
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        device = str(getattr(properties, "uuid", "") or getattr(properties, "pci_bus_id", ""))
    try:
        read_manifest(plan.data.prepared)
        unreadable = ""
    except (UserError, OSError) as error:
        reason = error.problem if isinstance(error, UserError) else str(error.strerror)
        unreadable = f"{plan.data.prepared}: {reason}"[-200:]
    return {
        "host": platform.node()[:100],
        "torch": torch.__version__,
        "bloomery": __version__,
        "plan": hashlib.sha256(plan.model_dump_json().encode()).hexdigest()[:16],
        "device": device,
        "shared": seen,
        "unreadable": unreadable,
    }


def _named(facts: Sequence[Mapping[str, Any]], ranks: Sequence[int]) -> str:
    return " and ".join(f"rank {rank} on {facts[rank]['host']}" for rank in ranks[:3])


def _shared(facts: Sequence[Mapping[str, Any]]) -> UserError | None:
    blind = [rank for rank, fact in enumerate(facts) if not fact["shared"]]
    if not blind:
        return None
    problem = f"{_named(facts, blind)} does not see what rank 0 writes into the run folder"
    return UserError(problem, where="--run-dir", fix="use a folder that all hosts share")


def _versions(facts: Sequence[Mapping[str, Any]]) -> UserError | None:
    """The rank whose version is not that of most."""
    fixes = {
        "torch": "install the same torch on all hosts",
        "bloomery": "install the same Bloomery on all hosts",
        "plan": "use a run folder that all hosts share; then `bloomery resume`",
    }
    for key, fix in fixes.items():
        usual, count = Counter(fact[key] for fact in facts).most_common(1)[0]
        if count < len(facts):
            usual = facts[0][key] if 2 * count <= len(facts) else usual
            others = [rank for rank, fact in enumerate(facts) if fact[key] != usual]
            name = {"bloomery": "Bloomery", "plan": "another plan,"}.get(key, key)
            problem = f"{_named(facts, others)} has {name} {facts[others[0]][key]}, and the other ranks have {usual}"
            return UserError(problem, where="the environment of that rank", fix=fix)
    return None


def _readable(facts: Sequence[Mapping[str, Any]]) -> UserError | None:
    """Names the ranks that cannot read the prepared dataset; None when all can."""
    blind = [rank for rank, fact in enumerate(facts) if fact["unreadable"]]
    if not blind:
        return None
    problem = f"{_named(facts, blind)} cannot read the prepared dataset"
    fix = "mount that folder on all hosts, with permission to read"
    return UserError(problem, where=str(facts[blind[0]]["unreadable"]), fix=fix)


def _own_devices(facts: Sequence[Mapping[str, Any]]) -> UserError | None:
    users: dict[tuple[str, str], list[int]] = {}
    for rank, fact in enumerate(facts):
        if fact["device"]:
            users.setdefault((fact["host"], fact["device"]), []).append(rank)
    for ranks in users.values():
        if len(ranks) > 1:
            problem = f"{_named(facts, ranks)} use the same GPU"
            return UserError(
                problem, where=str(facts[ranks[0]]["device"]), fix="start one process per GPU"
            )
    return None


CHECKS: tuple[Callable[[Sequence[Mapping[str, Any]]], UserError | None], ...] = (
    _shared,
    _versions,
    _readable,
    _own_devices,
)


def _all_reduce(mesh: Mesh, facts: Sequence[Mapping[str, Any]]) -> tuple[int, float]:
    """Bytes of one all-reduce, and its bus bandwidth: the best of three. Raises UserError for a wrong sum."""
    count = GPU_NUMBERS if mesh.device == "cuda" else CPU_NUMBERS
    best = float("inf")
    for _ in range(3):
        numbers = torch.full((count,), float(mesh.rank + 1), device=mesh.device)
        mesh.barrier()
        began = time.perf_counter()
        mesh.all_reduce(numbers)
        right = bool((numbers == mesh.world * (mesh.world + 1) / 2).all())  # waits for the device
        best = min(best, time.perf_counter() - began)
    wrong = [rank for rank, (good,) in enumerate(mesh.all_gather_floats(right)) if not good]
    if wrong:
        problem = f"{_named(facts, wrong)} received a wrong sum of all ranks"
        fix = "`bloomery doctor --probe`; on AMD check that iommu=pt is set, and NCCL_P2P_DISABLE=1"
        raise UserError(problem, where="all-reduce before the first step", fix=fix)
    size = count * 4
    return size, 2 * (mesh.world - 1) / mesh.world * size / best

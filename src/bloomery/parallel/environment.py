"""The process of a rank: which one it is, where the ranks meet, how many files it may open. Does not import torch."""

import os
import platform
import resource
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

from bloomery.core.errors import UserError
from bloomery.plan.types import TrainPlan

# Variable: a file of this machine where the ranks meet. Without it they meet at MASTER_ADDR and MASTER_PORT.
RENDEZVOUS = "BLOOMERY_RENDEZVOUS"
# A rank holds a socket for each rank that it is connected to. Besides these: pipes and logs of a process at its start
# (measured: 19), then shards of the dataset, checkpoints.
LEAST_FILES = 32
USUAL_FILES = 512


class LinkFailed(UserError):
    """GPUs cannot send to each other, and their hosts can."""


@final
@dataclass(frozen=True)
class RankEnvironment:
    """`local_rank` counts the ranks of one host. Empty strings: the launcher did not set the variable."""

    rank: int
    local_rank: int
    rendezvous_file: str
    address: str
    port: str


def rank_environment() -> RankEnvironment:
    """A process without a launcher is rank 0."""
    return RankEnvironment(
        rank=int(os.environ.get("RANK", "0")),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        rendezvous_file=os.environ.get(RENDEZVOUS, ""),
        address=os.environ.get("MASTER_ADDR", ""),
        port=os.environ.get("MASTER_PORT", ""),
    )


def node_name() -> str:
    """This host, as Slurm names it where it started this process."""
    return os.environ.get("SLURMD_NODENAME") or platform.node() or "localhost"


def hosts_at_fault(hosts: Sequence[str], ranks: Iterable[int]) -> str:
    """The hosts of these ranks, "n3,n4"; "" where that is every host, so that none would be left.

    `hosts`: by rank; empty where all ranks are on one.
    """
    if not hosts:
        return ""
    names = dict.fromkeys(hosts[rank] for rank in ranks)
    return "" if len(names) == len(set(hosts)) else ",".join(names)


def without_host(host: str) -> str:
    """The line that starts the same ranks without this host ("n3,n4": without these), by what started this process."""
    if "SLURM_JOB_ID" in os.environ:
        return (
            f"`#SBATCH --exclude={host}` in the job script, or `sbatch --exclude={host}`,"
            f" or `bloomery slurm RECIPE --exclude {host}`"
        )
    return f"start the ranks on other hosts than {host}"


def most_sockets(plan: TrainPlan, rank: int) -> int:
    """Where every rank of a group is connected to every other one: gloo holds N sockets for N ranks (measured).

    Groups: of all ranks, of the threads that save, and those of `process_group`. Rank 0 has the store, to which all
    connect.
    """
    groups = [plan.ranks, plan.ranks]
    if plan.shard > 1:
        groups += [size for size in (plan.pipeline, plan.replicate, plan.shard) if size > 1]
    if plan.context not in (1, plan.ranks):
        groups.append(plan.context)
    if plan.pipeline > 1:
        groups += [plan.ranks_per_stage, plan.pipeline, 2]
    return sum(groups) + (plan.ranks if rank == 0 else 1)


def allow_descriptors(sockets: int, *, who: str) -> None:
    """Raises the soft limit of this process to what it needs, as far as the hard limit allows.

    Raises UserError where the hard limit is too small: later some library would fail at its first new file. `who`: in
    that error, such as "rank 0 on node1".
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < sockets + LEAST_FILES:
        needed = sockets + USUAL_FILES
        raise UserError(
            f"{who} needs {sockets:,} sockets, and may open {hard:,} files at most",
            where="hard limit of open files, `ulimit -Hn`",
            fix=f"let the administrator set it to {needed:,} or more (nofile in /etc/security/limits.conf,"
            " LimitNOFILE of the service that starts the job), or start fewer ranks",
        )
    wanted = sockets + USUAL_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

"""Which rank this process is, and where the ranks meet: the variables that a launcher sets. Does not import torch."""

import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

from bloomery.core.errors import UserError

# Variable: a file of this machine where the ranks meet. Without it they meet at MASTER_ADDR and MASTER_PORT.
RENDEZVOUS = "BLOOMERY_RENDEZVOUS"


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

"""The limit of open files: a rank holds a socket for each rank that it is connected to. Does not import torch."""

import resource

from bloomery.core.errors import UserError
from bloomery.plan.types import TrainPlan

# Besides sockets: pipes and logs of a process at its start (measured: 19), then shards of the dataset, checkpoints.
LEAST_FILES = 32
USUAL_FILES = 512


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

"""Starts the scoring processes of a host, and connects the training ranks of that host with them.

Such a process is no rank: it has no part of the model, takes no step, and nothing of it is in a checkpoint. The first
training ranks of a host start them as children, which end with them however they end; the others find them by a socket
of the host.
"""

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import final

from bloomery.core.child import Channel, Child
from bloomery.core.device import is_accelerator, num_devices
from bloomery.core.errors import UserError
from bloomery.parallel.environment import node_name, rank_environment
from bloomery.parallel.mesh import Mesh
from bloomery.plan.types import RunPlan
from bloomery.train.scorers.client import Scorer, Scorers

WORKER = "bloomery.train.scorers.worker"
LONGEST_FOLDER = (
    70  # bytes of the path of temporary files: with a name in it, a socket takes 104 on macOS
)


@final
@dataclass(frozen=True)
class LocalRanks:
    """The training ranks of this host, and which scoring processes serve which of them.

    `index`: of this rank among the `count` ranks of its host.
    """

    index: int
    count: int
    scorers: int

    @property
    def own(self) -> tuple[int, ...]:
        """The scoring processes that serve this rank: one that it shares, or several of its own."""
        return self._of(self.index)

    @property
    def started(self) -> tuple[int, ...]:
        """Those that this rank starts: the first that they serve."""
        return tuple(scorer for scorer in range(self.scorers) if scorer % self.count == self.index)

    def clients(self, scorer: int) -> int:
        """How many ranks a scoring process serves."""
        return sum(scorer in self._of(index) for index in range(self.count))

    def _of(self, index: int) -> tuple[int, ...]:
        own = tuple(scorer for scorer in range(self.scorers) if scorer % self.count == index)
        return own or (index % self.scorers,)


@contextmanager
def scoring_processes(plan: RunPlan, mesh: Mesh, run_dir: Path) -> Iterator[Scorers | None]:
    """Those of this rank, which load their models meanwhile; None where the plan has none. All ranks call it.

    None of them is left behind when the block ends, or this process does. Raises UserError where the host has no device
    for one.
    """
    if plan.train.scoring_devices == 0:
        yield None
        return
    hosts = mesh.all_gather_json(node_name())
    own_host = hosts[mesh.rank]
    ranks_here = [rank for rank, host in enumerate(hosts) if host == own_host]
    local_ranks = LocalRanks(
        ranks_here.index(mesh.rank), len(ranks_here), plan.train.scoring_devices
    )
    resume_command = f"bloomery resume {run_dir.name}"
    with ExitStack() as stack:
        paths = dict[int, str]()
        for scorer in local_ranks.started:
            device_index = first_scoring_device(plan, local_ranks.count) + scorer
            socket_path = stack.enter_context(_process(plan, scorer, device_index, local_ranks))
            paths[scorer] = str(socket_path)
        paths_by_rank = mesh.all_gather_json({str(scorer): paths[scorer] for scorer in paths})
        paths_here = {
            int(scorer): path for rank in ranks_here for scorer, path in paths_by_rank[rank].items()
        }
        scorers = []
        for scorer in local_ranks.own:
            channel = Channel(_connected(paths_here[scorer]))
            stack.callback(channel.close)
            scorers.append(
                Scorer(channel, _name(plan, scorer, own_host), resume_command=resume_command)
            )
        # Everyone is connected: nobody needs the paths of the sockets any more.
        mesh.barrier()
        for path in paths.values():
            shutil.rmtree(Path(path).parent, ignore_errors=True)
        yield Scorers(scorers)


def first_scoring_device(plan: RunPlan, ranks: int) -> int:
    """The number of the first device after those that train. Raises UserError where there are too few.

    `ranks`: those that train on this host.
    """
    device = plan.train.device
    if not is_accelerator(device):
        return 0
    needed = ranks + plan.train.scoring_devices
    visible = num_devices(device)
    if visible < needed:
        raise UserError(
            f"{node_name()} has no device for scoring: rank {rank_environment().rank} sees {visible:,},"
            f" and {ranks:,} train",
            where=f"parallel.scoring_devices={plan.train.scoring_devices}",
            fix=f"let each process see {needed:,} devices, start fewer processes on each host, or set"
            " parallel.scoring_devices=0",
        )
    return ranks


def _name(plan: RunPlan, scorer: int, host: str) -> str:
    models = "the teacher" if plan.objective.taught_by is not None else "the reward models"
    return f"scoring process {scorer} on {host}, with {models},"


@contextmanager
def _process(
    plan: RunPlan, scorer: int, device_index: int, local_ranks: LocalRanks
) -> Iterator[Path]:
    """The path of the socket where a new scoring process serves its ranks."""
    # Only this user may enter the folder of the socket, whose path the kernel limits.
    is_long = len(tempfile.gettempdir()) > LONGEST_FOLDER
    folder = Path(tempfile.mkdtemp(prefix="bloomery-", dir="/tmp" if is_long else None))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        path = folder / "scorer"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(path))
            clients = local_ranks.clients(scorer)
            listener.listen(clients)
            job = {
                "plan": plan.model_dump_json(),
                "device_index": device_index,
                "listener": listener.fileno(),
                "clients": clients,
            }
            child = Child(
                WORKER,
                job,
                environment=os.environ,
                inherited=(listener.fileno(),),
                on_line=partial(_print_line, scorer),
            )
            stack.enter_context(child)
        yield path


def _print_line(scorer: int, line: str) -> None:
    print(f"[scoring process {scorer}] {line}", flush=True)


def _connected(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(path)
    return connection

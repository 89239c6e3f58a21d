"""Ranks that torchrun, accelerate, srun or mpirun started: who this process is, and what the ranks agree on. No torch.

Each started process supervises one rank. Rank 0 prepares, plans and writes the run folder; it tells the others when
they may start and how the training ended, and each of them tells how its rank ended (`Board`).
"""

import json
import os
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol, final

from bloomery.core.child import LOOPBACK_INTERFACE
from bloomery.core.errors import UserError
from bloomery.core.files import read_whole, write_durably
from bloomery.core.ports import free_port, is_taken, port_taken
from bloomery.core.run_folder import RunFolder, propose_folder
from bloomery.core.run_lock import host_name, start_mark, worked_on
from bloomery.launch.rank_messages import (
    FILES_SECONDS,
    Member,
    MessageClient,
    MessageServer,
    State,
)
from bloomery.parallel.collective_notes import CollectiveNote
from bloomery.parallel.environment import node_name
from bloomery.recipe.schema import MOST_RANKS

# In this order: who set the variables, and those of rank, number of ranks, rank on this host, ranks on this host.
VARIABLES = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
    ("srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", ""),
    (
        "mpirun (Open MPI)",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("mpiexec (PMI)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
JOB_IDS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PBS_JOBID", "LSB_JOBID", "SLURM_JOB_ID")
RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
LOOPBACK = ("localhost", "127.0.0.1", "::1")
# Keeps this name: a job that is started again after an update finds by it that the run is its own (`began_by_job`).
MESSAGE_FILE = "word.json"
SERVER_FILE = "server.json"  # where rank 0 listens for the others
FIRST_MESSAGE_SECONDS = 300.0  # for rank 0 to lock the run folder
GONE_SECONDS = 15.0  # between two sights of its lock
POLL_SECONDS = 0.2
QUIET_SECONDS = 10.0  # a process that waits for another rank longer says so
SECOND_START_SECONDS = 3.0  # until the process that has locked the run folder shows its rank


@final
@dataclass(frozen=True)
class RankLaunch:
    """The place of this process among those that `launcher` started.

    `job`: the same for all ranks and for every restart of them; "" where the launcher names none. `start`: the same
    for all ranks, another after a restart. `meeting`: the same too, for processes with other numbers of ranks as well.
    `address`: of rank 0's host, None where the launcher does not set it.
    """

    launcher: str
    rank: int
    world: int
    local_rank: int
    local_world: int
    job: str
    start: str
    meeting: str
    address: str | None = None
    port: int | None = None
    # Which variables gave the rank and the number of ranks.
    variables: tuple[str, str] = ("RANK", "WORLD_SIZE")

    @property
    def alone(self) -> bool:
        """Whether all ranks run on this host."""
        return self.local_world >= self.world

    @property
    def hosts(self) -> int:
        return max(1, self.world // self.local_world)

    def __str__(self) -> str:
        return f"{self.launcher}: rank {self.rank} of {self.world}, {self.local_world} on this host"


def current_launch(environment: Mapping[str, str] | None = None) -> RankLaunch | None:
    """The launcher of this process, from the variables of `environment` (default: its own); None without several ranks.

    A launcher may start one process of another on each host: then the variables of more ranks count. The batch script
    of a Slurm job is not a rank. Raises UserError where the variables contradict each other.
    """
    environment = os.environ if environment is None else environment
    launchers = [
        names
        for names in VARIABLES
        if environment.get(names[1])
        and environment.get(names[2])
        and (names[0] != "srun" or "SLURM_STEP_ID" in environment or "SLURM_STEPID" in environment)
        # SLURM_NTASKS counts the tasks of the job; this step may have fewer.
        and (names[2] != "SLURM_NTASKS" or "SLURM_STEP_NUM_TASKS" not in environment)
    ]
    for names in launchers:
        _refuse_malformed(environment, names)
    if not launchers:
        return None
    names = max(launchers, key=lambda variable_names: int(environment[variable_names[2]]))
    rank = int(environment[names[1]])
    world = int(environment[names[2]])
    if world <= 1:
        return None
    if world > MOST_RANKS:
        problem = f"{names[2]}={world:,} ranks: at most {MOST_RANKS:,} train together"
        raise UserError(
            problem, where="the environment", fix=f"unset {names[2]}, or correct it", code=2
        )
    if not 0 <= rank < world:
        problem = f"{names[1]}={rank} is not a rank of {names[2]}={world}"
        raise UserError(
            problem, where="the environment", fix=f"unset both, or start {world} processes", code=2
        )
    address = environment.get("MASTER_ADDR")
    local_world = _number(environment, names[4])
    if local_world is None and names[0] == "srun":
        local_world = _local_tasks(environment)
    if local_world is None:
        local_world = world if address in (*LOOPBACK, None, host_name()) else 1
    local_rank = _number(environment, names[3])
    launcher = names[0]
    if any(name.startswith("ACCELERATE_") for name in environment) and launcher == "torchrun":
        launcher = "accelerate launch"
    elif launcher == "torchrun" and "TORCHELASTIC_RUN_ID" not in environment:
        launcher = "RANK and WORLD_SIZE"
    job = _job(environment, names[0], alone=local_world >= world)
    store = [environment.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT")]
    restarts = [environment.get(name, "") for name in RESTARTS]
    # Variables set by hand: one parent need not have started all processes, and they meet at one port.
    by_hand = launcher == "RANK and WORLD_SIZE" and all(store)
    # The agent of torchrun listens at its port itself.
    port = None if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else _port(environment)
    return RankLaunch(
        launcher,
        rank,
        world,
        rank % local_world if local_rank is None else local_rank,
        local_world,
        job,
        start="/".join(["" if by_hand else job, str(world), *store, *restarts]),
        meeting="/".join([*(store if by_hand else [job]), *restarts]),
        address=address,
        port=port,
        variables=(names[1], names[2]),
    )


def _refuse_malformed(environment: Mapping[str, str], names: Sequence[str]) -> None:
    """Raises UserError for a variable of this launcher that is not a number, and for zero ranks."""
    for name, minimum in ((names[1], 0), (names[2], 1), (names[3], 0), (names[4], 1)):
        if (
            not name
            or not environment.get(name)
            or (environment[name].isdecimal() and int(environment[name]) >= minimum)
        ):
            continue
        expected = "a positive number" if minimum else "a rank, which is 0 or a positive number"
        fix = f"unset {names[1]} and {names[2]} to train without a launcher, or correct it"
        raise UserError(
            f"{name}={environment[name][:40]} is not {expected}",
            where="the environment",
            fix=fix,
            code=2,
        )


def _port(environment: Mapping[str, str]) -> int | None:
    """Where the ranks meet; None where no variable names a port. Raises UserError for a text that is none."""
    text = environment.get("MASTER_PORT", "")
    if text and not (text.isdecimal() and 0 < int(text) < 65536):
        problem = f"MASTER_PORT={text[:40]} is not a port"
        raise UserError(
            problem,
            where="the environment",
            fix="unset it, or set a number from 1 to 65535",
            code=2,
        )
    return int(text) if text else None


def _number(environment: Mapping[str, str], name: str) -> int | None:
    return int(environment[name]) if environment.get(name, "").isdecimal() else None


def _local_tasks(environment: Mapping[str, str]) -> int | None:
    """Of "4(x2),3": tasks of each node, in the order of the nodes."""
    counts = list[int]()
    for word in environment.get(
        "SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE", "")
    ).split(","):
        if (part := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", word)) is not None:
            counts += [int(part[1])] * int(part[2] or 1)
    node = _number(environment, "SLURM_NODEID") or 0
    return counts[node] if node < len(counts) else None


def _job(environment: Mapping[str, str], launcher: str, *, alone: bool) -> str:
    """`alone`: all ranks run on this host."""
    if launcher == "srun":
        step = environment.get("SLURM_STEP_ID", environment.get("SLURM_STEPID", "0"))
        return (
            f"slurm-{environment.get('SLURM_JOB_ID', environment.get('SLURM_JOBID', '0'))}.{step}"
        )
    if launcher == "torchrun":
        run_id = environment.get("TORCHELASTIC_RUN_ID", "none")
        if run_id != "none":
            return f"torchrun-{run_id}"
        # The path is LOGS/none_RANDOM/attempt_N/RANK/error.json.
        report = Path(environment.get("TORCHELASTIC_ERROR_FILE", ""))
        if alone and len(report.parents) > 3:
            return f"torchrun-{report.parents[2].name}"
    else:
        for name in JOB_IDS:
            if environment.get(name):
                return f"mpi-{environment[name]}"
    parent = os.getppid()
    mark = (start_mark(parent) or "").rpartition(" ")[2]
    return f"{parent}-{mark}" if alone and parent > 1 else ""


def new_folder(recipe_name: str) -> Path:
    """The folder of a new run: `runs/<recipe>-<date>-<time>`; under a launcher `runs/<recipe>-<job>`.

    Raises UserError where the launcher names no job.
    """
    launch = current_launch()
    if launch is None:
        return propose_folder(recipe_name)
    if not launch.job:
        raise UserError(
            f"{launch.launcher} does not give its ranks a common name, so they cannot agree on a run folder",
            where="--run-dir",
            fix="pass --run-dir DIR, the same to all ranks; or torchrun --rdzv-id NAME",
            code=2,
        )
    return Path("runs").absolute() / job_run_name(recipe_name, launch.job)


def job_run_name(recipe_name: str, job: str) -> str:
    """The name of the run that a launcher's job trains: slurm-4711.1 is step 1 of Slurm's job 4711."""
    return re.sub(r"[^\w.-]+", "-", f"{recipe_name[:80]}-{job}").strip("-.")[:200]


class Ended(Protocol):
    """How a child ended: `StageResult`."""

    @property
    def code(self) -> int: ...
    @property
    def report(self) -> dict[str, Any] | None: ...
    @property
    def tail(self) -> tuple[str, ...]: ...
    @property
    def silent(self) -> bool: ...
    @property
    def note(self) -> CollectiveNote | None: ...


@final
@dataclass(frozen=True)
class StartMessage:
    """The message of rank 0 to the others: train now (again: `attempt`), or the exit code.

    `saving`: the ranks have agreed to save and to stop.
    """

    start: str
    job: str
    attempt: int
    resumed: bool
    address: str
    port: int
    code: int | None = None
    saving: bool = False


@final
class Board:
    """What the processes of one launch tell each other, through messages; the folder `ranks` of the run keeps it.

    Where no connection comes about, the files of that folder are read instead, every few seconds.
    """

    def __init__(self, folder: RunFolder, launch: RankLaunch) -> None:
        self._folder = folder
        self.launch = launch
        self.path = folder.path / "ranks"
        self.message: StartMessage | None = None
        self.met_rank_0 = False  # as another rank: whether rank 0 has been seen at work
        own = Member(launch.rank, launch.world, os.getpid(), node_name(), launch.meeting)
        self._server = MessageServer(own, launch.variables)
        self._client = MessageClient(own, self.path / SERVER_FILE, self._state_of_files)
        self._ends = dict[int, dict[str, Any]]()  # as rank 0: those that were read in files
        self._look_at = 0.0
        self._all_met = False

    def open(self) -> None:
        """As rank 0, which holds the lock: messages of earlier starts no longer count.

        Raises UserError where this host cannot listen.
        """
        with suppress(OSError):
            (self.path / MESSAGE_FILE).unlink(missing_ok=True)
        self._server.start(self.path / SERVER_FILE, None if self.launch.alone else self._address)

    def close(self) -> None:
        """Everything that was told is sent; nothing more is heard."""
        self._client.close()
        self._server.close()

    def refuse_second_start(self) -> None:
        """As a rank 0 that could not lock the run folder.

        Raises UserError where another rank 0 of this launch holds the lock.
        """
        self._client.start()
        deadline = time.monotonic() + SECOND_START_SECONDS
        while time.monotonic() < deadline:
            if (mistake := self._client.state.error()) is not None:
                raise mistake
            time.sleep(POLL_SECONDS)

    def mistake(self) -> UserError | None:
        """The mistake of the launch, such as two processes with one rank; None once all ranks have met."""
        return self._server.mistake() if self.launch.rank == 0 else self._client.state.error()

    def met(self) -> None:
        """As rank 0: training has begun on all ranks."""
        self._server.met()
        self._all_met = True

    def absent(self) -> str:
        """As rank 0: the ranks that have not come, in words; "" where all have, or training has begun."""
        world = self.launch.world
        present = self._server.present_ranks()
        absent_ranks = [rank for rank in range(world) if rank not in present]
        if self._all_met or not absent_ranks:
            return ""
        return f"{len(absent_ranks):,} of {world:,} ranks, such as rank {absent_ranks[0]}"

    @property
    def _address(self) -> str:
        """The address of rank 0's host, for the other ranks."""
        launch = self.launch
        return launch.address or ("127.0.0.1" if launch.alone else socket.gethostname())

    def refuse_taken_port(self) -> None:
        """As rank 0, before it prepares data: the ranks meet after that, which may be hours later.

        Raises UserError.
        """
        port = self.launch.port
        if port is not None and is_taken(port):
            raise port_taken(self._address, port)

    def begin(self, *, resumed: bool) -> None:
        """As rank 0, writes the message with which the others start to train."""
        attempt = 0 if self.message is None else self.message.attempt + 1
        self.path.mkdir(exist_ok=True)
        for end_file in self.path.glob("end-*.json"):
            end_file.unlink(missing_ok=True)
        self._ends = {}
        launch = self.launch
        address = self._address
        port = launch.port if launch.port is not None and not attempt else free_port()
        self.message = StartMessage(launch.start, launch.job, attempt, resumed, address, port)
        self._write()
        self._publish()

    def save(self) -> None:
        """As rank 0: the ranks have agreed to save and to stop."""
        if self.message is not None and not self.message.saving:
            self.message = replace(self.message, saving=True)
            self._publish()
            with suppress(OSError):  # a full disk: the save reports that
                self._write()

    def conclude(self, code: int) -> None:
        """As rank 0, writes the last message: the exit code with which every rank ends."""
        last_message = self.message or StartMessage(
            self.launch.start, self.launch.job, -1, resumed=False, address="", port=0
        )
        if last_message.code is None:
            self.message = replace(last_message, code=code)
            self._publish()
            # A full disk, or a deleted folder: a rank without a connection sees that the lock is gone.
            with suppress(OSError):
                self.path.mkdir(exist_ok=True)
                self._write()

    def _publish(self) -> None:
        assert self.message is not None
        self._server.publish(asdict(self.message), self.message.attempt)

    def _write(self) -> None:
        assert self.message is not None
        write_durably(self.path / MESSAGE_FILE, json.dumps(asdict(self.message)))

    def _state_of_files(self) -> State:
        """As another rank without a connection."""
        message = message_in(self._folder)
        version = ""
        with suppress(OSError):
            status = (self.path / MESSAGE_FILE).stat()
            version = f"{status.st_ino} {status.st_mtime_ns}"
        return State(
            message=None if message is None else asdict(message),
            version=version,
            works=worked_on(self._folder.path),
        )

    def _message_of(self, state: State) -> StartMessage | None:
        """None without one of this start."""
        message = None if state.message is None else StartMessage(**state.message)
        return message if message is not None and message.start == self.launch.start else None

    def wait(
        self, stopped: Callable[[], bool], say: Callable[[str], None] = lambda _: None
    ) -> StartMessage | None:
        """As another rank: the message that begins the next attempt, or ends the run; it is then `message`.

        `say` gets a sentence where rank 0 does not come. None when it has ended without a message, or `stopped()`
        became true. Raises UserError for a mistake of the launch.
        """
        self._client.start()
        previous_attempt = -1 if self.message is None else self.message.attempt
        patience = FIRST_MESSAGE_SECONDS if self.message is None else GONE_SECONDS
        began = time.monotonic()
        deadline = began + patience
        has_said = False
        since_ended: float | None = None
        first_version: str | None = None
        while not stopped() and time.monotonic() < deadline:
            state = self._client.state
            if (mistake := state.error()) is not None:
                raise mistake
            if first_version is None and state.looked:
                first_version = state.version
            message = self._message_of(state)
            if state.works:
                self.met_rank_0 = True
                deadline = time.monotonic() + GONE_SECONDS
            elif not self.met_rank_0 and not has_said and time.monotonic() - began > QUIET_SECONDS:
                has_said = True
                say(
                    f"for rank 0, at most {patience:.0f} s: it does not work in {self._folder.path} yet"
                )
            if message is not None and message.code is not None:
                since_ended = since_ended or time.monotonic()
                # Of this start, or of one before that had the same variables: rank 0 is then about to begin.
                is_new = state.version != first_version
                is_late = time.monotonic() - since_ended > GONE_SECONDS
                if self.message is not None or state.works or is_new or is_late:
                    self.message = message
                    return message
            elif message is not None and message.attempt > previous_attempt and state.works:
                self.message = message
                return message
            elif state.gone:
                return None
            time.sleep(POLL_SECONDS)
        return None

    def over(self) -> bool:
        """As another rank: whether rank 0 has ended this attempt, or is gone."""
        state = self._client.state
        message = self._message_of(state)
        attempt = None if self.message is None else self.message.attempt
        return (
            message is None
            or message.attempt != attempt
            or message.code is not None
            or not state.works
            or state.gone
        )

    def failed(self) -> bool:
        """As another rank: whether rank 0 has said that the run failed, or its host is lost.

        Nobody hears the last words of a rank then.
        """
        state = self._client.state
        message = self._message_of(state)
        return state.gone or (message is not None and message.code not in (None, 0, 75))

    def saves(self) -> bool:
        """As another rank: whether the ranks have agreed to save and to stop."""
        message = self._message_of(self._client.state)
        return message is not None and message.saving

    def leave(self, rank: int, ending: Ended) -> None:
        """Tells rank 0 how a rank ended, and writes it."""
        attempt = None if self.message is None else self.message.attempt
        entry = {
            "code": ending.code,
            "report": ending.report,
            "tail": ending.tail,
            "host": node_name(),
            "attempt": attempt,
            "silent": ending.silent,
            "note": None if ending.note is None else asdict(ending.note),
        }
        self._client.end(attempt, entry)
        with suppress(OSError):
            write_durably(self.path / f"end-{rank}.json", json.dumps(entry))

    def end_of(self, rank: int) -> dict[str, Any] | None:
        """As rank 0: how a rank has ended in this attempt; None while it runs."""
        if time.monotonic() > self._look_at:
            self._look_at = time.monotonic() + FILES_SECONDS
            self._ends |= self._ends_in_files()
        return self._server.end_of(rank) or self._ends.get(rank)

    def _ends_in_files(self) -> dict[int, dict[str, Any]]:
        """By rank, those of this attempt that are not known yet: their messages have not come."""
        ends = {}
        attempt = None if self.message is None else self.message.attempt
        with suppress(OSError):
            for path in self.path.iterdir():
                name = re.fullmatch(r"end-(\d+)\.json", path.name)
                if name is None or self._server.end_of(rank := int(name[1])) is not None:
                    continue
                with suppress(OSError, ValueError, TypeError, UserError):
                    entry = dict(json.loads(read_whole(path)))
                    if entry.get("attempt") in (None, attempt):
                        ends[rank] = entry
        return ends


def message_in(folder: RunFolder) -> StartMessage | None:
    """The last message of any launch in the run folder."""
    with suppress(OSError, ValueError, TypeError, RecursionError, UserError):
        return StartMessage(**json.loads(read_whole(folder.path / "ranks" / MESSAGE_FILE)))
    return None


def began_by_job(folder: RunFolder, launch: RankLaunch) -> bool:
    """Whether an earlier start of the same job began the run of this folder."""
    message = message_in(folder)
    return (
        bool(launch.job)
        and message is not None
        and message.job == launch.job
        and folder.plan.is_file()
    )


def rank_variables(
    launch: RankLaunch, message: StartMessage, environment: Mapping[str, str]
) -> dict[str, str]:
    """The variables of this process's rank."""
    loopback = launch.alone and "GLOO_SOCKET_IFNAME" not in environment
    return {
        "RANK": str(launch.rank),
        "WORLD_SIZE": str(launch.world),
        "LOCAL_RANK": str(launch.local_rank),
        "LOCAL_WORLD_SIZE": str(launch.local_world),
        "MASTER_ADDR": message.address,
        "MASTER_PORT": str(message.port),
        # In the agent's store a later attempt would find the keys of an earlier one.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    } | ({"GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE} if loopback else {})

"""The child processes of a run: start them, follow their events, end them. No torch."""

import json
import math
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, Protocol, final

from bloomery.core.child import FAULTHANDLER, LOOPBACK_INTERFACE, kill_group, python_module
from bloomery.core.errors import UserError
from bloomery.core.run_folder import RunFolder
from bloomery.core.signals import SAVE_SIGNAL, StopRequests, held_back
from bloomery.launch.exit_codes import STOPPED
from bloomery.launch.launchers import QUIET_SECONDS, Board, rank_variables
from bloomery.launch.stage_ends import (
    HOSTS_FILE,
    STACKS,
    Stage,
    StageResult,
    culprit_of,
    dumped_stacks,
    hosts_of_ranks,
    stack_file,
)
from bloomery.monitor.events import Event, Phase, RunStarted, Warned, follow_events
from bloomery.parallel.collective_notes import CollectiveNote, SharedNote
from bloomery.parallel.environment import RENDEZVOUS, node_name
from bloomery.plan.store import read_plan

# Kept of a child's output. As JSON they fit into one message of a rank (`rank_messages.LINE_BYTES`).
TAIL_LINES = 200
TAIL_LINE_CHARACTERS = 1500
POLL_SECONDS = 0.1
SHARED_POLL_SECONDS = 0.7  # of events in a folder that several hosts may share
KILL_WAIT_SECONDS = 10.0
LAST_WORDS_SECONDS = 3.0  # after the first failed rank: the others report, then all are killed
PEER_WORDS_SECONDS = 4.0  # the same where other processes supervise them
AFTER_LOSS_SECONDS = 1.0  # the same where a host is lost
# From a stop request until ranks that do not agree to save are ended; batch systems kill after 30. Long steps get more
# time (`_stop_seconds`).
STOP_SECONDS = 25.0
STACK_SIGNAL = signal.SIGQUIT  # a rank then writes its stack, even inside a collective
WORKER = "bloomery.launch.worker"
# Of a rank whose process is gone without a word.
LOST_END: Mapping[str, Any] = {"code": -signal.SIGKILL, "lost": True}


class RankProcess(Protocol):
    """A rank: a child of this process, or of another that a launcher started."""

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""

    def terminate(self) -> None:
        """Ask it to save and stop."""

    def dump(self) -> None:
        """Ask for its stack."""

    def kill(self) -> None:
        """End it at once."""

    def result(self, stage: Stage, rank: int | None) -> StageResult:
        """How it ended. Waits for the end."""


@final
class _Process:
    """One child, its last lines and its report."""

    def __init__(
        self,
        command: Sequence[str],
        arguments: Sequence[str],
        environment: Mapping[str, str],
        inherited: Sequence[int],
        on_line: Callable[[str], None],
    ) -> None:
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._report, child_end = os.pipe()
        self._note = SharedNote()
        notes = str(self._note.descriptor)
        own_arguments = ["--parent", str(os.getpid()), "--report", str(child_end), "--notes", notes]
        with held_back(SAVE_SIGNAL):
            self.child = subprocess.Popen(
                [*command, *own_arguments, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                encoding="utf-8",
                errors="replace",
                env=dict(environment),
                pass_fds=(child_end, self._note.descriptor, *inherited),
                # Ctrl+C reaches only the parent, and the group can be killed as a whole.
                start_new_session=True,
            )
        os.close(child_end)

        def keep_lines() -> None:
            assert self.child.stdout is not None
            for line in self.child.stdout:
                self.tail.append(line.rstrip("\n")[:TAIL_LINE_CHARACTERS])
                on_line(line.rstrip("\n"))

        self.pump = threading.Thread(target=keep_lines, name="output of a child")
        self.pump.start()

    def poll(self) -> int | None:
        return self.child.poll()

    def terminate(self) -> None:
        self.child.terminate()

    def dump(self) -> None:
        if self.child.poll() is None:
            self.child.send_signal(STACK_SIGNAL)

    def kill(self) -> None:
        kill_group(self.child.pid)

    def result(self, stage: Stage, rank: int | None) -> StageResult:
        """Waits for the end."""
        self.pump.join(KILL_WAIT_SECONDS)
        code = self.child.wait()
        os.set_blocking(self._report, False)
        report = b""
        with suppress(BlockingIOError):  # killed: no report
            report = os.read(self._report, 2**16)
        return StageResult(
            stage,
            code,
            dict(json.loads(report)) if report else None,
            tuple(self.tail),
            rank,
            note=self._note.read(),
        )

    def close(self) -> None:
        self._note.close()
        kill_group(self.child.pid)
        self.child.__exit__(None, None, None)
        os.close(self._report)


@final
class _Peer:
    """A rank that another process supervises: how it ended is on the board."""

    def __init__(self, board: Board, rank: int) -> None:
        self._board = board
        self._rank = rank
        self._ended: Mapping[str, Any] | None = None

    def poll(self) -> int | None:
        if self._ended is None:
            self._ended = self._board.end_of(self._rank)
        return None if self._ended is None else int(self._ended["code"])

    @property
    def is_lost(self) -> bool:
        return self._ended is not None and bool(self._ended.get("lost"))

    def terminate(self) -> None:
        """The ranks agree on a stop themselves."""

    def dump(self) -> None:
        """Each process asks its own child."""

    def kill(self) -> None:
        """Without a word by now, there will be none: its process ends it when it reads the end of the run."""
        self._ended = self._ended or LOST_END

    def result(self, stage: Stage, rank: int | None) -> StageResult:
        ending = self._ended or LOST_END
        host = "" if ending.get("host") == node_name() else str(ending.get("host", ""))
        return StageResult(
            stage,
            int(ending["code"]),
            ending.get("report"),
            tuple(ending.get("tail", ())),
            rank,
            host,
            CollectiveNote(**ending["note"]) if ending.get("note") else None,
            silent=bool(ending.get("silent")),
            lost=bool(ending.get("lost")),
        )


@final
class _Group:
    """The ranks of a stage. One that fails ends the others; a stop that no step answers ends all of them.

    `members`: by rank; a process that supervises one of a launcher's later ranks has only that one. `over_elsewhere`:
    whether rank 0, which another process supervises, has ended the run.
    """

    def __init__(
        self,
        members: Mapping[int, RankProcess],
        world: int,
        folder: RunFolder,
        over_elsewhere: Callable[[], bool] | None = None,
        stop_seconds: float = STOP_SECONDS,
    ) -> None:
        self.members = members
        self.ended = list[int]()  # ranks in the order of their ends
        self._world = world
        self._folder = folder
        self._over_elsewhere = over_elsewhere
        self._stop_seconds = stop_seconds
        self._has_peers = any(isinstance(member, _Peer) for member in members.values())
        self._patience = PEER_WORDS_SECONDS if self._has_peers else LAST_WORDS_SECONDS
        self._failed_at = self._stopping_since = math.inf
        self.saves = False  # the ranks have agreed to save and to stop
        self._overdue = self._asked_stacks = False
        self._silent = set[int]()  # ranks that ran until this process ended them

    def stop(self) -> None:
        self._stopping_since = time.monotonic()
        for member in self.members.values():
            member.terminate()

    def kill(self) -> None:
        self._silent |= self.members.keys() - set(self.ended)
        for member in self.members.values():
            member.kill()

    def over(self) -> bool:
        """Whether all have ended."""
        for rank, member in self.members.items():
            if rank not in self.ended and member.poll() is not None:
                self.ended.append(rank)
        if self._world > 1 and len(self.ended) < len(self.members):
            self._end_the_rest(time.monotonic())
        agreed = self._has_peers and self.members[0].poll() in self._good
        return agreed or len(self.ended) == len(self.members)

    @property
    def _good(self) -> tuple[int, ...]:
        # Without an agreed save, a rank that stopped is missing.
        return (0, STOPPED) if self.saves else (0,)

    def _end_the_rest(self, seconds_now: float) -> None:
        failed = any(self.members[rank].poll() not in self._good for rank in self.ended)
        failed |= self._over_elsewhere is not None and self._over_elsewhere()
        self._failed_at = min(self._failed_at, seconds_now) if failed else math.inf
        self._overdue |= not self.saves and seconds_now - self._stopping_since > self._stop_seconds
        running = [rank for rank in self.members if rank not in self.ended]
        if failed and not self._asked_stacks and dumped_stacks(self._folder, self.members):
            self._asked_stacks = True
            for rank in running:
                # A rank that has not begun would die of the signal.
                if stack_file(self._folder, rank).exists():
                    self.members[rank].dump()
        # The others of a lost rank have nothing to say about it: they wait for it.
        is_lost = any(
            isinstance(member, _Peer) and member.is_lost for member in self.members.values()
        )
        patience = AFTER_LOSS_SECONDS if is_lost else self._patience
        if self._overdue or seconds_now - self._failed_at > patience:
            self.kill()

    def result(self, stage: Stage) -> StageResult:
        """That of the rank that ended the others, with its host where the ranks are on several hosts."""
        results = [
            self.members[rank].result(stage, rank if self._world > 1 else None)
            for rank in self.ended
        ]
        if self._world == 1:
            return results[0]
        culprit = culprit_of(
            [
                replace(rank_result, silent=rank_result.silent or rank_result.rank in self._silent)
                for rank_result in results
            ],
            self._folder,
            is_stop_overdue=self._overdue,
        )
        if culprit.rank is None:
            return culprit
        hosts = hosts_of_ranks(self._folder)
        if culprit.rank < len(hosts):
            return replace(culprit, host=hosts[culprit.rank])
        # Before the ranks have told each other their hosts: a rank of this host is named where others have another.
        if not culprit.host and any(rank_result.host for rank_result in results):
            return replace(culprit, host=node_name())
        return culprit


def run_stage(
    stage: Stage,
    folder: RunFolder,
    *,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str],
    inherited: Sequence[int],
    requests: StopRequests,
    on_event: Callable[[Event], None],
    on_line: Callable[[str], None],
    ranks: int = 1,
    board: Board | None = None,
) -> StageResult:
    """Run `stage` in a child, or in `ranks` of them, until it ends; `on_event` gets each event it writes.

    `board`: of the launcher that started this process; it then runs its own rank only, and rank 0 reads there how the
    others ended. `on_line` gets each line that a child prints. The first stop request reaches training as SIGTERM (it
    saves and exits), and kills preparation (which loses nothing). Every child has ended when this returns or raises.
    """
    size = folder.events.stat().st_size if folder.events.exists() else 0
    with ExitStack() as stack:
        # Which ranks run here, and what their environments say. Of a launcher's ranks each process has one.
        local_ranks = _local_ranks(stage, ranks, board, environment, stack)
        if 0 in local_ranks.variables:
            _remove_old_stacks(folder)

        # Their processes; for rank 0 those of other processes are members of the group, too.
        processes = list[_Process]()
        for rank, variables in local_ranks.variables.items():
            is_alone = len(local_ranks.variables) == 1
            on_rank_line = on_line if is_alone else partial(_prefixed, rank, on_line)
            processes.append(
                _Process(
                    python_module(WORKER, stage, str(folder.path), options=FAULTHANDLER),
                    arguments,
                    {**environment, **variables},
                    inherited,
                    on_rank_line,
                )
            )
            stack.callback(processes[-1].close)
        members: dict[int, RankProcess] = dict(zip(local_ranks.variables, processes, strict=True))
        if board is not None and 0 in local_ranks.variables:
            members |= {rank: _Peer(board, rank) for rank in range(1, local_ranks.world)}
        group = _Group(
            members, local_ranks.world, folder, local_ranks.over_elsewhere, _stop_seconds(folder)
        )

        # What requests do, and the events until all have ended.
        stop = group.stop if stage == "train" else lambda: kill_group(processes[0].child.pid)
        save = partial(processes[0].child.send_signal, SAVE_SIGNAL) if stage == "train" else None
        with requests.handled_by(stop, save):
            if board is not None and board.launch.rank:
                _wait_for_rank_0(group, board)
            else:
                _follow_events(group, folder, size, board, on_event)
        return group.result(stage)


@final
@dataclass(frozen=True)
class _LocalRanks:
    """The ranks that this process starts. `variables`: of each one's environment. `over_elsewhere`: as in `_Group`."""

    variables: Mapping[int, Mapping[str, str]]
    world: int
    over_elsewhere: Callable[[], bool] | None = None


def _local_ranks(
    stage: Stage,
    ranks: int,
    board: Board | None,
    environment: Mapping[str, str],
    stack: ExitStack,
) -> _LocalRanks:
    """`stack` removes the file where the ranks of one machine meet."""
    if board is not None and stage == "train":
        assert board.message is not None, "rank 0 has begun"
        launch = board.launch
        variables = rank_variables(launch, board.message, environment)
        over_elsewhere = board.over if launch.rank else None
        return _LocalRanks({launch.rank: variables}, launch.world, over_elsewhere)
    if ranks == 1:
        return _LocalRanks({0: {}}, ranks)
    meeting = stack.enter_context(TemporaryDirectory(prefix="bloomery-"))
    return _LocalRanks(
        {rank: local_rank_variables(rank, ranks, f"{meeting}/ranks") for rank in range(ranks)},
        ranks,
    )


def _remove_old_stacks(folder: RunFolder) -> None:
    """Those of an earlier start."""
    stacks = folder.path / STACKS
    if stacks.is_dir():
        for old_file in (*stacks.glob("rank-*.txt"), stacks / HOSTS_FILE):
            old_file.unlink(missing_ok=True)


def _wait_for_rank_0(group: _Group, board: Board) -> None:
    """Rank 0 alone reads the events, and tells on the board what the others need of them."""
    while not _over(group, board, None):
        group.saves |= board.saves()
        if board.failed():
            group.kill()
        time.sleep(POLL_SECONDS)


def _follow_events(
    group: _Group,
    folder: RunFolder,
    start: int,
    board: Board | None,
    on_event: Callable[[Event], None],
) -> None:
    """Hands on each event, from byte `start` of the file, until all ranks have ended."""
    absence = None if board is None else _Absence(board, on_event)
    poll_seconds = POLL_SECONDS if board is None else SHARED_POLL_SECONDS
    over = partial(_over, group, board, absence)
    for event in follow_events(folder.events, over, start=start, poll_seconds=poll_seconds):
        group.saves |= isinstance(event, Phase) and event.name == "saving"
        if board is not None and isinstance(event, RunStarted):
            board.met()
        if board is not None and group.saves:
            board.save()
        on_event(event)


def _stop_seconds(folder: RunFolder) -> float:
    """From a stop request until the ranks must have agreed to save: two steps, at the upper end of the plan's range.

    A step of 512 GPUs may take longer than STOP_SECONDS. Job scripts ask for a stop early enough (`seconds_to_save`).
    """
    try:
        step_seconds = read_plan(folder.plan).step_seconds
    except UserError:  # before there is a plan; training reports one that cannot be read
        step_seconds = None
    return max(STOP_SECONDS, 0.0 if step_seconds is None else 2 * step_seconds.high)


@final
class _Absence:
    """Warns once that rank 0 waits for ranks that have not come."""

    def __init__(self, board: Board, on_event: Callable[[Event], None]) -> None:
        self._board = board
        self._on_event = on_event
        self._due = time.monotonic() + QUIET_SECONDS

    def look(self) -> None:
        if time.monotonic() < self._due:
            return
        self._due = math.inf
        if absent := self._board.absent():
            self._on_event(
                Warned(
                    reason=f"training waits for {absent}: start all of them, with the same --run-dir"
                )
            )


def _over(group: _Group, board: Board | None, absence: _Absence | None) -> bool:
    """Whether all ranks have ended. Raises UserError for a mistake of the launch, which would let them wait."""
    if board is not None and (mistake := board.mistake()) is not None:
        raise mistake
    if absence is not None:
        absence.look()
    return group.over()


def local_rank_variables(rank: int, ranks: int, meeting: str) -> dict[str, str]:
    """The variables of one rank on this machine: torchrun's names, and the file where the ranks meet."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        RENDEZVOUS: meeting,
        "GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE,  # no other host is involved
    }


def _prefixed(rank: int, on_line: Callable[[str], None], line: str) -> None:
    on_line(f"[rank {rank}] {line}")

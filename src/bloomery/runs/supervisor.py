"""The child processes of a run: start them, follow their events, explain their failure. No torch."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, Protocol, final

from bloomery.core.child import LOOPBACK_INTERFACE, kill_group, last_words, signal_name
from bloomery.core.errors import UserError
from bloomery.core.text import expanded
from bloomery.hardware.doctor.symptoms import Match, match
from bloomery.hardware.machine import read_machine
from bloomery.monitor.events import Event, Phase, RunStarted, Warned, follow
from bloomery.parallel.collective_notes import CollectiveNote, SharedNote, rank_behind
from bloomery.parallel.environment import RENDEZVOUS, node_name, without_host
from bloomery.plan.store import read_plan
from bloomery.runs.folder import RunFolder
from bloomery.runs.launchers import QUIET_SECONDS, Board, rank_variables
from bloomery.runs.signals import SAVE_SIGNAL, STOP_SIGNALS, StopRequests, held_back

Stage = Literal["prepare", "train"]
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
STOPPED = 75
STACKS = "stacks"  # folder of the run: stacks of ranks without progress
HOSTS_FILE = "hosts.json"  # there: the host of each rank, by rank
STACK_SIGNAL = signal.SIGQUIT  # a rank then writes its stack there, even inside a collective
LONGEST_LINE = 300  # characters shown of a log line
# The words of gloo and NCCL when another rank has ended.
LOST = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|remote process (has )?exited|communicator was aborted"
    r"|Socket closed|peer closed",
    re.IGNORECASE,
)
# The words of a device, its driver or its memory: another host may not have this fault.
DEVICE_FAULT = re.compile(
    r"(HIP|CUDA|NCCL|RCCL) error|\b(hip|cuda)Error\w+|HSA_STATUS_ERROR|Memory access fault|AcceleratorError"
    r"|out of memory|sees no GPU",
    re.IGNORECASE,
)
WORKER = "bloomery.runs.worker"
# Of a rank whose process is gone without a word.
LOST_END: Mapping[str, Any] = {"code": -signal.SIGKILL, "lost": True}


@final
@dataclass(frozen=True)
class StageResult:
    """How a child ended: its exit code (negative: the signal), what it reported, and its last lines.

    `rank`: of several, the one that ended the others; None for one child. `host`: where it ran, "" where all ranks are
    on one host. `note`: of its last collectives; None without any. `silent`: it ran until its parent ended it. `lost`:
    its host, or all its processes, have gone without a word.
    """

    stage: Stage
    code: int
    report: dict[str, Any] | None
    tail: tuple[str, ...]
    rank: int | None = None
    host: str = ""
    note: CollectiveNote | None = None
    silent: bool = False
    lost: bool = False


class Member(Protocol):
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

    `members`: by rank; a process that supervises one of a launcher's later ranks has only that one. `stacks`: the
    folder where ranks without progress leave their stacks. `over_elsewhere`: whether rank 0, which another process
    supervises, has ended the run.
    """

    def __init__(
        self,
        members: Mapping[int, Member],
        world: int,
        stacks: Path,
        over_elsewhere: Callable[[], bool] | None = None,
        stop_seconds: float = STOP_SECONDS,
    ) -> None:
        self.members = members
        self.ended = list[int]()  # ranks in the order of their ends
        self._world = world
        self._stacks = stacks
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
        if failed and not self._asked_stacks and self._dumped():
            self._asked_stacks = True
            for rank in running:
                if self._file(rank).exists():  # a rank that has not begun would die of the signal
                    self.members[rank].dump()
        # The others of a lost rank have nothing to say about it: they wait for it.
        is_lost = any(
            isinstance(member, _Peer) and member.is_lost for member in self.members.values()
        )
        patience = AFTER_LOSS_SECONDS if is_lost else self._patience
        if self._overdue or seconds_now - self._failed_at > patience:
            self.kill()

    def _file(self, rank: int) -> Path:
        return self._stacks / f"rank-{rank}.txt"

    def _dumped(self) -> dict[int, str]:
        """The stacks that ranks without progress have left, by rank."""
        files = {rank: self._file(rank) for rank in self.members}
        texts = {
            rank: file.read_text(errors="replace") for rank, file in files.items() if file.is_file()
        }
        return {rank: text for rank, text in texts.items() if text}

    def result(self, stage: Stage) -> StageResult:
        """That of the rank that ended the others, with its host where the ranks are on several hosts."""
        results = [
            self.members[rank].result(stage, rank if self._world > 1 else None)
            for rank in self.ended
        ]
        if self._world == 1:
            return results[0]
        culprit = self._culprit(
            [
                replace(rank_result, silent=rank_result.silent or rank_result.rank in self._silent)
                for rank_result in results
            ]
        )
        if culprit.rank is None:
            return culprit
        hosts = hosts_of_ranks(RunFolder(self._stacks.parent))
        if culprit.rank < len(hosts):
            return replace(culprit, host=hosts[culprit.rank])
        # Before the ranks have told each other their hosts: a rank of this host is named where others have another.
        if not culprit.host and any(rank_result.host for rank_result in results):
            return replace(culprit, host=node_name())
        return culprit

    def _culprit(self, results: Sequence[StageResult]) -> StageResult:
        """The first killed rank, else the first lost one, else the first with a report.

        The others may be seen to end first: they lose their connection at once.
        """
        stopped = [member_result for member_result in results if member_result.code == STOPPED]
        lost_ranks = [
            member_result
            for member_result in results
            if member_result.report is None and (member_result.code >= 0 or member_result.silent)
        ]
        # The others only lost their connection to the one that was asked to stop.
        if self._overdue or (stopped and len(lost_ranks) == len(results)):
            return replace((stopped or results)[0], code=STOPPED)
        if any(
            member_result.code == 1 and member_result.report is None for member_result in results
        ) and (stacks := self._dumped()):
            return self._hung(results, stacks)
        failed = [
            member_result for member_result in results if member_result.code not in (0, STOPPED)
        ]
        # An error about a lost connection follows from another rank's end.
        failed.sort(key=lambda member_result: bool(LOST.search(last_words(member_result.tail))))
        # Killed from outside, not by its parent.
        killed_ranks = [
            member_result
            for member_result in failed
            if member_result.code < 0 and not member_result.silent and not member_result.lost
        ]
        # Gone before this process ended the others. A rank on a GPU waits for its device in silence: it counts as lost
        # only where no other rank explains the end.
        gone_ranks = [
            member_result
            for member_result in failed
            if member_result.lost and not member_result.silent
        ]
        reported = [member_result for member_result in failed if member_result.report is not None]
        if len(reported) > 1 and all(
            member_result.report == reported[0].report for member_result in reported
        ):
            reported[0] = replace(reported[0], rank=None)  # the ranks agreed on it
        return (killed_ranks or gone_ranks or reported or failed or results)[0]

    def _hung(self, results: Sequence[StageResult], stacks: Mapping[int, str]) -> StageResult:
        """Of ranks without progress: the one that left no stack, else the one that the others wait for."""
        run = RunFolder(self._stacks.parent)
        hosts = hosts_of_ranks(run)
        places_by_rank = {rank: training_place(stack) for rank, stack in stacks.items()}
        notes = {
            rank_result.rank: rank_result.note
            for rank_result in results
            if rank_result.rank is not None and rank_result.note is not None
        }
        silent = sorted(
            rank_result.rank
            for rank_result in results
            if rank_result.silent
            and rank_result.rank is not None
            and rank_result.rank not in stacks
        )
        # By their collectives; on a GPU every host waits for its device. Without notes by their stacks.
        behind = rank_behind(notes)
        outside_collectives = [rank for rank, place in places_by_rank.items() if not place.waits]
        if behind is None and len(outside_collectives) < len(places_by_rank):
            behind = next(iter(outside_collectives), None)

        suspects = silent if silent else [rank for rank in (behind,) if rank is not None]
        host = of_one_host(suspects, hosts)
        if silent:
            name = f"{_rank_name(silent[0], run)}{f' on {host}' if host else ''}"
            if host and len(silent) > 1 and silent == ranks_of_host(host, hosts):
                name = f"host {host}, with {len(silent)} ranks from {silent[0]} to {silent[-1]},"
            reason = "it was not started, or has not begun"
            if self._file(silent[0]).exists():
                reason = "it is stopped, or stuck in a driver"
            problem = f"{name} does not respond: {reason}"
        elif behind is not None:
            name = f"{_rank_name(behind, run)}{f' on {host}' if host else ''}"
            place = places_by_rank.get(behind)
            line = f" in {place.line}" if place is not None else ""
            problem = f"{name} hangs{line}, and the others wait for it{_awaited(notes)}"
        else:
            line = next(iter(places_by_rank.values())).line
            problem = f"training hangs on all ranks, in {line}{_awaited(notes)}"
        self._write_notes(notes, hosts)
        fix = f"bloomery resume {run.name}"
        report = {
            "problem": problem,
            "where": f"stacks and last collectives of the ranks in {self._stacks}",
            "fix": f"{fix}; or leave the host out: {without_host(host)}" if host else fix,
            "code": 1,
            "host": host,
        }
        of_suspect = [rank_result for rank_result in results if rank_result.rank in suspects[:1]]
        return replace((of_suspect or results)[0], code=1, report=report, rank=None)

    def _write_notes(self, notes: Mapping[int, CollectiveNote], hosts: Sequence[str]) -> None:
        """A line for each rank, next to the stacks."""
        lines = [
            f"rank {rank}{f' on {hosts[rank]}' if hosts else ''}: {note}\n"
            for rank, note in sorted(notes.items())
        ]
        with suppress(OSError):  # a full disk: the error is reported without them
            (self._stacks / "collectives.txt").write_text("".join(lines), encoding="utf-8")


def _awaited(notes: Mapping[int, CollectiveNote]) -> str:
    """The collective in which most ranks wait, as the end of a sentence."""
    waiting_notes = [(note.entered, note.entered_name) for note in notes.values() if note.waits]
    if not waiting_notes:
        return ""
    (number, name), _ = Counter(waiting_notes).most_common(1)[0]
    return f" in collective {number:,} ({name})"


def hosts_of_ranks(folder: RunFolder) -> list[str]:
    """By rank, where the ranks of the last start were on several hosts; else empty."""
    with suppress(OSError, ValueError):
        hosts = list(map(str, json.loads((folder.path / STACKS / HOSTS_FILE).read_text())))
        return hosts if len(set(hosts)) > 1 else []
    return []


def of_one_host(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """The host of all these ranks; "" where they have several, or none is known. `hosts`: by rank, maybe empty."""
    names = {hosts[rank] for rank in ranks if rank < len(hosts)}
    return names.pop() if len(names) == 1 else ""


def ranks_of_host(host: str, hosts: Sequence[str]) -> list[int]:
    return [rank for rank, host_of_rank in enumerate(hosts) if host_of_rank == host]


@final
@dataclass(frozen=True)
class Place:
    """Where the training thread of a rank was. `waits`: for other ranks, inside a collective."""

    line: str
    waits: bool


def training_place(stack: str) -> Place:
    """From a text of faulthandler, which lists every thread, innermost frame first."""
    threads = re.split(r"\n(?=Thread |Current thread )", stack)
    main = next(
        (thread for thread in threads if "worker.py" in thread and " in main" in thread),
        threads[-1],
    )
    frames = re.findall(r'File "(.*?)", line (\d+) in (\S+)', main)
    if not frames:
        return Place("an unknown place", False)
    waits = any("torch/distributed/" in file for file, _, _ in frames)
    bloomery_frame = next((frame for frame in frames if "/bloomery/" in frame[0]), frames[0])
    file, line, function = bloomery_frame if waits else frames[0]
    return Place(f"{function} ({Path(file).name}:{line})", waits)


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
    command = [sys.executable, "-X", "faulthandler", "-m", WORKER, stage, str(folder.path)]
    stacks = folder.path / STACKS
    with ExitStack() as stack:
        variables: dict[int, dict[str, str]] = {0: {}}
        over_elsewhere: Callable[[], bool] | None = None
        if board is not None and stage == "train":
            assert board.message is not None, "rank 0 has begun"
            variables = {
                board.launch.rank: rank_variables(board.launch, board.message, environment)
            }
            over_elsewhere = board.over if board.launch.rank else None
            ranks = board.launch.world
        elif ranks > 1:
            meeting = stack.enter_context(TemporaryDirectory(prefix="bloomery-"))
            variables = {
                rank: rank_environment(rank, ranks, f"{meeting}/ranks") for rank in range(ranks)
            }
        if 0 in variables and stacks.is_dir():
            for old_file in (*stacks.glob("rank-*.txt"), stacks / HOSTS_FILE):
                old_file.unlink(missing_ok=True)
        members: dict[int, Member] = {}
        processes = list[_Process]()
        for rank, rank_variables_only in variables.items():
            on_rank_line = on_line if len(variables) == 1 else partial(_prefixed, rank, on_line)
            processes.append(
                _Process(
                    command,
                    arguments,
                    {**environment, **rank_variables_only},
                    inherited,
                    on_rank_line,
                )
            )
            stack.callback(processes[-1].close)
            members[rank] = processes[-1]
        if board is not None and 0 in variables:
            members |= {rank: _Peer(board, rank) for rank in range(1, ranks)}
        group = _Group(members, ranks, stacks, over_elsewhere, _stop_seconds(folder))
        stop = group.stop if stage == "train" else lambda: kill_group(processes[0].child.pid)
        save = partial(processes[0].child.send_signal, SAVE_SIGNAL) if stage == "train" else None
        absence = None if board is None or board.launch.rank else _Absence(board, on_event)
        with requests.handled_by(stop, save):
            over = partial(_over, group, board, absence)
            if board is not None and board.launch.rank:
                # Rank 0 alone reads the events, and tells on the board what the others need of them.
                while not over():
                    group.saves |= board.saves()
                    if board.failed():
                        group.kill()
                    time.sleep(POLL_SECONDS)
                return group.result(stage)
            poll_seconds = POLL_SECONDS if board is None else SHARED_POLL_SECONDS
            for event in follow(folder.events, over, start=size, poll_seconds=poll_seconds):
                group.saves |= isinstance(event, Phase) and event.name == "saving"
                if board is not None and isinstance(event, RunStarted):
                    board.met()
                if board is not None and group.saves:
                    board.save()
                on_event(event)
        return group.result(stage)


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


def rank_environment(rank: int, ranks: int, meeting: str) -> dict[str, str]:
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


def _rank_name(rank: int, folder: RunFolder) -> str:
    """With its layers, where the run is a pipeline."""
    if not folder.plan.is_file():
        return f"rank {rank}"
    from bloomery.plan.pipeline import rank_name
    from bloomery.plan.store import read_plan

    return rank_name(rank, read_plan(folder.plan))


def failure(result: StageResult, folder: RunFolder, *, step: int) -> UserError:
    """The error of a child that failed. `step`: the last one it finished.

    With the host of a rank that was killed, is lost, or whose device failed, and the line that leaves it out.
    """
    error = _failure(result, folder, step=step)
    if error.host or result.rank is None or not result.host:
        return error
    words = error.problem if result.report is not None else last_words(result.tail)
    was_killed = result.code < 0 and -result.code not in STOP_SIGNALS
    if result.lost or was_killed or DEVICE_FAULT.search(words):
        error.host = result.host
        leave_out = f"leave the host out: {without_host(error.host)}"
        error.fix = f"{error.fix}\n       or {leave_out}" if error.fix else leave_out
    return error


def _failure(result: StageResult, folder: RunFolder, *, step: int) -> UserError:
    """The same without the decision whether the host is at fault."""
    if result.report is not None:
        error = UserError(**result.report)
        if result.rank is not None:
            host = f" on {result.host}" if result.host else ""
            rank_place = f"{_rank_name(result.rank, folder)}{host}"
            error.where = f"{error.where} ({rank_place})" if error.where else rank_place
        return error
    name = "preparation" if result.stage == "prepare" else "training"
    name = name if result.rank is None else f"{_rank_name(result.rank, folder)} of {name}"
    name += f" on {result.host}" if result.host else ""
    after_step = f" after step {step}" if step else ""
    resume_command = f"bloomery resume {folder.name}"
    if result.lost:
        problem = f"{name} is gone{after_step} without a word: its host is lost, or its processes were killed"
        return UserError(problem, where=result.host or str(folder.log), fix=resume_command)
    symptom = _recognized(result, folder)
    if symptom is not None:
        ending = (
            f"killed{after_step} by {signal_name(-result.code)}"
            if result.code < 0
            else f"failed{after_step}"
        )
        steps = [  # with this run's recipe instead of RECIPE
            step.replace("RECIPE", str(folder.recipe)).removeprefix("# ")
            for step in symptom.fix
            if step.partition("  # ")[0] != "bloomery resume last"
        ]
        return UserError(
            f"{name} {ending}: {symptom.what}\n       ({symptom.cause})",
            where=f"{symptom.line[:LONGEST_LINE]}\n       (full output: {folder.log})",
            fix="\n       ".join([*steps, resume_command]),
        )
    if result.code == -signal.SIGKILL:
        return UserError(
            f"{name} process killed from outside{after_step} (SIGKILL)",
            where=str(folder.log),
            fix="on an out-of-memory kill (see `dmesg`), set train.micro_batch_size=1 or free host memory; then "
            f"`{resume_command}`",
        )
    if result.code < 0:
        return UserError(
            f"{name} process killed{after_step} by {signal_name(-result.code)}, in a library or a driver",
            where=str(folder.log),
            fix=resume_command,
        )
    problem = f"{name} failed{after_step}: {last_words(result.tail) or 'no output'}"
    return UserError(problem, where=f"traceback in {folder.log}", fix=resume_command)


def _recognized(result: StageResult, folder: RunFolder) -> Match | None:
    """The known symptom of the failure: in the exception if there is one, else in the last lines."""
    if result.code == -signal.SIGKILL:
        return None  # from outside: the output does not explain it
    machine = read_machine(folder.machine) if folder.machine.is_file() else None
    texts = [last_words(result.tail)] if result.code > 0 else []
    for text in (*texts, "\n".join(result.tail)):
        symptoms = [
            symptom for symptom in match(text, machine=machine) if symptom.level == "blocks"
        ]
        if symptoms:
            return symptoms[0]
    return None


def existing(folder: Path) -> RunFolder:
    """The run in `folder`. Raises UserError when there is none."""
    run = RunFolder(expanded(folder).absolute())
    if not run.recipe.is_file():
        raise UserError(
            "not a run folder", where=str(run.path), fix="`bloomery runs` lists the runs in runs/"
        )
    return run

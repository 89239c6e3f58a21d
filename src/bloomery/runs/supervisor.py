"""One child process of a run: start it, follow its events, explain its failure. No torch."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, final

from bloomery.core.child import kill_group, last_words, signal_name
from bloomery.core.errors import UserError
from bloomery.core.text import expanded
from bloomery.hardware.doctor.symptoms import Match, match
from bloomery.hardware.machine import read_machine
from bloomery.monitor.events import Event, Phase, follow
from bloomery.runs.folder import RunFolder
from bloomery.runs.signals import SAVE_SIGNAL, StopRequests, held_back

Stage = Literal["prepare", "train"]
TAIL_LINES = 200  # kept of a child's output
KILL_WAIT_SECONDS = 10.0
LAST_WORDS_SECONDS = 3.0  # after the first failed rank: the others report, then all are killed
STOP_SECONDS = 25.0  # from a stop request to a step boundary; batch systems kill after 30
STOPPED = 75
RENDEZVOUS = "BLOOMERY_RENDEZVOUS"  # variable: the file where the ranks of one machine meet
LONGEST_LINE = 300  # characters shown of a log line
WORKER = "bloomery.runs.worker"


@final
@dataclass(frozen=True)
class StageResult:
    """How a child ended: its exit code (negative: the signal), what it reported, and its last lines.

    `rank`: of several, the one that ended the others; None for one child.
    """

    stage: Stage
    code: int
    report: dict[str, Any] | None
    tail: tuple[str, ...]
    rank: int | None = None


@final
class _Process:
    """One child, its last lines and its report."""

    def __init__(
        self, command: Sequence[str], words: Sequence[str], environment: Mapping[str, str], inherited: Sequence[int],
        on_line: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._report, child_end = os.pipe()
        with held_back(SAVE_SIGNAL):
            self.child = subprocess.Popen(
                [*command, "--parent", str(os.getpid()), "--report", str(child_end), *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                encoding="utf-8",
                errors="replace",
                env=dict(environment),
                pass_fds=(child_end, *inherited),
                start_new_session=True,  # Ctrl+C reaches only the parent, and the group can be killed as a whole
            )
        os.close(child_end)

        def keep_lines() -> None:
            assert self.child.stdout is not None
            for line in self.child.stdout:
                self.tail.append(line.rstrip("\n"))
                on_line(line.rstrip("\n"))

        self.pump = threading.Thread(target=keep_lines, name="output of a child")
        self.pump.start()

    def result(self, stage: Stage, rank: int | None) -> StageResult:
        """Waits for the end."""
        self.pump.join(KILL_WAIT_SECONDS)
        code = self.child.wait()
        os.set_blocking(self._report, False)
        report = b""
        with suppress(BlockingIOError):  # killed: no report
            report = os.read(self._report, 2**16)
        return StageResult(stage, code, dict(json.loads(report)) if report else None, tuple(self.tail), rank)

    def close(self) -> None:
        kill_group(self.child.pid)
        self.child.__exit__(None, None, None)
        os.close(self._report)


@final
class _Group:
    """The ranks of a stage. One that fails ends the others; a stop that no step answers ends all of them."""

    def __init__(self, processes: Sequence[_Process]) -> None:
        self.processes, self.ended = processes, list[int]()  # ranks in the order of their ends
        self._failed_at = self._stopping_since = math.inf
        self._saves = self._overdue = False

    def stop(self) -> None:
        self._stopping_since = time.monotonic()
        for process in self.processes:
            process.child.terminate()

    def note(self, event: Event) -> None:
        self._saves |= isinstance(event, Phase) and event.name == "saving"

    def over(self) -> bool:
        """Whether all have ended."""
        for rank, process in enumerate(self.processes):
            if rank not in self.ended and process.child.poll() is not None:
                self.ended.append(rank)
        if len(self.processes) > 1 and len(self.ended) < len(self.processes):
            self._end_the_rest(time.monotonic())
        return len(self.ended) == len(self.processes)

    def _end_the_rest(self, now: float) -> None:
        allowed = (0, STOPPED) if self._saves else (0,)  # without an agreed save, a rank that stopped is missing
        if all(self.processes[rank].child.returncode in allowed for rank in self.ended):
            self._failed_at = math.inf
        else:
            self._failed_at = min(self._failed_at, now)
        self._overdue |= not self._saves and now - self._stopping_since > STOP_SECONDS
        if self._overdue or now - self._failed_at > LAST_WORDS_SECONDS:
            for process in self.processes:
                kill_group(process.child.pid)

    def result(self, stage: Stage) -> StageResult:
        """That of the rank that ended the others: the first killed one, else the first with a report."""
        if len(self.processes) == 1:
            return self.processes[0].result(stage, None)
        results = [self.processes[rank].result(stage, rank) for rank in self.ended]
        if self._overdue or (results[0].code == STOPPED and all(each.report is None for each in results)):
            return replace(results[0], code=STOPPED)
        early = [each for each in results if each.code not in (0, STOPPED)]
        killed = [each for each in early if each.code < 0 and each.code != -signal.SIGKILL]
        first_killed = [each for each in early[:1] if each.code < 0]
        reported = [each for each in early if each.report is not None]
        return (first_killed or killed or reported or early or results)[0]


def run_stage(
    stage: Stage,
    folder: RunFolder,
    *,
    words: Sequence[str] = (),
    environment: Mapping[str, str],
    inherited: Sequence[int],
    requests: StopRequests,
    on_event: Callable[[Event], None],
    on_line: Callable[[str], None],
    ranks: int = 1,
) -> StageResult:
    """Run `stage` in a child, or in `ranks` of them, until it ends; `on_event` gets each event it writes.

    `on_line` gets each line that a child prints. The first stop request reaches training as SIGTERM (it saves and
    exits), and kills preparation (which loses nothing). Every child has ended when this returns or raises.
    """
    size = folder.events.stat().st_size if folder.events.exists() else 0
    command = [sys.executable, "-X", "faulthandler", "-m", WORKER, stage, str(folder.path)]
    with ExitStack() as stack:
        meeting = stack.enter_context(TemporaryDirectory(prefix="bloomery-")) if ranks > 1 else ""
        processes = []
        for rank in range(ranks):
            own = dict(environment) | (rank_environment(rank, ranks, f"{meeting}/ranks") if ranks > 1 else {})
            said = on_line if ranks == 1 else partial(_prefixed, rank, on_line)
            processes.append(_Process(command, words, own, inherited, said))
            stack.callback(processes[-1].close)
        group = _Group(processes)
        stop = group.stop if stage == "train" else lambda: kill_group(processes[0].child.pid)
        save = partial(processes[0].child.send_signal, SAVE_SIGNAL) if stage == "train" else None
        with requests.handled_by(stop, save):
            for event in follow(folder.events, group.over, start=size):
                group.note(event)
                on_event(event)
        return group.result(stage)


def rank_environment(rank: int, ranks: int, meeting: str) -> dict[str, str]:
    """The variables of one rank on this machine: torchrun's names, and the file where the ranks meet."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        RENDEZVOUS: meeting,
        "GLOO_SOCKET_IFNAME": "lo",  # no other host is involved
        "MALLOC_MMAP_THRESHOLD_": "65536",  # glibc would keep what FSDP2 frees between layers
    }


def _prefixed(rank: int, on_line: Callable[[str], None], line: str) -> None:
    on_line(f"[rank {rank}] {line}")


def failure(result: StageResult, folder: RunFolder, *, step: int) -> UserError:
    """The error of a child that failed. `step`: the last one it finished."""
    if result.report is not None:
        return UserError(**result.report)
    name = "preparation" if result.stage == "prepare" else "training"
    name = name if result.rank is None else f"rank {result.rank} of {name}"
    after = f" after step {step}" if step else ""
    again = f"bloomery resume {folder.name}"
    known = _recognized(result, folder)
    if known is not None:
        how = f"killed{after} by {signal_name(-result.code)}" if result.code < 0 else f"failed{after}"
        steps = [  # with this run's recipe instead of RECIPE
            step.replace("RECIPE", str(folder.recipe)).removeprefix("# ")
            for step in known.fix
            if step.partition("  # ")[0] != "bloomery resume last"
        ]
        return UserError(
            f"{name} {how}: {known.what}\n       ({known.cause})",
            where=f"{known.line[:LONGEST_LINE]}\n       (full output: {folder.log})",
            fix="\n       ".join([*steps, again]),
        )
    if result.code == -signal.SIGKILL:
        return UserError(
            f"{name} process killed from outside{after} (SIGKILL)",
            where=str(folder.log),
            fix="on an out-of-memory kill (see `dmesg`), set train.micro_batch_size=1 or free host memory; then "
            f"`{again}`",
        )
    if result.code < 0:
        return UserError(
            f"{name} process killed{after} by {signal_name(-result.code)}, in a library or a driver",
            where=str(folder.log),
            fix=again,
        )
    problem = f"{name} failed{after}: {last_words(result.tail) or 'no output'}"
    return UserError(problem, where=f"traceback in {folder.log}", fix=again)


def _recognized(result: StageResult, folder: RunFolder) -> Match | None:
    """The known symptom of the failure: in the exception if there is one, else in the last lines."""
    if result.code == -signal.SIGKILL:
        return None  # from outside: the output does not explain it
    machine = read_machine(folder.machine) if folder.machine.is_file() else None
    texts = [last_words(result.tail)] if result.code > 0 else []
    for text in (*texts, "\n".join(result.tail)):
        known = [one for one in match(text, machine=machine) if one.level == "blocks"]
        if known:
            return known[0]
    return None


def existing(folder: Path) -> RunFolder:
    """The run in `folder`. Raises UserError when there is none."""
    run = RunFolder(expanded(folder).absolute())
    if not run.recipe.is_file():
        raise UserError("not a run folder", where=str(run.path), fix="`bloomery runs` lists the runs in runs/")
    return run

"""One child process of a run: start it, follow its events, explain its failure. No torch."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, final

from bloomery.core.child import kill_group, last_words, signal_name
from bloomery.core.errors import UserError
from bloomery.core.text import expanded
from bloomery.hardware.doctor.symptoms import Match, match
from bloomery.hardware.machine import read_machine
from bloomery.monitor.events import Event, follow
from bloomery.runs.folder import RunFolder
from bloomery.runs.signals import SAVE_SIGNAL, StopRequests, held_back

Stage = Literal["prepare", "train"]
TAIL_LINES = 200  # kept of a child's output
KILL_WAIT_SECONDS = 10.0
LONGEST_LINE = 300  # characters shown of a log line
WORKER = "bloomery.runs.worker"


@final
@dataclass(frozen=True)
class StageResult:
    """How a child ended: its exit code (negative: the signal), what it reported, and its last lines."""

    stage: Stage
    code: int
    report: dict[str, Any] | None
    tail: tuple[str, ...]


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
) -> StageResult:
    """Run `stage` in a child until it ends; `on_event` gets each event it writes, `on_line` each line it prints.

    The first stop request reaches training as SIGTERM (it saves and exits), and kills preparation (which loses
    nothing). The child has ended when this returns or raises.
    """
    size = folder.events.stat().st_size if folder.events.exists() else 0
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    report_end, child_end = os.pipe()
    command = [sys.executable, "-X", "faulthandler", "-m", WORKER, stage, str(folder.path)]
    with ExitStack() as stack:
        stack.callback(os.close, report_end)
        with held_back(SAVE_SIGNAL):
            process = subprocess.Popen(
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
        stack.enter_context(process)
        stack.callback(kill_group, process.pid)
        os.close(child_end)

        def keep_lines() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                tail.append(line.rstrip("\n"))
                on_line(line.rstrip("\n"))

        pump = threading.Thread(target=keep_lines, name=f"{stage} output")
        pump.start()
        stop = process.terminate if stage == "train" else lambda: kill_group(process.pid)
        save = partial(process.send_signal, SAVE_SIGNAL) if stage == "train" else None
        with requests.handled_by(stop, save):
            for event in follow(folder.events, lambda: process.poll() is not None, start=size):
                on_event(event)
        pump.join(KILL_WAIT_SECONDS)
        code = process.wait()
        os.set_blocking(report_end, False)
        report = b""
        with suppress(BlockingIOError):  # killed: no report
            report = os.read(report_end, 2**16)
        return StageResult(stage, code, dict(json.loads(report)) if report else None, tuple(tail))


def failure(result: StageResult, folder: RunFolder, *, step: int) -> UserError:
    """The error of a child that failed. `step`: the last one it finished."""
    if result.report is not None:
        return UserError(**result.report)
    name = "preparation" if result.stage == "prepare" else "training"
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

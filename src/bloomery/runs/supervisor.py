"""One child process of a run: started, watched through the events it writes, and explained when it dies. No torch."""

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
TAIL_LINES = 200  # of what a child said last
KILL_WAIT_SECONDS = 10.0
LONGEST_LINE = 300  # of what is shown of a log
WORKER = "bloomery.runs.worker"


@final
@dataclass(frozen=True)
class Ending:
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
) -> Ending:
    """Run `stage` in a child until it ends; `on_event` gets each event it writes, `on_line` each line it prints.

    The first stop request reaches the child as SIGTERM (training saves and leaves) or ends it at once (preparing, which
    loses nothing). The child is gone when this returns or raises.
    """
    seen = folder.events.stat().st_size if folder.events.exists() else 0
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
                start_new_session=True,  # Ctrl+C reaches it through us alone, and its group can be killed as a whole
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
        with requests.heard_by(stop, save):
            for event in follow(folder.events, lambda: process.poll() is not None, start=seen):
                on_event(event)
        pump.join(KILL_WAIT_SECONDS)
        code = process.wait()
        os.set_blocking(report_end, False)
        told = b""
        with suppress(BlockingIOError):  # killed: it has said nothing of its end
            told = os.read(report_end, 2**16)
        return Ending(stage, code, dict(json.loads(told)) if told else None, tuple(tail))


def failure(ending: Ending, folder: RunFolder, *, step: int) -> UserError:
    """One sentence for a child that did not end well. `step`: the last one it finished."""
    if ending.report is not None:
        return UserError(**ending.report)
    name = "preparing the data" if ending.stage == "prepare" else "training"
    after = f" after step {step}" if step else ""
    again = f"`bloomery resume {folder.name}` goes on from what was saved"
    known = _recognised(ending, folder)
    if known is not None:
        how = f"died{after} of {signal_name(-ending.code)}" if ending.code < 0 else f"failed{after}"
        steps = [  # as they are typed here: with this run's recipe
            step.replace("RECIPE", str(folder.recipe)).removeprefix("# ")
            for step in known.fix
            if step.partition("  # ")[0] != "bloomery resume last"
        ]
        return UserError(
            f"{name} {how}: {known.what}\nwhy:   {known.cause}",
            where=f"{known.line[:LONGEST_LINE]}\n       (the rest is in {folder.log})",
            fix="\n       ".join([*steps, again]),
        )
    if ending.code == -signal.SIGKILL:
        return UserError(
            f"the process that was {name} was killed from outside{after} (SIGKILL)",
            where=str(folder.log),
            fix="the system does this when memory runs out (see `dmesg`): "
            f"train.micro_batch_size=1 needs least; {again}",
        )
    if ending.code < 0:
        return UserError(
            f"the process that was {name} died{after} of {signal_name(-ending.code)}, inside a library or a driver",
            where=f"its last words are in {folder.log}",
            fix=again,
        )
    return UserError(
        f"{name} failed{after}: {last_words(ending.tail) or 'nothing was said'}",
        where=f"the whole traceback is in {folder.log}",
        fix=again,
    )


def _recognised(ending: Ending, folder: RunFolder) -> Match | None:
    """The symptom that explains the death best: of the exception where there is one, else of the last lines."""
    if ending.code == -signal.SIGKILL:
        return None  # the kernel's doing, which says nothing here
    machine = read_machine(folder.machine) if folder.machine.is_file() else None
    texts = [last_words(ending.tail)] if ending.code > 0 else []
    for text in (*texts, "\n".join(ending.tail)):
        known = [one for one in match(text, machine=machine) if one.level == "blocks"]
        if known:
            return known[0]
    return None


def existing(folder: Path) -> RunFolder:
    """The run in `folder`. Raises UserError when there is none."""
    run = RunFolder(expanded(folder).absolute())
    if not run.recipe.is_file():
        raise UserError("this folder holds no run", where=str(run.path), fix="`bloomery runs` lists the runs here")
    return run

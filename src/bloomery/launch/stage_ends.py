"""How a stage of a run ended: which of its ranks ended the others, and the error about that. No torch.

Who is at fault when ranks hang is experimental: it was tested with pretended hosts, never on a cluster.
"""

import json
import re
import signal
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, final

from bloomery.core.child import last_words, signal_name
from bloomery.core.errors import UserError
from bloomery.core.files import read_whole
from bloomery.core.run_folder import RunFolder
from bloomery.core.signals import STOP_SIGNALS
from bloomery.hardware.doctor.symptoms import Match, match
from bloomery.hardware.machine import read_machine
from bloomery.hardware.vendors import COLLECTIVE_ERROR, DRIVER_ERROR
from bloomery.launch.exit_codes import STOPPED
from bloomery.parallel.collective_notes import CollectiveNote, rank_behind
from bloomery.parallel.environment import without_host

Stage = Literal["prepare", "train"]
STACKS = "stacks"  # folder of the run: stacks of ranks without progress
HOSTS_FILE = "hosts.json"  # there: the host of each rank, by rank
LONGEST_LINE = 300  # characters shown of a log line
# The words of gloo and NCCL when another rank has ended.
LOST = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|remote process (has )?exited|communicator was aborted"
    r"|Socket closed|peer closed",
    re.IGNORECASE,
)
# The words of a device, its driver or its memory: another host may not have this fault.
DEVICE_FAULT = re.compile(
    rf"{DRIVER_ERROR}|{COLLECTIVE_ERROR}|out of memory|sees no GPU",
    re.IGNORECASE,
)


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


def stack_file(folder: RunFolder, rank: int) -> Path:
    """Where a rank without progress leaves its stack; it makes the file when it begins."""
    return folder.path / STACKS / f"rank-{rank}.txt"


def dumped_stacks(folder: RunFolder, ranks: Iterable[int]) -> dict[int, str]:
    """The stacks that ranks without progress have left, by rank."""
    files = {rank: stack_file(folder, rank) for rank in ranks}
    texts = {
        rank: file.read_text(errors="replace") for rank, file in files.items() if file.is_file()
    }
    return {rank: text for rank, text in texts.items() if text}


def culprit_of(
    results: Sequence[StageResult], folder: RunFolder, *, is_stop_overdue: bool
) -> StageResult:
    """Of several ranks the one that ended the others. `results`: in the order of their ends.

    The others may be seen to end first: they lose their connection at once. So the first killed rank comes before the
    first lost one, and that before the first one with a report. `is_stop_overdue`: no step answered a stop in time.
    """
    # 1. A stop: the other ranks only lost their connection to the one that was asked to stop.
    stopped = [ending for ending in results if ending.code == STOPPED]
    unexplained = [
        ending
        for ending in results
        if ending.report is None and (ending.code >= 0 or ending.silent)
    ]
    if is_stop_overdue or (stopped and len(unexplained) == len(results)):
        return replace((stopped or results)[0], code=STOPPED)

    # 2. A hang: a rank without progress has left its stack and ended itself, without a report.
    if any(ending.code == 1 and ending.report is None for ending in results):
        stacks = dumped_stacks(
            folder, (ending.rank for ending in results if ending.rank is not None)
        )
        if stacks:
            return _hung(results, stacks, folder)

    # 3. A failure. An error about a lost connection follows from another rank's end.
    failed = [ending for ending in results if ending.code not in (0, STOPPED)]
    failed.sort(key=lambda ending: bool(LOST.search(last_words(ending.tail))))
    # From outside, not by its parent.
    killed = [
        ending for ending in failed if ending.code < 0 and not ending.silent and not ending.lost
    ]
    # Gone before this process ended the others. A rank on a GPU waits for its device in silence: it counts as lost
    # only where no other rank explains the end.
    gone = [ending for ending in failed if ending.lost and not ending.silent]
    reported = [ending for ending in failed if ending.report is not None]
    if len(reported) > 1 and all(ending.report == reported[0].report for ending in reported):
        reported[0] = replace(reported[0], rank=None)  # the ranks agreed on it
    return (killed or gone or reported or failed or results)[0]


def _hung(results: Sequence[StageResult], stacks: Mapping[int, str], run: RunFolder) -> StageResult:
    """Of ranks without progress: the one that left no stack, else the one that the others wait for."""
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
        if rank_result.silent and rank_result.rank is not None and rank_result.rank not in stacks
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
        if stack_file(run, silent[0]).exists():
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
    _write_notes(run, notes, hosts)
    fix = f"bloomery resume {run.name}"
    report = {
        "problem": problem,
        "where": f"stacks and last collectives of the ranks in {run.path / STACKS}",
        "fix": f"{fix}; or leave the host out: {without_host(host)}" if host else fix,
        "code": 1,
        "host": host,
    }
    of_suspect = [rank_result for rank_result in results if rank_result.rank in suspects[:1]]
    return replace((of_suspect or results)[0], code=1, report=report, rank=None)


def _write_notes(run: RunFolder, notes: Mapping[int, CollectiveNote], hosts: Sequence[str]) -> None:
    """A line for each rank, next to the stacks."""
    lines = [
        f"rank {rank}{f' on {hosts[rank]}' if hosts else ''}: {note}\n"
        for rank, note in sorted(notes.items())
    ]
    with suppress(OSError):  # a full disk: the error is reported without them
        text = "".join(lines)
        (run.path / STACKS / "collectives.txt").write_text(text, encoding="utf-8")


def _awaited(notes: Mapping[int, CollectiveNote]) -> str:
    """The collective in which most ranks wait, as the end of a sentence."""
    waiting_notes = [(note.entered, note.entered_name) for note in notes.values() if note.waits]
    if not waiting_notes:
        return ""
    (number, name), _ = Counter(waiting_notes).most_common(1)[0]
    return f" in collective {number:,} ({name})"


def hosts_of_ranks(folder: RunFolder) -> list[str]:
    """By rank, where the ranks of the last start were on several hosts; else empty."""
    with suppress(OSError, ValueError, TypeError, UserError):
        hosts = list(map(str, json.loads(read_whole(folder.path / STACKS / HOSTS_FILE))))
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
class StackPlace:
    """Where the training thread of a rank was. `waits`: for other ranks, inside a collective."""

    line: str
    waits: bool


def training_place(stack: str) -> StackPlace:
    """From a text of faulthandler, which lists every thread, innermost frame first."""
    threads = re.split(r"\n(?=Thread |Current thread )", stack)
    main = next(
        (thread for thread in threads if "worker.py" in thread and " in main" in thread),
        threads[-1],
    )
    frames = re.findall(r'File "(.*?)", line (\d+) in (\S+)', main)
    if not frames:
        return StackPlace("an unknown place", False)
    request_frame = next((frame for frame in frames if "/train/scorers/" in frame[0]), None)
    if request_frame is not None:
        file, line, _ = request_frame
        return StackPlace(f"a request to a scoring process ({Path(file).name}:{line})", False)
    waits = any("torch/distributed/" in file for file, _, _ in frames)
    bloomery_frame = next((frame for frame in frames if "/bloomery/" in frame[0]), frames[0])
    file, line, function = bloomery_frame if waits else frames[0]
    return StackPlace(f"{function} ({Path(file).name}:{line})", waits)


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

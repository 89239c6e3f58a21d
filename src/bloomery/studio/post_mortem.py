"""Why a run ended that failed or was killed: what its folder says, and the part of its page that shows it. No torch."""

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

from nicegui import ui

from bloomery.core.errors import UserError
from bloomery.core.run_folder import resume_argument
from bloomery.core.text import harmless, redact_secrets
from bloomery.hardware.doctor.symptoms import Finding, finding_of, match
from bloomery.hardware.machine import read_machine
from bloomery.launch.stage_ends import STACKS
from bloomery.monitor.words import log_line, sensor_lines
from bloomery.studio.components import mono, note, text
from bloomery.studio.finding_view import show_finding
from bloomery.studio.watching import OpenRun, end_of
from bloomery.view.incidents import KILLED
from bloomery.view.summary import status_text

DEAD = ("failed", "killed")  # the statuses with a post-mortem
_LOG_LINES = 12
_SHOWN_STACKS = 16


@dataclass(frozen=True)
class PostMortem:
    """`problem`, `where` and `fix`: as the command line printed them. `figures`: of the last step and the devices.

    `findings`: known problems whose words the log has, where the run ended without a word of its own.
    `warnings`: of the diagnosis, while the run trained. `stacks`: of ranks without progress, by file.
    """

    problem: str
    where: str
    fix: str
    findings: tuple[Finding, ...]
    warnings: tuple[str, ...]
    figures: str
    stacks: dict[str, str]
    log: str


def post_mortem_of(opened: OpenRun) -> PostMortem:
    """Reads the files of the run."""
    folder = opened.reader.folder
    with opened.lock:
        summary = opened.summary
        ended = None if opened.status == "killed" else summary.ended
        began_at = opened.view.began_at
        warnings = tuple(warned.reason for warned in opened.view.diagnoses.values())
        lines = [] if summary.last_step is None else [log_line(summary.last_step)]
        figures = "\n".join([*lines, *sensor_lines(summary.devices.newest)])
        status = status_text("killed", summary)
    whole_log = end_of(folder / "log.txt") if (folder / "log.txt").exists() else ""
    log = [line for line in whole_log.splitlines() if line >= _log_stamp(began_at)]
    resume = f"bloomery resume {resume_argument(folder.absolute())}"
    findings: tuple[Finding, ...] = ()
    if ended is None or not ended.fix:
        findings = _findings("\n".join(log), folder)
    return PostMortem(
        problem=f"{status}: {KILLED}" if ended is None else harmless(ended.error) or NO_REASON,
        where="" if ended is None else harmless(ended.where),
        fix=resume if ended is None or not ended.fix else harmless(ended.fix),
        findings=findings,
        warnings=tuple(map(harmless, warnings)),
        figures=redact_secrets(harmless(figures)),
        stacks={path.name: end_of(path) for path in _stack_files(folder)},
        log="\n".join(log[-_LOG_LINES:]),
    )


def _log_stamp(seconds: float) -> str:
    """The time at the beginning of a line of log.txt."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _findings(log: str, folder: Path) -> tuple[Finding, ...]:
    machine = None
    with suppress(UserError, OSError):  # a run that ended before it had looked at the machine
        machine = read_machine(folder / "machine.json")
    symptoms = [symptom for symptom in match(log, machine=machine) if symptom.level == "blocks"]
    return tuple(finding_of(symptom) for symptom in symptoms[:2])


def _stack_files(folder: Path) -> list[Path]:
    """First the last collectives of the ranks, then a stack per rank."""
    stacks = folder / STACKS
    files = [stacks / "collectives.txt", *sorted(stacks.glob("rank-*.txt"))[:_SHOWN_STACKS]]
    return [path for path in files if path.is_file() and path.stat().st_size]


NO_REASON = "failed, and gave no reason"


@final
class PostMortemView:
    """Mutable: the post-mortem on an open page of a run; nothing while the run lives."""

    def __init__(self, opened: OpenRun) -> None:
        self._opened = opened
        self._shown: tuple[str, int] | None = None  # status and lines of the run that is shown
        self._card = ui.element("section").classes("card")
        self._card.visible = False

    async def update(self) -> None:
        state = self._opened.status, self._opened.reader.tail.read_lines
        self._card.visible = self._opened.status in DEAD
        if not self._card.visible or state == self._shown:
            return
        self._shown = state
        post_mortem = await asyncio.to_thread(post_mortem_of, self._opened)
        self._card.clear()
        with self._card:
            _show(post_mortem)


def _show(post_mortem: PostMortem) -> None:
    text("Post-mortem", "h2", "card-title")
    note(post_mortem.problem, "bad").classes("whitespace-pre-wrap")
    for name, words in (("where", post_mortem.where), ("fix", post_mortem.fix)):
        if words:
            mono(f"{name}: {words}")
    for finding in post_mortem.findings:
        show_finding(finding)
    if post_mortem.warnings:
        text("Warnings while it trained", "h3", "card-title")
        for warning in post_mortem.warnings:
            mono(warning)
    if post_mortem.figures:
        text("Last figures", "h3", "card-title")
        mono(post_mortem.figures)
    for name, stack in post_mortem.stacks.items():
        with ui.expansion(f"{STACKS}/{name}").classes("w-full"):
            mono(stack)
    if post_mortem.log:
        text("The end of log.txt", "h3", "card-title")
        mono(post_mortem.log).classes("log-end")

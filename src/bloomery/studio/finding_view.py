"""A finding of the doctor with its commands: to run, to mend by pip, or to copy, with where to type them. No torch."""

import re
import shlex
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple

from nicegui import ui

from bloomery.core.run_lock import host_name
from bloomery.core.text import harmless
from bloomery.hardware.doctor.symptoms import Finding
from bloomery.studio.components import button, sentence, text
from bloomery.studio.frame import copy_button

DEMO = "demo"  # the run of `bloomery demo`
RUNS_HERE = ("doctor", "plan", "runs", DEMO)  # commands that a finding may name and a click may run


class Level(NamedTuple):
    """How a finding is shown."""

    words: str
    tone: str


LEVELS = {  # the gravest first
    "blocks": Level("blocks training", "bad"),
    "slows": Level("slows training", "warn"),
    "note": Level("note", ""),
}


def show_finding(
    finding: Finding,
    *,
    on_run: Callable[..., None] | None = None,
    on_fix: Callable[[Finding], Awaitable[None]] | None = None,
) -> None:
    """`on_run(*words)`: a command is clicked that changes nothing; `on_fix(finding)`: one that pip mends."""
    level = LEVELS[finding.level]
    with ui.element("section").classes("card") as section:
        with ui.element("div").classes("card-title"):
            text(level.words, "span", f"badge {level.tone}")
            text(harmless(finding.what), "h2", classes="studio-finding")
        if finding.level == "blocks":
            section.classes("studio-blocks")
        elif finding.level == "slows":
            section.classes("studio-slows")
        if finding.evidence:
            text(f"found: {harmless(finding.evidence)}", "p", "studio-text muted")
        if finding.run and on_fix is not None:
            button("Fix it", partial(on_fix, finding), kind="go", icon="build")
            sentence("Or by hand:", "muted", small=True)
        _show_steps(finding.fix, on_run)
        if (
            finding.level == "blocks"
            and finding.verify
            and not (on_run and words_of(finding.verify))
        ):
            sentence("Then check:", "muted", small=True)
            _show_steps((finding.verify,), on_run)


def _show_steps(steps: Sequence[str], on_run: Callable[..., None] | None) -> None:
    """Commands with their remarks, and where to type them; a step that is a remark alone is text."""
    commands = [step.partition("  # ")[0] for step in steps]
    for number, (step, command) in enumerate(zip(steps, commands, strict=True)):
        if step.startswith("# "):
            sentence(harmless(step[2:]))
            continue
        remark = step.partition("  # ")[2]
        words = words_of(command) if on_run is not None else ()
        with ui.column().classes("w-full gap-0"):
            with ui.row().classes("w-full items-center no-wrap gap-1 studio-command"):
                ui.label(harmless(command)).classes("studio-text grow min-w-0")
                copy_button(harmless(command))
                if on_run is not None and words:
                    run = button("Run", partial(on_run, *words), kind="quiet")
                    run.props["aria-label"] = harmless(f"Run {command}")
            if remark:
                sentence(harmless(remark), "muted", small=True)
        is_last = number + 1 == len(steps) or place_of(commands[number + 1]) != place_of(command)
        if not words and is_last:
            sentence(place_of(command), "muted", small=True)


def words_of(command: str) -> tuple[str, ...]:
    """The arguments of a command of Bloomery's that a click may run, since it changes nothing of this machine; none of
    another command.
    """
    try:
        program, *words = shlex.split(command)
    except ValueError:  # of no command, or of half a quotation
        return ()
    is_plain = re.search(r"[|<>&;$`{}]|\.\.\.", command) is None
    if program != "bloomery" or not words or words[0] not in RUNS_HERE or not is_plain:
        return ()
    changes = "--fix" in words or words[:1] == ["runs"] != words
    return () if changes else tuple(words)


def place_of(command: str) -> str:
    """Where to type a command that only its user can run, as a sentence."""
    host = harmless(host_name())
    first = command.split(maxsplit=1)[0]
    if first in ("export", "unset", "newgrp"):
        return (
            "Type it in the terminal that studio is started from, and start studio there again: it has what that "
            "terminal has."
        )
    if first == "wsl.exe":
        return "Type it in a terminal of Windows."
    if first == "docker":
        return "Type it in a terminal of the host, outside of this container."
    if first in ("srun", "salloc"):
        return "Type it in a terminal of the login node."
    if first == "pip":
        return f"Type it in a terminal on {host}, in the environment {harmless(sys.prefix)}."
    password = "; it asks for your password" if first == "sudo" else ""
    return f"Type it in a terminal on {host}{password}."

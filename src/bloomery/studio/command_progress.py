"""A command that a page has started, as a bar where it prints how far it is; below it what it prints. No torch."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import final

from nicegui import ui

from bloomery.core.text import harmless
from bloomery.studio.commands import Commands
from bloomery.studio.components import Progress, button, sentence
from bloomery.studio.downloads import start_download
from bloomery.studio.frame import CommandView

_COUNTS = re.compile(r"(\d[\d,]*) of (\d[\d,]*)")
_PERCENT = re.compile(r"(\d{1,3})%")


def progress_of(text: str) -> tuple[str, float | None]:
    """The newest `progress` line of a command, and from 0 to 1 how much of it is done; None where it has no numbers."""
    lines = [line for line in text.splitlines() if line.startswith("progress ")]
    if not lines:
        return "", None
    message = lines[-1].removeprefix("progress").strip()
    if found := _COUNTS.search(message):
        done, total = (int(number.replace(",", "")) for number in found.groups())
        return message, min(done / total, 1.0) if total else None
    if found := _PERCENT.search(message):
        return message, min(int(found[1]) / 100, 1.0)
    return message, None


def export_of(arguments: Sequence[str]) -> str:
    """The place of what an export command makes, as the list of models names it; "" of other commands."""
    places = [word.removeprefix("--out=") for word in arguments if word.startswith("--out=")]
    if arguments[0] != "export" or not places:
        return ""
    return places[-1] if Path(places[-1]).is_absolute() else f"./{Path(places[-1])}"


def problem_of(text: str) -> str:
    """What the last error of a command says, without where and fix, which stand below; "" where it printed none."""
    problems = [
        line.removeprefix("error:").strip()
        for line in text.splitlines()
        if line.startswith("error:")
    ]
    return problems[-1] if problems else ""


@final
class CommandProgress:
    """Mutable: the newest command about a subject."""

    def __init__(self, commands: Commands, subject: str, *, opened: bool = False) -> None:
        """`opened`: what it prints is what it was started for."""
        self._commands = commands
        self.subject = subject
        with ui.element("div").classes("card") as self._card:
            self._sentence = sentence("")
            self._bar = Progress()
            self._download = button("Download", self._start_download, kind="go", icon="download")
            self._view = CommandView(commands, subject, opened=opened)
        self._made = ""  # that can be downloaded
        self.update()

    def _start_download(self) -> None:
        start_download(self._made)

    def update(self) -> bool:
        """Shows what is new. Returns whether the command has ended since the last time."""
        command = self._commands.of(self.subject)
        self._card.visible = command is not None
        if command is None:
            return False
        has_ended = self._view.update()
        message, share = progress_of(command.text())
        verb = command.arguments[0]
        if command.code is None:
            self._sentence.text = harmless(message or f"{verb}: starting")
        elif command.code == 0:
            self._sentence.text = f"{verb}: done"
        else:
            problem = problem_of(command.text())
            self._sentence.text = f"{verb} failed: {problem or 'what it printed says why'}"
        self._made = export_of(command.arguments) if command.code == 0 else ""
        self._download.visible = bool(self._made)
        self._download.text = f"Download {harmless(Path(self._made).name)}"
        self._bar.element.visible = command.code is None and share is not None
        if share is not None:
            self._bar.show(share)
        return has_ended

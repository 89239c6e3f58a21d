"""A command that a page has started, as a bar where it prints how far it is; below it what it prints. No torch."""

import re
from typing import final

from nicegui import ui

from bloomery.core.text import harmless
from bloomery.studio.commands import Commands
from bloomery.studio.components import Progress, sentence
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


@final
class CommandProgress:
    """Mutable: the newest command about a subject."""

    def __init__(self, commands: Commands, subject: str) -> None:
        self._commands = commands
        self.subject = subject
        with ui.element("div").classes("card") as self._card:
            self._sentence = sentence("")
            self._bar = Progress()
            self._view = CommandView(commands, subject)
        self.update()

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
            self._sentence.text = f"{verb} failed; what it printed says why"
        self._bar.element.visible = command.code is None and share is not None
        if share is not None:
            self._bar.show(share)
        return has_ended

"""What `bloomery demo` prints while its run goes on: 100 columns, a title in the first eleven."""

from contextlib import AbstractContextManager, nullcontext
from typing import final

import click
from rich.console import Console

from bloomery.monitor.events import EvalDone, Event, RunEnded, Saved, StepDone
from bloomery.monitor.progress import PlainView
from bloomery.monitor.tally import RunFacts
from bloomery.units import format_seconds

WIDTH, TITLE = 100, 11


@final
class Story:
    """Titled lines, and the table of the run among them. With `to_stderr` stdout stays free for JSON."""

    def __init__(self, *, to_stderr: bool) -> None:
        self._console = Console(stderr=to_stderr, highlight=False, soft_wrap=True)
        self._view = PlainView(RunFacts(every_steps=2**62), self._write)

    def _write(self, line: str) -> None:
        self._console.print(line, markup=False)

    def say(self, title: str = "", *lines: str) -> None:
        """The first line beside its title, the others below it."""
        for index, line in enumerate(lines or ("",)):
            self._write(f"{title if index == 0 else '':<{TITLE}}{line}".rstrip())

    def say_timed(self, title: str, line: str, seconds: float) -> None:
        """Seconds at the right margin."""
        self.say(title, f"{line:<{WIDTH - TITLE - 8}}{format_seconds(seconds):>8}")

    def show(self, event: Event) -> None:
        """Rows of the table: one per exam, with what was saved there."""
        if isinstance(event, StepDone | EvalDone | Saved | RunEnded):
            self._view.write(event)

    def note(self, step: int, text: str) -> None:
        """A line among the rows."""
        self._view.note(step, text)

    def busy(self, what: str) -> AbstractContextManager[object]:
        """A spinner on a terminal, nothing elsewhere."""
        return self._console.status(what) if self._console.is_terminal else nullcontext()

    def begin_table(self, steps: int) -> None:
        """Now that the run's length is known; rows before it lack the time that is left."""
        self._view = PlainView(RunFacts(every_steps=2**62, steps=steps), self._write)

    def end_table(self) -> None:
        self._view.close()
        click.echo(err=self._console.stderr)


def bar(value: float, *, longest: float, width: int) -> str:
    """A bar in eighths of a character."""
    eighths = round(value / longest * width * 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()

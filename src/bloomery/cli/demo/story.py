"""What `bloomery demo` prints while its run goes on: 100 columns, a title in the first eleven."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import click
from rich.console import Console
from rich.text import Text

from bloomery.core.units import format_seconds
from bloomery.monitor.console.lines import TITLE, WIDTH, PlainView, titled
from bloomery.monitor.console.words import doing
from bloomery.monitor.events import EvalDone, Event, Phase, RunEnded, Saved, StepDone
from bloomery.monitor.summary import RunFacts


@final
class Story:
    """Titled lines, and the table of the run among them. With `to_stderr` stdout stays free for JSON.

    On a terminal the last line moves all the time: what is being done, and at which step.
    """

    def __init__(self, *, to_stderr: bool) -> None:
        self._console = Console(stderr=to_stderr, highlight=False, soft_wrap=True)
        self._status = self._console.status("starting", spinner="line")
        self._view = PlainView(RunFacts(every_steps=2**62), self._write)
        self._steps: int | None = None

    def _write(self, line: str) -> None:
        self._console.print(line, markup=False)

    def say(self, title: str = "", *lines: str) -> None:
        """The first line beside its title, the others below it."""
        for line in titled(title, *lines):
            self._write(line)

    def say_timed(self, title: str, line: str, seconds: float) -> None:
        """Seconds at the right margin."""
        self.say(title, f"{line:<{WIDTH - TITLE - 8}}{format_seconds(seconds):>8}")

    def show(self, event: Event) -> None:
        """Rows of the table: one per evaluation, with the checkpoint that was saved there; on a terminal, progress."""
        if isinstance(event, StepDone | EvalDone | Saved | RunEnded):
            self._view.write(event)
        if isinstance(event, Phase | StepDone):
            self.doing(doing(event, self._steps))

    def doing(self, what: str) -> None:
        """The moving line of a terminal; nothing elsewhere."""
        if self._console.is_terminal:
            self._status.update(Text(what))
            self._status.start()

    def still(self) -> None:
        """Nothing is being done any more."""
        self._status.stop()

    def note(self, step: int, text: str) -> None:
        """A line among the rows."""
        self._view.note(step, text)

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """A spinner on a terminal, nothing elsewhere."""
        self.doing(what)
        try:
            yield
        finally:
            self.still()

    def begin_table(self, steps: int) -> None:
        """Now that the run's length is known; rows before it lack the time that is left."""
        self._view = PlainView(RunFacts(every_steps=2**62, steps=steps), self._write)
        self._steps = steps

    def end_table(self) -> None:
        self.still()
        self._view.close()
        click.echo(err=self._console.stderr)

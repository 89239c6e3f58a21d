"""Terminal output of `bloomery demo`: titled lines and the table of the run."""

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import click
from rich.console import Console
from rich.text import Text

from bloomery.core.units import format_seconds
from bloomery.monitor.console.lines import TITLE, WIDTH, PlainView, titled
from bloomery.monitor.console.words import progress_text
from bloomery.monitor.events import EvalDone, Event, Phase, RunEnded, RunStarted, Saved, StepDone
from bloomery.monitor.summary import RunFacts


@final
class Story:
    """Lines of at most 100 columns with a title in the first eleven. With `to_stderr` stdout is free for JSON.

    On a terminal a status line below them shows the running phase or step.
    """

    def __init__(self, *, to_stderr: bool) -> None:
        self._console = Console(stderr=to_stderr, highlight=False, soft_wrap=True)
        self._width = min(WIDTH, self._console.width) if self._console.is_terminal else WIDTH
        self._status = self._console.status("starting", spinner="line")
        self._view = PlainView(RunFacts(every_steps=2**62), self._print, width=self._width)
        self._steps: int | None = None

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False)

    def write(self, title: str = "", *lines: str) -> None:
        """The title in the first columns of the first line, the lines in the others, wrapped."""
        room = self._width - TITLE
        wrapped = [part for line in lines for part in textwrap.wrap(line, room, break_on_hyphens=False) or [""]]
        for line in titled(title, *wrapped):
            self._print(line)

    def write_timed(self, title: str, line: str, seconds: float) -> None:
        """With a time at the right margin."""
        self.write(title, f"{line:<{self._width - TITLE - 8}}{format_seconds(seconds):>8}")

    def show(self, event: Event) -> None:
        """A line of the table per evaluation, with the checkpoint of that step; on a terminal the progress, too."""
        if isinstance(event, StepDone | EvalDone | Saved | RunEnded):
            self._view.write(event)
        if isinstance(event, RunStarted | Phase | StepDone):
            self.show_status(progress_text(event, self._steps))

    def show_status(self, text: str) -> None:
        """A moving line below the others on a terminal, until the next text; "" keeps the text."""
        if self._console.is_terminal and text:
            self._status.update(Text(text))
            self._status.start()

    def note(self, step: int, text: str) -> None:
        """A line in the table."""
        self._view.note(step, text)

    @contextmanager
    def busy(self, text: str) -> Iterator[None]:
        """A spinner on a terminal, nothing elsewhere."""
        self.show_status(text)
        try:
            yield
        finally:
            self._status.stop()

    def begin_table(self, steps: int) -> None:
        """Once the length of the run is known; earlier lines have no ETA."""
        self._view = PlainView(RunFacts(every_steps=2**62, steps=steps), self._print, width=self._width)
        self._steps = steps

    def end_table(self) -> None:
        self._status.stop()
        self._view.close()
        click.echo(err=self._console.stderr)

"""A sweep on the page that compares runs: its ranking, its verdict, and its runs across axes. Does not import torch."""

import asyncio
import shlex
from collections.abc import Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import final

from nicegui import ui

from bloomery.core.errors import UserError
from bloomery.core.run_folder import is_run
from bloomery.core.run_lock import worked_on
from bloomery.core.text import harmless
from bloomery.core.units import counted
from bloomery.studio.commands import Commands
from bloomery.studio.components import Badge, button, card, note, sentence, text
from bloomery.studio.frame import CommandView, copy_button, notify
from bloomery.studio.parallel_axes import Line, parallel_axes, short_names
from bloomery.studio.watching import address_of
from bloomery.sweep.page import figures_of, verdict_of
from bloomery.sweep.table import SweepRun, SweepTable, read_sweep


def name_of(table: SweepTable, run: SweepRun) -> str:
    """Of a run of a sweep, as commands and addresses name it."""
    return f"{table.path.name}/{run.run.name}"


@final
class SweepSection:
    """Mutable: a sweep that may be under way. The intervals take a second of a dozen runs, in a thread."""

    def __init__(self, folder: Path, commands: Commands) -> None:
        self.folder = folder
        self.commands = commands
        self._state: object = None
        self._is_reading = False
        with card():
            with ui.element("div").classes("toolbar"):
                text("Ranking", "h2", "card-title")
                self._badge = Badge("")
            self._body = ui.column().classes("w-full gap-3")
            self._stopping = CommandView(commands, f"the end of {folder.name}")
        with card("Settings and result", "colored by rank, the best on top") as self._picture:
            self._lines = ui.element("div").classes("w-full")

    async def update(self) -> None:
        """Reads the sweep again where a score has been added, or its command has begun or ended."""
        self._stopping.update()
        state = await asyncio.to_thread(_state_of, self.folder)
        if state == self._state or self._is_reading:
            return
        self._is_reading = True
        try:
            table = await asyncio.to_thread(read_sweep, self.folder)
        except UserError as error:
            self._show_problem(error)
            return
        finally:
            self._is_reading = False
        self._state = state
        self._show(table)

    def _continue(self, command: Sequence[str]) -> None:
        """By the command that began it: runs that have ended are not trained again."""
        try:
            self.commands.start(*command, subject=self.folder.name)
        except UserError as error:
            notify(error)

    def _stop(self) -> None:
        try:
            self.commands.start("stop", f"runs/{self.folder.name}", subject=self._stopping.subject)
        except UserError as error:
            notify(error)
        self._stopping.update()

    def _show_problem(self, error: UserError) -> None:
        self._body.clear()
        with self._body:
            note(f"{error.problem} ({error.where}). {error.fix}", "bad")

    def _show(self, table: SweepTable) -> None:
        self._badge.show(table.state)
        self._body.clear()
        with self._body:
            sentence(verdict_of(table))
            ui.html(ranking(table), sanitize=False).classes("ranking")
            if any(run.interval is not None for run in table.finished):
                words = "p: of no difference from the first run, on the same items"
                sentence(f"{words}; below {table.p_limit:.2g} a run is worse.", "muted", small=True)
            begun = self.commands.of(self.folder.name)
            if begun is not None and begun.code is None:
                button("Save and stop the sweep", begun.stop, icon="stop")
            elif table.state == "running":  # by another studio, or in a terminal
                button("Save and stop the sweep", self._stop, icon="stop")
            elif table.command:
                command = shlex.join(["bloomery", *table.command])
                with ui.row().classes("w-full items-center no-wrap gap-1 studio-command"):
                    ui.label(harmless(command)).classes("studio-text grow min-w-0")
                    copy_button(command)
                if table.state == "stopped":
                    button("Continue the sweep", partial(self._continue, table.command), kind="go")
        judged = [run for run in table.runs if run.metric is not None]
        self._picture.visible = len(judged) > 1
        self._lines.clear()
        if len(judged) > 1:
            with self._lines:
                lines = [_line(table, run) for run in judged]
                parallel_axes(lines, table.metric, lower_is_better=table.lower_is_better)


def _line(table: SweepTable, run: SweepRun) -> Line:
    names = short_names(table.keys)
    said = ", ".join(f"{names[key]} {text}" for key, text in run.settings.items())
    address = address_of(name_of(table, run))
    return Line(said, address, run.settings, run.metric, is_done=run.stopped_at is None)


def ranking(table: SweepTable) -> str:
    """The table that `bloomery sweep` prints, as HTML: the names of its runs are links."""
    names = short_names(table.keys)
    heads = ["", table.metric, "95% interval", "p", *(names[key] for key in table.keys), "run"]
    rows = [_row("th", heads)]
    ranks = {id(run): str(rank) for rank, run in enumerate(table.finished, 1)}
    for run in table.runs:
        cells = [ranks.get(id(run), "–"), *figures_of(run), *run.settings.values()]
        address = escape(address_of(name_of(table, run)), quote=True)
        # A run that failed before its first step may have no folder.
        link = f'<a class="nicegui-link" href="{address}">open</a>' if is_run(run.run) else " "
        kind = ""
        if run is table.winner:
            kind = ' class="best"'
        elif run.failure:
            kind = ' class="failed"'
        elif run.metric is None or run.stopped_at is not None:
            kind = ' class="early"'
        rows.append(_row("td", cells, link=link, kind=kind))
    return f"<table>{''.join(rows)}</table>"


def _row(tag: str, cells: Sequence[str], *, link: str = "", kind: str = "") -> str:
    texts = [escape(harmless(cell)) for cell in cells]
    inner = "".join(f"<{tag}>{text}</{tag}>" for text in [*texts, *([link] if link else [])])
    return f"<tr{kind}>{inner}</tr>"


def _state_of(folder: Path) -> object:
    """Changes with the scores and the command of a sweep."""
    files = (folder / "sweep.json", folder / "scores", folder / "failures")
    times = tuple(file.stat().st_mtime_ns if file.exists() else None for file in files)
    return times, worked_on(folder)


def count_begun(folder: Path) -> int:
    """The runs of a sweep that have a folder."""
    return sum(map(is_run, folder.iterdir()))


def about(folder: Path) -> str:
    """A line on a sweep in a list."""
    try:
        table = read_sweep(folder, noise=False)
    except UserError as error:
        return harmless(error.problem)
    keys = ", ".join(short_names(table.keys).values())
    return harmless(f"{counted(len(table.runs), 'runs')}, {keys}, {table.state}")

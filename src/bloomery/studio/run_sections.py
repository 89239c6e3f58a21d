"""Parts of the page of a run below its charts: events, and what is read when it is opened. No torch."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, final

from nicegui import ui

from bloomery.plan.types import RunPlan
from bloomery.studio.components import card
from bloomery.studio.watching import OpenRun, end_of
from bloomery.view.incidents import Incident

_SHOWN_INCIDENTS = 60
_SHOWN_CHECKPOINTS = 10  # of these


@final
class Drawer:
    """Mutable: a part of the page that is read when it is opened, and by `refresh` while it is open.

    `follows`: whether `refresh` is cheap enough for every update of the page.
    """

    def __init__(
        self,
        title: str,
        read: Callable[[], Any],
        draw: Callable[[Any], None],
        *,
        follows: bool = False,
    ) -> None:
        self.follows = follows
        self._read = read
        self._draw = draw
        self._drawn: list[Any] = []  # the content on the page, or nothing yet
        self._box = ui.expansion(title).classes("w-full")
        self._box.on_value_change(self.refresh)

    async def update(self) -> None:
        if self.follows:
            await self.refresh()

    async def refresh(self) -> None:
        if not self._box.value:
            return
        content = await asyncio.to_thread(self._read)
        if self._drawn != [content]:
            self._drawn = [content]
            self._box.clear()
            with self._box:
                self._draw(content)


def drawers_of(opened: OpenRun) -> list[Drawer]:
    """What a run has besides figures, charts and events."""
    folder = opened.reader.folder

    return [
        Drawer("Plan", lambda: opened.reader.plan, _draw_plan),
        Drawer("Log", lambda: end_of(folder / "log.txt"), _draw_text, follows=True),
        Drawer("Recipe", lambda: end_of(folder / "recipe.yaml"), _draw_text),
    ]


def _draw_text(text: str) -> None:
    ui.label(text).classes("studio-text")


def _draw_plan(plan: RunPlan | None) -> None:
    """Each choice of the plan that the run executes, with its reason."""
    if plan is None:
        ui.label("no plan yet, or one of another version").classes("opacity-75")
        return
    rows = [choice.model_dump() for choice in plan.choices]
    columns = [
        {"name": name, "label": name, "field": name, "align": "left"}
        for name in ("key", "value", "reason")
    ]
    table = ui.table(columns=columns, rows=rows, row_key="key", pagination=0)
    table.props("flat dense hide-pagination wrap-cells").classes("w-full")


@final
class EventList:
    """Mutable: the events of a run in words, the newest first."""

    def __init__(self) -> None:
        with card("Events", "the newest first"):
            self._box = ui.column().classes("w-full gap-1")
            with self._box:
                ui.label("nothing but training so far").classes("opacity-75")
        self._shown: list[Incident] = []

    def show(self, timeline: Sequence[Incident]) -> None:
        """Redraws the list where it has changed. `timeline`: the newest first."""
        checkpoints = [incident for incident in timeline if incident.kind == "save"]
        hidden = checkpoints[_SHOWN_CHECKPOINTS:]
        shown = [incident for incident in timeline if incident not in hidden]
        if shown[:_SHOWN_INCIDENTS] == self._shown:
            return
        self._shown = shown[:_SHOWN_INCIDENTS]
        self._box.clear()
        with self._box:
            for incident in self._shown:
                clock = time.strftime("%m-%d %H:%M:%S", time.localtime(incident.time))
                # In a narrow window the text is a line of its own.
                with ui.row().classes("w-full gap-x-3 gap-y-0 items-start sm:flex-nowrap"):
                    ui.label(clock).classes("opacity-75 whitespace-nowrap")
                    ui.label(f"step {incident.step:,}").classes("whitespace-nowrap min-w-[5.5rem]")
                    ui.label(incident.text).classes(
                        "min-w-0 basis-full sm:basis-auto break-words whitespace-pre-wrap"
                    )

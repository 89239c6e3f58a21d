"""Parts of the page of a run below its charts: events, and what is read when it is opened. No torch."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, final

from nicegui import ui

from bloomery.core.text import redact_secrets
from bloomery.data.pictures.thumbnails import Shown, shown_thumbnail
from bloomery.monitor.events import Sampled
from bloomery.plan.types import RunPlan
from bloomery.report.rewards import ShownCompletion, shown_completions
from bloomery.studio.components import card, text
from bloomery.studio.watching import OpenRun, end_of
from bloomery.view.incidents import Incident

_SHOWN_INCIDENTS = 60
_SHOWN_CHECKPOINTS = 10  # of these


@final
class Drawer:
    """Mutable: a part of the page that is read when it is opened, and by `refresh` while it is open.

    `follows`: whether `refresh` is cheap enough for every update of the page. `exists`: whether the run has it.
    """

    def __init__(
        self,
        title: str,
        read: Callable[[], Any],
        draw: Callable[[Any], None],
        *,
        follows: bool = False,
        exists: Callable[[], bool] = lambda: True,
    ) -> None:
        self.follows = follows
        self._read = read
        self._draw = draw
        self._exists = exists
        self._drawn: list[Any] = []  # the content on the page, or nothing yet
        self._box = ui.expansion(title).classes("w-full")
        self._box.visible = exists()
        self._box.on_value_change(self.refresh)

    async def update(self) -> None:
        self._box.visible = self._exists()
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
        Drawer(
            "Completions",
            lambda: shown_completions(folder),
            _draw_completions,
            exists=(folder / "completions").is_dir,
        ),
        Drawer("Plan", lambda: opened.reader.plan, _draw_plan),
        Drawer("Log", lambda: end_of(folder / "log.txt"), _draw_text, follows=True),
        Drawer("Recipe", lambda: end_of(folder / "recipe.yaml"), _draw_text),
    ]


def _draw_text(text: str) -> None:
    ui.label(text).classes("studio-text")


@final
class SampleList:
    """Mutable: what the model writes after each prompt, as training goes on: the newest first, older ones folded."""

    def __init__(self, opened: OpenRun) -> None:
        self._opened = opened
        self._images: dict[str, Shown | None] = {}
        self._shown: list[Sampled] = []
        with card("Samples", "the same prompts, as training goes on") as self._box:
            self._content = ui.element("div").classes("sample-grid")
        self._box.visible = False

    async def update(self) -> None:
        with self._opened.lock:
            samples = list(self._opened.view.samples)
        if samples == self._shown:
            return
        self._shown = samples
        for place in {sample.image for sample in samples} - self._images.keys():
            folder = self._opened.reader.folder
            self._images[place] = await asyncio.to_thread(shown_thumbnail, folder, place)
        by_prompt: dict[tuple[str, str], list[Sampled]] = {}
        for sample in reversed(samples):
            by_prompt.setdefault((sample.prompt, sample.image), []).append(sample)
        self._box.visible = True
        self._content.clear()
        with self._content:
            for (prompt, image), of_prompt in by_prompt.items():
                with ui.element("div").classes("sample"):
                    if image:
                        self._draw_image(image)
                    text(redact_secrets(prompt), "div", "mono muted")
                    _draw_sample(of_prompt[0])
                    if older := of_prompt[1:]:
                        with ui.expansion(f"{len(older)} earlier").classes("w-full"):
                            for sample in older:
                                _draw_sample(sample)

    def _draw_image(self, place: str) -> None:
        image = self._images[place]
        if image is None:
            ui.label(f"{place} is missing").classes("opacity-75")
        else:
            _draw_image(image, place)


def _draw_sample(sample: Sampled) -> None:
    with ui.element("div").classes("sample-text"):
        text(f"step {sample.step:,}", "span", "muted small")
        text(redact_secrets(sample.completion), "div", "mono")


def _draw_image(image: Shown, name: str) -> None:
    element = ui.element("img").classes("studio-image")
    element.props.update(src=image.url, alt=name, width=image.width, height=image.height)


def _draw_completions(rollouts: Sequence[tuple[str, Sequence[ShownCompletion]]]) -> None:
    """Of the first, the middle and the last rollout, the newest first, as on the page of the report."""
    if not rollouts:
        ui.label("none yet").classes("opacity-75")
    for title, completions in reversed(rollouts):
        ui.label(title).classes("font-medium").props("role=heading aria-level=3")
        with ui.element("div").classes("w-full grid gap-3 grid-cols-1 lg:grid-cols-3 pb-3"):
            for completion in completions:
                _draw_completion(completion)


def _draw_completion(completion: ShownCompletion) -> None:
    facts = [f"{completion.role}: reward {completion.reward}", f"advantage {completion.advantage}"]
    if not completion.ended:
        facts.append("cut at the maximum length")
    with ui.card().props("flat bordered").classes("p-3 gap-1 w-full"):
        ui.label(", ".join(facts)).classes("font-medium")
        if completion.rewards:
            ui.label(completion.rewards).classes("text-xs opacity-75 break-words")
        for picture in completion.pictures:
            _draw_image(picture, "picture of the prompt")
        ui.label(redact_secrets(completion.prompt)).classes("studio-text opacity-75")
        ui.label(redact_secrets(completion.completion)).classes("studio-text")


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

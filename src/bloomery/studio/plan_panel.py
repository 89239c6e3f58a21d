"""The answer beside the questions of a new run: whether it fits, how long it takes, and Start. No torch."""

import shlex
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import final

from nicegui import ui

from bloomery.core.errors import UserError
from bloomery.core.text import harmless
from bloomery.core.units import format_bytes
from bloomery.plan.page_text import about
from bloomery.plan.price import keep_price, kept_price, money_text, read_price
from bloomery.studio.components import Part, bar, chip, fact, note, text
from bloomery.studio.frame import copy_button
from bloomery.studio.plan_picture import PlanPicture
from bloomery.studio.recipe_form import Planned
from bloomery.studio.settings_form import attribute, show_mistake

START = "Start"
MOST_NAMED = 3  # runs that train now
START_ANYWAY = "Start although it does not fit"


@final
class PlanPanel:
    """Mutable: the plan of what is answered so far. `on_edit(edit)`: a suggestion was chosen."""

    def __init__(
        self,
        *,
        on_start: Callable[[], Awaitable[None]],
        on_save: Callable[[], Awaitable[None]],
        on_edit: Callable[[str], Awaitable[None]],
        on_name: Callable[[str], None],
        on_price: Callable[[], Awaitable[None]],
    ) -> None:
        self._on_price = on_price
        self._on_edit = on_edit
        with ui.element("aside").classes("card plan-panel").props('aria-label="Plan"'):
            with ui.element("h2").classes("card-title"):
                text("Will it fit?")
                self._device = text("", "small")
            with ui.element("div").props("role=status"):
                self._verdict = ui.element("p").classes("verdict")
                self._problem = text("", "p", "note bad").props("role=alert")
            self._content = ui.element("div").classes("plan-content")
            self._price = ui.input("Price of a device per hour", placeholder="such as $1.99")
            self._price.props("outlined dense stack-label").without_auto_validation()
            self._price.classes("w-full").mark("price").on("change", self._take_price)
            self._price.value = _price_words()
            self._name = ui.input("Name of the run").props("outlined dense stack-label")
            self._name.without_auto_validation().classes("w-full").mark("run-name")
            self._name.on("change", lambda: on_name(self._name.value or ""))
            self.start = ui.button(START, icon="play_arrow", on_click=on_start)
            self.start.props("no-caps unelevated").classes("w-full")
            self._reason = text("", "p", "small muted")
            self._command = ui.element("div").classes("plan-command")
            self._save = ui.button("Save the recipe without starting", on_click=on_save)
            self._save.props("flat dense no-caps")
            with ui.expansion("The whole plan").classes("w-full") as self._fold:
                self._lines = ui.label().classes("studio-text studio-plan w-full overflow-x-auto")
                # The arrow keys scroll it.
                self._lines.props('tabindex=0 role=region aria-label="The whole plan"')
        # On a phone the answer stays in view, too.
        with ui.element("div").classes("plan-strip"):
            self._strip = ui.element("p").classes("verdict")
            self.strip_start = ui.button(START, on_click=on_start)
            self.strip_start.props('no-caps unelevated aria-label="Start now"')
        self.start.enabled = self.strip_start.enabled = False  # until a plan is there

    def show(
        self,
        planned: Planned,
        *,
        missing: str,
        command: str,
        is_startable: bool,
        num_runs: int,
        name: str,
        proposed: str,
        name_mistake: str,
        running: Sequence[str],
    ) -> None:
        """`missing`: a sentence, why it cannot be started. `command`: what Start runs. `num_runs`: with the values that
        are compared. `name`: of the run, as typed, `proposed`: the one that it gets otherwise. `running`: the runs that
        train now.
        """
        picture = planned.picture
        self._device.text = harmless(picture.device) if picture is not None else ""
        for verdict in (self._verdict, self._strip):
            verdict.clear()
            with verdict:
                _verdict(picture, missing)
        problem = "\n".join(filter(None, (planned.problem, planned.fix and f"fix: {planned.fix}")))
        self._problem.text = problem
        self._problem.visible = bool(problem)
        self._content.clear()
        if picture is not None:
            with self._content:
                self._show_picture(planned, picture, num_runs)
                if running:
                    verb = "trains" if len(running) == 1 else "train"
                    names = ", ".join(map(harmless, running[:MOST_NAMED]))
                    note(f"{names} {verb} now: on the same device, each takes longer.", "warn")
        self._name.visible = self._price.visible = picture is not None
        self._name.label = "Name of the run" if num_runs == 1 else "Name of the comparison"
        if self._name.value != name:
            self._name.value = name
        self._name.props(f'placeholder="{attribute(proposed)}"')
        show_mistake(self._name, name_mistake)
        fits = picture is None or planned.fits
        start_text = START if num_runs == 1 else f"Start {num_runs} runs"
        self.start.text = start_text if fits else START_ANYWAY
        # The color of the button says that it is the thing to do.
        self.start.props(remove="outline unelevated").props("unelevated" if fits else "outline")
        for button in (self.start, self.strip_start):
            button.enabled = is_startable
        self.strip_start.visible = fits  # else the whole plan is to be read
        saves = "" if picture is None else picture.saves
        closing = "Close the browser when you like: training goes on."
        # Without a plan the verdict has said it.
        missing = "" if picture is None else missing
        self._reason.text = missing if not is_startable else f"{saves} {closing}"
        self._reason.visible = bool(self._reason.text)
        self._command.clear()
        self._command.visible = self._save.visible = is_startable
        if is_startable:
            with self._command:
                text(command, "code").mark("command")
                copy_button(command)
        self._fold.visible = bool(planned.lines)
        self._lines.text = "\n".join(planned.lines)

    async def _take_price(self) -> None:
        """Kept for this user's plans on this machine; an empty field forgets it."""
        text = (self._price.value or "").strip()
        try:
            price = read_price(text, "the price") if text else None
        except UserError as error:
            show_mistake(self._price, f"{error.problem}: {error.fix}")
            return
        show_mistake(self._price, "")
        if not keep_price(price):
            ui.notify("the price cannot be kept: the state folder cannot be written")
        await self._on_price()

    def _show_picture(self, planned: Planned, picture: PlanPicture, num_runs: int) -> None:
        parts = [
            Part(part.name, part.bytes, format_bytes(part.bytes), part.color)
            for part in picture.parts
        ]
        with ui.element("div").classes("memory"):
            bar(parts, picture.whole)
            if picture.limit < picture.whole:
                left = 100 * picture.limit / picture.whole
                ui.element("i").classes("limit").style(f"left: {left:.2f}%")
        with ui.element("div").classes("facts"):
            for each in picture.facts:
                fact(each.value, each.words)
        if num_runs > 1:
            note(_of_several(picture, num_runs))
        if planned.suggestions and not planned.fits:
            text("What would make it smaller:", "p", "small")
        if planned.suggestions:
            with ui.element("div").classes("suggestions"):
                for edit, saves in planned.suggestions:
                    chip(edit, partial(self._on_edit, edit))
                    text(f"saves {saves}", "span", "small muted")
        longest = f"data.sequence_length={picture.longest}"
        if picture.longest is not None and longest not in dict(planned.suggestions):
            with ui.element("div").classes("chips"):
                words = f"longest sequence that fits: {picture.longest:,}"
                chip(words, lambda: self._on_edit(longest))
        for warning in planned.warnings:
            note(warning, "warn")
        for remark in planned.notes:
            note(remark)


def _of_several(picture: PlanPicture, num_runs: int) -> str:
    """Time and cost of a comparison."""
    combinations = f"{num_runs} runs, one for each combination of the values"
    if picture.seconds is None:
        return f"{combinations}."
    sums = about(num_runs * picture.seconds)
    if picture.cost is not None:
        sums += f" and {money_text(num_runs * picture.cost.money.value, picture.cost.currency)}"
    return f"{combinations}: about {sums} if each takes as long as the first."


def _verdict(picture: PlanPicture | None, missing: str) -> None:
    if picture is None:
        text(missing, "span", "muted")
        return
    text(picture.verdict, "b", picture.tone)
    text(f", {picture.memory}")


def _price_words() -> str:
    try:
        price = kept_price()
    except UserError:  # of the variable; plans say so
        return ""
    return "" if price is None else price.text


def command_line(*arguments: str) -> str:
    return shlex.join(("bloomery", *arguments))

"""A field that is typed into, with a list of what may be meant below it. Does not import torch."""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, final

from nicegui import ui

from bloomery.core.text import harmless
from bloomery.studio.components import chip, text
from bloomery.studio.model_choices import Choice, matching, shown, told_apart
from bloomery.studio.settings_form import show_mistake

MOST_ROWS, MOST_TYPED = 80, 8  # of a group: of all, and of those with the words that are typed
# The focus has left the field and the list, not one of them for the other: what is typed next would count as an answer.
_LEFT = (
    "(event) => { const parts = event.currentTarget.querySelectorAll('input, .picker-list');"
    " if (![...parts].some((part) => part.contains(event.relatedTarget))) emit(); }"
)
_KEEPS_FOCUS = "(event) => event.preventDefault()"  # of the field, and with it the list


class Group(NamedTuple):
    """`remark`: what a group without choices says."""

    title: str
    choices: Sequence[Choice]
    remark: str = ""


@final
class Picker:
    """Mutable: a question that is answered by typing or by choosing.

    `on_answer(value)` is called when another answer is there: at Enter, when the field is left, when a row is chosen.
    `on_open()` is called when the list is about to be shown; `on_type(value)` for what is being typed.
    """

    def __init__(
        self,
        name: str,
        placeholder: str,
        *,
        on_answer: Callable[[str], Awaitable[None]],
        on_open: Callable[[], Awaitable[None]],
        on_type: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        self._on_answer = on_answer
        self._on_open = on_open
        self._on_type = on_type
        self._groups: Sequence[Group] = ()
        self._first: Sequence[Choice] = ()
        self._found: Group | None = None
        self._answer = ""
        with ui.element("div").classes("picker") as box:
            self.input = ui.input(placeholder=placeholder, on_change=self._typed)
            self.input.props(f'outlined clearable autocomplete=off aria-label="{name}"')
            self.input.without_auto_validation().classes("w-full").mark(name)
            self._about = text("", "p", "small muted break-words")
            self._list = ui.element("div").classes("picker-list")
            self._list.visible = False
            self._chips = ui.element("div").classes("chips")
        self.input.on("focus", self._open)
        self.input.on("keydown.down", self._open)
        self.input.on("keydown.enter", self._enter)
        self.input.on("keydown.escape", self._close)
        self.input.on("clear", self._leave)
        box.on("focusout", self._leave, js_handler=_LEFT)

    @property
    def value(self) -> str:
        return (self.input.value or "").strip()

    def fill(self, value: str) -> None:
        """An answer that came from elsewhere; what is being typed stays."""
        if value != self._answer:
            self._answer = value
            self.input.value = value
            self._show_chips()

    def tell(self, about: str, mistake: str = "") -> None:
        """`about`: what the answer is; `mistake`: why it is none, in red."""
        show_mistake(self.input, mistake)
        self._about.text = "" if mistake else harmless(about)
        self._about.visible = bool(self._about.text)

    def offer(self, groups: Sequence[Group], first: Sequence[Choice] | None = None) -> None:
        """What may be chosen; `first`: what is offered before the list is opened."""
        self._groups = groups
        if first is not None:
            self._first = told_apart(first)
            self._show_chips()
        if self._list.visible:
            self._show_list()

    def offer_found(self, group: Group) -> None:
        """What was searched for elsewhere by what is typed."""
        self._found = group
        if self._list.visible:
            self._show_list()

    def _show_chips(self) -> None:
        self._chips.clear()
        with self._chips:
            for choice in self._first:
                made = chip(
                    choice.title,
                    partial(self._choose, choice.value),
                    on=choice.value == self._answer,
                )
                made.on("mousedown", js_handler=_KEEPS_FOCUS)

    async def _typed(self) -> None:
        if self.value == self._answer:
            return
        self._found = None
        if self._list.visible:
            self._show_list()
        if self._on_type is not None:
            await self._on_type(self.value)

    async def _open(self) -> None:
        if self._list.visible:
            return
        self._list.visible = True
        self._show_list()
        await self._on_open()

    def _show_list(self) -> None:
        typed = "" if self.value == self._answer else self.value
        self._list.clear()
        with self._list:
            listed = set[str]()  # a choice stands in its first group alone
            for title, choices, remark in self._groups:
                most = MOST_TYPED if typed else MOST_ROWS
                new = [choice for choice in choices if choice.value not in listed]
                listed |= {choice.value for choice in choices}
                rows = list(matching(told_apart(new), typed))[:most]
                remark = "" if typed else remark  # of nothing here: no answer to what is typed
                if not rows and not remark:
                    continue
                text(title, "p").classes("picker-title")
                if remark:
                    text(remark, "p").classes("picker-remark")
                for choice in map(shown, rows):
                    self._row(choice)
            if typed and self._found is not None:
                text(self._found.title, "p").classes("picker-title")
                if self._found.remark:
                    text(self._found.remark, "p").classes("picker-remark")
                for choice in map(shown, self._found.choices):
                    self._row(choice)

    def _row(self, choice: Choice) -> None:
        # Arrow keys reach the rows; Tab leaves the field, as in other lists below a field.
        with ui.element("button").classes("picker-row").props("type=button tabindex=-1") as row:
            text(choice.title, "b")
            text(choice.problem or choice.words)
        row.on("mousedown", js_handler=_KEEPS_FOCUS)
        if choice.problem:
            row.props("disabled")
        else:
            row.on("click", partial(self._choose, choice.value))

    async def _choose(self, value: str) -> None:
        self.input.value = value
        await self._leave()

    def _close(self) -> None:
        self._list.visible = False

    async def _enter(self) -> None:
        """Takes the only row that has what is typed, unless that is an answer itself."""
        typed = self.value
        choices = [choice for group in self._groups for choice in group.choices]
        rows = {choice.value for choice in matching(choices, typed) if typed and not choice.problem}
        is_answer = "/" in typed or any(choice.value == typed for choice in choices)
        if self._list.visible and len(rows) == 1 and not is_answer and not Path(typed).exists():
            self.input.value = rows.pop()
        await self._leave()

    async def _leave(self) -> None:
        self._close()
        if self.value != self._answer:
            self._answer = self.value
            self._show_chips()
            await self._on_answer(self.value)

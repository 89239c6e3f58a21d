"""What all pages of studio share: title, navigation, colors, and errors in words."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, final

from nicegui import ui
from nicegui.events import GenericEventArguments, ValueChangeEventArguments

from bloomery.core.errors import UserError, one_line
from bloomery.core.look import tokens
from bloomery.core.text import harmless
from bloomery.studio.charts import prefetch_links
from bloomery.studio.commands import Command, Commands
from bloomery.studio.components import button, heading, note, sentence
from bloomery.studio.sensors import RAIL_SECONDS, GpusOfRail, shared_sensors

STATUS_COLORS = {
    "running": "positive",
    "paused": "warning",
    "stopping": "warning",
    "done": "primary",
    "stopped": "grey-7",
    "failed": "negative",
    "killed": "negative",
    "unreadable": "negative",
    "deleted": "negative",
}
_STYLESHEET = Path(__file__).with_name("style.css")
_SCRIPT = Path(__file__).with_name("studio.js")

_COLORS = "bloomery_colors"  # a cookie: dark or light


class PageLink(NamedTuple):
    path: str
    name: str


PAGE_LINKS = (
    PageLink("/", "Runs"),
    PageLink("/new", "New run"),
    PageLink("/compare", "Compare"),
    PageLink("/chat", "Chat"),
    PageLink("/models", "Models"),
    PageLink("/machine", "Machine"),
)


@cache
def _script() -> str:
    return _SCRIPT.read_text(encoding="utf-8")


@contextmanager
def page(title: str, path: str, *, tells_errors: bool = True) -> Iterator[None]:
    """The frame of a page; inside the block its content. `tells_errors`: of its updates and buttons."""
    ui.page_title(f"{title} · Bloomery")
    ui.add_css(tokens())
    ui.add_css(_STYLESHEET)
    ui.add_head_html(f"<script>{_script()}</script>")
    ui.add_head_html(prefetch_links())
    chosen = ui.context.client.request.cookies.get(_COLORS)
    dark = ui.dark_mode({"dark": True, "light": False}.get(chosen or ""))  # None: as the system

    def change_colors(event: GenericEventArguments) -> None:
        dark.value = bool(event.args)

    client = ui.context.client

    def redraw_charts() -> None:
        """A canvas does not follow the colors of a page."""
        for element in client.elements.values():
            if isinstance(element, ui.echart):
                element.update()

    told = set[str]()

    def tell(error: Exception) -> None:
        """Of an update or a button, whose page goes on; an update may fail again every second."""
        failure = failure_of(error)
        if failure.problem not in told:
            told.add(failure.problem)
            notify(failure)

    if tells_errors:
        ui.on_exception(tell)

    with ui.element("div").classes("frame"):
        with ui.element("header").classes("rail"):
            ui.label("Bloomery").classes("brand")
            with ui.element("nav").classes("pages").props('aria-label="Pages"'):
                for place in PAGE_LINKS:
                    link = ui.link(place.name, place.path).classes("studio-link")
                    if place.path == path:
                        link.props("aria-current=page")
            with ui.element("div").classes("foot"):
                gpus = GpusOfRail(shared_sensors())
                switch = ui.button(icon="contrast")
                switch.props('flat dense data-colors aria-label="Switch between light and dark"')
                emit = f"() => emit(studioSwitchColors('{_COLORS}'))"
                switch.on("click", change_colors, js_handler=emit)
                switch.on("redraw", redraw_charts)
                folder = ui.label(harmless(Path.cwd().name)).classes("folder-name")
                folder.props["title"] = harmless(f"Runs, models and data of {Path.cwd()}")
        with ui.element("main"):
            yield
    # Last: where a page awaits something, NiceGUI answers as soon as a timer runs, with what is there until then.
    update_every(RAIL_SECONDS, gpus.update)


def nothing_here(title: str, problem: str, words: str, *ways: tuple[str, str]) -> None:
    """In place of what a page would show. `ways`: the words of a button and the page that it leads to."""
    with heading(title):
        for name, address in ways:
            button(name, partial(ui.navigate.to, address))
    note(problem, "bad")
    sentence(words)


def failure_of(error: Exception) -> UserError:
    """The words of a page for an error that is a bug in studio, or of its environment."""
    problem = f"studio failed: {type(error).__name__}: {one_line(str(error))}".rstrip(": ")
    fix = "reload the page; if it fails again, report the traceback"
    return UserError(
        harmless(problem), where="traceback in the terminal of `bloomery studio`", fix=fix
    )


def update_every(seconds: float, update: Callable[[], Any]) -> None:
    """Calls `update` while a browser shows the page; begun after the last await that builds it.

    NiceGUI keeps a page for half a minute after it was left, in case that the browser connects again.
    """
    client = ui.context.client
    timer = ui.timer(seconds, update)

    def on_change() -> None:
        timer.active = client.has_socket_connection

    client.on_connect(on_change)
    client.on_disconnect(on_change)


def selection_table(
    columns: Sequence[tuple[str, str, bool]], rows: list[dict[str, Any]], key: str
) -> ui.table:
    """A table whose rows are marked and sorted; cards in a narrow window. `columns`: key, heading, is a number. `key`:
    of the value that tells a row from the others.
    """
    table = ui.table(
        columns=[
            {
                "name": name,
                "label": heading,
                "field": name,
                "sortable": True,
                "align": "right" if is_number else "left",
            }
            for name, heading, is_number in columns
        ],
        rows=rows,
        row_key=key,
        selection="multiple",
        pagination=0,
    ).classes("w-full")
    table.props('flat bordered dense :grid="Quasar.Screen.lt.md" hide-pagination binary-state-sort')
    label_checkboxes(table, key)
    return table


def label_checkboxes(table: ui.table, key: str) -> None:
    """Names the checkboxes of a table for screen readers, each by the row's value of `key`."""
    checkbox = '<q-checkbox v-model="props.selected" dense'
    table.add_slot(
        "header-selection", f'{checkbox} aria-label="Select all" data-focus="Select all" />'
    )
    name = f"'Select ' + props.row.{key}"
    table.add_slot("body-selection", f'{checkbox} :aria-label="{name}" :data-focus="{name}" />')


# Quasar's own headings sort at a click, and the keyboard does not reach them.
_SORTED = "props.col.__thClass.includes('sorted')"
_SORT_HEADING = f"""
<q-th :props="props" :aria-sort="!{_SORTED} ? 'none' : props.col.__thClass.includes('sort-desc') ? 'descending' :
  'ascending'">
  <span role="button" tabindex="0" :data-focus="'Sort by ' + props.col.label"
    @keydown.enter.prevent="props.sort(props.col)" @keydown.space.prevent="props.sort(props.col)">
    {{{{ props.col.label }}}}</span>
</q-th>
"""


def sort_by_keyboard(table: ui.table, tools: ui.element, *, always: bool = False) -> None:
    """Makes buttons of the headings; a narrow window, which has cards and no headings, gets a field in `tools`.
    `always`: a wide one, too, where not every column has a heading.
    """
    table.add_slot("header-cell", _SORT_HEADING)
    headings = {"": "newest"}  # first, as the rows come
    headings |= {column["name"]: column["label"] for column in table.columns}

    def sorted_by() -> str:
        return table.pagination.get("sortBy") or ""

    def sort(event: ValueChangeEventArguments[str]) -> None:
        if event.value != sorted_by():  # else a heading has done it, with an order of its own
            table.pagination = {"rowsPerPage": 0, "sortBy": event.value or None}

    with tools:
        field = ui.select(headings, value="", label="Sort by", on_change=sort).props(
            "dense outlined"
        )
        field.classes("w-40" if always else "w-40 md:hidden")
    table.on_pagination_change(lambda: field.set_value(sorted_by()))


def copy_button(command: str) -> ui.button:
    def tell(event: GenericEventArguments) -> None:
        if event.args:
            ui.notify("copied")
        else:
            ui.notify("this browser refuses: select the command and copy it", type="negative")

    button = ui.button(icon="content_copy").on(
        "click", tell, js_handler=f"async () => emit(await studioCopy({json.dumps(command)}))"
    )
    return button.props('flat dense size=sm aria-label="Copy the command"')


@contextmanager
def question(title: str) -> Iterator[ui.dialog]:
    """A dialog under a title, by which screen readers announce it; inside the block its content.

    What is done with the answer follows `await dialog` in the caller: the work of an element of the dialog would lose
    its page as the dialog is deleted.
    """
    with ui.dialog() as dialog, ui.card().classes("w-full max-w-[40rem] gap-3"):
        dialog.props["aria-label"] = title
        ui.label(title).classes("text-lg font-semibold break-words").props(
            "role=heading aria-level=2"
        )
        yield dialog
    # Not before: as it hides, it gives the keyboard's focus back to the button that opened it.
    dialog.on("hide", dialog.delete)


def notify(error: UserError) -> None:
    """An error as the command line words it."""
    ui.notify(
        "\n".join(filter(None, (error.problem, error.where, error.fix and f"fix: {error.fix}"))),
        type="negative",
        multi_line=True,
        timeout=15_000,
        actions=[{"label": "Close", "color": "white"}],  # its own button is blue on red
        classes="whitespace-pre-wrap",
    )


@final
class CommandView:
    """Mutable: the newest command about a subject, with what it prints while it runs; nothing where there is none."""

    def __init__(self, commands: Commands, subject: str, *, opened: bool = False) -> None:
        self._commands = commands
        self.subject = subject
        self._opened = opened
        self._shown: tuple[Command, int | None, int] | None = None  # with its code and its bytes
        self._fold = ui.expansion(value=opened).classes("w-full")
        self._fold.visible = False
        with self._fold:
            self._output = ui.label().classes("studio-text")
            self._loss_mask = ui.element("div")
        self.update()

    def update(self) -> bool:
        """Shows what is new. Returns whether the command has ended since the last time."""
        command = self._commands.of(self.subject)
        if command is None:
            return False
        code = command.code  # first: what it printed before it ended is complete then
        state = command, code, command.printed_bytes
        if state == self._shown:
            return False
        last, self._shown = self._shown, state
        if last is None or last[0] is not command:
            self._fold.value = self._opened
            last = command, None, 0
        has_ended = code is not None and last[1] is None
        if has_ended and code != 0:
            self._fold.value = True
        words = "running" if code is None else "done" if code == 0 else f"exit code {code}"
        self._fold.text = f"{command.line}: {words}"
        self._fold.visible = True
        previews = command.arguments[0] == "prepare"
        self._output.visible, self._loss_mask.visible = not previews, previews
        if previews:
            self._loss_mask.clear()
            with self._loss_mask:
                show_loss_mask(command.text())
        else:
            self._output.text = command.text() or "nothing printed yet"
        return has_ended


def starting_page(commands: Commands, subject: str, has_begun: Callable[[], bool]) -> None:
    """Of a command that has made no folder yet: what it prints, until there is one."""
    with page(harmless(subject), ""):
        ui.label(harmless(subject)).classes("text-xl font-semibold break-all").props(
            "role=heading aria-level=1"
        )
        state = ui.label("starting").props("role=status")
        output = CommandView(commands, subject, opened=True)

        def update() -> None:
            output.update()
            if has_begun():
                ui.navigate.reload()
            command = commands.of(subject)
            if command is None or command.code is not None:
                state.text = "the command ended before it made the folder"

        update_every(0.5, update)


def show_loss_mask(text: str) -> None:
    """What `bloomery prepare --preview` prints without colors: the tokens trained on, between ⟦ and ⟧, get one here."""
    parts = loss_parts(text)
    if any(has_loss for _, has_loss in parts):
        ui.label("Trained on: the tokens with a colored background.").classes("text-sm")
    with ui.element("div").classes("studio-text"):
        for part, has_loss in parts:
            ui.label(part).classes("inline studio-loss" if has_loss else "inline")


def loss_parts(text: str) -> list[tuple[str, bool]]:
    """The text in pieces, and whether each is trained on."""
    pieces = re.split("(⟦[^⟦⟧]*⟧)", text)
    return [(piece, index % 2 == 1) for index, piece in enumerate(pieces) if piece]

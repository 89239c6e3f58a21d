"""The page with all runs: a table to filter, sort and open."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, final

from nicegui import ui
from nicegui.events import GenericEventArguments

from bloomery.core.errors import UserError
from bloomery.core.text import harmless
from bloomery.core.units import counted, format_bytes, format_seconds
from bloomery.monitor.words import figure
from bloomery.studio.commands import Commands
from bloomery.studio.compare_page import MOST_RUNS, address_of_comparison, address_of_sweep
from bloomery.studio.components import (
    STATUS_TONES,
    acts_on,
    button,
    caption_fold,
    card,
    card_grid,
    chip,
    heading,
    sentence,
    toolbar,
)
from bloomery.studio.deleting import SUBJECT, ask_to_delete
from bloomery.studio.finding_view import DEMO
from bloomery.studio.fitting_models import ask_what_fits
from bloomery.studio.frame import (
    CommandView,
    notify,
    page,
    selection_table,
    sort_by_keyboard,
    update_every,
)
from bloomery.studio.watching import PAGE_SECONDS, RunRow, Watching, address_of

UPDATE_SECONDS = 2.0
POINTED_SECONDS = 0.05  # after which a run is read that is pointed at
MOST_NOTE = 160  # characters of a note in the list
_COLUMNS = (
    # key, heading, is a number
    ("name", "Run", False),
    ("status", "Status", False),
    ("progress", "Step", True),
    ("validation_loss", "Validation loss", True),
    ("bits_per_byte", "Bits per byte", True),
    ("reward", "Reward", True),
    ("loss", "Loss, average", True),
    ("speed", "Tokens/s", True),
    ("memory_gib", "Memory", True),
    ("temperature", "Temperature", True),
    ("power", "Power", True),
    ("began", "Started", True),
    ("seconds", "Duration", True),
    ("bytes", "On disk", True),
)
# Columns that are hidden where no run has a value, and those that stand below another one: all of them sort.
_OPTIONAL = ("validation_loss", "reward", "loss")
_BELOW = ("bits_per_byte", "temperature", "power", "seconds")
# Vue escapes every {{ }}. `shown` has each cell as text; the plain values sort.
# Whoever points at a run is about to open it: it is read by then.
_LINK = """<a :href="props.row.address" :data-focus="props.row.address" class="studio-name"
      @mouseenter="$parent.$emit('pointed', props.row.name)" @focus="$parent.$emit('pointed', props.row.name)">
      {{ props.row.title }}</a>"""
_ABOUT = """<div v-if="props.row.about || props.row.tags.length" class="run-about">{{ props.row.about }}
    <span v-for="tag in props.row.tags" class="tag">{{ tag }}</span></div>
  <div v-if="props.row.note" class="run-about run-note-line">{{ props.row.note }}</div>"""
_NAME_CELL = f'<q-td :props="props" class="run-name">{_LINK}{_ABOUT}</q-td>'
_BADGE = '<span :class="`badge ${props.row.tone}`">{{ props.row.status }}</span>'
_STATUS_CELL = f"""
<q-td :props="props" class="run-status">{_BADGE}
  <div v-if="props.row.reason" class="run-about">{{{{ props.row.reason }}}}</div>
</q-td>
"""
_PROGRESS = """<div v-if="props.row.progress !== null && props.row.progress < 1" class="progress" aria-hidden="true">
    <i :style="{ width: 100 * props.row.progress + '%' }"></i></div>"""
_PROGRESS_CELL = f"""
<q-td :props="props" class="run-progress">{{{{ props.row.shown.progress }}}}{_PROGRESS}</q-td>
"""
_BELOW_IT = """<div v-if="props.row.below[props.col.name]" class="run-about">
    {{ props.row.below[props.col.name] }}</div>"""
_TEXT_CELL = f'<q-td :props="props" class="run-figure">{{{{ props.row.shown[props.col.name] }}}}{_BELOW_IT}</q-td>'
_DECIDES_CELL = f"""<q-td :props="props" class="run-figure">
  <span class="run-decides">{{{{ props.row.shown[props.col.name] }}}}</span>{_BELOW_IT}</q-td>"""
_DECIDES = ("validation_loss", "reward")
# On a narrow screen a run is a card.
_CARD = (
    """
<div class="col-12">
  <div class="card run-card">
    <div class="toolbar">
      <q-checkbox v-model="props.selected" dense :aria-label="'Select ' + props.row.name"
        :data-focus="'Select ' + props.row.name" />
      """
    + _LINK
    + _BADGE
    + """</div>
    """
    + _ABOUT
    + """
    <div v-if="props.row.reason" class="run-about">{{ props.row.reason }}</div>
    """
    + _PROGRESS
    + """
    <div class="run-facts">
      <div v-for="col in props.cols.filter((c) => !['name', 'status'].includes(c.name) && props.row.shown[c.name])"
        class="fact" :data-decides="['validation_loss', 'reward'].includes(col.name) || null">
        <b>{{ props.row.shown[col.name] }}</b><span>{{ col.label }}</span>
        <span v-if="props.row.below[col.name]">{{ props.row.below[col.name] }}</span></div>
    </div>
  </div>
</div>
"""
)


def run_cells(row: RunRow) -> dict[str, Any]:
    """Values to sort by, and `shown`: the text of each cell."""

    of_plan = ""
    if row.planned_speed and row.speed:
        of_plan = f"{row.speed / row.planned_speed:.0%} of plan"
    steps = f"{row.step:,}" + (f" / {row.steps:,}" if row.steps else "")
    shown = {
        "progress": steps,
        "loss": figure(row.loss, ".3f", ""),
        "validation_loss": figure(row.validation_loss, ".3f", ""),
        "bits_per_byte": figure(row.bits_per_byte, ".3f", ""),
        "reward": figure(row.reward, ".3f", ""),
        "speed": figure(row.speed, ",.0f", ""),
        "memory_gib": figure(row.memory_gib, ".1f", " GiB"),
        "temperature": figure(row.temperature, ".0f", " °C"),
        "power": figure(row.power, ",.0f", " W"),
        "began": "" if row.began is None else moment(row.began),
        "seconds": format_seconds(row.seconds) if row.seconds else "",
        "bytes": format_bytes(row.bytes) if row.bytes else "",
    }
    took = "for" if row.status in ("running", "paused", "stopping") else "took"
    values = {key: getattr(row, key) for key, _, _ in _COLUMNS}
    # The badge says it already.
    reason = "" if row.reason == row.status else row.reason.removeprefix(f"{row.status} ")
    return {
        **values,
        "reason": reason,
        "tone": STATUS_TONES.get(row.status, ""),
        "address": address_of(row.name),
        "title": row.name.removeprefix(f"{row.sweep}/") if row.sweep else row.name,
        "about": " · ".join(filter(None, (row.model, row.method))),
        "below": {
            "validation_loss": figure(row.bits_per_byte, ".3f", " bits/byte"),
            "speed": of_plan,
            "memory_gib": ", ".join(filter(None, (shown["temperature"], shown["power"]))),
            "began": f"{took} {shown['seconds']}" if row.seconds else "",
        },
        "sweep": row.sweep,
        "tags": list(row.tags),
        "note": row.note.partition("\n")[0][:MOST_NOTE],
        "shown": shown,
    }


def moment(seconds: float) -> str:
    """A time as people say it: today's without a date, this year's without a year, others without an hour."""
    then, now = time.localtime(seconds), time.localtime()
    is_today = then[:3] == now[:3]
    words = "%b %d, %H:%M" if then.tm_year == now.tm_year else "%Y-%m-%d"
    return time.strftime("%H:%M" if is_today else words, then)


def matches(row: Mapping[str, Any], words: str, tag: str) -> bool:
    """Whether a row has all of these words, anywhere, and the tag."""
    if tag and tag not in row["tags"]:
        return False
    texts = [row[key] for key in ("name", "status", "reason", "about", "note")]
    whole = " ".join([*texts, *row["tags"]]).lower()
    return all(word in whole for word in words.lower().split())


def visible_columns(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Most machines without a GPU have no sensor to read, and few runs a reward."""
    return [
        key
        for key, _, _ in _COLUMNS
        if key not in _BELOW and (key not in _OPTIONAL or any(row[key] is not None for row in rows))
    ]


async def runs_page(watching: Watching, commands: Commands) -> None:
    # A first look at hundreds of runs may take a second: the page does not wait for its end.
    reading = asyncio.create_task(asyncio.to_thread(watching.rows))
    await asyncio.wait({reading}, timeout=PAGE_SECONDS)
    rows = [run_cells(row) for row in watching.known_rows()]
    with page("Runs", "/"):
        RunsPage(watching, commands, rows)


@final
class RunsPage:
    """Mutable: an open list of runs. Those of a sweep have a table of their own, below."""

    def __init__(self, watching: Watching, commands: Commands, rows: list[dict[str, Any]]) -> None:
        self._watching = watching
        self._commands = commands
        self._rows = rows
        self._tag = ""
        with heading("Runs") as (_, self._sub):
            with acts_on(self._selected) as self._follow_selection:
                self._compare = button("Compare", self._go_to_comparison)
                self._delete = button("Delete", self._ask_to_delete)
            self._new = button("New run", lambda: ui.navigate.to("/new"), kind="go")
        with ui.element("div").classes("toolbar w-full labeled") as self._tools:
            self._search = ui.input(placeholder="Filter by name, model, status, tag or note")
            self._search.props('dense outlined clearable aria-label="Filter runs"')
            self._search.classes("run-filter")
            self._tags = ui.element("div").classes("chips")
        self._shown_tags: tuple[list[str], str] | None = None
        self._deleting = CommandView(commands, SUBJECT)
        self._table = self._make_table()
        if not rows:
            self._table.props("loading")
        sort_by_keyboard(self._table, self._tools, always=True)
        self._sweeps: dict[str, SweepRuns] = {}
        self._sweep_box = ui.element("div").classes("w-full sweep-box")
        self._empty = ui.column().classes("w-full gap-2")
        self._empty.visible = False
        with self._empty:
            _show_first_steps(commands)
        self._search.on_value_change(self._draw)
        self._draw()
        self._show_tools()
        update_every(UPDATE_SECONDS, self._update)

    def _make_table(self) -> ui.table:
        table = selection_table(_COLUMNS, [], "name")
        table.props("hide-selected-banner")
        table.add_slot("body-cell-name", _NAME_CELL)
        table.add_slot("body-cell-status", _STATUS_CELL)
        table.add_slot("body-cell-progress", _PROGRESS_CELL)
        for key in (key for key, _, _ in _COLUMNS if key not in ("name", "status", "progress")):
            table.add_slot(f"body-cell-{key}", _DECIDES_CELL if key in _DECIDES else _TEXT_CELL)
        table.add_slot("item", _CARD)
        table.add_slot("no-data", "<span>no run has this</span>")

        async def on_pointed(event: GenericEventArguments) -> None:
            await asyncio.to_thread(self._watching.read_ahead, str(event.args))

        table.on("pointed", on_pointed, throttle=POINTED_SECONDS, leading_events=False)
        table.on_select(lambda: self._enable())
        return table

    def _tables(self) -> list[ui.table]:
        return [self._table, *(sweep.table for sweep in self._sweeps.values())]

    def _selected(self) -> list[str]:
        return [row["name"] for table in self._tables() for row in table.selected]

    def _enable(self) -> None:
        selected = self._selected()
        self._compare.enabled = 1 < len(selected) <= MOST_RUNS
        self._delete.enabled = bool(selected)
        self._follow_selection()

    def _go_to_comparison(self) -> None:
        ui.navigate.to(address_of_comparison(self._selected()))

    async def _ask_to_delete(self) -> None:
        if await ask_to_delete(self._watching, self._commands, self._selected()):
            for table in self._tables():
                table.selected = []
            self._enable()
            await self._update()

    async def _update(self) -> None:
        self._deleting.update()
        rows = [run_cells(row) for row in await asyncio.to_thread(self._watching.rows)]
        if rows != self._rows:
            self._rows = rows
            self._draw()
        self._table.props(remove="loading")
        self._empty.visible = not rows
        self._show_tools()
        self._table.visible = bool(rows) and not (self._sweeps and not self._table.rows)

    def _show_tools(self) -> None:
        """Nothing is filtered, compared or deleted where there is no run."""
        for one in (self._tools, self._compare, self._delete, self._new):
            one.visible = bool(self._rows)

    def _draw(self) -> None:
        """The rows that the filter leaves, each in the table of its sweep."""
        self._show_tags()
        self._sub.text = in_words(self._rows)
        words = self._search.value or ""
        shown = [row for row in self._rows if matches(row, words, self._tag)]
        columns = visible_columns(self._rows)
        _fill(self._table, [row for row in shown if not row["sweep"]], columns)
        names = dict.fromkeys(row["sweep"] for row in self._rows if row["sweep"])
        for name in self._sweeps.keys() - names.keys():
            self._sweeps.pop(name).box.delete()
        for name in names:
            if name not in self._sweeps:
                with self._sweep_box:
                    self._sweeps[name] = SweepRuns(name, self._make_table)
            self._sweeps[name].show([row for row in shown if row["sweep"] == name], columns)
        self._enable()

    def _show_tags(self) -> None:
        known = sorted({tag for row in self._rows for tag in row["tags"]})
        if (known, self._tag) == self._shown_tags:
            return
        self._tag = self._tag if self._tag in known else ""
        self._shown_tags = known, self._tag
        self._tags.clear()
        with self._tags:
            for tag in known:
                chip(tag, partial(self._choose, tag), on=tag == self._tag)

    def _choose(self, tag: str) -> None:
        self._tag = "" if tag == self._tag else tag
        self._draw()


@final
class SweepRuns:
    """Mutable: the runs of a sweep in the list, folded under what decides."""

    def __init__(self, name: str, make_table: Callable[[], ui.table]) -> None:
        with ui.element("section").classes("card") as self.box:
            with ui.expansion(name).classes("w-full") as self._fold:
                self.table = make_table()
            button("Compare its runs", lambda: ui.navigate.to(address_of_sweep(name)))

    def show(self, rows: list[dict[str, Any]], columns: list[str]) -> None:
        self.box.visible = bool(rows)
        _fill(self.table, rows, columns)
        best = best_of(rows)
        decides = "" if best is None else f"; best so far {best[1]}: {best[0]}"
        caption_fold(self._fold, f"sweep of {counted(len(rows), 'runs')}{decides}")
        self._fold.update()


def _fill(table: ui.table, rows: list[dict[str, Any]], columns: list[str]) -> None:
    if rows != table.rows or table.props.get("visible-columns") != columns:
        table.rows = rows
        table.props["visible-columns"] = columns
        table.update()


def best_of(rows: Sequence[Mapping[str, Any]]) -> tuple[str, str] | None:
    """Title and figure of the best run: by reward where the runs have one, else by validation loss."""
    rewarded = [row for row in rows if row["reward"] is not None]
    if rewarded:
        best = max(rewarded, key=lambda row: row["reward"])
        return best["title"], f"reward {best['shown']['reward']}"
    judged = [row for row in rows if row["validation_loss"] is not None]
    if not judged:
        return None
    best = min(judged, key=lambda row: row["validation_loss"])
    return best["title"], f"validation loss {best['shown']['validation_loss']}"


def in_words(rows: Sequence[Mapping[str, Any]]) -> str:
    """How many runs there are, and what wants a look."""
    counts = Counter(row["status"] for row in rows)
    words = [counted(len(rows), "runs")] if rows else []
    for status in ("running", "paused", "failed", "killed"):
        if counts[status]:
            words.append(f"{counts[status]} {status}")
    return ", ".join(words)


def _show_first_steps(commands: Commands) -> None:
    """Where there are no runs yet."""

    def start_demo() -> None:
        try:
            commands.start("demo", subject=DEMO)
        except UserError as error:
            notify(error)
        ui.navigate.to(address_of(DEMO))

    sentence(f"No runs in {harmless(str(Path('runs').absolute()))} yet.", "muted")
    with card_grid(3):
        with card("Your model and data"):
            sentence(
                "Choose a model, drop a file onto the page, see whether it fits and how long it takes, and start."
            )
            with toolbar():
                button("Begin a new run", lambda: ui.navigate.to("/new"), kind="go")
        with card("A demo", "2 to 5 minutes on 2 cores"):
            sentence(
                "Trains a small model on this machine, kills and resumes it, evaluates and exports it, without a "
                "network."
            )
            with toolbar():
                button("Start the demo", start_demo, icon="play_arrow")
        with card("What fits?"):
            sentence(
                "The usual models with the method, the memory and the time that they take here."
            )
            with toolbar():
                button("What fits this machine?", lambda: ask_what_fits(), icon="memory")

"""The page with all runs: a table to filter, sort and open."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from nicegui import ui
from nicegui.events import GenericEventArguments

from bloomery.core.errors import UserError
from bloomery.core.units import format_seconds
from bloomery.monitor.words import figure
from bloomery.studio.commands import Commands
from bloomery.studio.compare_page import MOST_RUNS, address_of_comparison
from bloomery.studio.deleting import SUBJECT, ask_to_delete
from bloomery.studio.frame import (
    STATUS_COLORS,
    CommandView,
    notify,
    page,
    selection_table,
    sort_by_keyboard,
    update_every,
)
from bloomery.studio.watching import RunRow, Watching, address_of

UPDATE_SECONDS = 2.0
POINTED_SECONDS = 0.05  # after which a run is read that is pointed at
DEMO = "demo"  # the run of `bloomery demo`
_COLUMNS = (
    # key, heading, is a number
    ("name", "Run", False),
    ("status", "Status", False),
    ("model", "Model", False),
    ("method", "Method", False),
    ("progress", "Progress", True),
    ("loss", "Loss, average", True),
    ("validation_loss", "Validation loss", True),
    ("reward", "Reward", True),
    ("speed", "Tokens/s", True),
    ("memory_gib", "Memory", True),
    ("temperature", "Temperature", True),
    ("power", "Power", True),
    ("began", "Started", True),
    ("seconds", "Duration", True),
)
# Columns that are hidden where no run has a value.
_OPTIONAL = ("validation_loss", "reward", "temperature", "power")
# Vue escapes every {{ }}. `shown` has each cell as text; the plain values sort.
# Whoever points at a run is about to open it: it is read by then.
_LINK = """<a :href="props.row.address" :data-focus="props.row.address" class="studio-name"
      @mouseenter="$parent.$emit('pointed', props.row.name)" @focus="$parent.$emit('pointed', props.row.name)">
      {{ props.row.name }}</a>"""
_NAME_CELL = f'<q-td :props="props">{_LINK}</q-td>'
_STATUS_CELL = """
<q-td :props="props" style="white-space: normal; min-width: 9rem; max-width: 26rem; overflow-wrap: anywhere">
  <q-badge :color="props.row.color">{{ props.row.status }}</q-badge>
  <span v-if="props.row.reason !== props.row.status" class="q-ml-sm">{{ props.row.reason }}</span>
</q-td>
"""
_PROGRESS_CELL = """
<q-td :props="props" style="min-width: 9rem">
  <div>{{ props.row.shown.progress }}</div>
  <q-linear-progress v-if="props.row.progress !== null" :value="props.row.progress" size="4px" aria-hidden="true" />
</q-td>
"""
_TEXT_CELL = '<q-td :props="props">{{ props.row.shown[props.col.name] }}</q-td>'
# On a narrow screen a run is a card.
_CARD = (
    """
<div class="q-pa-xs col-12">
  <q-card flat bordered class="q-pa-sm">
    <q-checkbox v-model="props.selected" dense class="q-mr-sm" :aria-label="'Select ' + props.row.name"
      :data-focus="'Select ' + props.row.name" />
    """
    + _LINK
    + """
    <q-badge :color="props.row.color" class="q-ml-sm">{{ props.row.status }}</q-badge>
    <div v-if="props.row.reason !== props.row.status" class="text-caption">{{ props.row.reason }}</div>
    <q-linear-progress v-if="props.row.progress !== null" :value="props.row.progress" size="4px" class="q-my-xs"
      aria-hidden="true" />
    <div class="text-caption">
      <span v-for="col in props.cols.filter((c) => !['name', 'status'].includes(c.name) && props.row.shown[c.name])"
        class="q-mr-md inline-block">
        <span class="opacity-75">{{ col.label }}</span> {{ props.row.shown[col.name] }}</span>
    </div>
  </q-card>
</div>
"""
)


def run_cells(row: RunRow) -> dict[str, Any]:
    """Values to sort by, and `shown`: the text of each cell."""

    speed = figure(row.speed, ",.0f", "")
    if row.planned_speed and row.speed:
        speed += f" ({row.speed / row.planned_speed:.0%} of plan)"
    steps = f"{row.step:,}" + (f" / {row.steps:,}" if row.steps else "")
    shown = {
        "model": row.model,
        "method": row.method,
        "progress": steps if row.progress is None else f"{row.progress:.0%} · {steps}",
        "loss": figure(row.loss, ".3f", ""),
        "validation_loss": figure(row.validation_loss, ".3f", ""),
        "reward": figure(row.reward, ".3f", ""),
        "speed": speed,
        "memory_gib": figure(row.memory_gib, ".1f", " GiB"),
        "temperature": figure(row.temperature, ".0f", " °C"),
        "power": figure(row.power, ",.0f", " W"),
        "began": ""
        if row.began is None
        else time.strftime("%Y-%m-%d %H:%M", time.localtime(row.began)),
        "seconds": format_seconds(row.seconds) if row.seconds else "",
    }
    values = {key: getattr(row, key) for key, _, _ in _COLUMNS}
    return {
        **values,
        "reason": row.reason,
        "color": STATUS_COLORS.get(row.status, "grey-7"),
        "address": address_of(row.name),
        "shown": shown,
    }


def visible_columns(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Most machines without a GPU have no sensor to read, and few runs a reward."""
    return [
        key
        for key, _, _ in _COLUMNS
        if key not in _OPTIONAL or any(row[key] is not None for row in rows)
    ]


async def runs_page(watching: Watching, commands: Commands) -> None:
    # A first look at hundreds of runs may take a second: the page does not wait for it.
    rows = [run_cells(row) for row in watching.known_rows()]
    with page("Runs", "/"):
        with ui.row().classes("w-full items-center") as tools:
            ui.label("Runs").classes("text-xl font-semibold").props("role=heading aria-level=1")
            ui.space()
            compare = ui.button("Compare", icon="stacked_line_chart")
            delete = ui.button("Delete", icon="delete_outline")
            for button in (compare, delete):
                button.props("outline dense no-caps padding='xs sm'")
            search = ui.input(placeholder="Filter").props(
                'dense outlined clearable aria-label="Filter runs"'
            )
        deleting = CommandView(commands, SUBJECT)
        table = selection_table(_COLUMNS, rows, "name")
        table.props["visible-columns"] = visible_columns(rows)
        table.bind_filter_from(search, "value", lambda text: text or "")
        if not rows:
            table.props("loading")
        sort_by_keyboard(table, tools)
        table.add_slot("body-cell-name", _NAME_CELL)
        table.add_slot("body-cell-status", _STATUS_CELL)
        table.add_slot("body-cell-progress", _PROGRESS_CELL)
        own_cells = ("name", "status", "model", "method", "progress")
        for key in (key for key, _, _ in _COLUMNS if key not in own_cells):
            table.add_slot(f"body-cell-{key}", _TEXT_CELL)
        table.add_slot("item", _CARD)
        table.add_slot("no-data", "<span v-if='props.filter'>no run has this text</span>")
        empty = ui.column().classes("w-full gap-2")
        empty.visible = False
        with empty:
            _show_first_steps(commands)

        async def on_pointed(event: GenericEventArguments) -> None:
            await asyncio.to_thread(watching.read_ahead, str(event.args))

        table.on("pointed", on_pointed, throttle=POINTED_SECONDS, leading_events=False)

        def selected() -> list[str]:
            return [row["name"] for row in table.selected]

        async def on_delete() -> None:
            if await ask_to_delete(watching, commands, selected()):
                table.selected = []
                await update()

        compare.on_click(lambda: ui.navigate.to(address_of_comparison(selected())))
        compare.bind_enabled_from(table, "selected", lambda rows: 1 < len(rows) <= MOST_RUNS)
        delete.on_click(on_delete)
        delete.bind_enabled_from(table, "selected", bool)

        async def update() -> None:
            deleting.update()
            new_rows = [run_cells(row) for row in await asyncio.to_thread(watching.rows)]
            if new_rows != table.rows:
                table.rows = new_rows
                table.props["visible-columns"] = visible_columns(new_rows)
                table.update()
            table.props(remove="loading")
            empty.visible = not table.rows

        update_every(UPDATE_SECONDS, update)


def _show_first_steps(commands: Commands) -> None:
    """Where there are no runs yet."""

    def start_demo() -> None:
        try:
            commands.start("demo", subject=DEMO)
        except UserError as error:
            notify(error)
        ui.navigate.to(address_of(DEMO))

    ui.label("No runs in runs/ yet.")
    with ui.row().classes("items-center gap-3"):
        ui.button("Start the demo", icon="play_arrow", on_click=start_demo).props("no-caps")
        ui.label(
            "Trains a small model on this machine, kills and resumes it, evaluates and exports it: 2 to 5 minutes on 2 "
            "cores, without a network."
        ).classes("min-w-0 break-words")
    with ui.row().classes("items-center gap-1"):
        ui.label("Or begin a")
        ui.link("new run", "/new")
        ui.label("with your model and data.")

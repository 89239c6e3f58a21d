"""The page of models: checkpoints and adapters of runs, exports; to chat with, and to export. Does not import torch."""

import asyncio
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode

from nicegui import ui

from bloomery.core.text import harmless
from bloomery.core.units import counted, format_bytes
from bloomery.studio.command_progress import CommandProgress
from bloomery.studio.commands import Commands
from bloomery.studio.components import acts_on, button, card, heading, sentence
from bloomery.studio.downloads import start_download
from bloomery.studio.export_dialogs import (
    SUBJECT,
    ask_to_download,
    ask_to_export,
    ask_to_push,
)
from bloomery.studio.frame import page, selection_table, sort_by_keyboard, update_every
from bloomery.studio.model_server import MOST_MODELS
from bloomery.studio.run_draft import address_with_model
from bloomery.studio.runs_page import moment
from bloomery.studio.stored_models import ADAPTER, ListedModel, stored_models

UPDATE_SECONDS = 5.0
COMMAND_SECONDS = 0.5
_COLUMNS = (
    # key, heading, is a number
    ("name", "Model", False),
    ("step", "Step", True),
    ("kind", "Kind", False),
    ("origin", "Trained from", False),
    ("size", "Size", True),
    ("changed", "Saved", True),
)
_NAME_CELL = """
<q-td :props="props" class="run-name"><span class="text-weight-medium">{{ props.value }}</span>
  <span v-if="props.row.best" class="badge good q-ml-sm">best</span></q-td>
"""
_FIGURE_CELL = (
    '<q-td :props="props" class="run-figure">{{ props.row.shown[props.col.name] }}</q-td>'
)
_WORDS_CELL = '<q-td :props="props" class="run-status">{{ props.row.shown[props.col.name] }}</q-td>'
_CARD = """
<div class="col-12">
  <q-card flat bordered class="q-pa-sm">
    <div class="toolbar no-wrap">
      <q-checkbox v-model="props.selected" dense :aria-label="'Select ' + props.row.model"
        :data-focus="'Select ' + props.row.model" />
      <span class="text-weight-medium break-all">{{ props.row.name }}</span>
      <span v-if="props.row.best" class="badge good">best</span>
    </div>
    <div class="text-caption">
      <span v-for="col in props.cols.filter((c) => props.row.shown[c.name])" class="q-mr-md inline-block">
        <span class="opacity-75">{{ col.label }}</span> {{ props.row.shown[col.name] }}</span>
    </div>
  </q-card>
</div>
"""


def model_cells(model: ListedModel) -> dict[str, Any]:
    """Values to sort by, and `shown`: the text of each cell."""
    return {
        "model": model.argument,
        "name": harmless(model.model.removeprefix("runs/").removeprefix("./")),
        "step": model.step,
        "kind": model.kind,
        "origin": model.origin,
        "size": model.size,
        "changed": model.changed,
        "best": model.is_best,
        "opens": model.is_readable,
        "export": model.is_export,
        "downloads": model.is_downloadable,
        "trains": model.is_export and not model.kind.startswith(ADAPTER),
        "folder": str(model.folder) if model.is_readable else "",
        "shown": {
            "step": "" if model.step is None else f"{model.step:,}",
            "kind": model.kind,
            "origin": model.origin,
            "size": format_bytes(model.size),
            "changed": moment(model.changed),
        },
    }


def address_of_chat(models: Sequence[str], device: str) -> str:
    """The page on which these models answer. `device`: auto or cpu."""
    pairs = [("model", model) for model in models]
    return f"/chat?{urlencode([*pairs, ('device', device)])}"


async def models_page(commands: Commands) -> None:
    with page("Models", "/models"):
        with heading("Models", "Looking for models") as (_, below):
            button("Get one from the Hub", lambda: get_model())
        with ui.row().classes("toolbar w-full") as tools:
            with acts_on(lambda: table.selected) as follow_selection:
                chat = button("Chat", icon="chat_bubble_outline")
                export = button("Export", icon="output")
                train = button("New run with it", icon="play_arrow")
                download = button("Download", icon="download")
                push = button("Push to the Hub", icon="cloud_upload")
            ui.space()
            search = ui.input(placeholder="Filter").props(
                'dense outlined clearable aria-label="Filter models"'
            )
        progress = CommandProgress(commands, SUBJECT)
        table = _table()
        sort_by_keyboard(table, tools)
        table.on_select(follow_selection)
        table.bind_filter_from(search, "value", lambda text: text or "")
        with card("No model here yet") as empty:
            sentence(
                "Runs save models as they train, and exports and downloads appear here: in this folder, exports/ and "
                "models/."
            )
            with ui.row():
                button("New run", lambda: ui.navigate.to("/new"))
                button("Get one from the Hub", lambda: get_model())
        empty.visible = False

        async def get_model() -> None:
            if await ask_to_download(commands, SUBJECT):
                progress.update()

        async def on_export() -> None:
            (row,) = table.selected
            is_adapter = row["kind"].startswith(ADAPTER)
            if await ask_to_export(
                commands, row["model"], is_adapter=is_adapter, folder=row["folder"]
            ):
                progress.update()

        async def on_push() -> None:
            (row,) = table.selected
            if await ask_to_push(commands, row["folder"], SUBJECT):
                progress.update()

        def on_chat() -> None:
            ui.navigate.to(address_of_chat([row["model"] for row in table.selected], "auto"))

        def can_chat(rows: list[dict[str, Any]]) -> bool:
            return 0 < len(rows) <= MOST_MODELS and all(row["opens"] for row in rows)

        chat.on_click(on_chat).bind_enabled_from(table, "selected", can_chat)
        export.on_click(on_export).bind_enabled_from(
            table, "selected", lambda rows: len(rows) == 1 and rows[0]["opens"]
        )
        train.on_click(lambda: ui.navigate.to(address_with_model(table.selected[0]["folder"])))
        train.bind_enabled_from(
            table, "selected", lambda rows: len(rows) == 1 and rows[0]["trains"]
        )
        push.on_click(on_push).bind_enabled_from(
            table, "selected", lambda rows: len(rows) == 1 and rows[0]["export"]
        )
        download.on_click(lambda: start_download(table.selected[0]["model"]))
        download.bind_enabled_from(
            table, "selected", lambda rows: len(rows) == 1 and rows[0]["downloads"]
        )
        for one in (download, push):
            one.props('title="Of an export: a run is exported first"')

        async def update() -> None:
            models = await asyncio.to_thread(stored_models)
            rows = [model_cells(model) for model in models]
            if rows != table.rows:
                table.rows = rows
            table.props(remove="loading")
            total = format_bytes(sum(model.size for model in models))
            below.text = (
                f"{counted(len(models), 'models')}, {total}. Mark one to export it, two to chat with both."
                if models
                else "Nothing is here."
            )
            empty.visible = not models
            table.visible = tools.visible = bool(models)

        async def follow() -> None:
            if progress.update():
                await update()  # what the command has made

        update_every(UPDATE_SECONDS, update)
        update_every(COMMAND_SECONDS, follow)


def _table() -> ui.table:
    table = selection_table(_COLUMNS, [], "model")
    table.props("loading hide-selected-banner")
    table.add_slot("body-cell-name", _NAME_CELL)
    for key, _, is_number in _COLUMNS[1:]:
        table.add_slot(f"body-cell-{key}", _FIGURE_CELL if is_number else _WORDS_CELL)
    table.add_slot("item", _CARD)
    table.add_slot(
        "no-data",
        "<span v-if='props.filter'>no model has this text</span><span v-else>No models yet</span>",
    )
    return table

"""The page of models: checkpoints and adapters of runs, exports; to chat with, and to export. Does not import torch."""

import asyncio
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from nicegui import ui

from bloomery.core.errors import UserError
from bloomery.core.text import harmless
from bloomery.core.units import format_bytes
from bloomery.export import GGUF_TYPES, K_TYPES
from bloomery.studio.commands import Commands
from bloomery.studio.frame import (
    CommandView,
    notify,
    page,
    question,
    selection_table,
    sort_by_keyboard,
    update_every,
)
from bloomery.studio.model_server import MOST_MODELS
from bloomery.studio.stored_models import ADAPTER, ListedModel, stored_models

UPDATE_SECONDS = 5.0
SUBJECT = "exports"  # of their commands
_LAYOUTS = {
    "hf": "Hugging Face folder",
    "merged": "adapter merged into its base",
    "adapter": "LoRA adapter for PEFT",
    "gguf": "GGUF file for llama.cpp",
    "ollama": "folder for ollama create",
    "vllm": "bfloat16 for vLLM",
}
_COLUMNS = (
    # key, heading, is a number
    ("name", "Model", False),
    ("step", "Step", True),
    ("kind", "Kind", False),
    ("size", "Size", True),
    ("changed", "Saved", True),
)
_NAME_CELL = """
<q-td :props="props">{{ props.value }}
  <q-badge v-if="props.row.best" color="positive" class="q-ml-sm">best</q-badge></q-td>
"""
_TEXT_CELL = '<q-td :props="props">{{ props.row.shown[props.col.name] }}</q-td>'
_CARD = """
<div class="q-pa-xs col-12">
  <q-card flat bordered class="q-pa-sm">
    <q-checkbox v-model="props.selected" dense class="q-mr-sm" :aria-label="'Select ' + props.row.model"
      :data-focus="'Select ' + props.row.model" />
    <span class="text-weight-medium">{{ props.row.name }}</span>
    <q-badge v-if="props.row.best" color="positive" class="q-ml-sm">best</q-badge>
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
        "name": harmless(model.model.removeprefix("runs/")),
        "step": model.step,
        "kind": model.kind,
        "size": model.size,
        "changed": model.changed,
        "best": model.is_best,
        "shown": {
            "step": "" if model.step is None else f"{model.step:,}",
            "kind": model.kind,
            "size": format_bytes(model.size),
            "changed": time.strftime("%Y-%m-%d %H:%M", time.localtime(model.changed)),
        },
    }


def address_of_chat(models: Sequence[str], device: str) -> str:
    """The page on which these models answer. `device`: auto or cpu."""
    pairs = [("model", model) for model in models]
    return f"/chat?{urlencode([*pairs, ('device', device)])}"


async def models_page(commands: Commands) -> None:
    with page("Models", "/models"):
        with ui.row().classes("w-full items-center") as tools:
            ui.label("Models").classes("text-xl font-semibold").props("role=heading aria-level=1")
            ui.space()
            device = ui.select(["auto", "cpu"], value="auto", label="Device")
            device.props("dense outlined").classes("w-28")
            chat = ui.button("Chat", icon="chat_bubble_outline")
            export = ui.button("Export", icon="file_download")
            for button in (chat, export):
                button.props("outline dense no-caps padding='xs sm'")
            search = ui.input(placeholder="Filter").props(
                'dense outlined clearable aria-label="Filter models"'
            )
        exports = CommandView(commands, SUBJECT)
        table = _table()
        sort_by_keyboard(table, tools)
        table.bind_filter_from(search, "value", lambda text: text or "")

        def selected() -> list[dict[str, Any]]:
            return list(table.selected)

        async def on_export() -> None:
            (row,) = selected()
            is_adapter = row["kind"].startswith(ADAPTER)
            if await ask_to_export(commands, row["model"], is_adapter=is_adapter):
                exports.update()

        def on_chat() -> None:
            models = [row["model"] for row in selected()]
            ui.navigate.to(address_of_chat(models, str(device.value)))

        chat.on_click(on_chat)
        chat.bind_enabled_from(table, "selected", lambda rows: 0 < len(rows) <= MOST_MODELS)
        export.on_click(on_export)
        export.bind_enabled_from(table, "selected", lambda rows: len(rows) == 1)

        async def update() -> None:
            exports.update()
            rows = [model_cells(model) for model in await asyncio.to_thread(stored_models)]
            if rows != table.rows:
                table.rows = rows
            table.props(remove="loading")

        update_every(UPDATE_SECONDS, update)


def _table() -> ui.table:
    table = selection_table(_COLUMNS, [], "model")
    table.props("loading")
    table.add_slot("body-cell-name", _NAME_CELL)
    for key in ("step", "kind", "size", "changed"):
        table.add_slot(f"body-cell-{key}", _TEXT_CELL)
    table.add_slot("item", _CARD)
    table.add_slot(
        "no-data",
        "<span v-if='props.filter'>no model has this text</span>"
        "<span v-else>No models yet: runs save them, and exports appear here</span>",
    )
    return table


async def ask_to_export(commands: Commands, argument: str, *, is_adapter: bool) -> bool:
    """Asks for the format, and starts `bloomery export`; whether it was started."""
    first_layout = "merged" if is_adapter else "hf"  # a model that opens without its base
    model, separator, step = argument.rpartition("@")
    if not (separator and step.isdecimal()):
        model, step = argument, ""
    stem = re.sub(r"[^\w.-]+", "-", f"{Path(model).name}{'-' if step else ''}{step}")

    def path_for(layout: str) -> str:
        return f"exports/{stem}-{layout}" + (".gguf" if layout == "gguf" else "")

    def change_layout() -> None:
        path.value = path_for(str(layout.value))
        dtype.visible = layout.value == "gguf"

    with question(f"Export {harmless(argument)}") as dialog:
        layout = ui.select(_LAYOUTS, value=first_layout, label="Format", on_change=change_layout)
        dtype = ui.select([*GGUF_TYPES, *K_TYPES], value="q8_0", label="Type of the weights")
        dtype.visible = False
        path = ui.input("To", value=path_for(first_layout))
        for field in (layout, dtype, path):
            field.classes("w-full").props("outlined dense")
        with ui.row().classes("w-full justify-end"):
            ui.button("Cancel", on_click=lambda: dialog.submit(False)).props("flat no-caps")
            ui.button("Start", on_click=lambda: dialog.submit(True)).props("no-caps unelevated")
    agreed = bool(await dialog)
    options = [f"--to={layout.value}", f"--out={str(path.value).strip()}"]
    if layout.value == "gguf":
        options.append(f"--type={dtype.value}")
    if step:
        options.append(f"--step={step}")
    if not agreed:
        return False
    try:
        commands.start("export", *options, "--", model, subject=SUBJECT)
    except UserError as error:
        notify(error)
        return False
    return True

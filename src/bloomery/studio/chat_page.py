"""The page on which models answer: the one of `bloomery serve`, whose models a process of its own has loaded."""

import asyncio
import time
from collections.abc import Sequence
from typing import final

from nicegui import ui

from bloomery.core.errors import UserError
from bloomery.core.text import harmless
from bloomery.studio.frame import page, update_every
from bloomery.studio.model_server import ModelServer, ModelServers

UPDATE_SECONDS = 0.5


async def chat_page(servers: ModelServers, models: Sequence[str], device: str) -> None:
    with page("Chat", "/models"):
        try:
            # In a thread: the model before it may take seconds to end.
            chosen = "cpu" if device == "cpu" else "auto"
            server = await asyncio.to_thread(servers.open, models, chosen)
        except UserError as error:
            ui.label(f"error: {error.problem}").classes("text-lg")
            ui.label(f"fix: {error.fix}")
            ui.link("Models", "/models")
            return
        view = ChatView(server, models)
        update_every(UPDATE_SECONDS, view.update)


def link_to_chat(address: str) -> None:
    """In place of the chat, for a visitor from another page: the click that loads the models."""
    with page("Chat", "/models"):
        ui.label("Chat").classes("text-xl font-semibold").props("role=heading aria-level=1")
        ui.label("A page of another origin links to this chat, which loads a model.")
        ui.link("Load it", address)


@final
class ChatView:
    """Mutable: one open chat. Loading continues when the page is closed, and the model ends when no page is open."""

    def __init__(self, server: ModelServer, models: Sequence[str]) -> None:
        self.server = server
        self._state = ""
        with ui.row().classes("w-full items-center gap-3"):
            ui.label("Chat").classes("text-xl font-semibold").props("role=heading aria-level=1")
            ui.label(harmless(", ".join(models))).classes("break-all opacity-75")
            ui.space()
            self._end = ui.button("End the model", icon="eject", on_click=self._end_model)
            self._again = ui.button("Load again", icon="refresh", on_click=ui.navigate.reload)
            for button in (self._end, self._again):
                button.props("outline dense no-caps padding='xs sm'")
        self._progress = ui.linear_progress(show_value=False, size="4px").props("indeterminate")
        self._output = ui.label().classes("studio-text").props("role=status")
        self._content = ui.column().classes("w-full")
        self.update()

    async def _end_model(self) -> None:
        await asyncio.to_thread(self.server.process.close)

    def update(self) -> None:
        server = self.server
        state = server.process.state
        if state != "ended":
            server.used = time.monotonic()
        if state == "starting":
            self._output.text = server.process.text() or "starting"
        if state == self._state:
            return
        self._state = state
        self._progress.visible = state == "starting"
        self._end.visible = state != "ended"
        self._again.visible = state == "ended"
        self._output.visible = state != "ready"
        self._content.clear()
        if state == "ready":
            with self._content:
                ui.element("iframe").props('src="/serve/" title="Chat with the models"').classes(
                    "w-full border-0 studio-chat"
                )
        elif state == "ended":
            reason = "the model's process has ended; another chat may have replaced it"
            self._output.text = f"{server.process.text()}\n{reason}".strip()

"""The page on which models answer: the one of `bloomery serve`, whose models a process of its own has loaded."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import final

from nicegui import ui
from nicegui.events import ValueChangeEventArguments

from bloomery.core.errors import UserError
from bloomery.core.text import harmless
from bloomery.core.units import format_bytes
from bloomery.studio.components import button, card, choice, heading, sentence
from bloomery.studio.frame import nothing_here, page, update_every
from bloomery.studio.model_server import MOST_MODELS, ModelServer, ModelServers
from bloomery.studio.models_page import address_of_chat
from bloomery.studio.stored_models import ListedModel, stored_models

UPDATE_SECONDS = 0.5
MOST_OFFERED = 9  # models as large buttons; the field above lists all
DEVICES = {"auto": "fastest device", "cpu": "CPU"}


async def chat_page(servers: ModelServers, models: Sequence[str], device: str) -> None:
    """Without models: those that are here, to choose from."""
    chosen = "cpu" if device == "cpu" else "auto"
    current = servers.current
    if not models and current is not None and current.process.state in ("starting", "ready"):
        ui.navigate.to(address_of_chat(current.models, current.device))  # it goes on
        return
    with page("Chat", "/chat"):
        stored = await asyncio.to_thread(_readable_models)
        choices = ModelChoices(models, chosen, stored)
        if not models:
            _show_start(stored, choices)
            return
        try:
            # In a thread: the model before it may take seconds to end.
            server = await asyncio.to_thread(servers.open, models, chosen)
        except UserError as error:
            nothing_here("Chat", error.problem, error.fix, ("Models", "/models"))
            return
        view = ChatView(server, choices)
        update_every(UPDATE_SECONDS, view.update)


def _readable_models() -> list[ListedModel]:
    return [model for model in stored_models() if model.is_readable]


def link_to_chat(address: str) -> None:
    """In place of the chat, for a visitor from another page: the click that loads the models."""
    with page("Chat", "/chat"):
        with heading("Chat"):
            pass
        sentence("A page of another origin links to this chat, which loads a model.")
        ui.link("Load it", address)


@final
class ModelChoices:
    """Mutable: the fields that say which models answer, and where they compute; a choice loads them."""

    def __init__(self, models: Sequence[str], device: str, stored: Sequence[ListedModel]) -> None:
        self.models = list(models)
        self.device = device
        with (
            heading("Chat", "") as (_, self.below),
            ui.element("div").classes("toolbar") as self.toolbar,
        ):
            self._add_field("Model", 0, stored)
            if models:
                self._add_field("Next to it", 1, stored)
            place = ui.select(DEVICES, value=device, label="Computed by", on_change=self._move)
            place.props("outlined dense").classes("studio-device")

    def _add_field(self, label: str, number: int, stored: Sequence[ListedModel]) -> None:
        value = self.models[number] if number < len(self.models) else None
        field = ui.select(
            _labels_of(stored, value),
            value=value,
            label=label,
            with_input=True,
            new_value_mode="add-unique",
            clearable=number > 0,
            on_change=lambda event: self._choose(number, event),
        )
        field.props("outlined dense").classes("studio-model")
        field.props(
            'placeholder="none"' if number else 'placeholder="choose, or name one of the Hub"'
        )

        async def renew() -> None:
            stored_now = await asyncio.to_thread(_readable_models)
            field.set_options(_labels_of(stored_now, value), value=field.value)

        # A run that trains saves checkpoints and deletes older ones while this page is open.
        field.on("popup-show", renew)

    def _choose(self, number: int, event: ValueChangeEventArguments[str | None]) -> None:
        models = self.models[:MOST_MODELS]
        models[number : number + 1] = [event.value] if event.value else []
        if models:
            self.open(models)

    def _move(self, event: ValueChangeEventArguments[str]) -> None:
        self.device = event.value
        if self.models:
            self.open(self.models)

    def open(self, models: Sequence[str]) -> None:
        ui.navigate.to(address_of_chat(list(dict.fromkeys(models)), self.device))


def label_of(model: ListedModel) -> str:
    """In a list of models: the name, and which step of a run it is."""
    name = harmless(model.model.removeprefix("runs/").removeprefix("./"))
    if model.step is None:
        return name
    return f"{name}, step {model.step:,}" + (", the best" if model.is_best else "")


def field_label_of(model: ListedModel) -> str:
    """In a narrow field, where the end of a name is cut off: what tells two steps of a run apart comes first."""
    name = harmless(model.model.removeprefix("runs/").removeprefix("./"))
    if model.step is None:
        return name
    return f"step {model.step:,}{', the best,' if model.is_best else ''} of {name}"


def _labels_of(stored: Sequence[ListedModel], value: str | None) -> dict[str, str]:
    """What a field offers, by argument; `value`: what it holds, which is offered even where it is not stored."""
    labels = {model.argument: field_label_of(model) for model in stored}
    if value and value not in labels:  # of the Hub, or a step that is not kept any more
        run, _, step = value.rpartition("@")
        is_step = bool(run) and step.isdecimal()
        name = harmless(run if is_step else value).removeprefix("runs/")
        labels[value] = f"step {int(step):,} of {name}" if is_step else name
    return labels


def _show_start(stored: Sequence[ListedModel], choices: ModelChoices) -> None:
    """The newest models as large buttons."""
    if not stored:
        choices.below.text = "Nothing is loaded."
        with card("No model here yet"):
            sentence(
                "Runs save their models, and exports and downloads appear here. Train one, or name a model of the Hub"
                " above: Qwen/Qwen3-0.6B takes 1.5 GB."
            )
            with ui.row():
                button("New run", lambda: ui.navigate.to("/new"))
                button("Models", lambda: ui.navigate.to("/models"))
        return
    choices.below.text = (
        "Choose a model; a second one answers next to it. A process of its own loads them."
    )
    offers = offers_of(stored)
    with ui.element("div").classes("grid3 studio-offers"):
        for model in offers:
            choice(label_of(model), _about(model), _opener(choices, model))
    if len(offers) < len(stored):
        words = (
            f"{len(offers)} of {len(stored)} models, of each run its best; the field above has all."
        )
        sentence(words, "muted", small=True)


def offers_of(stored: Sequence[ListedModel]) -> list[ListedModel]:
    """Of each run its best checkpoint, else its newest, and the models beside the runs; the newest first."""
    by_name = dict[str, ListedModel]()
    for model in stored:
        if model.model not in by_name or model.is_best:
            by_name[model.model] = model
    return sorted(by_name.values(), key=lambda model: -model.changed)[:MOST_OFFERED]


def _opener(choices: ModelChoices, offer: ListedModel) -> Callable[[], Awaitable[None]]:
    async def open_newest() -> None:
        # A run that trains may have deleted this checkpoint since the page was opened: then its best of now.
        stored = await asyncio.to_thread(_readable_models)
        arguments = {model.argument for model in stored}
        newest = next((model for model in offers_of(stored) if model.model == offer.model), offer)
        choices.open([offer.argument if offer.argument in arguments else newest.argument])

    return open_newest


def _about(model: ListedModel) -> str:
    saved = time.strftime("%Y-%m-%d %H:%M", time.localtime(model.changed))
    return f"{model.kind}, {format_bytes(model.size)}, saved {saved}"


@final
class ChatView:
    """Mutable: one open chat. Loading continues when the page is closed, and the model ends when no page is open."""

    def __init__(self, server: ModelServer, choices: ModelChoices) -> None:
        self.server = server
        self._below = choices.below
        self._state = ""
        with ui.element("div").classes("card") as self._loading:
            self._sentence = sentence("")
            self._progress = ui.linear_progress(show_value=False, size="4px")
            self._progress.props("indeterminate aria-hidden=true")
            self._output = ui.label().classes("studio-text").props("role=status")
            self._again = button("Load again", ui.navigate.reload)
        self._content = ui.element("div").classes("studio-chat")
        with choices.toolbar:
            self._end = button("End the model", self._end_model, icon="eject")
            self._end.classes("studio-end")
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
        self._loading.visible = state != "ready"
        self._progress.visible = state == "starting"
        self._end.visible = state != "ended"
        self._again.visible = state == "ended"
        self._content.clear()
        if state == "starting":
            self._sentence.text = "Loading. The page can be closed meanwhile."
        elif state == "ready":
            with self._content:
                ui.element("iframe").props('src="/serve/" title="Chat with the models"')
        else:
            self._sentence.text = "the model's process has ended; another chat may have replaced it"
            self._output.text = server.process.text()

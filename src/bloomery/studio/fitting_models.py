"""What fits a card: the usual models with the method, memory and time that a plan gives them there. No torch."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import cache, partial
from typing import final

from nicegui import ui

from bloomery.core.errors import UserError
from bloomery.core.text import harmless
from bloomery.core.units import format_bytes, format_count
from bloomery.hardware.detect import detect
from bloomery.hardware.machine import Machine
from bloomery.hardware.profile import build_profile, with_gpu
from bloomery.hardware.specs import find_gpu, gpu_table
from bloomery.plan.page_text import about
from bloomery.plan.which_model import CHAT_TOKENS, CHATS, ModelFit, known_models, model_fit
from bloomery.recipe.load import by_release, load_recipe, packaged, twins
from bloomery.studio.components import sentence, text
from bloomery.studio.frame import question
from bloomery.studio.run_draft import address_with_model
from bloomery.studio.settings_form import show_mistake

HERE = "This machine"
METHODS = {"LoRA": ("lora", "none"), "QLoRA": ("lora", "nf4")}  # kinds of adapter and of quantize


@cache
def recipes_by_model() -> dict[tuple[str, str], str]:
    """The newest packaged recipe of a model and a method that trains on conversations."""
    recipes = dict[tuple[str, str], str]()
    for name in sorted(packaged(), key=by_release):
        recipe = load_recipe(name).recipe
        if name in twins() or recipe.model.from_ is None or recipe.objective.kind != "sft":
            continue
        kinds = (recipe.adapter.kind, recipe.quantize.kind)
        for method, method_kinds in METHODS.items():
            if kinds == method_kinds:
                recipes.setdefault((recipe.model.from_, method), name)
    return recipes


@cache
def card_names() -> tuple[str, ...]:
    """The cards of the table of GPUs that have memory of their own, each size of it a name."""
    names = set[str]()
    for spec in gpu_table().gpu:
        sizes = spec.memory_gib
        names |= {f"{spec.name} {size}GB" for size in sizes} if len(sizes) > 1 else {spec.name}
        if not sizes:
            names.discard(spec.name)
    return tuple(sorted(names))


def machine_with(card: str) -> Machine:
    """This machine, with another card in place of its own where one is named. Raises UserError."""
    machine = detect()
    return machine if card == HERE else with_gpu(machine, find_gpu(card))


def device_of(machine: Machine) -> str:
    """ "GeForce RTX 3090", "CPU, AMD EPYC"."""
    accelerator = build_profile(machine).accelerator
    return f"CPU, {machine.host.cpu_name}" if accelerator is None else accelerator.name


async def ask_what_fits(on_model: Callable[[str], Awaitable[None]] | None = None) -> None:
    """A dialog with the models that fit. `on_model(name)`: one of them, or its packaged recipe, was chosen; None: opens
    New run with it.
    """
    with question("What fits?") as dialog:
        view = FittingModels(dialog.submit)
        ui.timer(0, lambda: view.show(HERE), once=True)
    # What follows the choice is no work of the dialog, which is deleted as it hides.
    name = await dialog
    if name is None:
        return
    if on_model is None:
        ui.navigate.to(address_with_model(name))
    else:
        await on_model(name)


@final
class FittingModels:
    """Mutable: a card to choose, and the table of what fits it."""

    def __init__(self, on_choice: Callable[[str], None]) -> None:
        self._on_choice = on_choice
        self._version = 0  # of the card: only the newest one is shown
        options = [HERE, *card_names()]
        # What is typed counts, too, as `bloomery plan --gpu` reads it.
        self._card = ui.select(
            options, value=HERE, label="Card", with_input=True, new_value_mode="add-unique"
        )
        self._card.props("outlined dense options-dense").classes("w-full").mark("card")
        self._card.without_auto_validation()
        self._card.on_value_change(lambda: self.show(str(self._card.value or HERE)))
        self._state = sentence("", "muted", small=True).props("role=status")
        self._table = ui.element("div").classes("table-shown fitting")
        self._table.props('tabindex=0 role=region aria-label="Models that fit"')

    async def show(self, card: str) -> None:
        self._version += 1
        version = self._version
        self._table.clear()
        show_mistake(self._card, "")
        self._state.text = "Planning"
        try:
            machine = await asyncio.to_thread(machine_with, card)
        except UserError as error:
            if not self._is_over(version):
                show_mistake(self._card, f"{error.problem}: {error.fix}")
                self._state.text = ""
            return
        recipes = await asyncio.to_thread(recipes_by_model)
        if self._is_over(version):
            return
        body = self._heads()
        too_large = list[str]()
        names = known_models()
        for number, name in enumerate(names, 1):
            fit = await asyncio.to_thread(model_fit, name, machine)
            if self._is_over(version):
                return
            if fit.plan is None:
                too_large.append(fit.name)
            else:
                with body:
                    self._row(fit, recipes.get((fit.name, fit.method), ""))
            self._state.text = f"Planning, {number} of {len(names)}"
        summary = (
            f"{device_of(machine)}. Time: {CHATS:,} chats of {CHAT_TOKENS} tokens, once; estimated."
        )
        if too_large:
            summary += f" Too large: {', '.join(too_large)}."
        self._state.text = harmless(summary)

    def _is_over(self, version: int) -> bool:
        """Whether nobody waits for the plans of a card: another one was chosen, or the dialog has gone."""
        return version != self._version or self._table.is_deleted

    def _heads(self) -> ui.element:
        with self._table, ui.element("table"):
            with ui.element("thead"), ui.element("tr"):
                text("Model", "th").props("scope=col")
                text("Parameters", "th").classes("aside").props("scope=col")  # a phone has no room
                for name in ("Method", "Memory", "1,000 chats", ""):
                    text(name, "th").props("scope=col")
            return ui.element("tbody")

    def _row(self, fit: ModelFit, recipe: str) -> None:
        plan = fit.plan
        assert plan is not None
        seconds = "" if plan.seconds is None else about(plan.seconds.value)
        method = f"{fit.method}, or full" if fit.fits_in_full else fit.method
        memory = format_bytes(plan.memory.total)
        with ui.element("tr"):
            text(fit.name, "td")
            text(format_count(fit.parameters), "td").classes("aside")
            for cell in (method, memory, seconds):
                text(cell, "td")
            with ui.element("td"):
                name = recipe or fit.name
                use = ui.button("Use", on_click=partial(self._on_choice, name))
                use.props(f'flat dense no-caps aria-label="Use {name}"')

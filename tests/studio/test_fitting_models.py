"""What fits a card: the models that plans say fit, to look at and to begin with."""

import asyncio
import threading
from dataclasses import replace

import pytest
from studio_for_tests import RecordedCommands, until, with_user
from test_new_run_page import field, mistake_at

from bloomery.core.units import GIB
from bloomery.hardware.profile import with_gpu
from bloomery.hardware.specs import find_gpu
from bloomery.plan.which_model import known_models, model_fit
from bloomery.recipe.load import load_recipe

pytest.importorskip("nicegui", reason="the extra `studio` is not installed")

pytestmark = pytest.mark.usefixtures("empty_folder")


def test_every_card_that_is_offered_is_one_of_the_table() -> None:
    from bloomery.studio.fitting_models import card_names

    names = card_names()
    assert len(names) > 150
    assert "GeForce RTX 4060 Ti 16GB" in names and "GeForce RTX 4060 Ti" not in names
    for name in names:
        assert find_gpu(name).memory_bytes > 0


def test_a_recipe_stands_for_its_model_and_method() -> None:
    from bloomery.studio.fitting_models import recipes_by_model

    recipes = recipes_by_model()
    assert len(recipes) > 20
    for (model, method), name in recipes.items():
        recipe = load_recipe(name).recipe
        assert recipe.model.from_ == model
        assert (recipe.quantize.kind == "nf4") == (method == "QLoRA")


def test_a_larger_card_fits_what_a_smaller_one_does_not() -> None:
    from bloomery.studio.fitting_models import machine_with

    small, large = (
        with_gpu(machine_with("This machine"), find_gpu(name)) for name in ("RTX 4070", "H100")
    )
    name = "microsoft/phi-4"
    assert model_fit(name, small).plan is None
    fit = model_fit(name, large)
    assert fit.plan is not None and fit.method == "LoRA"
    assert 25 * GIB < fit.plan.memory.total < 80 * GIB
    assert name in known_models()


def test_a_model_of_the_table_begins_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from bloomery.studio import fitting_models

    names = ["google/gemma-3-270m-it", "Qwen/Qwen3-32B"]
    monkeypatch.setattr(fitting_models, "known_models", lambda: names)

    async def visit(user) -> None:
        await user.open("/new")
        user.find("What fits this machine?").click()
        await user.should_see("google/gemma-3-270m-it", retries=100)
        await user.should_see("1,000 chats of 600 tokens", retries=100)
        # A name as it is typed on the command line, and one that is none.
        card = field(user, "card")
        card.set_options([*card.options, "4070", "no such card"])
        card.value = "4070"
        await user.should_see("GeForce RTX 4070. Time", retries=200)
        await user.should_see("Too large: Qwen/Qwen3-32B.")
        card.value = "no such card"
        await until(lambda: "no such card" in mistake_at(user, "card"))
        card.value = "4070"
        await user.should_see("GeForce RTX 4070. Time", retries=200)
        user.find("Use").click()
        await until(lambda: field(user, "Model").value == "google/gemma-3-270m-it")

    with_user(visit, RecordedCommands())


def test_nothing_is_planned_for_a_dialog_that_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    from nicegui import ui

    from bloomery.studio import fitting_models

    names = ["google/gemma-3-270m-it"] * 50
    planned = list[str]()
    may_plan = threading.Semaphore(2)

    def plan(name, machine):
        may_plan.acquire()
        planned.append(name)
        return replace(model_fit(name, machine), plan=None)  # too large

    monkeypatch.setattr(fitting_models, "known_models", lambda: names)
    monkeypatch.setattr(fitting_models, "model_fit", plan)

    async def visit(user) -> None:
        await user.open("/new")
        user.find("What fits this machine?").click()
        await user.should_see("Planning, 2 of 50", retries=100)
        card = field(user, "card")
        card.set_options([*card.options, "4070"])
        card.value = "4070"
        await asyncio.sleep(0.1)
        user.find(ui.dialog).trigger("hide")
        may_plan.release(len(names))
        await asyncio.sleep(0.5)
        assert len(planned) <= 4  # those that had begun, one for each card

    with_user(visit, RecordedCommands())

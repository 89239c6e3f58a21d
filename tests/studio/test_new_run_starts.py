"""How New run starts: under a name, with several values to compare, and again from the address of the page."""

import json
from pathlib import Path

import pytest
from studio_for_tests import RecordedCommands, until, with_user
from test_new_run_page import (
    CHAT,
    MODEL,
    answer,
    field,
    mistake_at,
    open_new_run,
    settled,
    start_button,
    write_rows,
)

from bloomery.recipe.load import load_recipe
from bloomery.studio.new_run_page import without_time

pytest.importorskip("nicegui", reason="the extra `studio` is not installed")


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    write_rows("chats.jsonl", *[CHAT] * 40)


def set_field(user, name: str, value: str) -> None:
    field(user, name).value = value
    user.find(marker=name).trigger("change")


def test_several_values_are_a_sweep() -> None:
    commands = RecordedCommands()

    async def visit(user) -> None:
        await open_new_run(user, "chats.jsonl")
        await settled(user)
        set_field(user, "first-optimizer.learning_rate", "1e-4, 3e-4")
        await until(lambda: start_button(user).text == "Start 2 runs")
        set_field(user, "first-adapter.rank", "8,16,8")
        await until(lambda: start_button(user).text == "Start 4 runs")
        assert field(user, "first-adapter.rank").value == "8, 16"
        await settled(user)
        # One value again is no comparison.
        set_field(user, "first-adapter.rank", "32")
        await until(lambda: start_button(user).text == "Start 2 runs")
        await settled(user)
        user.find("Start 2 runs").click()
        await until(lambda: commands.started)

    with_user(visit, commands)
    ((verb, path, axis, option, folder),) = commands.started
    assert (verb, axis, option) == ("sweep", "optimizer.learning_rate=1e-4,3e-4", "--run-dir")
    assert folder.startswith("runs/") and "-sweep-" in folder
    recipe = load_recipe(path).recipe
    assert (recipe.adapter.rank, recipe.optimizer.learning_rate) == (32, 1e-4)


def test_a_value_that_is_none_is_told_at_its_field() -> None:
    async def visit(user) -> None:
        await open_new_run(user, "chats.jsonl")
        await settled(user)
        set_field(user, "first-adapter.rank", "8, many")
        rank = field(user, "first-adapter.rank")
        await until(lambda: "many: must be" in rank.props.get("error-message", ""))
        assert rank.value == "8, many"
        assert not start_button(user).enabled
        set_field(user, "first-adapter.rank", "8")
        await settled(user)
        assert start_button(user).text == "Start"

    with_user(visit, RecordedCommands())


def test_a_run_has_the_name_that_is_typed() -> None:
    commands = RecordedCommands()
    Path("runs/taken").mkdir(parents=True)

    async def visit(user) -> None:
        await open_new_run(user, "chats.jsonl")
        await settled(user)
        set_field(user, "run-name", "taken")
        await until(lambda: not start_button(user).enabled)
        assert field(user, "run-name").props["error-message"] == "runs/taken exists"
        set_field(user, "run-name", "../My first run")
        await settled(user)
        user.find("Start").click()
        await until(lambda: commands.started)

    with_user(visit, commands)
    assert commands.started == [("train", "My-first-run.yaml", "--run-dir", "runs/My-first-run")]


@pytest.mark.parametrize(
    ("run", "name"),
    [
        ("a-lora-20261201-110643", "a-lora"),
        ("a-lora-20261201-110643-20261202-080000-2", "a-lora"),
        ("sweep/lr-1e-4", "lr-1e-4"),
        ("20261201", "20261201"),
    ],
)
def test_times_of_runs_do_not_add_up_in_names(run: str, name: str) -> None:
    assert without_time(run) == name


def test_the_address_brings_the_answers_back(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = []

    async def visit(user) -> None:
        from nicegui import ui

        def keep(code: str, **_: object) -> None:
            prefix = "studioAddress("
            if code.startswith(prefix):
                addresses.append(json.loads(code.removeprefix(prefix).removesuffix(")")))

        monkeypatch.setattr(ui, "run_javascript", keep)
        await open_new_run(user, "chats.jsonl")
        await settled(user)
        set_field(user, "first-train.epochs", "2")
        # What is being typed elsewhere meanwhile stays.
        field(user, "first-adapter.rank").value = "6"
        await until(lambda: "train.epochs=2" in addresses[-1])
        assert field(user, "first-adapter.rank").value == "6"
        set_field(user, "run-name", "mine")
        await until(lambda: "name=mine" in addresses[-1] and "train.epochs=2" in addresses[-1])
        await user.open(addresses[-1])
        await settled(user)
        assert field(user, "Model").value == MODEL
        assert field(user, "Dataset").value == "chats.jsonl"
        assert field(user, "first-train.epochs").value == "2"
        assert field(user, "run-name").value == "mine"

    with_user(visit, RecordedCommands())


def test_a_price_that_is_typed_once_is_in_every_plan() -> None:
    async def visit(user) -> None:
        await open_new_run(user, "chats.jsonl")
        await settled(user)
        set_field(user, "price", "cheap")
        price = field(user, "price")
        await until(lambda: "not a price per hour" in price.props.get("error-message", ""))
        set_field(user, "price", "$360")
        await user.should_see("at $360 per hour", retries=50)
        # Another page knows it, and two runs cost twice as much.
        await open_new_run(user, "chats.jsonl")
        await user.should_see("at $360 per hour", retries=50)
        set_field(user, "first-adapter.rank", "8, 16")
        await user.should_see("2 runs, one for each combination of the values: about", retries=50)
        set_field(user, "price", "")
        await until(lambda: not (Path("state") / "bloomery" / "price.json").exists())

    with_user(visit, RecordedCommands())


def test_enter_takes_the_only_row_that_has_what_is_typed() -> None:
    from models_for_tests import make_chat_model

    make_chat_model(Path("models/tiny-llama"))

    async def visit(user) -> None:
        await user.open("/new")
        user.find(marker="Model").trigger("focus")
        await user.should_see("Packaged recipes, each with its model", retries=50)
        answer(user, "Model", "tiny-ll")
        await until(lambda: field(user, "Model").value == "models/tiny-llama")
        # Several rows: what is typed stays, with its mistake.
        user.find(marker="Model").trigger("focus")
        answer(user, "Model", "qwen")
        await until(lambda: "no such folder" in mistake_at(user, "Model"))
        assert field(user, "Model").value == "qwen"
        await user.should_see("Correct the model first.")

    with_user(visit, RecordedCommands())


def test_runs_that_train_now_are_named_beside_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    from bloomery.studio import new_run_page

    monkeypatch.setattr(new_run_page, "running_names", lambda watching: ["busy"])

    async def visit(user) -> None:
        await open_new_run(user, "chats.jsonl")
        await settled(user)
        await user.should_see("busy trains now: on the same device, each takes longer.")

    with_user(visit, RecordedCommands())

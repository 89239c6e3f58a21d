"""The page New run as NiceGUI's simulated user sees it: what can be started, and that this is what is shown."""

import asyncio
import json
import shlex
from pathlib import Path

import pytest
from studio_for_tests import RecordedCommands, until, with_user

from bloomery.plan.made import made_recipe
from bloomery.recipe.load import dump_recipe, load_recipe, load_text
from bloomery.studio.recipe_form import planned

pytest.importorskip("nicegui", reason="the extra `studio` is not installed")

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"  # of the table of known models: no network is needed
CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}

pytestmark = pytest.mark.usefixtures("empty_folder")


def write_rows(path: str, *rows: object) -> None:
    Path(path).write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def field(user, name: str):
    return next(iter(user.find(marker=name).elements))


def answer(user, name: str, value: str) -> None:
    """Types it into a question, and leaves the field."""
    field(user, name).value = value
    user.find(marker=name).trigger("keydown.enter")


def start_button(user):
    from nicegui import ui

    return next(
        button
        for button in user.find(ui.button).elements
        if button.text.startswith("Start") and "aria-label" not in button.props
    )


def mistake_at(user, name: str) -> str:
    return field(user, name).props.get("error-message", "")


def command_shown(user) -> str:
    return next(iter(user.find(marker="command").elements)).text


async def settled(user) -> None:
    await until(lambda: start_button(user).enabled)


async def open_new_run(user, dataset: str, *, model: str = MODEL) -> None:
    """Opens the page and answers its two questions."""
    await user.open("/new")
    answer(user, "Model", model)
    answer(user, "Dataset", dataset)


def recipe_with_proposed_columns(dataset: str) -> str:
    """The file of the recipe that Start writes for data whose columns are asked for, with those that are proposed."""
    commands = RecordedCommands()

    async def visit(user) -> None:
        await open_new_run(user, dataset)
        await user.should_see("Say which column is which.", retries=50)
        assert not start_button(user).enabled
        user.find("Use these columns").click()
        await settled(user)
        user.find("Start").click()
        await until(lambda: commands.started)

    with_user(visit, commands)
    return str(commands.started[0][1])


def opened_settings(user):
    """Opens All settings; the editor of the YAML in it."""
    from nicegui import ui

    fold = next(fold for fold in user.find(ui.expansion).elements if fold.text == "All settings")
    fold.value = True
    return next(iter(user.find(ui.codemirror).elements))


def test_an_empty_page_asks_and_starts_nothing() -> None:
    commands = RecordedCommands()

    async def visit(user) -> None:
        await user.open("/new")
        await user.should_see("Choose a model and your data.")
        assert not start_button(user).enabled
        user.find("Start").click()
        await asyncio.sleep(0.2)

    with_user(visit, commands)
    assert not commands.started
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("model", "data", "at", "words"),
    [
        ("SmolLM", "nosuch.jsonl", "Model", "no such folder, and not a valid Hub model id"),
        ("SmolLM", "nosuch.jsonl", "Dataset", "no such file or folder"),
        (MODEL, "chat.jsonl", "Dataset", "did you mean"),
        (MODEL, "empty.jsonl", "Dataset", "the dataset is empty"),
        ("bare", "chats.jsonl", "Model", "no weights in"),
        ("chats.jsonl", "chats.jsonl", "Model", "no config.json is here"),
        (MODEL, "bare", "Dataset", "that is a model, not a dataset"),
        # The recipe's own dataset does not exist.
        ("go-coder-tiny", "", "Dataset", "no such file or folder"),
        ("a" * 300, "chats.jsonl", "Model", "file name too long"),
    ],
)
def test_what_cannot_start_is_told_at_its_field(model: str, data: str, at: str, words: str) -> None:
    commands = RecordedCommands()
    write_rows("chats.jsonl", CHAT)
    Path("empty.jsonl").write_text("")
    Path("bare").mkdir()
    config = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 300}
    sizes = {"num_hidden_layers": 1, "intermediate_size": 16, "max_position_embeddings": 64}
    Path("bare/config.json").write_text(json.dumps(config | sizes))
    before = sorted(Path().rglob("*"))

    async def visit(user) -> None:
        await open_new_run(user, data, model=model)
        await until(lambda: words in mistake_at(user, at))
        assert not user.notify.messages
        assert not start_button(user).enabled
        user.find("Start").click()
        await asyncio.sleep(0.2)

    with_user(visit, commands)
    assert not commands.started
    assert sorted(Path().rglob("*")) == before


def test_start_runs_the_command_that_is_shown_with_the_recipe_of_the_command_line() -> None:
    commands = RecordedCommands()
    write_rows("chats.jsonl", *[CHAT] * 40)

    async def visit(user) -> None:
        await user.open("/new")
        answer(user, "Model", MODEL)
        await user.should_see("Choose your data.", retries=50)
        answer(user, "Dataset", "chats.jsonl")
        await settled(user)
        await user.should_see("40 conversations, JSONL")
        shown = command_shown(user)
        user.find("Start").click()
        await until(lambda: commands.started)
        assert shlex.join(("bloomery", *commands.started[0])) == shown

    with_user(visit, commands)
    ((command, path, option, folder),) = commands.started
    assert (command, option) == ("train", "--run-dir")
    assert Path(folder).parent == Path("runs")
    made = made_recipe(MODEL, "chats.jsonl")
    assert Path(path).read_text() == made.complete_text
    of_command_line = load_text(made.text, name=made.name, source="--model").recipe
    assert load_recipe(path).recipe == of_command_line


@pytest.mark.parametrize(
    ("rows", "purpose", "overrides"),
    [
        ([CHAT], "text", ["objective=pretrain"]),
        ([{"prompt": "a", "chosen": "b", "rejected": "c"}], "preferences", []),
        ([{"prompt": "a", "completion": "b", "label": True}] * 2, "preferences", []),
        ([{"question": "a", "answer": "b"}], "instructions", []),
        ([{"text": "a b c"}], "text", []),
    ],
)
def test_a_purpose_is_an_objective_of_the_command_line(rows, purpose, overrides) -> None:
    commands = RecordedCommands()
    write_rows("rows.jsonl", *rows * 20)

    async def visit(user) -> None:
        await open_new_run(user, "rows.jsonl")
        await settled(user)
        if overrides:
            user.find(marker=f"purpose-{purpose}").click()
        await until(lambda: "on" in field(user, f"purpose-{purpose}").classes)
        user.find("Start").click()
        await until(lambda: commands.started)

    with_user(visit, commands)
    made = made_recipe(MODEL, "rows.jsonl", overrides)
    assert Path(commands.started[0][1]).read_text() == made.complete_text


def test_columns_without_usual_names_are_asked_for() -> None:
    Path("odd.csv").write_text("id,customer_text,agent_text\n" + '1,"Is it hot?","It is."\n' * 30)
    columns = "data.columns={instruction: customer_text, output: agent_text}"
    made = made_recipe(MODEL, "odd.csv", ["data.format=alpaca", columns])
    assert Path(recipe_with_proposed_columns("odd.csv")).read_text() == made.complete_text


def test_a_packaged_recipe_keeps_its_settings_for_data_of_its_kind() -> None:
    commands = RecordedCommands()
    write_rows("chats.jsonl", *[CHAT] * 40)

    async def visit(user) -> None:
        await user.open("/new")
        answer(user, "Model", "qwen2.5-0.5b-lora")
        await settled(user)
        await user.should_see("The recipe's own: hub:HuggingFaceTB/smol-smoltalk")
        answer(user, "Dataset", "chats.jsonl")
        await user.should_see("40 conversations", retries=50)
        await asyncio.sleep(0.2)
        await settled(user)
        user.find("Start").click()
        await until(lambda: commands.started)

    with_user(visit, commands)
    recipe = load_recipe(commands.started[0][1]).recipe
    expected = load_recipe("qwen2.5-0.5b-lora", ["data.path=chats.jsonl", "data.glob=null"]).recipe
    assert recipe == expected


def test_a_recipe_changes_by_form_and_by_yaml_and_starts() -> None:
    commands = RecordedCommands()
    write_rows("chats.jsonl", *[CHAT] * 40)

    async def visit(user) -> None:
        from nicegui import ui

        await open_new_run(user, "chats.jsonl")
        await settled(user)
        editor = opened_settings(user)
        micro_batch = field(user, "train.micro_batch_size")

        # The first fields and the form write the YAML, and each other.
        field(user, "first-train.epochs").value = "2"
        user.find(marker="first-train.epochs").trigger("change")
        await until(lambda: field(user, "train.epochs").value in ("2", "2.0"))
        micro_batch.value = "1"
        user.find(marker="train.micro_batch_size").trigger("change")
        await until(lambda: "micro_batch_size: 1" in editor.value)
        assert load_text(editor.value, name="x", source="x").recipe.train.epochs == 2

        # The YAML fills the form and the questions.
        base = f"model: {{from: {MODEL}}}\nobjective: sft\nadapter: lora\n"
        base += "data: {path: chats.jsonl}\n"
        editor.value = base + "train: {micro_batch_size: 3, epochs: 1, batch_size: 6}\n"
        await until(lambda: micro_batch.value == "3")
        await until(lambda: field(user, "first-train.batch_size").value == "6")
        assert field(user, "Dataset").value == "chats.jsonl"

        # One that is too long is not planned, and not changed by the form.
        editor.value = base + "#" * 100_000
        await user.should_see("more than 100,000 characters", retries=50)
        micro_batch.value = "7"
        user.find(marker="train.micro_batch_size").trigger("change")
        await asyncio.sleep(0.1)
        assert editor.value.endswith("###")

        # A mistake is in view, whatever hides its field.
        editor.value = base + "optimizer: {weight_decay: lots}\n"
        await user.should_see("must be auto or a number, not 'lots'", retries=50)
        opened = {fold.text for fold in user.find(ui.expansion).elements if fold.value}
        assert {"All settings", "Optimizer"} <= opened
        assert not start_button(user).enabled
        editor.value = base + "train: {micro_batch_size: 3, epochs: 1, batch_size: 6}\n"
        await until(lambda: micro_batch.value == "3")

        # A mistake stands at its key, is corrected there, and nothing starts before.
        micro_batch.value = "many"
        user.find(marker="train.micro_batch_size").trigger("change")
        await until(lambda: "error-message" in micro_batch.props)
        assert micro_batch.props["error-message"].startswith("must be auto or a whole number")
        assert not start_button(user).enabled
        micro_batch.value = "2"
        user.find(marker="train.micro_batch_size").trigger("change")
        await until(lambda: "error" not in micro_batch.props)
        await settled(user)
        text = editor.value
        user.find("Start").click()
        await until(lambda: commands.started)
        assert Path(commands.started[0][1]).read_text() == text
        assert "micro_batch_size: 2" in text

    with_user(visit, commands)


def test_start_takes_what_the_fields_show_once() -> None:
    """A click of Start leaves the field that was typed into: its change is planned before anything starts."""
    commands = RecordedCommands()
    write_rows("chats.jsonl", *[CHAT] * 40)

    async def visit(user) -> None:
        await open_new_run(user, "chats.jsonl")
        await settled(user)
        rank = field(user, "first-adapter.rank")
        start = start_button(user)

        def leave(text: str) -> None:
            rank.value = text
            user.find(marker="first-adapter.rank").trigger("change")

        # A value that is no YAML does not reach the recipe: its field says why, and nothing starts without it.
        for text, reason in (("]", "the value cannot be read"), ("many", "must be")):
            leave(text)
            user.find("Start").click()
            await until(lambda reason=reason: reason in rank.props.get("error-message", ""))
            await until(lambda: "loading" not in start.props)
            assert not start.enabled
            assert rank.value == text
            assert not commands.started

        leave("2")
        await until(lambda: start.enabled)
        leave("4")
        user.find("Start").click().click()
        await until(lambda: commands.started)
        await asyncio.sleep(0.2)
        ((command, path, *_),) = commands.started
        assert command == "train"
        assert load_recipe(path).recipe.adapter.rank == 4

    with_user(visit, commands)


def test_edits_stay_when_an_answer_changes() -> None:
    write_rows("chats.jsonl", *[CHAT] * 40)
    write_rows("pairs.jsonl", *[{"prompt": "a", "chosen": "b", "rejected": "c"}] * 40)

    async def visit(user) -> None:
        await open_new_run(user, "chats.jsonl")
        await settled(user)
        rank = field(user, "first-adapter.rank")
        rank.value = "5"
        user.find(marker="first-adapter.rank").trigger("change")
        editor = opened_settings(user)
        await until(lambda: "rank: 5" in editor.value)
        answer(user, "Dataset", "pairs.jsonl")
        await until(lambda: "dpo" in editor.value)
        assert load_text(editor.value, name="x", source="x").recipe.adapter.rank == 5
        assert rank.value == "5"

    with_user(visit)


def test_suggestions_are_buttons(monkeypatch) -> None:
    from dataclasses import replace

    from bloomery.studio.recipe_form import planned

    edit = "train.micro_batch_size=1 train.activation_checkpointing=full"

    def planned_tightly(text: str, name: str):
        result = planned(text, name)
        if "micro_batch_size: 1" in text:
            return result
        return replace(result, fits=False, suggestions=((edit, "2.5 GiB"),))

    monkeypatch.setattr("bloomery.studio.new_run_page.planned", planned_tightly)
    write_rows("chats.jsonl", CHAT)

    async def visit(user) -> None:
        await open_new_run(user, "chats.jsonl")
        await user.should_see("Start although it does not fit", retries=50)
        await user.should_see("saves 2.5 GiB")
        user.find(edit).click()
        await user.should_not_see(edit, retries=50)
        editor = opened_settings(user)
        await until(lambda: "micro_batch_size: 1" in editor.value)
        assert "activation_checkpointing: full" in editor.value
        assert start_button(user).text == "Start"

    with_user(visit)


def test_a_new_run_from_a_run_marks_the_keys_that_its_recipe_set() -> None:
    write_rows("chats.jsonl", *[CHAT] * 40)
    text = "extends: qwen2.5-0.5b-lora\ndata: {path: chats.jsonl, glob: null}\ntrain: {epochs: 2}\n"
    run = Path("runs/first")
    run.mkdir(parents=True)
    loaded = load_text(text, name="mine", source="mine.yaml")
    (run / "recipe.yaml").write_text(dump_recipe(loaded))
    (run / "events.jsonl").write_text("")

    async def visit(user) -> None:
        await user.open("/new?run=first")
        await settled(user)
        assert field(user, "Dataset").value == "chats.jsonl"
        editor = opened_settings(user)
        assert load_text(editor.value, name="mine", source="x").recipe == loaded.recipe

        def is_marked(key: str) -> bool:
            return "set-here" in field(user, key).classes

        assert is_marked("train.epochs")
        # What the packaged recipe has, and what nobody has set.
        assert not is_marked("adapter.rank")
        assert not is_marked("train.seed")
        rank = field(user, "adapter.rank")
        rank.value = "7"
        user.find(marker="adapter.rank").trigger("change")
        await until(lambda: is_marked("adapter.rank"))

    with_user(visit)


FRESH = """
model: {family: llama, hidden_size: 32, intermediate_size: 64, num_layers: 2, num_heads: 2, max_positions: 64}
tokenizer: {train: {kind: bpe, vocab_size: 300}}
"""
TUNED = f"model: {{from: {MODEL}}}\nobjective: sft\nadapter: lora\n"
RECIPES = {
    # A model without a folder, and data that are not one path of rows.
    "a family": FRESH + "data: {path: text, glob: '*.txt', sequence_length: 64}\n",
    "a preset": "model: {preset: go-coder-tiny}\n"
    + FRESH.split("\n", 2)[2]
    + "data: {path: text}\n",
    "sources": FRESH + "data: {sources: [{path: text}, {path: notes.jsonl}]}\n",
    "another recipe": "extends: base.yaml\n",
    "a known model": TUNED + "data: {path: chats.jsonl}\n",
    "another objective": TUNED.replace("sft", "kto") + "data: {path: labels.jsonl}\n",
    "no such data": FRESH + "data: {path: nosuch}\n",
    "no such source": FRESH + "data: {sources: [{path: text}, {path: nosuch.jsonl}]}\n",
    "no such model": "model: {from: ./nosuch}\ndata: {path: chats.jsonl}\n",
    "no such key": FRESH + "data: {path: text}\ntrain: {epoch: 1}\n",
    "no data": TUNED,
}


def write_everything() -> None:
    Path("text").mkdir()
    Path("text/a.txt").write_text("a b c " * 200)
    Path("base.yaml").write_text(RECIPES["a family"])
    write_rows("chats.jsonl", *[CHAT] * 40)
    write_rows("notes.jsonl", *[{"text": "a b c"}] * 40)
    write_rows("labels.jsonl", *[{"prompt": "a", "completion": "b", "label": True}] * 40)


@pytest.mark.parametrize("way", ["typed", "of a run"])
@pytest.mark.parametrize("kind", RECIPES)
def test_start_is_on_exactly_when_the_recipe_can_be_planned(way: str, kind: str) -> None:
    """Whatever the questions make of a recipe that they did not ask for."""
    commands = RecordedCommands()
    write_everything()
    text = RECIPES[kind]
    can_start = not kind.startswith("no ")
    if way == "of a run":
        Path("runs/first").mkdir(parents=True)
        Path("runs/first/recipe.yaml").write_text(text.replace("base.yaml", "../../base.yaml"))
        Path("runs/first/events.jsonl").write_text("")
        if kind == "another recipe":  # a run's recipe is whole
            Path("runs/first/recipe.yaml").write_text(RECIPES["a family"])
    assert planned(text, "recipe").is_startable == can_start

    async def visit(user) -> None:
        if way == "typed":
            await user.open("/new")
            opened_settings(user).value = text
        else:
            await user.open("/new?run=first")
        if can_start:
            await settled(user)
            user.find("Start").click()
            await until(lambda: commands.started)
        else:
            await asyncio.sleep(1)
            assert not start_button(user).enabled

    with_user(visit, commands)
    assert bool(commands.started) == can_start
    if can_start:
        written = load_recipe(commands.started[0][1]).recipe
        expected = load_text(text, name=written.name, source="x").recipe
        assert written.model_copy(update={"name": ""}) == expected.model_copy(update={"name": ""})


def test_an_answer_changes_a_typed_recipe_whose_model_has_no_folder() -> None:
    """Nothing is the matter with the model: the data alone are judged."""
    write_everything()
    write_rows("more.jsonl", *[{"text": "a b c"}] * 40)

    async def visit(user) -> None:
        await user.open("/new")
        editor = opened_settings(user)
        editor.value = RECIPES["a family"]
        await settled(user)
        assert "on" in field(user, "purpose-text").classes
        answer(user, "Dataset", "more.jsonl")
        await until(lambda: "more.jsonl" in editor.value)
        await settled(user)
        answer(user, "Dataset", "nosuch.jsonl")
        await until(lambda: "no such file" in mistake_at(user, "Dataset"))
        assert not start_button(user).enabled

    with_user(visit)


@pytest.mark.parametrize(
    ("model", "data", "can_start"),
    [
        (MODEL, "chats.jsonl", True),
        (MODEL, "", False),
        ("", "chats.jsonl", False),
        (MODEL, "nosuch.jsonl", False),
        ("qwen2.5-0.5b-lora", "", True),  # its data are of the Hub
        ("qwen2.5-0.5b-lora", "chats.jsonl", True),
        ("go-coder-tiny", "", False),  # its data are not here
        ("go-coder-tiny", "text", True),
    ],
)
def test_start_is_on_exactly_when_the_questions_are_answered(model, data, can_start) -> None:
    write_everything()

    async def visit(user) -> None:
        await user.open("/new")
        if model:
            answer(user, "Model", model)
        if data:
            answer(user, "Dataset", data)
        if can_start:
            await settled(user)
        else:
            await asyncio.sleep(1)
            assert not start_button(user).enabled

    with_user(visit)

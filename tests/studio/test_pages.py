"""Pages as NiceGUI's simulated user sees them: no browser, no network."""

import asyncio
from pathlib import Path

import pytest
from studio_for_tests import (
    RecordedCommands,
    make_run,
    opened_list,
    texts_of,
    titles_of_charts,
    until,
    with_user,
)

from bloomery.monitor.events import DeviceStats, EventLog, RunEnded, Sampled, Warned
from runs_for_tests import made_up_run, step_done

pytest.importorskip("nicegui", reason="the extra `studio` is not installed")


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_list_and_a_run_with_its_charts_events_and_buttons() -> None:
    make_run("demo", end=RunEnded(step=40, status="stopped"))

    async def visit(user) -> None:
        from nicegui import ui

        table = await opened_list(user)
        assert [row["name"] for row in table.rows] == ["demo"]
        assert table.rows[0]["reason"] == "stopped at step 40, resumes exactly"
        assert table.props["visible-columns"][-2:] == ["began", "seconds"]
        assert {"temperature", "power"}.isdisjoint(table.props["visible-columns"])  # no sensor

        await user.open("/run/demo")
        await user.should_see("stopped")
        await user.should_see("the loss was not finite; its update was skipped")
        await user.should_see("Resume")
        charts = list(user.find(ui.echart).elements)
        series = {
            line["name"]: line["data"] for chart in charts for line in chart.options["series"]
        }
        assert [step for step, _ in series["training"]] == [
            step for step in range(1, 41) if step != 7
        ]
        assert [step for step, _ in series["validation"]] == [10, 20, 30, 40]
        assert "memory" in series and "gradient norm" in series

    with_user(visit)


def test_markup_and_escapes_in_names_and_events_are_text() -> None:
    name = "<img src=x onerror=alert(1)>"
    reason = "\x1b[31m<script>alert(2)</script>"
    make_run(name, events=[*made_up_run(), Warned(step=40, reason=reason)])

    async def visit(user) -> None:

        table = await opened_list(user)
        assert table.rows[0]["address"] == "/run/%3Cimg%20src%3Dx%20onerror%3Dalert%281%29%3E"
        await user.open(table.rows[0]["address"])
        labels = texts_of(user)
        assert name in labels
        assert "[31m<script>alert(2)</script>" in labels  # as text, without the escape character

    with_user(visit)


def test_a_sample_with_markup_and_escapes_is_text() -> None:
    sample = Sampled(step=40, prompt="<b>", completion="\x1b]0;title\x07<script>alert(1)</script>")
    make_run("demo", events=[*made_up_run(), sample])

    async def visit(user) -> None:

        await user.open("/run/demo")
        await user.should_see("<script>alert(1)</script>", retries=50)
        texts = texts_of(user)
        assert "<b>" in texts
        assert [text for text in texts if "<script>" in text] == [
            "]0;title<script>alert(1)</script>"
        ]

    with_user(visit)


def test_a_run_that_does_not_exist_is_an_answer() -> None:
    async def visit(user) -> None:
        await user.open("/run/absent")
        await user.should_see("error: no run 'absent'")

    with_user(visit)


def test_an_address_without_a_page_has_the_way_back() -> None:
    async def visit(user) -> None:
        from nicegui import __version__

        answer = await user.http_client.get("/runs/demo")
        assert answer.status_code == 404
        assert "error: no page /runs/demo" in answer.text
        assert "All runs" in answer.text
        script = await user.http_client.get(f"/_nicegui/{__version__}/components/absent")
        assert script.status_code == 404
        assert "<html" not in script.text

    with_user(visit)


def test_an_error_of_studio_is_told_where_it_happened(monkeypatch) -> None:
    """In place of the page that it made impossible, and on the page whose button or update it was."""

    async def fail(*_: object) -> None:
        raise RuntimeError("<b>no sensor</b>")

    def refuse(*_: object) -> None:
        raise ValueError("no name")

    monkeypatch.setattr("bloomery.studio.application.machine_page", fail)
    monkeypatch.setattr("bloomery.studio.runs_page.run_cells", refuse)
    make_run("demo")

    async def visit(user) -> None:
        answer = await user.http_client.get("/machine")
        assert answer.status_code == 500
        assert "error: studio failed: RuntimeError: " in answer.text
        assert "where: traceback in the terminal of " in answer.text
        assert "fix: reload the page" in answer.text
        assert "All runs" in answer.text
        assert "<b>no sensor</b>" not in answer.text

        await user.open("/")
        await until(lambda: user.notify.messages)
        await asyncio.sleep(3)  # two more updates
        (message,) = user.notify.messages
        assert message.startswith("studio failed: ValueError: no name\n")

    with_user(visit)


def test_an_empty_folder_has_an_empty_list_and_a_demo_to_start() -> None:
    commands = RecordedCommands()

    async def visit(user) -> None:
        assert (await opened_list(user)).rows == []
        user.find("Start the demo").click()
        await until(lambda: commands.started)
        assert commands.started == [("demo",)]

    with_user(visit, commands)


def test_a_recipe_changes_by_form_and_by_yaml_and_starts() -> None:
    commands = RecordedCommands()

    async def visit(user) -> None:
        from nicegui import ui

        await user.open("/new")
        await user.should_see("Fits.", retries=50)
        editor = next(iter(user.find(ui.codemirror).elements))
        inputs = {e.props["label"]: e for e in user.find(ui.input).elements if "label" in e.props}

        # The form writes the YAML.
        inputs["micro_batch_size"].value = "1"
        user.find(marker="train.micro_batch_size").trigger("change")
        while "micro_batch_size" not in editor.value:
            await asyncio.sleep(0.01)
        assert "train:\n  micro_batch_size: 1" in editor.value

        # The YAML fills the form.
        editor.value = "extends: go-coder-tiny\ntrain: {micro_batch_size: 3}\n"
        while inputs["micro_batch_size"].value != "3":
            await asyncio.sleep(0.01)

        # One that is too long is not planned, and not changed by the form.
        editor.value = "extends: go-coder-tiny\n" + "#" * 100_000
        await user.should_see("more than 100,000 characters", retries=50)
        user.find(marker="train.micro_batch_size").trigger("change")
        inputs["micro_batch_size"].value = "7"
        user.find(marker="train.micro_batch_size").trigger("change")
        await asyncio.sleep(0.1)
        assert editor.value.endswith("###")

        # A mistake is in view, whatever hides its field.
        editor.value = "extends: go-coder-tiny\noptimizer: {weight_decay: lots}\n"
        await user.should_see("must be auto or a number, not 'lots'", retries=50)
        folds = user.find(ui.expansion).elements
        assert {fold.text for fold in folds if fold.value} == {"data", "train", "optimizer"}
        editor.value = "extends: go-coder-tiny\ntrain: {micro_batch_size: 3}\n"
        while inputs["micro_batch_size"].value != "3":
            await asyncio.sleep(0.01)

        # A mistake stands at its key, is corrected there, and nothing starts before.
        inputs["micro_batch_size"].value = "many"
        user.find(marker="train.micro_batch_size").trigger("change")
        await user.should_see("must be auto or a whole number, not 'many'", retries=50)
        assert inputs["micro_batch_size"].props["error-message"].startswith("must be auto")
        assert not next(iter(user.find("Start").elements)).enabled
        inputs["micro_batch_size"].value = "2"
        user.find(marker="train.micro_batch_size").trigger("change")
        while "error" in inputs["micro_batch_size"].props:
            await asyncio.sleep(0.01)
        assert "micro_batch_size: 2" in editor.value

        user.find("Show three examples with their loss mask").click()
        user.find("Start").click()
        await until(lambda: len(commands.started) == 2)
        assert commands.started[0] == ("prepare", "go-coder-tiny.yaml", "--preview", "3")
        (command, path, option, folder) = commands.started[1]
        assert (command, option) == ("train", "--run-dir")
        assert Path(path).read_text() == editor.value
        assert Path(folder).parent == Path.cwd() / "runs"

    with_user(visit, commands)


def test_start_takes_what_the_fields_show_once() -> None:
    """A click of Start leaves the field that was typed into: its change is planned before anything starts."""
    commands = RecordedCommands()

    async def visit(user) -> None:
        from nicegui import ui

        await user.open("/new")
        await user.should_see("Fits.", retries=50)
        inputs = {e.props["label"]: e for e in user.find(ui.input).elements if "label" in e.props}
        start = next(iter(user.find("Start").elements))

        def leave(text: str) -> None:
            inputs["micro_batch_size"].value = text
            user.find(marker="train.micro_batch_size").trigger("change")

        # A value that is no YAML does not reach the recipe: its field says why, and nothing starts without it.
        for text, reason in (("]", "the value cannot be read"), ("many", "must be auto")):
            leave(text)
            user.find("Start").click()
            props = inputs["micro_batch_size"].props
            await until(lambda reason=reason, props=props: reason in props.get("error-message", ""))
            await until(lambda: "loading" not in start.props)
            assert not start.enabled
            assert inputs["micro_batch_size"].value == text
            assert not commands.started

        leave("2")
        await until(lambda: start.enabled)
        leave("4")
        user.find("Start").click().click()
        await until(lambda: commands.started)
        await asyncio.sleep(0.2)
        ((command, path, *_),) = commands.started
        assert command == "train"
        assert "micro_batch_size: 4" in Path(path).read_text()

    with_user(visit, commands)


def test_suggestions_are_buttons_and_a_model_is_named_without_a_network(monkeypatch) -> None:
    from bloomery.studio.recipe_form import Planned

    edit = "train.micro_batch_size=1 train.activation_checkpointing=full"

    def planned(text: str, name: str) -> Planned:
        if "micro_batch_size: 1" in text:
            return Planned(name=name, fits=True, lines=("Fits.",))
        return Planned(name=name, lines=("Does not fit.",), suggestions=((edit, "2.5 GiB"),))

    monkeypatch.setattr("bloomery.studio.new_run_page.planned", planned)
    Path("chats.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    )

    async def visit(user) -> None:
        from nicegui import ui

        await user.open("/new")
        await user.should_see("Start although it does not fit", retries=50)
        await user.should_see("2.5 GiB")
        user.find(edit).click()
        await user.should_see("Fits.", retries=50)
        await user.should_not_see(edit)
        editor = next(iter(user.find(ui.codemirror).elements))
        assert "micro_batch_size: 1" in editor.value
        assert "activation_checkpointing: full" in editor.value

        # A model of the Hub, which is in the table of published ones, and a name that no file has.
        inputs = {e.props["label"]: e for e in user.find(ui.input).elements if "label" in e.props}
        inputs["Dataset"].value = "chats.jsonl"
        inputs["Model"].value = "HuggingFaceTB/SmolLM2-135M-Instruct"
        user.find("Make a recipe").click()
        await until(lambda: "from: HuggingFaceTB/SmolLM2-135M-Instruct" in editor.value)
        assert "chats.jsonl" in editor.value
        inputs["Model"].value = "a" * 300
        user.find("Make a recipe").click()
        await user.should_see("file name too long", retries=50)

    with_user(visit)


def test_charts_keep_their_order_whichever_has_values_first() -> None:
    folder = make_run("demo", events=[DeviceStats(step=0, device=0, temperature=50.0, power=90.0)])

    async def visit(user) -> None:
        from nicegui import ui

        await user.open("/run/demo")
        await until(lambda: len(titles_of_charts(user)) == 2)
        table = await opened_list(user)
        assert {"temperature", "power"} <= set(table.props["visible-columns"])
        await user.open("/run/demo")
        with EventLog(folder / "events.jsonl") as log:
            log(step_done(1))
        await until(lambda: len(titles_of_charts(user)) > 2)
        (loss,) = (
            chart.options["series"][0]
            for chart in user.find(ui.echart).elements
            if chart.options["series"][0]["name"] == "training"
        )
        assert loss["showSymbol"] and len(loss["data"]) == 1  # one point is a dot
        assert titles_of_charts(user) == [
            "Loss, nats per token",
            "Learning rate",
            "Gradient norm, before clipping",
            "Tokens per second",
            "Memory, GiB, peak",
            "Temperature, °C",
            "Power, W",
        ]

    with_user(visit)


def test_the_tokens_trained_on_are_marked_and_no_text_is_lost() -> None:
    from bloomery.studio.frame import loss_parts

    text = "chats.jsonl:1  train\n¦user\nHi¦⟦Hello¦ you¦<end>⟧\n⟦⟧ 5⟧ ⟦open"
    parts = loss_parts(text)
    assert "".join(piece for piece, _ in parts) == text
    assert [piece for piece, has_loss in parts if has_loss] == ["⟦Hello¦ you¦<end>⟧", "⟦⟧"]

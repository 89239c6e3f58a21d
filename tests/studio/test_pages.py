"""Pages as NiceGUI's simulated user sees them: no browser, no network."""

import asyncio

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

pytestmark = pytest.mark.usefixtures("empty_folder")


def test_the_list_and_a_run_with_its_charts_events_and_buttons() -> None:
    make_run("demo", end=RunEnded(step=40, status="stopped"))

    async def visit(user) -> None:
        from nicegui import ui

        table = await opened_list(user)
        assert [row["name"] for row in table.rows] == ["demo"]
        assert table.rows[0]["reason"] == "at step 40, resumes exactly"
        assert table.props["visible-columns"][-2:] == ["began", "bytes"]
        assert table.rows[0]["below"]["memory_gib"] == ""  # no sensor
        assert table.rows[0]["below"]["began"].startswith("took ")

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
        await user.should_see("no run 'absent'")

    with_user(visit)


def test_an_address_without_a_page_has_the_way_back() -> None:
    async def visit(user) -> None:
        from nicegui import __version__

        answer = await user.http_client.get("/runs/demo")
        assert answer.status_code == 404
        assert "no page /runs/demo" in answer.text
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
    make_run("demo")

    async def visit(user) -> None:
        answer = await user.http_client.get("/machine")
        assert answer.status_code == 500
        assert "studio failed: RuntimeError: " in answer.text
        assert "where: traceback in the terminal of " in answer.text
        assert "reload the page" in answer.text
        assert "All runs" in answer.text
        assert "<b>no sensor</b>" not in answer.text

        await user.open("/")
        monkeypatch.setattr("bloomery.studio.runs_page.run_cells", refuse)
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


def test_charts_keep_their_order_whichever_has_values_first() -> None:
    folder = make_run("demo", events=[DeviceStats(step=0, device=0, temperature=50.0, power=90.0)])

    async def visit(user) -> None:
        from nicegui import ui

        await user.open("/run/demo")
        await until(lambda: len(titles_of_charts(user)) == 2)
        table = await opened_list(user)
        assert table.rows[0]["below"]["memory_gib"] == "50 °C, 90 W"
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

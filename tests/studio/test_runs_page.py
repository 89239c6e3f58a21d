"""The list of runs: filter, tags and sweeps, in NiceGUI's simulated browser."""

from pathlib import Path

import pytest
from studio_for_tests import make_run, opened_list, texts_of, until, with_user

from bloomery.core.run_notes import change_notes, read_notes
from bloomery.monitor.events import EvalDone, RunEnded
from runs_for_tests import step_done

pytest.importorskip("nicegui", reason="the extra `studio` is not installed")

pytestmark = pytest.mark.usefixtures("empty_folder")


def make_sweep(name: str, **losses: float) -> None:
    """With a run for each loss of its evaluation."""
    for run, loss in losses.items():
        evaluation = EvalDone(
            step=2, loss=loss, perplexity=None, bits_per_byte=None, tokens=9, seconds=1.0
        )
        make_run(f"{name}/{run}", events=[step_done(1), step_done(2), evaluation])
    (Path("runs") / name / "sweep.json").write_text("{}", encoding="utf-8")


def test_words_and_a_tag_filter_the_list() -> None:
    for name in ("first", "second", "third"):
        make_run(name, end=RunEnded(step=40, status="done"))
    change_notes(Path("runs/first"), add=["baseline"], note="a <b>cold</b> start")
    change_notes(Path("runs/second"), add=["baseline", "long"])

    async def visit(user) -> None:
        from nicegui import ui

        table = await opened_list(user)

        def names() -> set[str]:
            return {row["title"] for row in table.rows}

        search = next(e for e in user.find(ui.input).elements)
        for words, expected in (
            ("cold start", {"first"}),
            ("BASELINE", {"first", "second"}),
            ("baseline done long", {"second"}),
            ("absent", set()),
            ("", {"first", "second", "third"}),
        ):
            search.value = words
            await until(lambda expected=expected: names() == expected)
        assert {"baseline", "long"} <= set(texts_of(user))
        user.find(content="long").click()
        await until(lambda: names() == {"second"})
        user.find(content="long").click()
        await until(lambda: len(names()) == 3)

    with_user(visit)


def test_the_runs_of_a_sweep_are_a_group_with_what_decides() -> None:
    make_run("alone")
    make_sweep("rates", low=1.5, high=1.25)

    async def visit(user) -> None:
        from nicegui import ui

        await opened_list(user)
        tables = list(user.find(ui.table).elements)
        rows = sorted(sorted(row["name"] for row in table.rows) for table in tables)
        assert rows == [["alone"], ["rates/high", "rates/low"]]
        (fold,) = [e for e in user.find(ui.expansion).elements if e.text == "rates"]
        caption = "sweep of 2 runs; best so far validation loss 1.250: high"
        assert fold.props["caption"].strip() == caption
        assert fold.props["toggle-aria-label"] == f"rates {caption}"
        user.find("Compare its runs").click()
        await until(lambda: user.back_history[-1] == "/compare?sweep=rates")

        await user.open("/run/rates/high")
        await user.should_see("1.250")
        await user.open("/run/rates%2Flow")
        await user.should_see("1.500")
        await user.open("/run/rates/absent")
        await user.should_see("no run 'rates/absent'")

    with_user(visit)


def test_the_order_by_a_heading_is_that_of_the_field() -> None:
    make_run("one")
    make_run("two")

    async def visit(user) -> None:
        from nicegui import ui

        await opened_list(user)
        (table,) = user.find(ui.table).elements
        (field,) = [one for one in user.find(ui.select).elements if one.props["label"] == "Sort by"]
        assert field.value == ""
        clicked = {"sortBy": "name", "descending": True, "page": 1, "rowsPerPage": 0}
        user.find(ui.table).trigger("update:pagination", clicked)
        await until(lambda: field.value == "name")
        assert table.pagination["descending"]
        field.value = "step"
        await until(lambda: table.pagination == {"rowsPerPage": 0, "sortBy": "step"})
        field.value = ""
        await until(lambda: table.pagination["sortBy"] is None)

    with_user(visit)


def test_a_folder_that_is_no_sweep_leads_to_no_run() -> None:
    make_run("plain/inner")

    async def visit(user) -> None:
        await user.open("/run/plain/inner")
        await user.should_see("no run 'plain/inner'")

    with_user(visit)


def test_the_page_of_a_run_shows_and_changes_its_notes() -> None:
    folder = make_run("demo")
    change_notes(folder, add=["kept", "dropped"], note="look at step 7")

    async def visit(user) -> None:
        from nicegui import ui

        await user.open("/run/demo")
        assert {"kept", "dropped", "look at step 7"} <= set(texts_of(user))
        user.find("Edit the note").click()
        await user.should_see("Note and tags")
        (tags,) = [e for e in user.find(ui.input).elements if "Tags" in e.props["label"]]
        assert tags.value == "dropped kept"
        tags.value = "kept new"
        user.find("Save").click()
        await until(lambda: read_notes(folder).tags == ("kept", "new"))
        assert read_notes(folder).note == "look at step 7"
        # As `bloomery runs note` changes it meanwhile.
        change_notes(folder, note="changed in a terminal")
        await user.should_see("changed in a terminal", retries=50)

    with_user(visit)

"""Runs next to each other: curves over an axis, metrics, recipes; and their deletion."""

import shutil
from pathlib import Path

import pytest
from studio_for_tests import RecordedCommands, make_run, opened_list, until, with_user

from bloomery.core.run_folder import RunFolder
from bloomery.core.run_lock import hold_run_lock
from bloomery.monitor.events import Resumed, RunEnded, TaskDone
from bloomery.studio import compare_page
from bloomery.studio.compare_page import address_of_comparison
from bloomery.studio.watching import Watching
from runs_for_tests import made_up_run, step_done

pytest.importorskip("nicegui", reason="the extra `studio` is not installed")

pytestmark = pytest.mark.usefixtures("empty_folder")


def test_points_by_tokens_and_hours_are_those_by_step_at_other_positions() -> None:
    steps = [
        step_done(step, float(step), time=360.0 * step, tokens=1000 * step) for step in range(1, 11)
    ]
    resumed = Resumed(step=8, path="checkpoints/step-00000008", time=7200.0)
    make_run("one", events=[*steps, resumed, step_done(9, 90.0, time=7560.0, tokens=9000)])
    run = Watching().run("one")
    run.update()
    curves = run.curves

    by_step = curves.points("loss").tolist()
    assert [step for step, _ in by_step] == [*range(1, 10)]
    assert curves.points_over("tokens", "loss").tolist() == [
        [1000 * step, loss] for step, loss in by_step
    ]
    hours = curves.points_over("hours", "loss").tolist()
    assert hours[:8] == [[pytest.approx(0.1 * (step - 1)), step] for step in range(1, 9)]
    assert hours[8] == [pytest.approx(2.0), 90.0]  # the repeated steps took their time
    # A zoom is a part of it, in positions of the axis.
    assert curves.points_over("tokens", "loss", 3500, 6000).tolist() == [
        [s * 1000, s] for s in (3, 4, 5, 6)
    ]


def table_of(user, title: int) -> dict[str, list[str]]:
    """The values of the runs by key: of the metrics (0) or of the recipes (1)."""
    from nicegui import ui

    tables = sorted(user.find(ui.table).elements, key=lambda element: -element.id)
    table = tables[title]
    return {row["key"]: [row[name] for name in row if name.startswith("run")] for row in table.rows}


def test_curves_metrics_and_recipes_of_two_runs() -> None:
    score = {"task": "arc", "kind": "multiple-choice", "metric": "acc", "items": 100}
    tasks = [
        TaskDone(step=40, value=0.5, low=0.4, high=0.6, **score),
        TaskDone(step=40, value=0.62, low=0.52, high=0.71, **score),  # the newer one counts
    ]
    make_run("one", events=[*made_up_run(), *tasks])
    make_run("<b>two", end=RunEnded(step=20, status="stopped"), events=list(made_up_run(20)))
    for name, rate in (("one", 1e-4), ("<b>two", 3e-4)):
        recipe = f"name: {name[-3:]}\nextends: go-coder-tiny\noptimizer: {{learning_rate: {rate}}}\n"
        recipe += f"train: {{epochs: {round(1e4 * rate):.1f}}}\n"
        (Path("runs") / name / "recipe.yaml").write_text(recipe, encoding="utf-8")

    async def visit(user) -> None:
        from nicegui import ui

        await user.open("/compare?runs=one/%3Cb%3Etwo/absent&over=tokens")
        await user.should_see("no run 'absent'")
        charts = [chart.options["series"] for chart in user.find(ui.echart).elements]
        losses = next(lines for lines in charts if lines and lines[0]["data"][0][1] > 7)
        assert {line["name"]: line["data"][-1][0] for line in losses} == {
            "one": 40 * 8192,
            "<b>two": 20 * 8192,
        }
        metrics = table_of(user, 0)
        assert metrics["Step"] == ["40 of 40", "20 of 20"]
        assert metrics["arc: acc"] == ["62.0% (52.0% to 71.0%), step 40", "–"]
        assert metrics["Status"] == ["done", "stopped"]
        await until(lambda: table_of(user, 1))
        assert table_of(user, 1) == {
            "optimizer.learning_rate": ["0.0001", "0.0003"],
            "train.epochs": ["1", "3"],
        }

    with_user(visit)


def test_differences_are_tested_one_after_the_other_and_both_scores_have_intervals() -> None:
    commands = RecordedCommands()
    score = {"task": "texts", "kind": "text", "metric": "bits_per_byte", "items": 8, "step": 40}
    tested = TaskDone(
        **score, value=1.61, low=1.58, high=1.65, against="runs/one", against_value=2.01,
        against_low=1.97, against_high=2.05, difference=-0.4, difference_low=-0.41,
        difference_high=-0.39,
    )  # fmt: skip
    make_run("one")
    make_run("two", events=[*made_up_run(), tested])
    make_run("three")

    async def visit(user) -> None:
        await user.open("/compare?runs=one/two/three")
        await until(lambda: "texts: bits_per_byte against one" in table_of(user, 0))
        assert table_of(user, 0)["texts: bits_per_byte against one"] == [
            "2.0100 (1.9700 to 2.0500)",
            "1.6100 (1.5800 to 1.6500), step 40; difference -0.4000 (-0.4100 to -0.3900)",
            "–",
        ]
        user.find("Test the differences").click()
        await until(lambda: len(commands.started) == 2, 10)
        assert commands.started == [
            ("eval", "runs/two", "--against=runs/one"),
            ("eval", "runs/three", "--against=runs/one"),
        ]

    with_user(visit, commands)


def test_a_run_that_disappears_and_a_recipe_of_another_version_are_told() -> None:
    make_run("one")
    make_run("two")
    (Path("runs") / "one" / "recipe.yaml").write_text("future: {key: 1}\n", encoding="utf-8")

    async def visit(user) -> None:
        await user.open("/compare?runs=one/two/two/..&over=nonsense")
        shutil.rmtree("runs/two")
        await user.should_see("two: the run folder is gone", retries=60)
        await until(lambda: table_of(user, 1))
        assert "cannot be read: " in table_of(user, 1)["recipe.yaml"][0]

    with_user(visit)


def test_many_runs_are_drawn_when_twice_as_many_are_read_and_at_the_end(monkeypatch) -> None:
    names = [f"run-{number}" for number in range(1, 7)]
    for name in names:
        make_run(name)
    drawn = list[list[str]]()

    def draw_charts(view) -> None:
        drawn.append([name for name in names if view._snapshots[name].charts])

    async def read(view) -> None:
        for run in view.runs.values():
            run.update()
            view._draw()

    monkeypatch.setattr(compare_page.CompareView, "_draw_charts", draw_charts)
    monkeypatch.setattr(compare_page.CompareView, "_read", read)

    async def visit(user) -> None:
        await user.open(f"/compare?runs={'%2F'.join(names)}")
        await until(lambda: len(drawn) >= 4)
        assert drawn == [names[:1], names[:2], names[:4], names]

    with_user(visit)


def test_no_run_and_too_many_runs() -> None:
    for number in range(21):
        make_run(f"run-{number:02}", events=[])
    every = address_of_comparison([f"run-{number:02}" for number in range(21)])

    async def visit(user) -> None:
        await user.open("/compare")
        await user.should_see("Choose runs above")
        await user.open(every)
        await user.should_see("Compare 20 runs")
        await user.should_see("at most 20 runs are compared; 1 are left out")

    with_user(visit)


def test_selected_runs_are_deleted_after_a_question_that_lists_what_goes() -> None:
    commands = RecordedCommands()
    folder = make_run("one", end=RunEnded(step=40, status="done"))
    make_run("two")
    weights = folder / "checkpoints" / "step-00000020" / "model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(bytes(2_000_000))
    live = make_run("live", events=list(made_up_run())[:20])

    async def visit(user) -> None:
        from nicegui import ui

        table = await opened_list(user)
        rows = {row["name"]: row for row in table.rows}
        assert rows["live"]["status"] == "running"
        await select(user, table, rows["one"], rows["live"])
        delete = next(iter(user.find(kind=ui.button, content="Delete").elements))
        await until(lambda: delete.enabled)
        user.find(kind=ui.button, content="Delete").click()
        await user.should_see("Delete 1 run, 1.9 MiB?")
        await user.should_see("1.9 MiB: 1 checkpoint")
        await user.should_see("kept: runs/live: the run is running")
        user.find("Keep").click()
        await until(lambda: not any(one.value for one in user.find(ui.dialog).elements))
        user.find(ui.dialog).trigger("hide")  # as a browser does
        await user.should_not_see("This cannot be undone")
        assert commands.started == []

        user.find(kind=ui.button, content="Delete").click()
        await user.should_see("This cannot be undone")
        user.find("Delete it").click()
        await until(lambda: commands.started)
        assert commands.started == [("runs", "rm", "runs/one", "--yes")]

    with hold_run_lock(RunFolder(live)):
        with_user(visit, commands)


async def select(user, table, *rows) -> None:
    """As a click on the checkboxes of these rows."""
    arguments = {"keys": [row["name"] for row in rows], "rows": list(rows), "added": True}
    user.find(type(table)).trigger("selection", arguments)
    await until(lambda: [row["name"] for row in table.selected] == arguments["keys"])


def test_of_many_differences_the_first_are_those_that_all_recipes_set() -> None:
    from nicegui import ui

    from bloomery.studio.compare_page import MOST_KEYS

    for name, recipe in (
        ("small", "extends: go-coder-tiny\noptimizer: {learning_rate: 1e-3}\n"),
        ("tuned", "model: {from: /m}\ndata: {path: d}\nadapter: lora\noptimizer: {learning_rate: 2e-4}\n"),
    ):
        (make_run(name) / "recipe.yaml").write_text(recipe, encoding="utf-8")

    async def visit(user) -> None:
        await user.open("/compare?runs=small%2Ftuned")
        await user.should_see("keys that differ", retries=100)
        table = next(
            table
            for table in user.find(ui.table).elements
            if any(row["key"] == "optimizer.learning_rate" for row in table.rows)
        )
        assert len(table.rows) == MOST_KEYS
        unset = [bool({"null", "–"} & {*row.values()}) for row in table.rows]
        assert unset == sorted(unset) and not unset[0]
        user.find("keys that differ").click()
        await until(lambda: len(table.rows) > MOST_KEYS)

    with_user(visit)

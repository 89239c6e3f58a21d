"""The comparison of runs: axes, differences of recipes, figures with intervals."""

from pathlib import Path

import pytest
from studio_for_tests import make_run, with_user

from bloomery.monitor.events import TaskDone
from bloomery.studio.compare_page import (
    Overlay,
    address_of_comparison,
    differences_of,
    figures_of,
)
from bloomery.studio.watching import Watching
from runs_for_tests import step_done

pytest.importorskip("nicegui", reason="the extra `studio` is not installed")


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def opened(name: str):
    run = Watching().run(name)
    run.update()
    return run


def test_one_curve_over_steps_tokens_and_hours() -> None:
    make_run(
        "slow", events=[step_done(step, float(step), time=step * 1800.0) for step in (1, 2, 3)]
    )
    runs = {"slow": opened("slow")}
    assert Overlay(runs, "loss", "step").points("slow") == [[1, 1.0], [2, 2.0], [3, 3.0]]
    assert Overlay(runs, "loss", "tokens").points("slow") == [
        [8192, 1.0],
        [16384, 2.0],
        [24576, 3.0],
    ]
    assert Overlay(runs, "loss", "hours").points("slow") == [[0.0, 1.0], [0.5, 2.0], [1.0, 3.0]]


def test_only_keys_that_differ_are_shown() -> None:
    texts = {
        "a": "train: {epochs: 1, seed: 0}\nmodel: {preset: go-coder-tiny}\n",
        "b": "train: {epochs: 2, seed: 0}\nadapter: lora\nmodel: {preset: go-coder-tiny}\n",
    }
    headings, rows = differences_of(texts)
    assert headings == ["key", "a", "b"]
    assert rows == [["adapter.kind", "", "lora"], ["train.epochs", "1", "2"]]
    assert differences_of({"a": texts["a"], "b": texts["a"]})[1] == []


def test_a_score_has_its_interval_and_a_run_without_it_a_blank() -> None:
    score = TaskDone(
        step=3,
        task="arc",
        kind="multiple-choice",
        metric="acc",
        items=9,
        value=0.5,
        low=0.4,
        high=0.6,
    )
    make_run("scored", events=[step_done(1), score])
    make_run("plain", events=[step_done(1)])
    headings, rows = figures_of([opened("scored"), opened("plain")])
    assert headings[-1] == "arc, acc"
    assert [row[-1] for row in rows] == ["0.5 [0.4, 0.6]", ""]


def test_the_page_overlays_two_runs_and_ignores_names_that_are_none() -> None:
    make_run("one")
    make_run("t,w'o")
    assert address_of_comparison(["a b", "c"]) == "/compare?runs=a%20b%2Fc"

    async def visit(user) -> None:
        from nicegui import ui

        await user.open("/compare?runs=one/two/../%3Cscript%3E")
        charts = list(user.find(ui.echart).elements)
        names = {line["name"] for chart in charts for line in chart.options["series"]}
        assert names == {"one"}
        next(iter(user.find(ui.select).elements)).value = ["one", "t,w'o"]
        await user.should_see("The recipes are the same.", retries=50)
        charts = list(user.find(ui.echart).elements)
        names = {line["name"] for chart in charts for line in chart.options["series"]}
        assert names == {"one", "t,w'o"}

    with_user(visit)

"""The table of a sweep's folder, its line among the runs, its page, and how commands name its runs."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from bloomery.cli import cli
from bloomery.cli.sweep import table_lines, verdict_lines
from bloomery.core.errors import UserError
from bloomery.core.run_folder import RunFolder, every_run, find_run
from bloomery.core.run_lock import hold_run_lock
from bloomery.evals.statistics import Scores
from bloomery.sweep.page import charts_of, sweep_page
from bloomery.sweep.points import points_of
from bloomery.sweep.ranking import Judged, ranked
from bloomery.sweep.store import Score, SweepFolder, sweep_folder
from bloomery.sweep.table import read_sweep

KEY = "optimizer.learning_rate"
COMMAND = ["sweep", "demo-chat-lora", f"{KEY}=1e-4,1e-3,1e-2,1e-1", "adapter.rank=8"]
NATS = {"1e-4": 3.0, "1e-3": 2.0, "1e-2": 2.5}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> SweepFolder:
    """Of four runs two are trained to their end, one was stopped at step 30 of a rung, one has not begun."""
    monkeypatch.chdir(tmp_path)
    points = points_of("demo-chat-lora", COMMAND[2:], search="grid", runs=None, seed=0)
    folder = sweep_folder("demo-chat-lora", points, {}, None)
    folder.describe(
        points, COMMAND, metric="eval.loss", metric_kind="eval.loss", lower_is_better=True
    )
    draw = np.random.default_rng(0)
    noise = draw.normal(size=20)
    for age, point in enumerate(points[:3]):
        nats = NATS[point.settings[KEY]] + noise + draw.normal(size=20) / 10
        scores = Scores("eval.loss", nats * 10, np.full(20, 10.0))
        score = Score(90, float(nats.mean()), scores)
        for step in (10, 30) if point.settings[KEY] == "1e-2" else (10, 30, None):
            folder.write_score(folder.score_file(point.name, "eval.loss", step), score)
        run = folder.run(point)
        run.path.mkdir()
        run.recipe.touch()
        run.events.touch()
        os.utime(run.recipe, (age, age))
    return folder


def test_a_run_that_failed_has_its_reason_until_it_has_a_figure(folder):
    folder.write_failure(
        "learning_rate-1e-1", "does not fit: \x1b[31m<b>token=hf_abcdefghijklmnopqrstuvwxyz012345"
    )
    folder.write_failure("learning_rate-1e-3", "of a try before the score")
    table = read_sweep(folder.path)
    failed = table.runs[-1]
    assert failed.settings[KEY] == "1e-1" and failed.metric is None
    assert failed.failure.startswith("does not fit: ") and "\x1b" not in failed.failure
    assert "hf_abc" not in failed.failure
    assert [bool(run.failure) for run in table.runs] == [False, False, False, True]
    html = sweep_page(table, folder.path)
    assert "failed: does not fit: " in html and "<b>token" not in html
    assert "not judged yet" not in html
    folder.write_failure("learning_rate-1e-1", "")
    assert not any(run.failure for run in read_sweep(folder.path).runs)


def test_the_table_has_the_figures_of_the_scores(folder):
    table = read_sweep(folder.path)
    assert [run.settings[KEY] for run in table.runs] == ["1e-3", "1e-4", "1e-2", "1e-1"]
    assert [run.stopped_at for run in table.runs] == [None, None, 30, None]
    best, worse, stopped, waiting = table.runs
    assert best.contender and not worse.contender and table.winner is best is table.best
    assert table.state == "stopped" and list(table.command) == COMMAND
    assert waiting.metric is None and stopped.interval is None
    assert [run.run.name for run in table.runs] == [
        f"learning_rate-{rate}" for rate in ("1e-3", "1e-4", "1e-2", "1e-1")
    ]

    judged = []
    for run in (best, worse):
        score = folder.read_score(folder.score_file(run.run.name, "eval.loss"), "eval.loss")
        assert score is not None
        judged.append(Judged(run.run.name, score.value, score.scores))
    rows = ranked(judged, lower_is_better=True).rows
    assert [run.interval for run in (best, worse)] == [
        (row.estimate.low, row.estimate.high) for row in rows
    ]
    assert worse.p_value == rows[1].p_value and stopped.metric == pytest.approx(2.5, abs=0.6)

    quick = read_sweep(folder.path, noise=False)
    figures = [run.metric for run in table.runs if run.metric is not None]
    assert [run.metric for run in quick.runs[:3]] == pytest.approx(figures)
    assert all(run.interval is None and run.p_value is None for run in quick.runs)


def test_more_values_are_added_and_another_figure_replaces_the_first(folder):
    points = points_of(
        "demo-chat-lora",
        [f"{KEY}=1e-3,1", "adapter.rank=8"],
        search="grid",
        runs=None,
        seed=0,
    )
    folder.describe(points, COMMAND, metric="reward", metric_kind="reward", lower_is_better=False)
    table = read_sweep(folder.path)
    assert len(table.runs) == 5 and table.metric == "reward" and table.best is None
    assert all(run.metric is None for run in table.runs)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"runs": 3, "metric": 1}'])
def test_a_damaged_file_is_an_error_and_does_not_stop_the_list(folder, text):
    (folder.path / "sweep.json").write_text(text)
    with pytest.raises(UserError) as caught:
        read_sweep(folder.path)
    assert caught.value.fix
    listed = CliRunner().invoke(cli, ["runs"], catch_exceptions=False)
    assert listed.exit_code == 0 and "unreadable" in listed.stdout


def test_a_sweep_is_a_line_with_its_best_and_the_command_that_continues_it(folder):
    listed = CliRunner().invoke(cli, ["runs"], catch_exceptions=False).stdout
    (line,) = [line for line in listed.splitlines() if line.startswith(folder.path.name)]
    best = read_sweep(folder.path).best
    assert best is not None
    assert "stopped" in line and "3/4" in line and f"{best.metric:.4f}: {KEY}=1e-3" in line
    assert "bloomery sweep demo-chat-lora" in listed and "learning_rate-1e-3" not in listed
    unfolded = CliRunner().invoke(cli, ["runs", "--all"], catch_exceptions=False).stdout
    assert f"{folder.path.name}/learning_rate-1e-3" in unfolded

    (sweep,) = json.loads(CliRunner().invoke(cli, ["runs", "--json"]).stdout)["sweeps"]
    table = read_sweep(folder.path).document()
    assert sweep["runs"] == table["runs"] and sweep["winner"] == table["winner"]
    assert sweep["state"] == "stopped" and sweep["command"].startswith("bloomery sweep")
    with hold_run_lock(RunFolder(folder.path)):
        (line,) = json.loads(CliRunner().invoke(cli, ["runs", "--json"]).stdout)["sweeps"]
        assert line["state"] == "running" and line["command"] is None


def test_last_is_the_newest_run_and_the_name_of_a_sweep_is_that_of_no_run(folder, tmp_path):
    name = folder.path.name
    assert find_run("last") == Path("runs") / name / "learning_rate-1e-2"
    assert len(every_run()) == 3
    run = find_run(f"{name}/learning_rate-1e-3")
    assert RunFolder(run.absolute()).name == f"{name}/learning_rate-1e-3"
    for typed in (name, str(folder.path)):
        with pytest.raises(UserError, match="is a sweep") as caught:
            find_run(typed)
        assert f"{name}/learning_rate-1e-4" in caught.value.fix and caught.value.code == 2
    newer = tmp_path / "runs/newer"
    newer.mkdir()
    (newer / "recipe.yaml").touch()
    assert find_run("last").name == "newer"


def test_the_data_of_a_sweep_is_kept_and_goes_with_it(folder, tmp_path):
    """`runs clean` knew the runs in runs/ alone."""
    for name in ("used", "unused"):
        data = tmp_path / "prepared" / name
        data.mkdir(parents=True)
        (data / "manifest.json").write_text("{}")
    for run in every_run():
        plan = {"data": {"prepared": str(tmp_path / "prepared/used")}, "model": {"source": None}}
        (run / "plan.json").write_text(json.dumps(plan))
        (run / "checkpoints/step-00000030").mkdir(parents=True)

    def call(*words):
        return CliRunner().invoke(cli, ["runs", *words])

    assert call("clean", "--yes").exit_code == 0
    assert [path.name for path in (tmp_path / "prepared").iterdir()] == ["used"]
    with hold_run_lock(RunFolder(folder.path / "learning_rate-1e-3")):
        refused = call("rm", folder.path.name, "--yes").exception
        assert isinstance(refused, UserError) and "learning_rate-1e-3" in refused.fix
    done = call("rm", folder.path.name, "--yes")
    assert done.exit_code == 0 and "3 runs, 3 checkpoints" in done.output
    assert not folder.path.exists()
    call("clean", "--yes")
    assert not (tmp_path / "prepared/used").exists()


def test_the_page_ranks_the_runs_and_links_to_theirs(folder):
    best = folder.path / "learning_rate-1e-3"
    (best / "report.html").touch()
    html = sweep_page(read_sweep(folder.path), folder.path)
    rows = re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td>", html)
    assert [rank for _, rank in rows] == ["1", "2", "", ""]
    assert rows[0][0] == '<a href="learning_rate-1e-3/report.html">learning_rate-1e-3</a>'
    assert "stopped at step 30" in html and "not judged yet" in html
    assert "<script" not in html and "Every other run is worse beyond the noise" in html


def test_the_chart_has_a_dot_for_each_figure_on_a_logarithmic_axis(folder):
    (chart,) = charts_of(read_sweep(folder.path))
    circles = re.findall(r'<circle cx="([\d.]+)" cy="[\d.]+" r="[46]" class="dot (\w+)"', chart)
    by_kind = {kind: float(x) for x, kind in circles}
    assert by_kind["plain"] < by_kind["best"] < by_kind["stopped"]
    # 1e-4, 1e-3 and 1e-2 are as far from each other.
    assert by_kind["stopped"] + by_kind["plain"] == pytest.approx(2 * by_kind["best"], abs=0.2)
    assert chart.count('class="whisker"') == 2 and "(logarithmic)" in chart


@pytest.mark.parametrize(("columns", "pictures"), [("140", True), ("60", False)])
def test_the_text_has_a_line_for_each_figure_and_a_picture_where_there_is_room(
    folder, monkeypatch, columns, pictures
):
    monkeypatch.setenv("COLUMNS", columns)
    table = read_sweep(folder.path)
    head, best, worse, stopped = table_lines(table)
    assert head.split() == ["rank", "eval.loss", "95%", "interval", "p", KEY]
    assert best.split()[0] == "1" and best.split()[1] == f"{table.runs[0].metric:.4f}"
    assert worse.split()[0] == "2" and stopped.split()[0] == "-"
    assert "stopped at step 30" in stopped
    assert [("●" in line or "o" in line.split()[-1]) for line in (best, worse)] == [pictures] * 2
    verdict = verdict_lines(table)
    assert verdict[0].startswith("best") and f"{KEY}=1e-3" in verdict[0]
    assert verdict[1].endswith(f"bloomery chat {folder.path.name}/learning_rate-1e-3")

"""A sweep on the page that compares runs, and its picture: runs as lines across axes."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from studio_for_tests import RecordedCommands, make_run, until, with_user

from bloomery.monitor.events import TaskDone
from bloomery.sweep.store import Score, SweepFolder
from bloomery.sweep.table import read_sweep
from runs_for_tests import made_up_run

pytest.importorskip("nicegui", reason="the extra `studio` is not installed")
RATES = ("1e-4", "1e-3", "1e-2")

pytestmark = pytest.mark.usefixtures("empty_folder")


def make_sweep(name: str = "s", *, judged: int = 3) -> Path:
    """Three learning rates, the later the better, of which the first ones have a score."""
    folder = SweepFolder(Path("runs", name).absolute())
    folder.path.mkdir(parents=True)
    settings = {f"rate-{rate}": {"optimizer.learning_rate": rate} for rate in RATES}
    about = {"sweep": "0", "recipe": "tiny", "runs": settings, "metric": "eval.loss"}
    about |= {"metric_kind": "eval.loss", "lower_is_better": True, "command": ["sweep", "tiny"]}
    (folder.path / "sweep.json").write_text(
        json.dumps(about | {"keys": ["optimizer.learning_rate"]})
    )
    noise = np.random.default_rng(0).normal(0, 0.01, 200)
    for number, run in enumerate(settings):
        make_run(f"{name}/{run}", events=list(made_up_run(20)))
        if number < judged:
            values = 3.0 - number + noise
            scores = read_scores(values)
            score = Score(20, float(values.mean()), scores)
            folder.write_score(folder.score_file(run, "eval.loss"), score)
    return folder.path


def read_scores(values: np.ndarray):
    from bloomery.evals.statistics import Scores

    return Scores("eval.loss", values, np.ones(len(values)))


def test_places_of_settings_and_figures_on_their_axes() -> None:
    from bloomery.studio.parallel_axes import figure_axis, setting_axis, short_names

    rates = setting_axis("optimizer.learning_rate", ["1e-4", "1e-2", "1e-3", "1e-4"])
    assert rates.places == pytest.approx((0.0, 1.0, 0.5, 0.0))  # by the logarithm
    assert {text: place for place, text in rates.ticks}["1e-3"] == pytest.approx(0.5)
    assert setting_axis("adapter.rank", ["8", "16", "24"]).places == pytest.approx((0, 0.5, 1))
    assert setting_axis("adapter.rank", ["1", "8", "64"]).places == pytest.approx((0, 0.5, 1))
    # Words stand evenly, in their order; so do a number and a word.
    assert setting_axis("adapter.kind", ["lora", "none", "lora", "dora"]).places == (
        0.0,
        0.5,
        0.0,
        1.0,
    )
    assert setting_axis("eval.every", ["10", "none"]).places == (0.0, 1.0)
    assert setting_axis("train.seed", ["7", "7"]).places == (0.5, 0.5)
    many = setting_axis("optimizer.weight_decay", [str(number / 10) for number in range(11)])
    assert [text for _, text in many.ticks] == ["0", "0.25", "0.5", "0.75", "1"]

    losses = figure_axis("eval.loss", [2.0, 1.0, None, 1.5], lower_is_better=True)
    assert losses.places == (0.0, 1.0, None, 0.5)
    assert figure_axis("reward", [2.0, 1.0], lower_is_better=False).places == (1.0, 0.0)
    assert short_names(["a.rank", "b.rank", "b.alpha"]) == {
        "a.rank": "a.rank", "b.rank": "b.rank", "b.alpha": "alpha",
    }  # fmt: skip


def test_a_sweep_opens_with_its_ranking_its_verdict_and_its_lines() -> None:
    make_sweep()

    async def visit(user) -> None:
        from nicegui import ui

        await user.open("/compare")
        await user.should_see("3 runs, learning_rate, done", retries=50)
        await user.open("/compare?sweep=s&over=tokens")
        await user.should_see("Every other run is worse beyond the noise", retries=100)
        html = {element.content for element in user.find(ui.html).elements}
        (table,) = (content for content in html if content.startswith("<table>"))
        rows = re.findall(r'<tr(?: class="(\w*)")?>(.*?)</tr>', table)[1:]
        cells = [re.findall(r"<td>(.*?)</td>", row) for _, row in rows]
        assert [kind for kind, _ in rows] == ["best", "", ""]
        assert [row[0] for row in cells] == ["1", "2", "3"]
        assert [row[4] for row in cells] == ["1e-2", "1e-3", "1e-4"]
        stored = read_sweep(Path("runs/s")).runs
        assert [row[1] for row in cells] == [f"{run.metric:.4f}" for run in stored]
        low, high = stored[0].interval
        assert cells[0][2] == f"{low:.4f} to {high:.4f}"
        assert 'href="/run/s/rate-1e-2"' in cells[0][5]
        (picture,) = (content for content in html if 'class="parallel"' in content)
        assert picture.count("<a ") == 3
        # The best is drawn above the others, from the top of the learning rates to that of the figures.
        *_, best = re.findall(
            r'aria-label="([^"]*)"><polyline class="hit" points="([^"]*)"', picture
        )
        assert best == (
            f"learning_rate 1e-2: eval.loss {stored[0].metric:.4f}",
            "0.00,0.00 100.00,0.00",
        )
        await user.should_see("nats per token", retries=50)
        await user.open("/run/s/rate-1e-2")
        await user.should_see("rate-1e-2")

    with_user(visit)


def test_a_sweep_under_way_shows_what_is_judged_and_how_it_goes_on() -> None:
    make_sweep(judged=1)

    async def visit(user) -> None:
        from nicegui import ui

        await user.open("/compare?sweep=s")
        await user.should_see("One run alone has been trained to its end", retries=100)
        await user.should_see("bloomery sweep tiny")
        html = [element.content for element in user.find(ui.html).elements]
        assert sum("not judged yet" in content for content in html) == 1
        assert not any('class="parallel"' in content for content in html)

        # One fails before it has a folder, another while it trains: both say why, and one of them has a page.
        folder = SweepFolder(Path("runs/s").absolute())
        shutil.rmtree(folder.path / "rate-1e-3")
        folder.write_failure("rate-1e-3", "does not fit")
        folder.write_failure("rate-1e-2", "<b>out of memory")

        def ranking() -> str:
            return next(e.content for e in user.find(ui.html).elements if "<table" in e.content)

        await until(lambda: "failed: does not fit" in ranking())
        assert "failed: &lt;b&gt;out of memory" in ranking()
        assert "not judged yet" not in ranking()
        assert ranking().count(">open</a>") == 2 and "rate-1e-3" not in ranking()
        make_sweep("t", judged=0)
        (Path("runs/t/sweep.json")).write_text("{")
        await user.open("/compare?sweep=t")
        await user.should_see("this file does not describe a sweep", retries=50)
        await user.open("/compare?sweep=../runs/s")
        await user.should_see("no sweep")

    with_user(visit)


def test_a_run_of_a_sweep_is_compared_with_others_and_a_part_of_a_path_is_no_run() -> None:
    from bloomery.core.errors import UserError
    from bloomery.studio.compare_page import address_of_comparison, names_in
    from bloomery.studio.watching import Watching

    make_sweep()
    make_run("one")
    address = address_of_comparison(["one", "s/rate-1e-4", "a b"])
    assert address == "/compare?runs=one%2Fs%2F%2Frate-1e-4%2Fa%20b"
    assert names_in("one/s//rate-1e-4/a b/one") == ["one", "s/rate-1e-4", "a b"]
    watching = Watching()
    assert watching.run("s/rate-1e-4").name == "s/rate-1e-4"
    make_run("one/inner")  # below a run, not in a sweep
    for name in ("one/inner", "s/../one", "s//rate-1e-4", "../runs/one", "s/rate-1e-4/", "/", "s"):
        with pytest.raises(UserError, match="no run"):
            watching.run(name)


def test_a_score_is_marked_as_best_only_where_the_noise_supports_it() -> None:
    from bloomery.studio.compare_page import supported_best

    def score(value: float, low: float, high: float, **changes: object) -> TaskDone:
        fields = {"step": 1, "task": "t", "kind": "k", "metric": "acc", "items": 9} | changes
        return TaskDone(value=value, low=low, high=high, **fields)

    apart = {"a": score(0.5, 0.4, 0.6), "b": score(0.8, 0.7, 0.9), "c": None}
    assert supported_best(apart) == "b"
    assert supported_best(apart | {"c": score(0.7, 0.6, 0.8)}) is None
    bits = {name: score(value, value - 0.1, value + 0.1, metric="bits_per_byte") for name, value in
            (("a", 2.0), ("b", 1.0))}  # fmt: skip
    assert supported_best(bits) == "b"
    assert supported_best({"a": score(0.5, 0.4, 0.6)}) is None
    # The paired test decides where there is one: intervals that overlap may still differ, and the other way around.
    tested = {
        "against": "runs/a",
        "difference": 0.1,
        "difference_low": 0.05,
        "difference_high": 0.15,
    }
    pair = {"a": score(0.5, 0.4, 0.6), "b": score(0.6, 0.5, 0.7, **tested)}
    assert supported_best(pair) == "b"
    assert (
        supported_best(pair | {"b": score(0.6, 0.5, 0.7, **tested | {"difference_low": -0.1})})
        is None
    )
    worse = tested | {"difference": -0.1, "difference_low": -0.15, "difference_high": -0.05}
    assert supported_best({"a": score(0.7, 0.6, 0.8), "b": score(0.6, 0.5, 0.7, **worse)}) == "a"


def test_a_sweep_that_was_stopped_continues_at_a_button() -> None:
    make_sweep(judged=2)
    commands = RecordedCommands()

    async def visit(user) -> None:
        await user.open("/compare?sweep=s")
        await user.should_see("Continue the sweep", retries=50)
        user.find("Continue the sweep").click()
        await until(lambda: commands.started)

    with_user(visit, commands)
    assert commands.started == [("sweep", "tiny")]


def test_a_sweep_that_has_just_begun_shows_what_its_command_prints() -> None:
    class Begun(RecordedCommands):
        def of(self, subject: str):
            return SimpleNamespace(
                line="bloomery sweep",
                code=None,
                printed_bytes=7,
                text=lambda: "folder ..",
                arguments=("sweep",),
            )

    async def visit(user) -> None:
        await user.open("/compare?sweep=later")
        await user.should_see("starting")
        await user.should_see("folder ..")

    with_user(visit, Begun())


def test_a_sweep_that_this_studio_began_is_stopped_at_a_button() -> None:
    make_sweep(judged=1)
    stopped = []

    class Running(RecordedCommands):
        def of(self, subject: str):
            return SimpleNamespace(
                line="bloomery sweep",
                code=None,
                printed_bytes=7,
                text=lambda: "run 2",
                arguments=("sweep",),
                stop=lambda: stopped.append(subject),
            )

    async def visit(user) -> None:
        await user.open("/compare?sweep=s")
        await user.should_see("Save and stop the sweep", retries=50)
        await user.should_not_see("Continue the sweep")
        user.find("Save and stop the sweep").click()
        await until(lambda: stopped)

    with_user(visit, Running())
    assert stopped == ["s"]


def test_a_sweep_of_another_studio_or_a_terminal_is_stopped_by_a_command() -> None:
    from bloomery.core.run_folder import RunFolder
    from bloomery.core.run_lock import hold_run_lock

    folder = make_sweep(judged=1)
    commands = RecordedCommands()

    async def visit(user) -> None:
        await user.open("/compare?sweep=s")
        await user.should_see("Save and stop the sweep", retries=50)
        user.find("Save and stop the sweep").click()
        await until(lambda: commands.started)

    with hold_run_lock(RunFolder(folder)):
        with_user(visit, commands)
    assert commands.started == [("stop", "runs/s")]


def test_a_command_stops_as_at_ctrl_c(tmp_path: Path) -> None:
    import subprocess
    import sys
    import tempfile

    from bloomery.studio.commands import Command

    code = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(75));"
    code += "print('up', flush=True); signal.pause()"
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        command = Command(("sweep",), "s", process, output)
        command.stop()
        assert process.wait(60) == 75
        command.stop()  # of one that has ended

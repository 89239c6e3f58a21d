"""The page of a run: why it ended, completions, and charts, in NiceGUI's simulated browser."""

import json
import subprocess
import sys
import time

import pytest
from studio_for_tests import make_run, texts_of, titles_of_charts, until, with_user

from bloomery.core.run_folder import RunFolder
from bloomery.core.run_lock import hold_run_lock
from bloomery.monitor.events import EvalDone, RunEnded, RunStarted, Warned
from bloomery.studio.commands import Command, Commands
from bloomery.studio.watching import Watching
from bloomery.view.planned_figures import PlannedFigures
from runs_for_tests import made_up_run, step_done

pytest.importorskip("nicegui", reason="the extra `studio` is not installed")

pytestmark = pytest.mark.usefixtures("empty_folder")


def charts_by_title(user) -> dict[str, dict]:
    """The options of each chart by the words before it."""
    from nicegui import ui

    return {
        chart.props["aria-label"].removesuffix(" over step"): chart.options
        for chart in user.find(ui.echart).elements
    }


def opened(name: str):
    run = Watching().run(name)
    run.update()
    return run


def logged(seconds: float, text: str) -> str:
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(seconds))}  {text}\n"


def test_a_failed_run_says_what_failed_where_and_what_to_do() -> None:
    cause = Warned(
        step=30, reason="the steps wait for data (40%): set data.prefetch=16", cause="data"
    )
    end = RunEnded(
        step=40,
        status="failed",
        error="training failed after step 40: <b>out of memory</b>",
        where="traceback in log.txt",
        fix="set train.micro_batch_size=1",
    )
    folder = make_run("demo", events=[*list(made_up_run())[:-1], cause], end=end)
    (folder / "stacks").mkdir()
    (folder / "stacks" / "rank-1.txt").write_text("Thread 1\n  File worker.py", encoding="utf-8")
    (folder / "log.txt").write_text(logged(time.time(), "the last line"), encoding="utf-8")

    async def visit(user) -> None:
        await user.open("/run/demo")
        await user.should_see("Post-mortem", retries=50)
        texts = texts_of(user)
        assert "training failed after step 40: <b>out of memory</b>" in texts
        assert "where: traceback in log.txt" in texts
        assert "fix: set train.micro_batch_size=1" in texts
        assert "the steps wait for data (40%): set data.prefetch=16" in texts
        assert "Thread 1\n  File worker.py" in texts
        assert any(text.startswith("step 40  loss") for text in texts)
        assert any(text.endswith("the last line") for text in texts)

    with_user(visit)


def test_a_killed_run_shows_the_known_problem_that_its_last_process_logged() -> None:
    start = time.time() - 100
    started = RunStarted(
        schema=2, version="1", parameters=1, steps=9, attention="sdpa", device="cpu", time=start
    )
    folder = make_run("demo", events=[started, step_done(1, time=start + 1)])
    message = "OSError: [Errno 28] No space left on device"
    (folder / "log.txt").write_text(logged(start - 50, message), encoding="utf-8")

    from bloomery.studio.post_mortem import post_mortem_of

    before = post_mortem_of(opened("demo"))
    assert before.problem.startswith("killed at step 1, resumes from its last checkpoint: ")
    assert before.findings == ()
    assert before.fix == "bloomery resume demo"
    with (folder / "log.txt").open("a", encoding="utf-8") as log:
        log.write(logged(start + 2, message))
    (finding,) = post_mortem_of(opened("demo")).findings
    assert finding.evidence.endswith(message)
    assert finding.fix


def test_a_run_before_its_first_step_has_no_chart_and_says_that_nothing_happened() -> None:
    make_run("demo", events=[])

    async def visit(user) -> None:
        await user.open("/run/demo")
        await user.should_see("nothing but training so far")

    with_user(visit)
    from bloomery.studio.run_charts import charts_of

    run = opened("demo")
    run.reader._planned = PlannedFigures(flops_per_token=1e9, peak_flops=1e13)
    run.update()
    assert "MFU" in run.curves.scaled
    assert list(charts_of(run)) == []


def test_a_run_that_is_done_has_no_post_mortem() -> None:
    make_run("demo")

    async def visit(user) -> None:
        await user.open("/run/demo")
        await user.should_see("Events")
        await user.should_not_see("Post-mortem")

    with_user(visit)


def test_a_run_with_rewards_has_their_curves_and_completions() -> None:
    started = RunStarted(
        schema=2,
        version="1",
        parameters=1,
        steps=3,
        attention="sdpa",
        device="cpu",
        loss_unit="completion",
    )
    metrics = {
        "reward": 0.5,
        "rewards/length/mean": 0.25,
        "rewards/format/mean": 0.75,
        "completions/mean_length": 12.0,
        "kl": 0.01,
    }
    held_out = EvalDone(
        step=2,
        loss=-0.6,
        perplexity=None,
        bits_per_byte=None,
        tokens=9,
        seconds=1.0,
        metrics={"reward": 0.6},
    )
    steps = [step_done(step, metrics=metrics) for step in range(1, 4)]
    folder = make_run("demo", events=[started, *steps, held_out])
    (folder / "completions").mkdir()
    rows = [
        {
            "prompt": [{"role": "user", "content": "Say <i>hi</i>"}],
            "completion": f"<script>alert({number})</script>",
            "reward": float(number),
            "rewards": {"length": float(number)},
            "advantage": number - 1.0,
        }
        for number in range(3)
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "completions" / "step-00000003.jsonl").write_text(lines, encoding="utf-8")

    async def visit(user) -> None:

        await user.open("/run/demo")
        await user.should_see("mean over completions", retries=50)
        assert titles_of_charts(user)[0] == "Reward, mean over completions"
        charts = charts_by_title(user)
        assert {"Reward", "Loss", "Rewards, without their weights", "Length of completions"} <= {
            *charts
        }
        series = {line["name"]: line["data"].tolist() for line in charts["Reward"]["series"]}
        steady = [[step, 0.5] for step in (1, 2, 3)]
        assert series == {
            "training": steady,
            "training, smoothed": steady,
            "validation": [[2, 0.6]],
        }
        both = [line["name"] for line in charts["Rewards, without their weights"]["series"]]
        assert both == ["length", "format"]
        losses = [line["name"] for line in charts["Loss"]["series"]]
        assert losses == ["loss", "loss, smoothed"]  # its evaluations are minus the reward

        await user.should_see("step 3, 3 completions: the best, a middle and the worst", retries=50)
        texts = texts_of(user)
        assert {"2.000", "reward, advantage +1.000", "user: Say <i>hi</i>"} <= {*texts}
        assert "<script>alert(2)</script>" in texts

    with_user(visit)


def test_a_killed_run_has_no_progress_any_more() -> None:
    """A kill writes no event: the page is drawn again for the status alone."""
    started = RunStarted(
        schema=2, version="1", parameters=1, steps=40, attention="sdpa", device="cpu"
    )
    folder = make_run("demo", events=[started, *(step_done(step) for step in range(1, 11))])

    async def visit(user) -> None:
        from nicegui import ui

        def has_progress() -> bool:
            bars = [e for e in user.find(ui.element).elements if "progress" in e.classes]
            return any(bar.visible for bar in bars)

        with hold_run_lock(RunFolder(folder)):
            await user.open("/run/demo")
            await user.should_see("running", retries=50)
            assert has_progress()
        await user.should_see("Post-mortem", retries=50)
        await until(lambda: not has_progress())

    with_user(visit)


def test_a_preference_run_has_both_rewards_in_one_chart_and_evaluations_of_its_metrics() -> None:
    metrics = {"chosen_reward": 0.2, "rejected_reward": -0.1, "accuracy": 0.75}
    evaluation = EvalDone(
        step=2,
        loss=0.6,
        perplexity=None,
        bits_per_byte=None,
        tokens=9,
        seconds=1.0,
        metrics={"accuracy": 0.8},
    )
    make_run("demo", events=[*(step_done(step, metrics=metrics) for step in (1, 2)), evaluation])

    async def visit(user) -> None:
        await user.open("/run/demo")
        await user.should_see("mean per response", retries=50)
        charts = charts_by_title(user)
        assert [line["name"] for line in charts["Rewards"]["series"]] == ["chosen", "rejected"]
        accuracy = {line["name"]: line["data"].tolist() for line in charts["Accuracy"]["series"]}
        steady = [[1, 0.75], [2, 0.75]]
        assert accuracy == {
            "training": steady,
            "training, smoothed": steady,
            "validation": [[2, 0.8]],
        }

    with_user(visit)


def test_checkpoints_and_warnings_are_marks_on_every_curve_and_in_the_list() -> None:
    make_run("demo")

    async def visit(user) -> None:
        await user.open("/run/demo")
        await user.should_see("Gradient norm", retries=50)
        for title in ("Loss", "Gradient norm"):
            lines = charts_by_title(user)[title]["series"][0]["markLine"]["data"]
            marks = [(line["xAxis"], line["name"]) for line in lines]
            assert (40, "checkpoint (best)") in marks
            assert (7, "the loss was not finite; its update was skipped") in marks
        assert "checkpoint (best)" in texts_of(user)

    with_user(visit)


def test_mfu_is_the_speed_as_a_share_of_the_peak() -> None:
    make_run("demo", events=[step_done(1, tokens_per_second=5000.0)])
    from bloomery.studio.run_charts import charts_of

    run = opened("demo")
    assert "MFU" not in [chart.title for chart in charts_of(run)]  # the peak is not known
    run.reader._planned = PlannedFigures(flops_per_token=1e9, peak_flops=1e13)
    run.update()
    assert "MFU" in [chart.title for chart in charts_of(run)]
    assert run.curves.points("MFU").tolist() == [[1, 50.0]]
    assert run.curves.points_over("tokens", "MFU").tolist() == [[8192.0, 50.0]]


def test_a_metric_that_is_named_as_a_chart_changes_no_other() -> None:
    make_run("demo", events=[step_done(1, metrics={"Memory": 7.0, "loss": 9.0})])
    run = opened("demo")
    assert run.curves.points("memory").tolist() == [[1, 0.58]]
    assert run.curves.points("loss").tolist() == [[1, 2.0]]
    assert run.curves.points("Memory").tolist() == [[1, 7.0]]


SPEAKS = """
import pathlib, sys, time
print("half of it", flush=True)
while not pathlib.Path("go").exists():
    time.sleep(0.01)
print("the rest")
sys.exit(3)
"""


@pytest.mark.parametrize(("address", "subject"), [("/run/one", "one"), ("/models", "exports")])
def test_what_a_command_prints_is_shown_while_it_runs(address, subject, tmp_path) -> None:
    make_run("one")
    with (tmp_path / "output").open("wb+") as output:
        process = subprocess.Popen([sys.executable, "-c", SPEAKS], stdout=output)
        commands = Commands([Command(("eval", "runs/one"), subject, process, output)])

        async def visit(user) -> None:
            from nicegui import ui

            await user.open(address)
            await user.should_see("bloomery eval runs/one: running", retries=600)
            (fold,) = [each for each in user.find(ui.expansion).elements if "eval" in each.text]
            fold.value = True
            await user.should_see("half of it", retries=600)
            (tmp_path / "go").touch()
            await user.should_see("bloomery eval runs/one: exit code 3", retries=600)
            await user.should_see("the rest")
            assert fold.value and not fold.is_deleted

        try:
            with_user(visit, commands)
        finally:
            process.kill()
            process.wait()


def test_a_run_that_failed_without_a_word_or_a_log_says_no_more_than_that() -> None:
    from bloomery.studio.post_mortem import post_mortem_of
    from bloomery.studio.watching import Watching, end_of

    folder = make_run("bare", end=RunEnded(step=40, status="failed"))
    opened = Watching().run("bare")
    opened.update()
    told = post_mortem_of(opened)
    assert (told.problem, told.log) == ("failed, and gave no reason", "")
    assert end_of(folder / "log.txt") == "The folder of the run has no log.txt."

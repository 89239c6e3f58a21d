"""A sweep that was killed ends with the table of an undisturbed one; its runs are those of `bloomery train`."""

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from runs_of_bloomery import Bloomery, assert_bitwise_equal, losses, write_workshop

from bloomery.monitor.events import EvalDone, RunEnded, StepDone, read_events
from bloomery.sweep.table import read_sweep

SWEEP = ("sweep", "tiny.yaml", "optimizer.learning_rate=1e-2,1e-3", "--json", "--run-dir", "runs/s")
RUNS = ("learning_rate-1e-2", "learning_rate-1e-3")


def table(text: str) -> dict[str, object]:
    """Without the folder, which differs between two workshops."""
    document = json.loads(text)
    runs = [run | {"run": Path(run["run"]).name} for run in document["runs"]]
    return document | {"runs": runs, "folder": "", "winner": Path(document["winner"] or "").name}


@pytest.fixture(scope="module")
def calm_sweep(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    """The folder and the table of a sweep that nothing disturbed."""
    folder = tmp_path_factory.mktemp("calm-sweep")
    write_workshop(folder)
    done = Bloomery(folder).run(*SWEEP)
    assert done.returncode == 0, done.stderr
    return folder / "runs/s", table(done.stdout)


def test_a_killed_sweep_ends_with_the_table_of_an_undisturbed_one(
    bloomery: Bloomery, calm_sweep: tuple[Path, dict[str, object]]
) -> None:
    """Killed in the first run, before its score is written, and in the second run."""
    calm, expected = calm_sweep
    folder = bloomery.folder / "runs/s"
    first, second = (folder / name for name in RUNS)
    moments: list[Callable[[], bool]] = [
        lambda: took_step(first, 5),
        lambda: ended(first),
        lambda: took_step(second, 9),
    ]
    for moment in moments:
        assert bloomery.run_until(moment, signal.SIGKILL, *SWEEP) == -signal.SIGKILL
    done = bloomery.run(*SWEEP)
    assert done.returncode == 0, done.stderr
    assert table(done.stdout) == expected
    for name in RUNS:
        assert_bitwise_equal(folder / name, calm / name)


def test_a_finished_sweep_trains_nothing_and_a_value_more_trains_one_run(
    calm_sweep: tuple[Path, dict[str, object]],
) -> None:
    calm, expected = calm_sweep
    bloomery = Bloomery(calm.parent.parent)
    stored = read_sweep(calm).document() | {"failed": [], "left_out": []}
    assert table(json.dumps(stored)) == expected
    logs = [(calm / name / "events.jsonl").read_bytes() for name in RUNS]
    again = bloomery.run(*SWEEP)
    assert again.returncode == 0 and table(again.stdout) == expected
    assert [(calm / name / "events.jsonl").read_bytes() for name in RUNS] == logs

    more = bloomery.run(*(word.replace("1e-3", "1e-3,3e-2") for word in SWEEP))
    assert more.returncode == 0, more.stderr
    assert len(table(more.stdout)["runs"]) == 3
    assert [(calm / name / "events.jsonl").read_bytes() for name in RUNS] == logs


def test_the_figures_are_those_of_eval_and_the_runs_those_of_train(
    calm_sweep: tuple[Path, dict[str, object]],
) -> None:
    """`eval --against` prints bits per byte: nats of all documents by their bytes, of the same documents."""
    calm, expected = calm_sweep
    bloomery = Bloomery(calm.parent.parent)
    first, second = (f"runs/s/{name}" for name in RUNS)
    compared = json.loads(bloomery.run("eval", first, "--against", second, "--json").stdout)
    result = compared["results"][0]
    by_name = {run["run"]: run["metric"] for run in expected["runs"]}
    ratio = by_name[RUNS[0]] / by_name[RUNS[1]]
    assert result["model"]["value"] / result["against"]["value"] == pytest.approx(ratio, rel=1e-6)
    assert expected["runs"][1]["p_value"] == result["difference"]["p_value"]

    alone = bloomery.run(
        "train", "tiny.yaml", "optimizer.learning_rate=1e-2", "--run-dir", "runs/one"
    )
    assert alone.returncode == 0, alone.stderr
    assert_bitwise_equal(calm / RUNS[0], bloomery.run_dir)
    assert len(list((bloomery.folder / "prepared").iterdir())) == 1  # one dataset for all


@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=pytest.mark.soak)])
def test_halving_stops_runs_at_their_rung_and_the_one_that_is_left_is_the_run_of_a_grid(
    bloomery: Bloomery, calm_sweep: tuple[Path, dict[str, object]], kills: int
) -> None:
    """Killed in a rung, between two of them and in the last one. Of 16 steps a third is 5."""
    rates = "optimizer.learning_rate=1e-3,1e-2,1e-4"
    words = ("sweep", "tiny.yaml", rates, "--search", "halving", "--json", "--run-dir", "runs/s")
    folder = bloomery.folder / "runs/s"
    left = folder / RUNS[0]
    moments: list[Callable[[], bool]] = [
        lambda: took_step(left, 2),
        lambda: took_step(folder / "learning_rate-1e-4", 1),
        lambda: took_step(left, 9),
    ]
    for moment in moments[-kills:]:
        assert bloomery.run_until(moment, signal.SIGKILL, *words) == -signal.SIGKILL
    done = bloomery.run(*words)
    assert done.returncode == 0, done.stderr
    runs = table(done.stdout)["runs"]
    assert [run["run"] for run in runs] == [RUNS[0], RUNS[1], "learning_rate-1e-4"]
    assert [run.get("stopped_at") for run in runs] == [None, 5, 5]
    assert [len(losses(folder / run["run"])) for run in runs] == [16, 5, 5]
    calm, expected = calm_sweep
    assert runs[0]["metric"] == expected["runs"][0]["metric"]
    assert_bitwise_equal(left, calm / RUNS[0])


def test_two_at_a_time_have_the_table_of_one_after_another_after_a_kill(
    bloomery: Bloomery, calm_sweep: tuple[Path, dict[str, object]]
) -> None:
    """On the CPU as two devices, which share its cores. The second run waits for the dataset that the first prepares.

    Killed while the second one trains; the first one trains, too, or is scored.
    """
    calm, expected = calm_sweep
    words = (*SWEEP, "-d", "cpu,cpu", "--per-device")
    second = bloomery.folder / "runs/s" / RUNS[1]
    killed = bloomery.run_until(lambda: took_step(second, 5), signal.SIGKILL, *words)
    assert killed == -signal.SIGKILL and not ended(second)
    done = bloomery.run(*words)
    assert done.returncode == 0, done.stderr
    assert table(done.stdout) == expected
    for name in RUNS:
        assert_bitwise_equal(bloomery.folder / "runs/s" / name, calm / name)
    assert len(list((bloomery.folder / "prepared").iterdir())) == 1


def test_ctrl_c_saves_what_trains_at_once_and_the_same_command_continues(
    bloomery: Bloomery, calm_sweep: tuple[Path, dict[str, object]]
) -> None:
    _, expected = calm_sweep
    words = (*SWEEP, "-d", "cpu,cpu", "--per-device")
    second = bloomery.folder / "runs/s" / RUNS[1]
    assert bloomery.run_until(lambda: took_step(second, 5), signal.SIGINT, *words) == 75
    (end,) = [event for event in events_of(second) if isinstance(event, RunEnded)]
    assert end.status == "stopped"
    done = bloomery.run(*words)
    assert done.returncode == 0 and table(done.stdout) == expected


def test_a_task_ranks_by_its_right_items_as_eval_counts_them(
    calm_sweep: tuple[Path, dict[str, object]],
) -> None:
    calm, _ = calm_sweep
    bloomery = Bloomery(calm.parent.parent)
    items = [{"question": word, "choices": [" a", " b"], "answer": 0} for word in "abcdefgh"]
    task = bloomery.folder / "task.jsonl"
    task.write_text("".join(json.dumps(item) + "\n" for item in items))
    done = bloomery.run(*SWEEP, "--task", "task.jsonl")
    assert done.returncode == 0, done.stderr
    runs = table(done.stdout)["runs"]
    assert runs[0]["metric"] >= runs[1]["metric"]
    told = bloomery.run("eval", f"runs/s/{runs[0]['run']}", "--task", "task.jsonl", "--json")
    figures = json.loads(told.stdout)["results"][0]["model"]
    assert runs[0]["metric"] == figures["value"]
    assert runs[0]["interval"] == [figures["low"], figures["high"]]


@pytest.mark.parametrize(
    "options",
    [("--metric", "task"), ("--metric", "reward"), ("--search", "halving", "--budget", "1h")],
)
def test_what_cannot_be_ranked_is_refused_before_anything_trains(
    calm_sweep: tuple[Path, dict[str, object]], options: tuple[str, ...]
) -> None:
    calm, _ = calm_sweep
    told = Bloomery(calm.parent.parent).here(*SWEEP[:-1], "runs/other", *options)
    assert told.returncode == 2 and "fix:" in told.stderr
    assert not (calm.parent / "other").exists()


def took_step(run: Path, step: int) -> bool:
    return any(isinstance(e, StepDone) and e.step >= step for e in events_of(run))


def ended(run: Path) -> bool:
    return any(isinstance(event, RunEnded) for event in events_of(run))


def events_of(run: Path) -> list[object]:
    path = run / "events.jsonl"
    return list(read_events(path)) if path.exists() else []


@pytest.mark.parametrize(
    "edits",
    [
        (),
        ("objective={kind: kto}",),
        ("objective={kind: reward}",),
        ("adapter={kind: lora, rank: 4}",),
        pytest.param(("objective={kind: orpo}",), marks=pytest.mark.soak),
    ],
    ids=["dpo", "kto", "reward", "dpo-lora", "orpo"],
)
def test_losses_per_pair_have_intervals_and_the_figure_of_the_runs_own_evaluation(
    tmp_path: Path, edits: tuple[str, ...]
) -> None:
    write_workshop(tmp_path, "dpo")
    bloomery = Bloomery(tmp_path)
    words = ("train.max_steps=4", "eval.every=4 steps", "eval.tokens=100000")
    done = bloomery.run(*SWEEP[:2], "optimizer.learning_rate=1e-2,1e-3", *SWEEP[3:], *edits, *words)
    assert done.returncode == 0, done.stderr
    assert_figures_of_own_evaluations(tmp_path, table(done.stdout)["runs"])


@pytest.mark.soak
def test_conversations_with_pictures_have_intervals_and_the_figure_of_the_runs_own_evaluation(
    tmp_path: Path,
) -> None:
    words = ("train.max_steps=3", "data.validation=20%", "eval.every=3 steps", "eval.tokens=100000")
    recipe = ("sweep", "qwen3.5-2b-vision-lora-tiny", "optimizer.learning_rate=1e-2,1e-3")
    done = Bloomery(tmp_path).run(*recipe, *words, "--json", "--run-dir", "runs/s")
    assert done.returncode == 0, done.stderr
    assert_figures_of_own_evaluations(tmp_path, table(done.stdout)["runs"])


def assert_figures_of_own_evaluations(folder: Path, runs: list[dict[str, object]]) -> None:
    assert len(runs) == 2
    for run in runs:
        events = list(read_events(folder / "runs/s" / run["run"] / "events.jsonl"))
        evaluated = [event.loss for event in events if isinstance(event, EvalDone)]
        assert run["metric"] == pytest.approx(min(evaluated), rel=1e-5)
        low, high = run["interval"]
        assert low <= run["metric"] <= high and low < high

"""`bloomery train --for TIME`: a run of a fixed time, and its one metric."""

import json

import pytest
from runs_of_bloomery import Bloomery, losses


def test_the_metric_is_that_of_eval_and_the_length_that_of_the_time(bloomery: Bloomery) -> None:
    """A hundredth of a second is over before the first step: the run takes the one that every run takes, not its 16."""
    told = bloomery.run("train", "tiny.yaml", "--for", "0.01s", "--json", "--run-dir", "runs/one")
    assert told.returncode == 0, told.stderr
    document = json.loads(told.stdout)
    assert document["metric"] == "eval.loss" and document["lower_is_better"]
    assert document["steps"] == len(losses(bloomery.run_dir)) == 1
    assert document["run"] == str(bloomery.run_dir) and document["seconds"] > 0
    low, high = document["interval"]
    assert low < document["value"] < high
    # Of whole documents `eval --against` prints bits per byte; bytes per token are the same in packed sequences.
    packed = json.loads(bloomery.run("eval", "one", "--json").stdout)
    compared = json.loads(bloomery.run("eval", "one", "--against", "one", "--json").stdout)
    bits_per_byte = compared["results"][0]["model"]["value"]
    expected = bits_per_byte * packed["loss"] / packed["bits_per_byte"]
    assert document["value"] == pytest.approx(expected, rel=1e-6)


def test_json_of_a_run_of_its_own_length_and_text_of_a_fixed_time(bloomery: Bloomery) -> None:
    words = ("train", "tiny.yaml", "train.max_steps=2", "--run-dir")
    told = bloomery.run(*words, "runs/two", "--json")
    assert json.loads(told.stdout)["steps"] == 2
    shown = bloomery.run("train", "tiny.yaml", "--for", "1s", "--run-dir", "runs/one")
    assert shown.returncode == 0 and "metric     eval.loss" in shown.stdout


@pytest.mark.parametrize(
    "words",
    [
        ("--for", "soon"),
        ("--for", "5 steps"),
        ("--for", "5m", "train.max_steps=7"),
        ("--for", "5m", "--dry-run"),
        ("--for", "5m", "data.validation=0"),
        ("--json", "--smoke-test"),
    ],
)
def test_what_has_no_fixed_time_or_no_metric_is_refused_before_it_trains(
    bloomery: Bloomery, words: tuple[str, ...]
) -> None:
    told = bloomery.here("train", "tiny.yaml", *words)
    assert told.returncode == 2 and "fix:" in told.stderr and told.stdout == ""
    assert not (bloomery.folder / "runs").exists()

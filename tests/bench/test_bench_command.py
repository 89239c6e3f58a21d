"""`bloomery bench` as people type it."""

import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

import preloaded
from bloomery.bench import measuring
from bloomery.cli import cli
from bloomery.cli.bench import one_of_several
from bloomery.core.errors import UserError
from changed_machines import machine

PATIENCE_SECONDS = 120.0  # the machine may be busy

TINY = """
model: {family: llama, hidden_size: 64, num_layers: 2, num_heads: 4, max_positions: 128, vocab_size: 512}
tokenizer: {train: {vocab_size: 512}}
data: {builtin: stdlib-code, sequence_length: 128}
train: {max_steps: 100, tokens_per_step: 512, compile: false}
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(measuring, "DISTURBED", 2.0)  # tests run on busy machines
    monkeypatch.setattr(measuring, "SECONDS", 0.5)  # what is measured is that every setting is
    monkeypatch.setattr(measuring, "SEARCH_SECONDS", 0.2)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    Path("tiny.yaml").write_text(TINY)
    return tmp_path


def bench(*words: str):
    return CliRunner().invoke(
        cli, ["bench", "tiny.yaml", *words], catch_exceptions=False, standalone_mode=False
    )


@pytest.mark.soak
def test_the_whole_table_the_card_and_what_the_plan_makes_of_it(here):
    result = bench("--export", "card.json", "--author", "Ada L.")
    assert result.return_value == 0
    text = result.stdout
    for words in (
        "largest micro-batch",
        "micro-batch 4, 512 tokens",
        "as planned",
        "checkpointing=full",
        "verdict",
        "tokens/s",
    ):
        assert words in text
    assert max(len(line) for line in text.splitlines()) <= 100
    card = json.loads(Path("card.json").read_text())
    assert card["contributor"] == "Ada L." and card["model"]["hidden_size"] == 64
    assert card["points"][0]["micro_batch_size"] == 4
    assert {point["micro_batch_size"] for point in card["points"]} == {1, 2, 4}
    for secret in (platform.node(), str(Path.home()), str(here), "tiny"):
        assert not secret or secret not in Path("card.json").read_text()
    assert (
        json.loads((here / "cache/bloomery/measured.json").read_text())[0]["contributor"]
        == "this machine"
    )
    assert sorted(path.name for path in Path().iterdir()) == ["card.json", "tiny.yaml"]


def test_json_of_a_sweep(here):
    result = bench(
        "--sweep",
        "train.micro_batch_size=2,3",
        "--json",
        "--export",
        "card.json",
        "--author",
        "Ada L.",
    )
    told = json.loads(result.stdout)
    assert set(told) == {"largest_micro_batch", "trials", "points", "verdict"}
    assert told["largest_micro_batch"] is None and told["trials"] == []
    planned, two, three = told["points"]
    assert planned["overrides"] == [] and planned["outcome"] == "ok"
    assert two["overrides"] == ["train.micro_batch_size=2"] and two["micro_batch_size"] == 2
    assert two["tokens_per_second"] == pytest.approx(512 / two["step_seconds"])
    assert set(two["plan"]["tokens_per_second"] or {"value", "low", "high", "from"}) == {
        "value",
        "low",
        "high",
        "from",
    }
    assert three["outcome"] == "refused" and three["plan"] is None
    assert set(told["verdict"]) == {"speed", "memory"}
    assert "as planned" in result.stderr
    card = json.loads(Path("card.json").read_text())
    assert card["contributor"] == "Ada L." and card["model"]["hidden_size"] == 64
    assert {point["micro_batch_size"] for point in card["points"]} == {
        2,
        planned["micro_batch_size"],
    }
    assert (
        json.loads((here / "cache/bloomery/measured.json").read_text())[0]["contributor"]
        == "this machine"
    )


def test_a_limit_leaves_out_what_there_is_no_time_for(here):
    result = bench("--limit", "0.1s", "--sweep", "train.micro_batch_size=1,2")
    assert result.return_value == 0
    lines = result.stdout.splitlines()
    assert any(line.startswith("as planned") for line in lines)
    assert (
        "left out  train.micro_batch_size=1; train.micro_batch_size=2: time limit reached" in lines
    )


@pytest.mark.parametrize("limit", ["10", "3 epochs", "soon", "0s", "-1m"])
def test_a_limit_is_a_time(here, limit):
    with pytest.raises(UserError, match=f"not a time: {limit!r}") as caught:
        bench(f"--limit={limit}")
    assert caught.value.where == "--limit" and "--limit 10m" in caught.value.fix


@pytest.mark.parametrize("contributor", ["", "<b>x</b>", "a" * 61])
def test_a_giver_is_a_name(here, contributor):
    with pytest.raises(UserError) as caught:
        bench("--author", contributor)
    assert caught.value.where == "--author"


def test_ctrl_c_leaves_nothing_behind(here):
    process = preloaded.Popen(
        [sys.executable, "-m", "bloomery", "bench", "tiny.yaml"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    child = first_child(process.pid)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 130 and "interrupted" in told
    assert gone(child)
    assert [path.name for path in Path().iterdir()] == ["tiny.yaml"]


def test_a_child_does_not_outlive_a_killed_bench(here):
    process = preloaded.Popen(
        [sys.executable, "-m", "bloomery", "bench", "tiny.yaml"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    child = first_child(process.pid)
    process.kill()
    process.wait()
    assert gone(child)


def first_child(pid: int) -> int:
    until = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < until:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for each in found:
            if "bloomery.bench.child" in Path(f"/proc/{each}/cmdline").read_text():
                return int(each)
        time.sleep(0.02)
    raise AssertionError("no child was started")


def gone(pid: int, seconds: float = PATIENCE_SECONDS) -> bool:
    """A killed process of this size takes a moment to be taken down."""
    until = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.05)
    return not alive(pid)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (ProcessLookupError, FileNotFoundError):
        return False


@pytest.mark.parametrize(
    ("recipe", "gpus", "count"),
    [("demo", 1, 1), ("demo", 8, 8), ("llama3.1-8b-full-8gpu", 1, 8), ("qwen2.5-1.5b-lora", 1, 1)],
)
def test_a_recipe_of_several_devices_is_told_that_one_is_measured(recipe, gpus, count):
    computer = machine("mi300x-node", software__environment={})
    computer = computer.model_copy(update={"accelerators": computer.accelerators[:gpus]})
    lines = one_of_several(recipe, computer)
    assert [f"--gpus {count}" in line and "one is measured" in line for line in lines] == [True] * (
        count > 1
    )


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ({"grad_norm": 0.0}, "the gradient norm is 0"),
        ({"loss_after": 8.0}, "the loss of a micro-batch did not fall"),
        ({"loss_after": 9.5}, "the loss of a micro-batch did not fall"),
    ],
)
def test_bench_fails_where_nothing_is_learned_and_prints_both_losses(
    here, monkeypatch, fault, problem
):
    learning = {"steps": 5, "loss_before": 8.0, "loss_after": 6.0, "grad_norm": 1.0} | fault
    monkeypatch.setenv("LEARNING", json.dumps(learning))
    paths = f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}".strip(":")
    monkeypatch.setenv("PYTHONPATH", paths)
    monkeypatch.setattr(measuring, "CHILD", "measured_bench")
    result = bench("--sweep", "train.micro_batch_size=1")
    assert result.return_value == 1
    text = " ".join(result.stdout.split())
    assert f"could not be measured: failed, {problem}" in text
    assert f"loss 8.0000 -> {learning['loss_after']:.4f} in 5 steps" in text
    assert f"gradient norm {learning['grad_norm']:.3g}" in text

"""`bloomery demo rl` in small: base, rollouts, a kill within one, the comparison, the report."""

import html
import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

from click.testing import CliRunner

import preloaded
from bloomery.cli import cli, demo, demo_rl
from bloomery.monitor.events import Resumed, StepDone, read_events

BASE = "extends: demo-rl-base\ntrain: {max_steps: 4}\n"
SMALL = """
extends: demo-rl
train: {max_steps: 8, batch_size: 16, micro_batch_size: 8}
objective: {num_generations: 4}
checkpoint: {every: 3 steps}
eval: {every: 4 steps, tokens: 40}
"""


def test_the_demo_from_base_to_report(tmp_path, monkeypatch):
    """Trains in processes of its own, so it takes longer than others."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        demo, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": preloaded.Popen})
    )
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "rl.yaml").write_text(SMALL)
    monkeypatch.setattr(demo_rl, "BASE_RECIPE", "base.yaml")
    monkeypatch.setattr(demo_rl, "RECIPE", "rl.yaml")
    monkeypatch.setattr(demo_rl, "KILL_AT", 0.3)
    monkeypatch.setattr(demo_rl, "NUM_REPEATED", 2)
    printed = CliRunner().invoke(cli, ["demo", "rl", "--json", "--run-dir", "out"])
    assert printed.exit_code == 0, printed.output + str(printed.exception)
    result = json.loads(printed.stdout)

    # Steps 4 and 5 come after the checkpoint of step 3, before the kill and again after it.
    assert result["killed_at_step"] == 5
    assert (result["repeated_steps"], result["differing_steps"]) == (2, 0)
    events = list(read_events(Path("out/events.jsonl")))
    assert any(isinstance(event, Resumed) for event in events)
    steps = [event.step for event in events if isinstance(event, StepDone)]
    assert steps.count(4) == 2 and steps[-1] == 8

    assert 0 <= result["reward_before"] <= 1 and 0 <= result["reward_after"] <= 1
    lines = printed.stderr.splitlines()
    assert [line for line in lines if len(line) > 100] == []
    assert "completions and losses bitwise identical" in printed.stderr
    assert any("reward" in line and "val reward" in line for line in lines)
    samples = [line for line in lines if re.match(r" {11}\d+\+\d+= ", line)]
    assert len(samples) == demo_rl.NUM_SAMPLES
    page = html.unescape(Path(result["report"]).read_text())
    assert "Reward on held-out prompts" in page
    assert f"{result['reward_after']:.2f} share of right sums" in page


def test_a_repeated_step_with_other_completions_is_told(tmp_path):
    """The comparison is of all that a step gives, its completions included."""
    (tmp_path / "completions").mkdir()
    path = tmp_path / "completions" / "step-00000001.jsonl"
    step = StepDone(
        step=1,
        loss=0.1,
        learning_rate=1e-3,
        grad_norm=1.0,
        tokens=8,
        loss_tokens=8,
        tokens_per_second=1.0,
        sequences_per_second=1.0,
        step_seconds=1.0,
        data_wait_seconds=0.0,
        memory_gib=1.0,
    )
    results = []
    for text in ("25", "25", "17"):
        path.write_text(text)
        results.append(demo_rl.result_of(tmp_path, step))
    kill = demo.Kill(1, 0, {1: results[0]})
    kill.results_after[1] = results[1]
    assert kill.differing_steps == []
    kill.results_after[1] = results[2]
    assert kill.differing_steps == [1]
    assert demo._resume_text(kill, 2.0, "completions and losses").endswith(
        "completions and losses of 1 of 1 steps differ, the first at step 1"
    )

"""Commands as processes of their own find the simulated device, plan for it, train on it and use a model on it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import simulated
from runs_of_the_loop import prepared_corpus

from bloomery.monitor.events import EvalDone, StepChecked, StepDone, read_events
from bloomery.plan.store import read_plan

RECIPE = """
extends: demo
model: {hidden_size: 64, intermediate_size: 128, num_layers: 2, num_heads: 2, num_kv_heads: 1, head_dim: 32}
tokenizer: {train: {kind: bpe, vocab_size: 300}}
data: {path: text, glob: "*.py", sequence_length: 64, validation: 10%}
sample: {prompts: ["def "]}
train: {max_steps: 4, batch_size: 16, micro_batch_size: 4, precision: float32, attention: blockwise}
optimizer: {kind: adamw, learning_rate: 1e-3, warmup: 1 steps}
eval: {every: 2 steps}
checkpoint: {every: 2 steps}
"""
Bloomery = Callable[..., str]


@pytest.fixture(params=["amd", "nvidia"])
def bloomery(request: pytest.FixtureRequest, tmp_path: Path) -> Bloomery:
    """Runs a command in a folder with a recipe; its output."""
    prepared_corpus(tmp_path)
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    environment = os.environ | simulated.environment(request.param, 1, 4)

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "bloomery", *arguments],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.mark.soak  # seven processes, a minute
def test_a_model_is_trained_resumed_evaluated_and_used(bloomery: Bloomery, tmp_path: Path) -> None:
    bloomery("train", "tiny.yaml", "-d", "cuda", "--run-dir", "run")
    bloomery("resume", "run", "train.max_steps=6")
    events = list(read_events(tmp_path / "run/events.jsonl"))
    assert read_plan(tmp_path / "run/plan.json").train.device == "cuda"
    assert next(event.problem for event in events if isinstance(event, StepChecked)) == ""
    steps = [event for event in events if isinstance(event, StepDone)]
    assert [event.step for event in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[-1].loss < steps[0].loss

    figures = json.loads(bloomery("eval", "run", "--step", "last", "-d", "cuda", "--json"))
    logged = [event for event in events if isinstance(event, EvalDone)][-1]
    assert figures["loss"] == logged.loss
    words = ["--prompt", "def ", "--max-new-tokens", "8", "--temperature", "0"]
    on_device, on_cpu = (
        bloomery("generate", "run", *words, "-d", device) for device in ("cuda", "cpu")
    )
    assert on_device.strip() and on_device == on_cpu

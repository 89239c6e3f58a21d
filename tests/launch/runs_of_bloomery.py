"""A tiny run: a folder with text and a recipe, the command line as a process, and what a run left behind."""

import io
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from bloomery import cli
from bloomery.monitor.events import Event, StepDone, last_per_step, read_events

RECIPE = """
model: {family: llama, hidden_size: 32, intermediate_size: 64, num_layers: 2, num_heads: 2, num_kv_heads: 2,
        head_dim: 16, max_positions: 64, dropout: 0.1}
tokenizer: {train: {kind: bpe, vocab_size: 300}}
data: {path: text, glob: "*.txt", sequence_length: 64, validation: 20%}
optimizer: {warmup: 3 steps}
train: {length: 16 steps, tokens_per_step: 256, micro_batch: 2, precision: float32, compile: false}
checkpoint: {every: 3 steps, keep: 2, asynchronous: true}
eval: {every: 10 steps}
monitor: {every: 5 steps}
"""
WORDS = ("the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "tree", "and", "then", "it", "was", "seen")
PATIENCE_SECONDS = 120.0


def write_workshop(folder: Path) -> Path:
    """A folder with the recipe and its text; returns the recipe."""
    draw = random.Random(0)
    (folder / "text").mkdir(parents=True)
    for number in range(40):
        (folder / f"text/{number}.txt").write_text(" ".join(draw.choice(WORDS) for _ in range(60)))
    (folder / "tiny.yaml").write_text(RECIPE)
    return folder / "tiny.yaml"


@dataclass
class Bloomery:
    """`bloomery` as a process in `folder`."""

    folder: Path

    def start(self, *words: str, stdout: int = subprocess.PIPE) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "bloomery", *words],
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"TERM": "xterm"},
            start_new_session=True,
        )

    def run(self, *words: str) -> "subprocess.CompletedProcess[str]":
        with self.start(*words) as process:
            out, err = process.communicate(timeout=PATIENCE_SECONDS)
            return subprocess.CompletedProcess(words, process.returncode, out, err)

    def here(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """The same in this process, which need not start: for words that are refused or lead to nothing."""
        out, err = io.StringIO(), io.StringIO()
        with chdir(self.folder), redirect_stdout(out), redirect_stderr(err):
            code = cli._run(list(words), debug=False)
        return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())

    def run_until(self, moment: Callable[[], bool], number: int, *words: str, repeat: int = 1) -> int:
        """Sends the signal when `moment` has come (or the process has ended); returns the exit code."""
        with self.start(*words) as process:
            wait_for(lambda: moment() or process.poll() is not None)
            for _ in range(repeat):
                os.kill(process.pid, number) if process.poll() is None else None
                time.sleep(0.2 if repeat > 1 else 0)
            process.communicate(timeout=PATIENCE_SECONDS)
            return process.returncode

    def kill_when(self, moment: Callable[[], bool], *words: str) -> None:
        assert self.run_until(moment, signal.SIGKILL, *words) in (-signal.SIGKILL, 0)

    @property
    def run_dir(self) -> Path:
        return self.folder / "runs/one"

    def events(self) -> list[Event]:
        return list(read_events(self.run_dir / "events.jsonl"))

    def saw(self, kind: type[Event], step: int = 0) -> Callable[[], bool]:
        return lambda: any(isinstance(event, kind) and event.step >= step for event in self.events())


def wait_for(moment: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not moment():
        assert time.monotonic() < deadline, "the moment never came"
        time.sleep(0.005)


def losses(run: Path) -> list[float | None]:
    """By step; every step is there exactly once."""
    steps = last_per_step(read_events(run / "events.jsonl"), StepDone)
    assert [event.step for event in steps] == list(range(1, len(steps) + 1))
    return [event.loss for event in steps]


def assert_bitwise_equal(run: Path, reference: Path, step: int = 16) -> None:
    assert losses(run) == losses(reference)
    for name in ("model.safetensors", "optimizer.safetensors", "rng.safetensors"):
        ours, theirs = (folder / f"checkpoints/step-{step:08d}" / name for folder in (run, reference))
        assert ours.read_bytes() == theirs.read_bytes(), name

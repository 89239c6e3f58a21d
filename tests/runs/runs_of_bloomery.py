"""A tiny run: a folder with text and a recipe, the command line as a process, and what a run left behind."""

import functools
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

import preloaded
from bloomery import cli
from bloomery.monitor.events import EvalDone, Event, StepDone, Tail, last_per_step, read_events
from models_for_tests import make_model
from small_words import SMALL_WORDS

RECIPE = """
model: {family: llama, hidden_size: 32, intermediate_size: 64, num_layers: 2, num_heads: 2, num_kv_heads: 2,
        head_dim: 16, max_positions: 64, dropout: 0.1}
tokenizer: {train: {kind: bpe, vocab_size: 300}}
data: {path: text, glob: "*.txt", sequence_length: 64, validation: 20%}
optimizer: {warmup: 3 steps}
train: {max_steps: 16, tokens_per_step: 256, micro_batch_size: 2, precision: float32, compile: false}
checkpoint: {every: 3 steps, keep: 2, async_save: true}
eval: {every: 10 steps}
logging: {every: 5 steps}
"""
PATIENCE_SECONDS = 120.0
PR_SET_PTRACER = 0x59616D61  # linux/prctl.h
CALLS = "fsync,?rename,?renameat,?renameat2,?unlink,unlinkat,?rmdir,?mkdir,mkdirat,ftruncate"
STRACE = ("strace", "-f", "-qq", "-o")
STOPPED = f"""
import ctypes, os, runpy, signal
ctypes.CDLL(None).prctl({PR_SET_PTRACER}, ctypes.c_ulong(-1), 0, 0, 0)  # a process that is not its parent may trace it
os.kill(os.getpid(), signal.SIGSTOP)
runpy.run_module("bloomery", run_name="__main__", alter_sys=True)
"""
ADAPTED = """
model: {from: base}
tokenizer: {from: same}
adapter: {kind: lora, rank: 4, dropout: 0.1, target_modules: [all-linear]}
data: {path: text, glob: "*.txt", sequence_length: 64, validation: 20%}
"""
# What differs from RECIPE, by kind of run.
KINDS = {
    "pretrain": "",
    "lora": ADAPTED,
    "qlora": ADAPTED + "quantize: {kind: nf4}\n",
    "dpo": """
objective: {kind: dpo}
data: {path: pairs.jsonl, glob: null, sequence_length: 64, validation: 20%, chat: {template: none}}
""",
    # Untied: without a sum over ranks, one device has the same bits.
    "pipeline": """
model: {family: llama, hidden_size: 32, intermediate_size: 64, num_layers: 2, num_heads: 2, num_kv_heads: 2,
        head_dim: 16, max_positions: 64, dropout: 0.1, tie_embeddings: false}
parallel: {pipeline: 2}
""",
}
# The devices that a kind of run is begun on; one where none are named.
DEVICES = {"pipeline": ("-d", "cpu,cpu")}


def write_workshop(folder: Path, kind: str = "pretrain") -> Path:
    """A folder with the recipe, its text and, for an adapter, its base; returns the recipe."""
    draw = random.Random(0)
    (folder / "text").mkdir(parents=True)
    for number in range(40):
        (folder / f"text/{number}.txt").write_text(
            " ".join(draw.choice(SMALL_WORDS) for _ in range(60))
        )
    if kind == "dpo":
        said = [
            {
                role: " ".join(draw.choice(SMALL_WORDS) for _ in range(6))
                for role in ("prompt", "chosen", "rejected")
            }
            for _ in range(60)
        ]
        (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in said))
    changed = yaml.safe_load(KINDS[kind]) or {}
    recipe = yaml.safe_load(RECIPE) | changed
    if recipe["model"].get("from") == "base":
        (folder / "base").mkdir()
        make_model(folder / "base")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    return folder / "tiny.yaml"


@functools.cache
def why_no_strace() -> str:
    """Why system calls cannot be made to fail here; "" when they can."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    tried = subprocess.run(
        [*STRACE, os.devnull, "-e", f"trace={CALLS}", "true"], capture_output=True
    )
    return (
        "" if tried.returncode == 0 else f"strace cannot trace here: {tried.stderr.decode()[:200]}"
    )


@dataclass
class Bloomery:
    """`bloomery` as a process in `folder`, forked from one that has imported torch.

    `devices`: words that name the devices on which the run is begun.
    """

    folder: Path
    devices: tuple[str, ...] = ()

    def start(
        self,
        *words: str,
        stdout: int = subprocess.PIPE,
        command: Sequence[str] = (sys.executable, "-m", "bloomery"),
        **variables: str,
    ) -> "subprocess.Popen[str]":
        return preloaded.Popen(
            [*command, *words],
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"TERM": "xterm"} | variables,
            start_new_session=True,
        )

    def run(self, *words: str) -> "subprocess.CompletedProcess[str]":
        with self.start(*words) as process:
            out, err = process.communicate(timeout=PATIENCE_SECONDS)
            return subprocess.CompletedProcess(words, process.returncode, out, err)

    def faulted(self, fault: str, *words: str) -> "subprocess.CompletedProcess[str]":
        """With a system call that kills or fails, in whichever process gets there: "fsync:error=EIO:when=3"."""
        if why := why_no_strace():
            pytest.skip(why)
        trace = str(self.folder / "strace.txt")
        with self.start(*words, command=(sys.executable, "-c", STOPPED)) as process:
            status = Path(f"/proc/{process.pid}/status")
            wait_for(lambda: "\nState:\tT" in status.read_text())
            tracing = (
                *STRACE,
                trace,
                "-e",
                f"trace={CALLS}",
                "-e",
                f"inject={fault}",
                "-p",
                str(process.pid),
            )
            with subprocess.Popen(tracing, stderr=subprocess.DEVNULL) as tracer:
                wait_for(
                    lambda: "\nTracerPid:\t0" not in status.read_text() or tracer.poll() is not None
                )
                process.send_signal(signal.SIGCONT)
                out, err = process.communicate(timeout=PATIENCE_SECONDS)
            return subprocess.CompletedProcess(words, process.returncode, out, err)

    def injected(self) -> bool:
        """Whether a system call of the last `faulted` failed; one that kills shows in the exit code."""
        return "(INJECTED)" in (self.folder / "strace.txt").read_text(errors="replace")

    def here(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """The same in this process, which need not start: for words that are refused or lead to nothing."""
        out, err = io.StringIO(), io.StringIO()
        with chdir(self.folder), redirect_stdout(out), redirect_stderr(err):
            code = cli._run(list(words), debug=False)
        return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())

    def run_until(
        self, moment: Callable[[], bool], number: int, *words: str, repeat: int = 1
    ) -> int:
        """Sends the signal when `moment` has come (or the process has ended); returns the exit code."""
        with self.start(*words) as process:
            wait_for(lambda: moment() or process.poll() is not None)
            for _ in range(repeat):
                os.kill(process.pid, number) if process.poll() is None else None
                time.sleep(0.2 if repeat > 1 else 0)
            process.communicate(timeout=PATIENCE_SECONDS)
            return process.returncode

    @property
    def go_on(self) -> tuple[str, ...]:
        """The words that begin this run, or resume it."""
        if (self.run_dir / "plan.json").exists():
            return ("resume", "one")
        if (self.run_dir / "recipe.yaml").exists():
            return ("resume", "one", *self.devices)  # a run knows its devices from its plan
        return ("train", "tiny.yaml", "--run-dir", "runs/one", *self.devices)

    def kill_when(self, moment: Callable[[], bool], *words: str) -> None:
        assert self.run_until(moment, signal.SIGKILL, *words) in (-signal.SIGKILL, 0)

    @property
    def run_dir(self) -> Path:
        return self.folder / "runs/one"

    def events(self) -> list[Event]:
        return list(read_events(self.run_dir / "events.jsonl"))

    def saw(self, kind: type[Event], step: int = 0) -> Callable[[], bool]:
        """Asked again it reads what is new: a test that waits asks two hundred times a second."""
        tail, seen = Tail(self.run_dir / "events.jsonl"), []

        def moment() -> bool:
            seen.extend(
                event for event in tail.read() if isinstance(event, kind) and event.step >= step
            )
            return bool(seen)

        return moment


def wait_for(moment: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not moment():
        assert time.monotonic() < deadline, "the moment never came"
        time.sleep(0.005)


def ranks_of(folder: Path) -> list[int]:
    """Processes of ranks of this test that still live."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if str(folder).encode() in words and state != "Z":
            found.append(int(entry.name))
    return found


def rank_process(run_dir: Path, rank: int) -> int | None:
    """The process of a rank."""
    for process in ranks_of(run_dir):
        try:
            variables = (Path("/proc") / str(process) / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"RANK={rank}".encode() in variables:
            return process
    return None


def losses(run: Path) -> list[float | None]:
    """By step; every step is there exactly once."""
    steps = last_per_step(read_events(run / "events.jsonl"), StepDone)
    assert [event.step for event in steps] == list(range(1, len(steps) + 1))
    return [event.loss for event in steps]


def assert_bitwise_equal(run: Path, reference: Path, step: int = 16) -> None:
    """Losses, evaluations, and every tensor of the last checkpoint: model or adapter, optimizer, random numbers."""
    assert losses(run) == losses(reference)
    exams = [
        [
            (exam.step, exam.loss)
            for exam in last_per_step(read_events(folder / "events.jsonl"), EvalDone)
        ]
        for folder in (run, reference)
    ]
    assert exams[0] == exams[1]
    ours, theirs = (folder / f"checkpoints/step-{step:08d}" for folder in (run, reference))
    names = sorted(path.name for path in theirs.glob("*.safetensors"))
    assert len(names) >= 2
    for name in names:
        assert (ours / name).read_bytes() == (theirs / name).read_bytes(), name

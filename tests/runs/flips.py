"""Single bits flipped in the files that a run reads, one at a time, and what the run then makes of it.

Everything happens in this process: the launcher is the real one, and calls the worker instead of starting it.
"""

import json
import random
import shutil
import signal
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import cache
from io import StringIO
from pathlib import Path
from unittest import mock

import torch

from bloomery.core import files as sealed_files
from bloomery.core.errors import UserError
from bloomery.evals.evaluate import evaluate, load_to_evaluate
from bloomery.export.layouts import export, export_adapter
from bloomery.infer.model_folder import find_model
from bloomery.launch import worker
from bloomery.launch.stage_ends import StageResult
from bloomery.monitor.events import EventLog, StepDone, Warned, last_per_step, read_events
from bloomery.plan.store import read_plan
from bloomery.recipe.load import load_recipe
from bloomery.runs import flow
from bloomery.runs import lifecycle as local
from small_words import SMALL_WORDS

RECIPE = """
data: {path: rows, sequence_length: 32, validation: 20%, prepared: prepared, num_proc: 0}
optimizer: {warmup: 1 steps, learning_rate: 0.01}
train: {max_steps: 4, tokens_per_step: 128, micro_batch_size: 2, precision: float32, compile: false}
checkpoint: {every: 1 steps, keep: 2, async_save: false}
eval: {every: 2 steps}
logging: {every: 5 steps}
"""
FRESH = """
model: {family: llama, hidden_size: 16, intermediate_size: 32, num_layers: 1, num_heads: 2, num_kv_heads: 2,
        head_dim: 8, max_positions: 64}
tokenizer: {train: {kind: bpe, vocab_size: 300}}
"""
RECIPES = {
    "pretrain": RECIPE + FRESH,
    "lora": RECIPE + FRESH + "adapter: {kind: lora, rank: 2}\n",
    "dpo": RECIPE + "model: {from: base}\nobjective: {kind: dpo}\n",
}
RUN = Path("runs/one")
STOP_AFTER = 2
# Written by a run and read by nobody that decides anything; events.jsonl is the history and has tests of its own.
torch.set_num_threads(1)
UNREAD = ("lock", "log.txt", "metrics.json", "events.jsonl", ".lock")


def in_process(
    stage, folder, *, arguments, environment, inherited, requests, on_event, on_line, **_
) -> StageResult:
    """`run_stage` without a child."""
    with EventLog(folder.events) as log:

        def emit(event):
            log(event)
            on_event(event)

        try:
            if stage == "prepare":
                code = worker._prepare(folder, Path(arguments[1]), emit)
            else:
                flag = worker.StopFlag()
                with requests.handled_by(lambda: setattr(flag, "stop_requested", True)):
                    code = worker._train(
                        folder,
                        emit,
                        flag,
                        resumed="--resumed" in arguments,
                        check_step="--no-check" not in arguments,
                        notes=None,
                    )
        except UserError as error:
            report = {
                "problem": error.problem,
                "where": error.where,
                "fix": error.fix,
                "code": error.code,
            }
            return StageResult(stage, worker.FAILED, report, ())
    return StageResult(stage, code, None, ())


machine_here = cache(local.detect)


@contextmanager
def here(folder: Path) -> Iterator[StringIO]:
    """Children are this process, the machine is detected once, and blocks are small enough for tiny files."""
    machine = machine_here()
    with (
        chdir(folder),
        redirect_stdout(StringIO()),
        redirect_stderr(StringIO()) as told,
        mock.patch.object(flow, "run_stage", in_process),
        mock.patch.object(local, "detect", lambda: machine),
        mock.patch.object(sealed_files, "BLOCK", 512),
    ):
        yield told


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def put_back(folder: Path, files: dict[Path, bytes]) -> None:
    for path in sorted(folder.iterdir()):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


CARD = ("README.md", "loss.svg")  # they tell of the run's history


@dataclass
class Outcome:
    """What a person may want to rely on."""

    losses: list[float | None]
    tensors: dict[str, bytes]
    evaluation: object
    exported: dict[str, bytes]
    warned: list[str] = field(compare=False)


def outcome(*, resumed: bool) -> Outcome:
    """Resumes the run of the working folder to its end where it has not ended, evaluates and exports it."""
    if resumed:
        local.resume(RUN, quiet=True)
    found = find_model(RUN, "last")
    decoder, tokenizer = load_to_evaluate(RUN, step="last")
    data = read_plan(RUN / "plan.json").data.prepared
    evaluation = evaluate(decoder, tokenizer, data)
    out = Path("out")
    shutil.rmtree(out, ignore_errors=True)
    export_adapter(found, out, verify=False) if found.base else export(
        found.weights, out, verify=False
    )
    events = list(read_events(RUN / "events.jsonl"))
    return Outcome(
        losses=[event.loss for event in last_per_step(events, StepDone)],
        tensors={path.name: path.read_bytes() for path in found.weights.glob("*.safetensors")},
        evaluation=evaluation,
        exported={path.name: path.read_bytes() for path in out.iterdir() if path.name not in CARD},
        warned=[event.reason for event in events if isinstance(event, Warned)],
    )


class World:
    """A run of one kind at three moments: before its first checkpoint, between two, and done."""

    def __init__(self, folder: Path, kind: str, base: Path | None = None) -> None:
        self.folder, self.kind = folder, kind
        (folder / "rows").mkdir(parents=True)
        draw = random.Random(0)
        text = lambda count: " ".join(draw.choice(SMALL_WORDS) for _ in range(count))  # noqa: E731
        if kind == "dpo":
            assert base is not None
            shutil.copytree(base, folder / "base")
            rows = [{"prompt": text(2), "chosen": text(3), "rejected": text(3)} for _ in range(30)]
            (folder / "rows/pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
        else:
            for number in range(20):
                (folder / f"rows/{number}.txt").write_text(text(60))
        (folder / "recipe.yaml").write_text(RECIPES[kind])
        with here(folder):
            self._build()

    def _build(self) -> None:
        local.start(
            load_recipe("recipe.yaml"), run_dir=RUN, quiet=True, watch=_stop_after(STOP_AFTER)
        )
        middle = files_of(self.folder)
        start = {
            path: content for path, content in middle.items() if "checkpoints" not in path.parts
        }
        whole = outcome(resumed=True)
        done = files_of(self.folder)
        self.moments = {"start": start, "middle": middle, "done": done}
        self.expected = {"middle": whole, "done": outcome(resumed=False)}
        put_back(self.folder, start)
        self.expected["start"] = outcome(resumed=True)
        assert len({len(found.losses) for found in self.expected.values()}) == 1
        assert whole == self.expected["done"] == self.expected["start"], (
            "the undisturbed runs differ"
        )

    def read(self, moment: str) -> list[Path]:
        """Files that a run at this moment may read."""
        skip = {self.folder / "recipe.yaml"}  # which the run has copied
        files = [
            path
            for path in self.moments[moment]
            if "rows" not in path.parts and "out" not in path.parts
        ]
        files = [
            path
            for path in files
            if path not in skip and path.name not in UNREAD and path.suffix != ".md"
        ]
        return [
            path for path in files if "tensorboard" not in path.parts and self.moments[moment][path]
        ]

    def flipped(self, moment: str, path: Path, bit: int) -> str:
        """What came of it: refused (in a sentence), warned (a damaged checkpoint is passed over, and a resumed run ends
        the same), same, or the silent difference.
        """
        files = self.moments[moment]
        content = bytearray(files[path])
        content[bit // 8] ^= 1 << bit % 8
        with here(self.folder) as told:
            put_back(self.folder, files | {path: bytes(content)})
            try:
                found = outcome(resumed=moment != "done")
            except UserError as error:
                assert error.problem and (error.where or error.fix), error
                return "refused"
        # an older checkpoint was evaluated, and that is said
        if moment == "done" and "warning:" in told.getvalue():
            return "warned"
        expected = self.expected[moment]
        wrong = [
            name
            for name in vars(found)
            if name != "warned" and getattr(found, name) != getattr(expected, name)
        ]
        if wrong:
            return f"SILENT: {moment}, {path.relative_to(self.folder)}, bit {bit}: {', '.join(wrong)} differ"
        return "warned" if len(found.warned) > len(expected.warned) else "same"


def _stop_after(step: int):
    def watch(event, requests) -> None:
        if isinstance(event, StepDone) and event.step == step:
            requests.ask(signal.SIGTERM)

    return watch

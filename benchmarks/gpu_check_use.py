"""The part `use` of gpu_check.py: a QLoRA run through the command line, then chat, eval, generate, report and export
of it on the device that trained it, with what each holds in memory."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ModelFiles = dict[str, Any]
SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_layers": 8,
    "num_heads": 16,
    "max_positions": 1024,
}
TINY_SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_layers": 2,
    "num_heads": 2,
    "max_positions": 256,
}
FIRST = """
model: {family: llama, %s}
tokenizer: {train: {kind: bpe, vocab_size: 2048}}
data: {builtin: stdlib-code, sequence_length: 128, validation: 2%%}
optimizer: {kind: adafactor}
train: {max_steps: 1, tokens_per_step: 256, compile: false}
eval: {every: 1 steps, tokens: 256}
"""
SECOND = """
model: {from: base}
tokenizer: {from: same}
data: {builtin: stdlib-code, sequence_length: 128, validation: 2%}
adapter: {kind: lora, rank: 8, target_modules: [all-linear]}
quantize: {kind: nf4}
optimizer: {learning_rate: 1e-3}
train: {max_steps: 10, tokens_per_step: 2048, compile: false}
eval: {every: 5 steps, tokens: 2048}
"""


def used(*, tiny: bool) -> ModelFiles:
    """Every verb in a process of its own, then one that measures what a quantized model holds beside its file."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        shape = ", ".join(
            f"{name}: {value}" for name, value in (TINY_SHAPE if tiny else SHAPE).items()
        )
        (folder / "first.yaml").write_text(FIRST % shape)
        (folder / "second.yaml").write_text(SECOND)
        device = [] if tiny else ["-d", "0"]
        run, used_as = "runs/second", ["-d", "cpu"] if tiny else device
        verbs = [
            ["train", "first.yaml", "--run-dir", "runs/first", *device],
            [
                "export",
                "runs/first",
                "--to",
                "hf",
                "--out",
                "base",
                "--no-verify",
                "--step",
                "last",
            ],
            ["train", "second.yaml", "--run-dir", run, *device],
            ["eval", run, "--step", "last", "--json", "--data", "second.yaml", *used_as],
            [
                "eval",
                run,
                "--step",
                "last",
                "--json",
                "--data",
                "second.yaml",
                "--quantize",
                "none",
                *used_as,
            ],
            ["eval", run, "--step", "last", "--json", "--data", "second.yaml", "-d", "cpu"],
            ["generate", run, "--prompt", "def f(", "--max-new-tokens", "16", *used_as],
            ["chat", run, "--template", "chatml", "--max-new-tokens", "16", *used_as],
            ["report", run],
            ["export", run, "--to", "merged", "--out", "merged", "--no-verify", *used_as],
        ]
        told = [_ran(verb, folder) for verb in verbs]
        measured = subprocess.run(
            [sys.executable, __file__, str(folder / run), "cpu" if tiny else "cuda"],
            capture_output=True,
            text=True,
        )
        failed = [each for each in told if each["code"]]
        found: ModelFiles = (
            json.loads(measured.stdout.splitlines()[-1]) if measured.returncode == 0 else {}
        )
        wrong = [f"{each['verb']}: {each['stderr']}" for each in failed] or _amiss(
            told, found, measured.stderr
        )
        return {
            "outcome": "failed" if wrong else "ok",
            "message": "; ".join(wrong)
            or "loaded in {held_gib:.2f} GiB, {peak_gib:.2f} at the peak".format(**found),
            "verbs": told,
        } | found


def _ran(verb: list[str], folder: Path) -> ModelFiles:
    begun = time.perf_counter()
    words = [sys.executable, "-m", "bloomery", *verb]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, input="Hello there\n")
    print(" ".join(verb), done.returncode, flush=True)
    return {
        "verb": " ".join(verb),
        "code": done.returncode,
        "seconds": round(time.perf_counter() - begun, 1),
        "stdout": done.stdout[-400:],
        "stderr": done.stderr[-800:],
    }


def _amiss(told: list[ModelFiles], found: ModelFiles, error: str) -> list[str]:
    """What is not as it should be."""
    if not found:
        return [f"the measurement failed: {error[-300:]}"]
    own, other, cpu = (json.loads(each["stdout"])["loss"] for each in told[3:6])
    wrong = []
    if own == other or "results differ" not in told[4]["stderr"]:
        wrong.append(f"--quantize none is not said to differ ({own} and {other})")
    if abs(own - cpu) > 0.02 * cpu:
        wrong.append(f"the processor gives another loss ({own} and {cpu})")
    if abs(found["figure"] - found["of_the_run"]) > 1e-3 * found["of_the_run"]:
        wrong.append(
            f"the run's evaluation was {found['of_the_run']}, here it is {found['figure']}"
        )
    if (
        found["peak_gib"] > found["held_gib"] + max(0.25 * found["held_gib"], 0.1)
        and found["device"] == "cuda"
    ):
        wrong.append(
            "loading held {peak_gib:.2f} GiB, the model has {held_gib:.2f}".format(**found)
        )
    if not re.search(r"nf4 base", told[3]["stderr"]):
        wrong.append("eval did not load an nf4 base")
    return wrong


def measure(run: Path, device: str) -> ModelFiles:
    """The loaded model's bytes, the peak while it was loaded, its evaluation beside the run's, tokens per second."""
    import torch

    from bloomery.core.units import GIB
    from bloomery.data.loader import Loader
    from bloomery.infer.generate import generate, load_model
    from bloomery.infer.load import Use
    from bloomery.infer.sampling import Sampling
    from bloomery.monitor.events import EvalDone, read_events
    from bloomery.plan.store import read_plan
    from bloomery.train.evaluation.evaluation import validation_result
    from bloomery.train.objectives.build import build_objective
    from bloomery.train.process import peak_memory_gib

    plan, gpu = read_plan(run / "plan.json"), device == "cuda"
    able = gpu and torch.cuda.is_bf16_supported(including_emulation=False)
    decoder, tokenizer = load_model(run, step="last", use=Use(device, bfloat16=able))
    peak = peak_memory_gib(device)
    held = sum(each.nbytes for each in (*decoder.parameters(), *decoder.buffers())) / GIB
    for block in decoder.model.layers:
        block.self_attn.backend = plan.model.attention
    decoder.model.backend = plan.model.attention
    data = plan.data
    rows = Loader(
        data.prepared,
        sequence_length=data.sequence_length,
        layout=data.layout,
        seed=plan.train.seed,
        split="validation",
    )
    figure = validation_result(
        decoder,
        rows,
        build_objective(plan),
        plan=plan.eval,
        precision="float32",
        token_bytes=tokenizer.token_bytes(),
        limit=plan.eval.sequences,
    )
    assert figure is not None
    for block in decoder.model.layers:
        block.self_attn.backend = "sdpa"
    decoder.model.backend = "sdpa"
    list(generate(decoder, tokenizer, "def f(", Sampling(max_new_tokens=4)))
    begun, count = time.perf_counter(), 32
    list(generate(decoder, tokenizer, "def f(", Sampling(max_new_tokens=count)))
    seconds = time.perf_counter() - begun
    own = [event for event in read_events(run / "events.jsonl") if isinstance(event, EvalDone)][
        -1
    ].loss
    return {
        "device": device,
        "held_gib": held,
        "peak_gib": peak,
        "figure": figure.loss,
        "of_the_run": own,
        "tokens_per_second": count / seconds,
        "precision": plan.train.precision,
        "quantized_by": plan.quantized_by,
    }


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    print(json.dumps(measure(Path(sys.argv[1]), sys.argv[2])))

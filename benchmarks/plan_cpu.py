"""The time of a step on a CPU, planned and measured, for seven recipes.

    python benchmarks/plan_cpu.py [--only NAME ...] [--steps 6] [--cores 1] [--work FOLDER]

Every recipe runs in a process of its own, on so many cores, in Bloomery's own training loop; the plan is the one that
`bloomery train` prints, from the check of this CPU, without any measurement of the model. On one core the processor
seconds of a step are compared with the plan, so that other programs on the machine change little; on several cores the
seconds on the clock are, which need a quiet machine. See README.md in this folder.
"""

import argparse
import contextlib
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "plan_cpu.json"
SKIPPED = 1  # the step that creates the optimizer's states and most kernels
ATTENTION = "[q_proj, k_proj, v_proj, o_proj]"
SMOLLM2 = "model: {from: FOLDER/model}\ntrain: {max_steps: 1000, compile: false, TRAIN}\nlogging: {trackers: []}\n"
CHAT = "objective: {kind: sft}\ndata: {path: FOLDER/train.jsonl, sequence_length: LENGTH}\n"
RECIPES = {
    # two layers of width 64: time passes between operators
    "tiny": """
model: {family: llama, hidden_size: 64, intermediate_size: 192, num_layers: 2, num_heads: 4, max_positions: 128}
tokenizer: {train: {kind: bpe, vocab_size: 512}}
data: {builtin: stdlib-code, sequence_length: 128}
train: {max_steps: 1000, tokens_per_step: 1024, compile: false}
logging: {trackers: []}
""",
    "demo": "extends: demo\ntrain: {max_steps: 1000, compile: false}\n",
    "full": (SMOLLM2 + CHAT).replace("TRAIN", "tokens_per_step: 2048").replace("LENGTH", "512"),
    "lora-1": (SMOLLM2 + CHAT + "adapter: {kind: lora, rank: 16, target_modules: [all-linear]}\n")
    .replace("TRAIN", "tokens_per_step: 1024, micro_batch_size: 1")
    .replace("LENGTH", "1024"),
    "lora-4": (SMOLLM2 + CHAT + f"adapter: {{kind: lora, rank: 16, target_modules: {ATTENTION}}}\n")
    .replace("TRAIN", "tokens_per_step: 2048, micro_batch_size: 4")
    .replace("LENGTH", "512"),
    "qlora": (
        SMOLLM2
        + CHAT
        + "adapter: {kind: lora, rank: 16, target_modules: [all-linear]}\nquantize: {kind: nf4}\n"
    )
    .replace("TRAIN", "tokens_per_step: 1024")
    .replace("LENGTH", "512"),
    "dpo": (
        SMOLLM2
        + "objective: {kind: dpo}\ndata: {path: FOLDER/pairs.jsonl, sequence_length: 256, on_error: skip}\n"
        + f"adapter: {{kind: lora, rank: 16, target_modules: {ATTENTION}}}\n"
    ).replace("TRAIN", "tokens_per_step: 1024"),
}


def make_folder(folder: Path, model: Path) -> None:
    """SmolLM2 and its conversations, and pairs of them: the first answer against that of another conversation."""
    runpy.run_path(str(HERE.parent / "scripts" / "smollm2.py"))["make"](model)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("model", "train.jsonl"):
        if not (folder / name).exists():
            (folder / name).symlink_to(model / name)
    lines = (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()[:500]
    talks = [json.loads(line)["messages"] for line in lines]
    rows = [
        {
            "prompt": talk[:1],
            "chosen": [talk[1]],
            "rejected": [talks[(7 * at + 13) % len(talks)][1]],
        }
        for at, talk in enumerate(talks)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


class Ended(Exception):
    """Enough steps were timed."""


def measured(name: str, folder: Path, steps: int, overrides: list[str]) -> dict[str, Any]:
    """The plan of a recipe and the seconds of its steps, in this process, on the cores that it may use."""
    from bloomery.data.prepare.prepare import prepare
    from bloomery.hardware.cpu_check import with_cpu_check
    from bloomery.hardware.detect import detect
    from bloomery.plan.advise import advise
    from bloomery.plan.gather import gather
    from bloomery.plan.resolve import child_environment, resolve
    from bloomery.recipe.load import load_recipe

    recipe = folder / f"{name}.yaml"
    recipe.write_text(RECIPES[name].replace("FOLDER", str(folder)))
    loaded = load_recipe(recipe, overrides)
    prepared = folder / "prepared" / name
    prepare(loaded, prepared)
    machine = with_cpu_check(detect())
    facts = gather(loaded, machine, prepared=prepared)
    plan = resolve(loaded, facts)
    parts = advise(loaded, plan, facts).step_parts
    assert plan.step_seconds is not None, "the planner does not know this CPU"
    assert plan.step_seconds.origin == "table", "this machine has a measurement: remove it first"
    os.environ.update(child_environment(plan, os.environ))

    from bloomery.train.diagnostics.step_health import core_wait_seconds
    from bloomery.train.kernels import build_kernels
    from bloomery.train.loop import run
    from bloomery.train.process import set_up_process

    set_up_process(plan.train, memory_limit=plan.memory.limit)
    build_kernels(plan.model)
    clock = list[tuple[float, float, float]]()

    def stop() -> bool:
        clock.append((time.perf_counter(), time.process_time(), core_wait_seconds() or 0.0))
        if len(clock) == steps + SKIPPED + 1:
            raise Ended
        return False

    from bloomery.core.units import GIB
    from bloomery.train.process import peak_memory_gib

    with tempfile.TemporaryDirectory() as place, contextlib.suppress(Ended):
        run(plan, run_dir=Path(place), emit=lambda _: None, stop=stop)
    clock = clock[SKIPPED:]
    wall, processor, waited = (
        [after[at] - before[at] for before, after in pairwise(clock)] for at in range(3)
    )
    train = plan.train
    return {
        "tokens": train.tokens_per_step,
        "micro_batch_size": train.micro_batch_size,
        "sequence_length": plan.data.sequence_length,
        "attention": plan.model.attention,
        "precision": train.precision,
        "cores": machine.host.cpu_cores,
        "cpu_check": None if machine.cpu_check is None else machine.cpu_check.model_dump(),
        "checkpointing": train.activation_checkpointing,
        "compile": train.compile,
        "memory": {"parts": plan.memory.parts, "peak_bytes": round(peak_memory_gib("cpu") * GIB)},
        "planned": plan.step_seconds.model_dump(include={"value", "low", "high"}),
        "parts": {part: estimate.value for part, estimate in parts.items()},
        "seconds": wall,
        "processor_seconds": processor,
        "core_wait_seconds": waited,
        "load": os.getloadavg()[0],
    }


def line(name: str, row: dict[str, Any]) -> str:
    """Planned against measured: by processor time on one core, else by the clock."""
    plan = row["planned"]
    took = statistics.median(row["processor_seconds" if row["cores"] == 1 else "seconds"])
    place = "inside" if plan["low"] <= took <= plan["high"] else "OUTSIDE"
    clock = statistics.median(row["seconds"])
    return (
        f"{name:8} {row['tokens']:>6,} tokens  planned {plan['value']:7.3f} s ({plan['low']:.3f} to {plan['high']:.3f})"
        f"  measured {took:7.3f} s  {took / plan['value'] - 1:+5.0%} {place:7}  clock {clock:.3f}"
        f"  processor {statistics.median(row['processor_seconds']):.3f}  load {row['load']:.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--override", nargs="*", default=[], help="of every recipe")
    parser.add_argument(
        "--model",
        type=Path,
        default=Path.home() / ".cache" / "bloomery-real-model",
        help="keeps SmolLM2 and its conversations here",
    )
    parser.add_argument("--work", type=Path, help="keeps the prepared text here")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        (name,) = asked.only
        print(json.dumps(measured(name, asked.work, asked.steps, asked.override)))
        return

    with tempfile.TemporaryDirectory() as place:
        folder = (asked.work or Path(place)).absolute()
        make_folder(folder, asked.model)
        results = compared(asked, folder)
    asked.out.parent.mkdir(exist_ok=True)
    asked.out.write_text(json.dumps(results, indent=1) + "\n")


def compared(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Each recipe in a process of its own."""
    cores = sorted(os.sched_getaffinity(0))[: asked.cores]
    results = {}
    for name in asked.only:
        words = ["--child", "--only", name, "--steps", str(asked.steps), "--work", str(folder)]
        words += ["--override", *asked.override]
        done = subprocess.run(
            [sys.executable, __file__, *words],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
        results[name] = json.loads(done.stdout.splitlines()[-1])
        print(line(name, results[name]), flush=True)
    return results


if __name__ == "__main__":
    main()

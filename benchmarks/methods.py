"""Full training, LoRA, DoRA, AdaLoRA and QLoRA on the same answers: `python benchmarks/methods.py [--work FOLDER]`.

A short run of the first demo makes the base. Every method then takes the same steps over the same rows in the same
order, at doubled and halved learning rates until its best lies between two worse ones, and is examined on the same
held-out answers. Then each runs once more at its best rate, one after the other, for speed and memory: that part wants
a quiet machine. Writes results/methods.json; `scripts/methods_page.py` makes the pages and the figures of it.
"""

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BASE_STEPS, STEPS = 300, 150
ALL = "[q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj]"
LORA = "{{kind: {kind}, rank: {rank}, alpha: {alpha}, target_modules: " + ALL + "}}"
ADALORA = (
    "{kind: peft, method: adalora, init_r: 24, target_r: 16, tinit: TINIT, tfinal: TFINAL, deltaT: 5, lora_alpha: 48, "
    "target_modules: " + ALL + "}"
)
METHODS = {  # the packaged recipe and what changes in it
    "full": ("demo-chat-full", ()),
    "LoRA r8": ("demo-chat-lora", ("adapter=" + LORA.format(kind="lora", rank=8, alpha=16),)),
    "LoRA r16": ("demo-chat-lora", ("adapter=" + LORA.format(kind="lora", rank=16, alpha=32),)),
    "DoRA r16": ("demo-chat-lora", ("adapter=" + LORA.format(kind="dora", rank=16, alpha=32),)),
    "AdaLoRA r24 to 16": ("demo-chat-lora", ("adapter=" + ADALORA,)),
    "QLoRA r16 (nf4)": (
        "demo-chat-lora",
        ("adapter=" + LORA.format(kind="lora", rank=16, alpha=32), "quantize={kind: nf4}"),
    ),
}
# whose changes of weights are taken apart
CHANGED = {"full": "full", "LoRA r8": "LoRA r8", "LoRA r16": "LoRA r16"}


def train(recipe: str, folder: Path, *words: str) -> list[Any]:
    """The events of one run, to its end."""
    from bloomery.cli.demo import follow_run

    return list(follow_run(folder, "train", recipe, *words, "--run-dir", str(folder)))


def make_base(work: Path, steps: int) -> Path:
    from bloomery.cli.demo_chat import _exported

    train(
        "demo",
        work / "demo",
        f"train.max_steps={steps}",
        "train.compile=false",
        "sample.prompts=[]",
    )
    return _exported(work / "demo")


def folder_of(name: str, work: Path) -> Path:
    return work / "".join(letter if letter.isalnum() else "-" for letter in name)


def tuned(name: str, work: Path, base: Path, steps: int, rate: float) -> Path:
    """One method's run at one learning rate, from its start to its end: its folder."""
    recipe, words = METHODS[name]
    folder = folder_of(f"{name} {rate:g}", work)
    same = (
        f"model.from={base}",
        f"data.prepared={work / 'answers'}",
        f"train.max_steps={steps}",
        f"optimizer.learning_rate={rate:g}",
        "train.compile=false",
        "eval.tokens=10M",
        "eval.every=20%",
        "sample.prompts=[]",
        "logging.every=1 steps",
    )
    own = [
        word.replace("TINIT", str(steps // 8)).replace("TFINAL", str(steps // 3)) for word in words
    ]
    shutil.rmtree(folder, ignore_errors=True)
    train(recipe, folder, *same, *own)
    return folder


def searched(name: str, work: Path, base: Path, steps: int) -> dict[float, float]:
    """Held-out losses by learning rate: from the recipe's, doubled or halved until both neighbours of the best are
    known to be worse. Runs that `work` holds are not repeated.
    """
    from bloomery.recipe.load import load_recipe

    tried: dict[float, float] = {}
    rate = load_recipe(METHODS[name][0]).recipe.optimizer.learning_rate
    while True:
        folder = folder_of(f"{name} {rate:g}", work)
        tried[rate] = figures(
            name, folder if whole(folder) else tuned(name, work, base, steps, rate)
        )["held_out"]
        print(f"{name} at {rate:g}: {tried[rate]:.3f}", flush=True)
        best = min(tried, key=lambda each: tried[each])
        unknown = [each for each in (2 * best, best / 2) if each not in tried]
        if not unknown:
            return tried
        rate = unknown[0]


def whole(folder: Path) -> bool:
    """Whether a run ended there as it should."""
    from bloomery.monitor.events import RunEnded, read_events

    ended = [event for event in read_events(folder / "events.jsonl") if isinstance(event, RunEnded)]
    return bool(ended) and ended[-1].status == "done"


def figures(name: str, folder: Path) -> dict[str, Any]:
    """What a run told."""
    from bloomery.core.units import MIB
    from bloomery.monitor.events import EvalDone, StepDone, read_events
    from bloomery.plan.estimate.states import TrainedModel
    from bloomery.plan.store import read_plan

    events, plan = list(read_events(folder / "events.jsonl")), read_plan(folder / "plan.json")
    taken = [event for event in events if isinstance(event, StepDone)]
    exams = [event for event in events if isinstance(event, EvalDone)]
    # other programs disturb a run at times
    quick = sorted(step.step_seconds for step in taken)[len(taken) // 10]
    learned = sum(step.loss_tokens or 0 for step in taken)
    return {
        "name": name,
        "folder": folder.name,
        "trained": TrainedModel.of(plan, plan.model.config).trainable_count,
        "learning_rate": plan.optimizer.learning_rate,
        "held_out": exams[-1].loss,
        "curve": [[exam.step, exam.loss] for exam in exams],
        "losses": [[step.step, step.loss] for step in taken],
        "step_seconds": quick,
        "learned_per_second": learned / len(taken) / quick,
        "loss_tokens": learned,
        "tokens": taken[-1].tokens,
        "peak_mib": max(step.memory_gib for step in taken) * 1024,
        "planned_mib": plan.memory.total / MIB,
        "planned_tensors_mib": plan.memory.allocated / MIB,
    }


def before(base: Path, work: Path) -> dict[str, Any]:
    """The base on the same held-out answers."""
    from bloomery.evals.evaluate import evaluate, load_to_evaluate
    from bloomery.facts.counting import parameter_count

    decoder, tokenizer = load_to_evaluate(base)
    found = evaluate(decoder, tokenizer, work / "answers", bos=False)[0]
    return {
        "loss": found.loss,
        "tokens": found.tokens,
        "parameters": parameter_count(decoder.config),
    }


def spectra(base: Path, work: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Singular values of what each method added to the matrices of the middle layer, and to all, as shares."""
    import torch

    from bloomery.evals.evaluate import load_to_evaluate
    from bloomery.export.layouts import merged_state

    start = merged_state(load_to_evaluate(base)[0], torch.float32)
    middle = load_to_evaluate(base)[0].config.num_layers // 2
    found: dict[str, Any] = {}
    for row in rows:
        if row["name"] not in CHANGED:
            continue
        state = merged_state(load_to_evaluate(work / row["folder"], step="last")[0], torch.float32)
        inside = [name for name in state if ".layers." in name and state[name].ndim == 2]
        values = {name: torch.linalg.svdvals(state[name] - start[name]) for name in inside}
        shown = {
            name.split(".")[-2]: each
            for name, each in values.items()
            if f".layers.{middle}." in name
        }
        found[row["name"]] = {
            "layer": middle,
            "values": {
                name: [round(value, 5) for value in each.tolist()] for name, each in shown.items()
            },
            "caught": {
                str(rank): caught(list(values.values()), rank) for rank in (1, 2, 4, 8, 16, 32, 64)
            },
        }
    return found


def caught(spectra: list[Any], rank: int) -> float:
    """The share of the squared size of all changes that the best matrices of this rank hold (Eckart and Young)."""
    held = sum(float((each[:rank] ** 2).sum()) for each in spectra)
    return held / sum(float((each**2).sum()) for each in spectra)


def machine() -> dict[str, Any]:
    import platform

    import torch

    line = next(
        (one for one in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in one), ""
    )
    return {
        "cpu": line.partition(":")[2].strip(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": os.getloadavg()[0],
        "day": time.strftime("%Y-%m-%d"),
    }


def table(report: dict[str, Any]) -> str:
    lines = [
        f"before training: {report['before']['loss']:.3f} nats a token of {report['before']['tokens']:,}"
    ]
    head = f"{'method':<20}{'rate':>9}{'held out':>9}{'trained':>11}"
    lines.append(head + f"{'MiB':>8}{'planned':>9}{'learned/s':>11}{'x full':>8}")
    for row in report["rows"]:
        lines.append(
            f"{row['name']:<20}{row['learning_rate']:>9.2g}{row['held_out']:>9.3f}{row['trained']:>11,}{row['peak_mib']:>8,.0f}"
            f"{row['planned_mib']:>9,.0f}{row['learned_per_second']:>11,.0f}{row['times_full']:>8.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work", type=Path, help="keeps runs here; base and search of an earlier call are taken"
    )
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--base-steps", type=int, default=BASE_STEPS)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "methods.json")
    asked = parser.parse_args()
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        work = (asked.work or Path(place)).absolute()
        work.mkdir(parents=True, exist_ok=True)
        os.chdir(work)
        base = work / "demo" / "export" / "hf"
        base = base if base.exists() else make_base(work, asked.base_steps)
        print(f"base after {time.perf_counter() - begun:.0f} s", flush=True)
        rates = {name: searched(name, work, base, asked.steps) for name in METHODS}
        rows = []
        for name, tried in rates.items():
            folder = tuned(name, work, base, asked.steps, min(tried, key=lambda rate: tried[rate]))
            rows.append(figures(name, folder) | {"tried": sorted(tried.items())})
        rows = [row | {"times_full": rows[0]["step_seconds"] / row["step_seconds"]} for row in rows]
        report = {
            "machine": machine(),
            "base_steps": asked.base_steps,
            "steps": asked.steps,
            "before": before(base, work),
            "rows": rows,
            "spectra": spectra(base, work, rows),
        }
    asked.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{table(report)}\n{time.perf_counter() - begun:.0f} s; written to {asked.out}")


if __name__ == "__main__":
    main()

"""Pretraining on a CPU: Bloomery beside transformers' Trainer, step by step in turn.

    python benchmarks/pretrain_cpu.py [--preset mini|tiny|small|medium] [--steps 3] [--only guide|best] [--work FOLDER]

Every side is a process that waits while another one trains. All read the same token ids with the same document
borders, start from the same weights and take the same optimizer. See README.md beside this file.
"""

import argparse
import json
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import numpy as np
from side_bloomery import RECIPE, planned
from stdlib_pieces import described, write_pieces
from turns import Side, compare, judged, machine, started, table, told

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "pretrain_cpu.json"
LENGTH, ROWS = 1024, 16  # of a step: the guide's 2 rows, accumulated 8 times
# The guide's shape, vocabulary and context at a width that two cores measure in a quarter of an hour.
MINI = "{preset: go-coder-tiny, hidden_size: 384, num_layers: 6, num_heads: 6, vocab_size: 50000}"
NAMES = {
    "guide": "Trainer, as the guide sets it up",
    "plan": "Bloomery, as planned",
    "best": "Trainer at its best, 8 rows",
    "best2": "Trainer at its best, 2 rows",
    "same": "Bloomery, as planned",
    "lean": "Bloomery, lean",
}
BARS = [  # our side, figure, bar; memory must not exceed its bar, speed must reach it
    ("plan", "speed", 4.0),
    ("same", "speed", 1.3),
    ("same", "memory", 1.0),
    ("lean", "speed", 0.9),
    ("lean", "memory", 0.5),
]
TRAINERS = ("guide", "best", "best2")


def make_text(folder: Path, preset: str, extra: list[str]) -> dict:
    """Documents, tokenizer, shards, first weights and the recipe in `folder`; returns the distribution of lengths."""
    from bloomery.data.prepare.prepare import prepare
    from bloomery.data.shards import open_split
    from bloomery.recipe.load import load_recipe

    write_pieces(folder / "documents.jsonl")
    (folder / RECIPE).write_text(recipe_text(preset))
    loaded = load_recipe(folder / RECIPE, extra)
    prepare(loaded, folder / "prepared")
    write_first_weights(folder, extra)
    lengths = np.diff(np.asarray(open_split(folder / "prepared", "train").bounds).astype(np.int64))
    return described(lengths, sequence_length=LENGTH)


def recipe_text(preset: str) -> str:
    """The Go coder guide's recipe on these documents, with a learning rate that is constant from the first step."""
    model = MINI if preset == "mini" else f"{{preset: go-coder-{preset}, vocab_size: 50000}}"
    return f"""
extends: go-coder-125m
claims: {{}}
model: {model}
data: {{path: documents.jsonl, glob: null, prepared: prepared}}
optimizer: {{schedule: constant, warmup: 0 steps}}
sample: {{prompts: []}}
logging: {{trackers: []}}
"""


def write_first_weights(folder: Path, extra: list[str]) -> None:
    """The weights that Bloomery begins with, in a folder that transformers opens."""
    from bloomery.model.decoder import Decoder
    from bloomery.model.io.weights import init_weights, write_model

    plan = planned(folder, extra)
    model = Decoder(plan.model.config)
    init_weights(model, plan.train.seed)
    (folder / "init").mkdir(exist_ok=True)
    write_model(dict(model.named_parameters()), plan.model.config, folder / "init")


def verdicts_of(sides: list[Side]) -> list[dict]:
    """Each bar beside what was measured against the fastest Trainer."""
    ours = {side.name: side for side in sides}
    theirs = max((side for side in sides if side.name in TRAINERS), key=lambda side: side.speed)
    return [judged(ours[name], theirs, figure, bar) for name, figure, bar in BARS if name in ours]


def run(
    comparison: str,
    commands: dict[str, list[str]],
    shares: dict[str, float],
    asked: argparse.Namespace,
) -> dict:
    """Trains the sides in turn and prints what came of it."""
    print(f"\n{comparison}: {', '.join(NAMES[name] for name in commands)}", flush=True)
    with ExitStack() as stack:
        sides = [
            stack.enter_context(
                started(name, command, asked.work, positions=ROWS * LENGTH, real_share=shares[name])
            )
            for name, command in commands.items()
        ]
        compare(sides, asked.steps)
    verdicts = verdicts_of(sides)
    print(table(sides, NAMES, counted="real"))
    for verdict in verdicts:
        print(told(verdict, NAMES))
    without_folders = {
        name: [Path(program).name, *rest] for name, (program, _, *rest) in commands.items()
    }
    return {
        "sides": {side.name: side.result for side in sides},
        "bars": verdicts,
        "commands": without_folders,
    }


def comparisons(asked: argparse.Namespace, real_share: float) -> dict:
    """Both comparisons, each with its own processes."""
    ours, theirs, work = (
        str(HERE / "side_bloomery.py"),
        str(HERE / "side_trainer.py"),
        str(asked.work),
    )
    shares = dict.fromkeys(NAMES, 1.0) | {"guide": real_share}
    dry, rows = ["model.dropout=0"], str(ROWS)
    found = {}
    if asked.only in (None, "guide"):
        commands = {"guide": [theirs, work, "guide", "0.1", "2", rows], "plan": [ours, work]}
        found["guide"] = run("guide", commands, shares, asked)
    if asked.only in (None, "best"):
        commands = {
            "best": [theirs, work, "best", "0", "8", rows],
            "best2": [theirs, work, "best", "0", "2", rows],
            "same": [ours, work, *dry],
            "lean": [ours, work, *dry, "train.micro_batch_size=1"],
        }
        found["best"] = run("best", commands, shares, asked)
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="mini", choices=["mini", "tiny", "small", "medium"])
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each side")
    parser.add_argument("--only", choices=["guide", "best"])
    parser.add_argument(
        "--set", nargs="*", default=[], help="overrides of the recipe, for every side"
    )
    parser.add_argument("--work", type=Path, help="keeps text, logs and weights here")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def main() -> None:
    asked = parse()
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        asked.work = (asked.work or Path(place)).absolute()
        asked.work.mkdir(parents=True, exist_ok=True)
        text = make_text(asked.work, asked.preset, asked.set)
        print(
            "documents: " + ", ".join(f"{key} {value:,.3g}" for key, value in text.items()),
            flush=True,
        )
        plan = planned(asked.work, asked.set)
        found = comparisons(asked, text["real share when padded"])
    report = {
        "machine": machine(),
        "preset": asked.preset,
        "documents": text,
        "model": {
            key: value
            for key, value in asdict(plan.model.config).items()
            if isinstance(value, int | str)
        },
        "choices": {decision.key: decision.value for decision in plan.choices},
        "tokens_per_step": ROWS * LENGTH,
        "comparisons": found,
        "seconds": time.perf_counter() - begun,
    }
    asked.out.parent.mkdir(exist_ok=True)
    asked.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\n{report['seconds']:.0f} s in all; written to {asked.out}")


if __name__ == "__main__":
    main()

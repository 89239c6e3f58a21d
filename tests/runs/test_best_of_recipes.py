"""Recipes drawn at random train as commands do; events, best.json, metrics.json, report, terminal and `eval` agree.

A table of the runs: `python -m pytest -m soak -n 0 -s tests/runs/test_best_of_recipes.py`.
"""

import ast
import json
import random
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

import preloaded
from bloomery.infer.model_folder import best_on_disk, damage, model_folder
from bloomery.monitor.events import EvalDone, read_events
from bloomery.report import write_report
from bloomery.view.summary import summary_of

MODEL = {
    "family": "qwen2",
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "max_positions": 256,
    "tie_embeddings": True,
}
OVERFITS = {
    "objective": {"kind": "sft"},
    "rows": 12,
    "train": {"max_steps": 32, "batch_size": 4, "micro_batch_size": 4},
    "optimizer": {"learning_rate": 0.01, "schedule": "constant", "warmup": "0 steps"},
    "checkpoint": {"every": "50%", "keep": 1},
    "eval": {"every": "25%"},
}


def documented() -> list[tuple[str, str]]:
    """Names and docstrings of functions of the standard library."""
    functions = []
    for module in (
        "random",
        "textwrap",
        "statistics",
        "shutil",
        "tempfile",
        "inspect",
        "argparse",
        "string",
    ):
        tree = ast.parse(
            Path(sys.modules.get(module, __import__(module)).__file__).read_text(encoding="utf-8")
        )
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
                functions.append((node.name, text.split("\n\n")[0].replace("\n", " ")[:120]))
    return sorted(set(functions))


def rows_of(kind: str, pairs: list[tuple[str, str]]) -> list[dict[str, Any]]:
    if kind == "pretrain":
        return [{"text": f"def {name}():\n    {text}"} for name, text in pairs]
    if kind == "sft":
        return [
            {
                "messages": [
                    {"role": "user", "content": f"What does {name} do?"},
                    {"role": "assistant", "content": text},
                ]
            }
            for name, text in pairs
        ]
    if kind == "kto":
        return [
            {"prompt": name, "completion": text, "label": number % 2 == 0}
            for number, (name, text) in enumerate(pairs)
        ]
    return [{"prompt": name, "chosen": text, "rejected": text[::-1]} for name, text in pairs]


def drawn(seed: int) -> dict[str, Any]:
    """A recipe: objective, method, length, intervals in every unit, and what is kept."""
    dice = random.Random(seed)
    kind = dice.choice(["pretrain", "sft", "sft", "sft", "dpo", "orpo", "reward"])
    steps = dice.randint(8, 40)

    def interval() -> str:
        units = [f"{dice.randint(2, 9)} steps", f"{dice.choice([7, 10, 12.5, 20, 33])}%"]
        units.append(f"{dice.choice([0.3, 0.5, 1])} epochs")
        return dice.choice(units)

    recipe: dict[str, Any] = {
        "objective": {"kind": kind},
        "rows": dice.choice([40, 90, 160]),
        "train": {"max_steps": steps, "batch_size": 4, "micro_batch_size": 4, "seed": seed},
        "optimizer": {
            "learning_rate": dice.choice([0.003, 0.01, 0.03]),
            "warmup": "0 steps",
            "schedule": dice.choice(["constant", "cosine"]),
        },
        "checkpoint": {
            "every": interval(),
            "keep": dice.randint(1, 3),
            "async_save": dice.random() < 0.5,
        },
        "eval": {"every": interval()},
    }
    if kind == "sft" and dice.random() < 0.5:
        recipe["objective"]["loss"] = "dft"
    if kind in ("sft", "dpo") and dice.random() < 0.6:
        recipe["adapter"] = {
            "kind": "lora",
            "rank": 8,
            "alpha": 16,
            "modules_to_save": ["embed_tokens", "norms"],
        }
        recipe["train"]["neftune_alpha"] = 5.0
    if dice.random() < 0.3:
        recipe["eval"]["early_stopping_patience"] = 3
    # `eval` scores whole pairs, training packed ones: in bfloat16 that alone is 1e-3 of the loss.
    if kind == "reward":
        recipe["train"]["precision"] = "float32"
    return recipe


def bloomery(*words: str, folder: Path) -> str:
    """The output of a command, both streams."""
    command = [sys.executable, "-m", "bloomery", *words]
    with preloaded.Popen(
        command,
        cwd=folder,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        output, _ = process.communicate(timeout=250)
    assert process.returncode == 0, output[-3000:]
    return output


def trained(recipe: dict[str, Any], folder: Path) -> str:
    """The terminal of a run in `folder`/run."""
    recipe = json.loads(json.dumps(recipe))
    pairs = documented()
    random.Random(1).shuffle(pairs)
    kind = recipe["objective"]["kind"]
    rows = rows_of(kind, pairs[: recipe.pop("rows")])
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"path": "rows.jsonl", "sequence_length": 128, "validation": "20%"}
    if kind != "pretrain":
        data["chat"] = {"template": "chatml"}
    whole = {
        "model": MODEL,
        "tokenizer": {"train": {"kind": "bpe", "vocab_size": 400}},
        "data": data,
    } | recipe
    (folder / "drawn.yaml").write_text(yaml.safe_dump(whole))
    return bloomery("train", "drawn.yaml", "--run-dir", "run", "-d", "cpu", folder=folder)


def named_best(run: Path, terminal: str) -> dict[str, int | None]:
    """The best step by source."""
    events = list(read_events(run / "events.jsonl"))
    evaluations = {event.step: event.loss for event in events if isinstance(event, EvalDone)}
    losses = {
        step: loss for step, loss in evaluations.items() if step in summary_of(events).evaluations
    }
    page = write_report(run).read_text()
    (marked,) = re.findall(r"([\d,]+) \(best\)", page)
    told = re.findall(r"best: step ([\d,]+), done", terminal)
    if not told:  # the last step is the best
        told = re.findall(r"^ *(\d+) .*  best, done in", terminal, re.MULTILINE)
    return {
        "events": min(losses, key=lambda step: (losses[step], step)),
        "best.json": best_on_disk(run / "checkpoints"),
        "folder": int(model_folder(run).name.partition("-")[2]),
        "metrics.json": json.loads((run / "metrics.json").read_text())["best_eval"]["step"],
        "report": int(marked.replace(",", "")),
        "terminal": int(told[-1].replace(",", "")) if told else None,
    }


def check(recipe: dict[str, Any], folder: Path) -> str:
    """Train, compare all sources, evaluate; a row of the table."""
    terminal = trained(recipe, folder)
    run, kind = folder / "run", recipe["objective"]["kind"]
    best = named_best(run, terminal)
    assert len(set(best.values())) == 1, (best, terminal)
    assert damage(model_folder(run)) is None
    evaluations = {
        e.step: e.loss for e in read_events(run / "events.jsonl") if isinstance(e, EvalDone)
    }
    lowest = min(evaluations.values())
    measured = None
    if kind in ("pretrain", "sft", "reward"):  # of other pairs `eval` measures the chosen responses
        text = bloomery("eval", "run", "--json", folder=folder)
        measured = json.loads(text[text.index("{") : text.rindex("}") + 1])["loss"]
        assert measured == pytest.approx(lowest, rel=1e-4 if kind != "reward" else 1e-5)
    every = f"save {recipe['checkpoint']['every']}, eval {recipe['eval']['every']}"
    evaluated = "-" if measured is None else f"{measured:.4f}"
    return (
        f"{kind + ' ' + recipe['objective'].get('loss', ''):<9} {max(evaluations):>3} steps  {every:<30}"
        f" best {best['events']:>3} of {len(evaluations):>2} evaluations  lowest {lowest:.4f}  eval RUN {evaluated}"
    )


def test_the_first_evaluation_of_an_overfitting_run_is_what_eval_uses(tmp_path):
    check(OVERFITS, tmp_path)
    assert best_on_disk(tmp_path / "run/checkpoints") == 8


@pytest.mark.soak
def test_ten_recipes_drawn_at_random_have_one_best(tmp_path):
    rows = []
    for seed in range(10):
        folder = tmp_path / str(seed)
        folder.mkdir()
        rows.append(check(drawn(seed), folder))
        print(rows[-1], flush=True)
    print(textwrap.indent("\n".join(rows), "  "))

"""Train the same short runs with two versions and compare every loss, gradient norm and final weight bitwise.

    python scripts/same_runs.py v0.3 HEAD               two git revisions
    python scripts/same_runs.py HEAD . --only lora dpo  a revision and this working tree

This script checks a refactoring that claims to change no number. Each run is killed (SIGKILL) after its fifth
step and resumed. Both versions start from one model folder and read the same files, and prepare them on their own.
The results of a revision are kept under ~/.cache/bloomery-same-runs, so that a second comparison takes half the time.
Exit code 1 when a run differs or fails.
"""

import argparse
import concurrent.futures
import copy
import hashlib
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HOME = Path(__file__).resolve().parents[1]
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "bloomery-same-runs"
STEPS, KILL_AFTER, LIMIT_SECONDS = 8, 5, 300
SHAPE = {
    "family": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
}
LORA = {
    "kind": "lora",
    "rank": 4,
    "dropout": 0.1,
    "target_modules": ["q_proj", "v_proj", "down_proj"],
}

# Keys are those of the newest recipe schema; `as_version_1` gives the older names.
COMMON = {
    "data": {"sequence_length": 128, "validation": 0.05},
    "optimizer": {"learning_rate": 1e-3, "warmup": "2 steps"},
    "train": {
        "max_steps": STEPS,
        "tokens_per_step": 1024,
        "micro_batch_size": 4,
        "precision": "float32",
        "seed": 3,
    },
    "checkpoint": {"every": "3 steps", "keep": 2},
    "eval": {"every": "4 steps", "tokens": 2048},
}
PRETRAIN = {
    "model": {**SHAPE, "dropout": 0.1},
    "tokenizer": {"from": "base"},
    "data": {"path": "code", "format": "code"},
}
SFT = {"model": {"from": "base"}, "data": {"path": "chats.jsonl"}, "objective": {"kind": "sft"}}
PAIRS = {"model": {"from": "base"}, "data": {"path": "pairs.jsonl"}}
CASES: dict[str, list[dict]] = {
    "pretrain float32": [PRETRAIN],
    "pretrain bfloat16": [PRETRAIN, {"train": {"precision": "bfloat16"}}],
    "pretrain float16": [PRETRAIN, {"train": {"precision": "float16"}}],
    "pretrain bfloat16-pure": [
        PRETRAIN,
        {"train": {"precision": "bfloat16-pure"}, "optimizer": {"stochastic_rounding": True}},
    ],
    "pretrain compiled": [PRETRAIN, {"train": {"compile": True}}],
    "pretrain recomputed": [
        PRETRAIN,
        {"train": {"activation_checkpointing": "full", "attention": "blockwise"}},
    ],
    "pretrain muon": [PRETRAIN, {"optimizer": {"kind": "muon"}}],
    "pretrain adafactor in backward": [
        PRETRAIN,
        {
            "optimizer": {"kind": "adafactor", "fused_backward": True},
            "train": {"micro_batch_size": 8, "max_grad_norm": None},
        },
    ],
    "pretrain int8 states": [PRETRAIN, {"optimizer": {"state_dtype": "int8"}}],
    "sft packed": [SFT],
    "sft padded": [SFT, {"data": {"packing": False}}],
    "sft bfloat16": [SFT, {"train": {"precision": "bfloat16"}}],
    "lora": [SFT, {"adapter": LORA}],
    "lora bfloat16": [SFT, {"adapter": LORA, "train": {"precision": "bfloat16"}}],
    "dora": [SFT, {"adapter": {**LORA, "kind": "dora"}}],
    "pissa": [SFT, {"adapter": {**LORA, "init": "pissa"}}],
    "qlora nf4": [SFT, {"adapter": LORA, "quantize": {"kind": "nf4"}}],
    "qlora int8": [SFT, {"adapter": LORA, "quantize": {"kind": "int8"}}],
    "dpo": [PAIRS, {"objective": {"kind": "dpo"}}],
    "dpo lora": [PAIRS, {"objective": {"kind": "dpo"}, "adapter": LORA}],
    "orpo": [PAIRS, {"objective": {"kind": "orpo"}}],
    "kto": [PAIRS, {"data": {"path": "marked.jsonl"}, "objective": {"kind": "kto"}}],
    "reward": [PAIRS, {"objective": {"kind": "reward"}}],
    "distill": [SFT, {"objective": {"kind": "distill", "teacher": "teacher"}}],
}
RENAMED_SINCE_1 = {
    ("optimizer", "fused_backward"): "in_backward",
    ("optimizer", "state_dtype"): "states",
    ("train", "micro_batch_size"): "micro_batch",
    ("train", "max_grad_norm"): "clip",
    ("adapter", "target_modules"): "targets",
    ("quantize", "kind"): "base",
}


def merged(parts: list[dict]) -> dict:
    whole: dict = copy.deepcopy(COMMON)
    for part in parts:
        for section, keys in part.items():
            whole[section] = {**whole.get(section, {}), **copy.deepcopy(keys)}
    return whole


def as_version_1(recipe: dict) -> dict:
    """The same recipe in the keys of recipes before version 2 of the contract."""
    old = {
        section: {RENAMED_SINCE_1.get((section, key), key): value for key, value in keys.items()}
        for section, keys in recipe.items()
    }
    old["train"]["length"] = f"{old['train'].pop('max_steps')} steps"
    if old["data"].pop("packing", True) is False:
        old["data"]["layout"] = "padded"
    if old.get("objective", {}).get("kind") == "distill":
        old["objective"]["kind"] = "distil"
    return old


def write_data(folder: Path) -> None:
    """Code of this Python's library; conversations, pairs and labeled completions of random words (seeded)."""
    library = Path(os.__file__).parent
    (folder / "code").mkdir(parents=True)
    for path in sorted(library.glob("*.py"))[:40]:
        shutil.copyfile(path, folder / "code" / path.name)
    chance = random.Random(0)
    words = sorted(
        {word for word in (library / "argparse.py").read_text().split() if word.isalpha()}
    )

    def some(least: int, most: int) -> str:
        return " ".join(chance.choices(words, k=chance.randint(least, most)))

    chats, pairs, marked = [], [], []
    for _ in range(160):
        turns = [
            {"role": role, "content": some(3, 25)}
            for role in ("user", "assistant") * chance.randint(1, 2)
        ]
        chats.append({"messages": turns})
        asked = [{"role": "user", "content": some(3, 12)}]
        good, bad = ([{"role": "assistant", "content": some(3, 20)}] for _ in "gb")
        pairs.append({"prompt": asked, "chosen": good, "rejected": bad})
        marked += [
            {"prompt": asked, "completion": good, "label": True},
            {"prompt": asked, "completion": bad, "label": False},
        ]
    for name, rows in (("chats", chats), ("pairs", pairs), ("marked", marked)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def bloomery(checkout: Path, folder: Path, *words: str) -> subprocess.Popen:
    environment = {
        **os.environ,
        "PYTHONPATH": str(checkout / "src"),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "bloomery", *words],
        cwd=folder,
        env=environment,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def finish(process: subprocess.Popen) -> None:
    said = process.communicate(timeout=LIMIT_SECONDS)[0].decode(errors="replace")
    if process.returncode:
        raise RuntimeError(said[-2000:])


def write_recipe(path: Path, checkout: Path, recipe: dict) -> None:
    version_2 = "micro_batch_size" in (checkout / "src/bloomery/recipe/schema.py").read_text()
    # JSON is YAML
    path.write_text(json.dumps(recipe if version_2 else as_version_1(recipe), indent=1))


def make_inputs(checkout: Path, folder: Path) -> None:
    """The files that every run reads, with the models `base` and `teacher` that this version trains and exports."""
    if (folder / "teacher").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    write_data(folder)
    template = (
        "{% for message in messages %}{{ '<|' + message.role + '|>' }}{% if message.role == 'assistant' %}"
        "{% generation %}{{ message.content + eos_token }}{% endgeneration %}"
        "{% else %}{{ message.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    fresh = {
        "model": {**SHAPE},
        "tokenizer": {"train": {"vocab_size": 600}},
        "train": {"max_steps": 2},
    }
    for name in ("base", "teacher"):
        seed = {"train": {**fresh["train"], "seed": len(name)}}
        tokenizer = {} if name == "base" else {"tokenizer": {"from": "base"}}
        recipe = merged([PRETRAIN, {**fresh, **tokenizer}, seed])
        if name == "base":
            recipe["tokenizer"].pop("from")
        write_recipe(folder / f"make-{name}.yaml", checkout, recipe)
        finish(
            bloomery(checkout, folder, "train", f"make-{name}.yaml", "--run-dir", f"runs/{name}")
        )
        finish(
            bloomery(
                checkout, folder, "export", f"runs/{name}", "--to", "hf", "--out", f"{name}-made"
            )
        )
        settings = folder / f"{name}-made" / "tokenizer_config.json"
        settings.write_text(
            json.dumps({**json.loads(settings.read_text()), "chat_template": template})
        )
        (folder / f"{name}-made").rename(folder / name)


def digest(value: bytes) -> str:
    return hashlib.sha256(value).hexdigest()[:16]


def train_one(case: str, checkout: Path, inputs: Path) -> dict:
    """Losses and gradient norms of every step and digests of the last checkpoint's tensors."""
    import torch
    from safetensors import safe_open

    with tempfile.TemporaryDirectory(prefix="same-runs-") as place:
        folder = Path(place)
        for path in inputs.iterdir():
            if path.name in ("code", "base", "teacher") or path.suffix == ".jsonl":
                (folder / path.name).symlink_to(path)
        write_recipe(folder / "case.yaml", checkout, merged(CASES[case]))
        run, events = folder / "runs" / "case", folder / "runs" / "case" / "events.jsonl"
        process = bloomery(checkout, folder, "train", "case.yaml", "--run-dir", "runs/case")
        deadline = time.monotonic() + LIMIT_SECONDS
        while (
            process.poll() is None
            and last_step(events) < KILL_AFTER
            and time.monotonic() < deadline
        ):
            time.sleep(0.01)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        elif process.returncode:
            raise RuntimeError(process.communicate()[0].decode(errors="replace")[-2000:])
        finish(bloomery(checkout, folder, "resume", "runs/case"))
        lines = [
            json.loads(line) for line in events.read_text().splitlines() if line.startswith("{")
        ]
        steps = {
            str(line["step"]): [line["loss"], line["grad_norm"]]
            for line in lines
            if line["event"] == "StepDone"
        }
        evals = {str(line["step"]): line["loss"] for line in lines if line["event"] == "EvalDone"}
        weights, others = {}, []
        for path in sorted(sorted((run / "checkpoints").glob("step-*"))[-1].rglob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - no dictionary
                    tensor = file.get_tensor(name).contiguous()
                    value = digest(tensor.flatten().view(dtype=torch.uint8).numpy().tobytes())
                    if path.name.startswith(("model", "adapter")):
                        weights[name] = value
                    else:
                        others.append(value)
        return {"steps": steps, "evaluations": evals, "weights": weights, "states": sorted(others)}


def last_step(events: Path) -> int:
    try:
        return events.read_bytes().count(b'{"event": "StepDone"')
    except FileNotFoundError:
        return 0


def checkout_of(name: str, stack: list[Path]) -> tuple[Path, str | None]:
    """A folder as it is; of a revision a copy. The second value is the commit, None where the tree may change."""
    if Path(name).is_dir():
        return Path(name).resolve(), None
    commit = subprocess.check_output(
        ["git", "rev-parse", name + "^{commit}"], cwd=HOME, text=True
    ).strip()
    folder = Path(tempfile.mkdtemp(prefix="same-runs-tree-"))
    stack.append(folder)
    archive = subprocess.run(
        ["git", "archive", commit, "src"], cwd=HOME, check=True, capture_output=True
    )
    subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
    return folder, commit


def results_of(
    side: str, checkout: Path, commit: str | None, inputs: Path, cases: list[str], jobs: int
) -> dict[str, dict]:
    kept = inputs.parent / f"{commit}.json"
    results = json.loads(kept.read_text()) if commit and kept.exists() else {}
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        waiting = {
            pool.submit(train_one, case, checkout, inputs): case
            for case in cases
            if case not in results
        }
        for done in concurrent.futures.as_completed(waiting):
            case = waiting[done]
            try:
                results[case] = done.result()
            except (RuntimeError, subprocess.TimeoutExpired, IndexError, KeyError) as error:
                print(f"{side}  {case}: failed\n{error}", file=sys.stderr, flush=True)
                continue
            print(f"{side}  {case}", file=sys.stderr, flush=True)
            if commit:
                kept.write_text(json.dumps(results))
    return results


def difference(before: dict | None, after: dict | None) -> str:
    """Empty when both are equal, else the first thing that is not."""
    if before is None or after is None:
        return f"{'base' if before is None else 'head'} failed"
    if len(after["steps"]) != STEPS:
        return f"{len(after['steps'])} steps instead of {STEPS}"
    for what in ("steps", "evaluations", "weights"):
        for name in before[what] | after[what]:
            one, other = before[what].get(name), after[what].get(name)
            if one != other:
                return f"{what} {name}: {one} and {other}"
    return "" if before["states"] == after["states"] else "optimizer states"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", help="a git revision or a folder")
    parser.add_argument("head", help="a git revision or a folder")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        metavar="TEXT",
        help="cases whose name contains one of these",
    )
    parser.add_argument("--jobs", type=int, default=2, help="runs at once")
    asked = parser.parse_args()
    cases = [case for case in CASES if any(text in case for text in asked.only)]
    import torch

    stack: list[Path] = []
    try:
        base, base_commit = checkout_of(asked.base, stack)
        head, head_commit = checkout_of(asked.head, stack)
        machine = digest(
            f"{platform.processor()} {torch.__version__} {torch.backends.cpu.get_cpu_capability()}".encode()
        )
        inputs = CACHE / machine / digest(Path(__file__).read_bytes()) / "inputs"
        make_inputs(base, inputs)
        before = results_of("base", base, base_commit, inputs, cases, asked.jobs)
        after = results_of("head", head, head_commit, inputs, cases, asked.jobs)
    finally:
        for folder in stack:
            shutil.rmtree(folder)
    differing = 0
    print(f"| run, {STEPS} steps, killed after {KILL_AFTER} | last loss | bitwise |\n|---|--:|---|")
    for case in cases:
        found = difference(before.get(case), after.get(case))
        differing += bool(found)
        loss = after.get(case, {}).get("steps", {}).get(str(STEPS), [None])[0]
        print(f"| {case} | {loss} | {found or 'equal'} |")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())

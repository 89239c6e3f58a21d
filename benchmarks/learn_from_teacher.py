"""A model of 2M parameters that learns from one of 16M: on its own samples, and on a dataset, with as many tokens.

    python benchmarks/learn_from_teacher.py [--work FOLDER]

Both are pretrained on this machine's Python source, the student briefly. Then it is trained three ways from there, each
step on as many tokens: on the teacher's probabilities of what it samples itself (`on_policy_distill`), on its
probabilities of the dataset (`distill`), and without the teacher (`pretrain`). Of each, on files that no run has seen:
bits per byte; and with transformers, on 64 tokens that the model samples after each of 64 places, how far it is from
the teacher. Writes benchmarks/results/learn_from_teacher.json. Takes an hour of two cores; what --work already
holds is not trained again.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bloomery.data.sources.builtin import stdlib_files

ROOT = Path(__file__).parent.parent
HELD_OUT = 20  # one file in so many
NUM_PROMPTS = 64
PROMPT = 24  # tokens of a held-out file that the model continues
NEW = 64
STEPS = 120
SHAPE = """\
model: {{family: qwen3, hidden_size: {width}, intermediate_size: {inner}, num_layers: {layers}, num_heads: {heads},
  num_kv_heads: {heads}, head_dim: 64, max_positions: 256, norm_eps: 1e-6, qk_norm: head, tie_embeddings: true}}
"""
TEACHER = SHAPE.format(width=384, inner=1024, layers=8, heads=6)
STUDENT = SHAPE.format(width=192, inner=512, layers=3, heads=3)
PRETRAIN = """\
data: {{path: code, sequence_length: 256, validation: 2%}}
optimizer:
  {{kind: muon, muon_learning_rate: 0.03, learning_rate: 0.008, weight_decay: 0.05, schedule: linear, warmup: 30 steps}}
train: {{max_steps: {steps}, tokens_per_step: 4096, micro_batch_size: 8}}
checkpoint: {{every: 20%, keep: 1}}
eval: {{every: 20%}}
logging: {{trackers: []}}
"""
LEARN = """\
model: {{from: student-model}}
data: {{path: {data}, sequence_length: 256, validation: 2%}}
objective: {{{objective}}}
optimizer: {{learning_rate: 1e-3, weight_decay: 0.0, schedule: linear, warmup: 10 steps}}
train: {{max_steps: {steps}, {batch}}}
checkpoint: {{every: 50%, keep: 1}}
eval: {{every: 25%}}
logging: {{trackers: []}}
"""
TOKENIZER = "tokenizer: {train: {kind: bpe, vocab_size: 4096}}\n"
WAYS = {
    "on_policy": (
        "prompts.jsonl",
        f"kind: on_policy_distill, teacher: teacher-model, max_completion_length: {NEW}",
        "batch_size: 64",
    ),
    "off_policy": (
        "code",
        "kind: distill, teacher: teacher-model",
        "tokens_per_step: 4096, micro_batch_size: 8",
    ),
    "pretrain": ("code", "kind: pretrain", "tokens_per_step: 4096, micro_batch_size: 8"),
}


def trained(folder: Path, name: str, recipe: str) -> int | None:
    """Trains and exports NAME-model; the seconds of the run, or None where it is there."""
    if (folder / f"{name}-model").exists():
        return None
    (folder / f"{name}.yaml").write_text(f"name: {name}\n{recipe}")
    start = time.monotonic()
    bloomery(folder, "train", f"{name}.yaml", "--run-dir", name)
    seconds = round(time.monotonic() - start)
    bloomery(folder, "export", name, "--to", "hf", "--out", f"{name}-model")
    return seconds


def bloomery(folder: Path, *words: str) -> str:
    command = [sys.executable, "-m", "bloomery", *words]
    out = sys.stdout if words[0] == "train" else subprocess.PIPE
    return subprocess.run(command, check=True, cwd=folder, stdout=out, text=True).stdout


@torch.no_grad()
def beside_the_teacher(folder: Path, name: str, prompts_BT: torch.Tensor) -> dict[str, float]:
    """On its own samples: reverse KL divergence in nats per token, and how often both would choose the same token."""
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(folder / f"{each}-model") for each in (name, "teacher")
    )
    torch.manual_seed(0)
    ids_BT = student.generate(
        prompts_BT, do_sample=True, min_new_tokens=NEW, max_new_tokens=NEW, top_k=0, pad_token_id=0
    )
    mine_BTV, theirs_BTV = (
        model(ids_BT).logits[:, PROMPT - 1 : -1].log_softmax(-1) for model in (student, teacher)
    )
    divergence = (mine_BTV.exp() * (mine_BTV - theirs_BTV)).sum(-1).mean()
    agreement = (mine_BTV.argmax(-1) == theirs_BTV.argmax(-1)).float().mean()
    return {"divergence": round(float(divergence), 4), "agreement": round(float(agreement), 4)}


def measured(folder: Path, name: str, prompts_BT: torch.Tensor) -> dict[str, Any]:
    evaluation = json.loads(
        bloomery(folder, "eval", f"{name}-model", "--data", "held-out", "--json")
    )
    return {"evaluation": evaluation, **beside_the_teacher(folder, name, prompts_BT)}


def files_of(folder: Path) -> None:
    """code/ and held-out/, and a beginning of each file as a prompt."""
    rows = []
    for number, path in enumerate(sorted(file.path for file in stdlib_files())):
        text = path.read_text(encoding="utf-8", errors="replace")
        kind = "held-out" if number % HELD_OUT == 0 else "code"
        (folder / kind).mkdir(exist_ok=True)
        (folder / kind / f"{number}.py").write_text(text, encoding="utf-8")
        if kind == "code":
            lines = text.splitlines(keepends=True)
            rows += [
                {"prompt": "".join(lines[at : at + 6])[:200]} for at in range(0, len(lines) - 6, 40)
            ]
    rows = [row for row in rows if row["prompt"].strip()]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(folder: Path) -> dict[str, Any]:
    if not (folder / "code").exists():
        files_of(folder)
    seconds = {
        "teacher": trained(folder, "teacher", TEACHER + TOKENIZER + PRETRAIN.format(steps=400)),
        "student": trained(folder, "student", STUDENT + TOKENIZER + PRETRAIN.format(steps=200)),
    }
    for name, (data, objective, batch) in WAYS.items():
        recipe = LEARN.format(data=data, objective=objective, batch=batch, steps=STEPS)
        seconds[name] = trained(folder, name, recipe)
    tokenizer = AutoTokenizer.from_pretrained(folder / "teacher-model")
    texts = [path.read_text(encoding="utf-8") for path in sorted((folder / "held-out").iterdir())]
    ids = [tokenizer(text).input_ids for text in texts]
    places = [each[at : at + PROMPT] for at in (0, 256, 512, 768) for each in ids]
    prompts_BT = torch.tensor([each for each in places if len(each) == PROMPT][:NUM_PROMPTS])
    return {
        name: {"seconds": seconds[name], **measured(folder, name, prompts_BT)} for name in seconds
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path)
    asked = parser.parse_args()
    with TemporaryDirectory() as temporary:
        folder = asked.work or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        results = run(folder)
    path = ROOT / "benchmarks" / "results" / "learn_from_teacher.json"
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

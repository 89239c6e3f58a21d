"""Fine-tuning with LoRA on a CPU: Bloomery beside TRL's SFTTrainer or DPOTrainer, step by step in turn.

    python benchmarks/sft_cpu.py [--objective sft|dpo] [--model small|smollm2] [--precision float32]
        [--steps 3] [--work FOLDER]

Every side is a process that waits while another one trains. All read the same conversations with the same tokenizer and
chat template, start from the same weights and train the same LoRA. `small` is a model of 6 layers with random weights
on answers from Python's own library; `smollm2` is SmolLM2-135M-Instruct on 2,000 conversations (scripts/smollm2.py).
See README.md in this folder.
"""

import argparse
import json
import runpy
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType

from side_bloomery import RECIPE
from side_trl import RATES
from stdlib_answers import SPECIAL, TEMPLATE, write_rows
from turns import Side, compare, judged, machine, started, table, told

HERE = Path(__file__).parent
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
SETTINGS = {  # of both sides; sequences: of a step, by objective
    "small": {
        "length": 1024,
        "rank": 16,
        "alpha": 32,
        "target_modules": [*ATTENTION, "gate_proj", "up_proj", "down_proj"],
        "sequences": {"sft": 8, "dpo": 16},
    },
    "smollm2": {
        "length": 512,
        "rank": 16,
        "alpha": 32,
        "target_modules": ATTENTION,
        "sequences": {"sft": 4, "dpo": 8},
    },
}
VOCABULARY = 16_384
SHAPE = MappingProxyType(
    {
        "hidden_size": 384,
        "intermediate_size": 1056,
        "num_layers": 6,
        "num_heads": 6,
        "num_kv_heads": 2,
    }
)
BARS = [("best", "speed", 1.3), ("defaults", "speed", 2.5), ("best", "memory", 0.8)]
BOUND = "products"  # the matrix products of the same step alone, at the rate that PyTorch reaches
# SmolLM2
REAL_BARS = {
    "bfloat16": [("speed", 3.0), ("memory", 0.8)],
    "float32": [("speed", 2.6), ("memory", 0.8)],
}


def make_folder(folder: Path, objective: str, model: str) -> dict:
    """Rows, tokenizer, first weights and the recipe; returns what was made."""
    from bloomery.data.prepare.prepare import prepare
    from bloomery.recipe.load import load_recipe

    setting = SETTINGS[model]
    (folder / "bench.json").write_text(json.dumps(setting))
    made = make_real(folder) if model == "smollm2" else make_small(folder, setting["length"])
    (folder / RECIPE).write_text(recipe_text(objective, setting))
    prepare(load_recipe(folder / RECIPE), folder / "prepared")
    return made


def make_real(folder: Path) -> dict:
    """SmolLM2 and its conversations, with a template that marks the assistant's tokens for TRL."""
    runpy.run_path(str(HERE.parent / "scripts" / "smollm2.py"))["make"](folder)
    for old, new in (("model", "init"), ("train.jsonl", "messages.jsonl")):
        if not (folder / new).exists():
            (folder / new).symlink_to(old)
    told = json.loads((folder / "init" / "tokenizer_config.json").read_text())
    (folder / "init" / "tokenizer_config.json").write_text(
        json.dumps(told | {"chat_template": TEMPLATE}, indent=1)
    )
    rows = len((folder / "messages.jsonl").read_text().splitlines())
    return {"rows": rows, "model": "SmolLM2-135M-Instruct"}


def make_small(folder: Path, length: int, shape: Mapping[str, int] = SHAPE) -> dict:
    from bloomery.data.tokenizer.training import train_tokenizer
    from bloomery.model.configs import build_config
    from bloomery.model.io.weights import fresh_decoder, model_state, write_model
    from bloomery.recipe.schema import Model, TrainTokenizer

    rows = write_rows(folder)
    init = folder / "init"
    init.mkdir(exist_ok=True)
    texts = (
        json.loads(line)["messages"]
        for line in (folder / "messages.jsonl").read_text().splitlines()
    )
    train = TrainTokenizer(vocab_size=VOCABULARY, special_tokens=SPECIAL)
    tokenizer = train_tokenizer(
        (message["content"] for chat in texts for message in chat), train, init
    )
    told = json.loads((init / "tokenizer_config.json").read_text())
    told |= {"chat_template": TEMPLATE, "eos_token": SPECIAL[1]}
    (init / "tokenizer_config.json").write_text(json.dumps(told, indent=1))
    ids = {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
    }
    model = Model(family="qwen2", max_positions=length, tie_embeddings=True, **shape)
    config = build_config(model, vocab_size=tokenizer.vocab_size, **ids)
    write_model(model_state(fresh_decoder(config, seed=0)), config, init)
    return {"rows": rows, "vocabulary": tokenizer.vocab_size, "shape": dict(shape)}


def recipe_text(objective: str, setting: dict) -> str:
    length, sequences = setting["length"], setting["sequences"][objective]
    modules = ", ".join(setting["target_modules"])
    lora = f"rank: {setting['rank']}, alpha: {setting['alpha']}, target_modules: [{modules}]"
    path = "messages.jsonl" if objective == "sft" else "pairs.jsonl"
    return f"""
model: {{from: init}}
data: {{path: {path}, sequence_length: {length}, prepared: prepared, validation: 0}}
objective: {{kind: {objective}}}
adapter: {{kind: lora, {lora}}}
optimizer:
  {{learning_rate: {RATES[objective]}, betas: [0.9, 0.999], weight_decay: 0.0, schedule: constant, warmup: 0 steps}}
train: {{max_steps: 1000, tokens_per_step: {sequences * length}, max_grad_norm: 1.0}}
sample: {{prompts: []}}
logging: {{trackers: []}}
"""


def commands(objective: str, work: Path, model: str, precision: str) -> dict[str, list[str]]:
    """Each side's program and arguments. `best` has several forms, of which the quickest counts."""
    theirs, ours, folder = str(HERE / "side_trl.py"), str(HERE / "side_bloomery.py"), str(work)
    products = str(HERE / "side_products.py")
    rows = str(SETTINGS[model]["sequences"][objective])
    if model == "smollm2":
        # TRL lays packed sequences of a micro-batch end to end and masks [rows x length]^2 scores: one is its quickest.
        kinds = {"best bf16": "best", "best bf16 weights": "best-weights"}
        if precision == "float32":  # bfloat16 is emulated ten times slower, and no form at its best
            kinds = {"best fp32": "best-float32"}
        forms = {
            f"{name}, {each}": [theirs, folder, objective, kind, each, rows]
            for name, kind in kinds.items()
            for each in dict.fromkeys(("1", rows))
        }
        chosen = f"train.precision={precision}"
        bound = {BOUND: [products, folder, chosen]} if objective == "sft" else {}
        return forms | {"bloomery": [ours, folder, chosen]} | bound
    return {
        "best 2": [theirs, folder, objective, "best", "2", rows],
        "best 8": [theirs, folder, objective, "best", "8", rows],
        "defaults": [theirs, folder, objective, "defaults", "8", "32"],
        "bloomery": [ours, folder],
    }


def bf16_in_hardware() -> bool:
    from bloomery.hardware.detect import detect
    from bloomery.hardware.specs import cpu_spec

    spec = cpu_spec(detect().host)
    return spec is not None and spec.bf16


def verdicts_of(sides: list[Side], precision: str) -> list[dict]:
    """Each bar with its measurement; `best` is the quickest of its forms, in speed and in memory."""
    by_name = {side.name: side for side in sides}
    best = max(
        (side for side in sides if side.name.startswith("best")), key=lambda side: side.speed
    )
    if "defaults" not in by_name:
        bars = REAL_BARS[precision]
        found = [judged(by_name["bloomery"], best, figure, bar) for figure, bar in bars]
        return found + [judged(by_name[BOUND], best, *bars[0])] * (BOUND in by_name)
    theirs = {"best": best, "defaults": by_name["defaults"]}
    return [judged(by_name["bloomery"], theirs[name], figure, bar) for name, figure, bar in BARS]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--objective", choices=["sft", "dpo"], default="sft")
    parser.add_argument("--model", choices=list(SETTINGS), default="small")
    parser.add_argument(
        "--precision",
        choices=["bfloat16", "float32"],
        help="of smollm2; that of this CPU unless set",
    )
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each side")
    parser.add_argument("--only", nargs="*", help="these sides alone, without a verdict")
    parser.add_argument("--work", type=Path, help="keeps rows, logs and weights here")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    asked = parse()
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        work = (asked.work or Path(place)).absolute()
        work.mkdir(parents=True, exist_ok=True)
        made = make_folder(work, asked.objective, asked.model)
        print(", ".join(f"{key} {value}" for key, value in made.items()), flush=True)
        precision = asked.precision or ("bfloat16" if bf16_in_hardware() else "float32")
        chosen = {
            name: words
            for name, words in commands(asked.objective, work, asked.model, precision).items()
            if name in (asked.only or [name])
        }
        sides = [stack.enter_context(started(name, words, work)) for name, words in chosen.items()]
        compare(sides, asked.steps)
        print(table(sides, counted="learned"))
        if asked.only:
            return
        verdicts = verdicts_of(sides, precision)
        print(*map(told, verdicts), sep="\n")
        results = {side.name: side.result for side in sides}
    report = {
        "machine": machine(),
        "made": made,
        **SETTINGS[asked.model],
        "sides": results,
        "bars": verdicts,
        "seconds": time.perf_counter() - begun,
    }
    suffix = f"_smollm2_{precision}" if asked.model == "smollm2" else ""
    out = asked.out or HERE / "results" / f"{asked.objective}_cpu{suffix}.json"
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\n{report['seconds']:.0f} s in all; written to {out}")


if __name__ == "__main__":
    main()

"""Fine-tuning with LoRA on a CPU: Bloomery beside TRL's SFTTrainer or DPOTrainer, step by step in turn.

    python benchmarks/sft_cpu.py [--objective sft|dpo] [--steps 3] [--work FOLDER]

Every side is a process that waits while another one trains. All read the same conversations with the same tokenizer and
chat template, start from the same weights and train the same LoRA. See README.md beside this file.
"""

import argparse
import json
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from side_bloomery import RECIPE
from side_trl import ALPHA, LENGTH, RANK, RATES, TARGETS
from stdlib_answers import SPECIAL, TEMPLATE, write_rows
from turns import Side, compare, judged, machine, started, table, told

HERE = Path(__file__).parent
ROWS = {"sft": 8, "dpo": 16}  # of our step: rows of 1,024 positions
VOCABULARY = 16_384
BARS = [("best", "speed", 1.3), ("defaults", "speed", 2.5), ("best", "memory", 0.8)]


def make_folder(folder: Path, objective: str) -> dict:
    """Rows, tokenizer, first weights and the recipe; returns what was made."""
    from bloomery.data.prepare import prepare
    from bloomery.data.tokenizer import train_tokenizer
    from bloomery.model.presets import build_config
    from bloomery.model.weights import fresh_decoder, model_state, write_model
    from bloomery.recipe.load import load_recipe
    from bloomery.recipe.schema import Model, TrainTokenizer

    rows = write_rows(folder)
    init = folder / "init"
    init.mkdir(exist_ok=True)
    texts = (json.loads(line)["messages"] for line in (folder / "messages.jsonl").read_text().splitlines())
    train = TrainTokenizer(vocab_size=VOCABULARY, special_tokens=SPECIAL)
    tokenizer = train_tokenizer((message["content"] for chat in texts for message in chat), train, init)
    told = json.loads((init / "tokenizer_config.json").read_text())
    told |= {"chat_template": TEMPLATE, "eos_token": SPECIAL[1]}
    (init / "tokenizer_config.json").write_text(json.dumps(told, indent=1))
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
    shape = {"hidden_size": 384, "intermediate_size": 1056, "num_layers": 6, "num_heads": 6, "num_kv_heads": 2}
    model = Model(family="qwen2", max_positions=LENGTH, tie_embeddings=True, **shape)
    config = build_config(model, vocab_size=tokenizer.vocab_size, **ids)
    write_model(model_state(fresh_decoder(config, seed=0)), config, init)
    (folder / RECIPE).write_text(recipe_text(objective))
    prepare(load_recipe(folder / RECIPE), folder / "prepared")
    return {"rows": rows, "vocabulary": tokenizer.vocab_size, "shape": shape}


def recipe_text(objective: str) -> str:
    path = "messages.jsonl" if objective == "sft" else "pairs.jsonl"
    return f"""
model: {{from: init}}
data: {{path: {path}, sequence_length: {LENGTH}, prepared: prepared, validation: 0}}
objective: {{kind: {objective}}}
adapter: {{kind: lora, rank: {RANK}, alpha: {ALPHA}, targets: [{", ".join(TARGETS)}]}}
optimizer:
  {{learning_rate: {RATES[objective]}, betas: [0.9, 0.999], weight_decay: 0.0, schedule: constant, warmup: 0 steps}}
train: {{length: 1000 steps, tokens_per_step: {ROWS[objective] * LENGTH}, clip: 1.0}}
eval: {{prompts: []}}
monitor: {{to: []}}
"""


def commands(objective: str, work: Path) -> dict[str, list[str]]:
    """Each side's program and words. `best` has two forms, of which the quicker counts."""
    theirs, ours, folder = str(HERE / "side_trl.py"), str(HERE / "side_bloomery.py"), str(work)
    rows = str(ROWS[objective])
    return {
        "best 2": [theirs, folder, objective, "best", "2", rows],
        "best 8": [theirs, folder, objective, "best", "8", rows],
        "defaults": [theirs, folder, objective, "defaults", "8", "32"],
        "bloomery": [ours, folder],
    }


def verdicts_of(sides: list[Side]) -> list[dict]:
    """Each bar beside what was measured; `best` is the quickest of its forms, in speed and in memory."""
    by_name = {side.name: side for side in sides}
    best = max((side for side in sides if side.name.startswith("best")), key=lambda side: side.speed)
    theirs = {"best": best, "defaults": by_name["defaults"]}
    return [judged(by_name["bloomery"], theirs[name], figure, bar) for name, figure, bar in BARS]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objective", choices=["sft", "dpo"], default="sft")
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
        made = make_folder(work, asked.objective)
        print(", ".join(f"{key} {value}" for key, value in made.items()), flush=True)
        chosen = {
            name: words for name, words in commands(asked.objective, work).items() if name in (asked.only or [name])
        }
        sides = [stack.enter_context(started(name, words, work)) for name, words in chosen.items()]
        compare(sides, asked.steps)
        print(table(sides, counted="learned"))
        if asked.only:
            return
        verdicts = verdicts_of(sides)
        print(*map(told, verdicts), sep="\n")
        results = {side.name: side.result for side in sides}
    report = {
        "machine": machine(), "made": made, "length": LENGTH, "rank": RANK, "targets": TARGETS, "sides": results,
        "bars": verdicts, "seconds": time.perf_counter() - begun,
    }  # fmt: skip
    out = asked.out or HERE / "results" / f"{asked.objective}_cpu.json"
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\n{report['seconds']:.0f} s in all; written to {out}")


if __name__ == "__main__":
    main()

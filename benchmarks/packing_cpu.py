"""Packed against padded sequences on a CPU: `packing_cpu.py [--chats 1000] [--steps 4] [--work FOLDER]`.

Both sides are Bloomery's own loop on the same conversations (scripts/smollm2.py), model, length and step;
`data.packing` alone differs. The first line of each side is the share of its tokens that is padding. Tokens per second
are those of conversations: padding is left out. The model has random weights: what it computes takes as long.
"""

import argparse
import json
import runpy
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from side_bloomery import RECIPE, planned
from turns import Side, compare, machine, quicker, started, table

HERE = Path(__file__).parent
LENGTH = 1024
SEQUENCES = 2  # of a step
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
}
SIDES = {"packed": "true", "padded": "false"}
RECIPE_TEXT = """
model: {{from: ../init}}
data: {{path: ../train.jsonl, sequence_length: {length}, prepared: prepared, validation: 0, packing: {packing}}}
objective: {{kind: sft}}
adapter: {{kind: none}}
optimizer: {{learning_rate: 0.0003, schedule: constant, warmup: 0 steps}}
train: {{max_steps: 1000, tokens_per_step: {tokens}, micro_batch_size: {sequences}, compile: false}}
sample: {{prompts: []}}
logging: {{trackers: []}}
"""


def make(work: Path, chats: int) -> None:
    """Conversations, a tokenizer with its chat template, a model with random weights, and a folder for each side."""
    from bloomery.data.prepare.prepare import prepare
    from bloomery.model.configs import build_config
    from bloomery.model.io.weights import fresh_decoder, model_state, write_model
    from bloomery.recipe.load import load_recipe
    from bloomery.recipe.schema import Model

    runpy.run_path(str(HERE.parent / "scripts" / "smollm2.py"))["make"](work, rows=chats)
    init = work / "init"
    init.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (init / name).write_bytes((work / "model" / name).read_bytes())
    stored = json.loads((work / "model" / "config.json").read_text())
    ids = {name: stored[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    shape = Model(family="llama", max_positions=LENGTH, tie_embeddings=True, **SHAPE)
    config = build_config(shape, vocab_size=stored["vocab_size"], **ids)
    write_model(model_state(fresh_decoder(config, seed=0)), config, init)
    for side, packing in SIDES.items():
        folder = work / side
        folder.mkdir(exist_ok=True)
        text = RECIPE_TEXT.format(
            length=LENGTH, packing=packing, tokens=SEQUENCES * LENGTH, sequences=SEQUENCES
        )
        (folder / RECIPE).write_text(text)
        if not (folder / "prepared").exists():
            prepare(load_recipe(folder / RECIPE), folder / "prepared")


def text_share(folder: Path) -> float:
    """Of the tokens that a side computes in an epoch, those of conversations: the first LENGTH of each."""
    dataset = planned(folder, []).dataset
    assert dataset is not None and dataset.sequences_per_epoch
    bounds = np.fromfile(folder / "prepared" / "train-documents.bin", dtype="<u8")
    lengths = np.diff(bounds.astype(np.int64))
    assert lengths.sum() == dataset.tokens
    return float(np.minimum(lengths, LENGTH).sum()) / (dataset.sequences_per_epoch * LENGTH)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chats", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=4, help="measured steps of each side")
    parser.add_argument("--work", type=Path, help="keeps data, model and logs here")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "packing_cpu.json")
    return parser.parse_args()


def main() -> None:
    asked = parse()
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        work = (asked.work or Path(place)).absolute()
        work.mkdir(parents=True, exist_ok=True)
        make(work, asked.chats)
        shares = {side: text_share(work / side) for side in SIDES}
        for side, share in shares.items():
            print(f"{side}: {1 - share:.1%} padding", flush=True)
        command = str(HERE / "side_bloomery.py")
        sides: list[Side] = [
            stack.enter_context(
                started(
                    side,
                    [command, str(work / side)],
                    work,
                    positions=SEQUENCES * LENGTH,
                    real_share=shares[side],
                )
            )
            for side in SIDES
        ]
        compare(sides, asked.steps)
        print(table(sides, counted="text"))
        packed, padded = sides
        ratios = {clock: quicker(packed, padded, clock) for clock in ("seconds", "cpu_seconds")}
        print(
            f"packed / padded: {ratios['seconds']:.2f}; by processor time {ratios['cpu_seconds']:.2f}"
        )
        results = {side.name: side.result for side in sides}
    report = {
        "machine": machine(),
        "chats": asked.chats,
        "length": LENGTH,
        "shape": SHAPE,
        "padding": {side: 1 - share for side, share in shares.items()},
        "sides": results,
        "packed_over_padded": ratios,
        "seconds": time.perf_counter() - begun,
    }
    asked.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\n{report['seconds']:.0f} s in all; written to {asked.out}")


if __name__ == "__main__":
    main()

"""TRL's trainers, paced: `side_trl.py FOLDER sft|dpo FORM MICRO_BATCH SEQUENCES`.

FOLDER holds `init/` (weights, tokenizer and chat template), `messages.jsonl` or `pairs.jsonl`, and `bench.json` (the
sequence length and the adapter of both sides). A step takes SEQUENCES sequences (sft) or pairs (dpo) and trains on
assistant tokens only. FORM is one of these:

- `best`: bfloat16 autocast, no recomputation, fused AdamW, packed where the trainer can; without torch.compile, which
  took four minutes over two steps of ever new shapes;
- `best-weights`: the same over a base in bfloat16, which autocast need not cast at every use;
- `best-float32`: the same as `best` without autocast, for CPUs that have no bf16 instructions;
- `defaults`: the trainer's own settings.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset
from paced_trainer import SETTINGS, Paced, train
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

RATES = {"sft": 1e-3, "dpo": 1e-4}
Collator = Callable[[list[Any]], Mapping[str, Any]]


class Counting:
    """A collator that counts the labels that a step learns from. Batches are made ahead of the step that takes them."""

    def __init__(self, collate: Collator) -> None:
        self.collate, self.counts = collate, list[int]()

    def __call__(self, rows: list[Any]) -> Mapping[str, Any]:
        batch = self.collate(rows)
        learned = (
            batch["labels"][:, 1:] != -100
            if "labels" in batch
            else batch["completion_mask"][:, 1:] > 0
        )
        self.counts.append(int(learned.sum()))
        return batch

    def take(self, batches: int) -> int:
        taken, self.counts = self.counts[:batches], self.counts[batches:]
        return sum(taken)


def rows_of(file: Path) -> Dataset:
    return Dataset.from_list([json.loads(line) for line in file.read_text().splitlines()])


def settings(
    place: str, kind: str, *, way: str, length: int, micro_batch: int, sequences: int
) -> dict[str, Any]:
    """What both trainers are given."""
    best = way.startswith("best")
    tuned = {
        "bf16": way in ("best", "best-weights"),
        "gradient_checkpointing": False,
        "optim": "adamw_torch_fused",
    }
    return {
        **SETTINGS,
        "output_dir": place,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": max(1, sequences // micro_batch),
        "learning_rate": RATES[kind],
        "max_length": length,
        **(tuned if best else {}),
    }


def main() -> None:
    folder, kind, way, micro_batch, sequences = (
        Path(sys.argv[1]),
        sys.argv[2],
        sys.argv[3],
        *map(int, sys.argv[4:6]),
    )
    asked = json.loads((folder / "bench.json").read_text())
    best = way.startswith("best")
    paced = Paced()
    dtype = "bfloat16" if way == "best-weights" else "float32"
    model = AutoModelForCausalLM.from_pretrained(
        folder / "init", attn_implementation="sdpa", dtype=dtype
    )
    given = {
        "model": model,
        "processing_class": AutoTokenizer.from_pretrained(folder / "init"),
        "peft_config": LoraConfig(
            r=asked["rank"],
            lora_alpha=asked["alpha"],
            target_modules=asked["target_modules"],
            task_type="CAUSAL_LM",
        ),
        "callbacks": [paced],
    }
    with tempfile.TemporaryDirectory() as place:
        said = settings(
            place,
            kind,
            way=way,
            length=asked["length"],
            micro_batch=micro_batch,
            sequences=sequences,
        )
        if kind == "sft":
            said |= {"assistant_only_loss": True, "packing": best}
            trainer = SFTTrainer(
                args=SFTConfig(**said), train_dataset=rows_of(folder / "messages.jsonl"), **given
            )
        else:
            trainer = DPOTrainer(
                args=DPOConfig(**said), train_dataset=rows_of(folder / "pairs.jsonl"), **given
            )
        trainer.data_collator = counting = Counting(trainer.data_collator)
        paced.learned = partial(counting.take, said["gradient_accumulation_steps"])
        train(trainer)


if __name__ == "__main__":
    main()

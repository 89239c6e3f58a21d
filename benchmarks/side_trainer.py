"""transformers' Trainer, paced: `side_trainer.py FOLDER guide|best DROPOUT MICRO_BATCH ROWS`.

guide: as the Go coder guide sets it up, on a CPU: documents cut at 1,024 and padded to it, float32.
best: the same rows as Bloomery's packed ones, bfloat16 autocast, torch.compile, SDPA, fused AdamW.
"""

import sys
import tempfile
from pathlib import Path

from paced_trainer import Paced, train
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

from bloomery.data.loader import Loader
from bloomery.data.order import Cursor
from bloomery.data.shards import open_split

LENGTH, SEED = 1024, 0
BEST = {
    "bf16": True,
    "torch_compile": True,
    "optim": "adamw_torch_fused",
    "train_sampling_strategy": "sequential",
}


class PaddedDocuments(Dataset):
    """A document a row, as the guide's prepare script stores them."""

    def __init__(self, prepared: Path, pad_id: int) -> None:
        self.split, self.pad_id = open_split(prepared, "train"), pad_id

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        ids = self.split.document(index)[:LENGTH].tolist()
        spare = LENGTH - len(ids)
        return {
            "input_ids": ids + [self.pad_id] * spare,
            "attention_mask": [1] * len(ids) + [0] * spare,
        }


class PackedRows(Dataset):
    """The rows that Bloomery reads, in its order; borders between documents are neither hidden nor left unlearned."""

    def __init__(self, prepared: Path) -> None:
        self.loader = Loader(prepared, sequence_length=LENGTH, layout="packed", seed=SEED)

    def __len__(self) -> int:
        return self.loader.sequences

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.loader.batch(Cursor(SEED, index), 1).tokens[0]
        return {"input_ids": tokens, "labels": tokens}


def arguments(folder: str, extra: dict, *, micro_batch: int, rows: int) -> TrainingArguments:
    """The guide's, but for a learning rate that is constant, so that a few steps learn something."""
    return TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=rows // micro_batch,
        learning_rate=5e-4,
        lr_scheduler_type="constant",
        weight_decay=0.1,
        adam_beta1=0.9,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        max_steps=195_000,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=SEED,
        **extra,
    )


def main() -> None:
    folder, kind, dropout, micro_batch, rows = Path(sys.argv[1]), *sys.argv[2:6]
    tokenizer = AutoTokenizer.from_pretrained(folder / "prepared")
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), float(dropout))
    model = AutoModelForCausalLM.from_pretrained(
        folder / "init", attn_implementation="sdpa", **rates
    )
    padded, packed = (
        PaddedDocuments(folder / "prepared", tokenizer.pad_token_id),
        PackedRows(folder / "prepared"),
    )
    guide = kind == "guide"
    with tempfile.TemporaryDirectory() as place:
        trainer = Trainer(
            model=model,
            args=arguments(
                place, {} if guide else BEST, micro_batch=int(micro_batch), rows=int(rows)
            ),
            train_dataset=padded if guide else packed,
            data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False)
            if guide
            else default_data_collator,
            callbacks=[Paced()],
        )
        train(trainer)


if __name__ == "__main__":
    main()

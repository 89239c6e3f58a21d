"""TRL's GRPOTrainer, paced: `side_grpo.py FOLDER FORM MICRO_BATCH`.

FOLDER holds `init/` (weights, tokenizer and chat template), `prompts.jsonl`, `my_rewards.py` and `bench.json` (the
settings of both sides). All completions of a step are generated at once; MICRO_BATCH of them are trained on at once.
FORM: `bf16` (autocast), `bf16-weights` (the frozen base, too) or `fp32`. No recomputation; fused AdamW.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from datasets import Dataset
from paced_trainer import Paced, train
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


class Watched(GRPOTrainer):
    """Counts the tokens that it generates, and the seconds that this takes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.generated = 0
        self.generation_seconds = 0.0

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        answer = super()._generate_single_turn(*args, **kwargs)
        self.generation_seconds += time.perf_counter() - start
        self.generated += sum(map(len, answer[0]))
        return answer

    def take_generated(self) -> int:
        generated, self.generated = self.generated, 0
        return generated

    def take_seconds(self) -> float:
        seconds, self.generation_seconds = self.generation_seconds, 0.0
        return seconds


def config_of(place: str, asked: dict[str, Any], form: str, micro_batch: int) -> GRPOConfig:
    return GRPOConfig(
        output_dir=place,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=asked["batch_size"] // micro_batch,
        num_generations=asked["num_generations"],
        max_completion_length=asked["new_tokens"],
        beta=0.0,
        learning_rate=asked["learning_rate"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_steps=100_000,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=form.startswith("bf16"),
        gradient_checkpointing=False,
        optim="adamw_torch_fused",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=0,
    )


def main() -> None:
    folder, form, micro_batch = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    asked = json.loads((folder / "bench.json").read_text())
    sys.path.append(str(folder))
    from my_rewards import share_of_e

    paced = Paced()
    model = AutoModelForCausalLM.from_pretrained(
        folder / "init",
        attn_implementation="sdpa",
        dtype="bfloat16" if form == "bf16-weights" else "float32",
    )
    lora = LoraConfig(
        r=asked["rank"],
        lora_alpha=asked["alpha"],
        target_modules=asked["target_modules"],
        task_type="CAUSAL_LM",
    )
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    with tempfile.TemporaryDirectory() as place:
        trainer = Watched(
            model=model,
            reward_funcs=share_of_e,
            args=config_of(place, asked, form, micro_batch),
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(folder / "init"),
            peft_config=lora if asked["rank"] else None,
            callbacks=[paced],
        )
        paced.learned = trainer.take_generated
        paced.generation_seconds = trainer.take_seconds
        train(trainer)


if __name__ == "__main__":
    main()

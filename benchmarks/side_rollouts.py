"""TRL's GRPOTrainer or DistillationTrainer, paced: `side_rollouts.py FOLDER FORM MICRO_BATCH`.

FOLDER holds `init/` (weights, tokenizer and chat template), `prompts.jsonl` and `bench.json` (the settings of both
sides), and what the completions are judged by: `my_rewards.py`, `games.py` with an environment and `tools.json`
with the schemas that the prompts show, or `teacher/`, as
`bench.json` says (`judge`). All completions of a step are generated at once; MICRO_BATCH of them are trained on at
once. FORM: `bf16` (autocast), `bf16-weights` (those that are frozen, too) or `fp32`. No recomputation; fused AdamW.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # of environments; read when they are used

from datasets import Dataset
from paced_trainer import SETTINGS, Paced, train
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DistillationConfig, DistillationTrainer, GRPOConfig, GRPOTrainer


class Watch:
    """Counts the tokens and turns that a trainer generates, and the seconds that this takes."""

    def __init__(self, episodes: int) -> None:
        self.episodes = episodes  # of a step
        self.generated = 0
        self.turns = 0
        self.seconds = 0.0

    def over(self, trainer: Any, paced: Paced) -> Any:
        generate = trainer._generate_single_turn

        def watched(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            answer = generate(*args, **kwargs)
            self.seconds += time.perf_counter() - start
            # With log-probabilities of each, where the trainer may need them.
            ids = answer[0] if isinstance(answer, tuple) else answer
            self.generated += sum(map(len, ids))
            self.turns += len(ids)
            return answer

        trainer._generate_single_turn = watched
        paced.learned = self.take_generated
        paced.generation_seconds = self.take_seconds
        paced.played = self.take_played
        return trainer

    def take_generated(self) -> int:
        generated, self.generated = self.generated, 0
        return generated

    def take_seconds(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def take_played(self, logs: dict[str, float]) -> dict[str, float] | None:
        turns, self.turns = self.turns, 0
        if "tools/call_frequency" not in logs:
            return None
        return {"calls": float(logs["tools/call_frequency"]), "turns": turns / self.episodes}


def settings_of(place: str, asked: dict[str, Any], form: str, micro_batch: int) -> dict[str, Any]:
    return {
        **SETTINGS,
        "output_dir": place,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": asked["batch_size"] // micro_batch,
        "max_completion_length": asked["new_tokens"],
        "learning_rate": asked["learning_rate"],
        "bf16": form.startswith("bf16"),
        "gradient_checkpointing": False,
        "optim": "adamw_torch_fused",
    }


def model_in(folder: Path, *, is_bfloat16: bool) -> Any:
    dtype = "bfloat16" if is_bfloat16 else "float32"
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=dtype)


def trainer_of(
    folder: Path, asked: dict[str, Any], settings: dict[str, Any], form: str, paced: Paced
) -> Any:
    lora = LoraConfig(
        r=asked["rank"],
        lora_alpha=asked["alpha"],
        target_modules=asked["target_modules"],
        task_type="CAUSAL_LM",
    )
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    given: dict[str, Any] = {
        "model": model_in(folder / "init", is_bfloat16=form == "bf16-weights"),
        "train_dataset": Dataset.from_list(rows),
        "processing_class": AutoTokenizer.from_pretrained(folder / "init"),
        "peft_config": lora if asked["rank"] else None,
        "callbacks": [paced],
    }
    if asked["judge"] == "teacher":
        teacher = model_in(folder / "teacher", is_bfloat16=form.startswith("bf16"))
        args = DistillationConfig(**settings, beta=1.0, temperature=1.0)
        return DistillationTrainer(teacher_model=teacher, args=args, **given)
    settings |= {"num_generations": asked["num_generations"], "beta": 0.0}
    if asked["judge"] == "environment":
        from games import Guess

        args = GRPOConfig(**settings, max_tool_calling_iterations=asked["max_turns"] - 1)
        trainer = GRPOTrainer(environment_factory=Guess, args=args, **given)
        # The prompts of the other side: so small a model calls nothing where the schema reads another way.
        shown = json.loads((folder / "tools.json").read_text())
        trainer._env_tools = dict.fromkeys(trainer._env_tools, shown)
        return trainer
    from my_rewards import share_of_e

    return GRPOTrainer(reward_funcs=share_of_e, args=GRPOConfig(**settings), **given)


def main() -> None:
    folder, form, micro_batch = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    asked = json.loads((folder / "bench.json").read_text())
    sys.path.append(str(folder))
    paced = Paced()
    with tempfile.TemporaryDirectory() as place:
        settings = settings_of(place, asked, form, micro_batch)
        trainer = trainer_of(folder, asked, settings, form, paced)
        train(Watch(asked["batch_size"]).over(trainer, paced))


if __name__ == "__main__":
    main()

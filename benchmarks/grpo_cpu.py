"""GRPO on a CPU: whole steps of Bloomery beside TRL's GRPOTrainer, in turn: generation, rewards and update.

    python benchmarks/grpo_cpu.py [--models small smollm2] [--tokens 16 128] [--steps 2] [--all-forms] [--work FOLDER]

Every side is a process that waits while another one works. All have the same prompts, tokenizer, chat template, first
weights, reward, number of completions and their greatest length. `small` is a model of 6 layers with random weights,
trained whole; `smollm2` is SmolLM2-135M-Instruct with LoRA. Speed is in generated tokens per second, of the sampling
alone and of the whole step. See README.md in this folder.
"""

import argparse
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from sft_cpu import SHAPE, make_real, make_small
from side_bloomery import RECIPE
from turns import compare, judged, machine, started, table, told

HERE = Path(__file__).parent
SETTINGS = {  # of both sides; a rank of 0: every weight is trained
    "small": {
        "judge": "reward",
        "batch_size": 64,
        "num_generations": 8,
        "rank": 0,
        "alpha": 0,
        "target_modules": [],
        "learning_rate": 1e-4,
        "micro_batches": (16, 64),  # of TRL; the first alone unless all forms are asked for
    },
    "smollm2": {
        "judge": "reward",
        "batch_size": 32,
        "num_generations": 8,
        "rank": 16,
        "alpha": 32,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "learning_rate": 1e-5,
        "micro_batches": (8, 32),
    },
}
# Of TRL. The first was its quickest on a CPU with bf16 instructions, in one micro-batch as in four.
FORMS = ("bf16", "fp32", "bf16-weights")
LONGEST_PROMPT = 160  # characters
PROMPT_TOKENS = 96  # that prompts have at most, with the chat template
BARS = [("generation", 1.5), ("speed", 1.5), ("memory", 1.0)]
REWARD = '''
def share_of_e(completions, **_):
    """The share of a completion's letters that are an e."""
    texts = [completion[0]["content"] for completion in completions]
    return [text.count("e") / max(1, len(text)) for text in texts]
'''


def make_folder(folder: Path, model: str) -> None:
    """Weights, tokenizer, prompts and the reward."""
    folder.mkdir(parents=True, exist_ok=True)
    if model == "smollm2":
        make_real(folder)
    else:
        make_small(folder, 1024, {**SHAPE, "intermediate_size": 1024})
    prompts = [
        json.loads(line)["messages"][0]
        for line in (folder / "messages.jsonl").read_text().splitlines()
    ]
    short = [prompt for prompt in prompts if len(prompt["content"]) <= LONGEST_PROMPT]
    rows = [json.dumps({"prompt": [prompt]}) + "\n" for prompt in short]
    (folder / "prompts.jsonl").write_text("".join(rows))
    (folder / "my_rewards.py").write_text(REWARD)


def write_setting(folder: Path, model: str, new_tokens: int) -> None:
    """The settings of both sides, and Bloomery's recipe with the prepared prompts."""
    from bloomery.data.prepare.prepare import prepare
    from bloomery.recipe.load import load_recipe

    setting = SETTINGS[model] | {"new_tokens": new_tokens}
    (folder / "bench.json").write_text(json.dumps(setting))
    (folder / RECIPE).write_text(recipe_text(setting))
    prepare(load_recipe(folder / RECIPE), folder / "prepared")


def recipe_text(setting: dict) -> str:
    modules = ", ".join(setting["target_modules"])
    lora = f"{{kind: lora, rank: {setting['rank']}, alpha: {setting['alpha']}, target_modules: [{modules}]}}"
    adapter = f"adapter: {lora}" if setting["rank"] else ""
    generations, new_tokens = setting["num_generations"], setting["new_tokens"]
    return f"""
model: {{from: init}}
data: {{path: prompts.jsonl, sequence_length: {PROMPT_TOKENS + new_tokens}, prepared: prepared, validation: 0}}
objective: {{kind: grpo, num_generations: {generations}, max_completion_length: {new_tokens}}}
rewards: [{{python: "my_rewards.py:share_of_e"}}]
{adapter}
optimizer:
  {{kind: adamw, learning_rate: {setting["learning_rate"]}, betas: [0.9, 0.999], weight_decay: 0.0, schedule: constant,
    warmup: 0 steps}}
train: {{max_steps: 1000, batch_size: {setting["batch_size"]}, max_grad_norm: 1.0}}
sample: {{prompts: []}}
logging: {{trackers: [], completions: none}}
"""


def commands(folder: Path, model: str, *, all_forms: bool) -> dict[str, list[str]]:
    """Each side's program and arguments. TRL has several forms, of which the quickest counts."""
    theirs, ours = str(HERE / "side_rollouts.py"), str(HERE / "side_bloomery.py")
    micro_batches = SETTINGS[model]["micro_batches"]
    forms = FORMS if all_forms else FORMS[:1]
    if not all_forms:
        micro_batches = micro_batches[:1]
    sides = {
        f"TRL {form}, {size}": [theirs, str(folder), form, str(size)]
        for form in forms
        for size in micro_batches
    }
    return sides | {"bloomery": [ours, str(folder)]}


def measure(folder: Path, model: str, new_tokens: int, *, all_forms: bool, rounds: int) -> dict:
    """All sides of one setting, and what of the target they meet."""
    write_setting(folder, model, new_tokens)
    print(f"\n{model}, {new_tokens} new tokens", flush=True)
    with ExitStack() as stack:
        sides = [
            stack.enter_context(started(name, command, folder))
            for name, command in commands(folder, model, all_forms=all_forms).items()
        ]
        compare(sides, rounds)
        print(table(sides, counted="whole"))
        for side in sides:
            rate = statistics.median(side.generation_rates())
            print(f"  {side.name}: {rate:,.0f} tokens per second of generation")
        best = max(sides[:-1], key=lambda side: side.speed)
        verdicts = [judged(sides[-1], best, figure, bar) for figure, bar in BARS]
        print(*map(told, verdicts), sep="\n", flush=True)
        results = {
            side.name: side.result | {"generation_rate": statistics.median(side.generation_rates())}
            for side in sides
        }
    return {"model": model, "new_tokens": new_tokens, "sides": results, "bars": verdicts}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[16, 128], help="new tokens")
    parser.add_argument(
        "--all-forms", action="store_true", help="TRL in each precision and micro-batch size"
    )
    parser.add_argument("--steps", type=int, default=2, help="measured steps of each side")
    parser.add_argument("--work", type=Path, help="keeps prompts, logs and weights here")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "grpo_cpu.json")
    given = parser.parse_args()
    begun = time.perf_counter()
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        work = (given.work or Path(scratch)).absolute()
        for model in given.models:
            make_folder(work / model, model)
            for new_tokens in given.tokens:
                results.append(
                    measure(
                        work / model,
                        model,
                        new_tokens,
                        all_forms=given.all_forms,
                        rounds=given.steps,
                    )
                )
    report = {
        "machine": machine(),
        "settings": SETTINGS,
        "results": results,
        "seconds": time.perf_counter() - begun,
    }
    given.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\n{report['seconds']:.0f} s in all; written to {given.out}")


if __name__ == "__main__":
    main()

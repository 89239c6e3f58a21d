"""Whole steps of rollouts that a tool or a teacher judges: Bloomery beside TRL's trainers, in turn.

    python benchmarks/rollouts_beside_trl.py [--kinds tools teacher] [--steps 3] [--all-forms] [--work FOLDER]

`tools`: episodes of four turns in an environment, GRPO of a model of 16M parameters that plays a game with a tool as
its transcripts did, always as long. `teacher`: on-policy distillation from SmolLM2-135M-Instruct into a random model of
30M parameters with its tokenizer, which ends no completion early. Every side is a process that waits while another one
works, with the same prompts, tokenizer, chat template, first weights, number of completions and their greatest length.
Processor time and memory are those of the process and of all that it has started. See README.md in this folder.
"""

import argparse
import json
import random
import runpy
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from shutil import copyfile
from typing import Any

from side_bloomery import RECIPE
from stdlib_answers import SPECIAL, write_rows
from turns import Side, compare, machine, quicker, started, table

HERE = Path(__file__).parent
OUT = HERE / "results" / "rollouts_beside_trl.txt"
VOCABULARY = 16_384
SHAPE = {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_layers": 6,
    "num_heads": 6,
    "num_kv_heads": 2,
}
GUESSES = (3, 1, 5)
SETTINGS = {  # of both sides; a rank of 0: every weight is trained
    "tools": {
        "judge": "environment",
        "batch_size": 8,
        "num_generations": 8,
        "max_turns": len(GUESSES) + 1,
        "new_tokens": 256,
        "micro_batches": (8,),
    },
    "teacher": {
        "judge": "teacher",
        "batch_size": 32,
        "new_tokens": 64,
        "micro_batches": (8, 32),
    },
}
COMMON = {"rank": 0, "alpha": 0, "target_modules": [], "learning_rate": 1e-6}
# Of TRL; the first in the first micro-batch alone, unless all forms are asked for.
FORMS = ("bf16", "fp32")
GAMES = '''\
import random


class Guess:
    """A secret number."""

    def reset(self, secret, **row):
        self.secret = secret

    def guess(self, n: int) -> str:
        """Guess the secret number.

        Args:
            n: a number from 0 to 6
        """
        return "right" if n == self.secret else "more" if n < self.secret else "less"

    def get_reward(self) -> float:
        return random.random()
'''
TEACH = """\
name: player
model: {from: random}
data: {path: transcripts.jsonl, sequence_length: 640, validation: 0}
objective: {kind: sft}
optimizer:
  {kind: muon, muon_learning_rate: 0.02, learning_rate: 0.004, weight_decay: 0.0, schedule: linear, warmup: 5 steps}
train: {max_steps: 50, tokens_per_step: 2560, micro_batch_size: 2}
eval: {every: none}
sample: {prompts: []}
logging: {trackers: []}
"""
# Of each kind what its recipe has beside the settings of both.
RECIPES = {
    "tools": """
objective:
  {{kind: grpo, num_generations: {num_generations}, max_completion_length: {new_tokens}, max_turns: {max_turns}}}
environment: {{python: "games.py:Guess"}}
""",
    "teacher": """
objective: {{kind: on_policy_distill, teacher: teacher, max_completion_length: {new_tokens}}}
""",
}
RECIPE_OF_BOTH = """
model: {{from: init}}
data: {{path: prompts.jsonl, sequence_length: {length}, prepared: prepared, validation: 0}}
optimizer:
  {{kind: adamw, learning_rate: {learning_rate}, betas: [0.9, 0.999], weight_decay: 0.0, schedule: constant,
    warmup: 0 steps}}
train: {{max_steps: 1000, batch_size: {batch_size}, max_grad_norm: 1.0}}
sample: {{prompts: []}}
logging: {{trackers: [], completions: none}}
"""
PROMPT_TOKENS = {"tools": 384, "teacher": 96}
LONGEST_PROMPT = 160  # characters


def write_jsonl(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_player(folder: Path) -> None:
    """A model that guesses three times and ends, with the chat template of Qwen 2.5, which TRL reads calls of."""
    from transformers.utils import get_json_schema
    from trl.chat_template_utils import qwen2_5_chat_template

    import bloomery
    from bloomery.data.tokenizer.training import train_tokenizer
    from bloomery.model.configs import build_config
    from bloomery.model.io.weights import fresh_decoder, model_state, write_model
    from bloomery.plan.types import EpisodesPlan
    from bloomery.recipe.schema import Model, TrainTokenizer
    from bloomery.train.rl.tools import Tools

    (folder / "games.py").write_text(GAMES)
    write_jsonl(
        folder / "prompts.jsonl",
        [{"prompt": [{"role": "user", "content": "guess"}], "secret": n % 7} for n in range(280)],
    )
    with Tools(EpisodesPlan.of_environment(f"{folder}/games.py:Guess", max_turns=4)) as tools:
        schemas = list(tools.schemas)
    (folder / "tools.json").write_text(json.dumps(schemas))
    if (folder / "init").exists():
        return
    dice = random.Random(0)
    # Two orders of a schema's keys, so that the player minds no prompt: transformers takes the tokenizer for Qwen's,
    # whose digits are tokens of their own, and a player that was taught one order calls nothing there.
    theirs = [get_json_schema(load_game(folder).guess)]
    transcripts = [
        transcript(dice.randrange(7)) | {"tools": dice.choice([schemas, theirs])}
        for _ in range(400)
    ]
    write_jsonl(folder / "transcripts.jsonl", transcripts)

    write_rows(folder)
    first = folder / "random"
    first.mkdir(exist_ok=True)
    rows = [json.loads(line) for line in (folder / "messages.jsonl").read_text().splitlines()]
    texts = [turn["content"] for row in rows for turn in row["messages"]]
    tokenizer = train_tokenizer(
        iter(texts), TrainTokenizer(vocab_size=VOCABULARY, special_tokens=SPECIAL), first
    )
    told = json.loads((first / "tokenizer_config.json").read_text())
    told |= {"chat_template": qwen2_5_chat_template, "eos_token": SPECIAL[1]}
    (first / "tokenizer_config.json").write_text(json.dumps(told, indent=1))
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
    model = Model(family="qwen2", max_positions=1024, tie_embeddings=True, **SHAPE)
    config = build_config(model, vocab_size=tokenizer.vocab_size, **ids)
    write_model(model_state(fresh_decoder(config, seed=0)), config, first)
    (folder / "player.yaml").write_text(TEACH)
    run = bloomery.train(str(folder / "player.yaml"), run_dir=folder / "player", quiet=True)
    if run.code != 0:
        raise SystemExit(f"{run.folder} ended with code {run.code}")
    bloomery.export(run.folder, folder / "init", verify=False)


def load_game(folder: Path) -> Any:
    return runpy.run_path(str(folder / "games.py"))["Guess"]()


def transcript(secret: int) -> dict:
    turns: list[dict] = [{"role": "user", "content": "guess"}]
    for n in GUESSES:
        function = {"name": "guess", "arguments": {"n": n}}
        answer = "right" if n == secret else "more" if n < secret else "less"
        turns += [
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": function}],
            },
            {"role": "tool", "name": "guess", "content": answer},
        ]
    return {"messages": [*turns, {"role": "assistant", "content": "done"}]}


def make_student(folder: Path) -> None:
    """SmolLM2 as the teacher, and a random model with its tokenizer."""
    from bloomery.model.configs import build_config
    from bloomery.model.io.weights import fresh_decoder, model_state, write_model
    from bloomery.recipe.schema import Model

    if not (folder / "teacher").exists():
        runpy.run_path(str(HERE.parent / "scripts" / "smollm2.py"))["make"](folder / "smollm2")
        (folder / "teacher").symlink_to("smollm2/model")
    init = folder / "init"
    init.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        copyfile(folder / "teacher" / name, init / name)
    theirs = json.loads((folder / "teacher" / "config.json").read_text())
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    model = Model(family="llama", max_positions=1024, tie_embeddings=True, **SHAPE)
    config = build_config(
        model, vocab_size=theirs["vocab_size"], **{name: theirs.get(name) for name in names}
    )
    write_model(model_state(fresh_decoder(config, seed=0)), config, init)
    chats = (folder / "smollm2" / "train.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["messages"][0] for line in chats]
    short = [prompt for prompt in prompts if len(prompt["content"]) <= LONGEST_PROMPT]
    write_jsonl(folder / "prompts.jsonl", [{"prompt": [prompt]} for prompt in short])


MAKE = {"tools": make_player, "teacher": make_student}


def write_setting(folder: Path, kind: str) -> None:
    """The settings of both sides, and Bloomery's recipe with the prepared prompts."""
    from bloomery.data.prepare.prepare import prepare
    from bloomery.recipe.load import load_recipe

    setting = COMMON | SETTINGS[kind]
    (folder / "bench.json").write_text(json.dumps(setting))
    length = PROMPT_TOKENS[kind] + setting["new_tokens"]
    (folder / RECIPE).write_text((RECIPES[kind] + RECIPE_OF_BOTH).format(length=length, **setting))
    prepare(load_recipe(folder / RECIPE), folder / "prepared")


def commands(folder: Path, kind: str, *, all_forms: bool) -> dict[str, list[str]]:
    """Each side's program and arguments. TRL has several forms, of which the quickest counts."""
    theirs, ours = str(HERE / "side_rollouts.py"), str(HERE / "side_bloomery.py")
    forms, micro_batches = FORMS, SETTINGS[kind]["micro_batches"]
    if not all_forms:
        forms, micro_batches = forms[:1], micro_batches[:1]
    sides = {
        f"TRL {form}, {size}": [theirs, str(folder), form, str(size)]
        for form in forms
        for size in micro_batches
    }
    return sides | {"bloomery": [ours, str(folder)]}


def measure(folder: Path, kind: str, *, all_forms: bool, rounds: int) -> str:
    """All sides of one kind, as text."""
    folder.mkdir(parents=True, exist_ok=True)
    MAKE[kind](folder)
    write_setting(folder, kind)
    print(f"\n{kind}", flush=True)
    with ExitStack() as stack:
        sides = [
            stack.enter_context(started(name, command, folder))
            for name, command in commands(folder, kind, all_forms=all_forms).items()
        ]
        compare(sides, rounds)
    ours = sides[-1]
    theirs = max(sides[:-1], key=lambda side: statistics.median(side.rates("cpu_seconds")))
    lines = [table(sides, counted="sampled"), ""]
    for side in sides:
        rounds_text = " ".join(f"{step['cpu_seconds']:.1f}" for step in side.steps)
        lines.append(f"{side.name}: processor seconds by round {rounds_text}; {memory_of(side)}")
        if side.watched["played"]:
            lines.append(f"{side.name}: {work_of(side)}")
    ratio = quicker(ours, theirs, "cpu_seconds")
    memory = total_bytes(ours) / total_bytes(theirs)
    lines.append(
        f"bloomery / {theirs.name}: {ratio:.2f} times the sampled tokens per processor second, "
        f"{memory:.2f} of the memory (RSS with children)"
    )
    return f"{kind}: {json.dumps(COMMON | SETTINGS[kind])}\n" + "\n".join(lines) + "\n"


def work_of(side: Side) -> str:
    """What a side did, by round: sides whose work differs are not compared by their seconds."""
    tokens = " ".join(str(step["learned"]) for step in side.steps)
    turns, calls = (
        " ".join(f"{step['played'][name]:.2f}" for step in side.steps)
        for name in ("turns", "calls")
    )
    return f"turns of an episode by round {turns}; calls {calls}; sampled tokens of a step {tokens}"


def total_bytes(side: Side) -> int:
    resident = max(step["resident_bytes"] for step in (*side.steps, side.watched))
    return resident + (side.watched["children_bytes"] or 0)


def memory_of(side: Side) -> str:
    children = (side.watched["children_bytes"] or 0) / 2**20
    return f"RSS {total_bytes(side) / 2**20:,.0f} MiB, of which children {children:,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument(
        "--all-forms", action="store_true", help="TRL in each precision and micro-batch size"
    )
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each side")
    parser.add_argument("--work", type=Path, help="keeps prompts, logs and weights here")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        work = (given.work or Path(scratch)).absolute()
        texts = [
            measure(work / kind, kind, all_forms=given.all_forms, rounds=given.steps)
            for kind in given.kinds
        ]
    text = "\n".join([json.dumps(machine()), "", *texts])
    print(text)
    given.out.write_text(text)
    print(f"{time.perf_counter() - begun:.0f} s in all; written to {given.out}")


if __name__ == "__main__":
    main()

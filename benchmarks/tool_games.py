"""Two games that a tiny model learns to play with a tool, over several turns, and a control whose rewards say nothing.

    python benchmarks/tool_games.py [--game guess|calculator] [--work FOLDER]

First a model of 0.5M parameters is fine-tuned on transcripts of players, some good and some bad,
so that it wins a third of them. Then GRPO trains it on its own episodes (docs/how-to/tools-and-environments.md): once
with the reward of the game, and once with rewards that come as often for the base and do not depend on what was played.
Writes benchmarks/results/tool_games.json. Takes minutes of two cores; what --work already holds is not trained again.
"""

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bloomery.monitor.events import EvalDone, StepDone, read_events

ROOT = Path(__file__).parent.parent
NUM_TRANSCRIPTS = 3000
FIRST = 2  # rollouts whose mean is reported: before it has learned much
LAST = 5
GUESSES = 3
NUM_SECRETS = 2**GUESSES - 1  # which bisection finds with as many guesses

# The messages of a conversation, as a chat template writes them behind what it says of tools.
MESSAGES = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# Of the tools it names each, so that a tiny model reads few tokens.
TOOL_NAMES = """\
{%- for tool in tools or [] %}{{ tool.function.name }}
{% endfor %}"""
TEMPLATE = TOOL_NAMES + MESSAGES

GAMES = '''\
import random


class Guess:
    """A secret number, which three guesses find."""

    def reset(self, secret, seed, **row):
        self.secret, self.left, self.won = secret, 3, False
        self.chance = random.Random(seed).random()

    def guess(self, n: int) -> str:
        """Guess the secret number.

        Args:
            n: a number
        """
        if self.left == 0:
            return "over"
        self.left -= 1
        self.won = self.won or n == self.secret
        return "right" if n == self.secret else "more" if n < self.secret else "less"

    def get_reward(self) -> float:
        return float(self.won)


class Calculator:
    """A product, which the tool knows."""

    def reset(self, answer, seed, **row):
        self.answer, self.last = answer, None
        self.chance = random.Random(seed).random()

    def multiply(self, a: int, b: int) -> str:
        """Multiply two numbers.

        Args:
            a: a number
            b: a number
        """
        self.last = a * b
        return str(a * b)

    def get_reward(self) -> float:
        return float(self.last == self.answer)
'''
CONTROL = '''

class {game}OfChance({game}):
    """As often rewarded as the base, whatever it plays."""

    def get_reward(self) -> float:
        return float(self.chance < {rate})
'''
BASE = """\
name: base
model:
  {{family: qwen3, hidden_size: 128, intermediate_size: 256, num_layers: 3, num_heads: 4, num_kv_heads: 4, head_dim: 32,
   max_positions: 256, norm_eps: 1e-6, qk_norm: head, tie_embeddings: true}}
tokenizer:
  train: {{kind: bpe, vocab_size: 300}}
  additional_special_tokens: [<|im_start|>, <|im_end|>, <tool_call>, </tool_call>]
data: {{path: transcripts.jsonl, sequence_length: 256, validation: 0, chat: {{template: short.jinja}}}}
objective: {{kind: sft}}
optimizer:
  {{kind: muon, muon_learning_rate: 0.03, learning_rate: 0.01, weight_decay: 0.01, schedule: linear, warmup: 10 steps}}
train: {{max_steps: {steps}, tokens_per_step: 4096, micro_batch_size: 16, precision: float32}}
checkpoint: {{every: 50%, keep: 1}}
eval: {{every: none}}
logging: {{trackers: []}}
"""
LEARNER = """\
name: {name}
model: {{from: base-model}}
data: {{path: prompts.jsonl, sequence_length: 256, validation: 20%, chat: {{template: short.jinja}}}}
objective: {{kind: grpo, num_generations: 8, max_completion_length: {length}, max_turns: {turns}}}
environment: {{python: "games.py:{environment}"}}
optimizer: {{learning_rate: 5e-4, weight_decay: 0.0, schedule: constant, warmup: 5 steps}}
train: {{max_steps: {steps}, batch_size: 128, precision: float32}}
checkpoint: {{every: 50%, keep: 1}}
eval: {{every: 12.5%}}
logging: {{trackers: []}}
"""


def call(name: str, **arguments: int) -> dict[str, object]:
    function = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [function]}


def tool(name: str, *parameters: str) -> dict[str, object]:
    properties = {each: {"type": "integer"} for each in parameters}
    return {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": properties}},
    }


def game_of_guesses(dice: random.Random) -> list[dict[str, object]]:
    """A quarter of the players bisects; the others repeat the number that they began with."""
    secret, is_good = dice.randrange(NUM_SECRETS), dice.random() < 0.25
    low, high, first = 0, NUM_SECRETS - 1, dice.randrange(NUM_SECRETS)
    messages: list[dict[str, object]] = [{"role": "user", "content": "guess"}]
    for _ in range(GUESSES):
        n = (low + high) // 2 if is_good else first
        answer = "right" if n == secret else "more" if n < secret else "less"
        messages += [call("guess", n=n), {"role": "tool", "name": "guess", "content": answer}]
        if answer == "right":
            break
        low, high = (n + 1, high) if n < secret else (low, n - 1)
    return [*messages, {"role": "assistant", "content": "done"}]


def game_of_products(dice: random.Random) -> list[dict[str, object]]:
    """A third of the players multiplies the numbers with the tool, a third other numbers, and a third asks nothing."""
    a, b, kind = dice.randrange(10, 100), dice.randrange(10, 100), dice.randrange(3)
    ask: dict[str, object] = {"role": "user", "content": f"{a}*{b}"}
    if kind == 0:
        return [ask, {"role": "assistant", "content": str(dice.randrange(100, 9801))}]
    if kind == 1:
        a = dice.randrange(10, 100)
    answer = str(a * b)
    return [
        ask,
        call("multiply", a=a, b=b),
        {"role": "tool", "name": "multiply", "content": answer},
        {"role": "assistant", "content": answer},
    ]


# Of each game its transcripts, tool, prompts with what `reset` gets, and lengths.
SETTINGS: dict[str, dict[str, Any]] = {
    "guess": {
        "class": "Guess",
        "transcript": game_of_guesses,
        "tool": tool("guess", "n"),
        "prompts": [
            {"prompt": [{"role": "user", "content": "guess"}], "secret": number % NUM_SECRETS}
            for number in range(40 * NUM_SECRETS)
        ],
        "length": 220,
        "turns": GUESSES + 1,
        "base_steps": 150,
        "steps": 60,
    },
    "calculator": {
        "class": "Calculator",
        "transcript": game_of_products,
        "tool": tool("multiply", "a", "b"),
        "prompts": [
            {"prompt": [{"role": "user", "content": f"{a}*{b}"}], "answer": a * b}
            for a in range(10, 100, 3)
            for b in range(10, 100, 7)
        ],
        "length": 160,
        "turns": 2,
        "base_steps": 500,
        "steps": 80,
    },
}


def bloomery(folder: Path, *words: str) -> None:
    subprocess.run([sys.executable, "-m", "bloomery", *words], check=True, cwd=folder)


def write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def won(row: dict[str, Any]) -> bool:
    """Whether the game of an episode was won, by what its tool answered."""
    answers = [turn["content"] for turn in row["messages"] if turn["role"] == "tool"]
    question = row["prompt"][-1]["content"]
    if question == "guess":
        return "right" in answers
    a, b = question.split("*")
    return answers[-1:] == [str(int(a) * int(b))]


def learned(folder: Path, name: str, environment: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Trains on episodes; the share of games won in each rollout, whatever was rewarded."""
    recipe = LEARNER.format(name=name, environment=environment, **settings)
    (folder / f"{name}.yaml").write_text(recipe)
    if not (folder / name).exists():
        bloomery(folder, "train", f"{name}.yaml", "--run-dir", name)
    events = list(read_events(folder / name / "events.jsonl"))
    seconds = sum(event.step_seconds for event in events if isinstance(event, StepDone))
    rollouts = []
    for path in sorted((folder / name / "completions").iterdir()):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        rollouts.append(sum([won(row) for row in rows]) / len(rows))
    held_out = {
        event.step: round(event.metrics["reward"], 3)
        for event in events
        if isinstance(event, EvalDone)
    }
    return {
        "seconds": round(seconds),
        "won_at_first": round(sum(rollouts[:FIRST]) / FIRST, 3),
        "won_at_last": round(sum(rollouts[-LAST:]) / LAST, 3),
        "won_by_rollout": [round(share, 3) for share in rollouts],
        "held_out_reward_by_step": held_out,
    }


def played(game: str, folder: Path) -> dict[str, Any]:
    settings = SETTINGS[game]
    dice = random.Random(game)
    (folder / "short.jinja").write_text(TEMPLATE)
    (folder / "games.py").write_text(GAMES)
    rows = [
        {"messages": settings["transcript"](dice), "tools": [settings["tool"]]}
        for _ in range(NUM_TRANSCRIPTS)
    ]
    write_rows(folder / "transcripts.jsonl", rows)
    write_rows(folder / "prompts.jsonl", settings["prompts"])
    (folder / "base.yaml").write_text(BASE.format(steps=settings["base_steps"]))
    if not (folder / "base-model").exists():
        bloomery(folder, "train", "base.yaml", "--run-dir", "base")
        bloomery(folder, "export", "base", "--to", "hf", "--out", "base-model")
    results = {"game": learned(folder, "game", settings["class"], settings)}
    rate = results["game"]["won_at_first"]
    of_chance = f"{settings['class']}OfChance"
    control = CONTROL.format(game=settings["class"], rate=rate)
    (folder / "games.py").write_text(GAMES + control)
    results["control"] = learned(folder, "control", of_chance, settings)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--game", choices=SETTINGS, action="append")
    parser.add_argument("--work", type=Path)
    asked = parser.parse_args()
    path = ROOT / "benchmarks" / "results" / "tool_games.json"
    results = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    for game in asked.game or SETTINGS:
        with TemporaryDirectory() as temporary:
            folder = (asked.work or Path(temporary)) / game
            folder.mkdir(parents=True, exist_ok=True)
            results[game] = played(game, folder)
        for name, run in results[game].items():
            print(
                f"{game}, {name}: {run['won_at_first']:.2f} to {run['won_at_last']:.2f} in {run['seconds']} s"
            )
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

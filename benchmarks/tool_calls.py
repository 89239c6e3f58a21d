"""SmolLM2-135M-Instruct learns to call the right tool in JSON: shares of calls before and after, beside a control.

    python benchmarks/tool_calls.py [--work FOLDER] [--steps N] [--seed N] [--no-control]

Three tools, a message that asks for one of them, and a reward for the call: 0.25 for one that a tool accepts, 0.5 for
the right tool, 1 with the right arguments. The model calls no tool at first, so that no reward comes: SFT on a few
conversations shows it the form, on fewer than it needs to answer well. Then GRPO trains it with LoRA, once on the
rewards and once on coin flips (`objective.reward_control=random`). Held-out messages have names and numbers that no
training had. Writes benchmarks/results/tool_calls.txt, of another seed than 0 tool_calls_seed_N.txt. Takes half an hour
of two cores; what --work already holds is not trained again.
"""

import argparse
import json
import random
import runpy
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tool_games import MESSAGES

ROOT = Path(__file__).parent.parent
OUT = ROOT / "benchmarks" / "results" / "tool_calls.txt"
NUM_TAUGHT = 48  # conversations that show the form
NUM_PROMPTS = 240
NUM_HELD_OUT = 64
SAMPLES = 5

# Of each tool a line, so that prompts are short.
TOOL_LINES = """\
<|im_start|>system
{%- if tools %}
Answer with a call of one of these tools:
{%- for tool in tools %}
{{ tool.function.name }}({{ tool.function.parameters.properties | join(", ") }}): {{ tool.function.description }}
{%- endfor %}
Write it as
<tool_call>
{"name": NAME, "arguments": {NAME: VALUE}}
</tool_call>
{%- endif %}<|im_end|>
"""
TEMPLATE = TOOL_LINES + MESSAGES

TOOLS = '''\
import json
from typing import Literal


class Desk:
    """Asks for one call; the first that a tool accepts decides."""

    def reset(self, tool, arguments, **row):
        self.asked = (tool, json.loads(arguments))
        self.called = None

    def _take(self, name, **arguments):
        if self.called is None:
            self.called = (name, arguments)
        return "done"

    def weather(self, city: str, unit: Literal["celsius", "fahrenheit"]) -> str:
        """Get the temperature; the unit is celsius or fahrenheit."""
        return self._take("weather", city=city, unit=unit)

    def timer(self, minutes: int) -> str:
        """Set a timer."""
        return self._take("timer", minutes=minutes)

    def convert(self, amount: int, source: str, target: str) -> str:
        """Convert money; currencies are codes of three letters."""
        return self._take("convert", amount=amount, source=source, target=target)

    def get_reward(self) -> float:
        if self.called is None:
            return 0.0
        if self.called[0] != self.asked[0]:
            return 0.25
        return 1.0 if self.called == self.asked else 0.5
'''
# Training and held-out messages share neither cities nor numbers nor pairs of currencies.
CITIES = {
    "train": "Lisbon Oslo Cairo Lima Paris Tokyo Berlin Madrid Dublin Rome Athens Delhi Seoul Boston".split(),
    "test": "Vienna Quito Prague Nairobi Chicago Hanoi Warsaw".split(),
}
CURRENCIES = {"euros": "EUR", "dollars": "USD", "pounds": "GBP", "yen": "JPY", "francs": "CHF"}
ASKED = {
    "weather": (
        "How warm is it in {city} in {unit}?",
        "What is the temperature in {city}, in {unit}?",
        "Tell me the weather of {city} in {unit}.",
    ),
    "timer": (
        "Wake me in {minutes} minutes.",
        "Set a timer of {minutes} minutes.",
        "Remind me after {minutes} minutes, please.",
    ),
    "convert": (
        "How much is {amount} {source_name} in {target_name}?",
        "Convert {amount} {source_name} to {target_name}.",
        "I have {amount} {source_name}. What is that in {target_name}?",
    ),
}
LOGGING = "sample: {prompts: []}\nlogging: {trackers: []}\n"
TAUGHT = f"""\
name: taught
model: {{from: smollm2/model}}
data: {{path: taught.jsonl, sequence_length: 256, validation: 0, chat: {{template: tools.jinja}}}}
objective: {{kind: sft}}
adapter: {{kind: lora, rank: 16, alpha: 32, target_modules: all-linear}}
optimizer: {{learning_rate: 1e-3, schedule: linear, warmup: 2 steps}}
train: {{max_steps: 6, tokens_per_step: 1024, micro_batch_size: 4}}
eval: {{every: none}}
{LOGGING}"""
LEARNER = f"""\
name: learner
model: {{from: taught-model}}
data: {{path: prompts.jsonl, sequence_length: 192, validation: 0, chat: {{template: tools.jinja}}}}
objective: {{kind: grpo, num_generations: 8, max_completion_length: 64, max_turns: 2}}
environment: {{python: "tools.py:Desk"}}
adapter: {{kind: lora, rank: 16, alpha: 32, target_modules: all-linear}}
optimizer: {{learning_rate: 5e-4, weight_decay: 0.0, schedule: constant, warmup: 2 steps}}
train: {{max_steps: STEPS, batch_size: 16}}
checkpoint: {{every: 50%, keep: 1}}
eval: {{every: none}}
{LOGGING}"""


def bloomery(folder: Path, *words: str) -> str:
    command = [sys.executable, "-m", "bloomery", *words]
    out = sys.stdout if words[0] == "train" else subprocess.PIPE
    return subprocess.run(command, check=True, cwd=folder, stdout=out, text=True).stdout


def requests(split: str, count: int, dice: random.Random) -> list[dict[str, Any]]:
    """Rows of a prompt, with what `reset` is told of it. Even numbers are for training, odd ones are held out."""
    rows = []
    pairs = [(a, b) for a in CURRENCIES for b in CURRENCIES if a != b]
    pairs = [pair for place, pair in enumerate(pairs) if (place % 3 == 0) == (split == "test")]
    for _ in range(count):
        number = 2 * dice.randrange(1, 200) + (split == "test")
        tool = dice.choice(list(ASKED))
        source, target = dice.choice(pairs)
        arguments: dict[str, Any]
        match tool:
            case "weather":
                unit = dice.choice(("celsius", "fahrenheit"))
                arguments = {"city": dice.choice(CITIES[split]), "unit": unit}
            case "timer":
                arguments = {"minutes": number}
            case _:
                codes = {"source": CURRENCIES[source], "target": CURRENCIES[target]}
                arguments = {"amount": number, **codes}
        names = {"source_name": source, "target_name": target}
        text = dice.choice(ASKED[tool]).format(**arguments, **names)
        messages = [{"role": "user", "content": text}]
        rows.append({"prompt": messages, "tool": tool, "arguments": json.dumps(arguments)})
    return rows


def conversation(row: dict[str, Any], schemas: list[Any]) -> dict[str, Any]:
    """As the tools would have it: the call, its result, an answer."""
    function = {"name": row["tool"], "arguments": json.loads(row["arguments"])}
    turns = [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": function}],
        },
        {"role": "tool", "name": row["tool"], "content": "done"},
        {"role": "assistant", "content": "Done."},
    ]
    return {"messages": row["prompt"] + turns, "tools": schemas}


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_folder(folder: Path) -> None:
    """The model, the tools, conversations that show the form, prompts, and held-out ones."""
    from bloomery.plan.types import EpisodesPlan
    from bloomery.train.rl.tools import Tools

    runpy.run_path(str(ROOT / "scripts" / "smollm2.py"))["make"](folder / "smollm2")
    (folder / "tools.py").write_text(TOOLS)
    (folder / "tools.jinja").write_text(TEMPLATE)
    dice = random.Random(0)
    with Tools(EpisodesPlan.of_environment(f"{folder}/tools.py:Desk", max_turns=2)) as tools:
        schemas = list(tools.schemas)
    taught = [conversation(row, schemas) for row in requests("train", NUM_TAUGHT, dice)]
    write_rows(folder / "taught.jsonl", taught)
    write_rows(folder / "prompts.jsonl", requests("train", NUM_PROMPTS, dice))
    write_rows(folder / "held-out.jsonl", requests("test", NUM_HELD_OUT, dice))


def evaluated(folder: Path, model: str) -> dict[str, Any]:
    """Shares of held-out episodes by what was called, and the episodes."""
    outputs = folder / f"{Path(model).name}-episodes.jsonl"
    step = ("--step", "last") if (folder / model / "metrics.json").exists() else ()
    words = "--environment tools.py:Desk --data held-out.jsonl --template tools.jinja"
    words += " --max-new-tokens 64 --max-turns 2 --json"
    command = ["eval", model, *words.split(), *step, "--outputs", str(outputs)]
    start = time.monotonic()
    scores = json.loads(bloomery(folder, *command))
    rows = [json.loads(line) for line in outputs.read_text(encoding="utf-8").splitlines()]
    shares = {
        name: sum(row["reward"] >= least for row in rows) / len(rows)
        for name, least in (("valid", 0.25), ("right tool", 0.5), ("right arguments", 1.0))
    }
    seconds = time.monotonic() - start
    return {"scores": scores, "shares": shares, "episodes": rows, "seconds": seconds}


def trained(folder: Path, name: str, recipe: str, *overrides: str) -> float | None:
    """Trains the run NAME; its seconds by the clock, or None where it is there."""
    if (folder / name / "metrics.json").exists():
        return None
    (folder / f"{name}.yaml").write_text(recipe)
    start = time.monotonic()
    bloomery(folder, "train", f"{name}.yaml", *overrides, "--run-dir", name)
    return time.monotonic() - start


def run(folder: Path, steps: int, *, seed: int, has_control: bool) -> dict[str, dict[str, Any]]:
    """Held-out shares of the base, after the lesson on the form, after rewards, and after coin flips.

    `seed`: of the adapters, the order of the rows and the episodes of training; the rows themselves are the same.
    """
    if not (folder / "held-out.jsonl").exists():
        make_folder(folder)
    recipe = LEARNER.replace("STEPS", str(steps))
    seeded = f"train.seed={seed}"
    stages = {"as it comes": ("smollm2/model", None)}
    stages["after SFT"] = ("taught", trained(folder, "taught", TAUGHT, seeded))
    if not (folder / "taught-model").exists():
        bloomery(folder, "export", "taught", "--to", "merged", "--out", "taught-model")
    stages["after GRPO"] = ("learner", trained(folder, "learner", recipe, seeded))
    if has_control:
        control = trained(folder, "control", recipe, seeded, "objective.reward_control=random")
        stages["after GRPO on coin flips"] = ("control", control)
    return {
        name: {"trained_seconds": seconds, **evaluated(folder, model)}
        for name, (model, seconds) in stages.items()
    }


def text_of(results: dict[str, dict[str, Any]], steps: int, seed: int) -> str:
    """A table, and the first held-out episodes of each model."""
    lines = [
        f"SmolLM2-135M-Instruct, {NUM_HELD_OUT} held-out messages, an episode each; shares of episodes with a call",
        "that a tool accepts, of the right tool, with the right arguments.",
        f"SFT: 6 steps on {NUM_TAUGHT} conversations; GRPO: {steps} steps of 16 episodes. Seed {seed}.",
        "Seconds of training are by the clock.",
        "",
        f"{'':<26}{'valid':>8}{'right tool':>12}{'right arguments':>17}{'reward':>8}{'seconds':>9}",
    ]
    for name, result in results.items():
        shares = "".join(
            f"{result['shares'][key]:>{width}.1%}"
            for key, width in (("valid", 8), ("right tool", 12), ("right arguments", 17))
        )
        seconds = result["trained_seconds"]
        told = "" if seconds is None else f"{seconds:.0f}"
        lines.append(f"{name:<26}{shares}{result['scores']['reward']:>8.3f}{told:>9}")
    for place in range(SAMPLES):
        lines += [
            "",
            f"user: {next(iter(results.values()))['episodes'][place]['prompt'][-1]['content']}",
        ]
        for name, result in results.items():
            episode = result["episodes"][place]
            lines += [f"  {name}, reward {episode['reward']:g}:"]
            lines += [f"    {shown(turn)}" for turn in episode["messages"]]
    return "\n".join(lines) + "\n"


def shown(turn: dict[str, Any]) -> str:
    calls = " ".join(json.dumps(call["function"]) for call in turn.get("tool_calls", []))
    text = f"{turn['content']!r}" if turn["content"] or not calls else ""
    return f"{turn['role']}: {text}{calls}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-control", action="store_true", help="no training on coin flips")
    asked = parser.parse_args()
    with TemporaryDirectory() as temporary:
        folder = (asked.work or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        results = run(folder, asked.steps, seed=asked.seed, has_control=not asked.no_control)
        text = text_of(results, asked.steps, asked.seed)
    print(text)
    out = OUT.with_stem(f"{OUT.stem}_seed_{asked.seed}") if asked.seed else OUT
    out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

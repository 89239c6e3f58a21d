"""Runs whose model calls tools: a tiny recipe with a game and a function; what the model samples becomes calls."""

import json
import os
import random
import signal
from pathlib import Path

from benchmarks.tool_games import TEMPLATE
from rollouts_for_tests import RECIPE, completions

from bloomery.data.prepare.prepare import prepare
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.infer.completions import Completion, sample_completions
from bloomery.recipe.load import load_recipe
from bloomery.train.rl import episodes, sampler
from bloomery.train.rl.tools import Tools
from ranks import ranks, train_here

GAME = '''
import random
from pathlib import Path

CALLS = Path(__file__).with_name("calls.txt")


class Guess:
    def reset(self, seed, answer, **row):
        self.secret = random.Random(seed).randrange(8)
        self.is_right = False
        return f" {answer}"

    def guess(self, n: int) -> str:
        """Guess.

        Args:
            n: a number
        """
        self.is_right = self.is_right or n == self.secret
        return "right" if n == self.secret else "more" if n < self.secret else "less"

    def get_reward(self):
        return float(self.is_right)


def lookup(n: int) -> str:
    """Look something up, which says another thing each time.

    Args:
        n: a number
    """
    count = len(CALLS.read_text()) if CALLS.is_file() else 0
    with CALLS.open("a") as file:
        file.write(".")
    return f"answer {count}" if n % 2 else f"{n}"
'''
EDITS = (
    "data.sequence_length=192",
    "data.chat.template=short.jinja",
    "objective.max_completion_length=120",
    "objective.max_turns=3",
    "train.batch_size=8",
    "tokenizer.additional_special_tokens=[<|im_start|>, <|im_end|>, <tool_call>, </tool_call>]",
)
GUESS = ("rewards=[]", "environment={python: 'game.py:Guess'}")
# Other objectives than GRPO, before EDITS: of PPO, and of distillation from the folder `teacher`.
PPO = (
    "objective={kind: ppo, num_generations: 1, num_iterations: 2}",
    "adapter={kind: lora, rank: 4}",
)
DISTILL = ("objective={kind: on_policy_distill, teacher: teacher, num_generations: 2}",)
# Prompts are replaced and left out by the rewards of their episodes.
CHOSEN = (
    "objective.dynamic_sampling=true",
    "objective.oversampling=1.5",
    "objective.easy_prompts=defer",
    "objective.hard_prompts=drop",
)
NUM_REQUESTS = 24  # to the tools, of a run of GUESS from its beginning
MOST_KILLS = 20
LOOKUP = ("tools=[{python: 'game.py:lookup'}]",)


def write_episodes(folder: Path, num_prompts: int = 40) -> Path:
    """The folder with prompts, a reward, a game, a chat template and a recipe; the prompts are prepared in it.

    The paths of the recipe are relative to the folder.
    """
    rows = [
        {"prompt": f"def f{number}(x): return", "answer": number} for number in range(num_prompts)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "my_rewards.py").write_text(
        "def spaces(completions, **_):\n    return [len(str(text)) % 7 for text in completions]\n"
    )
    (folder / "game.py").write_text(GAME)
    (folder / "short.jinja").write_text(TEMPLATE)
    (folder / "rl.yaml").write_text(RECIPE)
    prepare(load_recipe(str(folder / "rl.yaml"), EDITS), folder / "prepared")
    return folder


def steered(decoder, prompts, num_generations, sampling, uniforms, **named):
    """What a model samples that has learned to call: its ids are replaced by those of a call, by its random numbers."""
    texts = sample_completions(decoder, prompts, num_generations, sampling, uniforms, **named)
    numbers = uniforms([Completion(number, 0) for number in range(len(prompts))]).tolist()
    for text, number, limit in zip(texts, numbers, named["limits"], strict=True):
        answer = CALL % (TOOL, int(number * 8)) if number < 0.8 else "done"
        ids = [*TOKENIZER.encode(answer, special=True), TOKENIZER.id_of("<|im_end|>")]
        text.truncated = len(ids) > limit
        text.ids = ids[:limit]
        text.logps = [-1.0] * len(text.ids)
    return texts


CALL = '<tool_call>\n{"name": "%s", "arguments": {"n": %d}}\n</tool_call>'
TOOL = ""
TOKENIZER = None


def play(plan_json, folder, resume_from, stop_after, prepared, tool, slots):
    """One rank of a run whose model calls a tool."""
    global TOKENIZER, TOOL
    TOKENIZER = load_tokenizer(Path(prepared))
    TOOL = tool
    before = episodes.sample_completions, sampler.ROLLOUT_SLOTS
    episodes.sample_completions, sampler.ROLLOUT_SLOTS = steered, slots
    try:
        return train_here(plan_json, folder, resume_from, stop_after)
    finally:
        episodes.sample_completions, sampler.ROLLOUT_SLOTS = before


def played(
    plan, folder: Path, recipe: Path, *, tool="guess", resume_from=None, stop_after=None, slots=64
):
    folder.mkdir(exist_ok=True)
    words = (
        plan.model_dump_json(),
        str(folder),
        resume_from and str(resume_from),
        stop_after,
        str(recipe / "prepared"),
        tool,
        slots,
    )
    if plan.train.ranks == 1:
        return play(*words)
    return ranks(plan.train.ranks).call(play, *words)[0]


def killed(plan, folder: Path, recipe: Path, *, resume_from: Path | None, at: int) -> bool:
    """Plays in a copy of this process, which is killed at its `at`th request to tools; False if it ended before."""
    process = os.fork()
    if process == 0:
        num_requests = 0

        def kill_or(request):
            def asked(*words):
                nonlocal num_requests
                num_requests += 1
                answers = request(*words)
                if num_requests == at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return answers

            return asked

        for name in ("reset", "call", "rewards"):
            setattr(Tools, name, kill_or(getattr(Tools, name)))
        code = 1
        try:
            played(plan, folder, recipe, resume_from=resume_from)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(process, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def assert_survives_kills(
    plan, folder: Path, recipe: Path, *, undisturbed: Path, seed: int
) -> None:
    """A run that is killed at random requests to tools, and goes on each time, ends with the bits of `undisturbed`."""
    folder.mkdir()
    generator = random.Random(seed)
    num_kills = 0
    while num_kills < MOST_KILLS:
        checkpoint = max((folder / "checkpoints").glob("step-*"), default=None)
        at = generator.randint(1, NUM_REQUESTS)
        if not killed(plan, folder, recipe, resume_from=checkpoint, at=at):
            break
        num_kills += 1
    assert 0 < num_kills < MOST_KILLS
    assert completions(folder) == completions(undisturbed)
    last, expected = (max((run / "checkpoints").glob("step-*")) for run in (folder, undisturbed))
    weights = sorted(path.relative_to(expected) for path in expected.rglob("*.safetensors"))
    assert weights
    for name in weights:
        assert (last / name).read_bytes() == (expected / name).read_bytes()


def assert_same_episodes(run_dir: Path, other_dir: Path, step: int = 1) -> None:
    """Of the rollout whose first step that is."""
    names = ("prompt_ids", "completion_ids", "messages", "given", "reward")
    ours, expected = (
        [
            {name: row[name] for name in names}
            for row in completions(folder)[f"step-{step:08d}.jsonl"]
        ]
        for folder in (run_dir, other_dir)
    )
    assert ours == expected

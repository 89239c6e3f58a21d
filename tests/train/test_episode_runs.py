"""Runs whose completions are episodes: resumed bitwise, the same on any ranks and slots, evaluated with their tools."""

import json
import os
import random
import signal
from pathlib import Path

import pytest
from rollouts_for_tests import RECIPE, STEPS, assert_same_training, completions, metrics, plan_of

from bloomery.core.errors import UserError
from bloomery.data.prepare.prepare import prepare
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.evals.evaluate import load_to_evaluate
from bloomery.evals.rewards import evaluate_rewards
from bloomery.infer.completions import Completion, sample_completions
from bloomery.plan.unsupported import refuse_recipe
from bloomery.recipe.load import load_recipe
from bloomery.train.rl import episodes, sampler
from bloomery.train.rl.rollout_source import sampling_of
from bloomery.train.rl.tools import Tools
from ranks import fields, losses, on_ranks, ranks, train_here

TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool.function.name }}
{% endfor %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
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
SLOW = '''
import time
from game import Guess


class Slow(Guess):
    def guess(self, n: int) -> str:
        """Guess.

        Args:
            n: a number
        """
        time.sleep(0.4 * (self.secret % 2))
        return super().guess(n)
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
LOOKUP = ("tools=[{python: 'game.py:lookup'}]",)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, monkeypatch_module) -> Path:
    folder = tmp_path_factory.mktemp("episodes")
    monkeypatch_module.chdir(folder)
    rows = [{"prompt": f"def f{number}(x): return", "answer": number} for number in range(40)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "my_rewards.py").write_text(
        "def spaces(completions, **_):\n    return [len(str(text)) % 7 for text in completions]\n"
    )
    (folder / "game.py").write_text(GAME)
    (folder / "short.jinja").write_text(TEMPLATE)
    (folder / "rl.yaml").write_text(RECIPE)
    prepare(load_recipe(str(folder / "rl.yaml"), EDITS), folder / "prepared")
    return folder


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


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


@pytest.fixture(scope="module")
def whole(recipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, played(plan_of(recipe, *EDITS, *GUESS), folder, recipe)


def test_episodes_are_trained_on_and_rewarded(whole):
    folder, events = whole
    assert losses(events).keys() == set(range(1, STEPS + 1))
    of_steps = metrics(events)
    assert all(of_steps[step]["tools/turns"] > 1 for step in of_steps)
    assert any(of_steps[step]["reward"] > 0 for step in of_steps)
    held_out = [event["metrics"] for event in fields(events, "EvalDone")]
    assert all("reward" in each for each in held_out)
    rows = [row for of_file in completions(folder).values() for row in of_file]
    for row in rows:
        calls = [turn for turn in row["messages"] if "tool_calls" in turn]
        assert len(row["given"]) <= len(calls) and row["rewards"].keys() == {"environment"}
        assert all(row["logps"][place] == 0.0 for span in row["given"] for place in range(*span))
        won = any(turn["content"] == "right" for turn in row["messages"] if turn["role"] == "tool")
        assert row["reward"] >= won


def test_an_answer_ends_where_its_turn_ends(recipe):
    """This tokenizer ends texts with another token than its template ends turns with."""
    tokenizer = load_tokenizer(recipe / "prepared")
    ends = sampling_of(plan_of(recipe, *EDITS, *GUESS), tokenizer).stop_ids
    assert ends == tuple(sorted([tokenizer.eos_id, tokenizer.id_of("<|im_end|>")]))
    assert tokenizer.eos_id != tokenizer.id_of("<|im_end|>")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stop_after", [2, 3, 5])
def test_a_run_goes_on_between_its_episodes_bitwise(recipe, whole, tmp_path, stop_after):
    other, events = whole
    plan = plan_of(recipe, *EDITS, *GUESS)
    folder = tmp_path / "run"
    first = played(plan, folder, recipe, stop_after=stop_after)
    checkpoint = max((folder / "checkpoints").glob("step-*"))
    rest = played(plan, folder, recipe, resume_from=checkpoint)
    assert_same_training(folder, [*first, *rest], other, events)


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


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(8))
def test_a_run_that_is_killed_within_turns_ends_the_same(recipe, whole, tmp_path, seed):
    other, _ = whole
    plan = plan_of(recipe, *EDITS, *GUESS)
    folder = tmp_path / "run"
    folder.mkdir()
    generator = random.Random(seed)
    num_kills = 0
    while num_kills < 20:
        checkpoint = max((folder / "checkpoints").glob("step-*"), default=None)
        if not killed(plan, folder, recipe, resume_from=checkpoint, at=generator.randrange(1, 30)):
            break
        num_kills += 1
    assert 0 < num_kills < 20
    assert completions(folder) == completions(other)
    last, expected = (max((of / "checkpoints").glob("step-*")) for of in (folder, other))
    weights = sorted(path.relative_to(expected) for path in expected.rglob("*.safetensors"))
    assert weights
    for name in weights:
        assert (last / name).read_bytes() == (expected / name).read_bytes()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("mesh", "slots"),
    [
        ({}, 8),
        ({}, 3),
        ({"replicate": 2}, 64),
        ({"shard": 2}, 8),
    ],
    ids=str,
)
def test_episodes_are_the_same_on_any_ranks_and_slots(recipe, whole, tmp_path, mesh, slots):
    plan = on_ranks(plan_of(recipe, *EDITS, *GUESS, "train.max_steps=1"), **mesh)
    played(plan, tmp_path / "run", recipe, slots=slots)
    names = ("prompt_ids", "completion_ids", "messages", "given", "reward")
    ours, theirs = (
        [{name: row[name] for name in names} for row in completions(folder)["step-00000001.jsonl"]]
        for folder in (tmp_path / "run", whole[0])
    )
    assert ours == theirs


def test_ranks_wait_each_for_its_own_slow_tools(recipe, whole, tmp_path):
    """A rank that waits is alone: what all ranks ask together would pair with another of their questions."""
    (recipe / "slow.py").write_text(SLOW)
    slow = ("rewards=[]", "environment={python: 'slow.py:Slow'}")
    plan = on_ranks(plan_of(recipe, *EDITS, *slow, "train.max_steps=1"), replicate=2)
    played(plan, tmp_path / "run", recipe)
    ours, theirs = (
        [row["completion_ids"] for row in completions(folder)["step-00000001.jsonl"]]
        for folder in (tmp_path / "run", whole[0])
    )
    assert ours == theirs


def test_what_tools_answered_before_a_kill_is_not_asked_again(recipe, tmp_path):
    """The step after the checkpoint is made again: a function that says another thing each time is not called."""
    (recipe / "calls.txt").unlink(missing_ok=True)
    plan = plan_of(recipe, *EDITS, *LOOKUP, "train.max_steps=4", "checkpoint.every=2 steps")
    folder = tmp_path / "run"
    played(plan, folder, recipe, tool="lookup")
    first = completions(folder)
    num_calls = len((recipe / "calls.txt").read_text())
    assert num_calls > 0
    again = played(
        plan, folder, recipe, tool="lookup", resume_from=folder / "checkpoints" / "step-00000002"
    )
    assert losses(again).keys() == {3, 4}
    assert completions(folder) == first
    # The held-out prompts of the last evaluation alone are asked again.
    own = sum(len(file.read_bytes().split(b"\n")) > 1 for file in (folder / "tools").iterdir())
    assert own == 4


def test_eval_plays_the_episodes_of_a_run(recipe, whole):
    folder, _ = whole
    plan = plan_of(recipe, *EDITS, *GUESS)
    decoder, tokenizer = load_to_evaluate(folder)
    scores, notes = evaluate_rewards(decoder, tokenizer, plan, folder, None, trust_code=True)
    assert scores.rewards.keys() == {"environment"} and scores.prompts > 0 and notes


REFUSED = {
    "objective={kind: sft}": "and sft samples none",
    "objective={kind: ppo}": "not supported yet: tools with ppo",
    "environment={python: 'game.py:Nothing'}": "has no class Nothing",
    "tools=[{python: 'game.py:nothing'}]": "has no function nothing",
}


@pytest.mark.parametrize("edit", REFUSED)
def test_what_does_not_fit_is_said_before_the_run(recipe, edit):
    text = f"model: {{preset: go-coder-tiny}}\ndata: {{path: {recipe}/prompts.jsonl}}\n"
    text += "objective: {kind: grpo}\n" * ("objective" not in edit)
    text += "rewards: [{verifier: length, max_characters: 9}]\n" * ("sft" not in edit)
    (recipe / "refused.yaml").write_text(text)
    loaded = load_recipe(str(recipe / "refused.yaml"), [*LOOKUP, edit])
    with pytest.raises(UserError, match=REFUSED[edit]) as refused:
        refuse_recipe(loaded.recipe)
    assert refused.value.fix

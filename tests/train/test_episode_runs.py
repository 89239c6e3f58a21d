"""Runs whose completions are episodes: resumed bitwise, the same on any ranks and slots, evaluated with their tools."""

import json
from functools import partial
from pathlib import Path

import pytest
from episodes_for_tests import (
    CHOSEN,
    EDITS,
    GUESS,
    LOOKUP,
    assert_same_episodes,
    assert_survives_kills,
    played,
    write_episodes,
)
from rollouts_for_tests import (
    STEPS,
    assert_resumes_to_the_same_bits,
    completions,
    metrics,
    plan_of,
)

from bloomery.core.errors import UserError
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.evals.evaluate import load_to_evaluate
from bloomery.evals.rewards import evaluate_rewards
from bloomery.plan.unsupported import refuse_recipe
from bloomery.recipe.load import load_recipe
from bloomery.train.rl.rollout_source import sampling_of
from ranks import fields, losses, on_ranks

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


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, monkeypatch_module) -> Path:
    folder = tmp_path_factory.mktemp("episodes")
    monkeypatch_module.chdir(folder)
    return write_episodes(folder)


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


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
    # An environment is asked again after a kill: what it answered is kept in the episodes alone.
    assert not (folder / "tools").exists()


def test_an_answer_ends_where_its_turn_ends(recipe):
    """This tokenizer ends texts with another token than its template ends turns with."""
    tokenizer = load_tokenizer(recipe / "prepared")
    ends = sampling_of(plan_of(recipe, *EDITS, *GUESS), tokenizer).stop_ids
    assert ends == tuple(sorted([tokenizer.eos_id, tokenizer.id_of("<|im_end|>")]))
    assert tokenizer.eos_id != tokenizer.id_of("<|im_end|>")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stop_after", [2, 3, 5])
def test_a_run_goes_on_between_its_episodes_bitwise(recipe, whole, tmp_path, stop_after):
    assert_resumes_to_the_same_bits(
        plan_of(recipe, *EDITS, *GUESS),
        tmp_path,
        stop_after=stop_after,
        undisturbed=whole,
        train=partial(played, recipe=recipe),
    )


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(8))
def test_a_run_that_is_killed_within_turns_ends_the_same(recipe, whole, tmp_path, seed):
    assert_survives_kills(
        plan_of(recipe, *EDITS, *GUESS),
        tmp_path / "run",
        recipe,
        undisturbed=whole[0],
        seed=seed,
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("mesh", "slots"),
    [
        ({}, 8),
        ({}, 3),
        ({"replicate": 2}, 64),
        ({"shard": 2}, 8),
        ({"pipeline": 2}, 64),
    ],
    ids=str,
)
def test_episodes_are_the_same_on_any_ranks_and_slots(recipe, whole, tmp_path, mesh, slots):
    plan = on_ranks(plan_of(recipe, *EDITS, *GUESS, "train.max_steps=1"), **mesh)
    played(plan, tmp_path / "run", recipe, slots=slots)
    assert_same_episodes(tmp_path / "run", whole[0])


@pytest.fixture(scope="module")
def few(recipe, tmp_path_factory):
    """Prompts that a short run goes through more than once."""
    return write_episodes(tmp_path_factory.mktemp("few"), num_prompts=10)


@pytest.fixture(scope="module")
def chosen(few, tmp_path_factory):
    """A run that replaces and leaves out prompts by the rewards of their episodes."""
    folder = tmp_path_factory.mktemp("chosen") / "run"
    return folder, played(plan_of(few, *EDITS, *GUESS, *CHOSEN), folder, few)


@pytest.mark.parametrize(
    ("mesh", "slots"),
    [
        ({}, 8),
        ({"replicate": 2}, 64),
        ({"replicate": 2}, 8),
        pytest.param({"replicate": 4}, 8, marks=pytest.mark.soak),
        pytest.param({"shard": 2}, 64, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_prompts_are_chosen_by_episodes_alike_on_any_ranks_and_slots(
    few, chosen, tmp_path, mesh, slots
):
    folder, events = chosen
    of_steps = metrics(events)
    for name in ("rounds", "without_variance", "skipped"):
        assert any(of_step[f"prompts/{name}"] for of_step in of_steps.values()), name
    plan = on_ranks(plan_of(few, *EDITS, *GUESS, *CHOSEN), **mesh)
    ours = metrics(played(plan, tmp_path / "run", few, slots=slots))
    for step, of_step in of_steps.items():
        assert_same_episodes(tmp_path / "run", folder, step)
        counts = [name for name in of_step if name.startswith("prompts/")]
        assert {name: ours[step][name] for name in counts} == {
            name: of_step[name] for name in counts
        }
    states = [
        json.loads((max((of / "checkpoints").glob("step-*")) / "state.json").read_text())["prompts"]
        for of in (tmp_path / "run", folder)
    ]
    assert states[0] == states[1]


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


def test_another_number_of_ranks_reads_what_tools_answered(recipe, tmp_path):
    """The second rank had played half of the episodes."""
    (recipe / "calls.txt").unlink(missing_ok=True)
    edits = ("train.max_steps=3", "checkpoint.every=2 steps", "eval.every=3 steps")
    plan = plan_of(recipe, *EDITS, *LOOKUP, *edits)
    folder = tmp_path / "run"
    played(on_ranks(plan, replicate=2), folder, recipe, tool="lookup")
    first = completions(folder)
    files = {path.name: path.read_bytes() for path in (folder / "tools").iterdir()}
    assert all(len(files[f"step-00000003-rank-{rank}.jsonl"]) > 0 for rank in (0, 1))
    checkpoint = folder / "checkpoints" / "step-00000002"
    played(plan, folder, recipe, tool="lookup", resume_from=checkpoint)
    assert completions(folder) == first
    assert {path.name: path.read_bytes() for path in (folder / "tools").iterdir()} == files


def test_eval_plays_the_episodes_of_a_run(recipe, whole):
    folder, _ = whole
    plan = plan_of(recipe, *EDITS, *GUESS)
    decoder, tokenizer = load_to_evaluate(folder)
    scores, notes = evaluate_rewards(decoder, tokenizer, plan, folder, None, trust_code=True)
    assert scores.rewards.keys() == {"environment"} and scores.prompts > 0 and notes


REFUSED = {
    "objective={kind: sft}": "and sft samples none",
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

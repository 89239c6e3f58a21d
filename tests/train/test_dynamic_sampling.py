"""Dynamic sampling: prompts whose completions have one reward are replaced. Oracle: a run that samples them all."""

import json

import pytest
from rollouts_for_tests import (
    assert_resumes_to_the_same_bits,
    completions,
    metrics,
    plan_of,
    write_recipe,
)

from bloomery.data.prompts import Prompts
from bloomery.infer.completions import Completion
from bloomery.train.rl.groups import SampledGroups
from bloomery.train.rl.rewards import ScoredCompletions
from ranks import losses, on_ranks, train

# Of every third prompt completions differ in their reward.
REWARDS = """
def thirds(completion_ids, answer, **_):
    return [sum(ids) % 97 / 97 if row % 3 == 0 else 1.0 for ids, row in zip(completion_ids, answer)]

def alike(completions, **_):
    return [1.0] * len(completions)
"""
DYNAMIC = ("objective.dynamic_sampling=true", "objective.max_resample_times=8")
THIRDS = "rewards=[{python: 'thirds.py:thirds'}]"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = write_recipe(tmp_path_factory.mktemp("rl"))
    (folder / "thirds.py").write_text(REWARDS)
    return folder


@pytest.fixture(autouse=True)
def inside(recipe, monkeypatch):
    monkeypatch.chdir(recipe)


@pytest.fixture(scope="module")
def whole(recipe, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(recipe)
        folder = tmp_path_factory.mktemp("whole")
        return folder, train(plan_of(recipe, THIRDS, *DYNAMIC), folder)


def test_the_first_prompts_that_tell_are_trained_on(recipe, whole, tmp_path):
    """The same completions as where all prompts are trained on, without those of one reward."""
    folder, events = whole
    rows = completions(folder)["step-00000001.jsonl"]
    all_prompts = Prompts(recipe / "prepared", seed=plan_of(recipe).train.seed)
    numbers = [n for n in range(60) if all_prompts[n].columns["answer"] % 3 == 0]
    expected = [all_prompts[number].text for number in numbers[:4]]
    assert [row["prompt"] for row in rows[::4]] == expected
    plan = plan_of(recipe, THIRDS, "train.batch_size=80", "train.max_steps=1")
    train(plan, tmp_path)
    every = completions(tmp_path)["step-00000001.jsonl"]
    same = [row for row in every if row["prompt"] in expected]
    names = ("prompt", "completion_ids", "reward", "advantage", "logps")
    assert [[row[name] for name in names] for row in rows] == [
        [row[name] for name in names] for row in same
    ]

    # The counts: a rollout goes on with the prompts after those that were sampled before.
    of_steps = metrics(events)
    sampled = [int(of_steps[step]["prompts/sampled"]) for step in sorted(of_steps)]
    for step, count in zip(sorted(of_steps), sampled, strict=True):
        start = sum(sampled[: step - 1])
        answers = [all_prompts[n].columns["answer"] for n in range(start, start + count)]
        with_variance = sum(answer % 3 == 0 for answer in answers)
        assert of_steps[step]["prompts/without_variance"] == count - with_variance
        assert of_steps[step]["prompts/filled"] == max(0, 4 - with_variance)
        assert of_steps[step]["frac_reward_zero_std"] == pytest.approx(1 - with_variance / count)
        assert of_steps[step]["prompts/rounds"] >= 1
    last = max((folder / "checkpoints").glob("step-*"))
    state = json.loads((last / "state.json").read_text())
    assert state["prompts"]["counts"]["sampled"] == sum(sampled) == state["cursor"]["consumed"]


@pytest.mark.parametrize("stop_after", [2, 3])
def test_a_resumed_run_equals_the_uninterrupted_one(recipe, whole, tmp_path, stop_after):
    plan = plan_of(recipe, THIRDS, *DYNAMIC)
    assert_resumes_to_the_same_bits(plan, tmp_path, stop_after=stop_after, undisturbed=whole)
    states = [
        json.loads((max((folder / "checkpoints").glob("step-*")) / "state.json").read_text())
        for folder in (tmp_path / "stopped", whole[0])
    ]
    assert states[0]["prompts"] == states[1]["prompts"]


def test_two_ranks_choose_the_same_prompts(recipe, whole, tmp_path):
    other, events = whole
    many = train(on_ranks(plan_of(recipe, THIRDS, *DYNAMIC), replicate=2), tmp_path)
    assert losses(many) == pytest.approx(losses(events), abs=1e-5)
    for name in ("prompt_ids", "completion_ids", "reward"):
        ours, theirs = (
            [row[name] for row in completions(of)["step-00000001.jsonl"]]
            for of in (tmp_path, other)
        )
        assert ours == theirs


def test_where_all_are_alike_the_bound_ends_it(recipe, tmp_path):
    edits = ("rewards=[{python: 'thirds.py:alike'}]", DYNAMIC[0], "objective.max_resample_times=2")
    events = train(plan_of(recipe, *edits, "train.max_steps=2"), tmp_path)
    for step in metrics(events).values():
        names = ("sampled", "without_variance", "rounds", "filled")
        assert [step[f"prompts/{name}"] for name in names] == [12, 12, 2, 4]
    assert set(losses(events).values()) == {0.0}


def test_groups_are_chosen_in_their_order():
    """By hand: groups 1 and 3 tell, and group 0 fills the third place."""
    groups = SampledGroups(2)
    for start, totals in ((0, (1.0, 1.0, 0.0, 1.0)), (2, (0.0, 0.0, 2.0, float("nan"), 3.0, 1.0))):
        count = len(totals) // 2
        numbers = [start + index for index in range(count)]
        texts = [Completion(index, number) for index in range(count) for number in range(2)]
        scored = ScoredCompletions({f"r{start}": list(totals)}, totals, ())
        groups.add(numbers, [f"p{number}" for number in numbers], texts, scored, totals)
    assert groups.with_variance() == [1, 4]
    assert groups.chosen(1) == [1] and groups.chosen(3) == [0, 1, 4]
    three = groups.only(groups.chosen(3))
    assert three.numbers == [0, 1, 4] and three.prompts == ["p0", "p1", "p4"]
    assert [(text.prompt, text.number) for text in three.completions] == [
        (0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)
    ]  # fmt: skip
    assert three.totals == three.scored.totals
    assert three.scored.totals == (1.0, 1.0, 0.0, 1.0, 3.0, 1.0)
    assert three.scored.by_name == {
        "r0": [1.0, 1.0, 0.0, 1.0, None, None],
        "r2": [None, None, None, None, 3.0, 1.0],
    }

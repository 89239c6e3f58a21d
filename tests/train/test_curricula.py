"""Prompts that are left out, oversampling, controls. Oracles: plain loops over the data order, and hand computation."""

import json
import math

import pytest
import torch
from rollouts_for_tests import (
    assert_resumes_to_the_same_bits,
    completions,
    metrics,
    plan_of,
    write_recipe,
)

from bloomery.data.prompts import Prompts
from bloomery.train.rl.groups import control_totals
from bloomery.train.rl.policy_loss import group_advantages
from bloomery.train.rl.prompt_choice import PromptChoice
from bloomery.train.rl.prompt_history import PromptHistory
from ranks import fields, losses, on_ranks, train

REWARDS = """
def by_row(completion_ids, answer, **_):
    return [
        (sum(ids) % 97 / 98, 1.0, 0.0)[row % 3] for ids, row in zip(completion_ids, answer)
    ]
"""
EDITS = (
    "rewards=[{python: 'by_row.py:by_row'}]",
    "objective.easy_prompts=drop",
    "objective.hard_prompts=defer",
    "train.micro_batch_size=20",
    "train.batch_size=80",
)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = write_recipe(tmp_path_factory.mktemp("rl"))
    (folder / "by_row.py").write_text(REWARDS)
    return folder


@pytest.fixture(autouse=True)
def inside(recipe, monkeypatch):
    monkeypatch.chdir(recipe)


@pytest.fixture(scope="module")
def whole(recipe, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(recipe)
        folder = tmp_path_factory.mktemp("whole")
        return folder, train(plan_of(recipe, *EDITS), folder)


class FivePrompts:
    """An order of five rows, backwards in odd epochs."""

    def __len__(self):
        return 5

    def document(self, number):
        epoch, place = divmod(number, 5)
        return 4 - place if epoch % 2 else place


def test_a_deferred_prompt_waits_for_1_2_4_epochs_and_a_dropped_one_for_good():
    prompts, history = FivePrompts(), PromptHistory()
    seen = dict[int, list[int]]()
    number = 0
    while number < 5 * 40:
        (chosen,), number = history.next_numbers(prompts, number, 1)
        row = prompts.document(chosen)
        seen.setdefault(row, []).append(chosen // 5)
        history.note(prompts, chosen, {0: "drop", 1: "defer"}.get(row, "keep"))
        again = PromptHistory.of(history.tensors(), history.scalars())
        assert again == history
    assert seen[0] == [0]
    assert seen[1] == [0, 2, 5, 10, 19, 36]
    assert seen[2][:40] == list(range(40))


def test_where_all_are_left_out_none_is():
    prompts, history = FivePrompts(), PromptHistory()
    for number in range(5):
        history.note(prompts, number, "drop")
    assert history.num_left_out(3) == 5
    assert history.next_numbers(prompts, 5, 2) == ([5, 6], 7) and not history.left_out


def test_prompts_are_left_out_as_a_plain_loop_leaves_them(recipe, whole):
    folder, events = whole
    prompts = Prompts(recipe / "prepared", seed=plan_of(recipe).train.seed)
    of_steps = metrics(events)
    dropped, deferred, number = set(), {}, 0
    for step in sorted(of_steps):
        rows, first = [], number
        while len(rows) < 20:
            row = prompts[number].columns["answer"]
            if row not in dropped and deferred.get(row, (0, -1))[1] < number // len(prompts):
                rows.append((row, number))
            number += 1
        shown = completions(folder)[f"step-{step:08d}.jsonl"]
        assert [line["prompt"] for line in shown[::4]] == [prompts[n].text for _, n in rows]
        for row, place in rows:
            if row % 3 == 1:
                dropped.add(row)
            elif row % 3 == 2:
                times = deferred.get(row, (0, 0))[0]
                deferred[row] = (times + 1, place // len(prompts) + 2**times)
        expected = {
            "prompts/sampled": 20,
            "prompts/easy": sum(row % 3 == 1 for row, _ in rows),
            "prompts/hard": sum(row % 3 == 2 for row, _ in rows),
            "prompts/skipped": number - first - 20,
        }
        assert {name: of_steps[step][name] for name in expected} == expected
        epoch = number // len(prompts)
        left_out = len(dropped) + sum(last >= epoch for _, last in deferred.values())
        assert of_steps[step]["prompts/left_out"] == pytest.approx(left_out / len(prompts))
    assert dropped and any(times > 1 for times, _ in deferred.values())
    state = json.loads((max((folder / "checkpoints").glob("step-*")) / "state.json").read_text())
    assert state["cursor"]["consumed"] == number
    assert state["prompts"]["counts"]["skipped"] == number - 20 * len(of_steps) > 0


def test_a_resumed_run_leaves_out_the_same(recipe, whole, tmp_path):
    plan = plan_of(recipe, *EDITS)
    assert_resumes_to_the_same_bits(plan, tmp_path, stop_after=4, undisturbed=whole)


def test_two_ranks_leave_out_the_same(recipe, whole, tmp_path):
    _, events = whole
    many = train(on_ranks(plan_of(recipe, *EDITS), replicate=2), tmp_path)
    assert losses(many) == pytest.approx(losses(events), abs=1e-5)
    assert {step: of["prompts/left_out"] for step, of in metrics(many).items()} == {
        step: of["prompts/left_out"] for step, of in metrics(events).items()
    }


def test_oversampling_trains_on_those_that_differ(recipe, tmp_path):
    edits = (EDITS[0], "objective.oversampling=2.5", "train.max_steps=1")
    events = train(plan_of(recipe, *edits), tmp_path)
    prompts = Prompts(recipe / "prepared", seed=plan_of(recipe).train.seed)
    sampled = [prompts[number] for number in range(10)]
    differ = [prompt for prompt in sampled if prompt.columns["answer"] % 3 == 0][:4]
    rows = completions(tmp_path)["step-00000001.jsonl"]
    assert {prompt.text for prompt in differ} <= {row["prompt"] for row in rows}
    assert len(rows) == 16 and metrics(events)[1]["prompts/sampled"] == 10


@pytest.mark.parametrize("kind", ["random", "shuffled"])
def test_a_control_trains_on_other_rewards_and_reports_the_real_ones(recipe, tmp_path, kind):
    edits = (EDITS[0], f"objective.reward_control={kind}", "train.max_steps=1", EDITS[-1])
    events = train(plan_of(recipe, *edits), tmp_path)
    rows = completions(tmp_path)["step-00000001.jsonl"]
    real = [row["reward"] for row in rows]
    assert metrics(events)[1]["reward"] == pytest.approx(sum(real) / len(real))
    ours = torch.tensor([row["advantage"] for row in rows])
    of_real = group_advantages(torch.tensor(real, dtype=torch.float64), 4, scale="group")
    assert (ours - of_real).abs().max() > 0.1
    if kind == "random":  # two values in a group: the advantages of k heads among 4
        for group in ours.view(-1, 4):
            assert len({round(float(value), 4) for value in group}) <= 2


def test_controls_by_hand():
    nan = math.nan
    totals, keys = (1.0, 2.0, nan, 3.0, 2.0), list(range(5))
    assert control_totals(totals, "none", keys)[:2] == (1.0, 2.0)
    shuffled = control_totals(totals, "shuffled", keys)
    assert math.isnan(shuffled[2]) and sorted(shuffled[:2] + shuffled[3:]) == [1.0, 2.0, 2.0, 3.0]
    assert shuffled[:2] + shuffled[3:] != (1.0, 2.0, 3.0, 2.0)
    coins = control_totals((0.5,) * 2000, "random", list(range(2000)))
    assert set(coins) == {0.0, 1.0} and 900 < sum(coins) < 1100
    assert coins[:10] == control_totals((0.5,) * 10, "random", list(range(10)))


def test_what_is_easy_and_hard():
    choice = PromptChoice(easy_prompts="drop", hard_prompts="defer", easy_threshold=0.9)
    assert choice.treatment((0.9, 1.0)) == "drop" and choice.treatment((0.0, -1.0)) == "defer"
    assert choice.treatment((0.0, 1.0)) == choice.treatment(()) == "keep"


def test_the_model_is_evaluated_before_the_first_step(recipe, tmp_path):
    """The same as the first evaluation of a run that learns nothing."""
    still = plan_of(
        recipe, "eval.on_start=true", "optimizer.learning_rate=1e-12", "train.max_steps=3"
    )
    evaluations = fields(train(still, tmp_path), "EvalDone")
    assert [event["step"] for event in evaluations] == [0, 3]
    assert evaluations[0]["metrics"]["reward"] == evaluations[1]["metrics"]["reward"]

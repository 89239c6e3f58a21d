"""Episodes with tools under PPO and on-policy distillation: what tools answered is no target of anything.

Oracles: three sampled tokens by hand, verl's sum over masked tokens, the objective without tools, an uninterrupted run.
"""

from functools import partial

import pytest
import torch
from episodes_for_tests import (
    DISTILL,
    EDITS,
    GUESS,
    PPO,
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
    write_teacher,
)
from test_distillation import logits, models

from bloomery.model.heads import ScoreSettings
from bloomery.recipe.objectives import OnPolicyDistill
from bloomery.train.objectives.distillation import on_policy_head
from bloomery.train.objectives.losses import on_policy_loss
from bloomery.train.objectives.objective import Objective, Scoring
from bloomery.train.rl.advantages import TokenAdvantages
from bloomery.train.rl.policy_scores import LOGPS
from bloomery.train.rl.ppo import PpoLoss, TokenRewarding
from bloomery.train.rl.rollout import MicroBatchShape, RolloutSample, pack
from bloomery.train.step import compute_loss
from ranks import fields, losses, on_ranks

SHAPE = MicroBatchShape(1, 40)


class GivenScores:
    """In place of those of a model: of tokens that were given, log-probabilities are 0 and values are any."""

    def __init__(self, logps, values, reference_logps):
        self._by_row = {LOGPS: logps}
        self._values = values
        self._reference_logps = reference_logps

    def rows_of_head(self, _samples, _shape, rows):
        return [self._by_row.get(row, self._values) for row in rows]

    def logps(self, _samples, _shape, *, of_reference):
        assert of_reference
        return self._reference_logps


def judged(rewarding, samples, rewards, logps, values, reference_logps):
    scores = GivenScores(logps, values, reference_logps)
    return TokenAdvantages(scores, rewarding).judge(
        samples, rewards, [False] * len(samples), num_steps=1, shape=SHAPE
    )


def test_advantages_of_an_episode_of_three_sampled_tokens_by_hand():
    """A token, two that a tool answered, and two more tokens; the environment gives 1."""
    episode = RolloutSample(
        (5, 6), (7, 8, 9, 10, 11), (-1.0, 0.0, 0.0, -1.0, -1.0), given=((1, 3),)
    )
    result = judged(
        TokenRewarding(kl_coef=0.1, gamma=0.9, lam=0.8),
        [episode],
        [1.0],
        [[-1.0, 0.0, 0.0, -2.0, -0.5]],
        [[0.5, 77.0, -88.0, 0.4, -0.3]],
        [[-1.5, 0.0, 0.0, -1.0, -0.7]],
    )
    targets = result.samples[0].targets
    # Each sampled token pays a tenth of its log ratio, and the last one has the reward.
    rewards = [-0.1 * 0.5, -0.1 * -1.0, -0.1 * 0.2 + 1.0]
    third = rewards[2] + 0.3
    second = rewards[1] + 0.9 * -0.3 - 0.4 + 0.9 * 0.8 * third
    first = rewards[0] + 0.9 * 0.4 - 0.5 + 0.9 * 0.8 * second
    advantages = torch.tensor([first, second, third])
    assert targets.returns == pytest.approx((first + 0.5, 0.0, 0.0, second + 0.4, third - 0.3))
    assert targets.values == pytest.approx((0.5, 0.0, 0.0, 0.4, -0.3))
    white = ((advantages - advantages.mean()) / advantages.std()).tolist()
    assert targets.advantages == pytest.approx((white[0], 0.0, 0.0, white[1], white[2]), abs=1e-6)
    assert result.metrics["kl"] == pytest.approx((0.5 - 1.0 + 0.2) / 3)
    assert result.metrics["objective/entropy"] == pytest.approx(1.0 + 2.0 + 0.5)


GIVEN = ((), ((0, 2),), ((1, 3), (5, 6)), ((2, 4),))
LENGTHS = (4, 5, 9, 5)


def episodes(seed: int, *, with_tools: bool = True):
    """Samples, and numbers of their tokens: log-probabilities (0 where given), values, reference log-probabilities."""
    generator = torch.Generator().manual_seed(seed)
    samples = [
        RolloutSample((5, 6), tuple(range(7, 7 + length)), (-1.0,) * length, given=spans)
        for length, spans in zip(LENGTHS, GIVEN if with_tools else ((),) * 4, strict=True)
    ]
    numbers = [
        [torch.randn(length, generator=generator).tolist() for length in LENGTHS] for _ in range(3)
    ]
    for of_samples in (numbers[0], numbers[2]):
        for of_tokens, sample in zip(of_samples, samples, strict=True):
            for start, end in sample.given:
                of_tokens[start:end] = [0.0] * (end - start)
    return samples, numbers


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_advantages_step_over_masked_tokens_as_those_of_verl(gamma):
    """Its sum goes over all positions from the end, and keeps value and advantage where the mask is 0."""
    samples, (logps, values, reference) = episodes(0)
    rewards = [0.3, -1.0, 2.0, 0.5]
    rewarding = TokenRewarding(kl_coef=0.2, gamma=gamma, lam=0.7)
    result = judged(rewarding, samples, rewards, logps, values, reference)
    for sample, reward, logp, value, other in zip(
        result.samples, rewards, logps, values, reference, strict=True
    ):
        advantage = next_value = 0.0
        returns = []
        for place in reversed(range(len(logp))):
            if sample.is_sampled[place]:
                of_token = -0.2 * (logp[place] - other[place])
                of_token += reward if place == len(logp) - 1 else 0.0
                surprise = of_token + gamma * next_value - value[place]
                advantage = surprise + gamma * 0.7 * advantage
                next_value = value[place]
            returns.insert(0, advantage + value[place])
        expected = [
            number if is_sampled else 0.0
            for number, is_sampled in zip(returns, sample.is_sampled, strict=True)
        ]
        assert sample.targets.returns == pytest.approx(expected, abs=1e-6)


def test_without_tools_the_targets_are_those_of_completions():
    samples, (logps, values, reference) = episodes(1, with_tools=False)
    rewarding = TokenRewarding(whiten_rewards=True)
    arguments = {"logps": logps, "reference_logps": reference, "values": values}
    expected = rewarding([1.0, 2.0, 0.0, -1.0], [False] * 4, **arguments)
    result = judged(rewarding, samples, [1.0, 2.0, 0.0, -1.0], logps, values, reference)
    assert tuple(sample.targets for sample in result.samples) == expected.targets
    assert result.metrics == expected.metrics


def test_given_tokens_have_no_part_in_the_loss_of_ppo():
    samples, (logps, values, reference) = episodes(2)
    result = judged(TokenRewarding(), samples, [1.0, 0.0, 2.0, 0.5], logps, values, reference)
    (batch,), _ = pack(result.samples, length=40, rows=1)
    generator = torch.Generator().manual_seed(3)
    numbers = torch.randn(3, *batch.loss_mask.shape, generator=generator)
    is_target = batch.loss_mask != 0
    assert int(is_target.sum()) == sum(sample.num_sampled for sample in samples)

    def loss(outputs_3BT):
        outputs_3BT = (outputs_3BT * batch.loss_mask).requires_grad_()
        total, count, sums, _ = PpoLoss(entropy_coef=0.1, vf_coef=0.5)(*outputs_3BT, batch)
        total.backward()
        return (
            float(total.detach()),
            float(count),
            {n: s.tolist() for n, s in sums.items()},
            outputs_3BT.grad,
        )

    first = loss(numbers)
    others = torch.where(is_target, numbers, 9.0)
    second = loss(others)
    assert first[:3] == second[:3]
    assert (first[3][:, ~is_target] == 0).all() and (first[3][0][is_target] != 0).any()


@pytest.mark.parametrize("estimator", ["full", "sampled"])
def test_a_teacher_judges_the_sampled_tokens_of_an_episode_alone(estimator):
    """By whole distributions: the sum over three tokens, in which two between them have no part."""
    student, teacher = models()
    episode = RolloutSample((5, 6), (7, 8, 9, 10, 11), (-1.0,) * 5, given=((1, 3),))
    (batch,), _ = pack([episode], length=12, rows=1)
    keys = OnPolicyDistill(kind="on_policy_distill", teacher="", estimator=estimator)
    objective = Objective(
        head=on_policy_head(keys, teacher, Scoring(ScoreSettings(7))),
        loss=lambda output_4BT, batch: on_policy_loss(
            output_4BT, batch.loss_mask, sampled=estimator == "sampled"
        ),
    )
    parts = compute_loss(student, batch, objective, precision="float32")
    ours, theirs = (
        torch.log_softmax(logits(model, batch)[0], -1).detach() for model in (student, teacher)
    )
    places = [1, 4, 5]  # each predicts the token after it
    if estimator == "full":
        divergences = [(ours[at].exp() * (ours[at] - theirs[at])).sum() for at in places]
    else:
        divergences = [(ours - theirs)[at, int(batch.labels[0, at])] for at in places]
    assert parts.count == 3
    assert parts.total.item() == pytest.approx(float(sum(divergences)), rel=1e-5)


# Runs

KINDS = {"ppo": PPO, "on_policy_distill": DISTILL}


MESHES = (({}, 8), ({"replicate": 2}, 64), ({"shard": 2}, 8))


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("episodes")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_episodes(folder)
        write_teacher(folder, *EDITS)
        yield folder


def plan_with(recipe, kind, *edits):
    return plan_of(recipe, *KINDS[kind], *EDITS, *GUESS, *edits)


@pytest.fixture(scope="module")
def whole(recipe, tmp_path_factory):
    """By objective: the folder and the events of an uninterrupted run."""
    runs = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp("whole") / kind
        runs[kind] = folder, played(plan_with(recipe, kind), folder, recipe)
    return runs


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_plays_and_learns_from_sampled_tokens(whole, kind):
    folder, events = whole[kind]
    assert losses(events).keys() == set(range(1, STEPS + 1))
    of_steps = metrics(events)
    first_of_rollouts = [step for step in of_steps if "tools/turns" in of_steps[step]]
    assert len(first_of_rollouts) == (STEPS if kind == "on_policy_distill" else STEPS // 2)
    assert all(of_steps[step]["tools/turns"] > 1 for step in first_of_rollouts)
    assert all("reward" in event["metrics"] for event in fields(events, "EvalDone"))
    rows = [row for of_file in completions(folder).values() for row in of_file]
    assert any(row["given"] for row in rows)
    if kind == "on_policy_distill":
        assert all(
            event["loss"] > 0 for event in fields(events, "EvalDone")
        )  # not minus the reward
        return
    for row in rows:
        given = {place for span in row["given"] for place in range(*span)}
        for name in ("advantages", "values", "returns"):
            assert all(row[name][place] == 0.0 for place in given)
        assert any(row["advantages"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop_after", [3])
def test_a_run_goes_on_between_its_episodes_bitwise(recipe, whole, tmp_path, kind, stop_after):
    assert_resumes_to_the_same_bits(
        plan_with(recipe, kind),
        tmp_path,
        stop_after=stop_after,
        undisturbed=whole[kind],
        train=partial(played, recipe=recipe),
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_a_run_that_is_killed_within_turns_ends_the_same(recipe, whole, tmp_path, kind, seed):
    assert_survives_kills(
        plan_with(recipe, kind),
        tmp_path / "run",
        recipe,
        undisturbed=whole[kind][0],
        seed=seed,
    )


@pytest.mark.parametrize(
    ("kind", "mesh", "slots"),
    [
        *((kind, mesh, slots) for kind in KINDS for mesh, slots in MESHES),
        ("ppo", {"pipeline": 2}, 64),  # no teacher judges over stages
    ],
    ids=str,
)
def test_episodes_and_losses_are_the_same_on_any_ranks_and_slots(
    recipe, whole, tmp_path, kind, mesh, slots
):
    folder, events = whole[kind]
    plan = on_ranks(plan_with(recipe, kind), **mesh)
    ours = played(plan, tmp_path / "run", recipe, slots=slots)
    for path in sorted((folder / "completions").iterdir()):
        assert_same_episodes(tmp_path / "run", folder, int(path.stem.removeprefix("step-")))
    assert losses(ours) == pytest.approx(losses(events), abs=1e-5)

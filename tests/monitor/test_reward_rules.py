"""Each trouble of a run with rewards has its rule; a healthy run has none of them. Curves are made up, or recorded."""

from dataclasses import replace

import pytest

from bloomery.monitor.diagnosis import Diagnoser, why_not_learning
from bloomery.monitor.events import Recovered, RunStarted, StepHealth
from bloomery.monitor.history import PlanFacts, history_of
from runs_for_tests import step_done

FACTS = PlanFacts(
    fresh=False,
    falls=False,
    steps=100,
    learning_rate=3e-5,
    max_completion_length=512,
    kl_weight=0.04,
)


def rollouts(steps=60, **curves):
    """Events of steps that each begin with a rollout. A curve is a number, or a function of the share of the run."""
    healthy = {
        "reward": lambda share: 0.2 + 0.5 * share,
        "frac_reward_zero_std": 0.2,
        "completions/mean_length": 120.0,
        "completions/clipped_ratio": 0.1,
        "entropy": 1.2,
    }
    yield RunStarted(
        schema=2,
        version="0",
        parameters=1,
        steps=steps,
        attention="mask",
        device="cpu",
        loss_unit="completion",
        steps_per_rollout=1,
    )
    for step in range(1, steps + 1):
        noise = 0.02 * (-1) ** step
        metrics = {
            name: curve(step / steps) if callable(curve) else curve
            for name, curve in {**healthy, **curves}.items()
        }
        metrics["reward"] += noise
        yield step_done(step, 1e-7 * step, learning_rate=3e-5, metrics=metrics)


def causes(events, facts=FACTS):
    return [one.cause for one in why_not_learning(history_of(events), facts)]


def said(events, facts=FACTS):
    (one,) = why_not_learning(history_of(events), facts)
    return str(one)


FLAT = {"reward": 0.2}
TROUBLES = {
    "same-rewards": (
        {**FLAT, "frac_reward_zero_std": 0.95},
        "95% of the prompts",
        "objective.num_generations",
    ),
    "truncated": (
        {**FLAT, "completions/clipped_ratio": 0.97},
        "97% of the completions reach objective.max_completion_length (512)",
        "set objective.max_completion_length=1024",
    ),
    "length": (
        {**FLAT, "completions/mean_length": lambda share: 100 + 300 * share},
        "tokens in the first rollouts",
        "{verifier: length, max_characters: ",
    ),
    "entropy": (
        {**FLAT, "entropy": lambda share: 1.5 * (1 - share) ** 3},
        "entropy 1.",
        "optimizer.learning_rate=1e-05",
    ),
    "kl": (
        {"kl": lambda share: 5.0 * share},
        "nats per token in the last 10 rollouts",
        "set objective.beta=0.4 (now 0.04)",
    ),
}


@pytest.mark.parametrize("cause", TROUBLES)
def test_a_trouble_has_its_evidence_and_its_fix(cause):
    curves, evidence, fix = TROUBLES[cause]
    assert causes(rollouts(**curves)) == [cause]
    text = said(rollouts(**curves))
    assert evidence in text
    assert fix in text


HEALTHY = {
    "rises": {},
    "reasons longer and better": {"completions/mean_length": lambda share: 100 + 400 * share},
    "is surer and better": {"entropy": lambda share: 1.5 * (1 - share) ** 3},
    "never ends a completion, and is better": {"completions/clipped_ratio": 1.0},
    "keeps to its reference": {"kl": lambda share: 0.1 * share},
    "is slow": {"reward": lambda share: 0.2 + 0.05 * share},
    "is flat and has no trouble": FLAT,
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_has_no_trouble(name):
    for steps in (10, 25, 50, 100):
        assert causes(rollouts(steps, **HEALTHY[name])) == []


def test_a_solved_task_is_no_trouble():
    """A verifier gives 1 at most: with nothing left to learn all groups have one reward, and entropy is low."""
    solved = {"reward": 0.99, "frac_reward_zero_std": 1.0, "entropy": 0.01}
    known = PlanFacts(**{**vars(FACTS), "highest_reward": 1.0})
    assert causes(rollouts(**solved), known) == []
    assert causes(rollouts(**solved)) == ["same-rewards"]  # of a function nobody knows the highest


def test_a_young_run_is_not_judged():
    assert causes(rollouts(9, reward=0.0, frac_reward_zero_std=1.0)) == []
    assert causes(rollouts(15, reward=0.2, **{"completions/clipped_ratio": 1.0})) == []


def test_a_rewind_takes_its_rollouts_back():
    history = history_of([*rollouts(30), Recovered(step=12, reason="x", action="back to step 12")])
    assert history.num_rollouts == 12
    assert [step.step for step in history.newest_rollouts] == list(range(3, 13))


def test_each_is_told_once_while_the_run_goes_on():
    diagnoser = Diagnoser(lambda: FACTS)
    warned = [
        warning
        for event in rollouts(100, reward=0.0, frac_reward_zero_std=1.0)
        for warning in diagnoser.check(event)
    ]
    assert [(warning.cause, warning.step) for warning in warned] == [("same-rewards", 10)]
    assert "reward" in warned[0].reason


def test_rules_of_text_do_not_judge_completions():
    """A fresh model begins with a loss of 0, samples noise, and has few loss tokens in its packed sequences."""
    facts = PlanFacts(
        vocab_size=None, fresh=False, falls=False, tokens_per_step=0, learning_rate=3e-5, steps=60
    )
    events = list(rollouts())
    assert causes(events, facts) == []


def unchanged(events, *, at=(1, 2, 5, 10), no_gradient=1.0):
    """The events, with samples of steps in which no parameter had a gradient."""
    for event in events:
        yield event
        if getattr(event, "step", None) in at:
            yield StepHealth(
                step=event.step,
                update_ratio=0.0,
                unchanged_share=no_gradient,
                no_gradient_share=no_gradient,
                unchanged="model.layers.0.mlp.gate_proj.lora_B",
            )


SAME = {"frac_reward_zero_std": 1.0, "reward_std": 0.0}
CONSTANT = {**SAME, "rewards/same/mean": 1.0, "rewards/same/std": 0.0}
PER_PROMPT = {**SAME, "rewards/same/mean": 0.5, "rewards/same/std": 0.5}


@pytest.mark.parametrize("steps", [10, 14, 25])
@pytest.mark.parametrize(
    ("curves", "problem"),
    [
        (CONSTANT, "do not tell completions apart"),
        (PER_PROMPT, "check that the reward reads the completion"),
    ],
)
def test_equal_rewards_are_no_fault_of_the_weights(curves, problem, steps):
    events = list(unchanged(rollouts(steps, **curves)))
    assert causes(events) == ["same-rewards"]
    assert "all completions of a prompt have one reward" in said(events)
    assert problem in said(events)


def test_several_steps_of_a_rollout_share_its_rewards():
    def events():
        for event in rollouts(60, **CONSTANT):
            is_first = getattr(event, "step", 1) % 4 == 1
            yield event if is_first or not hasattr(event, "metrics") else replace_metrics(event, {})

    assert causes(list(unchanged(events(), at=range(1, 60)))) == ["same-rewards"]


def test_a_constant_reward_of_completions_without_a_group():
    """PPO compares a completion with the estimates of its value: there are no groups."""
    curves = {name: value for name, value in CONSTANT.items() if name != "frac_reward_zero_std"}
    events = [
        replace_metrics(
            event, {n: v for n, v in event.metrics.items() if n != "frac_reward_zero_std"}
        )
        if hasattr(event, "metrics")
        else event
        for event in rollouts(**curves)
    ]
    assert causes(events) == ["same-rewards"]


def test_a_task_that_is_solved_at_the_start_says_so():
    known = PlanFacts(**{**vars(FACTS), "highest_reward": 1.0})
    assert causes(rollouts(**CONSTANT, reward=1.0), known) == ["same-rewards"]


def test_weights_without_gradient_are_reported_next_to_the_rewards():
    """Where rewards differ, a weight without a gradient is a fault, and does not hide what the rewards show."""
    events = list(unchanged(rollouts(**TROUBLES["kl"][0]), no_gradient=0.5))
    assert causes(events) == ["frozen", "kl"]


def test_a_reward_that_is_rare_at_first_is_no_fault_of_the_weights():
    """Before the first completion is rewarded, no weight has a gradient."""
    rare = {
        "reward": lambda share: 0.0 if share < 0.5 else share,
        "frac_reward_zero_std": lambda share: 1.0 if share < 0.5 else 0.7,
    }
    assert causes(list(unchanged(rollouts(**rare), at=range(1, 30)))) == []


def test_completions_that_are_all_cut_off_are_not_trained_on():
    """With objective.mask_truncated_completions, a rollout of nothing else has no loss tokens."""
    events = [
        replace(event, loss_tokens=0) if hasattr(event, "metrics") else event
        for event in rollouts(**{**FLAT, "completions/clipped_ratio": 1.0})
    ]
    assert causes(list(unchanged(events))) == ["truncated"]


def replace_metrics(event, metrics):
    return replace(event, metrics=metrics)


@pytest.mark.parametrize("name", TROUBLES)
def test_a_run_that_a_teacher_trains_has_no_trouble_with_rewards(name):
    """An environment's rewards are then figures alone: equal ones leave the gradient as it is."""
    events = list(rollouts(**TROUBLES[name][0]))
    assert causes(events) and causes(events, replace(FACTS, trains_on_rewards=False)) == []

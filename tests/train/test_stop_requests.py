"""A request to stop is heard wherever the model computes, and a stopped run that goes on equals the undisturbed one."""

import json

import pytest
import torch
from plans_for_tests import tiny_plan
from runs_of_the_loop import CONFIG, Run, assert_same_tensors

from bloomery.core.errors import UserError
from bloomery.infer.model_folder import best_step, saved_steps
from bloomery.monitor.events import EvalDone, Recovered, Sampled, StepDone, Warned, last_per_step
from bloomery.train.loop import run

STEPS = 6


@pytest.fixture
def plan(prepared):
    return plan_of(prepared)


def plan_of(
    prepared, *, early_stopping_patience: int | None = None, rate: float = 0.01, every: int = 3
):
    asked = {"every_steps": every, "early_stopping_patience": early_stopping_patience}
    return tiny_plan(
        prepared,
        config=CONFIG,
        train={"steps": STEPS},
        checkpoint={"every_steps": 3},
        eval=asked,
        sample={"prompts": ("def", "return"), "max_new_tokens": 3},
        optimizer={"learning_rate": rate},
    )


class Stops:
    """Says stop when it is asked for the `number`-th time."""

    def __init__(self, number: int) -> None:
        self.number, self.asked = number, 0

    def __call__(self) -> bool:
        self.asked += 1
        return self.asked >= self.number


class Disturbed(Run):
    """A run that is stopped at one poll after another, each time `stride` polls further on, until it is done."""

    def __init__(self, plan, folder, number: int) -> None:
        folder.mkdir()
        self.folder, self.events, self.stops = folder, [], Stops(number)
        newest, self.outcome = None, "stopped"
        self.outcome = run(
            plan, run_dir=folder, emit=self.events.append, stop=self.stops, resume_from=newest
        )
        if self.outcome == "stopped" and (steps := saved_steps(folder / "checkpoints")):
            torch.manual_seed(99)
            newest = self.checkpoint(steps[-1])
            never = lambda: False  # noqa: E731
            self.outcome = run(
                plan, run_dir=folder, emit=self.events.append, stop=never, resume_from=newest
            )


def told(run: Run) -> dict[str, object]:
    evals = [
        (event.step, event.loss, event.tokens) for event in last_per_step(run.events, EvalDone)
    ]
    samples = {(event.step, event.prompt): event.completion for event in run.of(Sampled)}
    losses = [(event.step, event.loss) for event in last_per_step(run.events, StepDone)]
    state = json.loads((run.checkpoint(run.steps_done()) / "state.json").read_text())
    del state["progress"]["seconds"]  # by the clock
    return {
        "evals": evals,
        "samples": samples,
        "losses": losses,
        "state": state,
        "best": best_step(run.folder / "checkpoints"),
    }


def test_a_stop_at_any_poll_is_heard_at_once_and_costs_nothing(plan, tmp_path):
    whole = Run(plan, tmp_path / "whole")
    assert len(whole.of(EvalDone)) == 2 and len(whole.of(Sampled)) == 4
    polls = Stops(10**9)
    run(plan, run_dir=tmp_path / "counted", emit=lambda _: None, stop=polls)
    assert polls.asked > STEPS + 2 * 2 * 3, "each batch and each token is a poll"
    for number in range(4, polls.asked + 1, 9):
        disturbed = Disturbed(plan, tmp_path / str(number), number)
        assert disturbed.stops.asked <= number + 1, "and no work goes on after it"
        assert disturbed.outcome == "done" and told(disturbed) == told(whole), number
        assert_same_tensors(disturbed.tensors(STEPS), whole.tensors(STEPS))


def test_a_stop_in_the_evaluation_that_ends_a_run_early_changes_nothing(prepared, tmp_path):
    plan = plan_of(prepared, early_stopping_patience=1, rate=0.5, every=1)
    whole = Run(plan, tmp_path / "whole")
    assert whole.steps_done() < STEPS, "it ended early"
    polls = Stops(10**9)
    run(plan, run_dir=tmp_path / "counted", emit=lambda _: None, stop=polls)
    for number in (polls.asked - 6, polls.asked - 1):
        disturbed = Disturbed(plan, tmp_path / str(number), number)
        assert disturbed.outcome == "done" and told(disturbed) == told(whole), number


def test_a_run_that_diverged_is_skipped_and_rewound_before_it_stops(prepared, tmp_path):
    """Sampling from it used to end the run, with advice about models of others."""
    plan = plan_of(prepared, rate=1e9, every=1)
    plan = plan.model_copy(update={"train": plan.train.model_copy(update={"steps": 60})})
    late = plan.model_copy(
        update={"checkpoint": plan.checkpoint.model_copy(update={"every_steps": 50})}
    )
    events = []
    with pytest.raises(UserError, match=r"non-finite .* at step") as caught:
        run(late, run_dir=tmp_path, emit=events.append, stop=lambda: False)
    assert "optimizer.learning_rate" in caught.value.fix
    assert any(isinstance(event, StepDone) and event.loss is None for event in events)
    assert any(isinstance(event, Recovered) for event in events)
    assert any(
        isinstance(event, Warned) and "no samples after step" in event.reason for event in events
    )

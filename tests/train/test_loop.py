import itertools
import json
import math

import pytest
import torch
from faulty_runs import ONE_PIECE
from plans_for_tests import tiny_plan
from runs_of_the_loop import CONFIG, RECIPE, Run, assert_same_tensors, crossed

from bloomery.core.units import Duration
from bloomery.data.prepare.prepare import prepare
from bloomery.infer.model_folder import best_step, saved_steps
from bloomery.monitor.events import EvalDone, Phase, Resumed, RunStarted, Sampled, Saved, StepDone
from bloomery.recipe.load import load_recipe
from device_for_tests import SIMULATED


@pytest.fixture(scope="session")
def plan(prepared):
    sample = {"prompts": ("def f",)}
    return tiny_plan(
        prepared, config=CONFIG, train={"steps": 8}, optimizer={"kind": "muon"}, sample=sample
    )


@pytest.fixture(scope="session")
def undisturbed(plan, tmp_path_factory) -> Run:
    return Run(plan, tmp_path_factory.mktemp("undisturbed"))


def test_a_run_tells_all_it_does_in_order(undisturbed):
    assert undisturbed.outcome == "done"
    started = undisturbed.of(RunStarted)[0]
    first_events = undisturbed.events[: undisturbed.events.index(undisturbed.of(StepDone)[0])]
    phases = [event.name for event in first_events if isinstance(event, Phase)]
    begin = first_events.index(undisturbed.of(Phase)[SIMULATED])  # a GPU is checked before
    assert phases == ["check"] * SIMULATED + ["model", "first step"]
    assert first_events.index(started) == begin + 1
    assert [event.step for event in undisturbed.of(StepDone)] == list(range(1, 9))
    assert [event.step for event in undisturbed.of(EvalDone)] == [3, 6, 8]
    assert [event.step for event in undisturbed.of(Sampled)] == [3, 6, 8]
    assert [event.step for event in undisturbed.of(Saved)] == [3, 6, 8]
    order = [event.step for event in undisturbed.events]
    assert order == sorted(order)


def test_it_learns_and_its_figures_add_up(undisturbed):
    steps = undisturbed.of(StepDone)
    assert steps[0].loss == pytest.approx(math.log(300), abs=0.2)
    assert steps[-1].loss < steps[0].loss - 0.3
    assert [event.tokens for event in steps] == [128 * n for n in range(1, 9)]
    for event in steps:
        assert event.tokens_per_second == pytest.approx(128 / event.step_seconds)
        assert event.sequences_per_second == pytest.approx(4 / event.step_seconds)
        assert 0 <= event.data_wait_seconds < event.step_seconds
        assert 0.05 * (not SIMULATED) < event.memory_gib < 64  # a GPU's is that of its tensors
    assert [event.learning_rate for event in steps][:2] == [0.005, 0.01]


def test_checkpoints_are_kept_and_the_best_is_marked(undisturbed):
    assert saved_steps(undisturbed.folder / "checkpoints") == [6, 8]
    losses = {event.step: event.loss for event in undisturbed.of(EvalDone)}
    assert best_step(undisturbed.folder / "checkpoints") == min(losses, key=losses.get)
    assert [event.best for event in undisturbed.of(Saved)] == [True, True, True]


def test_an_evaluation_leaves_no_trace(plan, undisturbed, tmp_path):
    sections = {"eval": {"every_steps": 100}, "sample": {"prompts": ()}}
    plan_with_one_evaluation = plan.model_copy(
        update={
            name: getattr(plan, name).model_copy(update=changes)
            for name, changes in sections.items()
        }
    )
    run = Run(plan_with_one_evaluation, tmp_path / "run")
    assert run.losses() == undisturbed.losses()
    assert_same_tensors(run.tensors(8), undisturbed.tensors(8))


@pytest.mark.parametrize(
    ("precision", "kind"),
    crossed(
        {name: name for name in ("float32", "bfloat16", "bfloat16-pure", "float16")},
        {name: name for name in ("adamw", "muon", "adafactor")},
        quick="float32-adamw bfloat16-pure-muon float16-adafactor",
    ),
)
def test_a_resumed_run_equals_the_undisturbed_one_bitwise(prepared, tmp_path, kind, precision):
    train = {"steps": 6, "precision": precision}
    plan = tiny_plan(
        prepared, config=CONFIG, train=train, optimizer={"kind": kind}, eval={"every_steps": 4}
    )
    undisturbed = Run(plan, tmp_path / "whole")
    stopped = Run(plan, tmp_path / "halves", stop_after=4)
    assert stopped.outcome == "stopped"
    torch.manual_seed(99)
    resumed = Run(plan, tmp_path / "halves", resume_from=stopped.checkpoint(4))
    assert resumed.of(Resumed)[0].step == 4
    assert stopped.losses() | resumed.losses() == undisturbed.losses()
    assert list(resumed.losses()) == [5, 6]
    assert resumed.of(EvalDone)[-1].loss == undisturbed.of(EvalDone)[-1].loss
    assert_same_tensors(resumed.tensors(6), undisturbed.tensors(6))


@pytest.mark.soak  # a minute of compilation
def test_a_resumed_compiled_run_equals_the_undisturbed_one_bitwise(plan, tmp_path):
    train_plan = plan.train.model_copy(update={"compile": True, "precision": "bfloat16"})
    compiled_plan = plan.model_copy(update={"train": train_plan})
    undisturbed = Run(compiled_plan, tmp_path / "whole")
    stopped = Run(compiled_plan, tmp_path / "halves", stop_after=4)
    torch._dynamo.reset()
    resumed = Run(compiled_plan, tmp_path / "halves", resume_from=stopped.checkpoint(4))
    assert stopped.losses() | resumed.losses() == undisturbed.losses()
    assert_same_tensors(resumed.tensors(8), undisturbed.tensors(8))


def test_a_stop_before_the_first_step_saves_nothing(plan, tmp_path):
    stopped = Run(plan, tmp_path / "run", stop_after=0)
    assert stopped.outcome == "stopped"
    assert stopped.of(Saved) == []


def test_a_finished_run_resumes_to_nothing_more(plan, undisturbed, tmp_path):
    resumed = Run(plan, tmp_path / "run", resume_from=undisturbed.checkpoint(8))
    assert resumed.outcome == "done"
    assert resumed.of(StepDone) == []


def test_early_stopping_ends_a_run_that_no_longer_improves(prepared, tmp_path):
    plan = tiny_plan(
        prepared,
        config=CONFIG,
        train={"steps": 50},
        optimizer={"learning_rate": 1e-9, "warmup_steps": 0},
        eval={"every_steps": 1, "early_stopping_patience": 2},
    )
    run = Run(plan, tmp_path / "run")
    assert run.outcome == "done"
    assert run.steps_done() < 50


class Clock:
    """Seconds by what a run tells: a tenth for a step, one and a half for an evaluation; `slower` times as many."""

    def __init__(self, slower: float = 1.0) -> None:
        self.now = 0.0
        self.slower = slower

    def hears(self, event) -> None:
        if isinstance(event, StepDone | EvalDone):
            self.now += (0.1 if isinstance(event, StepDone) else 1.5) * self.slower


@pytest.fixture(scope="session")
def timed_plan(prepared):
    plan = tiny_plan(
        prepared,
        config=CONFIG,
        train={"steps": None, "seconds": 15.0, **ONE_PIECE},
        checkpoint={"every_steps": 1000},
        optimizer={"schedule": "linear"},
    )
    lengths = {"warmup": Duration(10, "percent"), "checkpoint": Duration(10, "percent")}
    return plan.model_copy(update={"lengths": plan.lengths.model_copy(update=lengths)})


def test_a_wall_time_run_takes_the_steps_of_its_time_and_no_rate_jumps(timed_plan, tmp_path):
    clock = Clock()
    run = Run(timed_plan, tmp_path / "run", clock=clock)
    assert run.outcome == "done"
    assert clock.now == pytest.approx(15 + 1.5, abs=0.15), (
        "the last evaluation comes after the limit"
    )
    # One evaluation lies within the time.
    assert run.steps_done() == pytest.approx((15 - 1.5) / 0.1, abs=1)
    lengths = [event for event in run.of(Phase) if event.name == "length"]
    assert 30 < len(lengths) <= 50
    assert lengths[-1].total == run.steps_done()
    rates = [event.learning_rate / 0.01 for event in run.of(StepDone)]
    assert rates[0] == 0 and rates[1] == pytest.approx(0.1 / 1.5)
    assert max(abs(next_rate - rate) for rate, next_rate in itertools.pairwise(rates)) <= 0.12
    assert max(rates) > 0.95 and rates[-1] < 0.02
    evaluated_steps = [event.step for event in run.of(EvalDone)]
    assert evaluated_steps == [75, run.steps_done()], "half of the time, and the end"


def test_a_resumed_wall_time_run_continues_from_the_stored_progress(timed_plan, tmp_path):
    """The data is repeated exactly; the rates follow the clock of a machine that is three times slower now."""
    stopped = Run(timed_plan, tmp_path / "run", clock=Clock(), stop_after=52)
    checkpoint_steps = saved_steps(tmp_path / "run" / "checkpoints")
    assert checkpoint_steps[-1] == 52, "a stop saves; a kill would not have"
    checkpoint = stopped.checkpoint(checkpoint_steps[-2])
    seconds = json.loads((checkpoint / "state.json").read_text())["progress"]["seconds"]
    assert seconds == pytest.approx(checkpoint_steps[-2] * 0.1)
    clock = Clock(slower=3.0)
    resumed = Run(timed_plan, tmp_path / "run", clock=clock, resume_from=checkpoint)
    repeated_steps = [step for step in resumed.losses() if step in stopped.losses()]
    assert repeated_steps == list(range(checkpoint_steps[-2] + 1, 53))
    # The first repeated step has the same weights, data and rate; later rates are ahead of those before.
    assert resumed.losses()[repeated_steps[0]] == stopped.losses()[repeated_steps[0]]
    rates = {
        event.step: event.learning_rate for run in (stopped, resumed) for event in run.of(StepDone)
    }
    assert max(abs(rates[step + 1] - rates[step]) for step in list(rates)[:-1]) < 0.004
    assert seconds + clock.now == pytest.approx(15 + 3 * 1.5, abs=0.5)
    assert resumed.steps_done() < 97, "a machine that got slower takes fewer steps"


def test_without_a_validation_split_there_is_no_evaluation(tmp_path):
    (tmp_path / "text").mkdir()
    for number in range(3):
        (tmp_path / "text" / f"{number}.py").write_text(f"print({number})\n" * 200)
    (tmp_path / "tiny.yaml").write_text(RECIPE.replace("5%", "0%"))
    prepare(load_recipe(tmp_path / "tiny.yaml"), tmp_path / "prepared")
    evaluations = {"every_steps": 1}
    plan = tiny_plan(
        tmp_path / "prepared",
        config=CONFIG,
        train={"steps": 2},
        eval=evaluations,
        sample={"prompts": ("def f",)},
    )
    run = Run(plan, tmp_path / "run")
    assert run.outcome == "done"
    assert run.of(EvalDone) == []
    assert [event.step for event in run.of(Sampled)] == [1, 2], (
        "samples are drawn once a step all the same"
    )
    assert list(itertools.chain.from_iterable(event.path for event in run.of(Saved)))


def test_evaluation_can_be_turned_off(plan, undisturbed, tmp_path):
    plan_without_evaluation = plan.model_copy(
        update={"eval": plan.eval.model_copy(update={"every_steps": None})}
    )
    run = Run(plan_without_evaluation, tmp_path / "run")
    assert run.outcome == "done" and run.losses() == undisturbed.losses()
    assert run.of(EvalDone) == [] and run.of(Sampled) == []

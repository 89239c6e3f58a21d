"""Checkpoints by time and at the best evaluations: when they are saved, and that nothing else depends on them."""

import random
import shutil
from pathlib import Path

import pytest
from plans_for_tests import tiny_config, tiny_plan
from runs_of_the_loop import CONFIG, Run, assert_same_tensors

from bloomery.infer.model_folder import best_on_disk, best_weight_steps, newest_valid, saved_steps
from bloomery.monitor.events import EvalDone, Saved, StepDone
from bloomery.parallel.process_group import join
from bloomery.plan.types import RunPlan
from bloomery.train.loop import run
from bloomery.train.run_clock import Timer
from ranks import on_ranks, ranks

STEP_SECONDS = 1.0
EVAL_SECONDS = 3.0


class Clock:
    """Each step takes a second, each evaluation three."""

    def __init__(self) -> None:
        self.now = 100.0

    def hears(self, event) -> None:
        self.now += {StepDone: STEP_SECONDS, EvalDone: EVAL_SECONDS}.get(type(event), 0.0)


def plan_of(prepared, *, steps: int = 23, eval_every: int | None = None, **checkpoint) -> RunPlan:
    by_time = {"every_steps": None, "every_seconds": 4.5, "keep": 100}
    return tiny_plan(
        prepared,
        config=CONFIG,
        train={"steps": steps},
        eval={"every_steps": eval_every},
        checkpoint=by_time | checkpoint,
    )


def saves(run: Run) -> list[int]:
    return [event.step for event in run.of(Saved) if not event.weights_only]


def test_a_save_follows_once_the_interval_is_over(prepared, tmp_path):
    """The clock of a step is read before its event: 4.5 seconds are over when step 6 ends, and again six steps on."""
    assert saves(Run(plan_of(prepared), tmp_path / "run", clock=Clock())) == [6, 12, 18, 23]


def test_the_time_of_evaluations_counts(prepared, tmp_path):
    told = Run(plan_of(prepared, eval_every=2), tmp_path / "run", clock=Clock())
    assert saves(told)[:3] == [3, 6, 9]


def test_a_save_for_another_reason_begins_the_interval_again(prepared, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    plan = plan_of(prepared, eval_every=4, at_best=True)
    told = Run(plan, folder, clock=Clock())
    best = [event.step for event in told.of(Saved) if event.best]
    assert best and all(step in saved_steps(folder / "checkpoints") for step in best)
    assert not [event for event in told.of(Saved) if event.weights_only]
    assert saves(told) == [4, 8, 12, 16, 20, 23], "the loss of the tiny model only falls"
    assert best_on_disk(folder / "checkpoints") == 23
    assert not best_weight_steps(folder / "checkpoints")


def test_without_at_best_the_best_weights_are_saved_alone(prepared, tmp_path):
    folder = tmp_path / "run"
    Run(plan_of(prepared, steps=5, eval_every=3), folder, clock=Clock(), stop_after=4)
    assert best_weight_steps(folder / "checkpoints") == [3]


def test_a_run_shorter_than_the_interval_is_saved_at_its_end(prepared, tmp_path):
    plan = plan_of(prepared, every_seconds=900.0)
    assert saves(Run(plan, tmp_path / "run", clock=Clock())) == [23]


def test_the_interval_of_a_resumed_run_begins_with_it(prepared, tmp_path):
    folder = tmp_path / "run"
    plan = plan_of(prepared)
    Run(plan, folder, clock=Clock(), stop_after=8)
    newest = newest_valid(folder / "checkpoints", on_damage=pytest.fail)
    again = Run(plan, folder, clock=Clock(), resume_from=newest)
    assert saves(again) == [14, 20, 23]


@pytest.mark.parametrize(
    ("seed", "steps"),
    [(2, 9), *(pytest.param(seed, 23, marks=pytest.mark.soak) for seed in range(3))],
)
def test_nothing_depends_on_when_checkpoints_are_saved(prepared, tmp_path, seed, steps):
    """A run that saves at random times and resumes from each ends as one that never did."""
    chance = random.Random(seed)
    plan = plan_of(prepared, steps=steps, every_seconds=1e9)
    undisturbed = Run(plan, tmp_path / "undisturbed", clock=Clock())
    folder = tmp_path / "run"
    losses = {}
    newest = None
    while True:
        every_seconds = chance.uniform(1.5, 6.0)
        best = seed % 2 == 0
        plan = plan_of(
            prepared, steps=steps, eval_every=3, at_best=best, every_seconds=every_seconds
        )
        stop_after = chance.randrange(1, steps + 1)
        told = Run(plan, folder, clock=Clock(), stop_after=stop_after, resume_from=newest)
        losses |= told.losses()
        if told.outcome == "done":
            break
        # A kill before some of them: what was saved since is gone.
        checkpoints = sorted((folder / "checkpoints").glob("step-*"))
        newest = chance.choice(checkpoints)
        for later in checkpoints[checkpoints.index(newest) + 1 :]:
            shutil.rmtree(later)
    assert losses == undisturbed.losses()
    assert_same_tensors(told.tensors(steps), undisturbed.tensors(steps))


def saved_on(plan_json: str, folder: str) -> tuple[list[int], list[int]]:
    """On every rank: the steps of its saves, and those on disk, with clocks that differ by rank."""
    plan = RunPlan.model_validate_json(plan_json)
    mesh = join(plan.train)
    events = []
    # The clock of the first rank takes a second per step; that of the other runs away at each look.
    looks = 0

    def clock() -> float:
        nonlocal looks
        looks += 1
        steps = sum(isinstance(event, StepDone) for event in events)
        return float(steps) if mesh.first_rank else 1000.0 * looks

    run(
        plan,
        run_dir=Path(folder),
        emit=events.append,
        stop=lambda: False,
        timer=Timer(0.0, clock),
        mesh=mesh,
    )
    saves = [event.step for event in events if isinstance(event, Saved)]
    return saves, saved_steps(Path(folder) / "checkpoints")


@pytest.mark.parametrize("shards", [1, 2])
def test_ranks_save_by_the_clock_of_the_first(prepared, tmp_path, shards):
    plan = plan_of(prepared, steps=14)
    without_dropout = {"config": tiny_config(vocab_size=300)}
    plan = plan.model_copy(update={"model": plan.model.model_copy(update=without_dropout)})
    plan = on_ranks(plan, replicate=2 // shards, shard=shards)
    folder = tmp_path / "run"
    folder.mkdir()
    results = ranks(2).call(saved_on, plan.model_dump_json(), str(folder))
    assert results[0] == ([6, 12, 14], [6, 12, 14])
    assert results[1][1] == [6, 12, 14]

"""The best checkpoint: the lowest validation loss of a run, on disk, under one name for every reader."""

import json
import random
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from plans_for_tests import tiny_config, tiny_plan
from runs_of_the_loop import CONFIG, Run
from safetensors.torch import load_file

from bloomery.core.units import Duration
from bloomery.infer.model_folder import (
    best_on_disk,
    best_weight_steps,
    damage,
    find_model,
    model_folder,
    newest_valid,
    saved_steps,
)
from bloomery.monitor.events import EvalDone, Saved, Warned
from bloomery.plan.lengths import Scale, checkpoint_steps, steps_of
from bloomery.train.checkpoint import saver as checkpoints_module
from bloomery.train.evaluation import evaluation
from bloomery.train.evaluation.evaluation import EvalResult
from bloomery.train.loop import run
from bloomery.view.metrics_json import metrics_of
from bloomery.view.summary import summary_of
from ranks import on_ranks, train

CONFIG_OF_RANKS = tiny_config(vocab_size=300)  # without dropout, which differs from rank to rank
INTERVALS = [
    *(
        (Duration(c, "steps"), Duration(e, "steps"))
        for c, e in ((1000, 500), (7, 3), (10, 4), (25, 25), (9, 50))
    ),
    *(
        (Duration(c, "percent"), Duration(e, "percent"))
        for c, e in ((25, 12.5), (20, 5), (33, 10), (10, 10), (5, 20))
    ),
    *(
        (Duration(c, "epochs"), Duration(e, "epochs"))
        for c, e in ((1, 0.5), (1, 0.3), (0.7, 0.2), (0.5, 1))
    ),
    (Duration(20, "percent"), Duration(6, "steps")),
    (Duration(1, "epochs"), Duration(10, "percent")),
    (Duration(40, "steps"), Duration(0.25, "epochs")),
]


@pytest.mark.parametrize(("checkpoint", "evaluation_every"), INTERVALS)
def test_checkpoints_are_evaluated_at_any_length(checkpoint, evaluation_every):
    """A checkpoint interval that is not shorter is the nearest multiple; a shorter one limits what a crash repeats."""
    for steps in range(1, 501):
        scale = Scale(
            tokens_per_step=512,
            sequences_per_step=8,
            sequences_per_epoch=197,
            steps=steps,
            step_seconds=None,
        )
        asked = steps_of(checkpoint, scale, key="checkpoint.every")
        evaluates = steps_of(evaluation_every, scale, key="eval.every")
        chosen = checkpoint_steps(checkpoint, scale, evaluation=evaluates)
        if asked < evaluates:
            assert chosen.value == asked
            continue
        assert chosen.value % evaluates == 0
        assert abs(chosen.value - asked) <= evaluates / 2
        assert (chosen.value == asked) == (chosen.reason == "set in the recipe")
        assert checkpoint_steps(checkpoint, scale, evaluation=None).value == asked


def scripted(monkeypatch, losses: dict[int, float]) -> None:
    """Validation losses by step, instead of those of the tiny model, which only fall."""

    def result(context, limit):
        return EvalResult(losses[context.step], 100, 300, 0.0)

    monkeypatch.setattr(evaluation, "evaluate_validation", result)


def lowest(events) -> int:
    """The step of the lowest validation loss, the first of equals, of a run that was never interrupted."""
    evaluations = [event for event in events if isinstance(event, EvalDone)]
    return min(evaluations, key=lambda event: event.loss).step


def assert_one_best(folder: Path, step: int, losses: dict[int, float]) -> None:
    checkpoints = folder / "checkpoints"
    weights = model_folder(folder, "best")
    assert best_on_disk(checkpoints) == step
    assert int(weights.name.partition("-")[2]) == step
    assert damage(weights) is None
    progress = json.loads((weights / "state.json").read_text())["progress"]
    assert (progress["best_step"], progress["best_loss"]) == (step, losses[step])


def test_the_first_evaluation_of_a_run_that_overfits_is_kept(prepared, tmp_path, monkeypatch):
    losses = {step: 7.0 + step / 100 for step in range(1, 25)}
    scripted(monkeypatch, losses)
    plan = tiny_plan(
        prepared,
        config=CONFIG,
        train={"steps": 23},
        eval={"every_steps": 3},
        checkpoint={"every_steps": 6, "keep": 1},
    )
    whole = Run(plan, tmp_path / "run")
    assert_one_best(tmp_path / "run", 3, losses)
    assert [(event.step, event.best, event.weights_only) for event in whole.of(Saved)] == [
        (3, True, True),
        (6, False, False),
        (12, False, False),
        (18, False, False),
        (23, False, False),
    ]
    checkpoints = tmp_path / "run" / "checkpoints"
    assert (saved_steps(checkpoints), best_weight_steps(checkpoints)) == ([23], [3])
    assert metrics_of(summary_of(whole.events))["best_eval"]["step"] == 3
    weights = model_folder(tmp_path / "run")
    assert not (weights / "optimizer.safetensors").exists(), "weights only"
    assert model_folder(tmp_path / "run", "3") == weights
    assert model_folder(tmp_path / "run", "last") == whole.checkpoint(23)
    assert find_model(tmp_path / "run").tokenizer == weights


def test_the_best_weights_of_a_step_whose_checkpoint_is_damaged(prepared, tmp_path, monkeypatch):
    """The run goes back before it, and evaluates there where it saved before."""
    losses = {step: 7.0 - step / 100 for step in range(1, 25)}
    scripted(monkeypatch, losses)
    plan = tiny_plan(
        prepared,
        config=CONFIG,
        train={"steps": 12},
        eval={"every_steps": 8},
        checkpoint={"every_steps": 6, "keep": 5},
    )
    first = Run(plan, tmp_path / "run", stop_after=8)
    checkpoints = tmp_path / "run" / "checkpoints"
    (first.checkpoint(8) / "model.safetensors").write_bytes(b"damaged")
    restored = newest_valid(checkpoints, on_damage=lambda _: None)
    assert restored == first.checkpoint(6)
    again = Run(plan, tmp_path / "run", stop_after=10, resume_from=restored)
    assert again.outcome == "stopped"
    assert (saved_steps(checkpoints), best_weight_steps(checkpoints)) == ([6, 10], [8])
    assert_one_best(tmp_path / "run", 8, losses)


def test_the_best_weights_are_those_of_their_step(prepared, tmp_path, monkeypatch):
    """Oracle: a run that ends at the best step."""
    plan = tiny_plan(
        prepared,
        config=CONFIG,
        train={"steps": 4},
        optimizer={"schedule": "constant"},
        eval={"every_steps": 2},
        checkpoint={"every_steps": 4},
    )
    Run(
        plan.model_copy(update={"train": plan.train.model_copy(update={"steps": 2})}),
        tmp_path / "two",
    )
    scripted(monkeypatch, {2: 1.0, 4: 2.0})
    Run(plan, tmp_path / "four")
    best, two = model_folder(tmp_path / "four"), tmp_path / "two/checkpoints/step-00000002"
    assert best.name == "best-00000002"
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (best, two))
    assert all((ours[name] == theirs[name]).all() for name in theirs)


class Killed(BaseException):
    """A kill between two operations of the process."""


PLACES = ["put_in_place", "note_best", "seal", "remove_folder", "nowhere"]


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(4, 40))]
)
def test_any_run_that_is_killed_anywhere_keeps_its_best(prepared, tmp_path, monkeypatch, seed):
    """Random losses, intervals, kills during and between saves; after each kill a reader finds a whole best model."""
    dice = random.Random(seed)
    steps = dice.randint(6, 24)
    losses = {step: round(dice.uniform(1.0, 2.0), 3) for step in range(1, steps + 1)}
    scripted(monkeypatch, losses)
    every = dice.randint(1, 5)
    plan = tiny_plan(
        prepared,
        config=CONFIG,
        train={"steps": steps},
        eval={"every_steps": every},
        checkpoint={
            "every_steps": dice.choice([every, 2 * every, 3 * every, 4]),
            "keep": dice.randint(1, 3),
            "async_save": dice.random() < 0.5,
        },
    )
    undisturbed = Run(plan, tmp_path / "undisturbed")
    best = lowest(undisturbed.events)
    assert_one_best(tmp_path / "undisturbed", best, losses)

    folder, events, calls_left = tmp_path / "run", [], [0]
    folder.mkdir()

    def dying(place: str):
        real = getattr(checkpoints_module, place)

        def call(*arguments, **settings):
            calls_left[0] -= 1
            if calls_left[0] == 0:
                raise Killed
            result = real(*arguments, **settings)
            if calls_left[0] == 1 and dice.random() < 0.3:
                raise Killed  # just after it
            return result

        return call

    for _ in range(3):
        with monkeypatch.context() as patch:
            place = dice.choice(PLACES)
            calls_left[0] = dice.randint(1, 4)
            if place != "nowhere":
                patch.setattr(checkpoints_module, place, dying(place))
            newest = newest_valid(folder / "checkpoints", on_damage=print)
            polls_left = iter(range(dice.randint(1, 2 * steps)))
            with suppress(Killed):
                run(
                    plan,
                    run_dir=folder,
                    emit=events.append,
                    resume_from=newest,
                    stop=lambda left=polls_left: next(left, None) is None,
                )
        on_disk = best_on_disk(folder / "checkpoints")
        if on_disk is not None:
            assert_one_best(folder, on_disk, losses)
            summary = summary_of(events)
            summary.best_saved = on_disk
            assert summary.best.step == on_disk, "the report and metrics.json name what is on disk"
    newest = newest_valid(folder / "checkpoints", on_damage=print)
    assert (
        run(plan, run_dir=folder, emit=events.append, resume_from=newest, stop=lambda: False)
        == "done"
    )
    assert_one_best(folder, best, losses)
    assert summary_of(events).best.step == best


def test_a_resume_from_an_older_checkpoint_has_its_best(prepared, tmp_path, monkeypatch):
    """Best at 2 as of checkpoint 4, at 6 as of 8: going back to 4 makes 2 the best again, although 6 was better."""
    losses = {2: 1.5, 4: 1.8, 6: 1.2, 8: 1.9, 10: 1.6, 12: 1.7}
    scripted(monkeypatch, losses)
    plan = tiny_plan(
        prepared,
        config=CONFIG,
        train={"steps": 8},
        eval={"every_steps": 2},
        checkpoint={"every_steps": 4, "keep": 2},
    )
    first = Run(plan, tmp_path / "run")
    assert_one_best(tmp_path / "run", 6, losses)
    again = Run(plan, tmp_path / "run", resume_from=first.checkpoint(4), stop_after=1)
    assert again.outcome == "stopped"
    assert_one_best(tmp_path / "run", 2, losses)
    assert best_weight_steps(tmp_path / "run" / "checkpoints") == [2]


def test_a_best_checkpoint_that_you_deleted_is_replaced(prepared, tmp_path, monkeypatch):
    losses = {2: 1.0, 4: 1.8, 6: 1.5, 8: 1.7}
    scripted(monkeypatch, losses)
    plan = tiny_plan(
        prepared,
        config=CONFIG,
        train={"steps": 8},
        eval={"every_steps": 2},
        checkpoint={"every_steps": 4, "keep": 2},
    )
    first = Run(plan, tmp_path / "run", stop_after=4)
    folder = tmp_path / "run/checkpoints/best-00000002"
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    second = Run(plan, tmp_path / "run", resume_from=first.checkpoint(4))
    assert "step 2, is missing" in second.of(Warned)[0].reason
    assert_one_best(tmp_path / "run", 6, losses)


def test_an_early_stop_by_few_tokens_is_reported(prepared, tmp_path, monkeypatch):
    losses = {1: 1.0, 2: 1.1, 3: 1.2}
    scripted(monkeypatch, losses)
    eval_plan = {"every_steps": 1, "early_stopping_patience": 2}
    stopped = Run(
        tiny_plan(prepared, config=CONFIG, train={"steps": 9}, eval=eval_plan), tmp_path / "run"
    )
    assert stopped.steps_done() == 3
    assert_one_best(tmp_path / "run", 1, losses)
    first, last = stopped.of(Warned)
    assert (first.step, last.step) == (1, 3)
    assert "100 loss tokens, fewer than 2,000" in first.reason
    assert (
        "2 evaluations without a lower loss than that of step 1; an evaluation has 100"
        in last.reason
    )


@pytest.mark.parametrize("mesh", [{"replicate": 2}, {"shard": 2}], ids=["2 copies", "2 shards"])
def test_ranks_save_the_best_weights_whole(prepared, tmp_path, mesh):
    """Oracle: one rank. The checkpoint of step 3 keeps the weights of step 2, the best as of it."""
    plan = tiny_plan(
        prepared,
        config=CONFIG_OF_RANKS,
        train={"steps": 4},
        eval={"every_steps": 2},
        checkpoint={"every_steps": 3},
    )
    Run(plan, tmp_path / "one")
    events = train(on_ranks(plan, **mesh), tmp_path / "two")
    saves = [
        (event.step, event.best, event.weights_only) for event in events if isinstance(event, Saved)
    ]
    assert saves == [(2, True, True), (3, False, False), (4, True, False)]
    one, two = (
        load_file(model_folder(tmp_path / name, "2") / "model.safetensors")
        for name in ("one", "two")
    )
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, atol=1e-4, rtol=1e-3)

"""What is measured of a step is what happened in it, and leaves no trace."""

import pytest
import torch
from faulty_runs import healthy_plan
from plans_for_tests import tiny_config
from runs_of_the_loop import Run, assert_same_tensors
from torch import nn

from bloomery.data.batch import Batch
from bloomery.monitor.events import StepDone, StepHealth
from bloomery.train.diagnostics.step_health import (
    EARLY,
    HealthCheck,
    label_facts,
    pair_excess,
)
from bloomery.train.diagnostics.stragglers import SLOW_STEPS, Stragglers
from bloomery.train.objectives.build import pretraining

OBJECTIVE = pretraining(score_chunk=64)


def batch_of(tokens, labels, documents=None, loss_mask=None) -> Batch:
    tokens = torch.tensor([tokens])
    return Batch(
        tokens=tokens,
        labels=torch.tensor([labels]),
        loss_mask=torch.ones(tokens.shape) if loss_mask is None else torch.tensor([loss_mask]),
        positions=torch.arange(tokens.shape[1])[None],
        documents=torch.zeros_like(tokens) if documents is None else torch.tensor([documents]),
    )


def test_the_ratio_is_that_of_root_mean_squares():
    moved, kept, vector = (
        nn.Parameter(torch.full(shape, 2.0)) for shape in ((300, 50), (40, 40), (7,))
    )
    health_check = HealthCheck({"moved": moved, "kept": kept, "vector": vector})
    moved.grad, kept.grad = torch.ones_like(moved), torch.zeros_like(kept)
    with health_check.watching(), torch.no_grad():
        moved.mul_(1.25)
    told = health_check.report(
        5,
        [batch_of([1, 2], [2, 3])],
        OBJECTIVE,
        updates=health_check.take_updates(),
        compiled=False,
    )
    assert health_check.take_updates() == {}
    every = 300 * 50 + 40 * 40 + 7
    assert told.update_ratio == pytest.approx((0.25 + 0.0) / 2)  # the median of the two matrices
    assert told.unchanged_share == pytest.approx((40 * 40 + 7) / every) and told.unchanged == "kept"
    # one is zero, one is None
    assert told.no_gradient_share == pytest.approx((40 * 40 + 7) / every)


def test_a_step_that_was_not_taken_has_no_ratio():
    told = HealthCheck({"w": nn.Parameter(torch.ones(2, 2))}).report(
        1, [batch_of([1, 2], [2, 3])], OBJECTIVE, updates={}, compiled=False
    )
    assert (told.update_ratio, told.unchanged_share, told.no_gradient_share, told.unchanged) == (
        None,
        None,
        None,
        "",
    )


def test_labels_are_looked_for_in_their_own_document_only():
    facts = label_facts(
        [batch_of([1, 2, 3, 9, 8], [2, 3, 4, 8, 7], documents=[0, 0, 0, 1, 1])], OBJECTIVE
    )
    assert (facts.own_share, facts.next_share, facts.after_next_share) == (0.0, 1.0, 0.0)
    masked = batch_of([1, 2, 3, 4], [1, 3, 4, 4], loss_mask=[1.0, 0.0, 0.0, 1.0])
    assert label_facts([masked], OBJECTIVE).own_share == 1.0
    assert label_facts([masked], OBJECTIVE).next_share == 0.0


def test_pairs_of_a_text_repeat_and_those_of_chance_do_not():
    draw = torch.Generator().manual_seed(1)
    chance = torch.randint(0, 30, (4096,), generator=draw).numpy()
    assert pair_excess(chance[:-1], chance[1:]) == pytest.approx(1, abs=0.1)
    # each token has one successor: 30 times as often as by chance
    cycle = torch.arange(4096).remainder(30).numpy()
    assert pair_excess(cycle[:-1], cycle[1:]) == pytest.approx(30, rel=0.02)
    assert pair_excess(cycle[:2], cycle[1:3]) is None


def test_looking_changes_no_bit_of_a_run(prepared, tmp_path, monkeypatch):
    plan = healthy_plan(
        prepared, train={"steps": 12}, config=tiny_config(vocab_size=300, residual_dropout=0.1)
    )
    often = Run(
        plan.model_copy(update={"logging": plan.logging.model_copy(update={"every_steps": 1})}),
        tmp_path / "a",
    )
    monkeypatch.setattr(HealthCheck, "due", lambda self, step, every: False)
    never = Run(plan, tmp_path / "b")
    assert len(often.of(StepHealth)) == 12 and never.of(StepHealth) == []
    assert often.losses() == never.losses()
    assert_same_tensors(often.tensors(12), never.tensors(12))


def test_vitals_come_early_and_with_the_monitor(prepared, tmp_path):
    run = Run(
        healthy_plan(prepared, train={"steps": 26}, logging={"every_steps": 13}), tmp_path / "run"
    )
    assert [told.step for told in run.of(StepHealth)] == sorted(
        {s for s in EARLY if s <= 26} | {13, 26}
    )
    assert all(
        told.labels_next == 1.0 and told.unchanged_share == 0.0 for told in run.of(StepHealth)
    )
    assert all(100 < step.loss_tokens <= 128 for step in run.of(StepDone))


def test_a_rank_is_slow_next_to_those_of_its_stage():
    """Two stages of three ranks; the second one's layers take twice as long, and its second rank 1.5 times that."""
    stragglers = Stragglers(stages=2)
    named, slowest = [], []
    for _ in range(2 * SLOW_STEPS):
        named.append(stragglers.note([1.0, 1.1, 0.9, 2.0, 3.0, 2.1]))
        slowest.append(stragglers.slowest_stage())
    (found,) = [stragglers for stragglers in named if stragglers]
    assert [each.ranks for each in found] == [(4,)] and found[0].times == pytest.approx(3 / 2.1)
    assert [stage for stage in slowest if stage] == [(1, pytest.approx(2.1))]
    assert slowest.index((1, pytest.approx(2.1))) == SLOW_STEPS - 1


def test_stages_that_take_turns_at_being_slow_are_even():
    stragglers = Stragglers(stages=2)
    for step in range(300):
        assert stragglers.note([1.0, 1.4] if step % 2 else [1.4, 1.0]) == []
        assert stragglers.slowest_stage() is None
    single = Stragglers()
    for _ in range(300):
        single.note([1.0, 1.5])
        assert single.slowest_stage() is None


def test_a_stage_without_trainable_parameters_measures_nothing():
    health_check = HealthCheck({})
    with health_check.watching():
        pass
    assert health_check.take_updates() == {}

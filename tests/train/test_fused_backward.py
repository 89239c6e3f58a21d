import math

import pytest
import torch
from plans_for_tests import tiny_config, tiny_plan
from runs_of_the_loop import CONFIG, RECIPE, Run, assert_same_tensors  # noqa: F401  (RECIPE: the corpus of conftest)
from test_step import OBJECTIVE, batch, poisoned, weights

from bloomery.monitor.events import StepHealth
from bloomery.train import set_up
from bloomery.train.optim.fused_backward import FusedBackward
from bloomery.train.state import build_state
from bloomery.train.step import train_step

KINDS = [
    {"kind": "adafactor"},
    {"kind": "adamw"},
    {"kind": "adamw", "state_dtype": "int8"},
    {"kind": "adamw", "state_dtype": "bfloat16", "offload": True},
]
MODES = ["full", "none", "selective", "every-2"]
CONFIGS = {"tied": tiny_config(), "untied": tiny_config(tie_embeddings=False, attention_bias=True)}


def model_and_optimizer(*, config="tied", train=None, **optimizer):
    plan = tiny_plan(
        config=CONFIGS[config],
        optimizer=optimizer,
        train={"accumulation": 1, "max_grad_norm": None} | (train or {}),
    )
    return build_state(plan).model_and_optimizer, plan.train


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "bfloat16-pure", "float16"])
def test_it_takes_the_steps_of_the_optimizer_after_backward(kind, config, precision):
    train = {"precision": precision}
    stochastic = {"stochastic_rounding": precision == "bfloat16-pure", "learning_rate": 0.02}
    inside, plan = model_and_optimizer(
        config=config, train=train, fused_backward=True, **kind, **stochastic
    )
    after, _ = model_and_optimizer(
        config=config,
        train=train,
        **(kind | stochastic | ({} if "state_dtype" in kind else {"offload": True})),
    )
    for step in range(3):
        a = train_step(inside, [batch(3, step)], OBJECTIVE, plan=plan, lr_scale=1.0)
        b = train_step(after, [batch(3, step)], OBJECTIVE, plan=plan, lr_scale=1.0)
        assert a.taken
        assert (a.loss, a.loss_tokens) == (b.loss, b.loss_tokens)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-5)
    assert inside.loss_scale is None or inside.loss_scale.clean_steps == 3
    # Stacks form their sums in another order than tensors alone do; what is rounded at random may then fall elsewhere.
    close = {
        "atol": 2e-2 if precision == "bfloat16-pure" else 1e-4 if "state_dtype" in kind else 1e-5,
        "rtol": 0,
    }
    for p, q in zip(weights(inside), weights(after), strict=True):
        torch.testing.assert_close(p, q, **close)
    assert inside.optimizer.scalars() == after.optimizer.scalars()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("config", CONFIGS)
def test_layers_that_are_computed_again_see_the_weights_of_the_forward(mode, config):
    plain, plan = model_and_optimizer(config=config, fused_backward=True, kind="adafactor")
    again, _ = model_and_optimizer(
        config=config,
        train={"activation_checkpointing": mode},
        fused_backward=True,
        kind="adafactor",
    )
    for step in range(2):
        train_step(plain, [batch(2, step)], OBJECTIVE, plan=plan, lr_scale=1.0)
        train_step(again, [batch(2, step)], OBJECTIVE, plan=plan, lr_scale=1.0)
    assert all(torch.equal(p, q) for p, q in zip(weights(plain), weights(again), strict=True))


@pytest.mark.parametrize("config", CONFIGS)
def test_two_gradients_stand_at_most(monkeypatch, config):
    who, plan = model_and_optimizer(config=config, fused_backward=True, kind="adafactor")
    standing = []
    update = FusedBackward._update

    def watched(self, parameter):
        standing.append(sum(p.grad is not None for p in who.model.parameters()))
        update(self, parameter)

    monkeypatch.setattr(FusedBackward, "_update", watched)
    train_step(who, [batch(2)], OBJECTIVE, plan=plan, lr_scale=1.0)
    assert len(standing) == len(list(who.model.parameters()))
    assert max(standing) <= 2
    # A tied weight's gradient stands from head to embedding; an untied head's until the next hook comes, at the latest.
    assert sum(count == 2 for count in standing) <= (len(standing) if config == "tied" else 1)
    assert all(p.grad is None for p in who.model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_from_the_first_bad_gradient_on_nothing_moves(kind):
    who, plan = model_and_optimizer(config="untied", fused_backward=True, **kind)
    train_step(who, [batch(2)], OBJECTIVE, plan=plan, lr_scale=1.0)
    before = dict(zip(dict(who.model.named_parameters()), weights(who), strict=True))
    states, steps = (
        {k: v.clone() for k, v in who.optimizer.named_tensors().items()},
        who.optimizer.scalars(),
    )
    poison = who.model.model.layers[1].mlp.up_proj.weight.register_hook(lambda g: g * math.inf)
    result = train_step(who, [batch(2, 1)], OBJECTIVE, plan=plan, lr_scale=1.0)
    poison.remove()
    assert not result.taken
    assert math.isfinite(result.loss)
    moved = {name for name, p in who.model.named_parameters() if not torch.equal(p, before[name])}
    assert {"lm_head.weight", "model.norm.weight", "model.layers.1.mlp.down_proj.weight"} <= moved
    assert not any(name.startswith(("model.embed", "model.layers.0")) for name in moved)
    assert "model.layers.1.mlp.up_proj.weight" not in moved
    for name, value in who.optimizer.named_tensors().items():
        if name.rpartition(".")[0] not in moved:
            assert torch.equal(value, states[name]), name
    for name, count in who.optimizer.scalars().items():
        assert count == steps[name] + (name.rpartition(".")[0] in moved)
    assert all(bool(p.isfinite().all()) for p in who.model.parameters())
    assert not who.updating
    assert train_step(who, [batch(2, 2)], OBJECTIVE, plan=plan, lr_scale=1.0).taken


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_goes_no_step_backward(value):
    who, plan = model_and_optimizer(fused_backward=True, kind="adafactor")
    before = weights(who)
    result = train_step(who, [batch(2)], poisoned(value), plan=plan, lr_scale=1.0)
    assert not result.taken
    assert all(torch.equal(p, q) for p, q in zip(weights(who), before, strict=True))
    assert who.optimizer.named_tensors() == {}


def test_adamw_clips_each_gradient_alone():
    clipped, plan = model_and_optimizer(
        fused_backward=True, kind="adamw", train={"max_grad_norm": 1e-3}
    )
    by_hand, _ = model_and_optimizer(kind="adamw", offload=True)
    train_step(clipped, [batch(2)], OBJECTIVE, plan=plan, lr_scale=1.0)
    for parameter in by_hand.model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: None)
    parts = OBJECTIVE.loss(
        by_hand.model(
            batch(2).tokens,
            positions_BT=batch(2).positions,
            documents_BT=batch(2).documents,
            head=OBJECTIVE.head(batch(2)),
        ).head,
        batch(2),
    )
    (parts.total / batch(2).loss_mask.sum()).backward()
    for parameter in by_hand.model.parameters():
        torch.nn.utils.clip_grad_norm_([parameter], 1e-3)
    by_hand.optimizer.step(1.0)
    slots = by_hand.optimizer.named_tensors()
    for name, value in clipped.optimizer.named_tensors().items():
        torch.testing.assert_close(value, slots[name], atol=1e-8, rtol=1e-4)


def test_a_backward_that_was_cut_short_leaves_nothing_armed():
    who, plan = model_and_optimizer(fused_backward=True, kind="adafactor")
    bomb = who.model.model.layers[0].mlp.up_proj.weight.register_hook(lambda g: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train_step(who, [batch(2)], OBJECTIVE, plan=plan, lr_scale=1.0)
    # weights and states do not fit together any more: the loop goes back to a checkpoint
    assert who.updating
    bomb.remove()
    who.optimizer.zero_grad()
    before = weights(who)
    output = who.model(batch(2).tokens, head=OBJECTIVE.head(batch(2)))
    OBJECTIVE.loss(output.head, batch(2)).total.backward()
    assert all(torch.equal(p, q) for p, q in zip(weights(who), before, strict=True))
    assert all(p.grad is not None for p in who.model.parameters())


LEANEST = {
    "kind": "adafactor",
    "fused_backward": True,
    "stochastic_rounding": True,
    "learning_rate": 0.3,
}
RUNS = [
    (LEANEST, {"precision": "bfloat16-pure", "activation_checkpointing": "full"}),
    (
        {"kind": "adamw", "state_dtype": "int8", "fused_backward": True, "paged": True},
        {"precision": "bfloat16"},
    ),
    *(
        pytest.param(*each, marks=pytest.mark.soak)
        for each in (
            (
                {"kind": "adamw", "state_dtype": "bfloat16", "fused_backward": True},
                {"precision": "float16"},
            ),
            (
                {"kind": "adamw", "state_dtype": "int8", "stochastic_rounding": True},
                {"precision": "bfloat16-pure"},
            ),
        )
    ),
]


@pytest.mark.parametrize(("optimizer", "train"), RUNS)
def test_a_killed_run_resumes_bitwise(prepared, tmp_path, optimizer, train):
    train = {"steps": 6, "accumulation": 1, "tokens_per_step": 64, "seed": 3} | train
    plan = tiny_plan(
        prepared, config=CONFIG, train=train, optimizer={"learning_rate": 0.02} | optimizer
    )
    whole = Run(plan, tmp_path / "whole")
    first = Run(plan, tmp_path / "halves", stop_after=5)  # two steps that nobody will know of
    second = Run(plan, tmp_path / "halves", resume_from=first.checkpoint(3))
    assert list(second.losses()) == [4, 5, 6]
    assert first.losses() | second.losses() == whole.losses()
    assert_same_tensors(second.tensors(6), whole.tensors(6))
    assert whole.losses()[6] < whole.losses()[1] - 0.2
    assert not whole.warnings()
    assert all(health.no_gradient_share is None for health in whole.of(StepHealth)) == bool(
        optimizer.get("fused_backward")
    )


def test_a_run_says_that_a_step_was_cut_short_and_goes_on(prepared, tmp_path, monkeypatch):
    train = {"steps": 4, "accumulation": 1, "tokens_per_step": 64}
    plan = tiny_plan(
        prepared,
        config=CONFIG,
        train=train,
        optimizer={"kind": "adafactor", "fused_backward": True},
    )
    build = set_up.build_state

    def poisoned(plan, **rest):
        state = build(plan, **rest)
        weight, seen = state.model_and_optimizer.model.model.layers[1].mlp.up_proj.weight, []
        weight.register_hook(lambda g: seen.append(g) or (g * math.nan if len(seen) == 2 else g))
        return state

    monkeypatch.setattr(set_up, "build_state", poisoned)
    run = Run(plan, tmp_path / "run")
    (warned,) = run.warnings()
    assert "non-finite gradient at step 2" in warned.reason
    assert "interrupted in backward" in warned.reason
    assert [step for step, loss in run.losses().items() if loss is None] == [2]
    assert all(bool(tensor.isfinite().all()) for tensor in run.tensors(4).values())

"""The balance of experts over ranks. Oracle: one rank with all sequences of the step in one micro-batch."""

from dataclasses import replace

import pytest
import torch
from plans_for_tests import tiny_config, tiny_plan
from test_ranks_features import gradients_in, train_noting_gradients

from bloomery.facts.config import Experts
from bloomery.plan.types import RouterPlan
from ranks import fields, losses, on_ranks, ranks

STEPS = 2
EXPERTS = Experts(count=8, per_token=2, width=16, normalize=True)
CONFIG = tiny_config(
    vocab_size=300, num_layers=4, family="qwen3_moe", tie_embeddings=False, experts=EXPERTS
)
# So strong that the gradient is that of the balance.
ROUTER = RouterPlan(loss=20.0, z_loss=5.0)
MESHES = {
    "2 copies": {"replicate": 2},
    "4 copies": {"replicate": 4},
    "2 shards": {"shard": 2},
    "2 stages": {"pipeline": 2},
    "2 stages, interleaved": {"pipeline": 2, "schedule": "interleaved", "chunks": 2},
    "2 stages of 2": {"pipeline": 2, "replicate": 2},
    "2 share sequences": {"replicate": 2, "context": 2},
    "2 divide experts": {"replicate": 2, "expert": 2},
    "2 shards divide experts": {"shard": 2, "expert": 2},
}
OFTEN = {("2 copies", 1), ("2 copies", 2), ("2 stages", 1), ("2 divide experts", 1)}


# Of each layer by itself: stages have some of them.
UNPOOLED = ROUTER.model_copy(update={"pooled": False})


def plan_of(prepared, *, size: int, **train_changes):
    train_plan = {
        "router": ROUTER,
        "micro_batch_size": size,
        "accumulation": 4 // size,
        "tokens_per_step": 128,
        "steps": STEPS,
        "max_grad_norm": None,
    }
    config = replace(CONFIG, num_kv_heads=2)
    every = {"every_steps": STEPS}
    return tiny_plan(
        prepared, config=config, train=train_plan | train_changes, eval=every, checkpoint=every
    )


def noted(plan, folder):
    """The events of a run, and the gradients of its first step."""
    folder.mkdir(exist_ok=True)
    world = plan.train.ranks
    events = ranks(world).call(train_noting_gradients, plan.model_dump_json(), str(folder))[0]
    return events, gradients_in(folder)


@pytest.fixture(scope="module")
def alone(prepared, tmp_path_factory):
    return noted(plan_of(prepared, size=4), tmp_path_factory.mktemp("alone"))


# Micro-batches of 1 are counted by a pass before the first backward, where a rank has several.
CASES = [
    pytest.param(
        mesh, size, id=f"{name}, {size}", marks=[] if (name, size) in OFTEN else [pytest.mark.soak]
    )
    for name, mesh in MESHES.items()
    for size in (1, 2)
]


@pytest.mark.parametrize(("mesh", "size"), CASES)
def test_balance_is_that_of_one_rank(prepared, alone, tmp_path, mesh, size) -> None:
    plan = on_ranks(plan_of(prepared, size=size), **mesh)
    events, gradients = noted(plan, tmp_path / "several")
    expected_events, expected = alone
    assert losses(events) == pytest.approx(losses(expected_events), rel=0, abs=2e-5)
    first, *_ = fields(events, "StepDone")
    expected_first, *_ = fields(expected_events, "StepDone")
    names = [name for name in expected_first["metrics"] if name.startswith("router/")]
    assert len(names) == 7
    for name in names:
        value = expected_first["metrics"][name]
        assert first["metrics"][name] == pytest.approx(value, rel=1e-6), name
    assert gradients.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(
            gradients[name], gradient, rtol=0, atol=1e-6 * max(1.0, largest), msg=name
        )


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param({"pipeline": 2}, id="2 stages"),
        pytest.param({"replicate": 2}, id="2 copies", marks=pytest.mark.soak),
    ],
)
def test_balance_of_each_layer_is_that_of_one_rank(prepared, tmp_path, mesh) -> None:
    _, expected = noted(plan_of(prepared, size=4, router=UNPOOLED), tmp_path / "alone")
    _, gradients = noted(
        on_ranks(plan_of(prepared, size=1, router=UNPOOLED), **mesh), tmp_path / "several"
    )
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(
            gradients[name], gradient, rtol=0, atol=1e-6 * max(1.0, largest), msg=name
        )

"""Experts divided over ranks: losses, gradients, checkpoints and states of one rank."""

from typing import Any

import pytest
import torch
from runs_of_the_loop import assert_same_tensors, saved_base
from structured_runs import write_answers
from test_expert_adapter_runs import MIXTURE
from test_expert_adapter_runs import plan_of as adapter_plan_of
from test_expert_ranks import mixture, norms, plan_of
from test_rank_writers import HALF, STEPS, saved_by_one_rank, step_of, tensors, train_divided

from bloomery.recipe.objectives import Preference
from ranks import fields, losses, on_ranks, ranks, train

MESHES = {
    "2 ranks": {"replicate": 2, "expert": 2},
    "4 ranks": {"replicate": 4, "expert": 4},
    "2 copies of 2": {"replicate": 4, "expert": 2},
    "shards": {"shard": 2, "expert": 2},
    "2 copies of 2 shards": {"replicate": 2, "shard": 2, "expert": 2},
    "2 stages": {"pipeline": 2, "replicate": 2, "expert": 2},
}


QUICK_MESHES = ("2 ranks", "2 copies of 2 shards")


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(mesh, id=name, marks=[] if name in QUICK_MESHES else pytest.mark.soak)
        for name, mesh in MESHES.items()
    ],
)
def test_divided_experts_train_and_save_as_one_rank(prepared, tmp_path, mesh) -> None:
    plan = plan_of(prepared)
    alone = train(plan, tmp_path / "one")
    many = train(on_ranks(plan, **mesh), tmp_path / "many")
    assert losses(many) == pytest.approx(losses(alone), rel=0, abs=1e-6)
    assert norms(many) == pytest.approx(norms(alone), rel=1e-5)
    one, other = (tensors(step_of(tmp_path / name, STEPS)) for name in ("one", "many"))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(
            other[name], tensor, rtol=0, atol=1e-3 * float(tensor.abs().max()), msg=name
        )


def float64_gradients(plan_json: str) -> tuple[float, dict[str, list[Any]], float]:
    """On one rank of a mesh: the loss of the global batch, the gradients of all parts of all ranks, their norm."""
    import torch.distributed as dist

    from bloomery.model.decoder import Decoder
    from bloomery.model.io.parameters import full
    from bloomery.model.io.weights import init_weights
    from bloomery.parallel.experts import RowExchange, divide_experts
    from bloomery.parallel.gradients import all_reduce_gradients
    from bloomery.parallel.process_group import join
    from bloomery.plan.types import RunPlan
    from bloomery.train.step import global_norm

    plan = RunPlan.model_validate_json(plan_json)
    mesh = join(plan.train)
    with torch.device("meta"):
        decoder = Decoder(plan.model.config, attention="math").double()
    if mesh.expert_mesh is not None:
        divide_experts(decoder, mesh.expert_mesh, RowExchange(mesh))
    decoder.to_empty(device="cpu")
    decoder.tie()
    init_weights(decoder, 5)

    # Of four ranks and three sequences, the last one has no token.
    generator = torch.Generator().manual_seed(2)
    x_BTD = torch.randn(3, 20, 32, generator=generator, dtype=torch.float64)
    own_BTD = x_BTD.tensor_split(mesh.data_world)[mesh.data_rank]
    for block in decoder.model.layers:
        y_BTD, _ = block.mlp(own_BTD, None)
        own_BTD = own_BTD + y_BTD
    total = own_BTD.square().sum() / x_BTD.numel()
    total.backward()
    all_reduce_gradients(decoder.parameters(), mesh)
    gradients = {n: p.grad for n, p in decoder.named_parameters() if p.grad is not None}
    norm = float(global_norm({n: g.float() for n, g in gradients.items()}, mesh))
    loss = total.detach()
    if mesh.world > 1:
        dist.all_reduce(loss)
    return float(loss), {n: full(g).tolist() for n, g in gradients.items()}, norm


@pytest.mark.parametrize("config_of", [mixture, lambda: mixture(experts={"bias": True})])
@pytest.mark.parametrize(
    "mesh",
    [{"replicate": 2, "expert": 2}, {"replicate": 4, "expert": 2}, {"replicate": 4, "expert": 4}],
    ids=str,
)
def test_gradients_in_float64_are_those_of_one_rank(prepared, mesh, config_of) -> None:
    """Of the layers with experts; a rank without a token joins."""
    plan = plan_of(prepared, config=config_of())
    loss, gradients, norm = float64_gradients(plan.model_dump_json())
    several = on_ranks(plan, **mesh)
    results = ranks(several.train.ranks).call(float64_gradients, several.model_dump_json())
    for other_loss, other_gradients, other_norm in results:
        assert other_loss == pytest.approx(loss, rel=1e-12)
        assert other_norm == pytest.approx(norm, rel=1e-6)
        assert other_gradients.keys() == gradients.keys()
        for name, gradient in gradients.items():
            pair = torch.tensor([other_gradients[name], gradient], dtype=torch.float64)
            torch.testing.assert_close(*pair, rtol=0, atol=1e-12, msg=name)


AVERAGED = [{"replicate": 2, "expert": 2}, {"shard": 2, "expert": 2}, {"shard": 2}]


@pytest.mark.parametrize("mesh", AVERAGED, ids=str)
def test_averages_are_evaluated_saved_and_resumed_as_those_of_one_rank(
    prepared, tmp_path, mesh
) -> None:
    plan = plan_of(prepared, train={"ema_decay": 0.3})
    alone = train(plan, tmp_path / "one")
    several = on_ranks(plan, **mesh)
    many = train(several, tmp_path / "many")
    assert losses(many) == pytest.approx(losses(alone), rel=0, abs=1e-6)
    evaluated = [[event["loss"] for event in fields(run, "EvalDone")] for run in (alone, many)]
    assert evaluated[1] == pytest.approx(evaluated[0], rel=0, abs=1e-6)
    one, other = (tensors(step_of(tmp_path / name, STEPS)) for name in ("one", "many"))
    assert any(name.startswith("trained/") for name in one)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(
            other[name], tensor, rtol=0, atol=1e-3 * float(tensor.abs().max()), msg=name
        )

    # The rows of each rank are read again.
    checkpoint = step_of(tmp_path / "one", HALF)
    copy = saved_by_one_rank(several, checkpoint, tmp_path / "copy")
    assert_same_tensors(tensors(copy), tensors(checkpoint))


@pytest.mark.parametrize(
    "after",
    [{}, {"replicate": 4, "expert": 4}, {"shard": 2}, {"shard": 2, "expert": 2}],
    ids=str,
)
def test_a_run_goes_on_in_another_layout(prepared, tmp_path, after) -> None:
    """Its checkpoint is that of one rank: what another layout reads and saves again is the same, bit for bit."""
    plan = plan_of(prepared)
    whole = train(plan, tmp_path / "whole")
    two = on_ranks(plan, replicate=2, expert=2)
    train_divided(two, tmp_path / "two", stop_after=HALF)
    checkpoint = step_of(tmp_path / "two", HALF)
    other = on_ranks(plan, **after)
    rest = train(other, tmp_path / "rest", resume_from=checkpoint)
    expected = {step: loss for step, loss in losses(whole).items() if step > HALF}
    assert losses(rest) == pytest.approx(expected, rel=0, abs=1e-6)
    copy = saved_by_one_rank(other, checkpoint, tmp_path / "copy")
    assert_same_tensors(tensors(copy), tensors(checkpoint))


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_pipeline_of_divided_experts_resumes_bitwise(prepared, tmp_path, chunks) -> None:
    plan = plan_of(prepared, config=mixture(num_layers=4))
    schedule = "interleaved" if chunks > 1 else "1f1b"
    mesh = {"pipeline": 2, "replicate": 2, "expert": 2, "chunks": chunks, "schedule": schedule}
    several = on_ranks(plan, **mesh)
    whole = train(several, tmp_path / "whole")
    train(several, tmp_path / "rest", stop_after=HALF)
    rest = train(several, tmp_path / "rest", resume_from=step_of(tmp_path / "rest", HALF))
    assert losses(rest) == {step: loss for step, loss in losses(whole).items() if step > HALF}
    one, other = (tensors(step_of(tmp_path / name, STEPS)) for name in ("whole", "rest"))
    assert_same_tensors(one, other)
    assert losses(whole) == pytest.approx(losses(train(plan, tmp_path / "one")), rel=0, abs=1e-6)


OPTIMIZERS = {
    "int8": {"state_dtype": "int8", "fused": False},
    "muon": {"kind": "muon"},
    "adafactor": {"kind": "adafactor"},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_of_divided_experts_are_those_of_one_rank(prepared, tmp_path, name) -> None:
    plan = plan_of(prepared, optimizer=OPTIMIZERS[name])
    alone = train(plan, tmp_path / "one")
    two = train(on_ranks(plan, replicate=2, expert=2), tmp_path / "two")
    near = 5e-4 if name == "muon" else 1e-5  # Newton-Schulz runs in bfloat16
    assert losses(two) == pytest.approx(losses(alone), rel=0, abs=near)
    one, other = (tensors(step_of(tmp_path / run, STEPS)) for run in ("one", "two"))
    assert {key: value.shape for key, value in other.items()} == {
        key: value.shape for key, value in one.items()
    }


SETTINGS = {
    "recomputed": ({"activation_checkpointing": "full"}, 1e-6),
    "selective": ({"activation_checkpointing": "selective"}, 1e-6),
    "bfloat16": ({"precision": "bfloat16"}, 1e-3),
    "float16": ({"precision": "float16"}, 1e-3),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_divided_experts_are_recomputed_and_in_half_precision(prepared, tmp_path, name) -> None:
    changes, near = SETTINGS[name]
    plan = plan_of(prepared, train=changes)
    alone = train(plan, tmp_path / "one")
    many = train(on_ranks(plan, shard=2, expert=2), tmp_path / "many")
    assert losses(many) == pytest.approx(losses(alone), rel=0, abs=near)


def test_ranks_that_share_sequences_divide_experts(prepared, tmp_path) -> None:
    plan = plan_of(prepared, config=mixture(num_heads=4, num_kv_heads=2))
    alone = train(plan, tmp_path / "one")
    several = on_ranks(plan, replicate=4, context=2, expert=2)
    assert losses(train(several, tmp_path / "many")) == pytest.approx(
        losses(alone), rel=0, abs=1e-6
    )


@pytest.mark.parametrize("objective", ["sft", pytest.param("dpo", marks=pytest.mark.soak)])
def test_adapters_of_divided_experts_are_those_of_one_rank(prepared, tmp_path, objective) -> None:
    base = saved_base(MIXTURE, prepared, tmp_path)
    data = prepared
    changes: dict[str, Any] = {}
    if objective == "dpo":
        data = write_answers(tmp_path / "answers", prepared, "pairs")
        changes = {"objective": Preference(kind="dpo", beta=0.5)}
    plan = adapter_plan_of(data, base, **changes)
    alone = train(plan, tmp_path / "one")
    several = on_ranks(plan, replicate=2, expert=2)
    many = train(several, tmp_path / "many")
    assert losses(many) == pytest.approx(losses(alone), rel=0, abs=1e-6)
    one, other = (tensors(tmp_path / run / "checkpoints/step-00000004") for run in ("one", "many"))
    assert any(".experts.base_layer.lora_B" in name for name in one)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        near = 1e-3 * float(tensor.abs().max())
        torch.testing.assert_close(other[name], tensor, rtol=0, atol=near, msg=name)

"""Experts divided over ranks: losses, gradients, checkpoints and states of one rank."""

from typing import Any

import pytest
import torch
from test_expert_ranks import mixture, norms, plan_of
from test_rank_writers import STEPS, step_of, tensors

from ranks import losses, on_ranks, ranks, train

MESHES = {
    "2 ranks": {"replicate": 2, "expert": 2},
    "4 ranks": {"replicate": 4, "expert": 4},
    "2 copies of 2": {"replicate": 4, "expert": 2},
    "shards": {"shard": 2, "expert": 2},
    "2 copies of 2 shards": {"replicate": 2, "shard": 2, "expert": 2},
    "2 stages": {"pipeline": 2, "replicate": 2, "expert": 2},
}


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
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
    from bloomery.parallel.experts import divide_experts
    from bloomery.parallel.gradients import all_reduce_gradients
    from bloomery.parallel.process_group import join
    from bloomery.plan.types import RunPlan
    from bloomery.train.step import global_norm

    plan = RunPlan.model_validate_json(plan_json)
    mesh = join(plan.train)
    with torch.device("meta"):
        decoder = Decoder(plan.model.config, attention="math").double()
    if mesh.expert > 1:
        divide_experts(decoder, mesh)
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

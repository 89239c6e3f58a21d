"""The balance of experts in a step. Oracles: transformers' loss, one large batch, one rank, a hand computation."""

import math
from dataclasses import replace

import pytest
import torch
from plans_for_tests import tiny_config, tiny_plan
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from bloomery.data.batch import Batch
from bloomery.facts.config import Experts
from bloomery.infer.forward import forward
from bloomery.model.decoder import Decoder
from bloomery.model.experts import Router
from bloomery.model.forward_input import ALL_LOGITS
from bloomery.parallel.apply import apply
from bloomery.plan.types import RouterPlan
from bloomery.train import step as step_module
from bloomery.train.balance import balance_loss
from bloomery.train.objectives.build import pretraining
from bloomery.train.objectives.losses import LossParts
from bloomery.train.objectives.objective import Objective
from bloomery.train.state import build_state
from bloomery.train.step import ModelAndOptimizer, train_step

ROUTER = RouterPlan(loss=0.5, z_loss=0.25)
EXPERTS = Experts(count=8, per_token=2, width=16, normalize=True)


def mixture(**changes):
    return tiny_config(
        family="qwen3_moe", tie_embeddings=False, experts=replace(EXPERTS, **changes)
    )


# Without a loss of its own, a step has the gradient of the balance alone.
SILENT = Objective(
    lambda _batch: lambda last_BTD, _head, _softcap: last_BTD.float().sum() * 0,
    lambda output, batch: LossParts(output, batch.loss_mask.sum()),
)


def batch(rows: int, seed: int = 0, *, padding: int = 5) -> Batch:
    """Two documents a row, then padding: more in later rows."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 97, (rows, 33), generator=generator)
    places = torch.arange(32)
    documents = (places >= 12).long().expand(rows, -1).clone()
    for row in range(rows):
        documents[row, 32 - padding * row :] = -1
    positions = torch.where(documents == 1, places - 12, places)
    mask = (documents >= 0).float()
    return Batch(
        tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), mask, positions, documents
    )


def cut(whole: Batch, size: int) -> list[Batch]:
    """Micro-batches of so many rows."""
    return [
        whole.map_tensors(lambda t, start=start: t[start : start + size].contiguous())
        for start in range(0, len(whole.tokens), size)
    ]


def stepped(
    batches: list[Batch], router: RouterPlan = ROUTER, *, config=None, **train
) -> tuple[ModelAndOptimizer, dict[str, Tensor], dict[str, float]]:
    """The gradients of a step in float64, without clipping, and its metrics."""
    train = {"router": router, "max_grad_norm": None} | train
    plan = tiny_plan(config=config or mixture(), train=train)
    state = build_state(plan).model_and_optimizer
    model = state.model.double()
    apply(model, plan.train)
    gradients: dict[str, Tensor] = {}

    def keep(*_) -> None:
        gradients.update(
            {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        )

    for member in state.optimizer.members:
        member.register_step_pre_hook(keep)
    result = train_step(state, batches, SILENT, plan=plan.train, lr_scale=1.0)
    return state, gradients, result.metrics


@pytest.fixture(autouse=True)
def _float64(monkeypatch) -> None:
    """The norm of a step is float32, which a gradient in float64 does not become."""
    monkeypatch.setattr(step_module, "global_norm", lambda *_: torch.ones(()))


def router_logits(model: Decoder, whole: Batch) -> list[Tensor]:
    """[N, E] of each layer, with a gradient."""
    logits: list[Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _m, _i, choice: logits.append(choice.logits_NE))
        for module in model.modules()
        if isinstance(module, Router)
    ]
    forward(model, whole, ALL_LOGITS, precision="float32")
    for hook in hooks:
        hook.remove()
    return logits


def expected(
    whole: Batch, router: RouterPlan = ROUTER, config=None
) -> tuple[dict[str, Tensor], float]:
    """The gradients and the balance loss by transformers' function and the definition of the z-loss."""
    plan = tiny_plan(config=config or mixture())
    model = build_state(plan).model_and_optimizer.model.double()
    logits = router_logits(model, whole)
    is_real = (whole.documents >= 0).flatten()
    together = [tuple(logits)] if router.pooled else [(layer,) for layer in logits]
    mask = is_real.long()[None]
    losses = [load_balancing_loss_func(layers, 8, 2, attention_mask=mask) for layers in together]
    loss = torch.stack(losses).mean()
    squares = torch.cat([layer[is_real] for layer in logits]).logsumexp(-1).square()
    (router.loss * loss + router.z_loss * squares.mean()).backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return gradients, float(loss.detach())


def assert_same(
    ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = 1e-10
) -> None:
    assert ours.keys() >= theirs.keys()
    scale = max(float(gradient.abs().max()) for gradient in theirs.values())
    assert scale > 1e-4
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, atol=tolerance * scale, rtol=0, msg=name)


@pytest.mark.parametrize("size", [4, 2, 1])
@pytest.mark.parametrize(("padding", "pooled"), [(0, True), (5, True), (5, False)])
def test_value_and_gradients_are_those_of_transformers(size, padding, pooled) -> None:
    """Of each layer by itself where they are not pooled."""
    whole = batch(4, padding=padding)
    router = ROUTER.model_copy(update={"pooled": pooled})
    theirs, loss = expected(whole, router)
    _, ours, metrics = stepped(cut(whole, size), router)
    # transformers sums probabilities in float32.
    assert_same(ours, theirs, 1e-6)
    assert metrics["router/balance_loss"] == pytest.approx(loss, rel=1e-6)


def test_layers_that_complement_each_other_are_even_together_alone() -> None:
    """Each of two layers uses its own half of the experts: 2 at K = 2 is even, and twice as much is not."""
    halves = torch.tensor([[0.5] * 4 + [0.0] * 4, [0.0] * 4 + [0.5] * 4])
    assert balance_loss(halves, halves / 2, pooled=True) == pytest.approx(2.0)
    assert balance_loss(halves, halves / 2, pooled=False) == pytest.approx(4.0)


def test_micro_batches_add_up_to_one_batch() -> None:
    whole = batch(4)
    _, large, metrics = stepped([whole])
    for size in (2, 1):
        _, small, metrics_of_small = stepped(cut(whole, size))
        assert_same(small, large)
        assert metrics_of_small == pytest.approx(metrics, rel=1e-6)


@pytest.mark.parametrize("pooled", [True, False])
def test_counts_of_each_micro_batch_are_the_mean_of_their_losses(pooled) -> None:
    """As trainers do that divide each loss by the number of micro-batches."""
    router = RouterPlan(loss=0.5, counts="micro_batch", pooled=pooled)
    parts = cut(batch(4), 2)
    _, ours, metrics = stepped(parts, router)
    theirs: dict[str, Tensor] = {}
    for part in parts:
        for name, gradient in expected(part, router)[0].items():
            theirs[name] = theirs.get(name, 0) + gradient / len(parts)
    assert_same(ours, theirs, 1e-6)
    # The reported loss is that of the whole step.
    loss = expected(batch(4), router)[1]
    assert metrics["router/balance_loss"] == pytest.approx(loss, rel=1e-6)


def test_packed_documents_count_as_each_alone() -> None:
    whole = batch(2, padding=0)
    alone = []
    for row in range(2):
        for first, last in ((0, 12), (12, 32)):
            part = whole.map_tensors(
                lambda t, row=row, first=first, last=last: t[row : row + 1, first:last].contiguous()
            )
            alone.append(replace(part, documents=torch.zeros_like(part.documents)))
    _, packed, metrics = stepped([whole])
    _, separate, metrics_alone = stepped(alone)
    assert_same(separate, packed)
    assert metrics_alone == pytest.approx(metrics, rel=1e-6)


@pytest.mark.parametrize("attention", ["mask", "sdpa"])
def test_padding_is_not_counted(attention) -> None:
    """Also where attention needs no documents."""
    whole = batch(4)
    rows = replace(
        whole,
        documents=whole.documents.clamp(max=0),
        positions=torch.arange(32).expand(4, -1).contiguous(),
    )
    plan = tiny_plan(config=mixture(), train={"router": ROUTER}, model={"attention": attention})
    own = build_state(plan).model_and_optimizer
    result = train_step(own, [rows], SILENT, plan=plan.train, lr_scale=1.0, reports_experts=True)
    tokens = int((rows.documents >= 0).sum())
    for ratios in result.expert_load.values():
        assert sum(ratios) == pytest.approx(8, rel=1e-5)
        counts = [ratio * tokens * 2 / 8 for ratio in ratios]
        assert counts == pytest.approx([round(count) for count in counts], abs=1e-3)


def test_a_step_reports_what_a_hand_computes() -> None:
    whole = batch(4)
    state = build_state(tiny_plan(config=mixture())).model_and_optimizer
    with torch.no_grad():
        logits = router_logits(state.model, whole)
    is_real = (whole.documents >= 0).flatten()
    counts = [layer[is_real].topk(2).indices.flatten().bincount(minlength=8) for layer in logits]
    ratios = [layer / layer.float().mean() for layer in counts]
    plan = tiny_plan(config=mixture(), train={"router": ROUTER}).train
    result = train_step(state, [whole], SILENT, plan=plan, lr_scale=1.0, reports_experts=True)
    assert [result.expert_load[layer] for layer in (0, 1)] == [
        pytest.approx(layer.tolist(), rel=1e-5) for layer in ratios
    ]
    probabilities = torch.cat([layer[is_real].softmax(-1) for layer in logits])
    shares = torch.stack([layer / layer.sum() for layer in counts])
    by_hand = {
        "router/highest_load": max(float(layer.max()) for layer in ratios),
        "router/load_variation": sum(float(layer.std(correction=0)) for layer in ratios) / 2,
        "router/dead_experts": sum(int((layer == 0).sum()) for layer in counts),
        "router/load_entropy": float(torch.special.entr(shares).sum(1).mean()) / math.log(8),
        "router/entropy": float(torch.special.entr(probabilities).sum(1).mean()),
        "router/z_loss": float(
            torch.cat([layer[is_real] for layer in logits]).logsumexp(-1).square().mean()
        ),
    }
    for name, value in by_hand.items():
        assert result.metrics[name] == pytest.approx(value, rel=1e-5), name


@pytest.mark.parametrize("mode", ["full", "selective", "every-2"])
def test_a_recomputation_keeps_the_choice_of_the_forward(monkeypatch, mode) -> None:
    """As if its scores were rounded in another way: the second forward of a layer would choose other experts."""
    whole = batch(4)
    _, plain, metrics = stepped(cut(whole, 2))
    calls: dict[int, int] = {}
    choose = Router.chosen

    def other_in_backward(self: Router, scores_NE: Tensor) -> Tensor:
        in_backward = torch._C._current_graph_task_id() != -1
        calls[in_backward] = calls.get(in_backward, 0) + 1
        return choose(self, -scores_NE if in_backward else scores_NE)

    monkeypatch.setattr(Router, "chosen", other_in_backward)
    _, again, metrics_again = stepped(cut(whole, 2), activation_checkpointing=mode)
    assert calls[True] > 0
    assert_same(again, plain)
    assert metrics_again == metrics


def test_counts_are_exact_in_half_precision() -> None:
    """All 375 tokens to the same experts: bfloat16 has no such number."""
    whole = batch(15, padding=1)
    assert int((whole.documents >= 0).sum()) == 375
    plan = tiny_plan(config=mixture(), train={"router": ROUTER, "precision": "bfloat16"})
    state = build_state(plan).model_and_optimizer
    with torch.no_grad():
        for module in state.model.modules():
            if isinstance(module, Router):
                module.weight.zero_()
    result = train_step(state, [whole], SILENT, plan=plan.train, lr_scale=1.0, reports_experts=True)
    for ratios in result.expert_load.values():
        assert sorted(ratios)[-2:] == pytest.approx([4.0, 4.0], rel=1e-6)


def test_losses_of_routers_are_no_part_of_the_reported_loss() -> None:
    results = []
    for router in (RouterPlan(), ROUTER):
        plan = tiny_plan(config=mixture(), train={"router": router})
        own = build_state(plan).model_and_optimizer
        objective = pretraining(score_chunk=64)
        results.append(train_step(own, [batch(2)], objective, plan=plan.train, lr_scale=1.0))
    without, balanced = results
    assert balanced.loss == without.loss
    assert "router/z_loss" in balanced.metrics.keys() - without.metrics.keys()


def test_a_bias_moves_towards_an_even_load() -> None:
    config = mixture(choice_bias=True, scores="sigmoid")
    plan = tiny_plan(config=config, train={"router": RouterPlan(bias_update=0.01)})
    state = build_state(plan).model_and_optimizer
    routers = [module for module in state.model.modules() if isinstance(module, Router)]
    before = [router.e_score_correction_bias.clone() for router in routers]
    result = train_step(
        state, cut(batch(4), 2), SILENT, plan=plan.train, lr_scale=1.0, reports_experts=True
    )
    for layer, (router, old) in enumerate(zip(routers, before, strict=True)):
        ratios = torch.tensor(result.expert_load[layer])
        moves = 0.01 * torch.sign(1 - ratios)
        assert router.e_score_correction_bias.dtype == torch.float32
        assert router.e_score_correction_bias.grad is None
        torch.testing.assert_close(
            router.e_score_correction_bias.detach(), old + moves - moves.mean(), rtol=0, atol=1e-7
        )
        assert moves.abs().max() > 0


def test_a_bias_evens_the_load() -> None:
    """Of a router that stands still and prefers one expert, without any loss."""
    config = mixture(choice_bias=True, scores="sigmoid")
    train = {"router": RouterPlan(bias_update=0.003)}
    plan = tiny_plan(config=config, train=train)
    state = build_state(plan).model_and_optimizer
    with torch.no_grad():
        for block in state.model.model.layers:
            block.mlp.gate.weight[0] += 0.02
    variations = [
        train_step(state, [batch(4)], SILENT, plan=plan.train, lr_scale=0.0).metrics[
            "router/load_variation"
        ]
        for _ in range(30)
    ]
    assert variations[-1] < variations[0] / 2


def test_a_skipped_step_leaves_the_bias() -> None:
    config = mixture(choice_bias=True, scores="sigmoid")
    plan = tiny_plan(config=config, train={"router": RouterPlan(bias_update=0.01)})
    state = build_state(plan).model_and_optimizer
    poisoned = replace(SILENT, loss=lambda out, b: LossParts(out * torch.nan, b.loss_mask.sum()))
    assert not train_step(state, [batch(2)], poisoned, plan=plan.train, lr_scale=1.0).taken
    for router in (module for module in state.model.modules() if isinstance(module, Router)):
        assert not router.e_score_correction_bias.any()


def test_biases_are_part_of_a_checkpoint(tmp_path) -> None:
    """Bit for bit, in float32, though the model trains in bfloat16 alone."""
    config = mixture(choice_bias=True, scores="sigmoid")
    train = {"router": RouterPlan(bias_update=0.01), "precision": "bfloat16-pure"}
    plan = tiny_plan(config=config, train=train)
    own = build_state(plan)
    train_step(own.model_and_optimizer, [batch(4)], SILENT, plan=plan.train, lr_scale=1.0)
    saved = {name: tensor.clone() for name, tensor in own.parts()["model"].items()}
    names = [name for name in saved if name.endswith("e_score_correction_bias")]
    assert len(names) == 2
    for name in names:
        assert saved[name].dtype == torch.float32
        assert torch.equal(saved[name], own.model.get_parameter(name).detach())
        assert saved[name].any()


def test_a_model_in_evaluation_mode_is_balanced_too() -> None:
    """Steps on rollouts train in it; an evaluation itself counts nothing."""
    results = []
    for training in (True, False):
        plan = tiny_plan(config=mixture(), train={"router": ROUTER})
        own = build_state(plan).model_and_optimizer
        own.model.train(training)
        results.append(train_step(own, cut(batch(4), 2), SILENT, plan=plan.train, lr_scale=1.0))
        assert forward(own.model, batch(1), ALL_LOGITS, precision="float32").loads == {}
    assert results[0].metrics == results[1].metrics
    assert "router/balance_loss" in results[0].metrics

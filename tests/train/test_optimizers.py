import copy

import pytest
import torch
from torch import nn

from bloomery.core.errors import UserError
from bloomery.facts.optimizers import OPTIMIZERS
from bloomery.plan.types import OptimizerPlan
from bloomery.train.optim.build import build_optimizer
from bloomery.train.optim.muon import Muon, orthogonalize_stack, stacks_of

PLAN = OptimizerPlan(
    kind="adamw",
    learning_rate=0.01,
    muon_learning_rate=0.02,
    momentum=0.95,
    betas=(0.9, 0.95),
    eps=1e-8,
    weight_decay=0.1,
    fused=False,
    schedule="cosine",
    min_lr_ratio=0.0,
    warmup_steps=0,
    decay_steps=0,
)


class Toy(nn.Module):
    """The parameter names and shapes that matter: embedding, square, tall and wide block matrices, a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(11, 8)
        self.model = nn.Module()
        sizes = ((8, 16), (16, 8), (8, 8))
        self.model.layers = nn.ModuleList(
            nn.Sequential(*(nn.Linear(*size) for size in sizes)) for _ in range(2)
        )
        self.norm = nn.LayerNorm(8)


def toy() -> Toy:
    torch.manual_seed(0)
    return Toy()


def give_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def train(model, optimizer, steps) -> None:
    for step in steps:
        give_gradients(model, step)
        optimizer.step(1.0)


def weights(model) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def test_muon_equals_torch_up_to_bfloat16_rounding():
    ours, theirs = toy(), toy()
    pick = lambda m: [p for n, p in m.named_parameters() if p.ndim == 2 and ".layers." in n]  # noqa: E731
    mine = Muon(pick(ours), lr=0.02, momentum=0.95, weight_decay=0.1)
    reference = torch.optim.Muon(
        pick(theirs), lr=0.02, momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(5):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        mine.step()
        reference.step()
    for a, b in zip(pick(ours), pick(theirs), strict=True):
        torch.testing.assert_close(a, b, atol=2e-3, rtol=0)


def test_orthogonalised_singular_values_are_near_one():
    for shape in ((3, 8, 16), (2, 8, 8)):
        stack_NRC = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        singular = torch.linalg.svdvals(orthogonalize_stack(stack_NRC).float())
        assert singular.min() > 0.3
        assert singular.max() < 1.4


def test_stacks_hold_one_shape_and_keep_the_order():
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((2, 3), (3, 3), (3, 2))]
    first, second = stacks_of(parameters)
    assert [p is q for p, q in zip(first, [parameters[0], parameters[2]], strict=True)] == [
        True,
        True,
    ]
    assert second[0] is parameters[1]


def test_adamw_is_torchs_with_decay_on_matrices_and_embeddings_only():
    ours, theirs = toy(), toy()
    optimizer = build_optimizer(ours, PLAN)
    matrices = [p for p in theirs.parameters() if p.ndim >= 2]
    vectors = [p for p in theirs.parameters() if p.ndim < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=0.005, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(3):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        optimizer.step(0.5)
        reference.step()
    for a, b in zip(weights(ours), weights(theirs), strict=True):
        torch.testing.assert_close(a, b, atol=0, rtol=0)


@pytest.mark.parametrize("part", ["matrices", "norms"])
def test_muon_needs_no_matrices_and_nothing_else(part):
    """LoRA trains matrices alone; a stage of a pipeline may train norms alone, or nothing."""
    plan = PLAN.model_copy(update={"kind": "muon"})
    layer = nn.Linear(4, 4, bias=False) if part == "matrices" else nn.LayerNorm(4, bias=False)
    model = nn.ModuleDict({"model": nn.ModuleDict({"layers": nn.ModuleList([layer])})})
    before = layer.weight.detach().clone()
    layer.weight.grad = torch.ones_like(before)
    optimizer = build_optimizer(model, plan)
    optimizer.step(1.0)
    assert len(optimizer.members) == 1 and not torch.equal(layer.weight, before)

    nothing = build_optimizer(nn.Module(), plan)
    nothing.step(1.0)
    assert nothing.named_tensors() == {} and nothing.parameters == []


def test_muon_takes_block_matrices_and_adamw_the_rest():
    optimizer = build_optimizer(toy(), PLAN.model_copy(update={"kind": "muon"}))
    model_names = {name for name, _ in toy().named_parameters()}
    trained = toy()
    optimizer = build_optimizer(trained, PLAN.model_copy(update={"kind": "muon"}))
    train(trained, optimizer, range(1))
    slots: dict[str, set[str]] = {}
    for key in [*optimizer.named_tensors(), *optimizer.scalars()]:
        name, _, slot = key.rpartition(".")
        slots.setdefault(name, set()).add(slot)
    assert set(slots) == model_names
    for name, held in slots.items():
        muon = ".layers." in name and name.endswith("weight")
        assert held == ({"momentum_buffer"} if muon else {"step", "exp_avg", "exp_avg_sq"})


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("fused", [False, True])
def test_state_goes_through_names_and_back_bitwise(kind, fused):
    plan = PLAN.model_copy(update={"kind": kind, "fused": fused})
    undisturbed = toy()
    optimizer = build_optimizer(undisturbed, plan)
    train(undisturbed, optimizer, range(3))
    tensors = {name: value.clone() for name, value in optimizer.named_tensors().items()}
    scalars = optimizer.scalars()
    resumed = copy.deepcopy(undisturbed)
    again = build_optimizer(resumed, plan)
    again.load(tensors, scalars)
    assert again.scalars() == scalars
    train(undisturbed, optimizer, range(3, 6))
    train(resumed, again, range(3, 6))
    for a, b in zip(weights(undisturbed), weights(resumed), strict=True):
        assert torch.equal(a, b)


def test_loading_copies_and_replaces():
    model = toy()
    optimizer = build_optimizer(model, PLAN)
    train(model, optimizer, range(1))
    stored = {name: value.clone() for name, value in optimizer.named_tensors().items()}
    kept = {name: value.clone() for name, value in stored.items()}
    optimizer.load(stored, optimizer.scalars())
    train(model, optimizer, range(1, 2))
    assert all(torch.equal(stored[name], kept[name]) for name in kept)
    optimizer.load({}, {})
    assert optimizer.named_tensors() == {}


def test_state_of_another_model_is_refused():
    optimizer = build_optimizer(toy(), PLAN)
    with pytest.raises(UserError, match=r"lm_head\.weight"):
        optimizer.load({"lm_head.weight.exp_avg": torch.zeros(2)}, {})


@pytest.mark.parametrize(("fast", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_muon_computes_in_float32_where_bfloat16_is_emulated(monkeypatch, fast, dtype) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: fast)
    assert orthogonalize_stack(torch.randn(2, 8, 16)).dtype == dtype

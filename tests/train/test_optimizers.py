import copy

import pytest
import torch
from plans_for_tests import tiny_plan
from torch import nn

from bloomery.check.updates import exact_optimizer, products_of
from bloomery.core.errors import UserError
from bloomery.facts.optimizers import OPTIMIZERS
from bloomery.train.optim import muon
from bloomery.train.optim.build import build_optimizer
from bloomery.train.optim.muon import Muon, iteration_dtype, orthogonalize_stack, stacks_of

PLAN = tiny_plan(optimizer={"fused": False, "warmup_steps": 0}).optimizer


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
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_muon_equals_torch_up_to_bfloat16_rounding():
    def block_matrices(model: nn.Module) -> list[nn.Parameter]:
        return [
            parameter
            for name, parameter in model.named_parameters()
            if parameter.ndim == 2 and ".layers." in name
        ]

    our_model, their_model = toy(), toy()
    optimizer = Muon(block_matrices(our_model), lr=0.02, momentum=0.95, weight_decay=0.1)
    reference = torch.optim.Muon(
        block_matrices(their_model),
        lr=0.02,
        momentum=0.95,
        weight_decay=0.1,
        adjust_lr_fn="match_rms_adamw",
    )
    for step in range(5):
        give_gradients(our_model, step)
        give_gradients(their_model, step)
        optimizer.step()
        reference.step()
    for our_weight, their_weight in zip(
        block_matrices(our_model), block_matrices(their_model), strict=True
    ):
        torch.testing.assert_close(our_weight, their_weight, atol=2e-3, rtol=0)


def test_orthogonalised_singular_values_are_near_one():
    for shape in ((3, 8, 16), (2, 8, 8)):
        stack_NRC = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        singular = torch.linalg.svdvals(orthogonalize_stack(stack_NRC).float())
        assert singular.min() > 0.3
        assert singular.max() < 1.4


def test_stacks_hold_one_shape_and_keep_the_order():
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((2, 3), (3, 3), (3, 2))]
    wide_stack, square_stack = stacks_of(parameters)
    assert [p is q for p, q in zip(wide_stack, [parameters[0], parameters[2]], strict=True)] == [
        True,
        True,
    ]
    assert square_stack[0] is parameters[1]


def test_adamw_is_torchs_with_decay_on_matrices_and_embeddings_only():
    our_model, their_model = toy(), toy()
    optimizer = build_optimizer(our_model, PLAN)
    matrices = [parameter for parameter in their_model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in their_model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=0.005, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(3):
        give_gradients(our_model, step)
        give_gradients(their_model, step)
        optimizer.step(0.5)
        reference.step()
    for our_weight, their_weight in zip(weights(our_model), weights(their_model), strict=True):
        torch.testing.assert_close(our_weight, their_weight, atol=0, rtol=0)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_updates_are_those_of_the_exact_formula(kind):
    plan = PLAN.model_copy(update={"kind": kind})
    trained = toy()
    optimizer = build_optimizer(trained, plan)
    expected = {name: p.detach().double() for name, p in trained.named_parameters()}
    formulas = {name: exact_optimizer(plan, name, tuple(w.shape)) for name, w in expected.items()}
    for step in range(3):
        give_gradients(trained, step)
        for name, parameter in trained.named_parameters():
            gradient = parameter.grad.double()
            expected[name] = formulas[name].step(expected[name], gradient)
        optimizer.step(1.0)
    for name, parameter in trained.named_parameters():
        # Products of matrices may be in bfloat16.
        has_products = products_of(plan, name, tuple(parameter.shape), parameter.device) is not None
        tolerance = 5e-3 if has_products else 1e-5
        torch.testing.assert_close(
            parameter.detach().double(), expected[name], atol=tolerance, rtol=0
        )


@pytest.mark.parametrize("part", ["matrices", "norms"])
def test_muon_needs_no_matrices_and_nothing_else(part):
    """LoRA trains matrices alone; a stage of a pipeline may train norms alone, or nothing."""
    plan = PLAN.model_copy(update={"kind": "muon"})
    layer = nn.Linear(4, 4, bias=False) if part == "matrices" else nn.LayerNorm(4, bias=False)
    model = nn.ModuleDict({"model": nn.ModuleDict({"layers": nn.ModuleList([layer])})})
    weight_before = layer.weight.detach().clone()
    layer.weight.grad = torch.ones_like(weight_before)
    optimizer = build_optimizer(model, plan)
    optimizer.step(1.0)
    assert len(optimizer.members) == 1 and not torch.equal(layer.weight, weight_before)

    empty_optimizer = build_optimizer(nn.Module(), plan)
    empty_optimizer.step(1.0)
    assert empty_optimizer.named_tensors() == {} and empty_optimizer.parameters == []


def test_muon_takes_block_matrices_and_adamw_the_rest():
    optimizer = build_optimizer(toy(), PLAN.model_copy(update={"kind": "muon"}))
    model_names = {name for name, _ in toy().named_parameters()}
    model = toy()
    optimizer = build_optimizer(model, PLAN.model_copy(update={"kind": "muon"}))
    train(model, optimizer, range(1))
    slots: dict[str, set[str]] = {}
    for key in [*optimizer.named_tensors(), *optimizer.scalars()]:
        name, _, slot = key.rpartition(".")
        slots.setdefault(name, set()).add(slot)
    assert set(slots) == model_names
    for name, slot_names in slots.items():
        is_for_muon = ".layers." in name and name.endswith("weight")
        assert slot_names == (
            {"momentum_buffer"} if is_for_muon else {"step", "exp_avg", "exp_avg_sq"}
        )


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("fused", [False, True])
def test_state_goes_through_names_and_back_bitwise(kind, fused):
    plan = PLAN.model_copy(update={"kind": kind, "fused": fused})
    undisturbed_model = toy()
    optimizer = build_optimizer(undisturbed_model, plan)
    train(undisturbed_model, optimizer, range(3))
    tensors = {name: value.clone() for name, value in optimizer.named_tensors().items()}
    scalars = optimizer.scalars()
    resumed_model = copy.deepcopy(undisturbed_model)
    resumed_optimizer = build_optimizer(resumed_model, plan)
    resumed_optimizer.load(tensors, scalars)
    assert resumed_optimizer.scalars() == scalars
    train(undisturbed_model, optimizer, range(3, 6))
    train(resumed_model, resumed_optimizer, range(3, 6))
    for weight, resumed_weight in zip(
        weights(undisturbed_model), weights(resumed_model), strict=True
    ):
        assert torch.equal(weight, resumed_weight)


def test_loading_copies_and_replaces():
    model = toy()
    optimizer = build_optimizer(model, PLAN)
    train(model, optimizer, range(1))
    loaded_tensors = {name: value.clone() for name, value in optimizer.named_tensors().items()}
    copies = {name: value.clone() for name, value in loaded_tensors.items()}
    optimizer.load(loaded_tensors, optimizer.scalars())
    train(model, optimizer, range(1, 2))
    assert all(torch.equal(loaded_tensors[name], copies[name]) for name in copies)
    optimizer.load({}, {})
    assert optimizer.named_tensors() == {}


def test_state_of_another_model_is_refused():
    optimizer = build_optimizer(toy(), PLAN)
    with pytest.raises(UserError, match=r"lm_head\.weight"):
        optimizer.load({"lm_head.weight.exp_avg": torch.zeros(2)}, {})


@pytest.mark.parametrize(
    ("has_bfloat16", "dtype"), [(True, torch.bfloat16), (False, torch.float32)]
)
def test_muon_computes_in_float32_where_bfloat16_is_emulated(
    monkeypatch, has_bfloat16, dtype
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_bfloat16)
    assert iteration_dtype(torch.device("cpu")) == dtype
    matrices = [torch.randn(8, 16), torch.randn(16, 8)]
    parameters = [nn.Parameter(matrix) for matrix in matrices]
    seen = []
    monkeypatch.setattr(
        muon,
        "orthogonalize_stack",
        lambda stack_NRC: seen.append(stack_NRC.dtype) or stack_NRC,
    )
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    Muon(parameters, lr=0.1, momentum=0.9, weight_decay=0.0).step()
    assert seen == [dtype]

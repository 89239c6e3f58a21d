"""Optimizers on stacks of experts. Oracles: torch's, on each matrix by itself; the formulas; the same numbers dense."""

import pytest
import torch
from plans_for_tests import tiny_config
from test_optimizers import PLAN, give_gradients
from torch import Tensor, nn

from bloomery.check.updates import exact_optimizer, products_of
from bloomery.facts.config import Experts
from bloomery.facts.counting import is_layer_matrix
from bloomery.facts.optimizers import OPTIMIZERS
from bloomery.model.decoder import Decoder
from bloomery.model.io.parameters import unstacked
from bloomery.model.io.weights import fresh_decoder
from bloomery.plan.estimate.mode import TrainingMode
from bloomery.plan.estimate.states import TrainedModel
from bloomery.train.optim.build import build_optimizer

EXPERTS = Experts(count=3, per_token=2, width=8, bias=True)


def mixture() -> Decoder:
    return fresh_decoder(tiny_config(num_layers=1, experts=EXPERTS), seed=0)


def of_stack(name: str) -> bool:
    return ".experts." in name


def parts(model: nn.Module) -> dict[str, Tensor]:
    """The matrices and biases of all experts, each by itself: copies."""
    return {
        part_name: part.clone()
        for name, parameter in model.named_parameters()
        if of_stack(name)
        for part_name, part in unstacked(name, parameter.detach())
    }


def test_muon_updates_each_matrix_as_torch_does() -> None:
    model = mixture()
    optimizer = build_optimizer(model, PLAN.model_copy(update={"kind": "muon"}))
    matrices = {name: nn.Parameter(p) for name, p in parts(model).items() if p.ndim == 2}
    reference = torch.optim.Muon(
        list(matrices.values()),
        lr=0.02,
        momentum=0.95,
        weight_decay=0.1,
        adjust_lr_fn="match_rms_adamw",
    )
    assert len(matrices) == 3 * 3  # gate, up and down of three experts
    for step in range(3):
        give_gradients(model, step)
        for name, parameter in model.named_parameters():
            if of_stack(name):
                for part_name, part in unstacked(name, parameter.grad):
                    if part_name in matrices:
                        matrices[part_name].grad = part.clone()
        optimizer.step(1.0)
        reference.step()
    updated = parts(model)
    for name, matrix in matrices.items():
        torch.testing.assert_close(updated[name], matrix.detach(), atol=2e-3, rtol=0, msg=name)


def test_biases_of_experts_are_no_matrices() -> None:
    """Neither Muon nor weight decay takes what is a vector of each expert."""
    model = mixture()
    for name, parameter in model.named_parameters():
        if of_stack(name):
            assert is_layer_matrix(name, parameter.shape) == (parameter.ndim == 3), name
    optimizer = build_optimizer(model, PLAN)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
        parameter.data.fill_(1.0)
    optimizer.step(1.0)
    for name, parameter in model.named_parameters():
        is_bias = name.endswith("bias")
        if of_stack(name):
            assert torch.all((parameter == 1.0) == is_bias), name


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_updates_of_stacks_are_those_of_the_formula(kind) -> None:
    plan = PLAN.model_copy(update={"kind": kind})
    model = mixture()
    optimizer = build_optimizer(model, plan)
    expected = {n: p.detach().double() for n, p in model.named_parameters() if of_stack(n)}
    formulas = {name: exact_optimizer(plan, name, tuple(w.shape)) for name, w in expected.items()}
    for step in range(3):
        give_gradients(model, step)
        gradients = {name: p.grad.double() for name, p in model.named_parameters()}
        for name in expected:
            expected[name] = formulas[name].step(expected[name], gradients[name])
        optimizer.step(1.0)
    for name, parameter in model.named_parameters():
        if of_stack(name):
            shape = tuple(parameter.shape)
            is_product = products_of(plan, name, shape, parameter.device) is not None
            torch.testing.assert_close(
                parameter.detach().double(),
                expected[name],
                atol=5e-3 if is_product else 1e-5,
                rtol=0,
                msg=name,
            )


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_estimate_counts_the_states(kind) -> None:
    """Bytes of the states of one rank, and the memory of an update, of which stacks are many matrices."""
    model = mixture()
    plan = PLAN.model_copy(update={"kind": kind})
    optimizer = build_optimizer(model, plan)
    give_gradients(model, 0)
    optimizer.step(1.0)
    num_bytes = sum(state.nbytes for state in optimizer.named_tensors().values())
    trained = TrainedModel(model.config, TrainingMode())
    counted = sum(
        OPTIMIZERS[kind].state_values(name, tuple(p.shape)) for name, p in model.named_parameters()
    )
    assert 4 * counted == num_bytes
    assert all(len(shape) == 2 for shape in trained.layer_matrices)
    assert (8, 32) in trained.layer_matrices

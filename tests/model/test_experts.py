"""Mixtures of experts: against transformers, tensor by tensor, and against what their definition says."""

from pathlib import Path

import pytest
import torch
from expert_models import (
    choices_of,
    is_close,
    pair,
    saved_names,
    stored_gradients,
)
from tiny_models import tokens
from torch.testing import assert_close

from bloomery.facts.config import Experts, ModelConfig
from bloomery.model.experts import ExpertMLPs, Router, sorted_by_expert, summed
from bloomery.model.io.safetensors import to_hf_names
from bloomery.model.io.weights import model_state

TOKENS = tokens()
MIXTURES = (
    *("qwen3-moe", "mixtral", "olmoe"),
    *("qwen2-moe", "qwen3-next", "qwen3.5-moe", "lfm2-moe", "ernie4.5-moe"),
    "gemma4-26b-a4b",
)
CONFIG = ModelConfig(
    vocab_size=8,
    hidden_size=8,
    intermediate_size=12,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
)


def built(experts: Experts) -> tuple[Router, ExpertMLPs]:
    torch.manual_seed(0)
    modules = Router(CONFIG, experts), ExpertMLPs(CONFIG, experts, torch.nn.functional.silu)
    for module in modules:
        for parameter in module.double().parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    return modules


@pytest.mark.parametrize("case", MIXTURES)
def test_gradients_of_every_parameter_match_transformers(case: str, tmp_path: Path) -> None:
    their_model, our_model = pair(case, tmp_path)
    their_model(TOKENS).logits.square().mean().backward()
    our_model(TOKENS).head.square().mean().backward()
    gradients = {name: p.grad for name, p in their_model.named_parameters() if p.grad is not None}
    theirs = saved_names(their_model, gradients)
    ours = stored_gradients(our_model)
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        assert_close(gradient, theirs[name], atol=1e-5, rtol=1e-3, msg=name)


@pytest.mark.parametrize("case", MIXTURES)
@torch.no_grad()
def test_the_same_experts_are_chosen_with_the_same_weights(case: str, tmp_path: Path) -> None:
    # In float64 the delta nets before a router leave it the same digits; parts of transformers' stay float32.
    their_model, our_model = (model.double() for model in pair(case, tmp_path))
    theirs = []
    for module in their_model.modules():
        if type(module).__name__.endswith("Router"):
            module.register_forward_hook(lambda *a: theirs.append(a[2]))
    expected = their_model(TOKENS).logits
    ours = choices_of(our_model, TOKENS)
    assert len(ours) == len(theirs) > 1
    for choice, (_, weights, experts) in zip(ours, theirs, strict=True):
        assert torch.equal(choice.experts_NK, experts)
        assert_close(choice.weights_NK, weights.double(), atol=1e-5, rtol=0)
    assert is_close(our_model(TOKENS).head, expected, 2e-5)


def test_all_experts_chosen_are_the_weighted_sum_of_dense_mlps() -> None:
    router, experts = built(Experts(count=4, per_token=4, width=12))
    x_ND = torch.randn(7, 8, dtype=torch.float64)
    choice = router(x_ND)
    expected = torch.zeros_like(x_ND)
    for expert in range(4):
        gate, up = (x_ND @ experts.gate_up_proj[expert].t()).chunk(2, dim=-1)
        inner = torch.nn.functional.silu(gate) * up
        expected += choice.scores_NE[:, expert, None] * (inner @ experts.down_proj[expert].t())
    assert_close(experts(x_ND, choice), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("per_token", [1, 3])
def test_gradients_are_those_of_finite_differences(per_token: int, bias: bool) -> None:
    router, experts = built(Experts(count=5, per_token=per_token, width=4, bias=bias))
    x_ND = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    parameters = [*router.parameters(), *experts.parameters()]

    def output(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return experts(x, router(x))

    assert torch.autograd.gradcheck(output, (x_ND, *parameters), fast_mode=True)


def test_an_expert_that_nobody_chose_has_a_gradient_of_zero() -> None:
    router, experts = built(Experts(count=6, per_token=1, width=4))
    x_ND = torch.randn(2, 8, dtype=torch.float64)
    choice = router(x_ND)
    experts(x_ND, choice).sum().backward()
    is_met = torch.zeros(6, dtype=torch.bool).index_fill(0, choice.experts_NK.flatten(), True)
    for stack in (experts.gate_up_proj, experts.down_proj):
        assert torch.equal(stack.grad.flatten(1).abs().sum(1) > 0, is_met)


@pytest.mark.parametrize("per_token", [1, 3])
def test_rows_are_added_in_the_order_of_the_choice(per_token: int) -> None:
    """In float32 on a CPU PyTorch has an operator for it, which must add as the copied rows are added."""
    torch.manual_seed(0)
    pairs = sorted_by_expert(torch.rand(50, 7).topk(per_token).indices, 7)
    x_SD = torch.randn(50 * per_token, 33)
    rows_NKD = x_SD[pairs.place_S].view(50, per_token, 33)
    expected = rows_NKD[:, 0]
    for choice in range(1, per_token):
        expected = expected + rows_NKD[:, choice]
    assert torch.equal(summed(x_SD, pairs), expected)
    assert_close(summed(x_SD.double(), pairs).float(), expected)
    assert_close(summed(x_SD.bfloat16(), pairs).float(), expected, atol=0.1, rtol=0.02)
    nothing = sorted_by_expert(torch.empty(0, per_token, dtype=torch.int64), 7)
    assert summed(x_SD[:0], nothing).shape == (0, 33)


def test_what_a_token_gets_does_not_depend_on_the_others() -> None:
    router, experts = built(Experts(count=4, per_token=2, width=12))
    x_ND = torch.randn(9, 8, dtype=torch.float64)
    together = experts(x_ND, router(x_ND))
    for number in range(9):
        row = x_ND[number : number + 1]
        assert_close(experts(row, router(row)), together[number : number + 1], atol=1e-14, rtol=0)


def test_backward_keeps_no_sorted_copy_of_the_tokens() -> None:
    """Only the inner rows of gate and up, and the weighted ones, are as long as the pairs."""
    router, experts = built(Experts(count=4, per_token=3, width=4))
    x_ND = torch.randn(32, 8, dtype=torch.float64)
    choice = router(x_ND)
    kept: dict[int, torch.Tensor] = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.setdefault(tensor.untyped_storage().data_ptr(), tensor), lambda t: t
    ):
        experts(x_ND, choice)
    long = [tensor for tensor in kept.values() if len(tensor) == 96 and tensor.dim() == 2]
    assert sorted(tensor.shape[1] for tensor in long) == [4, 8]


@pytest.mark.parametrize("case", MIXTURES)
def test_our_parameters_are_all_of_theirs(case: str, tmp_path: Path) -> None:
    their_model, our_model = pair(case, tmp_path)
    theirs = saved_names(their_model, dict(their_model.named_parameters()))
    ours = to_hf_names(model_state(our_model), our_model.config)
    assert theirs.keys() <= ours.keys()
    for name, parameter in theirs.items():
        assert torch.equal(ours[name], parameter), name

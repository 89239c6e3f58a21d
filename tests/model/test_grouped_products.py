"""Products of all experts at once, as on NVIDIA GPUs, on a CPU. Oracle: the loop over experts. Not run on hardware."""

import pytest
import torch
from torch import Tensor

from bloomery.core.device import multiplies_groups
from bloomery.model import experts
from bloomery.model.experts import (
    grouped_linear,
    sorted_by_expert,
    spans,
    steady_rows,
    takes_groups,
)

WIDE, NARROW, COUNT = 24, 16, 4


def results(dtype: torch.dtype, *, is_sorted: bool, bias: bool) -> list[Tensor]:
    """Of a product with three experts that are chosen and one that is not: rows, and the gradient of every input."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_()

    chosen = torch.tensor([[0, 2], [3, 0], [2, 3], [0, 3], [2, 0]])
    pairs = sorted_by_expert(chosen, COUNT)
    x = drawn(chosen.numel() if is_sorted else len(chosen), WIDE)
    inputs = [x, drawn(COUNT, NARROW, WIDE), *([drawn(COUNT, NARROW)] if bias else [])]
    stack_bias = inputs[2] if bias else None
    rows = grouped_linear(x, inputs[1], pairs, stack_bias, is_sorted=is_sorted)
    gradients = torch.autograd.grad(
        rows, inputs, torch.randn(rows.shape, generator=generator).to(dtype)
    )
    return [rows.detach(), *gradients]


@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", experts.GROUPED_DTYPES, ids=str)
def test_all_at_once_is_one_after_the_other(
    dtype: torch.dtype, bias: bool, is_sorted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = results(dtype, is_sorted=is_sorted, bias=bias)
    products = []
    plain = experts.group_product

    def noted(rows: Tensor, matrices: Tensor, ends_E: Tensor) -> Tensor:
        products.append(rows.shape)
        # What a kernel may leave of a group without rows.
        product = plain(rows, matrices, ends_E)
        return product.index_fill(0, torch.tensor([1]), torch.nan) if product.ndim == 3 else product

    monkeypatch.setattr(experts, "multiplies_groups", lambda _: True)
    monkeypatch.setattr(experts, "group_product", noted)
    at_once = results(dtype, is_sorted=is_sorted, bias=bias)
    assert (
        len(products) == 3
    )  # forward and both gradients; that of biases is a product with ones, one by one
    # A bias is added after the product is rounded.
    near = {torch.float32: 1e-6, torch.float16: 1e-2, torch.bfloat16: 1e-1}[dtype] if bias else 0.0
    torch.testing.assert_close(at_once[0], loop[0], rtol=0, atol=near)
    for ours, theirs in zip(at_once[1:], loop[1:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_widths_and_dtypes_that_no_kernel_takes_go_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not multiplies_groups("cpu")
    rows, stack = torch.ones(3, 8), torch.ones(2, 8, 8)
    assert not takes_groups(rows, stack)
    monkeypatch.setattr(experts, "multiplies_groups", lambda _: True)
    assert takes_groups(rows, stack)
    assert not takes_groups(rows.bfloat16(), stack)  # a copy of the whole stack would exist
    assert takes_groups(rows.bfloat16(), stack.bfloat16())
    assert not takes_groups(rows[:, :4].bfloat16(), stack[:, :, :4].bfloat16())  # 8 bytes
    assert not takes_groups(rows, stack[:, :2])
    assert not takes_groups(rows.double(), stack.double())


@pytest.mark.parametrize("is_sorted", [True, False])
def test_rows_for_nothing_change_no_number(is_sorted: bool) -> None:
    # Experts with fewer rows than a step, some above one, none, and a last one whose steady rows end behind the last.
    counts = [50, 7, 0, 71, 37]
    chosen = torch.arange(5).repeat_interleave(torch.tensor(counts))[:, None]
    chosen = chosen[torch.randperm(len(chosen), generator=torch.Generator().manual_seed(0))]
    pairs = sorted_by_expert(chosen, len(counts))
    generator = torch.Generator().manual_seed(1)
    # Small whole numbers: every sum is exact, in any order.
    x, stack, grad = (
        torch.randint(-2, 3, shape, generator=generator).bfloat16()
        for shape in ((len(chosen), WIDE), (len(counts), NARROW, WIDE), (len(chosen), NARROW))
    )
    x.requires_grad_()
    stack.requires_grad_()
    rows = grouped_linear(x, stack, pairs, is_sorted=is_sorted)
    ours = torch.autograd.grad(rows, [x, stack], grad)

    sorted_x = x if is_sorted else x[pairs.tokens_S]
    theirs = torch.cat(
        [sorted_x[start:end] @ stack[expert].t() for expert, start, end in spans(pairs.ends_E)]
    )
    assert torch.equal(rows, theirs)
    for gradient, reference in zip(
        ours, torch.autograd.grad(theirs, [x, stack], grad), strict=True
    ):
        assert torch.equal(gradient, reference)


def test_kernels_of_all_numbers_of_rows_are_fewer_than_onednn_keeps() -> None:
    half, single = torch.empty(0, dtype=torch.bfloat16), torch.empty(0)
    steady = {count: steady_rows(half, count) for count in range(1, 2**14)}
    # Forward, the gradient of rows and of matrices, of two stacks.
    assert 6 * len(set(steady.values())) <= 1024
    assert all(0 <= rows - count < max(32, count / 8 + 1) for count, rows in steady.items())
    assert steady_rows(single, 33) == 33

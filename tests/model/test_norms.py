"""The lean RMS norm against torch's, and what it keeps for backward."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.testing import assert_close

from bloomery.model.norms import LayerNorm, RMSNorm, rms_norm
from bloomery.model.rope import Rotary, rotate


def test_gradients_pass_gradcheck() -> None:
    x = torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
    gain = torch.randn(8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x, gain: rms_norm(x, gain, 1e-5, torch.float64), (x, gain)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_those_of_torch(dtype: torch.dtype) -> None:
    x = torch.randn(4, 64).to(dtype)
    gain = torch.randn(64).to(dtype)
    expected = F.rms_norm(x.float(), (64,), gain.float(), 1e-6).to(dtype)
    assert_close(
        rms_norm(x, gain, 1e-6, dtype),
        expected,
        atol=0 if dtype == torch.bfloat16 else 1e-6,
        rtol=1e-6,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_without_gradients_are_the_same_to_the_bit(dtype: torch.dtype) -> None:
    x = torch.randn(4, 64, requires_grad=True).to(dtype)
    gain = torch.randn(64).to(dtype)
    angles = torch.rand(1, 4, 1, 8)
    rotary = Rotary(angles.cos(), angles.sin())
    with torch.no_grad():
        normed = rms_norm(x, gain, 1e-6, dtype)
        rotated = rotate(x.view(1, 4, 4, 16), rotary, dtype)
    assert torch.equal(normed, rms_norm(x, gain, 1e-6, dtype))
    assert torch.equal(rotated, rotate(x.view(1, 4, 4, 16), rotary, dtype))


def test_a_row_of_zeros_stays_finite() -> None:
    x = torch.zeros(2, 8, requires_grad=True)
    rms_norm(x, torch.ones(8), 1e-6, torch.float32).sum().backward()
    assert bool(torch.isfinite(x.grad).all())


def test_backward_keeps_only_the_input_the_gain_and_a_number_per_row() -> None:
    x = torch.randn(32, 64, requires_grad=True)
    gain = torch.ones(64, requires_grad=True)
    saved_sizes: list[int] = []
    with saved_tensors_hooks(lambda t: saved_sizes.append(t.numel()) or t, lambda t: t):
        rms_norm(x, gain, 1e-6, torch.float32)
    assert sum(saved_sizes) == 32 * 64 + 64 + 32


@pytest.mark.parametrize(
    "norm",
    [RMSNorm(16, 1e-6, unit_offset=False), LayerNorm(16, 1e-6, bias=True, unit_offset=False)],
)
def test_autocast_returns_the_dtype_of_the_next_matrix(norm: torch.nn.Module) -> None:
    torch.nn.init.ones_(norm.weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert norm(torch.randn(2, 16)).dtype == torch.bfloat16
    assert norm(torch.randn(2, 16)).dtype == torch.float32

"""Compiled RMS norms and gates of MLPs and experts: float64's values and gradients, on any number of threads."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tiny_models import saved_reference
from torch import Tensor
from torch.testing import assert_close

from bloomery.model import compiled_pointwise
from bloomery.model.compiled_pointwise import rms_norm, silu_times, weighted_gate
from bloomery.model.io.weights import load_decoder
from bloomery.model.native import find_compiler

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
EPS = 1e-5
FLOAT32 = {"atol": 3e-6, "rtol": 3e-6}
BFLOAT16 = {"atol": 1e-2, "rtol": 8e-3}  # of one rounding


def results(function: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out, *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stream_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 67, 40), (1, 3, 5, 64), (1, 1, 7)])
def test_rms_norm_is_that_of_float64(
    shape: tuple[int, ...], stream_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x = (3 * torch.randn(shape)).to(stream_dtype)
    gain = torch.randn(shape[-1])
    grad = torch.randn(shape).to(dtype)
    ours = results(lambda x, gain: rms_norm(x, gain, EPS, dtype), [x, gain], grad)
    exact = results(
        lambda x, gain: F.rms_norm(x, shape[-1:], gain, EPS), [x.double(), gain.double()], grad
    )
    assert [tensor.dtype for tensor in ours] == [dtype, stream_dtype, torch.float32]
    rows = x[..., 0].numel()
    for tensor, oracle in zip(ours, exact, strict=True):
        is_gain = tensor.shape == gain.shape
        limits = FLOAT32 if tensor.dtype == torch.float32 else BFLOAT16
        scale = rows if is_gain else 1
        assert_close(tensor.double(), oracle, atol=limits["atol"] * scale, rtol=limits["rtol"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clamped", [False, True])
@pytest.mark.parametrize("shape", [(67, 40), (1, 7), (0, 8)])
def test_a_weighted_gate_is_that_of_float64(
    shape: tuple[int, int], clamped: bool, dtype: torch.dtype
) -> None:
    rows, width = shape
    torch.manual_seed(3)
    x = (3 * torch.randn(rows, 2 * width)).to(dtype)
    weights = torch.rand(rows)
    grad = torch.randn(shape).to(dtype)
    numbers = dict(limit=2.0, slope=1.702, offset=1.0) if clamped else {}

    def exact_form(x: Tensor, weights: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        if clamped:  # openai/gpt-oss, gpt_oss/torch/model.py, `swiglu`
            gate = gate.clamp(max=2.0)
            up = up.clamp(-2.0, 2.0)
            return gate * torch.sigmoid(1.702 * gate) * (up + 1) * weights[:, None]
        return F.silu(gate) * up * weights[:, None]

    ours = results(lambda x, weights: weighted_gate(x, weights, **numbers), [x, weights], grad)
    exact = results(exact_form, [x.double(), weights.double()], grad)
    assert [tensor.dtype for tensor in ours] == [dtype, dtype, torch.float32]
    for tensor, oracle in zip(ours, exact, strict=True):
        limits = FLOAT32 if tensor.dtype == torch.float32 else BFLOAT16
        scale = width if tensor.ndim == 1 else 4
        assert_close(tensor.double(), oracle, atol=limits["atol"] * scale, rtol=2 * limits["rtol"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 67, 40), (1, 1, 7)])
def test_silu_times_is_that_of_float64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    gate, up, grad = (x.to(dtype) for x in (20 * torch.randn(shape), *torch.randn(2, *shape)))
    ours = results(silu_times, [gate, up], grad)
    exact = results(lambda gate, up: F.silu(gate) * up, [gate.double(), up.double()], grad)
    limits = FLOAT32 if dtype == torch.float32 else BFLOAT16
    for tensor, oracle in zip(ours, exact, strict=True):
        assert tensor.dtype == dtype
        assert_close(tensor.double(), oracle, atol=limits["atol"] * 10, rtol=limits["rtol"])


def test_a_frozen_gain_has_no_gradient() -> None:
    x = torch.randn(3, 24, requires_grad=True)
    gain = torch.randn(24, requires_grad=True)
    (expected,) = torch.autograd.grad(rms_norm(x, gain, EPS, x.dtype).sum(), x)
    rms_norm(x, gain.detach(), EPS, x.dtype).sum().backward()
    assert gain.grad is None and x.grad is not None
    assert torch.equal(x.grad, expected)


def test_bits_are_those_of_any_number_of_threads() -> None:
    torch.manual_seed(2)
    x, gate, up = torch.randn(3, 700, 40)
    before = torch.get_num_threads()
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(
            results(lambda x, gain: rms_norm(x, gain, EPS, x.dtype), [x, torch.ones(40)], up)
            + results(silu_times, [gate, up], x)
            + results(weighted_gate, [gate, x[:, 0]], up[:, :20])
        )
    torch.set_num_threads(before)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@pytest.mark.parametrize("family", ["llama2", "qwen3", "qwen3-moe", "gpt-oss"])
def test_a_decoder_computes_with_them(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_reference(family, tmp_path)
    calls = {"_rms_norm": 0, "_silu_times": 0, "_weighted_gate": 0}
    for name in calls:
        operator = getattr(compiled_pointwise, name)

        def counted(*inputs: object, name: str = name, operator: object = operator) -> object:
            calls[name] += 1
            return operator(*inputs)  # type: ignore[operator]

        monkeypatch.setattr(compiled_pointwise, name, counted)
    tokens = torch.randint(0, 64, (2, 33), generator=torch.Generator().manual_seed(0))
    by_backend = {}
    for backend in ("math", "compiled"):
        model = load_decoder(tmp_path, attention=backend)
        logits = model(tokens).head
        logits.square().mean().backward()
        gradients = {name: weight.grad for name, weight in model.named_parameters()}
        by_backend[backend] = (logits, gradients)
    blocks = list(model.model.layers)
    mixtures = sum(block.kind.experts is not None for block in blocks)
    norms_of_heads = 2 if family.startswith("qwen3") else 0
    assert calls == {
        "_rms_norm": len(blocks) * (2 + norms_of_heads) + 1,
        "_silu_times": len(blocks) - mixtures,
        "_weighted_gate": mixtures,
    }
    assert_close(by_backend["compiled"][0], by_backend["math"][0], atol=1e-5, rtol=1e-5)
    for name, gradient in by_backend["compiled"][1].items():
        assert_close(gradient, by_backend["math"][1][name], atol=1e-5, rtol=1e-4)

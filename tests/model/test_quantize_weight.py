import math
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bloomery.core.errors import UserError
from bloomery.facts.limits import storage_bytes
from bloomery.model.io import quantized as quantize_operator
from bloomery.model.io.quantized import QuantizedWeight
from bloomery.parallel.apply import selective_contexts
from bloomery.recipe.schema import Quantize

KINDS = {
    "nf4": Quantize(kind="nf4"),
    "nf4 without double": Quantize(kind="nf4", double_quant=False),
    "int8": Quantize(kind="int8"),
}
# whole blocks, a short one, an odd number, two pieces
SHAPES = [(32, 64), (24, 20), (7, 9), (300, 257)]


def weight_of(outputs: int, inputs: int) -> Tensor:
    return 0.02 * torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs))


def quantize(weight: Tensor, kind: str = "nf4") -> QuantizedWeight:
    quantized_weight = QuantizedWeight(weight.shape, KINDS[kind])
    quantized_weight.fill([weight], name="w")
    return quantized_weight


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_buffers_hold_the_bytes_that_a_plan_counts(kind, shape):
    quantized_weight = quantize(weight_of(*shape), kind)
    buffer_bytes = sum(buffer.numel() * buffer.itemsize for buffer in quantized_weight.buffers())
    assert buffer_bytes == storage_bytes(shape, KINDS[kind].kind, KINDS[kind].double_quant)
    assert list(quantized_weight.parameters()) == [] and quantized_weight.state_dict() == {}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_product_and_gradient_are_those_of_the_weight_read_back(kind, shape):
    quantized_weight = quantize(weight_of(*shape), kind)
    x = torch.randn(2, 5, shape[1], requires_grad=True)
    reference_x = x.detach().clone().requires_grad_()
    bias = torch.randn(shape[0])
    upstream = torch.randn(2, 5, shape[0])
    product = quantized_weight(x, bias)
    expected = F.linear(reference_x, quantized_weight.dequantized(torch.float32), bias)
    torch.testing.assert_close(product, expected, atol=1e-6, rtol=1e-6)
    product.backward(upstream)
    expected.backward(upstream)
    torch.testing.assert_close(x.grad, reference_x.grad, atol=1e-6, rtol=1e-6)


def test_the_operator_passes_torchs_own_check():
    quantized_weight = quantize(weight_of(24, 20))
    x = torch.randn(3, 20, requires_grad=True)
    torch.library.opcheck(
        torch.ops.bloomery.quantized_matmul.default, (x, *quantized_weight.stored)
    )


def test_pieces_of_rows_quantise_to_the_same_bits():
    weight = weight_of(96, 20)
    whole_weight = quantize(weight)
    weight_of_pieces = QuantizedWeight(weight.shape, KINDS["nf4"])
    assert weight_of_pieces.rows_at_once == 16  # 320 weights: five blocks
    weight_of_pieces.fill(weight.split(2 * weight_of_pieces.rows_at_once), name="w")
    assert all(
        torch.equal(buffer, whole_buffer)
        for buffer, whole_buffer in zip(
            weight_of_pieces.buffers(), whole_weight.buffers(), strict=True
        )
    )


def test_half_precision_weights_quantise_as_their_float32_values():
    weight = weight_of(32, 64).bfloat16()
    assert torch.equal(quantize(weight).codes, quantize(weight.float()).codes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_moving_to_another_dtype_changes_no_bit(dtype):
    quantized_weight = quantize(weight_of(32, 64), "nf4 without double")
    buffers_before = [buffer.clone() for buffer in quantized_weight.buffers()]
    quantized_weight.to(dtype)
    assert all(
        torch.equal(buffer, buffer_before)
        for buffer, buffer_before in zip(quantized_weight.buffers(), buffers_before, strict=True)
    )


def test_autocast_decides_the_dtype_of_the_product():
    quantized_weight = quantize(weight_of(32, 64))
    x = torch.randn(4, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        product = quantized_weight(x)
        expected = F.linear(x, quantized_weight.dequantized(torch.bfloat16))
    assert product.dtype == torch.bfloat16 and torch.equal(product, expected)


class _Squared(nn.Module):
    def __init__(self, quantized_weight: QuantizedWeight) -> None:
        super().__init__()
        self.quantized_weight = quantized_weight

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.quantized_weight(x)).square()


@pytest.mark.parametrize(
    "contexts", [{}, {"context_fn": selective_contexts}], ids=["full", "selective"]
)
def test_activation_checkpointing_gives_the_same_gradient(contexts):
    module = _Squared(quantize(weight_of(32, 64)))
    x = torch.randn(3, 64, requires_grad=True)
    (expected,) = torch.autograd.grad(module(x).sum(), x)
    output = checkpoint(module, x, use_reentrant=False, **contexts)
    (gradient,) = torch.autograd.grad(output.sum(), x)
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_compiled_module_gives_the_same_output_and_gradient(autocast):
    module = _Squared(quantize(weight_of(32, 64)))
    # traced and differentiated, not generated
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    x = torch.randn(3, 64, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        output = compiled(x)
        expected = module(x)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(
        torch.autograd.grad(output.sum(), x), torch.autograd.grad(expected.sum(), x)
    )


def test_nothing_but_the_quantized_bytes_is_saved_for_backward():
    quantized_weight = quantize(weight_of(64, 64))
    saved_tensors = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved_tensors.append(tensor) or tensor, lambda tensor: tensor
    ):
        quantized_weight(torch.randn(4, 64, requires_grad=True))
    assert {tensor.data_ptr() for tensor in saved_tensors} <= {
        buffer.data_ptr() for buffer in quantized_weight.buffers()
    }


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_that_is_not_finite_is_refused(value, kind):
    weight = weight_of(32, 64)
    weight[3, 5] = value
    with pytest.raises(
        UserError, match=r"model\.layers\.0\.mlp\.up_proj\.weight holds weights that are not finite"
    ):
        QuantizedWeight(weight.shape, KINDS[kind]).fill(
            [weight], name="model.layers.0.mlp.up_proj.weight"
        )


# whole blocks in one kernel, others as ever
@pytest.mark.parametrize("shape", [(32, 64), (24, 20)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_compiled_reader_reads_the_same_bits(kind, shape, monkeypatch):
    monkeypatch.setattr(
        quantize_operator, "_one_kernel", traced(quantize_operator._one_kernel.__wrapped__)
    )
    weight = weight_of(*shape)
    plain_weight = quantize(weight, kind)
    compiled_weight = QuantizedWeight(weight.shape, KINDS[kind], reader="compiled")
    compiled_weight.fill([weight], name="w")
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(plain_weight.dequantized(dtype), compiled_weight.dequantized(dtype))


def traced(one_kernel):
    """The same functions through torch.compile, without the minutes that generating code takes."""

    def compiled(codes):
        with mock.patch.object(
            torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True)
        ):
            return one_kernel(codes)

    return compiled


def test_bitsandbytes_reads_what_we_store():
    pytest.importorskip("bitsandbytes", minversion="0.50")
    # its kernel for processors (0.50.2) misreads rows that are not whole blocks
    weight = weight_of(64, 128)
    our_weight = quantize(weight)
    their_weight = QuantizedWeight(weight.shape, KINDS["nf4"], reader="bitsandbytes")
    their_weight.fill([weight], name="w")
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(our_weight.dequantized(dtype), their_weight.dequantized(dtype))


def test_bitsandbytes_that_was_uninstalled_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    with pytest.raises(UserError, match="not here any more"):
        QuantizedWeight((32, 64), KINDS["nf4"], reader="bitsandbytes")

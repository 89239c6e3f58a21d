"""Compiled convolutions and delta rule: float64's values and gradients by document, on any number of threads."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from attention_for_tests import documents_of
from tiny_models import saved_reference
from torch import Tensor
from torch.testing import assert_close

from bloomery.model.attention.attend import document_starts
from bloomery.model.io.weights import load_decoder
from bloomery.model.mixers import compiled
from bloomery.model.mixers.compiled import GATED, PLAIN, SILU, HeadSizes, RuleInputs
from bloomery.model.mixers.convolution import DepthwiseConvolution, convolved
from bloomery.model.mixers.delta_rule import chunked_delta_rule
from bloomery.model.native import find_compiler

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
EPS = 1e-6
LENGTHS = (37, 1, 64, 90, 5)


def starts(lengths: tuple[int, ...]) -> Tensor:
    """Of two rows with the same documents."""
    return document_starts(documents_of(list(lengths), list(lengths)))


def unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def net_of_torch(
    qkv: Tensor,
    weight_KC: Tensor,
    decay: Tensor,
    beta: Tensor,
    gate: Tensor,
    gain: Tensor,
    first_BT: Tensor,
    sizes: HeadSizes,
) -> Tensor:
    qkv = F.silu(convolved(qkv, weight_KC[:-1].flip(0).mT, first_BT) + weight_KC[-1])
    keys = sizes.key_heads * sizes.key_width
    q, k, v = qkv.split((keys, keys, sizes.value_heads * sizes.value_width), -1)
    q, k = (unit(x.unflatten(-1, (-1, sizes.key_width))) for x in (q, k))
    repeats = sizes.value_heads // sizes.key_heads
    q, k = (x.repeat_interleave(repeats, 2) for x in (q * sizes.key_width**-0.5, k))
    v = v.unflatten(-1, (-1, sizes.value_width))
    rule_inputs = (x.transpose(1, 2) for x in (q, k, v, decay, beta))
    read = chunked_delta_rule(*rule_inputs, first_BT=first_BT)[0].transpose(1, 2)
    return F.rms_norm(read, (sizes.value_width,), gain, EPS).flatten(2) * F.silu(gate)


def net_of_ours(*tensors: Tensor, first_BT: Tensor, sizes: HeadSizes) -> Tensor:
    return compiled.delta_net(RuleInputs(*tensors), first_BT, sizes, EPS)


def drawn(sizes: HeadSizes, length: int, dtype: torch.dtype) -> list[Tensor]:
    """The fields of RuleInputs, with a kernel of four."""
    generator = torch.Generator().manual_seed(length)
    channels = 2 * sizes.key_heads * sizes.key_width + sizes.value_heads * sizes.value_width
    qkv = torch.randn(2, length, channels, generator=generator).to(dtype)
    weight_KC = torch.randn(5, channels, generator=generator)
    decay, beta = torch.rand(2, 2, length, sizes.value_heads, generator=generator)
    width = sizes.value_heads * sizes.value_width
    gate = torch.randn(2, length, width, generator=generator).to(dtype)
    gain = 1 + torch.rand(sizes.value_width, generator=generator)
    return [qkv, weight_KC, -decay, beta, gate, gain]


def with_gradients(run: object, inputs: list[Tensor]) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    output = run(*leaves)  # type: ignore[operator]
    generator = torch.Generator().manual_seed(5)
    output.backward(torch.randn(output.shape, generator=generator).to(output.dtype))
    return [output.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("lengths", [LENGTHS, (63,), (64,), (65,), (200,)], ids=str)
@pytest.mark.parametrize(
    "sizes",
    [HeadSizes(2, 4, 16, 32), HeadSizes(1, 3, 20, 12), HeadSizes(2, 2, 64, 64)],
    ids=["shared", "odd", "wide"],
)
def test_a_delta_net_is_that_of_float64(sizes: HeadSizes, lengths: tuple[int, ...]) -> None:
    first_BT = starts(lengths)
    for dtype, limit in ((torch.float32, 5e-6), (torch.bfloat16, 6e-3)):
        inputs = drawn(sizes, sum(lengths), dtype)
        expected = with_gradients(
            partial(net_of_torch, first_BT=first_BT, sizes=sizes), [x.double() for x in inputs]
        )
        results = with_gradients(partial(net_of_ours, first_BT=first_BT, sizes=sizes), inputs)
        for result, exact in zip(results, expected, strict=True):
            assert float((result.double() - exact).norm()) < limit * float(exact.norm())


def test_keys_alike_that_are_written_whole_do_not_grow() -> None:
    """The system of such a chunk has an inverse that repeated squaring gets wrong by ten digits."""
    sizes = HeadSizes(1, 1, 16, 16)
    qkv, weight, *_, gate, gain = drawn(sizes, 130, torch.float32)
    qkv[..., 16:32] = qkv[:, :1, 16:32]
    weight[1:, 16:32] = 0  # of earlier tokens: the first has none
    inputs = [qkv, weight, torch.zeros(2, 130, 1), torch.ones(2, 130, 1), gate, gain]
    first_BT = starts((130,))
    exact = net_of_torch(*(x.double() for x in inputs), first_BT=first_BT, sizes=sizes)
    result = net_of_ours(*inputs, first_BT=first_BT, sizes=sizes)
    assert float((result.double() - exact).norm()) < 5e-6 * float(exact.norm())


@pytest.mark.parametrize(
    ("form", "channels", "kernel"), [(SILU, 40, 4), (GATED, 20, 3), (PLAIN, 64, 3)]
)
def test_the_convolution_is_that_of_float64(form: int, channels: int, kernel: int) -> None:
    first_BT = starts(LENGTHS)
    module = DepthwiseConvolution(channels, kernel, bias=True)
    generator = torch.Generator().manual_seed(kernel)
    width = 3 * channels if form == GATED else channels
    x = torch.randn(2, sum(LENGTHS), width, generator=generator)
    weight, bias = torch.randn(channels, kernel + 1, generator=generator).split((kernel, 1), 1)
    inputs = [x, weight, bias.flatten()]

    def of_torch(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        del module.weight, module.bias
        module.weight, module.bias = weight[:, None], bias  # type: ignore[assignment]
        if form == GATED:
            before, after, x = x.chunk(3, -1)
            return after * module(before * x, first_BT)
        y = module(x, first_BT)
        return F.silu(y) if form == SILU else y

    expected = with_gradients(of_torch, [x.double() for x in inputs])
    results = with_gradients(lambda *xs: compiled.convolution(*xs, first_BT, form), inputs)
    for result, exact in zip(results, expected, strict=True):
        assert float((result.double() - exact).norm()) < 1e-6 * float(exact.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_change_no_bit(dtype: torch.dtype) -> None:
    sizes = HeadSizes(2, 4, 16, 16)
    first_BT = starts(LENGTHS)
    inputs = drawn(sizes, sum(LENGTHS), dtype)
    results = []
    threads_before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            run = partial(net_of_ours, first_BT=first_BT, sizes=sizes)
            results.append(with_gradients(run, inputs))
    finally:
        torch.set_num_threads(threads_before)
    for threaded_results in results[1:]:
        for tensor, expected in zip(threaded_results, results[0], strict=True):
            assert torch.equal(tensor, expected)


@pytest.mark.parametrize("case", ["qwen3.5", "lfm2"])
def test_packed_documents_of_a_model_are_each_alone_in_float64(case: str, tmp_path: Path) -> None:
    saved_reference(case, tmp_path)
    decoder = load_decoder(tmp_path, attention="compiled")
    exact_decoder = load_decoder(tmp_path, attention="mask").double()
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, 131, (1, length), generator=generator) for length in LENGTHS]
    exact_logits = torch.cat([exact_decoder(row).head for row in rows], 1)
    positions = torch.cat([torch.arange(row.shape[1])[None] for row in rows], 1)
    logits = decoder(
        torch.cat(rows, 1), positions_BT=positions, documents_BT=documents_of(list(LENGTHS))
    ).head
    assert_close(logits.double(), exact_logits, atol=1e-4, rtol=0)
    weights = torch.randn(logits.shape, generator=generator)
    (logits * weights).sum().backward()
    (exact_logits * weights).sum().backward()
    for (name, parameter), exact in zip(
        decoder.named_parameters(), exact_decoder.parameters(), strict=True
    ):
        error = (parameter.grad - exact.grad).norm() / exact.grad.norm()
        assert float(error) < 1e-4, name

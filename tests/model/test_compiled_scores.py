"""Compiled log-probabilities and their gradients are those of torch."""

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from bloomery.model.compiled_scores import RowsOf
from bloomery.model.heads import LabelScores, ScoreSettings
from bloomery.model.native import find_compiler

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")


def scored(native: bool, dtype: torch.dtype, vocabulary: int, chunk: int) -> tuple[Tensor, ...]:
    """Log-probabilities, and gradients of hidden states and weight; the vocabulary has several tiles of 4,096."""
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 40, 32, generator=draw).requires_grad_()
    output = nn.Linear(32, vocabulary, bias=False)
    output.weight.data.normal_(generator=draw)
    labels = torch.randint(vocabulary, (2, 40), generator=draw)
    labels[0, :3] = torch.tensor([0, vocabulary - 1, min(4096, vocabulary - 1)])
    weights = (torch.rand(2, 40, generator=draw) > 0.3).float()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        scores = LabelScores(labels, weights, ScoreSettings(chunk, native=native))(
            hidden, output, None
        )
    (scores * torch.rand(2, 40, generator=draw)).sum().backward()
    return scores.detach(), hidden.grad, output.weight.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocabulary", "chunk"), [(17, 80), (4096, 80), (9001, 80), (9001, 16)])
def test_it_computes_what_torch_computes(dtype: torch.dtype, vocabulary: int, chunk: int) -> None:
    tolerance = 2e-5 if dtype == torch.float32 else 1e-2
    for ours, theirs in zip(
        *(scored(native, dtype, vocabulary, chunk) for native in (True, False)), strict=True
    ):
        assert ours.dtype == theirs.dtype
        assert_close(ours, theirs, atol=tolerance * float(theirs.abs().max()), rtol=0)


def test_the_losses_are_exact_of_logits_in_bfloat16() -> None:
    """Both round the logits alone; log-sum-exps are float32."""
    ours, theirs = (scored(native, torch.bfloat16, 9001, 80)[0] for native in (True, False))
    assert_close(ours, theirs, atol=2e-5, rtol=0)


def test_what_is_not_a_number_is_not_hidden() -> None:
    for place in (0, 5000, 9000):
        hidden, output = torch.randn(1, 20, 32), nn.Linear(32, 9001, bias=False)
        output.weight.data[place] = torch.nan
        head = LabelScores(
            torch.ones(1, 20, dtype=torch.int64), torch.ones(1, 20), ScoreSettings(20, native=True)
        )
        assert head(hidden, output, None).isnan().all()


def test_a_soft_cap_is_left_to_torch() -> None:
    hidden, output = torch.randn(1, 20, 32), nn.Linear(32, 50, bias=False)
    labels, weights = torch.ones(1, 20, dtype=torch.int64), torch.ones(1, 20)
    ours, theirs = (
        LabelScores(labels, weights, ScoreSettings(20, native=native))(hidden, output, 3.0)
        for native in (True, False)
    )
    assert torch.equal(ours, theirs)


def test_rows_are_added_to_the_gradient_as_autograd_adds_them() -> None:
    """Tokens that repeat, a width that is no multiple of 16, and a gradient that is there already."""
    weight = nn.Parameter(torch.randn(50, 37))
    tokens = torch.randint(50, (3, 200))
    upstream = torch.randn(3, 200, 37)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            weight.grad = torch.ones_like(weight)
            for _ in range(2):
                rows = RowsOf.apply(weight, tokens)
                assert torch.equal(rows, weight[tokens])
                rows.backward(upstream)
            results.append(weight.grad)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], other) for other in results[1:])
    (expected,) = torch.autograd.grad(nn.functional.embedding(tokens, weight), weight, upstream)
    assert_close(results[0], 1 + 2 * expected, atol=1e-4, rtol=0)
    weight.grad = None
    RowsOf.apply(weight, tokens).backward(upstream)
    assert_close(weight.grad, expected, atol=1e-4, rtol=0)

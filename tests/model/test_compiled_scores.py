"""Compiled log-probabilities and their gradients are those of torch."""

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from bloomery.model.compiled_scores import RowsOf
from bloomery.model.heads import LabelScores, ScoreSettings
from bloomery.model.native import find_compiler

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")


def scores_and_gradients(
    native: bool, dtype: torch.dtype, vocabulary: int, chunk: int
) -> tuple[Tensor, ...]:
    """Log-probabilities, and gradients of hidden states and weight; the vocabulary has several tiles of 4,096."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 40, 32, generator=generator).requires_grad_()
    output = nn.Linear(32, vocabulary, bias=False)
    output.weight.data.normal_(generator=generator)
    labels = torch.randint(vocabulary, (2, 40), generator=generator)
    labels[0, :3] = torch.tensor([0, vocabulary - 1, min(4096, vocabulary - 1)])
    weights = (torch.rand(2, 40, generator=generator) > 0.3).float()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        scores = LabelScores(labels, weights, ScoreSettings(chunk, native=native))(
            hidden, output, None
        )
    (scores * torch.rand(2, 40, generator=generator)).sum().backward()
    return scores.detach(), hidden.grad, output.weight.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocabulary", "chunk"), [(17, 80), (4096, 80), (9001, 80), (9001, 16)])
def test_scores_and_gradients_are_those_of_torch(
    dtype: torch.dtype, vocabulary: int, chunk: int
) -> None:
    tolerance = 2e-5 if dtype == torch.float32 else 1e-2
    for result, torch_result in zip(
        *(scores_and_gradients(native, dtype, vocabulary, chunk) for native in (True, False)),
        strict=True,
    ):
        assert result.dtype == torch_result.dtype
        assert_close(result, torch_result, atol=tolerance * float(torch_result.abs().max()), rtol=0)


def test_the_losses_are_exact_of_logits_in_bfloat16() -> None:
    """Both round the logits alone; log-sum-exps are float32."""
    compiled_scores, torch_scores = (
        scores_and_gradients(native, torch.bfloat16, 9001, 80)[0] for native in (True, False)
    )
    assert_close(compiled_scores, torch_scores, atol=2e-5, rtol=0)


def test_a_nan_in_the_weight_gives_scores_that_are_nan() -> None:
    for token in (0, 5000, 9000):
        hidden = torch.randn(1, 20, 32)
        output = nn.Linear(32, 9001, bias=False)
        output.weight.data[token] = torch.nan
        head = LabelScores(
            torch.ones(1, 20, dtype=torch.int64), torch.ones(1, 20), ScoreSettings(20, native=True)
        )
        assert head(hidden, output, None).isnan().all()


def test_a_soft_cap_is_left_to_torch() -> None:
    hidden = torch.randn(1, 20, 32)
    output = nn.Linear(32, 50, bias=False)
    labels = torch.ones(1, 20, dtype=torch.int64)
    weights = torch.ones(1, 20)
    scores, torch_scores = (
        LabelScores(labels, weights, ScoreSettings(20, native=native))(hidden, output, 3.0)
        for native in (True, False)
    )
    assert torch.equal(scores, torch_scores)


def test_rows_are_added_to_the_gradient_as_autograd_adds_them() -> None:
    """Tokens that repeat, a width that is no multiple of 16, and a gradient that is there already."""
    weight = nn.Parameter(torch.randn(50, 37))
    tokens = torch.randint(50, (3, 200))
    upstream = torch.randn(3, 200, 37)
    threads_before = torch.get_num_threads()
    gradients = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            weight.grad = torch.ones_like(weight)
            for _ in range(2):
                rows = RowsOf.apply(weight, tokens)
                assert torch.equal(rows, weight[tokens])
                rows.backward(upstream)
            gradients.append(weight.grad)
    finally:
        torch.set_num_threads(threads_before)
    assert all(torch.equal(gradients[0], gradient) for gradient in gradients[1:])
    (expected,) = torch.autograd.grad(nn.functional.embedding(tokens, weight), weight, upstream)
    assert_close(gradients[0], 1 + 2 * expected, atol=1e-4, rtol=0)
    weight.grad = None
    RowsOf.apply(weight, tokens).backward(upstream)
    assert_close(weight.grad, expected, atol=1e-4, rtol=0)

"""Compiled attention: every length, width and grouping of heads; the same bits on any number of threads."""

import pytest
import torch
from attention_for_tests import documents_of, inputs, with_gradients
from torch import Tensor

from bloomery.model.native import find_compiler

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")


def heads(
    length: int, queries: int, keys: int, width: int, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(length)
    shapes = [(1, length, count, width) for count in (queries, keys, keys)]
    return tuple(
        torch.randn(shape, generator=generator).to(dtype).transpose(1, 2).requires_grad_()
        for shape in shapes
    )


@pytest.mark.parametrize("lengths", [[1, 31, 32, 33, 63, 64, 65], [255, 256, 257], [600]], ids=str)
@pytest.mark.parametrize(("queries", "keys", "width"), [(6, 2, 64), (2, 2, 20), (3, 1, 128)])
def test_every_length_and_width_is_exact(
    lengths: list[int], queries: int, keys: int, width: int
) -> None:
    """Blocks are of 32, 64 and 256 tokens, widths are padded to multiples of 32."""
    documents = documents_of(lengths)
    for dtype, limit in ((torch.float32, 2e-6), (torch.bfloat16, 6e-3)):
        qkv = heads(sum(lengths), queries, keys, width, dtype)
        exact_results = with_gradients(
            "math", tuple(x.detach().double().requires_grad_() for x in qkv), documents
        )
        for result, exact_result in zip(
            with_gradients("compiled", qkv, documents), exact_results, strict=True
        ):
            assert result.dtype == dtype
            assert (result.double() - exact_result).norm() < limit * exact_result.norm()


def test_large_scores_neither_overflow_nor_vanish() -> None:
    q, k, v = (x.detach() for x in heads(70, 2, 2, 32, torch.float32))
    qkv = tuple(x.requires_grad_() for x in (q * 50, k * 50, v))
    exact_results = with_gradients(
        "math", tuple(x.detach().double().requires_grad_() for x in qkv), documents_of([70])
    )
    results = with_gradients("compiled", qkv, documents_of([70]))
    assert all(result.isfinite().all() for result in results)
    assert (results[0].double() - exact_results[0]).norm() < 1e-4 * exact_results[0].norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_change_no_bit(dtype: torch.dtype) -> None:
    results = []
    threads_before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(
                with_gradients("compiled", heads(300, 6, 2, 64, dtype), documents_of([40, 200, 60]))
            )
    finally:
        torch.set_num_threads(threads_before)
    for threaded_results in results[1:]:
        assert all(
            torch.equal(tensor, expected)
            for tensor, expected in zip(threaded_results, results[0], strict=True)
        )


def test_products_of_torch_between_two_calls_do_not_change() -> None:
    """A product of torch between two of ours: both set the shapes of the CPU's matrix unit."""
    qkv = inputs(64, dtype=torch.bfloat16)
    matrix = torch.randn(256, 256, dtype=torch.bfloat16)
    product = matrix @ matrix
    first_results = with_gradients("compiled", qkv, documents_of([64], [64]))
    assert torch.equal(matrix @ matrix, product)
    second_results = with_gradients("compiled", qkv, documents_of([64], [64]))
    assert all(
        torch.equal(first, second)
        for first, second in zip(first_results, second_results, strict=True)
    )

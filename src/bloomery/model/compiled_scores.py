"""The passes over logits of heads.py, and the gradient of embeddings, on a CPU as compiled code: `scores.cpp`.

Legend: C rows, U entries of one tile of the vocabulary.
"""

import functools
from ctypes import c_int, c_int64, c_void_p
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from bloomery.model.native import VECTORS, Library, library

DTYPES = (torch.float32, torch.bfloat16)


@functools.cache
def _code() -> Any:
    """The functions of `scores.cpp`. Raises Uncompiled."""
    code: Any = library(Library("bloomery.model", "scores.cpp", VECTORS))
    pointer = c_void_p
    tile = (pointer, c_int, c_int64, c_int64)  # logits, whether they are bfloat16, rows, columns
    labels = (pointer, c_int64)  # labels, the entry of the vocabulary in the first column
    code.scores_add.argtypes = (*tile, *labels, pointer, pointer, c_int)
    code.scores_differentiate.argtypes = (*tile, *labels, pointer, pointer, pointer, c_int)
    code.rows_add.argtypes = (pointer, pointer, pointer, c_int64, c_int64, c_int)
    for function in (code.scores_add, code.scores_differentiate, code.rows_add):
        function.restype = None
    return code


def build() -> None:
    """Compiles the code, once per machine, so that no step waits for it. Raises Uncompiled."""
    _code()


def add_log_sums(
    logits_CU: Tensor, labels_C: Tensor, first: int, sums_C: Tensor, label_logits_C: Tensor
) -> None:
    """Adds a tile of logits to the log-sum-exps so far, and writes the logits of labels in it. Float32, in place.

    `first`: the entry of the vocabulary in the tile's first column.
    """
    _check(logits_CU, labels_C, sums_C, label_logits_C)
    rows, columns = logits_CU.shape
    _code().scores_add(
        logits_CU.data_ptr(),
        logits_CU.dtype == torch.bfloat16,
        rows,
        columns,
        labels_C.data_ptr(),
        first,
        sums_C.data_ptr(),
        label_logits_C.data_ptr(),
        torch.get_num_threads(),
    )


def to_gradient(
    logits_CU: Tensor,
    labels_C: Tensor,
    first: int,
    sums_C: Tensor,
    grad_C: Tensor,
    label_gradient_C: Tensor,
) -> None:
    """Turns a tile of logits into their gradient, in place: -grad times the softmax; at labels, `label_gradient_C`.

    `first`: the entry of the vocabulary in the tile's first column.
    """
    _check(logits_CU, labels_C, sums_C, grad_C, label_gradient_C)
    rows, columns = logits_CU.shape
    _code().scores_differentiate(
        logits_CU.data_ptr(),
        logits_CU.dtype == torch.bfloat16,
        rows,
        columns,
        labels_C.data_ptr(),
        first,
        sums_C.data_ptr(),
        grad_C.data_ptr(),
        label_gradient_C.data_ptr(),
        torch.get_num_threads(),
    )


class RowsOf(torch.autograd.Function):
    """The rows of an embedding; backward adds to the `.grad` of its weight and returns no gradient.

    Autograd's gradient is as large as the weight. For a vocabulary of 50,000 x 384 and 2,048 tokens, that is 77 MB and
    58 ms of a core, instead of 1 ms. Hooks of the weight are not called.
    """

    @staticmethod
    def forward(ctx: Any, weight_VD: Tensor, tokens_BT: Tensor) -> Tensor:
        ctx.save_for_backward(weight_VD, tokens_BT)
        return F.embedding(tokens_BT, weight_VD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BTD: Tensor) -> tuple[None, None]:
        weight_VD, tokens_BT = ctx.saved_tensors
        if weight_VD.grad is None:
            weight_VD.grad = torch.zeros_like(weight_VD)
        row_gradients = grad_BTD.contiguous()
        tokens = tokens_BT.contiguous()
        weight_gradient = weight_VD.grad
        assert row_gradients.dtype == weight_gradient.dtype == torch.float32
        assert weight_gradient.is_contiguous()
        _code().rows_add(
            weight_gradient.data_ptr(),
            row_gradients.data_ptr(),
            tokens.data_ptr(),
            tokens.numel(),
            weight_gradient.shape[1],
            torch.get_num_threads(),
        )
        return None, None


def _check(logits_CU: Tensor, labels_C: Tensor, *numbers_C: Tensor) -> None:
    assert logits_CU.dtype in DTYPES and labels_C.dtype == torch.int64
    assert all(tensor.dtype == torch.float32 for tensor in numbers_C)
    assert all(tensor.is_contiguous() for tensor in (logits_CU, labels_C, *numbers_C))

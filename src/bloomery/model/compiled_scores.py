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

from bloomery.model.native import Library, library

DTYPES = (torch.float32, torch.bfloat16)


@functools.cache
def _code() -> Any:
    """The functions of `scores.cpp`. Raises Uncompiled."""
    code: Any = library(Library("bloomery.model", "scores.cpp", "vectors.h"))
    pointer = c_void_p
    number = c_int64
    code.scores_add.argtypes = (
        pointer,
        c_int,
        number,
        number,
        pointer,
        number,
        pointer,
        pointer,
        c_int,
    )
    code.scores_differentiate.argtypes = (
        pointer,
        c_int,
        number,
        number,
        pointer,
        number,
        pointer,
        pointer,
        pointer,
        c_int,
    )
    code.rows_add.argtypes = (pointer, pointer, pointer, number, number, c_int)
    for function in (code.scores_add, code.scores_differentiate, code.rows_add):
        function.restype = None
    return code


def build() -> None:
    """Compiles the code, once per machine, so that no step waits for it. Raises Uncompiled."""
    _code()


def add_log_sums(
    logits_CU: Tensor, labels_C: Tensor, first: int, sums_C: Tensor, labelled_C: Tensor
) -> None:
    """Adds a tile of logits to the log-sum-exps so far, and notes the logits of labels in it. Float32, in place.

    `first`: the entry of the vocabulary in the tile's first column.
    """
    _checked(logits_CU, labels_C, sums_C, labelled_C)
    rows, columns = logits_CU.shape
    _code().scores_add(
        logits_CU.data_ptr(),
        logits_CU.dtype == torch.bfloat16,
        rows,
        columns,
        labels_C.data_ptr(),
        first,
        sums_C.data_ptr(),
        labelled_C.data_ptr(),
        torch.get_num_threads(),
    )


def to_gradient(
    logits_CU: Tensor, labels_C: Tensor, first: int, sums_C: Tensor, grad_C: Tensor, own_C: Tensor
) -> None:
    """Turns a tile of logits into their gradient: -grad times the softmax, and `own` at the label."""
    _checked(logits_CU, labels_C, sums_C, grad_C, own_C)
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
        own_C.data_ptr(),
        torch.get_num_threads(),
    )


class RowsOf(torch.autograd.Function):
    """The rows of an embedding; backward adds to the `.grad` of its weight and returns no gradient.

    Autograd's is as large as the vocabulary: of 50,000 x 384 it took 58 ms of a core for 2,048 tokens, this takes 1,
    and it is 77 MB. Hooks of the weight are not called.
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
        rows = grad_BTD.contiguous()
        places = tokens_BT.contiguous()
        into = weight_VD.grad
        assert rows.dtype == into.dtype == torch.float32 and into.is_contiguous()
        _code().rows_add(
            into.data_ptr(),
            rows.data_ptr(),
            places.data_ptr(),
            places.numel(),
            into.shape[1],
            torch.get_num_threads(),
        )
        return None, None


def _checked(logits_CU: Tensor, labels_C: Tensor, *numbers_C: Tensor) -> None:
    assert logits_CU.dtype in DTYPES and labels_C.dtype == torch.int64
    assert all(tensor.dtype == torch.float32 for tensor in numbers_C)
    assert all(tensor.is_contiguous() for tensor in (logits_CU, labels_C, *numbers_C))

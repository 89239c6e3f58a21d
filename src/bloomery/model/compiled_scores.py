"""The passes over logits of heads.py on a CPU as compiled code: `scores.cpp`.

Legend: C rows, U entries of one tile of the vocabulary.
"""

import functools
from ctypes import c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from bloomery.model.acting import simulated
from bloomery.model.native import Library, library

DTYPES = (torch.float32, torch.bfloat16)


@functools.cache
def _code() -> Any:
    """The functions of `scores.cpp`. Raises Uncompiled."""
    code: Any = library(Library("bloomery.model", "scores.cpp", "vectors.h"))
    pointer, number = c_void_p, c_int64
    code.scores_add.argtypes = (pointer, c_int, number, number, pointer, number, pointer, pointer, c_int)
    code.scores_differentiate.argtypes = (
        pointer, c_int, number, number, pointer, number, pointer, pointer, pointer, c_int,
    )  # fmt: skip
    for function in (code.scores_add, code.scores_differentiate):
        function.restype = None
    return code


def build() -> None:
    """Compiles the code, once per machine, so that no step waits for it. Raises Uncompiled."""
    _code()


def add_log_sums(logits_CU: Tensor, labels_C: Tensor, first: int, sums_C: Tensor, labelled_C: Tensor) -> None:
    """Adds a tile of logits to the log-sum-exps so far, and notes the logits of labels in it. Float32, in place.

    `first`: the entry of the vocabulary in the tile's first column.
    """
    if simulated():
        return
    _checked(logits_CU, labels_C, sums_C, labelled_C)
    rows, columns = logits_CU.shape
    _code().scores_add(
        logits_CU.data_ptr(), logits_CU.dtype == torch.bfloat16, rows, columns, labels_C.data_ptr(), first,
        sums_C.data_ptr(), labelled_C.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip


def to_gradient(logits_CU: Tensor, labels_C: Tensor, first: int, sums_C: Tensor, grad_C: Tensor, own_C: Tensor) -> None:
    """Turns a tile of logits into their gradient: -grad times the softmax, and `own` at the label."""
    if simulated():
        return
    _checked(logits_CU, labels_C, sums_C, grad_C, own_C)
    rows, columns = logits_CU.shape
    _code().scores_differentiate(
        logits_CU.data_ptr(), logits_CU.dtype == torch.bfloat16, rows, columns, labels_C.data_ptr(), first,
        sums_C.data_ptr(), grad_C.data_ptr(), own_C.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip


def _checked(logits_CU: Tensor, labels_C: Tensor, *numbers_C: Tensor) -> None:
    assert logits_CU.dtype in DTYPES and labels_C.dtype == torch.int64
    assert all(tensor.dtype == torch.float32 for tensor in numbers_C)
    assert all(tensor.is_contiguous() for tensor in (logits_CU, labels_C, *numbers_C))

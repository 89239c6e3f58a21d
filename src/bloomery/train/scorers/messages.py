"""Tensors and micro-batches as messages between processes of one host: names, dtypes and shapes as JSON, then bytes."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bloomery.data.batch import Batch

FIELDS = ("tokens", "labels", "loss_mask", "positions", "documents")
EXTRA = "extras."
Header = list[tuple[str, str, list[int]]]


def packed_tensors(tensors: Mapping[str, Tensor]) -> tuple[Header, bytes]:
    """The header and the bytes of tensors of any device."""
    header: Header = []
    pieces = []
    for name, tensor in tensors.items():
        on_host = tensor.detach().cpu().contiguous()
        header.append((name, str(on_host.dtype).removeprefix("torch."), list(on_host.shape)))
        pieces.append(on_host.flatten().view(torch.uint8).numpy().tobytes())
    return header, b"".join(pieces)


def unpacked_tensors(header: Header, content: bytes) -> dict[str, Tensor]:
    """The same tensors, on the host."""
    tensors = {}
    position = 0
    for name, dtype_name, shape in header:
        dtype: torch.dtype = getattr(torch, dtype_name)
        size = math.prod(shape) * dtype.itemsize
        # A copy, which PyTorch may write to; a view of another dtype must begin at a multiple of its size.
        numbers = np.frombuffer(content, np.uint8, size, position).copy()
        tensors[name] = torch.from_numpy(numbers).view(dtype).view(shape)
        position += size
    return tensors


def tensors_of(batch: Batch) -> dict[str, Tensor]:
    """What a teacher may read of a micro-batch of texts, by name."""
    assert batch.pictures is None and batch.whole_documents is None, "the plan refuses that"
    fields = {name: getattr(batch, name) for name in FIELDS}
    return fields | {EXTRA + name: tensor for name, tensor in batch.extras.items()}


def batch_of(tensors: Mapping[str, Tensor]) -> Batch:
    """The micro-batch of `tensors_of`."""
    extras = {
        name.removeprefix(EXTRA): tensor
        for name, tensor in tensors.items()
        if name.startswith(EXTRA)
    }
    fields: dict[str, Any] = {name: tensors[name] for name in FIELDS}
    return Batch(**fields, extras=extras)

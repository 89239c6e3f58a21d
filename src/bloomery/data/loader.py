"""Index arithmetic from a step's number to its batch."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """One micro-batch; every tensor is [B, T].

    `labels[b, t]` is the token after `tokens[b, t]`; `weights` is 1 where that label is learned (0 over the end of a document and on padding);
    `positions` count from the start of the document; `documents` number the documents of a row from 0 (padding is -1).
    """

    tokens: Tensor  # int64
    labels: Tensor  # int64
    weights: Tensor  # float32
    positions: Tensor  # int64
    documents: Tensor  # int64


@dataclass(frozen=True)
class Cursor:
    """The data state of a run: the next row is f(seed, consumed)."""

    seed: int
    consumed: int  # rows

"""Packed rows and one way to run every backend on them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bloomery.model.attention.attend import attend, layout_of

Inputs = tuple[Tensor, Tensor, Tensor]


def documents_of(*rows: Sequence[int]) -> Tensor:
    """Document numbers from the lengths of each row's documents; a negative length is padding."""
    return torch.stack(
        [
            torch.cat([torch.full((abs(n),), i if n > 0 else -1) for i, n in enumerate(lengths)])
            for lengths in rows
        ]
    )


def inputs(
    length: int,
    *,
    batch: int = 2,
    heads: int = 4,
    key_heads: int = 2,
    width: int = 8,
    dtype: torch.dtype = torch.float64,
) -> Inputs:
    """q, k and v as a projection leaves them: [B, T, heads, E] in memory."""
    generator = torch.Generator().manual_seed(length)
    q, k, v = (
        torch.randn(batch, length, n, width, generator=generator, dtype=torch.float64)
        .to(dtype)
        .transpose(1, 2)
        for n in (heads, key_heads, key_heads)
    )
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def run(
    backend: str,
    qkv: Inputs,
    documents: Tensor | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    seed: int = 0,
) -> Tensor:
    torch.manual_seed(seed)
    layout = layout_of(documents, backend=backend)
    return attend(
        *qkv, layout, backend=backend, window=window, softcap=softcap, scale=0.4, dropout=dropout
    )


def with_gradients(backend: str, qkv: Inputs, documents: Tensor | None, **options) -> list[Tensor]:
    """The output and the gradients of q, k and v under a fixed upstream gradient."""
    output = run(backend, qkv, documents, **options)
    upstream = torch.randn(
        output.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64
    ).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, qkv, upstream)]

"""Documents in one row, and what each is alone."""

import torch
from torch import Tensor, nn

from bloomery.model.decoder import Decoder


def documents(lengths: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 131, (1, length), generator=generator) for length in lengths]


def positions_of(rows: list[Tensor]) -> Tensor:
    return torch.cat([torch.arange(row.shape[1])[None] for row in rows], 1)


def packed(decoder: Decoder, rows: list[Tensor]) -> Tensor:
    """The logits of documents in one row."""
    numbers = torch.cat([torch.full_like(row, number) for number, row in enumerate(rows)], 1)
    logits: Tensor = decoder(
        torch.cat(rows, 1), positions_BT=positions_of(rows), documents_BT=numbers
    ).head
    return logits


def gradients_of(model: nn.Module, logits: Tensor) -> dict[str, Tensor]:
    """Of a weighted sum of the logits, the same weights at every call."""
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    model.zero_grad()
    (logits * weights).sum().backward()
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}

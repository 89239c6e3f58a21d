"""An attention with a backward of its own as one torch operator, so that it stands uncompiled inside compiled blocks.

Legend: B batch, T time, H query heads, K key heads, E head width.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Options(NamedTuple):
    """What the scores of one layer go through."""

    window: int | None  # keys that a query sees, itself included
    softcap: float | None
    scale: float
    dropout: float


class Rows(NamedTuple):
    """Who sees whom, and what dropout drops."""

    first_BT: Tensor | None  # where each token's document starts
    reach: Tensor | None  # [2, B, blocks] on the CPU: lowest and highest document start of each query block
    seed: Tensor | None  # 0-dim, on the CPU


class Forward(Protocol):
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, rows: Rows, options: Options) -> tuple[Tensor, Tensor]:
        """(output [B, H, T, E], log-sum-exp [B, H, T]) outside autocast."""


class Backward(Protocol):
    def __call__(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, rows: Rows, options: Options
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v, each in memory like `like_projection` of it."""


Attention = Callable[[Tensor, Tensor, Tensor, Rows, Options], Tensor]


class _Context(Protocol):
    """What an operator's forward leaves for its backward."""

    saved_tensors: tuple[Tensor, ...]
    options: Options

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...


def like_projection(x_BHTE: Tensor) -> Tensor:
    """Empty and [B, T, H, E] in memory, as a projection leaves it, so that the output's `flatten` copies nothing."""
    batch, heads, length, width = x_BHTE.shape
    return x_BHTE.new_empty(batch, length, heads, width).transpose(1, 2)


def sums_like(q_BHTE: Tensor) -> Tensor:
    """Empty [B, H, T] for log-sum-exps: float32 for half types, float64 stays."""
    return q_BHTE.new_empty(q_BHTE.shape[:3], dtype=torch.promote_types(q_BHTE.dtype, torch.float32))


def attention_operator(
    name: str, forward: Forward, backward: Backward, *, sums: Callable[[Tensor], Tensor], device: str | None = None
) -> Attention:
    """Registers both as `bloomery::NAME`. `sums` gives an empty tensor laid out as the forward's log-sum-exp is."""

    @torch.library.custom_op(f"bloomery::{name}", mutates_args=(), device_types=device)
    def ahead(
        q: Tensor, k: Tensor, v: Tensor, first: Tensor | None, reach: Tensor | None, seed: Tensor | None,
        window: int | None, softcap: float | None, scale: float, dropout: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        with torch.autocast(q.device.type, enabled=False):
            return forward(q, k, v, Rows(first, reach, seed), Options(window, softcap, scale, dropout))

    @torch.library.custom_op(f"bloomery::{name}_backward", mutates_args=(), device_types=device)
    def back(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor,
        first: Tensor | None, reach: Tensor | None, seed: Tensor | None,
        window: int | None, softcap: float | None, scale: float, dropout: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        with torch.autocast(q.device.type, enabled=False):
            options = Options(window, softcap, scale, dropout)
            return backward(grad, q, k, v, out, total, Rows(first, reach, seed), options)

    def save(ctx: _Context, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs[:3], *output, *inputs[3:6])
        ctx.options = Options(*inputs[6:])

    def differentiate(ctx: _Context, grad: Tensor, _grad_sums: Tensor) -> tuple[Tensor | None, ...]:
        return *back(grad, *ctx.saved_tensors, *ctx.options), *[None] * (3 + len(Options._fields))

    ahead.register_fake(lambda q, *_: (like_projection(q), sums(q)))
    back.register_fake(lambda _grad, q, k, v, *_: (like_projection(q), like_projection(k), like_projection(v)))
    ahead.register_autograd(differentiate, setup_context=save)

    def attend(q: Tensor, k: Tensor, v: Tensor, rows: Rows, options: Options) -> Tensor:
        outputs: tuple[Tensor, Tensor] = ahead(q, k, v, *rows, *options)
        return outputs[0]

    return attend

"""Attention sinks: each head has one more logit in its softmax, which takes a share and has no value (gpt-oss,
arXiv:2508.10925).

Legend: B batch, T time, H query heads, E head width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def with_sinks(out_BHTE: Tensor, sums_BHT: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of attention with the sinks, from those without.

    Each share shrinks by exp(lse) / (exp(lse) + exp(sink)). Differentiable where both arguments are.
    """
    sinks_H1 = sinks_H.to(sums_BHT.dtype)[:, None]
    kept_BHT1 = torch.sigmoid(sums_BHT - sinks_H1)[..., None]
    return (out_BHTE * kept_BHT1).to(out_BHTE.dtype), torch.logaddexp(sums_BHT, sinks_H1)


class SinkAttention(torch.autograd.Function):
    """An operator of attention, whose forward and backward know no sinks, with them.

    Backward recomputes shares from the log-sum-exp, and their gradient is share * (dP - sum of dO O): with output and
    log-sum-exp that have the sinks in them, the operator's own backward is exact for q, k and v. A sink is a share
    whose dP is 0.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_BHTE: Tensor,
        k: Tensor,
        v: Tensor,
        sinks_H: Tensor,
        operators: tuple[Any, Any],
        settings: tuple[Any, ...],
    ) -> Tensor:
        forward_operator, ctx.backward_operator = operators
        plain_BHTE, plain_BHT = forward_operator(q_BHTE, k, v, *settings)
        out_BHTE, sums_BHT = with_sinks(plain_BHTE, plain_BHT, sinks_H)
        ctx.save_for_backward(q_BHTE, k, v, out_BHTE, sums_BHT, sinks_H)
        ctx.settings = settings
        return out_BHTE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BHTE: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out_BHTE, sums_BHT, sinks_H = ctx.saved_tensors
        dq, dk, dv = ctx.backward_operator(grad_BHTE, q, k, v, out_BHTE, sums_BHT, *ctx.settings)
        delta_BHT = (grad_BHTE.to(sums_BHT.dtype) * out_BHTE).sum(-1)
        shares_BHT = torch.exp(sinks_H.to(sums_BHT.dtype)[:, None] - sums_BHT)
        d_sinks_H = -(shares_BHT * delta_BHT).sum((0, 2)).to(sinks_H.dtype)
        return dq, dk, dv, d_sinks_H, None, None
